"""A daemon of benchmarks/churn.py, imported before anything else in its process: its steps are paced, and it may lie.

A step is a real one of a tiny model with a sleep behind it: sixteen daemons share two cores, and the protocol is to be
measured, not the cores. The daemon lies while the file that $CHURN_LIE names has one of these words in it:

    no work          its contributions have random signs in place of trained ones (sim/round_lies.py: `no work`)
    false roots      its availabilities carry a state root that nobody has (sim/round_lies.py: `false roots`)
    silent propose   when it is its turn to propose, it says nothing (sim/round_lies.py: `silent propose`)
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace as replaced
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from p2ptrain.core.context import Context
from p2ptrain.core.messages import Authored, Availability, Proposal, Received
from p2ptrain.digest import digest
from p2ptrain.share import Share
from p2ptrain.train.learner import Learner
from p2ptrain.train.live import StepResult

NO_WORK, FALSE_ROOTS, SILENT_PROPOSE = LIES = ("no work", "false roots", "silent propose")
STEP_SECONDS = 1.0

_train, _contribute = Learner.train, Learner.contribute
_signed, _publish, _send = Context.signed, Context.publish, Context.send
_draw = np.random.default_rng()


def lie() -> str:
    """Returns the lie that this daemon tells just now; empty: none."""
    path = os.environ.get("CHURN_LIE")
    return Path(path).read_text() if path and Path(path).exists() else ""


def train(
    self: Learner,
    share: Share,
    on_step: Callable[[StepResult], bool | None] = lambda result: None,
    *more: Any,
    **options: Any,
) -> list[StepResult]:
    def paced(result: StepResult) -> bool | None:
        time.sleep(STEP_SECONDS)
        return on_step(result)

    return _train(self, share, paced, *more, **options)


def contribute(self: Learner, round_number: int, k: int = 0) -> bytes:
    payload = _contribute(self, round_number, k)
    if lie() != NO_WORK:
        return payload
    contribution = self.outer.unpack(payload)
    signs = _draw.choice(np.array([-1, 1], contribution.values.dtype), contribution.values.shape)
    made = replaced(contribution, values=np.abs(contribution.values) * signs)
    return self.outer.pack(made, self.outer.fragment_of(round_number))


def signed(self: Context, message: Authored, attachment: bytes = b"") -> Received:
    if isinstance(message, Availability) and lie() == FALSE_ROOTS:
        message = replace(message, root=digest("false root", message.root))
    return _signed(self, message, attachment)


def said(messages: tuple[Received, ...]) -> list[Received]:
    is_silent = any(isinstance(each.message, Proposal) for each in messages) and lie() == SILENT_PROPOSE
    return [each for each in messages if not (is_silent and isinstance(each.message, Proposal))]


def publish(self: Context, *messages: Received) -> None:
    _publish(self, *said(messages))


def send(self: Context, peer: bytes, *messages: Received) -> None:
    if kept := said(messages):
        _send(self, peer, *kept)


def begin() -> None:
    """Takes the places of the real ones."""
    for owner, function in (
        (Learner, train), (Learner, contribute), (Context, signed), (Context, publish), (Context, send),
    ):  # fmt: skip
        setattr(owner, function.__name__, function)
