"""The chain: which history is kept, how requests are answered, and how forks are settled."""

from __future__ import annotations

import msgspec

from p2ptrain.core.chain import FORKS_MAX, Chain, are_level, common_branch, grown, wins
from p2ptrain.core.events import Saved, Trunk
from p2ptrain.core.history import STAGES_MAX, Beginning, BranchStart, Entry, History, jump
from p2ptrain.core.manifest import Manifest
from p2ptrain.core.state import AgreedState, genesis
from tests.helpers.core import KEYS, ROOT0, RUN, DigestSigner, begun, certified, line_of, plain_manifest, run_of

RUN_CONFIG = run_of()
START = genesis(RUN, KEYS[:4], ROOT0)


def line(rounds: int = 0, kept: int = 8) -> Chain:
    """A chain of this many rounds from the run's beginning."""
    made = Chain(START, RUN, kept)
    go_on(made, rounds)
    return made


def go_on(made: Chain, rounds: int) -> None:
    for entry, state in line_of(made.state, RUN_CONFIG, rounds):
        made.append(entry, state)


def regroup(made: Chain, *seats: int) -> Beginning:
    """Begins a branch of these members."""
    members = tuple(KEYS[seat] for seat in seats)
    beginning = begun(members, members, made.state)
    made.append(beginning, made.state.regrouped(beginning.branch, beginning.members))
    return beginning


def steps(made: Chain) -> list[Entry | Beginning]:
    return [each.step for each in made.steps]


# ---------------------------------------------------------------------------------------------------
# What is kept


def test_a_line_begins_with_nothing() -> None:
    made = line()
    assert (made.state, list(made.steps), made.lineage) == (START, [], [BranchStart(RUN, 0)])
    assert (made.entry(1), made.end_of(RUN), made.successor_of(RUN)) == (None, 0, None)


def test_of_a_long_line_the_newest_steps_are_kept_and_the_state_before_them() -> None:
    whole = line(12, kept=100)
    made = line(12, kept=8)
    assert steps(made) == steps(whole)[4:]
    assert made.base == whole.steps[3].state
    assert made.state == whole.state
    assert [made.entry(number) is not None for number in (4, 5, 12, 13)] == [False, True, True, False]


def test_states_are_found_by_branch_and_round_while_they_are_kept() -> None:
    made = line(3)
    beginning = regroup(made, 0, 1, 2)
    go_on(made, 2)
    fork = made.forks[beginning.branch]
    assert made.state_at(RUN, 0) == START
    assert made.state_at(RUN, 3) is fork
    assert made.state_at(beginning.branch, 3) == made.steps[3].state
    assert made.state_at(beginning.branch, 5) is made.state
    assert (made.state_at(RUN, 4), made.state_at(beginning.branch, 6), made.state_at(KEYS[9], 3)) == (None, None, None)


def test_a_regroup_adds_a_branch() -> None:
    made = line(3)
    beginning = regroup(made, 0, 1, 2)
    go_on(made, 2)
    assert made.lineage == [BranchStart(RUN, 0), BranchStart(beginning.branch, 3)]
    assert (made.end_of(RUN), made.end_of(beginning.branch), made.end_of(KEYS[9])) == (3, 5, None)
    assert made.successor_of(RUN) == BranchStart(beginning.branch, 3)
    assert made.successor_of(beginning.branch) is None
    assert [made.entry(number) for number in (3, 4)] == [steps(made)[2], steps(made)[4]]


def test_the_state_at_a_fork_outlives_the_steps_around_it() -> None:
    made = line(3)
    beginning = regroup(made, 0, 1, 2)
    go_on(made, 20)
    state = made.state_at(RUN, 3)
    assert state is not None
    assert (state.branch, state.round) == (RUN, 3)
    assert made.beginnings == {beginning.branch: beginning}


def test_changes_of_the_roster_are_kept_for_newcomers() -> None:
    made = line(2)
    regroup(made, 0, 1, 2)
    go_on(made, 20)
    assert made.changes == [line(2).steps[1].step, *made.beginnings.values()]


def test_a_line_of_many_branches_stays_within_its_bounds() -> None:
    made = line()
    for _ in range(FORKS_MAX + 10):
        regroup(made, 0, 1, 2)
        go_on(made, 1)
        assert {name: limit for name, limit in made.limits().items() if limit[0] > limit[1]} == {}
    assert len(made.forks) == len(made.beginnings) == FORKS_MAX


def test_a_line_of_more_branches_than_are_remembered_still_answers() -> None:
    made = line(2)
    for _ in range(STAGES_MAX + 2):
        regroup(made, 0, 1, 2)
    go_on(made, 20)
    oldest = made.lineage[1].branch
    assert made.beginnings and len(made.changes) > STAGES_MAX
    found = made.answer(oldest, 2)
    assert found.base == made.base and made.changes[-1] in found.changes


# ---------------------------------------------------------------------------------------------------
# Going back, and jumping ahead


def test_a_line_that_goes_back_forgets_what_came_after() -> None:
    made, before = line(3), line(3)
    fork = made.state
    regroup(made, 0, 1, 2)
    go_on(made, 2)
    made.rewind(fork)
    assert made.state is fork
    assert list(made.steps) == list(before.steps)
    assert (made.lineage, made.forks, made.beginnings) == (before.lineage, {}, {})


def test_a_jump_over_a_fork_where_the_line_went_back_proves_itself() -> None:
    made = line(3)
    fork = made.state
    regroup(made, 0, 1)
    go_on(made, 2)
    made.rewind(fork)
    regroup(made, 0, 1, 2)
    go_on(made, 20)
    answer = made.answer(RUN, 1)
    assert answer.base is not None
    jump(line(1).state, answer.changes, answer.base, DigestSigner())


def test_a_line_can_go_back_to_a_fork_before_all_that_is_kept() -> None:
    made = line(3)
    fork = made.state
    regroup(made, 0, 1, 2)
    go_on(made, 20)
    made.rewind(fork)
    assert (made.state, made.base, list(made.steps), made.lineage) == (fork, fork, [], [BranchStart(RUN, 0)])
    go_on(made, 2)
    assert made.state.round == 5


def test_a_line_goes_back_within_a_branch() -> None:
    made = line(5)
    third = made.steps[2].state
    made.rewind(third)
    assert (made.state, made.lineage, len(made.steps)) == (third, [BranchStart(RUN, 0)], 3)


def test_a_line_that_jumps_keeps_the_changes_that_led_there() -> None:
    made, ahead = line(1), line(2)
    beginning = regroup(ahead, 0, 1, 2)
    go_on(ahead, 20)
    made.rebase(tuple(ahead.changes), ahead.base)
    assert (made.state, list(made.steps), made.changes) == (ahead.base, [], ahead.changes)
    assert made.lineage == [BranchStart(RUN, 0), BranchStart(beginning.branch, 2)]


def test_a_line_that_jumps_over_a_branch_from_its_head_remembers_where_it_began() -> None:
    made, ahead = line(2), line(2)
    beginning = regroup(ahead, 0, 1, 2)
    go_on(ahead, 20)
    fork = made.state
    made.rebase(ahead.answer(RUN, 2).changes, ahead.base)
    assert (made.forks, made.beginnings) == ({beginning.branch: fork}, {beginning.branch: beginning})
    assert made.state_at(RUN, 2) is fork


# ---------------------------------------------------------------------------------------------------
# Answering


def test_who_has_it_all_gets_nothing() -> None:
    made = line(3)
    nothing = History((BranchStart(RUN, 0),), 3, (), None, ())
    assert [made.answer(RUN, number) for number in (3, 4)] == [nothing, nothing]
    assert made.answer(KEYS[9], 1) == nothing


def test_who_lags_gets_what_came_after() -> None:
    made = line(5)
    assert made.answer(RUN, 2) == History((BranchStart(RUN, 0),), 5, (), None, tuple(steps(made)[2:]))
    assert made.answer(RUN, 0).steps == tuple(steps(made))


def test_who_is_on_the_branch_before_gets_the_beginning_too() -> None:
    made = line(2)
    beginning = regroup(made, 0, 1, 2)
    go_on(made, 2)
    answer = made.answer(RUN, 2)
    assert answer.lineage == (BranchStart(RUN, 0), BranchStart(beginning.branch, 2))
    assert answer.steps == (beginning, *steps(made)[3:])


def test_who_lags_by_more_than_is_kept_gets_a_jump_that_proves_itself() -> None:
    made = line(2)
    beginning = regroup(made, 0, 1, 2)
    go_on(made, 20)
    answer = made.answer(RUN, 1)
    second = line(2).steps[1].step
    assert answer == History(
        (BranchStart(RUN, 0), BranchStart(beginning.branch, 2)), 22, (second, beginning), made.base, tuple(steps(made))
    )
    first = line(1).state
    jump(first, answer.changes, made.base, DigestSigner())


def test_a_jump_holds_only_the_changes_that_come_after_the_place_asked_for() -> None:
    made = line(2)
    first = regroup(made, 0, 1, 2)
    go_on(made, 3)
    after = made.state
    second = regroup(made, 0, 1)
    go_on(made, 20)
    answer = made.answer(first.branch, 4)
    assert [change for change in answer.changes if isinstance(change, Beginning)] == [second]
    jump(line_after(first).state, answer.changes, made.base, DigestSigner())
    assert after.round == 5


def line_after(beginning: Beginning) -> Chain:
    made = line(2)
    made.append(beginning, made.state.regrouped(beginning.branch, beginning.members))
    go_on(made, 2)
    return made


def test_a_base_that_nothing_certifies_is_not_handed_out() -> None:
    made = line(3, kept=1)
    regroup(made, 0, 1, 2)
    assert [type(step) for step in steps(made)] == [Beginning]
    assert made.answer(RUN, 1) == History(tuple(made.lineage), 3, (), None, ())


def test_a_round_that_changed_the_roster_is_part_of_a_jump() -> None:
    made = line(1)
    state = made.state
    manifest = msgspec.structs.replace(plain_manifest(state, RUN_CONFIG), unseated=(KEYS[3],), leaves=(KEYS[3],))
    assert isinstance(manifest, Manifest)
    entry = certified(manifest, state)
    made.append(entry, state.after(manifest, RUN_CONFIG))
    go_on(made, 20)
    answer = made.answer(RUN, 0)
    assert (answer.changes, answer.base) == ((entry,), made.base)
    jump(START, answer.changes, made.base, DigestSigner())


# ---------------------------------------------------------------------------------------------------
# Settling branches


def test_the_last_branch_that_two_lines_share() -> None:
    mine = [BranchStart(RUN, 0), BranchStart(KEYS[0], 3), BranchStart(KEYS[1], 5)]
    assert common_branch(mine, (BranchStart(RUN, 0), BranchStart(KEYS[0], 3), BranchStart(KEYS[2], 5))) == BranchStart(
        KEYS[0], 3
    )
    assert common_branch(mine, (BranchStart(RUN, 0), BranchStart(KEYS[0], 4))) == BranchStart(RUN, 0)
    assert common_branch(mine, (BranchStart(KEYS[1], 5), BranchStart(KEYS[2], 8))) == BranchStart(KEYS[1], 5)
    assert common_branch(mine, (BranchStart(KEYS[5], 0),)) is None
    assert common_branch(mine, tuple(mine)) == mine[-1]


def beginnings(
    first: tuple[int, ...], second: tuple[int, ...], state: AgreedState = START
) -> tuple[Beginning, Beginning]:
    sets = [tuple(KEYS[seat] for seat in seats) for seats in (first, second)]
    return begun(sets[0], sets[0], state), begun(sets[1], sets[1], state)


def test_the_branch_with_more_members_of_its_own_wins() -> None:
    larger, smaller = beginnings((0, 1), (3,))
    assert (wins(larger, smaller), wins(smaller, larger)) == (True, False)
    assert not are_level(larger, smaller)


def test_who_is_in_both_counts_for_neither() -> None:
    one, other = beginnings((0, 1, 2), (0, 1, 3))
    assert are_level(one, other)
    assert wins(one, other) != wins(other, one)


def test_a_tie_is_settled_by_name_and_alike_from_both_sides() -> None:
    one, other = beginnings((0, 1), (2, 3))
    lower, higher = sorted((one, other), key=lambda each: each.branch)
    assert (wins(lower, higher), wins(higher, lower)) == (True, False)


def test_how_many_signatures_one_knows_of_changes_nothing() -> None:
    larger, smaller = beginnings((0, 1, 2), (3,))
    fewer = msgspec.structs.replace(larger, signers=larger.signers[:2], signatures=larger.signatures[:2])
    assert (wins(fewer, smaller), wins(larger, smaller)) == (True, True)


def test_a_line_that_is_taken_up_again_knows_where_its_branch_began() -> None:
    """Otherwise two nodes on one branch would not recognise each other after one of them restarts."""
    made = line(2)
    regroup(made, 0, 1, 2)
    go_on(made, 20)
    saved = Saved(made.base, tuple(made.steps), (), 0, ROOT0, made.trunk())
    again = Chain.restored(saved, RUN, 8)
    assert again.state == made.state
    assert (again.lineage, again.changes, again.forks, again.beginnings) == (
        made.lineage, made.changes, made.forks, made.beginnings
    )  # fmt: skip
    assert [again.answer(RUN, number) for number in range(3)] == [made.answer(RUN, number) for number in range(3)]


def test_what_is_kept_for_ever_is_told_when_it_has_changed() -> None:
    made = line(2)
    assert not made.has_new_trunk
    beginning = regroup(made, 0, 1, 2)
    assert made.has_new_trunk
    second = line(2).steps[1]
    lineage = (BranchStart(RUN, 0), BranchStart(beginning.branch, 2))
    assert made.trunk() == Trunk(lineage, (second.step, beginning), (second.state,))
    assert not made.has_new_trunk


def test_who_stores_the_steps_adds_to_what_is_kept_for_ever_itself() -> None:
    """Told with every change, it would be stored as often as there are changes."""
    made = line(2)
    regroup(made, 0, 1, 2)
    told = made.trunk()
    for _ in range(3):
        before, last = made.state, made.steps[-1].step
        go_on(made, 1)
        regroup(made, 0, 1)
        assert not made.has_new_trunk
        steps = [each.step for each in made.steps][-2:]
        told = grown(told, steps[0], before, last)
        told = grown(told, steps[1], made.steps[-2].state, steps[0])
        assert told == Trunk(tuple(made.lineage), tuple(made.changes), tuple(made.forks.values()))
