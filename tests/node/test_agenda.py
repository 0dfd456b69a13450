"""Motions that the run go on as another, as an owner moves, reads and assents to them, and as a standing rule does."""

from __future__ import annotations

import errno
import logging
import shutil
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from p2ptrain.config import RunConfig
from p2ptrain.config.succession import change_of
from p2ptrain.core import events as ev
from p2ptrain.core.messages import NOTHING
from p2ptrain.core.succession import Motion
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.data.tokenizer import JsonTokenizer
from p2ptrain.errors import ConfigError, DataError
from p2ptrain.identity import peer_id_of
from p2ptrain.node import agenda as agenda_module
from p2ptrain.node.agenda import AHEAD_ROUNDS, Agenda, accepts, costs_of, text_of
from p2ptrain.observe.progress import agenda_lines, lines_of
from tests.helpers.memory_swarm import Member, MemorySwarm, swarm
from tests.helpers.net import skipping_time, until
from tests.helpers.tokenizers import prepared, tokenizer_json

RUN = RunConfig.model_validate({"name": "local", "recipe": {"name": "local"}})
SLOWER = {"recipe.learning_rate": "1/2000"}
OTHER_K = {"recipe.k": 4}


def motion_of(settings: dict[str, object], run: RunConfig = RUN, last: int = 4_200, weights: int = 4_200) -> Motion:
    root = b"\1" * 32 if weights < last else NOTHING
    return Motion(b"\2" * 32, 4_180, last, weights, root, change_of(run, settings))


# ---------------------------------------------------------------------------------------------------
# Words and rules


@pytest.mark.parametrize(
    ("settings", "weights", "rules"),
    [
        ({"recipe.inner_learning_rate": "1/200"}, 4_200, ["all", "rates"]),
        ({"recipe.schedule": "linear", "recipe.rounds": 9_000, "recipe.local_steps": 20}, 4_200, ["all", "rates"]),
        ({"recipe.inner_learning_rate": "1/200"}, 4_100, ["all"]),
        ({}, 4_100, ["all"]),
        ({"recipe.inner_learning_rate": "1/200", "recipe.k": 128}, 4_200, ["all"]),
        ({"agreement.stall_seconds": 60}, 4_200, ["all"]),
    ],
)
def test_a_standing_rule_accepts_what_it_says(settings: dict[str, object], weights: int, rules: list[str]) -> None:
    motion = motion_of(settings, weights=weights)
    assert [rule for rule in ("all", "rates", "ask", "never") if accepts(rule, RUN, motion)] == rules


def test_a_motion_in_words() -> None:
    assert text_of(RUN, motion_of({"recipe.inner_learning_rate": "1/200"})) == (
        "go on after round 4,200 with recipe.inner_learning_rate 1/200 instead of 1/100"
    )
    assert text_of(RUN, motion_of({"recipe.k": [64, 256], "recipe.nesterov": False}, weights=4_100)) == (
        "go on after round 4,200 from the weights of round 4,100 with recipe.k [64, 256] instead of 256"
    )
    assert text_of(RUN, motion_of({}, weights=4_100)) == "go on after round 4,200 from the weights of round 4,100"


@pytest.mark.parametrize(
    ("recipe", "costs"),
    [
        ({"inner_learning_rate": Fraction(1, 200)}, []),
        ({"local_steps": 20}, ["a round is 2 times the work: 160 sequences"]),
        (
            {"sequences_per_pass": 4},
            [
                "a round is 0.5 times the work: 40 sequences",
                "a pass holds 0.5 times the sequences in memory, unless device.sequences_per_pass is set",
            ],
        ),
        ({"k": 512}, ["a contribution has 1.71 times the bytes: 12,285 at most"]),
    ],
)
def test_what_a_change_costs_a_machine(recipe: dict[str, object], costs: list[str]) -> None:
    wanted = RUN.model_copy(update={"recipe": RUN.recipe.model_copy(update=recipe)})
    assert costs_of(RUN, wanted, [(1_024, 128)]) == costs


# ---------------------------------------------------------------------------------------------------
# An owner and the daemon


async def ask(node: Member, do: str, **request: Any) -> dict[str, Any]:
    return await node.daemon.answer({"do": do, **request})


def agenda_of(node: Member, rule: str) -> Agenda:
    """What a node with this rule would have after a restart."""
    return Agenda(node.daemon.driver, rule, node.daemon.launch.home)


def view(node: Member) -> Any:
    return node.daemon.driver.node.view()


async def moved(made: MemorySwarm, settings: dict[str, object] = SLOWER, **more: Any) -> dict[str, Any]:
    """The first member moves; all have seen it."""
    found = await ask(made.nodes[0], "propose", settings=settings, **more)
    await until(lambda: all(view(node).state.succession.motions for node in made.nodes))
    return found


@skipping_time
async def test_owners_move_see_and_decide_that_the_run_goes_on_as_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with swarm(tmp_path) as made:
        await made.reach(3)
        author, *others = made.nodes
        before = view(author).state.round
        found = await moved(made)
        text = f"go on after round {before + AHEAD_ROUNDS} with recipe.learning_rate 1/2000 instead of 1/1000"
        assert found == {"motion": found["motion"], "text": text, "needed": 3}
        (item,) = (await ask(others[0], "agenda"))["motions"]
        assert item == {
            "motion": found["motion"], "text": text, "author": peer_id_of(author.key), "assents": 1, "needed": 3,
            "last_round": before + AHEAD_ROUNDS, "weights_round": before + AHEAD_ROUNDS, "costs": [],
            "changes": {"recipe.learning_rate": ["1/1000", "1/2000"]},
            "is_mine": False, "obstacle": "",
        }  # fmt: skip
        agendas = [agenda_of(node, "ask") for node in made.nodes]
        for agenda in agendas:
            await agenda.look()
        assert f"{peer_id_of(author.key)} moves that the run {text}: `p2ptrain agenda`" in caplog.messages
        assert f"`p2ptrain assent {found['motion'][:8]}`" in agenda_lines(await ask(others[0], "agenda"))
        assert f"{found['motion'][:8]}: that the run {text}" in lines_of(others[0].status)
        for node in others[:2]:
            await ask(node, "assent", motion=found["motion"][:8].upper())
        await until(lambda: all(view(node).state.succession.decided for node in made.nodes))
        for agenda in agendas:
            await agenda.look()
        told = await ask(others[0], "agenda")
        assert (told["motions"], told["successor"]["is_mine"], told["successor"]["assents"]) == ([], True, 3)
        assert others[0].status["ends_after_round"] == before + AHEAD_ROUNDS
        assert agenda_of(others[2], "rates").goes_along(view(author).state.succession.decided)
        assert [agenda.goes_along(view(author).state.succession.decided) for agenda in agendas] == [True] * 3 + [False]
        assert f"decided: the run is to {text}; this node goes along" in caplog.messages
        assert "this node ends then; to go along: `p2ptrain assent" in caplog.text
        assert (await ask(others[2], "assent", motion=found["motion"]))["text"].startswith("it is decided already")
        decided = view(author).state.succession.decided
        assert agenda_of(others[2], "ask").goes_along(decided), "as after a restart"
        assert not agenda_of(author, "never").goes_along(decided)
        with pytest.raises(DataError, match=r"for good\. `p2ptrain leave`"):
            await ask(others[0], "withdraw")
        with pytest.raises(DataError, match="decided already"):
            await ask(author, "propose", settings=OTHER_K)


@skipping_time
async def test_an_assent_is_withdrawn_and_a_motion_lapses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with swarm(tmp_path) as made:
        await made.reach(3)
        author, node = made.nodes[:2]
        agenda = agenda_of(node, "all")
        found = await moved(made, after=view(author).state.round + 12)
        with pytest.raises(DataError, match="assents to nothing"):
            await ask(node, "withdraw")
        await agenda.look()
        assert "assenting to" in caplog.text
        name = bytes.fromhex(found["motion"])
        await until(lambda: view(node).state.succession.assent_of(node.key) == name)
        caplog.clear()
        await agenda_of(node, "all").look()  # as after a restart
        assert "assenting" not in caplog.text, "it assents already"
        assert (await ask(node, "withdraw"))["text"] == "this node assents to nothing any more"
        await until(lambda: view(node).state.succession.assent_of(node.key) == NOTHING)
        await agenda_of(node, "all").look()
        assert "assenting" not in caplog.text, "the owner has withdrawn since"
        (motion,) = view(node).state.succession.motions
        assert not agenda_of(node, "all").goes_along(motion), "nor does it go along if others decide so"
        assert agenda_of(author, "all").goes_along(motion)
        await until(lambda: not view(node).state.succession.motions)
        caplog.clear()
        await agenda.look()
        assert caplog.messages == [f"the motion of {peer_id_of(author.key)} has lapsed, that the run {found['text']}"]


@skipping_time
async def test_nodes_with_a_standing_rule_decide_without_their_owners(tmp_path: Path) -> None:
    async with swarm(tmp_path) as made:
        await made.reach(3)
        agendas = [agenda_of(node, "rates") for node in made.nodes]
        found = await moved(made)
        for agenda in agendas:
            await agenda.look()
        await until(lambda: view(made.nodes[0]).state.succession.decided is not None)
        assert view(made.nodes[0]).state.succession.decided.name.hex() == found["motion"]


@skipping_time
async def test_what_cannot_be_moved_is_answered_in_a_line(tmp_path: Path) -> None:
    async with swarm(tmp_path, history_rounds=16) as made:
        await made.reach(30)
        node = made.nodes[0]
        for request, why in (
            ({"settings": SLOWER, "after": 2}, "the last round is 2, and could be"),
            ({"settings": {}}, "it changes nothing"),
            ({"settings": {"recipe.learning_rate": "0.001"}}, "it changes nothing"),
            ({"settings": {}, "back_to": view(node).state.round}, "is not certified yet; the newest that is: "),
            ({"settings": {}, "back_to": 3}, "this node does not keep round 3: its history"),
            ({"settings": 7}, "a motion needs its settings"),
        ):
            with pytest.raises(DataError, match=why):
                await ask(node, "propose", **request)
        for request, why in (
            ({"settings": {"recipe.learning_rate": "nan"}}, "recipe.learning_rate: expected a number"),
            ({"settings": {"model.dim": 8}}, "model.dim: a successor cannot change it"),
            ({"settings": {"recipe.speed": 8}}, "recipe.speed: is no setting"),
            ({"settings": SLOWER, "after": -1}, "--after: is no round"),
            ({"settings": SLOWER, "back_to": True}, "--back-to: is no round"),
        ):
            with pytest.raises(ConfigError, match=why):
                await ask(node, "propose", **request)
        with pytest.raises(DataError, match="no motion begins with '12'"):
            await ask(node, "assent", motion="12")
        with pytest.raises(DataError, match="the name of a motion"):
            await ask(node, "assent", motion="")
        never = agenda_of(node, "never")
        for refused in (never.propose(SLOWER, None, None), never.assent("12")):
            with pytest.raises(ConfigError, match=r"^succession\.accept"):
                await refused
        assert not view(node).state.succession.motions


@skipping_time
async def test_a_node_neither_assents_to_nor_goes_along_with_a_run_that_its_release_does_not_know(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with swarm(tmp_path) as made:
        await made.reach(3)
        author, node = made.nodes[:2]
        last = view(author).state.round + 12
        later = b'{"protocol":999,"recipe":{"speed":"\\u001b[2Jfast"}}'
        author.daemon.driver.intake.give(ev.MoveRequested(last, last, NOTHING, later))
        await until(lambda: bool(view(node).state.succession.motions))
        (motion,) = view(node).state.succession.motions
        agenda = agenda_of(node, "all")
        await agenda.look()
        assert "knows no such run; a later one may" in caplog.text
        item = agenda.item(motion)
        assert item.changes == {"protocol": (str(made.run.protocol), "999"), "recipe.speed": ("null", "\\x1b[2Jfast")}
        assert (item.obstacle, item.costs) == ("this release of p2ptrain knows no such run; a later one may", [])
        assert not agenda.goes_along(motion)
        with pytest.raises(DataError, match="knows no such run"):
            await ask(node, "assent", motion=motion.name.hex())


@skipping_time
async def test_what_a_file_says_as_the_run_has_it_is_no_change(tmp_path: Path) -> None:
    async with swarm(tmp_path) as made:
        await made.reach(3)
        run, node = made.run, made.nodes[0]
        same = {
            "name": run.name,
            "model.preset": run.model.preset,
            "data.manifest": "embedded",
            "recipe.k": run.recipe.k,
        }
        found = await ask(node, "propose", settings=same | {"recipe.learning_rate": "1/2000"})
        assert found["text"].endswith("with recipe.learning_rate 1/2000 instead of 1/1000")
        with pytest.raises(ConfigError, match="name"):
            await ask(node, "propose", settings=SLOWER | {"name": "another"})


@skipping_time
async def test_a_roll_back_needs_a_checkpoint_with_the_certified_weights(tmp_path: Path) -> None:
    async with swarm(tmp_path) as made:
        await made.reach(3)
        author, node = made.nodes[:2]
        saved = (await ask(author, "checkpoint"))["round"]
        await until(lambda: view(author).state.root_round > saved + 1)
        with pytest.raises(DataError, match=f"does not keep round {saved + 1}: neither its disk nor a connected peer"):
            await ask(author, "propose", settings={}, back_to=saved + 1)
        found = await moved(made, {}, back_to=saved)
        (motion,) = view(node).state.succession.motions
        agenda = agenda_of(node, "all")
        assert await agenda.obstacle(motion) == "", "the author offers it"
        lies = Motion(motion.author, motion.made, motion.last, saved, b"\1" * 32, motion.change)
        assert "is not the certified one" in await agenda.obstacle(lies)
        await agenda.look()
        await until(lambda: view(node).state.succession.assents_to(motion.name) == 2)
        assert found["text"].endswith(f"from the weights of round {saved}")


@skipping_time
async def test_a_run_for_which_the_disk_is_too_small_is_not_assented_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with swarm(tmp_path) as made:
        await made.reach(1)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
        with pytest.raises(DataError, match=r"needs about .* of disk space .*, and may have "):
            await ask(made.nodes[0], "propose", settings=SLOWER)


@skipping_time
async def test_data_that_a_run_is_to_go_on_with_is_with_its_author_and_nobody_assents_without(tmp_path: Path) -> None:
    more, other, text = tmp_path / "more", tmp_path / "other", tmp_path / "text"
    text.write_text("A story that goes on for a while.\n" * 900)
    manifest = prepared(more, text).digest
    prepared(other, text, tokenizer=JsonTokenizer(tokenizer_json()))
    async with swarm(tmp_path) as made:
        await made.reach(3)
        author, node = made.nodes[:2]
        for data, why in ((tmp_path, "holds no data set"), (other, "has other tokens than this run's")):
            with pytest.raises(DataError, match=why):
                await ask(author, "propose", settings={}, data=str(data))
        with pytest.raises(DataError, match="neither this disk nor a connected peer has the data 3333"):
            await ask(author, "propose", settings={"data.manifest": "33" * 32})
        found = await moved(made, {}, data=str(more))
        (motion,) = view(node).state.succession.motions
        assert found["text"].endswith(f"data.manifest {manifest} instead of {made.run.data.manifest}")
        nobodys = replace(motion, change=motion.change.replace(manifest.encode(), b"3" * 64))
        agenda = agenda_of(node, "all")
        assert await agenda.obstacle(motion) == "", "the author has it"
        assert "neither this disk nor a connected peer has the data 3333" in await agenda.obstacle(nobodys)
        taken = author.daemon.launch.home.usual_dataset(manifest)
        assert TokenDataset.open(taken, manifest).missing_anywhere() == []


@skipping_time
async def test_of_a_large_state_only_a_round_with_a_root_of_all_of_it_can_be_the_last(tmp_path: Path) -> None:
    large = {"full_root_bytes_max": 2**20, "partial_root_leaves": 1, "full_root_rounds": 50}
    async with swarm(tmp_path, sections={"state": large}) as made:
        await made.reach(1)
        node = made.nodes[0]
        agenda = agenda_of(node, "all")
        size = "p2ptrain.node.agenda.covered_pieces"
        with pytest.MonkeyPatch.context() as patch:  # the swarm's state has two pieces, too few for a part of them
            patch.setattr(size, lambda size, config, number, _: None if number % config.full_root_rounds == 0 else [0])
            motion = await agenda.propose(SLOWER, None, None)
            assert motion.last == 50
            with pytest.raises(DataError, match="covers only a part of the state"):
                await agenda.propose(SLOWER, 49, None)


def test_a_piece_whose_copy_was_interrupted_is_copied_whole_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "given" / "piece", tmp_path / "own" / "piece"
    for each in (source, target):
        each.parent.mkdir()
    source.write_bytes(b"whole")

    def elsewhere(*_: object) -> None:
        raise OSError(errno.EXDEV, "another file system")

    def full(_: str, to: Path) -> None:
        Path(to).write_bytes(b"wh")
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(Path, "hardlink_to", elsewhere)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="full"):
        patch.setattr(agenda_module.shutil, "copyfile", full)
        agenda_module.link_or_copy(str(source), str(target))
    assert not target.exists()
    agenda_module.link_or_copy(str(source), str(target))
    assert target.read_bytes() == b"whole"
