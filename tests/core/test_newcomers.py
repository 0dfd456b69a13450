"""Newcomers: a run whose rounds take some milliseconds can be joined, and strangers cannot slow it down."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from p2ptrain.core import events as ev
from p2ptrain.core.newcomers import LEAST_SECONDS, ROUNDS, SAVED_SECONDS_MAX, SHARE, NewcomerTime
from p2ptrain.core.state import Admitted
from tests.helpers.core import KEYS, RUN, Bench, announced, root_of

NEWCOMER = KEYS[15]
SHORT = 0.02  # seconds of a training


def among(size: int, *, is_connected: bool = True, is_admitted: bool = True) -> Bench:
    """One of so many members, and a peer that was admitted just now."""
    bench = Bench(size, start=False)
    if is_admitted:
        bench.genesis = replace(bench.genesis, admitted=(*bench.genesis.admitted, Admitted(NEWCOMER, 0, 0, 0)))
    bench.start()
    for key in (*bench.others, *([NEWCOMER] if is_connected else [])):
        bench.do(ev.PeerSeen(key))
    if size > 1:  # a round decides as it begins whom it waits for
        bench.decide()
        return bench
    bench.train(1)
    bench.do(ev.Applied(RUN, 1, root_of(1)))
    return bench


def train(bench: Bench) -> None:
    """Everyone with a seat trains and contributes."""
    bench.wait(SHORT)
    for key in bench.others:
        bench.hear_offer(announced(key, 2, inline=True))
    bench.train(2)


def is_collecting(bench: Bench) -> bool:
    return bench.parts.here.mine is None


@pytest.mark.parametrize("size", [2, 4])
def test_a_short_round_stays_open_for_a_newcomer(size: int) -> None:
    bench = among(size)
    train(bench)
    bench.wait(LEAST_SECONDS - SHORT - 0.01)
    assert is_collecting(bench)
    bench.wait(0.01)
    assert not is_collecting(bench)


def test_a_round_is_over_at_once_when_the_newcomer_has_contributed() -> None:
    bench = among(4)
    train(bench)
    bench.hear_offer(announced(NEWCOMER, 2, inline=True))
    assert not is_collecting(bench)


def test_a_lone_node_holds_its_rounds_open_for_a_newcomer() -> None:
    bench = among(1)
    train(bench)
    assert bench.state.round == 1
    bench.wait(LEAST_SECONDS)
    assert bench.state.round == 2


@pytest.mark.parametrize("without", ["is_connected", "is_admitted"])
def test_no_round_stays_open_for_a_stranger_or_for_who_is_elsewhere(without: str) -> None:
    bench = among(4, **{without: False})
    train(bench)
    assert not is_collecting(bench)


def test_a_round_is_held_open_only_after_it_would_be_over() -> None:
    bench = among(4)
    bench.wait(LEAST_SECONDS)
    train(bench)
    assert not is_collecting(bench)


def test_nobody_is_a_newcomer_for_long() -> None:
    state, newcomers = among(4).genesis, NewcomerTime()

    def awaited(number: int, probation: int = 2, connected: tuple[bytes, ...] = KEYS, **changes: int) -> set[bytes]:
        entry = replace(Admitted(NEWCOMER, 5, 0, 0), **changes)
        at = replace(state, round=number, admitted=(*state.admitted[:-1], entry))
        return newcomers.awaited(at, probation, connected)

    assert awaited(5) == awaited(4 + ROUNDS) == awaited(6, taken=1) == {NEWCOMER}
    assert (
        awaited(5 + ROUNDS) == awaited(6, taken=2) == awaited(5, connected=KEYS[:4]) == awaited(5, probation=0) == set()
    )


def test_any_number_of_newcomers_takes_a_part_of_the_time() -> None:
    newcomers, now, took = NewcomerTime(), 0.0, 0.0
    while now < 3_600.0:
        seconds = newcomers.seconds(now)
        newcomers.took(seconds)
        took += seconds
        now += SHORT + seconds
    assert took == pytest.approx(SAVED_SECONDS_MAX + SHARE * now, rel=0.01)
