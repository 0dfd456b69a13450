"""Tells whether other programs use the GPU that this node trains on, through NVML.

The driver says which processes have something on the card, and on most systems how busy each keeps it. Where it does
not say the latter, a process that holds much of the card's memory counts as using it. Where it does not even list this
node's own process, as in WSL2 or in a container with process ids of its own, nothing can be told.

None of this has been tried on a card yet: the thresholds are guesses, and the calls follow NVML's documentation.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from statistics import mean
from time import monotonic

import pynvml
import torch

from p2ptrain.net.tasks import in_daemon_thread
from p2ptrain.node.energy import UNTOLD, handle_of

LOOK_SECONDS = 5.0  # a game that has just begun is in no hurry: it loads first
FREE_SECONDS = 60.0  # without others before training resumes, so that a menu between two games does not count; a guess
BUSY_PERCENT = 10  # of the card's time, by all others together: a desktop with a browser stays below; a guess
BUSY_BYTES = 2**30  # of the card's memory, where the time is not told: more than a desktop holds; a guess
# No sample, or more at once than a moment before: the next look has them.
NOTHING_NEW = (pynvml.NVML_SUCCESS, pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_INSUFFICIENT_SIZE)

log = logging.getLogger("p2ptrain.node")


class CardUse:
    """The use of one card by other processes than this one."""

    def __init__(self, device: torch.device) -> None:
        self._handle = handle_of(device)
        self._seen_until = 0  # the newest sample that was read

    def is_by_others(self) -> bool:
        """Whether other processes use the card now. Raises an error of UNTOLD if it does not tell."""
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
        for ask in (pynvml.nvmlDeviceGetComputeRunningProcesses, pynvml.nvmlDeviceGetGraphicsRunningProcesses):
            with suppress(pynvml.NVMLError_NotSupported):  # a card for computing draws nothing
                for each in ask(self._handle):
                    held[each.pid] = max(each.usedGpuMemory or 0, held.get(each.pid, 0))
        return held

    def _percents(self) -> dict[int, float] | None:
        """Returns how busy each process kept the card since the last call; None if it does not tell."""
        try:
            samples = pynvml.nvmlDeviceGetProcessUtilization(self._handle, self._seen_until)
        except pynvml.NVMLError_NotSupported:
            return None
        except pynvml.NVMLError as error:
            if error.value not in NOTHING_NEW:
                raise
            return {}
        found = defaultdict(list)
        valid = [each for each in samples if each.smUtil <= 100]  # drivers fill up with old and random ones
        for each in valid:
            if each.timeStamp > self._seen_until:
                found[each.pid].append(each.smUtil)
        self._seen_until = max([self._seen_until, *(each.timeStamp for each in valid)])
        return {pid: mean(percents) for pid, percents in found.items()}


def use_of(device: torch.device) -> Callable[[], bool]:
    """Returns what tells whether others use a CUDA device. Raises an error of UNTOLD if nothing does."""
    return CardUse(device).is_by_others


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
