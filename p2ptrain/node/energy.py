"""Measures the energy that a graphics card uses: by NVML's energy counter, or its power at each reading without one.

Everything that uses the card is included, and nothing else: not the fans, the main memory or the losses of the power
supply. Energy is counted only while the node is not paused. Processors are not measured: only root may read Linux's
RAPL counters, since they leak secrets of other programs (Lipp et al. 2021, PLATYPUS).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Any

import pynvml
import torch

from p2ptrain.net.tasks import in_daemon_thread

LOOK_SECONDS = 10.0  # between readings; a guess
WATTS_MAX = 5_000.0  # of a device: beyond this, the counter was reset, as after a sleep
# No driver, no such function or number, or CUDA has no meter.
UNTOLD = (OSError, ValueError, AttributeError, RuntimeError, pynvml.NVMLError)


class Nvml:
    """The meter of one graphics card."""

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
        self._joules += watts * min(now - self._looked_at, 2 * LOOK_SECONDS)
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
            await asyncio.sleep(LOOK_SECONDS)
