"""Payloads: one encoding per content, every other string refused, in bounded time and memory."""

from __future__ import annotations

import contextlib
import time
import tracemalloc
from math import comb, log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.config import RecipeConfig
from p2ptrain.errors import RemoteProtocolError
from p2ptrain.exact.codec import (
    WORK_BYTES,
    Contribution,
    PayloadFormat,
    index_widths,
    pack,
    pack_fields,
    read_exponents,
    unpack,
    unpack_fields,
)
from p2ptrain.exact.transform import Layout
from tests.helpers.exact_numbers import contribution, integers

FORMATS = [
    ("distro", 64, 32, 1),
    ("distro", 64, 8, 1),
    ("distro", 64, 1, 1),
    ("distro", 64, 64, 1),
    ("distro", 64, 200, 1),
    ("distro", 16, 5, 1),
    ("distro", 8, 32, 1),
    ("demo", 64, 32, 3),
    ("demo", 8, 3, 4),
    ("local", 32, 16, 1),
]


def make(name: str, chunk: int, k: int, value_bits: int, chunks: int = 3) -> tuple[Layout, RecipeConfig, PayloadFormat]:
    recipe = RecipeConfig(name=name, chunk=chunk, k=k, value_bits=value_bits)
    layout = Layout([(chunk * (chunks - 1), chunk), (chunk,)], chunk)
    form = PayloadFormat.of(layout, recipe)
    assert layout.chunks == chunks
    return layout, recipe, form


def same(first: Contribution, second: Contribution) -> bool:
    return (
        np.array_equal(first.indices, second.indices)
        and np.array_equal(first.values, second.values)
        and (first.exponents is None) == (second.exponents is None)
        and (first.exponents is None or np.array_equal(first.exponents, second.exponents))
    )


@pytest.mark.parametrize(("name", "chunk", "k", "value_bits"), FORMATS)
@given(seed=st.integers(0, 2**32), chunks=st.integers(2, 5))
@settings(deadline=None, max_examples=25)
def test_a_payload_unpacks_to_the_contribution_that_was_packed(
    name: str, chunk: int, k: int, value_bits: int, seed: int, chunks: int
) -> None:
    layout, recipe, form = make(name, chunk, k, value_bits, chunks)
    offered = contribution(seed, layout, recipe)
    payload = pack(offered, form)
    assert len(payload) == form.payload_bytes
    read = unpack(payload, form)
    assert same(read, offered)
    assert pack(read, form) == payload
    if recipe.spec.is_scaled:
        assert np.array_equal(read_exponents(payload, form), offered.exponents)


@pytest.mark.parametrize(("name", "chunk", "k", "value_bits"), FORMATS)
def test_extreme_sets_of_indices_survive(name: str, chunk: int, k: int, value_bits: int) -> None:
    layout, recipe, form = make(name, chunk, k, value_bits)
    area = chunk * chunk
    for row in (np.arange(k), np.arange(area - k, area), np.linspace(0, area - 1, k).astype(int)):
        indices = np.broadcast_to(row.astype(np.uint16), (layout.chunks, k))
        for value in (1, -1, 1 << (value_bits - 1), -(1 << (value_bits - 1))):
            values = np.full((layout.chunks, k), value, np.int8)
            for exponent in (-64, 15):
                scales = np.full(len(layout.groups), exponent, np.int8) if recipe.spec.is_scaled else None
                offered = Contribution(np.ascontiguousarray(indices), values, scales)
                assert same(unpack(pack(offered, form), form), offered)


@pytest.mark.parametrize(("name", "chunk", "k", "value_bits"), FORMATS)
def test_every_bit_flip_is_refused_or_is_the_encoding_of_what_it_decodes_to(
    name: str, chunk: int, k: int, value_bits: int
) -> None:
    layout, recipe, form = make(name, chunk, k, value_bits, 2)
    offered = contribution(7, layout, recipe)
    payload = pack(offered, form)
    refused = accepted = 0
    for bit in range(8 * len(payload)):
        flipped = bytearray(payload)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            read = unpack(bytes(flipped), form)
        except RemoteProtocolError:
            refused += 1
            continue
        accepted += 1
        assert not same(read, offered)
        assert pack(read, form) == flipped
    assert accepted >= layout.chunks * k  # every sign at least
    assert refused or form.payload_bytes * 8 == sum(count * width * form.chunks for count, width in form.sections)


@pytest.mark.parametrize(("name", "chunk", "k", "value_bits"), FORMATS)
def test_every_truncation_and_extension_is_refused(name: str, chunk: int, k: int, value_bits: int) -> None:
    layout, recipe, form = make(name, chunk, k, value_bits, 2)
    payload = pack(contribution(8, layout, recipe), form)
    for length in range(len(payload)):
        with pytest.raises(RemoteProtocolError, match=f"payload of {length} bytes; this run's have {len(payload)}"):
            unpack(payload[:length], form)
    with pytest.raises(RemoteProtocolError, match="this run's have"):
        unpack(payload + b"\0", form)


def test_each_kind_of_second_encoding_is_refused_with_its_reason() -> None:
    layout, recipe, form = make("local", 64, 32, 1, 3)
    offered = contribution(9, layout, recipe)
    good = pack(offered, form)
    (_, upper_bits), (_, low_bits), _, _ = form.sections
    assert (form.groups, upper_bits, low_bits) == (2, 60, 7)
    upper_bytes = -(-3 * upper_bits // 8)

    def spoiled(at: int, octet: int) -> bytes:
        return good[:at] + bytes([octet]) + good[at + 1 :]

    with pytest.raises(RemoteProtocolError, match=r"a scale of 2\*\*16; the limit is 2\*\*15"):
        unpack(spoiled(0, 80), form)
    with pytest.raises(RemoteProtocolError, match="a bit is set after the end of a section"):
        unpack(spoiled(form.groups + upper_bytes - 1, good[form.groups + upper_bytes - 1] | 0x80), form)
    ranks = np.array([0, comb(63, 32), 0], np.uint64)
    with pytest.raises(RemoteProtocolError, match="a rank names no bucket string"):
        unpack(good[:2] + pack_fields(ranks, 60) + good[2 + upper_bytes :], form)
    # Rank 0: all of a chunk's indices in bucket 0, where equal low bits repeat an index.
    zeros = bytes(len(good) - 2)
    with pytest.raises(RemoteProtocolError, match="indices of a chunk do not rise"):
        unpack(good[:2] + zeros, form)
    falling = pack_fields(np.tile(np.arange(32, 0, -1, dtype=np.uint8), 3), 7)
    with pytest.raises(RemoteProtocolError, match="indices of a chunk do not rise"):
        unpack(good[:2] + bytes(upper_bytes) + falling + bytes(len(good) - 2 - upper_bytes - len(falling)), form)
    layout, recipe, form = make("distro", 64, 64, 1, 3)
    payload = bytearray(pack(contribution(9, layout, recipe), form))
    payload[0] ^= 1
    with pytest.raises(RemoteProtocolError, match="a chunk's bucket string does not have 64 ones"):
        unpack(bytes(payload), form)


def test_widths_reach_the_targets_and_stay_above_the_entropy() -> None:
    model = Layout([(64 * 40, 64 * 61)], 64)  # 2,440 chunks: 10M parameters
    forms = [PayloadFormat.of(model, RecipeConfig(name="distro", chunk=64, k=k)) for k in (4, 8, 16, 32, 64, 128)]
    bits = {form.k: form.payload_bytes * 8 / (form.chunks * form.k) for form in forms}
    assert bits[8] <= 11.4
    assert bits[32] <= 9.9
    assert bits == pytest.approx({4: 12.0, 8: 11.125, 16: 10.4375, 32: 9.875, 64: 8.984375, 128: 7.9921875}, abs=1e-3)
    for k, found in bits.items():
        bound = log2(comb(4096, k)) / k + 1
        assert bound <= found < bound * 1.085


@given(st.integers(1, 512), st.sampled_from([64, 256, 1024, 4096]))
@settings(deadline=None)
def test_no_other_split_of_the_same_kind_is_shorter(k: int, area: int) -> None:
    k = min(k, area // 2)
    low_bits, ranked, upper_bits = index_widths(area, k)
    positions = (area >> low_bits) + k - 1
    assert upper_bits == ((comb(positions, k) - 1).bit_length() if ranked else positions)
    for other in range(area.bit_length()):
        strings = comb((area >> other) + k - 1, k)
        assert upper_bits + k * low_bits <= (area >> other) + k - 1 + k * other
        if strings <= 2**63:
            assert upper_bits + k * low_bits <= (strings - 1).bit_length() + k * other


@pytest.mark.parametrize("k", [6, 9, 14])
def test_ranks_of_sixty_three_bits_survive(k: int) -> None:
    layout, recipe, form = make("distro", 64, k, 1)
    last = np.arange(4096 - k, 4096, dtype=np.uint16)  # the largest rank of all
    top = Contribution(np.tile(last, (layout.chunks, 1)), np.ones((layout.chunks, k), np.int8))
    assert same(unpack(pack(top, form), form), top)
    offered = contribution(k, layout, recipe)
    assert same(unpack(pack(offered, form), form), offered)
    assert (form.ranked, form.upper_bits) == (True, 63)


def test_a_single_spare_bit_must_be_clear_too() -> None:
    layout, recipe, form = make("distro", 8, 5, 1, 3)
    assert form.chunks * form.k % 8 == 7
    payload = pack(contribution(1, layout, recipe), form)
    unpack(payload, form)
    with pytest.raises(RemoteProtocolError, match="a bit is set after the end of a section"):
        unpack(payload[:-1] + bytes([payload[-1] | 0x80]), form)


WRONG: dict[str, tuple[str, dict[str, object]]] = {
    "a value of zero": ("a value is not zero", {"values": 0}),
    "a value too large": ("a value fits its bits", {"values": 5}),
    "the least int8": ("a value fits its bits", {"values": -128}),
    "indices that fall": ("indices of a chunk rise", {"indices": 7}),
    "an index outside": ("an index lies in its chunk", {"indices": None}),
    "a scale too large": ("scales are in range", {"exponents": 16}),
    "a scale too small": ("scales are in range", {"exponents": -65}),
    "no scales": ("scaled recipes give scales", {"exponents": None}),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_recipe_that_gives_what_no_payload_can_say_is_stopped(case: str) -> None:
    reason, change = WRONG[case]
    layout, recipe, form = make("demo", 64, 32, 3)
    good = contribution(1, layout, recipe)
    assert good.exponents is not None
    indices, values, exponents = good.indices.copy(), good.values.copy(), good.exponents.copy()
    if "values" in change:
        values[1, 3] = change["values"]
    if "indices" in change:
        indices[1, -1] = 4096 if change["indices"] is None else indices[1, -2]
    if "exponents" in change and change["exponents"] is not None:
        exponents[0] = change["exponents"]
    scales = None if change.get("exponents", 0) is None else exponents
    with pytest.raises(AssertionError, match=reason):
        pack(Contribution(indices, values, scales), form)


@given(st.integers(1, 63), st.integers(1, 60), st.integers(0, 2**32))
@settings(deadline=None)
def test_fields_of_any_width_survive(width: int, count: int, seed: int) -> None:
    fields = integers(seed, count) & np.uint64((1 << width) - 1)
    if width <= 8:
        fields = fields.astype(np.uint8)
    packed = pack_fields(fields, width)
    assert len(packed) == -(-count * width // 8)
    assert int.from_bytes(packed, "little") == sum(int(field) << width * at for at, field in enumerate(fields))
    assert np.array_equal(unpack_fields(np.frombuffer(packed, np.uint8), count, width), fields)


def test_unpacking_takes_at_most_twice_the_memory_of_what_it_gives() -> None:
    for name, k, value_bits in (
        ("distro", 1, 1),
        ("distro", 8, 1),
        ("distro", 32, 1),
        ("demo", 32, 3),
        ("distro", 128, 1),
    ):
        recipe = RecipeConfig(chunk=64, name=name, k=k, value_bits=value_bits)
        layout = Layout([(64 * 40, 64 * 61)], 64)
        form = PayloadFormat.of(layout, recipe)
        payload = pack(contribution(3, layout, recipe), form)
        unpack(payload, form)  # tables are made once
        tracemalloc.start()
        unpack(payload, form)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak <= 2 * max(form.contribution_bytes, WORK_BYTES)


def test_unpacking_ten_million_parameters_takes_less_than_five_milliseconds() -> None:
    """At its best of many, because a busy machine takes breaks; what is refused is refused no later."""
    layout = Layout([(64 * 40, 64 * 61)], 64)
    recipe = RecipeConfig(name="distro", chunk=64, k=32)
    form = PayloadFormat.of(layout, recipe)
    good = pack(contribution(1, layout, recipe), form)
    seconds = []
    for payload in [good, bytes(len(good)), b"\xff" * len(good), good[:-1] + b"\xff"] * 30:
        start = time.perf_counter()
        with contextlib.suppress(RemoteProtocolError):
            unpack(payload, form)
        seconds.append(time.perf_counter() - start)
    assert max(min(seconds[kind::4]) for kind in range(4)) < 0.005


def test_a_wrong_length_allocates_nothing() -> None:
    _, _, form = make("distro", 64, 32, 1)
    endless = memoryview(bytes(50_000_000))
    tracemalloc.start()
    with pytest.raises(RemoteProtocolError):
        unpack(endless, form)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20_000


@pytest.mark.timeout(300)
def test_a_hundred_thousand_malformed_payloads_are_refused_or_canonical() -> None:
    """Four mutations of valid payloads and random strings, for three formats: bounded time, memory and errors."""
    generator = np.random.default_rng(2024)
    tried, accepted = 0, 0
    reasons: dict[str, int] = {}
    slowest_seconds, highest_bytes = 0.0, 0
    for name, chunk, k, value_bits in (("distro", 64, 32, 1), ("demo", 16, 5, 3), ("local", 64, 64, 1)):
        layout, recipe, form = make(name, chunk, k, value_bits)
        valid = [np.frombuffer(pack(contribution(seed, layout, recipe), form), np.uint8) for seed in range(8)]
        for turn in range(34_000):
            payload = valid[turn % 8].copy()
            kind = turn % 5
            at = int(generator.integers(len(payload)))
            if kind == 0:
                payload = generator.integers(0, 256, len(payload), dtype=np.uint8)
            elif kind == 1:
                payload[at] ^= np.uint8(1 << int(generator.integers(8)))
            elif kind == 2:
                payload[at:] = generator.choice(np.array([0, 255], np.uint8))
            elif kind == 3:
                payload[at:] = valid[(turn + 1) % 8][: len(payload) - at]
            else:
                payload = np.resize(payload, at + int(generator.integers(2)) * len(payload))
            measured = turn % 500 < 5  # tracing makes everything ten times slower
            if measured:
                tracemalloc.start()
            start = time.perf_counter()
            try:
                read = unpack(payload.tobytes(), form)
            except RemoteProtocolError as error:
                reason = error.why.split(" of ")[0]
                reasons[reason] = reasons.get(reason, 0) + 1
            else:
                accepted += 1
                assert pack(read, form) == payload.tobytes()
            slowest_seconds = max(slowest_seconds, time.perf_counter() - start)
            if measured:
                highest_bytes = max(highest_bytes, tracemalloc.get_traced_memory()[1])
                tracemalloc.stop()
            tried += 1
    assert tried == 102_000
    assert highest_bytes < 200_000
    assert slowest_seconds < 1.0  # a payload of a kilobyte takes 0.1 ms; a busy machine may take a break
    assert accepted > 5_000
    assert set(reasons) == {
        "payload",
        "a scale",
        "a bit is set after the end",
        "a rank names no bucket string",
        "indices",
        "a chunk's bucket string does not have 64 ones",
    }
    assert min(reasons.values()) > 100
