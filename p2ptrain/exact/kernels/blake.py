"""BLAKE3 on a card: the digests of a state's pieces, of which digest.py makes the root.

A leaf is hashed as its number in eight bytes and then its mebibyte, so its 1,024 whole chunks of BLAKE3 begin two words
early, and a last chunk has the eight bytes that are left. `chunks` gives each chunk's chaining value, `parents` joins
them level by level, and the last level joins the value of the whole chunks with that of the last one. All numbers are
32-bit words, so a value is a tuple of eight tensors."""

from __future__ import annotations

import triton
import triton.language as tl

from p2ptrain.exact.kernels.programs import program

CHUNK_START: tl.constexpr = tl.constexpr(1)
CHUNK_END: tl.constexpr = tl.constexpr(2)
MATERIAL: tl.constexpr = tl.constexpr(64)  # hashed under a derived key


@triton.jit
def _half(a, b, c, d, x, FIRST: tl.constexpr, SECOND: tl.constexpr):
    a = a + b + x
    d = d ^ a
    d = (d >> FIRST) | (d << (32 - FIRST))
    c = c + d
    b = b ^ c
    b = (b >> SECOND) | (b << (32 - SECOND))
    return a, b, c, d


@triton.jit
def _mixed(a, b, c, d, x, y):
    a, b, c, d = _half(a, b, c, d, x, 16, 12)
    return _half(a, b, c, d, y, 8, 7)


@triton.jit
def _compressed(h, m, count, size, flags):
    """Returns the first half of a compression: h, m: the value before, and a block's sixteen words."""
    zero = tl.zeros_like(h[0])
    v0, v1, v2, v3, v4, v5, v6, v7 = h
    v8, v9, v10, v11 = zero + 0x6A09E667, zero + 0xBB67AE85, zero + 0x3C6EF372, zero + 0xA54FF53A
    v12, v13, v14, v15 = zero + count, zero, zero + size, zero + flags
    rounds = 0
    while rounds < 7:
        v0, v4, v8, v12 = _mixed(v0, v4, v8, v12, m[0], m[1])
        v1, v5, v9, v13 = _mixed(v1, v5, v9, v13, m[2], m[3])
        v2, v6, v10, v14 = _mixed(v2, v6, v10, v14, m[4], m[5])
        v3, v7, v11, v15 = _mixed(v3, v7, v11, v15, m[6], m[7])
        v0, v5, v10, v15 = _mixed(v0, v5, v10, v15, m[8], m[9])
        v1, v6, v11, v12 = _mixed(v1, v6, v11, v12, m[10], m[11])
        v2, v7, v8, v13 = _mixed(v2, v7, v8, v13, m[12], m[13])
        v3, v4, v9, v14 = _mixed(v3, v4, v9, v14, m[14], m[15])
        m = (m[2], m[6], m[3], m[10], m[7], m[0], m[4], m[13], m[1], m[11], m[12], m[5], m[9], m[14], m[15], m[8])
        rounds += 1
    return v0 ^ v8, v1 ^ v9, v2 ^ v10, v3 ^ v11, v4 ^ v12, v5 ^ v13, v6 ^ v14, v7 ^ v15


@triton.jit
def _eight(words, step, mask):
    return (
        tl.load(words, mask=mask, other=0),
        tl.load(words + step, mask=mask, other=0),
        tl.load(words + 2 * step, mask=mask, other=0),
        tl.load(words + 3 * step, mask=mask, other=0),
        tl.load(words + 4 * step, mask=mask, other=0),
        tl.load(words + 5 * step, mask=mask, other=0),
        tl.load(words + 6 * step, mask=mask, other=0),
        tl.load(words + 7 * step, mask=mask, other=0),
    )


@triton.jit
def _key(key, zero):
    return _eight(key + zero.to(tl.int32), 1, zero == 0)


@triton.jit
def _store(values, step, h, mask):
    for word in tl.static_range(8):
        tl.store(values + word * step, h[word], mask=mask)


@program
def chunks(state, key, values, LANES: tl.constexpr):
    """state: [pieces * 2**18] words -> values: [8, pieces * 1024] of the whole chunks; a lane a chunk."""
    number = tl.program_id(0) * LANES + tl.arange(0, LANES)
    lane, piece = number % 1024, number // 1024
    zero = tl.zeros([LANES], tl.uint32)
    h = _key(key, zero)
    first = state + piece.to(tl.int64) * 262144 + lane * 256 - 2
    block = 0
    while block < 16:
        words = first + block * 16
        is_number = (lane == 0) & (block == 0)
        a = _eight(words, 1, number >= 0)
        m0 = tl.where(is_number, piece.to(tl.uint32), tl.load(words, mask=is_number == 0, other=0))
        m1 = tl.load(words + 1, mask=is_number == 0, other=0)
        b = _eight(words + 8, 1, number >= 0)
        m = (m0, m1, a[2], a[3], a[4], a[5], a[6], a[7], b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7])
        ends = tl.where(block == 0, CHUNK_START, 0) + tl.where(block == 15, CHUNK_END, 0)
        h = _compressed(h, m, lane.to(tl.uint32), 64, (ends + MATERIAL).to(tl.uint32))
        block += 1
    _store(values + number, tl.num_programs(0) * LANES, h, number >= 0)


@program
def parents(left, right, key, above, step, stride, count, flags, LANES: tl.constexpr):
    """above: [8, count] of the values left and right, [8, stride], each `step` apart."""
    number = tl.program_id(0) * LANES + tl.arange(0, LANES)
    here = number < count
    a = _eight(left + step * number, stride, here)
    b = _eight(right + step * number, stride, here)
    m = (a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7])
    h = _compressed(_key(key, tl.zeros([LANES], tl.uint32)), m, 0, 64, flags.to(tl.uint32))
    _store(above + number, count, h, here)


@program
def tails(state, key, values, count, LANES: tl.constexpr):
    """values: [8, count] of each piece's last chunk, of eight bytes."""
    number = tl.program_id(0) * LANES + tl.arange(0, LANES)
    here, zero = number < count, tl.zeros([LANES], tl.uint32)
    end = state + (number.to(tl.int64) + 1) * 262144 - 2
    m0, m1 = tl.load(end, mask=here, other=0), tl.load(end + 1, mask=here, other=0)
    m = (m0, m1, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero)
    _store(values + number, count, _compressed(_key(key, zero), m, 1024, 8, CHUNK_START + CHUNK_END + MATERIAL), here)
