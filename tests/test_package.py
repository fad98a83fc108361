"""The wheel and the sdist: metadata, links, version, and reproducible builds."""

import email
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from pathlib import Path

import pytest

import oncelog
from tools.package_metadata import make_description, make_urls, read_project_url

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ADDRESS = "https://code.example.org/oncelog"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(directory)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)  # noqa: S603
    return directory


@pytest.fixture
def metadata(dist: Path) -> Message:
    with zipfile.ZipFile(dist / f"oncelog-{PROJECT['version']}-py3-none-any.whl") as wheel:
        return email.message_from_bytes(wheel.read(f"oncelog-{PROJECT['version']}.dist-info/METADATA"))


def test_build_creates_only_the_files_of_a_release(dist: Path) -> None:
    name = f"oncelog-{PROJECT['version']}"
    assert sorted(file.name for file in dist.iterdir()) == [f"{name}-py3-none-any.whl", f"{name}.tar.gz"]


def test_sdist_contains_all_files_for_a_build(dist: Path) -> None:
    with tarfile.open(dist / f"oncelog-{PROJECT['version']}.tar.gz") as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert names >= {"pyproject.toml", "README.md", "LICENSE", "tools/sbom.py", "tools/package_metadata.py"}
    assert names >= {"requirements/runtime.txt", "src/oncelog/__init__.py", "src/oncelog/py.typed"}
    assert not [name for name in names if name.endswith((".pyc", ".db"))]


def test_wheel_contains_only_the_package_and_its_script(dist: Path) -> None:
    name = f"oncelog-{PROJECT['version']}"
    with zipfile.ZipFile(dist / f"{name}-py3-none-any.whl") as wheel:
        names = wheel.namelist()
    assert {one.partition("/")[0] for one in names} == {"oncelog", "oncelog_command.py", f"{name}.dist-info"}
    assert {f"{name}.dist-info/licenses/LICENSE", "oncelog/py.typed"} <= set(names)


def test_description_has_no_relative_links(metadata: Message) -> None:
    text = metadata.get_payload()
    assert isinstance(text, str)
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "# Oncelog" in text
    assert "](docs/" not in text
    assert "the tutorial" in text


def test_classifiers_list_every_python_version_since_the_oldest_supported_one(metadata: Message) -> None:
    classifiers = metadata.get_all("Classifier") or []
    minors = [one.rpartition("3.")[2] for one in classifiers if "Python :: 3." in one]
    assert minors == [str(minor) for minor in range(11, 11 + len(minors))]
    assert metadata["Requires-Python"] == ">=3.11"


def test_links_point_to_the_repository_given_to_the_build() -> None:
    text = "[a](docs/a.md#part) [b](https://example.org) [c](#here)"
    assert make_description(text, None) == "a [b](https://example.org) [c](#here)"
    expected = f"[a]({ADDRESS}/blob/main/docs/a.md#part) [b](https://example.org) [c](#here)"
    assert make_description(text, ADDRESS) == expected
    assert make_urls(None) == {}
    urls = make_urls(ADDRESS)
    assert urls["Repository"] == ADDRESS
    for url in set(urls.values()) - {ADDRESS}:
        assert (ROOT / url.removeprefix(f"{ADDRESS}/blob/main/")).is_file()


def test_address_of_the_repository_is_checked() -> None:
    assert read_project_url({}) is None
    assert read_project_url({"PROJECT_URL": f"{ADDRESS}/"}) == ADDRESS
    with pytest.raises(ValueError, match="PROJECT_URL must begin with https://, not 'ftp://x'"):
        read_project_url({"PROJECT_URL": "ftp://x"})


def test_distribution_version_equals_the_package_version() -> None:
    assert oncelog.__version__ == PROJECT["version"]


def test_newest_section_of_the_changelog_is_for_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    sections = [line for line in changelog.splitlines() if line.startswith("## ")]
    assert sections[0] == "## [Unreleased]"
    assert sections[1].startswith(f"## [{PROJECT['version']}] - ")
