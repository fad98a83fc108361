"""The web chat at `/chat`: the files for browsers and their endpoints, in development mode only."""
