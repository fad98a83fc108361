"""`plan` agrees with its model (`plan_model`) on generated histories."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.plan_comparison import (
    check_read_sets,
    check_retries,
    compare,
)
from core.plan_generator import History, HistoryGenerator, Step, draw_user_policies, histories, numbers_below
from oncelog.core.policy import (
    BUILT_IN_POLICIES,
    CHAT,
    DELTAS,
    EVENTS,
    LEDGER,
    RUNS,
)
from oncelog.core.values import (
    Reason,
)

__all__ = ["HistoryGenerator", "Step", "draw_user_policies", "numbers_below"]


@pytest.mark.rule("EV-3", "EV-4", "EV-5")
@given(histories(EVENTS))
def test_events_agree_with_the_model(history: History) -> None:
    compare(history)


@pytest.mark.rule("LG-2", "LG-3", "LG-4", "LG-5", "LG-6", "LG-7", "LG-9")
@pytest.mark.rule("LG-11", "LG-12", "LG-13", "LG-15", "LG-16", "LG-17")
@given(histories(LEDGER))
def test_transactions_agree_with_the_model(history: History) -> None:
    compare(history)


@pytest.mark.rule("DE-4", "DE-6", "DE-7", "DE-8")
@given(histories(DELTAS))
def test_deltas_agree_with_the_model(history: History) -> None:
    compare(history)


@pytest.mark.rule("RU-6", "RU-7", "RU-8")
@given(histories(RUNS))
def test_runs_agree_with_the_model(history: History) -> None:
    compare(history)


@pytest.mark.rule("CH-2", "CH-4", "CH-5", "CH-8", "CH-9")
@given(histories(CHAT))
def test_chats_agree_with_the_model(history: History) -> None:
    compare(history)


@pytest.mark.rule("CO-14", "CO-18", "CO-19", "CO-42", "CH-2")
@given(histories(*BUILT_IN_POLICIES))
def test_all_built_in_policies_on_one_log_agree_with_the_model(history: History) -> None:
    compare(history)


@pytest.mark.rule("CO-14", "CO-15", "CO-17", "CO-18", "CO-19", "CO-42")
@given(histories())
def test_user_policies_agree_with_the_model(history: History) -> None:
    compare(history)


@pytest.mark.rule("CO-15")
@given(st.one_of(histories(*BUILT_IN_POLICIES), histories()))
def test_batch_without_new_writes_changes_nothing(history: History) -> None:
    check_retries(history)


@given(st.one_of(histories(*BUILT_IN_POLICIES), histories()))
def test_plan_needs_only_its_read_set(history: History) -> None:
    check_read_sets(history)


@pytest.mark.rule("DE-7", "LG-2", "RU-7")
def test_generated_histories_reach_every_verdict_and_every_reason(is_soak: bool) -> None:
    """The seed is fixed. A case that is never generated is not tested, so each case must occur often."""
    verdicts: Counter[str] = Counter()
    random = Random(20)
    for policies in [*((policy,) for policy in BUILT_IN_POLICIES), BUILT_IN_POLICIES, ()]:
        for _ in range(250 if is_soak else 150):
            history = HistoryGenerator(random.randrange, policies or draw_user_policies(random.randrange)).history()
            verdicts += compare(history)
            check_read_sets(history)
            check_retries(history)
    kinds = {"Committed", "Replayed", "Replayed with a mismatch", "Granted"}
    kinds |= {"Applied True", "Applied False"} | {reason.name for reason in Reason}
    kinds -= {"TOO_MANY_COLUMNS", "ROW_TOO_LARGE"}  # too large for the generator; tested in test_plan_checks.py
    kinds -= {"BUSY", "READ_ONLY", "UNSTORABLE"}  # returned by the engine, never by `plan`
    kinds -= {"QUOTA_EXCEEDED"}  # these histories have no tenants; those of test_agreement.py do
    kinds -= {"WRONG_SCOPE"}  # needs tenants; tested in rules/test_event_id_scopes.py
    assert verdicts.keys() == kinds
    assert min(verdicts.values()) >= (20 if is_soak else 12), verdicts
