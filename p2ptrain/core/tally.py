"""Tallies and claims, only for display: the fate of each author's contributions, and what members report.

A contribution counts as offered when its announcement is accepted, applied when a manifest on this node's chain takes
it, late when it arrives after the last round that could have taken it, and refused for a reason. One that was offered
but neither applied nor refused has expired or may still be taken. Each node counts its own observations since its
start: other nodes receive other messages, and of rounds that it caught up with a node knows only what was applied.

Nothing that is agreed depends on a claim. An announcement claims the steps behind a contribution and their mean
training loss. Every `eval.every_rounds` rounds, three members are drawn by the digest of the last manifest; each
measures the held-out loss of the weights after that round before it trains, and its announcement from that base says
it. The median is shown once all three have spoken: one liar among them cannot move it beyond what the other two have
said. If one never does, the lower of two is shown when the next measurement begins. The training loss of a round is the
median of its steps, for the same reason."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable
from enum import Enum
from statistics import median_low

import msgspec
from msgspec import Struct

from p2ptrain.config import RunConfig
from p2ptrain.core.manifest import Manifest, draw_of
from p2ptrain.core.messages import ADMITTED_MAX, Announcement
from p2ptrain.core.offers import Offers
from p2ptrain.core.state import AgreedState, Taken

AUTHORS_MAX = 2 * ADMITTED_MAX  # admitted authors, and as many former ones
STALENESS_MAX = 64  # rounds that are told apart; more count as these
DRAWN = 3  # members: the fewest of which one may lie
SAID_MIN = 2  # with whom a measurement is shown at its end
ROUNDS_KEPT = 64  # of claims about training: a round is shown once it is applied, which is rarely far behind
MILLION = 1_000_000
LOSS_MAX = 100 * MILLION  # larger claims count as this: guessing blindly among 2**20 tokens costs 14 nats


class Refusal(Enum):
    BAD_PAYLOAD = "bad payload"  # the strict decoder refuses it, or it is not as long as announced
    TWO_FOR_ONE_ROUND = "two for one round"
    TOO_MANY = "too many at once"


class Ban(Enum):
    PROVEN = "two messages that contradict each other"
    BAD_PAYLOAD = Refusal.BAD_PAYLOAD.value
    TWO_FOR_ONE_ROUND = Refusal.TWO_FOR_ONE_ROUND.value


class Tally(Struct):
    offered: int = 0
    applied: int = 0
    late: int = 0
    refused: dict[str, int] = msgspec.field(default_factory=dict)  # by `Refusal`
    staleness: int | None = None  # rounds between the base and the round of the contribution that was applied last
    ban: str = ""  # why it was banned (`Ban`), if that was seen here


def staleness_of(taken: Taken, manifest: Manifest) -> int:
    """Returns how many rounds lie between the state that a contribution began from and the round that takes it."""
    return max(0, manifest.round - 1 - taken.base_round)


class Tallies:
    """The tallies of all authors that are or recently were admitted."""

    def __init__(self) -> None:
        self.by_author: dict[bytes, Tally] = {}
        self.staleness: dict[int, int] = {}  # contributions applied, by the rounds between their base and their round

    def of(self, author: bytes) -> Tally:
        tally = self.by_author.get(author)
        if tally is None:
            tally = self.by_author[author] = Tally()
        return tally

    def refuse(self, author: bytes, why: Refusal) -> None:
        refused = self.of(author).refused
        refused[why.value] = refused.get(why.value, 0) + 1

    def take(self, manifest: Manifest) -> None:
        """Counts the contributions that a manifest applies."""
        for taken in manifest.taken:
            author = self.of(taken.author)
            author.applied += 1
            author.staleness = rounds = min(staleness_of(taken, manifest), STALENESS_MAX)
            self.staleness[rounds] = self.staleness.get(rounds, 0) + 1

    def ban(self, manifest: Manifest, guilty: Collection[bytes | None], refused: Collection[bytes | None]) -> None:
        """Notes why a manifest bans keys: evidence convicts the `guilty`, and `refused` have sent a bad payload. None
        stands for one that is not known here, because this node was away."""
        rest = "" if None in {*guilty, *refused} else Ban.TWO_FOR_ONE_ROUND.value
        for key in manifest.banned:
            self.of(key).ban = Ban.PROVEN.value if key in guilty else Ban.BAD_PAYLOAD.value if key in refused else rest

    def forget(self, admitted: Container[bytes]) -> None:
        """Drops enough authors that are no longer admitted to leave room for those that are."""
        many = len(self.by_author) - (AUTHORS_MAX - ADMITTED_MAX)
        for author in [author for author in self.by_author if author not in admitted][: max(0, many)]:
            del self.by_author[author]

    def limits(self) -> dict[str, tuple[int, int]]:
        return {
            "authors tallied": (len(self.by_author), AUTHORS_MAX),
            "staleness counted": (len(self.staleness), STALENESS_MAX + 1),
        }


class HeldOut(Struct, frozen=True):
    """The held-out loss of the weights after a round."""

    round: int
    loss: float  # nats a token; the median of what was said
    said: int  # members that have said something


class TrainingClaims(Struct, frozen=True):
    """The figures of a round's training that its contributors claim."""

    steps: int
    loss: float | None  # nats a token, the median over these steps


UNKNOWN = TrainingClaims(0, None)


def drawn(state: AgreedState) -> tuple[bytes, ...]:
    return tuple(sorted(state.members, key=draw_of(state))[:DRAWN])


def weighted_median(values: Iterable[tuple[float, int]]) -> float | None:
    """Returns the lower median of (value, weight), or None if there is no weight."""
    ordered = sorted(values)
    half = sum(weight for _, weight in ordered) / 2
    for value, weight in ordered:
        half -= weight
        if half <= 0 < weight:
            return value
    return None


class Claims:
    def __init__(self, run: RunConfig) -> None:
        self.run = run
        self.held_out: HeldOut | None = None
        self.rounds: dict[int, TrainingClaims] = {}  # by round, the last ones
        self._base = b"", -1  # the branch and round whose weights were measured last
        self._drawn: tuple[bytes, ...] = ()
        self._said: dict[bytes, int] = {}  # the first word of each drawn member

    def begin(self, state: AgreedState, offers: Offers) -> None:
        """Notes who is drawn, if the weights after this round are measured, and what has been said early."""
        if self.run.eval.is_due(state.round) and (state.branch, state.round) != self._base:
            if len(self._said) >= SAID_MIN:
                self._show()
            self._base, self._drawn, self._said = (state.branch, state.round), drawn(state), {}
            for offer in offers.by_name.values():
                self.hear(offer.announcement)

    def hear(self, announcement: Announcement) -> None:
        """Notes a held-out loss, if a drawn member says it of the base that was drawn for."""
        if not announcement.held_out:
            return
        author, base = announcement.author, (announcement.branch, announcement.base_round)
        if base != self._base or author not in self._drawn or author in self._said:
            return
        self._said[author] = min(announcement.held_out, LOSS_MAX)
        if len(self._said) == len(self._drawn):
            self._show()

    def _show(self) -> None:
        self.held_out = HeldOut(self._base[1], median_low(self._said.values()) / MILLION, len(self._said))

    def take(self, manifest: Manifest, offers: Offers) -> None:
        """Notes what is claimed of the training behind the contributions that a manifest takes.

        A node that has not heard all of them, because it was away, shows no loss: what it has heard may be a liar's."""
        steps, heard, losses = 0, 0, []
        for taken in manifest.taken:
            for offer in offers.by_payload.get(taken.payload, ()):
                said = offer.announcement
                if (said.author, said.round) == (taken.author, taken.round):
                    weight = min(said.steps, self.run.recipe.local_steps)
                    steps, heard = steps + weight, heard + 1
                    if said.loss:
                        losses.append((min(said.loss, LOSS_MAX) / MILLION, weight))
                    break
        loss = weighted_median(losses) if heard == len(manifest.taken) else None
        self.rounds[manifest.round] = TrainingClaims(steps, loss)
        while len(self.rounds) > ROUNDS_KEPT:
            del self.rounds[next(iter(self.rounds))]

    def limits(self) -> dict[str, tuple[int, int]]:
        return {"held-out losses": (len(self._said), DRAWN), "rounds claimed": (len(self.rounds), ROUNDS_KEPT)}
