"""History: steps signed by a quorum are followed, and no altered ones."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from p2ptrain.core.history import (
    Entry,
    branch_of,
    follow,
)
from p2ptrain.core.messages import Ballot, Regroup, Vote, signed_bytes
from p2ptrain.core.roster import bitmap
from p2ptrain.core.state import genesis
from tests.helpers.core import (
    KEYS,
    ROOT0,
    RUN,
    DigestSigner,
    begun,
    certified,
    line_of,
    plain_manifest,
)
from tests.helpers.history import (
    BEGINNING,
    ENTRY,
    OTHER,
    RUN_CONFIG,
    SIGNER,
    START,
    altered,
    bent,
    refused,
)

# ---------------------------------------------------------------------------------------------------
# One round after another


def test_a_certified_round_leads_to_the_next_state() -> None:
    assert follow(START, ENTRY, RUN_CONFIG, SIGNER) == START.after(ENTRY.manifest, RUN_CONFIG)


@pytest.mark.parametrize("size", range(1, 17))
def test_a_quorum_is_enough_and_one_less_is_not(size: int) -> None:
    state = genesis(RUN, KEYS[:size], ROOT0)
    manifest = plain_manifest(state, RUN_CONFIG)
    for signers in (state.members[: state.roster.quorum], state.members[-state.roster.quorum :], state.members):
        entry = certified(manifest, state, view=3, signers=signers)
        assert follow(state, entry, RUN_CONFIG, SIGNER) == state.after(manifest, RUN_CONFIG)
    if size > 1:
        few = certified(manifest, state, signers=state.members[: state.roster.quorum - 1])
        assert refused(state, few) == (
            f"the certificate has {state.roster.quorum - 1} signatures; the quorum is {state.roster.quorum}"
        )


def test_a_line_of_rounds_leads_to_its_end() -> None:
    state = START
    for entry, expected in line_of(START, RUN_CONFIG, 5):
        state = follow(state, entry, RUN_CONFIG, SIGNER)
        assert state == expected
    assert (state.round, state.root_round) == (5, 4)


def test_a_round_does_not_follow_itself_or_the_one_after_it() -> None:
    (first, one), (second, two) = line_of(START, RUN_CONFIG, 2)
    assert refused(one, first) == "the manifest of round 1 does not follow round 1"
    assert refused(START, second) == "the manifest of round 2 does not follow round 0"
    assert refused(two, second) == "the manifest of round 2 does not follow round 2"


@pytest.mark.parametrize("field", ["branch", "round", "parent", "state"])
def test_a_manifest_follows_in_every_respect(field: str) -> None:
    """Even if a quorum has signed it, a manifest of another place is refused."""
    manifest = msgspec.structs.replace(ENTRY.manifest, **{field: 2 if field == "round" else OTHER})
    elsewhere = certified(manifest, START)
    assert refused(START, elsewhere) == f"the manifest of round {manifest.round} does not follow round 0"


CHANGED: dict[str, Any] = {
    "root": OTHER,
    "root_round": 1,
    "taken": (),
    "refused": (OTHER[:16],),
    "evidence": (OTHER[:16],),
    "leaves": (KEYS[1],),
    "banned": (KEYS[1],),
    "absent": b"\1",
    "seated": (KEYS[9],),
    "unseated": (KEYS[1],),
}


@pytest.mark.parametrize("field", CHANGED)
def test_nothing_in_a_manifest_can_be_changed_afterwards(field: str) -> None:
    changes = {field: CHANGED[field]}
    assert refused(START, altered(ENTRY, **changes)) == "the certificate has an invalid signature"
    manifest = msgspec.structs.replace(ENTRY.manifest, **changes)
    assert refused(START, Entry(manifest, ENTRY.certificate)) == "the certificate is for another manifest"


@pytest.mark.parametrize("field", ["branch", "round", "manifest"])
def test_a_certificate_is_of_its_manifest(field: str) -> None:
    step = bent(ENTRY, **{field: 2 if field == "round" else OTHER})
    assert refused(START, step) == "the certificate is for another manifest"


def test_a_signature_is_of_its_view() -> None:
    assert refused(START, bent(ENTRY, view=1)) == "the certificate has an invalid signature"


def signature(key: bytes, ballot: Ballot = Ballot.PRECOMMIT, **changes: Any) -> bytes:
    certificate = ENTRY.certificate
    fields: dict[str, Any] = {"branch": RUN, "round": 1, "view": 0, "manifest": certificate.manifest} | changes
    return DigestSigner(key).sign(signed_bytes(RUN, Vote(ballot=ballot, author=key, **fields)))


GOOD = ENTRY.certificate.signatures
WRONG_SIGNATURES: dict[str, tuple[bytes, ...]] = {
    "noise": (*GOOD[:2], bytes(64)),
    "of another member": (*GOOD[:2], signature(KEYS[3])),
    "in another order": (GOOD[1], GOOD[0], GOOD[2]),
    "of one member thrice": (GOOD[0],) * 3,
    "of a prevote": (*GOOD[:2], signature(KEYS[2], Ballot.PREVOTE)),
    "of another view": (*GOOD[:2], signature(KEYS[2], view=1)),
    "of another round": (*GOOD[:2], signature(KEYS[2], round=2)),
    "of another branch": (*GOOD[:2], signature(KEYS[2], branch=OTHER)),
    "of another manifest": (*GOOD[:2], signature(KEYS[2], manifest=OTHER)),
    "of one who has no seat": (*GOOD[:2], signature(KEYS[9])),
}


@pytest.mark.parametrize("what", WRONG_SIGNATURES)
def test_one_wrong_signature_spoils_a_certificate(what: str) -> None:
    assert refused(START, bent(ENTRY, signatures=WRONG_SIGNATURES[what])) == "the certificate has an invalid signature"


def test_the_signatures_that_are_tried_are_like_a_good_one() -> None:
    assert tuple(signature(key) for key in KEYS[:3]) == GOOD


@pytest.mark.parametrize("place", range(3))
def test_every_signature_is_looked_at(place: int) -> None:
    signatures = (*GOOD[:place], bytes(64), *GOOD[place + 1 :])
    assert refused(START, bent(ENTRY, signatures=signatures)) == "the certificate has an invalid signature"


def test_seats_that_nobody_has_sign_nothing() -> None:
    for seats in ([0, 1, 4], [0, 1, 255]):
        assert refused(START, bent(ENTRY, seats=bitmap(seats))) == "the certificate names seats that do not exist"


@pytest.mark.parametrize("seats", [[0, 1], [0, 1, 2, 3], []])
def test_there_is_a_signature_for_every_seat(seats: list[int]) -> None:
    assert refused(START, bent(ENTRY, seats=bitmap(seats))) == "the certificate names seats that do not exist"


def test_a_certificate_of_another_run_is_worth_nothing_here() -> None:
    elsewhere = DigestSigner()
    elsewhere.run_id = OTHER
    assert refused(START, ENTRY, elsewhere) == "the certificate has an invalid signature"


def test_the_roster_that_decides_is_the_one_before_the_round() -> None:
    """A newcomer has no vote on its own admission, and a leaving member still has one."""
    gone = (KEYS[0],)
    manifest = msgspec.structs.replace(plain_manifest(START, RUN_CONFIG), leaves=gone, unseated=gone)
    entry = certified(manifest, START, signers=KEYS[:3])
    following = follow(START, entry, RUN_CONFIG, SIGNER)
    assert following.members == KEYS[1:4]
    after = certified(plain_manifest(following, RUN_CONFIG), following)
    assert follow(following, after, RUN_CONFIG, SIGNER).round == 2
    assert len(after.certificate.signatures) == 2  # of three, none of whom is trusted to lie


# ---------------------------------------------------------------------------------------------------
# Branches


def test_a_set_that_a_quorum_of_itself_signed_begins_a_branch() -> None:
    assert follow(START, BEGINNING, RUN_CONFIG, SIGNER) == START.regrouped(BEGINNING.branch, KEYS[:3])


@pytest.mark.parametrize(("members", "enough"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 4), (7, 5)])
def test_so_many_of_a_set_begin_a_branch(members: int, enough: int) -> None:
    state = genesis(RUN, KEYS[:7], ROOT0)
    beginning = begun(KEYS[:members], KEYS[:enough], state)
    assert follow(state, beginning, RUN_CONFIG, SIGNER).members == KEYS[:members]
    if enough > 1:
        few = begun(KEYS[:members], KEYS[: enough - 1], state)
        assert refused(state, few) == f"the branch has {members} members, and {enough - 1} signed it"


def test_any_attempt_may_succeed() -> None:
    beginning = begun(KEYS[:3], KEYS[:2], START, attempt=5)
    assert follow(START, beginning, RUN_CONFIG, SIGNER) == START.regrouped(beginning.branch, KEYS[:3])


def test_a_branch_begins_after_one_state_only() -> None:
    ((_, following),) = line_of(START, RUN_CONFIG, 1)
    assert refused(following, BEGINNING) == "the branch begins elsewhere"
    for changes in ({"parent_branch": OTHER}, {"round": 1}, {"parent": OTHER}):
        assert refused(START, msgspec.structs.replace(BEGINNING, **changes)) == "the branch begins elsewhere"


def test_a_branch_has_the_same_name_for_all_who_sign_the_same_set() -> None:
    one, other = begun(KEYS[:3], KEYS[:2], START), begun(KEYS[:3], KEYS[1:3], START)
    assert one.branch == other.branch == branch_of(RUN, RUN, 0, KEYS[:3])
    different = [
        begun(KEYS[:3], KEYS[:2], START, attempt=1),
        begun(KEYS[:4], KEYS[:3], START),
        begun(KEYS[:3], KEYS[:2], msgspec.structs.replace(START, head=OTHER)),
        begun(KEYS[:3], KEYS[:2], msgspec.structs.replace(START, branch=OTHER)),
    ]
    assert len({one.branch, *(each.branch for each in different)}) == 5


def test_only_members_make_a_branch() -> None:
    assert refused(START, begun((*KEYS[:2], KEYS[9]), KEYS[:2], START)) == "the branch has keys that are not members"
    assert refused(START, begun(KEYS[:3], (KEYS[0], KEYS[3]), START)) == "the branch has keys that are not members"


@pytest.mark.parametrize("field", ["members", "signers"])
@pytest.mark.parametrize("bend", [lambda keys: keys[::-1], lambda keys: (*keys, keys[-1])], ids=["back", "twice"])
def test_members_and_signers_rise(field: str, bend: Any) -> None:
    beginning = msgspec.structs.replace(BEGINNING, **{field: bend(getattr(BEGINNING, field))})
    assert refused(START, beginning) == "the branch's members or signers are not in ascending order"


@pytest.mark.parametrize("count", [1, 3])
def test_a_branch_has_a_signature_of_every_signer(count: int) -> None:
    signatures = (BEGINNING.signatures * 2)[:count]
    assert refused(START, msgspec.structs.replace(BEGINNING, signatures=signatures)) == (
        "the branch has 3 members, and 2 signed it"
    )


def regroup_signature(key: bytes, **changes: Any) -> bytes:
    fields: dict[str, Any] = {"branch": RUN, "parent": RUN, "attempt": 0, "members": KEYS[:3]} | changes
    return DigestSigner(key).sign(signed_bytes(RUN, Regroup(author=key, **fields)))


WRONG_REGROUPS: dict[str, bytes] = {
    "noise": bytes(64),
    "of another member": regroup_signature(KEYS[2]),
    "of another set": regroup_signature(KEYS[1], members=KEYS[:2]),
    "of another attempt": regroup_signature(KEYS[1], attempt=1),
    "of another parent": regroup_signature(KEYS[1], parent=OTHER),
    "of another branch": regroup_signature(KEYS[1], branch=OTHER),
    "of a vote": signature(KEYS[1]),
}


@pytest.mark.parametrize("what", WRONG_REGROUPS)
def test_one_wrong_signature_spoils_a_branch(what: str) -> None:
    for signatures in (
        (BEGINNING.signatures[0], WRONG_REGROUPS[what]),
        (WRONG_REGROUPS[what], BEGINNING.signatures[1]),
    ):
        step = msgspec.structs.replace(BEGINNING, signatures=signatures)
        assert refused(START, step) == "the branch has an invalid signature"
    assert regroup_signature(KEYS[1]) == BEGINNING.signatures[1]


def test_a_branch_goes_on_with_the_quorum_of_its_own_members() -> None:
    state = follow(START, BEGINNING, RUN_CONFIG, SIGNER)
    entry = certified(plain_manifest(state, RUN_CONFIG), state, signers=KEYS[1:3])
    assert follow(state, entry, RUN_CONFIG, SIGNER).head == entry.manifest.digest
    assert refused(START, entry) == "the manifest of round 1 does not follow round 0"
    assert refused(state, ENTRY) == "the manifest of round 1 does not follow round 0"
