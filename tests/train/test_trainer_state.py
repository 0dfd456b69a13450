"""State that nodes transfer to each other, and that is saved at any moment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from p2ptrain.config.recipe import RULES
from p2ptrain.config.run import DataConfig
from p2ptrain.data.assignment import WINDOW_PIECES, shard, shard_in_window, shard_of_slots
from p2ptrain.data.dataset import TokenDataset, manifest_digest, store_manifest
from p2ptrain.digest import leaf_digests, merkle_root
from p2ptrain.errors import DataError, MemoryShortError, RemoteProtocolError
from p2ptrain.exact import replica
from p2ptrain.share import PassSlots, Share
from p2ptrain.train import learner
from p2ptrain.train.learner import EVALUATED_SEQUENCES
from tests.helpers.trainer import FAMILY, ONE_THREAD, RECIPES, Trainer, embedded, make, swarm_round


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    return embedded(tmp_path_factory.mktemp("corpus") / "data")


def newcomer(other: Trainer, dataset: TokenDataset) -> Trainer:
    return Trainer(other.run, ONE_THREAD, dataset, initial=False)


def contribution(trainer: Trainer, round_number: int, place: int = 0, places: int = 1) -> bytes:
    trainer.train(Share(round_number, place, places))
    return trainer.contribute(round_number)


@pytest.mark.parametrize("name", [*RECIPES, *FAMILY])
def test_a_newcomer_that_adopts_the_state_stays_the_same_bits(dataset: TokenDataset, name: str) -> None:
    first = make(dataset, name)
    for round_number in range(3):
        own = contribution(first, round_number)
        first.apply(round_number, [own], {round_number: own})
    second = newcomer(first, dataset)
    assert second.root() != first.root()
    second.adopt(3, [first.state_bytes()])
    assert (second.root(), second.round) == (first.root(), 3)
    assert second.evaluate() == first.evaluate()
    for round_number in range(3, 6):
        payloads = [contribution(trainer, round_number, place, 2) for place, trainer in enumerate([first, second])]
        for trainer, own in zip((first, second), payloads, strict=True):
            trainer.apply(round_number, payloads, {round_number: own})
        assert first.root() == second.root()


WHOLE = [name for name, recipe in FAMILY.items() if "fragments" not in recipe]  # all of the model in a round


@pytest.mark.parametrize("name", [*RECIPES, *WHOLE])
def test_the_states_bytes_are_what_its_root_is_made_of(dataset: TokenDataset, name: str) -> None:
    trainer = make(dataset, name)
    trainer.apply(0, [contribution(trainer, 0)])
    state = trainer.state_bytes()
    assert len(state) == trainer.state_size
    assert merkle_root(leaf_digests(state), len(state)) == trainer.root()
    size = trainer.live.weights.numel()
    halves = [trainer.live.parts(half) for half in torch.split(trainer.replica.state, size)]
    numbers = np.concatenate([part.numpy().ravel() for half in halves for part in half])
    assert state == numbers.astype("<f4").tobytes()
    assert len(halves) == (2 if trainer.run.recipe.momentum else 1)
    before = bytes(state)
    trainer.apply(1, [contribution(trainer, 1)])
    assert state == before  # a copy
    assert state != trainer.state_bytes()


def test_a_state_of_many_pieces_is_adopted_whole(dataset: TokenDataset) -> None:
    first, second = make(dataset), make(dataset, seed=2)
    received = bytearray(first.state_bytes())
    second.adopt(0, (memoryview(received)[start : start + 4_000] for start in range(0, len(received), 4_000)))
    assert second.root() == first.root()
    received[:] = bytes(len(received))
    assert second.root() == first.root()  # a copy
    spoiled = np.frombuffer(first.state_bytes(), dtype="<f4").copy()
    spoiled[-1] = np.nan
    with pytest.raises(RemoteProtocolError, match="not finite"):
        second.adopt(0, [spoiled.tobytes()])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_bytes_that_are_no_state_are_refused_and_change_nothing(dataset: TokenDataset, value: float) -> None:
    trainer = make(dataset)
    trainer.apply(0, [contribution(trainer, 0)])
    root, good = trainer.root(), trainer.state_bytes()
    spoiled = np.frombuffer(good, dtype="<f4").copy()
    spoiled[len(spoiled) // 2] = value
    size = trainer.state_size
    for state, why in [
        (spoiled.tobytes(), "the state has a weight that is not finite"),
        (good[:-1], f"the state has {size - 1} bytes; this run's has {size}"),
        (good + b"\0", f"the state has {size + 1} bytes; this run's has {size}"),
        (b"", f"the state has 0 bytes; this run's has {size}"),
    ]:
        with pytest.raises(RemoteProtocolError) as caught:
            trainer.adopt(7, [state])
        assert caught.value.why == why
    with pytest.raises(RemoteProtocolError, match=f"the state has {size} bytes"):
        trainer.adopt(7, [good[:6], good[6:]])  # pieces are of whole weights

    def broken() -> Iterator[bytes]:
        yield bytes(4_000)
        raise DataError("the disk has died")

    with pytest.raises(DataError):
        trainer.adopt(7, broken())
    assert (trainer.root(), trainer.round) == (root, 1)


@pytest.mark.parametrize("name", [*RECIPES, *FAMILY])
def test_what_the_swarm_has_not_been_told_survives_a_new_state(dataset: TokenDataset, name: str) -> None:
    first, second = make(dataset, name), make(dataset, name, seed=2)
    contribution(second, 0)
    residual = second.recipe.residual.coefficients.clone()
    second.adopt(5, [first.state_bytes()])
    assert torch.equal(second.recipe.residual.coefficients, residual)
    assert second.kept_rounds == (0,)
    assert second.restore(0)
    assert not torch.equal(second.recipe.residual.coefficients, residual)
    assert second.round == 5


@pytest.mark.parametrize("name", [*RECIPES, *FAMILY])
def test_a_state_that_is_adopted_while_a_round_trains_changes_nothing_of_its_contribution(
    dataset: TokenDataset, name: str
) -> None:
    first, second, other = make(dataset, name), make(dataset, name, seed=2), make(dataset, name, seed=2)
    for trainer in (second, other):
        trainer.train(Share(0, 0, 1))
    second.replica.adopt(4, [first.state_bytes()])
    assert not second.rebase()
    assert second.contribute(0) == other.contribute(0)
    second.train(Share(4, 0, 1))
    assert second.round == 4
    assert second.check(second.contribute(4)) is None


def test_two_rounds_that_are_agreed_on_while_ranks_bring_back_what_they_have_are_not_taken_in(
    dataset: TokenDataset,
) -> None:
    """What is noted of the training would name the wrong one."""
    learner = make(dataset, "local", is_late=True)
    payload = contribution(learner, 0)

    class SlowRanks:
        def bring_back(self) -> None:
            learner.replica.apply(2, [payload])

    learner.train(Share(0, 0, 1))
    learner.replica.apply(1, [payload])
    learner.elsewhere = SlowRanks()  # type: ignore[assignment]
    assert not learner.rebase()
    assert (learner.round, learner.replica.round) == (0, 2)


@pytest.mark.parametrize("name", RECIPES)
def test_an_audits_weights_are_no_measure_of_how_far_a_round_has_moved_them(dataset: TokenDataset, name: str) -> None:
    trainer, other, first_weights = make(dataset, name), make(dataset, name), make(dataset, name).replica.weights
    sequences, drifts = np.arange(64), []
    for number in (0, 1, 2):
        payloads = [contribution(each, number) for each in (trainer, other)]
        if number == 1:
            read = [(part, dataset.batch(part, trainer.run.model.sequence_length)) for part in np.split(sequences, 8)]
            trainer.audit(0, first_weights, payloads, read, read)
        for each, own in zip((trainer, other), payloads, strict=True):
            each.apply(number, [own], {number: own})
        drifts.append((trainer.drift, other.drift))
    measured = [drift for _, drift in drifts]
    assert None not in measured
    assert [drift for drift, _ in drifts] == [measured[0], measured[1] if name == "local" else None, measured[2]]


def test_agreed_weights_that_find_no_memory_are_taken_over_later_with_all_that_was_settled(
    dataset: TokenDataset,
) -> None:
    trainer, other = make(dataset, "local"), make(dataset, "local")
    for each in (trainer, other):
        own = contribution(each, 0)
        each.replica.apply(1, [own])
    asked: list[int] = []

    def uncounted(removed: Any) -> Any:
        asked.append(len(asked))
        if len(asked) == 1:
            raise MemoryError
        return removed

    trainer.settle(0, uncounted)
    other.settle(0, lambda removed: removed)
    with pytest.raises(MemoryShortError, match="out of memory while taking over the agreed weights: "):
        trainer.catch_up()
    assert trainer.kept_rounds == (0,)
    for each in (trainer, other):
        each.catch_up()
        assert (each.round, each.kept_rounds) == (1, ())
    assert torch.equal(trainer.recipe.residual.coefficients, other.recipe.residual.coefficients)


def test_without_initial_weights_nothing_is_drawn(dataset: TokenDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: object) -> None:
        raise AssertionError("drawn")

    first = make(dataset)
    monkeypatch.setattr(learner, "first_model", slow)
    second = newcomer(first, dataset)
    second.adopt(0, [first.state_bytes()])
    assert contribution(second, 0) == contribution(first, 0)


def test_rounds_that_are_not_kept_are_no_error(dataset: TokenDataset) -> None:
    trainer = make(dataset)
    forget = trainer.recipe.residual.forget
    assert (forget(0), trainer.restore(0)) == (False, False)
    for round_number, settle in ((0, forget), (1, trainer.restore)):
        contribution(trainer, round_number)
        assert trainer.kept_rounds == (round_number,)
        assert (settle(round_number), settle(round_number)) == (True, False)
    assert trainer.kept_rounds == ()


# ---------------------------------------------------------------------------------------------------
# Saving at any moment


@pytest.mark.parametrize("name", [*RECIPES, *FAMILY])
def test_state_saved_during_a_round_leaves_out_its_steps(dataset: TokenDataset, name: str, tmp_path: Path) -> None:
    trainer = make(dataset, name)
    trainer.apply(0, [contribution(trainer, 0)])
    residual = trainer.recipe.residual.coefficients.clone()
    trainer.train(Share(1, 0, 1))
    trainer.save(tmp_path / "state")
    restarted = newcomer(trainer, dataset)
    restarted.load(tmp_path / "state")
    assert (restarted.round, restarted.root(), restarted.kept_rounds) == (1, trainer.root(), (0,))
    assert torch.equal(restarted.recipe.residual.coefficients, residual)
    with pytest.raises(AssertionError, match="a contribution follows its training"):
        restarted.contribute(1)
    payloads = [trainer.contribute(1), contribution(restarted, 1)]  # whoever saves goes on as if nothing had been
    is_local = trainer.run.recipe.name == "local"
    assert (payloads[0] == payloads[1]) != is_local  # its inner optimizer has seen those steps


@pytest.mark.parametrize("name", [*RECIPES, *FAMILY])
def test_state_saved_before_the_announcement_has_the_contribution_to_give_back(
    dataset: TokenDataset, name: str, tmp_path: Path
) -> None:
    trainer = make(dataset, name)
    trainer.train(Share(0, 0, 1))
    trainer.contribute(0)
    trainer.save(tmp_path / "state")
    restarted = newcomer(trainer, dataset)
    restarted.load(tmp_path / "state")
    assert restarted.kept_rounds == (0,)
    assert restarted.restore(0) is trainer.restore(0) is True
    assert torch.equal(restarted.recipe.residual.coefficients, trainer.recipe.residual.coefficients)
    assert contribution(restarted, 0) == contribution(trainer, 0)  # the round can be trained again


@pytest.mark.parametrize("rule", RULES)
def test_a_node_of_a_run_with_a_rule_goes_on_from_what_it_saved_and_each_gets_back_what_did_not_count(
    dataset: TokenDataset, rule: str, tmp_path: Path
) -> None:
    trainers = [make(dataset, "local", rule=rule, **{RULES[rule].setting: 1}) for _ in range(7)]
    first = trainers[0].root()
    for number in range(2):
        payloads = [contribution(trainer, number, place, 7) for place, trainer in enumerate(trainers)]
        if number == 1:  # between its announcement and the round
            trainers[2].save(tmp_path / "state")
        for place, trainer in enumerate(trainers):
            trainer.apply(number, payloads, {number: payloads[place]})
    restarted = newcomer(trainers[2], dataset)
    restarted.load(tmp_path / "state")
    restarted.apply(1, payloads, {1: payloads[2]})
    assert len({trainer.root() for trainer in (*trainers, restarted)} | {first}) == 2
    assert torch.equal(restarted.recipe.residual.coefficients, trainers[2].recipe.residual.coefficients)
    assert contribution(restarted, 2, 2, 7) == contribution(trainers[2], 2, 2, 7)


# ---------------------------------------------------------------------------------------------------
# Data


def test_positions_are_those_that_are_trained_on(dataset: TokenDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(dataset, "local", local_steps=3, passes_per_step=2)
    used: list[int] = []
    real = trainer.dataset.batch

    def spy(positions: Any, length: int) -> Any:
        used.extend(positions.tolist())
        return real(positions, length)

    monkeypatch.setattr(trainer.dataset, "batch", spy)
    trainer.train(Share(7, 1, 3))
    assert used == trainer.positions_for(Share(7, 1, 3)).tolist()
    assert len(used) == 3 * 2 * 4
    assert not set(used) & set(trainer.positions_for(Share(7, 0, 3)).tolist())


def test_a_learner_reads_what_the_runs_policy_assigns(dataset: TokenDataset) -> None:
    drawn = make(dataset, "local", seed=1, local_steps=3)
    run = drawn.run.model_copy(update={"data": DataConfig(assignment="window")})
    window, length, count = Trainer(run, ONE_THREAD, dataset), run.model.sequence_length, run.recipe.round_sequences
    sequences = dataset.sequences(length)
    assert drawn.positions_for(Share(7, 1, 3)).tolist() == shard(1, 7, 1, 3, count, sequences).tolist()
    most = dataset.sequences_in(WINDOW_PIECES, length)
    assert window.positions_for(Share(7, 1, 3)).tolist() == shard_in_window(1, 7, 1, 3, count, sequences, most).tolist()
    slots = PassSlots(40, 20, 8, 4)  # fewer than three steps of four sequences need
    assert drawn.positions_for(Share(7, 1, 3, slots)).tolist() == 3 * shard_of_slots(1, slots, sequences).tolist()


def test_a_node_trains_and_evaluates_with_just_the_pieces_that_it_asked_for(
    dataset: TokenDataset, tmp_path: Path
) -> None:
    encoded = dataset.manifest_bytes()
    sparse = store_manifest(tmp_path / "sparse", encoded, manifest_digest(encoded))
    rich, poor = make(dataset), make(sparse)
    length = rich.run.model.sequence_length
    missing = sparse.missing(poor.positions_for(Share(0, 0, 1)), length)
    missing += sparse.missing_held_out(EVALUATED_SEQUENCES, length)
    assert 0 < len(missing) < len(sparse.missing_anywhere())
    for digest in missing:
        piece = dataset.piece(digest)
        assert piece is not None
        sparse.add_piece(digest, piece)
    assert contribution(poor, 0) == contribution(rich, 0)
    assert poor.evaluate() == rich.evaluate()


@pytest.mark.parametrize("is_own", [False, True], ids=["checked", "own"])
@pytest.mark.parametrize("name", [*RECIPES, *FAMILY])
def test_a_payload_that_was_checked_or_packed_here_is_not_unpacked_to_apply_it_and_gives_the_same_weights(
    dataset: TokenDataset, name: str, is_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = make(dataset, name), make(dataset, name)
    payload = contribution(first, 0)
    second.apply(0, [payload])
    assert is_own or first.check(payload) is None
    monkeypatch.delattr("p2ptrain.exact.aggregate.unpack")
    first.apply(0, [payload], {0: payload} if is_own else {})
    assert first.root() == second.root()
    assert not first.replica.unpacked, "it is of no more use"


def test_no_more_unpacked_payloads_are_kept_than_there_is_room_for(
    dataset: TokenDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(dataset)
    monkeypatch.setattr(replica, "UNPACKED_BYTES", 2 * trainer.outer.contribution_bytes)
    payloads = []
    for number in range(3):
        trainer.train(Share(number, 0, 1))
        payloads.append(trainer.contribute(number))
        assert trainer.check(payloads[-1]) is None
    assert list(trainer.replica.unpacked) == payloads[1:]


def test_a_payload_that_came_too_late_for_its_round_is_not_kept_unpacked(dataset: TokenDataset) -> None:
    trainer = make(dataset)
    trainer.train(Share(0, 0, 1))
    payload = trainer.contribute(0)
    assert trainer.check(payload) is None
    trainer.apply(0, [])
    assert list(trainer.replica.unpacked) == [payload], "it may be one for the next round, from someone faster"
    trainer.apply(1, [])
    assert not trainer.replica.unpacked


# ---------------------------------------------------------------------------------------------------
# In bf16


@pytest.mark.parametrize("name", ["demo", "local"])
def test_half_of_the_private_state_learns_as_well_in_a_swarm_with_others(dataset: TokenDataset, name: str) -> None:
    trainers = [make(dataset, name, half_state=half) for half in (True, False)]
    alone = [make(dataset, name) for _ in range(2)]
    for round_number in range(14):  # after ten the loss still falls by 0.05 a round, and noise alone exceeds the bound
        for swarm in (trainers, alone):
            swarm_round(swarm, round_number)
        assert trainers[0].root() == trainers[1].root()
    assert trainers[0].evaluate() < alone[0].evaluate() + 0.02
    assert trainers[0].evaluate() < np.log(256) - 0.5
    private = [trainers[0].recipe.residual.coefficients, trainers[0].recipe.state().get("inner_mean")]
    assert {tensor.dtype for tensor in private if tensor is not None} == {torch.bfloat16}


@pytest.mark.parametrize("half_state", [True, False])
def test_an_owner_may_choose_the_other_size_of_state_and_go_on(
    dataset: TokenDataset, half_state: bool, tmp_path: Path
) -> None:
    before, after = (make(dataset, "local", half_state=half) for half in (not half_state, half_state))
    swarm_round([before], 0)
    before.save(tmp_path / "state")
    after.load(tmp_path / "state")
    assert after.root() == before.root()
    for name, tensor in before.recipe.state().items():
        assert torch.equal(after.recipe.state()[name], tensor.to(after.recipe.state()[name].dtype))
    swarm_round([after], 1)
