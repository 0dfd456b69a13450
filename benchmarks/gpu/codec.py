"""A round's arithmetic without training: encode, pack, check, apply and root, on the device and on a CPU.

Milliseconds (medians after a warm-up; of 1B on a CPU one turn) and the most memory that each took beside weights,
gradient and residual. Ten contributions are applied. Both sides apply the same payloads to the same weights, and their
roots have to be equal.
"""

from __future__ import annotations

import sys
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import Peak, Report, median_ms, model_config, run_part
from p2ptrain.config import RecipeConfig
from p2ptrain.learn.aggregate import apply_payloads
from p2ptrain.learn.codec import PayloadFormat, pack, unpack
from p2ptrain.learn.model import Transformer
from p2ptrain.learn.recipes import Residual
from p2ptrain.learn.root import state_root
from p2ptrain.learn.transform import Layout

SIZES, SIZES_SMALL = ("10m", "124m", "1b"), ("1m",)
VOCABULARIES = {"124m": 50_304}
KS = (8, 32)
CONTRIBUTIONS, DIFFERENT = 10, 3
CPU = torch.device("cpu")
LONG_PARAMETERS = 500_000_000  # from here on one turn has to do on a CPU


def views(flat: Tensor, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [part.view(shape) for part, shape in zip(torch.split(flat, sizes), shapes, strict=True)]


def drawn(count: int, seed: int, device: torch.device) -> Tensor:
    """Normal numbers; drawn on the device, because a CPU takes seconds for 1B."""
    return torch.randn(count, generator=torch.Generator(device).manual_seed(seed), device=device)


def measure(
    shapes: list[tuple[int, ...]], k: int, device: torch.device, weights: Tensor, payloads: list[bytes]
) -> tuple[dict[str, Any], list[bytes]]:
    """The figures, and the payloads that were applied: made here if there are none yet."""
    count = weights.numel()
    turns = 1 if device.type == "cpu" and count > LONG_PARAMETERS else 3
    recipe = RecipeConfig(k=k)
    layout = Layout(shapes, recipe.chunk)
    form = PayloadFormat.of(layout, recipe)
    residual = Residual(layout, device)
    gradient, state = drawn(count, 1, device), weights.to(device, copy=True)
    figures: dict[str, Any] = {"payload_bytes": form.payload_bytes}
    number = 0

    def encode() -> Any:
        nonlocal number
        residual.add(views(gradient, shapes), 0.999)
        contribution = residual.take(number, recipe)
        residual.forget(number)
        number += 1
        return contribution

    def timed(name: str, work: Any) -> None:
        figures[f"{name}_ms"] = median_ms(work, device, turns)
        peak = Peak(device)
        if turns > 1:
            work()
            figures[f"{name}_mb"] = peak.taken_mb

    timed("encode", encode)
    contribution = encode()
    timed("pack", lambda: pack(contribution, form))
    if not payloads:
        made = []
        for seed in range(DIFFERENT):
            residual.clear()
            gradient = drawn(count, 10 + seed, device)
            made.append(pack(encode(), form))
        payloads = [made[index % DIFFERENT] for index in range(CONTRIBUTIONS)]
    timed("check", lambda: unpack(payloads[0], form))
    rate, parameters = Fraction(1, 1000), views(state, shapes)
    timed("apply", lambda: apply_payloads(layout, recipe, form, payloads, rate, parameters))
    timed("root", lambda: state_root(state))
    state.copy_(weights)
    apply_payloads(layout, recipe, form, payloads, rate, parameters)
    figures["root"] = state_root(state).hex()
    return figures, payloads


def main(report: Report) -> None:
    bad = []
    for name in SIZES_SMALL if report.small else SIZES:
        vocabulary = {"vocab_size": VOCABULARIES[name]} if name in VOCABULARIES else {}
        with torch.device("meta"):
            model = Transformer(model_config(name, **vocabulary))
        shapes = [tuple(parameter.shape) for parameter in model.parameters()]
        count = sum(parameter.numel() for parameter in model.parameters())
        weights = drawn(count, 0, report.device).mul_(0.02).to(CPU)
        for k in KS:
            roots, payloads = set(), []
            for device in (report.device, CPU):
                figures, payloads = measure(shapes, k, device, weights, payloads)
                roots.add(figures["root"])
                side = "device" if device is report.device else "cpu"
                report.add(f"{name}, k={k}, {side}", {"parameters": count} | figures)
            if len(roots) != 1:
                bad.append((name, k))
    report.add("roots_equal", not bad)
    if bad:
        sys.exit(f"roots differ: {bad}")


if __name__ == "__main__":
    run_part(__doc__ or "", main)
