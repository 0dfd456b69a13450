"""What members say of their training and of the agreed weights: who is heard, and what is shown of it."""

from __future__ import annotations

from typing import Any

import pytest

from p2ptrain.core import events as ev
from p2ptrain.core.messages import Announcement, payload_digest
from p2ptrain.core.state import genesis
from p2ptrain.core.tally import DRAWN, LOSS_MAX, ROUNDS_KEPT, HeldOut, TrainingClaims, drawn, weighted_median
from tests.helpers.core import BYTES, KEYS, ROOT0, RUN, Bench, announced, certified, payload, plain_manifest, run_of

SIZE = 7


def measuring(size: int = SIZE, me: int = 0, every_rounds: int = 2, **settings: Any) -> Bench:
    return Bench(size, me=me, every_rounds=every_rounds, **settings)


def drawn_others(bench: Bench) -> list[bytes]:
    return [key for key in drawn(bench.state) if key != bench.me]


def undrawn(bench: Bench) -> bytes:
    return next(key for key in bench.others if key not in drawn(bench.state))


def say(bench: Bench, author: bytes, held_out: int, number: int = 1, **changes: Any) -> None:
    bench.hear_offer(announced(author, number, inline=True, held_out=held_out, **changes))


def test_three_members_are_drawn_by_the_last_manifest_and_all_if_there_are_fewer() -> None:
    run, state = run_of(), genesis(RUN, KEYS[:SIZE], ROOT0)
    everyone, sets = set(), []
    for _ in range(24):
        chosen = drawn(state)
        assert len(set(chosen)) == DRAWN
        assert set(chosen) <= set(state.members)
        everyone |= set(chosen)
        sets.append(chosen)
        state = state.after(plain_manifest(state, run, [announced(KEYS[0], state.round + 1)]), run)
    assert everyone == set(KEYS[:SIZE])
    assert len(set(sets)) > 12
    assert sorted(drawn(genesis(RUN, KEYS[:2], ROOT0))) == sorted(KEYS[:2])


def test_a_node_is_asked_to_measure_only_where_it_is_drawn_and_to_write_wherever_it_is_due() -> None:
    for me in range(SIZE):
        bench = measuring(me=me)
        asked = [effect for effect in bench.started if isinstance(effect, ev.Train)]
        is_drawn = bench.me in drawn(bench.genesis)
        assert [(each.samples, each.evaluates) for each in asked] == [(True, is_drawn)]
        (later,) = (effect for effect in bench.decide() if isinstance(effect, ev.Train))
        assert (later.round, later.samples, later.evaluates) == (2, False, False)
    assert not any(
        each.samples or each.evaluates for each in measuring(every_rounds=0).started if isinstance(each, ev.Train)
    )


def test_what_a_node_measured_is_in_its_announcement_and_counts_for_itself() -> None:
    bench = next(bench for me in range(SIZE) if (bench := measuring(me=me)).me in drawn(bench.genesis))
    body, bench.now = payload(bench.me, 1), 10.0
    effects = bench.do(ev.TrainingFinished(1, payload_digest(body), BYTES, b"", 1, 2_500_000, 3_000_000))
    expected = announced(bench.me, held_out=3_000_000)
    assert bench.said(expected) == [each for each in effects if isinstance(each, ev.Persist | ev.Publish)][:2]
    first, second = drawn_others(bench)
    say(bench, first, 4_000_000)
    say(bench, second, 5_000_000)
    assert bench.node.view().held_out == HeldOut(0, 4.0, 3)


def test_the_median_of_the_drawn_members_is_shown() -> None:
    bench = next(bench for me in range(SIZE) if len(drawn_others(bench := measuring(me=me))) == DRAWN)
    assert bench.node.view().held_out is None
    shown = []
    for author, loss in zip(drawn_others(bench), (3_000_000, 900_000_000_000, 2_000_000), strict=True):
        say(bench, author, loss)
        shown.append(bench.node.view().held_out)
    assert shown == [None, None, HeldOut(0, 3.0, 3)], "of fewer, one may be a liar and the only one"


@pytest.mark.parametrize("lie", [1, LOSS_MAX])
def test_of_two_the_lower_is_shown_once_the_next_measurement_begins_and_of_one_none(lie: int) -> None:
    bench = measuring(every_rounds=1)
    honest, liar, *_ = drawn_others(bench)
    say(bench, honest, 3_000_000)
    bench.parts.pools.claims.begin(bench.state, bench.parts.pools.offers)
    assert bench.node.view().held_out is None
    say(bench, liar, lie)
    assert bench.node.view().held_out is None
    bench.decide()
    assert bench.node.view().held_out == HeldOut(0, min(3_000_000, lie) / 1e6, 2)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_of_fewer_members_all_have_to_speak(size: int) -> None:
    bench = measuring(size=size)
    claims = bench.parts.pools.claims
    shown = []
    for place, key in enumerate(bench.founders):
        claims.hear(announced(key, held_out=1_000_000 * (place + 2)))
        shown.append(claims.held_out)
    assert shown == [None] * (size - 1) + [HeldOut(0, {1: 2.0, 2: 2.0, 3: 3.0}[size], size)]


def test_nobody_else_is_heard_and_nobody_twice_nor_of_another_base() -> None:
    bench = measuring()
    first, *_ = drawn_others(bench)
    say(bench, undrawn(bench), 1_000_000)
    bench.hear_offer(announced(first, inline=True))  # says nothing
    assert bench.node.view().held_out is None
    say(bench, first, 3_000_000)
    say(bench, first, 1_000_000)
    say(bench, first, 1_000_000, number=2)  # of round 1
    assert bench.parts.pools.claims.limits()["held-out losses"] == (1, DRAWN)
    for key in drawn_others(bench)[1:]:
        say(bench, key, 2_000_000)
    if bench.me in drawn(bench.genesis):
        body = payload(bench.me, 1)
        bench.do(ev.TrainingFinished(1, payload_digest(body), BYTES, b"", 1, 2_500_000, 3_000_000))
        assert bench.node.view().held_out == HeldOut(0, 3.0, 3)
    else:
        assert bench.node.view().held_out == HeldOut(0, 2.0, 3)


def test_what_was_said_early_counts_once_the_base_is_here_and_the_last_median_stays_until_then() -> None:
    bench = measuring(every_rounds=1, agreement={"overlap_rounds": 1, "staleness_rounds_max": 1})
    for key in drawn_others(bench):
        say(bench, key, 3_000_000)
    for key in bench.others:  # nobody knows yet who is drawn
        say(bench, key, 2_000_000, number=2)
    before = bench.node.view().held_out
    bench.decide()
    heard = len(drawn_others(bench))
    first = HeldOut(0, 3.0, len([key for key in drawn(bench.genesis) if key != bench.me]))
    assert before == (first if first.said == DRAWN else None)
    assert bench.node.view().held_out == (HeldOut(1, 2.0, 3) if heard == DRAWN else first)


def test_what_is_claimed_of_a_rounds_training_is_weighted_by_steps_that_the_run_allows() -> None:
    bench = measuring(size=4)
    state, run = bench.state, bench.run
    claims = {1: (1, 3_000_000), 2: (10**9, 4_000_000), 3: (1, 0)}
    offers = []
    for place, (steps, loss) in claims.items():
        offers.append(announced(bench.founders[place], inline=True, steps=steps, loss=loss))
        bench.hear_offer(offers[-1])
    unheard = announced(bench.me)
    for also, loss in (([], 3.0), ([unheard], None)):  # what is heard of a part may be a liar's word alone
        entry = certified(plain_manifest(state, run, [*offers, *also]), state)
        bench.parts.pools.claims.take(entry.manifest, bench.parts.pools.offers)
        assert bench.node.view().training_of(1) == TrainingClaims(steps=3, loss=loss)
    assert bench.node.view().training_of(2) == TrainingClaims(steps=0, loss=None)


@pytest.mark.parametrize("lie", [1, 2_000_000, LOSS_MAX, 2**47])
@pytest.mark.parametrize("steps", [1, 2**47])
def test_one_of_three_cannot_move_the_swarms_training_loss_beyond_the_others(lie: int, steps: int) -> None:
    bench = measuring(size=4, recipe={"name": "local", "local_steps": 10, "local_steps_min": 1})
    state, offers = bench.state, []
    for key, loss, count in zip(bench.others, (2_400_000, 2_600_000, lie), (10, 10, steps), strict=True):
        offers.append(announced(key, inline=True, steps=count, loss=loss))
        bench.hear_offer(offers[-1])
    entry = certified(plain_manifest(state, bench.run, offers), state)
    bench.parts._follow(entry, state.after(entry.manifest, bench.run))
    shown = bench.node.view().training_of(1).loss
    assert shown is not None
    assert 2.4 <= shown <= 2.6


def test_the_swarms_training_loss_is_that_of_most_of_the_steps() -> None:
    assert weighted_median([(5.0, 1), (2.0, 10), (4.0, 3)]) == 2.0
    assert weighted_median([(5.0, 1), (2.0, 1)]) == 2.0
    assert weighted_median([(5.0, 3), (2.0, 1), (4.0, 1)]) == 5.0
    assert weighted_median([]) is None


def test_claims_of_few_rounds_are_kept() -> None:
    bench = measuring(size=4, every_rounds=1)
    for _ in range(ROUNDS_KEPT + 3):
        bench.decide()
    limits = bench.node.limits()
    assert limits["rounds claimed"] == (ROUNDS_KEPT, ROUNDS_KEPT)
    assert limits["held-out losses"][0] <= DRAWN
    assert bench.node.view().training_of(2).steps == 0
    assert bench.node.view().training_of(ROUNDS_KEPT).steps == 4


@pytest.mark.parametrize("held_out", [0, 2**47])
def test_a_claim_changes_nothing_that_is_agreed(held_out: int) -> None:
    bench = measuring(size=4)
    usual, said = announced(bench.others[0]), announced(bench.others[0], held_out=held_out)
    manifests = [plain_manifest(bench.state, bench.run, [each]) for each in (usual, said)]
    assert manifests[0].digest == manifests[1].digest
    assert isinstance(said, Announcement)
