"""Pace: how many of a round's local steps a machine takes, so that a slow one contributes without holding up the rest.

A machine that will have taken all steps about when the others have takes all; so equal machines never cut one another
short, whatever the noise. A slower one takes as many as fit before the others usually contribute, but at least
`local_steps_min`. Whether the next step fits has to be known before it begins: on a machine ten times slower, one step
takes as long as a round.

The core measures the pace (arrivals.py) and tells it to the device once it is known (`Pace`), and again when the round
is over; the device asks `takes_another` after each step. DiLoCo and its kin give slow workers fewer steps in the same
way (Douillard et al. 2023, arXiv 2311.08105; Liu et al. 2024, arXiv 2401.09135), from a coordinator."""

from __future__ import annotations

from p2ptrain.core.arrivals import GRACE
from p2ptrain.core.events import Pace


def pace_of(number: int, began: float, seconds: float, now: float) -> Pace:
    """Returns the pace of a round that began then, if the others usually contribute after this many seconds."""
    usual = began + seconds - now
    return Pace(number, max(0.0, usual), max(0.0, usual + GRACE * seconds))


def takes_another(done: int, least: int, most: int, step_seconds: float, usual: float, last: float) -> bool:
    """Whether a machine that has done some of a round's steps takes another.

    usual: seconds until the others usually contribute; last: until they no longer wait"""
    if not least <= done < most:
        return done < most
    return step_seconds <= usual or (most - done) * step_seconds <= last


def sequences_that_fit(before: int, most: int, seconds: float, usual: float, last: float) -> int:
    """Returns how many of a step's sequences a machine takes next, if with so many before its step took these seconds.

    usual: seconds until the others usually contribute; last: until they no longer wait; both from when it began"""
    if usual <= 0.0:  # it began too late, whatever its pace
        return before
    fit = min(max(1, int(before * usual / seconds)), most)
    return fit if fit > before or seconds > last else before
