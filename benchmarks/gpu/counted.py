"""Counts what a round asks of a card without one: launches, copies, waits, and the bytes that torch moves on it.

Tensors are on torch's device `meta`, which takes no memory and computes nothing; every operation that is no view is a
launch. A program of the card is not run, and a copy to main memory gives zeros.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from p2ptrain.exact import aggregate, root
from p2ptrain.exact.kernels import launches
from p2ptrain.exact.transform import Layout

CARD = torch.device("meta")
TO_HOST = "to host"
WAITS = ("_local_scalar_dense", "nonzero")
VIEWS = {
    "view", "permute", "split", "split_with_sizes", "slice", "transpose", "expand", "unsqueeze", "as_strided", "detach",
    "t", "select", "_unsafe_view", "squeeze", "_reshape_alias", "empty", "empty_like", "alias", "diff", "lift_fresh",
}  # fmt: skip


class Counting(TorchDispatchMode):
    """Counts what is asked of the card."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.programs: Counter[str] = Counter()  # launches of the card's own programs
        self.numbers: Counter[str] = Counter()  # that each of them has before it: see `numbers_of`
        self.moved = 0  # bytes that torch's own operations read and write
        self.to_card = self.to_host = 0

    def clear(self) -> None:
        self.calls.clear()
        self.programs.clear()
        self.numbers.clear()
        self.moved = self.to_card = self.to_host = 0

    @property
    def launches(self) -> int:
        return sum(self.calls.values()) - self.calls[TO_HOST]

    @property
    def waits(self) -> int:
        """How often a program waits for the card, copies to main memory included."""
        return self.calls[TO_HOST] + sum(self.calls[name] for name in WAITS)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if name == "_local_scalar_dense" and args[0].device == CARD:
            self.calls[name] += 1
            return 0.0
        made = func(*args, **(kwargs or {}))
        if name in ("_to_copy", "copy_"):
            source = args[1] if name == "copy_" else args[0]
            if source.device != CARD and made.device == CARD:  # no launch, but bytes on the bus
                self.to_card += source.numel() * source.itemsize
                return made
        here = [each for each in (*args, made) if isinstance(each, Tensor) and each.device == CARD]
        if name not in VIEWS and here:
            self.calls[name] += 1
            self.moved += sum(each.numel() * each.itemsize for each in {id(each): each for each in here}.values())
        return made


def numbers_of(constants: dict[str, Any]) -> int:
    """Returns how many numbers an instance of a program has before it: of contributions, of a chunk, or its lanes."""
    lanes = int(constants.get("LANES", 1))
    if "BITS" in constants:
        return lanes * int(constants["K"])
    return int(constants.get("AREA") or constants.get("C", 0) ** 2 or lanes)


@contextmanager
def counting() -> Iterator[Counting]:
    """The context in which a card is the device `meta`; what it is asked is counted within the yielded mode."""
    counts = Counting()

    def to_card(array: NDArray[Any], device: torch.device) -> Tensor:
        counts.to_card += array.nbytes
        return torch.empty(array.shape, dtype=torch.from_numpy(array).dtype, device=device)

    def to_host(tensor: Tensor) -> NDArray[Any]:
        counts.to_host += tensor.numel() * tensor.itemsize
        counts.calls[TO_HOST] += 1
        return np.zeros(tuple(tensor.shape), torch.empty(0, dtype=tensor.dtype).numpy().dtype)

    def launch(name: str, grid: tuple[int, ...], *_: Any, **constants: Any) -> None:
        if all(grid):
            counts.calls[name] += 1
            counts.programs[name] += 1
            counts.numbers[name] += int(np.prod(grid)) * numbers_of(constants)

    def is_card(device: torch.device) -> bool:
        return device == CARD

    with (
        patch.object(launches, "is_usable", is_card),
        patch.object(root, "is_usable", is_card),
        patch.object(aggregate, "to_host", to_host),
        patch.object(Layout, "padding_masks", lambda layout, device: (torch.empty(0), torch.empty(0))),  # computed
        patch.multiple(launches, to_card=to_card, to_host=to_host, launch=launch),
    ):
        try:
            yield counts
        finally:
            launches.tables.clear()
