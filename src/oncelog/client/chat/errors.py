"""Errors of the client of chats alone; the others are in `oncelog.errors`.

ClientError
└── UpdatesLostError      a reader of `updates` fell behind: look at what there is, and subscribe again
"""

from oncelog.errors import ClientError


class UpdatesLostError(ClientError):
    """More updates came than may wait for this reader, and it gets no more. Subscribe again, then look anew."""

    def __init__(self, limit_name: str, limit: int) -> None:
        super().__init__(f"updates were lost: {limit_name} is {limit}, and more came than that before they were read")
