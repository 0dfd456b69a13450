"""Replays a node's event log and checks that the core does the same again.

An event log consists of JSON lines. Each start of the process writes a header: the run, the node, the seed of its
random generator and its kind of signatures. Every other line is [now, event, digest of the effects, signatures made];
the digest is missing if the node crashed on the event. So a failure in the field can be repeated at a desk, event by
event, as often as needed. The log holds no key, but the node's own signatures in order.

A daemon's log goes on in other files when one is full, and the oldest are removed. A replay begins at the process's
start if its first file is still there, whichever of its files is named, and goes on to the last. If it is gone, the
rest is read and counted, but cannot be repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
FAILURES = (  # raised by bugs in the core
    AssertionError, P2ptrainError, LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError,
)  # fmt: skip


class Header(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The first line of each file that a process writes its events to."""

    format: int
    run: str  # the run's config in canonical form
    run_id: bytes
    me: bytes
    rng: str  # the seed of the node's random generator
    signer: str
    part: int = 0  # of the process's files; 0 holds its start
    round: int = 0  # at which this part begins


Line = tuple[float, Event, str, tuple[bytes, ...]]
_ENCODER = msgspec.json.Encoder()
_EFFECTS = msgspec.msgpack.Encoder()
_HEADER = msgspec.json.Decoder(Header)
_LINE = msgspec.json.Decoder(Line)


class Replayed(Struct, frozen=True):
    """The result of a replay."""

    events: int
    lives: int
    difference: str  # the first difference in effects; empty if there is none
    unrepeated: int = 0  # events of a process whose start is not in the log any more
    begins_at: int = 0  # the round at which those begin


def effects_digest(effects: Sequence[object]) -> str:
    return digest("effects", _EFFECTS.encode(effects)).hex()


# -- Writing ----------------------------------------------------------------------------------------


class EventLog:
    """Writes a node's events to a file."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file

    def begin(self, header: Header) -> None:
        self.file.write(_ENCODER.encode(header) + b"\n")

    def note(
        self, now: float, event: Event, effects: Sequence[object] | None, signatures: Sequence[bytes] = ()
    ) -> None:
        """Writes an event. `effects` is None if the node crashed on it."""
        name = "" if effects is None else effects_digest(effects)
        self.file.write(_ENCODER.encode((now, event, name, signatures)) + b"\n")


class NotingSigner:
    """A wrapper that records the signatures made by another signer."""

    def __init__(self, signer: Signer) -> None:
        self.signer, self.run_id = signer, signer.run_id
        self.made: list[bytes] = []

    def sign(self, signed: bytes) -> bytes:
        self.made.append(self.signer.sign(signed))
        return self.made[-1]

    def take(self) -> list[bytes]:
        """Returns the signatures made since the last call."""
        made, self.made = self.made, []
        return made

    def __call__(self, key: bytes, signed: bytes, signature: bytes) -> bool:
        return self.signer(key, signed, signature)


class LoggedSigner:
    """A signer that replays the signatures in a log; one that the log does not have is all zeros."""

    def __init__(self, run_id: bytes) -> None:
        self.run_id = run_id
        self.waiting: list[bytes] = []

    def expect(self, signatures: Sequence[bytes]) -> None:
        self.waiting = list(signatures)

    def sign(self, signed: bytes) -> bytes:
        return self.waiting.pop(0) if self.waiting else bytes(64)

    def __call__(self, key: bytes, signed: bytes, signature: bytes) -> bool:
        return verify(key, signed, signature)


# -- Reading ----------------------------------------------------------------------------------------


def replay(path: Path, signers: Mapping[str, Callable[[Header], Signer]] | None = None) -> Replayed:
    """Replays the events of a log; `signers` makes signers of other kinds than a daemon's."""
    node: Node | None = None
    signer: Signer | None = None
    header: Header | None = None
    events = lives = unrepeated = begins_at = 0
    try:
        for file, number, text in _lines(_files_of(path)):
            if text.startswith(b"{"):
                before, header = header, _parsed(_HEADER, text, file, number)
                if header.part == 0:
                    node, signer = _node_of(header, signers or {})
                    lives += 1
                elif before is None:
                    begins_at = header.round
                continue
            if header is None:
                raise DataError(f"{file}: line {number}: an event before any header")
            now, event, expected, signatures = _parsed(_LINE, text, file, number)
            if node is None:
                unrepeated += 1
                continue
            if isinstance(signer, LoggedSigner):
                signer.expect(signatures)
            events += 1
            where = f"line {number}, {type(event).__name__} at {now:.6f} s"
            where = where if file == path else f"{file.name}, {where}"
            try:
                effects = node.handle(event, now)
            except FAILURES as error:
                return Replayed(events, lives, f"{where}: {type(error).__name__}: {error}")
            if effects_digest(effects) != expected:
                kinds = ", ".join(type(effect).__name__ for effect in effects) or "none"
                return Replayed(events, lives, f"{where}: the effects differ and are now: {kinds}")
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", source=str(path), fix="Check the name") from error
    if not events and not unrepeated:
        raise DataError(f"{path}: contains no events")
    return Replayed(events, lives, "", unrepeated, begins_at)


def _lines(files: Sequence[Path]) -> Iterator[tuple[Path, int, bytes]]:
    """Yields each whole line, with its file and number."""
    for path in files:
        with path.open("rb") as file:
            number = 0
            while text := file.readline(LINE_BYTES_MAX):
                number += 1
                if not text.endswith(b"\n") and len(text) < LINE_BYTES_MAX:
                    break  # the process was killed while writing it
                yield path, number, text


def _files_of(path: Path) -> list[Path]:
    """Returns the files of the process that wrote this one, as far as they are there, in order."""
    first = _header_of(path)
    if first is None or not path.stem.isdigit():
        return [path]
    found, place = [path], int(path.stem)
    for step in (-1, 1):
        near, part = place + step, first.part + step
        while part >= 0 and _is_part(other := path.with_name(f"{near:08d}.jsonl"), part, first):
            found.append(other)
            near, part = near + step, part + step
    return sorted(found)


def _is_part(path: Path, part: int, of: Header) -> bool:
    header = _header_of(path) if path.exists() else None
    return header is not None and (header.rng, header.part) == (of.rng, part)


def _header_of(path: Path) -> Header | None:
    with path.open("rb") as file:
        text = file.readline(LINE_BYTES_MAX)
    return _parsed(_HEADER, text, path, 1) if text.startswith(b"{") and text.endswith(b"\n") else None


def _parsed(decoder: msgspec.json.Decoder[Header] | msgspec.json.Decoder[Line], text: bytes, path: Path, number: int):  # type: ignore[no-untyped-def]
    try:
        return decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path}: line {number} is damaged or from another version: {error}") from error


def _node_of(header: Header, signers: Mapping[str, Callable[[Header], Signer]]) -> tuple[Node, Signer]:
    if header.format != FORMAT:
        raise DataError(f"the event log has format {header.format}, and this release reads format {FORMAT}")
    try:
        run = RunConfig.from_canonical(header.run.encode())
    except RemoteProtocolError as error:
        raise DataError(f"the event log is from another version: {error.why}") from error
    known: dict[str, Callable[[Header], Signer]] = {REAL: lambda header: LoggedSigner(header.run_id), **signers}
    if header.signer not in known:
        raise DataError(
            f"the event log has signatures of kind {header.signer!r}, and this release knows {', '.join(known)}"
        )
    signer = known[header.signer](header)
    return Node(run, header.run_id, header.me, signer, Random(header.rng)), signer
