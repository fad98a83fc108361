"""Names of the documented maximum lengths over both wires, in characters that no database can compress."""

from random import Random

import pytest

from databases import BOTH_STORES
from oncelog.core.limits import ENTITY_KEY_CHARACTERS_MAX
from server.ledger.ledger_servers import SharedServer, key
from server.ledger.ledger_transports import code, expect_success, put, relate

pytestmark = BOTH_STORES

SCRIPTS = {"ascii": (0x21, 0x7E), "cjk": (0x4E00, 0x9FFF), "supplementary": (0x20000, 0x2A6D0)}


@pytest.mark.rule("CO-34", "LG-2")
@pytest.mark.parametrize("script", SCRIPTS)
async def test_names_of_the_maximum_lengths_are_written_and_read(shared_server: SharedServer, script: str) -> None:
    chance = Random(script)
    first, last = SCRIPTS[script]

    def name() -> str:
        return "".join(chr(chance.randint(first, last)) for _ in range(ENTITY_KEY_CHARACTERS_MAX))

    ledger = shared_server.ledger(vault=name()[:80])
    parts, names = (name(), name(), name()), sorted([name(), name(), "short"])
    operations = [relate(*parts), *(put(one, b"1") for one in names)]
    answer = expect_success(await ledger.write(1, *operations, key=key(1)))
    assert await ledger.write(1, *operations, key=key(1)) == answer
    assert await ledger.check_relationship(*parts) == {"exists": True, "version": 1}
    assert [await ledger.value(one) for one in names] == [b"1"] * 3
    found: list[str] = []
    token = ""
    while not found or token:
        page = await ledger.list_entities(page_size=1, page_token=token)
        found += [one["key"] for one in page["entities"]]
        token = page["next_page_token"]
    assert found == names
    resource, relation, subject = parts
    listed = await ledger.list_relationships(resource=resource, relation=relation, subject=subject)
    assert [(one["resource"], one["relation"], one["subject"]) for one in listed["relationships"]] == [parts]
    assert code(await ledger.write(2, *operations, key=key(2))) == "OK"
