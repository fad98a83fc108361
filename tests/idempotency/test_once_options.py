"""`once` refuses unsuitable functions, options, keys and arguments."""

import datetime as dt
import functools
import threading
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest

import oncelog
from idempotency.once_samples import Invoice, Node
from oncelog import (
    CanonicalError,
    once,
    work_of,
)


def sync_int() -> int:
    return 1


async def async_int() -> int:
    return 1


class TestDecorating:
    """Errors are raised when the function is decorated, not when it runs."""

    @pytest.mark.rule("RU-11")
    @pytest.mark.parametrize(
        "kind",
        [object, complex, list[threading.Lock], dict[str, Callable[[], int]], threading.Thread, dict[int, object]],
    )
    def test_result_type_without_json_form_is_refused(self, kind: object) -> None:
        def work() -> Any: ...

        work.__annotations__["return"] = kind
        with pytest.raises(TypeError, match="cannot be stored as JSON"):
            once(oncelog.open_blocking(":memory:"), name="work")(work)

    @pytest.mark.parametrize(
        "kind", [None, int, list[Invoice], dict[str, Any], tuple[int, str], set[UUID] | None, dt.date, bytes]
    )
    def test_result_type_with_json_form_is_accepted(self, kind: object) -> None:
        def work() -> Any: ...

        work.__annotations__["return"] = kind
        once(oncelog.open_blocking(":memory:"), name="work")(work)

    def test_recursive_result_type_is_accepted(self) -> None:
        once(oncelog.open_blocking(":memory:"), name="work", result=Node)(sync_int)

    def test_function_without_return_annotation_is_refused(self) -> None:
        def work():  # type: ignore[no-untyped-def]
            return 1

        with pytest.raises(TypeError, match="has no return type") as caught:
            once(oncelog.open_blocking(":memory:"), name="work")(work)
        assert caught.value.__suppress_context__

    def test_async_function_with_blocking_log_is_refused_and_vice_versa(self) -> None:
        with pytest.raises(TypeError, match="is async"):
            once(oncelog.open_blocking(":memory:"))(async_int)
        with pytest.raises(TypeError, match="is not async"):
            once(oncelog.open(":memory:"))(sync_int)

    def test_objects_other_than_functions_and_logs_are_refused(self) -> None:
        log = oncelog.open_blocking(":memory:")
        with pytest.raises(TypeError, match="functions"):
            once(log, name="work")(functools.partial(sync_int))
        with pytest.raises(TypeError, match=r"@oncelog.once\(log\)"):
            once(abs)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="once needs a log"):
            once("app.db")  # type: ignore[arg-type]

    @pytest.mark.parametrize("scope", [5, b"x", lambda: None])
    def test_scope_that_is_not_text_is_refused(self, scope: Any) -> None:
        with pytest.raises(TypeError, match="scope"):
            work_of(once(oncelog.open_blocking(":memory:"), scope=scope)(sync_int))

    def test_generator_is_refused(self) -> None:
        def numbers() -> Any:
            yield 1

        with pytest.raises(TypeError, match="generator"):
            once(oncelog.open_blocking(":memory:"), name="work")(numbers)

    def test_nested_function_without_a_name_is_refused(self) -> None:
        def inner() -> int:
            return 1

        with pytest.raises(ValueError, match="name="):
            once(oncelog.open_blocking(":memory:"))(inner)

    def test_scope_and_policy_are_named_after_the_function(self) -> None:
        log = oncelog.open_blocking(":memory:")
        work = work_of(once(log)(sync_int))
        assert work.scope == f"once/{__name__}.sync_int"
        assert work.policy.name == f"once.{__name__}.sync_int"
        long = work_of(once(log, name="A" * 100)(sync_int))
        assert len(long.policy.name) == 64
        assert long.policy.name != work_of(once(log, name="a" * 100)(sync_int)).policy.name
        assert sync_int.__name__ == once(log)(sync_int).__name__

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"ignore": ["nobody"]}, "nobody"),
            ({"in_flight": "maybe"}, "in_flight"),
            ({"lease_s": 0}, "lease_s"),
            ({"lease_s": 100_000}, "lease_s"),
            ({"wait_s": -1}, "wait_s"),
            ({"wait_s": True}, "wait_s"),
            ({"remember": [3]}, "remember"),
            ({"remember": [KeyboardInterrupt]}, "remember"),
            ({"remember": ValueError}, "remember"),
            ({"ignore": "nobody"}, "ignore"),
            ({"key": "k"}, "key"),
            ({"name": 5}, "name"),
            ({"name": ""}, "name"),
            ({"name": "x" * 300}, "name"),
            ({"name": "a\0"}, "name"),
            ({"name": "\ud800"}, "name"),
        ],
    )
    def test_options_out_of_range_are_refused(self, options: dict[str, Any], said: str) -> None:
        with pytest.raises((ValueError, TypeError), match=said):
            once(oncelog.open_blocking(":memory:"), **options)(sync_int)

    def test_arguments_without_canonical_form_are_refused(self) -> None:
        log = oncelog.open_blocking(":memory:")

        @once(log, name="work")
        def work(good: int, bad: Any) -> int:
            raise AssertionError

        with log:
            for bad in (object(), {1: 2}, {"a": {2: "b"}}, {"a": [object()]}, float("nan"), "\ud800", {b"a", 1.5j}):
                with pytest.raises(CanonicalError, match=r"\$.*bad"):
                    work(1, bad)
            with pytest.raises(TypeError, match="missing"):
                work(1)  # type: ignore[call-arg]

    @pytest.mark.parametrize(
        ("key", "said"),
        [("", "1 to 255"), ("x" * 256, "1 to 255"), (3, "string"), (None, "string"), ("\ud800", "surrogates")],
    )
    def test_invalid_keys_are_refused(self, key: Any, said: str) -> None:
        log = oncelog.open_blocking(":memory:")
        with log, pytest.raises((ValueError, TypeError), match=said):
            once(log, key=lambda: key)(sync_int)()

    def test_undecorated_function_raises_type_error(self) -> None:
        with pytest.raises(TypeError, match="not decorated"):
            work_of(sync_int)
