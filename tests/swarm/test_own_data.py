"""Real daemons train one model, each on data that its owner prepared and that nobody else gets."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from p2ptrain.data.dataset import TokenDataset, manifest_digest, read_manifest
from p2ptrain.identity import Identity
from p2ptrain.node.control import ask
from tests.helpers.daemons import ANSWER_SECONDS, LISTEN, TEST_SECONDS, DaemonSwarm, StartableDaemon, p2ptrain
from tests.helpers.scripts import script, until_both_contributed

NAMES = ("first", "second", "third")
EVERY = 10
ROUNDS = 60
CLOSED_RUN = """\
[data]
source = "own"

[eval]
every_rounds = {every}

[admission]
policy = "allowlist"
probation_rounds = 1
keys = {keys}
"""

pytestmark = pytest.mark.timeout(TEST_SECONDS)


def texts_of(count: int) -> list[str]:
    """Returns different texts, one for each owner."""
    everything = [topics[name] for name in sorted(topics)]
    return ["\n".join(everything[number::count]) for number in range(count)]


def prepared(directory: Path, text: str) -> Path:
    """Prepares an owner's data."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    file = directory.with_suffix(".jsonl")
    parts = text.split("\n\n")
    file.write_text("".join(json.dumps({"text": part}) + "\n" for part in parts if part))
    status, _, error = p2ptrain("data", "prepare", directory, file, "--held-out", "5")
    assert status == 0, error
    return directory


def closed_run(swarm: DaemonSwarm, names: Sequence[str] = NAMES) -> Path:
    """Writes the file of a run of own data in which these nodes may take part."""
    keys = [Identity.make(swarm.directory / name / "identity.key").key.hex() for name in names]
    path = swarm.run_file()
    usual = path.read_text().partition("[admission]")[0]
    path.write_text(usual + CLOSED_RUN.format(every=EVERY, keys=json.dumps(keys)))
    return path


def held_out(node: StartableDaemon) -> dict[int, float]:
    """Returns the held-out losses that a node has recorded, by round."""
    found = ask(node.directory, {"do": "rounds", "last": 1_000}, seconds=ANSWER_SECONDS)["rounds"]
    return {each["held_out_round"]: each["held_out_loss"] for each in found if each["held_out_round"] is not None}


def pieces_of(directory: Path) -> set[str]:
    """Returns the digests of the training pieces of a data set."""
    data = TokenDataset.open(directory, manifest_digest(read_manifest(directory)))
    return set(data.manifest.training.pieces)


def test_three_nodes_train_one_model_on_data_that_stays_with_each(swarm: DaemonSwarm) -> None:
    own = [
        prepared(swarm.directory / "data" / name, text) for name, text in zip(NAMES, texts_of(len(NAMES)), strict=True)
    ]
    first = swarm.add("first", "start", closed_run(swarm), "--data", own[0]).start().until_up()
    address = ("--bootstrap", first.address)
    by_config = {"P2PTRAIN_STORAGE__OWN_DATA": str(own[1])}  # which a restart without the option finds again
    second = swarm.add("second", "join", *address, **by_config).start()
    third = swarm.add("third", "join", *address, "--data", own[2]).start()
    nodes = [first, second, third]
    for node in nodes:
        node.until(lambda node=node: len(node.status().get("roster", ())) == len(nodes))
    second.until_applied(first.applied + 10)
    for node in (second, first):  # each repeats what it has trained since its checkpoint
        node.kill()
        before = len(node.text)
        node.start()
        node.until(lambda node=node, before=before: "continuing from the checkpoint of round" in node.text[before:])
        node.until(lambda node=node: node.is_member)
    number = max(node.applied for node in nodes) + ROUNDS
    for node in nodes:
        node.until_applied(number)
    assert swarm.compared() > ROUNDS / 2
    losses = held_out(third)
    assert losses[max(losses)] < losses[min(losses)] - 0.1
    for node in nodes:
        assert "came out differently" not in node.text
        assert "cannot be repeated" not in node.text
        assert "which stays on this machine" in node.status()["own_data"]
        assert int(node.status()["mine"]["applied"]) > ROUNDS / 4
        others = set().union(*(pieces_of(data) for data in own if data != own[nodes.index(node)]))
        assert others
        assert not [path for path in node.directory.rglob("*") if path.name in others]
    status, out, error = p2ptrain("evaluate", "--data-dir", third.directory)  # on the held-out data, which is here
    assert (status, "loss" in out) == (0, True), error
    shown = p2ptrain("status", "--data-dir", third.directory)[1]
    assert re.search(r"^data +the owner's, which stays on this machine; contributions leave it", shown, re.MULTILINE)


def test_who_has_no_data_or_that_of_another_tokenizer_is_told_before_anything_is_fetched(swarm: DaemonSwarm) -> None:
    own = prepared(swarm.directory / "data" / "first", texts_of(1)[0])
    first = swarm.add("first", "start", closed_run(swarm), "--data", own).start().until_up()
    place = swarm.directory / "second"
    arguments = ("join", "--bootstrap", first.address, "--listen", LISTEN, "--data-dir", place)
    status, _, error = p2ptrain(*arguments)
    assert status == 1
    what = "--data: the nodes of run test bring their own data, and this one has none. Give the directory that"
    assert what in error
    status, _, error = p2ptrain(*arguments, "--data", swarm.directory / "nowhere")
    assert status == 1
    assert "nowhere holds no data set" in error
    assert not (place / "data").exists() and not (place / "runs").exists()
    shared = swarm.first("shared", "shared").start().until_up()
    arguments = ("join", "--bootstrap", shared.address, "--listen", LISTEN, "--data-dir", place)
    status, _, error = p2ptrain(*arguments, "--data", own)
    assert status == 1
    assert (
        "--data: the nodes of run shared share their training data, and do not bring their own. Leave it out" in error
    )


def test_the_example_trains_on_two_texts(swarm: DaemonSwarm) -> None:
    files = []
    for name, text in zip(NAMES, texts_of(2), strict=False):
        files.append(swarm.directory / f"{name}.txt")
        files[-1].write_text(text)
    first = script(swarm, "first", str(files[0]), example="own_data.py").start().until_up()
    invitation = first.directory / "friends.invitation"
    first.until(invitation.exists)
    second = script(swarm, "second", str(files[1]), first.address, str(invitation), example="own_data.py")
    second.start()
    until_both_contributed(swarm, first, second)

    def losses() -> list[float]:
        return [float(each) for each in re.findall(r"held-out loss ([\d.]+)", second.log.read_text())]

    second.until(lambda: len(losses()) > 3 and sum(losses()[-3:]) / 3 < losses()[0])
    for each in (second, first):
        each.signal(signal.SIGINT)
        each.until_ended()
        assert "away: ended" in each.text.splitlines()[-1]  # it keeps its admission
    for each in (first, second):
        each.start()
    first.until(lambda: first.log.read_text().count("others join with") == 2)


def test_a_node_with_a_privacy_budget_tells_no_loss_and_ends_its_training_when_it_is_spent(swarm: DaemonSwarm) -> None:
    own = [prepared(swarm.directory / "data" / name, text) for name, text in zip(NAMES, texts_of(2), strict=False)]
    path = closed_run(swarm, NAMES[:2])
    patient = path.read_text().replace("staleness_rounds_max = 1", "staleness_rounds_max = 16")  # noise takes time
    path.write_text(patient)
    first = swarm.add("first", "start", path, "--data", own[0]).start().until_up()
    privacy = {"P2PTRAIN_PRIVACY__EPSILON": "1/10"}
    arguments = ("join", "--bootstrap", first.address, "--listen", LISTEN, "--data", own[1])
    status, _, error = p2ptrain(*arguments, "--data-dir", swarm.directory / "second", **privacy)
    assert status == 1
    assert re.search(r"privacy\.epsilon: 0\.1 allows no round: \d+ steps? with noise 1 on \d+ sequences", error)
    privacy = {"P2PTRAIN_PRIVACY__EPSILON": "1/5", "P2PTRAIN_PRIVACY__NOISE": "4"}
    second = swarm.add("second", "join", "--bootstrap", first.address, "--data", own[1], **privacy).start()
    second.until(lambda: steps_paid(second) > 2)
    second.kill()
    paid = steps_paid(second)
    second.start().until(lambda: steps_paid(second) > paid)  # what was lost is trained anew, and paid for again
    second.until(lambda: "the privacy budget is spent" in str(second.status().get("health")))
    status = second.status()
    assert 0.15 < status["privacy_epsilon"] <= 0.2
    assert re.search(r"with noise: epsilon 0\.\d\d of 0\.2 is spent \(delta 1e-06\)$", status["own_data"])
    paid, number = steps_paid(second), first.applied
    first.until_applied(number + 5)  # the swarm goes on without it
    second.until_applied(number + 5)
    assert steps_paid(second) == paid
    assert int(second.status()["mine"]["applied"]) > 10
    assert not re.search("came out differently|cannot be repeated", second.text)
    swarm.compared()
    assert set(losses_announced(second)) == {0}
    assert min(losses_announced(first)) > 0


def steps_paid(node: StartableDaemon) -> int:
    file = node.directory / "privacy.json"
    return sum(int(each["steps"]) for each in json.loads(file.read_text())["steps"]) if file.exists() else 0


def losses_announced(node: StartableDaemon) -> list[int]:
    """Returns the losses of trainings that a node told the core, which announces them."""
    logs = b"".join(path.read_bytes() for path in sorted(node.directory.glob("runs/*/events/*")))
    return [int(each) for each in re.findall(rb'"TrainingFinished".*?"loss":(\d+)', logs)]
