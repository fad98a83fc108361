"""Client of the Events API: submissions that survive a crash, and every event once, in one order."""
