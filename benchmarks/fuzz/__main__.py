"""Fuzzes every decoder of foreign bytes: `make fuzz SECONDS=60`.

    python -m benchmarks.fuzz [--seconds N] [--seed N] [--only PART] [--corpus FOLDER] [--json FILE] [FILE...]

Inputs are drawn from a seed that is printed: valid ones whose structure is altered, pieces of several, and random
bytes. A decoder may refuse them with its own error, in time and memory in proportion to the input, and may accept one
encoding of a content; anything else is a failure. Its input is written into the corpus, which each run and
tests/hostile/test_fuzz.py try first, so it is a test from then on. FILEs of the corpus are tried alone. Exit status 1
if anything failed.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import mmap
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random

from benchmarks.fuzz import Failure, Tally, Trial, limits
from benchmarks.fuzz.alter import BYTES_MAX, altered
from benchmarks.fuzz.targets import all_targets
from p2ptrain.digest import digest

CORPUS = Path(__file__).parents[2] / "tests" / "corpus"
TURN_SECONDS = 0.1  # of one target, before the next has its turn
POOL_MAX = 256  # inputs that a target's are made from: the seeds, and those that went another way than all before
WEIGHED = 20  # of so many inputs, the memory of one is measured
COLLECTED = 500  # inputs between two collections of garbage
POOL_BYTES_MAX = 2**14  # of each of them but the seeds
LINE_BYTES = 60  # of a file of the corpus
LENGTH_BYTES = 4  # before the last input, in the file that a crash leaves


class Fuzzer:
    """Draws inputs for one target."""

    def __init__(self, trial: Trial, corpus: Path, rng: Random) -> None:
        self.trial, self.corpus, self.rng = trial, corpus / trial.target.name, rng
        self.pool = [*trial.target.seeds, *read_corpus(corpus).get(trial.target.name, {}).values()]
        self._ways: set[str] = set()
        self._kept: set[str] = set()

    def begin(self) -> None:
        """Tries the seeds and the corpus."""
        for data in self.pool:
            self._ways.add(self.trial.run(data, weighs=True))
        self.report()

    def turn(self, seconds: float, note: Callable[[bytes], None]) -> None:
        """Tries inputs for some time, at least one. `note` is told each before it is tried."""
        until = time.monotonic() + seconds
        while True:
            self.step(note)
            if time.monotonic() >= until:
                break
        self.report()

    def step(self, note: Callable[[bytes], None] = lambda data: None) -> None:
        data = altered(self.trial.target.kind, self.rng.choice(self.pool), self.pool, self.rng)
        note(data)
        way = self.trial.run(data, weighs=self.trial.tally.inputs % WEIGHED == 0)
        if self.trial.tally.inputs % COLLECTED == 0:
            gc.collect(0)  # of what was made since the last time
        if len(data) > POOL_BYTES_MAX:
            return
        if way not in self._ways and len(self._ways) < POOL_MAX:
            self._ways.add(way)
            self.pool.append(data)
        elif way == "accepted" and self.rng.random() < 0.05:
            self._replace(data)

    def _replace(self, data: bytes) -> None:
        """Goes on from an accepted input, in place of an earlier one that is no seed."""
        seeds = len(self.trial.target.seeds)
        if len(self.pool) < POOL_MAX:
            self.pool.append(data)
        elif len(self.pool) > seeds:
            self.pool[self.rng.randrange(seeds, len(self.pool))] = data

    def report(self) -> None:
        """Prints new failures and keeps their inputs."""
        for failure in self.trial.tally.failures:
            if failure.key not in self._kept:
                self._kept.add(failure.key)
                path = write_corpus(self.corpus, failure)
                print(f"FAILED {failure.target}: {failure.what}\n{failure.details}input in {path}\n", flush=True)


def write_corpus(folder: Path, failure: Failure) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{digest('fuzz', failure.data).hex()[:16]}.hex"
    text = failure.data.hex()
    lines = [text[at : at + 2 * LINE_BYTES] for at in range(0, len(text), 2 * LINE_BYTES)]
    path.write_text("\n".join(lines) + "\n")
    return path


def read_corpus(folder: Path) -> dict[str, dict[str, bytes]]:
    """Returns the inputs in the corpus, by target and the file's name."""
    found: dict[str, dict[str, bytes]] = {}
    for path in sorted(folder.glob("*/*.hex")):
        found.setdefault(path.parent.name, {})[path.name] = bytes.fromhex(path.read_text())
    return found


def fuzz(trials: Sequence[Trial], seconds: float, seed: int, corpus: Path, last: Path) -> int:
    """Gives each target its turns until the time is up; returns the number of inputs that failed."""
    fuzzers = [Fuzzer(trial, corpus, Random(f"{seed} {trial.target.name}")) for trial in trials]  # noqa: S311
    with noted_in(last) as note, limits():
        for fuzzer in fuzzers:
            fuzzer.begin()
        until, turn = time.monotonic() + seconds, 0
        while time.monotonic() < until:
            for fuzzer in fuzzers:
                if turn % fuzzer.trial.target.every == 0 and time.monotonic() < until:
                    fuzzer.turn(min(TURN_SECONDS, max(0.0, until - time.monotonic())), note)
            turn += 1
    return sum(trial.tally.failed for trial in trials)


@contextmanager
def noted_in(path: Path) -> Iterator[Callable[[bytes], None]]:
    """Keeps the last input in a file, in case that a library takes the process down; it is removed at the end."""
    path.write_bytes(bytes(LENGTH_BYTES + BYTES_MAX))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as last:

        def note(data: bytes) -> None:
            last[: LENGTH_BYTES + len(data)] = len(data).to_bytes(LENGTH_BYTES, "little") + data

        yield note
    path.unlink()


def table(tallies: dict[str, Tally]) -> str:
    lines = [f"{'target':28}{'inputs':>10}{'accepted':>10}{'us a KB':>10}{'worst':>10}{'memory':>8}   slowest"]
    for name, each in tallies.items():
        mean = 1e6 * each.seconds / max(1.0, each.bytes / 1_024)
        seconds, size = each.slowest
        lines.append(
            f"{name:28}{each.inputs:10,}{each.accepted:10,}{mean:10,.0f}{1e6 * each.worst_seconds_a_kb:10,.0f}"
            f"{each.worst_memory_a_byte:8.1f}   {1e3 * seconds:.2f} ms for {size:,} bytes"
        )
    inputs, accepted = (sum(getattr(each, name) for each in tallies.values()) for name in ("inputs", "accepted"))
    worst = max(each.worst_seconds_a_kb for each in tallies.values())
    memory = max(each.worst_memory_a_byte for each in tallies.values())
    return "\n".join([*lines, f"{'all':28}{inputs:10,}{accepted:10,}{'':10}{1e6 * worst:10,.0f}{memory:8.1f}"])


def figures(tallies: dict[str, Tally], seed: int) -> dict[str, object]:
    of_each = {
        name: {
            "inputs": each.inputs,
            "accepted": each.accepted,
            "worst_us_a_kb": round(1e6 * each.worst_seconds_a_kb, 1),
            "worst_memory_a_byte": round(each.worst_memory_a_byte, 2),
            "slowest_ms": round(1e3 * each.slowest[0], 3),
            "slowest_bytes": each.slowest[1],
            "failures": each.failed,
        }
        for name, each in tallies.items()
    }
    return {"seed": seed, "inputs": sum(each.inputs for each in tallies.values()), "targets": of_each}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**31)
    parser.add_argument("--only", default="", help="targets whose names begin so")
    parser.add_argument("--corpus", type=Path, default=CORPUS)
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("files", nargs="*", type=Path, help="files of the corpus that are tried alone")
    arguments = parser.parse_args()
    faulthandler.enable()
    last = Path(tempfile.gettempdir()) / f"fuzz-last-input-{arguments.seed}"
    with all_targets() as targets:
        chosen = [Trial(each) for each in targets if each.name.startswith(arguments.only)]
        if arguments.files:
            return _tried_alone(chosen, arguments.files)
        print(f"seed {arguments.seed}, {len(chosen)} targets; a crash leaves its input in {last}", flush=True)
        failures = fuzz(chosen, arguments.seconds, arguments.seed, arguments.corpus, last)
    tallies = {trial.target.name: trial.tally for trial in chosen}
    print(table(tallies))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures(tallies, arguments.seed), indent=1) + "\n")
    return failures > 0


def _tried_alone(trials: Sequence[Trial], files: Sequence[Path]) -> int:
    by_name = {trial.target.name: trial for trial in trials}
    with limits():
        for path in files:
            print(f"{path}: {by_name[path.parent.name].run(bytes.fromhex(path.read_text()), weighs=True)}")
    failures = [failure for trial in trials for failure in trial.tally.failures]
    for each in failures:
        print(f"FAILED {each.target}: {each.what}\n{each.details}")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
