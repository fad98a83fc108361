"""How much randomness the tests use.

By default every run is the same run: hypothesis derives its examples from the test itself. `--soak` draws new ones,
many more of them, from a seed that it prints; `--soak --hypothesis-seed=N` repeats that run.
"""

import secrets

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("default", derandomize=True, deadline=None, database=None, print_blob=True)
settings.register_profile(
    "soak",
    max_examples=1500,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="many more generated cases, from a new seed that is printed")


@pytest.hookimpl(tryfirst=True)  # before hypothesis looks at its seed
def pytest_configure(config: pytest.Config) -> None:
    is_soak = config.getoption("--soak")
    settings.load_profile("soak" if is_soak else "default")
    if is_soak and config.getoption("--hypothesis-seed") is None:
        config.option.hypothesis_seed = str(secrets.randbelow(2**32))


def pytest_report_header(config: pytest.Config) -> str:
    if config.getoption("--soak"):
        return f"generated cases: new ones, --soak --hypothesis-seed={config.getoption('--hypothesis-seed')}"
    return "generated cases: the same in every run"
