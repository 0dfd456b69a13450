"""The cost of agreement as a swarm grows, and the speed of its simulation.

    python benchmarks/agreement.py [speed] [growth] [loss] [payload] [straggler] [--seeds N] [--json FILE]
        [--plot FILE] [--quick]

`speed`: 200 nodes for 50 clean rounds and 1,000 nodes for 5, on one core, with every checker once a node and round.
`growth`: messages and bytes that reach a node in a round, from 4 to 1,000 nodes, counted before gossip's own
duplication (a published message counts once for every receiver), with the formula that fits. At most 256 nodes have a
vote, so it has two variables: N nodes that contribute, M = min(N, 256) that vote. `loss`: 5% of messages lost and
round trips of 200 ms, at 10 s of training, with payloads of 40 bytes. `straggler`: one machine ten times slower. Both
are the scenarios of that name, over several seeds, beside their clean twins, whose lines have no limit. `payload`:
`loss` with the payloads of the default recipe at 10M parameters, on lines of 10 Mbit/s up. --quick: small sizes, to
see that it runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from p2ptrain.config import RunConfig
from p2ptrain.sim.checkers import standard
from p2ptrain.sim.cluster import Cluster
from p2ptrain.sim.outcome import Outcome, rate, simulate
from p2ptrain.sim.scenario import Scenario, load_scenario, scenario_of
from p2ptrain.train.memory import need_of

SCENARIOS = Path(__file__).parents[1] / "scenarios"
SEATS = 256
SIZES = (4, 8, 16, 32, 64, 128, 256, 512, 1_000)
PARTS = ("speed", "growth", "loss", "payload", "straggler")
UP_MEGABITS = 10.0


def clean(nodes: int, rounds: int) -> Outcome:
    """Simulates a clean run with every checker."""
    text = {"sentence": f"{nodes} nodes, {rounds} clean rounds.", "nodes": nodes, "rounds": rounds}
    return simulate(scenario_of(text), 1, standard())


def timed(nodes: int, rounds: int) -> tuple[Outcome, dict[str, Any]]:
    gc.collect()  # what the run before left behind is not part of this one
    start, cpu_start = time.perf_counter(), time.process_time()
    outcome = clean(nodes, rounds)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu_start
    assert outcome.is_good, outcome.failures
    heard = outcome.cluster.metrics.heard_messages
    return outcome, {
        "nodes": nodes,
        "rounds": len(outcome.cluster.metrics.manifests),
        "messages": heard,
        "seconds": round(seconds, 1),
        "of CPU": round(cpu, 1),
        "microseconds a message": round(cpu / heard * 1e6, 2),
        "peak MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def per_node_and_round(cluster: Cluster) -> dict[str, float]:
    metrics = cluster.metrics
    places = len(cluster.nodes) * len(metrics.manifests)
    return {"messages": metrics.heard_messages / places, "bytes": metrics.heard_bytes / places}


# ---------------------------------------------------------------------------------------------------
# The parts


def speed(quick: bool) -> list[dict[str, Any]]:
    sizes = [(20, 5), (40, 2)] if quick else [(200, 50), (1_000, 5)]
    rows = []
    for nodes, rounds in sizes:
        rows.append(timed(nodes, rounds)[1])
        print("  ".join(f"{name} {value:,}" for name, value in rows[-1].items()))
    return rows


def growth(quick: bool) -> dict[str, Any]:
    sizes = SIZES[:4] if quick else SIZES
    rows = []
    print("     N      M   messages in        bytes in     (a node and round)")
    for nodes in sizes:
        found = per_node_and_round(clean(nodes, 5 if nodes <= SEATS else 2).cluster)
        rows.append({"nodes": nodes, "members": min(nodes, SEATS), **found})
        print(f"{nodes:6,} {min(nodes, SEATS):6,} {found['messages']:13,.1f} {found['bytes']:15,.0f}")
    fits = {
        "messages": fit(rows, "messages", {"N": lambda n, m: n, "M": lambda n, m: m}),
        "bytes": fit(rows, "bytes", {"N": lambda n, m: n, "M": lambda n, m: m, "N M": lambda n, m: n * m}),
    }
    for what, found in fits.items():
        terms = " + ".join(f"{factor:.4g} {name}" for name, factor in found["factors"].items())
        print(f"{what} = {terms}   (off by {found['error']:.1%} at most)")
    return {"rows": rows, "fits": fits}


def fit(rows: list[dict[str, Any]], what: str, terms: dict[str, Any]) -> dict[str, Any]:
    """Fits by least squares of relative errors, so that small swarms count as much as large ones."""
    basis = np.array([[term(row["nodes"], row["members"]) for term in terms.values()] for row in rows], dtype=float)
    found = np.array([row[what] for row in rows])
    factors, *_ = np.linalg.lstsq(basis / found[:, None], np.ones(len(rows)), rcond=None)
    error = np.abs(basis @ factors / found - 1.0).max()
    return {"factors": dict(zip(terms, factors.tolist(), strict=True)), "error": float(error)}


def with_payloads(scenario: Scenario) -> Scenario:
    """Returns it with payloads of `local` at 10M parameters, on lines that have a rate."""
    size = need_of(RunConfig.model_validate({"name": "payload", "model": {"preset": "10m"}})).payload
    training = replace(scenario.training, payload_bytes=size)
    return replace(scenario, training=training, links=replace(scenario.links, bytes_per_second=UP_MEGABITS * 125_000))


def beside_twin(scenario: Scenario, seeds: int) -> dict[str, Any]:
    """Returns a scenario's rate over that of its clean twin, for several seeds."""
    shares, taken = [], []
    for seed in range(1, seeds + 1):
        outcome = simulate(scenario, seed, standard())
        assert outcome.clean_rate is not None, "these scenarios have a rate to be held to"
        shares.append(rate(outcome.cluster) / outcome.clean_rate)
        taken.append(outcome.cluster.metrics.taken[outcome.cluster.nodes[-1].key])
        for failure in outcome.failures:
            print(f"seed {seed}: {failure}")
    row = {"seeds": seeds, "share": statistics.median(shares), "least": min(shares), "taken of the last": min(taken)}
    print("  ".join(f"{key} {value:.3g}" for key, value in row.items()))
    return row


def plot(found: dict[str, Any], path: Path) -> None:
    import matplotlib as mpl  # noqa: PLC0415  (slow, and only for this)

    mpl.use("agg")
    from matplotlib import pyplot  # noqa: PLC0415

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    nodes = np.geomspace(SIZES[0], SIZES[-1], 200)
    members = np.minimum(nodes, SEATS)
    values = {"N": nodes, "M": members, "N M": nodes * members}
    for axis, what in zip(axes, ("messages", "bytes"), strict=True):
        factors = found["fits"][what]["factors"]
        axis.plot(nodes, sum(factor * values[name] for name, factor in factors.items()), color="tab:gray", zorder=0)
        axis.scatter([row["nodes"] for row in found["rows"]], [row[what] for row in found["rows"]], color="tab:blue")
        axis.set(
            xscale="log", yscale="log", xlabel="nodes N; M = min(N, 256) vote", ylabel=f"{what} in, a node and round"
        )
        axis.set_title(" + ".join(f"{factor:.3g} {name}" for name, factor in factors.items()), fontsize=10)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all if none is named")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"no part {min(unknown)!r}: choose of {', '.join(PARTS)}")
    found: dict[str, Any] = {}
    for part in arguments.parts or PARTS:
        print(f"-- {part}", flush=True)
        match part:
            case "speed":
                found[part] = speed(arguments.quick)
            case "growth":
                found[part] = growth(arguments.quick)
            case _:
                scenario = load_scenario(SCENARIOS / f"{'loss' if part == 'payload' else part}.toml")
                scenario = with_payloads(scenario) if part == "payload" else scenario
                found[part] = beside_twin(scenario, 1 if arguments.quick else arguments.seeds)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    if arguments.plot and "growth" in found:
        plot(found["growth"], arguments.plot)


if __name__ == "__main__":
    main()
