"""Refused tokens: the message that the client gets and the reason that the server logs."""

import pytest

from oncelog.errors import AUTHENTICATION_FAILED, AuthError
from oncelog.server.auth.tokens import Tokens
from server.auth import auth_material


def refusal(tokens: Tokens, text: str) -> str:
    """Return the logged reason. The client always gets the same message, which contains no part of the token."""
    with pytest.raises(AuthError) as caught:
        tokens.authenticate(text)
    assert str(caught.value) == AUTHENTICATION_FAILED
    shown = auth_material.all_texts(caught.value)
    for part in text.split("."):
        assert len(part) < 12 or part not in shown
    return caught.value.reason
