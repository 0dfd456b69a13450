"""Motions, assents, and the end of a run that another follows."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from p2ptrain.audit.receipt import check, decode_receipt
from p2ptrain.config.succession import change_of, changed, told
from p2ptrain.core import events as ev
from p2ptrain.core.admission import check_request
from p2ptrain.core.audits import Conduct
from p2ptrain.core.chain import Chain
from p2ptrain.core.manifest import Manifest, Request, contradiction, manifest_of
from p2ptrain.core.membership import OVER
from p2ptrain.core.messages import NOTHING, Assent, Availability, Moving
from p2ptrain.core.origin import Descent, decode_origin, first_state, follows, origin_of, succeed
from p2ptrain.core.state import AgreedState, genesis
from p2ptrain.core.succession import UNMOVED, Assented, Motion, Succession, is_closing, is_over, may_assent, needed
from p2ptrain.core.wire import encode
from p2ptrain.digest import digest
from p2ptrain.errors import ConfigError, RemoteProtocolError
from tests.helpers.core import (
    KEYS,
    ROOT0,
    RUN,
    Bench,
    DigestSigner,
    announced,
    certified,
    envelopes,
    name_of,
    root_of,
    run_of,
    signed,
)
from tests.helpers.receipts import CONFIG as PLAIN
from tests.helpers.receipts import FIRST, CountingSigner, receipt_after

SLOWER = b'{"recipe":{"inner_learning_rate":"1/200"}}'
FASTER = b'{"recipe":{"inner_learning_rate":"1/50"}}'
CONFIG = run_of(recipe={"name": "local"}).sealed(
    manifest="0" * 64, initial_root=ROOT0.hex(), founders=[key.hex() for key in KEYS[:4]]
)
START = genesis(RUN, KEYS[:4], ROOT0)


def motion(author: bytes = KEYS[0], **changes: Any) -> Motion:
    fields: dict[str, Any] = {"made": 1, "last": 6, "weights": 6, "root": NOTHING, "change": SLOWER}
    return Motion(author=author, **(fields | changes))


def moved(state: AgreedState, *requests: Motion | Assented, roots: bool = True) -> AgreedState:
    """The state after a round that carries these."""
    return state.after(carrying(state, *requests, roots=roots), CONFIG)


def carrying(state: AgreedState, *requests: Motion | Assented, roots: bool = True) -> Manifest:
    names = [digest("core test", encode(each))[:16] for each in requests]
    asked = {
        name: Request(motion=each) if isinstance(each, Motion) else Request(assent=each)
        for name, each in zip(names, requests, strict=True)
    }
    root = (state.round, root_of(state.round)) if roots else (state.root_round, state.root)
    named = [
        Availability(state.branch, state.round + 1, *root, (), (), tuple(sorted(names)), b"\x0f", key)
        for key in state.members
    ]
    found = manifest_of(state, CONFIG, named, lambda name: None, asked.get)
    assert isinstance(found, Manifest)
    assert contradiction(found, state, CONFIG) is None
    return found


def agreed(*keys: bytes, to: Motion, made: int = 2) -> list[Assented]:
    return [Assented(key, made, to.name) for key in keys]


def decided(**changes: Any) -> AgreedState:
    """The state after two rounds in which all have agreed on a successor."""
    wanted = motion(**changes)
    state = moved(moved(START, wanted), *agreed(*KEYS[1:3], to=wanted))
    assert state.succession.decided == wanted
    return state


# ---------------------------------------------------------------------------------------------------
# Changes


def test_a_change_has_one_spelling_and_says_what_it_means() -> None:
    settings = {"recipe.local_steps": 20, "recipe.inner_learning_rate": "0.005", "eval.every_rounds": 10}
    change = change_of(CONFIG, settings)
    assert change == b'{"eval":{"every_rounds":10},"recipe":{"inner_learning_rate":"1/200","local_steps":20}}'
    assert changed(CONFIG, change).recipe.local_steps == 20
    assert told(CONFIG, change)["recipe.inner_learning_rate"] == ("1/100", "1/200")
    for other in (
        b'{"recipe":{"local_steps":20,"inner_learning_rate":"1/200"},"eval":{"every_rounds":10}}',
        change.replace(b"1/200", b"0.005"),
        change.replace(b":", b": "),
        b'{"recipe":{"local_steps":10}}',
    ):
        with pytest.raises(RemoteProtocolError, match="canonical"):
            changed(CONFIG, other)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"model.sequence_length": 64}, "a successor cannot change it"),
        ({"recipe.name": "demo"}, "a successor cannot change it"),
        ({"seed": 1}, "seed: a successor cannot change it"),
        ({"recipe.speed": 1}, "no setting of a run. `p2ptrain config schema` lists them"),
        ({"recipe.momentum": "0.9"}, "part of the state"),
        ({"admission.seats_max": 30}, "only raise it"),
        ({"recipe.inner_learning_rate": "nan"}, "a number, or a fraction"),
        ({"recipe.local_steps": 0}, "local_steps"),
    ],
)
def test_a_successor_is_refused_settings_that_leave_nothing_to_go_on_from(
    settings: dict[str, object], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        change_of(CONFIG, settings)


@pytest.mark.parametrize(
    "change",
    [b"", b"[]", b"\xff", b'{"recipe":1}', b'{"world":{"rounds":5}}', b'{"model":{}}', b'{"x":{"y":1}}', b"[" * 1_000],
)
def test_a_change_of_a_stranger_may_be_anything(change: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        changed(CONFIG, change)


# ---------------------------------------------------------------------------------------------------
# Agreement


def test_two_thirds_of_the_seats_decide_for_good() -> None:
    wanted = motion()
    state = moved(START, wanted)
    assert state.succession.motions == (wanted,)
    assert state.succession.assents == (Assented(KEYS[0], 1, wanted.name),)  # who moves assents
    state = moved(state, *agreed(KEYS[1], to=wanted))
    assert state.succession.decided is None
    state = moved(state, *agreed(KEYS[3], to=wanted, made=3))
    assert state.succession.decided == wanted
    assert [each.member for each in state.succession.assents] == [KEYS[0], KEYS[1], KEYS[3]]
    later = moved(state, Assented(KEYS[1], 4, NOTHING), motion(KEYS[2], made=4, last=9, change=FASTER))
    assert later.succession == state.succession


@pytest.mark.parametrize(("members", "least"), [(1, 1), (2, 2), (3, 3), (4, 3), (5, 4), (6, 5), (7, 5), (256, 171)])
def test_more_than_two_thirds_are_needed(members: int, least: int) -> None:
    assert needed(members) == least
    assert 3 * least > 2 * members >= 3 * (least - 1)


def test_a_member_has_one_motion_and_one_assent_of_which_the_later_counts() -> None:
    first, second = motion(), motion(change=FASTER, made=2)
    state = moved(START, first)
    state = moved(state, second, *agreed(KEYS[1], to=first))
    assert state.succession.motions == (second,)
    assert state.succession.assent_of(KEYS[0]) == second.name
    other = motion(KEYS[2], made=3, last=8)
    state = moved(state, other, *agreed(KEYS[1], to=second, made=3))
    assert state.succession.assents_to(second.name) == 2
    for repeated in (Assented(KEYS[1], 2, other.name), Assented(KEYS[1], 3, other.name)):
        assert moved(state, repeated).succession.assents_to(second.name) == 2  # said before, or at the same time
    state = moved(state, Assented(KEYS[1], 4, NOTHING))
    assert state.succession.assents_to(second.name) == 1
    assert moved(state, *agreed(KEYS[1], to=second, made=3)).succession.assents_to(second.name) == 1
    assert moved(state, replace(first, made=1)).succession.motions[0] == second


def test_a_motion_that_comes_late_does_not_take_back_what_its_author_said_since() -> None:
    late, other = motion(KEYS[1], made=2), motion(change=FASTER)
    state = moved(moved(START, other), *agreed(KEYS[1], to=other, made=3))
    assert moved(state, late).succession.motions == (other,)
    assert moved(state, replace(late, made=4)).succession.assent_of(KEYS[1]) == replace(late, made=4).name
    together = moved(START, other, late), Assented(KEYS[1], 4, other.name)
    state = moved(*together)
    later = replace(late, made=3)
    assert moved(state, later).succession == state.succession
    both = moved(moved(START, other), late, Assented(KEYS[1], 3, other.name))
    assert both.succession.assent_of(KEYS[1]) == other.name  # in one manifest


def test_a_motion_lapses_with_its_round_and_with_its_authors_seat() -> None:
    state = moved(START, motion())
    for _ in range(4):
        state = moved(state)
    assert (state.round, len(state.succession.motions)) == (5, 1)
    assert moved(state).succession.motions == ()
    wanted = motion(last=50)
    state = moved(START, wanted, *agreed(KEYS[1], to=wanted))
    manifest = replace(carrying(state), leaves=(KEYS[0],), unseated=(KEYS[0],))
    after = state.after(manifest, CONFIG)
    assert after.succession.motions == ()
    assert after.succession.assents_to(wanted.name) == 0


def test_what_was_moved_is_void_on_another_branch() -> None:
    state = decided().regrouped(b"\1" * 32, KEYS[:3])
    assert state.succession == Succession(since=2)
    assert moved(state, motion(made=3, last=257, weights=257)).succession.motions == ()  # they may just be cut off
    (made,) = moved(state, motion(made=3, last=258, weights=258)).succession.motions
    assert moved(moved(state, made)).succession.since == 2


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (motion(KEYS[9]), "only members"),
        (motion(last=3, weights=3), "could be 4 at the earliest"),
        (motion(last=0, weights=0), "at the earliest"),
        (motion(last=2**21, weights=2**21), "could be"),
        (motion(weights=3), "not certified"),
        (motion(weights=0), "not certified"),
        (motion(weights=7), "not made yet"),
        (motion(root=ROOT0), "not made yet"),
        (motion(change=b"{}"), "changes nothing"),
        (motion(change=b'{"model":{"layers":1}}'), "none that a successor may have"),
        (motion(change=b"no"), "no table"),
    ],
)
def test_motions_that_cannot_be_made_are_refused(made: Motion, why: str) -> None:
    message = Moving(RUN, 1, made.last, made.weights, made.root, made.change, made.author)
    with pytest.raises(RemoteProtocolError, match=why):
        check_request(message, START, CONFIG, DigestSigner())
    assert moved(START, made) == moved(START)  # and no manifest carries them


def test_assents_that_change_nothing_are_refused() -> None:
    wanted = motion()
    state = moved(START, wanted)
    for member, name in ((KEYS[9], wanted.name), (KEYS[1], b"\1" * 32), (KEYS[0], wanted.name), (KEYS[1], NOTHING)):
        with pytest.raises(RemoteProtocolError, match="changes nothing"):
            check_request(Assent(RUN, 2, name, member), state, CONFIG, DigestSigner())
    assert check_request(Assent(RUN, 2, wanted.name, KEYS[1]), state, CONFIG, DigestSigner()).assent


@pytest.mark.parametrize("field", ["motions", "assents"])
def test_an_outsider_sees_that_a_manifest_carries_what_it_may_not(field: str) -> None:
    state = moved(START, motion())
    wrong = {"motions": (motion(KEYS[8], made=2),), "assents": (Assented(KEYS[8], 2, motion().name),)}[field]
    assert "it carries" in str(contradiction(replace(carrying(state), **{field: wrong}), state, CONFIG))


# ---------------------------------------------------------------------------------------------------
# The end


def test_the_run_is_over_once_the_last_root_is_certified() -> None:
    state = decided()
    for _ in range(4):
        assert not is_closing(state)
        state = moved(state)
    assert (state.round, is_closing(state), is_over(state)) == (6, True, False)
    assert not is_over(moved(state, roots=False))
    offer = announced(KEYS[2], 7)
    availability = Availability(RUN, 7, 6, root_of(6), (name_of(offer),), (), (), b"\x0f", KEYS[0])
    named = [replace(availability, author=key) for key in KEYS[:4]]
    last = manifest_of(state, CONFIG, named, lambda name: offer, lambda name: None)
    assert isinstance(last, Manifest)
    assert last.taken == ()
    assert is_over(state.after(last, CONFIG))
    open_one = moved(START)
    taken = carrying(open_one)
    offered = manifest_of(open_one, CONFIG, [replace(each, round=2, root_round=1, root=root_of(1)) for each in named],
                          lambda name: announced(KEYS[2], 2), lambda name: None)  # fmt: skip
    assert isinstance(offered, Manifest)
    wrong = replace(last, taken=tuple(replace(each, round=7, base_round=6) for each in offered.taken))
    assert taken.taken == ()
    assert "after the last round" in str(contradiction(wrong, state, CONFIG))


def test_a_roll_back_needs_no_root_of_the_weights_that_it_drops() -> None:
    state = moved(moved(START), motion(made=2, weights=0, root=ROOT0, last=6))
    assert state.succession.motions[0].goes_back
    wanted = state.succession.motions[0]
    state = moved(state, *agreed(*KEYS[1:3], to=wanted, made=3))
    while state.round < 6:
        state = moved(state, roots=False)
    assert is_over(state)


def ended(**changes: Any) -> Descent:
    state = decided(**changes)
    while not is_over(after := moved(state)):
        state = after
    return Descent(CONFIG.canonical(), (), state, certified(carrying(state), state))


def with_last(origin: Descent, **changes: Any) -> Descent:
    return replace(origin, last=replace(origin.last, manifest=replace(origin.last.manifest, **changes)))


def test_the_successor_has_everything_that_was_agreed() -> None:
    origin = ended()
    run, state = succeed(decode_origin(encode(origin)))
    last = origin.before.after(origin.last.manifest, CONFIG)
    assert run.recipe.inner_learning_rate == changed(CONFIG, SLOWER).recipe.inner_learning_rate
    assert (run.predecessor.run, run.predecessor.round) == (CONFIG.run_id, 7)
    assert run.predecessor.head == origin.last.manifest.digest.hex()
    assert run.state.initial_root == root_of(6).hex()
    assert run.admission.founders == ()  # the head fixes who is there
    assert (state.branch, state.head, state.round, state.root_round) == (run.id, run.id, 7, 7)
    assert [entry.key for entry in state.admitted] == [entry.key for entry in last.admitted]
    assert (state.members, state.bans, state.succession) == (last.members, last.bans, UNMOVED)
    assert state.oldest_base(run.agreement.staleness_rounds_max) == 7
    assert first_state(run, origin) == state
    assert first_state(CONFIG, None) == replace(START, branch=CONFIG.id, head=CONFIG.id)
    assert succeed(ended(made=1, last=7, weights=7))[0].id != run.id


def test_where_a_run_comes_from_is_proved_by_its_id() -> None:
    origin = ended()
    run, _ = succeed(origin)
    forged = replace(origin.before, bans=(KEYS[7],))
    for wrong, why in (
        (replace(origin, before=forged), "does not follow"),
        (replace(with_last(origin, state=forged.digest), before=forged), "does not come from there"),
        (with_last(origin, round=9), "does not follow"),
        (replace(origin, config=run.canonical()), "canonical"),
        (ended(change=FASTER), "does not come from there"),
        (Descent(CONFIG.canonical(), (), START, certified(carrying(START), START)), "has not ended"),
        (None, "nothing says"),
    ):
        with pytest.raises(RemoteProtocolError, match=why):
            first_state(run, wrong)
    later = origin.before.after(origin.last.manifest, CONFIG)
    with pytest.raises(RemoteProtocolError, match="has not ended"):
        first_state(run, Descent(CONFIG.canonical(), (), later, certified(carrying(later), later)))


def test_a_receipt_of_a_successor_proves_where_the_run_comes_from() -> None:
    origin = ended()
    run, first = succeed(origin)
    receipt = receipt_after(first, run, origin=origin)
    assert len(check(decode_receipt(encode(receipt)), run.run_id, CountingSigner)["rounds"]) == 3
    last = origin.last.certificate
    unsigned = replace(origin.last, certificate=replace(last, signatures=(bytes(64), *last.signatures[1:])))
    for wrong, why in (
        (None, "nothing says"),
        (ended(change=FASTER), "does not come from there"),
        (replace(origin, last=unsigned), "invalid signature"),
        (replace(origin, changes=(origin.last,)), "more than where the run comes from"),
    ):
        with pytest.raises(RemoteProtocolError, match=why):
            check(replace(receipt, origin=wrong), "", CountingSigner)
    with pytest.raises(RemoteProtocolError, match="more than where the run comes from"):
        check(replace(receipt_after(FIRST, PLAIN), origin=origin), "", CountingSigner)


def test_an_agreed_state_that_a_stranger_made_up_is_refused_before_anything_is_computed_from_it() -> None:
    origin = ended()
    for changes in ({"members": (*KEYS[:4], KEYS[9])}, {"admitted": ()}, {"members": ()}):
        before = replace(origin.before, **changes)
        forged = replace(with_last(origin, state=before.digest), before=before)
        with pytest.raises(RemoteProtocolError):
            succeed(forged)


def test_a_strangers_state_with_more_strikes_than_there_are_is_refused_before_anything_is_computed_from_it() -> None:
    origin, many = ended(), Conduct(strikes=2**47)  # a shift by as much takes all memory
    admitted = (replace(origin.before.admitted[0], conduct=many), *origin.before.admitted[1:])
    with pytest.raises(RemoteProtocolError):
        decode_origin(encode(replace(origin, before=replace(origin.before, admitted=admitted))))


class OfTheRun(DigestSigner):
    """Verifies what was signed in the run of these tests, whose id is not that of its config."""

    def __init__(self) -> None:
        super().__init__()
        self.run_id = CONFIG.id

    def __call__(self, key: bytes, signed: bytes, signature: bytes) -> bool:
        return super().__call__(key, signed.replace(CONFIG.id, RUN), signature)


def test_who_knows_only_the_run_before_finds_its_successor_by_certificates() -> None:
    origin = ended()
    assert follows(origin, START, OfTheRun()) == succeed(origin)[0]
    few = certified(origin.last.manifest, origin.before, signers=KEYS[:2])
    other = certified(carrying(START), START)
    for wrong, first in (
        (replace(origin, last=few), START),  # too few have signed
        (with_last(origin, leaves=(KEYS[0],)), START),
        (replace(origin, changes=(other,), before=START), START),
        (origin, genesis(RUN, KEYS[:3], ROOT0)),  # other members began it
    ):
        with pytest.raises(RemoteProtocolError):
            follows(wrong, first, OfTheRun())
    with pytest.raises(RemoteProtocolError, match="another run"):
        follows(origin, START, DigestSigner())


def test_a_chain_tells_how_its_run_has_ended() -> None:
    chain, state = Chain(START, RUN, 16), START
    wanted = motion()
    for requests in ((wanted,), tuple(agreed(*KEYS[1:3], to=wanted)), (), (), (), (), ()):
        assert origin_of(chain, CONFIG) is None
        step = certified(carrying(state, *requests), state)
        state = state.after(step.manifest, CONFIG)
        chain.append(step, state)
    found = origin_of(chain, CONFIG)
    assert found == ended()
    assert origin_of(Chain(state, RUN, 16), CONFIG) is None


# ---------------------------------------------------------------------------------------------------
# A node


def test_an_owner_moves_and_assents() -> None:
    bench = Bench(4, me=1, recipe={"name": "local"})
    move = Moving(RUN, 1, 6, 6, NOTHING, SLOWER, KEYS[1])
    assert bench.do(ev.MoveRequested(6, 6, NOTHING, SLOWER)) == [ev.Publish(*envelopes(move))]
    other = Moving(RUN, 1, 9, 9, NOTHING, FASTER, KEYS[0])
    bench.hear(other)
    offers = bench.collect()
    availability = bench.parts.here.mine
    assert availability is not None
    assert availability == signed(
        bench.available(KEYS[1], offers, requests=tuple(sorted(map(name_of, (move, other)))), root_round=0, root=ROOT0)
    )
    before = bench.node.view().counters.get("requests without effect", 0)
    assert bench.do(ev.AssentRequested(b"\1" * 32)) == []
    assert bench.do(ev.MoveRequested(1, 1, NOTHING, SLOWER)) == []
    assert bench.node.view().counters["requests without effect"] == before + 2


def after_the_end(me: int = 1) -> Bench:
    """A node that starts where its run is over."""
    state = decided()
    while not is_over(state):
        state = moved(state)
    bench = Bench(4, me=me, recipe={"name": "local"}, start=False)
    bench.start(base=state, applied_round=state.round, applied_root=root_of(state.round))
    for peer in bench.others:
        bench.do(ev.PeerSeen(peer))
    return bench


def test_after_the_end_a_node_only_helps_those_who_lag_behind_and_ends() -> None:
    bench = after_the_end()
    effects = bench.hear(bench.hello(KEYS[0], round=5))
    assert any(isinstance(effect, ev.Send) for effect in effects)  # its place, so that the other asks for history
    assert bench.hear(bench.available(KEYS[0])) == []
    assert bench.do(ev.HistoryAsked(KEYS[0], RUN, bench.state.round - 1))
    said = bench.wait(2.0)
    assert not any(isinstance(effect, ev.Train | ev.Publish | ev.Persist | ev.Stop) for effect in said)
    assert ev.Stop(OVER) in bench.wait(2.0)
    assert not any(isinstance(effect, ev.Stop | ev.Train | ev.Publish) for effect in bench.wait(15.0))


def test_no_training_begins_for_rounds_after_the_last() -> None:
    state = decided()
    while state.round < 6:
        state = moved(state)
    bench = Bench(4, me=1, recipe={"name": "local"}, start=False)
    effects = bench.start(base=state, applied_round=6, applied_root=root_of(6)) + bench.wait(3.0)
    assert not any(isinstance(effect, ev.Train) for effect in effects)
    assert bench.parts.here.mine is not None  # it attests the last root at once


# ---------------------------------------------------------------------------------------------------
# Another protocol


def test_a_change_of_the_protocol_is_agreed_on_by_all_releases_in_form_alone() -> None:
    for change in (b'{"protocol":3}', b'{"protocol":9,"recipe":{"speed":"fast"}}'):
        wanted = motion(change=change)
        assert moved(START, wanted).succession.motions == (wanted,)
    for change in (
        b'{"protocol":1}',
        b'{"protocol":true}',
        b'{"protocol":"3"}',
        b'{"protocol": 3}',
        b'{"protocol":70000}',
    ):
        assert moved(START, motion(change=change)).succession == UNMOVED
    assert change_of(CONFIG, {"protocol": 3}) == b'{"protocol":3}'
    assert told(CONFIG, b'{"protocol":3}') == {"protocol": (2, 3)}
    assert succeed(ended(change=b'{"protocol":3}'))[0].protocol == 3
    with pytest.raises(RemoteProtocolError):
        succeed(ended(change=b'{"protocol":9}'))


@pytest.mark.parametrize(("protocol", "remembers"), [(2, False), (3, True)])
def test_what_a_member_took_back_stays_so_though_it_loses_its_seat_from_protocol_3_on(
    protocol: int, remembers: bool
) -> None:
    run = CONFIG.model_copy(update={"protocol": protocol})
    wanted = motion(last=50, weights=50)
    state = moved(moved(START, wanted), *agreed(KEYS[1], to=wanted))
    state = moved(state, Assented(KEYS[1], 3, NOTHING))
    without = state.after(replace(carrying(state), unseated=(KEYS[1],)), run)
    back = without.after(replace(carrying(without), seated=(KEYS[1],)), run)
    replayed = Assented(KEYS[1], 2, wanted.name)
    assert may_assent(replayed, back) is not remembers
    assert may_assent(replace(replayed, made=4), back)
