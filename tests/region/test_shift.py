"""A region and the world: nothing that is learned is lost or counted twice, whoever is late, away, new or lying."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from random import Random

import pytest
import torch

from p2ptrain.errors import RemoteProtocolError
from p2ptrain.exact.outer import TAIL_BYTES, Tail
from p2ptrain.region.shift import Region, World

ROUNDS = 4  # of the region to one of the world
STEP = 1.0  # what each round of the region learns
ALL_ZERO = bytes(32)


@dataclass
class RegionMember:
    """A node of a region of one weight, with its residual and what it has not sent to the world yet."""

    region: Region
    residual: float = 0.0
    unsent: float = 0.0
    heard: int = -1


@dataclass
class Universe:
    """A region of some members, and a world in which it is one of `others` + 1 contributors.

    The others move the world by `drift` each. A member hears of the world `lag` rounds late.
    """

    size: int
    others: int = 0
    drift: float = 0.0
    latency: int = 1  # rounds of the region, from a contribution to the world's next round
    first: float = 0.0
    lag: dict[int, int] = field(default_factory=dict)
    number: int = 0
    here: float = 0.0

    def __post_init__(self) -> None:
        self.members = [RegionMember(self._made(place)) for place in range(self.size)]
        self.history = [(-100, self.first)]  # when the world agreed, and on what
        self.sent: list[tuple[int, float]] = []  # when, and what

    def _made(self, place: int) -> Region:
        return Region(bytes([place]) * 32, ROUNDS, 100.0)

    def restart(self, place: int) -> None:
        self.members[place].region = self._made(place)
        self.members[place].heard = -1

    def rounds(
        self, count: int, away: Collection[int] = (), late: Collection[int] = (), mute: Collection[int] = ()
    ) -> None:
        """Passes so many rounds; away: who does not train; late: whose contributions no round takes; mute: who has no
        line to the world."""
        for _ in range(count):
            self._round(away, late, mute)

    def _round(self, away: Collection[int], late: Collection[int], mute: Collection[int]) -> None:
        self.number += 1
        self._tell(mute)
        offered: dict[int, float] = {}
        for place, each in enumerate(self.members):
            if place in away:
                continue
            shift = each.region.begin(self.number, torch.tensor([self.here]))
            offered[place] = each.residual + STEP + (0.0 if shift is None else float(shift[0]))
            each.region.offer(self.number)
            each.residual = offered[place] if place in late else 0.0
        taken = {place: moved for place, moved in offered.items() if place not in late}
        tails = {self.members[place].region.me: self.members[place].region.tail for place in taken}
        if taken:
            self.here += sum(taken.values()) / len(taken)
        for place, each in enumerate(self.members):
            moved = each.region.applied(self.number, tails, torch.tensor([self.here]))
            each.unsent += 0.0 if moved is None else -float(moved[0])
            if each.unsent and place not in mute:
                self.sent.append((self.number, each.unsent))
                each.unsent = 0.0

    def _tell(self, mute: Collection[int]) -> None:
        if self.sent and self.number >= self.sent[-1][0] + self.latency:
            moved = sum(each for _, each in self.sent) + self.others * self.drift
            self.history.append((self.number, self.history[-1][1] + moved / (1 + self.others)))
            self.sent.clear()
        for place, each in enumerate(self.members):
            if place in mute:
                each.region.lose()
                continue
            known = max(at for at, (when, _) in enumerate(self.history) if when + self.lag.get(place, 0) <= self.number)
            if not each.region.is_followed or known != each.heard:
                each.region.hear(World(known, torch.tensor([self.history[known][1]])))
                each.heard = known

    @property
    def ideal(self) -> float:
        """Where the region is if nothing was lost or counted twice: what it learned last is not the world's yet."""
        learned = self.number * STEP + self.others * self.drift * (len(self.history) - 1)
        return self.first + learned / (1 + self.others)

    @property
    def off(self) -> float:
        return self.here - self.ideal


def test_one_node_alone_brings_all_that_it_learns_to_the_world() -> None:
    alone = Universe(1)
    alone.rounds(40)
    assert alone.off == 0.0
    assert [weights for _, weights in alone.history] == [STEP * ROUNDS * number for number in range(10)]


@pytest.mark.parametrize("latency", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_nothing_is_lost_while_the_world_agrees(size: int, latency: int) -> None:
    found = Universe(size, latency=latency)
    found.rounds(200)
    assert found.off == pytest.approx(0.0, abs=1e-3)
    assert len(found.history) > 200 // (ROUNDS + latency + ROUNDS)


def test_two_regions_meet_in_the_middle() -> None:
    found = Universe(3, others=1, drift=2 * ROUNDS * STEP)  # the other one learns twice as much
    found.rounds(200)
    assert found.here == pytest.approx(found.ideal, abs=ROUNDS)


def test_members_that_hear_late_shift_late_and_by_no_more() -> None:
    for lag in ({0: 1}, {2: 1}, {0: 3}, {1: 2, 2: 5}):
        found = Universe(3, others=1, drift=8.0, lag=lag)
        found.rounds(200)
        assert found.here == pytest.approx(found.ideal, abs=ROUNDS + 4), lag


def test_a_member_that_was_away_for_long_takes_nothing_in_twice() -> None:
    found = Universe(2, others=1, drift=8.0)
    found.rounds(20)
    found.rounds(175, away=[0])
    found.rounds(40)
    assert found.here == pytest.approx(found.ideal, rel=0.05)


def test_a_member_without_a_line_to_the_world_harms_nobody() -> None:
    for mute in (0, 2):
        found = Universe(3, others=1, drift=8.0)
        found.rounds(15)
        found.rounds(200, mute=[mute])
        found.rounds(40)
        assert found.here == pytest.approx(found.ideal, rel=0.06), mute
        assert len(found.history) > 50


def test_a_contribution_that_comes_too_late_brings_its_shift_no_second_time() -> None:
    rng, found = Random(1), Universe(3, others=1, drift=8.0)
    for _ in range(300):
        found.rounds(1, late=[place for place in range(3) if rng.random() < 0.15])
    assert found.here == pytest.approx(found.ideal, rel=0.12)


def test_a_restart_of_one_costs_nothing() -> None:
    found = Universe(3, others=1, drift=8.0)
    for place in (0, 1, 2, 0, 0):
        found.rounds(23)
        found.restart(place)
    found.rounds(40)
    assert found.here == pytest.approx(found.ideal, rel=0.05)


def test_a_restart_of_all_goes_back_to_the_world_and_on() -> None:
    found = Universe(2)
    found.rounds(43)
    at_least = found.history[-1][1]
    for place in range(2):
        found.restart(place)
    found.rounds(2)
    assert at_least <= found.here <= 45.0
    found.rounds(98)
    assert found.here - at_least == pytest.approx(100.0, abs=2 * ROUNDS)
    assert len(found.history) > 25


def test_a_region_that_begins_late_starts_from_the_world_and_does_not_pull_it_back() -> None:
    found = Universe(2, others=1, drift=4.0, first=500.0)
    found.rounds(1)
    assert found.here == 501.0
    found.rounds(99)
    assert found.here == pytest.approx(600.0, abs=3.0)
    assert min(weights for _, weights in found.history) == 500.0


def test_a_region_too_far_from_where_it_was_starts_from_the_world_again() -> None:
    found = Universe(2)
    found.rounds(10)
    found.here += 10_000.0  # a bound has cut what was to be added, or a liar was alone
    found.rounds(30)
    assert max(weights for _, weights in found.history) < 100.0, "it did not tell the world"
    assert found.here < 100.0


def test_when_the_speaker_dies_the_next_one_speaks() -> None:
    found = Universe(3)
    found.rounds(17)
    found.rounds(60, away=[0])
    assert found.off == pytest.approx(0.0, abs=ROUNDS)
    assert len(found.history) > 15
    assert found.history[-1][1] > 60.0


def test_only_one_contributes() -> None:
    regions = [Region(bytes([place]) * 32, 2, 9.0) for place in range(3)]
    tails = {each.me: Tail(5, False, True, False) for each in regions[1:]} | {regions[0].me: Tail(None, False, True)}
    for each in regions:
        each.hear(World(5, torch.zeros(1)))
        each.begin(1, torch.zeros(1))
        each.applied(1, {other.me: Tail(5, True) for other in regions}, torch.zeros(1))
    found = [each.applied(2, tails, torch.ones(1)) for each in regions]
    assert [None if each is None else float(each[0]) for each in found] == [None, -1.0, None]
    assert [each.world_round for each in regions] == [5, 5, 5]


@pytest.mark.parametrize("seed", range(20))
def test_drawn_trouble_never_runs_away(seed: int) -> None:
    rng = Random(seed)
    found = Universe(
        rng.randint(1, 5), others=rng.randint(0, 2), drift=4.0, latency=rng.randint(1, 6),
        lag={place: rng.randint(0, 3) for place in range(5)},
    )  # fmt: skip
    for _ in range(60):
        places = range(found.size)
        found.rounds(
            rng.randint(1, 6),
            away=[place for place in places if rng.random() < 0.1],
            late=[place for place in places if rng.random() < 0.1],
            mute=[place for place in places if rng.random() < 0.1],
        )
        if rng.random() < 0.1:
            found.restart(rng.randrange(found.size))
    assert 0.6 * found.ideal < found.here < 1.2 * found.ideal
    assert len(found.history) > 10


@pytest.mark.parametrize("lie", [Tail(2**40, True, True), Tail(2**40, False, True, True), Tail(0, True, False)])
def test_a_liar_about_the_world_moves_the_others_by_little(lie: Tail) -> None:
    found = Universe(4, others=1, drift=8.0)
    found.rounds(10)
    object.__setattr__(found.members[3].region, "begin", lambda *_: None)
    found.members[3].region.tail = lie
    found.rounds(200)
    assert found.here == pytest.approx(found.ideal, rel=0.3)
    assert len(found.history) > 40


@pytest.mark.parametrize("lie", [Tail(None, False, True), Tail(0, False, True, True)])
def test_a_liar_that_says_it_knows_keeps_no_region_from_beginning(lie: Tail) -> None:
    found = Universe(4, others=1, drift=8.0)
    object.__setattr__(found.members[3].region, "begin", lambda *_: None)
    found.members[3].region.tail = lie
    found.rounds(200)
    assert len(found.history) > 30


def test_a_liar_stops_nothing_where_the_others_hear_one_round_apart() -> None:
    found = Universe(4, others=1, drift=8.0, lag={1: 1, 2: 1})
    found.rounds(30)
    object.__setattr__(found.members[3].region, "begin", lambda *_: None)
    found.members[3].region.tail = Tail(0, True, True, True)
    found.rounds(200)
    assert len(found.history) > 20
    assert found.here == pytest.approx(found.ideal, rel=0.2)


def test_a_liar_that_shifts_to_a_round_long_past_multiplies_nothing() -> None:
    found = Universe(4, others=1, drift=8.0, latency=10)
    found.rounds(30)
    liar = found.members[3].region
    object.__setattr__(liar, "begin", lambda *_: None)
    for _ in range(200):
        liar.tail = Tail(len(found.history) - 1, True, True)
        found.rounds(1)
    assert found.here == pytest.approx(found.ideal, rel=0.2)


def test_a_liar_with_a_round_that_never_comes_is_forgotten() -> None:
    found = Universe(4, others=1, drift=8.0)
    found.rounds(30)
    liar = found.members[3].region
    object.__setattr__(liar, "begin", lambda *_: None)
    liar.tail = Tail(2**40, False, True, True)
    found.rounds(10, mute=[1, 2])
    found.rounds(200)
    assert len(found.history) > 25


def test_who_knows_and_who_follows_may_be_two() -> None:
    found = Universe(2, others=1, drift=8.0)
    found.rounds(30)
    found.rounds(5, mute=[0])
    found.restart(1)
    found.rounds(100, mute=[0])
    assert len(found.history) > 15
    assert found.members[1].region.world_round is not None


def test_a_shift_on_offer_when_the_region_goes_another_way_is_added_once() -> None:
    region = Region(ALL_ZERO, ROUNDS, 100.0)
    region.hear(World(0, torch.zeros(1)))
    region.begin(1, torch.zeros(1))
    region.offer(1)
    region.applied(1, {ALL_ZERO: Tail(0, True)}, torch.zeros(1))
    region.hear(World(1, torch.full((1,), 10.0)))
    shift = region.begin(2, torch.zeros(1))
    region.offer(2)  # the quorum is lost, and the contribution returns to the residual
    assert shift is not None and float(shift[0]) == 10.0
    again = region.begin(2, torch.zeros(1))
    assert again is not None and float(again[0]) == 0.0, "it is in the residual"
    region.offer(2)
    region.applied(2, {ALL_ZERO: region.tail}, torch.full((1,), 10.0))
    assert region.world_round == 1


def test_a_tail_is_nine_bytes_with_one_reading() -> None:
    for tail in (Tail(), Tail(0), Tail(7, True, True, True), Tail(2**63, False, True)):
        assert len(tail.encoded()) == TAIL_BYTES
        assert Tail.of(b"before" + tail.encoded()) == tail
    for wrong in (bytes(8) + b"\x08", bytes(8) + b"\x01", bytes(7) + b"\x01\x04"):
        with pytest.raises(RemoteProtocolError, match="a tail of"):
            Tail.of(wrong)
