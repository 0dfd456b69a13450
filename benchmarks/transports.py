"""A second road beside p2pd? The project's transport and iroh's Python wheel carry the same frames, side by side.

    make iroh
    OMP_NUM_THREADS=1 python benchmarks/transports.py [--only CELL ...] [--lines NAME ...] [--roads NAME ...]
        [--turns 3] [--json FILE]

Each node is a process of its own (transports_node.py has the roads). In every turn each road has its turn on the same
line; what is told are medians of the turns. Lines other than loopback take root (relay.py), homes behind routers nft
too. Processor is that of a node's processes, p2pd's with it. Memory (RSS) is what the road adds: libraries and
connections in the node's own process, and p2pd's process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import select
import signal
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from time import monotonic, sleep, strftime
from typing import Any

from relay import DEVICE, INSIDE, Hosts, address, hosts_on

from p2ptrain.sim.scenario import LINES, Line

NODE, RELAY = (Path(__file__).with_name(f"transports_{name}.py") for name in ("node", "relay"))
PLACES: dict[str, Line | None] = {"loopback": None, "gbit": INSIDE, "dsl": LINES["dsl"], "lte": LINES["lte"]}
DELIVERED = {"loopback": 2**28, "gbit": 2**26, "dsl": 2**23, "lte": 2**23}  # bytes of a measurement of throughput
LARGE = 16 * 2**20
ANSWER_SECONDS = 200.0
NUMBERS = count(1)  # of nodes: each has a key of its own
DEAD_SECONDS = 3.0  # between a kill and the next start

Record = dict[str, Any]


class Far:
    """A node in another process."""

    def __init__(self, road: str, place: str, port: int, prefix: Sequence[str] = (), **more: Any) -> None:
        self.settings = {"road": road, "host": place, "port": port, "seed": next(NUMBERS), **more}
        self.prefix = list(prefix)
        self.start()

    def start(self) -> None:
        self.began = monotonic()
        self.process = subprocess.Popen(  # noqa: S603
            [*self.prefix, sys.executable, str(NODE), json.dumps(self.settings)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
        )  # fmt: skip
        self.numbers, self.answers = count(1), dict[int, Record]()
        ready = self.answer(0)
        self.address, self.peer, self.ready_at = ready["address"], ready["peer"], ready["at"]

    def order(self, do: str, **arguments: Any) -> int:
        assert self.process.stdin is not None
        number = next(self.numbers)
        self.process.stdin.write(json.dumps({"of": number, "do": do, "with": arguments}).encode() + b"\n")
        return number

    def answer(self, number: int, seconds: float = ANSWER_SECONDS) -> Record:
        assert self.process.stdout is not None
        end = monotonic() + seconds
        while number not in self.answers:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, end - monotonic()))
            line = self.process.stdout.readline() if ready else b""
            if not line:
                raise OSError(f"no answer of {self.settings}")
            found = json.loads(line)
            self.answers[found.pop("of")] = found
        return self.answers.pop(number)

    def ask(self, do: str, **arguments: Any) -> Record:
        found = self.answer(self.order(do, **arguments))
        if "error" in found:
            raise OSError(f"{do}: {found['error']}")
        return found

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def close(self) -> float:
        """Ends the node; returns the seconds that it took."""
        began = monotonic()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()
        return monotonic() - began


class Place:
    """Two hosts with a line between them, or this machine."""

    def __init__(self, name: str, hosts: Hosts | None) -> None:
        self.name, self.hosts, self.ports = name, hosts, count(24_000)

    def node(self, road: str, number: int, **more: Any) -> Far:
        if self.hosts is None:
            return Far(road, "127.0.0.1", next(self.ports), **more)
        return Far(road, address(number), next(self.ports), self.hosts.prefix(number), **more)


@contextlib.contextmanager
def place(name: str) -> Iterator[Place]:
    line = PLACES[name]
    if line is None:
        yield Place(name, None)
        return
    with hosts_on([line], 2) as hosts:
        yield Place(name, hosts)


@contextlib.contextmanager
def pair(where: Place, road: str) -> Iterator[tuple[Far, Far]]:
    nodes = [where.node(road, number) for number in range(2)]
    try:
        yield nodes[0], nodes[1]
    finally:
        for node in nodes:
            node.close()


def used(before: Record, after: Record) -> float:
    return after["processor"] - before["processor"]


# -----------------------------------------------------------------------------------------------
# Cells: each returns what one road does in one turn


def meeting(where: Place, road: str) -> Record:
    """Connects, five times, and asks for an answer of 1 KB."""
    with pair(where, road) as (one, other):
        found = []
        for _ in range(5):
            found.append(one.ask("connect", address=other.address))
            one.ask("disconnect", peer=other.peer)
            sleep(0.5)
        return {
            "first, connected": found[0]["connected"],
            "connected": statistics.median(each["connected"] for each in found),
            "answered": statistics.median(each["answered"] for each in found),
            "started": one.ready_at - one.began,
        }


def latency(where: Place, road: str) -> Record:
    """Echoes of 1 KB and 100 KB, and the delivery of 16 MB with its receipt."""
    times = (400, 100) if where.name in ("loopback", "gbit") else (30, 5)
    with pair(where, road) as (one, other):
        one.ask("connect", address=other.address)
        one.ask("echo", peer=other.peer, size=1_000, times=5)
        small = one.ask("echo", peer=other.peer, size=1_000, times=times[0])
        medium = one.ask("echo", peer=other.peer, size=100_000, times=times[1])
        large = one.ask("deliver", peer=other.peer, size=LARGE, streams=1)
        return {
            "1 KB": small["median"], "1 KB, p95": small["p95"],
            "100 KB": medium["median"], "100 KB, p95": medium["p95"],
            "16 MB": large["seconds"],
        }  # fmt: skip


def throughput(where: Place, road: str) -> Record:
    """Delivers on one stream, on eight, and 1 KB messages beside one."""
    size = DELIVERED[where.name]
    with pair(where, road) as (one, other):
        one.ask("connect", address=other.address)
        found: Record = {}
        for streams in (1, 8):
            before = [node.ask("usage") for node in (one, other)]
            told = one.ask("deliver", peer=other.peer, size=size, streams=streams)
            after = [node.ask("usage") for node in (one, other)]
            name = f"{streams} streams" if streams > 1 else "1 stream"
            found[f"{name}, MB/s"] = size / 1e6 / told["seconds"]
            found[f"{name}, first done"] = told["first"] / told["seconds"]
            for who, then, now in zip(("sender", "receiver"), before, after, strict=True):
                found[f"{name}, {who}, s a GB"] = used(then, now) / (size / 1e9)
                found[f"{name}, {who}, loop late"] = now["late_most"]
        for priority in (0, 1) if road.startswith("iroh") else (0,):
            told = one.ask("beside", peer=other.peer, size=size, priority=priority)
            name = "1 KB beside, first" if priority else "1 KB beside"
            found |= {name: told["median"], f"{name}, most": told["most"]}
        return found


def gone(where: Place, road: str) -> Record:
    """A peer is killed; and its line is cut, while nothing and while something is said."""
    found: Record = {}
    for how in ("killed", *(("cut", "cut, talking") if where.hosts else ())):
        with pair(where, road) as (one, other):
            one.ask("connect", address=other.address)
            number = one.order("watch", peer=other.peer, talks=how == "cut, talking")
            sleep(3.0)
            at = monotonic()
            if how == "killed":
                other.kill()
            else:
                assert where.hosts is not None
                where.hosts.namespaces[1].ip("link", "set", DEVICE, "down")
            told = one.answer(number)
            if how != "killed":
                assert where.hosts is not None
                where.hosts.namespaces[1].ip("link", "set", DEVICE, "up")
            for name in ("stream", "list"):
                found[f"{how}, {name}"] = None if told[name] is None else told[name] - at
    return found


def back(where: Place, road: str) -> Record:
    """A peer is killed and starts again, while the other dials it, and dials the other itself."""
    with pair(where, road) as (one, other):
        one.ask("connect", address=other.address)
        other.kill()
        number = one.order("dial", address=other.address, seconds=60.0)
        sleep(DEAD_SECONDS)
        other.start()
        told = one.answer(number)
        found = {"dialled": told["at"] and told["at"] - other.ready_at, "tries": told["tries"]}
        other.kill()
        sleep(DEAD_SECONDS)
        other.start()
        told = other.ask("dial", address=one.address, seconds=60.0)
        return found | {"dials": told["at"] and told["at"] - other.ready_at, "started": other.ready_at - other.began}


def crowd(size: int, where: Place, road: str) -> Record:
    """All are connected with all, say nothing, and then 1 KB to everyone twice a second. All are in one process, so
    that 24 fit on two cores, with p2pd's beside it."""
    node = where.node("tcp", 0, ticks=False)
    try:
        ports = next(where.ports) + 1_000
        return node.answer(node.order("crowd", road=road, size=size, port=ports), 600.0)
    finally:
        node.close()


# -----------------------------------------------------------------------------------------------
# Homes


def homes(road: str, *, relayed: bool) -> Record:
    """Two homes behind routers that let in only replies: until they answer each other, with a relay and without.

    Both know one public node, which tells them where it sees them. p2pd waits for its reservation, and is then dialled
    through the relay; without one, both dial where the other is seen, at the same time.
    """
    from tests.helpers.namespaces import Internet, made  # noqa: PLC0415  # takes nft

    with made(lambda: Internet(1, 2)) as net, contextlib.ExitStack() as stack:
        public, (one, other) = net.public[0], net.homes
        url = f"http://{public.address}:3340"
        more: Record = {"relay": url} if relayed and road == "iroh" else {}
        if relayed and road == "iroh":
            command = [*public.prefix, sys.executable, str(RELAY), public.address, "3340"]
            relay = subprocess.Popen(command, stdout=subprocess.PIPE)  # noqa: S603
            stack.callback(relay.wait)
            stack.callback(relay.kill)
            assert relay.stdout is not None
            relay.stdout.readline()
        middle = Far(road, public.address, 4001, public.prefix, network={"nat": True, "relay": relayed})
        stack.callback(middle.close)
        began = monotonic()
        if road.startswith("p2pd"):
            more = {"network": {"nat": True, "relay": relayed, "trusted_relays": [middle.address] if relayed else []}}
        ends = [Far(road, each.address, 4001, each.prefix, **more) for each in (one, other)]
        for end in ends:
            stack.callback(end.close)
            end.ask("connect", address=middle.address)
        found: Record = {"connected": monotonic() - began}
        seen = [middle.ask("paths", peer=end.peer)["ends"][-1] for end in ends]
        if relayed:
            there = where_to(ends[1], road, url)
            told = [ends[0].ask("dial", address=there, seconds=60.0)]
        else:
            there = ""
            places = [
                f"{end.peer} {at} -" if road == "iroh" else f"{at}/p2p/{end.address.rpartition('/')[2]}"
                for end, at in zip(ends, seen, strict=True)
            ]
            numbers = [end.order("dial", address=at, seconds=30.0) for end, at in zip(ends, places[::-1], strict=True)]
            told = [end.answer(number) for end, number in zip(ends, numbers, strict=True)]
        at = [each["at"] for each in told if each["at"] is not None]
        found["answered after"] = min(at) - began if at else None
        if not at:
            return found | {"why": told[0]["why"]}
        found["1 KB, at first"] = at_last(ends[0], "echo", peer=ends[1].peer, size=1_000, times=50)["median"]
        try:
            found["16 MB, at first"] = ends[0].ask("deliver", peer=ends[1].peer, size=LARGE, streams=1)["seconds"]
        except OSError as error:  # the relay has limits
            found |= {"16 MB, at first": None, "why": str(error)}
            ends[0].ask("dial", address=there, seconds=60.0)
        if relayed and road == "iroh":
            for end, place_ in zip(ends, seen, strict=True):
                end.ask("tell", address=place_)
        direct = monotonic()
        while not (is_direct := not relayed_by(ends[0].ask("paths", peer=ends[1].peer)["ends"])):
            sleep(0.5)
            if monotonic() > direct + 60.0:
                break
        found["direct after"] = monotonic() - direct if is_direct else None
        found["path"] = ", ".join(ends[0].ask("paths", peer=ends[1].peer)["ends"])
        found["1 KB, at last"] = at_last(ends[0], "echo", peer=ends[1].peer, size=1_000, times=50)["median"]
        return found


def at_last(end: Far, do: str, **arguments: Any) -> Record:
    """Asks again, for a minute: a connection may give way to a better one meanwhile."""
    until = monotonic() + 60.0
    while True:
        try:
            return end.ask(do, **arguments)
        except OSError:
            if monotonic() > until or end.process.poll() is not None:
                raise
            sleep(0.5)


def where_to(end: Far, road: str, url: str) -> str:
    """Returns the address of a home through the relay, as soon as it has one."""
    if road == "iroh":
        return f"{end.peer} - {url}"
    while "/p2p-circuit/" not in (found := str(end.ask("addresses")["address"])):
        sleep(0.2)
        if monotonic() > end.began + 120.0:
            raise OSError("no relay in two minutes")
    return found


def relayed_by(ends: Sequence[str]) -> bool:
    return all("p2p-circuit" in each or "http" in each for each in ends)


# -----------------------------------------------------------------------------------------------
# Turns

ON_LINES: dict[str, Callable[[Place, str], Record]] = {
    "meeting": meeting, "latency": latency, "throughput": throughput, "gone": gone, "back": back,
}  # fmt: skip
ROADS = ("tcp", "p2pd", "p2pd-quic", "iroh", "iroh-raw")
CELLS = (*ON_LINES, "crowd-4", "crowd-24", "homes")
BARE = {"latency", "throughput"}  # what bare sockets are measured in as well: what the line allows


def turns(options: argparse.Namespace) -> Iterator[Record]:
    wanted = [name for name in CELLS if name in options.only]
    for line in options.lines:
        cells = [name for name in wanted if name in ON_LINES and (name != "gone" or line in ("loopback", "dsl"))]
        for turn in range(options.turns if cells else 0):
            with place(line) as where:
                for cell in cells:
                    for road in options.roads:
                        if road != "tcp" or cell in BARE:
                            yield told(partial(ON_LINES[cell], where, road), cell, line, road, turn)
    for turn in range(options.turns):
        for cell in wanted:
            for road in (each for each in options.roads if cell not in ON_LINES and (each != "tcp" or cell in BARE)):
                if cell == "homes":
                    for relayed in (True, False):
                        line = "with a relay" if relayed else "without"
                        yield told(
                            lambda road=road, relayed=relayed: homes(road, relayed=relayed), cell, line, road, turn
                        )
                else:
                    size = int(cell.partition("-")[2])
                    yield told(
                        lambda size=size, road=road: crowd(size, Place("loopback", None), road),
                        cell,
                        "loopback",
                        road,
                        turn,
                    )


def told(measure: Callable[[], Record], cell: str, line: str, road: str, turn: int) -> Record:
    try:
        found = measure()
    except (OSError, KeyError) as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    return {"cell": cell, "line": line, "road": road, "turn": turn, "load": os.getloadavg()[0], "found": found}


def medians(records: Sequence[Record]) -> dict[tuple[str, str], dict[str, Record]]:
    """Returns by cell and line, then by road, the median of each figure, and None where most turns had none."""
    grouped: dict[tuple[str, str], dict[str, dict[str, list[Any]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for each in records:
        for name, value in each["found"].items():
            if not isinstance(value, str):
                grouped[each["cell"], each["line"]][each["road"]][name].append(value)
    return {
        key: {road: {name: middle(values) for name, values in found.items()} for road, found in roads.items()}
        for key, roads in grouped.items()
    }


def middle(values: Sequence[float | None]) -> float | None:
    there = [each for each in values if each is not None]
    return statistics.median(there) if 2 * len(there) > len(values) else None


def show(records: Sequence[Record]) -> None:
    for (cell, line), roads in medians(records).items():
        print(f"\n{cell}, {line}: {', '.join(roads)}")
        for name in dict.fromkeys(name for found in roads.values() for name in found):
            values = [found.get(name) for found in roads.values()]
            print(f"  {name:32}" + "".join(f"{'-' if each is None else f'{each:.4g}':>12}" for each in values))
    for each in records:
        for name in ("error", "why"):
            if each["found"].get(name):
                print(f"{each['cell']}, {each['line']}, {each['road']}: {each['found'][name]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CELLS, nargs="+", default=CELLS)
    parser.add_argument("--lines", choices=PLACES, nargs="+", default=list(PLACES))
    parser.add_argument(
        "--roads", choices=("tcp", "p2pd", "p2pd-quic", "iroh", "iroh-raw"), nargs="+", default=["tcp", "p2pd", "iroh"]
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    records: list[Record] = []
    machine = {"system": platform.platform(), "python": platform.python_version(), "processors": os.cpu_count()}
    for each in turns(options):
        records.append(each)
        print(f"{each['cell']}, {each['line']}, {each['road']}, turn {each['turn'] + 1}", flush=True)
        if options.json:
            found = {"date": strftime("%Y-%m-%d"), "machine": machine, "command": sys.argv[1:], "records": records}
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    show(records)


if __name__ == "__main__":
    main()
