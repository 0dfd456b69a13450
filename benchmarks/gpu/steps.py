"""Tokens a second and model FLOP utilisation of plain AdamW, `distro` and `local`; effects of the device's settings.

The baseline is AdamW as one fused kernel over all weights, with the same passes. `overhead` is what a step takes more
in whole rounds: contribution, packing, the apply of 8 and of 100 contributions, the root; all but the network.
`swarm_cost` is the same over the recipe's own steps (with Muon for `local`, without an optimizer for `distro`), in
blocks of ten that take turns: least, median and most. Beside them stand a contribution, an apply, a root, and the
verdict on a payload, which a processor gives. With `compiled`, both sides are. Model FLOPs a token are 6 * parameters
+ 12 * layers * width * length (PaLM, arXiv 2204.02311); utilisation is over a bf16 matrix product measured here, and
over the data sheet's where the GPU is known.
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
from p2ptrain.exact.codec import unpack
from p2ptrain.exact.outer import Outer
from p2ptrain.exact.root import state_root
from p2ptrain.models.built_in import Transformer, initialise
from p2ptrain.train.live import LiveModel
from p2ptrain.train.memory import PassSettings, need_of
from p2ptrain.train.recipes import make_recipe

# Model, vocabulary, sequences of a pass, passes of a step: 65,536 tokens, which is a GPU's part of nanoGPT's batch.
SIZES = {"124m": (50_304, 16, 4), "350m": (50_304, 8, 8)}
SIZES_SMALL = {"1m": (256, 2, 1)}
STEPS, STEPS_SMALL, WARM_UP = 8, 3, 2
CONTRIBUTIONS, CONTRIBUTIONS_SMALL = (8, 100), (2,)
LOCAL_STEPS = BLOCK_STEPS = 10
PAIRS = 5
COMPILED_SECONDS = 100.0  # that a size takes which is compiled
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


class Rounds:
    """A node's rounds on the device: its steps, and all that the swarm adds to them but the network."""

    def __init__(self, bench: Bench, name: str) -> None:
        self.bench, config = bench, RECIPES[name]
        self.config = config.model_copy(
            update={
                "sequences_per_pass": bench.recipe.sequences_per_pass,
                "passes_per_step": bench.recipe.passes_per_step,
            }
        )
        self.outer = Outer(self.config, bench.live.shapes)
        self.recipe = make_recipe(self.config, bench.live, self.outer.layouts)
        self.agreed = bench.live.weights.clone()
        self.payloads: list[bytes] = []
        self.number = 0

    def steps(self, count: int = BLOCK_STEPS) -> None:
        for step in range(count):
            self.recipe.local_step(step, self.bench.batch, [])

    def begin(self) -> None:
        self.number += 1
        self.recipe.base.copy_(self.agreed)
        self.recipe.begin(self.number)

    def contribute(self) -> bytes:
        self.recipe.end()
        payload = self.outer.pack(self.recipe.contribute(self.number), 0)
        self.recipe.residual.forget(self.number)
        return payload

    def apply(self) -> None:
        self.outer.apply(self.agreed, 0, self.payloads)

    def root(self) -> None:
        state_root(self.agreed)

    def block(self) -> None:
        """As many steps as `steps` takes, in whole rounds."""
        for _ in range(BLOCK_STEPS // self.config.local_steps):
            self.begin()
            self.steps(self.config.local_steps)
            self.contribute()
            self.apply()
            self.root()


def recipe_figures(bench: Bench, name: str, baseline: list[float]) -> dict[str, Any]:
    """Measures blocks of steps with and without whole rounds, in turns."""
    rounds, small = Rounds(bench, name), bench.steps == STEPS_SMALL
    rounds.begin()
    rounds.steps(1)
    payload, plain = rounds.contribute(), statistics.median(baseline)
    form = rounds.outer.forms[rounds.config.k_max][0]
    figures: dict[str, Any] = {}
    for contributions in CONTRIBUTIONS_SMALL if small else CONTRIBUTIONS:
        rounds.payloads = [payload] * contributions
        rounds.block()
        pairs = [
            (seconds_of(rounds.steps, bench.device), seconds_of(rounds.block, bench.device))
            for _ in range(1 if small else PAIRS)
        ]
        step = statistics.median(block for _, block in pairs) / BLOCK_STEPS
        figures |= {
            f"swarm_cost_{contributions}": spread([block / steps - 1 for steps, block in pairs]),
            f"overhead_{contributions}": round(step / plain - 1, 4),
            f"apply_ms_{contributions}": median_ms(rounds.apply, bench.device, 3),
        }
        figures.setdefault("tokens_per_second", round(bench.tokens / step))
    figures["step_seconds"] = [round(seconds / BLOCK_STEPS, 4) for seconds in spread([steps for steps, _ in pairs])]
    rounds.begin()
    rounds.steps(1)
    figures["contribute_ms"] = round(1e3 * seconds_of(rounds.contribute, bench.device), 3)
    figures["check_ms"] = median_ms(lambda: unpack(payload, form), bench.device, 3)
    figures["root_ms"] = median_ms(rounds.root, bench.device, 3)
    return figures


def measure(
    report: Report, name: str, shape: tuple[int, int, int], peaks: dict[str, float], *, compiled: bool = False
) -> None:
    vocabulary, sequences, passes = shape
    config = model_config(name, vocab_size=vocabulary)
    baseline: list[float] = []
    for what in ("adamw", "distro", "local"):
        peak = Peak(report.device)
        bench = Bench(report, config, sequences, passes)
        if compiled:
            bench.live.model.compile_layers()
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
        report.add(f"{name}, {what}" + (", compiled" if compiled else ""), figures | utilised)
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
            measure(report, size, shape, peaks)
            if not place and not report.small and report.seconds_left > COMPILED_SECONDS:
                measure(report, size, shape, peaks, compiled=True)
        except FAILURES as error:
            report.add(size, {"failed": str(error)[:500]})
            failed.append(size)
        if not place:  # before what takes longer, and tells less that is new
            settings(report, size, *shape)
    if failed:
        sys.exit(f"not measured to the end: {failed}")


if __name__ == "__main__":
    run_part(__doc__ or "", main)
