"""The agreed state: a function of the state and the manifest alone, in which nothing grows without bound."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.config import RunConfig
from p2ptrain.core.audits import Summons
from p2ptrain.core.manifest import NO_BEARER, Join, Manifest
from p2ptrain.core.messages import SHORT_BYTES, Announcement
from p2ptrain.core.roster import bitmap
from p2ptrain.core.state import BANS_MAX, UNSEATED_ABSENCES, WINDOW_MAX, Admitted, AgreedState, Taken, genesis
from p2ptrain.core.succession import Succession
from p2ptrain.digest import digest
from p2ptrain.share import PassSlots
from tests.helpers.core import KEYS, ROOT0, RUN, announced, root_of, run_of

MEMBERS, NEWCOMER, LATECOMER = KEYS[:4], KEYS[8], KEYS[9]
BRANCH = digest("state test", b"branch")
PAYLOAD = digest("state test", b"payload")
OPEN = run_of()
INVITE = run_of(admission={"policy": "invite", "keys": [KEYS[15].hex()]})
_DECODER = msgspec.msgpack.Decoder(AgreedState)


def start(members: tuple[bytes, ...] = MEMBERS) -> AgreedState:
    return genesis(RUN, members, ROOT0)


def manifest(state: AgreedState, **changes: Any) -> Manifest:
    """The next manifest, empty except for the given changes."""
    fields: dict[str, Any] = {"root_round": state.root_round, "root": state.root, "absent": b""}
    fields |= dict.fromkeys(("taken", "refused", "evidence", "joins", "leaves", "banned", "seated", "unseated"), ())
    return Manifest(state.branch, state.round + 1, state.head, state.digest, **(fields | changes))


def content(author: bytes, number: int) -> bytes:
    return digest("content of a test", author, bytes([number]))[:SHORT_BYTES]


def taking(state: AgreedState, *authors: bytes, number: int | None = None, base: int | None = None) -> Manifest:
    """The next manifest, with these authors' contributions for its own round or another."""
    of = state.round + 1 if number is None else number
    taken = tuple(
        Taken(author, of, of - 1 if base is None else base, PAYLOAD, 1, 1, content(author, of))
        for author in sorted(authors)
    )
    return manifest(state, taken=taken)


def after(state: AgreedState, run: RunConfig = OPEN, **changes: Any) -> AgreedState:
    return state.after(manifest(state, **changes), run)


def entry(state: AgreedState, key: bytes) -> Admitted | None:
    return next((each for each in state.admitted if each.key == key), None)


def with_newcomer(
    run: RunConfig = OPEN, key: bytes = NEWCOMER, bearer: bytes = NO_BEARER, last: int = 0
) -> AgreedState:
    return after(start(), run, joins=(Join(key, bearer, 1, last),))


# ---------------------------------------------------------------------------------------------------
# What it is


def test_a_run_begins_like_this() -> None:
    assert start((KEYS[2], KEYS[0])) == AgreedState(
        branch=RUN,
        round=0,
        head=RUN,
        members=(KEYS[0], KEYS[2]),
        admitted=(Admitted(KEYS[0], 0, 0, 0), Admitted(KEYS[2], 0, 0, 0)),
        bans=(),
        window=(),
        filled=(),
        spent=(),
        root_round=0,
        root=ROOT0,
        assigned=0,
    )


def test_an_empty_manifest_moves_the_round_and_the_head_and_nothing_else() -> None:
    state = start()
    empty = manifest(state)
    assert state.after(empty, OPEN) == msgspec.structs.replace(state, round=1, head=empty.digest)


def test_a_manifest_moves_the_certified_root() -> None:
    state = after(start(), root_round=0, root=root_of(7))
    assert (state.root_round, state.root) == (0, root_of(7))


def test_a_manifest_of_another_state_is_our_own_mistake() -> None:
    state = start()
    with pytest.raises(AssertionError):
        state.after(msgspec.structs.replace(manifest(state), state=BRANCH), OPEN)


def test_what_was_looked_up_does_not_change_the_state_or_its_encoding() -> None:
    state = with_newcomer()
    plain = msgspec.msgpack.encode(state)
    looked_up = (state.digest, state.place, state.banned, state.taken, state.roster)
    assert looked_up[1] == {key: place for place, key in enumerate((*MEMBERS, NEWCOMER))}
    assert msgspec.msgpack.encode(state) == plain
    assert _DECODER.decode(plain) == state
    assert _DECODER.decode(plain).digest == state.digest
    regrouped = state.regrouped(BRANCH, MEMBERS[:3])
    fresh = _DECODER.decode(msgspec.msgpack.encode(regrouped))
    assert (regrouped.digest, regrouped.place, regrouped.roster) == (fresh.digest, fresh.place, fresh.roster)


def test_every_part_of_the_state_is_in_its_digest() -> None:
    state = start()
    others: dict[str, Any] = {
        "branch": BRANCH,
        "round": 1,
        "head": BRANCH,
        "members": MEMBERS[:3],
        "admitted": state.admitted[:3],
        "bans": (NEWCOMER,),
        "window": ((MEMBERS[0], 1, bytes(16)),),
        "filled": (1,),
        "spent": ((NO_BEARER, 1),),
        "root_round": 1,
        "root": BRANCH,
        "assigned": 1,
        "taken_lately": ((MEMBERS[0], 1, 1),),
        "typical": 1,
        "summons": (Summons(MEMBERS[0], 1, 1, MEMBERS[1], 0, 0),),
        "succession": Succession(since=1),
    }
    assert list(others) == list(AgreedState.__struct_fields__)
    digests = {msgspec.structs.replace(state, **{name: value}).digest for name, value in others.items()}
    assert len({state.digest, *digests}) == len(others) + 1


# ---------------------------------------------------------------------------------------------------
# Staleness and the window


def offer(number: int, base: int, author: bytes = MEMBERS[0], branch: bytes = RUN) -> Announcement:
    return announced(author, number, branch=branch, base_round=base)


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_contribution_may_be_as_many_filled_rounds_old_and_no_more(staleness: int) -> None:
    """Empty rounds do not count: they changed no weights."""
    run = run_of({"staleness_rounds_max": staleness})
    state = start()
    for number in range(1, 13):
        state = state.after(taking(state, MEMBERS[1]) if number % 2 else manifest(state), run)  # odd ones are filled
        filled = [each for each in range(1, number + 1) if each % 2]
        for base in range(number + 1):
            between = [each for each in filled if each > base]
            assert state.may_take(offer(number + 1, base), staleness) == (len(between) <= staleness)


def test_a_contribution_to_a_later_round_waits() -> None:
    state = start()
    assert [state.may_take(offer(number, 0), 0) for number in (1, 2, 3)] == [True, False, False]


def test_only_admitted_authors_of_this_branch_are_taken() -> None:
    state = start()
    assert state.may_take(offer(1, 0), 0)
    assert not state.may_take(offer(1, 0, NEWCOMER), 0)
    assert not state.may_take(offer(1, 0, branch=BRANCH), 0)
    assert with_newcomer().may_take(offer(2, 1, NEWCOMER), 0)
    regrouped = state.regrouped(BRANCH, MEMBERS[:3])
    assert not regrouped.may_take(offer(1, 0), 0)
    assert regrouped.may_take(offer(1, 0, branch=BRANCH), 0)


@pytest.mark.parametrize("staleness", [0, 2, 64])
@given(data=st.data())
def test_each_author_and_round_is_taken_once_ever(staleness: int, data: st.DataObject) -> None:
    """However often and in whatever form a contribution is offered again, and whatever was taken in between."""
    run = run_of({"staleness_rounds_max": staleness})
    state, ever = start(), set[tuple[bytes, int]]()
    for number in range(1, data.draw(st.integers(1, 12)) + 1):
        chosen: list[Taken] = []
        for author in MEMBERS:
            of = data.draw(st.integers(1, number))
            base = data.draw(st.integers(0, of - 1))
            if state.may_take(offer(of, base, author), staleness):
                assert (author, of) not in ever
                chosen.append(Taken(author, of, base, PAYLOAD, 1, 1, content(author, of)))
                ever.add((author, of))
        state = after(state, run, taken=tuple(chosen))
        assert state.window == tuple(sorted(state.window))
        assert {entry[:2] for entry in state.window} <= ever


def test_the_window_keeps_what_could_be_taken_again_and_forgets_the_rest() -> None:
    run = run_of({"staleness_rounds_max": 1})
    state = start()
    for _ in range(5):
        state = state.after(taking(state, MEMBERS[1], MEMBERS[0]), run)
    assert state.filled == (4, 5)
    kept = [entry[:2] for entry in state.window]
    assert kept == [(MEMBERS[0], 4), (MEMBERS[0], 5), (MEMBERS[1], 4), (MEMBERS[1], 5)]
    late = state.after(taking(state, MEMBERS[2], number=5, base=4), run)  # of round 5, in round 6
    assert late.filled == (5, 6)
    assert [entry[:2] for entry in late.window] == [(MEMBERS[0], 5), (MEMBERS[1], 5), (MEMBERS[2], 5)]


def test_empty_rounds_push_nothing_out_of_the_window() -> None:
    run = run_of({"staleness_rounds_max": 1})
    state = start()
    for _ in range(3):
        state = state.after(taking(state, MEMBERS[0]), run)
    for _ in range(100):
        state = state.after(manifest(state), run)
    assert (state.filled, [entry[:2] for entry in state.window]) == ((2, 3), [(MEMBERS[0], 2), (MEMBERS[0], 3)])


def test_the_longest_window_is_within_its_bound() -> None:
    run = run_of({"staleness_rounds_max": 64})
    state = start()
    for _ in range(200):
        state = state.after(taking(state, *MEMBERS), run)
    assert (len(state.filled), len(state.window)) == (65, 65 * len(MEMBERS))
    assert len(state.window) * 1_024 == WINDOW_MAX * len(MEMBERS)
    assert _DECODER.decode(msgspec.msgpack.encode(state)) == state


# ---------------------------------------------------------------------------------------------------
# Absences


def test_absences_count_in_a_row_and_start_again_when_heard() -> None:
    state, counted = start(), []
    for absent in ([1], [1, 2], [1], [], [1]):
        state = after(state, absent=bitmap(absent))
        counted.append(tuple(each.absent for each in state.admitted))
    assert counted == [(0, 1, 0, 0), (0, 2, 1, 0), (0, 3, 0, 0), (0, 0, 0, 0), (0, 1, 0, 0)]


def test_a_member_need_not_contribute_and_the_rest_need_not_be_heard() -> None:
    """A member that votes is useful; the others are judged by their contributions."""
    state = with_newcomer()
    state = state.after(taking(state, NEWCOMER), OPEN)
    for _ in range(3):
        state = after(state)
    assert [each.absent for each in state.admitted] == [0, 0, 0, 0, 3]
    state = state.after(taking(state, NEWCOMER), OPEN)
    assert entry(state, NEWCOMER) == Admitted(NEWCOMER, 1, 2, 0)


def test_who_loses_its_seat_stays_admitted_and_starts_again() -> None:
    state = start()
    for _ in range(2):
        state = state.after(taking(state, *MEMBERS), OPEN)
    state = after(state, absent=bitmap([1]), unseated=(MEMBERS[1],))
    assert state.members == (MEMBERS[0], *MEMBERS[2:])
    assert [(each.since, each.taken, each.absent) for each in state.admitted] == [
        (0, 2, 0), (0, 0, 0), (0, 2, 0), (0, 2, 0),
    ]  # fmt: skip
    assert state.may_take(offer(4, 3, MEMBERS[1]), 0)


def test_what_was_taken_in_the_round_that_unseated_it_does_not_count() -> None:
    state = start()
    last = msgspec.structs.replace(taking(state, MEMBERS[1]), unseated=(MEMBERS[1],), absent=bitmap([1]))
    assert entry(state.after(last, OPEN), MEMBERS[1]) == Admitted(MEMBERS[1], 0, 0, 0)


def test_an_open_run_gives_up_on_one_that_never_offers_anything() -> None:
    run = run_of(admission={"absence_rounds_max": 1})
    state = with_newcomer(run)
    for _ in range(UNSEATED_ABSENCES):
        state = after(state, run)
    assert entry(state, NEWCOMER) == Admitted(NEWCOMER, 1, 0, UNSEATED_ABSENCES)
    state = after(state, run)
    assert [each.key for each in state.admitted] == list(MEMBERS)
    assert state.bans == ()


def test_one_contribution_in_time_keeps_its_place() -> None:
    run = run_of(admission={"absence_rounds_max": 1})
    state = with_newcomer(run)
    for _ in range(3):
        for _ in range(UNSEATED_ABSENCES):
            state = after(state, run)
        state = state.after(taking(state, NEWCOMER), run)
    assert entry(state, NEWCOMER) == Admitted(NEWCOMER, 1, 3, 0)


def test_who_was_invited_is_not_given_up() -> None:
    run = run_of(admission={"absence_rounds_max": 1, "policy": "invite", "keys": [KEYS[15].hex()]})
    state = with_newcomer(run, bearer=bytes(range(32)), last=10)
    for _ in range(2 * UNSEATED_ABSENCES):
        state = after(state, run)
    assert entry(state, NEWCOMER) == Admitted(NEWCOMER, 1, 0, 2 * UNSEATED_ABSENCES)


def test_a_member_that_nobody_may_replace_stays_admitted_however_long_it_is_unheard() -> None:
    run = run_of(admission={"absence_rounds_max": 1})
    state = start(MEMBERS[:1])
    for _ in range(2 * UNSEATED_ABSENCES):
        state = after(state, run, absent=bitmap([0]))
    assert (state.members, state.admitted) == (MEMBERS[:1], (Admitted(MEMBERS[0], 0, 0, 2 * UNSEATED_ABSENCES),))


def test_a_member_that_never_offers_anything_keeps_its_seat() -> None:
    run = run_of(admission={"absence_rounds_max": 1})
    state = start()
    for _ in range(2 * UNSEATED_ABSENCES):
        state = after(state, run)
    assert state.members == MEMBERS
    assert [each.absent for each in state.admitted] == [0] * 4


# ---------------------------------------------------------------------------------------------------
# Who comes and who goes


def test_who_joins_is_admitted_from_that_round_on_without_a_seat() -> None:
    state = with_newcomer()
    assert state.members == MEMBERS
    assert state.admitted == (*(Admitted(key, 0, 0, 0) for key in MEMBERS), Admitted(NEWCOMER, 1, 0, 0))


def test_admitted_keys_rise_wherever_a_newcomer_belongs() -> None:
    low = bytes(32)
    state = after(start(), joins=(Join(low, NO_BEARER, 0, 0), Join(NEWCOMER, NO_BEARER, 0, 0)))
    assert [each.key for each in state.admitted] == [low, *MEMBERS, NEWCOMER]
    assert state.place[low] == 0


def test_a_seat_is_a_place_among_the_members() -> None:
    state = with_newcomer()
    state = state.after(taking(state, NEWCOMER), OPEN)
    state = after(state, seated=(NEWCOMER,), absent=bitmap([2]))
    assert state.members == (*MEMBERS, NEWCOMER)
    assert state.roster.seat[NEWCOMER] == 4
    assert entry(state, NEWCOMER) == Admitted(NEWCOMER, 1, 1, 0)
    state = after(state, absent=bitmap([4]))  # the bitmap is of the roster before
    assert entry(state, NEWCOMER) == Admitted(NEWCOMER, 1, 1, 1)


def test_absences_are_read_in_the_seats_of_the_roster_that_decided() -> None:
    state = after(start(), absent=bitmap([3]), unseated=(MEMBERS[0],))
    assert [each.absent for each in state.admitted] == [0, 0, 0, 1]


def test_who_leaves_is_gone_and_may_come_back() -> None:
    state = after(start(), leaves=(MEMBERS[1],), unseated=(MEMBERS[1],))
    assert (state.members, state.bans) == ((MEMBERS[0], *MEMBERS[2:]), ())
    assert entry(state, MEMBERS[1]) is None
    state = after(state, joins=(Join(MEMBERS[1], NO_BEARER, 0, 0),))
    assert entry(state, MEMBERS[1]) == Admitted(MEMBERS[1], 2, 0, 0)


def test_who_is_banned_is_gone_and_remembered() -> None:
    state = after(with_newcomer(), banned=(MEMBERS[1], NEWCOMER), unseated=(MEMBERS[1],))
    assert state.members == (MEMBERS[0], *MEMBERS[2:])
    assert [each.key for each in state.admitted] == [MEMBERS[0], *MEMBERS[2:]]
    assert state.bans == (MEMBERS[1], NEWCOMER)
    assert state.banned == {MEMBERS[1], NEWCOMER}


def test_of_too_many_bans_the_oldest_are_forgotten() -> None:
    old = tuple(digest("state test key", number.to_bytes(2, "little")) for number in range(BANS_MAX))
    state = msgspec.structs.replace(with_newcomer(), bans=old)
    state = after(state, banned=(NEWCOMER,))
    assert state.bans == (*old[1:], NEWCOMER)
    assert _DECODER.decode(msgspec.msgpack.encode(state)) == state


def test_the_roster_object_stays_while_nobody_comes_or_goes() -> None:
    """Its seats are looked up for every message, and must not be computed anew each round."""
    state = start()
    following = after(state, joins=(Join(NEWCOMER, NO_BEARER, 0, 0),))
    assert following.members is state.members
    assert following.roster is state.roster


# ---------------------------------------------------------------------------------------------------
# Invitations


def test_an_invitation_is_remembered_until_it_expires() -> None:
    first, second = b"\2" * 16, b"\1" * 16
    state = after(start(), INVITE, joins=(Join(NEWCOMER, first, 1, 3), Join(LATECOMER, second, 1, 4)))
    remembered = [state.spent]
    for _ in range(3):
        state = after(state, INVITE)
        remembered.append(state.spent)
    assert remembered == [((second, 4), (first, 3)), ((second, 4), (first, 3)), ((second, 4),), ()]


def test_who_needed_no_invitation_spends_none() -> None:
    assert with_newcomer().spent == ()


# ---------------------------------------------------------------------------------------------------
# Branches


def test_a_branch_starts_in_the_same_round_with_fewer_members() -> None:
    state = with_newcomer()
    for _ in range(2):
        state = state.after(taking(state, *MEMBERS, NEWCOMER), OPEN)
    state = after(state, absent=bitmap([1, 3]))
    regrouped = state.regrouped(BRANCH, MEMBERS[:3])
    assert regrouped == msgspec.structs.replace(
        state,
        branch=BRANCH,
        head=BRANCH,
        members=MEMBERS[:3],
        succession=Succession(since=4),
        admitted=(
            *(Admitted(key, 0, 2, 0) for key in MEMBERS[:3]),
            Admitted(MEMBERS[3], 0, 0, 0),
            Admitted(NEWCOMER, 1, 0, 0),
        ),
    )
    assert regrouped.round == state.round
    assert regrouped.after(manifest(regrouped), OPEN).branch == BRANCH


def test_only_members_begin_a_branch() -> None:
    with pytest.raises(AssertionError):
        with_newcomer().regrouped(BRANCH, (*MEMBERS[:3], NEWCOMER))


# ---------------------------------------------------------------------------------------------------
# Determinism


@given(st.permutations(MEMBERS))
def test_the_order_in_which_founders_are_named_does_not_matter(members: list[bytes]) -> None:
    assert start(tuple(members)).digest == start().digest


def test_the_state_is_a_part_of_the_protocol() -> None:
    """Any other result would need a new protocol version; the expected bytes can be written down without this code."""
    keys = tuple(bytes([number]) * 32 for number in range(4))
    state = genesis(bytes(32), keys, b"\7" * 32)
    state = state.after(taking(state, keys[0], keys[2]), OPEN)
    state = after(
        state, joins=(Join(b"\5" * 32, b"\3" * 32, 1, 9),), banned=(keys[1],), unseated=(keys[1],), absent=b"\1"
    )
    members = [keys[0], keys[2], keys[3]]
    clean = [1, 0, 0, 0, [], 0, 0, 0, 0, 0]
    counts = [(keys[0], 0, 1, 1), (keys[2], 0, 1, 0), (keys[3], 0, 0, 0), (b"\5" * 32, 2, 0, 0)]
    admitted = [[*each, 0, clean, 0] for each in counts]
    taken = [keys[0], 1, 1], [keys[2], 1, 1]
    window, spent = [[*each[:2], content(each[0], 1)] for each in taken], [[b"\3" * 32, 9]]
    plain = [bytes(32), 2, state.head, members, admitted, [keys[1]], window, [1], spent]
    plain += [0, b"\7" * 32, 0, taken, 0, [], [[], [], None, 0]]
    assert state.digest == digest("agreed state", msgspec.msgpack.encode(plain))
    assert (state.head.hex(), state.digest.hex()) == (
        "08b55fe8839efd03ba8746a13c4cd405934b75c5e9ac038900f7bcda5c794331",
        "f65675eead57f33f3d07756966c8373b69811d4dd728c975233cfa159a40efa5",
    )


# ---------------------------------------------------------------------------------------------------
# By capability

TEN_STEPS = {"local_steps": 10, "passes_per_step": 2, "sequences_per_pass": 3}
BY_CAPABILITY = run_of(data={"assignment": "capability"}, recipe=TEN_STEPS)


def stepping(state: AgreedState, *steps: int, run: RunConfig = BY_CAPABILITY) -> AgreedState:
    """The state after a round in which the members contributed so many steps; 0: nothing."""
    number = state.round + 1
    pairs = zip(MEMBERS, steps, strict=False)
    taken = tuple(
        Taken(key, number, state.round, PAYLOAD, 1, each, content(key, number)) for key, each in pairs if each
    )
    return state.after(manifest(state, taken=taken), run)


def shares_of(state: AgreedState) -> list[tuple[int, int]]:
    """Returns where each member's slots of the next round begin, and how many there are, in steps."""
    found = [each for key in state.members if (each := state.slots_of(key, state.round + 1, BY_CAPABILITY))]
    assert len(found) == len(state.members)
    assert {each.total for each in found} == {sum(each.size for each in found)}
    return [((each.start + each.first) // 6, each.size // 6) for each in found]


def test_members_get_data_for_as_many_steps_as_they_took_one_after_the_other() -> None:
    state = start()
    assert shares_of(state) == [(0, 10), (10, 10), (20, 10), (30, 10)]
    state = stepping(state, 10, 7, 9, 12)
    assert [entry.steps for entry in state.admitted] == [10, 7, 9, 10]  # at most what a round has
    assert shares_of(state) == [(40, 10), (50, 7), (57, 9), (66, 10)]
    assert state.slots_of(MEMBERS[1], 3, BY_CAPABILITY) == PassSlots(
        (40 + 36) * 6, 36 * 6, 10 * 6, 7 * 6
    )  # a round ahead
    state = stepping(state, 10, 10, 9, 10)
    assert shares_of(state) == [(76, 10), (86, 10), (96, 9), (105, 10)]


def test_one_slow_round_changes_little_and_who_is_away_gets_less_each_round() -> None:
    state, fading = start(), []
    for _ in range(8):
        state = stepping(state, 10, 1, 0)
        fading.append(tuple(entry.steps for entry in state.admitted))
    assert fading[0] == (10, 7, 7, 7)
    assert fading[-1] == (10, 1, 1, 1)
    assert fading == sorted(fading, reverse=True)
    assert [entry.steps for entry in stepping(state, 10, 10, 0).admitted] == [10, 10, 1, 1]


def test_nobody_gets_less_than_the_fewest_steps_of_a_round() -> None:
    for least, kept in ((4, 4), (0, 10)):  # 0: always all
        run = run_of(data={"assignment": "capability"}, recipe=TEN_STEPS | {"local_steps_min": least})
        state = start()
        for _ in range(9):
            state = stepping(state, 10, 1, run=run)
        assert [entry.steps for entry in state.admitted] == [10, kept, kept, kept]


def test_a_newcomer_gets_all_steps_and_a_branch_keeps_what_is_known() -> None:
    state = stepping(start(), 10, 7, 9, 10)
    joined = state.after(manifest(state, joins=(Join(NEWCOMER, NO_BEARER, 1, 0),)), BY_CAPABILITY)
    slots = joined.slots_of(NEWCOMER, 3, BY_CAPABILITY)
    assert slots is not None and slots.size == 60
    apart = state.regrouped(BRANCH, MEMBERS[:2])
    assert [entry.steps for entry in apart.admitted] == [10, 7, 9, 10]
    assert apart.assigned == state.assigned == 40


def test_other_policies_keep_no_account_of_steps() -> None:
    state = stepping(start(), 10, 1, run=OPEN)
    assert (state.assigned, {entry.steps for entry in state.admitted}) == (0, {0})
    assert state.slots_of(MEMBERS[0], 2, OPEN) is None


def test_the_account_of_steps_stays_a_number_that_can_be_encoded() -> None:
    state = stepping(msgspec.structs.replace(start(), assigned=2**48 - 1), 10)
    assert state.assigned == 39
    assert _DECODER.decode(msgspec.msgpack.encode(state)) == state
