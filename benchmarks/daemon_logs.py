"""Analyses daemons' event logs: where the time goes from a round's last announcement to its last apply.

    python benchmarks/daemon_logs.py DATA_DIR ... [--json FILE]

Of nodes that ran on one machine, whose processes share a monotonic clock; uvloop's has a resolution of 1 ms. The events
are run again (p2ptrain/replay.py) so as to have their effects, too. A phase ends when the last node is through it: it
holds every payload that the round took; it has said what it holds; the proposal, its prevote and its precommit are on
their way to its disk and to the others; it knows the decision; it has applied it. "From core to core" is the time of
one message: the author's disk, where it must be written first, p2pd, gossip, and the other's queue of events.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from p2ptrain.config import RunConfig
from p2ptrain.core import events as ev
from p2ptrain.core.manifest import Manifest
from p2ptrain.core.messages import Announcement, Availability, Ballot, Message, Proposal, Vote, decode
from p2ptrain.core.node import Node
from p2ptrain.replay import Header, Line, LoggedSigner

PHASES = ("held", "availability", "proposal", "prevote", "precommit", "decided", "applied")
WARM_UP_ROUNDS = 3  # after the last node has its seat: estimates of arrivals settle


@contextmanager
def new_directory(keep: bool) -> Iterator[Path]:
    """A directory for nodes, with their logs; `keep`: it is not removed, and named."""
    directory = Path(tempfile.mkdtemp(prefix="p2ptrain-benchmark-"))
    try:
        yield directory
    finally:
        if keep:
            print(f"kept: {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)


# ---------------------------------------------------------------------------------------------------
# What a log tells


class Trusting:
    """A signer that accepts every signature, because those in our own log were verified."""

    def __init__(self, run_id: bytes) -> None:
        self.run_id = run_id

    def __call__(self, key: bytes, signed: bytes, signature: bytes) -> bool:
        return True


@dataclass
class Life:
    """The times of events in one daemon's life."""

    key: bytes
    started: float = 0.0
    has_state: float = 0.0
    is_admitted: float = 0.0
    asked_to_train: dict[int, float] = field(default_factory=dict)
    trained: dict[int, float] = field(default_factory=dict)
    held: dict[bytes, float] = field(default_factory=dict)  # by payload
    said: dict[bytes, tuple[str, float]] = field(default_factory=dict)  # by digest: the kind of message
    heard: dict[bytes, float] = field(default_factory=dict)
    steps: dict[tuple[str, int], float] = field(default_factory=dict)  # by kind and round, when it was last said
    manifests: dict[int, Manifest] = field(default_factory=dict)
    decided: dict[int, float] = field(default_factory=dict)
    applied: dict[int, float] = field(default_factory=dict)
    views: int = 0  # beyond the first


def kind_of(message: Message) -> str:
    return message.ballot.name.lower() if isinstance(message, Vote) else type(message).__name__.lower()


def life_in(directory: Path) -> Life:
    """Reads the life of the node with this data directory."""
    first, *rest = sorted(directory.glob("runs/*/events/*.jsonl"))
    with first.open("rb") as file:
        header = msgspec.json.decode(file.readline(), type=Header)
        signer, life = LoggedSigner(header.run_id), Life(header.me)
        run = RunConfig.from_canonical(header.run.encode())
        node = Node(run, header.run_id, header.me, signer, Random(header.rng))  # noqa: S311  # as it was drawn then
        decoder, trusting = msgspec.json.Decoder(Line), Trusting(header.run_id)
        later = (line for path in rest for line in path.read_bytes().splitlines() if not line.startswith(b"{"))
        for text in chain(file, later):
            try:
                now, event, _, signatures = decoder.decode(text)
            except msgspec.DecodeError:  # it was killed as it wrote
                break
            signer.waiting = list(signatures)
            effects = node.handle(event, now)
            _note_event(life, event, now)
            for effect in effects:
                _note_effect(life, effect, now, trusting)
            view = node.view()
            has_state = view.applied_round in view.roots and view.applied_round == view.state.round
            life.has_state = life.has_state or (now if has_state else 0.0)
            life.is_admitted = life.is_admitted or (now if view.is_admitted else 0.0)
    return life


def _note_event(life: Life, event: ev.Event, now: float) -> None:
    match event:
        case ev.Started():
            life.started = now
        case ev.TrainingFinished():
            life.trained[event.round] = life.held[event.payload] = now
        case ev.PayloadArrived() if event.good:
            life.held.setdefault(event.payload, now)
        case ev.MessageReceived():
            life.heard.setdefault(event.received.digest, now)
            message = event.received.message
            if isinstance(message, Announcement) and event.payload_good:
                life.held.setdefault(message.payload, now)
        case ev.Applied():
            life.applied[event.round] = now
        case _:
            pass


def _note_effect(life: Life, effect: ev.Effect, now: float, trusting: Trusting) -> None:
    match effect:
        case ev.Publish():
            received = decode(effect.envelope, trusting)
            message = received.message
            life.said.setdefault(received.digest, (kind_of(message), now))
            if isinstance(message, Availability | Proposal | Vote):
                life.steps.setdefault((kind_of(message), message.round), now)
                life.views += isinstance(message, Vote) and message.view > 0 and message.ballot is Ballot.PREVOTE
        case ev.Train():
            life.asked_to_train[effect.round] = now
        case ev.Apply():
            life.manifests[effect.manifest.round], life.decided[effect.manifest.round] = effect.manifest, now
        case _:
            pass


# ---------------------------------------------------------------------------------------------------
# From the last announcement to the last apply


def phases_of(lives: list[Life], number: int) -> dict[str, float] | None:
    """Returns when the last node finished each phase of a round, in seconds since its last contribution."""
    manifest = next((life.manifests[number] for life in lives if number in life.manifests), None)
    by_key = {life.key: life for life in lives}
    if manifest is None or not manifest.taken or not all(number in life.applied for life in lives):
        return None
    if not all(taken.author in by_key and taken.round in by_key[taken.author].trained for taken in manifest.taken):
        return None
    began = max(by_key[taken.author].trained[taken.round] for taken in manifest.taken)
    ends: dict[str, list[float]] = defaultdict(list)
    for life in lives:
        ends["held"].append(max(life.held.get(taken.payload, began) for taken in manifest.taken))
        for kind in ("availability", "proposal", "prevote", "precommit"):
            if (kind, number) in life.steps:
                ends[kind].append(life.steps[kind, number])
        ends["decided"].append(life.decided[number])
        ends["applied"].append(life.applied[number])
    return {phase: max(ends[phase]) - began for phase in PHASES if ends[phase]} | {"taken": len(manifest.taken)}


def on_the_way(lives: list[Life], since: float) -> dict[str, list[float]]:
    """Returns, by kind of message, the seconds from the author's core to another's, including the author's disk."""
    found: dict[str, list[float]] = defaultdict(list)
    for author in lives:
        for digest, (kind, at) in author.said.items():
            if at >= since and (took := [life.heard[digest] - at for life in lives if digest in life.heard]):
                found[kind] += took
    return found


def spread(values: Iterable[float]) -> tuple[float, float]:
    """Returns the median and p90."""
    ordered = sorted(values)
    return statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]


def report_phases(lives: list[Life], first: int, last: int) -> dict[str, Any]:
    found = {number: phases for number in range(first, last + 1) if (phases := phases_of(lives, number))}
    assert found, "no round was applied by all"
    rows = list(found.values())
    whole = [row for row in rows if row["taken"] == len(lives)]
    print(f"{len(rows)} rounds, of which {len(whole)} took all {len(lives)} contributions; "
          f"views beyond the first: {sum(life.views for life in lives)}")  # fmt: skip
    result: dict[str, Any] = {"rounds": len(rows), "whole": len(whole), "phases": {}, "messages": {}}
    print("                   median    p90 ms   since the last announcement, until the last node ...  (step alone)")
    before = [0.0] * len(rows)
    for phase in PHASES:
        ends = [row.get(phase, 0.0) for row in rows]
        middle, late = spread(ends)
        step = statistics.median(max(0.0, end - start) for start, end in zip(before, ends, strict=True))
        before = [max(start, end) for start, end in zip(before, ends, strict=True)]
        result["phases"][phase] = {"median": middle, "p90": late, "step": step}
        print(f"  {phase:<14} {middle * 1e3:8.0f} {late * 1e3:8.0f}   {step * 1e3:8.0f}")
    since = min(life.asked_to_train.get(first, 0.0) for life in lives)
    for kind, seconds in sorted(on_the_way(lives, since).items()):
        middle, late = spread(seconds)
        result["messages"][kind] = {"median": middle, "p90": late, "count": len(seconds)}
        print(f"  {kind:<14} {middle * 1e3:8.0f} {late * 1e3:8.0f}   from core to core ({len(seconds)})")
    applying = [life.applied[number] - life.decided[number] for life in lives for number in found]
    training = [
        life.trained[number] - life.asked_to_train[number]
        for life in lives for number in found if number in life.trained and number in life.asked_to_train
    ]  # fmt: skip
    ends = sorted(max(life.applied[number] for life in lives) for number in found)
    result |= {
        "apply": spread(applying),
        "training": spread(training),
        "round": spread(later - earlier for earlier, later in pairwise(ends)),
        "load": os.getloadavg(),
    }
    for name in ("apply", "training", "round"):
        print(f"  {name:<14} {result[name][0] * 1e3:8.0f} {result[name][1] * 1e3:8.0f}")
    print("  load average   " + " ".join(f"{load:.1f}" for load in result["load"]))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", type=Path, nargs="+", metavar="DATA_DIR")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    lives = [life_in(directory) for directory in arguments.directories]
    numbers = set.intersection(*({number for kind, number in life.steps if kind == "prevote"} for life in lives))
    found = report_phases(lives, min(numbers) + WARM_UP_ROUNDS, max(numbers))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
