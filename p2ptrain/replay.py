"""Replay: run a node's events again, and see whether the core does what it did then.

An event log is JSON lines. A header begins each life of the process: the run, whose node it is, the seed of its
generator and the kind of its signatures. Every other line is [now, event, digest of the effects, signatures made], and
without a digest if the node did not survive the event. What broke in the field is repeated at a desk that way, one
event at a time, as often as needed. A key is not in the log: signatures of the node's own are, in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from p2ptrain.errors import ConfigError, DataError, P2ptrainError, RemoteProtocolError
from p2ptrain.identity import verify

FORMAT = 1
LINE_BYTES_MAX = 2**28  # the longest history, in JSON, twice
REAL = "ed25519"
FAILURES = (  # what the core raises when it has made a mistake
    AssertionError, P2ptrainError, LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError,
)  # fmt: skip


class Header(Struct, frozen=True, forbid_unknown_fields=True):
    """The beginning of one life of a process."""

    format: int
    run: str  # its canonical text
    run_id: bytes
    me: bytes
    rng: str  # what the node's generator was seeded with
    signer: str


Line = tuple[float, Event, str, tuple[bytes, ...]]
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

    def note(
        self, now: float, event: Event, effects: Sequence[object] | None, signatures: Sequence[bytes] = ()
    ) -> None:
        """`effects` is None if the node did not survive the event."""
        name = "" if effects is None else effects_digest(effects)
        self.file.write(_ENCODER.encode((now, event, name, signatures)) + b"\n")


class NotingSigner:
    """Signs and verifies as another does, and remembers what it signed."""

    def __init__(self, signer: Signer) -> None:
        self.signer, self.run_id = signer, signer.run_id
        self.made: list[bytes] = []

    def sign(self, signed: bytes) -> bytes:
        self.made.append(self.signer.sign(signed))
        return self.made[-1]

    def __call__(self, key: bytes, signed: bytes, signature: bytes) -> bool:
        return self.signer(key, signed, signature)


class LoggedSigner:
    """Gives the signatures that a log has; what is signed elsewhere than then has none."""

    def __init__(self, run_id: bytes) -> None:
        self.run_id = run_id
        self.waiting: list[bytes] = []

    def sign(self, signed: bytes) -> bytes:
        return self.waiting.pop(0) if self.waiting else bytes(64)

    def __call__(self, key: bytes, signed: bytes, signature: bytes) -> bool:
        return verify(key, signed, signature)


# ---------------------------------------------------------------------------------------------------
# Reading


def replay(path: Path, signers: Mapping[str, Callable[[Header], Signer]] | None = None) -> Replayed:
    """Run the events of a log again; `signers` make those of other kinds than a daemon's."""
    node: Node | None = None
    signer: Signer | None = None
    events = lives = 0
    try:
        with path.open("rb") as file:
            number = 0
            while text := file.readline(LINE_BYTES_MAX):
                number += 1
                if not text.endswith(b"\n") and len(text) < LINE_BYTES_MAX:
                    break  # the process was killed as it wrote
                if text.startswith(b"{"):
                    node, signer = _node_of(_parsed(_HEADER, text, path, number), signers or {})
                    lives += 1
                    continue
                if node is None:
                    raise DataError(f"{path}: line {number}: events before any header")
                now, event, expected, signatures = _parsed(_LINE, text, path, number)
                if isinstance(signer, LoggedSigner):
                    signer.waiting = list(signatures)
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


def _node_of(header: Header, signers: Mapping[str, Callable[[Header], Signer]]) -> tuple[Node, Signer]:
    if header.format != FORMAT:
        raise DataError(f"an event log of format {header.format}: this release reads format {FORMAT}")
    try:
        run = RunConfig.from_canonical(header.run.encode())
    except RemoteProtocolError as error:
        raise DataError(f"an event log of another version: {error.why}") from error
    known: dict[str, Callable[[Header], Signer]] = {REAL: lambda header: LoggedSigner(header.run_id), **signers}
    if header.signer not in known:
        raise DataError(
            f"an event log with signatures of kind {header.signer!r}: this release knows {', '.join(known)}"
        )
    signer = known[header.signer](header)
    return Node(run, header.run_id, header.me, signer, Random(header.rng)), signer
