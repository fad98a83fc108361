"""Refusals of tokens, as the client and the server's log see them."""

import pytest

from doors import material
from oncelog.doors.tokens import Tokens
from oncelog.errors import AuthError


def refusal(tokens: Tokens, text: str) -> str:
    """Return the logged reason. The client sees the same message for every reason, without parts of the token."""
    with pytest.raises(AuthError) as caught:
        tokens.principal_of(text)
    assert str(caught.value) == "authentication failed"
    shown = material.all_texts(caught.value)
    for part in text.split("."):
        assert len(part) < 12 or part not in shown
    return caught.value.reason
