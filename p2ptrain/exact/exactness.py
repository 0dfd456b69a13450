"""Asks a device for known answers before it takes part: who rounds in another way would drift from the swarm."""

from __future__ import annotations

import logging
import time

import torch

from p2ptrain.config import BASIS_PEAK, EXACT_MAX, RecipeConfig
from p2ptrain.digest import PIECE_BYTES, leaf_digest
from p2ptrain.errors import DeviceError
from p2ptrain.exact.kernels.launches import failures, is_usable, launches_of, leaves, refuse
from p2ptrain.exact.outer import Outer
from p2ptrain.exact.transform import FP32_EXACT_MAX, first_stage_dtype, integer_basis, inverse

EXACTNESS_FIX = (
    "Unset DNNL_DEFAULT_FPMATH_MODE, TORCH_ALLOW_TF32_CUBLAS_OVERRIDE and whatever sets torch's float32 matmul "
    "precision or flush-to-zero mode; or choose another device"
)
ELSEWHERE = 'Set device.name = "cpu", or that of a CUDA device'
TRIED = 3  # contributions
SLOW_SECONDS = 5.0  # from here on the log says what took so long

log = logging.getLogger("p2ptrain.exact")


def check_exactness(recipe: RecipeConfig, device: torch.device) -> None:
    """Refuses a device or library whose arithmetic on the exact path does not follow IEEE 754.

    Matrix products may be configured to use TF32 or bf16 internally, or a processor to flush subnormals to zero;
    replicas would drift apart without a visible reason. Checking a few known answers takes a millisecond."""
    if device.type not in ("cpu", "cuda"):
        what = f"{device} is not known to compute exactly: {device.type} lacks fp64, or was not tried"
        raise DeviceError(what, fix=ELSEWHERE)
    chunk = recipe.chunk
    basis = integer_basis(chunk, torch.int64, torch.device("cpu"))
    for bound in ((FP32_EXACT_MAX - 1) // BASIS_PEAK, (EXACT_MAX - 1) // BASIS_PEAK**2):  # each stage's largest input
        votes = torch.zeros(3, chunk, chunk, dtype=torch.int64)
        votes[0, 1, chunk // 2 + 1] = bound  # all votes in one coefficient
        votes[1, :, 1] = bound // chunk * (1 - 2 * (torch.arange(chunk) % 2))  # a column, which the first product sums
        votes[2] = bound // chunk**2
        votes[2, 1, 1] += bound - bound // chunk**2 * chunk**2
        expected = torch.einsum("ui,nuv,vj->inj", basis, votes, basis)
        computed = inverse(votes.view(3, -1).int().to(device), chunk, first_stage_dtype(bound, device))
        if not torch.equal(computed.cpu().long(), expected):
            raise DeviceError(f"{device} does not multiply matrices exactly", fix=EXACTNESS_FIX)
    tiny = torch.full((2**20,), 2.0**-140, device=device)  # fp32 below the normal range, enough of them for all threads
    twice = (tiny + tiny).cpu().view(torch.int32)  # compared as bits, since flushed numbers equal zero
    if not (twice == 2**10).all():
        raise DeviceError(f"{device} flushes small numbers to zero", fix=EXACTNESS_FIX)
    smaller = (tiny * 0.75).cpu().view(torch.int32)  # a product of the momentum, below the normal range
    if not (smaller == 3 * 2**7).all():
        raise DeviceError(f"{device} flushes small products to zero", fix=EXACTNESS_FIX)
    check_kernels(recipe, device)


def check_kernels(recipe: RecipeConfig, device: torch.device) -> None:
    """Has torch do the arithmetic of a card on which a run's programs give other bits, or do not run."""
    if not is_usable(device):
        return
    start = time.monotonic()
    try:
        is_same = _is_same(recipe, device)
        state = torch.arange(PIECE_BYTES // 4 + 5, dtype=torch.float32)
        pieces = enumerate(torch.split(state, PIECE_BYTES // 4))
        expected = [leaf_digest(number, piece.numpy().tobytes()) for number, piece in pieces]
        is_same = is_same and leaves(state.to(device)) == expected
    except failures() as error:  # whatever a compiler or a driver raises
        first = next(iter(str(error).splitlines()), "")
        refuse(device, f"the programs for a card do not run here ({type(error).__name__}: {first})")
    else:
        if not is_same:
            refuse(device, "the programs for a card give other bits here")
    if (took := time.monotonic() - start) > SLOW_SECONDS:
        log.info("compiling the programs for %s took %.0f s; the next start finds them", device, took)


@torch.no_grad()
def _is_same(recipe: RecipeConfig, device: torch.device) -> bool:
    """Whether a card's programs pack a contribution and move the weights as is done in main memory."""
    chunk, generator = recipe.chunk, torch.Generator().manual_seed(0)
    recipe = recipe.model_copy(update={"fragments": 1, "rule": "all", "momentum_rounds": 1})  # all three count, at once
    outer = Outer(recipe, [(2 * chunk, chunk), (chunk - 3, chunk + 5), (9,)])
    (layout,) = outer.layouts
    programs = launches_of(layout, device)
    if programs is None or recipe.is_dense:
        return True
    state = torch.randn(outer.state_numbers, generator=generator)
    there, payloads = state.to(device, copy=True), []
    ahead = there[: outer.parameters].clone()
    for number in range(TRIED):
        residual = torch.randn(layout.chunks, layout.area, generator=generator).to(device)
        programs.accumulate(ahead, residual, 0.5)
        made, removed = programs.take(residual, recipe.ks[-1 - number % len(recipe.ks)], number, recipe)
        payloads.append(outer.pack(made, 0))
        if outer.unpack(payloads[-1]).indices.tobytes() != made.in_memory().indices.tobytes():
            return False
        programs.subtract(ahead, residual, 0.5)  # nobody checks these two: they have to run
        programs.subtract_sparse(ahead, made.indices, removed, 0.5)
    outer.apply(state, recipe.warmup_rounds, payloads)
    outer.apply(there, recipe.warmup_rounds, payloads)
    return torch.equal(state.view(torch.int32), there.cpu().view(torch.int32))
