"""What limits a run of 1, 7 or 72 billion parameters with 16, 64 or 256 nodes, and what a machine with eight cards has
room for: the tables of docs/explanation/scale.md.

    python benchmarks/scale.py                      writes figures/scale.json
    python benchmarks/scale.py --simulate 1000 20   times the simulator, too, with every checker

Sizes are production's own (p2ptrain/train/memory.py), times are those measured on smaller models times the number of
parameters (MEASURED): nothing of this size has run.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import cache
from math import ceil, log2
from typing import Any

from agreement import timed
from figures import FIGURES, load, save

from p2ptrain.config import RunConfig
from p2ptrain.exact.codec import index_widths
from p2ptrain.train.memory import RANK_BYTES, Need, PassSettings, need_of

MODELS: dict[str, dict[str, Any]] = {
    "1B": {"preset": "1b", "vocab_size": 32_768},
    "7B": {
        "dim": 4_096, "layers": 32, "heads": 32, "kv_heads": 8, "ffn_dim": 14_336, "vocab_size": 32_768,
        "sequence_length": 4_096,
    },
    "13B": {
        "dim": 5_120, "layers": 40, "heads": 40, "kv_heads": 40, "ffn_dim": 13_824, "vocab_size": 32_768,
        "sequence_length": 4_096,
    },
    "72B": {
        "dim": 8_192, "layers": 80, "heads": 64, "kv_heads": 8, "ffn_dim": 29_568, "vocab_size": 152_064,
        "sequence_length": 4_096,
    },
}  # fmt: skip
OVER_NODES = ("1B", "7B", "72B")  # in the tables over numbers of nodes
SHARDED = ("7B", "13B", "72B")  # in that of a machine with several cards
CARDS, CARD_BYTES = 8, 80e9
NODES = (16, 64, 256)
KS = (256, 64)  # the default, and a quarter of it
HISTORY_ROUNDS, CHECKPOINTS = 256, 4  # the defaults
LINES = {"100 Mbit/s": 100e6 / 8, "1 Gbit/s": 1e9 / 8, "10 Gbit/s": 10e9 / 8}  # bytes a second, down
CORES = 16  # of the processor beside the card, on which the figures below were measured
ABOUT = ("p2ptrain/exact", "p2ptrain/train/memory.py", "p2ptrain/core", "p2ptrain/sim", "benchmarks/scale.py")


@dataclass(frozen=True)
class Measured:
    """Seconds a parameter, measured at 124M with k = 256 on an H200 and one core beside it."""

    check: float  # of one core, for one payload: the strict decoder in C
    count: float  # of the card, for one contribution, copying it there included
    update: float  # of the card, for a round
    make: float  # of the card, for a contribution of one's own
    root: float  # of the card


@cache
def measured() -> Measured:
    """Reads figures/gpu-h200.json."""
    found = load("gpu-h200")["parts"]["steps"]["figures"]["124m, local, compiled"]
    a_number = 1e-3 / 124e6
    count = (found["apply_ms_100"] - found["apply_ms_8"]) / 92
    return Measured(
        check=found["check_ms"] * a_number,
        count=count * a_number,
        update=(found["apply_ms_8"] - 8 * count) * a_number,
        make=found["contribute_ms"] * a_number,
        root=found["root_ms"] * a_number,
    )


@dataclass(frozen=True)
class OnProcessor:
    """Seconds a parameter of one core, measured at 1B with ten contributions of k = 8 and 32 beside an H100."""

    count: float  # for one contribution with k = 256: a place takes as long there as between 8 and 32
    update: float  # for a round


@cache
def on_processor() -> OnProcessor:
    """Reads figures/gpu-h100.json."""
    found = load("gpu-h100")["parts"]["codec"]["figures"]
    few, more = (found[f"1b, k={k}, cpu"] for k in (8, 32))
    place = (more["apply_ms"] - few["apply_ms"]) / (32 - 8)  # of each chunk, in ten contributions
    a_number = 1e-3 / few["parameters"]
    return OnProcessor(KS[0] * place / 10 * a_number, (few["apply_ms"] - 8 * place) * a_number)


@cache
def need(model: str, k: int, device: str = "cuda") -> Need:
    """Returns what production says that a run takes, with bf16 state on a card and checkpointing.

    device: where a node's own tensors lie; "cpu", if its cards are its ranks' alone
    """
    run = RunConfig.model_validate(
        {
            "name": "scale",
            "model": MODELS[model],
            "tokenizer": {"kind": "json", "digest": "0" * 64},
            "recipe": {"name": "local", "k": k},
        }
    )
    passes = PassSettings(
        autocast=True, checkpointing=True, sequences_per_pass=1, device=device, half_state=True, is_compiled=True
    )
    return need_of(run, passes)


# ---------------------------------------------------------------------------------------------------
# Sums


def sum_bytes(k: int, group: int, area: int = 4_096) -> float:
    """Returns the bytes a parameter of the exact sum of a group's contributions, each with signs at k of the places.

    Places are drawn independently here, which is the worst: those of nodes that learn the same overlap. A sum of g
    signs takes one of 2 g + 1 values. What is shortest counts: the places that are not zero, or all of them.
    """
    places = area * (1.0 - (1.0 - k / area) ** group)
    bits = ceil(log2(2 * group + 1))
    chosen = min(ceil(places), area // 2)
    low, _, upper = index_widths(area, chosen)
    sparse = upper + chosen * (low + bits) if places <= area / 2 else float("inf")
    return min(sparse, area * bits) / area / 8


def down(nodes: int, payload: float, group: int = 1, sum_of_group: float = 0.0) -> float:
    """Returns what a node fetches in a round: the others' payloads, or those of its group and other groups' sums."""
    return (nodes - 1) * payload if group == 1 else (group - 1) * payload + (nodes // group - 1) * sum_of_group


def best_group(nodes: int) -> int:
    """Returns the size of groups for which single payloads and sums are equally many."""
    return int(2 ** round(log2(nodes) / 2))


# ---------------------------------------------------------------------------------------------------
# Tables


def size(count: float) -> str:
    for unit, least in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= 0.9995 * least:
            return f"{count / least:.3g} {unit}" if count / least < 999.5 else f"{count / least:,.0f} {unit}"
    return f"{count / 1e3:.3g} KB"


def span(seconds: float) -> str:
    for unit, least in (("h", 3_600.0), ("min", 60.0)):
        if seconds >= 1.5 * least:
            return f"{seconds / least:.3g} {unit}"
    return f"{seconds:.2g} s" if seconds >= 0.095 else f"{seconds * 1e3:.2g} ms"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(each) + " |" for each in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def bytes_down() -> str:
    """Bytes that a node fetches in a round, and how long a line takes for them."""
    head = ["", "k", "a payload", *(f"down a round, {nodes} nodes" for nodes in NODES)]
    head += [f"{nodes} nodes at 1 Gbit/s" for nodes in NODES]
    rows = []
    for model in OVER_NODES:
        for k in KS:
            payload = need(model, k).payload
            each = [down(nodes, payload) for nodes in NODES]
            rows.append(
                [model, f"{k}", size(payload), *map(size, each), *(span(one / LINES["1 Gbit/s"]) for one in each)]
            )
    return table(head, rows)


def work() -> str:
    """Seconds of a round that are not training."""
    cost, rows = measured(), []
    for model in OVER_NODES:
        parameters = need(model, KS[0]).parameters
        once = (cost.make + cost.update) * parameters
        rows.append(
            [
                model,
                *(span(nodes * cost.check * parameters / CORES) for nodes in NODES),
                *(span(once + nodes * cost.count * parameters) for nodes in NODES),
                span(cost.root * parameters),
            ]
        )
    head = ["", *(f"check {nodes} payloads, {CORES} cores" for nodes in NODES)]
    return table([*head, *(f"make one, apply {nodes}, a card" for nodes in NODES), "a whole root"], rows)


def room() -> str:
    """Memory and disk of a node, and what a newcomer fetches."""
    rows = []
    for model in OVER_NODES:
        each = need(model, KS[0])
        disks = [each.disk(CHECKPOINTS, HISTORY_ROUNDS, nodes) for nodes in NODES]
        few = each.disk(CHECKPOINTS, 16, NODES[1])
        joins = [span(each.agreed / rate) for rate in LINES.values()]
        rows.append(
            [
                model,
                size(each.trainer),
                size(each.main("cuda")),
                *map(size, disks),
                size(few),
                size(each.agreed),
                *joins,
            ]
        )
    head = ["", "on the card", "main memory", *(f"disk, {nodes} nodes" for nodes in NODES)]
    head += [f"disk, {NODES[1]} nodes, 16 rounds kept", "a state"]
    return table([*head, *(f"fetched at {line}" for line in LINES)], rows)


def on_cards(model: str) -> tuple[Need, int]:
    """Returns what a rank takes whose node has so many cards, and the main memory of that machine: as `demands_of`."""
    own = need(model, KS[0], "cpu")
    return need(model, KS[0]), own.main("cpu") + own.state + own.inner + (CARDS + 1) * RANK_BYTES


def ranks() -> str:
    """Memory of a card that is one of several ranks with a part each, and how it adds up."""
    rows = []
    for model in SHARDED:
        each, _ = on_cards(model)
        part = (2 * each.state + each.inner) / CARDS
        terms = each.state, each.inner, part, each.gathered, each.activations, each.rank(CARDS)
        rows.append([model, f"{each.parameters / 1e9:.1f}", *map(size, terms)])
        rows[-1].append("yes" if each.rank(CARDS) <= CARD_BYTES else "no")
    head = ["", "billions of parameters", "weights (w)", "inner state (i)", f"(2 w + i) / {CARDS}", "gathered"]
    return table([*head, "a pass", "a rank: the last three together", f"fits {size(CARD_BYTES)}"], rows)


def main_memory() -> str:
    """Main memory of a machine whose cards are ranks, and how it adds up; traffic and work of a round."""
    rows, nodes = [], NODES[0]
    for model in SHARDED:
        own, (_, whole) = need(model, KS[0], "cpu"), on_cards(model)
        begun, passes = own.optimizer - own.inner, max(own.activations, own.codec, own.filter)
        shared, files = own.state + own.inner, own.checkpoint
        terms = 3 * own.state, begun, own.inner, own.residual, shared, passes, files
        rest = whole - sum(terms)
        one = (on_processor().update + nodes * on_processor().count) * own.parameters
        rows.append([model, *map(size, (*terms, rest, whole)), size(own.payload), size(down(nodes, own.payload))])
        rows[-1] += [span(one), span(one / CORES)]
    head = ["", "3 w", "where a round began", "i", "residual", "shared with ranks: w + i", "a pass or the codec"]
    head += ["a checkpoint", "the rest", "main memory: all of these", "a payload", f"down a round, {nodes} nodes"]
    return table([*head, f"apply {nodes}, one core", f"with {CORES}, if that divides evenly"], rows)


def sums() -> str:
    """Bytes down a round of 7B with sums of neighbours, exact ones and such as are compressed again."""
    rows = []
    for nodes in NODES:
        for k in KS:
            payload, group = need("7B", k).payload, best_group(nodes)
            parameters = need("7B", k).parameters
            exact = sum_bytes(k, group) * parameters
            single, with_sums, again = (
                down(nodes, payload),
                down(nodes, payload, group, exact),
                down(nodes, payload, group, payload),
            )
            rows.append(
                [
                    f"{nodes}", f"{k}", f"{group}", f"{exact / payload:.1f}", size(single),
                    f"{size(with_sums)} ({with_sums / single:.2f})", f"{size(again)} ({again / single:.2f})",
                ]
            )  # fmt: skip
    head = ["nodes", "k", "of a group", "a sum, in payloads", "all payloads", "own group's and exact sums"]
    return table([*head, "sums compressed again"], rows)


def arithmetic() -> dict[str, Any]:
    """Returns the tables and the figures of the page's sentences."""
    cost = measured()
    return {
        "bytes down": bytes_down(),
        "work": work(),
        "room": room(),
        "sums": sums(),
        "picoseconds a parameter": {
            "check": round(cost.check * 1e12, 1),
            "count": round(cost.count * 1e12, 2),
            "update": round(cost.update * 1e12, 1),
            "make": round(cost.make * 1e12, 1),
            "root": round(cost.root * 1e12, 1),
        },
        "bytes a parameter": {f"{k}": round(need("7B", k).payload / need("7B", k).parameters, 5) for k in KS},
        "billions of parameters": {model: round(need(model, KS[0]).parameters / 1e9, 2) for model in MODELS},
        "ranks": ranks(),
        "main memory": main_memory(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--simulate", type=int, nargs=2, metavar=("NODES", "ROUNDS"), action="append", default=[])
    asked = parser.parse_args()
    path = FIGURES / "scale.json"
    kept = load("scale").get("simulated", {}) if path.exists() else {}
    for nodes, rounds in asked.simulate:
        _, row = timed(nodes, rounds)
        print(row, flush=True)
        kept[f"{nodes} nodes, {rounds} rounds"] = row
    save(path, {**arithmetic(), "simulated": kept}, ABOUT)


if __name__ == "__main__":
    main()
