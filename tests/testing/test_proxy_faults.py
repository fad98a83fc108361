"""The proxy's random decisions depend only on the seed."""

from collections import Counter
from dataclasses import replace

import pytest

from oncelog.testing.proxy_faults import (
    CALM,
    DUPLICATED_BYTES_MAX,
    NO_FAULT,
    Decision,
    Direction,
    Faults,
    FaultSampler,
    Incident,
    should_refuse,
)
from oncelog.testing.proxy_frames import Unit

TEXT = Unit(100, is_whole_text=True)
HEAD = Unit(100, is_head=True)
FREQUENT = Faults(cut_rate=0.3, stall_rate=0.3, delay_rate=0.5, duplicate_rate=0.5)


def decisions(
    seed: int = 1,
    number: int = 1,
    direction: Direction = Direction.TO_SERVER,
    faults: Faults = FREQUENT,
    unit: Unit = TEXT,
    count: int = 2000,
) -> list[Decision]:
    chance = FaultSampler(seed, number, direction)
    return [chance.decide(unit, faults) for _ in range(count)]


def incidents(found: list[Decision]) -> Counter[Incident]:
    return Counter(one.breaks.incident for one in found if one.breaks is not None)


def test_decisions_depend_on_seed_connection_and_direction() -> None:
    assert decisions() == decisions()
    others = [decisions(seed=2), decisions(number=2), decisions(direction=Direction.TO_CLIENT)]
    assert all(decisions() != other for other in others)


def test_decisions_of_a_seed_never_change() -> None:
    """If this test fails, the seeds in old failure reports can no longer be replayed."""
    first = [one.breaks for one in decisions(seed=7, count=6)]
    assert [(one.incident.name, one.at) if one else None for one in first] == [
        ("CUT_AT_ANSWER", 100),
        None,
        None,
        ("STALLED", 94),
        ("CUT_AT_ANSWER", 100),
        None,
    ]


def test_changing_one_rate_does_not_affect_other_faults() -> None:
    without = decisions(faults=replace(FREQUENT, cut_rate=0, stall_rate=0))
    assert [one.delay_s for one in without] == [one.delay_s for one in decisions()]


def test_faults_occur_at_their_rates() -> None:
    found = decisions()
    cuts = incidents(found)
    assert cuts.total() == pytest.approx(2000 * (0.3 + 0.7 * 0.3), rel=0.1)
    assert cuts[Incident.CUT_AT_ANSWER] == pytest.approx(300, rel=0.2)
    assert cuts[Incident.CUT_IN_FRAME] == pytest.approx(150, rel=0.25)
    assert cuts[Incident.CUT_AFTER_FRAME] == pytest.approx(150, rel=0.25)
    assert sum(one.delay_s > 0 for one in found) == pytest.approx(1000, rel=0.1)
    assert max(one.delay_s for one in found) <= 0.02
    breaks = [one.breaks for one in found if one.breaks is not None]
    assert {one.is_reset for one in breaks} == {False, True}
    assert {one.both_ways for one in breaks if one.incident is Incident.STALLED} == {False, True}
    assert {one.at for one in breaks if one.incident is Incident.CUT_IN_FRAME} >= {0, 99}
    assert all(one.at == 100 for one in breaks if one.incident in (Incident.CUT_AT_ANSWER, Incident.CUT_AFTER_FRAME))


def test_calm_has_no_faults() -> None:
    assert set(decisions(faults=CALM)) == {NO_FAULT}
    assert not any(should_refuse(1, number, CALM) for number in range(1000))


def test_cut_at_answer_applies_to_clients_and_cut_in_head_to_heads() -> None:
    assert Incident.CUT_AT_ANSWER not in incidents(decisions(direction=Direction.TO_CLIENT))
    heads = incidents(decisions(unit=HEAD))
    assert heads[Incident.CUT_IN_HEAD] > 0
    assert heads[Incident.CUT_IN_FRAME] == 0


def test_only_whole_texts_up_to_a_maximum_size_are_duplicated() -> None:
    always = replace(CALM, duplicate_rate=1)
    for unit in (HEAD, Unit(100), Unit(DUPLICATED_BYTES_MAX + 1, is_whole_text=True)):
        assert set(decisions(faults=always, unit=unit)) == {NO_FAULT}
    for unit in (TEXT, Unit(DUPLICATED_BYTES_MAX, is_whole_text=True)):
        assert set(decisions(faults=always, unit=unit)) == {Decision(is_duplicated=True)}


def test_refusals_are_determined_by_the_connection_number() -> None:
    refused = [number for number in range(1000) if should_refuse(3, number, replace(CALM, refuse_rate=0.2))]
    assert len(refused) == pytest.approx(200, rel=0.2)
    assert refused == [number for number in range(1000) if should_refuse(3, number, replace(CALM, refuse_rate=0.2))]


@pytest.mark.parametrize("wrong", [{"cut_rate": 1.1}, {"refuse_rate": -0.1}, {"stall_ms_max": -1}])
def test_invalid_rates_and_times_are_refused(wrong: dict[str, float]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name} must be 0"):
        Faults(**wrong)  # type: ignore[arg-type]
