"""Who to be connected with, and keeping it so: p2pd neither reconnects nor tells when a peer comes or goes.

Addresses come from the user (bootstraps), from the last time (remembered), and as hints from the DHT, where each node
announces its own under the run's id. A hint costs at most a failed dial: who answers proves its key in the handshake.
Only a peer that speaks the run's protocol counts as connected; a bootstrap of another run is told apart and said so.

Small swarms are fully connected. In larger ones a node keeps LINKS_MAX connections: bootstraps and members of the
roster first, and some on purpose in address ranges of their own, so that one network cannot surround it (an eclipse).
Dials that fail are repeated with growing waits and jitter, for ever: an outage may last a weekend.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from random import Random

import msgspec

from p2ptrain.errors import RemoteProtocolError
from p2ptrain.identity import PeerIdError, key_of
from p2ptrain.net import inquiry
from p2ptrain.net.transport import Transport, TransportError

LOOK_SECONDS = 1.0  # between looks at who is connected: a unix socket and a few hundred bytes
DIAL_SECONDS = 1.0  # until a dial that failed is repeated; doubles each time
DIAL_SECONDS_MAX = 60.0
DIALS_AT_ONCE = 4
LINKS_MAX = 48  # gossip needs a dozen; the rest shortens the way to payloads and histories
RANGES_KEPT = 8  # links to different address ranges (/16, /32 of IPv6) that are dialled first
KNOWN_MAX = 1_024  # peers with addresses; of more, those that were never reached are forgotten first
ADDRESSES_MAX = 8  # of a peer
ADDRESS_BYTES_MAX = 256
ANNOUNCE_SECONDS = 300.0  # between announcements of our own addresses in the DHT
HINT_SECONDS = 1_800.0  # how long such a hint stands
SEARCH_SECONDS = 2.0  # between looks into the DHT; doubles up to
SEARCH_SECONDS_MAX = 60.0
ASKED = 3  # peers, each time, for others that they know
TELL_SECONDS = 60.0  # between two lines about the same address that does not answer

log = logging.getLogger("p2ptrain.net")
_HINT_ENCODER = msgspec.msgpack.Encoder()
_HINT = msgspec.msgpack.Decoder(list[str])

Seen = Callable[[bytes], None]


@dataclass(slots=True)
class Known:
    """A peer whose address we know."""

    addresses: list[str]
    is_bootstrap: bool = False
    tries: int = 0
    next_at: float = 0.0
    told_at: float = -TELL_SECONDS
    was_reached: bool = False


@dataclass(slots=True)
class Connections:
    """Of one node, in one run."""

    transport: Transport
    run_id: bytes
    speaks: Callable[[bytes], Awaitable[bool]]  # whether a connected peer takes part in our run
    seen: Seen
    lost: Seen
    rng: Random
    known: dict[bytes, Known] = field(default_factory=dict)
    linked: dict[bytes, None] = field(default_factory=dict)  # connected, and of our run
    strangers: dict[bytes, float] = field(default_factory=dict)  # connected, of another run; when we last asked
    members: frozenset[bytes] = frozenset()
    shunned: dict[bytes, float] = field(default_factory=dict)  # disconnected on purpose, until when
    dialling: set[bytes] = field(default_factory=set)

    # -----------------------------------------------------------------------------------------------
    # What is known

    def add(self, address: str, *, is_bootstrap: bool = False) -> None:
        """Somebody may be found at this address, which ends with its id."""
        if len(address) > ADDRESS_BYTES_MAX:
            return
        key = key_of(address.rpartition("/p2p/")[2])
        if key == self.transport.me:
            return
        known = self.known.setdefault(key, Known([]))
        known.is_bootstrap = known.is_bootstrap or is_bootstrap
        if address in known.addresses:
            known.addresses.remove(address)
        known.addresses.insert(0, address)
        del known.addresses[ADDRESSES_MAX:]
        if len(self.known) > KNOWN_MAX:
            spare = (peer for peer, each in self.known.items() if not (each.is_bootstrap or each.was_reached))
            del self.known[next(spare, next(iter(self.known)))]

    def remembered(self) -> list[str]:
        """Addresses that have worked, for the next start."""
        return [each.addresses[0] for each in self.known.values() if each.was_reached and each.addresses][:KNOWN_MAX]

    def reachable(self, but: bytes) -> tuple[str, ...]:
        """Addresses of peers that are connected, for others to dial."""
        places = [self.known[peer].addresses[:1] for peer in self.linked if peer in self.known and peer != but]
        return tuple(address for each in places for address in each)

    def shun(self, peer: bytes, until: float) -> None:
        """Do not dial this peer for a while."""
        self.shunned[peer] = until
        while len(self.shunned) > KNOWN_MAX:
            del self.shunned[next(iter(self.shunned))]

    # -----------------------------------------------------------------------------------------------
    # The loops

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._look_for_ever(), name="who is connected")
            group.create_task(self._dial_for_ever(group), name="dialling")
            group.create_task(self._announce_for_ever(), name="announcing addresses")
            group.create_task(self._search_for_ever(), name="searching peers")

    async def _look_for_ever(self) -> None:
        while True:
            with contextlib.suppress(TransportError):
                await self.look()
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        """See who has come and who has gone."""
        now = asyncio.get_running_loop().time()
        connected = await self.transport.peers()
        for peer in [peer for peer in self.linked if peer not in connected]:
            del self.linked[peer]
            if peer in self.known:
                self.known[peer].next_at = now  # at once, then with growing waits
            self.lost(peer)
        self.strangers = {peer: at for peer, at in self.strangers.items() if peer in connected}
        for peer, addresses in connected.items():
            if peer in self.linked or now < self.strangers.get(peer, 0.0):
                continue
            if not await self.speaks(peer):
                self._is_stranger(peer, now)
                continue
            self.strangers.pop(peer, None)
            self.linked[peer] = None
            for address in addresses:
                self.add(address)
            if peer in self.known:
                self.known[peer].was_reached, self.known[peer].tries = True, 0
            self.seen(peer)

    def _is_stranger(self, peer: bytes, now: float) -> None:
        known = self.known.get(peer)
        if known is not None and known.is_bootstrap and peer not in self.strangers:
            log.warning("%s answers, but takes no part in this run, or speaks another version", known.addresses[0])
        self.strangers[peer] = now + 5.0

    async def _dial_for_ever(self, group: asyncio.TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        while True:
            for peer in self._due(loop.time())[: max(0, DIALS_AT_ONCE - len(self.dialling))]:
                self.dialling.add(peer)
                group.create_task(self._dial(peer), name="dial")
            await asyncio.sleep(0.2)

    def _due(self, now: float) -> list[bytes]:
        """Whom to dial now, the most wanted first."""
        self.shunned = {peer: until for peer, until in self.shunned.items() if until > now}
        wanted = [
            peer
            for peer, known in self.known.items()
            if known.next_at <= now and not (peer in self.linked or peer in self.strangers or peer in self.dialling)
            and peer not in self.shunned and known.addresses
        ]  # fmt: skip
        ranges = {address_range(known.addresses[0]) for peer in self.linked if (known := self.known.get(peer))}

        def rank(peer: bytes) -> tuple[bool, bool, bool, float]:
            known = self.known[peer]
            is_elsewhere = len(ranges) < RANGES_KEPT and address_range(known.addresses[0]) not in ranges
            return (not known.is_bootstrap, peer not in self.members, not is_elsewhere, self.rng.random())

        wanted.sort(key=rank)
        room = LINKS_MAX - len(self.linked) - len(self.dialling)
        return wanted[: max(0, room)]

    async def _dial(self, peer: bytes) -> None:
        known, loop = self.known.get(peer), asyncio.get_running_loop()
        try:
            if known is None:
                return
            problem: TransportError | None = None
            for address in list(known.addresses):
                try:
                    await self.transport.connect(address)
                    known.next_at = loop.time() + DIAL_SECONDS  # `look` has to find it first
                    return
                except TransportError as error:
                    problem = error
            wait = min(DIAL_SECONDS * 2.0 ** min(known.tries, 16), DIAL_SECONDS_MAX)
            known.tries += 1
            known.next_at = loop.time() + wait * self.rng.uniform(0.5, 1.5)
            if known.is_bootstrap and loop.time() >= known.told_at + TELL_SECONDS:
                known.told_at = loop.time()
                log.warning("cannot reach %s: %s; will go on trying", known.addresses[0], problem)
        finally:
            self.dialling.discard(peer)

    async def _announce_for_ever(self) -> None:
        while True:
            addresses = [each for each in self.transport.addresses() if len(each) <= ADDRESS_BYTES_MAX][:ADDRESSES_MAX]
            told = False
            if addresses and self.linked:
                with contextlib.suppress(TransportError):
                    await self.transport.announce(topic_of(self.run_id), _HINT_ENCODER.encode(addresses), HINT_SECONDS)
                    told = True
            await asyncio.sleep(ANNOUNCE_SECONDS if told else LOOK_SECONDS)

    async def _search_for_ever(self) -> None:
        wait = SEARCH_SECONDS
        while True:
            if self.linked:
                await self._ask_around()
                with contextlib.suppress(TransportError):
                    self._take_hints(await self.transport.look_up(topic_of(self.run_id)))
                wait = min(2 * wait, SEARCH_SECONDS_MAX)
            await asyncio.sleep(wait)

    async def _ask_around(self) -> None:
        """Peers know peers; more certain than the DHT, and at once."""
        for peer in self.rng.sample(list(self.linked), min(ASKED, len(self.linked))):
            with contextlib.suppress(TransportError, RemoteProtocolError):
                for address in await inquiry.ask_peers(self.transport, peer, self.run_id):
                    with contextlib.suppress(PeerIdError):
                        self.add(address)

    def _take_hints(self, hints: dict[bytes, bytes]) -> None:
        for peer, value in hints.items():
            try:
                addresses = _HINT.decode(value)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue
            self.tell(peer, addresses)

    def tell(self, peer: bytes, addresses: Iterable[str]) -> None:
        """A hint about where this peer is; addresses of another are not its to tell."""
        for address in list(addresses)[:ADDRESSES_MAX]:
            with contextlib.suppress(PeerIdError):
                if key_of(address.rpartition("/p2p/")[2]) == peer:
                    self.add(address)


def topic_of(run_id: bytes) -> str:
    """Under which a run's nodes gossip, and find one another."""
    return f"p2ptrain/1/{run_id.hex()}"


def address_range(address: str) -> str:
    """What one provider or attacker is likely to own as a whole."""
    parts = address.split("/")
    if len(parts) < 3 or parts[1] not in ("ip4", "ip6"):
        return parts[2] if len(parts) > 2 else ""
    try:
        host = ipaddress.ip_address(parts[2])
    except ValueError:
        return parts[2]
    return str(ipaddress.ip_network((host, 16 if host.version == 4 else 32), strict=False))
