"""`p2ptrain export`: the choice of the checkpoint, of the files to read it with, and the errors if there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from p2ptrain.config import RunConfig
from p2ptrain.core.events import Certified
from p2ptrain.core.state import genesis
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.data.tokenizer import JsonTokenizer
from p2ptrain.node.home import Home
from p2ptrain.node.saved import keep_tokenizer
from p2ptrain.store.checkpoints import STAMP_NAME, STATE_NAME, TRAINER_NAME
from p2ptrain.store.log import Log
from tests.helpers.core import KEYS
from tests.helpers.export import SMALL, Command, NodeDirectory, run_of, saved_node, state_of
from tests.helpers.store import some_records
from tests.helpers.tokenizers import json_lines, prepared, tokenizer_json


@pytest.fixture
def node(tmp_path: Path) -> NodeDirectory:
    return saved_node(tmp_path / "node")


def weights_in(directory: Path) -> bytes:
    content = (directory / "model.safetensors").read_bytes()
    return content[8 + int.from_bytes(content[:8], "little") :]


def state_in(node: NodeDirectory, number: int) -> bytes:
    [path] = node.checkpoints.directory.glob(f"*-round-{number}")
    return (path / STATE_NAME).read_bytes()


def test_the_newest_is_exported_or_the_one_that_is_named(
    p2ptrain: Command, node: NodeDirectory, tmp_path: Path
) -> None:
    root = node.checkpoints.present()[1].root.hex()[:16]
    told = f"round 16 of x, root {root}, not certified: there is no log of its run here: {tmp_path / 'out'}\n"
    assert p2ptrain("export", tmp_path / "out", *node.place) == (0, told, "")
    assert weights_in(tmp_path / "out") == state_in(node, 16)
    assert p2ptrain("export", tmp_path / "old", "--round", "8", *node.place)[0] == 0
    assert weights_in(tmp_path / "old") == state_in(node, 8)
    assert weights_in(tmp_path / "old") != weights_in(tmp_path / "out")


@pytest.mark.parametrize("name", [STATE_NAME, TRAINER_NAME, STAMP_NAME])
def test_what_is_damaged_is_named_and_an_older_one_exported(
    name: str, p2ptrain: Command, node: NodeDirectory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = node.checkpoints.present()[1].path / name
    path.write_bytes(path.read_bytes()[:-1])
    status, out, _ = p2ptrain("export", tmp_path / "out", *node.place)
    assert (status, out.partition(" of ")[0], weights_in(tmp_path / "out")) == (0, "round 8", state_in(node, 8))
    assert f"skipped: {path}: " in caplog.text
    status, out, err = p2ptrain("export", tmp_path / "no", "--round", "16", *node.place)
    assert (status, out) == (1, "")
    assert err == f"{node.checkpoints.directory}: no undamaged checkpoint of round 16\n"
    assert not (tmp_path / "no").exists()


def test_a_root_that_the_weights_have_not_is_a_failure(p2ptrain: Command, node: NodeDirectory, tmp_path: Path) -> None:
    node.save(24, state_of(node.run), root=b"r" * 32)
    status, out, err = p2ptrain("export", tmp_path / "out", *node.place)
    assert (status, out) == (1, "")
    assert "not the weights of round 24" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["node"]


def test_who_errs_is_told_what_to_do(p2ptrain: Command, node: NodeDirectory, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for arguments, told in (
        (
            ("there", "--data-dir", tmp_path / "nothing"),
            "there: it exists already. Name a directory that does not exist yet",
        ),
        (("out", *node.place, "--run", "none"), f"--data-dir: no run none in {node.directory}."),
        (("out", "--data-dir", tmp_path / "nothing"), f"--data-dir: no run in {tmp_path / 'nothing'}."),
        (("out", "--checkpoint", tmp_path / "nothing"), f"--checkpoint: {tmp_path / 'nothing'} holds no checkpoint."),
        (("out", "--checkpoint", tmp_path, "--round", "8"), "--round: the directory holds one round only."),
        (("out", "--round", "-1"), "Invalid value for '--round'"),
    ):
        status, out, err = p2ptrain("export", tmp_path / str(arguments[0]), *arguments[1:])
        assert (status, out) == (2, "")
        assert told in err
        assert "Traceback" not in err
    empty = NodeDirectory(tmp_path / "empty", run_of())
    status, _, err = p2ptrain("export", tmp_path / "out", *empty.place)
    why = "no checkpoint yet; a node writes the first once it has the run's weights"
    assert (status, err) == (1, f"{empty.checkpoints.directory}: {why}\n")
    damaged = empty.checkpoints.directory / "00000001-round-8"
    damaged.mkdir(parents=True)
    (damaged / "checkpoint.json").write_text("{")
    status, _, err = p2ptrain("export", tmp_path / "out", *empty.place)
    assert status == 1
    assert err.endswith(f"{empty.checkpoints.directory}: no undamaged checkpoint\n")


# ---------------------------------------------------------------------------------------------------
# A checkpoint that was copied elsewhere


def test_a_copied_checkpoint_is_exported_without_the_node(
    p2ptrain: Command, node: NodeDirectory, tmp_path: Path
) -> None:
    assert p2ptrain("checkpoint", "export", tmp_path / "copy", "--round", "8", *node.place)[0] == 0
    away = ("--data-dir", tmp_path / "nothing")
    assert p2ptrain("export", tmp_path / "out", "--checkpoint", tmp_path / "copy", *away)[0] == 0
    assert weights_in(tmp_path / "out") == state_in(node, 8)
    assert json.loads((tmp_path / "out" / "run.json").read_text())["name"] == "x"
    other = ("--run", "0" * 64)
    status, _, err = p2ptrain("export", tmp_path / "no", "--checkpoint", tmp_path / "copy", *away, *other)
    assert (status, f"--run: {tmp_path / 'copy'} belongs to run {node.run.run_id}." in err) == (2, True)


def test_a_copy_without_its_runs_settings_takes_those_of_the_node(
    p2ptrain: Command, node: NodeDirectory, tmp_path: Path
) -> None:
    p2ptrain("checkpoint", "export", tmp_path / "copy", *node.place)
    other = tmp_path / "copy" / "run.json"
    for content in (None, run_of("y").canonical(), RunConfig(name="x").canonical()):
        other.unlink(missing_ok=True)
        if content is not None:
            other.write_bytes(content)
        arguments = ("--checkpoint", tmp_path / "copy")
        status, _, err = p2ptrain("export", tmp_path / "no", *arguments, "--data-dir", tmp_path / "nothing")
        assert (status, err.partition(".")[0]) == (2, f"--data-dir: the config of run {node.run.run_id} is not here")
        out = tmp_path / f"out of {hash(content)}"
        assert p2ptrain("export", out, *arguments, *node.place)[0] == 0
        assert weights_in(out) == state_in(node, 16)
    other.write_bytes(b"nonsense")
    status, _, err = p2ptrain("export", tmp_path / "no", *arguments, *node.place)
    assert (status, f"{other}: not a run's config" in err) == (1, True)


@pytest.mark.parametrize("name", [STATE_NAME, TRAINER_NAME, STAMP_NAME])
def test_a_copy_that_was_damaged_is_refused(name: str, p2ptrain: Command, node: NodeDirectory, tmp_path: Path) -> None:
    p2ptrain("checkpoint", "export", tmp_path / "copy", *node.place)
    path = tmp_path / "copy" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    status, _, err = p2ptrain("export", tmp_path / "out", "--checkpoint", tmp_path / "copy")
    assert (status, str(path) in err) == (1, True)
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------------------------------------
# Tokenizers


@pytest.fixture
def worded(tmp_path: Path) -> tuple[NodeDirectory, bytes]:
    """Makes a node whose run has its own tokenizer, and the tokenizer's file."""
    tokenizer = JsonTokenizer(tokenizer_json())
    file = json_lines(tmp_path / "a.jsonl", ["hello all of you " * 50] * 2)
    made = prepared(tmp_path / "data", file, tokenizer=tokenizer)
    named = {"kind": "json", "digest": tokenizer.digest}
    raw = RunConfig.model_validate({"name": "x", "model": {**SMALL, "vocab_size": 300}, "tokenizer": named})
    run = raw.sealed(manifest=made.digest, initial_root="2" * 64, founders=[KEYS[0].hex()])
    node = NodeDirectory(tmp_path / "node", run)
    place = Home(node.config).usual_dataset(made.digest)
    place.parent.mkdir()
    made.path.rename(place)
    node.save(8, state_of(run))
    return node, tokenizer.file_bytes


def test_the_tokenizer_is_that_of_the_data_and_goes_with_a_copy(
    p2ptrain: Command, worded: tuple[NodeDirectory, bytes], tmp_path: Path
) -> None:
    node, file_bytes = worded
    assert p2ptrain("export", tmp_path / "out", *node.place)[0] == 0
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == file_bytes
    assert p2ptrain("checkpoint", "export", tmp_path / "copy", *node.place)[0] == 0
    arguments = ("--checkpoint", tmp_path / "copy", "--data-dir", tmp_path / "nothing")
    assert p2ptrain("export", tmp_path / "two", *arguments)[0] == 0
    assert (tmp_path / "two" / "tokenizer.json").read_bytes() == file_bytes


def test_the_tokenizer_of_data_that_lies_elsewhere_is_kept_with_the_run(
    p2ptrain: Command, worded: tuple[NodeDirectory, bytes], tmp_path: Path
) -> None:
    node, file_bytes = worded
    [place] = node.directory.glob("data/*")
    data = TokenDataset.open(place, node.run.data.manifest)
    keep_tokenizer(Home(node.config), node.run, data)
    assert not (node.run_directory / "tokenizer.json").exists(), "it is in the node's directory already"
    elsewhere = place.rename(tmp_path / "elsewhere")
    keep_tokenizer(Home(node.config), node.run, TokenDataset.open(elsewhere, node.run.data.manifest))
    elsewhere.rename(tmp_path / "moved")
    assert p2ptrain("export", tmp_path / "out", *node.place)[0] == 0
    assert p2ptrain("checkpoint", "export", tmp_path / "copy", *node.place)[0] == 0
    for name in ("out", "copy"):
        assert (tmp_path / name / "tokenizer.json").read_bytes() == file_bytes


def test_another_tokenizer_than_the_runs_is_refused(
    p2ptrain: Command, worded: tuple[NodeDirectory, bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node, _ = worded
    p2ptrain("checkpoint", "export", tmp_path / "copy", *node.place)
    path = tmp_path / "copy" / "tokenizer.json"
    path.write_bytes(tokenizer_json(fill=1))
    arguments = ("--checkpoint", tmp_path / "copy", *node.place)
    status, _, err = p2ptrain("export", tmp_path / "no", *arguments)
    assert (status, f"{path}: damaged, or from another run" in err) == (1, True)
    path.unlink()
    assert p2ptrain("export", tmp_path / "out", *arguments)[0] == 0  # the node has it
    [kept] = node.directory.glob("data/*/tokenizer.json")
    kept.unlink()
    status, _, err = p2ptrain("export", tmp_path / "no", *node.place)
    assert (status, f"{kept} is missing" in err) == (1, True)
    assert p2ptrain("checkpoint", "export", tmp_path / "bare", *node.place)[0] == 0, "the weights are worth a copy"
    assert f"exporting without the tokenizer: {kept} is missing" in caplog.text
    names = sorted(path.name for path in (tmp_path / "bare").iterdir())
    assert names == [STAMP_NAME, "run.json", STATE_NAME, TRAINER_NAME]


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(p2ptrain: Command, tmp_path: Path) -> None:
    tokenizer = JsonTokenizer(tokenizer_json())
    run = run_of(tokenizer={"kind": "json", "digest": tokenizer.digest}, model={**SMALL, "vocab_size": 200})
    path = NodeDirectory(tmp_path / "node", run).save(8, state_of(run)).path
    (path / "tokenizer.json").write_bytes(tokenizer.file_bytes)
    status, _, err = p2ptrain("export", tmp_path / "no", "--data-dir", tmp_path / "node")
    assert (status, f"{tokenizer.vocab_size} tokens, but the run's model has 200" in err) == (1, True)


# ---------------------------------------------------------------------------------------------------
# Members


def test_the_card_tells_the_members_of_the_round_if_the_log_does(p2ptrain: Command, tmp_path: Path) -> None:
    run = run_of()
    node = NodeDirectory(tmp_path / "node", run)
    base, records = some_records()
    certified = [record.state for record in records if isinstance(record, Certified)]
    first = genesis(run.id, tuple(sorted(KEYS[:2])), bytes(32))
    for number, state, told in (
        (certified[-1].round, certified[-1], f"after this round {len(certified[-1].members)} with a vote,"),
        (1_000, base, f"after this round {len(base.members)} with a vote, {len(base.admitted)} admitted"),
        (1_001, first, "| members | 3 when it began |"),  # its manifest is not in the log
    ):
        node.save(number, state_of(run), head=state.head)
        if state is certified[-1]:
            log = Log(node.run_directory / "wal", base, kept=64)
            log.append(records)
        content = log.path.read_bytes()
        assert p2ptrain("export", tmp_path / f"out{number}", *node.place)[0] == 0
        assert told in (tmp_path / f"out{number}" / "README.md").read_text()
        assert log.path.read_bytes() == content, "a running node may be writing it"
    log.close()


def test_a_log_that_cannot_be_read_costs_a_line_of_the_card(
    p2ptrain: Command, node: NodeDirectory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (node.run_directory / "wal").mkdir()
    (node.run_directory / "wal" / "00000001.log").write_bytes(b"nonsense")
    assert p2ptrain("export", tmp_path / "out", *node.place)[0] == 0
    assert "the members are unknown: " in caplog.text
    assert "| members | 3 when it began |" in (tmp_path / "out" / "README.md").read_text()
