"""The figures, the page's report and the picture of a run to show (run_to_show.py), from what its nodes have on disk.

Roots are compared between the records of all nodes, those that have left among them, in every round. The history of the
first node is audited by `p2ptrain audit`, run by run, from the first state of each: a copy of its directory gets the
states that the program kept beside the node. `read` takes back only a file that is whole and as it was written.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from figures import ROOT, save
from show_nodes import command, environment
from show_plan import KEEPER

from p2ptrain.errors import DataError
from p2ptrain.observe.rounds import recorded
from p2ptrain.observe.schema import RoundRecord
from p2ptrain.store.records import ROUNDS_MAX

ABOUT = ("p2ptrain/core", "p2ptrain/exact", "p2ptrain/train", "p2ptrain/node", "benchmarks/show_plan.py")
POINTS_MAX = 600  # of a curve in the file
COLOURS = 64  # of the picture, which then weighs a third
PAGE_BYTES_MAX = 1_500_000
WANTED: dict[str, Callable[[Any], bool]] = {  # what the file must have, and how it must look
    "runs": lambda rows: bool(rows) and all(one["last"] <= other["last"] for one, other in pairwise(rows)),
    "rounds": lambda count: type(count) is int and count > 0,
    "hours": lambda hours: hours["from first to last"] >= hours["slept"] >= 0,
    "held-out loss": lambda rows: bool(rows) and _rises(row[0] for row in rows) and _are_losses(row[1] for row in rows),
    "training loss": lambda rows: bool(rows) and _rises(row[0] for row in rows) and _are_losses(row[1] for row in rows),
    "members": lambda rows: bool(rows) and _rises(row[0] for row in rows),
    "events": lambda rows: bool(rows) and _rises(row["hours"] for row in rows),
    "counts": lambda counts: all(type(each) is int and each >= 0 for each in counts.values()),
    "roots": lambda roots: 0 < roots["told by several nodes"] <= roots["rounds"] and type(roots["differ"]) is list,
    "audits": lambda rows: bool(rows) and all(type(row["all holds"]) is bool for row in rows),
    "totals": lambda totals: all(each > 0 for each in totals.values()),
}


class WrongFileError(Exception):
    """A file of figures that lacks something, or is not what was written."""


def _rises(values: Iterable[float]) -> bool:
    return all(one <= other for one, other in pairwise([*values]))


def _are_losses(values: Iterable[float]) -> bool:
    return all(math.isfinite(each) and each >= 0 for each in values)


def digest_of(found: dict[str, Any]) -> str:
    told = {key: found[key] for key in WANTED}
    return blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=16).hexdigest()


def check(found: dict[str, Any]) -> None:
    """Raises WrongFileError if figures are not whole, or not as they were written."""
    for key, is_right in WANTED.items():
        if key not in found:
            raise WrongFileError(f"{key!r} is missing")
        try:
            if not is_right(found[key]):
                raise WrongFileError(f"{key!r} cannot be")
        except (TypeError, KeyError, IndexError, AttributeError, ValueError) as error:
            raise WrongFileError(f"{key!r} is damaged") from error
    if found.get("digest") != digest_of(found):
        raise WrongFileError("the digest is that of other figures")


def read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WrongFileError(f"{path}: {error}") from error
    if not isinstance(found, dict):
        raise WrongFileError(f"{path} holds no figures")
    check(found)
    return found


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a file of lines; a kill may have cut off the last one."""
    found = []
    for line in path.read_text().splitlines():
        with suppress(ValueError):
            found.append(json.loads(line))
    return found


# ---------------------------------------------------------------------------------------------------
# From the disk


def collect(directory: Path) -> dict[str, Any]:
    """Returns all figures of a run's directory; its daemons may be running."""
    events, minutes = lines_of(directory / "events.jsonl"), lines_of(directory / "figures.jsonl")
    records = records_of(directory)
    for before, each in pairwise(events):  # a program that has just started does not know the round
        each["round"] = max(before["round"], each["round"])
    begun, (*_, newest) = events[0]["at"], minutes
    runs = runs_of(directory, events, newest["round"])
    kinds = [each["what"] for each in events]
    slept = sum(each["seconds"] for each in events if each["what"] == "slept")
    told = measured(lines_of(directory / "losses.jsonl"), [each["run"] for each in runs])
    losses = [[number, loss] for number, loss in sorted(swarm_losses(records).items())]
    away = [each["seconds"] for each in events if each["what"] == "back"]
    found: dict[str, Any] = {
        "runs": runs,
        "rounds": newest["round"],
        "hours": {
            "from first to last": round((newest["at"] - begun) / 3_600, 2),
            "slept": round(slept / 3_600, 2),
            "away after a kill, median seconds": round(median(away)) if away else 0,
        },
        "held-out loss": told,
        "training loss": thinned(losses),
        "members": thinned([[each["round"], each["members"]] for each in minutes]),
        "events": [row_of(each, begun) for each in events if each["what"] not in ("complaint", "back")],
        "counts": {
            "runs": len(runs),
            "kills": kinds.count("killed"),
            "joins": kinds.count("joins") + 1,  # the first node is no event
            "leaves": kinds.count("leaves"),
            "ended by themselves": kinds.count("ended by itself"),
            "suspensions": sum(each.get("standing") in ("suspended", "expelled") for each in events),
            "successions": kinds.count("succession"),
            "roll-backs": sum("goes back to" in each for each in runs),
            "sleeps of all": kinds.count("slept"),
            "wrong states": kinds.count("wrong state"),
        },
        "roots": compared(records),
        "audits": [audited(directory, each["run"]) for each in runs],
        "totals": {
            "tokens": newest["tokens"],
            "MB sent": round(newest["sent"] / 1e6),
            "MB received": round(newest["received"] / 1e6),
            "MB of memory of all nodes, median": round(median(each["memory"] for each in minutes) / 1e6),
            "MB of memory of all nodes, most": round(max(each["memory"] for each in minutes) / 1e6),
            "seconds of a round, median": round(round_seconds(records), 1),
        },
    }
    return found | {"digest": digest_of(found)}


def row_of(event: dict[str, Any], begun: float) -> dict[str, Any]:
    row = {"round": event["round"], "hours": round((event["at"] - begun) / 3_600, 3), "what": event["what"]}
    more = {key: event[key] for key in ("node", "lie", "standing", "away", "seconds", "status") if event.get(key)}
    return row | more


def runs_of(directory: Path, events: Sequence[dict[str, Any]], newest: int) -> list[dict[str, Any]]:
    """Returns the runs that followed one another, and how each differs from the one before."""
    found: list[dict[str, Any]] = []
    before: dict[str, Any] = {}
    names = [each["run"][:16] for each in events if each["what"] in ("run", "succession")]
    ends = [each["round"] for each in events if each["what"] == "succession"]
    for place, name in enumerate(names):
        run = json.loads((directory / "nodes" / KEEPER / "runs" / name / "run.json").read_text())
        recipe = run["recipe"]
        row = {"run": name, "last": ends[place] if place < len(ends) else max(ends, default=0)}
        row["first"] = run.get("predecessor", {}).get("round", 0) + 1
        row["settings"] = {key: recipe[key] for key in recipe if not before or before.get(key) != recipe[key]}
        moved = [each for each in events if each["what"] == "moves" and "--back-to" in each["arguments"]]
        back = [each["arguments"][each["arguments"].index("--back-to") + 1] for each in moved
                if place and each["at"] < times(events)[place] and each["at"] > times(events)[place - 1]]  # fmt: skip
        if back:
            row["goes back to"] = int(back[-1])
        before = recipe
        found.append(row)
    if found:
        found[-1]["last"] = max(newest, found[-1]["first"])
        found[0]["settings"] = {key: found[0]["settings"][key] for key in ("name", "inner", "local_steps", "k")}
    return found


def times(events: Sequence[dict[str, Any]]) -> list[float]:
    return [each["at"] for each in events if each["what"] in ("run", "succession")]


def records_of(directory: Path) -> dict[tuple[str, str], list[RoundRecord]]:
    """Returns the records of each node and run."""
    found = {}
    for place in sorted((directory / "nodes").glob("*/runs/*")):
        with suppress(DataError):  # none is recorded yet
            found[place.parents[1].name, place.name] = recorded(place, ROUNDS_MAX)
    return found


def compared(records: dict[tuple[str, str], list[RoundRecord]]) -> dict[str, Any]:
    """Compares the root of every round between all who have applied it."""
    roots: dict[tuple[str, bytes, int], dict[bytes, int]] = defaultdict(lambda: defaultdict(int))
    for (_, run), rounds in records.items():
        for each in rounds:
            roots[run, each.branch, each.round][each.root] += 1
    tellers = [sum(told.values()) for told in roots.values()]
    return {
        "rounds": len(roots),
        "told by several nodes": sum(count > 1 for count in tellers),
        "nodes that tell a round, median": median(tellers) if tellers else 0,
        "differ": sorted(f"{run} {number}" for (run, _, number), told in roots.items() if len(told) > 1),
    }


def measured(rows: Sequence[dict[str, Any]], runs: Sequence[str]) -> list[list[float]]:
    """Returns each measurement of the held-out loss once: round, loss and place of the run. Where one run ends and the
    next begins, both have a state."""
    found = {(each["round"], runs.index(each["run"])): each["loss"] for each in rows}
    return [[number, found[number, place], place] for number, place in sorted(found)]


def swarm_losses(records: dict[tuple[str, str], list[RoundRecord]]) -> dict[int, float]:
    found: dict[int, float] = {}
    for rounds in records.values():
        for each in rounds:
            if each.swarm_loss is not None:
                found.setdefault(each.round, round(each.swarm_loss, 4))
    return found


def round_seconds(records: dict[tuple[str, str], list[RoundRecord]]) -> float:
    gaps = []
    for (name, _), rounds in records.items():
        if name == KEEPER:
            gaps += [late.applied_at - early.applied_at for early, late in pairwise(rounds)]
    return median(gaps) if gaps else 0.0


def thinned(rows: list[list[float]]) -> list[list[float]]:
    """Returns means over equal parts, if there are more rows than a file should have."""
    each = -(-len(rows) // POINTS_MAX)
    parts = [rows[at : at + each] for at in range(0, len(rows), each or 1)]
    return [[part[-1][0], round(fmean(row[1] for row in part), 4)] for part in parts]


# ---------------------------------------------------------------------------------------------------
# Audits


def audited(directory: Path, run: str) -> dict[str, Any]:
    """Audits the first node's history of a run, from the first state that was kept."""
    place = laid_out(directory, run)
    done = run_command("audit", place, "--json")
    shutil.rmtree(place)
    told = json.loads(done.stdout)
    replayed = told["replayed"] or {"first": None, "last": None}
    return {
        "run": run,
        "certified": told["certified"],
        "replayed": [replayed["first"], replayed["last"]],
        "signatures": told["signatures"],
        "all holds": told["all_holds"],
        "wrong": [each["what"] for each in told["findings"] if each["verdict"] not in ("ok", "note")][:5],
    }


def laid_out(directory: Path, run: str) -> Path:
    """Copies a run's directory of the first node, and puts the states beside it that were kept of it."""
    source, place = directory / "nodes" / KEEPER / "runs" / run, directory / "audited" / run
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(source, place, copy_function=_copied, ignore=shutil.ignore_patterns("events", "lock"))
    for state in (directory / "states" / run).glob("*/*"):
        if not (place / "checkpoints" / state.name).exists():
            shutil.copytree(state, place / "checkpoints" / state.name, copy_function=os.link)
    return place


def _copied(source: str, target: str) -> None:
    """Links what never changes, and copies the rest; a file may go while its node is running."""
    with suppress(FileNotFoundError):
        if Path(source).parent.name == "payloads" or "checkpoints" in Path(source).parts:
            os.link(source, target)
        else:
            shutil.copy2(source, target)


def run_command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603
        ["nice", "-n", "19", *command(*arguments)],  # noqa: S607
        capture_output=True, text=True, check=False, env=environment(), stdin=subprocess.DEVNULL,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------
# The page


def report_to(directory: Path, found: dict[str, Any], folder: Path) -> Path | None:
    """Writes the report of the first node about the longest run, if the page is small enough for a repository."""
    longest = max(found["runs"], key=lambda each: each["last"] - each["first"])["run"]
    folder.mkdir(exist_ok=True)
    out = folder / "report.html"
    done = run_command("report", "--data-dir", directory / "nodes" / KEEPER, "--run", longest, "--out", out)
    if done.returncode:
        raise WrongFileError(done.stderr)
    if out.stat().st_size > PAGE_BYTES_MAX:
        shutil.rmtree(folder)
        return None
    return out


def draw(found: dict[str, Any], path: Path) -> None:
    """Draws the held-out loss over the rounds, with what happened."""
    from matplotlib.figure import Figure  # noqa: PLC0415  # takes a second
    from PIL import Image  # noqa: PLC0415  # comes with it

    figure = Figure(figsize=(10, 5.6), layout="constrained")
    above, below = figure.subplots(2, height_ratios=(5, 2), sharex=True)
    above.plot(*zip(*found["training loss"], strict=True), color="0.8", linewidth=1, label="training loss of the swarm")
    parts: list[list[tuple[float, float]]] = [[] for _ in found["runs"]]
    for number, loss, place in found["held-out loss"]:
        parts[place].append((number, loss))
    for place, part in enumerate(parts):
        if part:
            label = {"label": "held-out loss"} if place == 0 else {}
            above.plot(*zip(*part, strict=True), color="tab:blue", marker=".", markersize=3, linewidth=1.5, **label)
    for before, run in pairwise(found["runs"]):
        back = run.get("goes back to")
        text = f"back to round {back}" if back is not None else ", ".join(_short(run["settings"]))
        above.axvline(before["last"], color="tab:red" if back is not None else "tab:green", linewidth=0.8)
        above.annotate(
            text, (before["last"], 1), xycoords=("data", "axes fraction"), rotation=90, fontsize=7,
            ha="right", va="top", color="0.3", xytext=(-2, -3), textcoords="offset points",
        )  # fmt: skip
    above.set_ylabel("nats a byte")
    above.legend(loc="center right", fontsize=8)
    below.step(*zip(*found["members"], strict=True), where="post", color="0.3", linewidth=1, label="members")
    marks = {"killed": ("x", "tab:red"), "joins": ("^", "tab:green"), "leaves": ("v", "tab:purple")}
    for what, (marker, colour) in marks.items():
        rounds = [each["round"] for each in found["events"] if each["what"] == what]
        below.plot(rounds, [0.6] * len(rounds), marker, color=colour, markersize=4, label=what)
    suspended = [each["round"] for each in found["events"] if each.get("standing") == "suspended"]
    below.plot(suspended, [0.6] * len(suspended), "s", color="black", markersize=4, label="a liar is suspended")
    below.set_ylim(bottom=0, top=9)
    below.set_xlabel("round")
    below.legend(loc="upper right", fontsize=7, ncols=5)
    figure.savefig(path, dpi=100)
    Image.open(path).convert("RGB").quantize(COLOURS).save(path, optimize=True)


def _short(settings: dict[str, Any]) -> list[str]:
    names = {"inner_learning_rate": "rate", "rounds": "rounds"}
    return [f"{names.get(key, key)} {value}" for key, value in settings.items()]


def write(directory: Path, path: Path) -> None:
    found = collect(directory)
    check(json.loads(json.dumps(found)))
    save(path, found, ABOUT)
    draw(read(path), ROOT / "docs" / "pictures" / "show.png")
    page = report_to(directory, found, ROOT / "docs" / "show")
    print(f"{path}, docs/pictures/show.png" + (f", {page}" if page else "; the report is too large for docs"))
