"""Newcomers: a run whose rounds take some milliseconds can be joined, and a crowd of keys cannot slow that down."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from p2ptrain.core import events as ev
from p2ptrain.core.audits import Conduct
from p2ptrain.core.manifest import joins_max
from p2ptrain.core.messages import Availability, read
from p2ptrain.core.newcomers import LEAST_SECONDS, ROUNDS, SAVED_SECONDS_MAX, SHARE, NewcomerTime, looked_at
from p2ptrain.core.state import Admitted
from p2ptrain.digest import digest
from tests.helpers.core import KEYS, RUN, Bench, announced, root_of, run_of
from tests.helpers.manifest import admitting

NEWCOMER = KEYS[15]
SHORT = 0.02  # seconds of a training
CROWD = tuple(digest("crowd", bytes([place])) for place in range(40))


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


def test_of_a_crowd_in_one_range_few_are_looked_at_and_newcomers_from_elsewhere_always() -> None:
    working = CROWD[7]
    crowd = [Admitted(key, 1, 0, 0, 0, Conduct(credit=9 if key == working else 0)) for key in CROWD]
    state = admitting(*crowd, *(Admitted(key, 1, 0, 0) for key in KEYS[8:11]))
    ranges = {**dict.fromkeys(CROWD, "10.1"), KEYS[8]: "10.2", KEYS[9]: "10.3"}  # the third is not connected
    seen = [{key for key in state.place if key in looked_at(state, run_of(), ranges, number)} for number in range(20)]
    for looked in seen:
        assert looked >= {*KEYS[:4], *KEYS[8:11], working}
        assert len(looked & {*CROWD}) == joins_max(4)
    assert len({key for looked in seen for key in looked} & {*CROWD}) > 20, "others in each round"
    invited = run_of(admission={"policy": "allowlist", "keys": [key.hex() for key in CROWD]})
    assert all(key in looked_at(state, invited, ranges, 1) for key in state.place)
    few = admitting(*crowd[: joins_max(4)])
    assert all(key in looked_at(few, run_of(), {}, 1) for key in few.place)


@pytest.mark.parametrize("was_connected", [True, False])
def test_who_is_connected_anew_or_from_elsewhere_is_looked_at_from_then_on(was_connected: bool) -> None:
    bench, newcomer = Bench(4, start=False), KEYS[8]
    crowd = [Admitted(key, 0, 0, 0) for key in (*CROWD, newcomer)]
    bench.genesis = replace(bench.genesis, admitted=(*bench.genesis.admitted, *crowd))
    bench.start()
    for key in (*bench.others, *(CROWD if was_connected else ()), newcomer if was_connected else KEYS[9]):
        bench.do(ev.PeerSeen(key, "10.1"))
    here = bench.parts.here
    number = next(number for number in range(1, 100) if not here.looks_at(newcomer, number))
    if not was_connected:
        bench.do(ev.PeerLost(KEYS[9]))
    bench.do(ev.PeerSeen(newcomer, "10.2"))
    assert bench.parts.here.looks_at(newcomer, number)


def test_who_has_gone_takes_no_place_of_who_is_connected_through_a_relay() -> None:
    relayed, gone = KEYS[8], [Admitted(key, 1, 0, 100, 0, Conduct(credit=9)) for key in CROWD]
    state = admitting(*gone, Admitted(relayed, 1, 0, 0))
    assert all(relayed in looked_at(state, run_of(), {relayed: ""}, number) for number in range(20))


def test_those_whose_work_was_found_lately_take_half_of_the_places_of_their_range() -> None:
    most = joins_max(4)

    def found(absent: int) -> int:
        """How often those are looked at whose work was found, of 400 times; as many others share their range."""
        entries = [Admitted(key, 1, 0, absent, 0, Conduct(credit=key in CROWD[:most])) for key in CROWD[: 2 * most]]
        state, ranges = admitting(*entries), dict.fromkeys(CROWD, "10.1")
        looked = [looked_at(state, run_of(), ranges, number) for number in range(400 // most)]
        return sum(key in each for each in looked for key in CROWD[:most])

    assert 220 < found(0) < 300
    assert found(100) == pytest.approx(200, abs=19), "they may have gone"


def beside_a_crowd(**agreement: int) -> Bench:
    """One of four members, connected to a crowd of admitted keys in one range of addresses, and to a newcomer."""
    bench = Bench(4, start=False, agreement=agreement)
    admitted = (*bench.genesis.admitted, *(Admitted(key, 0, 0, 0) for key in (*CROWD, NEWCOMER)))
    bench.genesis = replace(bench.genesis, admitted=tuple(sorted(admitted, key=lambda entry: entry.key)))
    bench.start()
    for key in (*bench.others, *CROWD, NEWCOMER):
        bench.do(ev.PeerSeen(key, "10.1" if key in CROWD else key.hex()))
    return bench


def few_of_crowd(bench: Bench) -> set[bytes]:
    """Returns the keys of the crowd that are looked at in this round."""
    looked = looked_at(bench.state, bench.run, bench.parts.context.peers, bench.state.round + 1)
    return {key for key in CROWD if key in looked}


def test_a_contribution_that_a_later_round_may_take_is_looked_at_anew_in_that_round() -> None:
    bench = beside_a_crowd(staleness_rounds_max=1)
    before = few_of_crowd(bench)
    for key in CROWD:
        bench.hear(announced(key))
    effects = bench.decide(apply=False)
    assert bench.state.round == 1
    now = few_of_crowd(bench)
    assert now - before
    fetched = {each.payload for each in effects if isinstance(each, ev.Fetch)}
    assert fetched >= {announced(key).payload for key in now - before}
    assert not fetched & {announced(key).payload for key in {*CROWD} - now}
    for key in now - before:
        bench.arrives(announced(key).payload)
    held, _ = bench.parts.pools.offers.attestable(bench.state, bench.parts.here.looks_at)
    authors = {bench.parts.pools.offers.by_name[name].announcement.author for name in held}
    assert authors == now - before, "of the others nothing has arrived"


@pytest.mark.parametrize("is_looked_at", [True, False])
def test_who_came_too_late_is_waited_for_only_if_it_is_looked_at(is_looked_at: bool) -> None:
    bench = beside_a_crowd(overlap_rounds=0)
    for key in CROWD:  # nobody is held up as a newcomer
        bench.do(ev.PeerLost(key))
        bench.do(ev.PeerSeen(key, "10.1"))
    bench.wait(10.0)
    bench.decide()
    few = few_of_crowd(bench)
    late = min(few if is_looked_at else {*CROWD} - few)
    bench.hear(announced(late))
    assert bench.parts.here.collecting.waits_for(late) is is_looked_at


def test_what_a_crowd_offers_is_neither_fetched_nor_attested_unless_others_attest_it() -> None:
    bench = beside_a_crowd()
    few = few_of_crowd(bench)
    assert len(few) == joins_max(4)
    sent, along = CROWD[:20], CROWD[20:]
    effects = {key: bench.hear(announced(key)) for key in (*sent, NEWCOMER)}
    fetched = {key for key, each in effects.items() if any(isinstance(effect, ev.Fetch) for effect in each)}
    assert fetched == {NEWCOMER, *few.intersection(sent)}
    for key in along:
        bench.hear_offer(announced(key, inline=True))
    bench.train(inline=True)
    for key in bench.others:
        bench.hear_offer(announced(key, inline=True))
    assert bench.parts.here.mine is not None
    held = {
        bench.parts.pools.offers.by_name[name].announcement.author
        for name in read(bench.parts.here.mine, Availability).held
    }
    assert held == {*bench.founders, *few.intersection(along)}
