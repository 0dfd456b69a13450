"""hivemind.Optimizer on the line, model, data and minutes of wan.py: what it has learned, and what that cost in bytes.

    OMP_NUM_THREADS=1 python benchmarks/against_hivemind.py [--nodes 4] [--minutes 2 5] [--line dsl | --rate 20 ...]
        [--modes local sync] [--codecs fp16 8bit] [--inner muon adamw] [--rates RATE ...] [--periods BATCHES ...]
        [--matchmaking 3] [--run FILE] [--keep] [--json FILE]

`sync` averages gradients and takes a step with their mean, after `period` batches of each peer. `local` takes a step
with each batch, and averages the weights after `period` of them in the background (delay_state_averaging). Both have
our inner optimizers (torch_inner.py), first weights and shards of the data. Every combination runs for the longest of
`--minutes`; one that --json has is not run again, so a comparison that was broken off goes on.

Peers have different weights between two rounds. The loss told is the lowest of those of all peers and of the mean of
their weights. hivemind's 8-bit codec does not run with every NumPy: where it fails, its error is told instead. In
version 1.1.12 a step waits for the round before it even with delay_state_averaging, so that a round hides only behind
one batch, and matchmaking behind those before it (--matchmaking, seconds).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np
import torch
from daemon_logs import new_directory
from relay import Hosts, address, hosts_on, lines_of
from wan import add_options, held_out_loss, load_run, parsed, tell, traffic

from p2ptrain.config import RunConfig
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.models.built_in import Transformer
from p2ptrain.train.begin import begin

PEER = Path(__file__).with_name("hivemind_peer.py")
START_SECONDS = 120.0  # until a peer tells its address
END_SECONDS = 60.0  # beyond the last minute: an averaging round under way has to end
LOOK_SECONDS = 0.5
RATES = {"muon": (0.005, 0.01, 0.02), "adamw": (0.0015, 0.003, 0.006)}
PERIODS = {"local": (5, 10, 30), "sync": (1, 3, 10)}
TRY_CODEC = (
    "import sys, torch; from hivemind.compression import CompressionInfo; from hivemind_peer import CODECS\n"
    "tensor, codec = torch.linspace(-1, 1, 1000), CODECS[sys.argv[1]]()\n"
    "codec.extract(codec.compress(tensor, CompressionInfo.from_tensor(tensor)))"
)


@dataclass(frozen=True)
class Variant:
    """One way to train with hivemind."""

    mode: str  # sync, local
    codec: str  # fp16, 8bit
    inner: str  # muon, adamw
    rate: float
    period: int  # batches of each peer between two rounds
    matchmaking: float  # seconds

    def __str__(self) -> str:
        return f"hivemind {self.mode}, {self.codec}, {self.inner} at {self.rate:g}, every {self.period} batches"


class Done:
    """The runs that are done, in a file."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.runs: list[dict[str, Any]] = json.loads(path.read_text()) if path and path.exists() else []

    def find(self, wanted: dict[str, Any]) -> dict[str, Any] | None:
        return next((one for one in self.runs if all(one.get(key) == value for key, value in wanted.items())), None)

    def add(self, run: dict[str, Any]) -> None:
        self.runs.append(run)
        if self.path:
            partial = self.path.with_suffix(".partial")
            partial.write_text(json.dumps(self.runs, indent=1) + "\n")
            partial.replace(self.path)


class Peers:
    """Processes that train with hivemind, each on a host of its own."""

    def __init__(self, hosts: Hosts, directory: Path, settings: dict[str, Any], program: Path = PEER) -> None:
        self.hosts, self.directory, self.settings, self.program = hosts, directory, settings, program
        self.size = len(hosts.namespaces)
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, began: float) -> None:
        """Starts the first, and then the others, who are told where it is."""
        self._start(0, [], began)
        told = self.directory / "0.out"
        until = monotonic() + START_SECONDS
        while not told.read_text().endswith("\n"):
            assert monotonic() < until and self.processes[0].poll() is None, self.log(0)
            sleep(LOOK_SECONDS)
        for place in range(1, self.size):
            self._start(place, json.loads(told.read_text()), began)

    def _start(self, place: int, first: list[str], began: float) -> None:
        own = {"place": place, "peers": self.size, "address": address(place), "first": first, "began": began}
        command = [sys.executable, str(self.program), json.dumps(self.settings | own | {"out": str(self.directory)})]
        with (self.directory / f"{place}.out").open("wb") as out, (self.directory / f"{place}.log").open("wb") as log:
            process = subprocess.Popen(  # noqa: S603
                [*self.hosts.prefix(place), *command], stdin=subprocess.DEVNULL, stdout=out, stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True,
            )  # fmt: skip
        self.processes.append(process)

    def log(self, place: int) -> str:
        return (self.directory / f"{place}.log").read_text(errors="replace")[-2_000:]

    def look(self) -> None:
        for place, process in enumerate(self.processes):
            assert not process.poll(), f"peer {place} has ended:\n{self.log(place)}"

    def stop(self) -> None:
        """Ends all, with the processes that hivemind started for them."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self.processes:
                try:
                    os.killpg(process.pid, number)
                except ProcessLookupError:
                    continue
                try:
                    process.wait(5.0)
                except subprocess.TimeoutExpired:
                    continue

    def weights(self, number: int) -> list[np.ndarray[Any, Any]]:
        """Returns the weights that peers had after a minute; one that had not started by then has none."""
        paths = [self.directory / f"{place}.{number}.npy" for place in range(self.size)]
        return [np.load(path) for path in paths if path.exists()]


def measure(hosts: Hosts, run: RunConfig, variant: Variant, dataset: Path, minutes: list[float], keep: bool) -> Any:
    """Trains in one way, and returns what there is to tell after each of the minutes."""
    seconds = sorted(60 * each for each in minutes)
    settings = asdict(variant) | {
        "model": run.model.model_dump(mode="json"),
        "recipe": run.recipe.model_dump(mode="json"),
        "dataset": str(dataset),
        "manifest": run.data.manifest,
        "seconds": seconds,
    }
    with new_directory(keep) as directory:
        peers, began, marks = Peers(hosts, directory, settings), monotonic(), []
        try:
            peers.start(began)
            for minute, second in zip(sorted(minutes), seconds, strict=True):
                while monotonic() < began + second:
                    sleep(LOOK_SECONDS)
                    peers.look()
                marks.append({"minutes": minute, "seconds": monotonic() - began} | traffic(hosts))
            until = monotonic() + END_SECONDS
            while any(process.poll() is None for process in peers.processes) and monotonic() < until:
                sleep(LOOK_SECONDS)
            relay = hosts.counts()
        finally:
            peers.stop()
        told = [json.loads(path.read_text()) if path.exists() else None for path in _told(directory, peers.size)]
        data = TokenDataset.open(dataset, run.data.manifest)
        for number, mark in enumerate(marks):
            found = peers.weights(number)
            assert found, f"no peer had started after {mark['minutes']:g} minutes:\n{peers.log(0)}"
            losses = [loss_of(each, run, data) for each in (*found, np.mean(found, axis=0))]
            mark |= {"losses": losses[:-1], "loss_of_mean": losses[-1], "loss": min(losses)}
    return {"system": str(variant), "marks": marks, "peers": told, "relay": relay, "load": os.getloadavg()}


def _told(directory: Path, size: int) -> Iterator[Path]:
    return (directory / f"{place}.json" for place in range(size))


def loss_of(weights: np.ndarray[Any, Any], run: RunConfig, dataset: TokenDataset) -> float:
    model = Transformer(run.model)
    torch.nn.utils.vector_to_parameters(torch.from_numpy(weights), model.parameters())
    return held_out_loss(model, dataset, run.model.sequence_length)


def why_codec_fails(codec: str) -> str:
    """Returns hivemind's error with this codec; empty if it works."""
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", TRY_CODEC, codec], cwd=PEER.parent, capture_output=True, text=True, check=False
    )
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--modes", nargs="+", choices=("local", "sync"), default=["local", "sync"])
    parser.add_argument("--codecs", nargs="+", choices=("fp16", "8bit"), default=["fp16", "8bit"])
    parser.add_argument("--inner", nargs="+", choices=("muon", "adamw"), default=["muon", "adamw"])
    parser.add_argument("--rates", nargs="+", type=float, help=f"by default {RATES}")
    parser.add_argument("--periods", nargs="+", type=int, help=f"by default {PERIODS}")
    parser.add_argument(
        "--matchmaking", type=float, default=3.0, metavar="S", help="hivemind's advice is 3 to 5 at least"
    )
    chosen = parsed(parser)
    lines, (_, run) = lines_of(chosen), load_run(chosen.run)
    reasons = {codec: why_codec_fails(codec) for codec in chosen.codecs}
    for codec, reason in reasons.items():
        if reason:
            print(f"hivemind's {codec} codec does not work with NumPy {np.__version__}: {reason}")
    done = Done(chosen.json)
    codecs = [codec for codec, reason in reasons.items() if not reason]
    variants = [
        Variant(mode, codec, inner, rate, period, chosen.matchmaking)
        for mode, codec, inner in product(chosen.modes, codecs, chosen.inner)
        for rate, period in product(chosen.rates or RATES[inner], chosen.periods or PERIODS[mode])
    ]
    with tempfile.TemporaryDirectory(prefix="p2ptrain-hivemind-data-") as folder:
        dataset = Path(folder) / "data"
        run = begin(run, dataset, ["0" * 64]).run  # seals it with our data; nobody joins
        for number, variant in enumerate(variants, 1):
            same = {"nodes": chosen.nodes, "lines": [asdict(line) for line in lines], "minutes": sorted(chosen.minutes)}
            same |= {"recipe": run.recipe.model_dump(mode="json"), "model": run.model.model_dump(mode="json")}
            if done.find(asdict(variant) | same) is not None:
                continue
            print(f"[{number}/{len(variants)}] {variant}", flush=True)
            with hosts_on(lines, chosen.nodes) as hosts:
                found = measure(hosts, run, variant, dataset, chosen.minutes, chosen.keep)
            done.add(asdict(variant) | same | found)
            tell(done.runs[-1])
    for each in sorted(done.runs, key=lambda each: each["marks"][-1]["loss"]):
        print(
            "  ".join(f"{mark['minutes']:g} min {mark['loss']:.3f}" for mark in each["marks"]) + f"  {each['system']}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
