"""The outcome of a simulation: runs a scenario, compares the result with its expectations, and tells it to a person.

The checkers watch the invariants (one history, equal roots, no honest node banned); this module checks the goal and
the scenario's own `expect`."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median

from msgspec import Struct
from msgspec.structs import replace

from p2ptrain.core.audits import Tier
from p2ptrain.core.succession import is_over
from p2ptrain.replay import FAILURES
from p2ptrain.sim import faults
from p2ptrain.sim.cluster import Cluster
from p2ptrain.sim.ledger import Checker, Violation
from p2ptrain.sim.machine import SimNode, Stretch
from p2ptrain.sim.scenario import Expect, Links, Scenario, Workload
from p2ptrain.sim.world import ManifestFacts

CHECK_ROUNDS_FROM = 64  # nodes: from this size on, checkers look once per node and round; below, after every event

Prepare = Callable[[Cluster], None]
NAMED_MAX = 12  # nodes listed in a line


class Outcome(Struct):
    cluster: Cluster
    clean_rate: float | None  # rounds a minute of the clean twin, if it was run
    failures: list[str]
    error: Exception | None = None  # the exception that ended the run

    @property
    def is_good(self) -> bool:
        return not self.failures


def simulate(
    scenario: Scenario, seed: int, checkers: Sequence[Checker] = (), prepare: Prepare | None = None
) -> Outcome:
    """Runs a scenario; failures are reported as sentences. `prepare` is called with the cluster before the start."""
    cluster = Cluster(seed, scenario, checkers, is_sparing=scenario.nodes >= CHECK_ROUNDS_FROM)
    if prepare is not None:
        prepare(cluster)
    faults.begin(cluster)
    try:
        cluster.run()
    except Violation as violation:
        return Outcome(cluster, None, [f"at {cluster.calendar.now:.3f} s: {violation}"], violation)
    except FAILURES as error:  # an assertion of the core failed, or it crashed
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}, line {last.lineno}, in {last.name}"
        text = f"at {cluster.calendar.now:.3f} s, {type(error).__name__}: {error} ({where})"
        return Outcome(cluster, None, [text], error)
    clean = rate(simulate(clean_twin(scenario), seed).cluster) if scenario.expect.rate_share_min is not None else None
    return Outcome(cluster, clean, list(_failures(cluster, scenario.expect, clean)))


def clean_twin(scenario: Scenario) -> Scenario:
    training = scenario.training
    even = Workload(training.seconds, training.spread, training.payload_bytes, training.state_bytes)
    return replace(scenario, training=even, links=Links(), fault=[], expect=Expect())


def rate(cluster: Cluster) -> float:
    """Returns the rounds that the median honest node applies in a virtual minute, without branches that lost."""
    rates = [
        60.0 * applied[1] / applied[0]
        for node in cluster.nodes
        if node.honest and (applied := cluster.metrics.last_applied.get(node.index))
    ]
    return median(rates) if rates else 0.0


def final_members(cluster: Cluster) -> list[int]:
    """Returns the final roster, as seen by the most advanced honest node."""
    last = _furthest(cluster)
    return sorted(cluster.key_index[key] for key in last.disk.state.members) if last else []


def ended(cluster: Cluster) -> list[int]:
    """Returns the honest nodes for which the run is over, and goes on as another."""
    return [node.index for node in cluster.nodes if node.honest and is_over(node.disk.state)]


def final_uncounted(cluster: Cluster) -> list[int]:
    """Returns the admitted nodes whose contributions count for nothing in the end."""
    last = _furthest(cluster)
    entries = last.disk.state.admitted if last else ()
    return sorted(cluster.key_index[entry.key] for entry in entries if entry.conduct.tier is not Tier.COUNTED)


def history(cluster: Cluster) -> list[ManifestFacts]:
    """Returns the decided manifests as seen by the most advanced honest node, without branches that lost."""
    last, metrics = _furthest(cluster), cluster.metrics
    if last is None:
        return []
    branch, end = last.disk.state.branch, last.disk.state.round
    found: list[ManifestFacts] = []
    while True:
        beginning = metrics.branches.get(branch)
        start = beginning.round if beginning else 0
        found += [each for at in range(end, start, -1) if (each := metrics.manifests.get((branch, at))) is not None]
        if beginning is None:
            return found[::-1]
        branch, end = beginning.parent_branch, start


def _furthest(cluster: Cluster) -> SimNode | None:
    return max((node for node in cluster.nodes if node.honest), key=lambda node: node.disk.state.round, default=None)


# -- Expectations -----------------------------------------------------------------------------------


def _failures(cluster: Cluster, expect: Expect, clean: float | None) -> Iterator[str]:
    if not cluster.calendar.is_over:
        here = (node for node in cluster.nodes if node.honest and not node.is_gone)
        left = [node for node in here if not cluster.goal.is_reached_by(node)]
        laggard = min(left, key=lambda node: node.state.round, default=None)
        yield (
            f"round {cluster.goal.round} was not reached by everyone within {cluster.setup.scenario.seconds:g} s: "
            + (f"node {laggard.index} has applied {laggard.state.round}" if laggard else "nobody honest is left")
        )
    if expect.rate_share_min is not None and clean is not None and rate(cluster) < expect.rate_share_min * clean:
        yield f"{rate(cluster):.2f} rounds a minute, of {clean:.2f} when nothing is wrong"
    yield from _over_time(cluster, expect)
    yield from _of_members(cluster, expect)
    for what, found, least, most in _counts(cluster, expect):
        if least is not None and found < least:
            yield f"{what}: {found}, expected {least} at least"
        if most is not None and found > most:
            yield f"{what}: {found}, expected {most} at most"


def _over_time(cluster: Cluster, expect: Expect) -> Iterator[str]:
    pick, between = cluster.setup.scenario.pick, cluster.metrics.rounds_between
    for pause in expect.paused:
        for index in pick(pause.nodes):
            if count := between(index, pause.since, pause.until):
                yield f"node {index} applied {count} rounds from {pause.since:g} to {pause.until:g} s, expected none"
    for progress in expect.progress:
        for index in pick(progress.nodes):
            count = between(index, progress.since, progress.until)
            if count < progress.rounds:
                yield (
                    f"node {index} applied {count} rounds from {progress.since:g} to {progress.until:g} s, "
                    f"expected {progress.rounds} at least"
                )
    if expect.resumed_seconds_max is not None:
        resumed_at, ended_at = cluster.goal.resumed_at, cluster.setup.scenario.end_of_faults
        took = None if resumed_at is None else resumed_at - ended_at
        if took is None or took > expect.resumed_seconds_max:
            words = "not at all" if took is None else f"after {took:.1f} s"
            yield f"rounds resumed {words}, expected within {expect.resumed_seconds_max:g} s of the faults' end"


def _of_members(cluster: Cluster, expect: Expect) -> Iterator[str]:
    pick, metrics = cluster.setup.scenario.pick, cluster.metrics
    banned = sorted(cluster.key_index[key] for key in metrics.banned)
    if expect.banned is not None and banned != pick(expect.banned):
        yield f"banned are {banned}, expected {pick(expect.banned)}"
    if expect.members is not None and final_members(cluster) != pick(expect.members):
        yield f"members in the end are {final_members(cluster)}, expected {pick(expect.members)}"
    if expect.ended is not None and ended(cluster) != pick(expect.ended):
        yield f"the run is over for {ended(cluster)}, expected {pick(expect.ended)}"
    kept = {manifest.digest for manifest in history(cluster)} if expect.kept is not None else set()
    for index in pick(expect.kept) if expect.kept is not None else ():
        if lost := [at for stretch in cluster.nodes[index].state.applied for at in _lost(cluster, stretch, kept)]:
            yield f"{len(lost)} rounds that node {index} applied, from {lost[0]} on, are not in the history in the end"
    for index in pick(expect.left) if expect.left is not None else ():
        if not cluster.nodes[index].has_left or index in final_members(cluster):
            yield f"node {index} has not left properly"
    for name, least in sorted(expect.taken_from.items()):
        count = sum(manifest.authors >> int(name) & 1 for manifest in history(cluster))
        if count < least:
            yield f"{count} contributions of node {name} were taken, expected {least} at least"
    for name, most in sorted(expect.counted_max.items()):
        count = metrics.counted[cluster.nodes[int(name)].key]
        if count > most:
            yield f"{count} contributions of node {name} were applied, expected {most} at most"


def _lost(cluster: Cluster, stretch: Stretch, kept: set[bytes]) -> list[int]:
    if stretch.head in kept:
        return []
    decided = ((at, cluster.metrics.manifests.get((stretch.branch, at))) for at in range(stretch.first, stretch.last))
    return [at for at, manifest in decided if manifest is None or manifest.digest not in kept] + [stretch.last]


def _counts(cluster: Cluster, expect: Expect) -> Iterator[tuple[str, float, float | None, float | None]]:
    metrics, decided = cluster.metrics, history(cluster)
    rounds, taken = max(1, len(decided)), sum(manifest.taken for manifest in decided)
    views = max(metrics.views.values(), default=0)
    nodes = len(cluster.nodes)
    yield "share of contributions taken", taken / rounds / nodes, expect.taken_share_min, None
    yield "branches begun", len(metrics.branches), expect.regroups_min, expect.regroups_max
    yield "the longest round's views beyond its first", views, expect.views_min, expect.views_max
    yield "empty rounds", sum(not manifest.taken for manifest in decided), None, expect.empty_rounds_max
    yield "alarms for a lost quorum", sum(metrics.stalls.values()), None, expect.stalls_max
    yield "states fetched", sum(metrics.states_fetched.values()), expect.catch_ups_min, None
    yield "nodes whose root differed", len(metrics.mismatches), expect.mismatches_min, expect.mismatches_max
    yield "ticks a node and round", sum(metrics.ticks.values()) / rounds / nodes, None, expect.events_max


def summary(outcome: Outcome, seed: int) -> str:
    cluster, metrics, calendar = outcome.cluster, outcome.cluster.metrics, outcome.cluster.calendar
    swarm = f"{len(cluster.nodes)}, seed {seed}, {calendar.now:.1f} virtual seconds"
    scenario, decided = cluster.setup.scenario, history(cluster)
    rounds, lost = max(1, len(decided)), len(metrics.manifests) - len(decided)
    losers = f", and {lost} on branches that lost" if lost else ""
    nodes = len(cluster.nodes)
    share = f", {rate(cluster) / outcome.clean_rate:.0%} of the clean rate" if outcome.clean_rate else ""
    banned, unseated = (_named(cluster.key_index[key] for key in each) for each in (metrics.banned, metrics.unseated))
    views = list(metrics.views.values())
    later = sum(view > 0 for view in views)
    taken = sum(manifest.taken for manifest in decided)
    empty = sum(not manifest.taken for manifest in decided)
    heard = f"{metrics.heard_messages / nodes / rounds:,.1f} messages and {metrics.heard_bytes / nodes / rounds:,.0f}"
    states = metrics.states_fetched.total()
    lines = [
        ("scenario", scenario.sentence),
        ("nodes", f"{swarm}, {calendar.deliveries:,} messages arrived"),
        ("rounds", f"{len(decided)} decided{losers}, {rate(cluster):.1f} a minute{share}"),
        ("views", f"{later} rounds took more than one, the longest {max(views, default=0) + 1}"),
        ("taken", f"{taken:,} contributions, {taken / rounds:.1f} a round; {empty} empty rounds"),
        ("traffic", f"a node and round: {heard} bytes in, before gossip's own duplication"),
        ("lost quorum", f"{sum(metrics.stalls.values())} alarms, {len(metrics.branches)} branches begun"),
        ("catching up", f"{states} states and {metrics.payloads_fetched.total():,} payloads fetched"),
        ("shut out", f"banned: {banned}; lost a seat: {unseated}; {metrics.disconnects.total()} disconnections"),
        ("members", f"{len(final_members(cluster))} in the end"),
        ("audits", f"{metrics.audits.total():,}; on trial or suspended in the end: {_named(final_uncounted(cluster))}"),
    ]
    if over := ended(cluster):
        lines.append(("over", f"the run goes on as another, for {_named(over)}"))
    if cluster.watch.is_beyond:
        lines.append(("beyond", "more than f of a roster were faulty: nothing is promised but one history"))
    lines += [("FAILED", failure) for failure in outcome.failures]
    return "\n".join(f"{name:12}{text}" for name, text in lines)


def _named(nodes: Iterable[int]) -> str:
    found = sorted(nodes)
    more = f" and {len(found) - NAMED_MAX} more" if len(found) > NAMED_MAX else ""
    return (", ".join(map(str, found[:NAMED_MAX])) + more) or "nobody"
