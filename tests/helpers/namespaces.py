"""Hosts on one machine: Linux network namespaces on a bridge, with real addresses, limits, losses and routers.

All of it lies in namespaces of our own, the bridge too, so that the machine's network is not touched, and goes with
them. It needs root, `ip` and `tc` (iproute2) and `nft` (nftables).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import psutil

PREFIX = "p2pt"
T = TypeVar("T")
NETWORKS = {4: "10.77.0.{}/24", 6: "fd77::{}/64"}
INTERNET = "11.77.0.{}/16"  # libp2p holds none of those that are reserved for documentation for public
HOME = "192.168.1.{}/24"  # of everybody who has a router
ROUTER = """\
table ip router {
  chain asked { ct state { established, related } accept; drop; }
  chain inwards { type filter hook input priority 0; iifname "wan" jump asked; }
  chain through { type filter hook forward priority 0; iifname "wan" jump asked; }
  chain out { type nat hook postrouting priority 100; oifname "wan" masquerade; }
}
"""
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
    """Returns why namespaces cannot be used here; empty if they can."""
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
        shape = ("rate", "1mbit", "burst", "9kb", "latency", "1s")
        run("tc", "-n", name, "qdisc", "add", "dev", "v", "root", "tbf", *shape)
        run("ip", "netns", "exec", name, "nft", "-f", "-", given=FIREWALL)
        run("ip", "netns", "exec", name, "nft", "add rule inet test loss numgen random mod 100 < 5 drop")
    except AssertionError as error:
        return f"this machine does not allow it: {error}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return ""


class Namespace:
    """A network namespace and its processes."""

    def __init__(self, name: str) -> None:
        self.name = name
        run("ip", "netns", "add", name)
        self.ip("link", "set", "lo", "up")

    @property
    def prefix(self) -> list[str]:
        """Returns the prefix that makes a command run there."""
        return ["ip", "netns", "exec", self.name]

    def run(self, *command: str, given: str | None = None) -> str:
        return run(*self.prefix, *command, given=given)

    def ip(self, *command: str) -> str:
        return run("ip", "-n", self.name, *command)

    def add_bridge(self) -> None:
        self.ip("link", "add", "name", "bridge", "type", "bridge")
        self.ip("link", "set", "bridge", "up")

    def join(self, hub: Namespace, link: str, address: str) -> str:
        """Connects to another namespace's bridge; returns the name of the interface there."""
        port = f"port-{self.name.rpartition('-')[2]}"
        end = ("name", port, "type", "veth", "peer", "name", link, "netns", self.name)
        hub.ip("link", "add", *end)
        hub.ip("link", "set", port, "master", "bridge", "up")
        self.ip("address", "add", address, "dev", link, *(["nodad"] if ":" in address else []))
        self.ip("link", "set", link, "up")
        return port


class Host(Namespace):
    """One machine."""

    def __init__(self, name: str, hub: Namespace, address: str) -> None:
        super().__init__(name)
        self.address, _, _ = address.partition("/")
        self.router: Namespace | None = None  # at home
        self.outside = self.address  # as others see it
        self._hub, self._port = hub, self.join(hub, "eth0", address)
        self.run("nft", "-f", "-", given=FIREWALL)

    def listen(self, kind: str) -> str:
        """Returns a daemon's address for a transport such as tcp/4001."""
        return f"/ip{6 if ':' in self.address else 4}/{self.address}/{kind}"

    def limit(self, megabits: int) -> None:
        """Limits the rate in both directions."""
        for namespace, link in ((self, "eth0"), (self._hub, self._port)):
            shape = ("rate", f"{megabits}mbit", "burst", "32kb", "latency", "200ms")
            run("tc", "-n", namespace.name, "qdisc", "replace", "dev", link, "root", "tbf", *shape)

    @property
    def sent(self) -> int:
        """Returns the bytes that went through the limit."""
        found = re.search(r"qdisc tbf .*\n Sent (\d+) bytes", run("tc", "-n", self.name, "-s", "qdisc"))
        return int(found[1]) if found else 0

    def lose(self, percent: int) -> None:
        """Drops this share of incoming packets."""
        self.run("nft", "flush chain inet test loss")
        if percent:
            rule = f"iifname eth0 numgen random mod 100 < {percent} counter drop"
            self.run("nft", f"add rule inet test loss {rule}")

    @property
    def lost(self) -> int:
        """Packets."""
        return sum(map(int, re.findall(r"counter packets (\d+)", self.run("nft", "list chain inet test loss"))))

    def cut(self) -> None:
        """Drops all packets silently."""
        self.run("nft", "add rule inet test here iifname eth0 drop; add rule inet test away oifname eth0 drop")

    def heal(self) -> None:
        self.run("nft", "flush chain inet test here; flush chain inet test away")

    def talks_to(self, other: Host) -> bool:
        """True if the router tracks a two-way connection with another home."""
        assert self.router is not None
        known = self.router.run("cat", "/proc/net/nf_conntrack").splitlines()
        return any(f"dst={other.outside} " in line and "[ASSURED]" in line for line in known)

    def reaches(self, other: Host) -> bool:
        """True if a ping is answered."""
        code = (
            "import socket, sys\n"
            "try: socket.create_connection((sys.argv[1], 9), timeout=1)\n"
            "except ConnectionRefusedError: print('yes')\n"
            "except OSError: print('no')\n"
        )
        return self.run("python3", "-c", code, other.address).strip() == "yes"


class Lan:
    """Hosts on a bridge, with addresses of one family only."""

    def __init__(self, size: int, family: int = 4) -> None:
        name = f"{PREFIX}-{os.getpid()}"
        self.hub = Namespace(f"{name}-hub")
        self.hub.add_bridge()
        self.hosts = [
            Host(f"{name}-{number}", self.hub, NETWORKS[family].format(number)) for number in range(1, size + 1)
        ]


class Internet:
    """Hosts with public addresses, and homes: a host each, behind a NAT router."""

    def __init__(self, public: int, homes: int) -> None:
        name = f"{PREFIX}-{os.getpid()}"
        self.hub = Namespace(f"{name}-hub")
        self.hub.add_bridge()
        self.public = [Host(f"{name}-{n}", self.hub, INTERNET.format(n)) for n in range(1, public + 1)]
        self.homes = [self._home(f"{name}-home{n}", INTERNET.format(100 + n)) for n in range(1, homes + 1)]

    def _home(self, name: str, address: str) -> Host:
        router = Namespace(f"{name}r")
        router.join(self.hub, "wan", address)
        router.add_bridge()
        router.ip("address", "add", HOME.format(1), "dev", "bridge")
        router.run("sysctl", "-q", "net.ipv4.ip_forward=1")
        router.run("nft", "-f", "-", given=ROUTER)
        host = Host(name, router, HOME.format(2))
        host.router, host.outside = router, address.partition("/")[0]
        host.ip("route", "add", "default", "via", HOME.format(1).partition("/")[0])
        return host


def namespaces() -> list[str]:
    """Returns our namespaces, and those left over from killed tests."""
    names = [line.split()[0] for line in run("ip", "netns", "list").splitlines() if line.strip()]
    return [name for name in names if re.fullmatch(rf"{PREFIX}-\d+-\w+", name)]


def remove(pid: int) -> None:
    """Removes everything that a process created."""
    for name in namespaces():
        if name.split("-")[1] == str(pid):
            run("ip", "netns", "del", name)


@contextmanager
def made(build: Callable[[], T]) -> Iterator[T]:
    """Creates a network and removes it at the end, with leftovers of killed tests."""
    for pid in {int(name.split("-")[1]) for name in namespaces()}:
        if not psutil.pid_exists(pid):
            remove(pid)
    try:
        yield build()
    finally:
        remove(os.getpid())
        assert [name for name in namespaces() if name.split("-")[1] == str(os.getpid())] == []
