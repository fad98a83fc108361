"""The web chat at `/chat`: files for browsers, and what serves them. In development mode only."""
