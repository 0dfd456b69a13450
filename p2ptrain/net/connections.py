"""Chooses the peers to connect to and keeps those connections: p2pd neither reconnects nor reports who comes and goes.

Addresses come from the user (bootstraps), from the last run of this node (remembered), from peers, and as hints from
the DHT, where each node announces its own under the run's id. A newly connected peer is asked at once for its own
addresses and for those of others, because nobody listens on the source port of a connection. A hint costs at most a
failed dial: a peer that answers proves its key in the handshake. But hearsay never displaces an address that the user
gave, that a peer gave for itself, or that has worked. A peer may tell addresses of the kind it was met on, or wider
ones: none but a peer on this machine tells loopback addresses, none but one in a private network private ones, and
names are not resolved unless the user gave them. address_book.py bounds the dials to what was told.

Only a peer that speaks the run's protocol counts as connected; a bootstrap of another run is recognised and reported.

Small swarms are fully connected. In larger ones a node dials up to LINKS_MAX connections: bootstraps and members of the
roster first, and as many slots again are reserved for these in case strangers fill the others. So that one network
cannot surround it (an eclipse attack: Heilman et al. 2015), it keeps a few links in separate address ranges, in each
range to the peer that has been linked longest (`anchors`). Anchors have slots of their own, and p2pd, which prunes
connections when there are too many, is told to prune anchors, bootstraps and members last. Failed dials are retried
forever, with backoff and jitter: an outage may last a weekend.

Keys cost nothing, and neither do addresses at which nobody answers. So peers that we need, peers reached before, and
peers known only by hearsay are dialled and met in separate slots (`Priority`), each within a time limit."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from statistics import median

import msgspec

from p2ptrain.address import ADDRESS_CHARACTERS_MAX, looks_right
from p2ptrain.errors import RemoteProtocolError
from p2ptrain.net import questions
from p2ptrain.net.address_book import ADDRESSES_MAX, KnownPeer, Origin, Priority, ToldDials, Unmet, tell
from p2ptrain.net.addresses import Reach, address_range, is_within, join, met_in, name_in, split
from p2ptrain.net.tasks import pauses
from p2ptrain.net.transport import Transport, TransportError

LOOK_SECONDS = 1.0  # between listings of the connected peers: a few hundred bytes over a unix socket
SPEAKS_SECONDS = 1.0  # before a peer that does not speak our protocol is asked again: it may be starting; doubles
SPEAKS_SECONDS_MAX = 30.0
STRANGER_TRIES = 3  # before the log says that a bootstrap takes no part in the run
MEETINGS_AT_ONCE = 16  # per priority
MEETING_SECONDS = 5.0  # for a peer to show that it speaks our protocol; the same again at the next try
DIAL_SECONDS = 1.0  # before a failed dial is repeated; doubles each time
DIAL_SECONDS_MAX = 60.0
STEADY_SECONDS = 30.0  # a connection that lasted this long is redialled at once when it is lost
DIALS_AT_ONCE = 4  # per priority
DIAL_SECONDS_LIMIT = 20.0  # for all addresses of one peer: p2pd gives each 15 s, and another may answer at once
ADDRESS_TRIES = 8  # over 20 s; afterwards it is asked now and then by the search for peers
LINKS_MAX = 48  # each costs a copy of all our messages; with no more members than that, gossip costs nothing
RANGES_KEPT = 8  # anchors: links to different address ranges (/16, or /32 of IPv6), on top of all others
KEEP_SECONDS = 60.0  # before p2pd is told again which peers to keep: it forgets them with a broken connection
KNOWN_MAX = 1_024  # peers with addresses; beyond that, those never reached are forgotten first
FORGOTTEN_AT_ONCE = KNOWN_MAX // 16  # so that a flood of addresses does not compare all peers for each
ANNOUNCE_SECONDS = 300.0  # between announcements of our own addresses in the DHT
HINT_SECONDS = 1_800.0  # how long such an announcement is valid
SEARCH_SECONDS = 2.0  # between searches in the DHT; doubles
SEARCH_SECONDS_MAX = 60.0
ASKED = 3  # peers asked for other peers in each search

log = logging.getLogger("p2ptrain.net")
_HINT = msgspec.msgpack.Decoder(list[str])

Seen = Callable[[bytes], None]


@dataclass(slots=True)
class Connections:
    transport: Transport
    run_id: bytes
    speaks: Callable[[bytes], Awaitable[bool]]  # whether a connected peer takes part in our run
    seen: Seen
    lost: Seen
    rng: Random
    roster: Callable[[], Collection[bytes]] = tuple  # the run's members
    known: dict[bytes, KnownPeer] = field(default_factory=dict)
    linked: dict[bytes, str] = field(default_factory=dict)  # connected, and in our run: from which range of addresses
    unmet: dict[bytes, Unmet] = field(default_factory=dict)
    members: frozenset[bytes] = frozenset()  # the roster when we last looked
    shunned: dict[bytes, float] = field(default_factory=dict)  # disconnected on purpose, and until when
    dialling: set[bytes] = field(default_factory=set)
    meeting: set[bytes] = field(default_factory=set)  # being asked whether they speak our protocol
    anchors: dict[str, bytes] = field(default_factory=dict)  # by address range
    met: dict[bytes, Reach] = field(default_factory=dict)  # the networks in which connected peers were met
    ends: dict[bytes, frozenset[str]] = field(default_factory=dict)  # of the connections with linked peers
    named: set[str] = field(default_factory=set)  # host names that the user gave; no others are resolved
    told_dials: ToldDials = field(default_factory=ToldDials)
    kept: set[bytes] = field(default_factory=set)  # peers whose connections p2pd should prune last
    keep_at: float = -math.inf  # when to tell p2pd again
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # a peer may have connected: check now

    # -- Known peers --------------------------------------------------------------------------------

    def add(self, address: str, origin: Origin = Origin.HEARSAY, told_in: Reach = Reach.LOOPBACK) -> None:
        """Adds an address, which ends with the peer's id; one that leads into a narrower network than that of whoever
        told it is ignored. TransportError if it is not an address."""
        name, is_told = name_in(address), origin in (Origin.HEARSAY, Origin.ITSELF)
        if is_told and name and name not in self.named:
            return  # before it is read: a long name takes half a millisecond
        peer, route = split(address)
        if name and origin is Origin.USER:
            self.named.add(name)
        if peer == self.transport.me:
            return
        if is_told and not name and not is_within(address, told_in):
            return
        known = self._of(peer)
        known.is_bootstrap = known.is_bootstrap or origin is Origin.USER
        known.was_reached = known.was_reached or origin is Origin.REMEMBERED
        known.add(join(route, peer), origin)

    def _of(self, peer: bytes) -> KnownPeer:
        """Returns the record of a peer, making it if needed. When there are too many, the least useful peers are
        dropped: if possible those that were never reached."""
        if peer not in self.known:
            if len(self.known) >= KNOWN_MAX:
                busy = self.dialling | self.meeting  # a new record of one would have no addresses
                least = [each for each in sorted(self.known, key=self._use) if each not in busy]
                for each in least[:FORGOTTEN_AT_ONCE]:
                    del self.known[each]
            self.known[peer] = KnownPeer()
        return self.known[peer]

    def _use(self, peer: bytes) -> tuple[bool, bool, bool, bool, float]:
        """The sort key by which peers are kept, the largest longest. Among linked peers the earliest ranks highest, so
        that newcomers cannot push anyone out, however many they are; among the others the one seen last."""
        known, is_linked = self.known[peer], peer in self.linked
        is_of_use = known.was_reached and bool(known.origins)
        since = -known.linked_at if is_linked else known.linked_at if is_of_use else -math.inf
        return (known.is_bootstrap, peer in self.members, is_linked, is_of_use, since)

    def remembered(self) -> list[str]:
        """Returns addresses of peers that were reached, for the next start: those that worked and those that the peers
        gave for themselves; the peers we need come first."""
        found: list[str] = []
        for known in (self.known[peer] for peer in sorted(self.known, key=self._use, reverse=True)):
            if known.linked_at > -math.inf:
                certain = {each for each, origin in known.origins.items() if origin >= Origin.ITSELF} | {known.worked}
                found += [each for each in known.addresses if each in certain][:2]
        return found[:KNOWN_MAX]

    def reachable(self, but: bytes) -> tuple[str, ...]:
        """Returns our own addresses and one of each connected peer, for others to dial."""
        places = [self.known[peer].addresses[:1] for peer in self.linked if peer in self.known and peer != but]
        return (*self._mine(), *(address for each in places for address in each))

    def _mine(self) -> list[str]:
        return [each for each in self.transport.addresses() if len(each) <= ADDRESS_CHARACTERS_MAX][:ADDRESSES_MAX]

    def latency(self, peer: bytes) -> float | None:
        """Returns the median round trip of recent small questions; None if the peer is away or has answered none."""
        known = self.known.get(peer)
        if known is None or peer not in self.linked or not known.answered_in:
            return None
        return round(median(known.answered_in), 4)

    def shun(self, peer: bytes, until: float) -> None:
        """Stops dialling this peer for a while."""
        self.shunned[peer] = until
        while len(self.shunned) > KNOWN_MAX:
            del self.shunned[next(iter(self.shunned))]

    # -- The loops ----------------------------------------------------------------------------------

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._look_for_ever(group), name="who is connected")
            group.create_task(self._dial_for_ever(group), name="dialling")
            group.create_task(self._announce_for_ever(), name="announcing addresses")
            group.create_task(self._search_for_ever(), name="searching peers")

    async def _look_for_ever(self, group: asyncio.TaskGroup) -> None:
        contained = self.transport.boundary.contained
        while True:
            self.changed.clear()
            with self.transport.boundary.contain("a look at who is connected"), contextlib.suppress(TransportError):
                for peer in await self.look():
                    self.meeting.add(peer)
                    met = partial(self.meeting.discard, peer)
                    work = contained("a meeting with a peer", peer, self._meet, peer, group, ended=met)
                    group.create_task(work, name="meeting")
                for peer in self._connected_anew():
                    self._ask_for_addresses(peer, group)
                for peer, before in self.linked.items():
                    if before != (place := self.transport.range_of(peer)):  # reached directly, and no longer relayed
                        self.linked[peer] = place
                        self.seen(peer)
                await self._keep()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self.changed.wait()

    async def look(self) -> list[bytes]:
        """Drops the peers that have gone, and returns those to ask now whether they take part in the run."""
        now = _now()
        self.members = frozenset(self.roster())
        connected = await self.transport.peers()
        self.met = dict.fromkeys(connected, Reach.PUBLIC)
        for peer, addresses in connected.items():
            with self.transport.boundary.contain("the networks of a connected peer", peer):
                self.met[peer] = met_in(addresses)
        for peer in [peer for peer in self.linked if peer not in connected]:
            del self.linked[peer]
            self.lost(peer)
            known = self.known.get(peer)
            if known is not None and now - known.linked_at >= STEADY_SECONDS:
                known.tries, known.next_at = 0, now
            elif known is not None:  # a peer that accepts and hangs up waits like one that does not answer
                known.next_at = max(known.next_at, now + DIAL_SECONDS)
        self.unmet = {peer: each for peer, each in self.unmet.items() if peer in connected}
        come = [peer for peer in connected if peer not in self.linked and peer not in self.meeting]
        unmet = {peer: self.unmet.setdefault(peer, Unmet(now)) for peer in come}
        due = [peer for peer, each in unmet.items() if now >= each.next_at]
        self.rng.shuffle(due)
        due.sort(key=lambda peer: (unmet[peer].tries, unmet[peer].next_at))  # a peer that returns queues again
        return self._placed(due, self.meeting, MEETINGS_AT_ONCE)

    def _connected_anew(self) -> list[bytes]:
        """Returns the linked peers whose connections are all others than when we last looked: such a peer was away in
        between, perhaps for a restart, and may be elsewhere now."""
        before, self.ends = self.ends, {peer: self.transport.ends_of(peer) for peer in self.linked}
        return [peer for peer, ends in self.ends.items() if before.get(peer) and not ends & before[peer]]

    def _range_of(self, peer: bytes) -> str:
        """The address range in which we reached a peer; empty if it dialled us: its addresses are only claims."""
        known = self.known.get(peer)
        return address_range(known.worked) if known is not None and known.worked else ""

    async def _keep(self) -> None:
        """Tells p2pd which connections to prune last."""
        now = _now()
        self.anchors = {}  # the longest linked peer of each range, for the few oldest ranges: `linked` is in order
        for peer in self.linked:
            if len(self.anchors) < RANGES_KEPT and (place := self._range_of(peer)):
                self.anchors.setdefault(place, peer)
        needed = {peer for peer in self.linked if self._is_needed(peer)} | set(self.anchors.values())
        if needed != self.kept or now >= self.keep_at:
            await self.transport.keep(needed)
            self.kept, self.keep_at = needed, now + KEEP_SECONDS

    async def _meet(self, peer: bytes, group: asyncio.TaskGroup) -> None:
        """Asks a connected peer whether it takes part in the run; as a task, so that a silent peer delays nobody."""
        takes_part = False
        now = _now()
        self.unmet.setdefault(peer, Unmet(now)).next_at = now + SPEAKS_SECONDS  # should all of this fail
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MEETING_SECONDS):
                takes_part = await self.speaks(peer)
        now = _now()
        if takes_part:
            known = self._of(peer)
            known.was_reached, known.linked_at = True, now
            self.linked[peer] = self.transport.range_of(peer)
            self.unmet.pop(peer, None)
            self.seen(peer)
            self._ask_for_addresses(peer, group)
            return
        unmet, stranger = self.unmet.setdefault(peer, Unmet(now)), self.known.get(peer)
        unmet.next_at = now + min(SPEAKS_SECONDS * 2.0 ** min(unmet.tries, 16), SPEAKS_SECONDS_MAX)
        unmet.tries += 1
        if stranger is not None and stranger.is_bootstrap and unmet.tries == STRANGER_TRIES:
            log.warning("%s is reachable, but %s", stranger.best, await questions.why_not(self.transport, peer))

    def _ask_for_addresses(self, peer: bytes, group: asyncio.TaskGroup) -> None:
        work = self.transport.boundary.contained("asking for addresses", peer, self._learn_addresses, peer)
        group.create_task(work, name="asking for addresses")

    async def _learn_addresses(self, peer: bytes) -> None:
        """Asks a connected peer for its addresses until it answers: it may still be starting.

        A peer that dialled us and has never told us its addresses could not be found again after a restart."""
        linked_at = self._of(peer).linked_at
        for pause in itertools.islice(pauses(), ADDRESS_TRIES):
            known = self.known.get(peer)
            if peer not in self.linked or known is None or known.linked_at != linked_at:
                return  # gone; if it is back, that connection has its own loop
            if await self._ask_around(peer):
                return
            await asyncio.sleep(pause)

    def takes_part(self, peer: bytes) -> None:
        """Notes that a peer speaks the run's protocol: it came again, was still starting when we met, or searches."""
        self.unmet.pop(peer, None)
        self.changed.set()

    async def _dial_for_ever(self, group: asyncio.TaskGroup) -> None:
        contained = self.transport.boundary.contained
        while True:
            with self.transport.boundary.contain("the choice of whom to dial"):
                for peer in self._placed(self._due(_now()), self.dialling, DIALS_AT_ONCE):
                    self.dialling.add(peer)
                    dialled = partial(self._dialled, peer)
                    group.create_task(contained("a dial", peer, self._dial, peer, ended=dialled), name="dial")
            await asyncio.sleep(0.2)

    def _due(self, now: float) -> list[bytes]:
        """Returns the peers to dial now, the most wanted first."""
        self.shunned = {peer: until for peer, until in self.shunned.items() if until > now}
        busy = Counter(map(self._standing, self.dialling))
        wanted = [
            peer
            for peer, known in self.known.items()
            if known.next_at <= now and not (peer in self.linked or peer in self.unmet or peer in self.dialling)
            and peer not in self.shunned and known.origins
            and busy[self._standing(peer)] < DIALS_AT_ONCE  # ranking a thousand waiting peers would take 20 ms
        ]  # fmt: skip
        ranges = {place for peer in self.linked if (place := self._range_of(peer))}
        ranges |= {self.known[peer].range for peer in self.dialling if peer in self.known}

        def is_elsewhere(peer: bytes) -> bool:
            place = self.known[peer].range
            return len(ranges) < RANGES_KEPT and bool(place) and place not in ranges

        def rank(peer: bytes) -> tuple[bool, bool, bool, float]:
            is_bootstrap, is_member = self.known[peer].is_bootstrap, peer in self.members
            return not is_bootstrap, not is_member, not is_elsewhere(peer), self.rng.random()

        wanted.sort(key=rank)
        room = max(0, LINKS_MAX - len(self.linked) - len(self.dialling))
        # Slots are reserved for needed peers and for other ranges, so that other peers cannot fill them all.
        chosen, rest = wanted[:room], wanted[room:]
        places = LINKS_MAX - sum(map(self._is_needed, [*self.linked, *self.dialling, *chosen]))
        chosen += [peer for peer in rest if self._is_needed(peer)][: max(0, places)]
        ranges |= {self.known[peer].range for peer in chosen}
        for peer in rest:
            if is_elsewhere(peer):
                ranges.add(self.known[peer].range)
                chosen.append(peer)
        return chosen

    def _is_needed(self, peer: bytes) -> bool:
        return self._standing(peer) is Priority.NEEDED

    def _standing(self, peer: bytes) -> Priority:
        known = self.known.get(peer)
        if peer in self.members or (known is not None and known.is_bootstrap):
            return Priority.NEEDED
        return Priority.REACHED if known is not None and known.was_reached else Priority.HEARD_OF

    def _placed(self, wanted: list[bytes], busy: Collection[bytes], places: int) -> list[bytes]:
        """Returns the first of the wanted peers, as many as still fit into the slots of their priority."""
        taken = Counter(map(self._standing, busy))
        found = []
        for peer in wanted:
            standing = self._standing(peer)
            if taken[standing] < places:
                taken[standing] += 1
                found.append(peer)
        return found

    async def _dial(self, peer: bytes) -> None:
        known = self.known[peer]  # who is being dialled is not forgotten
        if not (problem := await self._reach(known, self._standing(peer))):
            self.changed.set()
        elif known.is_bootstrap:
            tell(known.told, problem, _now())

    def _dialled(self, peer: bytes) -> None:
        """Sets when the next dial may come, should one be needed."""
        self.dialling.discard(peer)
        known = self.known[peer]
        wait = min(DIAL_SECONDS * 2.0 ** min(known.tries, 16), DIAL_SECONDS_MAX)
        known.tries += 1
        known.next_at = _now() + wait * self.rng.uniform(0.5, 1.5)

    async def _reach(self, known: KnownPeer, priority: Priority) -> str:
        """Connects to a peer at one of its addresses; on failure returns what was wrong with the best one."""
        problems: list[str] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DIAL_SECONDS_LIMIT):
                for address in known.to_dial(self.rng):
                    is_told = known.origins.get(address) is not Origin.USER
                    if is_told and not self.told_dials.may_dial(address, priority, _now()):
                        continue
                    is_reached = False
                    try:
                        await self.transport.connect(address)
                        known.worked, is_reached = address, True
                        return ""
                    except TransportError as error:
                        problems.append(str(error))
                        if known.worked == address:
                            known.worked = ""
                    finally:
                        if is_told:
                            self.told_dials.ended(address, priority, _now(), is_reached=is_reached)
        return problems[0] if problems else f"cannot connect to {known.best}: no answer"

    async def _announce_for_ever(self) -> None:
        failing = pauses(LOOK_SECONDS, ANNOUNCE_SECONDS)
        while True:
            pause = LOOK_SECONDS
            with self.transport.boundary.contain("announcing our addresses"), contextlib.suppress(TransportError):
                if (addresses := self._mine()) and self.linked:
                    hint, pause = msgspec.msgpack.encode(addresses), next(failing)  # unless somebody accepts it
                    await self.transport.announce(topic_of(self.run_id), hint, HINT_SECONDS)
                    pause, failing = ANNOUNCE_SECONDS, pauses(LOOK_SECONDS, ANNOUNCE_SECONDS)
            await asyncio.sleep(pause)

    async def _search_for_ever(self) -> None:
        wait = SEARCH_SECONDS
        while True:
            if self.linked:
                with self.transport.boundary.contain("a search for peers"):
                    asked = self.rng.sample(list(self.linked), min(ASKED, len(self.linked)))
                    contained = self.transport.boundary.contained
                    await asyncio.gather(*(contained("asking around", peer, self._ask_around, peer) for peer in asked))
                    with contextlib.suppress(TransportError):
                        self._take_hints(await self.transport.look_up(topic_of(self.run_id)))
                wait = min(2 * wait, SEARCH_SECONDS_MAX)
            await asyncio.sleep(wait)

    async def _ask_around(self, peer: bytes) -> bool:
        """Asks a peer for addresses, which is faster and more certain than the DHT. Returns whether it answered."""
        took = self._of(peer).answered_in.append
        try:
            answer = await questions.ask_peers(self.transport, peer, self.run_id, took)
        except TransportError:
            return False
        except RemoteProtocolError:
            return True  # its answer was invalid: asking again will not help
        self._of(peer).release, self._of(peer).owner = answer.release, answer.owner
        for address in answer.addresses:
            origin = Origin.ITSELF if address.endswith(join("", peer)) else Origin.HEARSAY
            self._take_hint(address, origin, self.met.get(peer, Reach.PUBLIC))
        return True

    def _take_hints(self, hints: dict[bytes, bytes]) -> None:
        for peer, value in hints.items():
            try:
                addresses = _HINT.decode(value)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue
            self.tell(peer, addresses)

    def tell(self, peer: bytes, addresses: Iterable[str]) -> None:
        """Adds addresses that this peer has announced and signed for itself; others in the list are ignored.

        Any connected peer may have made up the peer and its record, so they count as told by the least trusted."""
        for address in list(addresses)[:ADDRESSES_MAX]:
            if address.endswith(join("", peer)):
                self._take_hint(address, Origin.ITSELF, min(self.met.values(), default=Reach.LOOPBACK))

    def _take_hint(self, address: str, origin: Origin, told_in: Reach) -> None:
        with contextlib.suppress(TransportError):
            if looks_right(address):
                self.add(address, origin, told_in)


def _now() -> float:
    return asyncio.get_running_loop().time()


def topic_of(run_id: bytes) -> str:
    """The topic in which a run's nodes gossip, and the DHT key under which they find one another."""
    return f"p2ptrain/2/{run_id.hex()}"
