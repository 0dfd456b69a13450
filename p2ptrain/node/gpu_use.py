"""Asks NVML about the card that this node trains on: the energy that it uses, and whether other programs use it.

Energy comes from NVML's counter, or without one from the power at each reading. Everything that uses the card is
included, and nothing else: not the fans, the main memory or the losses of the power supply. Energy is counted only
while the node is not paused. Processors are not measured: only root may read Linux's RAPL counters, since they leak
secrets of other programs (Lipp et al. 2021, PLATYPUS).

The driver says which processes have something on the card, and on most systems how busy each keeps it. Where it does
not list this node's own process, as in WSL2 or in a container with process ids of its own, nothing can be told.

Whether other programs use a card has not been tried on one: the thresholds are guesses, the calls NVML's as documented.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import defaultdict
from collections.abc import Callable
from statistics import mean
from time import monotonic
from typing import Any

import psutil
import pynvml
import torch

from p2ptrain.net.tasks import in_daemon_thread

READ_SECONDS = 10.0  # between readings of energy; a guess
WATTS_MAX = 5_000.0  # of a device: beyond this, the counter was reset, as after a sleep
# No driver, no such function or number, or CUDA has no meter.
UNTOLD = (OSError, ValueError, AttributeError, RuntimeError, pynvml.NVMLError)
LOOK_SECONDS = 5.0  # between looks at other programs; a game that has just begun is in no hurry: it loads first
FREE_SECONDS = 60.0  # without others before training resumes, so that a menu between two games does not count; a guess
BUSY_PERCENT = 10  # of the card's time, by all others together: a desktop with a browser stays below; a guess
# No sample, or more at once than a moment before: the next look has them.
NOTHING_NEW = (pynvml.NVML_SUCCESS, pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_INSUFFICIENT_SIZE)

log = logging.getLogger("p2ptrain.node")


class Nvml:
    def __init__(self, device: torch.device, clock: Callable[[], float] = monotonic) -> None:
        self._handle, self._clock = handle_of(device), clock
        self._joules, self._looked_at = 0.0, clock()

    def read(self) -> float:
        """Returns joules, counted from anywhere. Raises an error of UNTOLD if the card does not tell."""
        try:
            return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1e3
        except pynvml.NVMLError:  # cards before Volta and MIG slices have no counter
            watts = pynvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3
        now = self._clock()
        self._joules += watts * min(now - self._looked_at, 2 * READ_SECONDS)
        self._looked_at = now
        return self._joules


def handle_of(device: torch.device) -> Any:
    """Returns NVML's handle of a CUDA device's card. Raises an error of UNTOLD if there is none."""
    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")


def meter_of(device: torch.device) -> Callable[[], float]:
    """Returns what reads the meter of a device. Raises an error of UNTOLD if it has none."""
    if device.type != "cuda":
        raise OSError(f"{device.type} has no energy counter")
    return Nvml(device).read


class Energy:
    """Periodically reads the device's meter in a thread, and reports the energy used since the last reading."""

    def __init__(
        self,
        make: Callable[[], Callable[[], float]],
        note: Callable[[float], None],
        is_counted: Callable[[], bool],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._make, self._note, self._is_counted, self._clock = make, note, is_counted, clock
        self._read: Callable[[], float] | None = None
        self._before: float | None = None
        self._looked_at = 0.0

    def look(self) -> float | None:
        """Returns the joules since the last reading; None if this is the first, or the figure is implausible."""
        if self._read is None:
            self._read = self._make()
        found, now = self._read(), self._clock()
        before, seconds = self._before, now - self._looked_at
        self._before, self._looked_at = found, now
        return found - before if before is not None and 0 <= found - before <= WATTS_MAX * seconds else None

    async def watch(self) -> None:
        """Runs until the meter fails. Most machines have none, and it ends at once."""
        while True:
            try:
                used = await in_daemon_thread(self.look, UNTOLD)
            except UNTOLD:
                return
            if used is not None and self._is_counted():
                self._note(used)
            await asyncio.sleep(READ_SECONDS)


class CardUse:
    """The use of one card by other processes than this one."""

    def __init__(self, device: torch.device) -> None:
        self._handle = handle_of(device)
        self._seen_until = 0  # the newest sample that was read

    def is_by_others(self) -> bool:
        """Whether other processes use the card now. Raises an error of UNTOLD if it does not tell."""
        if os.getpid() not in {each.pid for each in pynvml.nvmlDeviceGetComputeRunningProcesses(self._handle)}:
            raise OSError("the driver does not list this process itself")
        own = {os.getpid(), *(each.pid for each in psutil.Process().children(recursive=True))}
        return sum(percent for pid, percent in self._percents().items() if pid not in own) >= BUSY_PERCENT

    def _percents(self) -> dict[int, float]:
        """Returns how busy each process kept the card since the last call."""
        try:
            samples = pynvml.nvmlDeviceGetProcessUtilization(self._handle, self._seen_until)
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
