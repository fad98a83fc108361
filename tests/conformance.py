"""A pytest plugin that connects tests with the rules that they check, and generates docs/conformance.md.

A test lists its rules with ``@pytest.mark.rule("EV-3")``, and docs/rules.toml defines the rules. In every run, an
unknown rule in a test stops the collection. ``--conformance=check`` also fails the run if a proven rule has no passing
test or if the page is out of date. ``--conformance=write`` regenerates the page. Both modes need a run of all tests and
refuse options that select tests.
"""

import enum
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

DOCUMENTS = {
    "CO": "Common",
    "EV": "Events API",
    "LG": "Ledger API",
    "DE": "Deltas API",
    "RU": "Runs",
    "CH": "Chat API",
}
PLANNED = "planned"
PROVEN = "proven"

# Options that conflict with `check` and `write`, because they exclude tests or run them differently. The key is the
# name under which pytest stores the option.
SELECTING_OPTIONS = {
    "keyword": "-k",
    "markexpr": "-m",
    "lf": "--last-failed",
    "stepwise": "--stepwise",
    "deselect": "--deselect",
    "ignore": "--ignore",
    "ignore_glob": "--ignore-glob",
    "collectonly": "--collect-only",
    "check": "--check",
    "alone": "--alone",
}

INTRODUCTION = (
    "Each row is a rule of the rule catalogue. A rule is *proven* when tests show all of it, and "
    "*planned* while any part of it (an API, a store) is missing; a planned rule may have "
    "tests already. The tests listed are those that carry the rule's id and pass. This page is "
    "generated from `docs/rules.toml` and a run of all tests, by `make conformance`; `make test` "
    "fails when it is not current, or when a proven rule has no passing test."
)


class Rule(NamedTuple):
    """One rule of the catalogue."""

    rule_id: str
    meaning: str
    state: str

    @property
    def document(self) -> str:
        """Key of the rule's document in DOCUMENTS."""
        return self.rule_id.partition("-")[0]


class Outcome(enum.IntEnum):
    """The outcome of a test, from best to worst. An expected failure counts as skipped."""

    PASSED = 0
    SKIPPED = 1
    FAILED = 2


class Case(NamedTuple):
    """Outcome of one test case. A parametrised function has several cases."""

    function: str
    rule_ids: frozenset[str]
    outcome: Outcome


# --- The rules and the page ------------------------------------------------------------------


def load_rules(path: Path) -> dict[str, Rule]:
    """Return the rules by id, in file order. An invalid file is a usage error."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise pytest.UsageError(f"The rules cannot be read from {path}: {error}") from error
    return {rule_id: _parse_rule(path, rule_id, table) for rule_id, table in tables.items()}


def _parse_rule(path: Path, rule_id: str, table: object) -> Rule:
    match table:
        case {"meaning": str(meaning), "state": "planned" | "proven" as state, **others} if meaning and not others:
            rule = Rule(rule_id, meaning, state)
        case _:
            raise pytest.UsageError(
                f'{path}: {rule_id} must have a meaning and a state, "{PLANNED}" or "{PROVEN}", and nothing else.'
            )
    if rule.document not in DOCUMENTS:
        raise pytest.UsageError(f"{path}: {rule_id} has an unknown prefix. Known prefixes: {', '.join(DOCUMENTS)}.")
    return rule


def render_page(rules: Sequence[Rule], tests_by_rule: Mapping[str, Iterable[str]], to_root: str = "../") -> str:
    """Return the text of the page. `to_root` is the path from the page's directory to the root directory."""
    blocks = ["# Conformance", INTRODUCTION, count_line(rules)]
    for document, title in DOCUMENTS.items():
        rows = [_row(rule, tests_by_rule.get(rule.rule_id, ()), to_root) for rule in rules if rule.document == document]
        if rows:
            heading = ["| rule | meaning | state | tests |", "|---|---|---|---|"]
            blocks += [f"## {title}", "\n".join(heading + rows)]
    return "\n\n".join(blocks) + "\n"


def count_line(rules: Sequence[Rule]) -> str:
    """Return a sentence that states how many rules are proven."""
    return f"{sum(rule.state == PROVEN for rule in rules)} of {len(rules)} rules proven."


def _row(rule: Rule, tests: Iterable[str], to_root: str) -> str:
    # The tests ran in random order, but the page must not depend on it.
    links = ", ".join(_link(test, to_root) for test in sorted(set(tests)))
    meaning = rule.meaning.replace("|", "\\|")
    return f"| {rule.rule_id} | {meaning} | {rule.state} | {links} |"


def _link(test: str, to_root: str) -> str:
    path, _, name = test.partition("::")
    return f"[`{name}`]({to_root}{path})"


# --- The outcomes of a run -------------------------------------------------------------------


def function_of(node_id: str) -> str:
    """Return the test function of a node id, without the parameters in brackets."""
    path, separator, name = node_id.partition("::")
    return path + separator + name.partition("[")[0]


def outcomes_by_rule(cases: Iterable[Case]) -> dict[str, dict[str, Outcome]]:
    """Combine the cases into one outcome for each rule and test function.

    One failed case fails the function. A skipped case, for example for a store that is not installed, is ignored if the
    function has other cases.
    """
    gathered: dict[str, dict[str, set[Outcome]]] = defaultdict(lambda: defaultdict(set))
    for case in cases:
        for rule_id in case.rule_ids:
            gathered[rule_id][case.function].add(case.outcome)
    return {
        rule_id: {function: _combine(outcomes) for function, outcomes in functions.items()}
        for rule_id, functions in gathered.items()
    }


def _combine(outcomes: set[Outcome]) -> Outcome:
    return Outcome.FAILED if Outcome.FAILED in outcomes else min(outcomes)


def passing_tests(outcomes: Mapping[str, Mapping[str, Outcome]]) -> dict[str, list[str]]:
    """Return the passing test functions of each rule."""
    return {
        rule_id: [test for test, outcome in tests.items() if outcome is Outcome.PASSED]
        for rule_id, tests in outcomes.items()
    }


def unproven(rules: Iterable[Rule], outcomes: Mapping[str, Mapping[str, Outcome]]) -> list[str]:
    """Return a sentence for each proven rule without a passing test."""
    sentences = []
    for rule in rules:
        tests = outcomes.get(rule.rule_id, {})
        if rule.state == PROVEN and Outcome.PASSED not in tests.values():
            named = ", ".join(f"{test} ({tests[test].name.lower()})" for test in sorted(tests))
            why = f"none of its tests passed: {named}" if named else "no test names it"
            sentences.append(f"{rule.rule_id} is marked as proven, but {why}.")
    return sentences


# --- In every run: the option, the marker, the check for unknown rules -------------------------

_RULES = pytest.StashKey[dict[str, Rule]]()
# The reports contain the rule ids, because a pytest-xdist worker returns nothing else about an item.
_PROPERTY = "rule"
_DESELECTED = "conformance_deselected"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance", "conformance to the rule catalogue")
    group.addoption(
        "--conformance",
        choices=["off", "check", "write"],
        default="off",
        help="check: fail when a proven rule has no passing test or docs/conformance.md is out of date; "
        "write: regenerate docs/conformance.md; both need a run of all tests. Default: off.",
    )
    parser.addini(
        "conformance_rules",
        "The file of the rules, relative to the root directory.",
        type="string",
        default="docs/rules.toml",
    )
    parser.addini(
        "conformance_page",
        "The generated page, relative to the root directory and inside it.",
        type="string",
        default="docs/conformance.md",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "rule(*ids): the rules of docs/rules.toml that this test checks.")
    rules = load_rules(config.rootpath / config.getini("conformance_rules"))
    config.stash[_RULES] = rules
    mode: str = config.getoption("conformance")
    if mode != "off" and hasattr(config, "workerinput"):  # a pytest-xdist worker; the controller gets all reports
        config.pluginmanager.register(ConformanceWorker(config), "conformance-worker")
    elif mode != "off":
        _refuse_selection(config, mode)
        page = Path(config.getini("conformance_page"))
        run = ConformanceRun(mode, list(rules.values()), config.rootpath, page)
        config.pluginmanager.register(run, "conformance-run")


@pytest.hookimpl(tryfirst=True)  # before -k and -m, so that deselected tests are checked too
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    rules = config.stash[_RULES]
    mistakes = [mistake for item in items for mistake in _marker_errors(item, rules)]
    if mistakes:
        raise pytest.UsageError("\n".join(mistakes))
    for item in items:
        ids = {rule_id for marker in item.iter_markers("rule") for rule_id in marker.args}
        item.user_properties += [(_PROPERTY, rule_id) for rule_id in sorted(ids)]


def _marker_errors(item: pytest.Item, rules: Mapping[str, Rule]) -> list[str]:
    mistakes = []
    for marker in item.iter_markers("rule"):
        if marker.kwargs or not marker.args:
            mistakes.append(f"{item.nodeid}: the rule marker takes rule ids, at least one.")
        mistakes += [
            f"{item.nodeid}: there is no rule {rule_id!r}."
            for rule_id in marker.args
            if not isinstance(rule_id, str) or rule_id not in rules
        ]
    return mistakes


def _refuse_selection(config: pytest.Config, mode: str) -> None:
    used = [flag for name, flag in SELECTING_OPTIONS.items() if config.getoption(name, None)]
    if config.args_source is pytest.Config.ArgsSource.ARGS:
        used.append("paths")
    elif config.invocation_params.dir != config.rootpath:
        used.append("a folder other than the root")
    if used:
        raise _needs_all_tests(mode, f"this run was narrowed by {', '.join(used)}")


def _deselected(items: Sequence[pytest.Item]) -> str:
    return f"{len(items)} were deselected, the first is {items[0].nodeid}"


def _needs_all_tests(mode: str, why: str) -> pytest.UsageError:
    return pytest.UsageError(f"--conformance={mode} needs a run of all tests; {why}.")


# --- In check and write: the complete run ------------------------------------------------------


class ConformanceWorker:
    """Reports deselected tests from a pytest-xdist worker to the controller."""

    def __init__(self, config: pytest.Config) -> None:
        self._output: dict[str, Any] = config.workeroutput  # type: ignore[attr-defined]

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        if items:
            self._output[_DESELECTED] = _deselected(items)


class ConformanceRun:
    """Collects the outcomes of a complete run, and then checks or writes the page."""

    def __init__(self, mode: str, rules: Sequence[Rule], root: Path, page: Path) -> None:
        self._mode = mode
        self._rules = rules
        self._root = root
        self._page = page
        self._collected: set[str] = set()
        self._deselected = ""
        self._cases: dict[str, Case] = {}
        self._summary: list[str] = []

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        if items:
            raise _needs_all_tests(self._mode, _deselected(items))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._collected = {item.nodeid for item in session.items}

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self._collected.update(ids)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._deselected = getattr(node, "workeroutput", {}).get(_DESELECTED, self._deselected)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome = _outcome_of(report)
        if outcome is None:
            return
        # A test has several reports (setup, call, teardown, subtests). The worst one counts.
        earlier = self._cases.get(report.nodeid)
        worst = max(outcome, earlier.outcome) if earlier else outcome
        rule_ids = frozenset(str(value) for name, value in report.user_properties if name == _PROPERTY)
        self._cases[report.nodeid] = Case(function_of(report.nodeid), rule_ids, worst)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        problems = self._problems(exitstatus)
        if problems:
            self._summary = problems
            if exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
            return
        self._summary = [count_line(self._rules)]
        if self._mode == "write":
            target = self._root / self._page
            target.write_text(self._text(), encoding="utf-8", newline="\n")
            self._summary += [f"Wrote {self._page}.", *self._skipped_notes()]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("conformance")
        for line in self._summary:
            terminalreporter.write_line(line)

    def _problems(self, exitstatus: int) -> list[str]:
        done = "written" if self._mode == "write" else "checked"
        if self._deselected:
            return [str(_needs_all_tests(self._mode, self._deselected))]
        ended = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        if not ended or self._collected - self._cases.keys():
            return [f"Not all tests ran, so nothing was {done}."]
        problems = unproven(self._rules, self._outcomes())
        if exitstatus == pytest.ExitCode.TESTS_FAILED:
            # The page would otherwise omit the failed tests.
            problems.append(f"Tests failed, so {self._page} was not {done}.")
        elif self._mode == "check" and not self._is_current():
            problems.append(f"{self._page} is not current; run `make conformance`.")
            problems += self._skipped_notes()
        elif self._mode == "write" and problems:
            problems.append(f"Therefore {self._page} was not written.")
        return problems

    def _outcomes(self) -> dict[str, dict[str, Outcome]]:
        return outcomes_by_rule(self._cases.values())

    def _text(self) -> str:
        to_root = "../" * len(self._page.parent.parts)
        return render_page(self._rules, passing_tests(self._outcomes()), to_root)

    def _is_current(self) -> bool:
        target = self._root / self._page
        return target.is_file() and target.read_bytes() == self._text().encode()

    def _skipped_notes(self) -> list[str]:
        # Explain why tests are missing from the page on a machine that lacks a store.
        skipped = {
            test for tests in self._outcomes().values() for test, outcome in tests.items() if outcome is Outcome.SKIPPED
        }
        return [f"Skipped here, and so not on the page: {test}" for test in sorted(skipped)]


def _outcome_of(report: pytest.TestReport) -> Outcome | None:
    """Return the outcome that a report implies, or None for a successful setup or teardown."""
    if report.failed:
        return Outcome.FAILED
    if report.skipped or hasattr(report, "wasxfail"):
        return Outcome.SKIPPED
    return Outcome.PASSED if report.when == "call" else None
