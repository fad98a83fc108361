"""The Chat API."""
