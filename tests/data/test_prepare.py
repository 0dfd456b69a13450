"""Preparing data: the same everywhere, in bounded memory, split by content, and all or nothing."""

from __future__ import annotations

import json
import os
import tracemalloc
from fractions import Fraction
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from p2ptrain.data import dataset
from p2ptrain.data import prepare as prepare_module
from p2ptrain.data.corpus import Reading
from p2ptrain.data.dataset import Split, TokenDataset
from p2ptrain.data.prepare import prepare
from p2ptrain.data.tokenizer import BytesTokenizer, JsonTokenizer, Tokenizer, load_tokenizer
from p2ptrain.digest import PIECE_BYTES, digest
from p2ptrain.errors import ConfigError, DataError
from tests.helpers.tokenizers import json_lines, prepared, tokenizer_json, written


def stream_texts(out: Path, stream: Split, tokenizer: Tokenizer) -> list[str]:
    """Reads the documents of a stream without the code under test."""
    width = {256: "<u1"}.get(tokenizer.vocab_size, "<u2")
    content = b"".join((out / "pieces" / name).read_bytes() for name in stream.pieces)
    tokens = np.frombuffer(content, width)
    assert len(tokens) == stream.tokens
    assert not len(tokens) or tokens[-1] == tokenizer.end_of_document
    ends = np.flatnonzero(tokens == tokenizer.end_of_document)
    return [tokenizer.decode(document[:-1]) for document in np.split(tokens, ends + 1)[:-1]]


def fraction_of(text: str) -> int:
    return int.from_bytes(digest("held-out document", text.encode())[:8], "little")


def both_sides(out: Path, manifest_digest: str, tokenizer: Tokenizer | None = None) -> tuple[list[str], list[str]]:
    tokenizer = tokenizer or BytesTokenizer()
    manifest = TokenDataset.open(out, manifest_digest).manifest
    return stream_texts(out, manifest.training, tokenizer), stream_texts(out, manifest.held_out, tokenizer)


@pytest.mark.parametrize("tokenizer", [BytesTokenizer(), JsonTokenizer(tokenizer_json())], ids=["bytes", "json"])
def test_each_document_stands_on_one_side_by_its_text_alone(tmp_path: Path, tokenizer: Tokenizer) -> None:
    texts = [f"document {number} says hello\n" * (number % 7 + 1) for number in range(400)]
    repeated = texts + texts[::-1] + texts[::3]
    made = prepared(tmp_path / "out", json_lines(tmp_path / "a.jsonl", repeated), tokenizer=tokenizer)
    training, held_out = both_sides(tmp_path / "out", made.digest, tokenizer)
    expected = [fraction_of(text) < 2**64 // 4 for text in repeated]
    assert held_out == [text for text, held in zip(repeated, expected, strict=True) if held]
    assert training == [text for text, held in zip(repeated, expected, strict=True) if not held]
    assert not set(training) & set(held_out)
    assert 60 < len(set(held_out)) < 140  # 100 in the mean, 8.7 its deviation


ARTICLES = {
    "train": [" = One = \n A word @-@ for @-@ word text . \n = = Part = = \n More . \n", " = Two ( 2 ) = \n End . \n"],
    "validation": [" = Held = \n Nobody trains on <unk> . \n"],
}  # fmt: skip


def wikitext_in(directory: Path, form: str) -> Path:
    """Writes WikiText as its authors or Hugging Face have it, with blank lines around the headings."""
    directory.mkdir()
    for split, articles in {**ARTICLES, "test": [" = Test = \n Neither . \n"]}.items():
        lines = [line for text in articles for line in ("\n", *text.splitlines(keepends=True), "\n")]
        if form == "parquet":
            halves = [
                lines[: len(lines) // 2],
                lines[len(lines) // 2 :],
            ]  # an article may begin in one and end in another
            for number, half in enumerate(halves[: 1 if split == "validation" else 2]):
                texts = lines if split == "validation" else half
                rows = {"text": ["" if line == "\n" else line for line in texts]}
                parquet.write_table(pa.table(rows), directory / f"{split}-{number:05}-of-00002.parquet")
        else:
            name = f"wiki.{split.replace('validation', 'valid')}.{form}"
            written(directory / name, "".join(" \n" if line == "\n" else line for line in lines).encode())
    return directory


@pytest.mark.parametrize("form", ["tokens", "raw"])
def test_wikitext_is_cut_into_articles_as_they_are_and_its_validation_is_held_out(tmp_path: Path, form: str) -> None:
    directory = wikitext_in(tmp_path / form, form)
    made = prepared(tmp_path / "out", wikitext=directory)
    assert both_sides(tmp_path / "out", made.digest) == (ARTICLES["train"], ARTICLES["validation"])


def test_wikitext_is_the_same_data_in_tables_and_beside_other_files(tmp_path: Path) -> None:
    digests = [
        prepared(tmp_path / f"of {form}", wikitext=wikitext_in(tmp_path / form, form)).digest
        for form in ("raw", "parquet")
    ]
    assert digests == [digests[0]] * 2
    others = json_lines(tmp_path / "a.jsonl", [f"another {number}" for number in range(200)])
    made = prepared(tmp_path / "out", others, wikitext=tmp_path / "raw")
    training, held_out = both_sides(tmp_path / "out", made.digest)
    assert training[:2] == ARTICLES["train"] and held_out[:1] == ARTICLES["validation"]
    assert len(training) + len(held_out) == 203 and len(held_out) > 20


def test_a_directory_that_is_no_wikitext_is_refused_with_what_it_needs(tmp_path: Path) -> None:
    directory = wikitext_in(tmp_path / "two forms", "raw")
    for name in ("wiki.train.tokens", "wiki.valid.tokens"):
        written(directory / name, b" = One = \n")
    for place in (directory, tmp_path):
        with pytest.raises(ConfigError, match=r"not a directory with one form of WikiText.*wiki\.valid\.tokens"):
            prepared(tmp_path / "out", wikitext=place)


def test_a_document_stands_on_the_same_side_in_any_other_data(tmp_path: Path) -> None:
    texts = [f"document {number}" for number in range(200)]
    alone = prepared(tmp_path / "alone", json_lines(tmp_path / "a.jsonl", texts))
    among = prepared(
        tmp_path / "among", json_lines(tmp_path / "b.jsonl", ["first", *reversed(texts), "last"]), embedded=True
    )
    training, held_out = both_sides(tmp_path / "alone", alone.digest)
    more_training, more_held_out = both_sides(tmp_path / "among", among.digest)
    assert set(training) <= set(more_training)
    assert set(held_out) <= set(more_held_out)


@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1), min_size=1, max_size=6),
    held_out=st.fractions(0, 1).filter(lambda fraction: fraction < 1),
)
@settings(deadline=None, max_examples=50)
def test_neither_side_is_empty_where_two_documents_differ(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], held_out: Fraction
) -> None:
    directory = tmp_path_factory.mktemp("few")
    made = prepared(directory / "out", json_lines(directory / "a.jsonl", texts), held_out=held_out)
    training, held = both_sides(directory / "out", made.digest)
    assert sorted(training + held) == sorted(texts)
    assert not set(training) & set(held)
    assert training
    assert bool(held) == (held_out > 0 and len(set(texts)) > 1)


def test_the_same_input_gives_the_same_digest(tmp_path: Path) -> None:
    files = [
        written(tmp_path / "a.txt", "a line\r\n" * 20_000),
        json_lines(tmp_path / "b.jsonl", ["one", "two", "three"]),
    ]
    first, second = prepared(tmp_path / "one", *files), prepared(tmp_path / "two", *files)
    assert first.digest == second.digest == "a7cd2fbe9ee71b4d6f72d64ac69d8a6164c8930947db6344972e65eea8ff765b"
    assert prepared(tmp_path / "other", *reversed(files)).digest != first.digest
    assert prepared(tmp_path / "all", *files, held_out=Fraction(0)).digest != first.digest


def test_the_manifest_says_what_there_is_in_one_encoding(tmp_path: Path) -> None:
    content = tokenizer_json()
    tokenizer = load_tokenizer(written(tmp_path / "tokenizer.json", content))
    file = json_lines(tmp_path / "a.jsonl", ["hello", "other"])
    made = prepared(tmp_path / "out", file, tokenizer=tokenizer, held_out=Fraction(0))
    encoded = (tmp_path / "out" / "manifest.json").read_bytes()
    (piece,) = (tmp_path / "out" / "pieces").iterdir()
    tokens = len(tokenizer.encode("hello")) + len(tokenizer.encode("other")) + 2
    raw = {
        "version": 1,
        "token_bytes": 2,
        "tokenizer": {"kind": "json", "digest": digest("tokenizer", content).hex(), "vocab_size": 259},
        "training": {"pieces": [piece.name], "tokens": tokens},
        "held_out": {"pieces": [], "tokens": 0},
    }
    assert encoded == json.dumps(raw, sort_keys=True, separators=(",", ":")).encode()
    assert piece.name == digest("data piece", piece.read_bytes()).hex()
    assert (made.digest, made.path) == (digest("data manifest", encoded).hex(), tmp_path / "out")
    assert (made.tokens, made.held_out_tokens, made.pieces) == (tokens, 0, 1)


def test_pieces_are_a_mebibyte_and_the_last_is_shorter(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    text = "".join(f"{number}\n" for number in rng.integers(0, 10**9, 300_000))
    made = prepared(tmp_path / "out", written(tmp_path / "a.txt", text))
    manifest = TokenDataset.open(tmp_path / "out", made.digest).manifest
    for stream in (manifest.training, manifest.held_out):
        sizes = [(tmp_path / "out" / "pieces" / name).stat().st_size for name in stream.pieces]
        assert sizes == [PIECE_BYTES] * (len(sizes) - 1) + [stream.tokens - PIECE_BYTES * (len(sizes) - 1)]
    names = {*manifest.training.pieces, *manifest.held_out.pieces}
    assert {path.name for path in (tmp_path / "out" / "pieces").iterdir()} == names
    assert (len(names), made.tokens, made.held_out_tokens) == (
        made.pieces,
        manifest.training.tokens,
        manifest.held_out.tokens,
    )
    training, held_out = both_sides(tmp_path / "out", made.digest)
    assert sorted("".join(training + held_out).splitlines()) == sorted(text.splitlines())


def test_text_that_fills_a_piece_exactly_leaves_no_empty_one(tmp_path: Path) -> None:
    file = json_lines(tmp_path / "a.jsonl", ["a" * (PIECE_BYTES - 1)])
    made = prepared(tmp_path / "out", file)
    assert (made.tokens, made.pieces) == (PIECE_BYTES, 1)


def test_text_that_repeats_is_stored_once(tmp_path: Path) -> None:
    # 1,024 documents of 1 KiB with their ends make one piece, and the next is the same.
    made = prepared(tmp_path / "out", json_lines(tmp_path / "a.jsonl", ["b" * 1_023] * 3_072))
    assert (made.tokens, made.pieces) == (3 * PIECE_BYTES, 1)
    dataset = TokenDataset.open(tmp_path / "out", made.digest)
    assert (len(dataset.manifest.training.pieces), dataset.missing_anywhere()) == (3, [])


def test_line_ends_are_kept(tmp_path: Path) -> None:
    made = prepared(tmp_path / "out", written(tmp_path / "a.txt", "one\r\ntwo\rthree\n"))
    assert both_sides(tmp_path / "out", made.digest) == (["one\r\ntwo\rthree\n"], [])


def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    line = b"some line of ordinary length, as they stand in a file of text\n"
    with (path := tmp_path / "large.txt").open("wb") as file:
        for number in range(48):
            file.write(b"%d\n" % number + line * (2**20 // len(line)))
    tracemalloc.start()
    prepared(tmp_path / "out", path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * 2**20  # a batch of text twice, a piece of either stream, a copy


def test_progress_rises_to_the_size_of_the_text(tmp_path: Path) -> None:
    files = [written(tmp_path / "a.txt", "line\n" * 700_000), json_lines(tmp_path / "b.jsonl", ["one", "", "two"])]
    seen: list[tuple[int, ...]] = []
    total = sum(file.stat().st_size for file in files)
    prepare(
        tmp_path / "out",
        files,
        embedded=False,
        how=Reading(tokenizer=BytesTokenizer()),
        held_out=Fraction(1, 2),
        progress=lambda *args: seen.append(args),
    )
    done = [part for part, *_ in seen]
    assert {of for _, of, _ in seen} == {total}
    assert (done[0], done[-1], done) == (0, total, sorted(done))
    assert len(done) > 4


def test_the_embedded_corpus_comes_first_and_opens(tmp_path: Path) -> None:
    made = prepared(tmp_path / "out", held_out=Fraction(1, 100), embedded=True)
    assert made.tokens > 4_000_000
    assert 10_000 < made.held_out_tokens < made.tokens // 20
    assert TokenDataset.open(tmp_path / "out", made.digest).missing_anywhere() == []


@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_an_interrupted_call_leaves_nothing_that_opens_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    rng = np.random.default_rng(1)
    text = "".join(f"{number}\n" for number in rng.integers(0, 10**9, 250_000))
    file, out = written(tmp_path / "a.txt", text), tmp_path / "out"
    expected = prepared(tmp_path / "whole", file).digest
    left = iter(range(after))

    def interrupted(descriptor: int) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepared(out, file)
    assert not (out / "manifest.json").exists()
    with pytest.raises(DataError, match="holds no data set, or one that was not finished"):
        TokenDataset.open(out, expected)
    other = prepared(out, written(tmp_path / "b.txt", "something else\n"))  # not even with the same text
    assert {path.name for path in out.rglob("*")} == {
        "manifest.json",
        "pieces",
        *TokenDataset.open(out, other.digest).manifest.training.pieces,
    }


def test_an_interrupted_call_repeated_gives_what_it_would_have_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out = written(tmp_path / "a.txt", "line\n" * 10_000), tmp_path / "out"

    def interrupted(path: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepared(out, file)
    assert prepared(out, file).digest == prepared(tmp_path / "whole", file).digest
    assert sorted(path.name for path in out.rglob("*")) == sorted(path.name for path in (tmp_path / "whole").rglob("*"))


@pytest.mark.linux
def test_all_is_on_disk_before_the_manifest_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        done.append("sync " + Path(f"/proc/self/fd/{descriptor}").readlink().name[:8])
        fsync(descriptor)

    def replaced(path: Path, target: Path) -> Path:
        done.append("name " + target.name[:8])
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    made = prepared(tmp_path / "out", written(tmp_path / "a.txt", "text\n"))
    (piece,) = TokenDataset.open(tmp_path / "out", made.digest).manifest.training.pieces
    expected = [f"sync {piece[:8]}", f"name {piece[:8]}", "sync pieces", "sync manifest", "name manifest", "sync out"]
    assert done == expected


@pytest.mark.parametrize(
    "name", ["notes.txt", ".hidden", "pieces/notes.txt", "pieces/" + "A" * 64, "manifest.json.bak"]
)
def test_a_directory_with_other_things_is_refused_and_untouched(tmp_path: Path, name: str) -> None:
    file, out = written(tmp_path / "a.txt", "text\n"), tmp_path / "out"
    (out / "pieces").mkdir(parents=True)
    written(out / "pieces" / ("a" * 64), "a piece of an interrupted call")
    written(out / name, "precious")
    before = sorted(out.rglob("*"))
    with pytest.raises(ConfigError, match=r"it holds other files .*Name a new or empty directory") as caught:
        prepared(out, file)
    assert name in str(caught.value)
    assert sorted(out.rglob("*")) == before


def test_a_finished_data_set_is_not_overwritten(tmp_path: Path) -> None:
    file, out = written(tmp_path / "a.txt", "text\n"), tmp_path / "out"
    made = prepared(out, file)
    with pytest.raises(ConfigError, match="it holds a data set, which a run may be using"):
        prepared(out, file)
    assert TokenDataset.open(out, made.digest).missing_anywhere() == []


def test_two_calls_do_not_share_a_directory(tmp_path: Path) -> None:
    file, out = written(tmp_path / "a.txt", "text\n"), tmp_path / "out"

    def meanwhile(*_: int) -> None:
        with pytest.raises(ConfigError, match="another `data prepare` is using it"):
            prepared(out, file)

    made = prepare(
        out, [file], embedded=False, how=Reading(tokenizer=BytesTokenizer()), held_out=Fraction(0), progress=meanwhile
    )
    assert TokenDataset.open(out, made.digest).missing_anywhere() == []


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path / "a.txt", "text\n")
    with pytest.raises(ConfigError, match=r"a\.txt: cannot prepare data here: File exists"):
        prepared(file, file)

    with monkeypatch.context() as changed:
        changed.setattr(dataset, "PIECES_NAME", "p" * 300)  # whatever the system does not let be made
        with pytest.raises(DataError, match=r"cannot be written \(File name too long\)"):
            prepared(tmp_path / "other", file)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=r"cannot be written \(No space left on device\)"):
        prepared(tmp_path / "out", file)


def test_nothing_to_prepare_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing to prepare\. Name text files"):
        prepared(tmp_path / "out")
    files = [written(tmp_path / "a.txt", ""), written(tmp_path / "b.jsonl", '{"text": ""}\n')]
    with pytest.raises(ConfigError, match=r"a\.txt: the named files hold no text"):
        prepared(tmp_path / "out", *files)
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert prepared(tmp_path / "out", *files, written(tmp_path / "c.txt", "a")).tokens == 2


def test_text_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    # The first reading holds everything out, so that a second one moves the border; it finds the lower text alone.
    lower = min("one", "two", key=fraction_of)
    file = json_lines(tmp_path / "a.jsonl", ["one", "two"])

    def change(done: int, total: int, _: int) -> None:
        if done == total:
            json_lines(file, [lower])

    with pytest.raises(ConfigError, match=r"a\.jsonl: the text changed while it was read"):
        prepare(
            tmp_path / "out",
            [file],
            embedded=False,
            how=Reading(tokenizer=BytesTokenizer()),
            held_out=Fraction(2**64 - 1, 2**64),
            progress=change,
        )
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_missing_file_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.txt: cannot be read"):
        prepared(tmp_path / "out", tmp_path / "absent.txt")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("held_out", [Fraction(-1, 100), Fraction(1), Fraction(3, 2)])
def test_a_fraction_that_leaves_nothing_is_refused(tmp_path: Path, held_out: Fraction) -> None:
    with pytest.raises(ConfigError, match=r"held_out: .*Choose a fraction from 0 to below 1"):
        prepared(tmp_path / "out", written(tmp_path / "a.txt", "text"), held_out=held_out)


def test_more_pieces_than_a_manifest_holds_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module.dataset, "PIECES_MAX", 2)
    file = written(tmp_path / "a.txt", "line\n" * 600_000)
    with pytest.raises(ConfigError, match="more than 2 MiB of tokens"):
        prepared(tmp_path / "out", file, held_out=Fraction(0))


def test_the_tokenizer_is_stored_with_what_it_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, out = written(tmp_path / "a.txt", "hello\n"), tmp_path / "out"
    tokenizer = JsonTokenizer(tokenizer_json())

    real = prepare_module.replace_file

    def until_the_manifest(path: Path, content: bytes, mode: int) -> None:
        if path.name == "manifest.json":
            raise KeyboardInterrupt
        real(path, content, mode=mode)

    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "replace_file", until_the_manifest)
        with pytest.raises(KeyboardInterrupt):
            prepared(out, file, tokenizer=tokenizer)
    assert (out / "tokenizer.json").exists()
    with pytest.raises(ConfigError, match=r"it holds other files \(tokenizer\.json\)"):
        prepared(out, file)  # as bytes: the file may be somebody's own
    prepared(out, file, tokenizer=tokenizer)
    assert (out / "tokenizer.json").read_bytes() == tokenizer_json()
    assert sorted(path.name for path in out.iterdir()) == ["manifest.json", "pieces", "tokenizer.json"]
