"""How much randomness the tests use.

By default every run is the same run: hypothesis derives its examples from the test itself. `--soak` draws new ones,
many more of them, and prints the seed; a failure is repeated with `--soak --hypothesis-seed=N`.
"""

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("default", derandomize=True, deadline=None, database=None, print_blob=True)
settings.register_profile(
    "soak",
    max_examples=5000,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="many more generated cases, from a new seed that is printed")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("soak" if config.getoption("--soak") else "default")


def pytest_report_header(config: pytest.Config) -> str:
    if not config.getoption("--soak"):
        return "generated cases: the same in every run"
    return "generated cases: new in every run (--soak)"
