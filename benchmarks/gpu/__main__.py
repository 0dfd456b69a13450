"""Everything that a GPU has to tell, in under nine minutes, as one JSON file: `make gpu`; `make gpu SMALL=1` on a CPU.

    python -m benchmarks.gpu [--small] [--device NAME] [--only PART] [--json FILE] [--seconds N]

    tests     the tests marked gpu: golden roots, aggregate, trainer, memory
    swarm     trainers on a CPU and on the device, one swarm: the same bits over 200 rounds, for each recipe
    codec     encode, pack, check, apply and root: time and memory, on the device and on a CPU, and equal roots
    steps     tokens a second and model FLOP utilisation of AdamW, distro and local; what a device's settings change
    learning  eight peers on real text for as long as is left: loss over time and bytes

Each part is a process of its own with a limit of time; one that fails, hangs or takes the device down leaves the others
theirs, and the figures that it had. Exit status 1 if a part failed. On a machine without a network, see
docs/how-to/on-a-gpu-server.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
# Seconds that each may take, and at a tiny size. What the others leave of TOTAL, learning gets.
LIMITS = {"tests": (75, 100), "swarm": (130, 40), "codec": (110, 30), "steps": (110, 90), "learning": (0, 40)}
TOTAL_SECONDS, SMALL_SECONDS = 520.0, 175.0
START_SECONDS = 12.0  # of a part, to import torch and wake the device: not for what it measures
LEARNING_LEAST_SECONDS = 30.0


def machine(device: str) -> dict[str, Any]:
    """What the figures were taken on."""
    found: dict[str, Any] = {
        "device": device,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
    }
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        found |= {"gpu": properties.name, "gpu_memory_gb": round(properties.total_memory / 1e9, 1)}
    return found


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def run_part(name: str, device: str, seconds: float, small: bool, folder: Path) -> dict[str, Any]:
    """Start it, wait for as long as it may take, and read what it has told."""
    out, start = folder / f"{name}.json", time.monotonic()
    command = [sys.executable, "-m", f"benchmarks.gpu.{name}", "--out", str(out), "--device", device]
    command += ["--seconds", f"{max(1.0, seconds - START_SECONDS):.0f}", *(["--small"] if small else [])]
    print(f"== {name}, at most {seconds:.0f} s", flush=True)
    try:
        done = subprocess.run(command, cwd=ROOT, check=False, timeout=seconds)  # noqa: S603  # a part of this program
        status: int | str = done.returncode
    except subprocess.TimeoutExpired:
        status = "out of time"
    figures = json.loads(out.read_text()) if out.exists() else {}
    return {"status": status, "seconds": round(time.monotonic() - start, 1), "figures": figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--small", action="store_true", help="tiny sizes on a CPU, to see that all of it works")
    parser.add_argument("--device", help="cuda, or cpu where there is none")
    parser.add_argument("--only", action="append", choices=list(LIMITS), help="this part alone; may be repeated")
    parser.add_argument("--json", type=Path, default=Path("out/gpu.json"), help="where the figures go")
    parser.add_argument("--seconds", type=float, help="for all parts together")
    arguments = parser.parse_args()
    device = arguments.device or ("cpu" if arguments.small or not torch.cuda.is_available() else "cuda")
    if device == "cpu" and not arguments.small:
        sys.exit("no CUDA device is here: `make gpu SMALL=1` does the same at a tiny size on a CPU")
    total = arguments.seconds or (SMALL_SECONDS if arguments.small else TOTAL_SECONDS)
    start, results = time.monotonic(), {}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.only or LIMITS:
            left = total - (time.monotonic() - start)
            limit = LIMITS[name][arguments.small] or max(LEARNING_LEAST_SECONDS, left)
            results[name] = run_part(name, device, min(limit, left) if left > 0 else 1.0, arguments.small, Path(folder))
            told = {"machine": machine(device), "small": arguments.small, "parts": results}
            arguments.json.write_text(json.dumps(told, indent=1) + "\n")
    for name, result in results.items():
        print(f"{name:10} {'ok' if result['status'] == 0 else result['status']} in {result['seconds']} s")
    print(f"{time.monotonic() - start:.0f} s; the figures are in {arguments.json}")
    sys.exit(any(result["status"] != 0 for result in results.values()))


if __name__ == "__main__":
    main()
