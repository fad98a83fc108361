"""The chat door."""
