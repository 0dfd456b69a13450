"""The guide: its commands are run where possible, and the others name things that exist."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from p2ptrain import __version__
from p2ptrain.config import RunConfig, load_node_config
from p2ptrain.store.store import Store
from tests.helpers.deploy import DEPLOY, ROOT, read_documents, read_yaml, run, tool
from tests.helpers.sandbox import settings
from tests.helpers.store import some_records

GUIDE = DEPLOY / "README.md"
BLOCK = re.compile(r"^```(\w+)( offline)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Programs of the commands that are not run: they take an engine, a cluster, a service manager, root or another machine,
# or as a backup a node that has lived, which has a test of its own.
ELSEWHERE = {
    "mkdir",
    "cp",
    "docker",
    "kubectl",
    "sudo",
    "sudoedit",
    "make",
    "p2ptrain",
    "curl",
    "P2PTRAIN_VARIANT=cuda",
}
ME = b"m" * 32
RUN = RunConfig.model_validate({"name": "test"}).sealed(
    manifest="ab" * 32, initial_root="cd" * 32, founders=["ef" * 32]
)
TOOLS = {"promtool": "apt-get install prometheus", "systemd-analyze": "it comes with systemd"}


def blocks(kind: str, is_offline: bool) -> list[str]:
    return [
        text for name, offline, text in BLOCK.findall(GUIDE.read_text()) if (name, bool(offline)) == (kind, is_offline)
    ]


def commands() -> list[str]:
    return [line for text in blocks("sh", False) for line in text.splitlines()]


def drop_ins() -> list[str]:
    found = re.findall(r"((?:^    .*\n)+)", GUIDE.read_text(), re.MULTILINE)
    assert len(found) == 3
    return [re.sub(r"^    ", "", each, flags=re.MULTILINE) for each in found]


def verified(drop_in: str, directory: Path) -> tuple[int, str]:
    """Returns systemd's verdict on the unit with a drop-in, and an existing program."""
    analyze = tool("systemd-analyze", TOOLS["systemd-analyze"])
    unit, more = directory / "p2ptrain.service", directory / "p2ptrain.service.d/more.conf"
    more.parent.mkdir()
    for path, content in ((unit, (DEPLOY / "systemd/p2ptrain.service").read_text()), (more, drop_in)):
        path.write_text(content.replace("/usr/local/bin/p2ptrain", "/bin/true"))
    return run(analyze, "verify", "--man=no", unit)


def guides_config() -> str:
    (text,) = blocks("toml", True)
    return text


def lives(directory: Path) -> bool:
    """Opens a node's store as at a start; returns whether it knows that it has lost the record of its votes."""
    with Store(directory / "run", RUN, some_records()[0], ME, directory / "identity.key") as store:
        return store.is_forgetful


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Makes a checkout to run commands in, with this `p2ptrain`."""
    (tmp_path / "deploy").symlink_to(DEPLOY)
    (tmp_path / "node.toml").write_text(guides_config())
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin/p2ptrain"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m p2ptrain "$@"\n')
    command.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("number", range(len(blocks("sh", True))))
def test_what_can_be_run_here_runs(number: int, place: Path) -> None:
    text = blocks("sh", True)[number]
    for name in TOOLS.keys() & set(text.split()):
        tool(name, TOOLS[name])
    own = {"PATH": f"{place / 'bin'}:/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(place)}
    status, said = run("/bin/sh", "-eu", "-c", text, cwd=place, env=own)
    assert status == 0, said


def test_the_bootstraps_config_is_one(place: Path) -> None:
    config = load_node_config(place / "node.toml")
    assert config.network.announce == ("/dns4/bootstrap.example.org/tcp/4001",)
    assert (config.network.nat, config.network.relay_for_others) == (True, True)


def test_every_other_command_is_of_a_program_that_the_guide_may_use() -> None:
    assert len(commands()) > 20
    for line in commands():
        assert shlex.split(line)[0] in ELSEWHERE, line


def test_every_file_and_name_in_the_commands_exists() -> None:
    for line in commands():
        for word in shlex.split(line):
            if word.startswith("deploy/"):
                assert (ROOT / word).exists(), line
            if word.endswith(".whl"):
                assert word == f"./dist/p2ptrain-{__version__}-*.whl"
    services = read_yaml(DEPLOY / "compose.yaml")["services"]
    for name in re.findall(r"(?:exec|--follow) (\w+)", "\n".join(line for line in commands() if "compose" in line)):
        assert name in services
    objects = read_documents(DEPLOY / "kubernetes/p2ptrain.yaml")
    assert {name for line in commands() for name in re.findall(r"-n (\S+)", line)} == {
        objects["Namespace"]["metadata"]["name"],
        "monitoring",  # which is Prometheus', as the page says
    }
    assert (
        f"secret generic {objects['StatefulSet']['spec']['template']['spec']['volumes'][1]['secret']['secretName']}"
        in ("\n".join(commands()))
    )


@pytest.mark.parametrize(
    "line", sorted({re.search(r"\bp2ptrain (join|runs|doctor|status|config).*", each)[0] for each in commands()
                    if re.search(r"(^| )p2ptrain (join|runs|doctor|status|config)", each)})
)  # fmt: skip
def test_every_command_of_a_node_has_the_options_that_the_guide_gives_it(line: str) -> None:
    words = shlex.split(line)[1:]
    subcommand = words[: 2 if words[0] == "config" else 1]
    own = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "COLUMNS": "200", "TERM": "dumb"}
    status, said = run(sys.executable, "-m", "p2ptrain", *subcommand, "--help", env=own)
    assert status == 0, said
    for option in (word for word in words if word.startswith("--")):
        assert re.search(rf"(^|\s){option}\b", said), (option, said)


@pytest.mark.parametrize(
    ("number", "begins"), [(0, "start "), (2, "join --invitation ${CREDENTIALS_DIRECTORY}/invitation ")]
)
def test_the_drop_ins_that_begin_a_run_and_show_an_invitation_are_some_for_systemd(
    number: int, begins: str, tmp_path: Path
) -> None:
    text = drop_ins()[number]
    _, command = settings(text)["ExecStart"]
    assert command.startswith(f"/usr/local/bin/p2ptrain {begins}") and command.endswith("--data-dir /var/lib/p2ptrain")
    if number == 2:
        assert settings(text)["LoadCredential"] == ["invitation:/etc/p2ptrain/node.invitation"]
        assert command.endswith(
            settings((DEPLOY / "systemd/p2ptrain.service").read_text())["ExecStart"][-1].partition("join ")[2]
        )
    assert verified(text, tmp_path) == (0, "")


def test_the_drop_in_with_a_token_sets_what_the_node_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = settings(drop_ins()[1])
    (name, source), *_ = (each.split(":") for each in found["LoadCredential"])
    assert f"> {source}'" in "\n".join(commands())
    for each in found["Environment"]:
        monkeypatch.setenv(*each.split("="))
    http = load_node_config(None).http
    assert (http.host, http.token_file) == ("0.0.0.0", f"/run/credentials/p2ptrain.service/{name}")
    assert verified(drop_ins()[1], tmp_path) == (0, "")


def test_a_copy_of_the_key_is_the_same_node(place: Path) -> None:
    """The page's way to back it up, and back: the copy knows that it has spoken, and is silent until it has asked."""
    (make,) = (text for text in blocks("sh", True) if "identity new" in text)
    (copy,) = (text for text in blocks("sh", False) if "node/identity.key" in text)
    own = {"PATH": f"{place / 'bin'}:/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(place)}
    status, said = run("/bin/sh", "-eu", "-c", make, cwd=place, env=own)
    assert status == 0, said
    assert not lives(place / "node"), "a new key has said nothing"
    status, said = run("/bin/sh", "-eu", "-c", copy, cwd=place, env=own)
    assert status == 0, said
    assert (place / "backup").stat().st_mode & 0o777 == 0o700
    assert (place / "backup/identity.key").stat().st_mode & 0o777 == 0o600
    shutil.copytree(place / "backup", place / "again")
    assert lives(place / "again"), "it would say things twice"
    shown = [
        run(place / "bin/p2ptrain", "identity", "show", "--data-dir", each, cwd=place, env=own)
        for each in ("node", "again")
    ]
    assert shown[0] == shown[1] and shown[0][0] == 0
    assert "peer id" in shown[0][1]
