"""Fixtures for tests that run the previous version."""

import zipfile

import pytest

from previous.previous_version import WHEEL, PreviousVersion


@pytest.fixture(scope="session")
def previous(tmp_path_factory: pytest.TempPathFactory) -> PreviousVersion:
    """The previous version, unpacked once per test process."""
    unpacked = tmp_path_factory.mktemp("previous") / "site"
    with zipfile.ZipFile(WHEEL) as wheel:
        wheel.extractall(unpacked)
    return PreviousVersion(unpacked)
