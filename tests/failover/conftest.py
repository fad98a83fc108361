"""Fixtures of the failover tests."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from oncelog.testing.cluster import Cluster, ClusterSettings, run_cluster


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A cluster whose network can be cut. PostgreSQL runs without fsync, because the machine does not lose power."""
    directory = Path(tempfile.mkdtemp(prefix="oncelog-failover-"))
    settings = ClusterSettings(parameters={"fsync": "off", "full_page_writes": "off"})
    try:
        with run_cluster(directory, settings, is_wired=True) as found:
            yield found
    finally:
        shutil.rmtree(directory, ignore_errors=True)
