"""Strangers of another implementation of libp2p that end daemons: how many seconds until the first of three has ended?

    OMP_NUM_THREADS=1 python -m benchmarks.strangers_end [--only NAME] [--seconds 330] [--json FILE]
    OMP_NUM_THREADS=1 python -m benchmarks.strangers_end --dials [--minutes 10] [--json FILE]

Each of FINDINGS was seen to end a node before there was a boundary around exchanges with peers (net/boundary.py). A
swarm of three daemons trains; one stranger comes, which needs nothing but an address, and does one of them. "-" stands
for a swarm that still runs when the time is over. An answer in the DHT tells only when a node next announces itself,
which it does every five minutes.

With `--dials` instead: strangers tell addresses of their choice in libp2p's identify, are met once, and leave. How
often does a node's p2pd then dial such an address by itself, and how many of them? Only loopback is dialled: listeners
of ours stand at addresses of 127.0.0.0/16.

The strangers' libp2p is py-libp2p's: `make test-foreign` sets it up. To measure another commit, copy this file and
tests/helpers/{foreign,other_libp2p}.py into a worktree of it, and run it there with PYTHONPATH set to that folder and
OTHER_LIBP2P to out/other-libp2p here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep

from p2ptrain.core import wire
from p2ptrain.identity import Identity, id_bytes_of, peer_id_of
from p2ptrain.net import questions
from p2ptrain.net.libp2p.control import RESPONSE_BYTES_MAX, pb
from p2ptrain.net.libp2p.process import find_binary
from p2ptrain.net.libp2p.streams import read_message, write_message
from tests.helpers.daemons import DaemonSwarm, StartableDaemon
from tests.helpers.foreign import DHT, NESTED, NOT_UTF8, Foreign, address, foreign, found, frame

LOOK_SECONDS = 0.1
KEYS, TOLD = 38, 32  # strangers, and the addresses that each may tell: more than a node remembers
VISIT_SECONDS = 2.0  # from one visit to the next
HOSTS = [f"127.0.{net}.{host}" for net in (0, 1, 77, 200) for host in (2, 3, 4, 5)]
SEED = bytes(range(32))
ERROR = re.compile(r"[| ]*\w+Error(:|$)")  # the last line of a traceback


class Act:
    """What one finding has at hand."""

    def __init__(self, strangers: Foreign, nodes: list[StartableDaemon], directory: Path, limit: float) -> None:
        self.strangers, self.nodes, self.directory, self.limit = strangers, nodes, directory, limit
        self.addresses = [node.address for node in nodes]
        self.run_id = str(nodes[0].status()["run_id"])
        self.left: list[subprocess.Popen[bytes]] = []

    @property
    def line(self) -> str:
        return f"/p2ptrain/2/{self.run_id}/line"

    def plays_along(self, who: str, told: list[str]) -> None:
        """Makes a stranger that takes part in the run, and tells addresses."""
        answer = frame(wire.encode(questions.Peers(tuple(told)))).hex()
        self.strangers.order(who, "answer", protocol=self.line, then="read")
        self.strangers.order(who, "answer", protocol=questions.PROTOCOL, read="frame", send=answer, then="close")


# -----------------------------------------------------------------------------------------------
# Findings


def four_bytes(act: Act) -> None:
    """Refuses a protocol with bytes that are not UTF-8, which p2pd quotes."""
    act.strangers.order("a", "answer", protocol=act.line, line="fffefd0a")
    act.strangers.order("a", "tell", protocols=[])
    act.strangers.connect("a", act.addresses[0])


def _in_the_dht(act: Act, value: bytes) -> None:
    for name in DHT:
        act.strangers.order("a", "answer", protocol=name, read="message", reply=found(value).hex(), then="close")
    for each in act.addresses:
        peer = act.strangers.connect("a", each)
        act.strangers.ping_dht("a", peer)


def nested(act: Act) -> None:
    """Answers a search in the DHT with 4,000 lists in one another."""
    _in_the_dht(act, NESTED)


def not_utf8(act: Act) -> None:
    """Answers a search in the DHT with a string that is not UTF-8."""
    _in_the_dht(act, NOT_UTF8)


def unknown_kind(act: Act) -> None:
    """Is dialled by p2pd at an address of a kind that hivemind does not know (WebTransport), and asks where it is seen.

    p2pd's address is of that kind too: a p2pd with the stranger's key listens there.
    """
    identity = Identity(SEED)
    key = act.directory / "stranger.key"
    key.write_bytes(bytes.fromhex("08011240") + SEED + identity.key)
    key.chmod(0o600)
    control = act.directory / "stranger.sock"
    options = [f"-listen=/unix{control}", f"-id={key}", "-hostAddrs=/ip4/127.0.0.1/udp/0/quic-v1/webtransport"]
    act.left.append(
        subprocess.Popen(  # noqa: S603  # hivemind's own
            [find_binary(), *options, "-dhtServer=false", "-relay=false"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
    )  # fmt: skip
    while not control.exists():
        sleep(LOOK_SECONDS)
    me, told = asyncio.run(_addresses_of(control))
    assert me == id_bytes_of(identity.key)
    who = "a"
    assert act.strangers.make(who, SEED) == peer_id_of(identity.key)
    act.strangers.order(who, "tell", addresses=[each.hex() for each in told], protocols=list(DHT))
    for each in act.addresses:
        peer = act.strangers.connect(who, each)
        act.strangers.ping_dht(who, peer)
        act.strangers.order(who, "leave", peer=peer)
        act.strangers.until("parted", who=who, peer=peer)
    asyncio.run(_ask_where_it_is(act, control))


async def _addresses_of(control: Path) -> tuple[bytes, list[bytes]]:
    found = (await _told_by(control, pb.Request(type=pb.Request.IDENTIFY))).identify
    return found.id, list(found.addrs)


async def _told_by(control: Path, request: object) -> object:
    reader, writer = await asyncio.open_unix_connection(control)
    await write_message(writer, request.SerializeToString())
    told = pb.Response.FromString(await read_message(reader, RESPONSE_BYTES_MAX))
    writer.close()
    return told


async def _ask_where_it_is(act: Act, control: Path) -> None:
    """Asks every node that has dialled, until one has ended."""
    end = monotonic() + act.limit
    while all(node.is_running for node in act.nodes) and monotonic() < end:
        await asyncio.sleep(LOOK_SECONDS)
        for each in (await _told_by(control, pb.Request(type=pb.Request.LIST_PEERS))).peers:
            content = pb.StreamOpenRequest(peer=each.id, proto=[questions.PROTOCOL], timeout=5)
            reader, writer = await asyncio.open_unix_connection(control)
            await write_message(writer, pb.Request(type=pb.Request.STREAM_OPEN, streamOpen=content).SerializeToString())
            if pb.Response.FromString(await read_message(reader, RESPONSE_BYTES_MAX)).type == pb.Response.OK:
                writer.write(frame(wire.encode(questions.AskSeen())))
                await reader.read(100)
            writer.close()


def comes_by_itself(act: Act) -> None:
    """Is dialled where nobody answers, is forgotten among hearsay meanwhile, and comes by itself."""
    strangers = act.strangers
    late = strangers.make("late")
    port = strangers.listen("wall", role="hang")
    hanging = f"/ip4/127.0.0.1/tcp/{port}/p2p/{late}"
    act.plays_along("teller", [hanging])
    act.plays_along("late", [])
    peer = strangers.connect("teller", act.addresses[0])
    strangers.until("came", who="wall")
    for number in range(KEYS):
        keys = (Identity(os.urandom(32)).key for _ in range(TOLD))
        act.plays_along(f"{number}", [f"/ip4/127.0.0.1/tcp/9/p2p/{peer_id_of(key)}" for key in keys])
        strangers.connect(f"{number}", act.addresses[0])
    for number in range(KEYS):
        strangers.until("asked", who=f"{number}", peer=peer, protocol=questions.PROTOCOL)
    strangers.connect("late", act.addresses[0])


FINDINGS: dict[str, Callable[[Act], None]] = {
    "four bytes": four_bytes,
    "nested": nested,
    "not UTF-8": not_utf8,
    "unknown kind": unknown_kind,
    "comes by itself": comes_by_itself,
}


def seconds_until_one_ends(finding: Callable[[Act], None], limit: float) -> tuple[float | None, int, str]:
    """Returns the seconds from the stranger's first step to the end of the first daemon, how many ended, and why."""
    with tempfile.TemporaryDirectory() as directory:
        swarm = DaemonSwarm(Path(directory))
        try:
            nodes = swarm.of(3)
            with foreign() as strangers:
                strangers.make("warm")
                act = Act(strangers, nodes, Path(directory), limit)
                began = monotonic()
                try:
                    finding(act)
                except AssertionError as error:
                    print(f"  {str(error)[:300]}", flush=True)
                while all(node.is_running for node in nodes) and monotonic() - began < limit:
                    sleep(LOOK_SECONDS)
                took = monotonic() - began
                ended = [node for node in nodes if not node.is_running]
                if ended:
                    sleep(10.0)
                    ended = [node for node in nodes if not node.is_running]
                for process in act.left:
                    process.kill()
                    process.wait()
            if not ended:
                return None, 0, ""
            return took, len(ended), why(ended[0].text)
        finally:
            swarm.close()


def why(log: str) -> str:
    """Returns the last error of a log."""
    lines = [line for line in log.splitlines() if ERROR.match(line)]
    return lines[-1].lstrip("| ")[:160] if lines else log[-160:]


# -----------------------------------------------------------------------------------------------
# Dials


def dials(minutes: float) -> dict[str, object]:
    """Counts p2pd's own dials to addresses that strangers told in identify: one comes every few seconds, and leaves."""
    with tempfile.TemporaryDirectory() as directory:
        swarm = DaemonSwarm(Path(directory))
        try:
            node = swarm.of(2)[0]
            with foreign() as strangers:
                places = [(host, strangers.listen(f"at {host}", host, role="count")) for host in HOSTS]
                told = [address(f"/ip4/{host}/tcp/{port}").hex() for host, port in places]
                end, visits = monotonic() + minutes * 60.0, 0
                while monotonic() < end:
                    _visit(strangers, f"{visits}", node, told)
                    visits += 1
                    node.pause(min(VISIT_SECONDS, max(0.0, end - monotonic())))
                came = strangers.all("came")
                ends = Counter((each["host"], each["port"]) for each in came)
            return {
                "minutes": minutes, "strangers": visits, "endpoints told": len(places), "dials": len(came),
                "endpoints dialled": len(ends), "most to one": max(ends.values(), default=0), "runs": node.is_running,
            }  # fmt: skip
        finally:
            swarm.close()


def _visit(strangers: Foreign, who: str, node: StartableDaemon, told: list[str]) -> None:
    strangers.order(who, "tell", addresses=told, protocols=list(DHT))
    peer = strangers.connect(who, node.address)
    strangers.ping_dht(who, peer)
    strangers.order(who, "leave", peer=peer)
    strangers.until("parted", who=who, peer=peer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=FINDINGS)
    parser.add_argument("--seconds", type=float, default=330.0)
    parser.add_argument("--dials", action="store_true")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(f"p2ptrain of {Path(questions.__file__).parents[2]}, {sys.version.split()[0]}", flush=True)
    told: dict[str, object] = {}
    if options.dials:
        told["dials"] = dials(options.minutes)
        print(told["dials"])
    for name, finding in FINDINGS.items():
        if not options.dials and options.only in (None, name):
            took, ended, reason = seconds_until_one_ends(finding, options.seconds)
            told[name] = {"seconds": took, "ended": ended, "why": reason}
            print(f"{name:18}{'-' if took is None else f'{took:.1f} s':8} {ended} of 3  {reason}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
