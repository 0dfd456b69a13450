"""Files of other programs: compressed ones, tables, tokens, whole directories, and what is broken in them."""

from __future__ import annotations

import builtins
import gzip
import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import zstandard
from pyarrow import ipc, parquet

from p2ptrain.data import corpus
from p2ptrain.data.corpus import Reading, documents, file_sources
from p2ptrain.data.tokenizer import JsonTokenizer
from p2ptrain.errors import ConfigError
from tests.helpers.tokenizers import json_lines, tokenizer_json, written

TEXTS = ["one", "two words", "", "drei: äöü", "last"]
FULL = [text for text in TEXTS if text]


def read(path: Path, **how: Any) -> list[str]:
    return [document.text for source in file_sources([path]) for document in documents(source, Reading(**how))]


def refused(path: Path, **how: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(path, **how)
    return str(caught.value)


def parquet_file(path: Path, **columns: Any) -> Path:
    parquet.write_table(pa.table(columns), path, row_group_size=2)
    return path


def arrow_file(path: Path, new: Any, **columns: Any) -> Path:
    table = pa.table(columns)
    with new(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return path


# ---------------------------------------------------------------------------------------------------
# Compressed files


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress], ids=["gz", "zst"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_compressed_file_is_read_as_the_file_in_it(tmp_path: Path, name: str, pack: Any) -> None:
    plain = json_lines(tmp_path / name, [f"text {number} " * 300 for number in range(60)])
    suffix = ".gz" if pack is gzip.compress else ".zst"
    packed = written(tmp_path / f"{name}{suffix}", pack(plain.read_bytes()))
    assert read(packed) == read(plain)
    assert len(read(plain)) > 5
    (source,) = file_sources([packed])
    assert sum(document.source_bytes for document in documents(source)) == source.size


def test_what_follows_the_first_stream_of_a_compressed_file_is_read_too(tmp_path: Path) -> None:
    for suffix, pack in ((".gz", gzip.compress), (".zst", zstandard.compress)):
        packed = written(tmp_path / f"a.txt{suffix}", pack(b"one\n") + pack(b"two\n"))
        assert "".join(read(packed)) == "one\ntwo\n"


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".zst", zstandard.compress)])
def test_a_compressed_file_that_is_cut_off_or_damaged_is_named(tmp_path: Path, suffix: str, pack: Any) -> None:
    whole = pack(np.random.default_rng(0).bytes(300_000).hex().encode())
    assert f"cut.txt{suffix}: cannot be read" in refused(written(tmp_path / f"cut.txt{suffix}", whole[:-50_000]))
    assert f"bad.txt{suffix}: cannot be read" in refused(written(tmp_path / f"bad.txt{suffix}", b"not packed"))


# ---------------------------------------------------------------------------------------------------
# Tables


@pytest.mark.parametrize("kind", ["parquet", "arrow file", "arrow stream"])
def test_a_row_of_a_table_is_a_document(tmp_path: Path, kind: str) -> None:
    columns = {"id": list(range(len(TEXTS) + 1)), "text": [*TEXTS, None], "body": ["x"] * (len(TEXTS) + 1)}
    if kind == "parquet":
        path = parquet_file(tmp_path / "a.parquet", **columns)
    else:
        path = arrow_file(tmp_path / "a.arrow", ipc.new_file if kind == "arrow file" else ipc.new_stream, **columns)
    assert read(path) == FULL
    assert read(path, column="body") == ["x"] * (len(TEXTS) + 1)
    assert 'no column "story". Name one with --column: it has id, text, body' in refused(path, column="story")
    assert 'column "id" holds int64, not text' in refused(path, column="id")
    (source,) = file_sources([path])
    assert 0 < sum(document.source_bytes for document in documents(source)) <= source.size


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_damaged_table_is_named(tmp_path: Path, name: str) -> None:
    assert f"{name}: damaged" in refused(written(tmp_path / name, b"PAR1 nothing PAR1" * 100))
    assert "Parquet compresses by itself" in refused(written(tmp_path / f"{name}.gz", gzip.compress(b"PAR1")))


def test_an_arrow_file_with_a_changed_byte_is_named_and_ends_nothing(tmp_path: Path) -> None:
    path = arrow_file(tmp_path / "a.arrow", ipc.new_file, text=[f"text {number}" for number in range(40)])
    whole, draw, told = path.read_bytes(), np.random.default_rng(0), 0
    for place in draw.integers(8, len(whole), 300):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xC3]) + whole[place + 1 :])
        try:
            read(path)
        except ConfigError:
            told += 1
    assert told > 20
    latin = pa.StringArray.from_buffers(1, pa.py_buffer(np.array([0, 4], "<i4")), pa.py_buffer(b"caf\xe9"))
    assert "damaged" in refused(arrow_file(tmp_path / "b.arrow", ipc.new_file, text=latin))
    twice = pa.table([["a"], ["b"]], names=["text", "text"])
    parquet.write_table(twice, tmp_path / "twice.parquet")
    assert 'two columns "text"' in refused(tmp_path / "twice.parquet")


@pytest.mark.parametrize(("name", "missing"), [("a.parquet", "pyarrow"), ("a.txt.zst", "zstandard")])
def test_who_lacks_a_library_is_told_what_to_install(
    tmp_path: Path, name: str, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(wanted: str, *rest: Any) -> Any:
        if wanted == missing:
            raise ImportError(wanted)
        return real(wanted, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    said = refused(written(tmp_path / name, b""))
    assert f"{name}: needs {missing} to be read. Run: pip install 'p2ptrain[data]'" in said
    assert said == refused(tmp_path / name, skipped=lambda error: None), "that is no broken file"


def test_a_key_of_json_lines_can_be_named(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", '{"id": 1, "body": "one"}\n{"body": "two", "text": 3}\n')
    assert read(path, column="body") == ["one", "two"]
    assert "--column names another: this line has id, body" in refused(path)
    assert "is no key" in refused(path, column='a"b')


# ---------------------------------------------------------------------------------------------------
# Tokens


def tokens_of(path: Path, **how: Any) -> list[list[int]]:
    found = [document for source in file_sources([path]) for document in documents(source, Reading(**how))]
    assert all(each.tokens is not None and not each.text for each in found)
    return [each.tokens.tolist() for each in found if each.tokens is not None]


STREAM = [5, 6, 0, 0, 7, 0, 8, 9]


@pytest.mark.parametrize("kind", ["<u1", "<u2", "<i4", ">i8"])
def test_tokens_of_another_program_are_cut_where_a_document_ends(tmp_path: Path, kind: str) -> None:
    np.save(tmp_path / "a.npy", np.array(STREAM, dtype=kind))
    assert tokens_of(tmp_path / "a.npy") == [[5, 6], [7], [8, 9]]


def test_a_bin_has_tokens_of_16_bits_or_of_32_where_those_are_too_few(tmp_path: Path) -> None:
    assert tokens_of(written(tmp_path / "a.bin", np.array(STREAM, "<u2").tobytes())) == [[5, 6], [7], [8, 9]]
    large = JsonTokenizer(tokenizer_json(fill=70_000))
    path = written(tmp_path / "b.bin", np.array([5, 69_999, 0, 7], "<u4").tobytes())
    assert tokens_of(path, tokenizer=large) == [[5, 69_999], [7]]


def test_tokens_that_end_no_document_are_cut_like_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "BLOCK_TOKENS_MAX", 100)
    path = written(tmp_path / "a.bin", np.arange(1, 251, dtype="<u2").tobytes())
    assert [len(each) for each in tokens_of(path)] == [100, 100, 50]
    assert [token for each in tokens_of(path) for token in each] == list(range(1, 251))


def test_tokens_that_cannot_be_are_named(tmp_path: Path) -> None:
    path = written(tmp_path / "a.bin", np.array([1, 2, 50_256], "<u2").tobytes())
    said = refused(path)
    assert "a.bin, token number 2: token 50256, but the tokenizer has only 256 tokens" in said
    assert "--tokenizer" in said
    assert "its last token is cut off" in refused(written(tmp_path / "odd.bin", b"\x01\x00\x02"))
    np.save(tmp_path / "cut.npy", np.array([3, 4, 5]))
    written(tmp_path / "cut.npy", (tmp_path / "cut.npy").read_bytes()[:-8])
    assert "cut.npy: it is cut off: 2 of 3 tokens" in refused(tmp_path / "cut.npy")
    np.save(tmp_path / "negative.npy", np.array([3, -1]))
    assert "token number 1: token -1" in refused(tmp_path / "negative.npy")
    for header in ("'<i8', 'shape': (2, 3)", "'<f8', 'shape': (3,)", "'|O', 'shape': (3,)"):  # the last: pickled
        content = f"{{'descr': {header}, 'fortran_order': False}}\n".encode()
        path = written(tmp_path / "other.npy", b"\x93NUMPY\x01\x00" + len(content).to_bytes(2, "little") + content)
        assert "Save one row of whole numbers" in refused(path)
    assert "not a NumPy array" in refused(written(tmp_path / "no.npy", b"nothing"))


# ---------------------------------------------------------------------------------------------------
# Directories, and what is broken


def test_a_directory_gives_its_files_in_order(tmp_path: Path) -> None:
    place = tmp_path / "all"
    for name in ("b/two.txt", "a.md", "b/one.TXT", ".hidden/x.txt", ".x.txt", "image.png", "c.jsonl"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        written(place / name, f'{{"text": "{name}"}}')
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    written(elsewhere / "far.txt", "far")
    (place / "link").symlink_to(elsewhere)
    (place / "near.txt").symlink_to(elsewhere / "far.txt")
    (place / "nowhere.txt").symlink_to(elsewhere / "gone.txt")
    found = [str(Path(source.name).relative_to(place)) for source in file_sources([place])]
    assert found == ["a.md", "b/one.TXT", "b/two.txt", "c.jsonl", "near.txt"]
    (tmp_path / "none").mkdir()
    written(tmp_path / "none/a.png", b"")
    assert "a directory without a file that ends with .txt, .md, .jsonl" in refused(tmp_path / "none")


def test_what_is_broken_is_named_and_left_out_only_on_request(tmp_path: Path) -> None:
    place = tmp_path / "all"
    place.mkdir()
    written(place / "a.jsonl", '{"text": "one"}\nbroken\n{"text": 2}\n{"text": "two"}\n')
    written(place / "b.txt", b"\xff\xfe")
    written(place / "c.parquet", b"nothing")
    written(place / "d.txt.gz", gzip.compress(b"many words " * 10_000)[:-20])
    written(place / "e.txt", "three")
    assert "a.jsonl, line 2" in refused(place)
    left_out: list[ConfigError] = []
    found = read(place, skipped=left_out.append)
    assert [found[0], found[1], found[-1]] == ["one", "two", "three"]
    names = [error.source.removeprefix(f"{place}/") for error in left_out]
    assert names == ["a.jsonl, line 2", "a.jsonl, line 3", "b.txt, byte 0", "c.parquet", "d.txt.gz"]


def test_a_table_is_read_in_bounded_memory(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    table = pa.table({"text": ["x" * 10_000] * 20_000})
    parquet.write_table(table, buffer, row_group_size=100)
    path = written(tmp_path / "large.parquet", buffer.getvalue())
    del table, buffer
    before = pa.total_allocated_bytes()
    most = 0
    (source,) = file_sources([path])
    for number, document in enumerate(documents(source)):
        assert len(document.text) == 10_000
        if number % 500 == 0:
            most = max(most, pa.total_allocated_bytes() - before)
    assert most < 20 * 10**6  # of 200 MB


def test_a_line_that_is_too_long_costs_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "LINE_BYTES_MAX", 40)
    path = json_lines(tmp_path / "a.jsonl", ["one", "x" * 500, "two"])
    left_out: list[ConfigError] = []
    assert read(path, skipped=left_out.append) == ["one", "two"]
    assert [error.source for error in left_out] == [f"{path}, line 2"]
