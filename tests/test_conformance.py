from pathlib import Path

import pytest

import conformance
from conformance import Case, Outcome, Rule

RULES = """\
[CO-1]
meaning = "Already proven."
state = "proven"

[CO-2]
meaning = "Not there yet."
state = "planned"

[EV-1]
meaning = "From another document."
state = "planned"
"""

PASSING = """\
import pytest

@pytest.mark.rule("CO-1")
def test_shows_it():
    pass
"""

PAGE = Path("pages/conformance.md")

# The inner runs do not need these plugins, and importing Hypothesis again would take a second.
PLUGINS = ("-p", "no:randomly", "-p", "no:hypothesispytest", "-p", "no:asyncio", "-p", "conformance")


class Project:
    """A small project with three rules. Its tests run with the plugin."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self.pytester = pytester
        self.page = pytester.path / PAGE
        self.page.parent.mkdir()
        self.add("rules.toml", RULES)
        self.add(
            "pytest.ini",
            "[pytest]\n"
            "addopts = --strict-markers\n"
            "conformance_rules = rules.toml\n"
            f"conformance_page = {PAGE.as_posix()}\n",
        )

    def add(self, name: str, text: str) -> None:
        path = self.pytester.path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def run(self, *arguments: str) -> pytest.RunResult:
        return self.pytester.runpytest_inprocess(*PLUGINS, *arguments)


@pytest.fixture
def project(pytester: pytest.Pytester) -> Project:
    return Project(pytester)


def text_of(result: pytest.RunResult) -> str:
    return result.stdout.str() + result.stderr.str()


class TestRules:
    def test_rules_file_of_this_project_is_valid(self) -> None:
        path = Path(__file__).parents[1] / "docs" / "rules.toml"
        rules = list(conformance.load_rules(path).values())
        documents = list(conformance.DOCUMENTS)

        def place(rule: Rule) -> tuple[int, int]:
            return documents.index(rule.document), int(rule.rule_id.partition("-")[2])

        assert {rule.document for rule in rules} == set(documents)
        assert [place(rule) for rule in rules] == sorted(map(place, rules))

    def test_every_rule_of_this_project_is_one_short_line(self) -> None:
        path = Path(__file__).parents[1] / "docs" / "rules.toml"
        rules = conformance.load_rules(path).values()
        assert [rule.rule_id for rule in rules if len(rule.meaning) > 120] == []
        assert [rule.rule_id for rule in rules if "\n" in rule.meaning] == []

    def test_rules_are_read_in_the_order_of_the_file(self, project: Project) -> None:
        rules = conformance.load_rules(project.pytester.path / "rules.toml")
        assert list(rules) == ["CO-1", "CO-2", "EV-1"]
        assert rules["CO-1"] == Rule("CO-1", "Already proven.", "proven")

    @pytest.mark.parametrize(
        ("text", "complaint"),
        [
            ('[CO-1]\nmeaning = "x"\nstate = "done"\n', "CO-1 must have"),
            ('[CO-1]\nstate = "proven"\n', "CO-1 must have"),
            ('[CO-1]\nmeaning = ""\nstate = "proven"\n', "CO-1 must have"),
            ('[CO-1]\nmeaning = "x"\nstate = "proven"\nnote = "y"\n', "CO-1 must have"),
            ("CO-1 = 3\n", "CO-1 must have"),
            ('[XX-1]\nmeaning = "x"\nstate = "proven"\n', "XX-1 has an unknown prefix"),
            ("[CO-1\n", "cannot be read"),
        ],
        ids=["state", "no meaning", "empty meaning", "more", "no table", "document", "not toml"],
    )
    def test_invalid_rules_file_stops_the_run(self, project: Project, text: str, complaint: str) -> None:
        project.add("rules.toml", text)
        result = project.run()
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        assert complaint in text_of(result)

    def test_missing_rules_file_stops_the_run(self, project: Project) -> None:
        (project.pytester.path / "rules.toml").unlink()
        result = project.run()
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        assert "cannot be read" in text_of(result)


class TestPage:
    def test_page_has_one_table_per_document(self) -> None:
        rules = [
            Rule("CO-1", "One | two.", "proven"),
            Rule("CO-2", "Three.", "planned"),
            Rule("CH-1", "Four.", "planned"),
        ]
        tests = {"CO-1": ["tests/a.py::test_b", "tests/a.py::test_a"], "CH-1": ["t.py::C::test_c"]}
        assert conformance.render_page(rules, tests) == (
            "# Conformance\n\n"
            f"{conformance.INTRODUCTION}\n\n"
            "1 of 3 rules proven.\n\n"
            "## Common\n\n"
            "| rule | meaning | state | tests |\n"
            "|---|---|---|---|\n"
            "| CO-1 | One \\| two. | proven |"
            " [`test_a`](../tests/a.py), [`test_b`](../tests/a.py) |\n"
            "| CO-2 | Three. | planned |  |\n\n"
            "## Chat API\n\n"
            "| rule | meaning | state | tests |\n"
            "|---|---|---|---|\n"
            "| CH-1 | Four. | planned | [`C::test_c`](../t.py) |\n"
        )

    @pytest.mark.parametrize(
        ("node_id", "function"),
        [
            ("tests/a.py::test_a", "tests/a.py::test_a"),
            ("tests/a.py::test_a[x]", "tests/a.py::test_a"),
            ("tests/a.py::TestB::test_a[x::[y]]", "tests/a.py::TestB::test_a"),
            ("tests/[odd]/a.py::test_a[x]", "tests/[odd]/a.py::test_a"),
        ],
    )
    def test_cases_are_combined_into_their_function(self, node_id: str, function: str) -> None:
        assert conformance.function_of(node_id) == function

    @pytest.mark.parametrize(
        ("outcomes", "folded"),
        [
            ([Outcome.PASSED, Outcome.SKIPPED], Outcome.PASSED),
            ([Outcome.SKIPPED, Outcome.SKIPPED], Outcome.SKIPPED),
            ([Outcome.PASSED, Outcome.FAILED], Outcome.FAILED),
            ([Outcome.SKIPPED, Outcome.FAILED], Outcome.FAILED),
        ],
    )
    def test_function_passes_when_a_case_passes_and_none_fails(self, outcomes: list[Outcome], folded: Outcome) -> None:
        cases = [Case("a.py::test_a", frozenset({"CO-1"}), outcome) for outcome in outcomes]
        for order in (cases, cases[::-1]):
            assert conformance.outcomes_by_rule(order) == {"CO-1": {"a.py::test_a": folded}}

    def test_only_cases_with_the_marker_prove_a_rule(self) -> None:
        cases = [
            Case("a.py::test_a", frozenset({"CO-1"}), Outcome.PASSED),
            Case("a.py::test_a", frozenset({"CO-2"}), Outcome.SKIPPED),
        ]
        outcomes = conformance.outcomes_by_rule(cases)
        assert conformance.passing_tests(outcomes) == {"CO-1": ["a.py::test_a"], "CO-2": []}


class TestMarker:
    @pytest.mark.parametrize("mode", ["off", "check", "write"])
    def test_unknown_rule_stops_the_collection(self, project: Project, mode: str) -> None:
        project.add(
            "test_a.py",
            "import pytest\n@pytest.mark.rule('CO-1', 'CO-99')\ndef test_names_it():\n    open('ran', 'w').close()\n",
        )
        result = project.run(f"--conformance={mode}")
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        assert "test_a.py::test_names_it: there is no rule 'CO-99'." in text_of(result)
        assert "'CO-1'" not in text_of(result)
        assert not (project.pytester.path / "ran").exists()
        assert not project.page.exists()

    def test_unknown_rule_stops_the_run_even_if_its_test_is_deselected(self, project: Project) -> None:
        unknown = PASSING.replace("CO-1", "CO-99").replace("test_shows_it", "test_hidden")
        project.add("test_a.py", PASSING)
        project.add("test_b.py", unknown)
        result = project.run("-k", "test_shows_it")
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        assert "test_b.py::test_hidden: there is no rule 'CO-99'." in text_of(result)

    @pytest.mark.parametrize("arguments", ["", "()", "(id='CO-1')", "('CO-1', why='because')"])
    def test_marker_needs_at_least_one_id(self, project: Project, arguments: str) -> None:
        project.add("test_a.py", PASSING.replace('("CO-1")', arguments))
        result = project.run()
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        assert "test_a.py::test_shows_it: the rule marker takes rule ids" in text_of(result)

    @pytest.mark.parametrize("argument", ["3", "['CO-1']", "None"])
    def test_marker_accepts_only_strings(self, project: Project, argument: str) -> None:
        project.add("test_a.py", PASSING.replace('"CO-1"', argument))
        result = project.run()
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        assert f"test_a.py::test_shows_it: there is no rule {argument}." in text_of(result)

    def test_reports_contain_the_rule_ids(self, project: Project) -> None:
        project.add(
            "test_a.py",
            "import pytest\n"
            "pytestmark = pytest.mark.rule('EV-1')\n"
            "@pytest.mark.rule('CO-2', 'EV-1')\n"
            "class TestB:\n"
            "    @pytest.mark.rule('CO-1')\n"
            "    def test_c(self): pass\n",
        )
        run = project.pytester.inline_run(*PLUGINS)
        reports = run.getreports("pytest_runtest_logreport")
        expected = [("rule", "CO-1"), ("rule", "CO-2"), ("rule", "EV-1")]
        assert [report.user_properties for report in reports] == [expected] * 3

    def test_marker_and_option_have_a_help_text(self, project: Project) -> None:
        assert "@pytest.mark.rule(*ids): the rules" in text_of(project.run("--markers"))
        assert "--conformance={off,check,write}" in text_of(project.run("--help"))


class TestWrite:
    def test_written_page_passes_the_check(self, project: Project) -> None:
        project.add("folder/test_a.py", PASSING)
        project.add("test_b.py", PASSING.replace("CO-1", "CO-2"))
        written = project.run("--conformance=write")
        assert written.ret == pytest.ExitCode.OK
        assert "Wrote pages/conformance.md." in text_of(written)
        page = project.page.read_text(encoding="utf-8")
        assert "\n1 of 3 rules proven.\n" in page
        assert "| proven | [`test_shows_it`](../folder/test_a.py) |\n" in page
        assert "| planned | [`test_shows_it`](../test_b.py) |\n" in page
        assert "| From another document. | planned |  |\n" in page

        checked = project.run("--conformance=check")
        assert checked.ret == pytest.ExitCode.OK
        assert "1 of 3 rules proven." in text_of(checked)
        assert "Wrote" not in text_of(checked)

    def test_links_are_relative_to_the_page(self, project: Project) -> None:
        project.add("test_a.py", PASSING)
        assert project.run("--conformance=write", "-o", "conformance_page=page.md").ret == 0
        page = (project.pytester.path / "page.md").read_text(encoding="utf-8")
        assert "[`test_shows_it`](test_a.py)" in page
        assert not project.page.exists()

    def test_page_does_not_depend_on_the_order_of_tests(self, project: Project) -> None:
        project.add(
            "test_a.py",
            "import pytest\n"
            "@pytest.mark.rule('CO-1')\n"
            "@pytest.mark.parametrize('n', [1, 2])\n"
            "def test_b(n): pass\n"
            "@pytest.mark.rule('CO-1')\n"
            "def test_a(): pass\n",
        )
        project.add("test_b.py", PASSING)
        assert project.run("--conformance=write").ret == 0
        forwards = project.page.read_bytes()
        project.page.unlink()

        backwards = "def pytest_collection_modifyitems(items): items.reverse()\n"
        project.add("conftest.py", backwards)
        result = project.run("--conformance=write", "-v")
        assert text_of(result).index("test_b[2] PASSED") < text_of(result).index("test_b[1] PASSED")
        assert project.page.read_bytes() == forwards
        links = "[`test_a`](../test_a.py), [`test_b`](../test_a.py), [`test_shows_it`](../test_b.py)"
        assert f"| proven | {links} |" in forwards.decode()

    def test_page_lists_only_passed_tests(self, project: Project) -> None:
        project.add(
            "test_a.py",
            PASSING + "@pytest.mark.rule('CO-1')\n"
            "@pytest.mark.skip\n"
            "def test_skipped(): pass\n"
            "@pytest.mark.rule('CO-1')\n"
            "@pytest.mark.xfail\n"
            "def test_expected_to_fail(): assert False\n",
        )
        result = project.run("--conformance=write")
        assert result.ret == pytest.ExitCode.OK
        page = project.page.read_text(encoding="utf-8")
        assert "| proven | [`test_shows_it`](../test_a.py) |\n" in page
        assert "not on the page: test_a.py::test_skipped" in text_of(result)
        assert "not on the page: test_a.py::test_expected_to_fail" in text_of(result)

    @pytest.mark.parametrize(
        ("test", "arguments", "complaint"),
        [
            ("def test_b(): pass", [], "no test names it.\nTherefore pages/conformance.md was not written."),
            (PASSING + "def test_b(): assert False", [], "Tests failed, so pages/conformance.md"),
            ("def test_b(): assert False\n" + PASSING, ["-x"], "Not all tests ran"),
            (PASSING + "def test_b(): pytest.exit('', returncode=0)", [], "Not all tests ran"),
            (PASSING, ["--setup-only"], "Not all tests ran"),
            (PASSING + "import no_such_module", [], "Not all tests ran"),
            ("", [], "Not all tests ran"),
        ],
        ids=["no test", "a failure", "stopped", "left", "not called", "not collected", "nothing"],
    )
    def test_incomplete_run_does_not_write_the_page(
        self, project: Project, test: str, arguments: list[str], complaint: str
    ) -> None:
        project.page.write_text("as it was", encoding="utf-8")
        project.add("test_a.py", test)
        result = project.run("--conformance=write", *arguments)
        assert result.ret != pytest.ExitCode.OK
        assert complaint in text_of(result)
        assert project.page.read_text(encoding="utf-8") == "as it was"


class TestCheck:
    def test_proven_rule_without_a_test_fails_the_run(self, project: Project) -> None:
        project.add("test_a.py", PASSING.replace("CO-1", "CO-2"))
        result = project.run("--conformance=check")
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        result.stdout.fnmatch_lines(["*= conformance =*", "CO-1 is marked as proven, but no test names it."])

    @pytest.mark.parametrize(
        ("body", "outcome"),
        [
            ("def test_b(): pytest.skip()", "skipped"),
            ("@pytest.mark.skip\ndef test_b(): pass", "skipped"),
            ("@pytest.mark.xfail\ndef test_b(): assert False", "skipped"),
            ("@pytest.mark.xfail\ndef test_b(): pass", "skipped"),
            ("@pytest.mark.xfail(strict=True)\ndef test_b(): pass", "failed"),
            ("def test_b(): assert False", "failed"),
            ("def test_b(no_such_fixture): pass", "failed"),
            ("def test_b(fails_at_the_end): pass", "failed"),
            ("def test_b(subtests):\n    with subtests.test(): assert False", "failed"),
            ("def test_b(subtests):\n    with subtests.test(): pytest.skip()", "skipped"),
            ("@pytest.mark.parametrize('n', [1, 2])\ndef test_b(n): assert n == 1", "failed"),
        ],
        ids=[
            "skips",
            "marked skip",
            "expected to fail",
            "passes unexpectedly",
            "strictly unexpected",
            "fails",
            "no fixture",
            "tear-down",
            "subtest",
            "subtest skips",
            "one case",
        ],
    )
    def test_only_a_passing_test_proves_a_rule(self, project: Project, body: str, outcome: str) -> None:
        project.add(
            "test_a.py",
            "import pytest\n"
            "@pytest.fixture\n"
            "def fails_at_the_end():\n"
            "    yield\n"
            "    assert False\n"
            f"@pytest.mark.rule('CO-1')\n{body}\n",
        )
        result = project.run("--conformance=check")
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        sentence = f"but none of its tests passed: test_a.py::test_b ({outcome})."
        assert f"CO-1 is marked as proven, {sentence}" in text_of(result)

    def test_passing_test_proves_a_rule_despite_a_skipped_one(self, project: Project) -> None:
        project.add(
            "test_a.py",
            PASSING + "@pytest.mark.rule('CO-1')\ndef test_b(): pytest.skip()\n",
        )
        assert project.run("--conformance=write").ret == pytest.ExitCode.OK
        assert project.run("--conformance=check").ret == pytest.ExitCode.OK

    def test_planned_rule_needs_no_passing_test(self, project: Project) -> None:
        project.add("rules.toml", RULES.replace('"proven"', '"planned"'))
        project.add("test_a.py", "import pytest\n@pytest.mark.rule('CO-1')\ndef test_b(): pass\n")
        assert project.run("--conformance=write").ret == pytest.ExitCode.OK
        assert "0 of 3 rules proven." in project.page.read_text(encoding="utf-8")

    def test_missing_page_fails_the_run(self, project: Project) -> None:
        project.add("test_a.py", PASSING)
        result = project.run("--conformance=check")
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        assert "pages/conformance.md is not current; run `make conformance`." in text_of(result)
        assert not project.page.exists()

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("rules.toml", RULES.replace("Not there yet.", "Not yet there.")),
            ("test_b.py", PASSING.replace("CO-1", "EV-1")),
        ],
        ids=["rule", "test"],
    )
    def test_outdated_page_fails_the_run(self, project: Project, name: str, text: str) -> None:
        project.add("test_a.py", PASSING)
        assert project.run("--conformance=write").ret == pytest.ExitCode.OK
        project.add(name, text)
        result = project.run("--conformance=check")
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        assert "pages/conformance.md is not current; run `make conformance`." in text_of(result)

    def test_difference_message_mentions_skipped_tests(self, project: Project) -> None:
        planned = "@pytest.mark.rule('CO-2')\ndef test_needs_a_store(): "
        project.add("test_a.py", PASSING + planned + "pass\n")
        assert project.run("--conformance=write").ret == pytest.ExitCode.OK
        project.add("test_a.py", PASSING + planned + "pytest.skip('no store')\n")
        result = project.run("--conformance=check")
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        note = "Skipped here, and so not on the page: test_a.py::test_needs_a_store"
        assert note in text_of(result)

    def test_failed_run_does_not_suggest_writing_the_page(self, project: Project) -> None:
        project.add("test_a.py", PASSING + "def test_b(): assert False\n")
        result = project.run("--conformance=check")
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        assert "Tests failed, so pages/conformance.md was not checked." in text_of(result)
        assert "make conformance" not in text_of(result)


class TestSeveralProcesses:
    """Runs with pytest-xdist: workers collect and run the tests, and the controller checks the page."""

    OTHERS = "".join(f"def test_{number}(): pass\n" for number in range(5))

    @pytest.fixture(autouse=True)
    def _without_other_plugins(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # otherwise each worker imports them

    def run(self, project: Project, mode: str, workers: int = 1) -> pytest.RunResult:
        return project.run(f"--conformance={mode}", "-p", "xdist.plugin", "-n", str(workers))

    def test_page_is_the_same_as_with_one_process(self, project: Project) -> None:
        project.add("test_a.py", PASSING + self.OTHERS)
        assert project.run("--conformance=write").ret == pytest.ExitCode.OK
        result = self.run(project, "check", workers=2)
        assert result.ret == pytest.ExitCode.OK
        assert "1 of 3 rules proven." in text_of(result)

    def test_rule_without_a_test_fails_the_run(self, project: Project) -> None:
        project.add("test_a.py", self.OTHERS)
        result = self.run(project, "check")
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        assert "CO-1 is marked as proven, but no test names it." in text_of(result)

    def test_missing_reports_are_found(self, project: Project) -> None:
        project.add("test_a.py", PASSING + self.OTHERS)
        project.add(
            "conftest.py",
            "def pytest_runtest_protocol(item):\n    return True if item.name == 'test_0' else None\n",
        )
        result = self.run(project, "write")
        assert "Not all tests ran, so nothing was written." in text_of(result)
        assert not project.page.exists()

    def test_tests_deselected_in_a_worker_are_reported(self, project: Project) -> None:
        project.add("test_a.py", PASSING)
        project.add("test_b.py", "def test_b(): pass\n")
        project.add(
            "conftest.py",
            "def pytest_collection_modifyitems(config, items):\n"
            "    config.hook.pytest_deselected(items=[items.pop()])\n",
        )
        result = self.run(project, "write")
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        assert "1 were deselected, the first is test_b.py::test_b." in text_of(result)
        assert not project.page.exists()


class TestSelection:
    @pytest.mark.parametrize("mode", ["check", "write"])
    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            (["-k", "shows"], "-k"),
            (["-m", "rule"], "-m"),
            (["test_a.py"], "paths"),
            (["test_a.py::test_shows_it"], "paths"),
            (["--lf"], "--last-failed"),
            (["--sw"], "--stepwise"),
            (["--deselect", "test_b.py"], "--deselect"),
            (["--ignore", "test_b.py"], "--ignore"),
            (["--ignore-glob", "test_b*"], "--ignore-glob"),
            (["--collect-only"], "--collect-only"),
        ],
    )
    def test_selection_of_tests_is_refused(self, project: Project, mode: str, arguments: list[str], named: str) -> None:
        project.add("test_a.py", PASSING)
        project.add("test_b.py", "def test_b(): pass\n")
        result = project.run(f"--conformance={mode}", *arguments)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        complaint = f"--conformance={mode} needs a run of all tests; this run was narrowed by {named}."
        assert complaint in text_of(result)
        assert not project.page.exists()

    @pytest.mark.parametrize("mode", ["check", "write"])
    def test_tests_deselected_by_a_plugin_are_refused(self, project: Project, mode: str) -> None:
        project.add("test_a.py", PASSING)
        project.add("test_b.py", "def test_b(): pass\n")
        project.add(
            "conftest.py",
            "def pytest_collection_modifyitems(config, items):\n"
            "    config.hook.pytest_deselected(items=[items.pop()])\n",
        )
        result = project.run(f"--conformance={mode}")
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        assert "1 were deselected, the first is test_b.py::test_b." in text_of(result)
        assert not project.page.exists()

    def test_run_from_another_directory_is_refused(self, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
        project.add("folder/test_a.py", PASSING)
        monkeypatch.chdir(project.pytester.path / "folder")
        result = project.run("--conformance=write")
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        assert "narrowed by a folder other than the root." in text_of(result)
        assert not project.page.exists()

    def test_configured_test_paths_count_as_all_tests(self, project: Project) -> None:
        project.add("suite/test_a.py", PASSING)
        ini = project.pytester.path / "pytest.ini"
        ini.write_text(ini.read_text(encoding="utf-8") + "testpaths = suite\n", encoding="utf-8")
        assert project.run("--conformance=write").ret == pytest.ExitCode.OK
        assert "(../suite/test_a.py)" in project.page.read_text(encoding="utf-8")

    def test_selection_without_the_option_runs_unchecked(self, project: Project) -> None:
        project.add("test_a.py", PASSING)
        project.add("test_b.py", "def test_b(): pass\n")
        result = project.run("-k", "test_b")
        assert result.ret == pytest.ExitCode.OK
        result.assert_outcomes(passed=1, deselected=1)
        assert "conformance =" not in text_of(result)
        assert not project.page.exists()
