"""The Chat API, over WebSocket and HTTP. See docs/reference/chat.md."""
