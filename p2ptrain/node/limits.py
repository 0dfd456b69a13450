"""Limits on how much of its owner's machine the node uses.

config/node.py describes each of them. Memory and disk are checked at the start, before anything is allocated, and disk
again once it is known how much data a round needs.

Outside its hours, on battery and beside a game, the node behaves as after `p2ptrain pause`: it finishes the current
training and goes on voting and applying. These reasons and the owner's pause hold until each of them is lifted.

Memory cannot be released on demand: it holds weights and gradients, and a limit on the address space would make torch
fail in the middle of a round. So the need is estimated before anything is allocated (train/memory.py), and later usage
is only reported. To enforce a limit, use the system's means (systemd's MemoryMax=, a container's limit)."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from pydantic import ValidationError

from p2ptrain.config import RunConfig
from p2ptrain.config.node import OPTIONS, ChangeableLimits, Limits
from p2ptrain.config.text import allowed
from p2ptrain.core.complaints import Code, Complaint, complaint
from p2ptrain.errors import ConfigError, TooLargeError
from p2ptrain.files import below, nearest_existing
from p2ptrain.node.home import Home

if TYPE_CHECKING:
    from p2ptrain.data.dataset import TokenDataset
    from p2ptrain.node.work import Worker
    from p2ptrain.train.memory import DiskDemand, Need

LOOK_SECONDS = 5.0  # between checks of clock, battery and memory: unplugging costs a few seconds of charge
LESS_MEMORY = "Close other programs, set device.checkpointing = true, or join a run with a smaller model"
LESS_DISK = (
    "Make room, keep fewer checkpoints (storage.checkpoints_kept), choose another disk with --data-dir, "
    "or allow it with limits.disk_bytes"
)

log = logging.getLogger("p2ptrain.node")


# -- Decisions --------------------------------------------------------------------------------------


def is_within(hours: str, now: datetime) -> bool:
    """Whether training is allowed now. Hours may span midnight; the end is exclusive."""
    if not hours:
        return True
    start, _, end = hours.partition("-")
    time = f"{now:%H:%M}"
    return start <= time < end if start < end else time >= start or time < end


def reasons_to_pause(
    limits: ChangeableLimits, now: datetime, is_on_battery: bool, is_gpu_busy: bool = False
) -> list[Complaint]:
    found = []
    if not is_within(limits.hours, now):
        found.append(complaint(Code.OUTSIDE_HOURS, hours=limits.hours, until=limits.hours[:5]))
    if is_on_battery and limits.on_battery == "pause":
        found.append(complaint(Code.ON_BATTERY))
    if is_gpu_busy and limits.on_gpu_busy == "pause":
        found.append(complaint(Code.GPU_BUSY))
    return found


def rest_seconds(worked: float, percent: int) -> float:
    """Returns how long to idle after `worked` seconds to stay within `percent`."""
    return worked * (100 - percent) / percent


def over_memory(limits: ChangeableLimits, resident: int) -> Complaint | None:
    if not limits.memory_bytes or resident <= limits.memory_bytes:
        return None
    return complaint(Code.OVER_MEMORY, used_bytes=resident, limit_bytes=limits.memory_bytes)


def changed(limits: Limits, order: dict[str, Any]) -> Limits:
    """Returns the limits after an order of `p2ptrain limit`. Raises ConfigError for an invalid value."""
    given = {name: order[option.name] for name, option in OPTIONS.items() if order.get(option.name) is not None}
    try:
        return Limits.model_validate({**limits.model_dump(exclude_unset=True), **given})
    except ValidationError as error:
        place = error.errors(include_url=False)[0]["loc"]
        key = str(place[0]) if place else "hours"  # the only check of the whole section is about hours
        fix = f"Give {allowed(Limits.model_fields[key])}"
        raise ConfigError(f"{given[key]!r} is not valid", key=f"--{OPTIONS[key].name}", fix=fix) from error


def choose_settings(run: RunConfig, home: Home) -> None:
    """Sets what the owner has left to the node so that the run fits this machine, and logs it."""
    from p2ptrain.train.memory import fitting  # noqa: PLC0415  # imports torch

    before, home.config = home.config.device, fitting(run, home.config)
    for name, value in home.config.device:
        if value != getattr(before, name):
            log.info("device.%s = %s, chosen for run %s", name, str(value).lower(), run.name)


def refuse_too_large(run: RunConfig, home: Home) -> None:
    """Logs how much memory and disk space the run needs. Raises ConfigError if the config allows less, and
    TooLargeError if this machine has less: a process that takes more main memory would be ended by the system. Only
    warns if other programs have the memory, or if a GPU would fit smaller passes, which training takes by itself."""
    from p2ptrain.exact.shortage import mega  # noqa: PLC0415
    from p2ptrain.train.memory import demands_of, need_of, passes_that_fit  # noqa: PLC0415  # imports torch

    demands = demands_of(run, home.config)
    disk = disk_demand(run, home, need_of(run))
    log.info("run %s needs about %s", run.name, " and ".join([*(each.takes for each in demands), disk.takes]))
    limit = home.config.limits.memory_bytes
    if limit and demands[0].needed > limit:
        what = f"run {run.name} needs about {demands[0].takes}, but the limit is {mega(limit)}"
        raise ConfigError(what, key="limits.memory_bytes", fix="Raise it, or join a run with a smaller model")
    for each in demands:
        if each.level == "failed" and each.least <= each.total:
            what = f"run {run.name} needs about {each.takes}, but there are only {mega(each.total)}"
            fewer = max(1, passes_that_fit(run, home.config))
            fix = f"Set device.sequences_per_pass = {fewer}, so that less is needed at once"
            raise TooLargeError(what, fix=fix)
        if each.level == "failed":
            least = f"{mega(each.least)} even with one sequence per pass"
            what = f"run {run.name} needs about {each.takes}, {least}, but there are only {mega(each.total)}"
            raise TooLargeError(what, fix=LESS_MEMORY)
        if each.level == "warning":
            log.warning("only %s of %s are free now. %s", mega(each.free), each.what, LESS_MEMORY)
    refuse_disk(run, disk)


def keep_data_within(run: RunConfig, home: Home, data: TokenDataset) -> None:
    """Limits the fetched data to the room that the run leaves on the disk; ConfigError if not one round's fits."""
    from p2ptrain.train.learner import EVALUATED_SEQUENCES  # noqa: PLC0415
    from p2ptrain.train.memory import DISK_SHARE, need_of  # noqa: PLC0415

    least = data.fetched_bytes_min(run.recipe.round_sequences, EVALUATED_SEQUENCES, run.model.sequence_length)
    disk = disk_demand(run, home, need_of(run), data.prepared_bytes + least, of_data=data.directory)
    refuse_disk(run, disk)
    spare = 0 if home.config.limits.disk_bytes else int((1 - DISK_SHARE) * disk.used)  # else each start would take more
    data.keep_within(max(least, disk.room - disk.needed + least - spare))


def refuse_disk(run: RunConfig, disk: DiskDemand) -> None:
    from p2ptrain.exact.shortage import mega  # noqa: PLC0415

    if disk.level == "failed":
        what = f"run {run.name} needs about {disk.takes}, and may have {mega(disk.room)}"
        raise ConfigError(what, key="limits.disk_bytes", fix=LESS_DISK)


def disk_demand(
    run: RunConfig, home: Home, need: Need, data_bytes: int = 0, members: int = 0, of_data: Path | None = None
) -> DiskDemand:
    """Compares what a run takes of the disk with the room there is, for CONTRIBUTORS_USUAL contributors or more.
    data_bytes: of its data; of_data: where that lies, or the run that it is to follow"""
    from p2ptrain.exact.shortage import mega  # noqa: PLC0415
    from p2ptrain.train.memory import CONTRIBUTORS_USUAL, DiskDemand  # noqa: PLC0415

    contributors = min(max(members, len(run.admission.founders), CONTRIBUTORS_USUAL), run.admission.contributors_max)
    terms = home.config.storage.checkpoints_kept, run.agreement.history_rounds, contributors
    of_run = [of_data] if of_data else []  # on both sides, or on neither
    if run.is_sealed:
        of_run += map(home.of_run, (run.id, *home.ancestors(run)))  # which make room for it once it has a state
    used = sum(file.st_blocks * 512 for directory in of_run for _, file in below(directory))
    free = shutil.disk_usage(nearest_existing(home.directory)).free
    frozen = run.adapt.base_bytes or need.base
    if run.adapt.base:
        bases = below(home.bases)
        used += sum(file.st_blocks * 512 for path, file in bases if path.name.startswith(run.adapt.base))
    formula = need.disk_formula(*terms) + (f", {mega(data_bytes)} of data for a round" if data_bytes else "")
    formula += f", frozen weights of {mega(frozen)}" if frozen else ""
    return DiskDemand(need.disk(*terms) + data_bytes + frozen, used, free, home.config.limits.disk_bytes, formula)


# -- The machine ------------------------------------------------------------------------------------


def is_on_battery() -> bool:
    """Whether the machine runs on battery. If it has none, or cannot tell, it counts as plugged in."""
    try:
        battery = psutil.sensors_battery()
    except (OSError, ValueError, AttributeError):  # the kernel's files exist but cannot be read
        return False
    return battery is not None and battery.power_plugged is False


def resident_bytes() -> int:
    total = int((me := psutil.Process()).memory_info().rss)
    for process in me.children(recursive=True):
        with suppress(psutil.Error):  # the process has just ended
            memory = process.memory_info()
            total += int(memory.rss - getattr(memory, "shared", 0))  # what ranks share is counted once
    return total


def be_nice(nice: int) -> None:
    """Raises this process's niceness, never lowers it. Call it first: threads and child processes inherit it."""
    if nice > os.getpriority(os.PRIO_PROCESS, 0):
        os.setpriority(os.PRIO_PROCESS, 0, nice)


class Pauses:
    """The reasons why the node must not start another training. The core and the peers only see a slow node."""

    def __init__(self) -> None:
        self._reasons: dict[Code, Complaint] = {}
        self._are_over = asyncio.Event()  # set while there is no reason to pause
        self._are_over.set()

    def __contains__(self, code: Code) -> bool:
        return code in self._reasons

    def __iter__(self) -> Iterator[Complaint]:
        return iter([*self._reasons.values()])

    def __bool__(self) -> bool:
        return bool(self._reasons)

    def begin(self, why: Complaint) -> None:
        self._reasons[why.code] = why
        self._are_over.clear()

    def end(self, code: Code) -> None:
        """Removes this reason; training resumes when none is left."""
        self._reasons.pop(code, None)
        if not self._reasons:
            self._are_over.set()

    async def are_over(self) -> None:
        await self._are_over.wait()


class MachineLimits:
    """Applies the owner's limits: looks at the machine periodically, and pauses and resumes training."""

    def __init__(
        self,
        limits: ChangeableLimits,
        pauses: Pauses,
        worker: Worker,
        clock: Callable[[], datetime] = datetime.now,
        battery: Callable[[], bool] = is_on_battery,
        resident: Callable[[], int] = resident_bytes,
        gpu: Callable[[], bool] = lambda: False,
    ) -> None:
        self.over_memory: Complaint | None = None
        self._pauses, self._worker = pauses, worker
        self._clock, self._battery, self._resident, self._gpu = clock, battery, resident, gpu
        self._limits = Limits(**{name: getattr(limits, name) for name in ChangeableLimits.model_fields})
        worker.set_percent(limits.device_percent)
        worker.set_k_max(limits.k_max)

    @property
    def limits(self) -> Limits:
        """The limits in force, with the worker's threads."""
        return self._limits.model_copy(update={"threads": self._worker.threads})

    def change(self, order: dict[str, Any]) -> None:
        """Applies an order of `p2ptrain limit`. Raises ConfigError for an invalid value, and then changes nothing."""
        before, self._limits = self._limits, changed(self._limits, order)
        changes = {key: value for key, value in self._limits if value != getattr(before, key)}
        if not changes:
            return
        self._worker.set_percent(self._limits.device_percent)
        self._worker.set_k_max(self._limits.k_max)
        if "threads" in changes:
            self._worker.set_threads(self._limits.threads)
        log.info("limits: %s", ", ".join(f"{key} = {value!r}" for key, value in changes.items()))
        self.look()

    def look(self) -> None:
        """Pauses or resumes training according to the limits, and checks the memory in use."""
        limits = self.limits
        now = reasons_to_pause(limits, self._clock(), limits.on_battery == "pause" and self._battery(), self._gpu())
        for each in now:  # they show up in `health`; observe/progress.py logs the changes
            self._pauses.begin(each)
        for code in {Code.OUTSIDE_HOURS, Code.ON_BATTERY, Code.GPU_BUSY} - {each.code for each in now}:
            self._pauses.end(code)
        self.over_memory = over_memory(limits, self._resident()) if limits.memory_bytes else None

    async def watch(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(LOOK_SECONDS)
