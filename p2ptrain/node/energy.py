"""Measures the energy that the device uses, if it has its own meter.

    cuda   NVML's energy counter of the whole card, or its power at each reading if there is no counter
    cpu    Linux's RAPL counters of the whole processors. On most systems only root may read them, since they leak
           secrets of other programs (Lipp et al. 2021, PLATYPUS). They have about 32 bits and wrap within the hour

Both include everything that uses the device, and nothing else: not the fans, the main memory or the losses of the
power supply. Energy is counted only while the node is not paused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

import pynvml
import torch

from p2ptrain.net.tasks import in_daemon_thread

LOOK_SECONDS = 10.0  # a RAPL counter wraps after 20 minutes at 200 W
WATTS_MAX = 5_000.0  # of a device: beyond this, the counter was reset, as after a sleep
POWERCAP = Path("/sys/class/powercap")
# No such file, number or function; or no driver, or CUDA has no meter.
UNTOLD = (OSError, ValueError, AttributeError, RuntimeError, pynvml.NVMLError)


class Meter(Protocol):
    """An energy meter. Its counters start anywhere and only grow. Raises an error of UNTOLD if it cannot measure."""

    def read(self) -> list[tuple[float, float]]:
        """Returns each counter's joules and the value at which it wraps, 0 if it does not wrap."""
        ...


class Rapl:
    """The RAPL counters of this machine's processors."""

    def __init__(self, directory: Path = POWERCAP) -> None:
        self._zones = [
            zone
            for zone in sorted(directory.glob("intel-rapl:*"))  # AMD's have this name, too
            if zone.name.count(":") == 1 and (zone / "name").read_text().startswith("package")
        ]
        if not self._zones:
            raise OSError("no processor of this machine has an energy counter")

    def read(self) -> list[tuple[float, float]]:
        return [
            (int((zone / "energy_uj").read_text()) / 1e6, int((zone / "max_energy_range_uj").read_text()) / 1e6)
            for zone in self._zones
        ]


class Nvml:
    """The meter of one graphics card."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = monotonic) -> None:
        self._handle, self._clock = handle_of(device), clock
        self._joules, self._looked_at = 0.0, clock()

    def read(self) -> list[tuple[float, float]]:
        try:
            return [(pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3, 0.0)]
        except pynvml.NVMLError:  # cards before Volta and MIG slices have no counter
            watts = pynvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3
        now = self._clock()
        self._joules += watts * min(now - self._looked_at, 2 * LOOK_SECONDS)
        self._looked_at = now
        return [(self._joules, 0.0)]


def handle_of(device: torch.device) -> Any:
    """Returns NVML's handle of a CUDA device's card. Raises an error of UNTOLD if there is none."""
    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")


def meter_of(device: torch.device) -> Meter:
    """Returns the meter of a device. Raises an error of UNTOLD if it has none."""
    if device.type == "cpu":
        return Rapl()
    if device.type != "cuda":
        raise OSError(f"{device.type} has no energy counter")
    return Nvml(device)


class Energy:
    """Periodically reads the device's meter in a thread, and reports the energy used since the last reading."""

    def __init__(
        self,
        make: Callable[[], Meter],
        note: Callable[[float], None],
        is_counted: Callable[[], bool],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._make, self._note, self._is_counted, self._clock = make, note, is_counted, clock
        self._meter: Meter | None = None
        self._before: list[tuple[float, float]] = []
        self._looked_at = 0.0

    def look(self) -> float | None:
        """Returns the joules since the last reading; None if this is the first, or the figure is implausible."""
        if self._meter is None:
            self._meter = self._make()
        found, now = self._meter.read(), self._clock()
        before, seconds = self._before, now - self._looked_at
        self._before, self._looked_at = found, now
        if not before:
            return None
        used = 0.0
        for (joules, _), (after, goes_round_at) in zip(before, found, strict=True):
            used += after - joules if after >= joules else after - joules + goes_round_at
        return used if 0 <= used <= WATTS_MAX * len(found) * seconds else None

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
