"""Admission: which requests are allowed under each policy, and invitations that one run accepts once."""

from __future__ import annotations

from itertools import product
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.core.admission import (
    REQUEST_ROUNDS,
    Ticket,
    check_request,
    decode_invitation,
    encode_invitation,
    make_claim,
    make_ticket,
    read_claim,
)
from p2ptrain.core.manifest import NO_BEARER, Join, Request
from p2ptrain.core.messages import CLAIM_BYTES_MAX, NUMBER_MAX, Ballot, Evidence, JoinRequest, Leave, signed_bytes
from p2ptrain.core.reputation import prove
from p2ptrain.core.state import USES_MAX, Admitted, AgreedState, genesis
from p2ptrain.digest import digest
from p2ptrain.errors import RemoteProtocolError
from tests.helpers.core import KEYS, ROOT0, RUN, DigestSigner, announced, run_of, signed, voted

HOST, NEWCOMER, STRANGER = KEYS[12], KEYS[13], KEYS[14]
BRANCH = digest("admission test", b"branch")
BEARER, SPENT = KEYS[10], KEYS[11]
SIGNER = DigestSigner()
OPEN = run_of()
INVITE = run_of(admission={"policy": "invite", "keys": [HOST.hex()]})
ALLOWLIST = run_of(admission={"policy": "allowlist", "keys": [NEWCOMER.hex()]})
NOW = 1_000  # the round that the state is after


def state(**changes: Any) -> AgreedState:
    """The state after round 1,000: four members, one of them recent, a banned key and a used invitation."""
    fields: dict[str, Any] = {
        "round": NOW,
        "admitted": tuple(Admitted(key, 990 if key == KEYS[3] else 0, 0, 0) for key in KEYS[:4]),
        "bans": (STRANGER,),
        "spent": ((SPENT, 2_000),),
    }
    return msgspec.structs.replace(genesis(RUN, KEYS[:4], ROOT0), **(fields | changes))


def join(author: bytes = NEWCOMER, number: int = NOW + 1, claim: bytes = b"", branch: bytes = RUN) -> JoinRequest:
    return JoinRequest(branch, number, claim, author)


def leave(author: bytes = KEYS[0], number: int = NOW + 1, branch: bytes = RUN) -> Leave:
    return Leave(branch, number, author)


def ticket(
    bearer: bytes = BEARER, last_round: int = 1_100, host: bytes = HOST, run_id: bytes = RUN, uses: int = 1
) -> Ticket:
    return make_ticket(host, DigestSigner(host).sign, run_id, bearer, uses, last_round)


def claim(joiner: bytes = NEWCOMER, by: bytes | None = None, **fields: Any) -> bytes:
    """What `joiner` shows of an invitation, signed by its bearer or somebody else."""
    made = ticket(**fields)
    return make_claim(made, DigestSigner(by or made.bearer).sign, RUN, joiner)


def refusal(message: JoinRequest | Leave | Evidence, run: Any = OPEN, at: AgreedState | None = None) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        check_request(message, at or state(), run, SIGNER)
    return caught.value.why


# ---------------------------------------------------------------------------------------------------
# Joins


def test_anyone_may_join_an_open_run() -> None:
    assert check_request(join(), state(), OPEN, SIGNER) == Request(join=Join(NEWCOMER, NO_BEARER, 0, 0))


def test_who_is_on_the_allowlist_may_join_and_nobody_else() -> None:
    assert check_request(join(), state(), ALLOWLIST, SIGNER) == Request(join=Join(NEWCOMER, NO_BEARER, 0, 0))
    assert refusal(join(HOST), ALLOWLIST) == "the key that asks to join is not on the allowlist"


def test_who_shows_an_invitation_may_join() -> None:
    found = check_request(join(claim=claim()), state(), INVITE, SIGNER)
    assert found == Request(join=Join(NEWCOMER, BEARER, 1, 1_100))


@pytest.mark.parametrize("run", [OPEN, INVITE, ALLOWLIST], ids=["open", "invite", "allowlist"])
def test_who_is_banned_or_here_or_finds_no_room_may_not_join_whatever_it_shows(run: Any) -> None:
    full = run_of(admission={"contributors_max": 4, "policy": run.admission.policy, "keys": run.admission.keys})
    assert refusal(join(STRANGER, claim=claim()), run) == "the key that asks to join is banned"
    assert refusal(join(KEYS[2], claim=claim()), run) == "the key that asks to join is already admitted"
    assert refusal(join(claim=claim()), full) == "the run is full"


def test_the_last_place_may_be_asked_for() -> None:
    roomy = run_of(admission={"contributors_max": 5})
    assert check_request(join(), state(), roomy, SIGNER) == Request(join=Join(NEWCOMER, NO_BEARER, 0, 0))


# ---------------------------------------------------------------------------------------------------
# Invitations


@pytest.mark.parametrize(
    ("shown", "why"),
    [
        (b"", "not an invitation"),
        (b"\x01", "not an invitation"),
        (b"\x91" * CLAIM_BYTES_MAX, "not an invitation"),
        (claim()[:-1], "not an invitation"),
        (claim() + b"\0", "not an invitation"),
        (claim(host=NEWCOMER), "the invitation is signed by a key that may not invite"),
        (claim(run_id=BRANCH), "the invitation has an invalid signature"),
        (claim(KEYS[9]), "the bearer of the invitation has not signed for this key"),  # overheard
        (claim(by=NEWCOMER), "the bearer of the invitation has not signed for this key"),
        (claim(bearer=SPENT, last_round=2_000), "the invitation has been used up"),
        (claim(bearer=SPENT, last_round=3_000), "the invitation has been used up"),
        (claim(last_round=NOW), "the invitation has expired"),
        (claim(last_round=0), "the invitation has expired"),
        (claim(uses=0), "the invitation has been used up"),
    ],
)
def test_an_invitation_that_is_worth_nothing_is_refused(shown: bytes, why: str) -> None:
    assert refusal(join(claim=shown), INVITE).startswith(why)


def test_an_invitation_is_good_up_to_its_last_round() -> None:
    found = check_request(join(claim=claim(last_round=NOW + 1)), state(), INVITE, SIGNER)
    assert found == Request(join=Join(NEWCOMER, BEARER, 1, NOW + 1))


def test_an_invitation_has_one_encoding() -> None:
    encoded = claim()
    fields = msgspec.msgpack.decode(encoded)
    assert read_claim(encoded, NEWCOMER, INVITE, SIGNER) == Ticket(HOST, BEARER, 1, 1_100, fields[0][4])
    longer = [*fields, b""]
    wide = encoded.replace(b"\xcd\x04\x4c", b"\xce\x00\x00\x04\x4c")  # 1,100 in five bytes
    assert len(wide) == len(encoded) + 2
    for other in (msgspec.msgpack.encode(longer), wide):
        with pytest.raises(RemoteProtocolError, match="canonical"):
            read_claim(other, NEWCOMER, INVITE, SIGNER)


def test_an_invitation_admits_as_many_keys_as_it_has_uses() -> None:
    uses = tuple((BEARER, 1_100) for _ in range(2))
    for spent, is_left in ((uses[:1], True), (uses, False)):
        at = state(spent=spent)
        message = join(claim=claim(uses=2))
        if is_left:
            assert check_request(message, at, INVITE, SIGNER).join == Join(NEWCOMER, BEARER, 2, 1_100)
        else:
            assert refusal(message, INVITE, at) == "the invitation has been used up"


def test_the_text_of_an_invitation_is_read_again_and_nothing_else() -> None:
    seed = bytes(range(32))
    text = encode_invitation(ticket(uses=8), seed)
    assert decode_invitation(f" {text}\n").seed == seed
    assert decode_invitation(text).ticket == ticket(uses=8)
    for wrong in ("", "invitation", text[:-2], text + "00", text[:-1]):
        with pytest.raises(RemoteProtocolError):
            decode_invitation(wrong)


@given(st.integers(0, len(claim()) * 8 - 1))
def test_a_bit_that_flips_in_an_invitation_spoils_it(place: int) -> None:
    octets = bytearray(claim())
    octets[place // 8] ^= 1 << place % 8
    with pytest.raises(RemoteProtocolError):
        read_claim(bytes(octets), NEWCOMER, INVITE, SIGNER)


def test_the_largest_invitation_fits_its_place() -> None:
    assert len(claim(last_round=NUMBER_MAX - 1, uses=USES_MAX)) <= CLAIM_BYTES_MAX


def test_what_signs_an_invitation_signs_nothing_else() -> None:
    signed_for: list[bytes] = []

    def sign(signed: bytes) -> bytes:
        signed_for.append(signed)
        return bytes(64)

    for run_id, bearer, number in product((RUN, BRANCH), (BEARER, SPENT), (1, 2)):
        for uses in (1, 2):
            made = make_ticket(HOST, sign, run_id, bearer, uses, number)
        for joiner in KEYS[:2]:
            make_claim(made, sign, run_id, joiner)
    assert len(set(signed_for)) == 16 + 8
    assert {each.split(b"\0")[0] for each in signed_for} == {b"p2ptrain 2 ticket", b"p2ptrain 2 claim"}
    assert not set(signed_for) & {signed_bytes(RUN, message) for message in (join(), leave(), announced(HOST))}


# ---------------------------------------------------------------------------------------------------
# When and where


@pytest.mark.parametrize("make", [join, leave])
def test_a_request_counts_for_a_while(make: Any) -> None:
    oldest, newest = NOW - REQUEST_ROUNDS, NOW + 2
    for number in (oldest, NOW, NOW + 1, newest):
        found = check_request(make(number=number), state(), OPEN, SIGNER)
        expected = Request(join=Join(NEWCOMER, NO_BEARER, 0, 0)) if make is join else Request(None, KEYS[0], number)
        assert found == expected
    for number in (0, oldest - 1, newest + 1, NUMBER_MAX - 1):
        assert refusal(make(number=number)) == f"the request is of round {number}, and this is round {NOW + 1}"


@pytest.mark.parametrize("make", [join, leave])
def test_a_request_to_another_branch_is_refused(make: Any) -> None:
    regrouped = state().regrouped(BRANCH, KEYS[:3])
    assert refusal(make(branch=BRANCH)) == "the request is for another branch"
    assert refusal(make(), at=regrouped) == "the request is for another branch"
    assert check_request(make(branch=BRANCH), regrouped, OPEN, SIGNER) == check_request(make(), state(), OPEN, SIGNER)


# ---------------------------------------------------------------------------------------------------
# Leaves


def test_who_is_admitted_may_leave() -> None:
    for key, number in ((KEYS[0], 950), (KEYS[0], NOW + 1), (KEYS[3], 990)):
        assert check_request(leave(key, number), state(), OPEN, SIGNER) == Request(leave=key, leave_round=number)


def test_an_old_leave_of_one_that_came_back_is_refused() -> None:
    assert refusal(leave(KEYS[3], 989)) == "the author of the leave is not admitted, or has joined again since"


def test_a_stranger_cannot_leave() -> None:
    assert refusal(leave(NEWCOMER)) == "the author of the leave is not admitted, or has joined again since"


# ---------------------------------------------------------------------------------------------------
# Evidence


def lie(author: bytes, branch: bytes = RUN, number: int = 3) -> Evidence:
    votes = [voted(author, Ballot.PREVOTE, manifest, 0, number, branch) for manifest in (RUN, BRANCH)]
    return prove(*(signed(vote).envelope for vote in votes))


@pytest.mark.parametrize(("branch", "number"), [(RUN, NOW + 1), (RUN, 1), (BRANCH, 7)])
def test_a_lie_counts_on_whatever_branch_and_however_old(branch: bytes, number: int) -> None:
    assert check_request(lie(KEYS[1], branch, number), state(), OPEN, SIGNER) == Request(guilty=KEYS[1])


def test_evidence_against_who_is_not_here_is_refused() -> None:
    for gone in (NEWCOMER, STRANGER):
        assert refusal(lie(gone)) == "evidence against a key that is not admitted"


def test_evidence_that_proves_nothing_is_refused() -> None:
    halves = [signed(voted(KEYS[1], Ballot.PREVOTE, RUN, view)).envelope for view in (0, 1)]
    assert refusal(prove(*halves)) == "an honest author may have signed both messages of the evidence"
