"""The report: a simulation in a few lines for a person, and as a picture."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from p2ptrain.errors import ConfigError
from p2ptrain.sim.outcome import Outcome, final_members, rate

NAMED_MAX = 12  # nodes that a line names one by one


def summary(outcome: Outcome, seed: int) -> str:
    """What happened, line by line."""
    cluster, metrics = outcome.cluster, outcome.cluster.metrics
    scenario, rounds = cluster.scenario, max(1, len(cluster.metrics.manifests))
    nodes = len(cluster.nodes)
    share = f", {rate(cluster) / outcome.clean_rate:.0%} of the clean rate" if outcome.clean_rate else ""
    views = list(metrics.views.values())
    later = sum(view > 0 for view in views)
    taken = sum(metrics.taken.values())
    lines = [
        ("scenario", scenario.sentence),
        ("nodes", f"{nodes}, seed {seed}, {cluster.now:.1f} virtual seconds, {cluster.deliveries:,} messages arrived"),
        ("rounds", f"{len(metrics.manifests)} decided, {rate(cluster):.1f} a minute{share}"),
        ("views", f"{later} rounds took more than one, the longest {max(views, default=0) + 1}"),
        ("taken", f"{taken:,} contributions, {taken / rounds:.1f} a round; {metrics.empty_rounds()} empty rounds"),
        (
            "traffic",
            f"a node and round: {metrics.heard_messages / nodes / rounds:,.1f} messages and "
            f"{metrics.heard_bytes / nodes / rounds:,.0f} bytes in, before gossip's own duplication",
        ),
        ("lost quorum", f"{sum(metrics.stalls.values())} alarms, {len(metrics.branches)} branches begun"),
        ("catching up", f"{sum(metrics.states_fetched.values())} states and {metrics.fetches:,} payloads fetched"),
        ("shut out", _shut_out(outcome)),
        ("members", f"{len(final_members(cluster))} in the end"),
    ]
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


def plot(outcome: Outcome, path: Path) -> None:
    """Rounds over time, a line for each node, with the faults behind them."""
    try:
        import matplotlib as mpl  # noqa: PLC0415  (an extra, and slow to import)
    except ImportError as error:
        raise ConfigError("needs matplotlib", key="--plot", fix="Run: pip install 'p2ptrain[plot]'") from error
    mpl.use("agg")
    from matplotlib import pyplot  # noqa: PLC0415

    cluster = outcome.cluster
    figure, axes = pyplot.subplots(figsize=(10, 6), layout="constrained")
    for fault in cluster.scenario.fault:
        until = getattr(fault, "until", None) or fault.at
        axes.axvspan(fault.at, max(until, fault.at + 0.002 * cluster.now), color="tab:red", alpha=0.08, linewidth=0)
    for node in cluster.nodes:
        applied = cluster.metrics.timeline.get(node.index, [])
        times, numbers = [0.0, *(at for at, _ in applied)], [0, *(number for _, number in applied)]
        colour = "tab:blue" if node.honest else "tab:orange"
        axes.step(times, numbers, where="post", color=colour, alpha=0.5, linewidth=1)
    axes.set_xlabel("virtual seconds")
    axes.set_ylabel("round applied")
    axes.set_title(cluster.scenario.sentence, wrap=True, fontsize=10)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot be written: {error}", source=str(path), fix="Choose a file such as out.png"
        ) from error
    finally:
        pyplot.close(figure)
