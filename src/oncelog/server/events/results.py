"""Results of the events of one request: verdicts of the log, and rejections of the API."""

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Final

from msgspec import Struct

from oncelog.core.values import Committed, Mode, Reason, Refused, Replayed, Submission, Verdict
from oncelog.error_codes import AUTH_FAILED, RATE_LIMITED, SERVER_ERROR, VALIDATION_FAILED, VERSION_UNSUPPORTED
from oncelog.server.errors import RETRYABLE_CODES, ApiError, retryable_error

PRIOR_ITEM_FAILED: Final = "prior_item_failed"
CLOSING_CODES: Final = frozenset({AUTH_FAILED, VERSION_UNSUPPORTED, RATE_LIMITED, SERVER_ERROR})
"""Error codes that end the connection (EV-2)."""


class RejectedItem(Struct, frozen=True, gc=False):
    """An item that the API refuses before it submits anything to the log."""

    reason: str
    field: str
    message: str


ItemResult = Verdict | RejectedItem


class Submit(Struct, frozen=True, gc=False):
    """Events of a request: their ids as sent, and a submission or rejection for each."""

    ids: list[str]
    items: list[Submission | RejectedItem]
    mode: Mode = Mode.EACH


_UNTIL_REFUSED: Final = Mode.UNTIL_REFUSED  # access to an enum member is slow in Python 3.11


def get_reason(result: ItemResult) -> str:
    """Return why an item was rejected, as a code of the Events API."""
    if isinstance(result, RejectedItem):
        return result.reason
    is_skipped = isinstance(result, Refused) and result.reason is Reason.NOT_PROCESSED
    return PRIOR_ITEM_FAILED if is_skipped else VALIDATION_FAILED


def find_request_error(results: Iterable[ItemResult]) -> ApiError | None:
    """Return an error instead of results if the log did not decide an item. The client sends the request again.

    Clients treat `rejected` as final, so a result would lose an event that the log can accept later.
    """
    for result in results:
        if type(result) is Refused and result.reason in RETRYABLE_CODES:
            return retryable_error(result)
    return None


def select_submissions(submit: Submit) -> list[Submission]:
    """Return the submissions without rejected items. In `UNTIL_REFUSED`, the first rejected item ends the list."""
    items = submit.items
    if submit.mode is _UNTIL_REFUSED:
        items = list(takewhile(lambda item: type(item) is Submission, items))
    return [item for item in items if type(item) is Submission]


def merge_results(submit: Submit, verdicts: Sequence[Verdict]) -> Sequence[ItemResult]:
    """Return one result for each item: the verdict of the log, or the rejection of the API."""
    items = submit.items
    if len(verdicts) == len(items):
        return verdicts
    if submit.mode is not _UNTIL_REFUSED:
        following = iter(verdicts)
        return [next(following) if isinstance(item, Submission) else item for item in items]
    # Items behind the first refused one are skipped. If the log refused none, the first rejected item ended the list.
    refused = next((index for index, verdict in enumerate(verdicts) if isinstance(verdict, Refused)), None)
    results: list[ItemResult] = list(verdicts)
    if refused is None:
        refused = len(verdicts)
        results.append(items[refused])  # type: ignore[arg-type]  # `select_submissions` ends at a rejected item
    skipped = Refused(Reason.NOT_PROCESSED, f"item {refused} was refused", index=refused)
    return [*results, *[skipped] * (len(items) - len(results))]


def find_highest_position(results: Sequence[ItemResult]) -> int:
    """Return the highest position of the results; 0 if none has one."""
    positions = [
        result.receipt.position for result in results if isinstance(result, Committed | Replayed) and result.receipt
    ]
    return max(positions, default=0)
