"""Data on disk: sequences come out as they went in, and damaged or hostile data is refused."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.data import dataset as data
from p2ptrain.data.dataset import TokenDataset, manifest_digest, piece_digest
from p2ptrain.data.tokenizer import JsonTokenizer, load_tokenizer
from p2ptrain.digest import PIECE_BYTES
from p2ptrain.errors import DataError, RemoteProtocolError
from tests.helpers.tokenizers import END, json_lines, prepared, tokenizer_json, written


def dataset_of(directory: Path, token_bytes: int, tokens: int, held_out: int = 0) -> tuple[TokenDataset, np.ndarray]:
    """Makes a data set of random tokens; returns both."""
    vocab_size = {1: 256, 2: 50_000, 4: 2**20}[token_bytes]
    drawn = np.random.default_rng(tokens).integers(0, vocab_size, tokens + held_out)
    streams: list[dict[str, Any]] = []
    (directory / "pieces").mkdir(parents=True)
    for part in (drawn[:tokens], drawn[tokens:]):
        content = part.astype(f"<u{token_bytes}").tobytes()
        pieces = [content[at : at + PIECE_BYTES] for at in range(0, len(content), PIECE_BYTES)]
        for piece in pieces:
            (directory / "pieces" / piece_digest(piece)).write_bytes(piece)
        streams.append({"pieces": [piece_digest(piece) for piece in pieces], "tokens": len(part)})
    kind = {"kind": "bytes", "digest": ""} if token_bytes == 1 else {"kind": "json", "digest": "0" * 64}
    raw = {
        "version": 1,
        "token_bytes": token_bytes,
        "tokenizer": kind | {"vocab_size": vocab_size},
        "training": streams[0],
        "held_out": streams[1],
    }
    return TokenDataset.open(directory, write_manifest(directory, raw)), drawn


def named(dataset: TokenDataset) -> list[str]:
    """Returns the names of the missing files."""
    return [digest.hex() for digest in dataset.missing_anywhere()]


def write_manifest(directory: Path, raw: object) -> str:
    encoded = raw if isinstance(raw, bytes) else json.dumps(raw, sort_keys=True, separators=(",", ":")).encode()
    (directory / "manifest.json").write_bytes(encoded)
    return manifest_digest(encoded)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[TokenDataset, np.ndarray]]:
    """Makes three pieces of each token width, the last one short."""
    directory = tmp_path_factory.mktemp("wide")
    return {
        width: dataset_of(directory / str(width), width, 2 * PIECE_BYTES // width + 1_001, held_out=5_000)
        for width in (1, 2, 4)
    }


@given(width=st.sampled_from([1, 2, 4]), length=st.integers(1, 1_500_000), drawn=st.data())
@settings(deadline=None, max_examples=60)
def test_a_sequence_is_its_tokens_and_the_one_after(
    wide: dict[int, tuple[TokenDataset, np.ndarray]], width: int, length: int, drawn: st.DataObject
) -> None:
    dataset, tokens = wide[width]
    total = len(tokens) - 5_000
    assert dataset.sequences(length) == (total - 1) // length
    if dataset.sequences(length):
        position = st.integers(0, dataset.sequences(length) - 1)
        positions = drawn.draw(st.lists(position, min_size=1, max_size=5))
        batch = dataset.batch(np.array(positions), length)
        assert (batch.dtype, batch.shape) == (np.int64, (len(positions), length + 1))
        for row, position in zip(batch, positions, strict=True):
            assert np.array_equal(row, tokens[position * length : position * length + length + 1])


def test_a_pass_has_every_token_but_the_first_as_a_target_once(tmp_path: Path) -> None:
    dataset, tokens = dataset_of(tmp_path, 1, 1_001)
    batch = dataset.batch(np.arange(dataset.sequences(100)), 100)
    assert np.array_equal(batch[:, 1:].ravel(), tokens[1:])
    assert np.array_equal(batch[:, :-1].ravel(), tokens[:-1])


def test_a_sequence_runs_across_pieces(tmp_path: Path) -> None:
    dataset, tokens = dataset_of(tmp_path, 2, 3 * PIECE_BYTES // 2)
    length = PIECE_BYTES // 2 + 1
    assert np.array_equal(dataset.batch(np.array([0, 1]), length)[1], tokens[length : 2 * length + 1])
    end = PIECE_BYTES // 2 - 1  # a sequence whose last target alone stands in the next piece
    assert np.array_equal(dataset.batch(np.array([0]), end + 1)[0], tokens[: end + 2])


def test_the_held_out_stream_is_another_one(tmp_path: Path) -> None:
    dataset, tokens = dataset_of(tmp_path, 1, 1_000, held_out=501)
    assert (dataset.sequences(100), dataset.held_out_sequences(100)) == (9, 5)
    batch = dataset.held_out_batch(np.arange(5), 100)
    assert np.array_equal(batch[:, 1:].ravel(), tokens[1_001:])


def test_text_shorter_than_a_sequence_gives_none(tmp_path: Path) -> None:
    dataset, _ = dataset_of(tmp_path, 1, 100)
    assert [dataset.sequences(length) for length in (1, 33, 99, 100, 101)] == [99, 3, 1, 0, 0]
    assert dataset.held_out_sequences(1) == 0


@pytest.mark.parametrize("positions", [[9], [-1], [0, 99]])
def test_a_position_that_is_not_there_is_our_mistake(tmp_path: Path, positions: list[int]) -> None:
    dataset, _ = dataset_of(tmp_path, 1, 1_000)
    with pytest.raises(AssertionError, match="a position does not exist"):
        dataset.batch(np.array(positions), 100)


def test_prepared_text_comes_back_with_any_tokenizer(tmp_path: Path) -> None:
    texts = [f"{number}: hello, hello, all of you\n" * 5 for number in range(2_000)]
    for name, content in (("narrow", tokenizer_json()), ("wide", tokenizer_json(fill=70_000))):
        tokenizer = load_tokenizer(written(tmp_path / f"{name}.json", content))
        file = json_lines(tmp_path / "a.jsonl", texts)
        made = prepared(tmp_path / name, file, tokenizer=tokenizer, held_out=Fraction(0))
        dataset = TokenDataset.open(tmp_path / name, made.digest)
        assert (dataset.tokenizer.kind, dataset.tokenizer.digest) == ("json", tokenizer.digest)
        assert dataset.tokenizer.vocab_size == tokenizer.vocab_size
        tokens = dataset.batch(np.array([0]), made.tokens - 1)[0]
        assert tokenizer.decode(tokens) == END.join([*texts, ""])


@pytest.mark.linux
def test_only_so_many_pieces_are_mapped_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "OPEN_PIECES_MAX", 2)
    dataset, tokens = dataset_of(tmp_path, 4, 5 * PIECE_BYTES // 4)

    def open_maps() -> int:
        return Path("/proc/self/maps").read_text().count(f"{tmp_path}/pieces/")

    for position in (0, 200, 400, 600, 800, 1_000, 0, 600):
        row = dataset.batch(np.array([position]), 1_000)[0]
        assert np.array_equal(row, tokens[position * 1_000 : position * 1_000 + 1_001])
        assert open_maps() <= 2
    everything = dataset.batch(np.arange(dataset.sequences(1_000)), 1_000)
    assert np.array_equal(everything[:, 1:].ravel(), tokens[1 : everything.size - len(everything) + 1])
    assert open_maps() == 2


# ---------------------------------------------------------------------------------------------------
# Damage


def whole_batch(dataset: TokenDataset) -> np.ndarray:
    return dataset.batch(np.arange(dataset.sequences(1_000)), 1_000)


def test_a_flipped_bit_is_found_named_and_mended(tmp_path: Path) -> None:
    dataset, _ = dataset_of(tmp_path, 1, 3 * PIECE_BYTES)
    expected = whole_batch(TokenDataset.open(tmp_path, manifest_digest((tmp_path / "manifest.json").read_bytes())))
    name = dataset.manifest.training.pieces[1]
    good = (tmp_path / "pieces" / name).read_bytes()
    written(tmp_path / "pieces" / name, good[:777_777] + bytes([good[777_777] ^ 8]) + good[777_778:])
    assert named(dataset) == []  # its size is right, and nobody has read it yet
    with pytest.raises(DataError, match=rf"piece .*{name} is damaged"):
        whole_batch(dataset)
    with pytest.raises(DataError, match=rf"piece .*{name} is damaged"):
        whole_batch(dataset)
    assert (tmp_path / "pieces" / name).exists(), "its owner has put it there"
    assert named(dataset) == [name]
    assert dataset.batch(np.array([0]), 1_000).shape == (1, 1_001)  # the others can be used meanwhile
    dataset.add_piece(bytes.fromhex(name), good)
    assert named(dataset) == []
    assert np.array_equal(whole_batch(dataset), expected)


@pytest.mark.parametrize("change", [lambda good: good[:-1], lambda good: good + b"\0", lambda good: b""])
def test_a_piece_of_the_wrong_size_is_found(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    dataset, _ = dataset_of(tmp_path, 1, 2 * PIECE_BYTES + 5)
    name = dataset.manifest.training.pieces[0]
    path = tmp_path / "pieces" / name
    content = change(path.read_bytes())
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"{name} has {len(content)} bytes instead of {PIECE_BYTES}"):
        whole_batch(dataset)
    assert named(dataset) == [name]


def test_swapped_pieces_are_found(tmp_path: Path) -> None:
    dataset, _ = dataset_of(tmp_path, 1, 2 * PIECE_BYTES)
    first, second = (tmp_path / "pieces" / name for name in dataset.manifest.training.pieces)
    contents = first.read_bytes(), second.read_bytes()
    first.write_bytes(contents[1])
    second.write_bytes(contents[0])
    with pytest.raises(DataError, match=rf"{first.name} is damaged"):
        whole_batch(dataset)


def test_missing_pieces_are_listed_and_can_be_added(tmp_path: Path) -> None:
    dataset, tokens = dataset_of(tmp_path, 2, 3 * PIECE_BYTES // 2, held_out=100)
    names = [*dataset.manifest.training.pieces, *dataset.manifest.held_out.pieces]
    contents = {name: (tmp_path / "pieces" / name).read_bytes() for name in names}
    for name in names:
        (tmp_path / "pieces" / name).unlink()
    (tmp_path / "pieces").rmdir()  # as a newcomer has it: the manifest, and nothing else
    assert named(dataset) == names
    with pytest.raises(DataError, match=rf"{names[0]} cannot be read: No such file"):
        whole_batch(dataset)
    for index, name in enumerate(names):
        dataset.add_piece(bytes.fromhex(name), contents[name])
        assert named(dataset) == names[index + 1 :]
    assert np.array_equal(whole_batch(dataset)[:, 1:].ravel()[:1_000], tokens[1:1_001])
    assert {path.name for path in (tmp_path / "pieces").iterdir()} == set(names)


def test_the_first_held_out_sequences_that_are_here_are_counted(tmp_path: Path) -> None:
    tokens = 2 * PIECE_BYTES + 500
    dataset, _ = dataset_of(tmp_path, 1, 1_000, held_out=tokens)
    names = dataset.manifest.held_out.pieces
    assert dataset.held_out_here(64) == dataset.held_out_sequences(64) == (tokens - 1) // 64
    (tmp_path / "pieces" / names[2]).unlink()
    found = dataset.held_out_here(64)
    assert found == (2 * PIECE_BYTES - 1) // 64
    assert dataset.missing_held_out(found, 64) == []
    assert dataset.missing_held_out(found + 1, 64) == [bytes.fromhex(names[2])]
    (tmp_path / "pieces" / names[0]).unlink()
    assert dataset.held_out_here(64) == 0


def test_a_piece_from_a_peer_is_stored_only_if_it_is_what_it_says(tmp_path: Path) -> None:
    dataset, _ = dataset_of(tmp_path, 1, 2 * PIECE_BYTES)
    first, second = dataset.manifest.training.pieces
    good = (tmp_path / "pieces" / first).read_bytes()
    (tmp_path / "pieces" / first).unlink()
    stranger = b"a piece of something else"
    for name, piece, why in [
        (first, good[:-1], f"1048575 bytes that are not piece {first}"),
        (first, b"\xff" + good[1:], f"1048576 bytes that are not piece {first}"),
        (second, good, f"1048576 bytes that are not piece {second}"),
        (piece_digest(stranger), stranger, "belongs to another data set"),
        ("", stranger, "belongs to another data set"),
        ("ab" * 1_000, stranger, "belongs to another data set"),
    ]:
        with pytest.raises(RemoteProtocolError) as caught:
            dataset.add_piece(bytes.fromhex(name), piece)
        assert why in caught.value.why
        assert len(caught.value.why) < 200
    assert named(dataset) == [first]
    assert [path.name for path in (tmp_path / "pieces").iterdir()] == [second]


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, _ = dataset_of(tmp_path, 1, 2 * PIECE_BYTES)
    name = dataset.manifest.training.pieces[0]
    good = (tmp_path / "pieces" / name).read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(data.os, "fsync", full)
    with pytest.raises(DataError, match=r"cannot be written \(No space left on device\)"):
        dataset.add_piece(bytes.fromhex(name), good)
    assert (tmp_path / "pieces" / name).read_bytes() == good


# ---------------------------------------------------------------------------------------------------
# Manifests


def test_a_manifest_that_is_absent_or_another_one_is_refused(tmp_path: Path) -> None:
    dataset_of(tmp_path / "set", 1, 1_000)
    with pytest.raises(DataError, match="holds no data set, or one that was not finished"):
        TokenDataset.open(tmp_path, "0" * 64)
    with pytest.raises(DataError, match=rf"is manifest [0-9a-f]{{64}}, not {'0' * 64}"):
        TokenDataset.open(tmp_path / "set", "0" * 64)
    path = tmp_path / "set" / "manifest.json"
    good = path.read_bytes()
    path.write_bytes(good.replace(b'"tokens":1000', b'"tokens":1001'))
    with pytest.raises(DataError, match="is manifest"):
        TokenDataset.open(tmp_path / "set", manifest_digest(good))


def test_a_manifest_beyond_the_limit_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "MANIFEST_BYTES_MAX", 100)
    encoded = b" " * 101
    with pytest.raises(DataError, match="is larger than 100 bytes"):
        TokenDataset.open(tmp_path, write_manifest(tmp_path, encoded))


def test_two_full_streams_fit_a_manifest() -> None:
    name = '"' + "0" * 64 + '",'
    assert 2 * data.PIECES_MAX * len(name) + 1_000 < data.MANIFEST_BYTES_MAX


PIECE = "ab" * 32


def manifest(**changes: object) -> dict[str, Any]:
    good = {
        "version": 1,
        "token_bytes": 1,
        "tokenizer": {"kind": "bytes", "digest": "", "vocab_size": 256},
        "training": {"pieces": [PIECE], "tokens": 1_000},
        "held_out": {"pieces": [], "tokens": 0},
    }
    return good | changes


def test_a_manifest_of_one_piece_opens(tmp_path: Path) -> None:
    dataset = TokenDataset.open(tmp_path, write_manifest(tmp_path, manifest()))
    assert (dataset.sequences(100), named(dataset)) == (9, [PIECE])


@pytest.mark.parametrize(
    ("hostile", "why"),
    [
        (manifest(version=2), "Invalid enum value 2"),
        (manifest(token_bytes=3), "Invalid enum value 3"),
        (manifest(token_bytes=2), "2 bytes per token do not fit 256 tokens"),
        (manifest(extra=1), "unknown field `extra`"),
        ({key: value for key, value in manifest().items() if key != "held_out"}, "missing required field `held_out`"),
        (manifest(training={"pieces": [], "tokens": 0}), "no tokens"),
        (manifest(training={"pieces": [PIECE], "tokens": 0}), "1 pieces for 0 training tokens, which take 0"),
        (manifest(training={"pieces": [PIECE], "tokens": 2**20 + 1}), "which take 2"),
        (manifest(held_out={"pieces": [PIECE], "tokens": 2**39}), "1 pieces for 549755813888 held_out tokens"),
        (manifest(training={"pieces": [PIECE], "tokens": 2**62}), r"Expected `int` <= .*\$\.training\.tokens"),
        (manifest(training={"pieces": [PIECE], "tokens": 10**30}), r"\$\.training\.tokens|out of range|Expected `int`"),
        (manifest(training={"pieces": [PIECE], "tokens": -1}), "Expected `int` >= 0"),
        (manifest(training={"pieces": [PIECE], "tokens": 1.5}), "Expected `int`, got `float`"),
        (manifest(training={"pieces": [PIECE], "tokens": "1"}), "Expected `int`, got `str`"),
        (manifest(training={"pieces": [PIECE], "tokens": True}), "Expected `int`, got `bool`"),
        (manifest(training={"pieces": PIECE, "tokens": 1}), "Expected `array`, got `str`"),
        (manifest(training={"pieces": [PIECE[:-1]], "tokens": 1}), "matching regex"),
        (manifest(training={"pieces": [PIECE + "\n"], "tokens": 1}), "matching regex"),
        (manifest(training={"pieces": [PIECE.upper()], "tokens": 1}), "matching regex"),
        (manifest(training={"pieces": ["../" * 20 + "etc/passwd"], "tokens": 1}), "matching regex"),
        (manifest(training={"pieces": ["/" * 64], "tokens": 1}), "matching regex"),
        (manifest(training={"pieces": [PIECE] * 2, "tokens": 2**20 + 1}), "would have two sizes"),
        (manifest(held_out={"pieces": [PIECE], "tokens": 1}), "would have two sizes"),
        (manifest(tokenizer={"kind": "bytes", "digest": PIECE, "vocab_size": 256}), "tokenizer of kind bytes with"),
        (manifest(tokenizer={"kind": "json", "digest": "", "vocab_size": 256}), "tokenizer of kind json with"),
        (manifest(tokenizer={"kind": "other", "digest": "", "vocab_size": 256}), "Invalid enum value 'other'"),
        (manifest(tokenizer={"kind": "bytes", "digest": "", "vocab_size": 2**62}), "Expected `int` <= 1048576"),
        ([], "Expected `object`, got `array`"),
        (b"", "truncated"),
        (b"[" * 1_000_000, r"Expected `object`|nested too deeply"),
        (json.dumps(manifest(), sort_keys=True).encode(), "not in the canonical encoding"),
        (json.dumps(manifest(), separators=(",", ":")).encode(), "not in the canonical encoding"),
    ],
)
def test_a_hostile_manifest_is_refused_at_no_cost(tmp_path: Path, hostile: object, why: str) -> None:
    expected = write_manifest(tmp_path, hostile)
    tracemalloc.start()
    with pytest.raises(DataError, match=why):
        TokenDataset.open(tmp_path, expected)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * (tmp_path / "manifest.json").stat().st_size + 2**20


def test_a_manifest_that_says_a_key_twice_is_refused(tmp_path: Path) -> None:
    encoded = json.dumps(manifest(), sort_keys=True, separators=(",", ":")).encode()
    twice = encoded.replace(b'"version":1', b'"version":1,"version":1')
    with pytest.raises(DataError, match="not in the canonical encoding"):
        TokenDataset.open(tmp_path, write_manifest(tmp_path, twice))


def test_a_token_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    # The creator of a run signs its data, and can still lie about it: the model would index out of its table.
    piece = np.array([5, 299, 300], dtype="<u2").tobytes()
    tokenizer = {"kind": "json", "digest": "0" * 64, "vocab_size": 300}
    training = {"pieces": [piece_digest(piece)], "tokens": 3}
    raw = manifest(token_bytes=2, tokenizer=tokenizer, training=training)
    dataset = TokenDataset.open(tmp_path, write_manifest(tmp_path, raw))
    dataset.add_piece(bytes.fromhex(piece_digest(piece)), piece)
    with pytest.raises(DataError, match="contains token 300, but the tokenizer has only 300 tokens"):
        dataset.batch(np.array([0]), 2)


def test_a_manifest_that_lies_about_a_size_is_not_blamed_on_who_sends_the_piece(tmp_path: Path) -> None:
    piece = b"three"
    training = {"pieces": [piece_digest(piece)], "tokens": 1_000}
    dataset = TokenDataset.open(tmp_path, write_manifest(tmp_path, manifest(training=training)))
    with pytest.raises(DataError, match="has 5 bytes, but 1000 by the manifest"):
        dataset.add_piece(bytes.fromhex(piece_digest(piece)), piece)
    assert named(dataset) == [piece_digest(piece)]


def test_a_data_set_names_its_tokenizer_as_the_run_does(tmp_path: Path) -> None:
    tokenizer = JsonTokenizer(tokenizer_json())
    made = prepared(tmp_path / "out", written(tmp_path / "a.txt", "hello"), tokenizer=tokenizer)
    named = TokenDataset.open(tmp_path / "out", made.digest).tokenizer
    assert (named.kind, named.digest, named.vocab_size) == (tokenizer.kind, tokenizer.digest, tokenizer.vocab_size)
