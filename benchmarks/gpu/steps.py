"""Tokens a second and model FLOP utilisation of plain AdamW, `distro` and `local`; effects of the device's settings.

First the step as it is meant to run, compiled on both sides: what the swarm costs over it at 124M, smaller passes, and
350M and 1B for as long as there is time; then the same at 124M as it is without a compiler, and the device's settings.

The baseline is AdamW as one fused kernel over all weights, with the same passes. `overhead` is what a step takes more
in whole rounds: contribution, packing, the apply of 8 and of 100 contributions, the root; all but the network.
`swarm_cost` is the same over the recipe's own steps (with Muon for `local`, without an optimizer for `distro`), in
blocks of ten that take turns: least, median and most; `steps_over_adamw` is what those steps take more. Beside them
stand a contribution, an apply, a root, and the verdict on a payload, which a processor gives. Model FLOPs a token are
6 * parameters + 12 * layers * width * length (PaLM, arXiv 2204.02311); utilisation is over a bf16 matrix product
measured here, and over the data sheet's where the GPU is known.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu import Peak, Report, median_ms, model_config, ratio, run_part, seconds_of, spread
from benchmarks.gpu.rounds import BLOCK_STEPS, RECIPES, Rounds
from p2ptrain.config import ModelConfig, RecipeConfig, RunConfig
from p2ptrain.errors import MemoryShortError
from p2ptrain.exact.codec import unpack
from p2ptrain.models.built_in import Transformer, initialise
from p2ptrain.train.live import LiveModel
from p2ptrain.train.memory import PassSettings, need_of


@dataclass(frozen=True, slots=True)
class Size:
    """A model, and the passes of its step."""

    name: str
    vocabulary: int
    sequences: int  # of a pass
    passes: int  # of a step
    methods: tuple[str, ...] = ("adamw", "distro", "local")
    contributions: tuple[int, ...] = (8,)
    checkpointing: bool = False
    seconds: float = 0.0  # without which it is not begun

    @property
    def config(self) -> ModelConfig:
        return model_config(self.name, vocab_size=self.vocabulary)


# 65,536 tokens, which is a GPU's part of nanoGPT's batch; at 1B a fourth of them, or a block would take half a minute.
FIRST = Size("124m", 50_304, 64, 1, contributions=(8, 100))  # as many at a time as a node takes on a card of 80 GB
LARGER = (
    Size("350m", 50_304, 16, 4, seconds=25.0),
    Size("1b", 50_304, 4, 2, methods=("adamw", "local"), checkpointing=True, seconds=35.0),
)
PASSES = ((16, 4), (32, 2))  # of the plain step, compiled
SMALL = Size("tiny", 256, 2, 1, contributions=(2,))
STEPS, STEPS_SMALL, WARM_UP = 8, 3, 2
PAIRS, PAIRS_LEAST = 5, 1
EAGER_SECONDS, SETTING_SECONDS = 40.0, 8.0  # without which these are not begun
# bf16 without sparsity, by the exact name: an H100 on PCIe has a fourth less than one on SXM.
DATA_SHEET_TFLOPS = {
    "NVIDIA H100 80GB HBM3": 989.0,
    "NVIDIA H200": 989.0,
    "NVIDIA H100 NVL": 835.0,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA L40S": 362.0,
    "NVIDIA L40": 181.0,
    "NVIDIA GeForce RTX 4090": 165.0,
}
# No memory, or no compiler: the others are measured all the same.
FAILURES = (RuntimeError, MemoryShortError, OSError, ImportError, subprocess.SubprocessError)


class PlainLoss(Transformer):
    """The model with all logits at once, as most training scripts have it."""

    def loss(self, sequences: Tensor) -> Tensor:
        logits = self(sequences[:, :-1]).float()
        return functional.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten())


class Bench:
    """A model on the device, and batches of random tokens for it."""

    def __init__(
        self,
        report: Report,
        size: Size,
        *,
        kind: type[Transformer] = Transformer,
        compiled: bool = False,
    ) -> None:
        self.device, self.config = report.device, (config := size.config)
        model = kind(config, checkpointing=size.checkpointing)
        initialise(model, 0)
        self.live = LiveModel(model.to(report.device), autocast=report.device.type == "cuda")
        if compiled:
            self.live.model.compile_layers()
        self.recipe = RecipeConfig(sequences_per_pass=size.sequences, passes_per_step=size.passes)
        generator = torch.Generator(report.device).manual_seed(1)
        shape = (size.sequences * size.passes, config.sequence_length + 1)
        self.batch = torch.randint(config.vocab_size, shape, generator=generator, device=report.device)
        self.count = STEPS_SMALL if report.small else STEPS

    @property
    def tokens(self) -> int:
        return self.batch.shape[0] * self.config.sequence_length

    def rounds(self, name: str) -> Rounds:
        passes = {each: getattr(self.recipe, each) for each in ("sequences_per_pass", "passes_per_step")}
        return Rounds(self.live, RECIPES[name].model_copy(update=passes), self.batch)

    def adamw(self) -> list[float]:
        optimizer = torch.optim.AdamW([self.live.weights], lr=3e-4, betas=(0.9, 0.95), fused=True)
        self.live.weights.grad = self.live.gradient

        def step() -> None:
            self.live.gradient_step(0, self.batch, [], self.recipe)
            optimizer.step()

        return self.seconds(step)

    def seconds(self, step: Any) -> list[float]:
        return [seconds_of(step, self.device) for _ in range(WARM_UP + self.count)][WARM_UP:]


def peak_tflops(device: torch.device, size: int) -> float:
    """Returns the measured peak of a bf16 matrix product."""
    one, other = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / (median_ms(lambda: one @ other, device, 7) / 1e3) / 1e12


def pairs_of(rounds: Rounds, report: Report) -> list[tuple[float, float]]:
    """Measures blocks of steps with and without whole rounds, in turns, for as long as there is time."""
    pairs: list[tuple[float, float]] = []
    while len(pairs) < (PAIRS_LEAST if report.small else PAIRS):
        pairs.append((seconds_of(rounds.steps, report.device), seconds_of(rounds.block, report.device)))
        if report.seconds_left < 2 * sum(pairs[-1]):
            break
    return pairs


def recipe_figures(
    bench: Bench, name: str, baseline: list[float], size: Size, report: Report
) -> Iterator[dict[str, Any]]:
    """Yields more and more figures."""
    rounds = bench.rounds(name)
    rounds.begin()
    rounds.steps(1)
    payload, plain = rounds.contribute(), statistics.median(baseline)
    form = rounds.outer.forms[rounds.config.k_max][0]
    figures: dict[str, Any] = {}
    for contributions in size.contributions:
        rounds.payloads = [payload] * contributions
        rounds.block()
        pairs = pairs_of(rounds, report)
        steps, block = (statistics.median(each) / BLOCK_STEPS for each in zip(*pairs, strict=True))
        figures |= {
            f"swarm_cost_{contributions}": spread([block / steps - 1 for steps, block in pairs]),
            f"overhead_{contributions}": round(block / plain - 1, 4),
            f"apply_ms_{contributions}": median_ms(rounds.apply, bench.device, 3),
        }
        figures.setdefault("pairs", len(pairs))
        figures.setdefault("tokens_per_second", round(bench.tokens / block))
        figures.setdefault("steps_over_adamw", round(steps / plain - 1, 4))
        figures.setdefault("step_seconds", spread([steps / BLOCK_STEPS for steps, _ in pairs]))
        yield figures
    rounds.begin()
    rounds.steps(1)
    figures["contribute_ms"] = round(1e3 * seconds_of(rounds.contribute, bench.device), 3)
    figures["root_ms"] = median_ms(rounds.root, bench.device, 3)
    figures["check_ms"] = median_ms(lambda: unpack(payload, form), bench.device, 3)
    yield figures


def measure(report: Report, size: Size, peaks: dict[str, float], *, compiled: bool) -> None:
    config, baseline = size.config, list[float]()
    for what in size.methods:
        start, peak = time.monotonic(), Peak(report.device)
        bench = Bench(report, size, compiled=compiled)
        flops = 6 * bench.live.weights.numel() + 12 * config.layers * config.dim * config.sequence_length

        def tell(figures: dict[str, Any], what: str = what, flops: int = flops, peak: Peak = peak) -> None:
            rate = figures["tokens_per_second"]
            utilised = {f"mfu_{of}": round(rate * flops / 1e12 / tflops, 4) for of, tflops in peaks.items()}
            figures["memory_mb"] = peak.taken_mb
            if what != "adamw":
                # What the bytes' tokenizer would refuse is a model with more tokens: none reads a text here.
                recipe = RECIPES[what].model_copy(update={"sequences_per_pass": size.sequences})
                run = RunConfig(name="told", recipe=recipe).model_copy(update={"model": config})
                kind = report.device.type
                passes = PassSettings(kind == "cuda", size.checkpointing, device=kind, is_compiled=compiled)
                figures["told_over_taken"] = ratio(need_of(run, passes).trainer / 1e6, figures["memory_mb"])
            report.add(f"{size.name}, {what}" + (", compiled" if compiled else ""), figures | utilised)

        if what == "adamw":
            baseline = bench.adamw()
            rate, first = round(bench.tokens / statistics.median(baseline)), time.monotonic() - start
            tell({"tokens_per_second": rate, "step_seconds": spread(baseline), "with_start_seconds": round(first, 1)})
        else:
            for figures in recipe_figures(bench, what, baseline, size, report):
                tell(figures)
        del bench, tell  # before the next is made


def one_setting(report: Report, size: Size, **options: Any) -> tuple[float, float | None]:
    """Measures the time and memory of a step of plain AdamW, and frees everything."""
    peak = Peak(report.device)
    return statistics.median(Bench(report, size, **options).adamw()), peak.taken_mb


Measured: TypeAlias = Callable[[], tuple[float, float | None]]


def settings(report: Report, size: Size) -> dict[str, Measured]:
    """Returns the device's settings, by name what measures them, without a compiler."""
    return {
        "as it is": partial(one_setting, report, size),
        "checkpointing": partial(one_setting, report, replace(size, checkpointing=True)),
        "logits at once": partial(one_setting, report, size, kind=PlainLoss),
    }


def passes(report: Report, size: Size) -> dict[str, Measured]:
    """Returns smaller passes of the same step, compiled."""
    return {
        f"{sequences} sequences a pass, compiled": partial(
            one_setting, report, replace(size, sequences=sequences, passes=count), compiled=True
        )
        for sequences, count in PASSES
    }


def try_each(report: Report, name: str, tried: dict[str, Measured], tokens: int) -> None:
    for what, work in tried.items():
        if report.seconds_left < SETTING_SECONDS:
            report.add(f"{name}, {what}", {"left_out": f"only {report.seconds_left:.0f} s were left"})
            continue
        try:
            seconds, memory = work()
        except FAILURES as error:
            report.add(f"{name}, {what}", {"failed": str(error)[:500]})
        else:
            figures = {"step_ms": round(1e3 * seconds, 2), "tokens_per_second": round(tokens / seconds)}
            report.add(f"{name}, {what}", figures | {"memory_mb": memory})


def main(report: Report) -> None:
    if report.device.type == "cpu":
        torch.set_num_threads(1)
    peaks = {"measured": peak_tflops(report.device, 512 if report.small else 8_192)}
    name = torch.cuda.get_device_name(report.device) if report.device.type == "cuda" else ""
    if name in DATA_SHEET_TFLOPS:
        peaks["data_sheet"] = DATA_SHEET_TFLOPS[name]
    report.add("peak_tflops", {what: round(value, 2) for what, value in peaks.items()})
    first = SMALL if report.small else FIRST
    tokens = first.sequences * first.passes * first.config.sequence_length
    failed: list[str] = []

    def tried(size: Size, *, compiled: bool, seconds: float) -> None:
        name = size.name + (", compiled" if compiled else "")
        if report.seconds_left < seconds:
            report.add(name, {"left_out": f"only {report.seconds_left:.0f} s were left"})
            return
        try:
            measure(report, size, peaks, compiled=compiled)
        except FAILURES as error:
            report.add(name, {"failed": str(error)[:500]})
            failed.append(name)

    if not report.small:  # a processor's compiler takes half a minute
        tried(first, compiled=True, seconds=0.0)
        try_each(report, first.name, passes(report, first), tokens)
        for size in LARGER:
            tried(size, compiled=True, seconds=size.seconds)
    eager = first if report.small else replace(first, sequences=16, passes=4)
    tried(eager, compiled=False, seconds=0.0 if report.small else EAGER_SECONDS)
    try_each(report, eager.name, settings(report, eager), tokens)
    if failed:
        sys.exit(f"not measured to the end: {failed}")


if __name__ == "__main__":
    run_part(__doc__ or "", main)
