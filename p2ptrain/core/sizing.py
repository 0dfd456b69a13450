"""Sizing: which of the run's k this node's next contribution takes, so that it arrives before its round is over.

A line cannot be measured apart from what else it carries, nor how long the others will wait. But each manifest says
whether this node's contribution was in time, and if it was announced after all others, its training was late, and not
its line. So the size follows that, as a congestion window follows acknowledgements (Jacobson 1988): it begins with the
smallest, grows after a round in time, and shrinks after two that were missed within a few, or one right after it
grew. A size that fails right after it was tried is tried again after more rounds each time: a line that carries less
does not lose a contribution every few rounds, and one that has become faster is found out."""

from __future__ import annotations

from collections.abc import Collection, Sequence

GROW_ROUNDS = 1  # in time, before the next larger size is tried for the first time
TRIAL_ROUNDS = 8  # in time, after which a size is known to fit, and a single contribution may come too late
AGAIN_ROUNDS, AGAIN_ROUNDS_MAX = 8, 256  # in time, before one that came too late is tried again; doubled each time


class Sizing:
    """Picks from the run's k, which rise."""

    def __init__(self, ks: Sequence[int]) -> None:
        self._ks = ks
        self._at = 0
        self._fits = False  # the size of now
        self._in_time = 0  # rounds in a row, with this size
        self._wait = [GROW_ROUNDS] * len(ks)  # rounds in time before each size is tried

    @property
    def k(self) -> int:
        """The next contribution's; 0: the run leaves no choice."""
        return self._ks[self._at] if len(self._ks) > 1 else 0

    def sent(self, k: int) -> None:
        """Notes which k a contribution has: its owner may allow less than was asked for. 0: as asked."""
        if k and k != self.k:
            self._change(self._ks.index(k))

    def decided(self, number: int, taken: Collection[int]) -> None:
        """Notes a round to which a contribution was on offer; `taken`: those that it takes, by the rounds they are for.

        A round takes one of an author, the oldest. If that is a late one, this round's own was not late."""
        if number in taken:
            self.taken_in_time()
        elif not taken:
            self.came_late()

    def taken_in_time(self) -> None:
        """Notes that a round has taken the contribution that was made for it."""
        self._in_time += 1
        if self._in_time >= TRIAL_ROUNDS:
            self._fits, self._wait[self._at] = True, AGAIN_ROUNDS
        above = self._at + 1
        if above < len(self._ks) and self._in_time >= self._wait[above]:
            self._change(above)

    def came_late(self) -> None:
        """Notes that a round was agreed on without the contribution that was made for it."""
        is_alone, self._in_time = self._in_time >= TRIAL_ROUNDS, 0
        if is_alone or not self._at:
            return
        if not self._fits:
            self._wait[self._at] = min(max(AGAIN_ROUNDS, 2 * self._wait[self._at]), AGAIN_ROUNDS_MAX)
        self._change(self._at - 1)

    def _change(self, at: int) -> None:
        self._at, self._fits, self._in_time = at, False, 0
