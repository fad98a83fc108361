"""Client of the Events API: submissions survive a crash, and every event arrives once, in one order."""
