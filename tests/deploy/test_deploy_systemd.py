"""The systemd service: it is valid, and consistent with the node."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from p2ptrain.cli.exits import ExitStatus
from p2ptrain.node.notify import BEATS, TELL_SECONDS
from p2ptrain.node.socket_directory import BASE_MAX
from tests.helpers.deploy import DEPLOY, run, tool
from tests.helpers.sandbox import settings

UNIT, CUDA = DEPLOY / "systemd/p2ptrain.service", DEPLOY / "systemd/cuda.conf"
EXPOSURE_MAX = 1.2  # 0 to 10; it has to reach the internet, and p2pd to unpack itself


@pytest.fixture
def analyze() -> str:
    return tool("systemd-analyze", "it comes with systemd")


@pytest.fixture
def unit() -> dict[str, list[str]]:
    return settings(UNIT.read_text())


def verified(analyze: str, directory: Path, *drop_ins: Path) -> tuple[int, str]:
    """Returns systemd's verdict on the unit, with an existing program."""
    service = directory / UNIT.name
    service.write_text(UNIT.read_text().replace("/usr/local/bin/p2ptrain", "/bin/true"))
    for each in drop_ins:
        place = directory / f"{UNIT.name}.d"
        place.mkdir(exist_ok=True)
        (place / each.name).write_bytes(each.read_bytes())
    return run(analyze, "verify", "--man=no", service)


def test_systemd_has_nothing_to_say_about_the_unit_with_and_without_a_gpu(analyze: str, tmp_path: Path) -> None:
    assert verified(analyze, tmp_path) == (0, "")
    assert verified(analyze, tmp_path, CUDA) == (0, "")


def test_systemd_finds_a_key_that_is_none(analyze: str, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.conf"
    wrong.write_text("[Service]\nProtectSystm=strict\n")
    assert "ProtectSystm" in verified(analyze, tmp_path, wrong)[1]


def test_the_unit_may_touch_little(analyze: str) -> None:
    status, said = run(analyze, "security", "--offline=true", "--no-pager", UNIT)
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", said)
    assert found is not None and status == 0, said
    assert float(found[1]) <= EXPOSURE_MAX, said
    assert (
        run(analyze, "security", "--offline=true", "--no-pager", f"--threshold={int(EXPOSURE_MAX * 10)}", UNIT)[0] == 0
    )


def test_it_is_of_the_kind_that_the_node_speaks_to(unit: dict[str, list[str]]) -> None:
    assert (unit["Type"], unit["NotifyAccess"]) == (["notify"], ["main"])
    patience = int(unit["WatchdogSec"][0])
    assert patience / BEATS >= TELL_SECONDS, "or it beats more often than people read"
    assert unit["TimeoutStartSec"] == ["infinity"], "the run may be away for days"
    assert unit["RestartPreventExitStatus"] == [
        f"{ExitStatus.USER_ERRED} {ExitStatus.HARDWARE} {ExitStatus.OWNER_NEEDED}"
    ], "a new start mends none"


def test_its_directories_are_those_of_its_command(unit: dict[str, list[str]]) -> None:
    (command,) = unit["ExecStart"]
    assert command == "/usr/local/bin/p2ptrain join --config /etc/p2ptrain/node.toml --data-dir /var/lib/p2ptrain"
    assert unit["StateDirectory"] == unit["RuntimeDirectory"] == unit["ConfigurationDirectory"] == ["p2ptrain"]
    assert "XDG_RUNTIME_DIR=/run/p2ptrain" in unit["Environment"][0].split()
    assert len("/run/p2ptrain") <= BASE_MAX, "else its sockets would lie in a private /tmp"
    assert unit["StateDirectoryMode"] == unit["RuntimeDirectoryMode"] == ["0700"]


def test_a_gpu_takes_devices_and_nothing_that_is_not_about_them() -> None:
    assert settings(CUDA.read_text()).keys() == {"PrivateDevices", "DeviceAllow", "LimitMEMLOCK"}
