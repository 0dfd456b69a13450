"""Handles a device that runs out of memory: tells the shortage from a bug, and goes on."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from p2ptrain.capacity import free_memory_bytes
from p2ptrain.errors import MemoryShortError
from p2ptrain.exact.cards import failure_of

CPU = torch.device("cpu")
# The CPU allocator, cuBLAS, and the driver of a full GPU raise no specific error type.
SIGNS = re.compile(r"allocate memory|out of memory|ALLOC_FAILED")
SMALLER = 'device.checkpointing = true, device.half_state = true or device.autocast = "bf16" needs less memory'
SETTINGS_THAT_HELP = f"A smaller device.sequences_per_pass, {SMALLER}"
T = TypeVar("T")
log = logging.getLogger("p2ptrain.exact")
short: set[torch.device] = set()


def tell_short(device: torch.device) -> None:
    """Warns once that a device lacks memory for its part of a round's arithmetic, which nobody would see otherwise."""
    if device not in short:
        short.add(device)
        log.warning("%s has no memory left for a round's arithmetic, which takes longer so: what else uses it?", device)


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(SIGNS.search(str(error)))


def where_it_fits(work: Callable[[torch.device], T], device: torch.device) -> T:
    """Runs `work` on `device`, or on the CPU if the device has no memory left.

    So if a game takes the GPU's memory, the round becomes slower, but the node stays in it. `work` must leave
    everything unchanged if it fails. On the exact path both devices give the same bits."""
    try:
        return work(device)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    tell_short(device)
    return work(CPU)  # outside the `except`, so that the traceback and the failed attempt's tensors are freed


@contextmanager
def told(what: str, device: torch.device) -> Iterator[None]:
    """Raises MemoryShortError, with the device's usage, if memory runs out inside, DeviceError if the card fails."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            if (failed := failure_of(error)) is not None:
                raise failed from error
            raise
        raise MemoryShortError(f"out of memory while {what}: {memory_taken(device)}. {SETTINGS_THAT_HELP}") from error


def memory_taken(device: torch.device) -> str:
    """Describes for a person how much memory there is and which processes use it."""
    if device.type != "cuda":
        return f"{mega(free_memory_bytes())} of main memory are free"
    free, there = torch.cuda.mem_get_info(device)
    own = torch.cuda.memory_reserved(device)
    return f"{device} has {mega(there)}: tensors of this node {mega(own)}, free {mega(free)}"


def mega(size: int) -> str:
    """Formats bytes in MB or GB."""
    return f"{size / 10**9:,.1f} GB" if size >= 10**10 else f"{size / 10**6:,.0f} MB"
