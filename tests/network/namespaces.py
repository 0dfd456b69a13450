"""Hosts on one machine: Linux network namespaces on a bridge, with real addresses, limits and losses.

All of it lies in namespaces of our own, the bridge too, so that the machine's network is not touched, and goes with
them. It needs root, `ip` and `tc` (iproute2) and `nft` (nftables).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

PREFIX = "p2pt"
NETWORK = "10.77.0"
FIREWALL = """\
table inet test {
  chain loss { type filter hook input priority 0; }
  chain here { type filter hook input priority 1; }
  chain away { type filter hook output priority 1; }
}
"""


def run(*command: str, given: str | None = None) -> str:
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"
    return done.stdout


def why_impossible() -> str:
    """Why there can be no namespaces here; nothing if there can."""
    missing = [tool for tool in ("ip", "tc", "nft") if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    if os.geteuid():
        return "needs root"
    name = f"{PREFIX}-{os.getpid()}-try"
    try:
        run("ip", "netns", "add", name)
        run("ip", "-n", name, "link", "add", "name", "b", "type", "bridge")
        run("ip", "-n", name, "link", "add", "name", "v", "type", "veth", "peer", "name", "w")
        run(
            "tc",
            "-n",
            name,
            "qdisc",
            "add",
            "dev",
            "v",
            "root",
            "tbf",
            "rate",
            "1mbit",
            "burst",
            "9kb",
            "latency",
            "1s",
        )
        run("ip", "netns", "exec", name, "nft", "-f", "-", given=FIREWALL)
        run("ip", "netns", "exec", name, "nft", "add rule inet test loss numgen random mod 100 < 5 drop")
    except AssertionError as error:
        return f"this machine does not allow it: {error}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return ""


class Host:
    """One machine."""

    def __init__(self, lan: Lan, number: int) -> None:
        self.name, self.address = f"{lan.name}-{number}", f"{NETWORK}.{number}"
        self._hub, self._port = lan.hub, f"port{number}"
        run("ip", "netns", "add", self.name)
        run(
            "ip",
            "-n",
            self._hub,
            "link",
            "add",
            "name",
            self._port,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            self.name,
        )
        run("ip", "-n", self._hub, "link", "set", self._port, "master", "bridge", "up")
        run("ip", "-n", self.name, "address", "add", f"{self.address}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            run("ip", "-n", self.name, "link", "set", link, "up")
        self.run("nft", "-f", "-", given=FIREWALL)

    @property
    def prefix(self) -> list[str]:
        """Before a command that is to run there, as a process of its own."""
        return ["ip", "netns", "exec", self.name]

    def run(self, *command: str, given: str | None = None) -> str:
        return run(*self.prefix, *command, given=given)

    def limit(self, megabits: int) -> None:
        """Up and down."""
        for namespace, link in ((self.name, "eth0"), (self._hub, self._port)):
            shape = ("rate", f"{megabits}mbit", "burst", "32kb", "latency", "200ms")
            run("tc", "-n", namespace, "qdisc", "replace", "dev", link, "root", "tbf", *shape)

    @property
    def sent(self) -> int:
        """Bytes that went through the limit."""
        found = re.search(r"qdisc tbf .*\n Sent (\d+) bytes", run("tc", "-n", self.name, "-s", "qdisc"))
        return int(found[1]) if found else 0

    def lose(self, percent: int) -> None:
        """So many of the packets that come."""
        self.run("nft", "flush chain inet test loss")
        if percent:
            rule = f"iifname eth0 numgen random mod 100 < {percent} counter drop"
            self.run("nft", f"add rule inet test loss {rule}")

    @property
    def lost(self) -> int:
        """Packets."""
        return sum(map(int, re.findall(r"counter packets (\d+)", self.run("nft", "list chain inet test loss"))))

    def cut(self) -> None:
        """Nothing comes or goes, and nobody is told."""
        self.run("nft", "add rule inet test here iifname eth0 drop; add rule inet test away oifname eth0 drop")

    def heal(self) -> None:
        self.run("nft", "flush chain inet test here; flush chain inet test away")

    def reaches(self, other: Host) -> bool:
        """Whether a packet gets there and back."""
        code = (
            "import socket, sys\n"
            "try: socket.create_connection((sys.argv[1], 9), timeout=1)\n"
            "except ConnectionRefusedError: print('yes')\n"
            "except OSError: print('no')\n"
        )
        return self.run("python3", "-c", code, other.address).strip() == "yes"


class Lan:
    """Hosts on a bridge."""

    def __init__(self, size: int) -> None:
        self.name = f"{PREFIX}-{os.getpid()}"
        self.hub = f"{self.name}-hub"
        run("ip", "netns", "add", self.hub)
        run("ip", "-n", self.hub, "link", "add", "name", "bridge", "type", "bridge")
        run("ip", "-n", self.hub, "link", "set", "bridge", "up")
        self.hosts = [Host(self, number) for number in range(1, size + 1)]


def namespaces() -> list[str]:
    """Ours, and what others have left of theirs."""
    names = [line.split()[0] for line in run("ip", "netns", "list").splitlines() if line.strip()]
    return [name for name in names if re.fullmatch(rf"{PREFIX}-\d+-\w+", name)]


def remove(pid: int) -> None:
    """All that a process made."""
    for name in namespaces():
        if name.split("-")[1] == str(pid):
            run("ip", "netns", "del", name)


@contextmanager
def lan_of(size: int) -> Iterator[Lan]:
    """Afterwards nothing of it is left, nor of a test that was killed."""
    for pid in {int(name.split("-")[1]) for name in namespaces()}:
        if not psutil.pid_exists(pid):
            remove(pid)
    try:
        yield Lan(size)
    finally:
        remove(os.getpid())
        assert [name for name in namespaces() if name.split("-")[1] == str(os.getpid())] == []
