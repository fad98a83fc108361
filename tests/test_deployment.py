"""The files in deploy/ agree with the server, with each other and with the package."""

import configparser
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest
import yaml  # type: ignore[import-untyped]

from cli.server_process import oncelog, reserve_port, serving
from oncelog import open_blocking
from oncelog.server.limits import ApiLimits
from oncelog.server.settings import load
from tools.sbom import read_pins

ROOT: Final = Path(__file__).parent.parent
DEPLOY: Final = ROOT / "deploy"
PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
COMPOSE: Final = yaml.safe_load((DEPLOY / "docker/compose.yaml").read_text(encoding="utf-8"))
MANIFESTS: Final = {
    file.stem: list(yaml.safe_load_all(file.read_text(encoding="utf-8"))) for file in (DEPLOY / "kubernetes").glob("*")
}
USER: Final = "10001"
PORTS: Final = {"http": 7171, "grpc": 7271, "metrics": 9171}
OPEN_FILES: Final = 12_000


def read_dockerfile() -> list[tuple[str, str]]:
    """Return the instructions with their arguments."""
    text = (DEPLOY / "docker/Dockerfile").read_text(encoding="utf-8")
    lines = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in lines if line.strip()]


DOCKERFILE: Final = read_dockerfile()


def last(instruction: str) -> str:
    return [arguments for name, arguments in DOCKERFILE if name == instruction][-1]


@pytest.mark.parametrize(
    "file",
    [
        "docs/guides/deployment.md",
        *(
            f"deploy/{name}"
            for name in (
                "docker/compose.yaml",
                "docker/oncelog.toml",
                "kubernetes/oncelog.yaml",
                "kubernetes/oncelog-postgres.yaml",
            )
        ),
    ],
)
def test_commands_that_create_keys_work(file: str, tmp_path: Path) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    commands = re.findall(r"apikey create (\S+) (--.*)$", text, re.MULTILINE)
    assert commands
    for number, (_, options) in enumerate(commands):
        created = oncelog("apikey", "create", str(tmp_path / f"keys-{number}.json"), *shlex.split(options))
        assert created.returncode == 0, created.stderr


# --- the image


def test_image_pins_exactly_the_packages_that_the_server_needs() -> None:
    wanted = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["server"]]
    wanted += PROJECT["optional-dependencies"]["postgres"] + PROJECT["optional-dependencies"]["opentelemetry"]
    names = {re.split(r"[><=]", one)[0] for one in wanted}
    lines = (ROOT / "requirements/image.in").read_text(encoding="utf-8").splitlines()
    assert {line for line in lines if line and line[0] not in "#-"} == names


def test_image_has_the_versions_that_the_tests_run_with() -> None:
    image = set(read_pins(ROOT / "requirements/image.txt"))
    assert image
    assert image <= set(read_pins(ROOT / "requirements/runtime.txt"))
    assert not {"hatchling", "editables"} & {pin.name for pin in image}


def test_image_runs_as_an_unprivileged_user() -> None:
    assert last("USER") == f"{USER}:{USER}"
    names = [name for name, _ in DOCKERFILE]
    assert names.index("USER") > max(position for position, name in enumerate(names) if name == "RUN")
    assert f"--uid {USER}" in last("RUN")


def test_image_copies_only_files_in_the_build_context() -> None:
    ignored = (DEPLOY / "docker/Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    copied = {
        source
        for name, arguments in DOCKERFILE
        if name == "COPY" and "--from" not in arguments
        for source in arguments.split()[:-1]
    }
    assert copied == allowed
    assert all((ROOT / path).is_file() for path in copied - {"dist/oncelog-*.whl"})


def test_image_installs_only_pinned_packages_and_the_wheel() -> None:
    installs = [arguments for name, arguments in DOCKERFILE if name == "RUN" and " install " in arguments]
    pip = [command for one in installs for command in one.split("&&") if " pip" in command or "/pip " in command]
    assert len(pip) == 2
    assert "--require-hashes" in pip[0]
    assert "--no-deps --no-index" in pip[1]


def test_image_exposes_the_ports_of_its_settings() -> None:
    settings = load(str(DEPLOY / "docker/oncelog.toml"), {}, {})
    assert (settings.host, settings.port, settings.metrics_port) == ("0.0.0.0", PORTS["http"], PORTS["metrics"])  # noqa: S104
    assert {int(port) for port in last("EXPOSE").split()} == set(PORTS.values())
    (volume,) = last("VOLUME").split()
    assert settings.store.startswith(f"{volume}/")
    assert settings.api_keys.file is not None
    assert settings.api_keys.file.startswith(f"{volume}/")
    command = json.loads(last("ENTRYPOINT")) + json.loads(last("CMD"))
    assert command == ["oncelog", "serve", "--config", "/etc/oncelog/oncelog.toml"]
    assert f"COPY deploy/docker/oncelog.toml {command[-1]}" in [f"{name} {one}" for name, one in DOCKERFILE]


def test_health_check_of_the_image_follows_the_server(tmp_path: Path) -> None:
    check = json.loads(last("HEALTHCHECK").partition("CMD ")[2])
    with reserve_port() as port, serving(tmp_path, "--development", "--set", f"metrics_port={port}"):
        command = [sys.executable, *(part.replace(str(PORTS["metrics"]), str(port)) for part in check[1:])]
        healthy = subprocess.run(command, capture_output=True, check=False)  # noqa: S603
        assert healthy.returncode == 0, healthy.stderr
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1  # noqa: S603


# --- Compose


def test_compose_file_builds_the_image_and_waits_for_the_database() -> None:
    server, database = COMPOSE["services"]["oncelog"], COMPOSE["services"]["postgres"]
    build = server["build"]
    context = (DEPLOY / "docker" / build["context"]).resolve()
    assert context == ROOT
    assert (context / build["dockerfile"]).is_file()
    assert server["depends_on"] == {"postgres": {"condition": "service_healthy"}}
    assert database["healthcheck"]["test"][1] == "pg_isready"
    settings = {name: value for name, value in server["environment"].items() if name.startswith("ONCELOG_")}
    loaded = load(str(DEPLOY / "docker/oncelog.toml"), settings, {})
    assert loaded.store == "postgresql://oncelog@postgres:5432/oncelog"
    assert server["environment"]["PGPASSWORD"] == database["environment"]["POSTGRES_PASSWORD"]


def test_compose_file_publishes_ports_only_on_this_machine() -> None:
    server = COMPOSE["services"]["oncelog"]
    assert server["ports"] == [f"127.0.0.1:{PORTS[name]}:{PORTS[name]}" for name in ("http", "grpc")]
    assert (server["read_only"], server["cap_drop"]) == (True, ["ALL"])
    assert server["ulimits"] == {"nofile": OPEN_FILES}
    volumes = {volume.partition(":")[0] for one in COMPOSE["services"].values() for volume in one["volumes"]}
    assert volumes == set(COMPOSE["volumes"])


# --- systemd


def read_unit(name: str = "oncelog") -> configparser.ConfigParser:
    unit = configparser.ConfigParser(strict=False, interpolation=None, comment_prefixes=("#",), delimiters=("=",))
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / f"systemd/{name}.service", encoding="utf-8")
    return unit


def test_unit_starts_the_server_with_the_settings_of_the_guide(tmp_path: Path) -> None:
    service = read_unit()["Service"]
    command = shlex.split(service["ExecStart"])
    assert [Path(command[0]).name, *command[1:3]] == ["oncelog", "serve", "--config"]
    guide = (ROOT / "docs/guides/deployment.md").read_text(encoding="utf-8")
    assert f"`{command[3]}`" in guide
    (settings,) = re.findall(r"```toml\n(.*?)```", guide, re.DOTALL)
    file = tmp_path / "oncelog.toml"
    file.write_text(settings, encoding="utf-8")
    loaded = load(str(file), {}, {})
    assert loaded.store.startswith(f"/var/lib/{service['StateDirectory']}/")
    assert int(service["TimeoutStopSec"]) * 1000 > loaded.shutdown_ms


def test_unit_allows_all_connections_of_the_default_limits() -> None:
    service = read_unit()["Service"]
    assert int(service["LimitNOFILE"]) == OPEN_FILES
    assert ApiLimits().connections_max + ApiLimits().grpc_connections_max + 300 <= OPEN_FILES


def test_unit_is_hardened_and_lets_the_server_read_the_boot_id() -> None:
    service = read_unit()["Service"]
    assert service["User"] != "root"
    assert service["CapabilityBoundingSet"] == ""
    assert (service["ProtectSystem"], service["NoNewPrivileges"]) == ("strict", "yes")
    assert "ProcSubset" not in service


def test_backup_unit_backs_up_the_log_of_the_server(tmp_path: Path) -> None:
    server, service = read_unit()["Service"], read_unit("oncelog-backup")["Service"]
    for name in ("User", "Group", "StateDirectory", "UMask", "CapabilityBoundingSet", "ProtectSystem"):
        assert service[name] == server[name]
    assert service["KillMode"] == "mixed"
    guide = (ROOT / "docs/guides/deployment.md").read_text(encoding="utf-8")
    assert f'store = "{shlex.split(service["ExecStart"])[2]}"' in guide
    assert f"`{service['EnvironmentFile']}`" in guide
    (settings,) = re.findall(r"```ini\n(.*?)```", guide, re.DOTALL)
    values = dict(line.split("=", 1) for line in settings.splitlines())
    assert set(re.findall(r"\$\{?(\w+)", service["ExecStart"])) <= values.keys()
    log = str(tmp_path / "log.db")
    with open_blocking(log):
        pass
    options = [*values["BACKUP_OPTIONS"].split()[2:], "--once"]
    done = oncelog("backup", log, f"file://{tmp_path}/target", *options)
    assert done.returncode == 0, done.stderr


# --- Kubernetes


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifest_contains_all_resources(name: str) -> None:
    documents = {one["kind"]: one for one in MANIFESTS[name]}
    assert len(documents) == len(MANIFESTS[name])
    for document in documents.values():
        assert {"apiVersion", "kind", "metadata"} <= document.keys()
        assert document["metadata"]["labels"] == {"app.kubernetes.io/name": "oncelog"}
    workload = documents.get("StatefulSet") or documents["Deployment"]
    pod = workload["spec"]["template"]
    assert workload["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
    assert documents["Service"]["spec"]["selector"] == pod["metadata"]["labels"]
    (container,) = pod["spec"]["containers"]
    assert container["image"] == f"oncelog:{PROJECT['version']}"
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    volumes |= {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", ())}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    assert {port["name"]: port["containerPort"] for port in container["ports"]} == PORTS
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] in PORTS
    for port in documents["Service"]["spec"]["ports"]:
        assert port["port"] == PORTS[port["targetPort"]]


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifest_gives_the_server_settings_that_it_accepts(name: str, tmp_path: Path) -> None:
    documents = {one["kind"]: one for one in MANIFESTS[name]}
    (container,) = pod_of(documents)["containers"]
    file = tmp_path / "oncelog.toml"
    file.write_text(documents["ConfigMap"]["data"][file.name], encoding="utf-8")
    settings = load(str(file), {}, {})
    assert (settings.port, settings.metrics_port) == (PORTS["http"], PORTS["metrics"])
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert str(Path(settings.api_keys.file or "").parent) in mounts
    assert settings.store.startswith("postgresql://") or str(Path(settings.store).parent) in mounts


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifest_runs_the_server_unprivileged(name: str) -> None:
    pod = pod_of({one["kind"]: one for one in MANIFESTS[name]})
    (container,) = pod["containers"]
    assert (pod["securityContext"]["runAsNonRoot"], pod["securityContext"]["runAsUser"]) == (True, int(USER))
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    # With service links, Kubernetes may set variables that the server refuses.
    assert pod["enableServiceLinks"] is False
    (secret,) = [volume["secret"] for volume in pod["volumes"] if "secret" in volume]
    assert secret["defaultMode"] == 0o440
    assert pod["securityContext"]["fsGroup"] == int(USER)


def pod_of(documents: dict[str, Any]) -> dict[str, Any]:
    workload = documents.get("StatefulSet") or documents["Deployment"]
    pod: dict[str, Any] = workload["spec"]["template"]["spec"]
    return pod


def test_log_in_a_file_is_served_by_one_server() -> None:
    (workload,) = [one for one in MANIFESTS["oncelog"] if one["kind"] == "StatefulSet"]
    assert workload["spec"]["replicas"] == 1
