"""Client sequences: a client numbers its writes 1, 2, 3… in each scope, without gaps or repetitions."""

from oncelog.core.batch_state import BatchState, LaneDraft
from oncelog.core.values import ClientEntry, Reason, Refused, Remembered, Replayed, Submission, client_identity


def check_client_sequence(submission: Submission, lane: LaneDraft, state: BatchState) -> Replayed | Refused | None:
    """Return None for the client's next write, or the answer to a number that is old or too high.

    The submission's key is unknown: a known key has already been answered, regardless of its number.
    """
    entry = state.clients.get(client_identity(submission))
    is_known = entry is not None and lane.remembers(submission.policy.retention, entry.last_seen_ms)
    last = entry.sequence if entry is not None and is_known else 0
    sequence = submission.client_sequence
    if sequence == last + 1:
        return None
    if sequence > last:
        return Refused(
            Reason.SEQUENCE_GAP,
            f"sequence {sequence} leaves a gap: the last committed sequence is {last}, so the next must be {last + 1}",
            field="client_sequence",
            current=last,
        )
    return _answer_old_sequence(submission, last, state)


def _answer_old_sequence(submission: Submission, last: int, state: BatchState) -> Replayed | Refused:
    """Return the answer to an old number, which is never committed again. Different content is an error."""
    identity = (*client_identity(submission), submission.client_sequence)
    # Compare with the record, because the client's entry may have been evicted. Of several records, use the newest:
    # the sequence of an evicted client restarts at 1.
    remembered = state.sequences.get(identity)
    if remembered is None:
        return Replayed(None)  # It was committed, because a later number was, but its record is gone.
    if remembered.fingerprint == submission.fingerprint:
        return Replayed(remembered.receipt, erased=remembered.erased)
    return Refused(
        Reason.SEQUENCE_REUSED,
        f"sequence {submission.client_sequence} was used for a different write; the next is {last + 1}",
        field="client_sequence",
        current=last,
    )


def advance_client(submission: Submission, remembered: Remembered, state: BatchState) -> None:
    """Record a committed write of the client."""
    identity = client_identity(submission)
    state.sequences.put((*identity, submission.client_sequence), remembered)
    entry = ClientEntry(
        sequence=submission.client_sequence,
        last_seen_ms=remembered.receipt.log_time_ms,
        last_key=submission.key,
        last_fingerprint=submission.fingerprint,
    )
    state.clients.put(identity, entry)
