"""Table schemas: deltas that violate a schema, and invalid schema files."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from databases import BOTH_STORES
from oncelog.errors import SettingsError
from oncelog.server.deltas.schemas import TableSchemas
from server.deltas.delta_servers import change, refusal, run_server
from server.running_server import api_key

SHOP = {
    "shop": {
        "products": {"name": "text", "price": "number?", "stock": "integer", "sold": "boolean", "tags": "json"},
        "empty": {},
    }
}


ANY: tuple[Any, ...] = (None, 1, "x", True, [], {})


def write_schemas(directory: Path, schemas: Any) -> str:
    path = directory / "schemas.json"
    path.write_text(schemas if isinstance(schemas, str) else json.dumps(schemas), encoding="utf-8")
    return str(path)


def product(hlc: int = 1, **columns: Any) -> Any:
    return change(hlc, table="products", **columns)


@BOTH_STORES
@pytest.mark.rule("DE-10", "DE-6")
async def test_schema_violation_is_refused_and_the_error_names_the_field(tmp_path: Path) -> None:
    async with run_server(tmp_path, deltas_schemas=write_schemas(tmp_path, SHOP)) as server:
        gateway = server.gateway()
        good = product(name="Tea", price=3.5, stock=2, sold=False, tags=["x", {"y": 1}])
        for delta, words in (
            (change(1, table="orders", a=1), "table: 'orders' is not a table of the gateway"),
            (change(1, table="empty", a=1), "columns[0].column: 'a' is not a column of table 'empty'"),
            (product(name="x", nmae="y"), "columns[1].column: 'nmae' is not a column of table 'products'"),
            (product(name=1), "columns[0].value: column 'name' of table 'products' must be of type text, not integer"),
            (product(name=None), "columns[0].value: column 'name' of table 'products' must be of type text, not null"),
            (product(name=["x"]), "columns[0].value: column 'name' of table 'products' must be of type text, not json"),
            (
                product(stock=1.5),
                "columns[0].value: column 'stock' of table 'products' must be of type integer, not number",
            ),
            (
                product(stock="1"),
                "columns[0].value: column 'stock' of table 'products' must be of type integer, not text",
            ),
            (
                product(price=True),
                "columns[0].value: column 'price' of table 'products' must be of type number, not boolean",
            ),
            (
                product(sold=0),
                "columns[0].value: column 'sold' of table 'products' must be of type boolean, not integer",
            ),
            (
                product(sold=None),
                "columns[0].value: column 'sold' of table 'products' must be of type boolean, not null",
            ),
        ):
            answer = await gateway.push(good, delta)
            assert refusal(answer) == (422, "INVALID")
            expected = {"detail": f"deltas[1].{words}", "error": f"deltas[1].{words}", "code": "INVALID", "index": 1}
            assert answer.json.items() >= expected.items()
        assert await gateway.pull_all() == []
        allowed = [
            good,
            *(product(2, price=price) for price in (None, 1, -1.5, 0)),
            *(product(3, stock=stock) for stock in (0, -7, 2**53 - 1)),
            *(product(4, tags=tags) for tags in ANY),
            change(5, table="products", op="DELETE"),
            change(5, table="empty", op="INSERT"),
        ]
        assert [is_known for _, is_known in await gateway.push_accepted(*allowed)].count(True) == 0
        assert await server.gateway("other").push_accepted(change(1, table="whatever", a=1)) == [(1, False)]


@BOTH_STORES
@pytest.mark.rule("DE-4", "CO-18")
async def test_known_delta_is_acknowledged_after_the_schema_has_become_stricter(tmp_path: Path) -> None:
    path = write_schemas(tmp_path, {})
    old = product(anything=1)
    for is_in_memory in (True, False):
        async with run_server(tmp_path, deltas_schemas=path) as server:
            gateway = server.gateway()
            assert await gateway.push_accepted(old) == [(1, not is_in_memory)]
            write_schemas(tmp_path, SHOP)
            server.server.reload()
            assert await gateway.push_accepted(old) == [(1, True)]
            assert refusal(await gateway.push(old, product(2, anything=2))) == (422, "INVALID")
            assert await gateway.push_accepted(old) == [(1, True)]


async def test_star_schema_applies_to_gateways_without_a_schema(tmp_path: Path) -> None:
    schemas = {
        "shop": {"t": {"a": "text"}},
        "closed": {},
        "a/b": {"u": {"a": "json"}},
        "*": {"t": {"a": "integer"}},
    }
    async with run_server(tmp_path, deltas_schemas=write_schemas(tmp_path, schemas)) as server:
        for name, delta, status in (
            ("shop", change(1, a="x"), 200),
            ("shop", change(1, a=1), 422),
            ("else", change(1, a=1), 200),
            ("else", change(1, a="x"), 422),
            ("*", change(1, a=1), 200),
            ("a%2Fb", change(1, table="u", a=1), 200),
            ("a%2Fb", change(1, a=1), 422),
            ("closed", change(1, a=1), 422),  # a schema without tables differs from no schema
        ):
            assert (await server.gateway(name).push(delta)).status == status, (name, delta)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "deltas_schemas: "),
        ("{", "deltas_schemas: "),
        ("[]", "must be JSON of the form {gateway: {table: {column: type}}}"),
        ('{"shop": []}', "must be JSON of the form {gateway: {table: {column: type}}}"),
        ('{"shop": {"t": {"a": 1}}}', "must be JSON of the form {gateway: {table: {column: type}}}"),
        ('{"shop": {"t": {"a": "string"}}}', "shop.t.a: must be one of text, integer, number, boolean, json"),
        ('{"shop": {"t": {"a": "text??"}}}', "shop.t.a: must be one of"),
        ('{"shop": {"t": {"a": ""}}}', "shop.t.a: must be one of"),
        ('{"shop": {"no name": {}}}', "shop: 'no name' is not a valid table or column name"),
        ('{"shop": {"t": {"1": "text"}}}', "shop.t: '1' is not a valid table or column name"),
        ('{"shop": {}, "shop": {}}', "duplicate key"),
        ('{"": {}}', "'' is not a valid gateway name"),
        ('{"e\u0301": {}}', "is not a valid gateway name: gateway: must be in NFC"),
    ],
)
async def test_error_for_an_invalid_schema_file_names_the_setting(tmp_path: Path, text: str, words: str) -> None:
    schemas = TableSchemas(write_schemas(tmp_path, text))
    with pytest.raises(SettingsError) as raised:
        schemas.reload()
    assert str(raised.value).startswith("deltas_schemas: ")
    assert words in str(raised.value)

    with pytest.raises(SettingsError):
        async with run_server(tmp_path, deltas_schemas=str(tmp_path / "schemas.json")):
            pass


def test_missing_schema_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="deltas_schemas: "):
        TableSchemas(str(tmp_path / "nowhere.json")).reload()


async def test_reload_of_an_invalid_schema_file_keeps_the_old_schemas(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with run_server(tmp_path, deltas_schemas=write_schemas(tmp_path, SHOP)) as server:
        gateway = server.gateway()
        write_schemas(tmp_path, '{"shop": {"t": {"a": "texxt"}}}')
        with caplog.at_level(logging.ERROR):
            server.server.reload()
        assert "not reloaded: deltas_schemas: " in caplog.text
        assert "shop.t.a" in caplog.text
        assert refusal(await gateway.push(change(1, a=1))) == (422, "INVALID")
        assert await gateway.push_accepted(product(name="Tea")) == [(1, False)]
        write_schemas(tmp_path, {"shop": {"t": {"a": "integer"}}})
        server.server.reload()
        assert await gateway.push_accepted(change(1, a=1)) == [(2, False)]


@pytest.mark.rule("CO-28")
async def test_bad_schema_file_does_not_prevent_the_reload_of_other_files(tmp_path: Path) -> None:
    async with run_server(tmp_path, api_keys=True, deltas_schemas=write_schemas(tmp_path, {})) as server:
        keys = server.served.api_keys
        assert keys is not None
        first, second = (api_key(server.served, "c1", write=["deltas/shop"]) for _ in range(2))
        write_schemas(tmp_path, "[]")
        keys.revoke(first.key.id)
        server.server.reload()
        assert refusal(await server.gateway(credential=first.text).push(change(1, a=1))) == (401, "AUTH_FAILED")
        gateway = server.gateway(credential=second.text)
        assert await gateway.push_accepted(change(1, a=1)) == [(1, False)]
        write_schemas(tmp_path, SHOP)
        (tmp_path / "keys.json").write_bytes(b"no keys")
        server.server.reload()
        assert refusal(await gateway.push(change(2, a=2)))[0] == 422
