"""The programs that a card runs, one for each chunk of the model: transform.py, codec.py and aggregate.py for cards.

`update` is on the exact path: its products are of integers, its other operations are rounded once each, in the order of
aggregate.py, and it is compiled without fusion of floating-point operations, which changes bits.

A table has four numbers for each chunk: the place of its first number in the flat tensor, the numbers of a row, and how
many rows and columns are no padding. Where a row has 0 numbers, the chunk's numbers lie anywhere: its first place is
one among `addresses`, which has all of them, and -1 for padding."""

from __future__ import annotations

import triton
import triton.language as tl

# Numbers that differ between models and rounds, for each of which Triton would otherwise compile a program anew.
program = triton.jit(
    do_not_specialize=(
        *("pitch", "upper_at", "low_at", "signs_at", "sizes_at", "first", "last", "contributions", "most"),
        *("chunks", "group_count", "turn", "octets", "count", "step", "stride"),
    )
)


@triton.jit
def _places(table, addresses, n, C: tl.constexpr):
    """Returns the places of a chunk's numbers in the flat tensor, [C, C], and which are no padding."""
    first, stride = tl.load(table + n * 4), tl.load(table + n * 4 + 1)
    rows, columns = tl.load(table + n * 4 + 2), tl.load(table + n * 4 + 3)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    is_listed = (i * C + j >= 0) & (stride == 0)
    listed = tl.load(addresses + first + i * C + j, mask=is_listed, other=0)
    at = tl.where(is_listed, listed, first + i * stride + j)
    return at, tl.where(is_listed, listed >= 0, (i < rows) & (j < columns))


# -- Payloads that have been checked ----------------------------------------------------------------


@triton.jit
def _field(section, number, WIDTH: tl.constexpr, mask):
    """Reads fields of up to 16 bits; the room behind the payloads is readable."""
    bit = number * WIDTH
    octets = section + (bit >> 3)
    word = tl.load(octets, mask=mask, other=0).to(tl.int32)
    word |= tl.load(octets + 1, mask=mask, other=0).to(tl.int32) << 8
    if WIDTH > 9:
        word |= tl.load(octets + 2, mask=mask, other=0).to(tl.int32) << 16
    return (word >> (bit & 7).to(tl.int32)) & ((1 << WIDTH) - 1)


@triton.jit
def _value(payload, number, signs_at, sizes_at, BITS: tl.constexpr, mask):
    negative = _field(payload + signs_at, number, 1, mask)
    size = tl.zeros_like(negative) + 1
    if BITS > 1:
        size += _field(payload + sizes_at, number, BITS - 1, mask)
    return tl.where(negative == 1, -size, size)


@triton.jit
def _count(votes, index, value, shifts, group, each, contributions, most, SCALED: tl.constexpr, mask):
    """Adds to the votes: in any order, since they are integers."""
    if SCALED:
        shift = tl.load(shifts + group * contributions + each)
        left, right = tl.minimum(tl.maximum(shift, 0), 15), tl.minimum(tl.maximum(-shift, 0), 15)
        size = ((tl.abs(value) << left) + ((1 << right) >> 1)) >> right
        value = tl.where(value < 0, -1, 1) * tl.minimum(size, most)
    tl.atomic_add(votes + index, value, mask=mask, sem="relaxed")


@program
def count_strings(
    payloads,
    which,
    pitch,
    upper_at,
    low_at,
    signs_at,
    sizes_at,
    votes,
    shifts,
    groups,
    first,
    contributions,
    most,
    SCALED: tl.constexpr,
    AREA: tl.constexpr,
    P: tl.constexpr,
    WIDE: tl.constexpr,
    K: tl.constexpr,
    LOW: tl.constexpr,
    BITS: tl.constexpr,
):
    """Counts payloads with bucket strings. votes: [chunks from `first` on, AREA]; shifts: [groups, contributions]"""
    slot, each = tl.program_id(0).to(tl.int64), tl.load(which + tl.program_id(1))
    n, payload = slot + first, payloads + each * pitch
    position = tl.arange(0, WIDE)
    bit = n * P + position
    ones = (
        tl.load(payload + upper_at + (bit >> 3), mask=position < P, other=0).to(tl.int32) >> (bit & 7).to(tl.int32)
    ) & 1
    rank = tl.cumsum(ones, 0) - 1
    is_one = (ones == 1) & (rank < K)
    number = n * K + rank
    index = position - rank
    if LOW > 0:
        index = (index << LOW) | _field(payload + low_at, number, LOW, is_one)
    value = _value(payload, number, signs_at, sizes_at, BITS, is_one)
    group = tl.load(groups + n)
    _count(votes + slot * AREA, index, value, shifts, group, each, contributions, most, SCALED, is_one)


@program
def count_ranks(
    payloads,
    which,
    pitch,
    upper_at,
    low_at,
    signs_at,
    sizes_at,
    binomials,
    votes,
    shifts,
    groups,
    first,
    last,
    contributions,
    most,
    SCALED: tl.constexpr,
    AREA: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP: tl.constexpr,
    STEPS: tl.constexpr,
    K: tl.constexpr,
    LOW: tl.constexpr,
    BITS: tl.constexpr,
    LANES: tl.constexpr,
):
    """The same from ranks, a lane a chunk. binomials: [K + 1, 2 * TOP]"""
    slot, each = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES), tl.load(which + tl.program_id(1))
    n, payload = slot + first, payloads + each * pitch
    here = n < last
    group = tl.load(groups + n, mask=here, other=0)
    start = n * WIDTH
    rank = tl.zeros([LANES], tl.int64)
    for octet in tl.static_range((WIDTH + 14) // 8):
        some = tl.load(payload + upper_at + (start >> 3) + octet, mask=here, other=0).to(tl.int64)
        shift = octet * 8 - (start & 7)
        rank |= tl.where(shift >= 0, some << tl.maximum(shift, 0), some >> tl.maximum(-shift, 0))
    rank = rank & ((1 << WIDTH) - 1)
    for back in tl.static_range(K):
        row = binomials + (K - back) * 2 * TOP
        place = tl.zeros([LANES], tl.int32)
        for step in tl.static_range(STEPS):
            tried = place + (TOP >> step)
            place = tl.where(tl.load(row + tried) <= rank, tried, place)
        rank -= tl.load(row + place)
        number = n * K + (K - 1 - back)
        index = place - (K - 1 - back)
        if LOW > 0:
            index = (index << LOW) | _field(payload + low_at, number, LOW, here)
        value = _value(payload, number, signs_at, sizes_at, BITS, here)
        _count(votes, slot * AREA + index, value, shifts, group, each, contributions, most, SCALED, here)


@triton.jit
def _limb(x):
    """Splits x into 256 * rest + digit, the digit from -128 to 127."""
    digit = ((x + 128) & 255) - 128
    return digit.to(tl.int8), (x - digit) >> 8


@program
def update(
    weights,
    momentum,
    votes,
    high,
    low,
    steps,
    table,
    addresses,
    groups,
    squares,
    first,
    keep,
    mu,
    sign_step,
    KEEPS: tl.constexpr,
    OUTER: tl.constexpr,
    MOMENTUM: tl.constexpr,
    C: tl.constexpr,
    VOTE_LIMBS: tl.constexpr,
    HALF_LIMBS: tl.constexpr,
):
    """Inverts the transform of a chunk's votes in products of small integers, and moves the weights.

    votes: [chunks from `first` on, C * C], which become 0 again. high, low: [C, C] limbs of the basis, transposed.
    OUTER: 0 only adds up squares, 1 sign, 2 by steps. MOMENTUM: 0 none, 1 plain, 2 Nesterov's, 3 none in this round,
    but it is kept. VOTE_LIMBS 0: no transform"""
    slot = tl.program_id(0).to(tl.int64)
    n = slot + first
    a, b = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    own = votes + slot * C * C + a * C + b
    v = tl.load(own)
    wide = v.to(tl.int64)
    tl.store(squares + n, tl.sum(tl.reshape(wide * wide, [C * C])))
    if OUTER > 0:
        if VOTE_LIMBS > 0:
            bh, bl = tl.load(high + a * C + b), tl.load(low + a * C + b)  # [i, u]
            half = tl.zeros([C, C], tl.int32 if HALF_LIMBS <= 4 else tl.int64)
            for limb in tl.static_range(VOTE_LIMBS):
                digit, v = _limb(v)
                product = tl.dot(bl, digit, out_dtype=tl.int32) + (tl.dot(bh, digit, out_dtype=tl.int32) << 8)
                half += product.to(half.dtype) << (8 * limb)
            th, tl_ = tl.trans(bh), tl.trans(bl)  # [v, j]
            whole = tl.zeros([C, C], tl.int64)
            for limb in tl.static_range(HALF_LIMBS):
                digit, half = _limb(half)
                product = tl.dot(digit, tl_, out_dtype=tl.int32) + (tl.dot(digit, th, out_dtype=tl.int32) << 8)
                whole += product.to(tl.int64) << (8 * limb)
        else:
            whole = wide
        if OUTER == 1:
            u = ((whole > 0).to(tl.float32) - (whole < 0).to(tl.float32)) * sign_step + 0.0
        else:
            u = (whole.to(tl.float64) * tl.load(steps + tl.load(groups + n))).to(tl.float32) + 0.0
        at, inside = _places(table, addresses, n, C)
        if MOMENTUM > 0:
            total = tl.load(momentum + at, mask=inside, other=0.0) + u
            kept = total
            if MOMENTUM == 1 or MOMENTUM == 2:
                kept = total * mu
            if MOMENTUM == 1:
                u = total
            if MOMENTUM == 2:
                u = u + kept
            tl.store(momentum + at, kept, mask=inside)
        old = tl.load(weights + at, mask=inside, other=0.0)
        if KEEPS:
            old = old * keep
        tl.store(weights + at, old - u, mask=inside)
    tl.store(own, tl.zeros([C, C], tl.int32))


# -- Private arithmetic, which no other node checks -------------------------------------------------


@triton.jit
def _halves(x):
    """Splits a number into two of bf16, whose sum is 2**-17 off."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _transformed(x, basis, INVERSE: tl.constexpr, C: tl.constexpr):
    """DCT of [C, C], or its inverse, in three products of bf16 each, which take half the memory of TF32's.

    basis: [4, C, C] bf16, the halves of the basis and of its transpose"""
    at = tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :]
    left = basis + (2 * C * C if INVERSE else 0) + at
    right = basis + (0 if INVERSE else 2 * C * C) + at
    high_x, low_x = _halves(x)
    high, low = tl.load(left), tl.load(left + C * C)
    high_x, low_x = _halves(tl.dot(high, high_x, tl.dot(high, low_x, tl.dot(low, high_x))))
    high, low = tl.load(right), tl.load(right + C * C)
    return tl.dot(high_x, high, tl.dot(high_x, low, tl.dot(low_x, high)))


@program
def accumulate(tensor, residual, basis, table, addresses, keep, TRANSFORMED: tl.constexpr, C: tl.constexpr):
    """residual = keep * residual + DCT(tensor)."""
    n = tl.program_id(0).to(tl.int64)
    at, inside = _places(table, addresses, n, C)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    x = tl.load(tensor + at, mask=inside, other=0.0)
    own = residual + n * C * C + i * C + j
    if TRANSFORMED:
        x = _transformed(x, basis, False, C)
    tl.store(own, (tl.load(own).to(tl.float32) * keep + x).to(residual.dtype.element_ty))


@program
def project(residual, which, basis, table, addresses, TRANSFORMED: tl.constexpr, C: tl.constexpr):
    """Takes what falls on padding out of the chunks that are named."""
    n = tl.load(which + tl.program_id(0))
    _, inside = _places(table, addresses, n, C)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    own = residual + n * C * C + i * C + j
    x = tl.load(own).to(tl.float32)
    if TRANSFORMED:
        x = _transformed(tl.where(inside, _transformed(x, basis, True, C), 0.0), basis, False, C)
    else:
        x = tl.where(inside, x, 0.0)
    tl.store(own, x.to(residual.dtype.element_ty))


@program
def subtract(tensor, coefficients, basis, table, addresses, share, first, TRANSFORMED: tl.constexpr, C: tl.constexpr):
    """tensor -= share * inverse DCT of coefficients [chunks from `first` on, C * C]."""
    slot = tl.program_id(0).to(tl.int64)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    x = tl.load(coefficients + slot * C * C + i * C + j).to(tl.float32)
    if TRANSFORMED:
        x = _transformed(x, basis, True, C)
    at, inside = _places(table, addresses, slot + first, C)
    tl.store(tensor + at, tl.load(tensor + at, mask=inside, other=0.0) - x * share, mask=inside)


@program
def subtract_sparse(
    tensor,
    indices,
    values,
    room,
    basis,
    table,
    addresses,
    share,
    first,
    TRANSFORMED: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    WIDE: tl.constexpr,
):
    """`subtract` of coefficients of which only those at some indices [chunks, K] are not 0. room: [chunks, C * C]"""
    slot, lane = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    n = slot + first
    cells = room + slot * C * C
    tl.store(cells + tl.arange(0, C * C), tl.zeros([C * C], tl.float32))
    tl.debug_barrier()
    places = tl.load(indices + n * K + lane, mask=lane < K, other=0).to(tl.int32)
    tl.store(cells + places, tl.load(values + n * K + lane, mask=lane < K, other=0.0), mask=lane < K)
    tl.debug_barrier()
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    x = tl.load(cells + i * C + j)
    if TRANSFORMED:
        x = _transformed(x, basis, True, C)
    at, inside = _places(table, addresses, n, C)
    tl.store(tensor + at, tl.load(tensor + at, mask=inside, other=0.0) - x * share, mask=inside)


@program
def select(residual, indices, chosen, means, AREA: tl.constexpr, K: tl.constexpr):
    """A chunk's K largest magnitudes, by rising index (of equal ones the first), and their mean. chosen: [chunks, K]"""
    n, cell = tl.program_id(0).to(tl.int64), tl.arange(0, AREA)
    value = tl.load(residual + n * AREA + cell).to(tl.float32)
    bits = tl.abs(value).to(tl.int32, bitcast=True)
    threshold = tl.zeros([], tl.int32)
    for step in range(31):  # the K-th largest magnitude, a bit at a time
        tried = threshold | (1 << (30 - step))
        threshold = tl.where(tl.sum((bits >= tried).to(tl.int32)) >= K, tried, threshold)
    above, equal = bits > threshold, bits == threshold
    free = K - tl.sum(above.to(tl.int32))
    is_chosen = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= free))
    place = tl.cumsum(is_chosen.to(tl.int32), 0) - 1
    tl.store(indices + n * K + place, cell.to(tl.int16), mask=is_chosen)
    tl.store(chosen + n * K + place, value, mask=is_chosen)
    tl.store(means + n, tl.sum(tl.where(is_chosen, tl.abs(value), 0.0).to(tl.float64)) / K)


@triton.jit
def _multiples(x, exponent, top):
    """Returns |x| in units of 2**exponent, rounded, from 1 to `top`, and the unit."""
    down, up = (
        ((127 - exponent) << 23).to(tl.float32, bitcast=True),
        ((127 + exponent) << 23).to(tl.float32, bitcast=True),
    )
    return tl.minimum(tl.maximum(tl.floor(tl.abs(x) * down + 0.5), 1.0), top), up


@program
def errors(chosen, exponents, groups, found, chunks, group_count, top, K: tl.constexpr, WIDE: tl.constexpr):
    """A chunk's squared error for each candidate's exponents [candidates, groups]. found: [candidates, chunks]"""
    n, each, lane = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, WIDE)
    x = tl.load(chosen + n * K + lane, mask=lane < K, other=0.0)
    size, unit = _multiples(x, tl.load(exponents + each * group_count + tl.load(groups + n)).to(tl.int32), top)
    off = tl.where(lane < K, size * unit - tl.abs(x), 0.0).to(tl.float64)
    tl.store(found + each.to(tl.int64) * chunks + n, tl.sum(off * off))


@program
def withdraw(
    residual,
    indices,
    chosen,
    values,
    removed,
    exponents,
    groups,
    turn,
    top,
    SCALED: tl.constexpr,
    AREA: tl.constexpr,
    K: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Rounds what was chosen to values, and takes them from the residual. Zeros get signs by turns."""
    n, lane = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    here, at = lane < K, n * K + lane
    x = tl.load(chosen + at, mask=here, other=0.0)
    place = tl.load(indices + at, mask=here, other=0).to(tl.int32)
    sign = tl.where((x < 0) | ((x == 0) & ((place + turn) % 2 == 1)), -1, 1)
    left, sent, value = tl.zeros_like(x), x, sign
    if SCALED:
        size, unit = _multiples(x, tl.load(exponents + tl.load(groups + n)).to(tl.int32), top)
        value = sign * size.to(tl.int32)
        sent = value.to(tl.float32) * unit
        left = x - sent
    tl.store(values + at, value.to(values.dtype.element_ty), mask=here)
    tl.store(removed + at, sent, mask=here)
    tl.store(residual + n * AREA + place, left.to(residual.dtype.element_ty), mask=here)


@program
def mark(indices, ones, LOW: tl.constexpr, P: tl.constexpr, K: tl.constexpr, WIDE: tl.constexpr):
    """Sets the ones of each chunk's bucket string, a byte each."""
    n, lane = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    place = (tl.load(indices + n * K + lane, mask=lane < K, other=0).to(tl.int32) >> LOW) + lane
    tl.store(ones + n * P + place, tl.full([WIDE], 1, tl.uint8), mask=lane < K)


@program
def pack_fields(fields, section, octets, count, WIDTH: tl.constexpr, LANES: tl.constexpr):
    """Lays fields of WIDTH bits end to end: each lane makes a byte."""
    octet = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    byte = tl.zeros([LANES], tl.int32)
    for place in tl.static_range(8):
        bit = octet * 8 + place
        number = bit // WIDTH
        field = tl.load(fields + number, mask=number < count, other=0).to(tl.int64)
        byte |= ((field >> (bit % WIDTH)) & 1).to(tl.int32) << place
    tl.store(section + octet, byte.to(tl.uint8), mask=octet < octets)


@program
def sum_groups(numbers, starts, sums, LANES: tl.constexpr):
    """The sums of each group's numbers, in one order; of each row of numbers [rows, starts[-1]]."""
    group, groups = tl.program_id(0), tl.num_programs(0)
    numbers += tl.program_id(1).to(tl.int64) * tl.load(starts + groups)
    at, last = tl.load(starts + group), tl.load(starts + group + 1)
    total = tl.zeros([LANES], tl.float64)
    while at < last:
        place = at + tl.arange(0, LANES)
        total += tl.load(numbers + place, mask=place < last, other=0.0)
        at += LANES
    tl.store(sums + tl.program_id(1) * groups + group, tl.sum(total))
