"""How fast a training goes: how much of the time the device works, and for how many steps its round leaves time.

A machine so slow that not even one step fits a round takes that step on fewer of its sequences. How many fit, it learns
from the training before: from the time that it took, and the time after which the others contributed."""

from __future__ import annotations

import logging
from time import perf_counter, sleep

from p2ptrain.config import RecipeConfig
from p2ptrain.core.pace import sequences_that_fit, takes_another
from p2ptrain.node.limits import rest_seconds

NAP_SECONDS = 0.2  # during rests, between checks whether the node is ending

log = logging.getLogger(__name__)


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
        self._first_pace = self._pace  # what was told first of that round, before it was over
        self.step_sequences = 0  # that the next training's steps take; 0: all

    def set_percent(self, percent: int) -> None:
        self.percent = percent

    def stop(self) -> None:
        """Ends a rest, and lets none begin."""
        self.is_stopping = True

    def keep(self, number: int, usual: float, last: float) -> None:
        """Lets the training of this round take as many steps as fit; `usual` and `last` are seconds from now."""
        now = perf_counter()
        self._pace = number, now + usual, now + last
        if self._first_pace[0] != number:
            self._first_pace = self._pace

    def rest_before(self) -> bool:
        """Takes the rest that is due before a training, if any; idle time since the last one counts."""
        due, self._owed = self._owed - (perf_counter() - self._stepped_at), 0.0
        return due > 0.0 and self._rest(due) > 0.0

    def begin(self) -> None:
        self._owed = self._rested = 0.0
        self._began = self._stepped_at = perf_counter()

    def step(self) -> None:
        now = perf_counter()
        self._owed, self._stepped_at = rest_seconds(now - self._stepped_at, self.percent), now

    def takes_another(self, number: int, step: int) -> bool:
        """Whether a training that has taken so many steps takes another: as many as fit the pace of its round."""
        least, most = self._recipe.local_steps_min, self._recipe.local_steps
        if self.step_sequences:  # as few steps as may be, rather than more of them on fewer
            return step < least
        paced, usual, last = self._pace
        if paced != number:
            return True
        now = self._stepped_at
        step_seconds = (now - self._began - self._rested) / step * 100 / self.percent  # with the rest that follows it
        return takes_another(step, least, most, step_seconds, usual - now, last - now)

    def end(self, number: int, steps: int) -> None:
        """Notes a training's end, and settles on how many sequences the next one's steps take."""
        least, most = self._recipe.local_steps_min, self._recipe.step_sequences
        if (
            steps > least or least == self._recipe.local_steps
        ):  # who claims all steps would make the others' pace faster
            return
        paced, usual, last = self._first_pace
        before = self.step_sequences or most
        fit = min(2 * before, most)  # where there is no pace to keep any more
        if paced == number:
            seconds = self.worked * 100 / self.percent  # with the rest that follows it
            fit = sequences_that_fit(before, most, seconds, usual - self._began, last - self._began)
        self.step_sequences = fit if fit < most else 0
        if (before < most) != (fit < most):
            log.info("the next step takes %d of %d sequences: so many fit a round here", fit, most)

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
