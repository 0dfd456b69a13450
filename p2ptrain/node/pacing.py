"""How fast a training goes: how much of the time the device works, and for how many steps its round leaves time."""

from __future__ import annotations

from time import perf_counter, sleep

from p2ptrain.config import RecipeConfig
from p2ptrain.core.pace import takes_another
from p2ptrain.node.limits import rest_seconds

NAP_SECONDS = 0.2  # during rests, between checks whether the node is ending


class Pacing:
    """The rests and the number of steps of one worker's trainings."""

    def __init__(self, recipe: RecipeConfig) -> None:
        self.percent = 100  # share of the training time in which the device works; it rests between steps
        self.is_stopping = False
        self._recipe = recipe
        self._stepped_at = 0.0  # when the last step ended
        self._owed = self._rested = 0.0  # seconds of rest still due, and taken in this training
        self._began = 0.0  # when this training did
        self._pace = (-1, 0.0, 0.0)  # a round, and when the others usually contribute to it, and no longer wait

    def set_percent(self, percent: int) -> None:
        self.percent = percent

    def stop(self) -> None:
        """Ends a rest, and lets none begin."""
        self.is_stopping = True

    def keep(self, number: int, usual: float, last: float) -> None:
        """Lets the training of this round take as many steps as fit; `usual` and `last` are seconds from now."""
        now = perf_counter()
        self._pace = number, now + usual, now + last

    def begin(self) -> None:
        """Begins a training, after the rest that is due; idle time since the last one counts."""
        self._rest(self._owed - (perf_counter() - self._stepped_at))
        self._owed = self._rested = 0.0
        self._began = self._stepped_at = perf_counter()

    def step(self) -> None:
        """Notes a step's end."""
        now = perf_counter()
        self._owed, self._stepped_at = rest_seconds(now - self._stepped_at, self.percent), now

    def takes_another(self, number: int, step: int) -> bool:
        """Whether a training that has taken so many steps takes another: as many as fit the pace of its round."""
        paced, usual, last = self._pace
        if paced != number:
            return True
        now = self._stepped_at
        step_seconds = (now - self._began - self._rested) / step * 100 / self.percent  # with the rest that follows it
        least, most = self._recipe.local_steps_min, self._recipe.local_steps
        return takes_another(step, least, most, step_seconds, usual - now, last - now)

    def rest(self) -> None:
        """Rests after a step, before another."""
        if self.percent < 100:
            self._rested += self._rest(self._owed)
            self._owed, self._stepped_at = 0.0, perf_counter()

    @property
    def worked(self) -> float:
        """Seconds of this training, without its rests."""
        return perf_counter() - self._began - self._rested

    def _rest(self, seconds: float) -> float:
        """Leaves the device idle, unless the node is ending. Returns the seconds it took."""
        before = perf_counter()
        while (left := seconds - (perf_counter() - before)) > 0 and not self.is_stopping and self.percent < 100:
            sleep(min(left, NAP_SECONDS))
        return perf_counter() - before
