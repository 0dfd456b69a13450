"""The report: a simulation in a few lines for a person."""

from __future__ import annotations

from collections.abc import Iterable

from p2ptrain.sim.outcome import Outcome, final_members, final_uncounted, history, rate

NAMED_MAX = 12  # nodes listed in a line


def summary(outcome: Outcome, seed: int) -> str:
    """Describes the outcome, line by line."""
    cluster, metrics, calendar = outcome.cluster, outcome.cluster.metrics, outcome.cluster.calendar
    swarm = f"{len(cluster.nodes)}, seed {seed}, {calendar.now:.1f} virtual seconds"
    scenario, decided = cluster.setup.scenario, history(cluster)
    rounds, lost = max(1, len(decided)), len(metrics.manifests) - len(decided)
    losers = f", and {lost} on branches that lost" if lost else ""
    nodes = len(cluster.nodes)
    share = f", {rate(cluster) / outcome.clean_rate:.0%} of the clean rate" if outcome.clean_rate else ""
    views = list(metrics.views.values())
    later = sum(view > 0 for view in views)
    taken = sum(manifest.taken for manifest in decided)
    empty = sum(not manifest.taken for manifest in decided)
    lines = [
        ("scenario", scenario.sentence),
        ("nodes", f"{swarm}, {calendar.deliveries:,} messages arrived"),
        ("rounds", f"{len(decided)} decided{losers}, {rate(cluster):.1f} a minute{share}"),
        ("views", f"{later} rounds took more than one, the longest {max(views, default=0) + 1}"),
        ("taken", f"{taken:,} contributions, {taken / rounds:.1f} a round; {empty} empty rounds"),
        (
            "traffic",
            f"a node and round: {metrics.heard_messages / nodes / rounds:,.1f} messages and "
            f"{metrics.heard_bytes / nodes / rounds:,.0f} bytes in, before gossip's own duplication",
        ),
        ("lost quorum", f"{sum(metrics.stalls.values())} alarms, {len(metrics.branches)} branches begun"),
        (
            "catching up",
            f"{sum(metrics.states_fetched.values())} states and {metrics.payloads_fetched:,} payloads fetched",
        ),
        ("shut out", _shut_out(outcome)),
        ("members", f"{len(final_members(cluster))} in the end"),
        ("audits", f"{metrics.audits:,}; on trial or suspended in the end: {_named(final_uncounted(cluster))}"),
    ]
    if cluster.watch.is_beyond:
        lines.append(("beyond", "more than f of a roster were faulty: nothing is promised but one history"))
    lines += [("FAILED", failure) for failure in outcome.failures]
    return "\n".join(f"{name:12}{text}" for name, text in lines)


def _shut_out(outcome: Outcome) -> str:
    cluster, metrics = outcome.cluster, outcome.cluster.metrics
    banned = _named(cluster.key_index[key] for key in metrics.banned)
    unseated = _named(cluster.key_index[key] for key in metrics.unseated)
    disconnects = sum(metrics.disconnects.values())
    return f"banned: {banned}; lost a seat: {unseated}; {disconnects} disconnections"


def _named(nodes: Iterable[int]) -> str:
    found = sorted(nodes)
    more = f" and {len(found) - NAMED_MAX} more" if len(found) > NAMED_MAX else ""
    return (", ".join(map(str, found[:NAMED_MAX])) + more) or "nobody"
