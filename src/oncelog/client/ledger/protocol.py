"""The write protocol of one scope, without I/O and without a clock.

It decides which write is sent next and under which sequence, and what effect each answer has. The `write_stream` drives
it, saves its changes and makes its calls. The rules:

- Writes without an outcome form a queue in order of submission. Their sequences are contiguous and begin at `last` + 1,
  where `last` is the highest sequence known to be committed. A write whose sequence the server has already used keeps
  that sequence until its outcome is known, because the server never executes a used sequence as a new write.
- A write is sent under a saved sequence, with one call at a time. The writes behind it are sent before its answer
  arrives. They may overtake it, in which case SEQUENCE_GAP only means that they must be sent again.
- When a write is refused, the writes behind it move down by one sequence and keep their keys. The key identifies a
  committed write, however often its sequence has changed.
"""

from collections.abc import Collection, Sequence
from itertools import islice
from typing import Final

from oncelog.client.ledger.entries import (
    ForgottenClient,
    ProofFailure,
    QueuedWrite,
    SavedEntry,
    ScopeState,
    SequenceGap,
    SequenceTaken,
    SettledWrite,
    StoreChanges,
    WriteAnswer,
    WriteCall,
)
from oncelog.client.ledger.values import CONDITION_CODES, ClientState, Outcome, Refused, Written
from oncelog.errors import LostError, ServerRefusedError

CLOCK_CORRECTION_MS: Final = 60_000
"""Tolerance for clock corrections."""
RETENTION_MS: Final = 23 * 3600 * 1000
"""The server cannot have evicted a write that is younger than this: 24 hours, less one hour for clock skew."""

STATE_VALID_MS: Final = 60_000
"""Maximum age of a client state that counts as current. Before an old write is sent, the state must be current."""
WINDOW_MIN: Final = 4
"""Lowest number to which refusals reduce the writes that may be in flight."""


class LedgerProtocol:
    """The pending writes of one client in one scope."""

    def __init__(self, state: ScopeState, entries: Sequence[QueuedWrite], *, in_flight_max: int) -> None:
        """Continue with the stored state and pending writes, in order. Each of them may have been sent."""
        self.last = state.last
        self.forgotten: ForgottenClient | None = None
        self.refusal: ServerRefusedError | None = None
        """Why the server refuses to return the client state."""
        self.is_paused = False
        """Whether to send nothing until `release`, which the write stream calls after a pause."""
        self.is_refused = False
        """Whether the protocol is paused because the server denies access."""
        self.was_adopted = False
        """Whether the server evicted the client while no pending write had been sent, so none can be executed twice."""
        self._queue: dict[int, QueuedWrite] = {}
        self._in_flight = 0
        self._in_flight_max = self._window = in_flight_max
        self._probes = 0
        self._freed = state.freed
        """See `ScopeState.freed`. Until a write with this or a higher sequence commits, the protocol sends one write at
        a time."""
        self._highest = state.highest
        self._turn = 0
        self._wants_state = True
        self._is_first_question = True
        self._is_adopting = False
        self._requested_from: int | None = None
        self._state_at_ms = 0
        self._unsaved: dict[int, QueuedWrite] = {}
        """Writes that the next save includes."""
        self._settled: list[SettledWrite] = []
        self._unsaved_removals = 0
        """How many removals of uncommitted writes are not saved yet. Nothing is sent until they are saved: after a
        crash these writes are pending again, and no later write may have been committed before them."""
        self._reports: list[SettledWrite] = []
        self._saved_last = state.last
        for entry in entries:
            entry.saved_sequence = entry.sent_sequence = entry.sequence
            entry.highest_sequence = max(state.highest, entry.sequence)
            entry.mark_unknown(entry.sequence)
            self._queue[entry.number] = entry

    @property
    def entries(self) -> Collection[QueuedWrite]:
        """The writes without an outcome, in order."""
        return self._queue.values()

    @property
    def needs_state(self) -> bool:
        """Whether the client state must be requested, or was requested and has not arrived yet."""
        return self._wants_state or self._requested_from is not None

    # --- submitting

    def submit(self, entry: QueuedWrite) -> None:
        """Append a write to the queue. It is sent once it is saved."""
        entry.sequence = self.next_sequence
        self._queue[entry.number] = entry
        self._unsaved[entry.number] = entry

    @property
    def next_sequence(self) -> int:
        """Sequence that the next submitted write gets."""
        newest = next(reversed(self._queue.values()), None)
        return max(self.last, newest.sequence if newest is not None else 0) + 1

    def request_state(self) -> None:
        """Request the client state before the next write, after a long idle time. Ignored unless the queue is empty."""
        if not self._queue and self._requested_from is None:
            self._wants_state = True

    # --- saving

    def take_changes(self) -> StoreChanges | None:
        """Return the content of the next save, or None if everything is saved.

        Call `confirm_saved` or `revert_unsaved` afterwards.
        """
        # A write that moved down is saved only shortly before it is sent. Otherwise each refusal would save the whole
        # queue again.
        for entry in islice(self._queue.values(), 2 * self._in_flight_max):
            if entry.saved_sequence != entry.sequence:
                self._unsaved[entry.number] = entry
        if not self._unsaved and not self._settled and self.last == self._saved_last:
            return None
        entries = [
            SavedEntry(entry, entry.sequence, entry.lowest_possible(entry.sequence)) for entry in self._unsaved.values()
        ]
        self._highest = max(self._highest, *(entry.sequence for entry in entries), 0)
        changes = StoreChanges(entries, self._settled, ScopeState(self.last, self._freed, self._highest))
        self._unsaved, self._settled = {}, []
        return changes

    def confirm_saved(self, changes: StoreChanges) -> None:
        """Record that changes have been saved."""
        for entry, sequence, _ in changes.entries:
            entry.saved_sequence = sequence
        self._saved_last = changes.state.last
        self._unsaved_removals -= sum(not isinstance(settled.outcome, Written) for settled in changes.settled)

    def revert_unsaved(self, changes: StoreChanges) -> None:
        """After a failed save, keep the changes for the next save, but remove new writes from the queue."""
        for entry, _, _ in changes.entries:
            if entry.saved_sequence == 0:
                self._queue.pop(entry.number, None)
                self._unsaved.pop(entry.number, None)
            elif entry.number in self._queue:
                self._unsaved[entry.number] = entry
        # Settled writes remain settled: only committed ones were reported before the save.
        self._settled = changes.settled + self._settled
        self._renumber()

    def take_reports(self) -> list[SettledWrite]:
        """Return the outcomes that can be reported to callers before they are saved.

        An outcome is either a committed write, which the client would send again after a crash, or the error of a
        pending write that the server refuses to process.
        """
        reports, self._reports = self._reports, []
        return reports

    # --- sending

    def next_calls(self, now_ms: int) -> list[WriteCall]:
        """Return the calls to make now, in order. Pass each answer to `handle_answer`."""
        if self.is_paused or self.needs_state or self.forgotten is not None or self._unsaved_removals:
            return []
        calls: list[WriteCall] = []
        for entry in self._queue.values():
            if self._in_flight >= self._window:
                break
            if self._freed and calls:
                break
            if entry.call is not None or (self._probes and not entry.is_probe):
                if self._freed and not self._probes:
                    break
                continue
            if entry.saved_sequence != entry.sequence or entry.gapped_turn == self._turn:
                break  # later writes would only leave a gap
            # The clock may have been set back, hence `abs`.
            if self._is_old(entry, now_ms) and abs(now_ms - self._state_at_ms) > STATE_VALID_MS:
                # The server may have evicted the client, and would then accept the write as a new one.
                self._wants_state = True
                break
            call = WriteCall(entry, entry.sequence, self.last)
            entry.call = call
            entry.sent_sequence = entry.sequence
            entry.highest_sequence = max(entry.highest_sequence, entry.sequence)
            entry.denied = None
            self._in_flight += 1
            calls.append(call)
        return calls

    def release(self) -> None:
        """End the pause."""
        self.is_paused = self.is_refused = False

    def handle_answer(self, call: WriteCall, answer: WriteAnswer) -> None:  # noqa: C901 - one case for each answer
        """Process the answer to a call."""
        entry = call.entry
        entry.call = None
        self._in_flight -= 1
        if entry.number not in self._queue:
            return  # the application withdrew it
        match answer:
            case Written(tx_id=None) if entry.is_certain:
                # No earlier call can have committed this write, so a different one has this sequence. The server no
                # longer knows which one.
                self._handle_taken(call, call.sequence)
                self._wants_state = True
            case Written(sequence=sequence):
                self._settle(entry, answer)
                self._mark_used(sequence)
                self._window = min(self._window + 1, self._in_flight_max)
                if not sequence == call.sequence == entry.sequence:
                    self._give_up_sequence(sequence)
                    self._renumber()
            case ProofFailure(error, sequence):
                self._settle(entry, error)
                self._mark_used(sequence)
                self._renumber()
            case Refused(code):
                if code in CONDITION_CODES:  # the server checks conditions only for the next write in sequence
                    self._advance(call.sequence - 1)
                # Every write behind it must be sent again. If refusals are frequent, send fewer writes ahead.
                self._window = max(self._window // 2, min(WINDOW_MIN, self._in_flight_max))
                self._handle_refusal(entry, answer)
            case SequenceGap(last):
                self._handle_gap(call, last)
            case SequenceTaken(last):
                self._handle_taken(call, last)
            case LostError() | ServerRefusedError(is_transient=True):
                entry.mark_unknown(call.sequence)
                self.is_paused = True
            case ServerRefusedError():
                self._handle_denial(entry, answer)

    def _give_up_sequence(self, sequence: int) -> None:
        """Allow `_renumber` to move the write with this sequence, because a different write was committed under it.

        This happens when a delayed copy of a write that has moved down commits under its earlier sequence.
        """
        for entry in self._queue.values():
            if entry.sequence == entry.sent_sequence == sequence:
                entry.sent_sequence = 0
                self._end_probe(entry)

    def _handle_refusal(self, entry: QueuedWrite, outcome: Refused | ServerRefusedError) -> None:
        # A delayed copy of this write may still commit under the freed sequence. Only the answer to the next write
        # reveals that, so until then the protocol sends one write at a time.
        self._freed = max(self._freed, entry.highest_sequence)
        self._settle(entry, outcome)
        self._renumber()

    def _handle_taken(self, call: WriteCall, last: int) -> None:
        entry = call.entry
        self._mark_used(max(last, call.sequence))
        if entry.sequence == call.sequence:
            entry.sent_sequence = 0
        self._end_probe(entry)
        self._renumber()

    def _handle_gap(self, call: WriteCall, last: int) -> None:
        if last < call.last:
            # The server knew a higher sequence when the write was sent. The client state shows whether the server has
            # evicted the client.
            self._wants_state = self.is_paused = True
            return
        if last > self.last:
            self._advance(last)
            self._renumber()
        if self.last < call.entry.sequence - 1:
            call.entry.gapped_turn = self._turn  # resent when more is known about the writes before it

    def _handle_denial(self, entry: QueuedWrite, error: ServerRefusedError) -> None:
        if entry.is_certain:
            self._handle_refusal(entry, error)
            return
        # An earlier call may have committed the write, and this refusal only concerns the caller or the server's
        # limits. The client state shows whether the write was committed.
        entry.denied = error
        self._wants_state = True

    # --- client state

    def take_state_request(self) -> bool:
        """Return whether to request the client state now, and record the request.

        Pass the answer to `on_state_received` or `on_state_failed`.
        """
        if not self._wants_state or self._requested_from is not None or self.is_paused or self.forgotten is not None:
            return False
        if not self._queue and not self._is_first_question:
            return False  # no write waits for it
        self._requested_from = self.last
        return True

    def on_state_failed(self, error: LostError | ServerRefusedError) -> None:
        """Process a failed request for the client state."""
        self._requested_from = None
        if isinstance(error, LostError) or error.is_transient:
            self.is_paused = True
            return
        self._is_first_question = False
        self.refusal = error
        for entry in list(self._queue.values()):
            if not entry.highest_sequence:
                self._settle(entry, error)
            else:
                self._reports.append(SettledWrite(entry, entry.denied or error))
        self.is_paused = self.is_refused = bool(self._queue)

    def on_state_received(self, state: ClientState, now_ms: int) -> None:
        """Process the client state."""
        requested_from, self._requested_from = self._requested_from, None
        assert requested_from is not None  # noqa: S101 - every answer has a request
        self._wants_state = self._is_first_question = False
        self.refusal = None
        self._state_at_ms = now_ms
        last = state.last_sequence
        if self._is_adopting:
            self._adopt_sequence(last)
        elif last < requested_from or (
            last == 0 and any(self._is_old(entry, now_ms) for entry in self._queue.values())
        ):
            if last == 0 and not any(entry.highest_sequence for entry in self._queue.values()):
                self.was_adopted = True  # no pending write was sent, so none can be executed twice
                self._adopt_sequence(last)
            else:
                self.forgotten = ForgottenClient(self.last, last)
        else:
            self._mark_used(last)
            self._settle_denied(state)
            for entry in self._queue.values():
                if entry.sequence <= last and entry.sent_sequence == entry.sequence and not entry.is_probe:
                    entry.is_probe = True
                    self._probes += 1
                    # Other writes wait for a probe, so save it regardless of its place in the queue.
                    if entry.saved_sequence != entry.sequence:
                        self._unsaved[entry.number] = entry
            self._renumber()

    @staticmethod
    def _is_old(entry: QueuedWrite, now_ms: int) -> bool:
        """Whether the server may have evicted the write.

        A write also counts as old if its creation time is far in the future because the clock was set back.
        """
        age_ms = now_ms - entry.made_at_ms
        return not entry.is_certain and not -CLOCK_CORRECTION_MS <= age_ms <= RETENTION_MS

    def _settle_denied(self, state: ClientState) -> None:
        for entry in list(self._queue.values()):
            if entry.denied is None:
                continue
            if entry.key == state.last_key:
                self._settle(entry, Written(None, state.last_sequence, is_replay=True))
            elif entry.lowest_unknown is None or entry.lowest_unknown > state.last_sequence:
                self._handle_refusal(entry, entry.denied)
            else:  # an earlier call may have committed it, and only the server can tell
                self._reports.append(SettledWrite(entry, entry.denied))
                self.is_paused = self.is_refused = True

    def _adopt_sequence(self, last: int) -> None:
        self._is_adopting = False
        self.last = last
        self._freed = 0
        self._turn += 1
        for entry in self._queue.values():
            entry.sent_sequence = 0
            self._end_probe(entry)
        self._renumber()

    def resume(self, resend: Collection[bytes]) -> None:
        """Resend the pending writes with these keys as new writes, and withdraw the others."""
        if self.forgotten is None:
            return
        self.forgotten = None
        for entry in list(self._queue.values()):
            if entry.key not in resend:
                self._settle(entry, None)
        self._wants_state = self._is_adopting = self._is_first_question = True
        self.is_paused = False

    def withdraw(self, entry: QueuedWrite) -> bool:
        """Remove a pending write from the queue. Return True if it was not committed and cannot be committed later."""
        is_final = entry.is_certain and entry.call is None
        if not is_final:
            self._freed = max(self._freed, entry.highest_sequence)
        self._settle(entry, None)
        self._renumber()
        return is_final

    # --- the queue

    def _advance(self, last: int) -> None:
        if last > self.last:
            self.last = last
            self._turn += 1

    def _mark_used(self, sequence: int) -> None:
        """Record a committed sequence whose write is known."""
        self._advance(sequence)
        if sequence >= self._freed:
            self._freed = 0

    def _settle(self, entry: QueuedWrite, outcome: Outcome | Exception | None) -> None:
        del self._queue[entry.number]
        self._unsaved.pop(entry.number, None)
        self._end_probe(entry)
        settled = SettledWrite(entry, outcome)
        self._settled.append(settled)
        if isinstance(outcome, Written):
            self._reports.append(settled)
        else:
            self._unsaved_removals += 1
        self._turn += 1

    def _end_probe(self, entry: QueuedWrite) -> None:
        if entry.is_probe:
            entry.is_probe = False
            self._probes -= 1

    def _renumber(self) -> None:
        sequence = self.last
        for entry in self._queue.values():
            if entry.sequence <= self.last and entry.sent_sequence == entry.sequence:
                continue  # it may have been committed under this sequence
            sequence += 1
            if entry.sequence == sequence:
                continue
            if entry.sequence < sequence:
                # The file must not store it under the sequence of a different write.
                self._unsaved[entry.number] = entry
            entry.sequence = sequence
            self._turn += 1
