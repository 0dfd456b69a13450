"""Windows: checks the NAT, the clock and the sleep settings of WSL2, in which a node runs there.

These checks have not been tried on Windows; they follow the documentation of WSL.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from p2ptrain.doctor.findings import Diagnosis
from p2ptrain.doctor.network import SKEW_REFUSED_SECONDS

KERNEL = Path("/proc/sys/kernel/osrelease")
MODE_SECONDS = 5.0
TIME_KEEPERS = ("systemd-timesyn", "chronyd", "ntpd")  # beginnings of process names


@dataclass(frozen=True, slots=True)
class Wsl:
    """The WSL2 that this node runs in."""

    networking: str  # the networking mode, such as nat or mirrored; empty: unknown
    keeps_time: bool  # whether a program sets the clock


def look_at_wsl() -> Wsl | None:
    """Looks for WSL2; returns None if this machine is not in it."""
    try:
        if "microsoft" not in KERNEL.read_text().lower():
            return None
    except OSError:
        return None
    return Wsl(networking_mode(), keeps_time(_names()))


def networking_mode() -> str:
    """Asks WSL for its networking mode; empty if it has no answer, as before WSL 2.0."""
    program = shutil.which("wslinfo")
    if program is None:
        return ""
    with suppress(OSError, subprocess.SubprocessError):
        told = subprocess.run(  # noqa: S603
            [program, "--networking-mode"], capture_output=True, text=True, timeout=MODE_SECONDS, check=True
        )
        return told.stdout.strip().lower()
    return ""


def keeps_time(programs: Iterable[str]) -> bool:
    return any(name.startswith(TIME_KEEPERS) for name in programs)


def _names() -> Iterable[str]:
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            yield process.name()


def check_wsl(found: Wsl | None) -> list[Diagnosis]:
    if found is None:
        return []
    return [_check_network(found.networking), _check_clock(found.keeps_time), _check_sleep()]


def _check_network(mode: str) -> Diagnosis:
    if mode == "mirrored":
        text = "mirrored: this node has the addresses of Windows, whose firewall decides who may connect"
        return Diagnosis("WSL2 network", "good", text)
    text = f"{mode or 'its mode is unknown'}: behind a NAT of Windows, others reach this node only through relays"
    fix = "Write [wsl2] and networkingMode=mirrored to .wslconfig in your folder of Windows, then wsl --shutdown there"
    return Diagnosis("WSL2 network", "warning", text, fix)


def _check_clock(keeps: bool) -> Diagnosis:
    if keeps:
        return Diagnosis("WSL2 clock", "good", "a program sets it, also after Windows has slept")
    text = f"nothing sets it: it is behind after Windows has slept, and {SKEW_REFUSED_SECONDS:.0f} s are too many"
    return Diagnosis("WSL2 clock", "warning", text, "sudo hwclock -s after each sleep, or let systemd-timesyncd run")


def _check_sleep() -> Diagnosis:
    text = "not seen from here: Windows ends WSL2 when its last window is closed, and stops the node while it sleeps"
    fix = "Keep a window open, or start the node as a task of Windows; no sleep: powercfg /change standby-timeout-ac 0"
    return Diagnosis("WSL2 sleep", "warning", text, fix)
