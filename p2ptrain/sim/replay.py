"""Replay: run a node's events again, and see whether the core does what it did then.

An event log is JSON lines. A header begins each life of the process: the run, whose node it is, the seed of its
generator and the kind of its signatures. Every other line is [now, event, digest of the effects], and
without a digest if the node did not survive the event. What broke in the
field is repeated at a desk that way, one event at a time, as often as needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import BinaryIO

import msgspec
from msgspec import Struct

from p2ptrain.config import RunConfig
from p2ptrain.core.context import Signer
from p2ptrain.core.events import Event
from p2ptrain.core.node import Node
from p2ptrain.digest import digest
from p2ptrain.errors import ConfigError, DataError, RemoteProtocolError
from p2ptrain.sim.cluster import FAILURES, Cluster
from p2ptrain.sim.keys import FakeSigner
from p2ptrain.sim.machine import SimNode

FORMAT = 1
LINE_BYTES_MAX = 2**28  # the longest history, in JSON, twice
SIMULATED = "simulated"


class Header(Struct, frozen=True, forbid_unknown_fields=True):
    """The beginning of one life of a process."""

    format: int
    run: str  # its canonical text
    run_id: bytes
    me: bytes
    rng: str  # what the node's generator was seeded with
    signer: str


Line = tuple[float, Event, str]
_ENCODER = msgspec.json.Encoder()
_EFFECTS = msgspec.msgpack.Encoder()
_HEADER = msgspec.json.Decoder(Header)
_LINE = msgspec.json.Decoder(Line)


class Replayed(Struct, frozen=True):
    """What came of a replay."""

    events: int
    lives: int
    difference: str  # where the effects first differ; empty: nowhere


def effects_digest(effects: Sequence[object]) -> str:
    return digest("effects", _EFFECTS.encode(effects)).hex()


# ---------------------------------------------------------------------------------------------------
# Writing


class EventLog:
    """Writes down what happens to one node."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file

    def begin(self, header: Header) -> None:
        self.file.write(_ENCODER.encode(header) + b"\n")

    def note(self, now: float, event: Event, effects: Sequence[object] | None) -> None:
        """`effects` is None if the node did not survive the event."""
        name = "" if effects is None else effects_digest(effects)
        self.file.write(_ENCODER.encode((now, event, name)) + b"\n")


def watch(cluster: Cluster, index: int, log: EventLog) -> None:
    """Write down what happens to a node of a simulation."""
    life = 0

    def note(node: SimNode, event: Event, effects: Sequence[object] | None, local: float) -> None:
        nonlocal life
        if node.index != index:
            return
        if node.life != life:
            life = node.life
            run = cluster.run_config.canonical().decode()
            log.begin(Header(FORMAT, run, cluster.run_id, node.key, cluster.rng_name(index, life), SIMULATED))
        log.note(local, event, effects)

    cluster.observers.append(note)


# ---------------------------------------------------------------------------------------------------
# Reading


def replay(path: Path) -> Replayed:
    """Run the events of a log again."""
    node: Node | None = None
    events = lives = 0
    try:
        with path.open("rb") as file:
            number = 0
            while text := file.readline(LINE_BYTES_MAX):
                number += 1
                if text.startswith(b"{"):
                    node, lives = _node_of(_parsed(_HEADER, text, path, number)), lives + 1
                    continue
                if node is None:
                    raise DataError(f"{path}: line {number}: events before any header")
                now, event, expected = _parsed(_LINE, text, path, number)
                events += 1
                where = f"line {number}, {type(event).__name__} at {now:.6f} s"
                try:
                    effects = node.handle(event, now)
                except FAILURES as error:
                    return Replayed(events, lives, f"{where}: {type(error).__name__}: {error}")
                if effects_digest(effects) != expected:
                    kinds = ", ".join(type(effect).__name__ for effect in effects) or "none"
                    return Replayed(events, lives, f"{where}: the effects differ, now they are: {kinds}")
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", source=str(path), fix="Check the name") from error
    if not events:
        raise DataError(f"{path}: no events in it")
    return Replayed(events, lives, "")


def _parsed(decoder: msgspec.json.Decoder[Header] | msgspec.json.Decoder[Line], text: bytes, path: Path, number: int):  # type: ignore[no-untyped-def]
    try:
        return decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: line {number} is damaged, or of another version: {error}") from error


def _node_of(header: Header) -> Node:
    if header.format != FORMAT:
        raise DataError(f"an event log of format {header.format}: this release reads format {FORMAT}")
    try:
        run = RunConfig.from_canonical(header.run.encode())
    except RemoteProtocolError as error:
        raise DataError(f"an event log of another version: {error.why}") from error
    return Node(run, header.run_id, header.me, _signer_of(header), Random(header.rng))


def _signer_of(header: Header) -> Signer:
    """What signs and verifies as the node's own keys did. A daemon's keys are not in its log: it must be told how."""
    if header.signer != SIMULATED:
        raise DataError(f"an event log with signatures of kind {header.signer!r}: this release knows {SIMULATED!r}")
    return FakeSigner(header.run_id, header.me)
