"""What the device has used, as far as it measures it itself; nothing, where it does not.

    cuda   NVML's count of the whole card's energy, or where it keeps none, its power at each look
    cpu    Linux' RAPL counters of the whole processors, which most systems let only root read (Lipp et al. 2021,
           PLATYPUS: they tell secrets of other programs); they have 32 bits or so, and begin anew within the hour

Both are of all that uses the device, and of nothing else: no fans, no main memory, no losses of the power supply. It is
counted while the node is not paused. NVML is called by its C interface, which every driver brings: four functions.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

import torch

from p2ptrain.net.tasks import in_daemon_thread

LOOK_SECONDS = 10.0  # a counter of RAPL goes round in 20 minutes at 200 W
WATTS_MAX = 5_000.0  # of a device: what seems to be more is a counter that began anew, as after a sleep
POWERCAP = Path("/sys/class/powercap")
UNTOLD = (OSError, ValueError, AttributeError, RuntimeError)  # no file, number or function; or CUDA has none
NVML = "libnvidia-ml.so.1"


class Meter(Protocol):
    """Counts up from anywhere. OSError: it tells nothing, now or ever."""

    def read(self) -> list[tuple[float, float]]:
        """Of each counter: joules, and at how many it begins anew; 0: it does not."""
        ...


class Rapl:
    """The processors of this machine."""

    def __init__(self, directory: Path = POWERCAP) -> None:
        self._zones = [
            zone
            for zone in sorted(directory.glob("intel-rapl:*"))  # AMD's are named so as well
            if zone.name.count(":") == 1 and (zone / "name").read_text().startswith("package")
        ]
        if not self._zones:
            raise OSError("no processor here counts its energy")

    def read(self) -> list[tuple[float, float]]:
        return [
            (int((zone / "energy_uj").read_text()) / 1e6, int((zone / "max_energy_range_uj").read_text()) / 1e6)
            for zone in self._zones
        ]


class Nvml:
    """One graphics card. `library` is the driver's."""

    def __init__(self, uuid: str, library: Any = None, clock: Callable[[], float] = monotonic) -> None:
        self._library = library or ctypes.CDLL(NVML)  # OSError: there is none
        self._handle, self._clock = ctypes.c_void_p(), clock
        self._joules, self._looked_at = 0.0, clock()
        self._call("nvmlInit_v2")
        self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self._handle))

    def read(self) -> list[tuple[float, float]]:
        energy, power = ctypes.c_ulonglong(), ctypes.c_uint()
        try:
            self._call("nvmlDeviceGetTotalEnergyConsumption", self._handle, ctypes.byref(energy))
        except OSError:  # cards before Volta, and parts of cards, keep no count
            self._call("nvmlDeviceGetPowerUsage", self._handle, ctypes.byref(power))
            now = self._clock()
            self._joules += power.value / 1e3 * min(now - self._looked_at, 2 * LOOK_SECONDS)
            self._looked_at = now
            return [(self._joules, 0.0)]
        return [(energy.value / 1e3, 0.0)]

    def _call(self, name: str, *arguments: object) -> None:
        if status := getattr(self._library, name)(*arguments):
            raise OSError(f"{name} says {status}")


def meter_of(device: torch.device) -> Meter:
    """OSError: this device does not tell."""
    if device.type == "cpu":
        return Rapl()
    if device.type != "cuda":
        raise OSError(f"{device.type} does not count its energy")
    return Nvml(f"GPU-{torch.cuda.get_device_properties(device).uuid}")


class Energy:
    """Of one node: looks at its meter now and then, in a thread, and tells what was used since."""

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
        """Joules since the last look; None: there was none, or its figure is none."""
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
        """Until the meter tells nothing; most tell nothing from the start."""
        while True:
            try:
                used = await in_daemon_thread(self.look, UNTOLD)
            except UNTOLD:
                return
            if used is not None and self._is_counted():
                self._note(used)
            await asyncio.sleep(LOOK_SECONDS)
