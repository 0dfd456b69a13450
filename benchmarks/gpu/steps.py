"""Tokens a second and model FLOP utilisation of plain AdamW, `distro` and `local`; what the device's settings change.

The baseline is AdamW as one fused kernel over all weights, with the same passes. `overhead` is a step's time over its:
for `distro` with its contribution (DCT, top-k, packing), for `local` with the tenth of one. A round's apply of eight
contributions stands beside it. Model FLOPs a token are 6 * parameters + 12 * layers * width * length (PaLM, arXiv
2204.02311); utilisation is over a bf16 matrix product measured here, and over the data sheet's where the GPU is known.
"""

from __future__ import annotations

import statistics
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu import Peak, Report, median_ms, model_config, ratio, run_part, seconds_of, spread
from p2ptrain.config import ModelConfig, RecipeConfig, RunConfig
from p2ptrain.learn.aggregate import apply_payloads
from p2ptrain.learn.codec import PayloadFormat, pack
from p2ptrain.learn.live import LiveModel
from p2ptrain.learn.memory import Passes, need_of
from p2ptrain.learn.model import Transformer, initialise
from p2ptrain.learn.recipes import make_recipe
from p2ptrain.learn.transform import Layout

# Model, vocabulary, sequences of a pass, passes of a step: 65,536 tokens, which is a GPU's part of nanoGPT's batch.
SIZES = {"124m": (50_304, 16, 4), "350m": (50_304, 8, 8)}
SIZES_SMALL = {"1m": (256, 2, 1)}
STEPS, STEPS_SMALL, WARM_UP = 8, 3, 2
CONTRIBUTIONS = 8
LOCAL_STEPS = 10
DATA_SHEET_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0, "L40": 181.0, "RTX 4090": 165.0}  # dense bf16
RECIPES = {
    "distro": RecipeConfig(name="distro"),
    "local": RecipeConfig(name="local", local_steps=LOCAL_STEPS, inner_learning_rate=Fraction(3, 10_000)),
}


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
        config: ModelConfig,
        sequences: int,
        passes: int,
        *,
        kind: type[Transformer] = Transformer,
        checkpointing: bool = False,
    ) -> None:
        self.device, self.config = report.device, config
        model = kind(config, checkpointing=checkpointing)
        initialise(model, 0)
        self.live = LiveModel(model.to(report.device), autocast=report.device.type == "cuda")
        self.recipe = RecipeConfig(sequences_per_pass=sequences, passes_per_step=passes)
        generator = torch.Generator(report.device).manual_seed(1)
        shape = (sequences * passes, config.sequence_length + 1)
        self.batch = torch.randint(config.vocab_size, shape, generator=generator, device=report.device)
        self.steps = STEPS_SMALL if report.small else STEPS

    @property
    def tokens(self) -> int:
        return self.batch.shape[0] * self.config.sequence_length

    def adamw(self) -> list[float]:
        optimizer = torch.optim.AdamW([self.live.weights], lr=3e-4, betas=(0.9, 0.95), fused=True)
        self.live.weights.grad = self.live.gradient

        def step() -> None:
            self.live.gradient_step(0, self.batch, [], self.recipe)
            optimizer.step()

        return self.seconds(step)

    def seconds(self, step: Any) -> list[float]:
        return [seconds_of(step, self.device) for _ in range(WARM_UP + self.steps)][WARM_UP:]


def peak_tflops(device: torch.device, size: int) -> float:
    """Of a bf16 matrix product."""
    one, other = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / (median_ms(lambda: one @ other, device, 7) / 1e3) / 1e12


def recipe_figures(bench: Bench, name: str, baseline: list[float]) -> dict[str, Any]:
    """A round's own work, and its apply."""
    config = RECIPES[name].model_copy(
        update={"sequences_per_pass": bench.recipe.sequences_per_pass, "passes_per_step": bench.recipe.passes_per_step}
    )
    layout = Layout(bench.live.shapes, config.chunk)
    form = PayloadFormat.of(layout, config)
    recipe = make_recipe(config, bench.live, layout)
    recipe.begin()
    steps = bench.seconds(lambda: recipe.local_step(0, bench.batch, []))
    payloads: list[bytes] = []

    def contribute() -> None:
        payloads.append(pack(recipe.contribute(len(payloads)), form))
        recipe.residual.forget(len(payloads) - 1)

    contributing = statistics.median([seconds_of(contribute, bench.device) for _ in range(WARM_UP + 3)][WARM_UP:])
    parameters, agreed = bench.live.parts(recipe.agreed), (payloads * CONTRIBUTIONS)[:CONTRIBUTIONS]
    applying = median_ms(
        lambda: apply_payloads(layout, config, form, agreed, Fraction(1, 1000), parameters), bench.device, 3
    )
    step = statistics.median(steps) + contributing / config.local_steps
    plain = statistics.median(baseline)
    return {
        "tokens_per_second": round(bench.tokens / step),
        "step_seconds": spread(steps),
        "contribute_ms": round(1e3 * contributing, 2),
        "apply_ms": applying,
        "overhead": round(step / plain - 1, 4),
        "overhead_with_apply": round((step + applying / 1e3 / config.local_steps) / plain - 1, 4),
    }


def measure(report: Report, name: str, vocabulary: int, sequences: int, passes: int, peaks: dict[str, float]) -> None:
    config = model_config(name, vocab_size=vocabulary)
    flops = 0.0

    def add(what: str, seconds: list[float], figures: dict[str, Any], peak: Peak) -> None:
        rate = figures["tokens_per_second"]
        utilised = {f"mfu_{of}": round(rate * flops / 1e12 / tflops, 4) for of, tflops in peaks.items()}
        report.add(f"{name}, {what}", figures | utilised | {"memory_mb": peak.taken_mb})

    for what in ("adamw", "distro", "local"):
        peak = Peak(report.device)
        bench = Bench(report, config, sequences, passes)
        count = bench.live.weights.numel()
        flops = 6 * count + 12 * config.layers * config.dim * config.sequence_length
        if what == "adamw":
            baseline = bench.adamw()
            rate = round(bench.tokens / statistics.median(baseline))
            add(what, baseline, {"tokens_per_second": rate, "step_seconds": spread(baseline)}, peak)
        else:
            figures = recipe_figures(bench, what, baseline)
            run = RunConfig.model_validate({"name": "told", "model": config.model_dump(), "recipe": {"name": what}})
            run = run.model_copy(update={"recipe": RECIPES[what].model_copy(update={"sequences_per_pass": sequences})})
            told = need_of(run, Passes(report.device.type == "cuda", device=report.device.type)).trainer
            figures["told_over_taken"] = ratio(told / 1e6, max(peak.taken_mb, 1.0))
            add(what, [], figures, peak)
        del bench


def settings(report: Report, name: str, vocabulary: int, sequences: int, passes: int) -> None:
    """What each of the device's settings makes of plain AdamW: time and memory, over those without it."""
    config = model_config(name, vocab_size=vocabulary)
    variants: dict[str, dict[str, Any]] = {
        "as it is": {},
        "logits at once": {"kind": PlainLoss},
        "checkpointing": {"checkpointing": True},
        "compile": {},
    }
    whole: tuple[float, float] | None = None
    for what, changes in variants.items():
        if report.seconds_left < 0:
            report.add(f"{name}, {what}", {"left_out": "no time was left"})
            continue
        peak = Peak(report.device)
        try:
            bench = Bench(report, config, sequences, passes, **changes)
            if what == "compile":
                bench.live.model.compile_layers()
            seconds = statistics.median(bench.adamw())
        except RuntimeError as error:  # no compiler, or no memory: the others are measured all the same
            report.add(f"{name}, {what}", {"failed": str(error)[:500]})
            continue
        here = seconds, peak.taken_mb
        whole = whole or here
        figures = {"step_ms": round(1e3 * seconds, 2), "memory_mb": here[1], "time_over": ratio(seconds, whole[0])}
        report.add(f"{name}, {what}", figures | {"memory_over": ratio(here[1], max(whole[1], 1.0))})
        del bench


def main(report: Report) -> None:
    if report.device.type == "cpu":
        torch.set_num_threads(1)
    peaks = {"measured": peak_tflops(report.device, 512 if report.small else 8_192)}
    name = torch.cuda.get_device_name(report.device) if report.device.type == "cuda" else ""
    if known := [tflops for gpu, tflops in DATA_SHEET_TFLOPS.items() if gpu in name]:
        peaks["data_sheet"] = known[0]
    report.add("peak_tflops", {what: round(value, 2) for what, value in peaks.items()})
    sizes = SIZES_SMALL if report.small else SIZES
    for size, shape in sizes.items():
        measure(report, size, *shape, peaks)
    settings(report, next(iter(sizes)), *next(iter(sizes.values())))


if __name__ == "__main__":
    run_part(__doc__ or "", main)
