"""The manifest: contains exactly what q - f of the named members attest, and is the same for everyone."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.core.manifest import (
    ASKED_MAX,
    REFUSED_MAX,
    Join,
    Manifest,
    Missing,
    Request,
    attested,
    manifest_of,
)
from p2ptrain.core.messages import (
    HELD_MAX,
    REQUESTS_MAX,
    SEATS_MAX,
    Announcement,
)
from p2ptrain.core.roster import bitmap, quorum_of, roster_of, tolerated_by
from p2ptrain.core.state import Admitted, genesis
from p2ptrain.digest import digest
from tests.helpers.core import KEYS, ROOT0, RUN, announced, name_of, root_of
from tests.helpers.manifest import (
    ASKED,
    BEARER,
    MEMBERS,
    NEWCOMER,
    OPEN,
    SIZES,
    STALE,
    admitting,
    all_ask,
    all_hold,
    decide,
    empty,
    names,
    nobody,
    quorum,
    said,
    start,
    taken,
)

# ---------------------------------------------------------------------------------------------------
# Contributions


def test_contributions_are_taken_in_the_order_of_their_authors() -> None:
    state = start()
    offers = tuple(announced(key) for key in MEMBERS)
    assert all_hold(state, *offers) == empty(state, taken=tuple(taken(offer) for offer in offers))


def test_a_manifest_follows_its_state() -> None:
    state = start()
    state = state.after(all_hold(state, announced(MEMBERS[0])), OPEN)
    offer = announced(MEMBERS[1], 2)
    assert all_hold(state, offer) == empty(state, taken=(taken(offer),))
    assert empty(state).parent == state.head != RUN


def test_an_empty_manifest_is_valid() -> None:
    state = start()
    assert decide(state, quorum(state)) == empty(state)


@pytest.mark.parametrize("size", SIZES)
def test_q_minus_f_of_the_named_make_it_true_and_one_less_does_not(size: int) -> None:
    state = start(size)
    offer = announced(KEYS[0])
    least = quorum_of(size) - tolerated_by(size)
    enough = decide(state, quorum(state, least, held=names(offer)), (offer,))
    too_few = decide(state, quorum(state, least - 1, held=names(offer)), (offer,))
    assert (enough, too_few) == (empty(state, taken=(taken(offer),)), empty(state))


@pytest.mark.parametrize("size", SIZES)
def test_what_the_honest_attest_gets_in_whoever_is_named_and_what_only_liars_attest_does_not(size: int) -> None:
    rng = random.Random(size)
    state, roster = start(size), roster_of(KEYS[:size])
    honest_offer, false_offer = announced(KEYS[0]), announced(KEYS[0], which=b"which nobody has")
    for _ in range(50):
        liars = set(rng.sample(roster.members, roster.tolerated))
        named = [
            said(state, key, held=names(false_offer if key in liars else honest_offer))
            for key in rng.sample(roster.members, roster.quorum)
        ]
        assert decide(state, named, (honest_offer, false_offer)) == empty(state, taken=(taken(honest_offer),))


def test_who_is_named_beyond_a_quorum_adds_its_voice() -> None:
    """A proposal that names everyone's availabilities needs as many attestations as any other."""
    state = start(7)
    offer = announced(KEYS[0])
    for times in (2, 3, 4):
        named = [said(state, key, held=names(offer) if seat < times else ()) for seat, key in enumerate(state.members)]
        assert decide(state, named, (offer,)) == empty(state, taken=(taken(offer),) if times >= 3 else ())


def test_of_one_author_the_oldest_is_taken() -> None:
    state = start()
    old, new = announced(MEMBERS[0], 2, base_round=0), announced(MEMBERS[0], 3, base_round=0)
    for _ in range(2):
        state = state.after(all_hold(state), STALE)
    assert all_hold(state, old, new, run=STALE).taken == (taken(old),)
    following = state.after(all_hold(state, old, new, run=STALE), STALE)
    assert all_hold(following, old, new, run=STALE).taken == (taken(new),)


def test_an_older_one_that_too_few_hold_does_not_keep_the_newer_out() -> None:
    state = start()
    for _ in range(2):
        state = state.after(all_hold(state), STALE)
    old, new = announced(MEMBERS[0], 2, base_round=0), announced(MEMBERS[0], 3, base_round=0)
    named = [said(state, key, held=names(old, new) if seat < 1 else names(new)) for seat, key in enumerate(MEMBERS[:3])]
    assert decide(state, named, (old, new), run=STALE).taken == (taken(new),)


UNTAKEABLE = {
    "of a stranger": announced(NEWCOMER, 4),
    "of a later round": announced(MEMBERS[0], 5),
    "of another branch": announced(MEMBERS[0], 4, branch=ROOT0),
    "taken before": announced(MEMBERS[0], 3),
    "too old": announced(MEMBERS[0], 4, base_round=0),
}


@pytest.mark.parametrize("what", UNTAKEABLE)
def test_what_may_not_be_taken_is_neither_taken_nor_refused_even_if_all_attest_it(what: str) -> None:
    state = start()
    for number in (1, 2, 3):
        state = state.after(all_hold(state, *(announced(key, number) for key in MEMBERS), run=STALE), STALE)
    offer, good = UNTAKEABLE[what], announced(MEMBERS[0], 4, base_round=1)
    assert all_hold(state, offer, run=STALE) == empty(state)
    assert decide(state, quorum(state, refused=names(offer)), (offer,), run=STALE) == empty(state)
    assert all_hold(state, good, run=STALE) == empty(state, taken=(taken(good),))


# ---------------------------------------------------------------------------------------------------
# Lies


def test_two_for_one_round_that_are_both_attested_are_both_out_and_their_author_too() -> None:
    state = start()
    first, second, good = announced(MEMBERS[1]), announced(MEMBERS[1], which=b"another"), announced(MEMBERS[0])
    assert all_hold(state, first, second, good) == empty(
        state, taken=(taken(good),), banned=(MEMBERS[1],), unseated=(MEMBERS[1],)
    )


def test_an_older_contribution_of_one_that_lied_is_out_as_well() -> None:
    state = start()
    state = state.after(all_hold(state), STALE)
    old = announced(MEMBERS[1], 1)
    first, second = announced(MEMBERS[1], 2), announced(MEMBERS[1], 2, which=b"another")
    assert all_hold(state, old, first, second, run=STALE) == empty(state, banned=(MEMBERS[1],), unseated=(MEMBERS[1],))


def test_a_conflict_below_the_threshold_means_nothing() -> None:
    """The only member that attests the second one may be the liar."""
    state = start()
    first, second = announced(MEMBERS[1]), announced(MEMBERS[1], which=b"another")
    named = [
        said(state, key, held=names(first, second) if seat == 0 else names(first))
        for seat, key in enumerate(MEMBERS[:3])
    ]
    assert decide(state, named, (first, second)) == empty(state, taken=(taken(first),))


def test_a_bad_payload_bans_its_author() -> None:
    state = start()
    bad, good = announced(MEMBERS[1]), announced(MEMBERS[0])
    named = quorum(state, held=names(good), refused=names(bad))
    assert decide(state, named, (bad, good)) == empty(
        state, taken=(taken(good),), refused=names(bad), banned=(MEMBERS[1],), unseated=(MEMBERS[1],)
    )


@pytest.mark.parametrize("size", SIZES)
def test_too_few_that_refuse_ban_nobody(size: int) -> None:
    state = start(size)
    bad = announced(KEYS[0])
    least = quorum_of(size) - tolerated_by(size)
    assert decide(state, quorum(state, least - 1, refused=names(bad)), (bad,)) == empty(state)


def test_what_is_refused_by_enough_is_not_taken_whoever_holds_it() -> None:
    state = start(3)  # where two of two, who may not lie, might yet contradict themselves
    offer = announced(KEYS[1])
    named = quorum(state, held=names(offer), refused=names(offer))
    assert decide(state, named, (offer,)) == empty(state, refused=names(offer), banned=(KEYS[1],), unseated=(KEYS[1],))


def test_one_who_is_banned_without_a_seat_leaves_no_seat() -> None:
    state = admitting(Admitted(NEWCOMER, 0, 0, 0))
    assert all_ask(state, Request(guilty=NEWCOMER)) == empty(state, evidence=(ASKED[0],), banned=(NEWCOMER,))


def test_evidence_bans_whom_it_convicts_and_its_contribution_is_out() -> None:
    state = start()
    offers = (announced(MEMBERS[0]), announced(MEMBERS[2]))
    named = quorum(state, held=names(*offers), requests=ASKED[:1])
    assert decide(state, named, offers, {ASKED[0]: Request(guilty=MEMBERS[2])}) == empty(
        state, taken=(taken(offers[0]),), evidence=(ASKED[0],), banned=(MEMBERS[2],), unseated=(MEMBERS[2],)
    )


def test_evidence_against_one_who_is_gone_is_left_out() -> None:
    state = start(bans=(NEWCOMER,))
    assert all_ask(state, Request(guilty=NEWCOMER)) == empty(state)


def test_two_proofs_ban_once() -> None:
    state = start()
    asked = sorted(ASKED[:2])
    manifest = all_ask(state, Request(guilty=MEMBERS[3]), Request(guilty=MEMBERS[3]))
    assert manifest == empty(state, evidence=tuple(asked), banned=(MEMBERS[3],), unseated=(MEMBERS[3],))


# ---------------------------------------------------------------------------------------------------
# Roots


@pytest.mark.parametrize("size", SIZES)
def test_the_root_that_enough_carry_is_certified(size: int) -> None:
    state = start(size, round=4, root_round=2)
    least = quorum_of(size) - tolerated_by(size)
    carried = {"root_round": 4, "root": root_of(4)}
    assert decide(state, quorum(state, least, **carried)) == empty(state, **carried)
    assert decide(state, quorum(state, least - 1, **carried)) == empty(state)


def test_the_newest_of_several_roots_is_certified() -> None:
    state = start(7, round=9)
    roots = [(9, root_of(9)), (9, root_of(9)), (8, root_of(8)), (8, root_of(8)), (8, root_of(8))]
    named = [
        said(state, key, root_round=number, root=root)
        for key, (number, root) in zip(state.members, roots, strict=False)
    ]
    assert decide(state, named) == empty(state, root_round=8, root=root_of(8))
    newer = [*named, said(state, KEYS[5], root_round=9, root=root_of(9))]
    assert decide(state, newer) == empty(state, root_round=9, root=root_of(9))


def test_a_round_has_one_root_among_a_quorum() -> None:
    """2 (q - f) > q: two different roots cannot both have enough attestations."""
    assert [
        size for size in range(1, SEATS_MAX + 1) if 2 * (quorum_of(size) - tolerated_by(size)) <= quorum_of(size)
    ] == []


def test_a_certified_root_never_goes_back_or_changes() -> None:
    state = start(round=9, root_round=7, root=root_of(7))
    for number, root in ((6, root_of(6)), (7, root_of(8))):
        assert decide(state, quorum(state, root_round=number, root=root)) == empty(state)


# ---------------------------------------------------------------------------------------------------
# What is missing, and in which order


def test_what_is_attested_and_not_here_is_asked_for() -> None:
    state = start()
    here = announced(KEYS[0])
    held, refused = (names(*(announced(key, 9) for key in part)) for part in (KEYS[1:8], KEYS[8:]))
    named = quorum(state, held=tuple(sorted((*held, *names(here)))), refused=refused, requests=ASKED[:1])
    lonely = said(state, MEMBERS[3], held=names(announced(MEMBERS[3])))  # nobody needs what one alone attests
    found = manifest_of(state, OPEN, [*named, lonely], {name_of(here): here}.get, nobody)
    assert found == Missing(tuple(sorted((*held, *refused, ASKED[0]))))


def test_even_what_will_not_be_taken_is_needed_to_know_that() -> None:
    state = start()
    stranger = announced(NEWCOMER)
    named = quorum(state, held=names(stranger))
    assert manifest_of(state, OPEN, named, nobody, nobody) == Missing(names(stranger))
    assert decide(state, named, (stranger,)) == empty(state)


@given(st.data())
def test_the_manifest_depends_on_who_is_named_and_not_on_any_order(data: st.DataObject) -> None:
    """From the same content, everyone computes the same manifest, and any receiver can decode it."""
    size = data.draw(st.integers(1, 8))
    waiting = [Admitted(key, 0, data.draw(st.integers(0, 3)), 0) for key in KEYS[8:10]]
    state = admitting(*waiting, size=size)
    offers = [announced(key, which=which) for key in KEYS[:11] for which in (b"", b"another")]
    requests = dict(
        zip(
            ASKED,
            [
                *(Request(join=Join(key, bearer, 1, 5)) for key in KEYS[10:12] for bearer in (BEARER, b"\2" * 32)),
                *(Request(leave=key, leave_round=1) for key in (KEYS[0], KEYS[8])),
                *(Request(guilty=key) for key in (KEYS[1], KEYS[9])),
            ],
            strict=True,
        )
    )
    some_offers, some_requests = st.sets(st.sampled_from(offers)), st.sets(st.sampled_from(ASKED))
    kinds = [
        {
            "held": names(*data.draw(some_offers)),
            "refused": names(*data.draw(some_offers)),
            "requests": tuple(sorted(data.draw(some_requests))),
            "heard": bitmap(data.draw(st.sets(st.integers(0, size - 1)))),
        }
        for _ in range(2)
    ]
    named = [said(state, key, **data.draw(st.sampled_from(kinds))) for key in state.members[: state.roster.quorum]]
    manifest = decide(state, named, tuple(offers), requests)
    shuffled = data.draw(st.permutations(named))
    assert decide(state, shuffled, tuple(offers[::-1]), dict(reversed(requests.items()))) == manifest
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=Manifest) == manifest
    following = state.after(manifest, OPEN)
    assert following.members
    assert set(following.members) <= set(following.place)
    assert not set(manifest.banned) & set(following.place)
    assert not {each.author for each in manifest.taken} & {*manifest.banned, *manifest.leaves}
    assert [sorted(keys) for keys in lists_of(manifest)] == [list(keys) for keys in lists_of(manifest)]


def lists_of(manifest: Manifest) -> list[list[bytes]]:
    return [
        [each.author for each in manifest.taken],
        [each.key for each in manifest.joins],
        *(list(each) for each in (manifest.refused, manifest.evidence, manifest.leaves, manifest.banned)),
        *(list(each) for each in (manifest.seated, manifest.unseated)),
    ]


@given(st.lists(st.sets(st.sampled_from(ASKED)), max_size=8), st.integers(1, 8))
def test_names_are_attested_as_often_as_they_stand_there(fields: list[set[bytes]], least: int) -> None:
    expected = sorted(name for name in ASKED if sum(name in field for field in fields) >= least)
    assert attested((tuple(sorted(field)) for field in fields), least) == expected


def test_the_manifest_is_a_part_of_the_protocol() -> None:
    """Any other result would need a new protocol version; the expected bytes can be written down without this code."""
    members = [bytes([number]) * 32 for number in range(4)]
    state = genesis(bytes(32), tuple(members), b"\7" * 32)
    offer = Announcement(bytes(32), 1, 0, b"\7" * 32, b"\5" * 32, 99, b"\5" * 16, 1, 2, 0, members[2])
    named = quorum(state, held=names(offer), requests=(b"\4" * 16,), heard=b"\x07")
    manifest = decide(state, named, (offer,), {b"\4" * 16: Request(join=Join(b"\6" * 32, b"\3" * 32, 1, 9))})
    taken = [[members[2], 1, 0, b"\5" * 32, 99, 1, b"\5" * 16, True]]
    joins = [[b"\6" * 32, b"\3" * 32, 1, 9]]
    where = [bytes(32), 1, bytes(32), state.digest, 0, b"\7" * 32]
    plain = [*where, taken, [], [], joins, [], [], b"\x08", [], [], [], [], []]
    assert manifest.digest == digest("manifest", msgspec.msgpack.encode(plain))
    assert manifest.digest.hex() == "e15ef62514e94c1e10caaecec8a3ef55fb910878d288a6a9cfed566245fe0218"


# ---------------------------------------------------------------------------------------------------
# Bounds


def test_more_names_can_be_attested_than_one_availability_holds_but_not_twice_as_many() -> None:
    sizes = range(1, SEATS_MAX + 1)
    most = [quorum_of(size) * HELD_MAX // (quorum_of(size) - tolerated_by(size)) for size in sizes]
    assert HELD_MAX < max(most) <= REFUSED_MAX
    assert max(quorum_of(size) * REQUESTS_MAX // (quorum_of(size) - tolerated_by(size)) for size in sizes) <= ASKED_MAX


def test_the_manifest_of_the_fullest_availabilities_can_be_decoded() -> None:
    """A crowd that lies as much as possible, and members that each saw a different part of it."""
    crowd = [digest("manifest test crowd", number.to_bytes(2, "little")) for number in range(1_000)]
    state = admitting(*(Admitted(key, 0, 0, 0) for key in crowd), size=7)
    offers = [announced(key, which=bytes([which])) for key in crowd for which in range(4)]
    requests = {name_of(offer): Request(guilty=crowd[place % 1_000]) for place, offer in enumerate(offers)}
    everything = sorted(requests)
    named = [
        said(
            state,
            key,
            refused=tuple(sorted(shares(everything, HELD_MAX, seat))),
            requests=tuple(sorted(shares(everything, REQUESTS_MAX, seat))),
        )
        for seat, key in enumerate(state.members[:5])
    ]
    manifest = decide(state, named, tuple(offers), requests)
    assert len(manifest.refused) == 5 * HELD_MAX // 3
    assert len(manifest.evidence) == 5 * REQUESTS_MAX // 3
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=Manifest) == manifest


def shares(names: list[bytes], most: int, seat: int) -> list[bytes]:
    """Names dealt to five seats so that each has a full list, and each name is in three of them."""
    return [name for place, name in enumerate(names[: 5 * most // 3]) if (place * 3 + 2 - seat) % 5 < 3][:most]
