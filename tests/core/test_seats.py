"""Seats: what they cost in an open run, where a person can have any number of keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from p2ptrain.config import RunConfig
from p2ptrain.core import origin
from p2ptrain.core.admission import check_request
from p2ptrain.core.audits import (
    AUDITED_FROM,
    CREDIT,
    KEPT_ROUNDS,
    NEW_SEAT_ROUNDS,
    Conduct,
    Measured,
    Summons,
    Tier,
    may_leave,
)  # fmt: skip
from p2ptrain.core.manifest import Join, Manifest, Request, contradiction
from p2ptrain.core.messages import Leave
from p2ptrain.core.state import Admitted, AgreedState
from p2ptrain.errors import RemoteProtocolError
from tests.helpers.core import KEYS, DigestSigner, announced, run_of
from tests.helpers.manifest import ASKED, admitting, decide, names, quorum

LOCAL: dict[str, Any] = {"name": "local", "local_steps": 10, "sequences_per_pass": 8}
AUDITED, STEPS = run_of(recipe=LOCAL), 10
SIZE = 7
MEMBERS, EARNED, NEWCOMER = KEYS[:SIZE], KEYS[3], KEYS[9]
WORKS = Conduct(since=1, credit=40 * CREDIT)  # of a key that had to be found working


def entry(state: AgreedState, key: bytes) -> Admitted:
    return state.admitted[state.place[key]]


def earned(work: int = KEPT_ROUNDS * STEPS, conduct: Conduct = WORKS, **changes: Any) -> AgreedState:
    """A run whose member EARNED was a stranger."""
    return admitting(Admitted(EARNED, 1, 0, 0, 0, conduct, work), size=SIZE, **({"round": 100} | changes))


def manifest_after(state: AgreedState, steps: dict[bytes, int], *asked: Request, run: RunConfig = AUDITED) -> Manifest:
    """A round that takes a contribution of each of these keys, of so many steps."""
    number = state.round + 1
    offers = tuple(
        announced(key, number, base_round=state.round, which=key[:4], branch=state.branch, steps=each)
        for key, each in steps.items()
    )
    requests = dict(zip(ASKED, asked, strict=False))
    named = quorum(state, held=names(*offers), requests=tuple(sorted(requests)))
    manifest = decide(state, named, offers, requests, run)
    assert contradiction(manifest, state, run) is None
    return manifest


def after(
    state: AgreedState, mine: int = 0, key: bytes = EARNED, others: int = STEPS, run: RunConfig = AUDITED
) -> AgreedState:
    """The state after a round to which this key contributes so many steps, and all other members so many."""
    steps = {each: others for each in state.members if others and each != key} | ({key: mine} if mine else {})
    return state.after(manifest_after(state, steps, run=run), run)


def rounds_kept(does: Callable[[int], int], state: AgreedState | None = None, run: RunConfig = AUDITED) -> int:
    """In how many of 400 rounds EARNED keeps its seat, if it takes so many steps in each."""
    state = state or earned()
    for number in range(400):
        state = after(state, does(number), run=run)
        if EARNED not in state.members:
            return number
    return 400


def test_a_seat_that_was_earned_is_lost_by_doing_nothing() -> None:
    """Or one machine works for one key until it has a seat, lets that only vote, and goes on with the next."""
    assert rounds_kept(lambda number: 0) == KEPT_ROUNDS


@pytest.mark.parametrize(
    ("does", "is_kept"),
    [
        (lambda number: STEPS * (number % 2), True),
        (lambda number: STEPS * (number % 3 > 0), True),
        (lambda number: STEPS * (number % 3 == 0), False),
        (lambda number: STEPS // 2, True),
        (lambda number: STEPS // 2 - 1, False),
        (lambda number: STEPS * (number % 50 > 24), True),
    ],
    ids=["every second round", "two of three", "every third", "half of each", "less", "with pauses of 25 rounds"],
)
def test_half_of_what_members_do_keeps_a_seat(does: Callable[[int], int], is_kept: bool) -> None:
    assert (rounds_kept(does) == 400) is is_kept


def test_who_has_lost_its_seat_by_resting_has_it_again_after_its_probation() -> None:
    state = earned(work=STEPS)
    for _ in range(2):
        state = after(state)
    assert EARNED not in state.members and entry(state, EARNED).conduct.tier is Tier.COUNTED
    for _ in range(AUDITED.admission.probation_rounds):
        assert EARNED not in state.members
        state = after(state, STEPS)
    assert EARNED in state.members


def test_a_new_seat_lasts_as_many_rounds_as_its_key_has_worked_but_not_many() -> None:
    for taken, lasts in ((3, 4), (40, NEW_SEAT_ROUNDS)):
        state = admitting(Admitted(NEWCOMER, 1, taken, 0, 0, WORKS), size=SIZE, round=100)
        state = after(state, STEPS, NEWCOMER)
        assert NEWCOMER in state.members and entry(state, NEWCOMER).work == lasts * STEPS


@pytest.mark.parametrize(
    ("conduct", "run"),
    [
        (Conduct(), AUDITED),
        (WORKS, run_of(recipe={"name": "local", "local_steps": 3, "sequences_per_pass": 8})),
        (WORKS, run_of(admission={"policy": "allowlist", "keys": [key.hex() for key in MEMBERS]}, recipe=LOCAL)),
    ],
    ids=["never on trial", "no audits", "allowlist"],
)
def test_who_never_had_to_earn_its_seat_may_only_vote(conduct: Conduct, run: RunConfig) -> None:
    assert rounds_kept(lambda number: 0, earned(0, conduct), run) == 400


def test_a_run_that_rests_takes_nobodys_seat() -> None:
    state = earned(work=STEPS)
    for _ in range(500):
        state = after(state, others=0)
    assert entry(state, EARNED).work == STEPS
    for _ in range(3):
        state = after(state, STEPS)  # and it has time to begin again with the others
    assert EARNED in state.members


def test_a_seat_costs_as_much_as_the_median_of_the_members_does() -> None:
    """Where most take half of the steps, or contribute to every second round, a quarter is enough."""
    state = earned()
    for _ in range(200):
        state = after(state, 3, others=5)
    assert EARNED in state.members
    for number in range(400):
        state = after(state, STEPS * (number % 4 == 0), others=STEPS * (number % 2))
    assert EARNED in state.members


@pytest.mark.parametrize("usual", [1, 3, 10])
def test_doing_nothing_loses_a_seat_as_soon_where_few_steps_are_usual(usual: int) -> None:
    """Or a machine would hold its idle keys' seats ten times as long where members take one of ten steps."""
    state = earned()
    for number in range(KEPT_ROUNDS + 1):
        assert EARNED in state.members, number
        state = after(state, others=usual)
    assert EARNED not in state.members


def test_members_go_over_to_a_successor_with_all_the_work_that_a_seat_needs() -> None:
    """What was usual in the run before need not be here: with longer rounds one that is missed would cost the seat."""
    for before, longer, work in ((earned(work=3), 64, KEPT_ROUNDS * 64), (earned(work=3), 3, 0)):
        successor = run_of(recipe=LOCAL | {"local_steps": longer}).sealed(
            manifest="1" * 64, initial_root="2" * 64, founders=[KEYS[0].hex()]
        )
        begun = origin.begun(before, successor, bytes(32))
        assert {each.work for each in begun.admitted if each.key in before.members} == {work}
        assert {each.work for each in begun.admitted if each.key not in before.members} <= {0}


def test_a_doubt_that_cannot_lead_to_a_verdict_keeps_nobody() -> None:
    """Honest sums are often that high in the first rounds of a run, where nobody is summoned for them."""
    for typical, is_free in ((999, True), (1_000, False)):
        state = earned(conduct=replace(WORKS, doubt=900), typical=typical)
        assert may_leave(state, EARNED) is is_free


def test_a_regroup_keeps_the_work_of_those_who_are_left() -> None:
    state = earned().regrouped(bytes(32), MEMBERS[2:5])
    assert entry(state, EARNED).work == KEPT_ROUNDS * STEPS
    assert entry(earned().regrouped(bytes(32), MEMBERS[:3]), EARNED).work == 0


def test_who_is_to_be_measured_cannot_leave_and_come_back_clean() -> None:
    """In a run by allowlist or invitation; a newcomer to an open one is on trial again."""
    leave = Leave(bytes(32), 101, EARNED)
    for summons in ((), (Summons(MEMBERS[0], 99, 99, MEMBERS[1], 0, 0),)):
        state = earned(branch=bytes(32), summons=summons)
        assert check_request(leave, state, AUDITED, DigestSigner()).leave == EARNED
    state = earned(branch=bytes(32), summons=(Summons(EARNED, 99, 99, MEMBERS[1], 0, 0),))
    with pytest.raises(RemoteProtocolError, match="cannot give up its admission"):
        check_request(leave, state, AUDITED, DigestSigner())


@pytest.mark.parametrize(("steps", "credit"), [(10, CREDIT), (0, CREDIT), (11, CREDIT), (1, CREDIT // 10)])
def test_a_pass_of_few_steps_adds_as_little_credit(steps: int, credit: int) -> None:
    """The filter sees few steps as well as many: ten keys of one machine would each have what a member has."""
    state = admitting(size=SIZE, typical=1_500)
    state = state.after(manifest_after(state, {EARNED: steps}), AUDITED)
    found = Measured(MEMBERS[0], EARNED, state.round, 1_500, 1_000, False)
    state = state.after(manifest_after(state, {}, Request(measured=found)), AUDITED)
    assert entry(state, EARNED).conduct.credit == credit - (credit + 1_023) // 1_024


def test_a_round_that_admits_many_lets_no_more_than_the_first_count_at_once() -> None:
    """Whoever comes with more keys than that has one on trial; the last manifest draws which."""
    first, came = AUDITED_FROM - 1, KEYS[8:12]
    for branch in (bytes(32), b"\1" * 32):
        state = replace(admitting(size=first), branch=branch, head=branch)
        joins = [Request(join=Join(key, bytes(32), 0, 0)) for key in came]
        state = state.after(manifest_after(state, {}, *joins), AUDITED)
        assert [entry(state, key).conduct.tier for key in came].count(Tier.COUNTED) == 1
        assert state.counted == AUDITED_FROM
