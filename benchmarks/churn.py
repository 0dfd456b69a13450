"""Goodput under churn and liars: sixteen real daemons are killed, join, leave and lie; the simulator beside them.

    OMP_NUM_THREADS=1 python benchmarks/churn.py [SEGMENT ...] [--simulated N ...] [--scale S] [--seed 1]
        [--checkpoint-rounds 8] [--keep] [--json FILE] [--again]

A segment is some minutes with one kind of fault (SEGMENTS); one swarm serves all segments of a call, and what a
segment found is written at once, so that a call that was broken off goes on where it was. Kills, joins and leaves are
drawn from the seed. A killed daemon (SIGKILL, its p2pd ends with it) is started again after two seconds, with all that
it has on the disk. `--simulated`: no daemons, but swarms of so many nodes in the simulator with the same faults: with
as many nodes and the same `--scale` at the very same times, else with each node killed as often. `--scale`: a share of
each segment's minutes.

The daemons are real processes on loopback, each with its own p2pd, forked from one that has imported everything
(tests/helpers/nursery.py), because imports would take two of the three seconds that a start takes and sixteen daemons
share the cores. Rounds are paced: five steps of a tiny model with a sleep of a second behind each (churn_daemon.py).
So a round takes some seconds as real ones do, in most of which the cores are idle, and what is measured is the
protocol. Liars are patched daemons with honest keys; each kind has its twin in the simulator.

Goodput is the tokens a second behind honest contributions that rounds took, over those of the segments without faults;
where more nodes were there than at first, so much less.
Roots are compared from the nodes' own records (store/records.py), every round between all that applied it. A daemon
has caught up when it has applied the newest round that any other shows, counted from the start of its process; one
that is killed again before is counted by itself.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import monotonic, sleep, time
from typing import Any

from churn_faults import (
    DOWN_SECONDS,
    LOCAL_STEPS,
    NODES,
    SEGMENTS,
    SEQUENCES,
    Fault,
    Segment,
    faults_of,
    liars_of,
    median_and_p95,
    rounded,
)
from churn_simulated import of_simulated
from daemon_logs import new_directory
from figures import FIGURES, measured_now, rows_of, save
from show_nodes import free_port

from p2ptrain.errors import P2ptrainError
from p2ptrain.identity import Identity, peer_id_of
from p2ptrain.node.control import ask
from p2ptrain.observe.rounds import recorded
from p2ptrain.observe.schema import RoundRecord
from p2ptrain.store.records import ROUNDS_MAX
from tests.helpers.daemons import TINY_MODEL, DaemonSwarm, StartableDaemon

RUN = f"""\
name = "churn"

{TINY_MODEL}
[recipe]
name = "local"
local_steps = {LOCAL_STEPS}
sequences_per_pass = {SEQUENCES}
k = 64

[admission]
policy = "allowlist"
"""
MEMBERS_SECONDS = 300.0  # for sixteen daemons to come up and get their seats
CHECKPOINT_ROUNDS = 8  # the default of a node
WARM_UP_ROUNDS = 5  # until all know the pace
NEWCOMERS_MAX = 64
RECORDS_SECONDS = 7.0  # records are written every five
LOOK_SECONDS = 0.25
ABOUT = (
    "p2ptrain/core", "p2ptrain/node", "p2ptrain/store", "p2ptrain/net", "p2ptrain/sim", "benchmarks/churn.py",
    "benchmarks/churn_daemon.py", "benchmarks/churn_faults.py", "benchmarks/churn_simulated.py",
)  # fmt: skip


# ---------------------------------------------------------------------------------------------------
# Real daemons


class Swarm(DaemonSwarm):
    """Daemons whose roots are counted, not asserted. Each keeps its port, as nodes do: when all had been killed within
    seconds and came back on other ones, none found another again."""

    def add(self, name: str, *arguments: str | Path, **own: str) -> StartableDaemon:
        return super().add(name, *arguments, listen=f"/ip4/127.0.0.1/tcp/{free_port()}", **own)

    def compare(self, name: str, status: dict[str, Any]) -> None:
        """Leaves it to the records."""


def patched(directory: Path) -> None:
    """Lets each Python that is started from now on, the nursery above all, begin as churn_daemon.py says."""
    (directory / "sitecustomize.py").write_text("import churn_daemon\n\nchurn_daemon.begin()\n")
    paths = [str(directory), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


class Churned:
    """The sixteen and those who come in place of others."""

    def __init__(self, directory: Path) -> None:
        self.swarm = Swarm(directory)
        keys = [Identity.make(directory / f"node{n}" / "identity.key").key.hex() for n in range(NODES + NEWCOMERS_MAX)]
        (directory / "run.toml").write_text(f"{RUN}keys = {keys}\n")
        self.lies = [directory / f"lie{number}" for number in range(NODES)]
        self.peers: dict[str, str] = {}  # peer id by name
        self.places = list[StartableDaemon]()  # who stands for each number of a plan; newcomers replace leavers
        self.mismatches: Counter[str] = Counter()

    def start(self) -> None:
        first = self.swarm.add("node0", "start", self.swarm.directory / "run.toml", CHURN_LIE=str(self.lies[0]))
        self.places = [first.start().until_up()]
        for number in range(1, NODES):
            own = {"CHURN_LIE": str(self.lies[number])}
            self.places.append(self.swarm.joiner(f"node{number}", first.address, **own).start())
        for node in self.places:
            node.until(partial(self._is_member, node), MEMBERS_SECONDS, look=1.0)
        warm = self.places[0].applied + WARM_UP_ROUNDS
        self.places[0].until(lambda: self.places[0].applied >= warm)

    def _is_member(self, node: StartableDaemon) -> bool:
        return bool(self.status(node).get("is_member"))

    def status(self, node: StartableDaemon) -> dict[str, Any]:
        """Returns a node's status, empty if it does not answer yet."""
        with suppress(P2ptrainError):
            status = ask(node.directory, {"do": "status"}, seconds=2.0)
            self.peers[node.name] = status["peer_id"]
            if count := status["counters"].get("root mismatches"):
                self.mismatches[node.name] = count
            return status
        return {}

    def until_whole(self) -> float:
        """Waits until all that run are members and in the same round, or five minutes. Returns the seconds."""
        began = monotonic()
        while monotonic() < began + MEMBERS_SECONDS:
            statuses = [self.status(node) for node in self.running]
            rounds = [int(status.get("applied_round", -1)) for status in statuses]
            if all(status.get("is_member") for status in statuses) and max(rounds) - min(rounds) <= 1:
                break
            sleep(1.0)
        return monotonic() - began

    def settle(self) -> None:
        """Waits until all records are on the disk."""
        sleep(RECORDS_SECONDS)

    def records(self) -> dict[str, list[RoundRecord]]:
        found = {}
        for node in self.swarm.daemons:
            if directories := [*node.directory.glob("runs/*")]:
                found[node.name] = recorded(directories[0], ROUNDS_MAX)
        return found

    def lie(self, lies: dict[int, str]) -> None:
        for number, path in enumerate(self.lies):
            path.write_text(lies.get(number, ""))

    def newcomer(self) -> StartableDaemon:
        address = next(filter(None, (self.status(node).get("addresses") for node in self.running)))[0]
        node = self.swarm.joiner(f"node{len(self.swarm.daemons)}", address)
        return node.start()

    @property
    def running(self) -> list[StartableDaemon]:
        return [node for node in self.places if node.is_running]


@dataclass
class Recovery:
    """A daemon that was started, and has not caught up yet."""

    node: StartableDaemon
    started: float  # in seconds since 1970
    up: float = 0.0  # when it first answered
    caught_up: float = 0.0


class Passing:
    """A segment as it passes on real daemons."""

    def __init__(self, churned: Churned, segment: Segment, seed: int) -> None:
        self.churned, self.segment = churned, segment
        self.faults = faults_of(segment, seed)
        self.restarts: list[tuple[float, StartableDaemon]] = []  # due, on the monotonic clock
        self.back: list[Recovery] = []
        self.joined: list[Recovery] = []
        self.free: list[int] = []  # places of those who left
        self.leaving: list[StartableDaemon] = []
        self.kills = self.leaves = 0

    def run(self) -> tuple[float, float]:
        """Lets the segment pass. Returns its begin and its end, both at the end of a round, in seconds since 1970."""
        self.churned.lie(liars_of(self.segment, NODES))
        self._pass_a_round()
        wall, began, due = time(), monotonic(), list(self.faults)
        while monotonic() < began + 60.0 * self.segment.minutes:
            while due and monotonic() >= began + due[0].at:
                self._strike(due.pop(0))
            self._look()
            sleep(LOOK_SECONDS)
        self._pass_a_round()
        ended = time()
        while self.restarts or any(not each.caught_up for each in (*self.back, *self.joined)):
            self._look()
            if time() > ended + 60.0:
                break
            sleep(LOOK_SECONDS)
        self.churned.lie({})
        for node in self.leaving:
            node.until_ended()
        return wall, ended

    def _pass_a_round(self) -> None:
        """Waits until a round has ended, or a minute."""
        those, until = self.churned.running[:2], monotonic() + 60.0
        here = max(map(self._applied, those))
        while max(map(self._applied, those)) <= here and monotonic() < until:
            self._look()
            sleep(LOOK_SECONDS)

    def _strike(self, fault: Fault) -> None:
        if fault.kind == "join":
            self.joined.append(Recovery(self.churned.newcomer(), time()))
            if self.free:
                self.churned.places[self.free.pop(0)] = self.joined[-1].node
            else:
                self.churned.places.append(self.joined[-1].node)
            return
        node = self.churned.places[fault.node]
        if not node.is_running:
            return
        if fault.kind == "leave":
            self.leaves += 1
            with suppress(P2ptrainError):
                ask(node.directory, {"do": "leave"}, seconds=2.0)
            self.leaving.append(node)
            self.free.append(fault.node)
        else:
            self.kills += 1
            self.back = [each for each in self.back if each.node is not node or each.caught_up]
            node.kill()
            self.restarts.append((monotonic() + DOWN_SECONDS, node))

    def _look(self) -> None:
        while self.restarts and monotonic() >= self.restarts[0][0]:
            _, node = self.restarts.pop(0)
            self.back.append(Recovery(node.start(), time()))
        waiting = [each for each in (*self.back, *self.joined) if not each.caught_up]
        if not waiting:
            return
        those = {each.node.name for each in waiting}
        newest = max((self._applied(node) for node in self._some(those)), default=-1)
        for each in waiting:
            status = self.churned.status(each.node)
            if status and not each.up:
                each.up = time()
            if status and newest >= 0 and int(status["applied_round"]) >= newest:
                each.caught_up = time()

    def _some(self, but: set[str]) -> list[StartableDaemon]:
        return [node for node in self.churned.running if node.name not in but][:2]

    def _applied(self, node: StartableDaemon) -> int:
        return int(self.churned.status(node).get("applied_round", -1))


def judge(records: dict[str, list[RoundRecord]], span: tuple[float, float], liars: set[str]) -> dict[str, Any]:
    """Counts rounds, tokens and roots of the rounds that were first applied in this time, by the nodes' records."""
    first: dict[tuple[bytes, int], RoundRecord] = {}
    roots: dict[tuple[bytes, int], list[bytes]] = defaultdict(list)
    for each in sorted((each for told in records.values() for each in told), key=lambda each: each.applied_at):
        first.setdefault(each.key, each)
        roots[each.key].append(each.root)
    inside = [each for each in first.values() if span[0] < each.applied_at <= span[1]]
    by_number: dict[int, RoundRecord] = {}  # of several branches that which most have applied
    for each in inside:
        known = by_number.setdefault(each.round, each)
        by_number[each.round] = max(known, each, key=lambda one: len(roots[one.key]))
    counted = [*by_number.values()]
    tokens = sum(
        each.swarm_tokens * sum(peer_id_of(key) not in liars for key in each.contributors) / len(each.contributors)
        for each in counted
        if each.contributors
    )
    times = [span[0], *sorted(each.applied_at for each in counted), span[1]]
    compared = [len(roots[each.key]) for each in inside if len(roots[each.key]) > 1]
    return {
        "seconds": round(span[1] - span[0], 1),
        "rounds": len(counted),
        "honest tokens": round(tokens),
        "contributions a round": rounded(sum(len(each.contributors) for each in counted), len(counted)),
        "tries a round": rounded(sum(each.views for each in counted), len(counted)),
        "longest time without a round": round(max(late - early for early, late in pairwise(times)), 1),
        "branches": len({each.branch for each in inside}),
        "rounds compared": len(compared),
        "nodes that compared a round": rounded(sum(compared), len(compared)),
        "rounds whose roots differ": sum(len(set(roots[each.key])) > 1 for each in inside),
    }


def first_taken(records: dict[str, list[RoundRecord]], recoveries: list[Recovery], churned: Churned) -> list[float]:
    """Returns the seconds from these processes' starts to the first rounds that take a contribution of theirs."""
    first: dict[tuple[bytes, int], RoundRecord] = {}
    for each in sorted((each for told in records.values() for each in told), key=lambda each: each.applied_at):
        first.setdefault(each.key, each)
    found = []
    for recovery in recoveries:
        peer = churned.peers.get(recovery.node.name, "")
        at = next(
            (
                each.applied_at
                for each in first.values()
                if each.applied_at > recovery.started and any(peer_id_of(key) == peer for key in each.contributors)
            ),
            None,
        )
        found += [at - recovery.started] if at else []
    return found


def of_real(churned: Churned, segment: Segment, seed: int) -> dict[str, Any]:
    """Lets a segment pass on real daemons and returns its row."""
    waited = churned.until_whole()
    passing = Passing(churned, segment, seed)
    span = passing.run()
    churned.settle()
    records = churned.records()
    liars = {churned.peers[churned.places[number].name] for number in liars_of(segment, NODES)}
    back, joined = passing.back, passing.joined
    return {
        **judge(records, span, liars),
        "kills": passing.kills,
        "joins": len(joined),
        "leaves": passing.leaves,
        "seconds until a process answers": median_and_p95([each.up - each.started for each in back if each.up]),
        "seconds to catch up": median_and_p95([each.caught_up - each.started for each in back if each.caught_up]),
        "did not catch up": sum(not each.caught_up for each in back),
        "seconds to join": median_and_p95(first_taken(records, joined, churned)),
        "seconds until all had caught up from the segment before": round(waited, 1),
        "wrong states": sum(churned.mismatches.values()),
        "load": round(os.getloadavg()[0], 1),
    }


# ---------------------------------------------------------------------------------------------------
# The table


def per_second(row: dict[str, Any]) -> float:
    return float(row["honest tokens"] / row["seconds"])


def kind_of(row: dict[str, Any]) -> str:
    """Returns the swarm that a row is compared with: other settings of the same daemons are no other swarm."""
    return str(row["swarm"]).partition(",")[0]


def with_goodput(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds to each row the tokens a second over those of the segments without faults in a swarm of the same kind, of as
    many nodes as that has at first."""
    for row in rows:
        size = int(row["swarm"].split()[0])
        more = max(1.0, (row.get("nodes at a round's end") or row.get("nodes that compared a round") or size) / size)
        clean = [each for each in rows if each["segment"].startswith("no faults") and each["swarm"] == kind_of(row)]
        tokens, seconds = (sum(each[name] for each in clean) for name in ("honest tokens", "seconds"))
        row["goodput, percent"] = round(100.0 * per_second(row) * seconds / tokens / more, 1) if tokens else None
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Returns a line for each segment on real daemons."""
    head = [
        "segment", "a node failed every", "minutes", "kills; joins, leaves", "rounds", "goodput, %",
        "longest time without a round", "rounds compared, roots that differ",
        "seconds until a killed one answers", "until it has caught up: median, 95 %",
        "caught up, killed again before, not",
        "seconds to join", "load",
    ]  # fmt: skip
    lines = []
    for row in rows:
        if kind_of(row) != REAL:
            continue
        faults = f"{row['kills']}" + (f"; {row['joins']}, {row['leaves']}" if row["joins"] else "")
        node = f"{row['seconds'] * NODES / row['kills'] / 60:.3g} min" if row["kills"] else ""
        fates = row["seconds to catch up"]["count"], cut_short(row), row["did not catch up"]
        lines.append(
            [
                row["segment"] + str(row["swarm"])[len(REAL) :], node, f"{row['seconds'] / 60:.1f}", faults,
                f"{row['rounds']}", f"{row['goodput, percent']}", f"{row['longest time without a round']} s",
                f"{row['rounds compared']}, {row['rounds whose roots differ']}",
                pair(row["seconds until a process answers"]).partition(",")[0], pair(row["seconds to catch up"]),
                ", ".join(map(str, fates)) if row["kills"] else "", pair(row["seconds to join"]), f"{row['load']:.0f}",
            ]
        )  # fmt: skip
    return lines_of(head, lines)


def cut_short(row: dict[str, Any]) -> int:
    """Returns how many were killed again before they had caught up."""
    return int(row["kills"] - row["seconds to catch up"]["count"] - row["did not catch up"])


def simulated(rows: list[dict[str, Any]]) -> str:
    """Returns a line for each segment that was simulated, beside the daemons."""
    swarms = sorted({row["swarm"] for row in rows if kind_of(row) != REAL}, key=lambda name: (len(name), name))
    by = {(row["segment"], row["swarm"]): row for row in rows}
    head = ["segment", "goodput, %: daemons", *swarms, "seconds to catch up, median: daemons", *swarms]
    lines = []
    for segment in SEGMENTS:
        these = [by.get((segment, swarm)) for swarm in (REAL, *swarms)]
        if any(these[1:]):
            goodput = ["" if row is None else f"{row['goodput, percent']}" for row in these]
            caught = ["" if row is None else pair(row["seconds to catch up"]).partition(",")[0] for row in these]
            lines.append([segment, *goodput, *caught])
    return lines_of(head, lines)


def lines_of(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(each) + " |" for each in (head, ["---"] * len(head), *rows))


def pair(found: dict[str, Any]) -> str:
    return f"{found['median']}, {found['p95']}" if found["count"] else ""


# ---------------------------------------------------------------------------------------------------


REAL = f"{NODES} daemons"
Measure = Callable[[Segment], dict[str, Any]]


class Written:
    """The rows so far, in a file."""

    def __init__(self, path: Path, seed: int, *, anew: bool) -> None:
        self.path, self.seed, self.anew = path, seed, anew
        self.rows = rows_of(path)

    def has(self, segment: Segment, swarm: str) -> bool:
        return not self.anew and any((row["segment"], row["swarm"]) == (segment.name, swarm) for row in self.rows)

    def add(self, segment: Segment, swarm: str, found: dict[str, Any]) -> None:
        others = [row for row in rows_of(self.path) if (row["segment"], row["swarm"]) != (segment.name, swarm)]
        row = measured_now() | {"segment": segment.name, "swarm": swarm, "seed": self.seed, **found}
        self.rows = with_goodput([*others, row])
        self._save()
        print(f"{swarm}: {segment.name}: " + ", ".join(f"{name} {value}" for name, value in found.items()), flush=True)

    def _save(self) -> None:
        rows = sorted(self.rows, key=lambda row: [*SEGMENTS].index(row["segment"]))
        save(self.path, {"rows": rows, "table": table(rows), "simulated": simulated(rows)}, ABOUT)


def scaled(names: Sequence[str], scale: float) -> Iterator[Segment]:
    for segment in SEGMENTS.values():
        if not names or segment.name in names:
            yield replace(segment, minutes=segment.minutes * scale)


@contextmanager
def warmed(keep: bool) -> Iterator[Churned]:
    """Yields sixteen members."""
    with ExitStack() as stack:
        directory = stack.enter_context(new_directory(keep))
        patched(directory)
        churned = Churned(directory)
        stack.callback(churned.swarm.close)
        churned.start()
        yield churned


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("segments", nargs="*", metavar="SEGMENT", help="of SEGMENTS; all if none is named")
    parser.add_argument("--simulated", type=int, nargs="+", default=[], metavar="N")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--json", type=Path, default=FIGURES / "churn.json")
    parser.add_argument(
        "--checkpoint-rounds", type=int, default=CHECKPOINT_ROUNDS, metavar="N", help="between the daemons' checkpoints"
    )
    parser.add_argument("--again", action="store_true", help="measure also what the file has")
    asked = parser.parse_args()
    if unknown := set(asked.segments) - SEGMENTS.keys():
        parser.error(f"no segment {min(unknown)!r}: choose of {', '.join(SEGMENTS)}")
    written, segments = Written(asked.json, asked.seed, anew=asked.again), [*scaled(asked.segments, asked.scale)]
    for nodes in asked.simulated:
        for segment in segments:
            if not written.has(segment, swarm := f"{nodes} simulated"):
                written.add(segment, swarm, of_simulated(segment, nodes, asked.seed))
    every = asked.checkpoint_rounds
    real = REAL if every == CHECKPOINT_ROUNDS else f"{REAL}, a checkpoint every {every} rounds"
    missing = [segment for segment in segments if not asked.simulated and not written.has(segment, real)]
    if missing:
        os.environ["P2PTRAIN_STORAGE__CHECKPOINT_EVERY_ROUNDS"] = str(every)
        with warmed(asked.keep) as churned:
            for segment in missing:
                written.add(segment, real, of_real(churned, segment, asked.seed))


if __name__ == "__main__":
    main()
