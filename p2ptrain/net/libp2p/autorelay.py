"""Chooses the relays that p2pd gets at its start, and decides when to restart p2pd because a relay was lost.

go-libp2p reserves no slot until every relay it was given has proven to be one, or three minutes have passed
(autorelay's minCandidates and bootDelay; p2pd has no option for either). A single relay that is down, or is listed
under two addresses, would make a node behind a router unreachable through the others for that long. So p2pd gets only
relays that answer, each once; whether they are relays shows only then, but nodes of this network are by default.

After losing a relay, go-libp2p asks it again only an hour after the reservation was made (again no option in p2pd); a
freshly started p2pd asks at once. So p2pd is restarted once a minute has passed without a relay and one answers; after
ten minutes it may be any other, because relays go for good, too.

A QUIC address is probed with a packet of a version that does not exist; servers reply with theirs (RFC 9000, 6.1)."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from p2ptrain.address import parse
from p2ptrain.net.addresses import relay_of, split
from p2ptrain.net.tasks import in_daemon_thread
from p2ptrain.net.transport import TransportError

RELAYS_MAX = 4  # p2pd asks each of them for a reservation
TRIED_MAX = 16  # addresses probed
NUMBERS_MAX = 4  # IP addresses that a name may resolve to
ANSWER_SECONDS = 2.0
QUIC_TRIES = 2  # one packet may get lost
QUIC_BYTES = 1_200  # servers ignore shorter packets
LOST_SECONDS = 60.0  # without a relay before we act: p2pd's other relays give it a slot within seconds
ASK_SECONDS = 60.0  # between probes of the lost relays
VAIN_MAX = 10  # probes of them, before all others count, too: p2pd was given only a few
STARTS_APART_SECONDS = 600.0  # between restarts for this reason: each breaks all our connections
FAMILIES = {"dns4": socket.AF_INET, "dns6": socket.AF_INET6}  # dns: any


async def relays_to_use(addresses: Iterable[str]) -> list[str]:
    """Returns one address for each of the first few peers that answer.

    If none answers, all of them count: one may come up within minutes."""
    wanted = _possible(addresses)
    of_peers: dict[bytes, str] = {}
    for address in await _answering(wanted) or wanted:
        of_peers.setdefault(split(address)[0], address)
    return list(of_peers.values())[:RELAYS_MAX]


class RelayLoss:
    """Watches p2pd's relays.

    Once a lost relay answers again, restarting p2pd would get a reservation on it at once."""

    def __init__(
        self,
        relays: Iterable[str],
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._relays, self._clock, self._draw = tuple(relays), clock, draw
        self._had: frozenset[bytes] = frozenset()  # the relays when there last were any
        self._vain = 0  # probes since then
        self._is_of_others = False  # whether the last restart since then was for relays that we never had
        self._mended_at = float("-inf")  # when a restart was last asked for
        self.is_mendable = False
        self.p2pd_started()

    def p2pd_started(self) -> None:
        """Starts over. A restart that brings back no relay is not repeated for the same loss."""
        if self.is_mendable and not self._is_of_others:
            self._had = frozenset()
        self.is_mendable = False
        self._since = self._clock()  # when we last had a relay, or else when this p2pd started
        self._asked_at = float("-inf")
        self._patience = LOST_SECONDS * (1.0 + self._draw())  # jitter: many may have lost the same relay

    async def look(self, routes: Iterable[str]) -> None:
        """Takes note of the routes to us. Called every few seconds."""
        now = self._clock()
        if relays := frozenset(relay for route in routes if (relay := relay_of(route))):
            self._had, self._since, self._vain, self._is_of_others = relays, now, 0, False
        elif self._had and self._is_time(now):
            self._asked_at, self._vain = now, self._vain + 1
            tries_others = self._vain > VAIN_MAX and not self._is_of_others
            asked = [each for each in _possible(self.first()) if tries_others or split(each)[0] in self._had]
            if (found := await _answering(asked)) and self._asked_at == now:  # p2pd was not restarted meanwhile
                self._mended_at, self.is_mendable = now, True
                self._is_of_others = all(split(each)[0] not in self._had for each in found)

    def _is_time(self, now: float) -> bool:
        has_rested = now - self._asked_at >= ASK_SECONDS and now - self._mended_at >= STARTS_APART_SECONDS
        return has_rested and now - self._since >= self._patience

    def first(self) -> list[str]:
        """Returns all relays, those that we had first: p2pd is given only a few."""
        return sorted(self._relays, key=lambda address: _is_no_relay(address) or split(address)[0] not in self._had)


def _possible(addresses: Iterable[str]) -> list[str]:
    return [address for address in dict.fromkeys(addresses) if not _is_no_relay(address)][:TRIED_MAX]


async def _answering(addresses: list[str]) -> list[str]:
    answers = await asyncio.gather(*(_answers(address) for address in addresses))
    return [address for address, is_there in zip(addresses, answers, strict=True) if is_there]


def _is_no_relay(address: str) -> bool:
    """True for a peer behind a relay, and for an invalid address (peers can send us those)."""
    try:
        return split(address)[1].endswith("/p2p-circuit")
    except TransportError:
        return True


async def _answers(address: str) -> bool:
    asked = parse(address)
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            is_name = isinstance(asked.host, str)
            family = FAMILIES.get(asked.family, socket.AF_UNSPEC)
            numbers = await _numbers_of(str(asked.host), family) if is_name else [str(asked.host)]
            attempt = _tcp_answers if asked.transport == "tcp" else _quic_answers
            tries = [asyncio.create_task(attempt(number, asked.port)) for number in numbers]
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
    """Resolves a name, in a thread that nothing waits for: without a network a resolver takes half a minute to fail."""
    try:
        infos = await in_daemon_thread(
            lambda: socket.getaddrinfo(name, None, family, socket.SOCK_STREAM), (OSError, UnicodeError)
        )
    except (OSError, UnicodeError):  # UnicodeError: not a valid host name
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
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as asking:  # refused, or no way there
        asking.setblocking(False)
        asking.connect((host, port))
        for _ in range(QUIC_TRIES):
            asking.send(_packet_of_no_version())
            with suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_SECONDS / QUIC_TRIES):
                    await loop.sock_recv(asking, QUIC_BYTES)
                    return True
    return False


def _packet_of_no_version() -> bytes:
    """Builds a long header: flags, a version reserved for this purpose, and both connection ids."""
    start = b"\xc0" + bytes.fromhex("1a2a3a4a") + b"\x08" + os.urandom(8) + b"\x08" + os.urandom(8)
    return start.ljust(QUIC_BYTES, b"\0")
