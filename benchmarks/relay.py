"""Hosts on one machine, joined by a line with a rate, a delay and losses, where `tc netem` is missing.

Each host is a network namespace with a TUN device. One process, this file's, reads the packets that hosts send, and
writes each to the device of the host that it is for, when the line would have brought it: it waits for the sender's
uplink, then for the delay, then for the receiver's downlink. Before either link is a queue of one round trip, at least
100 ms long; what comes while it is full is dropped, and so is what the line loses. Packets keep their order. With
`--regions`, hosts are dealt to as many sites: inside one each has a line of 1 Gbit/s and 1 ms, and the line above is
one for all of a site's hosts, to all other sites.

All bytes that a host sends and receives are counted, IP's headers too: what its daemon, p2pd and kernel send, with
gossip's copies and what is sent again.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import gc
import heapq
import json
import os
import random
import select
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic, process_time
from typing import Any

from p2ptrain.sim.scenario import LINES, Line

NETWORK = "11.78.0"  # public, like a home's: nothing here leaves the machine
DEVICE = "line0"
DEFAULT = Line(20.0, 20.0, 0.1)
INSIDE = Line(1_000.0, 1_000.0, 0.001)  # between the hosts of one region
QUEUE_SECONDS_MIN = 0.1
PACKET_BYTES_MAX = 2_048  # the devices' MTU is 1,500
BURST = 32  # packets read from one device before another's turn
STDIN, STDOUT = 0, 1
TUNSETIFF, IFF_TUN_WITHOUT_HEADER = 0x400454CA, 0x1001
CLONE_NEWNET = 0x40000000
TUN = Path("/dev/net/tun")
NAMESPACES = Path("/run/netns")


# ---------------------------------------------------------------------------------------------------
# The process that carries packets


@dataclass(slots=True)
class Counts:
    """Packets and bytes of a host, and packets that did not arrive."""

    sent_bytes: int = 0
    far_bytes: int = 0  # of these, to other regions
    sent_packets: int = 0
    received_bytes: int = 0
    lost_packets: int = 0  # sent by it, and lost by the line
    dropped_packets: int = 0  # before its uplink or its downlink


class Relay:
    """Carries packets between devices."""

    def __init__(self, devices: Sequence[int], lines: Sequence[Line], seed: int, regions: Sequence[int] = ()) -> None:
        self.devices, self.rng = devices, random.Random(seed)  # noqa: S311
        self.regions = regions or range(len(devices))  # by host
        self.set_lines(lines)
        self.place_of = {address_bytes(place): place for place in range(len(devices))}
        self.counts = [Counts() for _ in devices]
        links = 2 * len(devices)  # each host's in its region, then each region's
        self.up_free, self.down_free, self.last = ([0.0] * links for _ in range(3))  # by link: when
        self.under_way: list[tuple[float, int, int, int, bytes, bool]] = []  # when, number, link, to, packet, has left
        self.number = 0
        self.late_seconds = self.latest_seconds = 0.0  # in all, and the most

    def set_lines(self, lines: Sequence[Line]) -> None:
        """Gives each region the next of these lines, for packets that are sent from now on."""
        self.lines = [lines[region % len(lines)] for region in range(max(self.regions) + 1)]

    def serve(self) -> None:
        """Carries until stdin ends; a line on stdin asks for the counts, and may first give other lines."""
        poll = select.epoll()
        places = {device: place for place, device in enumerate(self.devices)}
        for each in (STDIN, *self.devices):
            poll.register(each, select.EPOLLIN)
        while True:
            for each, _ in poll.poll(max(0.0, self.under_way[0][0] - monotonic()) if self.under_way else None):
                if each != STDIN:
                    self.take(places[each])
                elif not (asked := os.read(STDIN, 65_536)):
                    return
                else:
                    if lines := json.loads(asked):
                        self.set_lines([Line(**line) for line in lines])
                    os.write(STDOUT, json.dumps(self.report()).encode() + b"\n")
            self.deliver()

    def take(self, source: int) -> None:
        """Reads what a host sends, and sends it on its way."""
        device, counts, draw = self.devices[source], self.counts[source], self.rng.random
        now = monotonic()
        for _ in range(BURST):
            try:
                packet = os.read(device, PACKET_BYTES_MAX)
            except BlockingIOError:
                return
            target = self.place_of.get(packet[16:20])
            if target is None or packet[0] >> 4 != 4:
                continue
            counts.sent_packets += 1
            counts.sent_bytes += len(packet)
            line, up, down = self.way(source, target)
            if self.regions[source] != self.regions[target]:
                counts.far_bytes += len(packet)
            begins = max(now, self.up_free[up])
            if begins - now > queue_seconds(line):
                counts.dropped_packets += 1
                continue
            self.up_free[up] = leaves = begins + len(packet) * 8e-6 / line.up_megabits
            if draw() < line.loss:
                counts.lost_packets += 1
                continue
            arrives = leaves + line.delay_seconds + 2 * line.jitter_seconds * draw()
            self.last[up] = arrives = max(arrives, self.last[up])
            self.number += 1
            heapq.heappush(self.under_way, (arrives, self.number, down, target, packet, False))

    def way(self, source: int, target: int) -> tuple[Line, int, int]:
        """Returns the line from one host to another, and its two links."""
        here, there = self.regions[source], self.regions[target]
        if here == there:
            return INSIDE, source, target
        return self.lines[here], len(self.devices) + here, len(self.devices) + there

    def deliver(self) -> None:
        """Brings what is due through the receivers' downlinks."""
        now, under_way = monotonic(), self.under_way
        while under_way and under_way[0][0] <= now:
            at, number, link, target, packet, has_left = heapq.heappop(under_way)
            counts = self.counts[target]
            if not has_left:
                line = self.lines[link - len(self.devices)] if link >= len(self.devices) else INSIDE
                begins = max(at, self.down_free[link])
                if begins - at > queue_seconds(line):
                    counts.dropped_packets += 1
                    continue
                self.down_free[link] = at = begins + len(packet) * 8e-6 / line.down_megabits
                if at > now:
                    heapq.heappush(under_way, (at, number, link, target, packet, True))
                    continue
            with suppress(OSError):  # the host has gone, or reads nothing
                os.write(self.devices[target], packet)
                counts.received_bytes += len(packet)
            self.late_seconds += now - at
            self.latest_seconds = max(self.latest_seconds, now - at)

    def report(self) -> dict[str, Any]:
        late = {"mean_late_seconds": self.late_seconds / max(1, self.number), "latest_seconds": self.latest_seconds}
        return {"hosts": [asdict(each) for each in self.counts], "processor_seconds": process_time(), **late}


def queue_seconds(line: Line) -> float:
    """Returns the length of the queues: a product of bandwidth and delay, as routers have it by the old rule."""
    return max(QUEUE_SECONDS_MIN, 2 * line.delay_seconds)


def address(place: int) -> str:
    return f"{NETWORK}.{place + 1}"


def address_bytes(place: int) -> bytes:
    return bytes(map(int, address(place).split(".")))


def open_device(namespace: str) -> int:
    """Makes a TUN device in a namespace, where it stays while it is open here."""
    libc = ctypes.CDLL(None, use_errno=True)
    with (NAMESPACES / namespace).open() as there, Path("/proc/self/ns/net").open() as here:
        for place in (there, here):
            if libc.setns(place.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"no way into {place.name}")
            if place is there:
                device = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
                fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TUN_WITHOUT_HEADER))
    return device


def carry(settings: dict[str, Any]) -> None:
    """Makes the devices, says so, and carries packets."""
    gc.disable()  # nothing here has cycles
    with suppress(PermissionError):
        os.nice(-10)  # a line does not slow down when processors are busy
    devices = [open_device(each) for each in settings["namespaces"]]
    os.write(STDOUT, b"ready\n")
    lines = [Line(**each) for each in settings["lines"]]
    Relay(devices, lines, settings["seed"], settings["regions"]).serve()


# ---------------------------------------------------------------------------------------------------
# The hosts, as benchmarks see them


class Hosts:
    """Hosts that a relay joins; each, or each region, has the next of these lines."""

    def __init__(self, size: int, lines: Sequence[Line], seed: int = 1, regions: int | None = None) -> None:
        from tests.helpers.namespaces import PREFIX, Namespace  # noqa: PLC0415  # the relay itself needs none of it

        self.namespaces = [Namespace(f"{PREFIX}-{os.getpid()}-line{place}") for place in range(size)]
        settings = {"namespaces": [each.name for each in self.namespaces], "seed": seed}
        settings["lines"] = [asdict(line) for line in lines]
        settings["regions"] = [place % (regions or size) for place in range(size)]
        self.process = subprocess.Popen(  # noqa: S603
            [sys.executable, __file__, json.dumps(settings)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        if self._line() != b"ready\n":
            self.close()
            raise OSError("the relay did not start")
        for place, each in enumerate(self.namespaces):
            each.run("sysctl", "-q", "net.ipv6.conf.all.disable_ipv6=1")  # no chatter of neighbours
            each.ip("address", "add", f"{address(place)}/24", "dev", DEVICE)
            each.ip("link", "set", DEVICE, "up")

    def _line(self) -> bytes:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def prefix(self, place: int) -> list[str]:
        """Returns the prefix that makes a command run on a host."""
        return list(self.namespaces[place].prefix)

    def counts(self, lines: Sequence[Line] = ()) -> dict[str, Any]:
        """Returns all counts so far; from now on hosts have these lines, if any are given."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([asdict(line) for line in lines]).encode() + b"\n")
        found: dict[str, Any] = json.loads(self._line())
        return found

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def hosts_on(lines: Sequence[Line], size: int, seed: int = 1, regions: int | None = None) -> Iterator[Hosts]:
    """Makes hosts, and removes them at the end; without regions each is one of its own."""
    from tests.helpers.namespaces import made  # noqa: PLC0415

    with made(lambda: Hosts(size, lines, seed, regions)) as hosts:
        try:
            yield hosts
        finally:
            hosts.close()


def why_impossible() -> str:
    """Returns why there can be no hosts here; empty if there can."""
    if shutil.which("ip") is None or shutil.which("sysctl") is None:
        return "needs ip and sysctl"
    if os.geteuid():
        return "needs root"
    if not TUN.exists():
        return f"needs {TUN}"
    try:
        with hosts_on([DEFAULT], 1):
            return ""
    except (OSError, AssertionError) as error:
        return f"this machine allows no network namespace with a TUN device: {error}"


# ---------------------------------------------------------------------------------------------------
# The options of benchmarks


def add_line_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the line of each node: a named one, or 20 Mbit/s both ways and 100 ms")
    group.add_argument("--line", choices=LINES)
    group.add_argument(
        "--rate",
        type=rate_of,
        nargs="+",
        metavar="MBIT",
        help="in Mbit/s, up and down, or UP/DOWN; several: of the hosts in turn",
    )
    group.add_argument("--delay", type=float, metavar="MS", help="one way, from any node to any other")
    group.add_argument("--jitter", type=float, metavar="MS", help="mean of what comes on top of the delay")
    group.add_argument("--loss", type=float, metavar="PERCENT", help="of packets")
    group.add_argument("--regions", type=int, metavar="N", help="sites, each with one such line for all of its hosts")


def rate_of(text: str) -> tuple[float, float]:
    up, _, down = text.partition("/")
    return float(up), float(down or up)


def lines_of(arguments: argparse.Namespace) -> list[Line]:
    """Returns the named line, or the usual one, with what the other options change; one for each rate."""
    line = LINES[arguments.line] if arguments.line else DEFAULT
    if arguments.delay is not None:
        line = replace(line, delay_seconds=arguments.delay / 1_000)
    if arguments.jitter is not None:
        line = replace(line, jitter_seconds=arguments.jitter / 1_000)
    if arguments.loss is not None:
        line = replace(line, loss=arguments.loss / 100)
    rates = arguments.rate or ()
    is_possible = line.delay_seconds >= 0 and line.jitter_seconds >= 0 and 0 <= line.loss < 1
    if not (is_possible and all(min(rate) > 0 for rate in rates)):  # nor is what is not a number
        raise SystemExit("--rate must be above 0, --delay and --jitter 0 or more, --loss from 0 to below 100")
    return [replace(line, up_megabits=up, down_megabits=down) for up, down in rates] or [line]


if __name__ == "__main__":
    carry(json.loads(sys.argv[1]))
