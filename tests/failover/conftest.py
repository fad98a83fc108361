"""What the tests of fail-over share."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from oncelog.testing.cluster import Cluster, ClusterSettings, running_cluster


@pytest.fixture
def is_soak(request: pytest.FixtureRequest) -> bool:
    """Whether there is time for much more."""
    return bool(request.config.getoption("--soak"))


@pytest.fixture
def seed(request: pytest.FixtureRequest, is_soak: bool) -> int:
    """The same in every run; with --soak that of the run."""
    return int(request.config.getoption("--hypothesis-seed")) if is_soak else 1


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """One of its own, whose wires can be cut. Nobody pulls the machine's plug: what is written need not be synced."""
    directory = Path(tempfile.mkdtemp(prefix="oncelog-failover-"))
    settings = ClusterSettings(parameters={"fsync": "off", "full_page_writes": "off"})
    try:
        with running_cluster(directory, settings, is_wired=True) as found:
            yield found
    finally:
        shutil.rmtree(directory, ignore_errors=True)
