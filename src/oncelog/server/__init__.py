"""The server: its APIs decode requests to submissions and encode verdicts as answers."""
