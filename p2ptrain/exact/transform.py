"""Parameter tensors as square chunks, and their discrete cosine transform, approximate and exact.

DeMo (Peng, Quesnelle, Kingma 2024, arXiv 2411.19870) found that the fast-moving part of a momentum has
most of its energy in a few coefficients of its two-dimensional DCT-II, taken chunk by chunk. Here the
two directions differ in precision:

- Forward, from a gradient to coefficients, is fp32 and approximate. It only decides which coefficients
  a node contributes, which is its own choice.
- Inverse, from summed votes to an update, is exact. Votes are integers, the basis is a table of
  integers below 2**14, and every partial sum of

      U[i, j] = sum over u, v of  basis[u, i] * votes[u, v] * basis[v, j]

  is at most the chunk's sum of |votes| times the square of the largest basis entry. Below 2**53 every
  integer is exact in fp64, so no order, fused operation, thread count or device changes a bit.

Every matrix is padded to whole chunks, because splitting dimensions by a divisor would leave a prime one
uncompressed. Vectors, and matrices that padding would more than double, are laid end to end and share
chunks. Chunks are numbered group by group, left to right and top to bottom, as in the payload.

Without a transform a chunk is a stretch of a tensor, and its values are those of the weights. A run may also update one
part of the model after the other: `fragments` are layouts that share out the groups, with about as many chunks each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from p2ptrain.config import BASIS_PEAK, EXACT_MAX, RecipeConfig
from p2ptrain.exact.shortage import where_it_fits

# Chunks processed at a time. On a CPU their fp64 block of 1 MiB (chunks of 64) stays in a core's cache. On a GPU each
# launch costs a few microseconds, so blocks should be large; 32 MiB is a guess, and no other size was tried there.
BLOCK_CHUNKS, DEVICE_BLOCK_CHUNKS = 32, 1_024
PROJECTED_CHUNKS = 256  # partly padded chunks at a time
FP32_EXACT_MAX = 2**24  # up to this, every integer is exact in fp32

# round(2**13.5 * cos(pi * n / 128)) for n from 0 to 64. A table, because the cosines of two C libraries
# differ in their last bits; a test checks it against cosines of 50 digits. One table serves every chunk
# size, and makes the scale of a two-dimensional transform a power of two: 2**26 * chunk.
COSINES = (
    11585, 11582, 11571, 11554, 11529, 11498, 11460, 11415, 11363, 11304, 11238, 11166, 11086,
    11001, 10908, 10809, 10703, 10591, 10473, 10348, 10217, 10080, 9937, 9788, 9633, 9472,
    9305, 9133, 8956, 8772, 8584, 8391, 8192, 7988, 7780, 7567, 7350, 7128, 6901,
    6671, 6436, 6198, 5956, 5710, 5461, 5209, 4953, 4695, 4433, 4169, 3903, 3634,
    3363, 3090, 2815, 2538, 2260, 1981, 1700, 1418, 1136, 852, 568, 284, 0,
)  # fmt: skip
assert max(COSINES) == BASIS_PEAK


def basis_entry(chunk: int, u: int, i: int) -> int:
    """Returns 2**13.5 * cos(pi * (2i + 1) * u / (2 * chunk)), and 2**13 in the constant row u = 0."""
    if u == 0:
        return COSINES[32]
    n = (2 * i + 1) * u * (64 // chunk) % 256  # the angle in 256ths of a turn
    n = min(n, 256 - n)
    return COSINES[n] if n <= 64 else -COSINES[128 - n]


@cache
def integer_basis(chunk: int, dtype: torch.dtype, device: torch.device) -> Tensor:  # [u, i]
    entries = [[basis_entry(chunk, u, i) for i in range(chunk)] for u in range(chunk)]
    return torch.tensor(entries, dtype=dtype, device=device)


def inverse_scale(chunk: int) -> float:
    """Returns the factor (an exact power of two) that scales the integer inverse to the orthonormal one."""
    return 2.0**-26 / chunk


@cache
def orthonormal_basis(chunk: int, device: torch.device) -> Tensor:  # [u, i] fp32
    return integer_basis(chunk, torch.float64, device).mul(inverse_scale(chunk) ** 0.5).float()


def block_chunks(device: torch.device) -> int:
    return BLOCK_CHUNKS if device.type == "cpu" else DEVICE_BLOCK_CHUNKS


@dataclass(frozen=True, slots=True)
class Group:
    """One matrix, or all the vectors laid end to end as a matrix one chunk wide."""

    members: tuple[int, ...]  # parameters, by their place in the model
    rows: int
    columns: int
    chunk_rows: int
    chunk_columns: int
    first_chunk: int

    @property
    def chunks(self) -> int:
        return self.chunk_rows * self.chunk_columns


@dataclass(frozen=True, slots=True)
class Strip:
    """A strip of a group's matrix: its `rows` (unpadded) hold the layout's `chunks`, in whole rows of chunks."""

    rows: slice
    chunks: slice
    chunk_rows: int


class Layout:
    """Maps parameters to chunks; it follows from the parameters' shapes alone.

    is_transformed: whether a chunk's values are coefficients of its DCT, rather than weights"""

    def __init__(self, shapes: Sequence[Sequence[int]], chunk: int, *, is_transformed: bool = True) -> None:
        self.shapes = tuple(tuple(shape) for shape in shapes)
        self.is_transformed = is_transformed
        assert self.shapes and all(prod(shape) > 0 for shape in self.shapes), (
            "a model has parameters, and none is empty"
        )
        self.chunk = chunk
        self.area = chunk * chunk
        groups: list[Group] = []
        vectors: list[int] = []
        first_chunk = 0
        for index, shape in enumerate(self.shapes):
            rows, columns = (shape[0], prod(shape[1:])) if len(shape) > 1 else (1, prod(shape))
            if not is_transformed:  # laid out row by row: only its end may be partly padding
                rows, columns = -(-prod(shape) // chunk), chunk
            chunk_rows, chunk_columns = -(-rows // chunk), -(-columns // chunk)
            if chunk_rows * chunk_columns * self.area > 2 * prod(shape):
                vectors.append(index)
                continue
            groups.append(Group((index,), rows, columns, chunk_rows, chunk_columns, first_chunk))
            first_chunk += chunk_rows * chunk_columns
        if vectors:
            rows = -(-sum(prod(self.shapes[index]) for index in vectors) // chunk)
            groups.append(Group(tuple(vectors), rows, chunk, -(-rows // chunk), 1, first_chunk))
            first_chunk += groups[-1].chunk_rows
        self.groups = tuple(groups)
        self.chunks = first_chunk

    @classmethod
    def of(cls, shapes: Sequence[Sequence[int]], recipe: RecipeConfig) -> Layout:
        return cls(shapes, recipe.chunk, is_transformed=recipe.transform == "dct")

    def fragments(self, count: int) -> tuple[Layout, ...]:
        """Deals the groups, the largest first, each to the fragment with the fewest chunks so far."""
        if count == 1:
            return (self,)
        dealt: list[list[int]] = [[] for _ in range(count)]
        sizes = [0] * count
        for number in sorted(range(len(self.groups)), key=lambda number: (-self.groups[number].chunks, number)):
            least = sizes.index(min(sizes))
            dealt[least].append(number)
            sizes[least] += self.groups[number].chunks
        return tuple(self._only(sorted(numbers)) for numbers in dealt)

    def _only(self, numbers: Sequence[int]) -> Layout:
        """Returns a layout of some of the groups, with chunks numbered anew."""
        part, first_chunk, groups = copy(self), 0, []
        for number in numbers:
            groups.append(replace(self.groups[number], first_chunk=first_chunk))
            first_chunk += groups[-1].chunks
        part.groups, part.chunks = tuple(groups), first_chunk
        return part

    @property
    def scale(self) -> float:
        """The factor from the result of `decoded` to the weights."""
        return inverse_scale(self.chunk) if self.is_transformed else 1.0

    def decoded(self, votes: Tensor, votes_bound: int) -> Tensor:  # [i, n, j] fp64
        """Returns the exact inverse transform of votes [n, area], or these if there is no transform, before `scale`.

        votes_bound: limit of any chunk's sum of |votes|"""
        if not self.is_transformed:
            return untransformed(votes, self.chunk)
        return inverse(votes, self.chunk, first_stage_dtype(votes_bound, votes.device))

    def approximately(self, coefficients: Tensor) -> Tensor:  # [i, n, j] fp32
        """Returns the inverse transform of coefficients [n, area], which only this node applies."""
        n, c = len(coefficients), self.chunk
        rows = coefficients.float().view(n, c, c).permute(1, 0, 2)
        if not self.is_transformed:
            return rows.clone(memory_format=torch.contiguous_format)
        basis = orthonormal_basis(c, coefficients.device)
        return torch.mm(torch.mm(basis.T, rows.reshape(c, n * c)).view(c * n, c), basis).view(c, n, c)

    def strips(self, group: Group, device: torch.device) -> Iterator[Strip]:
        at_a_time = max(1, block_chunks(device) // group.chunk_columns)
        for start in range(0, group.chunk_rows, at_a_time):
            stop = min(start + at_a_time, group.chunk_rows)
            first = group.first_chunk + start * group.chunk_columns
            yield Strip(
                rows=slice(start * self.chunk, min(stop * self.chunk, group.rows)),
                chunks=slice(first, first + (stop - start) * group.chunk_columns),
                chunk_rows=stop - start,
            )

    def matrix(self, tensors: Sequence[Tensor], group: Group) -> Tensor:  # [rows, columns]
        """Returns the group's matrix: a view of its only tensor, or a copy of its vectors laid end to end.

        The copy is small and in main memory, where it fits: nothing may fail between two groups."""
        if len(group.members) == 1 and group.columns * group.rows == tensors[group.members[0]].numel():
            return tensors[group.members[0]].reshape(group.rows, group.columns)
        flat = torch.cat([tensors[index].reshape(-1).cpu() for index in group.members])
        return pad(flat, (0, group.rows * group.columns - flat.numel())).view(group.rows, group.columns)

    def store(self, matrix: Tensor, tensors: Sequence[Tensor], group: Group) -> None:
        """Writes a copy made by `matrix` back into the tensors; does nothing for a view."""
        if matrix.data_ptr() == tensors[group.members[0]].data_ptr():
            return
        flat, start = matrix.reshape(-1), 0
        for index in group.members:
            size = tensors[index].numel()
            tensors[index].copy_(flat[start : start + size].view(tensors[index].shape))
            start += size

    def padding_masks(self, device: torch.device) -> tuple[Tensor, Tensor]:  # [n] int64, [n, chunk, chunk] bool
        """Returns the partly padded chunks, and masks of their real elements."""
        chunks: list[int] = []
        masks: list[Tensor] = []
        for group in self.groups:
            size = sum(prod(self.shapes[index]) for index in group.members)
            real = torch.arange(group.rows * group.columns, device=device).view(group.rows, group.columns) < size
            for strip in self.strips(group, device):
                tiles = self._tiles(real[strip.rows], group, strip)
                partly = (~tiles.flatten(1).all(dim=1)).nonzero().flatten()
                chunks += (partly + strip.chunks.start).tolist()
                masks.append(tiles[partly])
        return torch.tensor(chunks, dtype=torch.int64, device=device), torch.cat(masks)

    def _padded(self, rows: Tensor, group: Group, strip: Strip) -> Tensor:  # [chunk_rows * c, chunk_columns * c]
        missing_rows = strip.chunk_rows * self.chunk - rows.shape[0]
        missing_columns = group.chunk_columns * self.chunk - group.columns
        return pad(rows, (0, missing_columns, 0, missing_rows)) if missing_rows or missing_columns else rows

    def _tiles(self, rows: Tensor, group: Group, strip: Strip) -> Tensor:  # [chunks, c, c]
        c = self.chunk
        padded = self._padded(rows, group, strip).view(strip.chunk_rows, c, group.chunk_columns, c)
        return padded.permute(0, 2, 1, 3).reshape(-1, c, c)

    def accumulate(self, tensors: Sequence[Tensor], residual: Tensor, keep: float) -> None:
        """residual = keep * residual + DCT(tensors), chunk by chunk; approximate. Without a transform: + tensors.

        tensors: gradients, or other tensors of the parameters' shapes; residual: [chunks, area] fp32 or bf16"""
        c = self.chunk
        for group in self.groups:
            matrix = self.matrix(tensors, group)
            for strip in self.strips(group, residual.device):
                full = where_it_fits(partial(self._transformed, matrix[strip.rows], group, strip), residual.device)
                target = residual[strip.chunks].view(strip.chunk_rows, group.chunk_columns, c, c)
                here = target.to(full.device)
                here.mul_(keep).add_(full.view(strip.chunk_rows, c, group.chunk_columns, c).permute(0, 2, 1, 3))
                if here is not target:
                    target.copy_(here)

    def _transformed(self, rows: Tensor, group: Group, strip: Strip, device: torch.device) -> Tensor:
        padded = self._padded(rows.to(device), group, strip)
        if not self.is_transformed:
            return padded
        c, basis = self.chunk, orthonormal_basis(self.chunk, device)
        half = torch.mm(padded.reshape(-1, c), basis.T)
        return torch.matmul(basis, half.view(strip.chunk_rows, c, -1))

    def project(self, residual: Tensor, chunks: Tensor, masks: Tensor) -> None:
        """Removes the part of the residual that falls on padding, as cropping the decoded tensor would."""
        numbers = chunks.tolist()
        for start in range(0, len(numbers), PROJECTED_CHUNKS):
            some = slice(start, start + PROJECTED_CHUNKS)
            views = [residual[number] for number in numbers[some]]
            found = where_it_fits(partial(self._projected, views, masks[some]), residual.device)
            for view, projected in zip(views, found, strict=True):
                view.copy_(projected)

    def _projected(self, views: Sequence[Tensor], real: Tensor, device: torch.device) -> Tensor:  # [n, area]
        c, basis = self.chunk, orthonormal_basis(self.chunk, device)
        chunks = torch.stack([view.to(basis) for view in views]).view(-1, c, c)
        if not self.is_transformed:
            return (chunks * real.to(device)).view(-1, self.area)
        return (basis @ (basis.T @ chunks @ basis * real.to(device)) @ basis.T).view(-1, self.area)


def fragment_of(number: int, fragments: int) -> int:
    """Returns the fragment that is updated in round `number`, counted from 1."""
    return (number - 1) % fragments


def first_stage_dtype(votes_bound: int, device: torch.device) -> torch.dtype:
    """Returns fp32, which is twice as fast, if the inverse's first product is exact in it; otherwise fp64.

    votes_bound: limit of any chunk's sum of |votes|"""
    assert votes_bound * BASIS_PEAK**2 < EXACT_MAX, "the config's bound keeps votes in the exact range"
    exact = votes_bound * BASIS_PEAK < FP32_EXACT_MAX
    return torch.float32 if exact and device.type == "cpu" and _fp32_products_are_plain() else torch.float64


def _fp32_products_are_plain() -> bool:
    """Whether torch multiplies in plain fp32, without TF32 or bf16."""
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # the older getter raises if the setting was made through torch's newer interface
        return False


def inverse(votes: Tensor, chunk: int, first_stage: torch.dtype) -> Tensor:
    """Inverts the transform exactly, in integers: [i, n, j] fp64 from votes [n, chunk * chunk] of any integer type."""
    n = votes.shape[0]
    rows = torch.empty(chunk, n, chunk, dtype=first_stage, device=votes.device)
    rows.copy_(votes.view(n, chunk, chunk).permute(1, 0, 2))  # [u, n, v]: makes both products plain matrix products
    with torch.autocast(votes.device.type, enabled=False):  # whatever the caller has enabled
        half = torch.mm(integer_basis(chunk, first_stage, votes.device).T, rows.view(chunk, n * chunk))
        whole = torch.mm(half.double().view(chunk * n, chunk), integer_basis(chunk, torch.float64, votes.device))
    return whole.view(chunk, n, chunk)


def untransformed(votes: Tensor, chunk: int) -> Tensor:
    """Returns votes [n, chunk * chunk] in the order of `inverse`: [i, n, j] fp64."""
    return votes.view(-1, chunk, chunk).permute(1, 0, 2).double().contiguous()
