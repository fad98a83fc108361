"""Generate the blocking classes from the async ones; see __main__.py."""
