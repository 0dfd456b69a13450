"""What the doctor says in WSL2, with a kernel's name, a networking mode and processes that the test makes up."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2ptrain.config import NodeConfig
from p2ptrain.doctor import examine, machine
from p2ptrain.doctor.findings import can_work
from p2ptrain.doctor.machine import Wsl, check_wsl, keeps_time, look_at_wsl, networking_mode

WSL2 = "5.15.153.1-microsoft-standard-WSL2\n"


def kernel(directory: Path, name: str) -> Path:
    path = directory / "osrelease"
    path.write_text(name)
    return path


@pytest.mark.parametrize(("name", "is_wsl"), [(WSL2, True), ("6.8.0-47-generic\n", False), ("", False)])
def test_wsl_is_recognised_by_its_kernel(
    name: str, is_wsl: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "networking_mode", lambda: "nat")
    monkeypatch.setattr(machine, "KERNEL", kernel(tmp_path, name))
    found = look_at_wsl()
    assert (found is not None) == is_wsl
    assert found is None or found.networking == "nat"
    monkeypatch.setattr(machine, "KERNEL", tmp_path / "not there")
    assert look_at_wsl() is None


def test_outside_of_wsl_nothing_is_said() -> None:
    assert check_wsl(None) == []


@pytest.mark.parametrize(
    ("mode", "level", "says"),
    [
        ("mirrored", "good", "has the addresses of Windows"),
        ("nat", "warning", "nat: behind a NAT"),
        ("virtioproxy", "warning", "virtioproxy: behind a NAT"),
        ("", "warning", "its mode is unknown"),
    ],
)
def test_its_nat_is_named_with_the_mode_that_has_none(mode: str, level: str, says: str) -> None:
    network, _, _ = check_wsl(Wsl(mode, keeps_time=True))
    assert (network.what, network.level, says in network.result) == ("WSL2 network", level, True)
    assert ("networkingMode=mirrored" in network.fix) == (level == "warning")


def test_its_clock_needs_a_program_that_sets_it_and_its_sleep_is_always_told() -> None:
    found = check_wsl(Wsl("mirrored", keeps_time=False))
    assert [(each.what, each.level) for each in found] == [
        ("WSL2 network", "good"),
        ("WSL2 clock", "warning"),
        ("WSL2 sleep", "warning"),
    ]
    assert found[1].fix.startswith("sudo hwclock -s") and "standby-timeout-ac 0" in found[2].fix
    assert can_work(found)
    assert [each.level for each in check_wsl(Wsl("mirrored", keeps_time=True))] == ["good", "good", "warning"]


def test_programs_that_set_the_clock_are_known_by_their_names() -> None:
    assert keeps_time(["init", "systemd-timesyncd"]) and keeps_time(["systemd-timesyn"]) and keeps_time(["chronyd"])
    assert not keeps_time(["init", "systemd", "bash"])


def test_wsl_itself_tells_its_networking_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert networking_mode() == ""
    program = tmp_path / "wslinfo"
    for script, mode in (('[ "$*" = --networking-mode ] && echo Mirrored', "mirrored"), ("exit 1", "")):
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        assert networking_mode() == mode


def test_the_doctor_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "KERNEL", kernel(tmp_path, WSL2))
    monkeypatch.setattr(examine, "look_at_device", lambda facts: [])
    monkeypatch.setattr(machine, "networking_mode", lambda: "nat")
    found = {}
    for each in examine.examine(NodeConfig(), None, is_asked_outside=False):
        found[each.what] = each
        if each.what == "WSL2 sleep":
            break
    assert [*found][-3:] == ["WSL2 network", "WSL2 clock", "WSL2 sleep"]
