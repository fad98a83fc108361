"""The to-do list of examples/todo depends only on the log's order, in memory, in SQLite and in JavaScript."""

import json
import random
import sqlite3
import subprocess
from pathlib import Path
from typing import Any, Final

from hypothesis import given
from hypothesis import strategies as st

import model
from insieme.clients import find_program
from oncelog.client import Event

PAGE: Final = Path(model.__file__).parent / "page"
ITEMS: Final = ("a", "b", "c")

Said = dict[str, Any]

changes: Final = st.builds(
    model.build_event,
    st.sampled_from(model.KINDS),
    st.sampled_from(ITEMS),
    st.sampled_from(["ann", "bob"]),
    st.none() | st.sampled_from(["milk", "bread", ""]),
)
others: Final = st.sampled_from(
    [
        None,
        {"type": model.ADDED},
        {"type": model.ADDED, "schemaVersion": 1, "payload": {"item": "a", "text": "no meta"}},
        {"type": model.ADDED, "schemaVersion": True, "payload": {"item": "a", "text": "x"}, "meta": {}},
        {"type": model.ADDED, "schemaVersion": 2, "payload": {"item": "a", "text": "x"}, "meta": {}},
        {"type": model.ADDED, "schemaVersion": 1, "payload": {"item": "", "text": "x"}, "meta": {}},
        {"type": model.ADDED, "schemaVersion": 1, "payload": {"item": 7, "text": "x"}, "meta": {}},
        {"type": model.ADDED, "schemaVersion": 1, "payload": {"item": "a", "text": None}, "meta": {}},
        {"type": model.ADDED, "schemaVersion": 1, "payload": {"item": "a", "text": "x", "by": None}, "meta": {}},
        {"type": model.ADDED, "schemaVersion": 1, "payload": [], "meta": {}},
        {"type": "shop.opened", "schemaVersion": 1, "payload": {"item": "a", "text": "x"}, "meta": {}},
        {"type": model.ADDED, "schemaVersion": 1, "payload": {"item": "a", "text": "no author"}, "meta": {}},
    ]
)
logs: Final = st.lists(changes | others, max_size=30)


def number_events(log: list[Said | None]) -> list[tuple[int, Said | None]]:
    """Number the events like a log: in increasing order, with gaps for other partitions."""
    return [(3 * number, event) for number, event in enumerate(log, 1)]


def event(number: int, said: Said | None) -> Event:
    return Event(f"id {number}", "somebody", ("project/home",), number, said, 0)


def list_in_sqlite(log: list[Said | None], pages: list[int]) -> list[model.Item]:
    """Apply the log to a table, in pages of these lengths, and return the resulting list."""
    connection = sqlite3.connect(":memory:")
    left = [event(number, said) for number, said in number_events(log)]
    for length in [*pages, len(left)]:
        model.apply(connection, left[:length])
        del left[:length]
    rows = connection.execute("SELECT * FROM todo_items").fetchall()
    connection.close()
    return model.list_visible(map(model._to_item, rows))


@given(logs, st.lists(st.integers(0, 5), max_size=10))
def test_table_equals_the_list_computed_from_the_log_for_any_page_sizes(
    log: list[Said | None], pages: list[int]
) -> None:
    assert list_in_sqlite(log, pages) == model.build_list(number_events(log))


@given(st.lists(st.lists(changes, max_size=8), max_size=4), st.randoms(use_true_random=False))
def test_client_with_pending_changes_shows_the_list_of_the_whole_log(
    writers: list[list[Said]], chance: random.Random
) -> None:
    """A log is any interleaving of changes by several writers."""
    queues = [list(queue) for queue in writers]
    log: list[Said | None] = []
    while left := [queue for queue in queues if queue]:
        log.append(chance.choice(left).pop(0))
    committed = model.build_list(number_events(log))
    # A client that has received part of the log and has the rest in its outbox shows the same list, apart from marks.
    seen = chance.randint(0, len(log))
    items = model.fold(number_events(log[:seen])).values()
    shown = model.build_list_with_pending(items, [said for said in log[seen:] if said is not None])
    assert [(item.id, item.text, item.is_done) for item in shown] == [
        (item.id, item.text, item.is_done) for item in committed
    ]
    assert {item.id for item in shown if item.is_pending} <= {
        said["payload"]["item"] for said in log[seen:] if said is not None
    }


def test_last_change_wins_and_removed_items_remain_removed() -> None:
    def change(kind: str, text: str | None = None) -> Said:
        return model.build_event(kind, "a", "ann", text)

    log: list[Said | None] = [change(model.DONE), change(model.ADDED, "milk"), change(model.ADDED, "bread")]
    assert model.build_list(number_events(log)) == [model.Item("a", 6, "milk", "ann")]
    log += [change(model.DONE), change(model.RENAMED, "oat milk"), change(model.UNDONE), change(model.DONE)]
    assert model.build_list(number_events(log)) == [model.Item("a", 6, "oat milk", "ann", is_done=True)]
    log += [change(model.REMOVED), change(model.UNDONE), change(model.ADDED, "milk again")]
    assert model.build_list(number_events(log)) == []


def test_pending_items_are_marked_and_listed_last() -> None:
    milk = model.Item("a", 7, "milk", "bob")
    waiting = [model.build_event(model.ADDED, "b", "ann", "bread"), model.build_event(model.DONE, "a", "ann")]
    assert model.build_list_with_pending([milk], waiting) == [
        milk._replace(is_done=True, is_pending=True),
        model.Item("b", 8, "bread", "ann", is_pending=True),
    ]
    assert (
        model.build_list_with_pending(
            [milk._replace(is_removed=True)], [model.build_event(model.ADDED, "a", "ann", "x")]
        )
        == []
    )


def test_reset_empties_the_table(tmp_path: Path) -> None:
    path = str(tmp_path / "ann.db")
    connection = sqlite3.connect(path, isolation_level=None)
    model.reset(connection)  # a new file
    model.apply(connection, [event(1, model.build_event(model.ADDED, "a", "ann", "milk"))])
    table = model.Table(path)
    assert [item.text for item in table.items()] == ["milk"]
    model.reset(connection)
    assert table.items() == []
    table.close()
    connection.close()


SCRIPT: Final = """
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";
const { buildList, buildListWithPending } = await import(pathToFileURL(process.argv[2]));
const cases = JSON.parse(readFileSync(0, "utf8"));
console.log(JSON.stringify(cases.map(({ log, waiting }) => [buildList(log), buildListWithPending(log, waiting)])));
"""


def to_insieme(log: list[tuple[int, Said | None]]) -> list[Said]:
    """Return the events in the Insieme dialect, without erased and incomplete events."""
    return [{"committedId": number, **said} for number, said in log if said is not None and "meta" in said]


def shuffle(events: list[Said]) -> list[Said]:
    """Return the events in a different order, because the page must sort them."""
    return random.Random(7).sample(events, len(events))


def test_page_and_python_model_produce_the_same_list(tmp_path: Path) -> None:
    cases: list[tuple[list[tuple[int, Said | None]], list[Said]]] = []

    @given(logs, st.lists(changes, max_size=5))
    def collect(log: list[Said | None], waiting: list[Said]) -> None:
        cases.append((number_events(log), waiting))

    collect()
    script = tmp_path / "run.mjs"
    script.write_text(SCRIPT)
    given_cases = [{"log": shuffle(to_insieme(log)), "waiting": waiting} for log, waiting in cases]
    done = subprocess.run(  # noqa: S603
        [find_program("node", "nodejs"), str(script), str(PAGE / "model.mjs")],
        input=json.dumps(given_cases),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert (done.returncode, done.stderr) == (0, "")
    for (log, waiting), (committed, shown) in zip(cases, json.loads(done.stdout), strict=True):
        assert [_as_item(one) for one in committed] == model.build_list(log)
        assert [_as_item(one) for one in shown] == model.build_list_with_pending(model.fold(log).values(), waiting)


def _as_item(one: Said) -> model.Item:
    return model.Item(one["id"], one["place"], one["text"], one["by"], one["isDone"], False, one["isPending"])
