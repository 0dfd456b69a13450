"""Shared by all parts of `make gpu`: models, the report, and measurements of a device's time and memory."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.compiling import compiled
from p2ptrain.config import ModelConfig

GPT2_VOCABULARY = 50_304  # GPT-2's, rounded up to a multiple of 64
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"dim": 64, "layers": 2, "heads": 2, "kv_heads": 1, "ffn_dim": 192, "sequence_length": 64},
    "1m": {"preset": "1m"},
    "10m": {"preset": "10m"},
    "124m": {"dim": 768, "layers": 12, "heads": 12, "kv_heads": 12, "ffn_dim": 2_048, "sequence_length": 1_024},
    "350m": {"dim": 1_024, "layers": 24, "heads": 16, "kv_heads": 16, "ffn_dim": 2_752, "sequence_length": 1_024},
    "1b": {"preset": "1b"},
}


def model_config(name: str, **changes: int) -> ModelConfig:
    return ModelConfig.model_validate(MODELS[name] | changes)


def write_json(path: Path, value: Any) -> None:
    """Writes a file atomically, because the process may be killed at any moment."""
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(value, indent=1) + "\n")
    new.replace(path)


class Report:
    """A part's figures, each written to disk at once, so that a part that is killed early has reported them."""

    def __init__(self, path: Path, device: str, *, small: bool, seconds: float) -> None:
        self.path, self.device, self.small = path, torch.device(device), small
        self.figures: dict[str, Any] = {}
        self._ends_at = time.monotonic() + seconds

    @property
    def seconds_left(self) -> float:
        return self._ends_at - time.monotonic()

    def add(self, name: str, figure: Any) -> None:
        self.figures[name] = figure
        write_json(self.path, self.figures)
        print(f"{name}: {json.dumps(figure)}", flush=True)


def run_part(description: str, part: Callable[[Report], None]) -> None:
    """Runs a part, from the launcher or by hand: `python -m benchmarks.gpu.codec --device cpu --small`."""
    parser = argparse.ArgumentParser(description=description.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("out/gpu-part.json"), help="where its figures go")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that it works")
    parser.add_argument("--seconds", type=float, default=300.0, help="what can be left out ends in time")
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    report, counts = (
        Report(arguments.out, arguments.device, small=arguments.small, seconds=arguments.seconds),
        compiled(),
    )
    try:
        part(report)
    finally:
        if counts.programs or counts.kept:
            report.add("compiling", counts.figures())


# ---------------------------------------------------------------------------------------------------
# Time and memory


def wait_for(device: torch.device) -> None:
    """Waits until a device has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], Any], device: torch.device) -> float:
    wait_for(device)
    start = time.perf_counter()
    work()
    wait_for(device)
    return time.perf_counter() - start


def median_ms(work: Callable[[], Any], device: torch.device, turns: int, *, warm_up: bool = True) -> float:
    """Returns the median time, after one warm-up turn."""
    if warm_up:
        work()
    return round(1e3 * statistics.median(seconds_of(work, device) for _ in range(turns)), 3)


class Peak:
    """The peak of memory since it was created: torch's allocations on a GPU, else the process's memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        gc.collect()  # what has gone in a circle would count as taken before
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        self.before = self._most() if device.type == "cuda" or _forget_the_most() else None

    def _most(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))

    @property
    def taken_mb(self) -> float | None:
        """Returns the memory used, in MB; None if the system does not report it."""
        return None if self.before is None else round((self._most() - self.before) / 1e6, 1)


def _forget_the_most() -> bool:
    """Resets the process's peak; False if the system does not support it, as in some containers."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def ratio(one: float | None, other: float | None) -> float | None:
    """Returns the ratio; None if one side is missing."""
    return round(one / other, 4) if one is not None and other else None


def spread(values: Sequence[float]) -> list[float]:
    """Returns the minimum, median and maximum."""
    return [round(each, 4) for each in (min(values), statistics.median(values), max(values))]
