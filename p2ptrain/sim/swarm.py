"""Swarm testing: scenarios drawn from seeds, until something breaks.

After Groce, Zhang, Eide, Chen and Regehr, "Swarm testing" (ISSTA 2012): each run has only some of the faults, chosen
at random, because faults that always come together hide one another. At most f members lie or are gone for good, which
is what the protocol promises to tolerate. If a roster arises in which more than f are faulty (after a regroup, say),
only a single history is required from then on, because nothing else was promised. If two quorums of that roster need
not share a member without fault, not even that is promised, and the run ends without a verdict: with 3f + 1 members,
or one, or three, this takes one faulty member beyond f, otherwise two or three. A failing scenario is shrunk: faults
are dropped, the run is shortened and nodes are removed, as long as it still fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from p2ptrain.config.run import PROTOCOLS
from p2ptrain.core.roster import tolerated_by
from p2ptrain.sim import checkers, liars
from p2ptrain.sim import scenario as sc
from p2ptrain.sim.ledger import Violation
from p2ptrain.sim.outcome import Outcome, ended, simulate

NODES = (4, 16)
ROUNDS = (20, 80)
RECOVERY_SECONDS = 1_800.0  # after the faults: a few of the longest views, a regroup, and fetching a state
SHRINK_SECONDS = 120.0  # of real time
AUDIT_LIES = ("no work", "false audits")
SUCCESSION_LIE = "false succession"
LIAR_KINDS = sorted(liars.KINDS.keys() - {*AUDIT_LIES, SUCCESSION_LIE})  # those that may do nothing else for a while
MOVED_SHARE = 0.4
AUDITED_SHARE = 0.5
AUDITED = {"name": "local", "local_steps": 10, "sequences_per_pass": 8}
Table: TypeAlias = dict[str, Any]  # of a scenario


class Failed(Struct, frozen=True):
    seed: int
    failures: list[str]
    scenario: sc.Scenario  # shrunk
    shrunk_failures: list[str]

    def __str__(self) -> str:
        found = "\n".join(self.failures)
        shrunk = "\n".join(f"# {failure}" for failure in self.shrunk_failures)
        return (
            f"seed {self.seed} fails:\n{found}\n\nIt is repeated by: p2ptrain simulate --swarm 1 --seed {self.seed}\n"
            f"Shrunk, as a file for: p2ptrain simulate FILE --seed {self.seed}\n\n{shrunk}\n{sc.to_toml(self.scenario)}"
        )


class SwarmSummary(Struct):
    seeds: int = 0
    rounds: int = 0
    deliveries: int = 0
    ended: int = 0  # runs that went on as another for some
    beyond: int = 0  # runs in which a roster had more than f faulty members: at most one history is promised
    seconds: float = 0.0
    failed: Failed | None = None

    def __str__(self) -> str:
        beyond = f", {self.beyond} reached a roster with more than f faulty members" if self.beyond else ""
        over = f" ({self.ended:,} decided to go on as another)" if self.ended else ""
        return (
            f"{self.rounds:,} rounds of {self.seeds:,} swarms{over}, {self.deliveries:,} messages, "
            f"in {self.seconds:,.0f} s: {'one failed' if self.failed else 'nothing found'}{beyond}"
        )


def swarm(
    rounds: int, seed: int, seconds: float | None = None, progress: Callable[[SwarmSummary], None] | None = None
) -> SwarmSummary:
    """Simulates drawn scenarios until a number of rounds or a time limit is reached, or one of them fails."""
    summary, began = SwarmSummary(), time.monotonic()
    while summary.rounds < rounds and (seconds is None or summary.seconds < seconds):
        at = seed + summary.seeds
        outcome = run(draw(at), at)
        summary.seeds += 1
        summary.rounds += outcome.cluster.rounds
        summary.deliveries += outcome.cluster.calendar.deliveries
        summary.ended += bool(ended(outcome.cluster))
        summary.beyond += outcome.cluster.watch.is_beyond
        summary.seconds = time.monotonic() - began
        if not outcome.is_good:
            scenario, failures = shrink(draw(at), at, outcome.failures)
            summary.failed = Failed(at, outcome.failures, scenario, failures)
            break
        if progress is not None:
            progress(summary)
    return summary


def run(scenario: sc.Scenario, seed: int) -> Outcome:
    """Runs a scenario with every checker. If more members were faulty than the protocol tolerates, only a fork (two
    histories) and a crash of the core count as failures."""
    outcome = simulate(scenario, seed, checkers.standard())
    is_a_crash_or_fork = outcome.error is not None and type(outcome.error) is not Violation
    if outcome.cluster.watch.is_beyond and not is_a_crash_or_fork:
        return replace(outcome, failures=[])
    return outcome


# -- Drawing ----------------------------------------------------------------------------------------


def draw(seed: int) -> sc.Scenario:
    return _Draw(seed).scenario()


class _Draw:
    def __init__(self, seed: int) -> None:
        self.seed, self.rng = seed, Random(f"swarm {seed}")
        # The smaller of two draws, because small swarms find just as much and are cheap.
        self.nodes = min(self.rng.randint(*NODES), self.rng.randint(*NODES))
        self.rounds = self.rng.randint(*ROUNDS)
        self.training = self.rng.choice([0.2, 1.0, 1.0, 5.0, 30.0])
        # Faults begin after a few rounds, and end when about half of the rounds could be done.
        self.start = 3.0 * self.training + 1.0
        self.end = self.start + max(30.0, self.rounds * self.training * 0.6)
        budget = tolerated_by(self.nodes)
        self.lying = self.rng.randint(0, budget)
        self.dying = self.rng.randint(0, budget - self.lying) if self.rng.random() < 0.3 else 0
        self.leaving = self.rng.randint(0, budget - self.lying - self.dying) if self.rng.random() < 0.3 else 0
        if self.lying + self.dying > tolerated_by(self.nodes - self.leaving):
            self.leaving = 0
        order = self.rng.sample(range(self.nodes), self.nodes)
        self.liars = sorted(order[: self.lying])
        self.dead = sorted(order[self.lying : self.lying + self.dying])
        self.leavers = sorted(order[self.lying + self.dying :][: self.leaving])
        self.others = sorted(order[self.lying + self.dying + self.leaving :])
        self.may_forget = budget - self.lying - self.dying - self.leaving

    def scenario(self) -> sc.Scenario:
        training = self._training()
        slowest = max((each["times"] for each in training["slow"]), default=1.0)
        return sc.scenario_of(
            self._with_moves(
                {
                    "sentence": f"Drawn from seed {self.seed}.",
                    "nodes": self.nodes,
                    "rounds": self.rounds,
                    "seconds": self.end + RECOVERY_SECONDS + 4.0 * self.rounds * self.training * max(1.0, slowest),
                    "faults_end": self.end,
                    "training": training,
                    "links": self._links(),
                    "disk": {"fsync_seconds": self._choice(0.0, 0.002, 0.02, 0.2), "kept": self._choice(0.0, 0.5, 1.0)},
                    "agreement": self._agreement(),
                    **self._admission(),
                    "fault": self._faults(),
                }
            )
        )

    def _with_moves(self, table: Table) -> Table:
        """Lets owners move in some swarms that the run go on as another, and a liar lie about it."""
        table, rng = self._with_audits(table), Random(f"swarm motions {self.seed}")
        if rng.random() >= MOVED_SHARE:
            return table
        table["protocol"] = rng.choice(PROTOCOLS)
        for _ in range(rng.randint(1, 3)):
            at, nodes = round(rng.uniform(0.5 * self.start, self.end), 3), [rng.randrange(self.nodes)]
            back, ahead = rng.random() < 0.25, rng.choice((2, 8, 30))
            table["seconds"] += 4.0 * 10.0 * ahead * self.training  # the slowest takes ten times as long
            table["fault"] += [{"kind": "move", "at": at, "nodes": nodes, "rounds_ahead_max": ahead, "back": back}]
        table["refusing"] = [rng.randrange(self.nodes)] if rng.random() < 0.2 else []
        for fault in table["fault"]:
            if fault["kind"] == "liar" and rng.random() < 0.5:
                fault["how"] = SUCCESSION_LIE
        return table

    def _with_audits(self, table: Table) -> Table:
        """Lets members audit in some swarms, and a liar lie about it. Drawn apart, or other draws would change."""
        rng = Random(f"swarm audits {self.seed}")
        if rng.random() < AUDITED_SHARE:
            table["recipe"], table["training"]["audit_share"] = AUDITED, rng.choice((0.1, 0.5))
            for fault in table["fault"]:
                if fault["kind"] == "liar" and rng.random() < AUDITED_SHARE:
                    fault["how"] = rng.choice(AUDIT_LIES)
        return table

    def _choice(self, *options: Any) -> Any:
        return self.rng.choice(options)

    def _some(self, among: list[int]) -> list[int]:
        return sorted(self.rng.sample(among, self.rng.randint(1, len(among))))

    def _span(self) -> dict[str, float]:
        at = self.start + self.rng.uniform(0.0, 0.8) * (self.end - self.start)
        return {"at": round(at, 3), "until": round(at + self.rng.uniform(0.02, 1.0) * (self.end - at), 3)}

    def _training(self) -> Table:
        slow = self.rng.random() < 0.3
        return {
            "seconds": self.training,
            "spread": self._choice(0.0, 0.1, 0.5),
            "payload_bytes": self._choice(40, 40, 40, 100_000),
            "slow": [{"nodes": self._some(self.others)[:2], "times": self._choice(0.1, 3.0, 10.0)}] if slow else [],
        }

    def _links(self) -> Table:
        if self.rng.random() < 0.4:
            return {}
        return {
            "latency_seconds": self._choice(0.001, 0.05, 0.2),
            "jitter_seconds": self._choice(0.001, 0.05, 0.5),
            "loss": self._choice(0.0, 0.01, 0.05, 0.2),
            "duplicate": self._choice(0.0, 0.1),
            "reorder": self._choice(0.0, 0.1),
            "bytes_per_second": self._choice(0.0, 1e6),
        }

    def _agreement(self) -> Table:
        staleness = self._choice(0, 0, 1, 4, 12)
        return {
            "staleness_rounds_max": staleness,
            "overlap_rounds": self._choice(0, 1, "auto") if staleness else 0,
            "on_quorum_loss": self._choice("halt", "regroup"),
            "stall_seconds": self._choice(20, 60, 120),
            "idle_round_seconds": self._choice(5, 60),
            "inline_bytes_max": self._choice(16_384, 16_384, 0),
        }

    def _admission(self) -> Table:
        admission = {"absence_rounds_max": self._choice(3, 10, 10), "probation_rounds": self._choice(0, 2)}
        policy = self._choice("open", "open", "invite", "allowlist")
        if policy == "open":
            return {"admission": admission}
        return {"admission": {**admission, "policy": policy}, "admission_keys": self._some(list(range(self.nodes)))}

    # -- Faults -------------------------------------------------------------------------------------

    def _faults(self) -> list[Table]:
        found: list[Table] = []
        if self.liars:
            kinds = self._choice(1, 1, len(self.liars))
            found += [
                {"kind": "liar", "at": 0.0, "nodes": self.liars[place::kinds], "how": self._choice(*LIAR_KINDS)}
                for place in range(kinds)
            ]
        if self.dead:  # drawn early, so that enough members remain whatever comes later
            found.append({"kind": "crash", "at": round(self.rng.uniform(0.5, self.start), 3), "nodes": self.dead})
        if self.leavers:
            found.append({"kind": "leave", "at": self._span()["at"], "nodes": self.leavers})
        crash, clog, sleep, stall = (partial(self._of_some, kind) for kind in ("crash", "clog", "sleep", "stall"))
        makers: tuple[Callable[[], Table | None], ...] = (
            crash, self._crash_all, self._forget, self._storm, self._partition, self._partition, clog, self._lossy,
            self._lose, sleep, self._clock, stall, self._slow_disk, self._join,
        )  # fmt: skip
        share = self.rng.uniform(0.0, 0.5)
        for make in makers:
            if self.rng.random() < share and (fault := make()) is not None:
                found.append(fault)
        return found

    def _of_some(self, kind: str) -> Table:
        return {"kind": kind, **self._span(), "nodes": self._some(self.others)}

    def _crash_all(self) -> Table:
        return {"kind": "crash", **self._span(), "nodes": self.others}

    def _forget(self) -> Table | None:
        if self.may_forget < 1:
            return None
        nodes = sorted(self.rng.sample(self.others, min(self.may_forget, len(self.others))))
        return {"kind": "crash", **self._span(), "nodes": nodes, "forgetful": True}

    def _storm(self) -> Table:
        every = self._choice(2.0, 10.0, 60.0)
        at_once = self.rng.randint(1, len(self.others))
        return {"kind": "storm", **self._span(), "nodes": self.others, "every_seconds": every, "at_once": at_once}

    def _partition(self) -> Table:
        order = self.rng.sample(range(self.nodes), self.nodes)
        cuts = sorted(self.rng.sample(range(1, self.nodes), self._choice(1, 1, 2)))
        groups = [sorted(order[low:high]) for low, high in pairwise([0, *cuts, self.nodes])]
        span, one_way = self._span(), self.rng.random() < 0.3
        flap_seconds = self._choice(0.0, 0.0, 1.0, 7.0)
        return {"kind": "partition", **span, "groups": groups, "one_way": one_way, "flap_seconds": flap_seconds}

    def _lossy(self) -> Table:
        span, loss = self._span(), self._choice(0.2, 0.5, 0.9)
        return {"kind": "lossy", **span, "loss": loss, "duplicate": 0.1, "reorder": 0.2}

    def _lose(self) -> Table:
        kinds = ["announcement", "availability", "proposal", "prevote", "precommit", "hello"]
        lost = self.rng.sample(kinds, self.rng.randint(1, 3))
        return {"kind": "lose", **self._span(), "nodes": self._some(self.others), "messages": lost}

    def _clock(self) -> Table:
        jump, rate = self._choice(0.0, -100.0, 100.0, 3600.0), self._choice(0.9, 1.0, 1.1)
        at, nodes = self._span()["at"], self._some(self.others)
        return {"kind": "clock", "at": at, "nodes": nodes, "jump_seconds": jump, "rate": rate}

    def _slow_disk(self) -> Table:
        span, nodes = self._span(), self._some(self.others)
        return {"kind": "slow disk", **span, "nodes": nodes, "fsync_seconds": self._choice(0.5, 3.0)}

    def _join(self) -> Table:
        ticket = self._choice("none", "new", "new", "spent", "stolen", "expired", "false")
        return {"kind": "join", "at": self._span()["at"], "count": self.rng.randint(1, 3), "ticket": ticket}


# -- Shrinking --------------------------------------------------------------------------------------


def shrink(scenario: sc.Scenario, seed: int, failures: list[str]) -> tuple[sc.Scenario, list[str]]:
    """Finds a smaller scenario that fails with the same seed, and returns it with its failures."""
    until = time.monotonic() + SHRINK_SECONDS
    is_smaller = True
    while is_smaller and time.monotonic() < until:
        is_smaller = False
        for smaller in _smaller(scenario):
            outcome = run(smaller, seed)
            if outcome.failures:
                scenario, failures, is_smaller = smaller, outcome.failures, True
                break
            if time.monotonic() >= until:
                break
    return scenario, failures


def _smaller(scenario: sc.Scenario) -> Iterator[sc.Scenario]:
    """Yields scenarios that are one step simpler, the largest step first."""
    for place in range(len(scenario.fault)):
        yield replace(scenario, fault=scenario.fault[:place] + scenario.fault[place + 1 :])
    for name, plain in (("links", sc.Links()), ("training", sc.Workload()), ("disk", sc.Durability())):
        if getattr(scenario, name) != plain:
            yield replace(scenario, **{name: plain})
    if scenario.admission:
        yield replace(scenario, admission={}, admission_keys=[])
    if scenario.rounds > 5:
        yield replace(scenario, rounds=max(5, scenario.rounds // 2))
    for key in sorted(scenario.agreement):
        yield replace(scenario, agreement={name: value for name, value in scenario.agreement.items() if name != key})
    if scenario.nodes > NODES[0]:
        yield from (without(scenario, node) for node in reversed(range(scenario.nodes)))


def without(scenario: sc.Scenario, gone: int) -> sc.Scenario:
    """Returns the scenario without one node, and with the nodes after it renumbered."""

    def rest(nodes: sc.Nodes) -> list[int]:
        return [node - (node > gone) for node in scenario.pick(nodes) if node != gone]

    changed: list[sc.AnyFault] = []
    for fault in scenario.fault:
        if isinstance(fault, sc.Partition):
            groups: list[sc.Nodes] = [left for group in fault.groups if (left := rest(group))]
            changed += [replace(fault, groups=groups)] if len(groups) > 1 else []
        elif isinstance(fault, sc.Lossy | sc.Newcomers):
            changed.append(fault)
        else:
            changed += [replace(fault, nodes=rest(fault.nodes))] if rest(fault.nodes) else []
    slow = [replace(each, nodes=rest(each.nodes)) for each in scenario.training.slow]
    return replace(
        scenario,
        nodes=scenario.nodes - 1,
        fault=changed,
        training=replace(scenario.training, slow=slow),
        refusing=rest(scenario.refusing),
        admission_keys=rest(scenario.admission_keys) or ([0] if scenario.admission_keys else []),
    )
