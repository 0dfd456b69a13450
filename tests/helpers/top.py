"""A scripted daemon for `p2ptrain top`, and its frames as text."""

from __future__ import annotations

import io
from copy import deepcopy
from typing import Any

from rich.console import Console

from p2ptrain.errors import P2ptrainError
from p2ptrain.observe.top_frame import Poll, frame
from tests.helpers.web import PEER, STATUS, a_round

LINE = {"at": "2026-03-29T12:34:56.789+00:00", "level": "warning", "message": "a line\nand more"}
ANSWERS: dict[str, dict[str, Any]] = {
    "status": STATUS,
    "peers": {"peers": [PEER]},
    "rounds": {"rounds": [a_round(number) | {"loss": 5.0 - number / 2} for number in range(1, 8)]},
    "log": {"lines": [LINE]},
}


class Answering:
    """A scripted daemon."""

    def __init__(self) -> None:
        self.answers = deepcopy(ANSWERS)
        self.error: P2ptrainError | None = None

    def __call__(self, order: dict[str, Any]) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        if order["do"] not in self.answers:
            raise P2ptrainError("unknown request")
        return self.answers[order["do"]]


def shown(now: Poll | None, before: Poll | None = None, trouble: str = "", width: int = 100, height: int = 40) -> str:
    console = Console(width=width, height=height, file=io.StringIO(), color_system=None)
    console.print(frame(now, before, trouble, width, height))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(line) <= width for line in text.splitlines()), text
    return str(text)
