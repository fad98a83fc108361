"""What a ledger remembers and for how long: restarts, a second gateway, a full cache, eviction, erasure."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from databases import BOTH_STORES
from doors.ledger.ledger_doors import Door, key, opened, prepare
from doors.ledger.test_ledger_sequences import already, written
from doors.ledger.wires import Json, Ledger, code, failure, put, refused, success
from doors.serving import run
from oncelog.core.policy import LEDGER, evicted_after
from oncelog.core.transactions import ledger_scope
from oncelog.core.values import Settings
from oncelog.engine.limits import Limits
from oncelog.errors import PolicyError, SettingsError
from oncelog.testing.clock import ManualClock

pytestmark = BOTH_STORES

TTL_MS: Final = 86_400_000
INTERVAL: Final = 4


def place(answer: Json) -> tuple[int, str, int]:
    """Sequence, id and height of a success."""
    return answer["assigned_sequence"], answer["committed_tx_id"], answer["block_height"]


async def retried(ledger: Ledger, number: int, **members: Any) -> Json:
    """The same write again that `written` has made."""
    return await ledger.write(number, put("a", b"%d" % number), key=members.pop("with_key", key(number)), **members)


# --- restarts ---------------------------------------------------------------------------------------------


@pytest.mark.rule("LG-4", "LG-6", "LG-9", "LG-11", "LG-12", "LG-13")
def test_after_a_restart_every_key_is_known_with_its_sequence_id_and_height(tmp_path: Path, wire: str) -> None:
    async def main() -> None:
        async with opened(tmp_path, wire) as door:
            ledger = door.ledger(client_id="app")
            answers = await written(ledger, 4)
            unkeyed = success(await ledger.write(5, put("a", b"5")))
            state = await ledger.get_client_state()
        async with opened(tmp_path, wire) as door:
            ledger = door.ledger(client_id="app")
            assert await ledger.get_client_state() == state
            for number in (3, 4, 1, 2):  # of N−1 the answer of N−1, and not that of the last
                for _ in range(2):
                    assert already(await retried(ledger, number)) == place(answers[number - 1])
                assert already(await retried(ledger, number, with_key=b"")) == place(answers[number - 1])
                assert already(await retried(ledger, number, with_key=key(77))) == place(answers[number - 1])
                # A known key is answered by its key, whatever sequence it comes with.
                again = await ledger.write(number + 7, put("a", b"%d" % number), key=key(number))
                assert already(again) == place(answers[number - 1])
                other = await ledger.write(number, put("a", b"other"), key=key(number))
                assert (code(other), failure(other)["number"]) == ("IDEMPOTENCY_KEY_REUSED", 6)
                assert code(await ledger.write(number, put("a", b"other"), key=key(78))) == "SEQUENCE_REUSED"
                assert code(await ledger.write(number, put("a", b"other"))) == "SEQUENCE_REUSED"
            assert already(await ledger.write(5, put("a", b"5"))) == place(unkeyed)
            assert code(await ledger.write(7, put("a", b"7"), key=key(7))) == "SEQUENCE_GAP"
            assert await ledger.get_client_state() == state
            assert len(await ledger.transaction_ids()) == 5
            sixth = success(await retried(ledger, 6))
            assert await retried(ledger, 6) == sixth
            assert already(await retried(ledger, 4)) == place(answers[3])

    run(main())


@pytest.mark.rule("LG-11", "LG-17")
def test_after_a_restart_a_batch_is_already_committed(tmp_path: Path, wire: str) -> None:
    async def main() -> None:
        writes = [[put("a", b"1")], [put("b", b"2")]]
        async with opened(tmp_path, wire) as door:
            answer = success(await door.ledger(client_id="app").batch_write(1, *writes, key=key(1)))
        async with opened(tmp_path, wire) as door:
            ledger = door.ledger(client_id="app")
            assert already(await ledger.batch_write(1, *writes, key=key(1))) == place(answer)
            assert already(await ledger.batch_write(1, *writes)) == place(answer)
            assert code(await ledger.batch_write(1, writes[0], key=key(1))) == "IDEMPOTENCY_KEY_REUSED"
            assert code(await ledger.batch_write(3, writes[0], key=key(3))) == "SEQUENCE_GAP"
            assert await ledger.last_sequence() == 1

    run(main())


@pytest.mark.rule("LG-3")
def test_after_a_restart_a_failed_condition_is_still_not_remembered(tmp_path: Path, wire: str) -> None:
    async def main() -> None:
        asked = put("a", b"2", condition={"must_exist": True})
        async with opened(tmp_path, wire) as door:
            ledger = door.ledger(client_id="app")
            assert code(await ledger.write(1, asked, key=key(1))) == "KEY_NOT_FOUND"
        async with opened(tmp_path, wire) as door:
            ledger = door.ledger(client_id="app")
            assert await ledger.last_sequence() == 0
            assert code(await door.ledger(client_id="else").write(1, put("a"), key=key(1))) == "OK"
            assert success(await ledger.write(1, asked, key=key(1)))["assigned_sequence"] == 1

    run(main())


# --- a second gateway ---------------------------------------------------------------------------------------


@pytest.mark.rule("LG-7", "LG-9", "LG-11", "LG-12", "LG-13")
def test_a_second_gateway_knows_what_the_first_has_committed(tmp_path: Path, wire: str) -> None:
    async def main() -> None:
        async with opened(tmp_path, wire) as one, opened(tmp_path, wire) as other:
            first, second = one.ledger(client_id="app"), other.ledger(client_id="app")
            answers = await written(first, 2)
            assert await second.get_client_state() == await first.get_client_state()
            for number in (1, 2):
                assert already(await retried(second, number)) == place(answers[number - 1])
                assert already(await retried(second, number, with_key=b"")) == place(answers[number - 1])
                assert await retried(first, number) == answers[number - 1]
                assert code(await second.write(number, put("x"), key=key(number))) == "IDEMPOTENCY_KEY_REUSED"
                assert code(await second.write(number, put("x"), key=key(90))) == "SEQUENCE_REUSED"
            third = success(await retried(second, 3))
            assert already(await retried(first, 3)) == place(third)
            assert await retried(second, 3) == third
            error = failure(await first.write(5, put("x"), key=key(5)))
            assert (error["code"], error["last_committed_sequence"]) == ("SEQUENCE_GAP", 3)
            assert await first.value("a") == await second.value("a") == b"3"

    run(main())


# --- the cache ---------------------------------------------------------------------------------------------


@pytest.mark.rule("LG-10")
def test_the_cache_is_as_large_and_keeps_as_long_as_the_rule_says() -> None:
    assert (Limits().cache_entries_max, Limits().cache_ttl_ms) == (100_000, TTL_MS)


@pytest.mark.rule("LG-10", "LG-11")
def test_what_the_cache_has_no_room_for_is_answered_from_the_store(tmp_path: Path, wire: str) -> None:
    async def main() -> None:
        async with opened(tmp_path, wire, cache_entries_max=2) as door:
            ledger = door.ledger(client_id="app")
            answers = await written(ledger, 5)
            for number in (5, 4):
                assert await retried(ledger, number) == answers[number - 1]
            for number in (1, 2, 3):
                assert already(await retried(ledger, number)) == place(answers[number - 1])
            assert code(await ledger.write(1, put("x"), key=key(1))) == "IDEMPOTENCY_KEY_REUSED"

    run(main())


@pytest.mark.rule("LG-10", "LG-11")
def test_without_a_cache_the_first_answer_is_whole_and_a_retry_is_already_committed(tmp_path: Path, wire: str) -> None:
    async def main() -> None:
        async with opened(tmp_path, wire, cache_entries_max=0) as door:
            ledger = door.ledger(client_id="app")
            answers = await written(ledger, 2)
            for number in (1, 2):
                assert already(await retried(ledger, number)) == place(answers[number - 1])

    run(main())


# --- eviction -----------------------------------------------------------------------------------------------


@pytest.mark.rule("LG-15")
def test_the_interval_and_the_time_to_live_are_those_of_the_rule_and_cannot_be_nothing() -> None:
    assert (Settings().eviction_interval, LEDGER.retention.ttl_ms) == (1000, 86_400 * 1000)
    for interval in (0, -1):
        with pytest.raises(SettingsError, match="eviction_interval"):
            Settings(eviction_interval=interval)
    for ms in (0, -1):
        with pytest.raises(PolicyError, match="time to live"):
            evicted_after(ms=ms)


class Evicting:
    """A server whose log has one lane and evicts at every fourth position, on a clock that stands."""

    def __init__(self, directory: Path, wire: str) -> None:
        self.clock = ManualClock()
        self._directory = directory
        self._wire = wire
        self.position = 0
        self.door: Door

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Ledger]:
        """The app's ledger."""
        if not self.position:
            await prepare(self._directory, self.clock, eviction_interval=INTERVAL)
        async with opened(self._directory, self._wire, clock=self.clock) as self.door:
            yield self.door.ledger(client_id="app")

    async def fill(self, upto: int) -> None:
        """Others write until the log has come to that position."""
        heads = await self.door.log.heads()
        position = heads[1].position if 1 in heads else 0
        ledger = self.door.ledger("others")
        for number in range(position, upto):
            self.position += 1
            answer = await ledger.of(client_id=f"client-{number}").write(1, put("z"), key=key(number))
            assert success(answer)["block_header"]["first_position"] == number + 1


@pytest.mark.rule("LG-8", "LG-15", "LG-16")
@pytest.mark.parametrize("is_restarted", [False, True], ids=["running", "restarted"])
def test_a_client_is_evicted_at_the_interval_and_then_one_never_seen(
    tmp_path: Path, wire: str, is_restarted: bool
) -> None:
    async def main() -> None:
        evicting = Evicting(tmp_path, wire)
        async with evicting.opened() as ledger:
            (first,) = await written(ledger, 1)
            evicting.clock.advance(TTL_MS + 1)
            await evicting.fill(INTERVAL - 1)
            assert await ledger.last_sequence() == 1
            assert place(await retried(ledger, 1)) == place(first)
            if not is_restarted:
                await evicting.fill(INTERVAL)
                await late(ledger, first)
                return
        async with evicting.opened() as ledger:
            assert await ledger.last_sequence() == 1
            assert already(await retried(ledger, 1)) == place(first)
            await evicting.fill(INTERVAL)
        async with evicting.opened() as ledger:
            await late(ledger, first)

    async def late(ledger: Ledger, first: Json) -> None:
        """An evicted client: state 0, a higher sequence is a gap, and its retry as 1 executes."""
        unknown = {
            "last_committed_sequence": 0,
            "last_seen_ms": 0,
            "last_idempotency_key": b"",
            "last_request_hash": b"",
        }
        assert await ledger.get_client_state() == unknown
        error = failure(await ledger.write(2, put("a", b"2"), key=key(2)))
        assert (error["code"], error["last_committed_sequence"]) == ("SEQUENCE_GAP", 0)
        again = success(await retried(ledger, 1))
        assert again["committed_tx_id"] != first["committed_tx_id"]
        assert (again["assigned_sequence"], again["version"]) == (1, 2)  # versions go on: they are the scope's
        assert await ledger.last_sequence() == 1
        # The key is the new transaction's.
        assert await retried(ledger, 1) == again
        assert code(await ledger.write(1, put("x"), key=key(1))) == "IDEMPOTENCY_KEY_REUSED"
        assert (await ledger.get_transaction(first["committed_tx_id"]))["version"] == 1

    run(main())


@pytest.mark.rule("LG-16")
def test_an_evicted_client_that_recovers_sends_its_retry_as_one(tmp_path: Path, wire: str) -> None:
    async def main() -> None:
        evicting = Evicting(tmp_path, wire)
        async with evicting.opened() as ledger:
            await written(ledger, 3)
            evicting.clock.advance(TTL_MS + 1)
            await evicting.fill(INTERVAL)
            assert failure(await retried(ledger, 3))["code"] == "SEQUENCE_GAP"
            last = await ledger.last_sequence()
            answer = success(await ledger.write(last + 1, put("a", b"3"), key=key(3)))
            assert (last, answer["assigned_sequence"]) == (0, 1)
            # With other operations under the old key: it is forgotten, so that is a new write too.
            assert code(await ledger.write(2, put("a", b"else"), key=key(1))) == "OK"

    run(main())


@pytest.mark.rule("LG-15")
@pytest.mark.parametrize(("age_ms", "last"), [(TTL_MS - 1, 1), (TTL_MS, 1), (TTL_MS + 1, 0)])
def test_only_what_is_strictly_older_is_evicted(tmp_path: Path, wire: str, age_ms: int, last: int) -> None:
    async def main() -> None:
        evicting = Evicting(tmp_path, wire)
        async with evicting.opened() as ledger:
            (first,) = await written(ledger, 1)
            evicting.clock.advance(age_ms)
            await evicting.fill(INTERVAL)
            assert await ledger.last_sequence() == last
            again = success(await retried(ledger, 1))
            assert (again["committed_tx_id"] == first["committed_tx_id"]) is (last == 1)

    run(main())


@pytest.mark.rule("LG-15")
def test_time_alone_evicts_nothing(tmp_path: Path, wire: str) -> None:
    """An eviction is at a log position: a log that nobody writes to forgets nobody."""

    async def main() -> None:
        evicting = Evicting(tmp_path, wire)
        async with evicting.opened() as ledger:
            (first,) = await written(ledger, 1)
            evicting.clock.advance(10 * TTL_MS)
            assert await ledger.last_sequence() == 1
            assert place(await retried(ledger, 1)) == place(first)
            assert place(await retried(ledger, 1, with_key=b"")) == place(first)

    run(main())


@pytest.mark.rule("LG-6", "LG-13", "LG-15")
def test_the_record_at_the_evicting_position_applies_first_and_an_evicted_sequence_is_not_new(
    tmp_path: Path, wire: str
) -> None:
    async def main() -> None:
        evicting = Evicting(tmp_path, wire)
        async with evicting.opened() as ledger:
            await written(ledger, 2)
            evicting.clock.advance(TTL_MS + 1)
            await evicting.fill(INTERVAL - 1)
            third = success(await retried(ledger, 3))  # at the position that evicts: it has renewed its client
            assert await ledger.last_sequence() == 3
            assert await retried(ledger, 3) == third
            for number in (1, 2):
                for asked in (key(number), key(50), b""):
                    for value in (b"%d" % number, b"other"):
                        answer = await ledger.write(number, put("a", value), key=asked)
                        assert already(answer) == (number, None, None)
            assert await ledger.last_sequence() == 3
            assert await ledger.value("a") == b"3"
        async with evicting.opened() as ledger:
            assert already(await retried(ledger, 1)) == (1, None, None)
            assert already(await retried(ledger, 3)) == place(third)

    run(main())


@pytest.mark.rule("LG-15")
def test_each_stream_of_a_client_is_evicted_by_its_own_last_write(tmp_path: Path, wire: str) -> None:
    async def main() -> None:
        evicting = Evicting(tmp_path, wire)
        async with evicting.opened() as ledger:
            vault, another = ledger.of(vault="main"), ledger.of(client_id="another")
            await written(ledger, 1)
            evicting.clock.advance(1)
            await written(vault, 1)
            await written(another, 1)
            evicting.clock.advance(TTL_MS)
            await evicting.fill(INTERVAL)
            assert [await one.last_sequence() for one in (ledger, vault, another)] == [0, 1, 1]

    run(main())


@pytest.mark.rule("LG-16", "LG-15")
def test_a_clock_that_is_set_back_evicts_nothing(tmp_path: Path, wire: str) -> None:
    async def main() -> None:
        evicting = Evicting(tmp_path, wire)
        async with evicting.opened() as ledger:
            answers = await written(ledger, 2)
            evicting.clock.jump(-30 * TTL_MS)
            await evicting.fill(2 * INTERVAL)
            assert await ledger.last_sequence() == 2
            assert [await retried(ledger, number) for number in (1, 2)] == answers
            third = success(await retried(ledger, 3))
            assert third["timestamp_ms"] >= answers[1]["timestamp_ms"]
            # By log time: that stood still, and so nothing has become older.
            evicting.clock.advance(29 * TTL_MS)
            await evicting.fill(3 * INTERVAL)
            assert await ledger.last_sequence() == 3

    run(main())


@pytest.mark.rule("LG-16", "CO-17")
def test_a_clock_that_jumps_forward_does_not_make_the_ledger_forget(tmp_path: Path, wire: str) -> None:
    async def main() -> None:
        evicting = Evicting(tmp_path, wire)
        async with evicting.opened() as ledger:
            await written(ledger, INTERVAL - 1)
            evicting.clock.jump(2 * TTL_MS)
            error = await refused(ledger.write(INTERVAL, put("a"), key=key(INTERVAL)))
            assert (error.status, error.retry_after_ms) == ("UNAVAILABLE", 1000)
            assert await ledger.last_sequence() == INTERVAL - 1
            evicting.clock.jump(-2 * TTL_MS)
            assert code(await retried(ledger, INTERVAL)) == "OK"

    run(main())


# --- erasure ---------------------------------------------------------------------------------------------------


@pytest.mark.rule("LG-18", "LG-11", "CO-41")
@pytest.mark.parametrize("is_restarted", [False, True], ids=["running", "restarted"])
def test_an_erased_transaction_is_known_and_marked(tmp_path: Path, wire: str, is_restarted: bool) -> None:
    async def erase(door: Door) -> None:
        assert await door.log.erase(key=key(2), policy=LEDGER, scope=ledger_scope("acme"), client="app") == 1

    async def look(ledger: Ledger, answers: list[Json], before: Json) -> None:
        for asked in (key(2), b"", key(70)):
            error = failure(await ledger.write(2, put("a", b"2"), key=asked))
            assert (error["code"], error["erased"]) == ("ALREADY_COMMITTED", True)
            assert (error["assigned_sequence"], error["committed_tx_id"], error["block_height"]) == place(answers[1])
        assert code(await ledger.write(2, put("a", b"x"), key=key(2))) == "IDEMPOTENCY_KEY_REUSED"
        found = await ledger.get_transaction(answers[1]["committed_tx_id"])
        assert found == {**before, "operations": [], "erased": True}
        for number in (1, 3):
            again = await retried(ledger, number)
            assert code(again) in ("OK", "ALREADY_COMMITTED")
            assert "erased" not in again.get("error", {})
            found = await ledger.get_transaction(answers[number - 1]["committed_tx_id"])
            assert (found["erased"], found["operations"]) == (False, [put("a", b"%d" % number)])

    async def main() -> None:
        async with opened(tmp_path, wire) as door:
            ledger = door.ledger(client_id="app")
            answers = await written(ledger, 3)
            before = await ledger.get_transaction(answers[1]["committed_tx_id"])
            await erase(door)
            if not is_restarted:
                await look(ledger, answers, before)
                return
        async with opened(tmp_path, wire) as door:
            await look(door.ledger(client_id="app"), answers, before)

    run(main())
