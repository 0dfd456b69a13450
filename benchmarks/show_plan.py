"""The run to show, as it is planned: its config, its liar, and what happens to which node in which round.

A pure function of a seed (`plan`), so that a run that is broken off goes on as it was meant, and another can repeat it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

RUN = """\
name = "show"
[model]
preset = "10m"
sequence_length = 128
[recipe]
name = "local"
inner = "muon"
local_steps = 4
sequences_per_pass = 8
inner_learning_rate = 0.01
k = [16, 32, 64]
schedule = "linear"
warmup_rounds = 8
rounds = 2000
final_ratio = 0.1
[agreement]
overlap_rounds = 0
staleness_rounds_max = 2
view_seconds = 20
view_seconds_max = 120
avail_seconds = 5
stall_seconds = 1200
settle_seconds = 60
history_rounds = 4096
[admission]
probation_rounds = 1
absence_rounds_max = 20
[eval]
every_rounds = 4
"""
LIE = '''\
"""Python runs this before anything else in the process of a liar."""

import os
from dataclasses import replace

import numpy as np

from p2ptrain.train.learner import Learner

honest = Learner.contribute


def contribute(self, round_number, k=0):
    found = self.outer.unpack(honest(self, round_number, k))
    signs = -np.sign(found.values)
    if os.environ["SHOW_LIE"] == "noise":
        signs = np.random.default_rng(round_number).choice(np.array([-1, 1], signs.dtype), signs.shape)
    made = replace(found, values=(np.abs(found.values) * signs).astype(found.values.dtype))
    return self.outer.pack(made, self.outer.fragment_of(round_number))


Learner.contribute = contribute
'''
KEEPER = "node-1"  # never leaves, and keeps the history of all rounds
FOUNDERS = (KEEPER, "node-2", "node-3", "node-4", "liar-1", "node-5")  # the first five count at once, and so does a lie
LIES = ("negative", "noise")
K_MAX = (64, 64, 32, 16)  # in turn: lines differ
PLANNED_ROUNDS = 20_000
NOTICE = 6  # rounds from a motion until it holds
SETTLED = 8  # rounds after a node was started in which it is not killed
SHORT, LONG = (5, 15, 30, 60, 120), (600, 1_800)  # seconds that a killed node stays away
FIRST = 50  # rounds in which each kind of event happens
SPIKE_ROUNDS = 8  # that a rate which is too high is left alone
TOO_HIGH = 0.2


class Planned(NamedTuple):
    """An event, and when it is due: so many rounds after all founders were there."""

    round: int
    what: str  # kill, join, liar, leave, move or back
    node: str
    seconds: int = 0  # how long a killed node stays away
    settings: tuple[tuple[str, float], ...] = ()  # that a motion changes
    lie: str = ""


def plan(seed: int, rounds: int = PLANNED_ROUNDS) -> list[Planned]:
    """Returns what happens in which round: in the first rounds each kind of event, afterwards one after the other."""
    rng = random.Random(f"run to show {seed}")  # noqa: S311  # chance that can be repeated
    others = [_membership, _futures]
    found = [each for make in others for each in make(rng, rounds)]
    found += _kills(rng, rounds, sorted(found))
    return sorted(found)


def _membership(rng: random.Random, rounds: int) -> Iterator[Planned]:
    honest, named, liars, at = [each for each in FOUNDERS if "node" in each], 5, 1, rng.randint(8, 11)
    next_liar = rng.randint(180, 240)
    wants_join = True
    while at < rounds:
        if at >= next_liar:
            yield Planned(at, "leave", f"liar-{liars}")
            liars, next_liar = liars + 1, at + rng.randint(200, 300)
            yield Planned(at + 6, "liar", f"liar-{liars}", lie=LIES[(liars - 1) % len(LIES)])
        elif wants_join:
            named += 1
            honest.append(f"node-{named}")
            yield Planned(at, "join", honest[-1])
        else:
            gone = rng.choice([each for each in honest if each != KEEPER])
            honest.remove(gone)
            yield Planned(at, "leave", gone)
        wants_join = len(honest) < 5 or (len(honest) == 5 and rng.random() < 0.5)
        at += rng.randint(12, 16) if at < FIRST else rng.randint(25, 50)


def _futures(rng: random.Random, rounds: int) -> Iterator[Planned]:
    rate, end, at = 0.01, 2_000, rng.randint(13, 15)
    while at < rounds:
        yield Planned(at, "move", KEEPER, settings=(("recipe.inner_learning_rate", TOO_HIGH),))
        rate = round(0.9 * rate, 5)
        yield Planned(at + NOTICE + SPIKE_ROUNDS, "back", KEEPER, settings=(("recipe.inner_learning_rate", rate),))
        at += rng.randint(28, 32)
        rate, end = round(0.9 * rate, 5), end + 2_000
        yield Planned(
            at, "move", "node-2", settings=(("recipe.inner_learning_rate", rate), ("recipe.rounds", float(end)))
        )
        at += rng.randint(900, 1_100)


def _kills(rng: random.Random, rounds: int, others: Sequence[Planned]) -> Iterator[Planned]:
    """Yields kills of nodes that are there by the other events."""
    there, waiting, at = list(FOUNDERS), list(others), 5
    while at < rounds:
        while waiting and waiting[0].round <= at:
            each = waiting.pop(0)
            if each.what == "leave":
                there.remove(each.node)
            elif each.what in ("join", "liar"):
                there.append(each.node)
        lately = {each.node for each in others if each.round > at - SETTLED and each.what in ("join", "liar")}
        victims = [each for each in there if each not in lately]
        yield Planned(at, "kill", rng.choice(victims), seconds=rng.choice(SHORT if at < FIRST else SHORT + LONG))
        at += rng.randint(4, 8) if at < FIRST else rng.randint(8, 20)


def planned_of(row: Sequence[Any]) -> Planned:
    """Returns an event as it was, from JSON."""
    *first, settings, lie = row
    return Planned(*first, tuple((name, value) for name, value in settings), lie)


def digest_of(planned: Sequence[Planned]) -> str:
    return blake2b(json.dumps(planned).encode(), digest_size=16).hexdigest()
