from server.web_chat.chromium import chromium

__all__ = ["chromium"]
