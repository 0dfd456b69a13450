"""A round's arithmetic without training: encode, pack, check, apply and root, on the device and on a CPU.

Milliseconds (medians after a warm-up; at 1B one turn of what takes seconds) and the most memory that each took beside
weights, gradient and residual; for pack and check, which a CPU does on both sides, main memory. Ten contributions are
applied. Both sides apply the same payloads to the same weights, as often, and their roots have to be equal.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import Peak, Report, median_ms, model_config, run_part
from p2ptrain.config import RecipeConfig
from p2ptrain.exact.aggregate import apply_payloads
from p2ptrain.exact.codec import Contribution, Packed, PayloadFormat, pack, unpack
from p2ptrain.exact.kernels.launches import OnCard
from p2ptrain.exact.root import state_root
from p2ptrain.exact.schedule import Terms
from p2ptrain.exact.transform import Layout
from p2ptrain.models.built_in import Transformer
from p2ptrain.train.residual import Residual

SIZES, SIZES_SMALL = ("10m", "124m", "1b"), ("1m",)
VOCABULARIES = {"124m": 50_304}
KS = (8, 32)
CONTRIBUTIONS, DIFFERENT = 10, 3
CPU = torch.device("cpu")
LONG_PARAMETERS = 500_000_000  # from here on one turn has to do of what takes seconds
LEAST_SECONDS = {"1b": 25.0}  # that one side takes; a size that is not here always fits


def views(flat: Tensor, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [part.view(shape) for part, shape in zip(torch.split(flat, sizes), shapes, strict=True)]


def drawn(count: int, seed: int, device: torch.device) -> Tensor:
    """Draws normal numbers on the device, because a CPU takes seconds for 1B."""
    return torch.randn(count, generator=torch.Generator(device).manual_seed(seed), device=device)


def measure(
    shapes: list[tuple[int, ...]],
    k: int,
    device: torch.device,
    weights: Tensor,
    gradients: list[Tensor],
    payloads: list[bytes],
    *,
    root_timed: bool,
) -> dict[str, Any]:
    """Measures one side. Makes the payloads from the gradients if there are none yet."""
    long = weights.numel() > LONG_PARAMETERS
    recipe = RecipeConfig(name="distro", chunk=64, k=k)
    layout = Layout(shapes, recipe.chunk)
    form = PayloadFormat.of(layout, recipe)
    residual = Residual((layout,), device)
    gradient, state = gradients[0].to(device), weights.to(device, copy=True)
    figures: dict[str, Any] = {"parameters": weights.numel(), "payload_bytes": form.payload_bytes}
    number = 0

    def bytes_of(contribution: Contribution | OnCard) -> bytes:
        return contribution.packed(form) if isinstance(contribution, OnCard) else pack(contribution, form)

    def encode() -> Contribution | OnCard:
        nonlocal number
        residual.add(0, views(gradient, shapes), 0.999)
        contribution = residual.take(number, recipe)
        residual.forget(number)
        number += 1
        return contribution

    def timed(name: str, work: Callable[[], Any], turns: int, memory_of: torch.device = device) -> None:
        if turns > 1:
            work()
        peak = Peak(memory_of)
        figures[f"{name}_ms"] = median_ms(work, device, turns, warm_up=False)
        figures[f"{name}_mb"] = peak.taken_mb

    timed("encode", encode, 1 if long and device.type == "cpu" else 3)
    contribution = encode()
    timed("pack", lambda: bytes_of(contribution), 1 if long else 3, CPU)
    if not payloads:
        made = []
        for each in gradients:
            residual.coefficients.zero_()
            residual.keep({})
            gradient = each.to(device)
            made.append(bytes_of(encode()))
        payloads += [made[index % len(made)] for index in range(CONTRIBUTIONS)]
    timed("check", lambda: unpack(payloads[0], form), 1 if long else 3, CPU)
    rate, parameters = Fraction(1, 1000), views(state, shapes)
    packed = [Packed(each, form) for each in payloads]
    timed("apply", lambda: apply_payloads(layout, recipe, packed, Terms(rate), parameters), 1 if long else 3)

    def root() -> None:
        figures["root"] = state_root(state).hex()

    if root_timed:
        timed("root", root, 1 if long else 3)
    else:
        root()
    return figures


def measure_both(
    report: Report, name: str, k: int, shapes: list[tuple[int, ...]], weights: Tensor, gradients: list[Tensor]
) -> bool | None:
    """Measures both sides; returns whether the roots are equal, or None if there was no time for both."""
    payloads: list[bytes] = []
    roots = []
    for side, device in (("device", report.device), ("cpu", CPU)):
        if report.seconds_left < LEAST_SECONDS.get(name, 0.0):
            report.add(f"{name}, k={k}, {side}", {"left_out": f"only {report.seconds_left:.0f} s were left"})
            return None
        figures = measure(shapes, k, device, weights, gradients, payloads, root_timed=k == KS[0])
        roots.append(figures["root"])
        report.add(f"{name}, k={k}, {side}", figures)
    report.add(f"{name}, k={k}, roots_equal", roots[0] == roots[1])
    return roots[0] == roots[1]


def main(report: Report) -> None:
    bad = []
    for name in SIZES_SMALL if report.small else SIZES:
        vocabulary = {"vocab_size": VOCABULARIES[name]} if name in VOCABULARIES else {}
        with torch.device("meta"):
            model = Transformer(model_config(name, **vocabulary))
        shapes = [tuple(parameter.shape) for parameter in model.parameters()]
        count = sum(parameter.numel() for parameter in model.parameters())
        if report.seconds_left < LEAST_SECONDS.get(name, 0.0):
            report.add(name, {"left_out": f"only {report.seconds_left:.0f} s were left"})
            continue
        weights = drawn(count, 0, report.device).mul_(0.02).to(CPU)
        gradients = [drawn(count, 1 + seed, report.device) for seed in range(DIFFERENT)]
        bad += [(name, k) for k in KS if measure_both(report, name, k, shapes, weights, gradients) is False]
        del weights, gradients  # before those of the next size are made
    report.add("roots_equal", not bad)
    if bad:
        sys.exit(f"roots differ: {bad}")


if __name__ == "__main__":
    run_part(__doc__ or "", main)
