"""The compiled ledger protocol is up to date, and the wheel contains it."""

import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from importlib import resources
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from oncelog.ledger.v1 import ledger_pb2, ledger_pb2_grpc

ROOT = Path(__file__).parents[3]
PROTO = "oncelog/ledger/v1/ledger.proto"
COMPILED = [f"oncelog/ledger/v1/ledger_{name}" for name in ("pb2.py", "pb2.pyi", "pb2_grpc.py", "pb2_grpc.pyi")]


def run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)  # noqa: S603
    assert done.returncode == 0, done.stdout + done.stderr


def test_compiled_files_are_up_to_date(tmp_path: Path) -> None:
    plugin = Path(sysconfig.get_path("scripts")) / "protoc-gen-mypy_grpc"
    outs = [f"--{name}_out={tmp_path}" for name in ("python", "pyi", "grpc_python")]
    typed = [f"--plugin={plugin}", f"--mypy_grpc_out=quiet:{tmp_path}"]
    run(sys.executable, "-m", "grpc_tools.protoc", "-Isrc", *outs, *typed, PROTO)
    made = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())
    assert made == sorted(COMPILED)
    stale = [name for name in COMPILED if (tmp_path / name).read_bytes() != (ROOT / "src" / name).read_bytes()]
    assert not stale, f"{PROTO} or its compiler has changed since these were compiled; run `make stubs`: {stale}"


def test_package_contains_the_protocol_file() -> None:
    text = resources.files("oncelog.ledger.v1").joinpath("ledger.proto").read_text(encoding="utf-8")
    described = descriptor_pb2.FileDescriptorProto()
    ledger_pb2.DESCRIPTOR.CopyToProto(described)
    assert re.findall(r"^  rpc (\w+)", text, re.MULTILINE) == [method.name for method in described.service[0].method]


def test_wheel_contains_the_protocol_and_its_compiled_files(tmp_path: Path) -> None:
    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", tmp_path)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert {PROTO, *COMPILED} <= set(archive.namelist())


@pytest.mark.parametrize("extra", ["ledger", "server"])
def test_extra_requires_the_package_versions_of_the_compiled_files(extra: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = project["optional-dependencies"][extra]
    compiled = re.search(r"^# Protobuf Python Version: (.+)$", (ROOT / "src" / COMPILED[0]).read_text(), re.MULTILINE)
    assert compiled is not None
    assert f"grpcio>={ledger_pb2_grpc.GRPC_GENERATED_VERSION}" in asked
    assert f"protobuf>={compiled[1]}" in asked
