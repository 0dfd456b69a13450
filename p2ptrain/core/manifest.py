"""The manifest: the list of everything that a round applies, a pure function of the availabilities in its proposal.

It contains exactly what q - f of the q named availabilities attest: contributions in the order of their authors' keys,
payloads that were found bad, joins, leaves, evidence, members that were not heard, and the newest state root. The
proposer only chooses which q availabilities to name. So every node computes the manifest itself, and a proposal carries
only its digest. Everything that every honest member attests gets in, and nothing that no honest member attests.

If two contributions of one author for one round are attested, the author has lied: neither is taken, and the author is
banned. So are authors of payloads that q - f members refuse, and authors that evidence convicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated

import msgspec
from blake3 import blake3
from msgspec import Meta, Struct

from p2ptrain.core import messages as msg
from p2ptrain.core.audits import Measured, counts, has_earned_seat, has_lost_seat, may_report
from p2ptrain.core.roster import bitmap, roster_of, seats_in
from p2ptrain.core.state import SPENT_MAX, AgreedState, Taken, Uses
from p2ptrain.core.succession import Assented, Motion, assents_of, is_closing, motions_of
from p2ptrain.digest import digest

if TYPE_CHECKING:
    from p2ptrain.config import RunConfig

NO_BEARER = bytes(msg.KEY_BYTES)
JOINS_MIN = 4  # that a manifest may grant, however small the roster
# Members may attest different names, so a manifest can hold more than one availability does. But q availabilities hold
# at most q times as many names, each of which has to occur q - f times, and q < 2 (q - f) for every N.
REFUSED_MAX = 2 * msg.HELD_MAX
ASKED_MAX = 2 * msg.REQUESTS_MAX


class Join(Struct, frozen=True, array_like=True):
    """A key to admit, and the invitation that it used, if the run requires one."""

    key: msg.Key
    bearer: msg.Key
    uses: Uses  # for how many keys the invitation is good
    last_round: msg.Number  # of the invitation; 0 if none was needed


class Request(Struct, frozen=True):
    """The change to the agreed state that a verified join request, leave or piece of evidence asks for."""

    join: Join | None = None
    leave: bytes = b""
    leave_round: int = 0
    guilty: bytes = b""  # the key that evidence convicts
    measured: Measured | None = None  # by a member's audit
    motion: Motion | None = None
    assent: Assented | None = None


class Manifest(Struct, frozen=True, array_like=True, dict=True):
    branch: msg.Digest
    round: msg.Number
    parent: msg.Digest  # the previous manifest, or the branch
    state: msg.Digest  # the agreed state before this round
    root_round: msg.Number
    root: msg.Digest
    taken: Annotated[tuple[Taken, ...], Meta(max_length=msg.ADMITTED_MAX)]  # by author, ascending
    refused: Annotated[tuple[msg.Short, ...], Meta(max_length=REFUSED_MAX)]  # announcements of bad payloads
    evidence: Annotated[tuple[msg.Short, ...], Meta(max_length=ASKED_MAX)]
    joins: Annotated[tuple[Join, ...], Meta(max_length=ASKED_MAX)]  # by key, ascending
    leaves: Annotated[tuple[msg.Key, ...], Meta(max_length=ASKED_MAX)]
    banned: Annotated[tuple[msg.Key, ...], Meta(max_length=msg.ADMITTED_MAX)]
    absent: msg.SeatBits  # members that fewer than q - f of the named authors heard
    seated: Annotated[tuple[msg.Key, ...], Meta(max_length=msg.SEATS_MAX)]  # have a seat from the next round on
    unseated: Annotated[tuple[msg.Key, ...], Meta(max_length=msg.SEATS_MAX)]  # lose their seat
    audits: Annotated[tuple[Measured, ...], Meta(max_length=ASKED_MAX)] = ()  # ascending
    motions: Annotated[tuple[Motion, ...], Meta(max_length=msg.SEATS_MAX)] = ()  # by author, ascending
    assents: Annotated[tuple[Assented, ...], Meta(max_length=msg.SEATS_MAX)] = ()  # by member, ascending

    @cached_property
    def digest(self) -> bytes:
        return digest("manifest", _ENCODER.encode(self))

    @property
    def counted(self) -> tuple[Taken, ...]:
        """The contributions that are applied."""
        return tuple(taken for taken in self.taken if taken.counts)

    @property
    def changes_roster(self) -> bool:
        return bool(self.seated or self.unseated)


_ENCODER = msgspec.msgpack.Encoder()


def joins_max(members: int) -> int:
    """Returns how many joins a manifest grants at most. Few, so that nobody fills a run within minutes."""
    return max(JOINS_MIN, members // 4)


Offers = Callable[[bytes], msg.Announcement | None]
Requests = Callable[[bytes], Request | None]


class Missing(Struct, frozen=True):
    """The names of attested announcements and requests that have to be fetched before the manifest can be computed."""

    names: tuple[bytes, ...]


def attested(fields: Iterable[tuple[bytes, ...]], least: int) -> list[bytes]:
    """Returns the names that occur in at least `least` of the fields, ascending."""
    counts: Counter[bytes] = Counter()
    for names, times in Counter(fields).items():  # most fields are equal
        for name in names:
            counts[name] += times
    return sorted(name for name, times in counts.items() if times >= least)


def manifest_of(
    state: AgreedState, run: RunConfig, named: list[msg.Availability], offer_of: Offers, request_of: Requests
) -> Manifest | Missing:
    """Computes the manifest of the next round from these availabilities."""
    roster = state.roster
    least = roster.attesting
    held = attested((availability.held for availability in named), least)
    refused = attested((availability.refused for availability in named), least)
    asked = attested((availability.requests for availability in named), least)
    offers = {name: offer_of(name) for name in (*held, *refused)}
    requests = {name: request_of(name) for name in asked}
    missing = tuple(sorted(name for name, found in (*offers.items(), *requests.items()) if found is None))
    if missing:
        return Missing(missing)

    staleness = run.agreement.staleness_rounds_max
    candidates = [offer for name in held if (offer := offers[name]) and state.may_take(offer, staleness)]
    candidates = [] if is_closing(state) else candidates
    places = Counter((offer.author, offer.round) for offer in candidates)
    liars = {author for (author, _), times in places.items() if times > 1}  # two contributions for one round
    refused = [name for name in refused if (offer := offers[name]) and state.may_take(offer, staleness)]
    guilty = {name: request.guilty for name, request in requests.items() if request and request.guilty in state.place}
    authors = {offer.author for name in refused if (offer := offers[name])}
    banned = authors | liars | set(guilty.values())
    wanted = [request for request in requests.values() if request]
    leaves = {
        request.leave
        for request in wanted
        if request.leave in state.place and request.leave_round >= state.admitted[state.place[request.leave]].since
    }
    absent = _unheard(named, roster.size, least)
    unseated = _unseated(state, run, banned | leaves, absent)
    if len(unseated) == roster.size:  # a roster must not become empty: in that case nobody leaves it
        banned, leaves, unseated = banned - unseated, leaves - unseated, set()
    gone = banned | leaves
    oldest = _oldest_of_each(state, (offer for offer in candidates if offer.author not in gone | liars))
    taken = _drawn(state, run, _of_one_author_each(state, oldest))
    authors = {entry.author for entry in taken}
    seated = _seated(state, run, authors, gone | unseated, len(unseated))
    root_round, root = _newest_root(state, named, least)
    return Manifest(
        branch=state.branch,
        round=state.round + 1,
        parent=state.head,
        state=state.digest,
        root_round=root_round,
        root=root,
        taken=taken,
        refused=tuple(refused),
        evidence=tuple(guilty),
        joins=_joins(state, run, [request.join for request in wanted if request.join], gone, authors | set(seated)),
        leaves=tuple(sorted(leaves - banned)),
        banned=tuple(sorted(banned)),
        absent=bitmap(absent),
        seated=seated,
        unseated=tuple(sorted(unseated)),
        audits=_audits([request.measured for request in wanted if request.measured], state),
        motions=motions_of((request.motion for request in wanted if request.motion), state, run),
        assents=assents_of((request.assent for request in wanted if request.assent), state),
    )


def contradiction(manifest: Manifest, state: AgreedState, run: RunConfig) -> str | None:
    """Returns why no availabilities can lead from a state to this manifest, or None if some may.

    An outsider can only check a manifest against the state before it: a dishonest quorum can still have left out
    anything. It is always valid that nobody lost a seat, because a roster that would become empty is kept."""
    return next(_contradictions(manifest, state, run), None)


def _contradictions(manifest: Manifest, state: AgreedState, run: RunConfig) -> Iterator[str]:
    """Yields contradictions. Only the first counts: the checks after it may rely on it."""
    if not state.members:
        yield "the state before has no members"
    if not set(state.members) <= set(state.place):
        yield "the state before has members that were never admitted"
    gone, unseated = {*manifest.banned, *manifest.leaves}, set(manifest.unseated)
    seats = seats_in(manifest.absent)
    if seats and seats[-1] >= state.roster.size:
        yield "it reports absent members that do not exist"
    if unseated and unseated != _unseated(state, run, gone, seats):
        yield "the wrong members lose their seats"
    authors = [taken.author for taken in manifest.taken]
    taken_of = set(authors)
    if manifest.seated != _seated(state, run, taken_of, gone | unseated, len(unseated)):
        yield "keys get seats that have not earned them"
    if not gone <= set(state.place) or gone & taken_of or not taken_of <= set(state.place):
        yield "it takes contributions of keys that it removes, or names keys that were not admitted"
    if manifest.joins != _joins(state, run, list(manifest.joins), gone, taken_of | set(manifest.seated)):
        yield "it admits keys that cannot be admitted"
    if (manifest.root_round, manifest.root) != (state.root_round, state.root) and not (
        state.root_round < manifest.root_round <= state.round
    ):
        yield "its state root is of a round that cannot be next"
    if manifest.audits != _audits(manifest.audits, state):
        yield "its audits are out of order, or by keys that may not audit"
    if manifest.motions != motions_of(manifest.motions, state, run):
        yield "it carries motions that cannot be made"
    if manifest.assents != assents_of(manifest.assents, state):
        yield "it carries assents that change nothing"
    rising = (authors, manifest.refused, manifest.evidence, manifest.leaves, manifest.banned)
    if any(first >= second for names in rising for first, second in pairwise(names)):
        yield "its lists are not in ascending order"
    yield from _contradictions_of_taken(manifest, state, run)


def _contradictions_of_taken(manifest: Manifest, state: AgreedState, run: RunConfig) -> Iterator[str]:
    if manifest.taken and is_closing(state):
        yield "it takes contributions after the last round"
    if manifest.taken != _of_one_author_each(state, manifest.taken):
        yield "it takes the same content of two authors"
    if manifest.taken != _drawn(state, run, manifest.taken):
        yield "it takes too many contributions of keys without a seat"
    if any(taken.counts != counts(state, taken.author) for taken in manifest.taken):
        yield "it applies contributions that do not count, or the other way round"
    staleness = run.agreement.staleness_rounds_max
    for taken in manifest.taken:
        if not state.is_open_to(taken, staleness) or taken.base_round > taken.round:
            yield f"it takes a contribution of round {taken.round} that cannot be taken"


def _audits(measured: Iterable[Measured], state: AgreedState) -> tuple[Measured, ...]:
    order = sorted(
        measured, key=lambda each: (each.author, each.round, each.key, each.is_summoned, each.z, each.strength)
    )
    return tuple(each for each in order if may_report(state, each))


def _oldest_of_each(state: AgreedState, candidates: Iterable[msg.Announcement]) -> tuple[Taken, ...]:
    oldest: dict[bytes, msg.Announcement] = {}
    for offer in candidates:
        if offer.author not in oldest or offer.round < oldest[offer.author].round:
            oldest[offer.author] = offer
    return tuple(
        Taken(
            offer.author, offer.round, offer.base_round, offer.payload, offer.payload_bytes, offer.steps, offer.content,
            counts(state, offer.author),
        )
        for _, offer in sorted(oldest.items())
    )  # fmt: skip


def _of_one_author_each(state: AgreedState, taken: tuple[Taken, ...]) -> tuple[Taken, ...]:
    """Returns the contributions without copies: of several with the same content one that counts, a member's, and
    of several members' the one that is drawn. A thousand keys behind one content are one contribution."""
    first: dict[bytes, Taken] = {}
    draw = draw_of(state)

    def rank(entry: Taken) -> tuple[bool, bool, bytes]:
        return not entry.counts, entry.author not in state.roster.seat, draw(entry.author)

    for entry in taken:
        other = first.setdefault(entry.content, entry)
        if other is not entry and rank(entry) < rank(other):
            first[entry.content] = entry
    return taken if len(first) == len(taken) else tuple(entry for entry in taken if first[entry.content] is entry)


def _unheard(named: list[msg.Availability], size: int, least: int) -> list[int]:
    heard = [0] * size
    for seats, times in Counter(availability.heard for availability in named).items():
        for seat in seats_in(seats):
            if seat < size:
                heard[seat] += times
    return [seat for seat, times in enumerate(heard) if times < least]


def _unseated(state: AgreedState, run: RunConfig, gone: set[bytes], absent: list[int]) -> set[bytes]:
    """Returns the members that lose their seat: gone, unheard for too long, or by what audits find of their work."""
    unheard = {state.members[seat] for seat in absent}
    limit = run.admission.absence_rounds_max
    entries = ((key, state.admitted[state.place[key]]) for key in state.members)
    return {
        key
        for key, entry in entries
        if key in gone or (key in unheard and entry.absent + 1 >= limit) or has_lost_seat(state, entry, run)
    }


def _seated(state: AgreedState, run: RunConfig, taken: set[bytes], out: set[bytes], freed: int) -> tuple[bytes, ...]:
    """Returns the newcomers that get a seat after probation, the longest admitted first; a few per round, so that the
    roster that decides about them stays the larger part of the next one."""
    free = run.admission.seats_max - len(state.members) + freed
    most = min(free, max(1, len(state.members) // 4))
    if most <= 0 or len(state.admitted) == len(state.members):
        return ()
    ready = [
        entry
        for entry in state.admitted
        if entry.key not in roster_of(state.members).seat
        and entry.key not in out
        and entry.taken + (entry.key in taken) >= run.admission.probation_rounds
        and has_earned_seat(state, entry.key, run)
    ]
    draw = draw_of(state)
    ready.sort(key=lambda entry: (entry.since, draw(entry.key)))
    return tuple(sorted(entry.key for entry in ready[:most]))


def _drawn(state: AgreedState, run: RunConfig, taken: tuple[Taken, ...]) -> tuple[Taken, ...]:
    """Returns the contributions without some of keys that have no seat, if these are too many in an open run, where
    one person can have any number of keys: half of those that stay are of keys whose work audits have found."""
    seat, most = state.roster.seat, max(1, state.roster.size // 4)
    others = [entry.author for entry in taken if entry.author not in seat]
    if run.admission.policy != "open" or len(others) <= most:
        return taken
    draw, admitted, place = draw_of(state), state.admitted, state.place
    ordered = sorted(others, key=draw)
    working = [key for key in ordered if admitted[place[key]].conduct.credit][: -(-most // 2)]
    drawn = set([*working, *(key for key in ordered if key not in working)][:most])
    return tuple(entry for entry in taken if entry.author in seat or entry.author in drawn)


def draw_of(state: AgreedState) -> Callable[[bytes], bytes]:
    """Returns the order in which keys are drawn: by the last manifest, which nobody knew when the keys were made."""
    return lambda key: blake3(state.head + key).digest()


def _joins(
    state: AgreedState, run: RunConfig, joins: list[Join], gone: set[bytes], kept: set[bytes]
) -> tuple[Join, ...]:
    """Returns the joins to grant: a few per round, at most one per key and use of an invitation, while there is room.
    Keys that are idle and not in `kept` make room."""
    idle = sum(entry.key not in gone and entry.key not in kept for entry in state.idle(run))
    room = min(joins_max(state.roster.size), run.admission.contributors_max - len(state.admitted) + idle)
    spent = Counter(bearer for bearer, _ in state.spent)
    chosen: dict[bytes, Join] = {}
    draw = draw_of(state)
    for join in sorted(joins, key=lambda join: (draw(join.key), join.bearer)):
        if len(chosen) >= room or join.key in state.place or join.key in state.banned or join.key in gone:
            continue
        is_spent = spent[join.bearer] >= join.uses or spent.total() >= SPENT_MAX
        if join.last_round and (is_spent or join.last_round <= state.round):
            continue
        if join.key not in chosen:
            chosen[join.key] = join
            spent[join.bearer] += join.last_round > 0
    return tuple(chosen[key] for key in sorted(chosen))


def _newest_root(state: AgreedState, named: list[msg.Availability], least: int) -> tuple[int, bytes]:
    carried = Counter((availability.root_round, availability.root) for availability in named)
    certified = [place for place, times in carried.items() if times >= least and place[0] > state.root_round]
    return max(certified, default=(state.root_round, state.root))
