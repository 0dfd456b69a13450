"""`p2ptrain demo`: runs a swarm of real daemons on this machine and kills one of them along the way.

Nothing is simulated: each node is a process with its own p2pd, directory and key, started with the commands that a
person would type, and queried like `p2ptrain status`. The demo collects every root that a node reports for a round; all
roots of a round must be the same. No node outlives the demo.
"""

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
from time import monotonic, sleep
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from p2ptrain.errors import DataError, P2ptrainError
from p2ptrain.net.libp2p.process import tied_to_us
from p2ptrain.node.control import ask
from p2ptrain.visible import count_of

RUN = """\
name = "demo"

[model]
dim = 128
layers = 4
heads = 4
kv_heads = 2
ffn_dim = 256
sequence_length = 128

[recipe]
local_steps = 5
sequences_per_pass = 2
warmup_rounds = 3

[agreement]
inline_bytes_max = 65536
stall_seconds = 15
settle_seconds = 4

[admission]
probation_rounds = 1
"""
LISTEN = "/ip4/127.0.0.1/tcp/0"
START_SECONDS = 240.0  # for a node to answer or to join, on a machine that has much else to do
STUCK_SECONDS = 120.0  # the demo fails after this long without a new round
DOWN_SECONDS = 5.0  # how long the killed node stays away
STOP_SECONDS = 20.0  # for a node to leave properly
POLL_SECONDS = 0.5
LINES_SECONDS = 5.0  # between progress lines without a terminal
SAMPLE_TOKENS = 240
LABEL, CHART_ROWS = 14, 6  # columns before what is summed up; the height of the loss curve
LEVELS = " ▁▂▃▄▅▆▇█"
REQUEST = "import ctypes; ctypes.CDLL(None).prctl(1, 15)"  # PR_SET_PDEATHSIG, SIGTERM


@dataclass(slots=True)
class DemoNode:
    """One daemon of the demo, and its last known status."""

    name: str
    directory: Path
    arguments: list[str]
    process: subprocess.Popen[bytes] | None = None
    status: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    sent_before: int = 0  # bytes sent before it was killed
    listen: str = LISTEN
    prefix: tuple[str, ...] = ()  # before its command, which it has to become

    @property
    def log(self) -> Path:
        return self.directory.with_suffix(".log")

    def start(self, *more: str) -> None:
        """Starts the daemon, with these arguments in addition; the counters of an earlier life count on."""
        self.arguments += more
        self.note, self.sent_before, self.status = "", self.sent, {}
        own = {"OMP_NUM_THREADS": "1", "P2PTRAIN_DEVICE__NAME": "cpu", "P2PTRAIN_DEVICE__THREADS": "1"}
        own |= {"P2PTRAIN_NETWORK__NAT": "false"}  # loopback needs no port mapping
        own |= {"P2PTRAIN_HTTP__HOST": "127.0.0.1", "P2PTRAIN_HTTP__PORT": "0"}
        command = tied_to_us(REQUEST, [sys.executable, "-m", "p2ptrain", *self.arguments])
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

    @property
    def sent(self) -> int:
        return self.sent_before + int(self.status.get("bytes", {}).get("bytes sent", 0))

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
        run.write_text(RUN)
        self.nodes = [DemoNode("node 1", directory / "node1", ["start", str(run)])]
        self.nodes += [DemoNode(f"node {n}", directory / f"node{n}", ["join"]) for n in range(2, size + 1)]
        self.roots: dict[int, set[tuple[str, str]]] = defaultdict(set)  # by round: pairs of node and root
        self.losses: list[tuple[int, float]] = []  # the first node's, by round
        self.began = monotonic()
        self.moved_at, self.newest = monotonic(), 0
        self.live: Live | None = None
        self.told_at = 0.0

    # -----------------------------------------------------------------------------------------------
    # Watching

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
        self._show()

    def _show(self) -> None:
        if self.live is not None:
            self.live.update(self._table())
        elif monotonic() >= self.told_at + LINES_SECONDS:
            self.told_at = monotonic()
            parts = [f"{node.name} {_brief(node)}" for node in self.nodes]
            self.console.print(
                f"{monotonic() - self.began:4.0f} s  " + " | ".join(parts), highlight=False, soft_wrap=True
            )

    def _table(self) -> Table:
        table = Table(title=f"p2ptrain demo · {monotonic() - self.began:.0f} s", title_justify="left")
        for name in ("", "round", "loss", "peers", "roster", "sent", "state root", ""):
            table.add_column(name)
        for node in self.nodes:
            status = node.status
            if not status:
                table.add_row(node.name, "", "", "", "", "", "", node.note or "starting")
                continue
            table.add_row(
                node.name,
                str(status["applied_round"]),
                "" if status["loss"] is None else f"{status['loss']:.3f}",
                str(len(status["peers"])),
                str(len(status["roster"])),
                count_of(node.sent),
                status["state_root"][:16],
                node.note or status["phase"],
            )
        return table

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

    # -----------------------------------------------------------------------------------------------
    # The script

    def run(self) -> bool:
        first, *others = self.nodes
        self._say(f"{len(self.nodes)} nodes on this machine, in {self.directory}")
        if self.console.is_terminal:
            self.live = Live(self._table(), console=self.console, refresh_per_second=4)
            self.live.start()
        try:
            first.start()
            self.until("the first node answers", lambda: first.status.get("addresses"), START_SECONDS)
            if first.status["http"]:
                self._say(f"the dashboard of node 1: {first.status['http']}")
            address = first.status["addresses"][0]
            for node in others:
                node.start("--bootstrap", address)
            self.until("all nodes have joined", self._is_whole, START_SECONDS)
            self._say(f"all {len(self.nodes)} are members, {monotonic() - self.began:.0f} s after the start")
            if others:
                self._kill_one(others[-1])
            self.until(f"{self.rounds} rounds", lambda: min(node.applied for node in self.nodes) >= self.rounds)
            self.look()
        finally:
            if self.live is not None:
                self.live.stop()
                self.live = None
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
        (self.live.console if self.live else self.console).print(text, highlight=False, markup=False, soft_wrap=True)

    def sum_up(self) -> bool:
        differing = sorted(number for number, roots in self.roots.items() if len({root for _, root in roots}) > 1)
        tellers = [len({name for name, _ in roots}) for roots in self.roots.values()]
        compared, by_all = sum(count > 1 for count in tellers), sum(count == len(self.nodes) for count in tellers)
        status = self.nodes[0].status
        state, size = status["state_bytes"], len(self.nodes)
        reduced = 2 * (size - 1) / size * state * status["applied_round"]
        text = self._sample()
        say = self._say
        say("")
        if self.losses:
            number, loss = self.losses[0]
            for row in chart([loss for _, loss in self.losses], max(1, self.console.width - LABEL), CHART_ROWS):
                say(f"{'':<{LABEL}}{row}")
            say(f"loss          {loss:.3f} in round {number}, {self._late_loss():.3f} at the end")
        newest = max(self.roots)
        say(f"state root    {', '.join(sorted({root for _, root in self.roots[newest]}))} after round {newest}")
        if size > 1:
            count = f"{compared} rounds compared, {by_all} of them between all {size}"
            say(f"              {count}: {len(differing)} differ")
        say(f"payload       {status['payload_bytes']:,} bytes per node and round; the gradient in fp32 {state:,}")
        say("sent          " + ", ".join(f"{node.name} {count_of(node.sent)}" for node in self.nodes))
        if size > 1:
            say(f"              a ring all-reduce in fp32 would have sent {count_of(reduced)} from each in this time")
        say(f"text          {text!r}")
        say(f"took          {monotonic() - self.began:.0f} s")
        if size == 1:
            say("one node: nothing to compare")
        elif differing:
            say(f"REPLICAS DIFFER in rounds {differing[:10]}")
        else:
            say("all replicas are bit-identical" if compared else "NO ROUND WAS SEEN BY TWO NODES")
        return not differing and (compared > 0 or size == 1)

    def _late_loss(self) -> float:
        late = [loss for _, loss in self.losses[-10:]]
        return sum(late) / len(late)

    def _sample(self) -> str:
        request = {"do": "sample", "prompt": "The ", "tokens": SAMPLE_TOKENS, "seed": 1}
        return str(ask(self.nodes[0].directory, request, seconds=120.0)["text"])

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
    directory.mkdir(parents=True, exist_ok=True)
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
