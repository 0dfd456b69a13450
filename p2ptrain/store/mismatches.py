"""How often this machine came to another state than everybody else, over all starts.

A wrong state is mended by taking over the right one. But a machine that comes to one again and again is broken, and
nobody is helped by its going on for ever: after three within a hundred rounds the node ends, and does not start again
before its owner has said so. Else whatever starts it again (systemd, a container's restart policy) would have it go on.

What is noted are the rounds, in a small file of its own: its owner removes it, which no row of a database makes easy.
A file that is damaged or lost counts for nothing, and counting begins anew.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import structlog
from msgspec import Meta, Struct

from p2ptrain.digest import digest
from p2ptrain.errors import DataError, HardwareError
from p2ptrain.files import read, write_atomically
from p2ptrain.store.formats import refuse_newer

MISMATCHES_MAX, MISMATCH_ROUNDS = 3, 100  # so many wrong states within so many rounds, and the node ends

_log = structlog.get_logger("p2ptrain.store")


class _Noted(Struct, frozen=True, forbid_unknown_fields=True):
    rounds: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(max_length=MISMATCHES_MAX)]
    digest: str


class Mismatches:
    """Of one node in one run. One thread writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rounds = self._read()  # the last, each less than MISMATCH_ROUNDS before the newest

    def note(self, number: int) -> None:
        """A state came out wrong; `number` is the round that was applied last. HardwareError: one too many.

        One round counts once: whoever is started again before it was mended may come to the same.
        """
        if number in self.rounds:
            return
        recent = [each for each in self.rounds if number - each < MISMATCH_ROUNDS]
        self.rounds = (*recent, number)[-MISMATCHES_MAX:]
        try:
            write_atomically(self.path, _encoded(self.rounds))
        except DataError as error:  # then a restart does not know of it, and this life does
            _log.error("a wrong state is not noted", why=str(error))
        self.refuse()

    def refuse(self) -> None:
        """HardwareError if there were too many: also at a start."""
        if len(self.rounds) == MISMATCHES_MAX:
            rounds = ", ".join(map(str, self.rounds))
            fix = f"test its memory, and do not overclock it. Then remove {self.path}: until then no start goes on"
            what = f"the state came out wrong here in rounds {rounds}, and right everywhere else"
            raise HardwareError(f"{what}. Suspect this machine's hardware: {fix}")

    def _read(self) -> tuple[int, ...]:
        """Nothing if it cannot be read; DataError if a later release has written it."""
        try:
            content = read(self.path)
        except DataError as error:
            return self._lost(str(error))
        if content is None:
            return ()
        try:
            noted = msgspec.json.decode(content, type=_Noted)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            refuse_newer(self.path, content)
            return self._lost(str(error))
        return noted.rounds if _encoded(noted.rounds) == content else self._lost("damaged")

    def _lost(self, why: str) -> tuple[int, ...]:
        _log.warning("wrong states of before are not known", path=str(self.path), why=why)
        return ()


def _encoded(rounds: tuple[int, ...]) -> bytes:
    return msgspec.json.encode(_Noted(rounds, digest("mismatches", msgspec.json.encode(rounds)).hex())) + b"\n"
