"""Build the software bill of materials (SBOM) that every wheel contains.

The SBOM is a CycloneDX document. It lists the versions that the tests ran with, as pinned in requirements/runtime.txt,
because the wheel itself accepts version ranges. The document depends only on its inputs, so builds are reproducible.
"""

import json
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SPEC_VERSION: Final = "1.6"
FILE_NAME: Final = "oncelog.cdx.json"
_NAMESPACE: Final = uuid.UUID("6f1b0f5e-6d0a-4a4e-9d0e-5f6a3f0c7f11")
_PIN: Final = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^\]]*\])?==([^\s;\\]+)")
_HASH: Final = re.compile(r"--hash=sha256:([0-9a-f]{64})")


class Pin(NamedTuple):
    """A pinned package: its normalised name, its version and the SHA-256 of each distribution."""

    name: str
    version: str
    hashes: tuple[str, ...]

    @property
    def purl(self) -> str:
        return f"pkg:pypi/{self.name}@{self.version}"


def read_pins(file: Path) -> Iterator[Pin]:
    """Read the pins of a file that pip-compile wrote with hashes."""
    for line in file.read_text().replace("\\\n", " ").splitlines():
        found = _PIN.match(line)
        if found is not None:
            name = re.sub(r"[-_.]+", "-", found[1]).lower()
            yield Pin(name, found[2], tuple(_HASH.findall(line)))


def make_sbom(name: str, version: str, pins: list[Pin]) -> dict[str, Any]:
    """Return the CycloneDX document of one release."""
    components = [_component(pin) for pin in sorted(pins)]
    itself = f"pkg:pypi/{name}@{version}"
    content = json.dumps([itself, components], sort_keys=True)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": SPEC_VERSION,
        "serialNumber": uuid.uuid5(_NAMESPACE, content).urn,
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": itself,
                "name": name,
                "version": version,
                "purl": itself,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
            }
        },
        "components": components,
        "dependencies": [
            {"ref": itself, "dependsOn": [component["bom-ref"] for component in components]},
            *({"ref": component["bom-ref"]} for component in components),
        ],
    }


def _component(pin: Pin) -> dict[str, Any]:
    return {
        "type": "library",
        "bom-ref": pin.purl,
        "name": pin.name,
        "version": pin.version,
        "purl": pin.purl,
        "externalReferences": [
            {
                "type": "distribution",
                "url": pin.purl,
                "hashes": [{"alg": "SHA-256", "content": digest} for digest in pin.hashes],
            }
        ],
    }


class SbomHook(BuildHookInterface):  # type: ignore[type-arg]
    """Hatch runs this hook when it builds a wheel, and puts the SBOM into its `.dist-info/sboms` (PEP 770)."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the SBOM. An editable installation needs none."""
        if version == "editable":
            return
        pins = list(read_pins(Path(self.root) / "requirements" / "runtime.txt"))
        document = make_sbom(self.metadata.name, self.metadata.version, pins)
        file = Path(self.directory) / FILE_NAME
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(document, indent=2) + "\n")
        build_data["sbom_files"].append(str(file))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the file next to the wheel, so that the directory contains only files that a release uploads."""
        del version, build_data, artifact_path
        (Path(self.directory) / FILE_NAME).unlink(missing_ok=True)
