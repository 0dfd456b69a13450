"""Tells whether other programs use the GPU that this node trains on, through NVML.

The driver says which processes have something on the card, and on most systems how busy each keeps it. Where it does
not say the latter, a process that holds much of the card's memory counts as using it. Where it does not even list this
node's own process, as in WSL2 or in a container with process ids of its own, nothing can be told.

None of this has been tried on a card yet: the thresholds are guesses, and the calls follow NVML's documentation.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
from collections import defaultdict
from collections.abc import Callable
from statistics import mean
from time import monotonic
from typing import Any

import torch

from p2ptrain.net.tasks import in_daemon_thread
from p2ptrain.node.energy import UNTOLD, Card, uuid_of

LOOK_SECONDS = 5.0  # a game that has just begun is in no hurry: it loads first
FREE_SECONDS = 60.0  # without others before training resumes, so that a menu between two games does not count; a guess
BUSY_PERCENT = 10  # of the card's time, by all others together: a desktop with a browser stays below; a guess
BUSY_BYTES = 2**30  # of the card's memory, where the time is not told: more than a desktop holds; a guess
PROGRAMS_MAX = 4_096  # a card has a few dozen
NOT_SUPPORTED, NOT_FOUND, INSUFFICIENT_SIZE = 3, 6, 7  # NVML's statuses
HOLDERS = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses")

log = logging.getLogger("p2ptrain.node")


class ProcessMemory(ctypes.Structure):
    """NVML's nvmlProcessInfo_v1_t, which goes with its functions without a version in their names."""

    _fields_ = (("pid", ctypes.c_uint), ("size", ctypes.c_ulonglong))


class ProcessTime(ctypes.Structure):
    """NVML's nvmlProcessUtilizationSample_t: what one process did since its last sample."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("at", ctypes.c_ulonglong),  # microseconds
        ("percent", ctypes.c_uint),  # of the time, on the multiprocessors
        ("memory_percent", ctypes.c_uint),
        ("encoder_percent", ctypes.c_uint),
        ("decoder_percent", ctypes.c_uint),
    )


class CardUse(Card):
    """The use of one card by other processes than this one."""

    def __init__(self, uuid: str, library: Any = None) -> None:
        super().__init__(uuid, library)
        self._seen_until = 0  # the newest sample that was read

    def is_by_others(self) -> bool:
        """Whether other processes use the card now. Raises OSError if it does not tell."""
        held = self._held()
        if os.getpid() not in held:
            raise OSError("the driver does not list this process itself")
        percents = self._percents()
        if percents is None:
            return any(size >= BUSY_BYTES for pid, size in held.items() if pid != os.getpid())
        return sum(percent for pid, percent in percents.items() if pid != os.getpid()) >= BUSY_PERCENT

    def _held(self) -> dict[int, int]:
        """Returns the card's memory that each process holds; 0: untold."""
        held: dict[int, int] = {}
        for function in HOLDERS:
            for each in self._list(function, ProcessMemory):
                size = 0 if each.size == 2**64 - 1 else each.size
                held[each.pid] = max(size, held.get(each.pid, 0))
        return held

    def _percents(self) -> dict[int, float] | None:
        """Returns how busy each process kept the card since the last call; None if it does not tell."""
        since = ctypes.c_ulonglong(self._seen_until)
        samples = self._list("nvmlDeviceGetProcessUtilization", ProcessTime, since, unsupported=None)
        if samples is None:
            return None
        found = defaultdict(list)
        for each in samples:
            if each.at > self._seen_until and each.percent <= 100:  # drivers fill up with old and random ones
                found[each.pid].append(each.percent)
        self._seen_until = max([self._seen_until, *(each.at for each in samples if each.percent <= 100)])
        return {pid: mean(percents) for pid, percents in found.items()}

    def _list(self, name: str, kind: type[Any], *rest: object, unsupported: Any = ()) -> Any:
        """Returns a list of the driver's, whose length it tells first."""
        count = ctypes.c_uint(0)
        status = self.status(name, self.handle, None, ctypes.byref(count), *rest)
        if status == NOT_SUPPORTED:
            return unsupported
        if status in (0, NOT_FOUND):
            return ()
        if status != INSUFFICIENT_SIZE or count.value > PROGRAMS_MAX:
            raise OSError(f"{name} returned {status}")
        count.value += 8  # for processes that have begun meanwhile
        found = (kind * count.value)()
        status = self.status(name, self.handle, found, ctypes.byref(count), *rest)
        if status not in (0, NOT_FOUND):
            raise OSError(f"{name} returned {status}")
        return found[: count.value] if status == 0 else ()


def use_of(device: torch.device) -> Callable[[], bool]:
    """Returns what tells whether others use a CUDA device. Raises OSError if nothing does."""
    return CardUse(uuid_of(device)).is_by_others


class GpuWatch:
    """Looks periodically, in a thread, whether others use the GPU, and until it has been free for a while."""

    def __init__(
        self,
        device: torch.device,
        is_wanted: Callable[[], bool],
        make: Callable[[torch.device], Callable[[], bool]] = use_of,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.is_busy = False
        self._device, self._is_wanted, self._make, self._clock = device, is_wanted, make, clock
        self._is_by_others: Callable[[], bool] | None = None
        self._busy_at = 0.0

    def _look(self) -> bool:
        if self._is_by_others is None:
            self._is_by_others = self._make(self._device)
        return self._is_by_others()

    def note(self, is_by_others: bool) -> None:
        """Takes in a look: busy at once, free only after a while."""
        now = self._clock()
        if is_by_others:
            self.is_busy, self._busy_at = True, now
        elif now - self._busy_at >= FREE_SECONDS:
            self.is_busy = False

    async def watch(self) -> None:
        """Runs until the card does not tell; a processor's other programs are no concern of this."""
        if self._device.type != "cuda":
            return
        while True:
            if self._is_wanted():
                try:
                    self.note(await in_daemon_thread(self._look, UNTOLD))
                except UNTOLD as error:
                    what = "cannot tell whether other programs use %s, so limits.on_gpu_busy has no effect: %s"
                    log.warning(what, self._device, error)
                    self.is_busy = False
                    return
            await asyncio.sleep(LOOK_SECONDS)
