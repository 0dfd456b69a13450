"""The cost of real daemons on one machine: time from training to the next state, time to join, bytes, memory.

    OMP_NUM_THREADS=1 python benchmarks/daemons.py [apply] [overlap] [join] [bytes] [sizes] [slow] [--rounds N]
        [--passes N] [--nodes N ...] [--percent N ...] [--minutes N] [--keep] [--json FILE] [--quick]

Each node is `p2ptrain start` or `p2ptrain join` in a process of its own with its own p2pd, training on one thread.
`apply`: four nodes, 1M parameters: from the last announcement of a round to the last node that has applied it, and
where that time goes, without overlap. `overlap`: the same with it, and the share of time in which a node trains.
`join`: a fourth node joins three, from the start of its process to the first manifest that takes a contribution of its;
three times. `bytes`: four nodes with payloads of 1 MB, and with tiny ones. `sizes`: tiny models, from 4 to 24 nodes:
bytes, pace and memory a node, for a dozen rounds or so many --minutes, and whether all have the same roots. `slow`: one
of four nodes may train --percent of its time (`p2ptrain limit`), ten if nothing else is said, in a run with ten local
steps, of which it takes as many as fit: the share of rounds that take its contribution, tokens over what the four would
train alone, the share of time in which rounds waited for it alone, and the length of a round beside that of the three
without it (which have the whole machine). --passes: passes of a step, so that it takes 2-4 s. --keep: do not
remove the nodes' directories, whose logs daemon_logs.py reads. --quick: see that it runs.

The phases of a round come from the daemons' logs (daemon_logs.py). Bytes are those of the TCP connections of each p2pd,
as the kernel counts them (`ss -tinp`), before headers of TCP and IP.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any, TypeVar

import psutil
from daemon_logs import WARM_UP_ROUNDS, Life, life_in, new_directory, report_phases

from p2ptrain.demo import DemoNode
from p2ptrain.node.control import ask

RUN = """\
name = "benchmark"
[model]
{model}
[recipe]
{recipe}
[agreement]
{agreement}
[admission]
probation_rounds = 1
{admission}
"""
ONE_MILLION = 'preset = "1m"'
TINY = "dim = 64\nlayers = 2\nheads = 2\nkv_heads = 2\nffn_dim = 128\nsequence_length = 64"
LARGE_PAYLOADS = "dim = 256\nlayers = 8\nheads = 4\nkv_heads = 2\nffn_dim = 512\nsequence_length = 32"
PARTS = ("apply", "overlap", "join", "bytes", "sizes", "slow")
S = TypeVar("S", bound="Swarm")
START_SECONDS = 240.0  # until a node answers: two dozen imports of torch share two cores
ROUND_SECONDS = 120.0  # without a new round something is broken
STOP_SECONDS = 20.0
LOCAL_STEPS = 10
POLL_SECONDS = 0.5


# ---------------------------------------------------------------------------------------------------
# A swarm


class Swarm:
    """A swarm of daemons, and their statuses."""

    def __init__(self, directory: Path, run: str, size: int) -> None:
        self.directory = directory
        path = directory / "run.toml"
        path.write_text(run)
        self.size, self.named = size, 0
        self.nodes = [self.make(["start", str(path)])]

    def start(self) -> None:
        """Starts the swarm, and waits until all nodes are members."""
        self.begin()
        self.until(self.is_whole, START_SECONDS * max(1.0, self.size / 16))  # their imports share the cores

    def begin(self) -> None:
        """Starts the first node, and all others once it is up."""
        self.nodes[0].start()
        self.until(lambda: bool(self.nodes[0].status.get("addresses")), START_SECONDS)
        for _ in range(self.size - 1):
            self.add()

    def make(self, arguments: list[str]) -> DemoNode:
        """Makes the next node, with a directory of its own."""
        self.named += 1
        return DemoNode(f"node {self.named}", self.directory / f"node{self.named}", arguments)

    def add(self) -> DemoNode:
        """Starts another node that joins."""
        node = self.make(["join", "--bootstrap", self.address])
        self.nodes.append(node)
        node.start()
        return node

    @property
    def address(self) -> str:
        return str(self.nodes[0].status["addresses"][0])

    def is_whole(self) -> bool:
        return all(len(node.status.get("roster", ())) == len(self.nodes) for node in self.nodes)

    @property
    def round(self) -> int:
        """The newest round that all nodes have applied."""
        return min(node.applied for node in self.nodes)

    def look(self) -> None:
        for node in self.nodes:
            node.look()
            node.assert_alive()

    def until(self, holds: Callable[[], bool], seconds: float) -> None:
        deadline = monotonic() + seconds
        while True:
            self.look()
            if holds():
                return
            assert monotonic() < deadline, f"after {seconds:.0f} s not yet; see {self.directory}"
            sleep(POLL_SECONDS)

    def pass_rounds(self, count: int) -> None:
        """Waits until all nodes have applied this many more rounds."""
        for _ in range(count):
            here = self.round
            self.until(lambda here=here: self.round > here, ROUND_SECONDS)  # type: ignore[misc]

    def stop(self) -> None:
        """Lets the nodes leave or end, so that their logs are complete, and kills those that hang."""
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            for node in self.nodes:
                node.end(number)
            deadline = monotonic() + STOP_SECONDS
            while monotonic() < deadline and any(node.process and node.process.poll() is None for node in self.nodes):
                sleep(POLL_SECONDS)


@contextmanager
def swarm_of(size: int, keep: bool, kind: type[Swarm] = Swarm, **sections: str) -> Iterator[Swarm]:
    run = RUN.format(**{"model": ONE_MILLION, "recipe": "", "agreement": "", "admission": ""} | sections)
    with swarm_in(keep, lambda directory: kind(directory, run, size)) as swarm:
        yield swarm


@contextmanager
def swarm_in(keep: bool, make: Callable[[Path], S]) -> Iterator[S]:
    """Makes a swarm in a directory of its own, and stops it at the end."""
    with new_directory(keep) as directory, ExitStack() as stack:
        swarm = make(directory)
        stack.callback(swarm.stop)
        yield swarm


def recipe(passes: int, **others: object) -> str:
    """Returns a recipe of one step a round, if the others do not say otherwise, with this many passes."""
    settings = {"name": '"distro"', "passes_per_step": passes, **others}
    return "\n".join(f"{key} = {value}" for key, value in settings.items())


# ---------------------------------------------------------------------------------------------------
# Rounds


def measure_rounds(arguments: argparse.Namespace, agreement: str) -> dict[str, Any]:
    with swarm_of(4, arguments.keep, recipe=recipe(arguments.passes), agreement=agreement) as swarm:
        swarm.start()
        swarm.pass_rounds(WARM_UP_ROUNDS)
        first, began = swarm.round + 2, monotonic()
        before = [node.status["training_seconds"] for node in swarm.nodes]
        swarm.pass_rounds(arguments.rounds + 2)
        took, last = monotonic() - began, swarm.round
        after = [node.status["training_seconds"] for node in swarm.nodes]
        shares = [(late - early) / took for early, late in zip(before, after, strict=True)]
        swarm.stop()
        lives = [life_in(node.directory) for node in swarm.nodes]
        result = report_phases(lives, first, last)
    result["training_shares"] = shares
    print("share of time in which a node trains: " + ", ".join(f"{share:.1%}" for share in shares))
    return result


# ---------------------------------------------------------------------------------------------------
# A slow node


def slow(arguments: argparse.Namespace) -> dict[str, Any]:
    settings = recipe(arguments.passes, name='"local"', local_steps=LOCAL_STEPS, inner_learning_rate='"1/200"')
    found: dict[str, Any] = {"local_steps": LOCAL_STEPS}
    ends: dict[str, tuple[int, int]] = {}  # the first and last rounds
    with swarm_of(4, arguments.keep, recipe=settings) as swarm:
        swarm.start()
        *_, last = swarm.nodes
        for percent in arguments.percent:
            began = swarm.round
            ask(last.directory, {"do": "limit", "percent": percent})
            found[f"{percent} %"] = over_rounds(swarm, arguments.rounds, {last.name: percent / 100})
            ends[f"{percent} %"] = began + WARM_UP_ROUNDS, swarm.round
        last.end(signal.SIGTERM)
        swarm.nodes.remove(last)
        assert last.process is not None
        last.process.wait(START_SECONDS)
        found["without"] = over_rounds(swarm, arguments.rounds, {})
        swarm.stop()
        lives = [life_in(node.directory) for node in (*swarm.nodes, last)]
        for name, (first, end) in ends.items():
            found[name]["waited for it alone"] = round(waited_alone(lives, first, end), 4)
    for name, row in found.items():
        if isinstance(row, dict):
            print(f"  {name:<10}" + "  ".join(f"{key} {value}" for key, value in row.items()))
    for name in ends:
        longer = found[name]["round seconds"] / found["without"]["round seconds"]
        found[name]["round over that without it"] = round(longer, 3)
        print(f"  {name}: a round takes {longer:.3f} of one without the slow node")
    return found


def waited_alone(lives: list[Life], first: int, last: int) -> float:
    """Returns the share of time in which the rounds after the first of these waited only for the last node."""
    *others, slow_one = lives
    waited = whole = 0.0
    for number, manifest in slow_one.manifests.items():
        began = min((life.asked_to_train[number] for life in lives if number in life.asked_to_train), default=None)
        by = [life.trained[number] for life in others if number in life.trained]
        if began is None or not first < number <= last or len(by) < len(others):
            continue
        whole += slow_one.decided[number] - began
        if slow_one.key in {taken.author for taken in manifest.taken}:
            waited += max(0.0, slow_one.trained.get(number, 0.0) - max(by))
    return waited / whole


def over_rounds(swarm: Swarm, rounds: int, shares: dict[str, float]) -> dict[str, Any]:
    """Lets rounds pass; `shares` are the nodes' shares of the time in which they may train, 1 if not named."""
    swarm.pass_rounds(WARM_UP_ROUNDS)

    def look() -> list[dict[str, float]]:
        keys = ("tokens", "training_seconds", "applied_round")
        taken = [node.status["counters"].get("contributions taken", 0) for node in swarm.nodes]
        return [{key: node.status[key] for key in keys} | {"taken": count}
                for node, count in zip(swarm.nodes, taken, strict=True)]  # fmt: skip

    before, began = look(), monotonic()
    swarm.pass_rounds(rounds)
    took, after = monotonic() - began, look()
    since = [{key: now[key] - then[key] for key in now} for then, now in zip(before, after, strict=True)]
    alone = sum(
        each["tokens"] / each["training_seconds"] * shares.get(node.name, 1.0)
        for node, each in zip(swarm.nodes, since, strict=True)
        if each["training_seconds"]
    )
    return {
        "round seconds": round(took / since[0]["applied_round"], 2),
        "share of rounds with a contribution of each": [
            round(each["taken"] / each["applied_round"], 3) for each in since
        ],
        "tokens a round of each": [round(each["tokens"] / each["applied_round"]) for each in since],
        "tokens over those alone": round(sum(each["tokens"] for each in since) / took / alone, 3),
    }


# ---------------------------------------------------------------------------------------------------
# Joining


def join(arguments: argparse.Namespace) -> dict[str, Any]:
    rows = []
    times = 1 if arguments.quick else 3
    with swarm_of(3, arguments.keep, recipe=recipe(arguments.passes)) as swarm:
        swarm.start()
        starts = []
        for _ in range(times):
            swarm.pass_rounds(2)
            starts.append(monotonic())
            node = swarm.add()
            swarm.until(lambda node=node: _was_taken(node), START_SECONDS)  # type: ignore[misc]
            swarm.pass_rounds(1)
            node.end(signal.SIGTERM)
            assert node.process is not None
            node.process.wait(START_SECONDS)
            swarm.nodes.remove(node)
        swarm.stop()
        old = life_in(swarm.nodes[0].directory)
        for number, began in enumerate(starts, start=4):
            rows.append(_joined(began, life_in(swarm.directory / f"node{number}"), old))
    names = list(rows[0])
    for name in names:
        print(f"  {name:<34}" + "".join(f"{row[name]:9.1f}" for row in rows) +
              f"   median {statistics.median(row[name] for row in rows):.1f}")  # fmt: skip
    return {"rows": rows, "load": os.getloadavg()}


def _was_taken(node: DemoNode) -> bool:
    return bool(node.status.get("counters", {}).get("contributions taken"))


def _joined(began: float, new: Life, old: Life) -> dict[str, float]:
    """Returns the seconds since the process was started, and the rounds decided meanwhile."""
    number = min(number for number, each in old.manifests.items() if new.key in {taken.author for taken in each.taken})
    taken_at = old.decided[number]

    def rounds_since(moment: float) -> int:
        return sum(moment < at <= taken_at for at in old.decided.values())

    return {
        "core started": new.started - began,
        "had the state": new.has_state - began,
        "admitted": new.is_admitted - began,
        "began to train": min(new.asked_to_train.values()) - began,
        "announced": min(new.trained.values()) - began,
        "taken by a manifest": taken_at - began,
        "rounds since the process started": rounds_since(began),
        "rounds since it had the state": rounds_since(new.has_state),
        "rounds since it was admitted": rounds_since(new.is_admitted),
    }


# ---------------------------------------------------------------------------------------------------
# Bytes


class Sockets:
    """Counts the bytes on processes' TCP connections, as long as each is sampled before it closes."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, str, str], tuple[int, int]] = {}

    def look(self) -> None:
        listed = subprocess.run(["ss", "-tinpHO"], capture_output=True, text=True, check=True)  # noqa: S607
        for line in listed.stdout.splitlines():
            parts, owner = line.split(), re.search(r"pid=(\d+)", line)
            if owner is None or not parts[0].startswith("ESTAB"):
                continue
            counts = [re.search(rf" {name}:(\d+)", line) for name in ("bytes_acked", "bytes_received")]
            sent, received = (int(count[1]) if count else 0 for count in counts)
            self.seen[int(owner[1]), parts[3], parts[4]] = sent, received

    def of(self, process: int) -> tuple[int, int]:
        """Returns the bytes sent and received."""
        mine = [counts for (owner, *_), counts in self.seen.items() if owner == process]
        return sum(sent for sent, _ in mine), sum(received for _, received in mine)


def p2pd_of(node: DemoNode) -> int:
    assert node.process is not None
    (child,) = (each for each in psutil.Process(node.process.pid).children() if each.name() == "p2pd")
    return int(child.pid)


def measure_traffic(swarm: Swarm, rounds: int, minutes: float = 0.0) -> dict[str, Any]:
    """Returns the bytes per node and round, from the sockets and from our counters of payloads; over at least so many
    rounds and minutes."""
    swarm.pass_rounds(2)
    sockets, p2pds = Sockets(), [p2pd_of(node) for node in swarm.nodes]
    sockets.look()
    before = [sockets.of(each) for each in p2pds]
    blobs_before, offered_before = [blob_bytes(node) for node in swarm.nodes], [offered(node) for node in swarm.nodes]
    began, first = monotonic(), swarm.round
    while swarm.round < first + rounds or monotonic() < began + 60 * minutes:
        swarm.pass_rounds(1)
        sockets.look()
    passed, took = swarm.round - first, monotonic() - began
    after = [sockets.of(each) for each in p2pds]
    blobs = [late - early for late, early in zip(map(blob_bytes, swarm.nodes), blobs_before, strict=True)]
    offers = [late - early for late, early in zip(map(offered, swarm.nodes), offered_before, strict=True)]
    payload = swarm.nodes[0].status["payload_bytes"]
    counts = zip(after, before, strict=True)
    passing = [((late[0] - early[0]) / passed, (late[1] - early[1]) / passed) for late, early in counts]
    return {
        "rounds": passed,
        "rounds_a_minute": 60 * passed / took,
        "payload_bytes": payload,
        "others_payloads": [payload * (sum(offers) - mine) / passed for mine in offers],
        "sent": [sent for sent, _ in passing],
        "received": [received for _, received in passing],
        "fetched": [each / passed for each in blobs],
        "load": os.getloadavg(),
    }


def roots_in(swarm: Swarm) -> dict[str, set[str]]:
    """Returns the roots that the nodes have of the last rounds that all of them still know, by round."""

    def common() -> set[str]:
        return set.intersection(*(set(node.status.get("roots", ())) for node in swarm.nodes))

    swarm.until(lambda: bool(common()), ROUND_SECONDS)
    return {number: {node.status["roots"][number] for node in swarm.nodes} for number in common()}


def blob_bytes(node: DemoNode) -> int:
    """Returns payload bytes that came over their own streams, not attached to announcements."""
    return sum(count for name, count in node.status["bytes"].items() if re.fullmatch(r"received .*/bulk", name))


def offered(node: DemoNode) -> int:
    """Returns the contributions that a node has announced in time, and that the others fetch."""
    counters = node.status["counters"]
    return int(counters.get("contributions taken", 0) + counters.get("contributions expired", 0))


def bytes_(arguments: argparse.Namespace) -> dict[str, Any]:
    found = {}
    rounds = 3 if arguments.quick else 12
    large = {"model": LARGE_PAYLOADS, "recipe": recipe(1, chunk=32, k=512, sequences_per_pass=2)}
    tiny = {"model": TINY, "recipe": recipe(1, k=8, sequences_per_pass=4)}
    for name, sections in {"tiny payloads": tiny, "large payloads": large}.items():
        with swarm_of(4, arguments.keep, **sections) as swarm:
            swarm.start()
            row = found[name] = measure_traffic(swarm, rounds)
        print(f"{name}: {row['payload_bytes']:,} bytes each; {row['rounds_a_minute']:.1f} rounds a minute")
        for what in ("sent", "received", "fetched"):
            values = ", ".join(f"{value:,.0f}" for value in row[what])
            ratios = [value / others for value, others in zip(row[what], row["others_payloads"], strict=True)]
            shares = ", ".join(f"{ratio:.2f}" for ratio in ratios)
            print(f"  {what:<9} a node and round {values}; over the others' payloads {shares}")
        own = [value - others for value, others in zip(row["received"], row["others_payloads"], strict=True)]
        print("  received without payloads " + ", ".join(f"{value:,.0f}" for value in own), flush=True)
    return found


def sizes(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    print(f"without torch: {memory_without_torch()}")
    print(
        " nodes  whole after  rounds  sent/round  received/round  without payloads  rounds/min  node MB  p2pd MB   load"
    )
    for size in arguments.nodes:
        sections = {"model": TINY, "recipe": recipe(1, k=8, sequences_per_pass=4)}
        with swarm_of(size, arguments.keep, **sections) as swarm:
            began = monotonic()
            swarm.start()
            whole = monotonic() - began
            row = measure_traffic(swarm, 3 if arguments.quick else 12, arguments.minutes)
            row |= {"nodes": size, "whole_seconds": whole}
            different = {number: sorted(roots) for number, roots in roots_in(swarm).items() if len(roots) > 1}
            assert not different, different
            row["node_bytes"] = statistics.mean(resident(node.process.pid) for node in swarm.nodes if node.process)
            row["p2pd_bytes"] = statistics.mean(resident(p2pd_of(node)) for node in swarm.nodes)
            row["python_pss"] = statistics.mean(shared_out(node.process.pid) for node in swarm.nodes if node.process)
        sent, received = statistics.mean(row["sent"]), statistics.mean(row["received"])
        row["protocol_received"] = received - statistics.mean(row["others_payloads"])
        rows.append(row)
        print(
            f"{size:6} {row['whole_seconds']:10.0f} s {row['rounds']:7} {sent:11,.0f} {received:15,.0f}"
            f" {row['protocol_received']:17,.0f} {row['rounds_a_minute']:11.1f}"
            f" {row['node_bytes'] / 2**20:8.0f} {row['p2pd_bytes'] / 2**20:8.0f} {row['load'][0]:6.1f}",
            flush=True,
        )
    return rows


def resident(process: int) -> int:
    return int(psutil.Process(process).memory_info().rss)


def shared_out(process: int) -> int:
    """Returns the proportional set size, in which shared pages count in part for each process."""
    return int(psutil.Process(process).memory_full_info().pss)


def memory_without_torch() -> str:
    """Measures processes that only import the network (with hivemind's imports), and torch."""
    found = []
    for name in ("p2ptrain.net.libp2p.p2pd", "torch", "p2ptrain.daemon.launch", "p2ptrain.core.node"):
        script = f"import {name}, psutil, sys; print(psutil.Process().memory_info().rss, 'torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)  # noqa: S603
        size, has_torch = done.stdout.split()
        found.append(f"{name} {int(size) / 2**20:.0f} MB{' (imports torch)' if has_torch == 'True' else ''}")
    return ", ".join(found)


# ---------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all if none is named")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--passes", type=int, default=6)
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 8, 16, 24])
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--percent", type=int, nargs="+", default=[10])
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"no part {min(unknown)!r}: choose of {', '.join(PARTS)}")
    if arguments.quick:
        arguments.rounds, arguments.passes, arguments.nodes = 3, 1, [4]
    found: dict[str, Any] = {}
    for part in arguments.parts or PARTS:
        print(f"-- {part}", flush=True)
        match part:
            case "apply":
                found[part] = measure_rounds(arguments, "overlap_rounds = 0")
            case "overlap":
                found[part] = measure_rounds(arguments, "overlap_rounds = 1")
            case "join":
                found[part] = join(arguments)
            case "bytes":
                found[part] = bytes_(arguments)
            case "slow":
                found[part] = slow(arguments)
            case _:
                found[part] = sizes(arguments)
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
