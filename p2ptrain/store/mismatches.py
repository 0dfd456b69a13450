"""Counts across restarts how often this machine computed a different state from everybody else.

A wrong state is corrected by adopting the right one. But a machine that keeps computing wrong states is broken: after
three within a hundred rounds the node ends, and refuses to start until its owner has intervened. Otherwise systemd or
a container's restart policy would keep it going forever.

The rounds are in a small file, because the owner can simply remove that, unlike a row of a database. If the file is
damaged or lost, counting starts again."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from p2ptrain.digest import digest
from p2ptrain.errors import DataError, HardwareError
from p2ptrain.files import read, write_atomically
from p2ptrain.store.formats import refuse_newer

MISMATCHES_MAX, MISMATCH_ROUNDS = 3, 100  # three wrong states within a hundred rounds end the node

_log = logging.getLogger("p2ptrain.store")


class _Contents(Struct, frozen=True, forbid_unknown_fields=True):
    rounds: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(max_length=MISMATCHES_MAX)]
    digest: str


class Mismatches:
    """The recent rounds in which this node computed a wrong state. Only one thread writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rounds = self._read()  # the latest rounds, all within MISMATCH_ROUNDS of the newest

    def note(self, number: int) -> None:
        """Notes a wrong state after round `number`. Raises HardwareError if there were too many.

        A round counts once, because a node that restarts before the correction may compute the same state again."""
        if number in self.rounds:
            return
        recent = [each for each in self.rounds if number - each < MISMATCH_ROUNDS]
        self.rounds = (*recent, number)[-MISMATCHES_MAX:]
        try:
            write_atomically(self.path, _encoded(self.rounds))
        except DataError as error:  # a restart will not know of this round, but this process does
            _log.error("cannot note a wrong state: %s", error)
        self.refuse()

    def refuse(self) -> None:
        """Raises HardwareError if there were too many; called at every start, too."""
        if len(self.rounds) == MISMATCHES_MAX:
            rounds = ", ".join(map(str, self.rounds))
            remove = f"Then remove {self.path}: the node does not start until you do"
            fix = f"test its memory, and do not overclock it. {remove}"
            what = f"this node computed a wrong state in rounds {rounds}, unlike all others"
            raise HardwareError(f"{what}. Suspect this machine's hardware: {fix}")

    def _read(self) -> tuple[int, ...]:
        """Returns the noted rounds, none if the file is unreadable. Raises DataError if a later release wrote it."""
        try:
            content = read(self.path)
        except DataError as error:
            return self._lost(str(error))
        if content is None:
            return ()
        try:
            noted = msgspec.json.decode(content, type=_Contents)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            refuse_newer(self.path, content)
            return self._lost(str(error))
        return noted.rounds if _encoded(noted.rounds) == content else self._lost("damaged")

    def _lost(self, why: str) -> tuple[int, ...]:
        _log.warning("earlier wrong states are unknown: path %s, why %s", self.path, why)
        return ()


def _encoded(rounds: tuple[int, ...]) -> bytes:
    return msgspec.json.encode(_Contents(rounds, digest("mismatches", msgspec.json.encode(rounds)).hex())) + b"\n"
