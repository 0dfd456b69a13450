"""`p2ptrain demo`: runs a swarm of real daemons on this machine and kills one of them along the way.

Nothing is simulated: each node is a process with its own p2pd, directory and key, started with the commands that a
person would type, and queried like `p2ptrain status`. The demo collects every root that a node reports for a round; all
roots of a round must be the same. No node outlives the demo."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from time import monotonic, sleep
from typing import Any

from rich.console import Console

from p2ptrain.errors import DataError, P2ptrainError
from p2ptrain.files import make_directory, replace_file
from p2ptrain.node.control import ask
from p2ptrain.system import Tie, tied_to_us

LISTEN = "/ip4/127.0.0.1/tcp/0"
START_SECONDS = 240.0  # for a node to answer or to join, on a machine that has much else to do
STUCK_SECONDS = 120.0  # the demo fails after this long without a new round
DOWN_SECONDS = 5.0  # how long the killed node stays away
STOP_SECONDS = 20.0  # for a node to leave properly
POLL_SECONDS = 0.5
LINES_SECONDS = 5.0  # between progress lines
CHART_ROWS = 6  # the height of the loss curve
LEVELS = " ▁▂▃▄▅▆▇█"


@dataclass(slots=True)
class DemoNode:
    """One daemon of the demo, and its last known status."""

    name: str
    directory: Path
    arguments: list[str]
    process: subprocess.Popen[bytes] | None = None
    status: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    listen: str = LISTEN
    prefix: tuple[str, ...] = ()  # before its command, which it has to become

    @property
    def log(self) -> Path:
        return self.directory.with_suffix(".log")

    def start(self, *more: str) -> None:
        """Starts the daemon, with these arguments in addition."""
        self.arguments += more
        self.note, self.status = "", {}
        own = {"OMP_NUM_THREADS": "1", "P2PTRAIN_DEVICE__NAME": "cpu", "P2PTRAIN_DEVICE__THREADS": "1"}
        own |= {"P2PTRAIN_NETWORK__NAT": "false"}  # loopback needs no port mapping
        own |= {"P2PTRAIN_HTTP__HOST": "127.0.0.1", "P2PTRAIN_HTTP__PORT": "0"}
        command = tied_to_us(Tie.END_WITH_PARENT, [sys.executable, "-m", "p2ptrain", *self.arguments])
        command += ["--data-dir", str(self.directory)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(  # noqa: S603
                [*self.prefix, *command, "--listen", self.listen, "--log-format", "text"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **own}, start_new_session=True,
            )  # fmt: skip

    def look(self) -> None:
        """Updates the status; keeps the old one if the node is not up yet or busy."""
        if self.process is not None and self.process.poll() is None:
            with suppress(P2ptrainError):
                self.status = ask(self.directory, {"do": "status"}, seconds=5.0)

    def assert_alive(self) -> None:
        if self.process is not None and self.process.poll() is not None:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-8:])
            raise DataError(f"{self.name} has ended with status {self.process.returncode}:\n{tail}")

    @property
    def applied(self) -> int:
        return int(self.status.get("applied_round", 0))

    def end(self, number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def kill(self) -> None:
        self.note = "killed"
        self.end(signal.SIGKILL)
        assert self.process is not None
        self.process.wait()


class Demo:
    """The swarm, and what has been observed of it."""

    def __init__(self, directory: Path, size: int, rounds: int) -> None:
        self.directory, self.rounds = directory, rounds
        self.console = Console()
        run = directory / "demo.toml"
        replace_file(run, Path(__file__).with_suffix(".toml").read_bytes())
        self.nodes = [DemoNode("node 1", directory / "node1", ["start", str(run)])]
        self.nodes += [DemoNode(f"node {n}", directory / f"node{n}", ["join"]) for n in range(2, size + 1)]
        self.roots: dict[int, set[tuple[str, str]]] = defaultdict(set)  # by round: pairs of node and root
        self.losses: list[tuple[int, float]] = []  # the first node's, by round
        self.began = monotonic()
        self.moved_at, self.newest = monotonic(), 0
        self.told_at = 0.0

    # -- Watching -----------------------------------------------------------------------------------

    def look(self) -> None:
        for node in self.nodes:
            node.look()
            for number, root in node.status.get("roots", {}).items():
                self.roots[int(number)].add((node.name, root))
        first = self.nodes[0].status
        if first.get("loss") is not None and (not self.losses or self.losses[-1][0] != first["applied_round"]):
            self.losses.append((first["applied_round"], first["loss"]))
        newest = max(node.applied for node in self.nodes)
        if newest > self.newest:
            self.newest, self.moved_at = newest, monotonic()
        if monotonic() - self.moved_at > STUCK_SECONDS:
            raise DataError(f"no progress for {STUCK_SECONDS:.0f} s; the logs are in {self.directory}")
        if monotonic() >= self.told_at + LINES_SECONDS:
            self.told_at = monotonic()
            parts = [f"{node.name} {_brief(node)}" for node in self.nodes]
            self._say(f"{monotonic() - self.began:4.0f} s  " + " | ".join(parts))

    def until(self, condition: str, holds: Any, seconds: float | None = None) -> None:
        """Polls the nodes until a condition holds."""
        deadline = None if seconds is None else monotonic() + seconds
        while True:
            self.look()
            if holds():
                return
            for node in self.nodes:
                if not node.note:
                    node.assert_alive()
            if deadline is not None and monotonic() > deadline:
                raise DataError(f"still waiting after {seconds:.0f} s: {condition}; the logs are in {self.directory}")
            sleep(POLL_SECONDS)

    # -- The script ---------------------------------------------------------------------------------

    def run(self) -> bool:
        first, *others = self.nodes
        self._say(f"{len(self.nodes)} nodes on this machine, in {self.directory}")
        first.start()
        self.until("the first node answers", lambda: first.status.get("addresses"), START_SECONDS)
        if first.status["http"]:
            self._say(f"the dashboard of node 1: {first.status['http']}")
        for node in others:
            node.start("--bootstrap", first.status["addresses"][0])
        self.until("all nodes have joined", self._is_whole, START_SECONDS)
        self._say(f"all {len(self.nodes)} are members, {monotonic() - self.began:.0f} s after the start")
        if others:
            self._kill_one(others[-1])
        self.until(f"{self.rounds} rounds", lambda: min(node.applied for node in self.nodes) >= self.rounds)
        self.look()
        return self.sum_up()

    def _is_whole(self) -> bool:
        return all(len(node.status.get("roster", ())) == len(self.nodes) for node in self.nodes)

    def _kill_one(self, victim: DemoNode) -> None:
        at = max(self.newest + 5, self.rounds // 2)
        self.until(f"round {at}", lambda: self.newest >= at)
        victim.kill()
        was, fell = victim.applied, monotonic()
        self._say(f"{victim.name} killed (SIGKILL) in round {was}")
        self.until("the victim stays away", lambda: monotonic() - fell > DOWN_SECONDS)
        went = self.newest
        self._say(f"the others went on to round {went} without it")
        victim.start()
        self.until(
            f"{victim.name} is back",
            lambda: victim.applied > max(went, was) and victim.status.get("is_member"),
            START_SECONDS,
        )
        self._say(f"{victim.name} is back, and was {monotonic() - fell:.0f} s away")

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def sum_up(self) -> bool:
        """Prints a chart of the loss, and whether all replicas were equal, which it returns."""
        differing = sorted(number for number, roots in self.roots.items() if len({root for _, root in roots}) > 1)
        tellers = [len({name for name, _ in roots}) for roots in self.roots.values()]
        compared, by_all = sum(count > 1 for count in tellers), sum(count == len(self.nodes) for count in tellers)
        if self.losses:
            losses = [loss for _, loss in self.losses]
            for row in chart(losses, max(1, self.console.width), CHART_ROWS):
                self._say(row)
            self._say(f"loss {losses[0]:.3f} in round {self.losses[0][0]}, {mean(losses[-10:]):.3f} at the end")
        if len(self.nodes) == 1:
            self._say("one node: nothing to compare")
            return True
        self._say(
            f"{compared} rounds compared, {by_all} of them between all {len(self.nodes)}: {len(differing)} differ"
        )
        if differing:
            self._say(f"REPLICAS DIFFER in rounds {differing[:10]}")
        else:
            self._say("all replicas are bit-identical" if compared else "NO ROUND WAS SEEN BY TWO NODES")
        return compared > 0 and not differing

    def close(self) -> None:
        """Lets the nodes leave one after another, since the others have to agree to it; kills those that stay."""
        for node in reversed(self.nodes):
            node.end(signal.SIGTERM)
            if node.process is not None:
                try:
                    node.process.wait(STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    node.end(signal.SIGKILL)
                    node.process.wait()


def _brief(node: DemoNode) -> str:
    if node.note or not node.status:
        return node.note or "starting"
    loss = "" if node.status["loss"] is None else f", loss {node.status['loss']:.3f}"
    return f"round {node.applied}{loss}, root {node.status['state_root'][:8]}"


def chart(values: Sequence[float], width: int, rows: int) -> list[str]:
    """Draws values as blocks scaled from the least to the largest, averaged to fit the width; the top row first."""
    each = -(-len(values) // width)
    means = [sum(part) / len(part) for part in (values[i : i + each] for i in range(0, len(values), each))]
    low, high, full = min(means), max(means), len(LEVELS) - 1
    steps = full * rows - 1  # the least has a block, too
    heights = [1 + (round((mean - low) / (high - low) * steps) if high > low else 0) for mean in means]
    below = [full * row for row in reversed(range(rows))]
    return ["".join(LEVELS[min(max(height - start, 0), full)] for height in heights) for start in below]


def _as_ctrl_c(*_: object) -> None:
    raise KeyboardInterrupt


def run_demo(nodes: int, rounds: int, keep: Path | None) -> bool:
    """Runs the demo; returns whether all replicas were bit-identical."""
    directory = Path(tempfile.mkdtemp(prefix="p2ptrain-demo-")) if keep is None else keep
    make_directory(directory)
    demo = Demo(directory, nodes, rounds)
    is_good = False
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _as_ctrl_c)
    try:
        is_good = demo.run()
    finally:
        demo.close()
        if keep is None and is_good:
            shutil.rmtree(directory, ignore_errors=True)
        elif keep is None:
            demo.console.print(f"kept for inspection: {directory}", highlight=False)
    return is_good
