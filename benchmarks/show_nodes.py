"""The nodes of a run to show (run_to_show.py): a daemon each, with what is counted of it over all its starts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
OWN = {
    "OMP_NUM_THREADS": "1",
    "P2PTRAIN_DEVICE__NAME": "cpu",
    "P2PTRAIN_DEVICE__THREADS": "1",
    "P2PTRAIN_DEVICE__SEQUENCES_PER_PASS": "2",  # of 8: seven nodes share one memory
    "P2PTRAIN_NETWORK__NAT": "false",
    "P2PTRAIN_HTTP__PORT": "0",
    "P2PTRAIN_LIMITS__ON_BATTERY": "train",
    "P2PTRAIN_SUCCESSION__ACCEPT": "all",
    "P2PTRAIN_AUDIT__SHARE": "1",  # a step of Muon costs more than an audit of its sequences; 7/200 is usual
    "P2PTRAIN_STORAGE__CHECKPOINTS_KEPT": "2",
    "P2PTRAIN_STORAGE__CHECKPOINT_EVERY_ROUNDS": "4",  # a node that was killed repeats what it trained since then
}


@dataclass
class Member:
    """A daemon that this program starts, kills and looks at; what has to last is in the fields before `process`."""

    name: str
    port: int
    lie: str = ""
    k_max: int = 64
    is_in: bool = True  # it has not left
    address: str = ""
    peer_id: str = ""
    totals: dict[str, int] = field(default_factory=dict)  # of all its earlier starts
    now: dict[str, int] = field(default_factory=dict)  # of this one
    process: subprocess.Popen[bytes] | None = None
    tie: socket.socket | None = None
    status: dict[str, Any] = field(default_factory=dict)
    failures: int = 0
    start_at: float = 0.0  # when it is to be started; 0: it is up, or has left

    SAVED = ("name", "port", "lie", "k_max", "is_in", "address", "peer_id", "totals", "now")

    @property
    def saved(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.SAVED}

    @property
    def is_up(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def applied(self) -> int:
        return int(self.status.get("applied_round", -1)) if self.is_up else -1

    def count(self) -> None:
        """Adds the counters of this start to those of earlier ones: a kill loses the former."""
        told = self.status.get("bytes", {})
        now = {
            "tokens": self.status.get("tokens", 0),
            "sent": told.get("bytes sent", 0),
            "received": told.get("bytes received", 0),
        }
        for name, value in now.items():
            if value < self.now.get(name, 0):
                self.totals[name] = self.totals.get(name, 0) + self.now[name]
        self.now = now

    def total(self, name: str) -> int:
        return self.totals.get(name, 0) + self.now.get(name, 0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "p2ptrain", *map(str, arguments)]


def environment(**own: str) -> dict[str, str]:
    path = os.pathsep.join([*filter(None, [own.pop("before", "")]), str(ROOT)])
    return {**os.environ, **OWN, "PYTHONPATH": path, **own}


def memory_of(process: int) -> int:
    """Returns the memory of a process and its children, shared pages in part."""
    total = 0
    with suppress(psutil.Error):
        me = psutil.Process(process)
        for each in (me, *me.children(recursive=True)):
            with suppress(psutil.Error):
                total += each.memory_full_info().pss
    return total
