"""The Chat API: WebSocket sessions and HTTP. See docs/reference/chat.md."""
