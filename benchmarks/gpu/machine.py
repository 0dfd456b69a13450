"""The machine and the version of the code that the figures were measured with.

A process of its own, like the parts: in the launcher a CUDA context would take memory from them, and break with the
driver.
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib import metadata
from pathlib import Path

import torch

from benchmarks.gpu import Report, run_part

ROOT = Path(__file__).parents[2]
COMMIT = ["git", "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty"]
DRIVER = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]


def processor() -> str | None:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def first_line(command: list[str]) -> str | None:
    """Returns the first line of a program's output; None if it is missing or fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, check=True, timeout=10, capture_output=True, text=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.splitlines()), None)


def main(report: Report) -> None:
    report.add("device", str(report.device))
    report.add("taken_at", time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    report.add("commit", first_line(COMMIT))
    report.add("python", platform.python_version())
    report.add("torch", torch.__version__)
    report.add("cuda", torch.version.cuda)
    for package in ("numpy", "transformers"):
        report.add(package, version(package))
    report.add("processor", processor())
    report.add("cores", len(os.sched_getaffinity(0)))
    if report.device.type == "cuda":
        report.add("driver", first_line(DRIVER))
        properties = torch.cuda.get_device_properties(report.device)
        report.add("gpu", properties.name)
        report.add("gpu_memory_gb", round(properties.total_memory / 1e9, 1))
        report.add("capability", f"{properties.major}.{properties.minor}")


if __name__ == "__main__":
    run_part(__doc__ or "", main)
