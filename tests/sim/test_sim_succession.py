"""Succession in the simulator: runs end as their owners want, and a core without one of its rules is caught."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from p2ptrain.core import admission, inbox, local_work, manifest, participant, repair, state, succession
from p2ptrain.core import round as rounds
from p2ptrain.core.events import Persist, Stop, Tick
from p2ptrain.core.membership import OVER
from p2ptrain.core.messages import NOTHING
from p2ptrain.core.state import AgreedState
from p2ptrain.core.succession import Assented, Motion, Succession
from p2ptrain.sim import checkers as ck
from p2ptrain.sim import swarm
from p2ptrain.sim.ledger import Checker, Ledger, Violation
from p2ptrain.sim.liars import KINDS
from p2ptrain.sim.outcome import Outcome, ended, simulate, summary
from p2ptrain.sim.scenario import OwnersMove, load_scenario, scenario_of
from p2ptrain.sim.succession import Minutes, Successions, after, name_of
from p2ptrain.sim.world import Setup

FOLDER = Path(__file__).parents[2] / "scenarios"
SEARCH = 40  # seeds, should the one that was found lead nowhere any more
Table = dict[str, Any]
Patch = pytest.MonkeyPatch


def only_successions() -> list[Checker]:
    ledger = Ledger()
    return [ledger, Successions(ledger)]


def of_file(name: str, seed: int, checkers: list[Checker]) -> Outcome:
    return simulate(load_scenario(FOLDER / f"{name}.toml"), seed, checkers)


# ---------------------------------------------------------------------------------------------------
# The end


@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize("name", ["succession", "succession-back", "succession-cut", "liar-false-succession"])
def test_the_end_does_not_hang_on_one_seed(name: str, seed: int) -> None:
    assert of_file(name, seed, ck.standard()).failures == []


def test_nothing_follows_the_end_and_a_report_says_for_whom_it_came() -> None:
    outcome = of_file("succession", 1, ck.standard())
    states = {node.disk.state.head: node.disk.state for node in outcome.cluster.nodes}
    (last,) = states.values()
    decided = last.succession.decided
    assert decided is not None
    assert (last.round, last.root_round) == (decided.last + 1, decided.last)
    assert {node.state.round for node in outcome.cluster.nodes} == {last.round}
    assert ended(outcome.cluster) == list(range(7))
    assert "over        the run goes on as another, for 0, 1, 2, 3, 4, 5, 6" in summary(outcome, 1)


def test_an_expected_end_that_does_not_come_is_a_failure() -> None:
    plain = {"sentence": "Nobody moves.", "nodes": 4, "rounds": 3, "expect": {"ended": "all"}}
    assert simulate(scenario_of(plain), 1).failures == ["the run is over for [], expected [0, 1, 2, 3]"]


def test_owners_who_refuse_assent_to_nothing_and_others_change_their_minds() -> None:
    scenario, words = load_scenario(FOLDER / "succession-refused.toml"), dict[int, set[bytes]]()

    class Words(Checker):
        def after(self, world: Any, index: int, event: Any, effects: Any) -> None:
            for each in world.nodes[index].disk.state.succession.assents:
                words.setdefault(world.key_index[each.member], set()).add(each.motion)

    assert simulate(scenario, 1, [Words()]).failures == []
    assert set(words) == {0, 1, 2, 3}
    assert any(NOTHING in said for said in words.values())


def test_an_owner_sees_that_a_roll_back_names_no_certified_root() -> None:
    """A motion may name any root; who assents compares it with the manifests."""
    fault = {"kind": "liar", "at": 0.0, "nodes": [6], "how": "false succession"}
    table = {"sentence": "One invents roots.", "nodes": 7, "rounds": 25, "fault": [fault]}
    for seed in range(3):
        outcome = simulate(scenario_of(table), seed, ck.standard())
        decided = [node.disk.state.succession.decided for node in outcome.cluster.nodes if node.honest]
        assert outcome.failures == []
        assert all(motion is None or not motion.goes_back for motion in decided)


def test_motions_come_up_in_drawn_swarms_and_change_no_other_draw() -> None:
    drawn = [swarm.draw(seed) for seed in range(300)]
    moved = [each for each in drawn if any(isinstance(fault, OwnersMove) for fault in each.fault)]
    assert 0.3 < len(moved) / len(drawn) < 0.5
    assert any(fault.back for each in moved for fault in each.fault if isinstance(fault, OwnersMove))
    assert any(each.refusing for each in moved)
    tally = swarm.swarm(60, 1)
    assert (tally.failed, tally.ended > 0) == (None, True)
    assert f"({tally.ended} decided to go on as another)" in str(tally)


# ---------------------------------------------------------------------------------------------------
# Counted again

A, B, C, D = (bytes([seat]) * 32 for seat in range(4))


def motion(author: bytes = A, **changes: Any) -> Motion:
    fields: Table = {"made": 1, "last": 9, "weights": 9, "root": NOTHING, "change": b"{}"}
    return Motion(author=author, **(fields | changes))


class Carrying:
    """As much of a manifest as the minutes read."""

    def __init__(self, number: int, *carried: Motion | Assented) -> None:
        self.round = self.root_round = number
        self.motions = tuple(each for each in carried if isinstance(each, Motion))
        self.assents = tuple(each for each in carried if isinstance(each, Assented))


def minuted(*rounds: Any, remembers: bool = True, without: bytes = b"") -> Minutes:
    minutes = Minutes(0, 0, remembers)
    for number, carried in enumerate(rounds, 1):
        members = tuple(key for key in (A, B, C, D) if key != without or number != len(rounds) - 1)
        minutes = after(minutes, Carrying(number, *carried), members)  # type: ignore[arg-type]
    return minutes


def test_names_are_those_of_the_core() -> None:
    assert name_of(motion()) == motion().name


def test_minutes_count_the_newest_word_of_each() -> None:
    name = motion().name
    assert minuted([motion()]).assenting(name) == {A}
    two = [[motion()], [Assented(B, 2, name)], [Assented(A, 3, NOTHING)]]
    assert minuted(*two).assenting(name) == {B}
    assert minuted([motion()], [Assented(B, 2, name), Assented(C, 2, name)]).decided == motion()
    assert minuted([motion(), Assented(A, 2, NOTHING)]).assenting(name) == set()  # which it said later
    assert minuted([motion()], *[[]] * 8).motions == {}


@pytest.mark.parametrize("late", [Assented(B, 2, motion().name), Assented(B, 3, motion().name), motion(B, made=2)])
def test_a_manifest_that_carries_older_words_is_seen(late: Motion | Assented) -> None:
    with pytest.raises(Violation, match=r"carries words of round [23] after others of round 3"):
        minuted([motion()], [], [Assented(B, 3, NOTHING)], [late])


def test_what_was_taken_back_before_a_seat_was_lost_stays_so_from_protocol_3_on() -> None:
    name = motion().name
    rounds = [[motion()], [Assented(B, 2, name)], [Assented(B, 3, NOTHING)], [], [Assented(B, 2, name)]]
    assert minuted(*rounds, remembers=False, without=B).assenting(name) == {A, B}
    with pytest.raises(Violation, match="of round 2 after others of round 3"):
        minuted(*rounds, without=B)
    assert minuted(*rounds[:4], [Assented(B, 4, name)], without=B).assenting(name) == {A, B}


def shown(outcome: Outcome, checker: Successions, succession: Succession, **changes: Any) -> str:
    """What the checker says of node 0 if its last agreed state has this succession."""
    record = outcome.cluster.nodes[0].disk.history[-1]
    effect = replace(record, state=replace(record.state, succession=succession, **changes))
    try:
        checker.after(outcome.cluster, 0, Tick(), [Persist(effect)])
    except Violation as violation:
        return str(violation)
    return ""


def test_each_difference_is_seen() -> None:
    checkers = only_successions()
    table = {"sentence": "One moves.", "nodes": 4, "rounds": 3, "refusing": "all", "seconds": 60.0}
    table["fault"] = [{"kind": "move", "at": 0.5, "nodes": [0], "rounds_ahead_max": 60}]
    outcome = simulate(scenario_of(table), 1, checkers)
    checker, here = checkers[1], outcome.cluster.nodes[0].disk.state.succession
    assert isinstance(checker, Successions)
    (moved,) = here.motions
    assert shown(outcome, checker, here) == ""
    assert "another decision" in shown(outcome, checker, replace(here, decided=moved))
    assert "other motions" in shown(outcome, checker, replace(here, motions=()))
    assert "other assents" in shown(outcome, checker, replace(here, assents=()))
    with pytest.raises(Violation, match=r"node 0 ends after round \d+, and its run goes on"):
        checker.after(outcome.cluster, 0, Tick(), [Stop(OVER)])


def test_two_ends_of_one_branch_are_seen() -> None:
    ledger, checker = only_successions()
    assert isinstance(checker, Successions)
    checker.ends[Setup(1, load_scenario(FOLDER / "succession.toml")).run_id] = bytes(32), 9
    (failure,) = of_file("succession", 1, [ledger, checker]).failures
    assert "nodes 9 and" in failure
    assert "end the same branch with different manifests" in failure


def test_who_has_missed_the_end_is_seen() -> None:
    checkers = only_successions()
    outcome = of_file("succession", 1, checkers)
    checkers[1].at_end(outcome.cluster)
    outcome.cluster.nodes[3].disk.history.pop()
    with pytest.raises(Violation, match=r"node 3 is in round \d+, and has missed the end"):
        checkers[1].at_end(outcome.cluster)


# ---------------------------------------------------------------------------------------------------
# Cores without a rule


def with_half_of_the_seats(patch: Patch) -> None:
    patch.setattr(succession, "needed", lambda members: members // 2 + 1)


def that_takes_contributions_to_the_end(patch: Patch) -> None:
    for module in (manifest, rounds, local_work):
        patch.setattr(module, "is_closing", lambda state: False)


def in_which_the_first_word_counts(patch: Patch) -> None:
    counted = succession.succession_after

    def first(before: AgreedState, carried: manifest.Manifest, *more: Any) -> Succession:
        said = {each.member for each in before.succession.assents}
        assents = tuple(each for each in carried.assents if each.member not in said)
        return counted(before, replace(carried, assents=assents), *more)

    patch.setattr(state, "succession_after", first)


def that_takes_old_words_again(patch: Patch) -> None:
    def may(assent: Assented, state: AgreedState) -> bool:
        here = state.succession
        is_news = assent.motion != here.assent_of(assent.member) and assent.member in state.roster.seat
        is_open = assent.motion in {NOTHING, *(motion.name for motion in here.motions)}
        return here.decided is None and is_news and is_open

    for module in (admission, succession):
        patch.setattr(module, "may_assent", may)


def whose_branches_keep_the_decision(patch: Patch) -> None:
    regrouped = AgreedState.regrouped

    def keeping(self: AgreedState, branch: bytes, members: tuple[bytes, ...]) -> AgreedState:
        return replace(regrouped(self, branch, members), succession=self.succession)

    patch.setattr(AgreedState, "regrouped", keeping)


def that_does_not_end(patch: Patch) -> None:
    for module in (participant, inbox):
        patch.setattr(module, "is_over", lambda state: False)


def that_tells_nobody(patch: Patch) -> None:
    patch.setattr(repair.Repair, "may_tell_history", lambda self, peer: False)


def moving(seed: int, nodes: int = 7, fault: list[Table] | None = None, **changes: Any) -> Table:
    moves = [{"kind": "move", "at": at, "nodes": [node], "rounds_ahead_max": 8} for node, at in enumerate((3.0, 6.0))]
    return {"sentence": "A core is broken.", "nodes": nodes, "rounds": 30, "seconds": 300.0,
            "fault": [*moves, *(fault or [])], **changes}  # fmt: skip


def with_stragglers(seed: int) -> Table:
    slow = [{"nodes": [4, 5], "times": 1.7}, {"nodes": [6], "times": 2.3}]
    agreement = {"staleness_rounds_max": 4, "overlap_rounds": 1}
    return moving(seed, training={"seconds": 1.0, "slow": slow}, agreement=agreement)


def with_a_cut(seed: int) -> Table:
    at = 10.0 + Random(seed).uniform(-2.0, 4.0)
    cut = {"kind": "partition", "at": at, "until": at + 40.0, "groups": [[0, 1, 2], [3, 4], [5, 6]]}
    return moving(seed, fault=[cut], agreement={"stall_seconds": 5, "settle_seconds": 1})


def with_liars(seed: int) -> Table:
    return moving(seed, fault=[{"kind": "liar", "at": 0.0, "nodes": "f", "how": "false succession"}])


def with_one_away(seed: int) -> Table:
    return moving(seed, fault=[{"kind": "crash", "at": 5.0, "until": 60.0, "nodes": [6]}], seconds=200.0)


MUTATIONS: dict[str, tuple[Callable[[Patch], None], Callable[[int], Table], str, int]] = {
    "two thirds": (with_half_of_the_seats, moving, "another decision than more than two thirds", 0),
    "an end of contributions": (that_takes_contributions_to_the_end, with_stragglers, "after the last round", 0),
    "newest words": (in_which_the_first_word_counts, moving, "than its members' newest words", 0),
    "an order of words": (that_takes_old_words_again, with_liars, "carries words of round", 0),
    "decisions of one branch": (whose_branches_keep_the_decision, with_a_cut, "another decision than", 0),
    "an end": (that_does_not_end, moving, "is decided after the end of the run", 0),
    "answers after the end": (that_tells_nobody, with_one_away, "has missed the end of its run", 0),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_core_without_it_is_caught(name: str, monkeypatch: Patch) -> None:
    mutate, table, sentence, found_at = MUTATIONS[name]

    def failures(seed: int) -> str:
        return " ".join(simulate(scenario_of(table(seed)), seed, only_successions()).failures)

    with monkeypatch.context() as patch:
        mutate(patch)
        caught = next((seed for seed in (found_at, *range(SEARCH)) if sentence in failures(seed)), None)
    assert caught is not None, f"no seed catches a core without {name}"
    assert failures(caught) == ""


def test_a_false_end_of_a_history_is_refused() -> None:
    """Who catches up is told of ends that nobody signed, and of histories that stop early."""
    assert "false succession" in KINDS
    faults = [
        {"kind": "liar", "at": 0.0, "nodes": "f", "how": "false succession"},
        *({"kind": "crash", "at": 3.0 + at, "until": 20.0 + at, "nodes": [at]} for at in range(3)),
        {"kind": "join", "at": 12.0, "count": 8},
    ]
    refused = 0
    for seed in range(4):
        outcome = simulate(scenario_of(moving(seed, 10, fault=faults, refusing="all")), seed, ck.standard())
        cores = [node.core for node in outcome.cluster.nodes if node.honest and node.core is not None]
        assert (outcome.failures, ended(outcome.cluster)) == ([], [])
        refused += sum(core.view().counters.get("histories refused", 0) for core in cores)
    assert refused > 0
