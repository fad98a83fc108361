"""Client of the Events API: submissions survive a crash, and `apply` handles each event once, in commit order."""
