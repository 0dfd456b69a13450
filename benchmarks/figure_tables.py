"""Derives from the rows of benchmarks/figures/*.json what pages tell of them: tables, ratios, sums. For figures.py."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

Json = Any
FIGURES = Path(__file__).resolve().parent / "figures"
MEASURED_CELL = "p2ptrain, 50 Mbit/s, 25 ms, 128 steps, k = 64, overlap"


# ---------------------------------------------------------------------------------------------------
# Learning


def methods(found: Json) -> str:
    """Returns the table of `learning.py`, the lowest loss first."""
    differs = len({row["steps"] for row in found["rows"]}) > 1
    lines = [f"| method | held-out loss, nats a byte | bytes a step | fp32 gradients are |{' steps |' * differs}"]
    lines.append("|---" * (4 + differs) + "|")
    for row in found["rows"]:
        steps = f" {row['steps']} |" * differs
        deviation = f" ± {row['deviation']:.3f}" if row["deviation"] else ""
        loss = f"{row['loss']:.3f}{deviation}{'*' * row['edge']}"
        size, ratio = row["bytes_per_peer_step"], 4 * row["parameters"] / row["bytes_per_peer_step"]
        lines.append(f"| {row['method']} | {loss} | {size:,.0f} | {ratio:,.0f} |{steps}")
    return "\n".join(lines)


def between_nodes(found: Json) -> dict[str, dict[str, float]]:
    """Returns by how much what a node sends of a method is smaller than fp32 gradients in a ring, by method and nodes.

    In a ring each of N nodes sends 2 (N - 1) / N gradients. Ours sends each contribution N - 1 times on average, and
    what comes on top is as in the measured frontier.
    """
    frontier = json.loads((FIGURES / "frontier.json").read_text(encoding="utf-8"))
    (cell,) = (each for each in frontier["cells"] if each["name"] == MEASURED_CELL)
    payloads = cell["sent"] / frontier["costs"]["payloads"][str(cell["k"])]  # where three others fetch it
    told = {
        name: {str(nodes): ratio * 2 / nodes * 3 / payloads for nodes in (4, 64)}
        for name, ratio in ratios(found).items()
    }
    return told | {"payloads sent": {"4": payloads}}


def ratios(found: Json) -> dict[str, float]:
    """Returns by how much fp32 gradients are larger, by method."""
    return {row["method"]: 4 * row["parameters"] / row["bytes_per_peer_step"] for row in found["rows"]}


def beside_adamw(found: Json) -> dict[str, dict[str, float]]:
    """Returns the last loss of `distro`, how much smaller it is than fp32 gradients, and how far behind AdamW."""
    told = {}
    for row in found["rows"]:
        if row["name"] == "distro":
            names = ("AdamW", row["parameters"])
            (adamw,) = (each["curve"] for each in found["rows"] if (each["name"], each["parameters"]) == names)
            loss, ratio = row["curve"][-1][1], 4 * row["parameters"] / row["bytes_per_peer_step"]
            behind = loss - adamw[-1][1]
            told[str(row["parameters"])] = {"loss": loss, "fp32 gradients are": ratio, "behind AdamW": behind}
    return told


def over_steps(found: Json) -> str:
    """Returns the losses of the family while it trains, between the points of its curves interpolated."""
    steps = (70, 140, 280, 420, 600)
    lines = [f"| after steps | {' | '.join(map(str, steps))} |", "|---" * (1 + len(steps)) + "|"]
    for row in sorted(found["rows"], key=lambda row: row["curve"][-1][1]):
        losses = [f"{_between(row['curve'], step):.{2 if step < steps[-1] else 3}f}" for step in steps]
        lines.append(f"| {row['method'].removesuffix(', 4 peers')} | {' | '.join(losses)} |")
    return "\n".join(lines)


def _between(curve: list[list[float]], step: float) -> float:
    (first, before), (second, after) = next(pair for pair in pairwise(curve) if pair[1][0] >= step)
    return before + (after - before) * (step - first) / (second - first)


def late(found: Json) -> str:
    """Returns the gap and the loss beyond that without delay, by how late a round is applied and by the share."""
    names = {
        (1, 2): "2 of the next round's 10 steps",
        (1, 5): "5 of them",
        (1, 0): "all of them",
        (2, 0): "2 whole rounds",
        (4, 0): "4 whole rounds",
    }
    lines = ["| applied after | 0 | 1/4 | 1/2 (ours) | 3/4 | 1 |", "|---|---|---|---|---|---|"]
    for late_by, name in names.items():
        rows = [row for row in found["rows"] if row["group"] == "late" and (row["delay"], row["between"]) == late_by]
        cells = [f"{row['gap']:.2f}, {row['more_loss']:.3f}" for row in sorted(rows, key=_share)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _share(row: dict[str, Json]) -> Fraction:
    return Fraction(row["early_share"])


def unequal(found: Json) -> str:
    """Returns the loss beyond that of equal peers, by the steps that four take in a round."""
    rows = [row for row in found["rows"] if row["group"] == "unequal"]
    lines = ["| steps of the four in a round | loss beyond that of equal peers |", "|---|---|"]
    lines += [f"| {', '.join(map(str, row['steps_of']))} | {row['more_loss'] or 0:.3f} |" for row in rows]
    return "\n".join(lines)


def fragments(found: Json) -> dict[str, Json]:
    """Returns the gap and the loss beyond that of whole contributions, by the number of fragments."""
    rows = [row for row in found["rows"] if row["group"] == "fragments" and row["fragments"] > 1]
    return {str(row["fragments"]): {"gap": row["gap"], "more loss": abs(row["more_loss"])} for row in rows}


# ---------------------------------------------------------------------------------------------------
# Liars


def lies(found: Json) -> dict[str, list[float]]:
    """Returns for each rule, swarm and lie the loss, and that over the losses without the liars and without lies."""
    rows = [row for row in found["rows"] if row["setting"]["steps"] == 200]
    absent = {(row["peers"], row["liars"]): row["loss"] for row in rows if not row["lie"]}
    honest = {row["peers"]: row["loss"] for row in rows if row["lie"] == "honest" and row["rule"] == "all"}
    told = {f"absent, {liars} of {peers}": [loss] for (peers, liars), loss in absent.items()}
    for row in rows:
        loss, swarm = row["loss"], (row["peers"], row["liars"])
        if row["lie"] == "honest":
            told[f"{row['rule']}, honest, {row['peers']}"] = [loss]
        elif row["lie"]:
            ratios_of_it = [loss, loss / absent[swarm], loss / honest[row["peers"]]]
            told[f"{row['rule']}, {row['lie']}, {row['liars']} of {row['peers']}"] = ratios_of_it
    return told


# ---------------------------------------------------------------------------------------------------
# Audits


FILTERED = {  # recipes of matched_filter.py, and their names in two pages
    "local muon": ("local muon, 80 sequences a round", "local muon, batch 8"),
    "local muon, batch 32": ("the same with 320", "local muon, batch 32"),
    "local adamw": ("local adamw", "local adamw"),
    "distro": ("distro, all of 32 sequences", "distro"),
    "demo": ("demo, all of 32", "demo"),
    "local muon, data in parts": ("local muon, each member a part of the text", "local muon, data in parts"),
    "local muon, larger model": ("local muon, 0.8M", "local muon, 0.8M parameters"),
    "local muon, adapters": ("local muon, adapters", "local muon, adapters (LoRA, rank 16)"),
}
# Of a part of a run: count, mean z, its deviation, the least, mean strength, its deviation, the least, share below 0.3.
MEAN, DEVIATION, LEAST, STRENGTH, BELOW = 1, 2, 3, 4, 7


def seen(found: Json) -> str:
    """Returns what decisive audits see of contributions by nine members, in three parts of a run."""
    lines = [
        "| z of | its author's own work | another's, copied | own less 2 means of the others, and its strength "
        "| forged from a quarter | turned around |",
        "|---|---|---|---|---|---|",
    ]
    for recipe, (name, _) in FILTERED.items():
        kinds = _kinds(found, recipe, "decisive")
        less, quarter, turned = (_column(kinds[kind], MEAN) for kind in ("own-2", "forged 25", "flip"))
        cells = (
            ", ".join(f"{each:.2f}" for each in _column(kinds["honest"], MEAN)),
            _span(_column(kinds["copy"], MEAN)),
            f"{_each(less)}; {_span(_column(kinds['own-2'], STRENGTH))}",
            _each(quarter),
            _each(turned),
        )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def honest_work(found: Json) -> str:
    """Returns z of honest work in three parts of a run, and how far that of copies is spread."""
    lines = ["| | decisive | of a copy | sparse | of a copy |", "|---|---|---|---|---|"]
    for recipe, (_, name) in FILTERED.items():
        decisive, sparse = (_kinds(found, recipe, audit) for audit in ("decisive", "sparse"))
        cells = (
            " / ".join(
                f"{part[MEAN]:.2f} ({part[DEVIATION]:.2f}, {part[LEAST] + 0.0:.2f})" for part in decisive["honest"]
            ),
            _span(_column(decisive["copy"], DEVIATION)),
            " / ".join(f"{part[MEAN]:.2f} ({part[DEVIATION]:.2f})" for part in sparse["honest"]),
            _span(_column(sparse["copy"], DEVIATION)),
        )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def of_honest_work(found: Json) -> list[float]:
    """Returns the least and the largest mean z of honest work after the first fifth of a run."""
    z = [part[MEAN] for recipe in FILTERED for part in _kinds(found, recipe, "decisive")["honest"][1:]]
    return [min(z), max(z)]


def few(found: Json) -> str:
    """Returns z of honest work and how far that of copies is spread, by how many contributions there are."""
    lines = ["| contributions | honest | copy |", "|---|---|---|"]
    for members in (9, 4, 3, 2, 1):
        kinds = _kinds(found, "local muon, batch 32", "decisive", members)
        honest = " / ".join(f"{part[MEAN]:.2f} ({part[DEVIATION]:.2f})" for part in kinds["honest"])
        copies = _column(kinds["copy"], DEVIATION)
        lines.append(f"| {members} | {honest} | {min(copies):.2f} to {max(copies):.2f} |")
    return "\n".join(lines)


def told_apart(found: Json) -> str:
    """Returns mean z and strength of each kind of contribution from the middle of a run on, and how often z is low."""
    names = {
        ("honest",): "honest",
        ("copy", "other data"): "copy; other data",
        ("resend",): "its own of the round before",
        ("mean", "little"): "the others' mean; ALIE",
        ("minus", "noise"): "minus the mean; noise",
        ("flip",): "its own turned around",
        ("ascent",): "up the gradient",
        ("own-2",): "own work less 2 means of the others",
        ("own-5",): "own work less 5 means",
        ("quarter",): "a quarter of each batch",
        ("forged 10",): "forged from 10 % of the sequences",
        ("forged 25",): "forged from 25 %",
        ("backdoor",): "a backdoor beside own work",
    }
    lines = ["| | local muon, batch 8 | batch 32 | distro |", "|---|---|---|---|"]
    for kinds, name in names.items():
        cells = []
        for recipe in ("local muon", "local muon, batch 32", "distro"):
            parts = [_kinds(found, recipe, "decisive")[kind][1:] for kind in kinds]
            z, below = ([part[place] for each in parts for part in each] for place in (MEAN, BELOW))
            strengths = dict.fromkeys(_span(_column(each, STRENGTH)) for each in parts)
            low = " to ".join(dict.fromkeys(f"{100 * each:.0f}" for each in (min(below), max(below))))
            cells.append(f"{_span(z)} / {'; '.join(strengths)}; {low} %")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def honest_audits(found: Json) -> dict[str, Json]:
    """Returns how many audits there were, how many had a bad z, and how many too little strength."""
    rows, kinds = found["rows"], ("decisive", "sparse")
    counted = {name: [sum(row[name][place] for row in rows) for place in range(3)] for name in kinds}
    return {"all": sum(counts[0] for counts in counted.values()), **counted}


def _kinds(found: Json, recipe: str, audit: str, members: int = 9) -> dict[str, list[list[float]]]:
    is_asked = (recipe, audit, members)
    return next(row["kinds"] for row in found["rows"] if (row["recipe"], row["audit"], row["members"]) == is_asked)


def _column(parts: Iterable[Sequence[float]], place: int) -> list[float]:
    return [part[place] for part in parts]


def _each(values: Sequence[float]) -> str:
    return ", ".join(_tenths(value) for value in values)


def _span(values: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(_tenths(each) for each in (min(values), max(values))))


def _tenths(value: float) -> str:
    return f"{round(value + math.copysign(1e-9, value), 1) + 0.0:.1f}"  # a half away from zero, and no -0.0


# ---------------------------------------------------------------------------------------------------
# Transports


def by_cell(found: Json) -> dict[str, Json]:
    """Returns the rows by cell, line and road."""
    return {f"{row['cell']}, {row['line']}, {row['road']}": row for row in found["rows"]}


VIEWS: dict[str, dict[str, Callable[[Json], Json]]] = {
    "learning": {"methods": methods},
    "learning-0.8m": {"methods": methods, "fp32 gradients are": ratios, "between nodes": between_nodes},
    "family-0.8m": {"over steps": over_steps},
    "distro": {"beside AdamW": beside_adamw},
    "lateness": {"late": late, "unequal": unequal, "fragments": fragments},
    "poison": {"lies": lies},
    "matched_filter": {"seen": seen, "honest": honest_work, "few": few, "told apart": told_apart, "z": of_honest_work},
    "transports": {"by": by_cell},
    "honest_audits": {"audits": honest_audits},
}
