"""Succession: how members agree on the run that follows theirs, and when theirs ends.

A member moves that the run end after a round and go on as another, with settings changed (config/succession.py), from
the weights it ends with or, as a roll-back, from certified ones of an earlier round. Members assent; manifests carry
motions and assents as they carry evidence, so the agreed state has both. A motion that more than two thirds of the
seats assent to at the same time is decided, for good. There is one motion of each member, and each assents to one, so
nobody keeps others from moving; a motion lapses with its round, or when its author loses the seat. What a member said
later counts, in whatever order it arrives.

Once the last round is there, manifests take no contribution any more, until the root after it is certified: then the
run is over (origin.py says how the next begins)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct

from p2ptrain.config.succession import CHANGE_BYTES_MAX, check_form
from p2ptrain.core.messages import NOTHING, SEATS_MAX, Digest, Key, Number
from p2ptrain.core.wire import encode
from p2ptrain.digest import digest
from p2ptrain.errors import RemoteProtocolError

if TYPE_CHECKING:
    from p2ptrain.config import RunConfig
    from p2ptrain.core.manifest import Manifest
    from p2ptrain.core.state import AgreedState

NOTICE_ROUNDS = 4  # at least, from the agreed state to a motion's last round: its assents take two or three to arrive
AHEAD_ROUNDS_MAX = 2**20
BRANCH_ROUNDS = 256  # that a branch lasts at least: the few who were cut off must not end what the others still train
REMEMBERS_THE_UNSEATED = 3  # from this protocol version on, what a member said counts though it lost its seat since
SAID_ROUNDS = 128  # for which an assent to nothing that is open is remembered: longer than a message of it is taken


class Motion(Struct, frozen=True, array_like=True):
    """A member moves that the run go on as another."""

    author: Key
    made: Number  # the round of its message
    last: Number  # the last round of this run that takes contributions
    weights: Number  # the round whose weights the successor begins with: `last`, or an earlier one
    root: Digest  # of these; NOTHING if they are the last ones, whose root is not known yet
    change: Annotated[bytes, Meta(max_length=CHANGE_BYTES_MAX)]

    @property
    def name(self) -> bytes:
        return digest("motion", encode(self))

    @property
    def goes_back(self) -> bool:
        return self.weights < self.last


class Assented(Struct, frozen=True, array_like=True):
    member: Key
    made: Number  # the round of its message
    motion: Digest  # its name; NOTHING: to none any more


class Succession(Struct, frozen=True, array_like=True):
    motions: Annotated[tuple[Motion, ...], Meta(max_length=SEATS_MAX)] = ()  # by author, ascending
    assents: Annotated[tuple[Assented, ...], Meta(max_length=SEATS_MAX)] = ()  # by member, ascending
    decided: Motion | None = None
    since: Number = 0  # the round after which the branch began; 0: it is the run's first

    def assents_to(self, name: bytes) -> int:
        return sum(each.motion == name for each in self.assents)

    def assent_of(self, member: bytes) -> bytes:
        """Returns the name of the motion that a member assents to, or NOTHING."""
        return next((each.motion for each in self.assents if each.member == member), NOTHING)


UNMOVED = Succession()


def needed(members: int) -> int:
    """Returns how many members have to assent: more than two thirds, also where fewer decide on a round."""
    return 2 * members // 3 + 1


def why_not_moved(motion: Motion, state: AgreedState, run: RunConfig) -> str:
    """Returns why a motion cannot be made in the next round; empty if it can."""
    return next(_hindrances(motion, state, run), "")


def _hindrances(motion: Motion, state: AgreedState, run: RunConfig) -> Iterator[str]:
    here = state.succession
    if motion.author not in state.roster.seat:
        yield "only members with a seat can move"
    if here.decided is not None:
        yield "a successor is decided already"
    if any(each.member == motion.author and each.made >= motion.made for each in here.assents):
        yield "its author has said something since, or in the same round"
    earliest = max(state.round + NOTICE_ROUNDS, here.since + BRANCH_ROUNDS if here.since else 0)
    if not earliest <= motion.last <= state.round + AHEAD_ROUNDS_MAX:
        latest = state.round + AHEAD_ROUNDS_MAX
        yield f"the last round is {motion.last}, and could be {earliest} at the earliest and {latest} at the latest"
    if motion.goes_back and (motion.weights > state.root_round or motion.root == NOTHING):
        yield f"the weights of round {motion.weights} are not certified yet"
    if not motion.goes_back and (motion.weights > motion.last or motion.root != NOTHING):
        yield "the root of weights that are not made yet is not known"
    try:
        check_form(run, motion.change)
    except RemoteProtocolError as error:
        yield str(error)
    if motion.change == b"{}" and not motion.goes_back:
        yield "it changes nothing"


def motions_of(motions: Iterable[Motion], state: AgreedState, run: RunConfig) -> tuple[Motion, ...]:
    """Returns the motions that a manifest carries: one of each author."""
    chosen: dict[bytes, Motion] = {}
    for motion in sorted(motions, key=lambda motion: (motion.author, -motion.made, motion.name)):
        if motion.author not in chosen and not why_not_moved(motion, state, run):
            chosen[motion.author] = motion
    return tuple(chosen.values())


def may_assent(assent: Assented, state: AgreedState) -> bool:
    """Whether an assent changes anything."""
    here = state.succession
    said = next((each for each in here.assents if each.member == assent.member), None)
    if assent.member not in state.roster.seat or here.decided is not None:
        return False
    if said is not None and (said.made >= assent.made or said.motion == assent.motion):
        return False
    is_open = assent.motion in {motion.name for motion in here.motions}
    return is_open or (assent.motion == NOTHING and said is not None)


def assents_of(assents: Iterable[Assented], state: AgreedState) -> tuple[Assented, ...]:
    """Returns the assents that a manifest carries: one of each member."""
    chosen: dict[bytes, Assented] = {}
    for assent in sorted(assents, key=lambda assent: (assent.member, -assent.made, assent.motion)):
        if assent.member not in chosen and may_assent(assent, state):
            chosen[assent.member] = assent
    return tuple(chosen.values())


def succession_after(state: AgreedState, manifest: Manifest, members: tuple[bytes, ...], run: RunConfig) -> Succession:
    """Returns what is moved and assented to after a manifest, which leaves these members. Who moves assents."""
    before, inside, number = state.succession, set(members), manifest.round
    if before.decided is not None or not (before.motions or before.assents or manifest.motions):
        return before
    moved = {motion.author: motion for motion in (*before.motions, *manifest.motions)}
    motions = tuple(moved[key] for key in sorted(moved.keys() & inside) if moved[key].last > number)
    said = {each.member: each for each in (*before.assents, *manifest.assents)}
    for each in manifest.motions:
        if each.author not in said or said[each.author].made <= each.made:
            said[each.author] = Assented(each.author, each.made, each.name)
    names = {motion.name for motion in motions}
    kept = [each for key, each in said.items() if key in inside]
    kept = [each for each in kept if each.motion in names or each.made > number - SAID_ROUNDS]
    if run.protocol >= REMEMBERS_THE_UNSEATED:
        gone = [Assented(key, each.made, NOTHING) for key, each in said.items() if key not in inside]
        gone = sorted(
            (each for each in gone if each.made > number - SAID_ROUNDS), key=lambda each: (-each.made, each.member)
        )
        kept += gone[: SEATS_MAX - len(kept)]
    assents = tuple(sorted(kept, key=lambda each: each.member))
    counts, least = Counter(each.motion for each in assents), needed(len(members))
    for motion in motions:
        if counts[motion.name] >= least:
            agreed = tuple(each for each in assents if each.motion == motion.name)
            return Succession((), agreed, motion, before.since)
    return Succession(motions, assents, None, before.since)


def is_closing(state: AgreedState) -> bool:
    """Whether the last round was decided, so that no later one takes a contribution."""
    decided = state.succession.decided
    return decided is not None and state.round >= decided.last


def is_over(state: AgreedState) -> bool:
    """Whether the run has ended: no round follows, but those of its successor."""
    decided = state.succession.decided
    return decided is not None and is_closing(state) and (decided.goes_back or state.root_round >= decided.last)
