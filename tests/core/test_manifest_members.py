"""The manifest: joins, leaves, seats, and a roster that never becomes empty."""

from __future__ import annotations

import msgspec
import pytest

from p2ptrain.core.manifest import JOINS_MIN, NO_BEARER, Join, Request, contradiction
from p2ptrain.core.roster import bitmap, quorum_of, tolerated_by
from p2ptrain.core.state import SPENT_MAX, Admitted
from p2ptrain.digest import digest
from tests.helpers.core import KEYS, announced, run_of
from tests.helpers.manifest import (
    ASKED,
    BEARER,
    LATECOMER,
    MEMBERS,
    NEWCOMER,
    OPEN,
    SIZES,
    admitting,
    all_ask,
    all_hold,
    decide,
    empty,
    names,
    quorum,
    said,
    start,
    taken,
)

# ---------------------------------------------------------------------------------------------------
# Joins and leaves


@pytest.mark.parametrize("size", SIZES)
def test_requests_need_q_minus_f_as_well(size: int) -> None:
    state = start(size)
    requests = {ASKED[0]: Request(join=Join(b"\1" * 32, NO_BEARER, 0, 0))}
    least = quorum_of(size) - tolerated_by(size)
    enough = decide(state, quorum(state, least, requests=ASKED[:1]), (), requests)
    too_few = decide(state, quorum(state, least - 1, requests=ASKED[:1]), (), requests)
    assert (enough, too_few) == (empty(state, joins=(Join(b"\1" * 32, NO_BEARER, 0, 0),)), empty(state))


def test_joins_rise_and_each_key_joins_once() -> None:
    state = start()
    one, two = Join(NEWCOMER, NO_BEARER, 0, 0), Join(LATECOMER, NO_BEARER, 0, 0)
    assert all_ask(state, Request(join=two), Request(join=one), Request(join=one)) == empty(state, joins=(one, two))


def test_who_is_here_or_banned_does_not_join() -> None:
    state = start(bans=(NEWCOMER,))
    joins = (Request(join=Join(key, NO_BEARER, 0, 0)) for key in (MEMBERS[0], NEWCOMER))
    assert all_ask(state, *joins) == empty(state)


def test_no_more_join_than_there_is_room_for() -> None:
    run = run_of(admission={"contributors_max": 6})
    state = start()
    requests = [Request(join=Join(key, NO_BEARER, 0, 0)) for key in KEYS[8:13]]
    joins = all_ask(state, *requests, run=run).joins
    assert len(joins) == 2
    assert set(joins) < {Join(key, NO_BEARER, 0, 0) for key in KEYS[8:13]}
    full = run_of(admission={"contributors_max": 4})
    assert all_ask(state, *requests, run=full) == empty(state)


@pytest.mark.parametrize("uses", [1, 2, 3])
def test_an_invitation_admits_as_many_keys_as_it_has_uses(uses: int) -> None:
    state = start()
    joins = tuple(Join(key, BEARER, uses, 9) for key in (NEWCOMER, LATECOMER, KEYS[10]))
    assert len(all_ask(state, *(Request(join=join) for join in joins)).joins) == uses
    later = start(spent=((BEARER, 9),) * 2)
    assert len(all_ask(later, *(Request(join=join) for join in joins)).joins) == max(0, uses - 2)
    others = (Join(NEWCOMER, BEARER, 1, 9), Join(LATECOMER, b"\2" * 32, 1, 9))
    assert all_ask(state, *(Request(join=join) for join in others)).joins == others


def test_a_manifest_grants_few_joins_and_its_parent_draws_them() -> None:
    joins = [Request(join=Join(key, NO_BEARER, 0, 0)) for key in KEYS[8:16]]
    drawn = [
        tuple(join.key for join in all_ask(start(head=digest("manifest test head", bytes([n]))), *joins).joins)
        for n in range(40)
    ]
    assert {len(keys) for keys in drawn} == {JOINS_MIN}
    assert {keys == tuple(sorted(keys)) for keys in drawn} == {True}
    assert len(set(drawn)) > 20
    assert {key for keys in drawn for key in keys} == set(KEYS[8:16])


def test_where_an_open_run_is_full_newcomers_take_the_places_of_keys_that_do_nothing() -> None:
    run = run_of(admission={"contributors_max": 8, "absence_rounds_max": 1})
    idle = [Admitted(key, 0, 1, absent) for key, absent in zip(KEYS[8:12], (0, 3, 9, 1), strict=True)]
    state = admitting(*idle)
    asked = [Request(join=Join(key, NO_BEARER, 0, 0)) for key in KEYS[12:16]]
    manifest = all_ask(state, *asked, run=run)
    assert len(manifest.joins) == 3
    after = state.after(manifest, run)
    assert len(after.admitted) == 8
    assert [key in after.place for key in KEYS[8:12]] == [True, False, False, False]
    fewer = all_ask(state, *asked[:1], run=run)
    assert [key in state.after(fewer, run).place for key in KEYS[8:12]] == [True, True, False, True]
    patient = run_of(admission={"contributors_max": 8, "absence_rounds_max": 4})
    assert len(all_ask(state, *asked, run=patient).joins) == 1
    invited = run_of(admission={"contributors_max": 8, "policy": "allowlist", "keys": [KEYS[9].hex()]})
    assert all_ask(state, *asked, run=invited).joins == ()


def test_an_open_manifest_takes_few_contributions_of_keys_without_a_seat() -> None:
    waiting = [Admitted(key, 0, 0, 0) for key in KEYS[8:16]]
    runs = OPEN, run_of(admission={"policy": "allowlist", "keys": [KEYS[15].hex()]})
    drawn = set()
    for n in range(40):
        state = admitting(*waiting, head=digest("manifest test head", bytes([n])))
        offers = [announced(key, state.round + 1, branch=state.branch) for key in (*state.members, *KEYS[8:16])]
        few, all_of_them = (all_hold(state, *offers, run=run) for run in runs)
        assert {taken.author for taken in few.taken} >= set(state.members)
        assert len(few.taken) == len(state.members) + 1
        assert len(all_of_them.taken) == len(state.members) + 8
        drawn |= {taken.author for taken in few.taken} - set(state.members)
        assert contradiction(few, state, OPEN) is None
        assert "too many" in (contradiction(all_of_them, state, OPEN) or "")
    assert len(drawn) > 4


def test_one_key_with_two_invitations_spends_one() -> None:
    state = start()
    joins = (Join(NEWCOMER, b"\2" * 32, 1, 9), Join(NEWCOMER, BEARER, 1, 9))
    for asked in (joins, joins[::-1]):
        assert all_ask(state, *(Request(join=join) for join in asked)).joins == (joins[1],)


def test_without_invitations_any_number_may_join() -> None:
    """The placeholder serial is not used up by the first join."""
    state = start(spent=((NO_BEARER, 100),))
    joins = tuple(Join(key, NO_BEARER, 0, 0) for key in KEYS[8:11])
    assert all_ask(state, *(Request(join=join) for join in joins)).joins == joins


def test_a_spent_or_expired_invitation_admits_nobody() -> None:
    state = start(spent=((BEARER, 100),), round=9)
    fresh = Join(NEWCOMER, b"\2" * 32, 1, 10)
    expired = Join(LATECOMER, b"\3" * 32, 1, 9)
    spent = Join(KEYS[10], BEARER, 1, 100)
    assert all_ask(state, *(Request(join=join) for join in (fresh, expired, spent))).joins == (fresh,)


def test_when_too_many_invitations_are_remembered_no_more_are_accepted() -> None:
    spent = tuple((number.to_bytes(32, "big"), 100) for number in range(1, SPENT_MAX))
    state = start(spent=spent)
    invited = [Join(NEWCOMER, b"\xfe" * 32, 1, 9), Join(LATECOMER, b"\xff" * 32, 1, 9)]
    manifest = all_ask(state, *(Request(join=join) for join in invited))
    assert manifest.joins == (invited[0],)
    state = state.after(manifest, OPEN)
    assert len(state.spent) == SPENT_MAX
    assert all_ask(state, Request(join=invited[1])) == empty(state)


def test_who_leaves_is_gone_and_nothing_of_it_is_taken() -> None:
    state = start()
    offers = (announced(MEMBERS[0]), announced(MEMBERS[2]))
    named = quorum(state, held=names(*offers), requests=ASKED[:1])
    assert decide(state, named, offers, {ASKED[0]: Request(leave=MEMBERS[2], leave_round=1)}) == empty(
        state, taken=(taken(offers[0]),), leaves=(MEMBERS[2],), unseated=(MEMBERS[2],)
    )


def test_one_without_a_seat_may_leave() -> None:
    state = admitting(Admitted(NEWCOMER, 0, 0, 0))
    assert all_ask(state, Request(leave=NEWCOMER, leave_round=1)) == empty(state, leaves=(NEWCOMER,))


def test_a_leave_from_before_one_came_back_does_nothing() -> None:
    state = admitting(Admitted(MEMBERS[2], 5, 0, 0), round=9)
    assert all_ask(state, Request(leave=MEMBERS[2], leave_round=4)) == empty(state)
    assert all_ask(state, Request(leave=MEMBERS[2], leave_round=5)).leaves == (MEMBERS[2],)
    assert all_ask(state, Request(leave=NEWCOMER, leave_round=5)) == empty(state)


def test_who_leaves_and_is_found_guilty_is_banned() -> None:
    state = start()
    manifest = all_ask(state, Request(leave=MEMBERS[2], leave_round=1), Request(guilty=MEMBERS[2]))
    assert manifest == empty(state, evidence=(ASKED[1],), banned=(MEMBERS[2],), unseated=(MEMBERS[2],))


# ---------------------------------------------------------------------------------------------------
# Absences and seats


@pytest.mark.parametrize("size", SIZES)
def test_who_fewer_than_q_minus_f_heard_is_absent(size: int) -> None:
    state = start(size)
    rest = bitmap(range(size - 1))
    quiet = quorum_of(size) - (quorum_of(size) - tolerated_by(size))  # so many may not hear without consequence
    present = decide(state, quorum(state, quiet, heard=rest))
    absent = decide(state, quorum(state, quiet + 1, heard=rest))
    assert (present, absent) == (empty(state), empty(state, absent=bitmap([size - 1])))


def test_not_being_named_says_nothing() -> None:
    state = start()
    assert decide(state, [said(state, key) for key in MEMBERS[1:]]) == empty(state)


def test_seats_that_nobody_has_are_heard_by_nobody() -> None:
    state = start()
    assert decide(state, quorum(state, heard=bitmap(range(256)))) == empty(state)


@pytest.mark.parametrize(("absent", "goes"), [(8, False), (9, True), (50, True)])
def test_who_is_absent_for_too_long_loses_its_seat(absent: int, goes: bool) -> None:
    state = admitting(Admitted(MEMBERS[1], 0, 3, absent))
    manifest = decide(state, quorum(state, heard=bitmap([0, 2, 3])))
    assert manifest == empty(state, absent=bitmap([1]), unseated=(MEMBERS[1],) if goes else ())


def test_who_is_heard_again_in_time_keeps_its_seat() -> None:
    state = admitting(Admitted(MEMBERS[1], 0, 3, 9))
    assert decide(state, quorum(state)) == empty(state)


def test_a_newcomer_gets_a_seat_with_the_contribution_that_ends_its_probation() -> None:
    state = admitting(Admitted(NEWCOMER, 0, 1, 0))
    offer = announced(NEWCOMER)
    assert decide(state, quorum(state)) == empty(state)
    assert all_hold(state, offer) == empty(state, taken=(taken(offer),), seated=(NEWCOMER,))
    first = admitting(Admitted(NEWCOMER, 0, 0, 0))
    assert all_hold(first, offer) == empty(first, taken=(taken(offer),))


@pytest.mark.parametrize(("size", "seats"), [(1, 1), (2, 1), (4, 1), (7, 1), (8, 2), (11, 2), (12, 3)])
def test_a_manifest_gives_few_seats_to_those_who_wait_longest(size: int, seats: int) -> None:
    waiting = [Admitted(KEYS[12 + place], since, 9, 0) for place, since in enumerate((7, 5, 8, 6))]
    state = admitting(*waiting, size=size)
    longest = sorted(waiting, key=lambda entry: entry.since)[:seats]
    assert decide(state, quorum(state)).seated == tuple(sorted(entry.key for entry in longest))


def test_of_those_who_came_together_the_key_alone_does_not_decide_who_is_first() -> None:
    waiting = [Admitted(key, 5, 9, 0) for key in KEYS[4:]]
    state = admitting(*waiting)
    first = {
        decide(msgspec.structs.replace(state, head=digest("manifest test head", bytes([number]))), []).seated
        for number in range(40)
    }
    assert len(first) > 5


@pytest.mark.parametrize(("seats_max", "seated"), [(3, 0), (4, 0), (5, 1), (6, 2), (7, 2)])
def test_no_more_have_seats_than_there_are(seats_max: int, seated: int) -> None:
    run = run_of(admission={"seats_max": seats_max})
    members = KEYS[:8]
    state = admitting(*(Admitted(key, 0, 9, 0) for key in KEYS[8:12]), size=8)
    leaving = [Request(leave=key, leave_round=1) for key in members[:4]]
    manifest = all_ask(state, *leaving, run=run)
    assert (len(manifest.seated), manifest.unseated) == (seated, members[:4])
    assert len(state.after(manifest, run).members) == 4 + seated


def test_who_goes_does_not_come_in_by_the_same_manifest() -> None:
    waiting = Admitted(NEWCOMER, 0, 9, 0)
    state = admitting(waiting, Admitted(MEMBERS[1], 0, 9, 9))
    leaves = all_ask(state, Request(leave=NEWCOMER, leave_round=1))
    assert (leaves.seated, leaves.leaves) == ((), (NEWCOMER,))
    gone = decide(admitting(Admitted(MEMBERS[1], 0, 9, 9)), quorum(state, heard=bitmap([0, 2, 3])))
    assert (gone.seated, gone.unseated) == ((), (MEMBERS[1],))


def test_without_probation_a_newcomer_is_seated_in_the_round_after_it_joined() -> None:
    run = run_of(admission={"probation_rounds": 0})
    state = start()
    manifest = all_ask(state, Request(join=Join(NEWCOMER, NO_BEARER, 0, 0)), run=run)
    assert manifest == empty(state, joins=(Join(NEWCOMER, NO_BEARER, 0, 0),))
    following = state.after(manifest, run)
    assert decide(following, quorum(following), run=run).seated == (NEWCOMER,)


# ---------------------------------------------------------------------------------------------------
# A roster is never empty


def test_the_last_member_does_not_go() -> None:
    state = start(1)
    assert all_ask(state, Request(leave=KEYS[0], leave_round=1)) == empty(state)
    assert all_ask(state, Request(guilty=KEYS[0])).banned == ()
    absent = admitting(Admitted(KEYS[0], 0, 0, 99), size=1)
    assert decide(absent, quorum(absent, heard=b"")) == empty(absent, absent=bitmap([0]))


def test_when_all_would_go_nobody_does() -> None:
    state = start()
    requests = [Request(guilty=MEMBERS[0]), *(Request(leave=key, leave_round=1) for key in MEMBERS[1:])]
    manifest = all_ask(state, *requests)
    assert (manifest.banned, manifest.leaves, manifest.unseated) == ((), (), ())
    assert state.after(manifest, OPEN).members == MEMBERS


def test_when_all_would_go_those_without_a_seat_still_do() -> None:
    state = admitting(Admitted(NEWCOMER, 0, 0, 0), Admitted(LATECOMER, 0, 0, 0), size=1)
    requests = [Request(leave=key, leave_round=1) for key in (KEYS[0], NEWCOMER)]
    assert all_ask(state, *requests, Request(guilty=LATECOMER)) == empty(
        state, evidence=(ASKED[2],), leaves=(NEWCOMER,), banned=(LATECOMER,)
    )


def test_all_but_one_may_go() -> None:
    state = start()
    manifest = all_ask(state, *(Request(leave=key, leave_round=1) for key in MEMBERS[1:]))
    assert manifest == empty(state, leaves=MEMBERS[1:], unseated=MEMBERS[1:])
    assert state.after(manifest, OPEN).members == MEMBERS[:1]
