"""Real daemons measure the held-out loss of the agreed weights, and all show the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from p2ptrain.config import DeviceConfig, RunConfig
from p2ptrain.data.corpus import Document
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.data.prepare import _fraction_of
from p2ptrain.node.control import ask
from p2ptrain.store.checkpoints import Checkpoints
from p2ptrain.store.store import CHECKPOINTS_NAME
from tests.helpers.daemons import ANSWER_SECONDS, TEST_SECONDS, DaemonSwarm, StartableDaemon, p2ptrain
from tests.helpers.trainer import Trainer

EVERY = 10
ROUNDS = 120
SEQUENCES = 3  # held out, fewer than any node measures at least, so that all measure the same
KEPT = {"P2PTRAIN_STORAGE__CHECKPOINT_EVERY_ROUNDS": str(EVERY), "P2PTRAIN_STORAGE__CHECKPOINTS_KEPT": "100"}

pytestmark = pytest.mark.timeout(TEST_SECONDS)


def prepared(directory: Path) -> str:
    """Prepares a data set of two documents, the smaller of which is held out; returns the manifest's digest."""
    large = "The swarm keeps what it has agreed on, and whoever comes later reads it.\n" * 400
    smaller = (f"{n}. Whoever comes later reads what is agreed on.\n" * 9 for n in range(1_000))
    border = _fraction_of(Document(large, 0))
    small = next(text for each in smaller if _fraction_of(Document(text := each[: 64 * SEQUENCES + 1], 0)) < border)
    texts = directory / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": each}) + "\n" for each in (large, small)))
    status, out, _ = p2ptrain("data", "prepare", directory / "data", texts, "--held-out", "0.0001")
    assert status == 0
    return out.split('manifest = "')[1][:64]


def measured(node: StartableDaemon) -> dict[int, float]:
    """Returns the held-out losses that a node has recorded, by round."""
    found = ask(node.directory, {"do": "rounds", "last": 1_000}, seconds=ANSWER_SECONDS)["rounds"]
    return {each["held_out_round"]: each["held_out_loss"] for each in found if each["held_out_round"] is not None}


def evaluated(node: StartableDaemon, run: RunConfig, data: TokenDataset) -> dict[int, float]:
    """Evaluates the agreed weights of a node's checkpoints, by round."""
    (directory,) = node.directory.glob("runs/*")
    trainer = Trainer(run, DeviceConfig(name="cpu", threads=1), data, initial=False)
    found = {}
    for each in Checkpoints(directory / CHECKPOINTS_NAME, run.id).found():
        assert not isinstance(each, Exception)
        trainer.load(each.trainer_path)
        found[each.round] = trainer.evaluate()
    return found


def test_three_daemons_show_the_held_out_loss_that_the_agreed_weights_have(swarm: DaemonSwarm) -> None:
    manifest = prepared(swarm.directory)
    path = swarm.run_file()
    path.write_text(f'{path.read_text()}\n[data]\nmanifest = "{manifest}"\n\n[eval]\nevery_rounds = {EVERY}\n')
    first = swarm.add("first", "start", path, "--data", swarm.directory / "data", **KEPT).start().until_up()
    nodes = [first, *(swarm.joiner(name, first.address, **KEPT).start() for name in ("second", "third"))]
    for node in nodes:
        node.until(lambda node=node: len(node.status().get("roster", ())) == len(nodes))
    number = first.applied + ROUNDS
    for node in nodes:
        node.until_applied(number)

    def told_by_all() -> tuple[list[dict[int, float]], set[int]]:
        told = [measured(node) for node in nodes]
        return told, set.intersection(*map(set, told))

    # A look takes at most 1 % of the time so far: after a slow first one the next is made later.
    first.until(lambda: len(told_by_all()[1]) >= 2)
    told, common = told_by_all()
    assert {each % EVERY for each in common} == {0}
    for each in common:
        assert len({losses[each] for losses in told}) == 1, f"of round {each}: {told}"
    statuses = [node.status() for node in nodes]
    for status in statuses:
        assert status["held_out_loss"] < 5.0
        assert status["perplexity"] == pytest.approx(2.718281828 ** status["held_out_loss"], rel=1e-3)
        assert 0 < len(status["text"]) <= 120
        assert status["text"].isprintable()
        assert status["text_round"] % EVERY == 0
        assert status["swarm_loss"] is not None
        assert 0 < status["drift"] < 1
        assert status["gradient_norm"] > 0
        assert status["mine"]["swarm_tokens"] > status["mine"]["tokens"] > 0
    for node in nodes:
        node.leave()

    (config,) = (swarm.directory / "first").glob("runs/*/run.json")
    run, losses = RunConfig.from_canonical(config.read_bytes()), told[0]
    own = evaluated(first, run, TokenDataset.open(swarm.directory / "data", manifest))
    checked = common & own.keys()
    assert len(checked) >= len(common) // 2
    for each in checked:
        assert losses[each] == pytest.approx(own[each], abs=1e-6)
    assert losses[max(losses)] < losses[min(losses)]
