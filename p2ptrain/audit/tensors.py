"""Compares the weights in a trainer's file with those in the state beside it.

The file is read a piece at a time and not mapped into memory, as the safetensors library does, because truncating a
mapped file would kill the process. Of its header only the entries that are needed are used, within the file's bounds.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from p2ptrain.errors import DataError
from p2ptrain.exact.root import FLOAT_BYTES, octets
from p2ptrain.files import READ_BYTES, open_regular, trouble
from p2ptrain.store.checkpoints import STATE_NAME

LENGTH_BYTES = 8  # of the length that precedes the header
HEADER_BYTES_MAX = 2**24  # 1,024 layers with five copies of nine parameters take 6 MB


class _TensorPlace(Struct):
    """A tensor's place in the file, counted from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Metadata(Struct):
    round: str = ""


def differs(path: Path, number: int, weights: Iterable[tuple[str, Tensor, Sequence[int]]]) -> str | None:
    """Returns why a trainer's file does not belong to this round and these tensors (name, flat values, shape), if so.
    Raises `DataError` if it cannot be read as a trainer's file."""
    with trouble(path, "cannot be read"), open_regular(path) as file:
        descriptor = file.fileno()
        size = os.fstat(descriptor).st_size
        length = int.from_bytes(os.pread(descriptor, LENGTH_BYTES, 0), "little")
        begin = LENGTH_BYTES + length
        if length > HEADER_BYTES_MAX or begin > size:
            raise DataError(f"{path}: its header claims {length:,} bytes")
        try:
            header = msgspec.json.decode(os.pread(descriptor, length, LENGTH_BYTES), type=dict[str, msgspec.Raw])
            for name, values, shape in weights:
                found = msgspec.json.decode(header.get(name, b"null"), type=_TensorPlace)
                first, last = found.data_offsets
                is_inside = 0 <= first <= last <= size - begin
                is_like_it = (found.dtype, found.shape) == ("F32", tuple(shape)) and is_inside
                if not (is_like_it and _are_there(descriptor, begin + first, last - first, values)):
                    return f"{path.name} and {STATE_NAME} have different weights ({name})"
            told = msgspec.json.decode(header.get("__metadata__", b"{}"), type=_Metadata).round
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise DataError(f"{path}: it has no valid safetensors header ({error})") from error
    return None if told == str(number) else f"{path.name} belongs to another round"


def _are_there(descriptor: int, start: int, size: int, values: Tensor) -> bool:
    expected = octets(values)
    if len(expected) != size:
        return False
    for at in range(0, size, READ_BYTES):
        part = expected[at : at + READ_BYTES]
        if os.pread(descriptor, len(part), start + at) != part:
            return False
    return True


def read_flat(path: Path, size: int) -> Tensor:
    """Reads a file of exactly `size` bytes as fp32 values; raises `DataError` if it has another size."""
    values = torch.empty(size // FLOAT_BYTES, dtype=torch.float32)
    with trouble(path, "cannot be read"), open_regular(path) as file:
        found = os.fstat(file.fileno()).st_size
        if found != size or file.readinto(octets(values)) != size:
            raise DataError(f"{path}: {found:,} bytes, but the state has {size:,}")
    return values
