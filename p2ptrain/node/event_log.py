"""Records the daemon's events for `p2ptrain replay`, so that a problem in the field can be reproduced offline.

Each start writes a new file, and goes on in another one when it is full; of all files the newest are kept. So the disk
that they take is bounded, and nobody can end the log by making the node hear much. If the log cannot be written, it is
closed with a warning and the node goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from p2ptrain.core.events import Effect, Event
from p2ptrain.replay import EventLog, Header, NotingSigner

BYTES_MAX = 2**24  # of a file, and one event more; 1,400 rounds of a small swarm
FILES_KEPT = 12  # 192 MiB

log = logging.getLogger("p2ptrain.node")


class EventFile:
    """The event log of one start of the daemon; `round_now` tells where a file begins."""

    def __init__(
        self, directory: Path, signer: NotingSigner, header: Header, round_now: Callable[[], int] = lambda: 0
    ) -> None:
        self._directory, self._signer, self._header, self._round_now = directory, signer, header, round_now
        self._file: BinaryIO | None = None
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._begin(header)
        except OSError as error:
            self._give_up(error)

    def _begin(self, header: Header) -> None:
        """Begins the next file, and removes the oldest."""
        self.close()
        names = sorted(self._directory.glob("*.jsonl"))
        for old in names[: max(0, len(names) - FILES_KEPT + 1)]:
            old.unlink()
        number = int(names[-1].stem) + 1 if names and names[-1].stem.isdigit() else 1
        self.path = self._directory / f"{number:08d}.jsonl"
        self._file = self.path.open("wb", buffering=0)  # a hung node that gets killed must leave its last events
        EventLog(self._file).begin(header)
        self._header = header

    def note(self, now: float, event: Event, effects: Sequence[Effect] | None) -> None:
        """Records an event after the core has handled it; `effects` is None if the core crashed on it."""
        made = self._signer.take()
        if self._file is None:
            return
        try:
            EventLog(self._file).note(now, event, effects, made)
            if self._file.tell() > BYTES_MAX:
                self._begin(msgspec.structs.replace(self._header, part=self._header.part + 1, round=self._round_now()))
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _give_up(self, error: OSError) -> None:
        log.warning("cannot write the event log: %s", error)
        self.close()
