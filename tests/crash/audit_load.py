"""The chats and users that audit_worker.py changes and test_audit_kill.py checks."""

from typing import Final

CHATS: Final = ("chat/one", "chat/two")
USERS: Final = tuple(f"user:{number}" for number in range(6))
