"""Payloads: which ones are wanted, which peers are asked, and when all are asked again."""

from __future__ import annotations

from random import Random

import pytest

from p2ptrain.core import payloads as module
from p2ptrain.core.context import Context
from p2ptrain.core.events import Effect, Fetch
from p2ptrain.core.messages import Announcement
from p2ptrain.core.payloads import (
    ANSWER_SECONDS,
    CLAIMS_MAX,
    RETRY_SECONDS_MAX,
    SOURCES_MAX,
    Payloads,
)
from p2ptrain.core.reputation import Reason
from p2ptrain.digest import digest
from tests.helpers.core import BYTES, KEYS, RUN, DigestSigner, announced, run_of

ME, AUTHOR = KEYS[0], KEYS[1]
NAME = digest("core test", b"a payload")


def offer(author: bytes = AUTHOR, payload: bytes = NAME, payload_bytes: int = BYTES) -> Announcement:
    return announced(author, payload=payload, payload_bytes=payload_bytes)


def payloads() -> Payloads:
    return Payloads(Context(run_of(), RUN, ME, DigestSigner(ME), Random(0)))


def emitted(made: Payloads) -> list[Effect]:
    effects, made.context.effects = made.context.effects, []
    return effects


def wanted(*sources: bytes) -> Payloads:
    made = payloads()
    made.want(NAME, BYTES, AUTHOR, sources)
    assert emitted(made) == [Fetch(NAME, BYTES, (AUTHOR, *sources)[:SOURCES_MAX])]
    return made


def test_the_author_is_asked_first_and_each_payload_once() -> None:
    made = wanted(KEYS[2], KEYS[3])
    made.want(NAME, BYTES, AUTHOR, (KEYS[4],))
    assert emitted(made) == []


def test_what_was_agreed_on_is_asked_of_others_first() -> None:
    made = payloads()
    made.want(NAME, BYTES, AUTHOR, KEYS[2:4], is_old=True)
    assert emitted(made) == [Fetch(NAME, BYTES, (KEYS[2], KEYS[3], AUTHOR))]


def verdicts(made: Payloads) -> dict[bytes, bool]:
    return {name: held.is_good for name, held in made.held.items()}


def test_one_s_own_old_payload_is_asked_of_others() -> None:
    made = payloads()
    made.want(NAME, BYTES, ME, (ME, *KEYS[2:4]))
    assert emitted(made) == [Fetch(NAME, BYTES, (KEYS[2], KEYS[3]))]


def test_what_is_here_is_not_fetched() -> None:
    made = payloads()
    made.came_along(offer(), good=True)
    made.want(NAME, BYTES, AUTHOR)
    assert (emitted(made), made.is_good(NAME)) == ([], True)


def test_good_and_bad_are_remembered_and_only_of_what_was_wanted() -> None:
    made = wanted()
    assert (made.arrived(NAME, False, AUTHOR, BYTES), made.is_good(NAME), verdicts(made)) == (
        True,
        False,
        {NAME: False},
    )
    assert (made.arrived(NAME, True, AUTHOR, BYTES), verdicts(made)) == (False, {NAME: False})
    made.want(NAME, BYTES, AUTHOR)
    assert emitted(made) == []


def test_only_the_true_author_and_length_are_of_what_is_here() -> None:
    claims = offer(), offer(payload_bytes=BYTES + 1), offer(author=KEYS[2])
    made = wanted()
    assert [made.checked(each) for each in claims] == [None, None, None]
    assert made.arrived(NAME, True, AUTHOR, BYTES)
    assert [made.checked(each) for each in claims] == [True, False, False]
    assert made.is_good(NAME)
    made.keep([])
    assert (made.held, made.checked(claims[0])) == ({}, None)


def test_what_is_bad_is_bad_whoever_announced_it() -> None:
    made = wanted()
    claims = offer(), offer(payload_bytes=BYTES + 1)
    made.arrived(NAME, False, AUTHOR, BYTES)
    assert [made.checked(each) for each in claims] == [False, False]


def test_when_all_sources_have_failed_all_are_asked_again_after_a_while() -> None:
    made = wanted(KEYS[2])
    made.failed(NAME, AUTHOR)
    assert made.deadline == ANSWER_SECONDS
    made.failed(NAME, KEYS[2])
    assert made.deadline == 1.0
    made.context.now = 0.9
    made.tick()
    assert emitted(made) == []
    made.context.now = 1.0
    made.tick()
    assert [fetch.sources for fetch in emitted(made) if isinstance(fetch, Fetch)] == [(AUTHOR, KEYS[2])]


def test_the_waits_double_up_to_half_a_minute() -> None:
    made = wanted()
    waits = []
    for _ in range(8):
        made.failed(NAME, AUTHOR)
        assert made.deadline is not None
        waits.append(made.deadline - made.context.now)
        made.context.now = made.deadline
        made.tick()
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, *[RETRY_SECONDS_MAX] * 3]


def test_a_driver_that_says_nothing_is_asked_again() -> None:
    made = wanted()
    made.context.now = ANSWER_SECONDS
    made.tick()
    assert emitted(made) == [Fetch(NAME, BYTES, (AUTHOR,))]


def test_the_next_fetch_tries_other_sources() -> None:
    made = wanted(*KEYS[2:16])
    made.context.now = ANSWER_SECONDS
    made.tick()
    (second,) = emitted(made)
    assert isinstance(second, Fetch)
    assert second.sources[0] == AUTHOR
    assert not {*second.sources[1:]} & {*KEYS[2:9]}


def test_who_failed_is_noted_and_asked_last() -> None:
    made = payloads()
    for _ in range(5):
        made.context.reputation.note(KEYS[2], Reason.UNFETCHABLE, 0.0)
    made.want(NAME, BYTES, AUTHOR, KEYS[2:4])
    assert emitted(made) == [Fetch(NAME, BYTES, (AUTHOR, KEYS[3], KEYS[2]))]
    made.failed(NAME, AUTHOR)
    assert made.context.reputation.score(AUTHOR, 0.0) > 0.0


def test_a_failure_of_what_nobody_wants_is_no_failure() -> None:
    made = payloads()
    made.failed(NAME, AUTHOR)
    assert made.context.reputation.score(AUTHOR, 0.0) == 0.0


def test_whoever_says_that_it_holds_a_payload_is_a_source() -> None:
    made = wanted()
    for key in (KEYS[2], KEYS[2], ME):
        made.add_source(NAME, key)
    made.add_source(RUN, KEYS[2])
    assert list(made.wanted[NAME].sources) == [KEYS[2]]


def test_a_false_claim_to_a_payload_does_not_keep_out_the_right_one() -> None:
    liar, other = KEYS[2:4]
    made = payloads()
    made.want(NAME, 2**32 - 1, liar)
    made.want(NAME, BYTES, AUTHOR, (other,))
    made.want(NAME, BYTES, AUTHOR)
    assert emitted(made) == [Fetch(NAME, 2**32 - 1, (liar,)), Fetch(NAME, BYTES, (AUTHOR, other))]
    for source in (liar, AUTHOR, other):
        made.failed(NAME, source)
    assert made.deadline == 1.0
    assert made.context.reputation.score(AUTHOR, 0.0) == 0.0  # perhaps it was asked for what does not exist
    made.context.now = 1.0
    made.tick()
    assert {fetch.payload_bytes: AUTHOR in fetch.sources for fetch in emitted(made) if isinstance(fetch, Fetch)} == {
        2**32 - 1: False,
        BYTES: True,
    }


def test_new_claims_do_not_put_off_the_next_try_of_the_right_one() -> None:
    made = wanted()
    made.failed(NAME, AUTHOR)
    for number, liar in enumerate(KEYS[2:6]):
        made.want(NAME, BYTES + 1 + number, liar)
    assert made.deadline == made.wanted[NAME].next_at == 1.0
    emitted(made)
    made.context.now = 1.0
    made.tick()
    assert Fetch(NAME, BYTES, (AUTHOR,)) in emitted(made)


def test_the_author_of_a_payload_is_asked_whoever_else_claims_it() -> None:
    made = payloads()
    made.want(NAME, BYTES, KEYS[2])
    made.want(NAME, BYTES, AUTHOR)
    assert emitted(made) == [Fetch(NAME, BYTES, (KEYS[2],)), Fetch(NAME, BYTES, (AUTHOR,))]


def test_what_is_no_longer_needed_is_forgotten() -> None:
    made = wanted()
    made.came_along(offer(payload=RUN), good=True)
    made.keep({RUN})
    assert (verdicts(made), made.wanted, made.deadline) == ({RUN: True}, {}, None)


def test_however_much_is_wanted_it_stays_within_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAYLOADS_MAX", 100)
    made = payloads()
    for number in range(110):
        made.want(number.to_bytes(32, "big"), BYTES, AUTHOR)
    for number in range(100):
        made.add_source(bytes(32), digest("core test", bytes([number])))
    assert made.limits() == {
        "payloads held": (0, 100),
        "payloads wanted": (100, 100),
        "sources of a payload": (4 * SOURCES_MAX, 4 * SOURCES_MAX),
        "claims to a payload": (1, CLAIMS_MAX),
    }
