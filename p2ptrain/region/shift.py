"""A region: a run whose nodes together are one contributor to another run, the world's (HALoS: arXiv 2506.04531).

Both are ordinary runs, and each agrees on its own. Two things connect them:

- **Upwards.** Every `world.rounds` rounds, one node contributes to the world how far the region has moved since it did
  last: the speaker, which is the one with the smallest key of those that follow the world and whose contributions this
  round took. It signs with its own key, so none is shared. If it is gone, the next key takes its place the next time.
- **Downwards.** When the world has agreed on a round, each node shifts its weights by the change before its next
  training, so the shift is a part of its contribution. All shift alike, so their mean is that shift. Nobody has to be
  believed about the world: contributions are bounded as ever.

Let R be the region's weights when it contributed last, or the world's weights once it has shifted to them since. When
the world agrees on new weights W, a node shifts by W - R: what the region has learned since R stays. What a node knows
and adds stands at the end of its contribution (`Tail`), so all see how much of a shift a round held, and R follows from
the region's agreed rounds and the world's weights alone.

A node that has not seen the last rounds, as after a restart, does not know R, and shifts by nothing until the region
contributes again. If nobody knows it, as in a region that begins, all start from W itself. So does a region that is
further from R than its steps can have moved it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from p2ptrain.exact.outer import Tail

LIARS = 3  # one contribution of so many does not count by itself
LEFT_MIN = 1 / 64  # of a shift: what is less is none
FURTHEST_TIMES = 4  # times what the steps between two contributions can move a weight by; a guess


@dataclass(frozen=True, slots=True)
class World:
    round: int
    weights: Tensor  # [parameters], in main memory


class Region:
    """Tracks a region and the world for one node. All but `hear`, `follow` and `lose` want the replica locked.

    round_reach: how far the steps of a round can move a weight"""

    def __init__(self, me: bytes, rounds: int, round_reach: float) -> None:
        self.me, self.rounds = me, rounds
        self.furthest = FURTHEST_TIMES * round_reach  # root mean square of a movement that a round's steps can explain
        self.tail = Tail()  # of the contribution that is being made
        self._newest: World | None = None
        self._from: Tensor | None = None  # R; None: unknown
        self.world_round: int | None = None  # that R is of, or the one before the region's contribution
        self._left = 1.0  # the share of the shift under way that the region has not taken yet
        self._speaker: bytes | None = None  # who contributed to the world's next round; None: nobody yet
        self._is_known_to_others = False  # R, by the last round
        self._shifting: World | None = None  # what the current training shifts to
        self._added: Tensor | None = None  # what it adds
        self._offered: tuple[int, Tensor] | None = None  # the round it is contributed to, and what it added
        self._returned: Tensor | None = None  # what no round took of that, and is in the residual now
        self._number = self._told_at = 0  # the region's last round, and the one after which it contributed last
        self.is_followed = False  # the world, at the moment

    def hear(self, world: World) -> None:
        self._newest = world
        self.follow()

    def follow(self) -> None:
        self.is_followed = True

    def lose(self) -> None:
        self.is_followed = False

    def begin(self, number: int, agreed: Tensor) -> Tensor | None:
        """Returns what the training of a round adds to the agreed weights before its first step, in main memory."""
        newest, origin = self._newest, self._from
        if self._offered is not None:  # no round has settled it, so it is in the residual again
            self._returned, self._offered = self._with_returned(self._offered[1]), None
        if not self._number and number > 1:
            self._is_known_to_others = True  # perhaps: this node has seen no round yet
        self._shifting = shift = None
        if newest is not None and (newest.round > self.world_round if self.world_round is not None else self._is_new):
            self._shifting, shift = newest, newest.weights - (agreed.cpu() if origin is None else origin)
        is_followed = newest is not None and (shift is not None or self.is_followed)
        followed = newest.round if newest is not None and is_followed else None
        self.tail = Tail(followed, shift is not None, origin is not None, self._speaker is not None)
        if self._returned is not None:
            shift = -self._returned if shift is None else shift - self._returned
        self._added = shift
        return shift

    @property
    def _is_new(self) -> bool:
        """Whether nobody in the region knows from where it goes on."""
        return self._from is None and not self._is_known_to_others and self.is_followed

    def _with_returned(self, added: Tensor) -> Tensor:
        return added if self._returned is None else added + self._returned

    def offer(self, number: int) -> None:
        """Notes that the training has become a contribution to this round."""
        self._offered = None if self._added is None else (number, self._added)

    def forget(self) -> None:
        """Notes that this node has not seen the region's last rounds."""
        self._from = self.world_round = self._speaker = None
        self._left, self._is_known_to_others = 1.0, True

    def applied(self, number: int, tails: Mapping[bytes, Tail], agreed: Tensor) -> Tensor | None:
        """Takes notice of a round of the region, by its contributions' authors. Returns how far the region has moved
        since it contributed last, with the sign of a gradient, if this node is to contribute it."""
        if self._number not in (0, number - 1):
            self.forget()
        self._number = number
        if self._offered is not None and self._offered[0] <= number:
            self._returned = None if self.me in tails else self._with_returned(self._offered[1])
            self._offered = None
        if not tails:
            return None
        is_known = LIARS * sum(tail.is_aware for tail in tails.values()) >= len(tails)
        targets = Counter(
            tail.followed
            for tail in tails.values()
            if tail.is_shifted and tail.is_aware == is_known and tail.followed is not None
        )
        for target, count in sorted(targets.items()):
            if self.world_round is None or target > self.world_round:
                self._note_shift(target, count / len(tails))
        self._is_known_to_others = is_known
        is_due = is_known and number % self.rounds == 0
        return self._tell(tails, agreed.to("cpu", copy=True)) if is_due else None

    def _note_shift(self, target: int, share: float) -> None:
        """Moves R, from which the region goes on, towards the world's weights of round `target`."""
        world = next((each for each in (self._shifting, self._newest) if each and each.round == target), None)
        if world is None or not (self._is_new or self._from is not None):
            if LIARS * share > 1:
                self.forget()  # this node is behind the others in the world's run, or did not know R before
            return
        self._left *= 1.0 - share
        if self._from is not None:
            self._from = self._from + share * (world.weights - self._from)
        if self._left < LEFT_MIN:
            self._from, self.world_round, self._left, self._speaker = world.weights, target, 1.0, None

    def _tell(self, tails: Mapping[bytes, Tail], here: Tensor) -> Tensor | None:
        """Begins the next movement, if one is due, and returns the last one if this node is to contribute it."""
        follow = sorted(key for key, tail in tails.items() if tail.is_aware and tail.followed is not None)
        newest = sorted(tail.followed for tail in tails.values() if tail.followed is not None)
        if not follow:
            if newest:
                self.forget()  # who knows R does not follow the world, and who follows it does not know R
            return None
        latest = newest[max(0, len(newest) - 1 - len(tails) // LIARS)]
        if self._speaker in follow:
            self.world_round = None if self.world_round is None else min(self.world_round, latest)
            return None
        have_told = sum(tails[key].has_told for key in follow)
        if self._from is None and 2 * have_told > len(follow):
            return None  # it was told in a round that this node has not seen
        moved = None if self._from is None else self._from - here
        rounds = max(self.rounds, self._number - self._told_at)
        if moved is not None and torch.linalg.vector_norm(moved) > self.furthest * rounds * moved.numel() ** 0.5:
            self.forget()
            return None
        self._from, self.world_round, self._left, self._speaker = here, latest, 1.0, follow[0]
        self._told_at = self._number
        return moved if self._speaker == self.me and self._newest is not None else None
