"""The web chat at `/chat`: its static files and endpoints, which the server offers only in development mode."""
