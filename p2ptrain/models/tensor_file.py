"""Writes safetensors files a part at a time; the library would need all tensors in memory at once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from p2ptrain.files import write_all

Shape = tuple[int, ...]
TYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
HEADER_ALIGNMENT = 8  # bytes; the numbers begin at a multiple of this


def write_tensors(
    path: Path,
    tensors: Iterable[tuple[str, torch.dtype, Shape]],
    content: Iterable[bytes | memoryview],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes a header for these tensors, then their bytes, `content`, and syncs the file."""
    entries: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    begin = 0
    for name, dtype, shape in tensors:
        end = begin + prod(shape) * dtype.itemsize
        entries[name] = {"dtype": TYPES[dtype], "shape": shape, "data_offsets": [begin, end]}
        begin = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % HEADER_ALIGNMENT)
    with path.open("wb", buffering=0) as file:
        write_all(file.fileno(), len(header).to_bytes(8, "little") + header)
        for part in content:
            write_all(file.fileno(), part)
        os.fsync(file.fileno())
