"""Measures what a node could do on this machine, in about a minute: `p2ptrain doctor --measure`.

Which models fit is the estimate that a start makes (train/memory.py). Measured are the device by itself, and whole
rounds of a model that fits, by a node's learner and replica: the steps, and what the swarm adds, except the network."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, TypeVar, get_args

import torch

from p2ptrain.config import MODEL_PRESETS, NodeConfig, RunConfig
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.errors import DataError, MemoryShortError
from p2ptrain.exact.shortage import mega, told
from p2ptrain.share import Share
from p2ptrain.train.begin import begin
from p2ptrain.train.learner import Learner, open_device
from p2ptrain.train.memory import demands_of, fitting

RECIPES = "distro", "local"
MODELS = {"cuda": ("100m", "30m", "10m", "1m"), "cpu": ("5m", "1m")}  # the first that fits; a guess at a minute's work
MATRIX_SIDES = {"cuda": 8_192, "cpu": 1_024}
COPIED_BYTES, CONTRIBUTIONS = 2**28, 8
TURNS, ROUNDS = 7, 3  # of one figure, after one that warms up
STEPS_SECONDS = 4.0  # of one round: a slow device takes fewer steps

T = TypeVar("T")


def _line(source: str, what: str, value: str, rest: str) -> str:
    return f"{source:<11}{what:<24}{value:>10} {rest}"


@dataclass(frozen=True, slots=True)
class Speed:
    """The measured speed of the device at one thing."""

    what: str
    value: float
    unit: str

    def line(self) -> str:
        return _line("measured", self.what, f"{self.value:,.3f}", self.unit)


@dataclass(frozen=True, slots=True)
class RoundCost:
    """The measured steps of a model, and what a round takes besides them."""

    model: str
    recipe: str
    tokens_per_second: float
    steps: int  # of a whole round
    step_ms: float
    parts_ms: dict[str, float]
    share: float  # all parts over the steps of a round

    def line(self) -> str:
        parts = " + ".join(f"{what} {value:,.1f}" for what, value in self.parts_ms.items())
        rest = (
            f"tokens/s\n{'':<11}to {self.steps} x {self.step_ms:,.1f} ms a round adds {self.share:.1%}, in ms: {parts}"
        )
        return _line("measured", f"{self.model} with {self.recipe}", f"{self.tokens_per_second:,.0f}", rest)


@dataclass(frozen=True, slots=True)
class Fit:
    """The estimate of the memory that training a model takes."""

    model: str
    recipe: str
    is_possible: bool
    needed_bytes: int
    total_bytes: int
    settings: tuple[str, ...]  # that a node would choose to make it fit

    def line(self) -> str:
        needed = f"{self.needed_bytes / 1e9:,.1f} of" if self.is_possible else "not in"
        rest = ", ".join([f"{self.total_bytes / 1e9:,.1f} GB", *self.settings])
        return _line("estimated", f"{self.model} with {self.recipe}", needed, rest)


Found = Speed | RoundCost | Fit


def measured(config: NodeConfig) -> Iterator[Found]:
    """Yields each figure once it is known. Raises a P2ptrainError if one cannot be had."""
    device, _ = open_device(config.device)
    yield from (_fit(_run_of(model, recipe), config) for model in MODEL_PRESETS for recipe in RECIPES)
    with told("measuring", device):
        yield from _rounds(config, device)
        yield from _speeds(device)


def summary(found: Sequence[Found]) -> str:
    """Says in a sentence what this machine is good for."""
    last = [each for each in found if isinstance(each, RoundCost)][-1]
    largest = [each.model for each in found if isinstance(each, Fit) and each.is_possible][-1]
    hours = 10**9 / last.tokens_per_second / 3_600
    what = f"This machine trains a model of size {last.model} on a billion tokens in {hours:,.1f} hours"
    return f"{what}; a swarm adds {last.share:.1%} to that, and its network. It has memory for sizes up to {largest}."


def json_of(found: Sequence[Found]) -> dict[str, Any]:
    speeds, rounds, fits = ([asdict(each) for each in found if isinstance(each, kind)] for kind in get_args(Found))
    return {"measured": {"speeds": speeds, "rounds": rounds}, "estimated": fits}


def _timed(work: Callable[[], T], device: torch.device) -> tuple[T, float]:
    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return perf_counter()

    began = now()
    return work(), now() - began


def _speed(what: str, work: Callable[[], object], device: torch.device, amount: float, unit: str) -> Speed:
    _timed(work, device)
    return Speed(what, amount / median(_timed(work, device)[1] for _ in range(TURNS)), unit)


def _speeds(device: torch.device) -> Iterator[Speed]:
    side = MATRIX_SIDES[device.type]
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        matrix = torch.randn(side, side, device=device).to(dtype)
        yield _speed(f"matrix product, {name}", partial(torch.mm, matrix, matrix), device, 2e-12 * side**3, "TFLOP/s")
    if device.type == "cuda":
        here, there = torch.empty(COPIED_BYTES // 4), torch.empty(COPIED_BYTES // 4, device=device)
        with suppress(RuntimeError):  # a container may not lock memory: then a node's copies are as slow
            here = here.pin_memory()
        yield _speed("copy to the card", partial(there.copy_, here), device, 1e-9 * COPIED_BYTES, "GB/s")
        yield _speed("copy from the card", partial(here.copy_, there), device, 1e-9 * COPIED_BYTES, "GB/s")


def _run_of(model: str, recipe: str) -> RunConfig:
    return RunConfig.model_validate({"name": "measured", "model": {"preset": model}, "recipe": {"name": recipe}})


def _fit(run: RunConfig, config: NodeConfig) -> Fit:
    demands, before = demands_of(run, chosen := fitting(run, config)), dict(config.device)
    here, is_possible = demands[-1], all(each.level != "failed" for each in demands)
    settings = [f"{name} = {str(value).lower()}" for name, value in chosen.device if value != before[name]]
    settings += ["one sequence a pass"] if (is_smaller := is_possible and here.needed > here.total) else []
    needed = here.least if is_smaller else here.needed
    return Fit(run.model.preset, run.recipe.name, is_possible, needed, here.total, tuple(settings))


def _model_that_fits(config: NodeConfig, device: torch.device) -> str:
    """Returns the largest of MODELS that fits into the memory that is free."""
    for model in MODELS[device.type]:
        runs = [_run_of(model, recipe) for recipe in RECIPES]
        demands = [each for run in runs for each in demands_of(run, fitting(run, config))]
        if all(each.needed <= each.free for each in demands):
            return model
    short = next(each for each in demands if each.needed > each.free)
    raise MemoryShortError(f"size {model} needs {short.takes}; {mega(short.free)} are free. Close other programs")


def _rounds(config: NodeConfig, device: torch.device) -> Iterator[RoundCost]:
    model = _model_that_fits(config, device)
    try:
        with tempfile.TemporaryDirectory() as directory:
            for run in (_run_of(model, recipe) for recipe in RECIPES):
                begun = begin(run, Path(directory) / "data", ["00" * 32])  # nobody joins it
                data = TokenDataset.open(begun.dataset, begun.run.data.manifest)
                yield _cost(Learner(begun.run, fitting(run, config).device, data))
    except OSError as error:
        raise DataError(f"the text to train on cannot be written: {error}", fix="Make room, or set TMPDIR") from error


def _cost(learner: Learner) -> RoundCost:
    rates, steps, parts = zip(*[_round(learner, number + 1) for number in range(ROUNDS + 1)][1:], strict=True)
    model, recipe, step = learner.run.model.preset, learner.run.recipe, 1e3 * median(steps)
    each = {name: 1e3 * median(part[name] for part in parts) for name in parts[0]}
    share = sum(each.values()) / (recipe.local_steps * step)
    return RoundCost(model, recipe.name, median(rates), recipe.local_steps, step, each, share)


def _round(learner: Learner, number: int) -> tuple[float, float, dict[str, float]]:
    """Returns tokens a second, the seconds of a step, and those of all that follows the steps."""
    replica, device, parts, ends = learner.replica, learner.device, dict[str, float](), perf_counter() + STEPS_SECONDS
    results, training = _timed(lambda: learner.train(Share(number, 0, 1), lambda _: perf_counter() < ends), device)
    payload, parts["contribute and pack"] = _timed(lambda: learner.contribute(number), device)
    _, parts[f"check {CONTRIBUTIONS}"] = _timed(lambda: [replica.check(payload) for _ in range(CONTRIBUTIONS)], device)
    counted, parts[f"apply {CONTRIBUTIONS}"] = _timed(lambda: replica.apply(number, [payload] * CONTRIBUTIONS), device)
    learner.settle(number, counted.uncounted(payload))
    _, parts["root"] = _timed(replica.root, device)
    return sum(result.tokens for result in results) / training, training / len(results), parts
