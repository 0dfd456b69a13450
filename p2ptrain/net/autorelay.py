"""Which relays p2pd is told of when it starts, those that answer, each once; and when it is started again for one.

go-libp2p asks no relay for a place before all that it was told of have turned out to be relays, or three minutes have
passed (autorelay's minCandidates and bootDelay; p2pd has no option for either). One that is down, or is named by two of
its addresses, would keep a node behind a router from being reached through the others for that long. What cannot be
seen from here is whether who answers is a relay; who is of this network is one, unless its owner switched that off.

A relay that was lost it asks again an hour after it gave the place, which p2pd has no option for either; a p2pd that is
started asks at once. So p2pd is started again where a minute without a relay has passed and one answers.

An address for QUIC is tried with a packet of a version that there is not, to which a server says which ones it has
(RFC 9000, section 6.1).
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import time
from collections.abc import Callable, Iterable

from p2ptrain.net.addresses import relay_of, split
from p2ptrain.net.tasks import in_daemon_thread
from p2ptrain.net.transport import TransportError

RELAYS_MAX = 4  # p2pd asks each for a place
TRIED_MAX = 16  # addresses
NUMBERS_MAX = 4  # that a name leads to
ANSWER_SECONDS = 2.0
QUIC_TRIES = 2  # one packet may get lost
QUIC_BYTES = 1_200  # what is shorter a server does not answer
LOST_SECONDS = 60.0  # without a relay: others that p2pd was told of give a place within seconds
ASK_SECONDS = 60.0  # between tries whether one answers
STARTS_APART_SECONDS = 600.0  # between two starts of p2pd for this: each costs its peers their connections to us
FAMILIES = {"ip4": socket.AF_INET, "dns4": socket.AF_INET, "ip6": socket.AF_INET6, "dns6": socket.AF_INET6}


async def relays_to_use(addresses: Iterable[str]) -> list[str]:
    """One address of each peer that answers, the first ones; of each peer if none does, because one may come up within
    minutes.
    """
    wanted = _possible(addresses)
    of_peers: dict[bytes, str] = {}
    for address in await _answering(wanted) or wanted:
        of_peers.setdefault(split(address)[0], address)
    return list(of_peers.values())[:RELAYS_MAX]


class RelayLoss:
    """Whether p2pd has been without a relay since it had one, which answers again: another p2pd would have a place."""

    def __init__(
        self,
        relays: Iterable[str],
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._relays, self._clock, self._draw = tuple(relays), clock, draw
        self._had: frozenset[bytes] = frozenset()  # the relays of the last time that there were any
        self._mended_at = float("-inf")  # when another p2pd was last wanted
        self.is_mendable = False
        self.p2pd_started()

    def p2pd_started(self) -> None:
        """One that was wanted for its relay and gets none has done what it can."""
        if self.is_mendable:
            self._had = frozenset()
        self.is_mendable = False
        self._since = self._clock()  # when there was a relay; else this p2pd's start
        self._asked_at = float("-inf")
        self._patience = LOST_SECONDS * (1.0 + self._draw())  # or else all who lost one relay would start at once

    async def look(self, routes: Iterable[str]) -> None:
        """At the ways to us, every few seconds."""
        now = self._clock()
        if relays := frozenset(relay for route in routes if (relay := relay_of(route))):
            self._had, self._since = relays, now
        elif self._had and self._is_time(now):
            self._asked_at = now
            found = await _answering([each for each in _possible(self._relays) if split(each)[0] in self._had])
            if found and self._asked_at == now:  # it is the same p2pd still
                self._mended_at, self.is_mendable = now, True

    def _is_time(self, now: float) -> bool:
        has_rested = now - self._asked_at >= ASK_SECONDS and now - self._mended_at >= STARTS_APART_SECONDS
        return has_rested and now - self._since >= self._patience

    def first(self) -> list[str]:
        """All relays, with those first that were had: p2pd is told of a few."""
        return sorted(self._relays, key=lambda address: _is_no_relay(address) or split(address)[0] not in self._had)


def _possible(addresses: Iterable[str]) -> list[str]:
    return [address for address in dict.fromkeys(addresses) if not _is_no_relay(address)][:TRIED_MAX]


async def _answering(addresses: list[str]) -> list[str]:
    answers = await asyncio.gather(*(_answers(address) for address in addresses))
    return [address for address, is_there in zip(addresses, answers, strict=True) if is_there]


def _is_no_relay(address: str) -> bool:
    """Who is reached through a relay is none; nor is what is no address, which peers may have told."""
    try:
        return split(address)[1].endswith("/p2p-circuit")
    except TransportError:
        return True


async def _answers(address: str) -> bool:
    _, route = split(address)
    _, kind, host, transport, port, *_ = route.split("/")
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            numbers = await _numbers_of(host, FAMILIES.get(kind, socket.AF_UNSPEC)) if "dns" in kind else [host]
            attempt = _tcp_answers if transport == "tcp" else _quic_answers
            tries = [asyncio.create_task(attempt(number, int(port))) for number in numbers]
            try:
                for each in asyncio.as_completed(tries):
                    if await each:
                        return True
                return False
            finally:
                for task in tries:
                    task.cancel()
                await asyncio.gather(*tries, return_exceptions=True)
    except TimeoutError:
        return False


async def _numbers_of(name: str, family: int) -> list[str]:
    """What a name stands for. A resolver without a network takes half a minute to give up."""
    try:
        infos = await in_daemon_thread(
            lambda: socket.getaddrinfo(name, None, family, socket.SOCK_STREAM), (OSError, UnicodeError)
        )
    except (OSError, UnicodeError):  # the latter for a name that is none
        return []
    return list(dict.fromkeys(str(info[4][0]) for info in infos))[:NUMBERS_MAX]


async def _tcp_answers(host: str, port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    writer.transport.abort()
    return True


async def _quic_answers(host: str, port: int) -> bool:
    loop = asyncio.get_running_loop()
    heard: asyncio.Future[bool] = loop.create_future()
    try:
        transport, _ = await loop.create_datagram_endpoint(lambda: _Ear(heard), remote_addr=(host, port))
    except OSError:
        return False
    try:
        for _ in range(QUIC_TRIES):
            transport.sendto(_packet_of_no_version())
            await asyncio.wait({heard}, timeout=ANSWER_SECONDS / QUIC_TRIES)
            if heard.done():
                return heard.result()
        return False
    finally:
        transport.abort()


class _Ear(asyncio.DatagramProtocol):
    def __init__(self, heard: asyncio.Future[bool]) -> None:
        self._heard = heard

    def datagram_received(self, data: bytes, addr: object) -> None:
        self._tell(is_there=True)

    def error_received(self, exc: Exception) -> None:
        self._tell(is_there=False)

    def _tell(self, *, is_there: bool) -> None:
        if not self._heard.done():
            self._heard.set_result(is_there)


def _packet_of_no_version() -> bytes:
    """A long header: its flags, a version that is kept free for this, and the ids of both ends."""
    start = b"\xc0" + bytes.fromhex("1a2a3a4a") + b"\x08" + os.urandom(8) + b"\x08" + os.urandom(8)
    return start.ljust(QUIC_BYTES, b"\0")
