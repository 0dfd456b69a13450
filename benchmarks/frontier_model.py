"""The cells of the measured frontier, and the model of an exchange: what it says of each (benchmarks/frontier.py)."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch
from paced import PACKAGE, VERSION
from wan import load_run

from p2ptrain.config import RunConfig
from p2ptrain.sim.scenario import Line

NODES, PACE_SECONDS, REAL_EVERY = 4, 0.25, 16
RATE = 0.001  # of AdamW
EQUAL_SECONDS, EQUAL_STEPS = 180.0, 384
COST_ROUNDS = 6
RUN = """\
name = "frontier"
[model]
preset = "30m"
sequence_length = 64
[recipe]
{plugin}
inner = "adamw"
inner_learning_rate = {rate}
local_steps = {steps}
local_steps_min = 0
k = {k}
sequences_per_pass = 1
{extra}
[agreement]
overlap_rounds = {overlap}
[admission]
probation_rounds = 0
[eval]
every_rounds = 0
"""
PLUGIN = 'plugin = "{package} {version}"\nsettings = {{ seconds = {seconds}, real_every = {real_every} }}'


@dataclass(frozen=True)
class Cell:
    """A system on a line; k is p2ptrain's alone, and hivemind's always overlaps."""

    system: str  # p2ptrain, torchft, hivemind
    megabits: float  # a second, up and down
    round_trip_ms: float
    steps: int  # of a round
    k: int = 0
    overlaps: bool = False
    pace_seconds: float = PACE_SECONDS
    extra: str = ""  # another setting of the recipe

    @property
    def name(self) -> str:
        overlap = "overlap" if self.overlaps else "no overlap"
        own = f", k = {self.k}, {overlap}" if self.k else ", overlap" if self.overlaps else ""
        pace = "" if self.pace_seconds == PACE_SECONDS else f", {self.pace_seconds:g} s a step"
        extra = f", {self.extra}" if self.extra else ""
        return (
            f"{self.system}, {self.megabits:g} Mbit/s, {self.round_trip_ms:g} ms, {self.steps} steps{own}{pace}{extra}"
        )

    @property
    def line(self) -> Line:
        return Line(self.megabits, self.megabits, self.round_trip_ms / 2_000)

    @property
    def swarm(self) -> tuple[str, int, int, bool, float, str]:
        """What cells of one swarm have in common."""
        return self.system, self.steps, self.k, self.overlaps, self.pace_seconds, self.extra

    @property
    def has_whole_curve(self) -> bool:
        """Whether its swarm waits for all marks, and not only for those that pass while it is measured."""
        return not self.k or (self.k == CENTRE.k and self.overlaps and not self.extra)

    @property
    def run(self) -> str:
        """The run's config; the rivals read model and recipe from it."""
        plugin = PLUGIN.format(
            package=PACKAGE, version=VERSION, seconds=self.pace_seconds, real_every=real_every(self.pace_seconds)
        )
        return RUN.format(
            plugin=plugin if self.k else "",
            rate=RATE,
            steps=self.steps,
            k=self.k or 64,
            overlap=int(self.overlaps),
            extra=self.extra,
        )


CENTRE = Cell("p2ptrain", 50.0, 25.0, 128, 64, overlaps=True)
LINES = [(20.0, 100.0), (50.0, 25.0), (20.0, 25.0), (5.0, 25.0), (200.0, 25.0), (1_000.0, 25.0), (50.0, 100.0)]
SWARMS = [  # the most telling first
    CENTRE,
    Cell("torchft", 50.0, 25.0, 128),
    Cell("torchft", 50.0, 25.0, 128, overlaps=True),
    Cell("hivemind", 50.0, 25.0, 128),
    *(replace(CENTRE, steps=steps) for steps in (32, 8)),
    replace(CENTRE, overlaps=False),
    replace(CENTRE, k=256),
    *(Cell(system, 50.0, 25.0, 32) for system in ("torchft", "hivemind")),
    *(replace(CENTRE, steps=steps, overlaps=False) for steps in (32, 8)),
    *(replace(CENTRE, steps=steps, k=256) for steps in (32, 8)),
    *(replace(CENTRE, steps=steps, k=256, overlaps=False) for steps in (128, 32, 8)),
]


def real_every(pace_seconds: float) -> int:
    """Returns how many steps share one real one: a real one in four seconds, whatever the pace."""
    return round(REAL_EVERY * PACE_SECONDS / pace_seconds)


@dataclass(frozen=True)
class Costs:
    """The model's constants: sizes in bytes, and seconds of work of one node alone on this machine."""

    weights: int  # bytes of all weights in fp32
    payloads: dict[int, int]  # bytes of a contribution, by k
    make: float  # a contribution: begin and end a round, residual, transform, choice, packing
    rebase: float  # with overlap: taking in a round between two steps
    apply: float  # four of them, and the root
    dense: float  # torchft's: pseudo-gradients, copies, outer step
    half: float  # hivemind's: to fp16, back, and the mean
    cores: int


HEADERS = 1_500 / 1_448  # IP and TCP around what is sent
TRIPS = {"p2ptrain": 4.0, "torchft": NODES - 1 + 2.0, "hivemind": 4.0}  # round trips of an exchange


def predict(cell: Cell, costs: Costs) -> dict[str, float]:
    """Returns what the model says of a cell: bytes up a round, which are those down, and the share that trains."""
    sizes = {
        "p2ptrain": (NODES - 1) * costs.payloads.get(cell.k, 0),  # everyone fetches all others'
        "torchft": 2 * (NODES - 1) / NODES * costs.weights,  # a ring: reduce-scatter, then all-gather
        "hivemind": 2 * (NODES - 1) / NODES * costs.weights / 2,
    }
    sent = sizes[cell.system] * HEADERS
    exchange = sent * 8e-6 / cell.megabits + TRIPS[cell.system] * cell.round_trip_ms / 1_000
    crowd = max(1.0, NODES / costs.cores)  # how many share a core
    make, apply, dense, half = (each * crowd for each in (costs.make, costs.apply, costs.dense, costs.half))
    training = cell.steps * cell.pace_seconds
    match cell.system:
        case "p2ptrain" if cell.overlaps:
            took = max(training + make + costs.rebase * crowd, exchange + make + apply)
        case "p2ptrain":
            took = training + make + exchange + apply
        case "torchft" if cell.overlaps:
            took = max(training, cell.pace_seconds + exchange) + dense  # begins after the first step
        case "torchft":
            took = training + exchange + dense
        case _:
            took = training + exchange + half  # a step waits for the averaging that began before it
    return {"share": training / took, "bytes": sent, "round_seconds": took}


def losses_from(curve: Sequence[dict[str, float | None]]) -> dict[str, float | None]:
    """Returns the loss of a cell's curve after EQUAL_SECONDS and after EQUAL_STEPS; None: it does not go so far, or its
    steps are not known."""

    def at(what: str, wanted: float) -> float | None:
        places = [place for each in curve if (place := each[what]) is not None]
        if not (places and places[0] <= wanted <= places[-1]):
            return None
        return float(np.interp(wanted, places, [each["loss"] or 0.0 for each in curve]))

    return {"loss at equal time": at("seconds", EQUAL_SECONDS), "loss at equal steps": at("steps", EQUAL_STEPS)}


def measure_costs() -> Costs:
    """Takes the constants on this machine: seconds of a processor in one thread, the median of all rounds but one."""
    from p2ptrain.exact.outer import Outer  # noqa: PLC0415  # the tables need none of this
    from p2ptrain.exact.root import state_root  # noqa: PLC0415
    from p2ptrain.models.built_in import Transformer, initialise  # noqa: PLC0415
    from p2ptrain.train.live import LiveModel  # noqa: PLC0415
    from p2ptrain.train.recipes import LocalRecipe  # noqa: PLC0415

    torch.set_num_threads(1)
    runs = {k: config_of(replace(CENTRE, k=k)) for k in (64, 256)}
    recipe = runs[64].recipe.model_copy(update={"plugin": "", "settings": {}})
    model = Transformer(runs[64].model)
    initialise(model, 0)
    live = LiveModel(model, autocast=False)
    outers = {k: Outer.of(run, live.shapes) for k, run in runs.items()}
    local, outer = LocalRecipe(recipe, live, outers[64].layouts), outers[64]
    state, taken = live.weights.clone(), {name: [] for name in ("make", "rebase", "apply", "dense", "half")}  # type: ignore[var-annotated]

    def timed(name: str) -> Any:
        @contextmanager
        def block() -> Iterator[None]:
            began = process_time()
            yield
            taken[name].append(process_time() - began)

        return block()

    with torch.no_grad():
        for number in range(1, COST_ROUNDS + 1):
            with timed("make"):
                local.base.copy_(state)
                local.begin(number)
            live.weights.add_(torch.randn_like(live.weights), alpha=1e-3)
            with timed("rebase"), local.rebased():
                local.base.copy_(state)
                local.residual.forget(number - 1)
            with timed("make"):
                local.end()
                payload = outer.pack(local.contribute(number), 0)
            with timed("apply"):
                outer.apply(state, number - 1, [payload] * NODES)
                state_root(state)
            with timed("dense"):
                moved = state - live.weights
                momentum = moved.clone().mul_(0.9).add_(moved)
                live.weights.copy_(state).sub_(momentum, alpha=0.7)
                state.copy_(live.weights)
            with timed("half"):
                halves = [live.weights.half() for _ in range(2)]
                live.weights.copy_(halves[0].float().add_(halves[1].float()).mul_(0.5))
    make = [one + other for one, other in zip(taken["make"][::2], taken["make"][1::2], strict=True)]
    found = {name: statistics.median(each[1:]) for name, each in (taken | {"make": make}).items()}
    payloads = {k: each.payload_bytes for k, each in outers.items()}
    return Costs(weights=4 * live.weights.numel(), payloads=payloads, cores=os.cpu_count() or 1, **found)


def config_of(cell: Cell) -> RunConfig:
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(cell.run)
        file.flush()
        return load_run(Path(file.name))[1]
