"""The Chat API: WebSocket sessions and HTTP. See docs/chat.md."""
