"""A hostile peer against iroh's Python wheel: which of our bounds on strangers can the binding hold?

    make iroh
    OMP_NUM_THREADS=1 python benchmarks/transports_hostile.py [--only NAME ...] [--json FILE]

The victim is a node of transports.py with this road, in a process of its own; the hostile peer is this process. Where
the same can be tried on p2pd, it is, for the figure beside it. `quiet` takes root: a host of its own, whose packets are
read.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import monotonic
from typing import Any

from transports import Far, Record
from transports_node import HOLD, LENGTH_BYTES, PIECE, PROTOCOL, SINK, OverIroh, OverP2pd, answer, iroh_wheel

from p2ptrain.net.transport import TransportError

SEEDS = 10_000  # of hostile peers: the victims' begin at 1
PORTS = iter(range(26_000, 30_000))
WAIT_SECONDS = 2.0
STREAMS, CONNECTIONS, ATTEMPTS, JUNK = 200, 4, 300, 20_000
ALPN = PROTOCOL.encode()


def victim(road: str = "iroh", **more: Any) -> Far:
    return Far(road, "127.0.0.1", next(PORTS), ticks=False, **more)


async def hostile(number: int = 0, road: str = "iroh") -> Any:
    start = OverIroh.start if road == "iroh" else OverP2pd.start
    return await start({"road": road, "host": "127.0.0.1", "port": next(PORTS), "seed": SEEDS + number}, answer)


async def within(work: Awaitable[Any], seconds: float = WAIT_SECONDS) -> bool:
    try:
        await asyncio.wait_for(work, seconds)
    except TimeoutError:
        return False
    return True


def grown(node: Far, before: Record) -> float:
    return (node.ask("usage")["own"] - before["own"]) / 1e6


async def streams() -> Record:
    """Opens 200 streams, of which 32 may be open: how many does it get, as the wheel comes and with our limit?"""
    found: Record = {}
    for limited in (False, True):
        node, peer = victim(limited=limited), await hostile()
        key = await peer.connect(node.address)
        await asyncio.sleep(0.2)
        tries = [asyncio.ensure_future(peer.open(key, 0)) for _ in range(STREAMS)]
        await asyncio.wait(tries, timeout=WAIT_SECONDS)
        found["with our limit" if limited else "by default"] = sum(each.done() for each in tries)
        for each in tries:
            each.cancel()
        one = peer.connections[key]
        found["unidirectional, " + ("ours" if limited else "default")] = await within(one.open_uni(), 0.5)
        await peer.close()
        node.close()
    return found


async def unread() -> Record:
    """Fills 32 streams a connection that the victim does not read: what it takes, and the victim's memory."""
    found: Record = {}
    for road, limited in (("p2pd", True), ("iroh", False), ("iroh", True)):
        node = victim(road, limited=limited)
        before, taken = node.ask("usage"), 0
        peers = [await hostile(number, road) for number in range(CONNECTIONS if road == "iroh" else 2)]

        async def fill(peer: Any, key: bytes, held: list[Any]) -> int:
            sent = 0
            with contextlib.suppress(TransportError):  # refused, or the victim hung up
                stream = await peer.open(key, 0)
                await stream.send(HOLD)
                while await within(stream.send(bytes(PIECE // 16)), 4.0):
                    sent += PIECE // 16
                held.append(stream)
            return sent

        held: list[Any] = []
        for peer in peers:
            key = await peer.connect(node.address)
            taken += sum(await asyncio.gather(*(fill(peer, key, held) for _ in range(32))))
        name = f"{road}, {'limited' if limited else 'as it comes'}"
        found[f"{name}: MB taken a connection"] = taken / len(peers) / 1e6
        found[f"{name}: MB of memory a connection"] = grown(node, before) / len(peers)
        held.clear()
        node.kill()
        for peer in peers:
            await peer.close()
    return found


async def flood() -> Record:
    """Fills a hundred streams of both kinds, on one connection: the memory of a victim with our limits, and of one that
    besides stops what it does not want."""
    found: Record = {}
    for strict in (False, True):
        node, peer = victim(strict=strict), await hostile()
        before, key = node.ask("usage"), await peer.connect(node.address)
        connection, taken, kept = peer.connections[key], 0, []

        async def fill(out: Any, kept: list[Any]) -> int:
            kept.append(out)
            sent = 0
            with contextlib.suppress(iroh_wheel().IrohError):
                await out.write_all(len(HOLD).to_bytes(LENGTH_BYTES, "big") + HOLD)
                while await within(out.write_all(bytes(PIECE // 16)), 6.0):
                    sent += PIECE // 16
            return sent

        outs = [(await connection.open_bi()).send() for _ in range(100)] + [
            await connection.open_uni() for _ in range(100)
        ]
        taken = sum(await asyncio.gather(*(fill(out, kept) for out in outs)))
        name = "strict" if strict else "with our limits"
        found |= {f"{name}: MB taken": taken / 1e6, f"{name}: MB of memory": grown(node, before)}
        node.kill()
        await peer.close()
    return found


async def headers() -> Record:
    """Announces frames of 2 MiB on 32 streams, and sends no more."""
    node, peer = victim(), await hostile()
    key = await peer.connect(node.address)
    before, held = node.ask("usage"), []
    for _ in range(32):
        stream = await peer.open(key, 0)
        await stream.send(SINK)
        await stream.out.write_all((2 * PIECE).to_bytes(LENGTH_BYTES, "big"))
        held.append(stream)
    await asyncio.sleep(WAIT_SECONDS)
    found = {"MB of memory for 64 MB announced": grown(node, before)}
    await peer.close()
    node.close()
    return found


async def datagrams() -> Record:
    """Sends datagrams, which the victim never reads."""
    node, peer = victim(), await hostile()
    key = await peer.connect(node.address)
    before, sent = node.ask("usage"), 0
    for _ in range(JUNK):
        await peer.connections[key].send_datagram_wait(bytes(1_000))
        sent += 1
    after = node.ask("usage")
    await peer.close()
    node.close()
    processor = after["processor"] - before["processor"]
    return {"sent": sent, "MB of memory": (after["own"] - before["own"]) / 1e6, "us each": processor / sent * 1e6}


async def attempts() -> Record:
    """Connects again and again: what one attempt costs the victim that accepts, refuses or ignores it."""
    found: Record = {}
    for policy in ("accept", "refuse", "ignore", "retry"):
        node, peer = victim(policy=policy), await hostile()
        before, made = node.ask("usage"), 0
        for _ in range(ATTEMPTS // 4):
            tries = [asyncio.ensure_future(within(_try(peer, node.address), 0.3)) for _ in range(4)]
            await asyncio.gather(*tries, return_exceptions=True)
            made += 4
        after, seen = node.ask("usage"), node.ask("met")["met"]
        found[f"{policy}: ms of processor an attempt"] = (after["processor"] - before["processor"]) / made * 1e3
        found[f"{policy}: the program saw"] = seen / made
        await peer.close()
        node.close()
    node, before_ = victim("p2pd"), None
    peers = [await hostile(number, "p2pd") for number in range(2)]
    before_, made = node.ask("usage"), 0
    for _ in range(20):
        for peer in peers:
            key = await peer.connect(node.address)
            await peer.disconnect(key)
            made += 1
    after = node.ask("usage")
    found["p2pd: ms of processor a connection"] = (after["processor"] - before_["processor"]) / made * 1e3
    for peer in peers:
        await peer.close()
    node.close()
    return found


async def _try(peer: Any, address: str) -> None:
    key = await peer.connect(address)
    await peer.disconnect(key)


async def addresses() -> Record:
    """Tells the victim addresses of its choice, where something else listens: does the victim send there?"""
    heard: Counter[str] = Counter()
    sockets = []
    for host in ("127.0.0.2", "127.0.77.3"):
        each = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        each.bind((host, 0))
        each.setblocking(False)
        sockets.append(each)
    node, peer = victim(), await hostile()
    for each in sockets:
        await peer.endpoint.add_external_addr("{}:{}".format(*each.getsockname()))
    place = node.address.split()[1].rpartition(":")[2]
    found: Record = {}
    for how in ("the stranger dials", "the victim dials"):
        heard.clear()
        if how == "the stranger dials":
            key = await peer.connect(node.address)
        else:
            await peer.disconnect(key)
            await asyncio.to_thread(node.ask, "connect", address=peer.address)
        end, size = monotonic() + 8.0, 0
        while monotonic() < end:
            await asyncio.sleep(0.05)
            for each in sockets:
                with contextlib.suppress(BlockingIOError):
                    while True:
                        data, (_, port) = each.recvfrom(2_048)
                        heard[f"{each.getsockname()[0]}{'' if str(port) == place else ', by the stranger'}"] += 1
                        size += len(data)
        found |= {f"{how}: packets to {where}": times for where, times in heard.items()} | {f"{how}: bytes": size}
    await peer.close()
    node.close()
    return found


async def cancelled() -> Record:
    """Reads a stream with a time limit that strikes at random: are bytes lost, and does an abort get past a write?"""
    one, other = await hostile(0), await hostile(1)
    sizes, got = bytearray(), asyncio.Event()
    lost: Record = {"reads": 0, "cancelled": 0}

    async def take(stream: Any) -> None:
        await stream.receive(16)
        try:
            while len(sizes) < 40_000:
                lost["reads"] += 1
                try:
                    sizes.extend(await asyncio.wait_for(stream.into.read(64), 0.0006))
                except TimeoutError:
                    lost["cancelled"] += 1
        finally:
            got.set()

    other._serve = take
    stream = await one.open(await one.connect(other.address), 0)
    await stream.send(SINK)
    for number in range(40_000 // 8):
        await stream.out.write_all(struct.pack(">Q", number))
        await asyncio.sleep(0.0003)
    await within(got.wait(), 3.0)
    lost["bytes lost of 40,000"] = 40_000 - len(sizes)
    hold = await one.open(next(iter(one.connections)), 0)
    other._serve = lambda stream: asyncio.Event().wait()
    hold = await one.open(next(iter(one.connections)), 0)
    writing = asyncio.ensure_future(hold.out.write_all(bytes(64 * PIECE)))
    await asyncio.sleep(1.0)
    lost["a reset gets past a write that waits"] = await within(hold.out.reset(0), 2.0)
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    lost["and once that is cancelled"] = await within(hold.out.reset(0), 2.0)
    await one.close()
    await other.close()
    return lost


async def reasons() -> Record:
    """Hangs up with a code and bytes that are not UTF-8: what a program is told."""
    wheel, found = iroh_wheel(), Record()
    one, other = await hostile(0), await hostile(1)
    for reason in (b"\xff\xfe\n", b"x" * 4_000):
        key = await one.connect(other.address)
        await asyncio.sleep(0.3)
        one.connections[key].close(7, reason)
        there = other.connections[one.me]
        found[f"{reason[:3]!r} x {len(reason)}"] = (await there.closed())[:80]
        try:
            await there.open_bi()
        except wheel.IrohError as error:
            found[f"{reason[:3]!r}, by open_bi"] = f"{error.kind().name}: {error.message()[:60]}"
    await one.close()
    await other.close()
    return found


async def junk() -> Record:
    """Sends packets that are no QUIC, and first packets that are forged: the victim's processor for each."""
    node, found = victim(), Record()
    host, port = node.address.split()[1].split(":")
    first = b"\xc3\x00\x00\x00\x01\x08" + bytes(8) + b"\x08" + bytes(8) + b"\x00\x44\x96"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        for name, start in (("junk", b""), ("forged first packet", first)):
            before = node.ask("usage")
            for number in range(JUNK):
                packet = start[:6] + struct.pack(">Q", number) + start[14:] if start else b"\x12" * 100
                out.sendto(packet.ljust(1_200, b"\x55") if start else packet, (host, int(port)))
                if number % 50 == 0:
                    time.sleep(0.005)  # noqa: ASYNC251  # nothing else runs here
            after = node.ask("usage")
            found[f"{name}: us of processor each"] = (after["processor"] - before["processor"]) / JUNK * 1e6
            found[f"{name}: MB of memory"] = (after["own"] - before["own"]) / 1e6
    found["still answers"] = await within(_answers(node), 10.0)
    node.close()
    return found


async def _answers(node: Far) -> None:
    peer = await hostile()
    await peer.connect(node.address)
    await peer.close()


async def silent() -> Record:
    """Keeps 100 connections that say nothing: their memory, and the processor that keeping them takes."""
    node, found = victim(), Record()
    before = node.ask("usage")
    peers = [await hostile(number) for number in range(100)]
    for peer in peers:
        await peer.connect(node.address)
    found["KB of memory each"] = grown(node, before) * 1e3 / 100
    before = node.ask("usage")
    await asyncio.sleep(10.0)
    found["processor for all, a second"] = (node.ask("usage")["processor"] - before["processor"]) / 10
    for peer in peers:
        await peer.close()
    node.close()
    return found


async def quiet() -> Record:
    """Starts nodes on a host of their own, and reads what they send unasked, by where it goes."""
    from tests.helpers.namespaces import Internet, made  # noqa: PLC0415  # takes root

    found: Record = {}
    for name, road, more in (
        ("minimal", "iroh", {}), ("without a preset", "iroh", {"preset": "none"}), ("p2pd, nat = false", "p2pd", {}),
    ):  # fmt: skip
        with made(lambda: Internet(1, 1)) as net:
            home = net.homes[0]
            code = (
                "import collections, json, socket, time\n"
                "s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3)); s.settimeout(0.5)\n"
                "c, end = collections.Counter(), time.monotonic() + 22\n"
                "while time.monotonic() < end:\n"
                "    try: p, a = s.recvfrom(2048)\n"
                "    except TimeoutError: continue\n"
                "    if a[2] != 4 or p[12:14] != b'\\x08\\0': continue\n"
                "    at = 14 + 4 * (p[14] & 15)\n"
                "    c['.'.join(map(str, p[30:34])) + ':' + str(int.from_bytes(p[at + 2:at + 4], 'big'))] += 1\n"
                "print(json.dumps(c))"
            )
            listening = await asyncio.create_subprocess_exec(
                *home.prefix, "python3", "-c", code, stdout=asyncio.subprocess.PIPE
            )
            await asyncio.sleep(1.0)
            node = Far(road, home.address, 4001, home.prefix, **more)
            out, _ = await listening.communicate()
            node.close()
            sent = json.loads(out)
            found[f"{name}: packets in 20 s"] = sum(sent.values())
            found[f"{name}: to"] = ", ".join(f"{where} {times}" for where, times in sorted(sent.items())[:8])
    return found


TRIES: dict[str, Callable[[], Awaitable[Record]]] = {
    each.__name__: each
    for each in (
        streams,
        unread,
        flood,
        headers,
        datagrams,
        attempts,
        addresses,
        cancelled,
        reasons,
        junk,
        silent,
        quiet,
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=TRIES, nargs="+", default=list(TRIES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    told: Record = {}
    for name in options.only:
        told[name] = asyncio.run(TRIES[name]())  # type: ignore[arg-type]
        print(f"\n{name}: {(TRIES[name].__doc__ or '').splitlines()[0]}", flush=True)
        for what, value in told[name].items():
            print(f"  {what:48} {value:.4g}" if isinstance(value, float) else f"  {what:48} {value}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(told, indent=1) + "\n")
    os._exit(0)  # what a hostile peer has left open is of no use


if __name__ == "__main__":
    main()
