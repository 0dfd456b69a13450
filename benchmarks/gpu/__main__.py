"""All figures of a GPU, in under nine minutes, as one JSON file: `make gpu`; `make gpu SMALL=1` on a CPU.

    python -m benchmarks.gpu [--small] [--device NAME] [--only PART] [--json FILE] [--seconds N]

    tests     the tests marked gpu: golden roots, aggregate, trainer, memory
    swarm     trainers on a CPU and on the device, one swarm: the same bits over 200 rounds, for each recipe
    codec     encode, pack, check, apply and root: time and memory, on the device and on a CPU, and equal roots
    steps     tokens a second and model FLOP utilisation of AdamW, distro and local; what a device's settings change
    learning  eight peers on real text for as long as is left: loss over time and bytes

Each part is a process of its own with a limit of time; one that fails, hangs or takes the device down leaves the others
theirs, and the figures that it had. With --only, the file keeps the parts that it had, and those that are run share all
of the time. Exit status 1 if a part failed. On a machine without a network, see docs/how-to/on-a-gpu-server.md.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import write_json

ROOT = Path(__file__).parents[2]
# Seconds that each may take, and at a tiny size. The last one gets all that the others leave, and this at least.
LIMITS = {"tests": (90, 100), "swarm": (80, 60), "codec": (90, 30), "steps": (200, 90), "learning": (60, 25)}
LAST = "learning"
TOTAL_SECONDS, SMALL_SECONDS = 500.0, 170.0  # before them this program imports torch
START_SECONDS = 12.0  # of a part, to import torch and wake the device: not for what it measures
MACHINE_SECONDS = 40.0


def command(name: str, out: Path, device: str, seconds: float, small: bool) -> list[str]:
    """Returns the command that starts a part."""
    words = [sys.executable, "-m", f"benchmarks.gpu.{name}", "--out", str(out), "--device", device]
    return [*words, "--seconds", f"{max(1.0, seconds - START_SECONDS):.0f}", *(["--small"] if small else [])]


def run_part(name: str, device: str, seconds: float, small: bool, folder: Path) -> dict[str, Any]:
    """Runs a part for at most its time limit, ends it with all its children, and reads its report."""
    out, start = folder / f"{name}.json", time.monotonic()
    print(f"== {name}, at most {seconds:.0f} s", flush=True)
    words = command(name, out, device, seconds, small)
    process = subprocess.Popen(words, cwd=ROOT, start_new_session=True)  # noqa: S603  # a part of this program
    try:
        status: int | str = process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        status = "out of time"
    finally:
        with suppress(ProcessLookupError):  # nothing of it is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    figures = {}
    if out.exists():
        try:
            figures = json.loads(out.read_text())
        except ValueError as error:
            status = f"{status}, and its figures cannot be read: {error}"
    return {"status": status, "seconds": round(time.monotonic() - start, 1), "figures": figures}


def limit_of(name: str, left: float, small: bool, todo: list[str] | None) -> float:
    """Returns the seconds for the next part; `todo` are the requested parts that are left, if not all"""
    if todo is not None:
        return max(1.0, left / len(todo))
    if name == LAST:
        return max(1.0, left)
    return max(1.0, min(LIMITS[name][small], left - LIMITS[LAST][small]))


def earlier_parts(path: Path) -> dict[str, Any]:
    """Returns the parts already in the file, each with the machine it was measured on."""
    try:
        found = json.loads(path.read_text())
        return {name: {key: found[key] for key in ("machine", "small")} | part for name, part in found["parts"].items()}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        sys.exit(f"{path} is no file of figures ({error!r}): nothing can be added to it; name another, or remove it")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--small", action="store_true", help="tiny sizes on a CPU, to see that all of it works")
    parser.add_argument("--device", help="cuda, or cpu where there is none")
    parser.add_argument("--only", action="append", choices=list(LIMITS), help="this part alone; may be repeated")
    parser.add_argument("--json", type=Path, help="where the figures go: out/gpu.json, or out/gpu-small.json")
    parser.add_argument("--seconds", type=float, help="for all parts together")
    arguments = parser.parse_args()
    small, path = arguments.small, arguments.json or Path(f"out/gpu{'-small' if arguments.small else ''}.json")
    device = arguments.device or ("cpu" if small or not torch.cuda.is_available() else "cuda")
    if device == "cpu" and not small:
        sys.exit("no CUDA device is here: `make gpu SMALL=1` does the same at a tiny size on a CPU")
    names = list(dict.fromkeys(arguments.only or LIMITS))
    kept = earlier_parts(path) if arguments.only else {}
    total = arguments.seconds or (SMALL_SECONDS if small else TOTAL_SECONDS)
    start, results = time.monotonic(), {}
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        machine = run_part("machine", device, MACHINE_SECONDS, small, Path(folder))
        told = {"machine": machine["figures"] or machine, "small": small, "parts": kept}
        for place, name in enumerate(names):
            left = total - (time.monotonic() - start)
            limit = limit_of(name, left, small, names[place:] if arguments.only else None)
            results[name] = run_part(name, device, limit, small, Path(folder))
            told["parts"] = {each: (kept | results)[each] for each in LIMITS if each in kept or each in results}
            write_json(path, told)
    for name, result in results.items():
        print(f"{name:10} {'ok' if result['status'] == 0 else result['status']} in {result['seconds']} s")
    print(f"{time.monotonic() - start:.0f} s; the figures are in {path}")
    sys.exit(any(result["status"] != 0 for result in results.values()))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the part that runs is ended as well
    main()
