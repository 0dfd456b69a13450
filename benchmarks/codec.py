"""The cost of a round's arithmetic, compared to a plain floating-point DeMo step in the same run.

    python benchmarks/codec.py [--json FILE] [--threads N] [--quick]

For a model of 10M and one of 100M parameters, 10 and 100 peers: milliseconds and peak memory of encode
(momentum, DCT, top-k, what is sent leaves the residual), pack, unpack with every check, and aggregate
(sum of votes, exact inverse, update of the weights); bytes on the wire and bits per coefficient beside
the entropy of a random set with signs. The two sides take turns, and ratios are medians of the turns'
ratios, so a machine whose speed drifts does not decide the result.

The floating-point side is DeMo as its paper and its code have it: dimensions split by their largest
divisor up to 64, einsum for both transforms, torch.topk, int64 indices and fp32 values on the wire,
a scatter-mean over the peers that sent a coefficient, and the sign. `matmul` is the same step with the
two einsums written as the batched matrix products that a careful engineer would write.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from p2ptrain.config import ModelConfig, RecipeConfig
from p2ptrain.exact.aggregate import apply_votes, sum_votes
from p2ptrain.exact.codec import Contribution, PayloadFormat, pack, unpack
from p2ptrain.exact.schedule import Terms
from p2ptrain.exact.transform import Layout
from p2ptrain.models.built_in import Transformer
from p2ptrain.train.residual import Residual

TEMPLAR_BYTES = 318_335  # its payload for 10.0M parameters at k = 32, measured
PLACE_BITS = 12  # of DeMo's places, if they were packed
CPU = torch.device("cpu")


class Ours:
    """The `distro` recipe, without the model around it."""

    def __init__(self, shapes: list[tuple[int, ...]], k: int) -> None:
        self.recipe = RecipeConfig(name="distro", chunk=64, k=k)
        self.layout = Layout(shapes, self.recipe.chunk)
        self.form = PayloadFormat.of(self.layout, self.recipe)
        self.residual = Residual((self.layout,), CPU)
        self.round = 0

    def encode(self, gradients: list[Tensor]) -> Contribution:
        self.residual.add(0, gradients, 0.999)
        contribution = self.residual.take(self.round, self.recipe)
        self.residual.forget(self.round)
        self.round += 1
        return contribution

    def pack(self, contribution: Contribution) -> bytes:
        return pack(contribution, self.form)

    def unpack(self, payloads: list[bytes]) -> list[Contribution]:
        return [unpack(payload, self.form) for payload in payloads]

    def aggregate(self, contributions: list[Contribution], parameters: list[Tensor]) -> None:
        votes = sum_votes(self.layout, self.recipe, contributions, len(contributions), None, CPU)
        apply_votes(self.layout, self.recipe, votes, Terms(Fraction(1, 1000)), parameters)


class FloatDeMo:
    """DeMo in floating point."""

    def __init__(self, shapes: list[tuple[int, ...]], k: int, *, matmul: bool) -> None:
        self.shapes, self.k, self.matmul = shapes, k, matmul
        self.momenta = [torch.zeros(shape) for shape in shapes]
        sizes = {self.divisor(size) for shape in shapes for size in shape}
        self.bases = {size: self.basis(size) for size in sizes}

    @staticmethod
    def divisor(size: int) -> int:
        return next(n for n in range(64, 0, -1) if size % n == 0)

    @staticmethod
    def basis(size: int) -> Tensor:  # [u, i]
        u, i = torch.arange(size)[:, None], torch.arange(size)[None, :]
        table = torch.cos(math.pi * (2 * i + 1) * u / (2 * size)) * math.sqrt(2 / size)
        table[0] = math.sqrt(1 / size)
        return table

    def chunks(self, tensor: Tensor) -> Tensor:  # [rows of chunks, columns of chunks, r, c] or [chunks, c]
        if tensor.dim() == 1:
            return tensor.view(-1, self.divisor(tensor.shape[0]))
        r, c = (self.divisor(size) for size in tensor.shape)
        return tensor.view(tensor.shape[0] // r, r, tensor.shape[1] // c, c).permute(0, 2, 1, 3)

    def transform(self, chunks: Tensor, *, forward: bool) -> Tensor:
        bases = [self.bases[size] if forward else self.bases[size].T for size in chunks.shape[(chunks.dim() // 2) :]]
        if chunks.dim() == 2:
            return torch.einsum("ni,ui->nu", chunks, bases[0])
        if self.matmul:
            return bases[0] @ (chunks.reshape(-1, chunks.shape[-1]) @ bases[1].T).view(chunks.shape)
        return torch.einsum("abij,ui,vj->abuv", chunks, bases[0], bases[1])

    def restored(self, chunks: Tensor, shape: tuple[int, ...]) -> Tensor:
        return chunks.reshape(shape) if chunks.dim() == 2 else chunks.permute(0, 2, 1, 3).reshape(shape)

    def encode(self, gradients: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        sent = []
        for momentum, gradient, shape in zip(self.momenta, gradients, self.shapes, strict=True):
            momentum.mul_(0.999).add_(gradient, alpha=1e-3)
            coefficients = self.transform(self.chunks(momentum), forward=True)
            flat = coefficients.reshape(-1, math.prod(coefficients.shape[coefficients.dim() // 2 :]))
            k = min(self.k, flat.shape[1])
            indices = flat.abs().topk(k, dim=1, sorted=False).indices
            values = flat.gather(1, indices)
            own = torch.zeros_like(flat).scatter_(1, indices, values).view(coefficients.shape)
            momentum.sub_(self.restored(self.transform(own, forward=False), shape))
            sent.append((indices, values))
        return sent

    def decode(self, received: list[list[tuple[Tensor, Tensor]]], parameters: list[Tensor]) -> None:
        for number, (parameter, shape) in enumerate(zip(parameters, self.shapes, strict=True)):
            like = self.chunks(parameter)
            indices = torch.cat([peer[number][0] for peer in received], dim=1)
            values = torch.cat([peer[number][1] for peer in received], dim=1)
            flat = torch.zeros(len(indices), math.prod(like.shape[like.dim() // 2 :]))
            flat.scatter_reduce_(1, indices, values, reduce="mean", include_self=False)
            update = self.restored(self.transform(flat.view(like.shape), forward=False), shape)
            parameter.sub_(update.sign_(), alpha=1e-3)

    def payload_bytes(self, sent: list[tuple[Tensor, Tensor]], place_bits: int = 64) -> int:
        return sum(indices.numel() * place_bits // 8 + values.numel() * 4 for indices, values in sent)


@dataclass
class Stage:
    """The duration of every turn, and the peak of additional memory in one turn."""

    seconds: list[float]
    peak_bytes: int = 0

    @property
    def milliseconds(self) -> float:
        return statistics.median(self.seconds) * 1e3


class Stages:
    """Named stages, timed turn by turn, or measured for memory in a separate turn."""

    def __init__(self) -> None:
        self.stages: dict[str, Stage] = {}
        self.memory = False

    def run(self, name: str, work: Callable[[], Any]) -> Any:
        before = reset_peak_memory() if self.memory else 0
        start = time.perf_counter()
        result = work()
        seconds = time.perf_counter() - start
        stage = self.stages.setdefault(name, Stage([]))
        if self.memory:
            stage.peak_bytes = peak_memory() - before
        else:
            stage.seconds.append(seconds)
        return result


def reset_peak_memory() -> int:
    """Releases free memory, resets the peak of resident memory to its current value, and returns it (Linux, glibc)."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return peak_memory()


def peak_memory() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def ours_turn(
    stages: Stages, ours: Ours, gradient: list[Tensor], payloads: list[bytes], parameters: list[Tensor]
) -> float:
    start = time.perf_counter()
    contribution = stages.run("encode", lambda: ours.encode(gradient))
    stages.run("pack", lambda: ours.pack(contribution))
    contributions = stages.run("unpack", lambda: ours.unpack(payloads))
    stages.run("aggregate", lambda: ours.aggregate(contributions, parameters))
    return time.perf_counter() - start


def float_turn(
    stages: Stages,
    name: str,
    demo: FloatDeMo,
    gradient: list[Tensor],
    received: list[list[tuple[Tensor, Tensor]]],
    parameters: list[Tensor],
) -> float:
    start = time.perf_counter()
    stages.run(f"{name}_encode", lambda: demo.encode(gradient))
    stages.run(f"{name}_decode", lambda: demo.decode(received, parameters))
    return time.perf_counter() - start


def measure(preset: str, k: int, peers: int, threads: int, turns: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    with torch.device("meta"):
        shapes = [tuple(p.shape) for p in Transformer(ModelConfig.model_validate({"preset": preset})).parameters()]
    torch.manual_seed(0)
    parameters = [torch.randn(shape) * 0.02 for shape in shapes]
    ours, floats = (
        Ours(shapes, k),
        {name: FloatDeMo(shapes, k, matmul=name == "matmul") for name in ("float", "matmul")},
    )
    gradients = [[torch.randn(shape) for shape in shapes] for _ in range(2)]
    payloads, received = [], []
    for _ in range(min(peers, 10)):
        noise = [torch.randn(shape) for shape in shapes]
        payloads.append(ours.pack(ours.encode(noise)))
        received.append(floats["float"].encode(noise))
    payloads, received = (payloads * (peers // len(payloads)), received * (peers // len(received)))
    stages, ratios, matmul_ratios = Stages(), [], []
    for turn in range(-1, turns + 1):  # the turn before the first warms up, the one after the last measures memory
        stages.memory = turn == turns
        gradient = gradients[turn % 2]
        seconds = [ours_turn(stages, ours, gradient, payloads, parameters)]
        seconds += [float_turn(stages, name, floats[name], gradient, received, parameters) for name in floats]
        if turn == -1:
            stages = Stages()
        elif not stages.memory:
            ratios.append(seconds[0] / seconds[1])
            matmul_ratios.append(seconds[0] / seconds[2])

    def total(*names: str) -> float:
        return sum(stages.stages[name].milliseconds for name in names)

    form = ours.form
    entropy = math.log2(math.comb(form.area, k)) / k + 1
    count = sum(parameter.numel() for parameter in parameters)
    float_bytes = floats["float"].payload_bytes(received[0])
    return {
        "parameters": count,
        "k": k,
        "peers": peers,
        "threads": threads,
        "bits_per_coefficient": round(form.payload_bytes * 8 / (form.chunks * form.k), 4),
        "entropy_bits_per_coefficient": round(entropy, 4),
        "payload_bytes": form.payload_bytes,
        "float_payload_bytes": float_bytes,
        "payload_ratio": round(float_bytes / form.payload_bytes, 3),
        "packed_ratio": round(floats["float"].payload_bytes(received[0], PLACE_BITS) / form.payload_bytes, 3),
        "fp32_ratio": round(4 * count / form.payload_bytes, 1),
        "ours_ms": round(total("encode", "pack", "unpack", "aggregate"), 2),
        "float_ms": round(total("float_encode", "float_decode"), 2),
        "matmul_ms": round(total("matmul_encode", "matmul_decode"), 2),
        "time_ratio": round(statistics.median(ratios), 3),
        "matmul_time_ratio": round(statistics.median(matmul_ratios), 3),
        "turns": turns,
        "stages_ms": {name: round(stage.milliseconds, 2) for name, stage in stages.stages.items()},
        "unpack_one_ms": round(total("unpack") / peers, 3),
        "stages_peak_mib": {name: round(stage.peak_bytes / 2**20, 1) for name, stage in stages.stages.items()},
    }


def describe(result: dict[str, Any]) -> str:
    stages, peaks = result["stages_ms"], result["stages_peak_mib"]
    times = ", ".join(f"{name} {stages[name]:.1f} ms ({peaks[name]:.0f} MiB)" for name in stages)
    return (
        f"{result['parameters'] / 1e6:.1f}M parameters, k={result['k']}, {result['peers']} peers, "
        f"{result['threads']} thread(s)\n"
        f"  wire: {result['payload_bytes']:,} bytes, {result['bits_per_coefficient']:.3f} bits a coefficient "
        f"(entropy {result['entropy_bits_per_coefficient']:.3f}); DeMo's {result['float_payload_bytes']:,} bytes are "
        f"{result['payload_ratio']:.2f} times as many, with places of {PLACE_BITS} bits "
        f"{result['packed_ratio']:.2f}, fp32 {result['fp32_ratio']:.0f} times\n"
        f"  time: {result['ours_ms']:.0f} ms; float {result['float_ms']:.0f} ms (ratio {result['time_ratio']:.2f}), "
        f"with batched products {result['matmul_ms']:.0f} ms (ratio {result['matmul_time_ratio']:.2f})\n"
        f"  {times}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--json", type=Path, help="also write the results there")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="the 10M model and 10 peers only")
    arguments = parser.parse_args()
    cases = [("10m", 32, 10, 9), ("10m", 8, 10, 9)]
    if not arguments.quick:
        cases += [("10m", 32, 100, 5), ("100m", 32, 10, 3), ("100m", 32, 100, 1)]
    results = []
    for preset, k, peers, turns in cases:
        results.append(measure(preset, k, peers, arguments.threads, turns))
        print(describe(results[-1]), flush=True)
    first = results[0]
    times = TEMPLAR_BYTES / first["payload_bytes"]
    print(f"templar's {TEMPLAR_BYTES:,} bytes for 10.0M parameters at k=32 are {times:.2f} times ours")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
