"""Public names exist, and `import oncelog` and the command line import few modules."""

import subprocess
import sys

import pytest

import oncelog
from oncelog import client

HEAVY = ("asyncio", "sqlite3", "concurrent.futures", "oncelog.engine")


def run_program(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)  # noqa: S603
    return done.stdout.strip()


def test_importing_the_library_does_not_import_asyncio_or_sqlite() -> None:
    names = ", ".join(map(repr, HEAVY))
    assert run_program(f"import sys, oncelog; print([name for name in ({names},) if name in sys.modules])") == "[]"


def test_computing_a_key_does_not_import_asyncio_or_sqlite() -> None:
    program = (
        "import sys, uuid, oncelog\n"
        "oncelog.event(uuid.uuid4(), {'type': 't'}, ['p'])\n"
        "oncelog.run_key(None, 1, 'e', None, None, {})\n"
        "print('asyncio' in sys.modules, 'sqlite3' in sys.modules)"
    )
    assert run_program(program) == "False False"


def test_command_line_does_not_import_the_client_library() -> None:
    assert run_program("import sys, oncelog.cli; print('oncelog.client.events.client' in sys.modules)") == "False"


PUBLIC = (*oncelog.__all__, "open")


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_can_be_loaded(name: str) -> None:
    assert getattr(oncelog, name) is getattr(oncelog, name)


@pytest.mark.parametrize("name", ["open", "open_blocking"])
def test_unknown_option_is_reported_with_the_public_name_of_the_function(name: str) -> None:
    with pytest.raises(TypeError, match=rf"oncelog\.{name}\(\) got an unexpected keyword argument 'lanes'"):
        getattr(oncelog, name)("log.db", lanes=8)


def test_star_import_loads_public_names() -> None:
    program = "from oncelog import *; print(open_blocking.__module__, Log.__name__)"
    assert run_program(program) == "oncelog.engine.log Log"


def test_star_import_does_not_shadow_builtins() -> None:
    program = "import builtins; from oncelog import *; print([name for name in dir(builtins) if name in globals()])"
    assert [name for name in eval(run_program(program)) if not name.startswith("__")] == []  # noqa: S307 - a list of names
    assert run_program("from oncelog import *; print(open.__module__)") in ("io", "_io")
    assert run_program("import oncelog; oncelog.Log; print(oncelog.open.__module__)") == "oncelog.engine.log"


def test_dir_lists_public_names_before_and_after_loading() -> None:
    program = (
        "import oncelog; before = dir(oncelog); oncelog.Log; "
        "print(before == dir(oncelog) == sorted([*oncelog.__all__, 'open']))"
    )
    assert run_program(program) == "True"


def test_public_names_are_unique_and_include_the_lazy_ones() -> None:
    assert len(oncelog.__all__) == len(set(oncelog.__all__))
    assert set(oncelog._LAZY_NAMES) <= set(PUBLIC)


def test_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Lgo'"):
        _ = oncelog.Lgo


@pytest.mark.parametrize("name", client.__all__)
def test_every_public_name_of_the_client_can_be_loaded(name: str) -> None:
    assert getattr(client, name) is getattr(client, name)
    assert name in dir(client)


def test_unknown_name_of_the_client_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Cleint'"):
        _ = client.Cleint
