"""Tokens a second and model FLOP utilisation of plain AdamW, `distro` and `local`; effects of the device's settings.

The baseline is AdamW as one fused kernel over all weights, with the same passes. `overhead` is what a step takes more:
for `distro` its contribution (DCT, top-k, packing) and what the device does of the apply of eight, which is to `distro`
what the optimizer's step is to AdamW; for `local` a tenth of both. `overhead_of_contributing` leaves the apply out.
Beside them stands a processor's work: to unpack eight contributions, to check one, the root. Model FLOPs a token
are 6 * parameters + 12 * layers * width * length (PaLM, arXiv 2204.02311); utilisation is over a bf16 matrix product
measured here, and over the data sheet's where the GPU is known.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu import Peak, Report, median_ms, model_config, ratio, run_part, seconds_of, spread
from p2ptrain.config import ModelConfig, RecipeConfig, RunConfig
from p2ptrain.errors import MemoryShortError
from p2ptrain.exact.aggregate import apply_payloads, apply_votes, sum_votes
from p2ptrain.exact.codec import Packed, PayloadFormat, pack, unpack
from p2ptrain.exact.root import state_root
from p2ptrain.exact.scales import Scales, Sizes
from p2ptrain.exact.schedule import Terms
from p2ptrain.exact.transform import Layout
from p2ptrain.models.built_in import Transformer, initialise
from p2ptrain.train.live import LiveModel
from p2ptrain.train.memory import PassSettings, need_of
from p2ptrain.train.recipes import make_recipe

# Model, vocabulary, sequences of a pass, passes of a step: 65,536 tokens, which is a GPU's part of nanoGPT's batch.
SIZES = {"124m": (50_304, 16, 4), "350m": (50_304, 8, 8)}
SIZES_SMALL = {"1m": (256, 2, 1)}
STEPS, STEPS_SMALL, WARM_UP = 8, 3, 2
CONTRIBUTIONS = 8
LOCAL_STEPS = 10
COMPILE_SECONDS = 45.0  # that torch.compile may take at first
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
    """Returns the measured peak of a bf16 matrix product."""
    one, other = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / (median_ms(lambda: one @ other, device, 7) / 1e3) / 1e12


def recipe_figures(bench: Bench, name: str, baseline: list[float]) -> dict[str, Any]:
    """Measures a round's own work, and its apply."""
    config = RECIPES[name].model_copy(
        update={"sequences_per_pass": bench.recipe.sequences_per_pass, "passes_per_step": bench.recipe.passes_per_step}
    )
    layout = Layout(bench.live.shapes, config.chunk)
    form = PayloadFormat.of(layout, config)
    recipe = make_recipe(config, bench.live, (layout,))
    recipe.begin(0)
    steps = bench.seconds(lambda: recipe.local_step(0, bench.batch, []))
    payloads: list[Packed] = []

    def contribute() -> None:
        recipe.end()
        payloads.append(Packed(pack(recipe.contribute(len(payloads)), form), form))
        recipe.residual.forget(len(payloads) - 1)

    contributing = statistics.median([seconds_of(contribute, bench.device) for _ in range(WARM_UP + 3)][WARM_UP:])
    parameters, agreed = bench.live.parts(recipe.base), (payloads * CONTRIBUTIONS)[:CONTRIBUTIONS]
    rate = Fraction(1, 1000)
    unpacked = [unpack(*payload) for payload in agreed]
    sizes = [Sizes.of(payload, layout) for payload in agreed] if form.groups else []
    scales = Scales.of(sizes, layout, config, None) if sizes else None

    def apply_unpacked() -> None:
        votes = sum_votes(layout, config, unpacked, len(unpacked), scales, bench.device)
        apply_votes(layout, config, votes, Terms(rate), parameters)

    def ms(work: Any, turns: int = 3) -> float:
        return median_ms(work, bench.device, turns, warm_up=turns > 1)

    applying = ms(apply_unpacked)
    step, plain = statistics.median(steps), statistics.median(baseline)
    with_contribution = step + contributing / config.local_steps
    whole = with_contribution + applying / 1e3 / config.local_steps
    return {
        "tokens_per_second": round(bench.tokens / whole),
        "step_seconds": spread(steps),
        "contribute_ms": round(1e3 * contributing, 2),
        "apply_on_device_ms": applying,
        "overhead": round(whole / plain - 1, 4),
        "overhead_of_contributing": round(with_contribution / plain - 1, 4),
        "apply_ms": ms(lambda: apply_payloads(layout, config, agreed, Terms(rate), parameters)),
        "unpack_ms": ms(lambda: [unpack(*payload) for payload in agreed]),
        "check_ms": ms(lambda: unpack(*agreed[0])),
        "root_ms": ms(lambda: state_root(recipe.base), 1),
    }


def measure(report: Report, name: str, vocabulary: int, sequences: int, passes: int, peaks: dict[str, float]) -> None:
    config = model_config(name, vocab_size=vocabulary)
    baseline: list[float] = []
    for what in ("adamw", "distro", "local"):
        peak = Peak(report.device)
        bench = Bench(report, config, sequences, passes)
        if what == "adamw":
            baseline = bench.adamw()
            rate = round(bench.tokens / statistics.median(baseline))
            figures: dict[str, Any] = {"tokens_per_second": rate, "step_seconds": spread(baseline)}
        else:
            figures = recipe_figures(bench, what, baseline)
        figures["memory_mb"] = peak.taken_mb
        if what != "adamw":
            # What the bytes' tokenizer would refuse is a model with more tokens: none reads a text here.
            run = RunConfig(name="told", recipe=RECIPES[what].model_copy(update={"sequences_per_pass": sequences}))
            run = run.model_copy(update={"model": config})
            told = need_of(run, PassSettings(report.device.type == "cuda", device=report.device.type)).trainer
            figures["told_over_taken"] = ratio(told / 1e6, figures["memory_mb"])
        flops = 6 * bench.live.weights.numel() + 12 * config.layers * config.dim * config.sequence_length
        rate = figures["tokens_per_second"]
        utilised = {f"mfu_{of}": round(rate * flops / 1e12 / tflops, 4) for of, tflops in peaks.items()}
        report.add(f"{name}, {what}", figures | utilised)
        del bench  # before the next is made


def setting(report: Report, config: ModelConfig, shape: tuple[int, int], what: str) -> tuple[float, float | None]:
    """Measures the time and memory of a step of plain AdamW, and frees everything."""
    peak = Peak(report.device)
    kind = PlainLoss if what == "logits at once" else Transformer
    bench = Bench(report, config, *shape, kind=kind, checkpointing=what == "checkpointing")
    if what == "compile":
        bench.live.model.compile_layers()
    return statistics.median(bench.adamw()), peak.taken_mb


def settings(report: Report, name: str, vocabulary: int, sequences: int, passes: int) -> None:
    """Measures plain AdamW's time and memory with each of the device's settings, relative to those without it."""
    config = model_config(name, vocab_size=vocabulary)
    whole: tuple[float, float | None] | None = None
    for what in ("as it is", "logits at once", "checkpointing", "compile"):
        if report.seconds_left < (COMPILE_SECONDS if what == "compile" else 0.0):
            report.add(f"{name}, {what}", {"left_out": f"only {report.seconds_left:.0f} s were left"})
            continue
        try:
            here = setting(report, config, (sequences, passes), what)
        except FAILURES as error:
            report.add(f"{name}, {what}", {"failed": str(error)[:500]})
            continue
        whole = whole or here
        figures = {"step_ms": round(1e3 * here[0], 2), "memory_mb": here[1], "time_over": ratio(here[0], whole[0])}
        report.add(f"{name}, {what}", figures | {"memory_over": ratio(here[1], whole[1])})


def main(report: Report) -> None:
    if report.device.type == "cpu":
        torch.set_num_threads(1)
    peaks = {"measured": peak_tflops(report.device, 512 if report.small else 8_192)}
    name = torch.cuda.get_device_name(report.device) if report.device.type == "cuda" else ""
    if name in DATA_SHEET_TFLOPS:
        peaks["data_sheet"] = DATA_SHEET_TFLOPS[name]
    report.add("peak_tflops", {what: round(value, 2) for what, value in peaks.items()})
    sizes = SIZES_SMALL if report.small else SIZES
    failed = []
    for place, (size, shape) in enumerate(sizes.items()):
        try:
            measure(report, size, *shape, peaks)
        except FAILURES as error:
            report.add(size, {"failed": str(error)[:500]})
            failed.append(size)
        if not place:  # before what takes longer, and tells less that is new
            settings(report, size, *shape)
    if failed:
        sys.exit(f"not measured to the end: {failed}")


if __name__ == "__main__":
    run_part(__doc__ or "", main)
