"""Errors of the ledger's client alone; the others are in `oncelog.errors`.

ClientError
├── ForgottenError      the server knows less of this client than it did: nothing is sent again until `resume`
└── UnverifiedError     a proof or a chain of blocks that does not verify
"""

from oncelog.client.ledger.values import PendingWrite
from oncelog.errors import ClientError


class ForgottenError(ClientError):
    """The server has forgotten this client, or was restored from a backup. Nothing is sent until `resume`.

    `pending` may have been committed or not: the server cannot tell any more, and would take each as a new one.
    """

    def __init__(self, last_sequence: int, server_sequence: int, pending: tuple[PendingWrite, ...]) -> None:
        if last_sequence == 0:
            why = "may have forgotten this client: its first write has no answer, and was made too long ago"
        elif server_sequence == 0:
            why = f"has forgotten this client, whose last sequence was {last_sequence}"
        else:
            why = f"knows less of this client than it did: its last sequence is {server_sequence}, was {last_sequence}"
        super().__init__(
            f"the server {why}. {len(pending)} writes are pending of which it cannot say whether they were committed; "
            "nothing is sent until resume(resend=…) says what becomes of them"
        )
        self.last_sequence = last_sequence
        self.server_sequence = server_sequence
        self.pending = pending


class UnverifiedError(ClientError):
    """What the server says does not verify. Of a write it says that it has been committed, as `tx_id`."""

    def __init__(self, message: str, tx_id: str | None = None) -> None:
        super().__init__(message)
        self.tx_id = tx_id
