"""Starts the programs on a card: what each needs is in tables that are made once for a layout."""

from __future__ import annotations

import importlib.util
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from math import prod
from subprocess import SubprocessError
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, proxy

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from p2ptrain.capacity import cores
from p2ptrain.config import BASIS_PEAK, RecipeConfig
from p2ptrain.digest import PIECE_BYTES, leaf_digest
from p2ptrain.exact import codec
from p2ptrain.exact.cards import lacks_compiler
from p2ptrain.exact.scales import Scales
from p2ptrain.exact.shortage import is_out_of_memory, tell_short
from p2ptrain.exact.transform import Group, Layout, integer_basis, orthonormal_basis

CHUNK_LEAST = 32  # the smallest sides whose products a card's units for small integers take
CAPABILITY_LEAST = (8, 0)
SLAB_BYTES = 2**27  # of votes at a time: a few launches for a small model, and not the memory of a large one
UPLOADED_BYTES = 2**26  # of payloads in one copy, at least one
COPYING_THREADS_MAX = 8
SPARE_BYTES = 16  # readable behind a payload
LANES = 128
RANKED_LANES = 128
INT32_LIMBS = 4  # so many digits of `limbs` fit 32 bits; with more a program keeps twice the registers
SQUARES, SIGN, STEPS = 0, 1, 2  # OUTER of programs.update
NO_MOMENTUM, PLAIN, NESTEROV, KEPT = 0, 1, 2, 3  # its MOMENTUM
PARENT_FLAGS, ROOT_FLAGS = 64 + 4, 64 + 4 + 8  # of BLAKE3, hashed under a derived key
COMPILED = {"enable_fp_fusion": False}  # one rounding where the protocol has two would change bits
LEAF_KEY = bytes.fromhex("8672240f26a28de9557c2148e1f139eea1426d487d3305fe65dad1d384fc89e0")  # of BLAKE3, for leaves
WORDS = PIECE_BYTES // 4

log = logging.getLogger("p2ptrain.exact")
T = TypeVar("T")
refused: dict[torch.device, str] = {}


def refuse(device: torch.device, why: str) -> None:
    """Has torch do all of this device's arithmetic from now on."""
    if _numbered(device) not in refused:
        refused[_numbered(device)] = why
        log.warning("%s does a round's arithmetic in torch, which takes longer: %s", device, why)


def is_usable(device: torch.device) -> bool:
    return device.type == "cuda" and why_not(device) is None


def why_not(device: torch.device) -> str | None:
    """Returns why torch does the arithmetic of a CUDA device, if it does."""
    device = _numbered(device)
    if device in refused:
        return refused[device]
    if importlib.util.find_spec("triton") is None:
        refuse(device, "Triton is not installed")
    elif torch.version.hip:
        refuse(device, "the programs for a card were not tried on ROCm")
    elif torch.cuda.get_device_capability(device) < CAPABILITY_LEAST:
        refuse(device, "the card is older than compute capability 8.0")
    return refused.get(device)


def _numbered(device: torch.device) -> torch.device:
    """Returns a device as its tensors name it."""
    return torch.device(device.type, device.index or 0)


def launch(name: str, grid: tuple[int, ...], *arguments: Any, warps: int = 4, **constants: Any) -> None:
    """Starts a program on the card that has its tensors."""
    if all(grid):
        device = arguments[0].device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            _program(name)[grid](*arguments, num_warps=warps, **COMPILED, **constants)


def _triton_errors() -> tuple[type[Exception], ...]:
    """Returns what a program raises that cannot be compiled for this card, before it has run."""
    try:
        from triton.errors import TritonError  # noqa: PLC0415
    except ImportError:  # what is there cannot be imported
        return (ImportError, SubprocessError)
    return (TritonError, SubprocessError)  # a C compiler makes what starts a program


def failures() -> tuple[type[Exception], ...]:
    """Returns what programs that do not compile or run raise."""
    return (
        *_triton_errors(), RuntimeError, ValueError, TypeError, AttributeError, AssertionError, ImportError, OSError,
    )  # fmt: skip


def attempt(work: Callable[[], T], device: torch.device) -> T | None:
    """Does some work in programs; returns None, for torch to do it, if memory is short or one cannot be compiled.

    The work changes nothing before it has taken all memory and compiled all programs."""
    try:
        return work()
    except _triton_errors() as error:
        refuse(device, f"a program cannot be compiled ({type(error).__name__})")
    except (RuntimeError, MemoryError) as error:
        if lacks_compiler(error):
            refuse(device, f"a program cannot be compiled ({error})")
        elif not is_out_of_memory(error):
            raise
        else:
            tell_short(device)
    return None


@cache
def _program(name: str) -> Any:
    from p2ptrain.exact.kernels import blake, programs  # noqa: PLC0415  # which import Triton

    return getattr(programs, name, None) or getattr(blake, name)


def _pinned(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Returns memory that a card copies to and from by itself; any other where there is none, as in a container."""
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    except RuntimeError:
        return torch.empty(shape, dtype=dtype)


def to_card(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copies without waiting for the card."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        tensor = _pinned(tensor.shape, tensor.dtype).copy_(tensor)
    return tensor.to(device, non_blocking=True)


def upload(contents: Sequence[bytes | memoryview], rows: Tensor) -> None:
    """Copies bytes to the starts of rows [contents, row's length] on the card, which may have two copies to do."""
    at_once, copies = max(1, UPLOADED_BYTES // rows.shape[1]), list[torch.cuda.Event]()

    def fill(row: NDArray[np.uint8], content: bytes | memoryview) -> None:
        row[: len(content)] = np.frombuffer(content, np.uint8)

    with ThreadPoolExecutor(min(cores(), COPYING_THREADS_MAX)) as pool:  # one thread copies more slowly than the bus
        for first in range(0, len(contents), at_once):
            part = rows[first : first + at_once]
            if len(copies) > 1:  # otherwise all payloads would come to lie in memory that is never given back
                copies.pop(0).synchronize()
            room = _pinned(part.shape, part.dtype)
            list(pool.map(fill, room.numpy(), contents[first : first + at_once]))
            part.copy_(room, non_blocking=True)
            if part.device.type == "cuda":
                copies.append(torch.cuda.current_stream(part.device).record_event())


def to_host(tensor: Tensor) -> NDArray[Any]:
    """Copies, and waits for what the card was asked before."""
    if tensor.device.type != "cuda":
        return tensor.cpu().numpy()
    room = _pinned(tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return room.numpy()


def flat_of(tensors: Sequence[Tensor]) -> Tensor | None:
    """Returns the one flat tensor of which these are all parts; None if they are not."""
    first, size = tensors[0], sum(each.numel() for each in tensors)
    ends = accumulate((each.numel() for each in tensors), initial=0)
    starts = [first.storage_offset() + end for end in ends][:-1]
    storage = first.untyped_storage().data_ptr()
    if any(
        not each.is_contiguous() or each.storage_offset() != start or each.untyped_storage().data_ptr() != storage
        for each, start in zip(tensors, starts, strict=True)
    ):
        return None
    return first.as_strided((size,), (1,))


def _halves(basis: Tensor) -> tuple[Tensor, Tensor]:
    """Returns two tensors of bf16 of which a matrix is about the sum."""
    high = basis.bfloat16()
    return high, (basis - high).bfloat16()


def limbs(most: int) -> int:
    """Returns in how many digits of 256, from -128 to 127, every integer up to `most` can be written."""
    count = 1
    while most > 127 * (256**count - 1) // 255:
        count += 1
    return count


def _above(number: int) -> int:
    return 1 << (number - 1).bit_length()


def tensor_type(value_bits: int, *, is_dense: bool = False) -> torch.dtype:
    return {1: torch.int8, 2: torch.int16, 4: torch.int32}[codec.value_type(value_bits, is_dense=is_dense).itemsize]


@dataclass(frozen=True, slots=True)
class OnCard:
    """A contribution that has not left the card."""

    indices: Tensor  # [chunks, k] int16
    values: Tensor  # [chunks, k]
    exponents: Tensor | None  # [groups] int8

    def in_memory(self) -> codec.Contribution:
        exponents = None if self.exponents is None else self.exponents.cpu().numpy()
        return codec.Contribution(self.indices.cpu().numpy().view(np.uint16), self.values.cpu().numpy(), exponents)

    def packed(self, form: codec.PayloadFormat) -> bytes:
        """Returns the same bytes as `codec.pack`."""
        made = attempt(partial(self._packed, form), self.indices.device)
        return codec.pack(self.in_memory(), form) if made is None else made

    def _packed(self, form: codec.PayloadFormat) -> bytes:
        device = self.indices.device
        if form.ranked:
            places = torch.arange(form.k, dtype=torch.int32, device=device)
            ones = (self.indices >> form.low_bits).to(torch.int32).add_(places)
            upper = _binomials_on(form, device)[places + 1, ones].sum(dim=1)
        else:
            upper = torch.zeros(form.chunks, form.positions, dtype=torch.uint8, device=device)
            constants = {"LOW": form.low_bits, "P": form.positions, "K": form.k, "WIDE": _above(form.k)}
            launch("mark", (form.chunks,), self.indices, upper, **constants)
        sizes = self.values.abs().sub_(1) if form.value_bits > 1 else self.values
        fields = (upper, self.indices, (self.values < 0).view(torch.uint8), sizes)
        payload = torch.empty(form.payload_bytes, dtype=torch.uint8, device=device)
        start = form.groups
        if self.exponents is not None:
            payload[:start].copy_((self.exponents + codec.EXPONENT_BIAS).view(torch.uint8))
        for field, (count, width) in zip(fields, form.sections, strict=True):
            size = codec.packed_bytes(form.chunks * count, width)
            if width:
                fixed = field, payload[start:], size, form.chunks * count
                launch("pack_fields", (-(-size // LANES),), *fixed, WIDTH=width, LANES=LANES)
            start += size
        return to_host(payload).tobytes()


@cache
def _binomials_on(form: codec.PayloadFormat, device: torch.device) -> Tensor:
    return to_card(codec.binomials(form.positions, form.k), device)


class Launches:
    """A layout's tables on a card, and what is done with them."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout: Layout = proxy(layout)  # which is the key of these tables
        self.device = device
        rows, addresses, size = [], [np.empty(0, np.int64)], 0
        starts = list(accumulate((prod(shape) for shape in layout.shapes), initial=0))
        for group in layout.groups:
            table, listed = _chunks_of(
                layout, group, [range(starts[each], starts[each + 1]) for each in group.members], size
            )
            rows.append(table)
            addresses.append(listed)
            size += listed.size
        whole, listed = np.concatenate(rows), np.concatenate([*addresses, np.full(layout.area, -1)])
        self.table, self.addresses = to_card(whole, device), to_card(listed, device)
        partly = [
            bool((listed[first : first + layout.area] < 0).any()) if stride == 0 else inside < layout.area
            for first, stride, inside in zip(whole[:, 0], whole[:, 1], whole[:, 2] * whole[:, 3], strict=True)
        ]
        self.padded = to_card(np.flatnonzero(partly), device)
        counts = [group.chunks for group in layout.groups]
        self.groups = to_card(np.repeat(np.arange(len(counts), dtype=np.int32), counts), device)
        self.starts = to_card(np.cumsum([0, *counts], dtype=np.int32), device)
        self.numbers = to_card(np.array(counts, np.float64), device)
        self.back = to_card(np.arange(17, dtype=np.int32)[:, None], device)
        basis = integer_basis(layout.chunk, torch.int64, torch.device("cpu")).T.contiguous()
        low = ((basis + 128) & 255) - 128
        self.low, self.high = (to_card(each.to(torch.int8).numpy(), device) for each in (low, (basis - low) >> 8))
        self.basis = torch.stack([*_halves(own := orthonormal_basis(layout.chunk, device)), *_halves(own.T)])
        self.warps = 4 if layout.chunk == 64 else 1

    # -- The exact path -----------------------------------------------------------------------------

    def update(
        self,
        recipe: RecipeConfig,
        payloads: Sequence[codec.Packed],
        scales: Scales | None,
        steps: Callable[[Callable[[int], int]], Sequence[float]],
        move: Move,
        weights: Tensor,
        momenta: Tensor | None,
    ) -> tuple[Sequence[float], Tensor]:
        """Applies payloads; returns the steps of the groups, and the squared votes of each chunk, on the card.

        steps: computes them from the sum of a group's squared votes. All memory is taken before anything changes."""
        layout, device, count = self.layout, self.device, len(payloads)
        slab = self._slab()
        pitch = -(-(max(form.payload_bytes for _, form in payloads) + SPARE_BYTES) // 8) * 8
        there = torch.empty(count, pitch, dtype=torch.uint8, device=device)
        upload([content for content, _ in payloads], there)
        by_form: dict[codec.PayloadFormat, list[int]] = defaultdict(list)
        for number, (_, form) in enumerate(payloads):
            by_form[form].append(number)
        which = [(form, to_card(np.array(numbers, np.int64), device)) for form, numbers in by_form.items()]
        votes = torch.zeros(slab, layout.area, dtype=torch.int32, device=device)
        squares = torch.empty(layout.chunks, dtype=torch.int64, device=device)
        shifts = self.groups
        if scales:
            of_all = [scales.shifts_of_groups(number) for number in range(count)]
            shifts = to_card(np.stack(of_all, axis=1).astype(np.int32), device)
        most, carried = count * recipe.vote_max, weights if momenta is None else momenta
        half = limbs(most * recipe.k_max * BASIS_PEAK)

        def run(outer: int, found: Sequence[float]) -> None:
            factors = to_card(np.array(found, np.float64), device)
            for first in range(0, layout.chunks, slab):
                chunks = min(slab, layout.chunks - first)
                for form, numbers in which:
                    common = votes, shifts, self.groups, first, count, recipe.vote_max
                    self._count(form, (there, numbers, pitch), common, chunks, is_scaled=scales is not None)
                launch(
                    "update", (chunks,), weights, carried, votes, self.high, self.low, factors, self.table,
                    self.addresses, self.groups, squares, first, move.keep, move.mu,
                    found[0] if outer == SIGN else 0.0, KEEPS=move.keep != 1.0, OUTER=outer, MOMENTUM=move.momentum,
                    C=layout.chunk, VOTE_LIMBS=limbs(most) if layout.is_transformed else 0,
                    HALF_LIMBS=half, warps=2 if layout.chunk == 32 else 4 if half <= INT32_LIMBS else 8,
                )  # fmt: skip

        summed: list[int] = []
        if recipe.outer == "normalised":
            run(SQUARES, [0.0] * len(layout.groups))
            sums = torch.zeros(len(layout.groups), dtype=torch.int64, device=device).index_add_(0, self.groups, squares)
            summed = to_host(sums).tolist()
        found = steps(summed.__getitem__)
        run(SIGN if recipe.outer == "sign" else STEPS, found)
        return found, squares

    def _count(
        self,
        form: codec.PayloadFormat,
        payloads: tuple[Tensor, Tensor, int],
        counting: tuple[Tensor, Tensor, Tensor, int, int, int],
        chunks: int,
        *,
        is_scaled: bool,
    ) -> None:
        """Counts payloads of one form, of some chunks. payloads: their bytes, the rows of these, and a row's length."""
        ends = accumulate(
            (codec.packed_bytes(form.chunks * count, width) for count, width in form.sections), initial=form.groups
        )
        votes, shifts, groups, first, *bounds = counting
        common, numbers = (*payloads, *list(ends)[:4]), payloads[1]
        constants = {"SCALED": is_scaled, "AREA": self.layout.area}
        constants |= {"K": form.k, "LOW": form.low_bits, "BITS": form.value_bits}
        if form.ranked:
            launch(
                "count_ranks", (-(-chunks // RANKED_LANES), len(numbers)), *common, _binomials_on(form, self.device),
                votes, shifts, groups, first, first + chunks, *bounds, WIDTH=form.upper_bits, TOP=form.half_row,
                STEPS=form.positions.bit_length(), LANES=RANKED_LANES, **constants,
            )  # fmt: skip
        else:
            launch(
                "count_strings", (chunks, len(numbers)), *common, votes, shifts, groups, first, *bounds,
                P=form.positions, WIDE=_above(form.positions), **constants,
            )  # fmt: skip

    # -- Private arithmetic, which no other node checks ---------------------------------------------

    def accumulate(self, tensor: Tensor, residual: Tensor, keep: float) -> None:
        self._each("accumulate", tensor, residual, self.basis, self.table, self.addresses, keep)
        self._each("project", residual, self.padded, self.basis, self.table, self.addresses, chunks=len(self.padded))

    def subtract(self, tensor: Tensor, coefficients: Tensor, share: float, first: int = 0) -> None:
        """Subtracts a share of these coefficients [chunks, area], of the chunks from `first` on, from a flat tensor."""
        fixed = tensor, coefficients, self.basis, self.table, self.addresses, share, first
        self._each("subtract", *fixed, chunks=len(coefficients))

    def subtract_sparse(self, tensor: Tensor, indices: Tensor, values: Tensor, share: float) -> bool:
        """`subtract` of coefficients of which only those at some indices are not 0; True."""
        slab, k = self._slab(), indices.shape[1]
        room = torch.empty(slab, self.layout.area, device=self.device)
        indices, values = indices.to(self.device), values.to(self.device)
        for first in range(0, self.layout.chunks, slab):
            fixed = tensor, indices, values, room, self.basis, self.table, self.addresses, share, first
            count = min(slab, self.layout.chunks - first)
            self._each("subtract_sparse", *fixed, chunks=count, K=k, WIDE=_above(k))
        return True

    def _slab(self) -> int:
        """Returns how many chunks are worked on at a time."""
        return max(1, min(self.layout.chunks, SLAB_BYTES // (4 * self.layout.area)))

    def _each(self, name: str, *arguments: Any, chunks: int | None = None, **constants: Any) -> None:
        constants |= {"TRANSFORMED": self.layout.is_transformed, "C": self.layout.chunk}
        launch(name, (self.layout.chunks if chunks is None else chunks,), *arguments, warps=self.warps, **constants)

    def take(self, residual: Tensor, k: int, turn: int, recipe: RecipeConfig) -> tuple[OnCard, Tensor]:
        """Makes a contribution of a residual, and returns it with the values that left the residual, without a wait.

        All memory is taken before the residual changes."""
        layout, device, grid = self.layout, self.device, (self.layout.chunks,)
        indices = torch.empty(layout.chunks, k, dtype=torch.int16, device=device)
        chosen, removed = (torch.empty(layout.chunks, k, device=device) for _ in range(2))
        means = torch.empty(layout.chunks, dtype=torch.float64, device=device)
        launch("select", grid, residual, indices, chosen, means, AREA=layout.area, K=k, warps=2)
        top, exponents = 1 << (recipe.value_bits - 1), self._exponents(chosen, means, recipe)
        values = torch.empty(layout.chunks, k, dtype=tensor_type(recipe.value_bits), device=device)
        launch(
            "withdraw", grid, residual, indices, chosen, values, removed, indices if exponents is None else exponents,
            self.groups, turn % 2, float(top), SCALED=exponents is not None, AREA=layout.area, K=k, WIDE=_above(k),
        )  # fmt: skip
        return OnCard(indices, values, exponents), removed

    def _exponents(self, chosen: Tensor, means: Tensor, recipe: RecipeConfig) -> Tensor | None:  # [groups] int8
        """Returns for each group the exponent with the least squared error, of those that `quantise` tries."""
        if not recipe.spec.is_scaled:
            return None
        (chunks, k), groups, candidates = chosen.shape, len(self.layout.groups), recipe.value_bits + 1
        mean = self._of_groups(means[None])[0] / self.numbers
        above = torch.where(mean > 0, torch.frexp(mean).exponent, codec.EXPONENT_MIN)
        tried = (above - self.back[:candidates]).clamp_(codec.EXPONENT_MIN, codec.EXPONENT_MAX)
        found = torch.empty(candidates, chunks, dtype=torch.float64, device=self.device)
        top, grid = float(1 << (recipe.value_bits - 1)), (chunks, candidates)
        launch("errors", grid, chosen, tried, self.groups, found, chunks, groups, top, K=k, WIDE=_above(k))
        best = self._of_groups(found).argmin(dim=0, keepdim=True)
        return tried.gather(0, best)[0].to(torch.int8)

    def _of_groups(self, numbers: Tensor) -> Tensor:  # [rows, chunks] fp64 -> [rows, groups]
        whole = torch.empty(len(numbers), len(self.layout.groups), dtype=torch.float64, device=self.device)
        launch("sum_groups", (whole.shape[1], len(whole)), numbers, self.starts, whole, LANES=LANES)
        return whole


@dataclass(frozen=True, slots=True)
class Move:
    """How an update moves the weights: the share of them that stays, the momentum's factor, and MOMENTUM."""

    keep: float
    mu: float
    momentum: int


def _chunks_of(
    layout: Layout, group: Group, members: Sequence[range], listed_before: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns a group's rows of the table, and the addresses of its chunks whose numbers do not lie in rows."""
    c, first = layout.chunk, members[0].start
    row, column = np.divmod(np.arange(group.chunks), group.chunk_columns)
    table = np.stack(
        [
            first + row * c * group.columns + column * c,
            np.full(group.chunks, group.columns),
            np.minimum(c, group.rows - row * c),
            np.minimum(c, group.columns - column * c),
        ],
        axis=1,
    ).astype(np.int64)
    places = np.concatenate([np.arange(each.start, each.stop) for each in members])
    if len(members) == 1 and places.size == group.rows * group.columns:
        return table, np.empty(0, np.int64)
    partly = np.arange(group.chunks) if len(members) > 1 else np.array([group.chunks - 1])
    padded = np.full(group.chunk_rows * layout.area, -1)  # such a group is one chunk wide
    padded[: places.size] = places
    table[partly] = np.stack(
        [listed_before + np.arange(partly.size) * layout.area, *np.zeros((3, partly.size))], axis=1
    )
    return table, padded.reshape(-1, layout.area)[partly].reshape(-1)


tables: WeakKeyDictionary[Layout, dict[torch.device, Launches]] = WeakKeyDictionary()


def launches_of(layout: Layout, device: torch.device) -> Launches | None:
    """Returns a layout's programs on this device; None if torch has to do the work."""
    if layout.chunk < CHUNK_LEAST or not is_usable(device):
        return None
    by_device = tables.setdefault(layout, {})
    if device not in by_device:
        by_device[device] = Launches(layout, device)
    return by_device[device]


def leaves(state: Tensor) -> list[bytes]:
    """Returns the digests of the pieces of a flat state of 32-bit numbers, a shorter last one by way of memory."""
    pieces = state.numel() // WORDS
    rest = state[pieces * WORDS :].view(torch.int32)
    if not pieces:
        return [leaf_digest(0, to_host(rest).tobytes())]
    device, words, count = state.device, state[: pieces * WORDS].view(torch.uint32), pieces * 1024
    key = to_card(np.frombuffer(LEAF_KEY, np.int32).copy(), device).view(torch.uint32)

    def room(width: int) -> Tensor:
        return torch.empty(8, width, dtype=torch.uint32, device=device)

    def joined(left: Tensor, right: Tensor, width: int, step: int, flags: int) -> Tensor:
        above = room(width)
        grid = (-(-width // LANES),)
        launch("parents", grid, left, right, key, above, step, step * width, width, flags, LANES=LANES)
        return above

    values = room(count)
    launch("chunks", (count // LANES,), words, key, values, LANES=LANES)
    while count > pieces:
        count //= 2
        values = joined(values, values.view(-1)[1:], count, 2, PARENT_FLAGS)
    last = room(pieces)
    launch("tails", (-(-pieces // LANES),), words, key, last, pieces, LANES=LANES)
    digests = joined(values, last, pieces, 1, ROOT_FLAGS).view(torch.int32)
    found = to_host(torch.cat([digests.view(-1), rest]))
    made = [row.tobytes() for row in np.ascontiguousarray(found[: digests.numel()].reshape(8, pieces).T)]
    return made + ([leaf_digest(pieces, found[digests.numel() :].tobytes())] if len(rest) else [])
