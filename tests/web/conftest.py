from web.chromium import chromium

__all__ = ["chromium"]
