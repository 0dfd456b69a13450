"""The format of small JSON files and lines: a field `format`, which is not written while it is 1."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from p2ptrain.errors import DataError

VERSION = 1


class _AnyVersion(Struct):
    """Of whichever format."""

    format: int = VERSION


def refuse_newer(path: Path, content: bytes) -> None:
    """DataError if a later release has written this; nothing for what cannot be read at all."""
    try:
        found = msgspec.json.decode(content, type=_AnyVersion).format
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    if found > VERSION:
        raise DataError(f"{path}: has format {found}, and this p2ptrain reads up to {VERSION}. Update p2ptrain")
