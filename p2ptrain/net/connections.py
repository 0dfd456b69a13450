"""Who to be connected with, and keeping it so: p2pd neither reconnects nor tells when a peer comes or goes.

Addresses come from the user (bootstraps), from the last time (remembered), from peers, and as hints from the DHT,
where each node announces its own under the run's id. A peer that has come is asked at once for its own addresses and
for those of others: where a connection came from is a port that nobody listens on. A hint costs at most a failed dial:
who answers proves its key in the handshake; but what others tell never displaces what the user said, what a peer told
of itself, or what has worked.

Only a peer that speaks the run's protocol counts as connected; a bootstrap of another run is told apart and said so.

Small swarms are fully connected. In larger ones a node dials up to LINKS_MAX connections: bootstraps and members of the
roster first, for whom there are as many places again should strangers fill these, and some on purpose in address ranges
of their own, so that one network cannot surround it (an eclipse).
Dials that fail are repeated with growing waits and jitter, for ever: an outage may last a weekend.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from random import Random

import msgspec

from p2ptrain.errors import RemoteProtocolError
from p2ptrain.identity import PeerIdError, key_of
from p2ptrain.net import inquiry
from p2ptrain.net.transport import Transport, TransportError

LOOK_SECONDS = 1.0  # between looks at who is connected: a unix socket and a few hundred bytes
SPEAKS_SECONDS = 1.0  # until a peer that does not speak our protocol is asked again: it may be starting; doubles
SPEAKS_SECONDS_MAX = 30.0
STRANGER_TRIES = 3  # until it is said of a bootstrap that it takes no part
MEETINGS_AT_ONCE = 8
DIAL_SECONDS = 1.0  # until a dial that failed is repeated; doubles each time
DIAL_SECONDS_MAX = 60.0
STEADY_SECONDS = 30.0  # a connection that held so long is dialled again at once when it is lost
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
TELL_SECONDS = 60.0  # between two lines about the same thing that is wrong with an address
TOLD_MAX = 64

log = logging.getLogger("p2ptrain.net")
_HINT_ENCODER = msgspec.msgpack.Encoder()
_HINT = msgspec.msgpack.Decoder(list[str])

Seen = Callable[[bytes], None]


class Source(IntEnum):
    """Who says where a peer is, the most certain last."""

    HEARSAY = 0
    REMEMBERED = 1
    ITSELF = 2
    USER = 3


@dataclass(slots=True)
class Known:
    """A peer whose addresses we know."""

    sources: dict[str, Source] = field(default_factory=dict)  # by address
    worked: str = ""  # the address under which it was reached last
    is_bootstrap: bool = False
    tries: int = 0
    next_at: float = 0.0
    told: dict[str, float] = field(default_factory=dict)  # what was said of it in the log, and when
    was_reached: bool = False
    linked_at: float = 0.0

    @property
    def addresses(self) -> list[str]:
        """What worked, then the most certain, and of those as certain the newest."""
        found = list(self.sources)[::-1]
        found.sort(key=lambda address: (address != self.worked, -self.sources[address]))
        return found

    def add(self, address: str, source: Source) -> None:
        known = self.sources.pop(address, source)
        self.sources[address] = max(known, source)
        if len(self.sources) > ADDRESSES_MAX:
            del self.sources[self.addresses[-1]]


@dataclass(slots=True)
class Stranger:
    """A peer that is connected, and does not speak our run's protocol."""

    tries: int = 0
    next_at: float = 0.0


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
    strangers: dict[bytes, Stranger] = field(default_factory=dict)
    members: frozenset[bytes] = frozenset()
    shunned: dict[bytes, float] = field(default_factory=dict)  # disconnected on purpose, until when
    dialling: set[bytes] = field(default_factory=set)
    meeting: set[bytes] = field(default_factory=set)  # being asked whether they speak our protocol
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # somebody may have come: look now

    # -----------------------------------------------------------------------------------------------
    # What is known

    def add(self, address: str, source: Source = Source.HEARSAY) -> None:
        """Somebody may be found at this address, which ends with its id."""
        if len(address) > ADDRESS_BYTES_MAX:
            return
        key = key_of(address.rpartition("/p2p/")[2])
        if key == self.transport.me:
            return
        known = self._of(key)
        known.is_bootstrap = known.is_bootstrap or source is Source.USER
        known.add(address, source)

    def _of(self, peer: bytes) -> Known:
        """What is known of a peer. For one more than there is room for, another is forgotten: the least useful, which
        was never reached if there is such a one, and longest ago of those."""
        if peer not in self.known:
            if len(self.known) >= KNOWN_MAX:
                del self.known[min(self.known, key=self._use)]
            self.known[peer] = Known()
        return self.known[peer]

    def _use(self, peer: bytes) -> tuple[bool, bool, bool]:
        known = self.known[peer]
        return (known.is_bootstrap, peer in self.linked, known.was_reached and bool(known.sources))

    def remembered(self) -> list[str]:
        """Of peers that were reached, for the next start: where that was, and where they say that they are."""
        found = []
        for each in self.known.values():
            if each.was_reached:
                found += [
                    address
                    for address in each.addresses
                    if each.sources[address] >= Source.ITSELF or address == each.worked
                ][:2]
        return found[:KNOWN_MAX]

    def reachable(self, but: bytes) -> tuple[str, ...]:
        """My own addresses, and one of each peer that is connected, for others to dial."""
        places = [self.known[peer].addresses[:1] for peer in self.linked if peer in self.known and peer != but]
        mine = [each for each in self.transport.addresses() if len(each) <= ADDRESS_BYTES_MAX][:ADDRESSES_MAX]
        return (*mine, *(address for each in places for address in each))

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
            group.create_task(self._look_for_ever(group), name="who is connected")
            group.create_task(self._dial_for_ever(group), name="dialling")
            group.create_task(self._announce_for_ever(), name="announcing addresses")
            group.create_task(self._search_for_ever(), name="searching peers")

    async def _look_for_ever(self, group: asyncio.TaskGroup) -> None:
        while True:
            self.changed.clear()
            with contextlib.suppress(TransportError):
                for peer in await self.look():
                    self.meeting.add(peer)
                    group.create_task(self._meet(peer), name="meeting")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self.changed.wait()

    async def look(self) -> list[bytes]:
        """See who has gone; who has come, and is still to be asked whether it takes part."""
        now = asyncio.get_running_loop().time()
        connected = await self.transport.peers()
        for peer in [peer for peer in self.linked if peer not in connected]:
            del self.linked[peer]
            known = self.known.get(peer)
            if known is not None and now - known.linked_at >= STEADY_SECONDS:
                known.tries, known.next_at = 0, now
            elif known is not None:  # who lets us in and hangs up costs no more than who does not answer
                known.next_at = max(known.next_at, now + DIAL_SECONDS)
            self.lost(peer)
        self.strangers = {peer: each for peer, each in self.strangers.items() if peer in connected}
        come = [peer for peer in connected if peer not in self.linked and peer not in self.meeting]
        due = [peer for peer in come if peer not in self.strangers or now >= self.strangers[peer].next_at]
        return due[: MEETINGS_AT_ONCE - len(self.meeting)]

    async def _meet(self, peer: bytes) -> None:
        """One that does not answer must not hold up the others."""
        try:
            if not await self.speaks(peer):
                await self._is_stranger(peer)
                return
            self.strangers.pop(peer, None)
            self.linked[peer] = None
            known = self._of(peer)
            known.was_reached, known.linked_at = True, asyncio.get_running_loop().time()
            self.seen(peer)
            await self._ask_around(peer)
        finally:
            self.meeting.discard(peer)

    def takes_part(self, peer: bytes) -> None:
        """It has said so itself: a stranger a moment ago, it was only starting."""
        if peer not in self.linked:
            self.strangers.pop(peer, None)
            self.changed.set()

    async def _is_stranger(self, peer: bytes) -> None:
        now = asyncio.get_running_loop().time()
        stranger = self.strangers.setdefault(peer, Stranger())
        stranger.next_at = now + min(SPEAKS_SECONDS * 2.0 ** min(stranger.tries, 16), SPEAKS_SECONDS_MAX)
        stranger.tries += 1
        known = self.known.get(peer)
        if known is not None and known.is_bootstrap and stranger.tries == STRANGER_TRIES:
            log.warning("%s answers, but %s", known.addresses[0], await inquiry.why_not(self.transport, peer))

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
        linked = [self.known[peer].addresses for peer in self.linked if peer in self.known]
        ranges = {address_range(addresses[0]) for addresses in linked if addresses}

        def rank(peer: bytes) -> tuple[bool, bool, bool, float]:
            known = self.known[peer]
            is_elsewhere = len(ranges) < RANGES_KEPT and address_range(known.addresses[0]) not in ranges
            return (not known.is_bootstrap, peer not in self.members, not is_elsewhere, self.rng.random())

        wanted.sort(key=rank)
        room = LINKS_MAX - len(self.linked) - len(self.dialling)
        # Whoever fills all places must not keep us from those whom we need: they have as many places of their own.
        needed = [peer for peer in wanted if self._is_needed(peer)]
        taken = sum(map(self._is_needed, self.linked)) + len(self.dialling)
        return wanted[: max(0, room, min(len(needed), LINKS_MAX - taken))]

    def _is_needed(self, peer: bytes) -> bool:
        return peer in self.members or (peer in self.known and self.known[peer].is_bootstrap)

    async def _dial(self, peer: bytes) -> None:
        known, loop = self.known.get(peer), asyncio.get_running_loop()
        try:
            if known is None:
                return
            problems = []
            for address in known.addresses:
                try:
                    await self.transport.connect(address)
                    known.worked = address
                    self._put_off(known)
                    self.changed.set()
                    return
                except TransportError as error:
                    problems.append(str(error))
                    if known.worked == address:
                        known.worked = ""
            self._put_off(known)
            if known.is_bootstrap:
                tell(known.told, problems[0], loop.time())
        finally:
            self.dialling.discard(peer)

    def _put_off(self, known: Known) -> None:
        """Until the next dial, should there have to be one."""
        wait = min(DIAL_SECONDS * 2.0 ** min(known.tries, 16), DIAL_SECONDS_MAX)
        known.tries += 1
        known.next_at = asyncio.get_running_loop().time() + wait * self.rng.uniform(0.5, 1.5)

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
                asked = self.rng.sample(list(self.linked), min(ASKED, len(self.linked)))
                await asyncio.gather(*(self._ask_around(peer) for peer in asked))
                with contextlib.suppress(TransportError):
                    self._take_hints(await self.transport.look_up(topic_of(self.run_id)))
                wait = min(2 * wait, SEARCH_SECONDS_MAX)
            await asyncio.sleep(wait)

    async def _ask_around(self, peer: bytes) -> None:
        """Peers know peers, and themselves; more certain than the DHT, and at once."""
        with contextlib.suppress(TransportError, RemoteProtocolError):
            for address in await inquiry.ask_peers(self.transport, peer, self.run_id):
                self._take_hint(address, peer)

    def _take_hints(self, hints: dict[bytes, bytes]) -> None:
        for peer, value in hints.items():
            try:
                addresses = _HINT.decode(value)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue
            self.tell(peer, addresses)

    def tell(self, peer: bytes, addresses: Iterable[str]) -> None:
        """A hint about where this peer is, which it has signed; addresses of another are not its to tell."""
        for address in list(addresses)[:ADDRESSES_MAX]:
            with contextlib.suppress(PeerIdError):
                if key_of(address.rpartition("/p2p/")[2]) == peer:
                    self.add(address, Source.ITSELF)

    def _take_hint(self, address: str, teller: bytes) -> None:
        with contextlib.suppress(PeerIdError):
            is_its_own = key_of(address.rpartition("/p2p/")[2]) == teller
            self.add(address, Source.ITSELF if is_its_own else Source.HEARSAY)


def tell(told: dict[str, float], problem: str, now: float) -> None:
    """Say what is wrong, each thing now and then; what is new at once."""
    if now < told.get(problem, now):
        return
    told[problem] = now + TELL_SECONDS
    while len(told) > TOLD_MAX:
        del told[next(iter(told))]
    log.warning("%s; will go on trying", problem)


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
