"""Preparing much text: by several processes, and from where an interrupted call had got to."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from p2ptrain.data import prepare as prepare_module
from p2ptrain.data.corpus import Document, Reading
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.data.prepare import DatasetSummary, in_processes, prepare
from p2ptrain.data.tokenizer import BytesTokenizer, JsonTokenizer, Tokenizer
from p2ptrain.errors import ConfigError, DataError
from tests.helpers.tokenizers import ends, json_lines, raises, tokenizer_json, written

TOKENIZER = JsonTokenizer(tokenizer_json())
SECONDS = 60.0


def lines(path: Path, count: int = 3_000) -> Path:
    draw = np.random.default_rng(0)
    return json_lines(path, [f"hello {number} " * 40 for number in draw.integers(0, 10**9, count)])


def made(out: Path, *files: Path, tokenizer: Tokenizer = TOKENIZER, **more: Any) -> DatasetSummary:
    settings = {"embedded": False, "held_out": Fraction(1, 4), "progress": lambda *_: None} | more
    return prepare(out, files, how=Reading(tokenizer=tokenizer, skipped=settings.pop("skipped", None)), **settings)


def test_several_processes_make_the_same_data_set(tmp_path: Path) -> None:
    files = [lines(tmp_path / "a.jsonl"), written(tmp_path / "b.bin", np.array([5, 6, 0, 7], "<u2").tobytes())]
    assert made(tmp_path / "one", *files).digest == made(tmp_path / "two", *files, processes=2).digest


def test_no_more_is_read_ahead_than_the_processes_will_soon_need() -> None:
    read = 0

    def batches() -> Iterator[list[Document]]:
        nonlocal read
        for read in range(1, 101):  # noqa: B007  (the number of batches so far)
            yield [Document("text", 4)]

    for number, _ in enumerate(in_processes(TOKENIZER, np.dtype("<u2"), batches(), 2)):
        assert read <= number + 8
    assert read == 100


@pytest.mark.parametrize(("fails", "said"), [(ends, "was ended"), (raises, "the tokenizers library failed")])
def test_a_process_that_fails_or_is_ended_is_told(fails: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module, "_encode", fails)
    with pytest.raises(DataError, match=said):
        list(in_processes(TOKENIZER, np.dtype("<u2"), [[Document("text", 4)]] * 20, 2))


# ---------------------------------------------------------------------------------------------------
# Interrupted


class CountingTokenizer(BytesTokenizer):
    """Counts what it encodes, and is interrupted at a text of its own."""

    def __init__(self, last: int = 10**9) -> None:
        self.count, self.last = 0, last

    def encode_batch(self, texts: Any) -> Any:
        self.count += len(texts)
        if self.count > self.last:
            raise KeyboardInterrupt
        return super().encode_batch(texts)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches and the places where one goes on are small."""
    monkeypatch.setattr(prepare_module, "BATCH_BYTES", 2**16)
    monkeypatch.setattr(prepare_module, "SAVED_BYTES", 2**17)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("last", [1, 700, 1_500, 2_900])
def test_the_same_call_goes_on_where_it_was_interrupted(tmp_path: Path, last: int, packed: bool) -> None:
    file, out = lines(tmp_path / "a.jsonl"), tmp_path / "out"
    if packed:
        subprocess.run(["gzip", "-k", str(file)], check=True)
        file = tmp_path / "a.jsonl.gz"
    whole = made(tmp_path / "whole", file, tokenizer=BytesTokenizer())
    first, second = CountingTokenizer(last), CountingTokenizer()
    with pytest.raises(KeyboardInterrupt):
        made(out, file, tokenizer=first)
    again = made(out, file, tokenizer=second)
    assert (again.digest, again.tokens) == (whole.digest, whole.tokens)
    assert second.count <= 3_000 - last + 1_200  # what was read since the last save is done again
    assert second.count < 3_000 or last < 1_200
    assert sorted(path.name for path in out.rglob("*")) == sorted(path.name for path in (tmp_path / "whole").rglob("*"))


def test_another_call_begins_anew(tmp_path: Path) -> None:
    file, out = lines(tmp_path / "a.jsonl"), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        made(out, file, tokenizer=CountingTokenizer(2_000))
    lines(file, 2_500)
    second = CountingTokenizer()
    again = made(out, file, tokenizer=second)
    assert second.count == 2_500
    assert TokenDataset.open(out, again.digest).missing_anywhere() == []
    assert len(list((out / "pieces").iterdir())) == again.pieces


@pytest.mark.parametrize("spoil", ["cut", "piece"])
def test_what_was_left_and_is_not_whole_is_not_gone_on_with(tmp_path: Path, spoil: str) -> None:
    file, out = lines(tmp_path / "a.jsonl", 6_000), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        made(out, file, tokenizer=CountingTokenizer(5_500))
    unfinished = out / ".p2ptrain-unfinished"
    if spoil == "cut":
        unfinished.write_bytes(unfinished.read_bytes()[:-100])
    else:
        next((out / "pieces").iterdir()).unlink()
    second = CountingTokenizer()
    assert made(out, file, tokenizer=second).digest == made(tmp_path / "w", file, tokenizer=BytesTokenizer()).digest
    assert second.count == 6_000


def test_what_was_left_out_stays_left_out(tmp_path: Path) -> None:
    file, out = lines(tmp_path / "a.jsonl"), tmp_path / "out"
    file.write_text("broken\n" + file.read_text())
    left_out: list[ConfigError] = []
    with pytest.raises(KeyboardInterrupt):
        made(out, file, tokenizer=CountingTokenizer(2_000), skipped=left_out.append)
    again = made(out, file, tokenizer=BytesTokenizer(), skipped=left_out.append)
    assert again.digest == made(tmp_path / "w", lines(tmp_path / "a.jsonl"), tokenizer=BytesTokenizer()).digest
    assert [error.source for error in left_out] == [f"{file}, line 1"] * 2


PROGRAM = """\
import os, signal, sys
from fractions import Fraction
from pathlib import Path
from p2ptrain.data import prepare as module
from p2ptrain.data.corpus import Reading
from p2ptrain.data.tokenizer import load_tokenizer

if __name__ == "__main__":
    out, file, tokenizer = map(Path, sys.argv[1:4])
    left, replace_file = [int(sys.argv[4])], module.replace_file
    module.SAVED_BYTES = 2**20

    def save_and_die(path, *what, mode):
        replace_file(path, *what, mode=mode)
        left[0] -= path.name == module.UNFINISHED_NAME
        if path.name == module.UNFINISHED_NAME and not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    module.replace_file = save_and_die
    how = Reading(tokenizer=load_tokenizer(tokenizer))
    made = module.prepare(
        out, [file], embedded=False, how=how, held_out=Fraction(1, 4), progress=lambda *_: None, processes=2
    )
    print(made.digest)
"""


def test_a_call_that_is_killed_goes_on_to_the_same_data_set_and_leaves_no_process(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", 20_000)
    program = written(tmp_path / "program.py", PROGRAM)
    tokenizer = written(tmp_path / "tokenizer.json", tokenizer_json())

    def run(out: str, saves: int) -> tuple[int, str]:
        command = [sys.executable, str(program), str(tmp_path / out), str(file), str(tokenizer), str(saves)]
        # Its other processes have its end of the pipe, too: `run` returns once they have ended.
        done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, timeout=SECONDS)
        return done.returncode, done.stdout

    killed = [run("out", saves) for saves in (1, 3)]
    assert killed == [(-signal.SIGKILL, "")] * 2
    assert run("out", 0) == run("whole", 0)
    assert run("whole", 0)[0] != 0  # it is there already
