"""The SBOM of the wheel, and the check of pinned versions against the committed advisories."""

import json
import subprocess
import sys
import zipfile
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from tools.advisories import LIST, Advisory, affected_pins, all_pins, is_affected, read_advisory, read_database
from tools.sbom import FILE_NAME, SPEC_VERSION, Pin, read_pins

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(directory)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)  # noqa: S603
    (built,) = directory.glob("*.whl")
    return built


@pytest.fixture
def sbom(wheel: Path) -> Any:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(f".dist-info/sboms/{FILE_NAME}")]
        return json.loads(archive.read(name))


def test_wheel_has_an_sbom_that_follows_the_cyclonedx_schema(sbom: Any) -> None:
    schemas = files("cyclonedx.schema") / "_res"
    names = [f"{name}.SNAPSHOT.schema.json" for name in (f"bom-{SPEC_VERSION}", "spdx", "jsf-0.82")]
    schema, *used = [json.loads((schemas / name).read_text()) for name in names]
    base = schema["$id"].rpartition("/")[0]
    registry = jsonschema_rs.Registry([(f"{base}/{name}", one) for name, one in zip(names[1:], used, strict=True)])
    jsonschema_rs.validator_for(schema, registry=registry).validate(sbom)


def test_sbom_lists_every_pinned_package_with_its_hashes(sbom: Any) -> None:
    pins = list(read_pins(ROOT / "requirements" / "runtime.txt"))
    assert len(pins) > 30
    assert [component["purl"] for component in sbom["components"]] == [pin.purl for pin in sorted(pins)]
    assert all(component["externalReferences"][0]["hashes"] for component in sbom["components"])


def test_no_pinned_version_has_a_known_advisory() -> None:
    listed = json.loads(LIST.read_text())
    assert listed["packages"]["aiohttp"]
    assert list(affected_pins(all_pins(), listed["packages"])) == []


def test_check_reports_an_affected_version() -> None:
    listed = json.loads(LIST.read_text())
    found = [advisory["id"] for _, advisory in affected_pins([Pin("aiohttp", "3.9.0", ())], listed["packages"])]
    assert "PYSEC-2024-26" in found


def advisory(events: list[dict[str, str]], **more: Any) -> Advisory | None:
    affected = {"package": {"name": "Some_Name"}, "ranges": [{"type": "ECOSYSTEM", "events": events}]}
    return read_advisory({"id": "PYSEC-1", "affected": [affected], **more}, "some-name")


@pytest.mark.parametrize(
    ("version", "expected"),
    [("0.9", False), ("1.0", True), ("1.9.9", True), ("2.0rc1", True), ("2.0", False), ("3.1", True), ("3.2", False)],
)
def test_advisory_affects_the_versions_in_its_ranges(version: str, expected: bool) -> None:
    found = advisory([{"introduced": "1.0"}, {"fixed": "2.0"}, {"introduced": "3.0"}, {"last_affected": "3.1"}])
    assert found is not None
    assert is_affected(version, found) is expected


def test_withdrawn_advisory_is_ignored() -> None:
    assert advisory([{"introduced": "0"}], withdrawn="2024-01-01T00:00:00Z") is None


def test_open_range_affects_every_version() -> None:
    found = advisory([{"introduced": "0"}])
    assert found is not None
    assert is_affected("99", found)


def test_database_is_read_by_package_name(tmp_path: Path) -> None:
    directory = tmp_path / "vulns" / "some-name"
    directory.mkdir(parents=True)
    document = {"id": "PYSEC-2", "affected": [{"package": {"name": "some-name"}, "versions": ["1.0", "1.1"]}]}
    (directory / "PYSEC-2.yaml").write_text(json.dumps(document))
    packages = read_database(tmp_path, {"some-name", "other"})
    assert list(packages) == ["some-name"]
    assert is_affected("1.1", packages["some-name"][0])
    assert not is_affected("1.2", packages["some-name"][0])
