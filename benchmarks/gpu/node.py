"""Two real daemons on the device, over loopback: how much of the time they train, what a round costs, equal roots.

Each is `p2ptrain start` or `p2ptrain join`, a process with its own p2pd, DHT and gossip, with a node's own defaults. On
a GPU both share it, so each trains at half its speed, and while one exchanges the other has all of it. The figures are
the nodes' own: status and records of rounds, since both had their seat and had applied two rounds together. Without
p2pd, which hivemind's wheel brings for Linux on x86-64, this part is skipped.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from benchmarks.gpu import MODELS, Report, run_part, spread
from p2ptrain.errors import P2ptrainError
from p2ptrain.net.transport import TransportError
from p2ptrain.node.control import ask

RUN = """\
name = "gpu"
[model]
{model}
[recipe]
name = "local"
{recipe}
[agreement]
stall_seconds = 60
[admission]
probation_rounds = 1
"""
# As many parameters as GPT-2's 124M have: of 256 tokens a model has more layers.
MODEL, MODEL_SMALL = MODELS["124m"] | {"layers": 18}, MODELS["1m"]
RECIPE, RECIPE_SMALL = (
    {"local_steps": 10, "sequences_per_pass": 16, "passes_per_step": 2},
    {"local_steps": 2, "sequences_per_pass": 2},
)
LISTEN = "/ip4/127.0.0.1/tcp/0"
START_SHARE = 0.6  # of the time, for the nodes to start and to find each other
STOP_SECONDS = 6.0
POLL_SECONDS = 0.25
WARM_UP_ROUNDS = 2
ROUNDS_SMALL = 3
TELL_SECONDS = 5.0  # between figures
RECORDS_MAX = 100
LOG_CHARACTERS = 1_500  # of the log of a node that has ended, its end


class NodeEndedError(Exception):
    """A node has ended by itself, or has not come as far as it should have."""


class Node:
    """A daemon, and its last known status."""

    def __init__(self, folder: Path, name: str, device: str, *arguments: str) -> None:
        self.directory, self.log, self.status = folder / name, folder / f"{name}.log", dict[str, Any]()
        own = {"P2PTRAIN_DEVICE__NAME": device, "P2PTRAIN_NETWORK__NAT": "false", "P2PTRAIN_HTTP__PORT": "0"}
        if device == "cpu":
            own |= {"OMP_NUM_THREADS": "1", "P2PTRAIN_DEVICE__THREADS": "1"}
        command = [sys.executable, "-m", "p2ptrain", *arguments, "--data-dir", str(self.directory)]
        command += ["--listen", LISTEN, "--log-format", "text"]
        with self.log.open("wb") as log:  # in our process group, which the launcher ends
            self.process = subprocess.Popen(  # noqa: S603  # this checkout's own program
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=os.environ | own
            )

    @property
    def applied(self) -> int:
        return int(self.status.get("applied_round", 0))

    def look(self) -> None:
        """Updates the status; keeps the old one if the node is not up yet or busy."""
        if self.process.poll() is not None:
            raise NodeEndedError(f"it has ended with status {self.process.returncode}: {self.last_words()}")
        with suppress(P2ptrainError):
            self.status = ask(self.directory, {"do": "status"}, seconds=5.0)

    def records(self) -> dict[int, dict[str, Any]]:
        """Returns what it keeps of its last rounds."""
        try:
            found = ask(self.directory, {"do": "rounds", "last": RECORDS_MAX}, seconds=10.0)["rounds"]
        except P2ptrainError:
            return {}
        return {each["round"]: each for each in found}

    def last_words(self) -> str:
        return self.log.read_text(errors="replace")[-LOG_CHARACTERS:]

    def end(self, number: int) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)


class Pair:
    """Two nodes of one run."""

    def __init__(self, folder: Path, device: str, *, small: bool) -> None:
        self.folder, self.device = folder, device
        model, recipe = (MODEL_SMALL, RECIPE_SMALL) if small else (MODEL, RECIPE)
        (folder / "run.toml").write_text(RUN.format(model=_toml(model), recipe=_toml(recipe)))
        self.nodes = [Node(folder, "first", device, "start", str(folder / "run.toml"))]

    def until(self, what: str, ends_at: float, holds: Any) -> None:
        while True:
            for node in self.nodes:
                node.look()
            if holds():
                return
            if monotonic() > ends_at:
                words = "\n".join(node.last_words() for node in self.nodes)
                raise NodeEndedError(f"in time, {what} did not come: {words}")
            sleep(POLL_SECONDS)

    def join(self, ends_at: float) -> None:
        """Has the second node join, and waits until both have their seat and have applied some rounds."""
        first = self.nodes[0]
        self.until("the first node", ends_at, lambda: first.status.get("addresses"))
        address = str(first.status["addresses"][0])
        self.nodes.append(Node(self.folder, "second", self.device, "join", "--bootstrap", address))
        self.until(
            "a roster of two", ends_at, lambda: all(len(each.status.get("roster", ())) == 2 for each in self.nodes)
        )
        began = self.applied
        self.until("rounds of both", ends_at, lambda: self.applied >= began + WARM_UP_ROUNDS)

    @property
    def applied(self) -> int:
        """The newest round that both have applied."""
        return min(node.applied for node in self.nodes)

    def stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            for node in self.nodes:
                node.end(number)
            deadline = monotonic() + STOP_SECONDS / 2
            while monotonic() < deadline and any(node.process.poll() is None for node in self.nodes):
                sleep(POLL_SECONDS)


def _toml(values: dict[str, Any]) -> str:
    return "\n".join(
        f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value}" for key, value in values.items()
    )


def figures_of(pair: Pair, before: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Returns what the nodes say of themselves since these statuses."""
    after = [node.status for node in pair.nodes]

    def each(key: str) -> list[float]:
        return [now[key] - then[key] for then, now in zip(before, after, strict=True)]

    first, last = max(status["applied_round"] for status in before), pair.applied
    records = [{n: row for n, row in node.records().items() if first < n <= last} for node in pair.nodes]
    rows = [row for kept in records for row in kept.values()]
    roots = [{n: row["root"] for n, row in kept.items()} for kept in records]
    shared = sorted(set.intersection(*map(set, roots)))
    exchange = [row["collect_seconds"] + row["agree_seconds"] + row["apply_seconds"] for row in rows]
    return {
        "seconds": round(seconds, 1),
        "rounds": last - first,
        "training_share": [round(own / seconds, 4) for own in each("training_seconds")],
        "tokens_per_second": round(sum(each("tokens")) / seconds),
        "tokens_per_second_while_training": [round(own["tokens_per_second"]) for own in after],
        "round_seconds": spread([row["seconds"] for row in rows]) if rows else None,
        "exchange_seconds": spread(exchange) if rows else None,
        "phase_seconds": {
            phase: round(statistics.median(row[f"{phase}_seconds"] for row in rows), 4)
            for phase in ("train", "collect", "agree", "apply")
        } if rows else None,
        "exchange_share": [own["exchange_share"] for own in after],
        "overlapping": [own["is_overlapping"] for own in after],
        "contributions_a_round": round(statistics.mean(len(row["contributors"]) for row in rows), 2) if rows else None,
        "payload_bytes": after[0]["payload_bytes"],
        "roots_compared": len(shared),
        "roots_equal": bool(shared) and all(roots[0][n] == roots[1][n] for n in shared),
        "same_model": [own["same_model"]["verdict"] for own in after],
        "loss": [own["loss"] for own in after],
        "complaints": sorted({each["code"] for own in after for each in own["complaints"]}),
    }  # fmt: skip


def why_not() -> str | None:
    """Returns why no daemon can run here."""
    try:
        from p2ptrain.net.libp2p.process import find_binary  # noqa: PLC0415  # needs packages that may be missing

        binary = find_binary()
    except (ImportError, TransportError) as error:
        return str(error)
    return None if os.access(binary, os.X_OK) else f"{binary} cannot be executed"


def measure(report: Report, pair: Pair) -> dict[str, Any]:
    start = monotonic()
    pair.join(start + START_SHARE * report.seconds_left)
    report.add("start_seconds", round(monotonic() - start, 1))
    before, first, began = [node.status for node in pair.nodes], pair.applied, monotonic()
    figures, told, tell_at = dict[str, Any](), first, began
    while report.seconds_left > STOP_SECONDS and not (report.small and told >= first + ROUNDS_SMALL):
        for node in pair.nodes:
            node.look()
        if pair.applied > told and (monotonic() > tell_at or report.small):
            figures, told = figures_of(pair, before, monotonic() - began), pair.applied
            report.add("nodes", figures)
            tell_at = monotonic() + TELL_SECONDS
        sleep(POLL_SECONDS)
    return figures


def main(report: Report) -> None:
    if why := why_not():
        report.add("skipped", why)
        return
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(Path(folder), str(report.device), small=report.small)
        try:
            figures = measure(report, pair)
        except NodeEndedError as error:
            report.add("failed", str(error))
            sys.exit(str(error))
        finally:
            pair.stop()
        report.add(
            "warnings", [line for node in pair.nodes for line in node.log.read_text().splitlines() if "WARN" in line]
        )
    if not figures.get("roots_equal"):
        sys.exit("the nodes' roots differ, or no round could be compared")


if __name__ == "__main__":
    run_part(__doc__ or "", main)
