"""How much of the time trains, over bandwidth, latency and local steps: 30M parameters on lines between homes.

    OMP_NUM_THREADS=1 python benchmarks/frontier.py [--systems p2ptrain torchft hivemind] [--lines MBIT/MS ...]
        [--steps H ...] [--ks K ...] [--overlap 1 0] [--pace SECONDS] [--again] [--lock FILE] [--keep]
    python benchmarks/frontier.py --table | --plot | --costs

Four real nodes, each on a host of its own (relay.py, which takes root), whose lines have the same rate both ways. The
trainer is paced (paced.py): a local step lasts PACE_SECONDS, as on a consumer's card, and of REAL_EVERY steps one is a
real one, of AdamW on one short sequence. Exchange, codec, agreement and apply are the real ones, on this machine's
cores. "Trains" is the steps taken times the pace, over the time that passed, from one round's end to a later one's.

Beside it, with the same model, data, first weights, inner optimizer, rate and pace (frontier_peer.py): torchft's DiLoCo
(dense fp32 pseudo-gradients by gloo, its outer SGD at 0.7 with Nesterov's 0.9; without and with its own overlap, the
longest `fragment_sync_delay` that it accepts) and hivemind.Optimizer (local steps,
weights averaged in fp16, begun 3 s ahead). torchft needs `python -m venv out/torchft && out/torchft/bin/pip install
torchft` beside the checkout, or where TORCHFT says.

All cells of a system that differ in their line alone are measured in one swarm, whose line changes: it joins on a fast
one. Its first cell also has a curve of the held-out loss, over seconds and steps from its first step; the other cells
have no loss. Each cell goes into the JSON as soon as it is measured, and one that is there is skipped (--again:
measured again).

The model (`predicted`, frontier_model.py): bytes over the rate, exchanges over the latency, and what making and
applying a contribution took of a processor alone on this machine, times nodes over cores.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Protocol

import figures
import numpy as np
import psutil
import torch
from against_hivemind import Peers, loss_of
from daemons import swarm_in
from frontier_model import (
    CENTRE,
    LINES,
    NODES,
    PACE_SECONDS,
    RATE,
    SWARMS,
    Cell,
    Costs,
    config_of,
    losses_from,
    measure_costs,
    predict,
    real_every,
)
from paced import NOTES, PACKAGE, VERSION, offer, read_notes
from relay import Hosts, hosts_on, why_impossible
from wan import Homes

from p2ptrain.config import NodeConfig
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.models.export import load_model
from p2ptrain.node.home import Home
from p2ptrain.node.saved import find_model, though_pruned
from p2ptrain.sim.scenario import Line
from p2ptrain.train.begin import begin

HERE = Path(__file__).resolve().parent
JSON = HERE / "figures" / "frontier.json"
PICTURE = HERE.parent / "docs" / "pictures" / "frontier.png"
ABOUT = ["p2ptrain/core", "p2ptrain/exact", "p2ptrain/net", "p2ptrain/node", "p2ptrain/train"]
TORCHFT = Path(os.environ.get("TORCHFT", HERE.parent / "out" / "torchft" / "lib" / "python3.11" / "site-packages"))
SETUP = Line(1_000.0, 1_000.0, 0.0005)  # while nodes start and join
WARM_UP_ROUNDS = {8: 3, 32: 1, 128: 0}  # after the round in which the line has changed
ROUNDS = {8: 12, 32: 6, 128: 3}  # that are measured
MARKS = (60.0, 120.0, 180.0, 240.0, 300.0)  # seconds since the first step, at which the first cell's loss is measured
SETTLED_ROUNDS = 2  # of all members, before the first step
MARK_SECONDS = 5.0  # until the weights of a mark are kept
START_SECONDS, ROUND_SECONDS, LOOK_SECONDS = 300.0, 400.0, 0.2
GROUP_NICE = "-19"  # as far from others' 0 as 0 is from 19


# ---------------------------------------------------------------------------------------------------
# Swarms at work


class AtWork(Protocol):
    """Four nodes that train."""

    hosts: Hosts

    def start(self) -> None:
        """Returns once all train together."""

    def look(self) -> None:
        """Sees that all are alive, and keeps the weights when a mark's time has come."""

    def notes(self) -> list[list[tuple[float, int]]]:
        """Returns what each process has noted."""

    def stop(self) -> None: ...

    def curve(self) -> list[dict[str, float]]:
        """Returns the loss at the marks so far, after `stop`."""


class Ours:
    """Real daemons with the paced plug-in."""

    def __init__(self, stack: ExitStack, hosts: Hosts, cell: Cell, keep: bool) -> None:
        self.hosts, self.cell, self.kept = hosts, cell, list[float]()  # seconds at which weights were kept
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="p2ptrain-frontier-")))
        offer(folder)
        shutil.copy(HERE / "paced.py", folder)
        self.folder = folder
        path = os.pathsep.join([str(folder), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
        os.environ |= {"PYTHONPATH": path, NOTES: str(folder), "P2PTRAIN_PLUGINS__ALLOW": f"{PACKAGE} {VERSION}"}
        self.swarm = stack.enter_context(swarm_in(keep, lambda directory: Homes(directory, cell.run, hosts)))

    def start(self) -> None:
        self.swarm.start()
        self.swarm.pass_rounds(SETTLED_ROUNDS)

    def look(self) -> None:
        (self.folder / "go").touch()  # the line is the cell's by now
        for node in self.swarm.nodes:
            node.assert_alive()
        began = min((notes[0][0] for notes in self.notes() if notes), default=monotonic())
        if len(self.kept) < len(MARKS) and monotonic() - began >= MARKS[len(self.kept)]:
            seconds = monotonic() - began
            ((directory, number),) = self.swarm.saved()
            config = NodeConfig.model_validate({"storage": {"directory": str(directory)}})
            saved = though_pruned(lambda: find_model(Home(config), number=number))
            self.data, self.run = Home(config).dataset(saved.run.data.manifest), saved.run
            model = load_model(saved.weights, torch.device("cpu"))
            weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
            np.save(self.folder / f"mark{len(self.kept)}.npy", weights)
            self.kept.append(seconds)
            shutil.copytree(self.data, self.folder / "data", dirs_exist_ok=True)

    def notes(self) -> list[list[tuple[float, int]]]:
        return [read_notes(path) for path in sorted(self.folder.glob("*.notes"))]

    def stop(self) -> None:
        self.swarm.stop()

    def curve(self) -> list[dict[str, float]]:
        if not self.kept:
            return []
        data = TokenDataset.open(self.folder / "data", self.run.data.manifest)
        losses = [loss_of(np.load(self.folder / f"mark{place}.npy"), self.run, data) for place in range(len(self.kept))]
        return [
            {"seconds": seconds, "steps": steps_at(self.notes(), seconds), "loss": loss}
            for seconds, loss in zip(self.kept, losses, strict=True)
        ]


class Theirs:
    """Peers with another library; their loss is the lower of the first's and of the mean of all."""

    def __init__(self, stack: ExitStack, hosts: Hosts, cell: Cell, keep: bool) -> None:
        self.hosts, self.cell = hosts, cell
        folder = Path(tempfile.mkdtemp(prefix="p2ptrain-frontier-"))
        if not keep:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        self.folder = folder
        self.run = begin(config_of(cell), folder / "data", ["0" * 64]).run  # seals it with our data; nobody joins
        settings = {
            "system": cell.system, "overlaps": cell.overlaps, "period": cell.steps, "pace_seconds": cell.pace_seconds,
            "real_every": real_every(cell.pace_seconds), "marks": MARKS, "rate": RATE, "torchft": str(TORCHFT),
            "model": self.run.model.model_dump(mode="json"), "recipe": self.run.recipe.model_dump(mode="json"),
            "dataset": str(folder / "data"), "manifest": self.run.data.manifest,
            # hivemind's own, the best of log/2026-11.md
            "mode": "local", "codec": "fp16", "inner": "adamw", "matchmaking": 3.0, "averaging_seconds": 600.0,
        }  # fmt: skip
        self.peers = Peers(hosts, folder, settings, HERE / "frontier_peer.py")
        stack.callback(self.peers.stop)

    def start(self) -> None:
        self.peers.start(monotonic())
        until = monotonic() + START_SECONDS
        while len(list(self.folder.glob("*.ready"))) < NODES:
            assert monotonic() < until, self.peers.log(0)
            self.peers.look()
            sleep(LOOK_SECONDS)

    def look(self) -> None:
        self.peers.look()
        (self.folder / "go").touch()  # the line is the cell's by now

    def notes(self) -> list[list[tuple[float, int]]]:
        return [read_notes(path) for path in sorted(self.folder.glob("*.notes"))]

    def stop(self) -> None:
        (self.folder / "stop").touch()
        self.peers.stop()

    def curve(self) -> list[dict[str, float]]:
        data, notes, found = TokenDataset.open(self.folder / "data", self.run.data.manifest), self.notes(), []
        for place, seconds in enumerate(MARKS):
            if len(weights := self.peers.weights(place)) < NODES:
                break
            loss = min(loss_of(each, self.run, data) for each in (weights[0], np.mean(weights, axis=0)))
            found.append({"seconds": seconds, "steps": steps_at(notes, seconds), "loss": loss})
        return found


def steps_at(notes: Sequence[Sequence[tuple[float, int]]], seconds: float) -> float:
    """Returns how many steps a peer had taken on average, so long after its first."""
    each = [np.interp(one[0][0] + seconds, [at for at, _ in one], [steps for _, steps in one]) for one in notes]
    return float(np.mean(each))


def share_of(notes: Sequence[tuple[float, int]], pace_seconds: float) -> float:
    """Returns the steps between the first and the last note times the pace, over the time between them."""
    (began, first), (ended, last) = notes[0], notes[-1]
    return (last - first) * pace_seconds / (ended - began)


def measure(work: AtWork, cell: Cell) -> dict[str, Any]:
    """Measures a cell in a swarm that trains."""
    work.hosts.counts([cell.line])
    since, rounds, warm_up = monotonic(), ROUNDS[cell.steps], WARM_UP_ROUNDS[cell.steps]

    def wait(count: int) -> list[list[tuple[float, int]]]:
        """Waits until all have noted so many rounds on this line, and returns the notes of these."""
        deadline, most = monotonic() + ROUND_SECONDS, 0
        while True:
            work.look()
            new = [[each for each in notes if each[0] >= since and each[1]] for notes in work.notes()]
            if len(new) == NODES and min(map(len, new)) >= count:
                return new
            if (now := sum(map(len, new))) > most:
                deadline, most = monotonic() + ROUND_SECONDS, now
            assert monotonic() < deadline, f"no round ends: {cell.name}"
            sleep(LOOK_SECONDS)

    wait(warm_up + 1)
    first, began = work.hosts.counts(), monotonic()
    notes, last = wait(warm_up + 1 + rounds), work.hosts.counts()
    took = monotonic() - began
    shares = [share_of(each[warm_up:], cell.pace_seconds) for each in notes]
    share = statistics.mean(shares)
    passed = share * took / (cell.steps * cell.pace_seconds)  # rounds of a node while bytes were counted
    found = {"share": share, "shares": shares, "rounds": rounds, "round_seconds": took / passed}
    for name in ("sent", "received"):
        bytes_of = [
            now[f"{name}_bytes"] - then[f"{name}_bytes"]
            for then, now in zip(first["hosts"], last["hosts"], strict=True)
        ]
        found |= {name: statistics.mean(bytes_of) / passed, f"most_{name}": max(bytes_of) / passed}
    late = last["mean_late_seconds"]
    return found | {"packets_late_seconds": late, "load": os.getloadavg()[0]}


def go_first() -> None:
    """Puts our processes before all others of this machine: the scheduler weighs sessions, not their `nice`."""
    here = psutil.Process()
    for process in (here, *here.children(recursive=True)):
        with suppress(OSError):  # it has ended, or this kernel weighs processes
            Path(f"/proc/{process.pid}/autogroup").write_text(GROUP_NICE)


@contextmanager
def locked(path: Path | None) -> Iterator[None]:
    """Holds a lock, so that no other benchmark runs meanwhile."""
    if path is None:
        yield
        return
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Figures:
    """The cells that are measured, and the file that has them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"cells": [], "curves": []}

    def has(self, cell: Cell) -> bool:
        return any(each["name"] == cell.name for each in self.found["cells"])

    def add(self, kind: str, row: dict[str, Any]) -> dict[str, Any]:
        """Puts a row in the place of the one with its name, or at the end, with its own head, writes all, and returns
        the row as it is written."""
        rows, row = [each for each in self.found[kind] if each["name"] != row["name"]], row | figures.measured_now()
        self.found[kind] = [*rows, row]
        self.write()
        return row

    def write(self) -> None:
        for row in self.found["cells"]:
            row["predicted"] = predict(cell_of(row), self.costs)
        self.found |= {"table": table_of(self.found), "goal": goal_of(self.found)}
        figures.save(self.path, {key: each for key, each in self.found.items() if key not in figures.HEAD}, ABOUT)

    @property
    def costs(self) -> Costs:
        found = {key: each for key, each in self.found["costs"].items() if key not in figures.HEAD}
        return Costs(**(found | {"payloads": {int(k): size for k, size in found["payloads"].items()}}))


def run_swarm(cells: Sequence[Cell], file: Figures, keep: bool, lock: Path | None, curve_seconds: float) -> None:
    """Measures cells that differ in their line alone, the first with its curve, for so long at least."""
    print(f"{cells[0].name}, and {len(cells) - 1} other lines", flush=True)
    with ExitStack() as stack:
        with locked(lock):
            hosts = stack.enter_context(hosts_on([SETUP], NODES))
            kind = Ours if cells[0].system == "p2ptrain" else Theirs
            work: AtWork = kind(stack, hosts, cells[0], keep)
            work.start()
            if lock:
                go_first()
            for cell in cells:
                row = {"name": cell.name} | asdict(cell) | measure(work, cell)
                row = file.add("cells", row)
                print(f"  {cell.name}: {row['share']:.1%}, {row['sent'] / 1e6:.2f} MB ({row['predicted']})", flush=True)
                began = max(each[0][0] for each in work.notes())
                while cell is cells[0] and cell.has_whole_curve and monotonic() < began + curve_seconds + MARK_SECONDS:
                    work.look()
                    sleep(LOOK_SECONDS)
            work.stop()
        file.add("curves", {"name": cells[0].name, "points": work.curve()})


def with_losses(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the cells with their losses, if they have a curve of their own."""
    curves = {each["name"]: each["points"] for each in found["curves"]}
    return [row | losses_from(curves.get(row["name"], [])) for row in found["cells"]]


def cell_of(row: dict[str, Any]) -> Cell:
    return Cell(**{name: row[name] for name in Cell.__dataclass_fields__ if name in row})


# ---------------------------------------------------------------------------------------------------
# What there is to see


def table_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the cells as a page shows them."""
    rows = []
    for row in sorted(with_losses(found), key=lambda row: (row["pace_seconds"] != PACE_SECONDS, *_place(row))):
        model, own = row["predicted"], row["k"]
        losses = [row[f"loss at equal {what}"] for what in ("time", "steps")]
        pace = f"{row['pace_seconds']:g} s a step"
        rows.append(
            {
                "system": row["system"],
                "steps": row["steps"],
                "k": row["k"] or "–",
                "overlap": ("yes" if row["overlaps"] else "no") if own or row["system"] == "torchft" else "–",
                "Mbit/s": row["megabits"],
                "ms": row["round_trip_ms"],
                "with": row.get("extra") or (pace if row["pace_seconds"] != PACE_SECONDS else "–"),
                "trains, %": round(100 * row["share"], 1),
                "model, %": round(100 * model["share"], 1),
                "model off by, %": round(100 * (model["share"] / row["share"] - 1)),
                "s a round": round(row["round_seconds"], 1),
                "MB up": round(row["sent"] / 1e6, 2),
                "MB down": round(row["received"] / 1e6, 2),
                "model, MB": round(model["bytes"] / 1e6, 2),
                "loss, equal time": "–" if losses[0] is None else round(losses[0], 3),
                "loss, equal steps": "–" if losses[1] is None else round(losses[1], 3),
            }
        )
    return rows


def goal_of(found: dict[str, Any]) -> dict[str, Any]:
    """Returns when we first had the lowest loss of each rival and when it had it, on the same line in as many steps."""
    curves = {each["name"]: each["points"] for each in found["curves"]}
    cells = {name: cell_of(row) for row in found["cells"] if (name := row["name"]) in curves and not row.get("extra")}
    told = {}
    for name, cell in cells.items():
        ours = replace(CENTRE, megabits=cell.megabits, round_trip_ms=cell.round_trip_ms, steps=cell.steps)
        if cell.k or not (mine := curves.get(ours.name)) or not curves[name]:
            continue
        best = min(curves[name], key=lambda each: each["loss"])  # the first of equal ones
        losses, seconds = np.minimum.accumulate([each["loss"] for each in mine]), [each["seconds"] for each in mine]
        after = float(np.interp(-best["loss"], -losses, seconds)) if best["loss"] >= losses[-1] else None
        told[name] = {"loss": best["loss"], "after s": best["seconds"], "ours after s": after}
        told[name]["of its time"] = None if after is None else after / best["seconds"]
        told[name]["our lowest"] = float(losses[-1])
    return told


def as_table(found: dict[str, Any]) -> str:
    """Returns the table for benchmarks/README.md, under the marker that keeps its figures equal."""
    rows = table_of(found)
    lines = [
        "| " + " | ".join(f"{each:,g}" if isinstance(each, float) else str(each) for each in row.values()) + " |"
        for row in rows
    ]
    head = f"| {' | '.join(rows[0])} |\n{'|---' * len(rows[0])}|"
    return "\n".join(["<!-- figures frontier: table -->", head, *lines])


def draw(file: Figures, picture: Path) -> None:
    """Draws the share that trains over the line's rate, and what the model says beside it."""
    import matplotlib  # noqa: PLC0415  # the benchmark needs none of it

    matplotlib.use("agg")
    from matplotlib import pyplot  # noqa: PLC0415
    from PIL import Image  # noqa: PLC0415  # comes with it

    figure, axes = pyplot.subplots(figsize=(8, 4.6), layout="constrained")
    colours = {"p2ptrain": "tab:blue", "torchft": "tab:red", "hivemind": "tab:green"}
    marks, every = {128: "o", 32: "s", 8: "^"}, np.geomspace(4.0, 1_200.0, 60)
    cells = [(cell_of(row), 100 * row["share"]) for row in sorted(file.found["cells"], key=_place)]
    cells = [each for each in cells if each[0] == _of_picture(each[0])]
    for (system, steps, overlaps), group in groupby(
        cells, lambda each: (each[0].system, each[0].steps, each[0].overlaps)
    ):
        each, colour = list(group), colours[system]
        model = [replace(each[0][0], megabits=float(rate), round_trip_ms=25.0) for rate in every]
        axes.plot(every, [100 * predict(cell, file.costs)["share"] for cell in model], ":", color=colour)
        axes.plot([], [], marks[steps], color=colour, label=f"{system}, {steps} steps a round{', overlap' * overlaps}")
        for cell, share in each:
            face = colour if cell.round_trip_ms == 25.0 else "none"
            axes.plot(cell.megabits, share, marks[steps], color=colour, markerfacecolor=face)
    axes.set(xscale="log", xlabel="Mbit/s up and down", ylabel="time that trains, %", ylim=(0, 101))
    axes.set_xticks([5, 20, 50, 200, 1_000], ["5", "20", "50", "200", "1,000"])
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    title = f"30M parameters, four nodes, {PACE_SECONDS:g} s a step, round trip 25 ms (open: 100); dotted: the model"
    axes.set_title(title, fontsize=10)
    figure.savefig(picture, dpi=80)
    pyplot.close(figure)
    Image.open(picture).convert("RGB").quantize(64).save(picture, optimize=True)


def _of_picture(cell: Cell) -> Cell:
    """Returns what the cell would have to be in order to be drawn."""
    own = {"k": CENTRE.k, "overlaps": True} if cell.k else {}
    return replace(cell, pace_seconds=PACE_SECONDS, extra="", **own)  # type: ignore[arg-type]


def _place(row: dict[str, Any]) -> tuple[Any, ...]:
    system = ["p2ptrain", "torchft", "hivemind"].index(row["system"])
    return system, -row["steps"], row["k"], not row["overlaps"], row["round_trip_ms"], row["megabits"]


def chosen_cells(arguments: argparse.Namespace) -> Iterator[list[Cell]]:
    """Returns the cells of each swarm that the arguments leave."""
    for swarm in SWARMS:
        is_wanted = (
            swarm.system in arguments.systems
            and swarm.steps in arguments.steps
            and (not swarm.k or swarm.k in arguments.ks)
            and (swarm.system == "hivemind" or swarm.overlaps in map(bool, arguments.overlap))
        )
        if is_wanted:
            yield [
                replace(swarm, megabits=rate, round_trip_ms=trip, pace_seconds=arguments.pace, extra=arguments.extra)
                for rate, trip in arguments.lines
            ]


def line_of(text: str) -> tuple[float, float]:
    rate, _, trip = text.partition("/")
    return float(rate), float(trip)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", default=["p2ptrain", "torchft", "hivemind"])
    parser.add_argument(
        "--lines", nargs="+", type=line_of, default=LINES, metavar="MBIT/MS", help="rate and round trip"
    )
    parser.add_argument("--steps", nargs="+", type=int, default=[128, 32, 8])
    parser.add_argument("--ks", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--overlap", nargs="+", type=int, default=[1, 0])
    parser.add_argument("--pace", type=float, default=PACE_SECONDS, metavar="SECONDS", help="that a step lasts")
    parser.add_argument("--extra", default="", metavar="LINE", help="another setting of [recipe], or a # and words")
    parser.add_argument("--again", action="store_true", help="measure cells that are there, too")
    parser.add_argument(
        "--lock", type=Path, help="a file that is locked while a swarm is at work, which then goes first"
    )
    parser.add_argument("--curve", type=float, default=MARKS[-1], metavar="SECONDS", help="of a first cell's curve")
    parser.add_argument("--costs", action="store_true", help="only take the model's constants anew")
    parser.add_argument("--keep", action="store_true", help="keep the nodes' directories and logs")
    parser.add_argument("--json", type=Path, default=JSON)
    parser.add_argument("--table", action="store_true", help="only print the table of what is measured")
    parser.add_argument("--plot", action="store_true", help="only draw the picture of it")
    chosen = parser.parse_args()
    file = Figures(chosen.json)
    if chosen.table:
        print(as_table(file.found))
        return 0
    if chosen.plot:
        draw(file, PICTURE)
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no host outlives us
    if why := why_impossible():
        sys.exit(f"no hosts here: {why}")
    if "costs" not in file.found or chosen.costs:
        file.found["costs"] = asdict(measure_costs())
        file.write()
    if chosen.costs:
        return 0
    for cells in chosen_cells(chosen):
        left = [cell for cell in cells if chosen.again or not file.has(cell)]
        if left:
            run_swarm(left, file, chosen.keep, chosen.lock, chosen.curve)
    return 0


if __name__ == "__main__":
    sys.exit(main())
