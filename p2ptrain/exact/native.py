"""Unpacking and counting in C (native.c): the same results as NumPy's, several times as fast.

The build of the package compiles it where there is a compiler (deploy/build_native.py); elsewhere NumPy does the work.
It releases the interpreter lock while it runs."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ABI = 2  # as in native.c
SHIFT_MAX = 15  # either way; a larger one would change nothing
WRONG_RANK, WRONG_ONES, NOT_RISING = 1, 2, 3


class Form(ctypes.Structure):
    """How many chunks there are, the bytes of each section, and the widths of a chunk's fields.

    strings: how many bucket strings there are, if they are stored as ranks, else 0"""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("chunks", "upper", "low", "signs", "magnitudes")),
        ("strings", ctypes.c_uint64),
        *(
            (name, ctypes.c_int32)
            for name in ("k", "positions", "top", "upper_bits", "low_bits", "magnitude_bits", "value_bytes")
        ),
    )


@cache
def library() -> ctypes.CDLL | None:
    """Returns what the build has compiled; None if it has not."""
    path = Path(__file__).with_name("libnative.so")
    try:
        found = ctypes.CDLL(str(path))
    except OSError:  # not built, or in a checkout that was copied from another processor
        return None
    return found if found.p2ptrain_abi() == ABI else None


def unpack(
    form: Form,
    sections: Sequence[NDArray[np.uint8]],
    binomials: NDArray[np.int64] | None,
    indices: NDArray[np.uint16],
    values: NDArray[Any],
) -> int:
    """Decodes the sections of a payload into indices and values; returns what is wrong with them, or 0."""
    native = library()
    assert native is not None
    wrong: int = native.p2ptrain_unpack(
        ctypes.byref(form),
        *(_at(section) for section in sections),
        None if binomials is None else _at(binomials),
        _at(indices),
        _at(values),
    )
    return wrong


def count(
    indices: Sequence[NDArray[np.uint16]],
    values: Sequence[NDArray[Any]],
    shifts: Sequence[NDArray[np.int64]],
    most: int,
    sums: NDArray[Any],
    area: int,
) -> None:
    """Adds the votes of some contributions to the sums: their values times 2**shift, rounded, and cut at `most`.

    sums: [chunks * area] int16 or int32; shifts: [chunks] of each; empty: the values are votes"""
    native, count = library(), len(indices)
    assert native is not None
    halvings = [np.clip(each, -SHIFT_MAX, SHIFT_MAX).astype(np.int8) for each in shifts]
    native.p2ptrain_count(
        ctypes.c_int64(len(indices[0])),
        ctypes.c_int64(area),
        ctypes.c_int32(count),
        (ctypes.c_int32 * count)(*(each.shape[1] for each in indices)),
        _all_at(indices),
        _all_at(values),
        ctypes.c_int32(values[0].itemsize),
        _all_at(halvings) if halvings else None,
        ctypes.c_int32(most),
        _at(sums),
        ctypes.c_int32(sums.itemsize),
    )


def _all_at(arrays: Sequence[NDArray[Any]]) -> Any:
    return (ctypes.c_void_p * len(arrays))(*(_at(each).value for each in arrays))


def _at(array: NDArray[Any]) -> ctypes.c_void_p:
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)
