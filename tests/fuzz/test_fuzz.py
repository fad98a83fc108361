"""A short run of the fuzzer in every test run, and a million inputs with --soak."""

from random import Random

import pytest

from fuzz.damage import apply_damage
from fuzz.fuzzer import fuzz
from fuzz.mutations import MUTATIONS, mutate
from fuzz.targets import CORPUS, TARGETS, Target

INPUTS = 30_000
SOAK_INPUTS = 1_000_000
TOTAL = sum(target.share for target in TARGETS.values())


@pytest.mark.rule("CO-33")
@pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))
def test_decoder_raises_only_documented_errors(target: Target, seed: int, is_soak: bool) -> None:
    for data in target.corpus():
        target.run(data)
    count = round((SOAK_INPUTS if is_soak else INPUTS) * target.share / TOTAL)
    fault = fuzz(target, seed, max(count, 10))
    assert fault is None, f"{fault.data!r}\n{fault.trace}"


@pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))
def test_corpus_has_inputs_that_the_decoder_accepts(target: Target) -> None:
    def is_accepted(data: bytes) -> bool:
        try:
            target.decode(data)
        except target.errors:
            return False
        return True

    assert any(map(is_accepted, target.corpus()))


def test_every_corpus_directory_belongs_to_a_target() -> None:
    assert sorted(path.name for path in CORPUS.iterdir()) == sorted(TARGETS)


def test_fuzzer_reports_an_undocumented_exception_with_its_input() -> None:
    def refuse_quotes(data: bytes) -> None:
        if b"''" in data:
            raise KeyError(data)

    fault = fuzz(Target("cursor", refuse_quotes, (ValueError,)), 1, 100_000)
    assert fault is not None
    assert b"''" in fault.data
    assert "KeyError" in fault.trace


def test_same_seed_gives_the_same_inputs() -> None:
    first, second = ([mutate(b'{"a":1}', Random(seed), [b"[]"]) for seed in range(50)] for _ in range(2))
    assert first == second
    assert len(set(first)) > 25


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_mutation_accepts_an_empty_input(mutation: object) -> None:
    assert callable(mutation)
    for seed in range(20):
        mutation(bytearray(), Random(seed), [b""])


def test_damage_program_changes_the_file_and_an_empty_program_does_not() -> None:
    file = bytes(range(256)) * 64
    assert apply_damage(file, b"") == file
    assert all(apply_damage(file, bytes([kind, 17, 1, 0, 0, 9, 9, 9])) != file for kind in (0, 1, 2, 4, 5))
