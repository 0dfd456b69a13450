"""Refuses formats of later releases. Small JSON files and lines have theirs in a field `format`, omitted if it is 1."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from p2ptrain.errors import DataError

VERSION = 1


class _AnyVersion(Struct):
    format: int = VERSION


def refuse_newer(path: Path, content: bytes) -> None:
    """Raises DataError if a later release wrote this; does nothing if it cannot be parsed."""
    try:
        found = msgspec.json.decode(content, type=_AnyVersion).format
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    refuse_version(path, found, VERSION)


def refuse_version(path: Path, found: int, known: int) -> None:
    """Raises DataError if this version of a file's format is a later release's."""
    if found > known:
        what = f"has format {found}, and this p2ptrain reads up to {known}"
        raise DataError(what, path=path, fix="Update p2ptrain")
