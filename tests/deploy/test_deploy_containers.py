"""The image and the compose file, as far as they can be checked without a container engine."""

from __future__ import annotations

import fnmatch
import json
import re
import shutil
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.config import load_node_config, load_run_config
from p2ptrain.identity import Identity
from tests.helpers.daemons import TEST_SECONDS, p2ptrain, swarm_in
from tests.helpers.deploy import DEPLOY, ROOT, read_yaml, run, tool

DOCKERFILE = DEPLOY / "docker/Dockerfile"
NODES = ("bootstrap", "node1", "node2", "node3")
SERVICES = (*NODES, "prepare", "prometheus", "grafana")


def instructions() -> list[tuple[str, str]]:
    """Yields each instruction of the Dockerfile with its arguments, continued lines joined."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    text = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line.strip()]


def of(name: str) -> list[str]:
    return [rest for each, rest in instructions() if each == name]


def what_a_build_takes() -> list[str]:
    """Returns the files and folders that pyproject.toml names, itself, and the versions of the rest."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    named = {*wheel["packages"], *wheel["force-include"], *(hook["path"] for hook in wheel["hooks"].values())}
    named |= {project["project"]["readme"], *project["project"]["license-files"]}
    return sorted(named | {"pyproject.toml", "constraints.txt"})


@pytest.fixture
def compose() -> dict[str, Any]:
    found: dict[str, Any] = read_yaml(DEPLOY / "compose.yaml")
    return found


# ---------------------------------------------------------------------------------------------------
# The image


def test_hadolint_has_nothing_to_say_about_the_dockerfile() -> None:
    hadolint = tool("hadolint", "pip install -e '.[deploy]'")
    assert run(hadolint, "--no-color", DOCKERFILE) == (0, "")


def test_hadolint_has_power(tmp_path: Path) -> None:
    hadolint = tool("hadolint", "pip install -e '.[deploy]'")
    broken = tmp_path / "Dockerfile"
    broken.write_text(re.sub(r"^# hadolint.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE))
    status, said = run(hadolint, "--no-color", broken)
    assert (status, "DL3013" in said) == (1, True)


def test_the_image_runs_as_nobody_in_particular_and_its_commands_need_no_shell() -> None:
    assert of("USER") == ["10001:10001"]
    names = [name for name, _ in instructions()]
    assert names.index("USER") > max(at for at, name in enumerate(names) if name in ("RUN", "COPY"))
    assert (of("ENTRYPOINT"), of("STOPSIGNAL")) == (['["p2ptrain"]'], ["SIGTERM"])
    assert len(of("FROM")) == 2
    assert set(of("FROM")) == {"${PYTHON_IMAGE}", "${PYTHON_IMAGE} AS build"}
    assert [each for each in of("COPY") if each.startswith("--from")] == [
        "--from=build /usr/local/lib/p2ptrain /usr/local/lib/p2ptrain"
    ]


def test_what_the_image_is_made_of_is_there_and_pinned() -> None:
    copied = [name for each in of("COPY") if not each.startswith("--from") for name in each.split()[:-1]]
    assert sorted(copied) == what_a_build_takes()
    assert all((ROOT / name).exists() for name in copied)
    environment = " ".join(of("ENV"))
    for name in ("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT"):
        assert f"{name}=/src/constraints.txt" in environment
    (first, *others) = [each for each in of("RUN") if "pip install" in each]
    assert "/^pip==/" in first, "first a pip that checks the hashes of constraints"
    assert "--require-hashes" in first
    assert ["--no-require-hashes" in each for each in others] == [False, True], "only the package itself has none"


def test_the_image_is_built_with_a_compiler_that_stays_out_of_it() -> None:
    (folder,) = re.findall(r"pip install --target (\S+) ziglang ", " ".join(of("RUN")))
    (built,) = [each for each in of("RUN") if "pip install --no-require-hashes ." in each]
    assert f'CC="{folder}/ziglang/zig cc -target $(uname -m)-linux-musl" ' in built
    assert not folder.startswith("/usr/local/lib/p2ptrain"), "which is copied"


def test_a_package_is_made_of_what_the_image_takes(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="the [deploy] extra brings it")
    left_out = re.findall(r"^\*\*/(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    for *names, to in (each.split() for each in of("COPY") if not each.startswith("--from")):
        for name in names:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, tmp_path / to, ignore=shutil.ignore_patterns(*left_out))
            else:
                (tmp_path / to).mkdir(exist_ok=True)
                shutil.copy(ROOT / name, tmp_path / to)
    status, said = run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", cwd=tmp_path)
    assert status == 0, said
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert {"p2ptrain/examples/tiny.toml", "p2ptrain/examples/node.toml"} <= set(zipfile.ZipFile(wheel).namelist())


def test_only_what_is_copied_goes_to_the_engine() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    let_in = sorted(line[1:] for line in lines if line.startswith("!"))
    assert let_in == what_a_build_takes()
    assert all(any(fnmatch.fnmatch(name, line) for line in lines[1:]) for name in ("a/__pycache__", "a/b.pyc"))


def test_the_image_holds_no_secret() -> None:
    named = [*of("ARG"), *of("ENV"), *of("COPY")]
    assert [each for each in named if re.search(r"token|secret|password|\.key", each, re.IGNORECASE)] == []


def test_the_settings_of_the_image_are_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in re.findall(r"(P2PTRAIN_\w+__\w+)=(\S+)", " ".join(of("ENV"))):
        monkeypatch.setenv(name, value)
    config = load_node_config(None)
    assert (config.storage.directory, config.http.port) == ("/var/lib/p2ptrain", 8_420)
    assert of("EXPOSE") == ["4001/tcp 8420/tcp"]
    assert of("VOLUME") == ["/var/lib/p2ptrain"]


def health_checks() -> dict[str, list[str]]:
    ((_, command),) = (each.split(" CMD ") for each in of("HEALTHCHECK"))
    test = read_yaml(DEPLOY / "compose.yaml")["services"]["node1"]["healthcheck"]["test"]
    assert test[0] == "CMD"
    return {"image": json.loads(command), "compose": test[1:]}


@pytest.mark.timeout(TEST_SECONDS)
def test_the_health_checks_know_a_node_that_lives_from_one_that_does_not(tmp_path: Path) -> None:
    checks = health_checks()
    with swarm_in(tmp_path) as swarm:
        node = swarm.first().start()
        node.until_says("this node in a browser: http://")
        found = re.search(r"http://127\.0\.0\.1:(\d+)/", node.text)
        assert found is not None
        assert {command[0] for command in checks.values()} == {"python"}
        python = shutil.which("python3") or "python3"
        for name, (_, *arguments) in checks.items():
            here = [each.replace("8420", found[1]) for each in arguments]
            port = {"P2PTRAIN_HTTP__PORT": found[1], "PATH": "/usr/bin:/bin"}
            assert run(python, *here, env=port) == (0, ""), name
        node.kill()
        for name, (_, *arguments) in checks.items():
            here = [each.replace("8420", found[1]) for each in arguments]
            assert run(python, *here, env=port)[0] == 1, name


# ---------------------------------------------------------------------------------------------------
# The swarm


def test_the_compose_files_are_what_the_specification_wants() -> None:
    spec = pytest.importorskip("compose_spec", reason="takes compose-spec: pip install -e '.[deploy]'")
    for name in ("compose.yaml", "compose.cuda.yaml"):
        merged = json.dumps(read_yaml(DEPLOY / name))  # without YAML's anchors
        if name == "compose.yaml":
            spec.PyCompose.from_json(merged).validate()
        else:
            assert json.loads(merged)["services"].keys() == set(NODES)
            spec.PyCompose.from_json(merged)
    with pytest.raises(ValueError, match="unknown"):
        spec.PyCompose.from_json('{"services": {"a": {"image": "b", "depends_on": {"c": {"condition": "unknown"}}}}}')


def test_every_service_may_touch_little(compose: dict[str, Any]) -> None:
    assert compose["services"].keys() == set(SERVICES)
    for name, service in compose["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["deploy"]["resources"]["limits"].keys() == {"cpus", "memory", "pids"}, name
        assert "privileged" not in service and "cap_add" not in service, name
        assert name == "prepare" or service["healthcheck"]["test"][0] == "CMD", name
        assert name in NODES or name == "prepare" or re.fullmatch(r"\S+:v?\d+\.\d+\.\d+", service["image"]), name


def test_all_that_is_mounted_is_there_and_only_what_must_be_can_be_written(compose: dict[str, Any]) -> None:
    used = set()
    for name, service in compose["services"].items():
        for each in service.get("volumes", []):
            source, target, *mode = each.split(":")
            if source.startswith("."):
                assert (DEPLOY / source).exists(), each
                assert mode == ["ro"], each
            else:
                used.add(source)
                assert name in (source, "prepare") or mode == ["ro"], each
            assert target.startswith("/")
    assert used == compose["volumes"].keys()
    for each in compose["configs"].values():
        load_run_config(DEPLOY / each["file"])


def test_only_the_protocol_is_open_to_other_machines(compose: dict[str, Any]) -> None:
    published = [port for service in compose["services"].values() for port in service.get("ports", [])]
    assert [port for port in published if not port.startswith("127.0.0.1:")] == ["4001:4001"]


def test_the_nodes_settings_are_settings(
    compose: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in NODES:
        own = {
            key: re.sub(r"\$\{\w+:-\}", "", value) for key, value in compose["services"][name]["environment"].items()
        }
        with monkeypatch.context() as patch:
            for key, value in own.items():
                patch.setenv(key, value)
            config = load_node_config(None)
        assert config.http.host == "0.0.0.0"
        assert set(config.http.allowed_hosts) == set(NODES)
        assert config.http.token_file == "/etc/p2ptrain/token"


@pytest.mark.timeout(TEST_SECONDS)
def test_what_is_prepared_lets_nodes_in_and_prometheus_read(compose: dict[str, Any], tmp_path: Path) -> None:
    """The script of `prepare` with its two places elsewhere, twice: the second time it changes nothing."""
    service = compose["services"]["prepare"]
    (script,) = service["command"]
    state, common, programs = tmp_path / "state", tmp_path / "common", tmp_path / "bin"
    for each in (state, common, programs):
        each.mkdir()
    command = programs / "p2ptrain"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m p2ptrain "$@"\n')
    command.chmod(0o755)
    own = {"PATH": f"{programs}:/usr/bin:/bin", "P2PTRAIN_STORAGE__DIRECTORY": str(state), "PYTHONPATH": str(ROOT)}
    script = script.replace("$$", "$").replace("/etc/p2ptrain", str(common))
    told = []
    for _ in range(2):
        status, said = run(*service["entrypoint"], script, env=own)
        assert status == 0, said
        told.append({path.name: path.read_text() for path in common.iterdir()})
    assert told[0] == told[1]
    identity = Identity.load(state / "identity.key")
    (address,) = tomllib.loads(told[0]["node.toml"])["network"]["bootstrap"]
    assert address == f"/dns4/bootstrap/tcp/4001/p2p/{identity.peer_id}"
    assert load_node_config(common / "node.toml").network.bootstrap == (address,)
    assert told[0]["token"] == told[0]["token.reader"] and len(told[0]["token"]) > 40
    assert (common / "token").stat().st_mode & 0o777 == 0o600
    assert (common / "token.reader").stat().st_mode & 0o777 == 0o644
    assert p2ptrain("config", "check", common / "node.toml")[0] == 0
