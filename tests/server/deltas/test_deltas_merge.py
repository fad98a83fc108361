"""Merged rows match a model regardless of the arrival order (DE-7, DE-4, DE-12)."""

import random
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from typing import Any, Final

import pytest

from databases import BOTH_STORES
from server.deltas.delta_servers import Gateway, Json, SharedServer, change, merge_onto_snapshot, rows_of, run_server
from server.deltas.row_model import merge_model

pytestmark = BOTH_STORES

# The private use area sorts before characters beyond the BMP by code point, but after them by UTF-16 code unit.
CLIENTS: Final = ("a", "b", "\ue000", "\U0001f600")
SETS: Final = {
    "columns": [change(1, a=1, b=1), change(2, a=2), change(2, client="b", b=2), change(2, client="b", b=3, c=0)],
    "clients": [change(5, client=client, a=client) for client in CLIENTS],
    "deletes": [
        change(3, op="DELETE"),
        change(2, op="INSERT", a=1, b=1),
        change(4, b=2),
        change(3, client="b", c=3),
    ],
    "ties": [
        change(3, client="b", op="DELETE"),
        change(3, client="a", a=1),
        change(3, client="\U0001f600", b=1),
        change(3, client="\ue000", op="DELETE"),
    ],
    "back": [change(1, a=1), change(2, op="DELETE"), change(3, op="INSERT"), change(1, client="b", b=1)],
}
"""Small sets of deltas that together cover every merge rule."""


def generate_deltas(random_: random.Random, count: int) -> list[Json]:
    """Generate deltas with few rows, clocks and clients, so that every kind of tie occurs often."""
    found: dict[str, Json] = {}
    while len(found) < count:
        op = random_.choice(["INSERT", "UPDATE", "UPDATE", "DELETE"])
        names = [] if op == "DELETE" else random_.sample("abcd", random_.randint(0, 3))
        columns: Any = {name: random_.choice([None, 0, 1, "x", [1], {"k": 2.5}]) for name in names}
        delta = change(
            random_.randint(1, 6),
            f"r{random_.randint(1, 3)}",
            client=random_.choice(CLIENTS),
            op=op,
            table=random_.choice("tu"),
            **columns,
        )
        found.setdefault(delta["deltaId"], delta)
    return list(found.values())


async def state(gateway: Gateway) -> list[Any]:
    """Return the merged state as bytes, so that comparisons include the column order."""
    bodies = [(await gateway.request("GET", f"rows/{table}")).body for table in "tu"]
    return [(await gateway.snapshot())[0], bodies]


async def check_agreement(gateway: Gateway, deltas: Sequence[Json]) -> None:
    model = merge_model(deltas)
    for table in "tu":
        assert await gateway.rows(table) == rows_of(model, table)


@pytest.mark.rule("DE-7", "DE-4")
@pytest.mark.parametrize("deltas", SETS.values(), ids=SETS)
async def test_every_permutation_of_a_small_set_merges_to_the_same_rows(
    shared_server: SharedServer, deltas: list[Json]
) -> None:
    model, states = merge_model(deltas), []
    for number, order in enumerate(permutations(deltas)):
        gateway = shared_server.gateway(number)
        cut = number % 4
        await gateway.push_accepted(*order[:cut])
        await gateway.push_accepted(*order[: cut + 1], *order[cut:])  # repeat some deltas, one of them within a push
        assert await gateway.rows() == rows_of(model), order
        states.append(await state(gateway))
    assert states == [states[0]] * 24


@pytest.mark.rule("DE-7", "DE-4", "DE-6")
async def test_write_after_a_delete_restores_the_row_with_only_its_own_columns(shared_server: SharedServer) -> None:
    gateway = shared_server.gateway()
    await gateway.push_accepted(change(5, op="INSERT", name="Tea", price=1))
    await gateway.push_accepted(change(7, op="DELETE"))
    assert await gateway.rows() == {}
    await gateway.push_accepted(change(6, price=2))  # late delta, older than the delete
    assert await gateway.rows() == {}
    await gateway.push_accepted(change(8, price=3))
    assert await gateway.rows() == {"r1": {"price": 3}}  # only the new delta's columns
    one = await gateway.ok("GET", "rows/t", params={"rowId": "r1"})
    assert one == {"rows": [{"rowId": "r1", "columns": {"price": 3}, "hlc": "8"}], "hasMore": False, "next": ""}
    assert await gateway.ok("GET", "rows/t", params={"rowId": "r2"}) == {"rows": [], "hasMore": False, "next": ""}
    assert await gateway.ok("GET", "rows/nowhere") == {"rows": [], "hasMore": False, "next": ""}


@pytest.mark.rule("DE-7", "DE-4", "DE-12")
@pytest.mark.parametrize("run", range(4))
async def test_random_orders_with_duplicates_compactions_and_restarts_merge_to_the_same_rows(
    tmp_path: Path, seed: int, run: int, is_soak: bool
) -> None:
    random_ = random.Random(4 * seed + run)
    deltas = generate_deltas(random_, 120 if is_soak else 20)
    names = [f"g{number}" for number in range(5 if is_soak else 3)]
    orders = {name: random_.sample(deltas, len(deltas)) for name in names}
    pushed: dict[str, list[Json]] = {name: [] for name in names}

    async def some(gateway: Gateway, name: str) -> None:
        """Push the next few deltas together with some known ones."""
        count = random_.randint(4, 20) if is_soak else random_.randint(7, 12)
        coming, orders[name] = orders[name][:count], orders[name][count:]
        pushed[name] += coming
        again = random_.sample(pushed[name], min(3, len(pushed[name])))
        batch = coming + again
        if random_.random() < 0.5:
            random_.shuffle(batch)
        await gateway.push_accepted(*batch)
        if random_.random() < 0.6:
            await gateway.compact(keep=random_.randint(0, 5))
            await gateway.push_accepted(*again)

    while any(orders.values()):
        async with run_server(tmp_path) as server:
            for name in names:
                gateway = server.gateway(name)
                await some(gateway, name)
                await check_agreement(gateway, pushed[name])
    async with run_server(tmp_path) as server:
        states = []
        for name in names:
            gateway = server.gateway(name)
            assert all(is_known for _, is_known in await gateway.push_accepted(*random_.sample(deltas, len(deltas))))
            await check_agreement(gateway, deltas)
            rows, cursor = await gateway.snapshot(limit=random_.randint(1, 4))
            assert cursor == len(deltas)
            assert merge_model(merge_onto_snapshot(rows, [])) == merge_model(deltas)
            states.append(await state(gateway))
        assert states == [states[0]] * len(names)
