"""The format version of small JSON files and lines: a field `format`, omitted if it is 1."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from p2ptrain.errors import DataError

VERSION = 1


class _AnyVersion(Struct):
    """The version field; all other content is ignored."""

    format: int = VERSION


def refuse_newer(path: Path, content: bytes) -> None:
    """Raises DataError if a later release wrote this; does nothing if it cannot be parsed."""
    try:
        found = msgspec.json.decode(content, type=_AnyVersion).format
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    if found > VERSION:
        raise DataError(
            f"has format {found}, and this p2ptrain reads up to {VERSION}", path=path, fix="Update p2ptrain"
        )
