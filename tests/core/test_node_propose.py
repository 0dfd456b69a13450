"""Proposing: for whom the proposer waits, and what it names."""

from __future__ import annotations

import pytest

from p2ptrain.core import events as ev
from p2ptrain.core.messages import Ballot
from tests.helpers.core import KEYS, Bench, announced, collecting, name_of, proposed, voted

PREVOTE = Ballot.PREVOTE


def test_the_proposer_proposes_at_once_when_all_are_here() -> None:
    bench, offers, named, _, _ = proposed(me=0)
    assert bench.hear_all(named[1], named[2]) == []
    chosen = sorted(named, key=lambda each: each.author)[:3]
    proposal, manifest = bench.proposed(chosen, offers)
    assert proposal.author == bench.me
    assert bench.hear(named[3]) == [
        *bench.said(proposal),
        *bench.said(voted(bench.me, PREVOTE, manifest.digest), manifest=manifest),
    ]


def test_the_proposer_waits_a_moment_for_the_rest_and_then_names_a_quorum() -> None:
    bench, offers, named, _, _ = proposed(me=0)
    bench.hear(named[1])
    bench.now = 10.1
    assert bench.hear(named[2]) == []
    bench.now = 10.2
    proposal, manifest = bench.proposed(named[:3], offers)
    deadlines = []
    while not (effects := bench.tick()) or not isinstance(effects[0], ev.Persist):
        deadlines.append(bench.now)
    assert effects == [*bench.said(proposal), *bench.said(voted(bench.me, PREVOTE, manifest.digest), manifest=manifest)]
    assert bench.now == pytest.approx(10.1 + 3 * 0.1 + 0.1)


def test_a_proposer_waits_no_longer_than_the_others_timers_allow() -> None:
    bench, _, named, _, _ = proposed(me=0)
    bench.hear(named[1])
    bench.now = 10.9
    assert bench.hear(named[2]) == []
    while bench.parts.here.agreement.views[0].proposal is None:
        bench.tick()
    assert bench.now == pytest.approx(10.9 + 2.0 / 4)  # `avail_seconds` and a view are 2 s


def test_a_proposer_does_not_wait_for_a_member_whose_last_word_decided_the_round_before() -> None:
    bench = Bench(4, me=KEYS.index(Bench(4).order(2)[0]))
    bench.decide()  # with the precommit of the second of the others, which now dies
    bench.others = (bench.others[0], bench.others[2])
    offers = bench.collect()
    while bench.parts.here.mine is None:
        bench.tick()
    bench.hear_all(*(bench.available(key, offers) for key in bench.others))
    assert bench.parts.here.agreement.views[0].proposal is not None


def test_a_proposer_names_what_members_attest_since_they_restarted() -> None:
    """All had attested a payload that their restarts have lost, and whose author has gone."""
    bench, offers = collecting(me=0)
    bench.train()
    lost = announced(KEYS[2], which=b"unknown")
    first = [bench.available(key, (*offers, lost)) for key in sorted(bench.founders[1:])]
    bench.hear_all(*first)
    assert bench.parts.here.agreement.views[0].proposal is None
    again = bench.available(first[2].author, offers)
    effects = bench.hear(again)
    mine = bench.parts.here.mine
    assert mine is not None
    proposal, manifest = bench.proposed([mine.message, again, first[0]], offers)
    assert effects == [*bench.said(proposal), *bench.said(voted(bench.me, PREVOTE, manifest.digest), manifest=manifest)]


def test_members_that_attest_a_payload_since_they_restarted_are_asked_for_it() -> None:
    bench, offers = collecting(me=0)
    bench.train()
    bench.hear_all(*(bench.available(key) for key in bench.founders[1:]))
    holders, available = bench.parts.pools.offers.holders, bench.parts.here.available
    assert not {*holders(offers[0].payload, available)} - {bench.me}
    bench.hear_all(*(bench.available(key, offers) for key in bench.founders[1:]))
    assert {*holders(offers[0].payload, available)} >= {*bench.founders[1:]}


def test_a_proposer_names_only_what_it_can_work_out() -> None:
    bench, offers = collecting(me=0)
    bench.train()
    unknown = announced(KEYS[2], which=b"unknown")
    named = [bench.available(key, (*offers, unknown)) for key in bench.founders[1:]]
    effects = bench.hear_all(*named)
    assert effects == [ev.Ask(KEYS[1], (name_of(unknown),))]
    assert bench.parts.here.agreement.views[0].proposal is None
