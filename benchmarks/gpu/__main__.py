"""All figures of a GPU, in under nine minutes, as one JSON file: `make gpu`; `make gpu SMALL=1` on a CPU.

    python -m benchmarks.gpu [--small] [--device NAME] [--only PART] [--json FILE] [--seconds N]

    model     what a card would take for a round, from what the round asks of it: with --small, or by --only
    programs  compiles what the other parts run on the card, in many processes
    tests     the tests marked gpu: golden roots, aggregate, trainer, memory
    swarm     trainers on a CPU and on the device, one swarm: the same bits over many rounds, for each recipe
    steps     tokens a second and model FLOP utilisation of AdamW, distro and local, compiled; what the swarm costs
    node      two real daemons on the device over loopback: how much of the time they train, the exchange, their roots
    codec     encode, pack, check, apply and root: time and memory, on the device and on a CPU, and equal roots
    learning  eight peers on real text for as long as is left: loss over time and bytes

Each part is a process of its own with a limit of time; one that fails, hangs or takes the device down leaves the others
theirs, and the figures that it had. Of less time, each has its share. `tests` and `swarm`, which time nothing,
run side by side on a card. With --only, the file keeps the parts that it had, and those that are run share all of the
time. Exit status 1 if a part failed. On a machine without a network, see docs/how-to/on-a-gpu-server.md.
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
LIMITS = {
    "model": (0, 30),
    "programs": (60, 25),
    "tests": (80, 100),
    "swarm": (80, 40),
    "steps": (170, 60),
    "node": (100, 60),
    "codec": (40, 30),
    "learning": (40, 20),
}
LAST = "learning"
BESIDE = {"tests": "swarm"}  # what runs at the same time on a card
TOTAL_SECONDS, SMALL_SECONDS = 500.0, 170.0  # before them this program imports torch
START_SECONDS = 12.0, 4.0  # of a part, to import torch and wake the device: not for what it measures
MACHINE_SECONDS = 40.0


def command(name: str, out: Path, device: str, seconds: float, small: bool) -> list[str]:
    """Returns the command that starts a part."""
    words = [sys.executable, "-m", f"benchmarks.gpu.{name}", "--out", str(out), "--device", device]
    return [*words, "--seconds", f"{max(1.0, seconds - START_SECONDS[small]):.0f}", *(["--small"] if small else [])]


class Part:
    """A part that runs, in a process of its own."""

    def __init__(self, name: str, device: str, seconds: float, small: bool, folder: Path) -> None:
        self.out, self.start = folder / f"{name}.json", time.monotonic()
        self.ends_at = self.start + seconds
        print(f"== {name}, at most {seconds:.0f} s", flush=True)
        words = command(name, self.out, device, seconds, small)
        self.process = subprocess.Popen(words, cwd=ROOT, start_new_session=True)  # noqa: S603  # a part of this program

    def result(self) -> dict[str, Any]:
        """Waits until the time is over, ends the part with all its children, and reads its report."""
        try:
            status: int | str = self.process.wait(timeout=max(0.0, self.ends_at - time.monotonic()))
        except subprocess.TimeoutExpired:
            status = "out of time"
        finally:
            self.end()
        figures = {}
        if self.out.exists():
            try:
                figures = json.loads(self.out.read_text())
            except ValueError as error:
                status = f"{status}, and its figures cannot be read: {error}"
        return {"status": status, "seconds": round(time.monotonic() - self.start, 1), "figures": figures}

    def end(self) -> None:
        with suppress(ProcessLookupError):  # nothing of it is left
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def run_parts(names: list[str], device: str, seconds: float, small: bool, folder: Path) -> dict[str, dict[str, Any]]:
    """Runs parts at the same time, each for at most this time."""
    parts = {name: Part(name, device, seconds, small, folder) for name in names}
    try:
        return {name: part.result() for name, part in parts.items()}
    finally:
        for part in parts.values():
            part.end()


def limit_of(name: str, left: float, small: bool, todo: list[str] | None, share: float = 1.0) -> float:
    """Returns the seconds for the next part.

    todo: the requested parts that are left, if not all; share: how much of their usual time all parts have
    """
    if todo is not None:
        return max(1.0, left / len(todo))
    if name == LAST:
        return max(1.0, left)
    return max(1.0, min(share * LIMITS[name][small], left - share * LIMITS[LAST][small]))


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
    names = list(dict.fromkeys(arguments.only or (name for name, limits in LIMITS.items() if limits[small])))
    kept = earlier_parts(path) if arguments.only else {}
    total = arguments.seconds or (SMALL_SECONDS if small else TOTAL_SECONDS)
    start, results = time.monotonic(), dict[str, dict[str, Any]]()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        machine = run_parts(["machine"], device, MACHINE_SECONDS, small, Path(folder))["machine"]
        told = {"machine": machine["figures"] or machine, "small": small, "parts": kept}
        share = min(1.0, total / (SMALL_SECONDS if small else TOTAL_SECONDS))
        for place, name in enumerate(names):
            if name in results:
                continue
            left = total - (time.monotonic() - start)
            limit = limit_of(name, left, small, names[place:] if arguments.only else None, share)
            beside = [BESIDE[name]] if not small and name in BESIDE and BESIDE[name] in names[place:] else []
            results |= run_parts([name, *beside], device, limit, small, Path(folder))
            told["parts"] = {each: (kept | results)[each] for each in LIMITS if each in kept or each in results}
            write_json(path, told)
    for name, result in results.items():
        print(f"{name:10} {'ok' if result['status'] == 0 else result['status']} in {result['seconds']} s")
    print(f"{time.monotonic() - start:.0f} s; the figures are in {path}")
    sys.exit(any(result["status"] != 0 for result in results.values()))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the part that runs is ended as well
    main()
