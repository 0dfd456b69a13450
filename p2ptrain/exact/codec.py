"""The payload: a contribution as the fewest bytes that have exactly one reading.

A contribution names k coefficients of every chunk, with a small signed integer for each. Indices
are sorted, because a set takes log2(k!) bits less than a list. A sorted set is coded as Elias and Fano
did (Elias 1974; Fano 1971): every index splits into low bits, stored as they are, and a bucket number;
the k bucket numbers, which never decrease, are k ones among `positions` = buckets + k - 1 places of a bit
string. That string is stored as its rank among all strings with k ones (the combinatorial number
system; Cover 1973) if the rank fits into a 64-bit integer (k up to 32 of 4096), otherwise as it is.

    section      bits a chunk        what
    scales       (8 bits a group)    power-of-two exponents, for recipes whose values have a scale
    upper        upper_bits          rank of the bucket string, or the string
    low          k * low_bits        low bits of the indices
    signs        k                   1 is negative
    magnitudes   k * (value_bits-1)  |value| - 1

Sections follow one another, each starting at a whole byte; fields are little-endian and fill bytes from
the lowest bit. There is no header: the run's config fixes every width, so the length is known before the
first byte arrives. Every contribution has exactly one encoding, and all other strings are refused: a rank that is
too large, equal buckets whose low bits do not rise, a bit string without exactly k ones, an exponent out of
range, a set bit after the end of a section.

A dense payload, which sends every weight, has no indices, and its values may be zero. Its only section after the scales
holds value + 2**(value_bits - 1) - 1 for each weight, and the largest code is refused; with one bit it holds the signs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from math import comb
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from p2ptrain.config import RecipeConfig
from p2ptrain.errors import RemoteProtocolError
from p2ptrain.exact import native
from p2ptrain.exact.transform import Layout

WORK_BYTES = 192 * 1024  # unpacking goes block by block, so its working memory is this and does not grow with the model
RANK_MAX = 2**63  # ranks are compared and subtracted as 64-bit integers
EXPONENT_BIAS = 64
EXPONENT_MIN, EXPONENT_MAX = -64, 15  # 2**15 times the largest update is still far from overflowing an fp32

Indices = NDArray[np.uint16]  # [chunks, k] rising along the last axis
Values = NDArray[np.int8] | NDArray[np.int16] | NDArray[np.int32]  # [chunks, k]; never zero, except in a dense payload
Bytes = NDArray[np.uint8]
Fields = NDArray[np.uint8] | NDArray[np.uint16] | NDArray[np.uint32] | NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Contribution:
    """A node's contribution to a round: an integer for each chosen coefficient, and exponents per group if scaled."""

    indices: Indices
    values: Values
    exponents: NDArray[np.int8] | None = None  # [groups] values are in units of 2**exponent


@dataclass(frozen=True, slots=True)
class PayloadFormat:
    """The widths of all fields in a payload, determined by the run's config and by k."""

    chunks: int
    groups: int  # 0 if contributions carry no scales
    area: int
    k: int
    value_bits: int
    low_bits: int
    ranked: bool  # whether the bucket string is stored as its rank
    upper_bits: int
    payload_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        size = self.groups + sum(packed_bytes(self.chunks * count, width) for count, width in self.sections)
        object.__setattr__(self, "payload_bytes", size)

    @classmethod
    def of(cls, layout: Layout, recipe: RecipeConfig, k: int = 0) -> PayloadFormat:
        """Returns the format of payloads with k numbers of a chunk; 0: the most that the run allows."""
        k = k or recipe.k_max
        low_bits, ranked, upper_bits = (0, False, 0) if recipe.is_dense else index_widths(layout.area, k)
        groups = len(layout.groups) if recipe.spec.is_scaled else 0
        return cls(layout.chunks, groups, layout.area, k, recipe.value_bits, low_bits, ranked, upper_bits)

    @property
    def is_dense(self) -> bool:
        """Whether a contribution holds every coefficient of a chunk."""
        return self.k == self.area

    @property
    def dense_zero(self) -> int:
        """The code of zero in a dense payload, which is also the largest value."""
        return (1 << (self.value_bits - 1)) - 1

    @property
    def positions(self) -> int:
        """Length of the bucket string."""
        return (self.area >> self.low_bits) + self.k - 1

    @property
    def half_row(self) -> int:
        """Half of the length of a row of `binomials`: the first step of a search in it."""
        return 1 << (self.positions.bit_length() - 1)

    @property
    def sections(self) -> tuple[tuple[int, int], ...]:
        """The number of fields per chunk and their bits: of upper, low, signs and magnitudes; of all if it is dense."""
        if self.is_dense:
            return ((self.area, self.value_bits),)
        upper = (1, self.upper_bits) if self.ranked else (self.upper_bits, 1)
        return upper, (self.k, self.low_bits), (self.k, 1), (self.k, self.value_bits - 1)

    @property
    def contribution_bytes(self) -> int:
        """Memory of an unpacked contribution; unpacking peaks at twice this size, or at twice WORK_BYTES if larger."""
        return self.chunks * self.k * ((0 if self.is_dense else 2) + self.value_type.itemsize) + self.groups

    @property
    def value_type(self) -> np.dtype[Any]:
        return value_type(self.value_bits, is_dense=self.is_dense)


class Packed(NamedTuple):
    """A payload that `unpack` has accepted."""

    content: bytes | memoryview
    form: PayloadFormat


def value_type(value_bits: int, *, is_dense: bool = False) -> np.dtype[Any]:
    """Returns the smallest type for values up to 2**(value_bits - 1) in magnitude, or to one less if `is_dense`."""
    bits = value_bits - is_dense
    return np.dtype(np.int8 if bits < 8 else np.int16 if bits < 16 else np.int32)


def every_index(chunks: int, area: int) -> Indices:
    """Returns all indices of each chunk, as a view that takes no memory."""
    return np.broadcast_to(np.arange(area, dtype=np.uint16), (chunks, area))


def packed_bytes(count: int, width: int) -> int:
    return -(-count * width // 8)


@cache
def index_widths(area: int, k: int) -> tuple[int, bool, int]:
    """Returns (low_bits, ranked, upper_bits) with the fewest bits per chunk; in a tie, the fewest low bits."""
    best: tuple[int, int, bool, int] | None = None
    for low_bits in range(area.bit_length() - 1):
        positions = (area >> low_bits) + k - 1
        strings = comb(positions, k)
        ranked = strings <= RANK_MAX
        upper_bits = (strings - 1).bit_length() if ranked else positions
        total = upper_bits + k * low_bits
        if best is None or total < best[0]:
            best = (total, low_bits, ranked, upper_bits)
    assert best is not None
    return best[1:]


@cache
def binomials(positions: int, k: int) -> NDArray[np.int64]:  # [k + 1, a power of two above positions]
    """Returns a table with comb(position, j) at [j, position]; every entry in use is below RANK_MAX."""
    table = np.full((k + 1, 1 << positions.bit_length()), RANK_MAX - 1, np.int64)
    for j in range(k + 1):
        table[j, : positions + 1] = [min(comb(position, j), RANK_MAX - 1) for position in range(positions + 1)]
    return table


# -- Contribution to payload and back ---------------------------------------------------------------


def pack(contribution: Contribution, form: PayloadFormat) -> bytes:
    """Encodes a contribution as a payload."""
    indices, values = contribution.indices, contribution.values
    _assert_whole(contribution, form)
    if form.is_dense:
        return _pack_dense(contribution, form)
    positions = (indices >> form.low_bits) + np.arange(form.k, dtype=np.uint16)  # [chunks, k] of the ones
    if form.ranked:
        terms = binomials(form.positions, form.k)[np.arange(1, form.k + 1), positions]
        upper: Fields = terms.sum(axis=1).astype(np.uint64)
    else:
        upper = np.zeros((form.chunks, form.positions), np.uint8)
        np.put_along_axis(upper, positions.astype(np.int64), 1, axis=1)
    low = indices & np.uint16((1 << form.low_bits) - 1)
    magnitudes = (np.abs(values.astype(np.int16)) - 1).astype(np.uint8)
    fields: tuple[Fields, ...] = (upper, low, (values < 0).view(np.uint8), magnitudes)
    sections = [pack_fields(part, width) for part, (_, width) in zip(fields, form.sections, strict=True)]
    if contribution.exponents is not None:
        sections.insert(0, _packed_exponents(contribution.exponents))
    payload = b"".join(sections)
    assert len(payload) == form.payload_bytes
    return payload


def _pack_dense(contribution: Contribution, form: PayloadFormat) -> bytes:
    assert contribution.exponents is not None, "only recipes with scales send every weight"
    step, parts = _dense_step(form), [_packed_exponents(contribution.exponents)]
    for first in range(0, form.chunks, step):  # in blocks, as unpacking does
        values = contribution.values[first : first + step]
        codes = values < 0 if form.value_bits == 1 else values.astype(np.int32) + form.dense_zero
        fields: Fields = codes.astype(np.uint8) if form.value_bits <= 8 else codes.astype(np.uint32)
        parts.append(pack_fields(fields, form.value_bits))
    return b"".join(parts)


def _dense_step(form: PayloadFormat) -> int:
    """Returns how many chunks of a dense payload fit a block; a multiple of eight starts at a whole byte."""
    return max(8, WORK_BYTES // (4 * form.area) & ~7)


def _packed_exponents(exponents: NDArray[np.int8]) -> bytes:
    return (exponents.astype(np.int16) + EXPONENT_BIAS).astype(np.uint8).tobytes()


def _assert_whole(contribution: Contribution, form: PayloadFormat) -> None:
    """Asserts that a recipe made a valid contribution; an invalid one would be packed wrongly."""
    indices, values, exponents = contribution.indices, contribution.values, contribution.exponents
    assert indices.shape == values.shape == (form.chunks, form.k), "a contribution has the run's shape"
    if form.is_dense and form.value_bits > 1:
        assert max(int(values.max()), -int(values.min())) <= form.dense_zero, "a value fits its bits"
    else:
        assert form.is_dense or (indices[:, 1:] > indices[:, :-1]).all(), "indices of a chunk rise"
        assert form.is_dense or int(indices[:, -1].max()) < form.area, "an index lies in its chunk"
        magnitudes = np.abs(values.astype(np.int16))
        assert magnitudes.min() >= 1, "a value is not zero"
        assert magnitudes.max() <= 1 << (form.value_bits - 1), "a value fits its bits"
    assert (exponents is not None) == bool(form.groups), "scaled recipes give scales, others none"
    if exponents is not None:
        assert exponents.shape == (form.groups,), "a scale for each group"
        assert exponents.min() >= EXPONENT_MIN, "scales are in range"
        assert exponents.max() <= EXPONENT_MAX, "scales are in range"


def unpack(payload: bytes | memoryview, form: PayloadFormat) -> Contribution:
    """Decodes a payload strictly; raises RemoteProtocolError, with the reason, if it is not a valid encoding."""
    if len(payload) != form.payload_bytes:
        raise RemoteProtocolError(f"payload of {len(payload)} bytes; this run's have {form.payload_bytes}")
    octets: Bytes = np.frombuffer(payload, np.uint8)
    exponents = _exponents(octets[: form.groups]) if form.groups else None
    sections = _sections(octets, form)
    for section, (count, width) in zip(sections, form.sections, strict=True):
        spare_bits = section.size * 8 - form.chunks * count * width
        if spare_bits and section[-1] >> (8 - spare_bits):
            raise RemoteProtocolError("a bit is set after the end of a section")
    values = np.empty((form.chunks, form.k), form.value_type)
    if form.is_dense:
        for rows, block in _dense_blocks(sections[0], form):
            values[rows] = block
        return Contribution(every_index(form.chunks, form.area), values, exponents)
    indices = np.empty((form.chunks, form.k), np.uint16)
    if native.library():
        table = binomials(form.positions, form.k) if form.ranked else None
        if wrong := native.unpack(_native_form(form, sections), sections, table, indices, values):
            raise RemoteProtocolError(_why(wrong, form))
        return Contribution(indices, values, exponents)
    work = 2 * form.upper_bits + (8 if form.ranked else 24) * form.k  # bytes per chunk of the largest arrays
    step = max(8, WORK_BYTES // work & ~7)  # chunks; a multiple of eight starts at a whole byte
    for first in range(0, form.chunks, step):
        last = min(first + step, form.chunks)
        indices[first:last], values[first:last] = _block(sections, form, first, last)
    return Contribution(indices, values, exponents)


def _native_form(form: PayloadFormat, sections: Sequence[Bytes]) -> native.Form:
    return native.Form(
        form.chunks,
        *(section.size for section in sections),
        comb(form.positions, form.k) if form.ranked else 0,
        form.k,
        form.positions,
        form.half_row,
        form.upper_bits,
        form.low_bits,
        form.value_bits - 1,
        form.value_type.itemsize,
    )


def unpack_chunks(payload: bytes | memoryview, form: PayloadFormat, chunks: slice) -> tuple[Indices, Values]:
    """Decodes some chunks of a payload that `unpack` has accepted."""
    sections, first = _sections(np.frombuffer(payload, np.uint8), form), chunks.start & ~7  # where a whole byte starts
    skipped = chunks.start - first
    if form.is_dense:
        values = _dense_block(sections[0], form, first, chunks.stop)[skipped:]
        return every_index(len(values), form.area), values
    indices, signed = _block(sections, form, first, chunks.stop)
    return indices[skipped:], signed[skipped:]


def _sections(octets: Bytes, form: PayloadFormat) -> list[Bytes]:
    ends = np.cumsum([form.groups, *(packed_bytes(form.chunks * count, width) for count, width in form.sections)])
    return [octets[start:end] for start, end in pairwise(ends.tolist())]


def _block(sections: list[Bytes], form: PayloadFormat, first: int, last: int) -> tuple[Indices, Values]:
    """Decodes the chunks from `first`, a multiple of eight, to `last`."""
    fields = [
        unpack_fields(
            section[first * count * width // 8 : packed_bytes(last * count, width)], (last - first) * count, width
        ).reshape(last - first, count)
        for section, (count, width) in zip(sections, form.sections, strict=True)
    ]
    sign = fields[2].view(np.int8) * np.int8(-2) + np.int8(1)
    values = np.multiply(sign, fields[3] + np.int16(1), dtype=np.int16)
    return _block_indices(fields[0], fields[1], form), values


def read_exponents(payload: bytes | memoryview, form: PayloadFormat) -> NDArray[np.int8]:
    """Reads only the scales of a payload that `unpack` has accepted."""
    return _exponents(np.frombuffer(payload, np.uint8)[: form.groups])


def read_squares(payload: bytes | memoryview, form: PayloadFormat) -> NDArray[np.int64]:  # [chunks]
    """Adds up the squared values of each chunk in a payload that `unpack` has accepted."""
    if form.value_bits == 1:
        return np.full(form.chunks, form.k, np.int64)
    count, width = form.sections[-1]
    octets = np.frombuffer(payload, np.uint8)[-packed_bytes(form.chunks * count, width) :]
    if form.is_dense:
        blocks = (block.astype(np.int64) for _, block in _dense_blocks(octets, form))
        return np.concatenate([np.square(block).sum(axis=1) for block in blocks])
    magnitudes = unpack_fields(octets, form.chunks * count, width).reshape(form.chunks, count).astype(np.int64) + 1
    sums: NDArray[np.int64] = np.square(magnitudes).sum(axis=1)
    return sums


def _dense_blocks(section: Bytes, form: PayloadFormat) -> Iterator[tuple[slice, NDArray[np.int32]]]:
    """Yields a slice of the chunks at a time, with its values [chunks, area]."""
    step = _dense_step(form)
    for first in range(0, form.chunks, step):
        last = min(first + step, form.chunks)
        yield slice(first, last), _dense_block(section, form, first, last)


def _dense_block(section: Bytes, form: PayloadFormat, first: int, last: int) -> NDArray[np.int32]:  # [chunks, area]
    width = form.value_bits
    part = section[first * form.area * width // 8 : packed_bytes(last * form.area, width)]
    codes = unpack_fields(part, (last - first) * form.area, width).astype(np.int32).reshape(-1, form.area)
    if width > 1 and codes.max() > 2 * form.dense_zero:
        raise RemoteProtocolError("a number has the one code that has no meaning")
    return 1 - 2 * codes if width == 1 else codes - form.dense_zero


def _exponents(octets: Bytes) -> NDArray[np.int8]:
    if octets.max() > EXPONENT_MAX + EXPONENT_BIAS:
        raise RemoteProtocolError(f"a scale of 2**{int(octets.max()) - EXPONENT_BIAS}; the limit is 2**{EXPONENT_MAX}")
    return (octets - np.uint8(EXPONENT_BIAS)).view(np.int8)


def _block_indices(upper: Fields, low: Fields, form: PayloadFormat) -> Indices:
    if form.ranked:
        positions = _unranked(upper[:, 0].astype(np.int64), form)
    else:
        if not (upper.sum(axis=1, dtype=np.int64) == form.k).all():
            raise RemoteProtocolError(_why(native.WRONG_ONES, form))
        positions = (np.flatnonzero(upper.view(bool)) % form.positions).astype(np.uint16).reshape(-1, form.k)
    indices = positions  # modified in place, because unpacking may take at most twice the contribution's memory
    indices -= np.arange(form.k, dtype=np.uint16)
    indices <<= np.uint16(form.low_bits)
    indices |= low.astype(np.uint16, copy=False)
    if not (indices[:, 1:] > indices[:, :-1]).all():
        raise RemoteProtocolError(_why(native.NOT_RISING, form))
    return indices


def _why(wrong: int, form: PayloadFormat) -> str:
    return {
        native.WRONG_RANK: "a rank names no bucket string",
        native.WRONG_ONES: f"a chunk's bucket string does not have {form.k} ones",
        native.NOT_RISING: "indices of a chunk do not rise",
    }[wrong]


def _unranked(ranks: NDArray[np.int64], form: PayloadFormat) -> Indices:  # [chunks, k] positions of the ones
    if (ranks < 0).any() or (ranks >= comb(form.positions, form.k)).any():
        raise RemoteProtocolError(_why(native.WRONG_RANK, form))
    table = binomials(form.positions, form.k)
    positions = np.empty((form.k, ranks.size), np.uint16)
    for j in range(form.k, 0, -1):  # the j-th one is at the last place whose binomial does not exceed the rank
        place = table[j].searchsorted(ranks, side="right") - 1
        ranks = ranks - table[j][place]
        positions[j - 1] = place
    return np.ascontiguousarray(positions.T)


# -- Fields of a few bits ---------------------------------------------------------------------------


def pack_fields(fields: Fields, width: int) -> bytes:
    """Lays fields of `width` bits end to end and fills the last byte with zeros."""
    if width == 0:
        return b""
    if width == 1:
        return np.packbits(fields, bitorder="little").tobytes()
    if width <= 8:  # eight fields are `width` whole bytes
        eights = np.zeros((-(-fields.size // 8), 8), np.uint8)
        eights.reshape(-1)[: fields.size] = fields.reshape(-1)
        words = np.zeros(len(eights), np.uint64)
        for place in range(8):
            words |= eights[:, place].astype(np.uint64) << np.uint64(width * place)
        octets = words.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :width]
        return bytes(octets.tobytes()[: packed_bytes(fields.size, width)])
    if width in (16, 24):
        return fields.reshape(-1).astype("<u4").view(np.uint8).reshape(-1, 4)[:, : width // 8].tobytes()
    octets = fields.reshape(-1, 1).astype("<u8").view(np.uint8)
    return np.packbits(np.unpackbits(octets, axis=1, count=width, bitorder="little"), bitorder="little").tobytes()


def unpack_fields(packed: Bytes, count: int, width: int) -> Fields:
    """Reads `count` fields that `pack_fields` wrote."""
    if width == 0:
        return np.zeros(count, np.uint8)
    if width == 1:
        return np.unpackbits(packed, count=count, bitorder="little")
    if width <= 8:
        octets = np.zeros((-(-count // 8), 8), np.uint8)
        whole = count // 8
        octets[:whole, :width] = packed[: whole * width].reshape(whole, width)
        octets[whole:, : packed.size - whole * width] = packed[whole * width :]
        words, mask = octets.view("<u8").reshape(-1), np.uint64((1 << width) - 1)
        fields = np.empty((words.size, 8), np.uint8)
        for place in range(8):  # one column at a time: a field of 64 bits each would be eight times the result
            fields[:, place] = words >> np.uint64(width * place) & mask
        return fields.reshape(-1)[:count]
    if width in (16, 24):
        octets = np.zeros((count, 4), np.uint8)
        octets[:, : width // 8] = packed.reshape(count, width // 8)
        return octets.view("<u4").reshape(count)
    bits = np.unpackbits(packed, count=count * width, bitorder="little").reshape(count, width)
    octets = np.zeros((count, 8), np.uint8)
    octets[:, : packed_bytes(1, width)] = np.packbits(bits, axis=1, bitorder="little")
    return octets.view("<u8").reshape(count)
