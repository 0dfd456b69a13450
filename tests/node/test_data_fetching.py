"""Training data from peers: only the needed pieces are fetched, each is checked, and none is left half written."""

from __future__ import annotations

import threading
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.data import dataset as data
from p2ptrain.data.dataset import TokenDataset, manifest_digest, store_manifest
from p2ptrain.data.tokenizer import BytesTokenizer, JsonTokenizer
from p2ptrain.digest import PIECE_BYTES
from p2ptrain.errors import DataError, RemoteProtocolError
from tests.helpers.tokenizers import json_lines, prepared, tokenizer_json, written

LINES = 600_000  # of eight bytes: five pieces, one token a byte


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    """Makes the complete data set of a peer."""
    directory = tmp_path_factory.mktemp("whole")
    lines = "".join(f"{number:07}\n" for number in range(LINES))
    made = prepared(directory / "data", written(directory / "a.txt", lines), held_out=Fraction(1, 4))
    return TokenDataset.open(made.path, made.digest)


def newcomer(directory: Path, whole: TokenDataset) -> TokenDataset:
    encoded = whole.manifest_bytes()
    return store_manifest(directory / "mine", encoded, manifest_digest(encoded))


def hand_over(whole: TokenDataset, mine: TokenDataset, digests: list[bytes]) -> None:
    for digest in digests:
        piece = whole.piece(digest)
        assert piece is not None
        mine.add_piece(digest, piece)


# ---------------------------------------------------------------------------------------------------
# What is missing


def test_a_newcomer_fetches_the_pieces_of_its_shard_and_no_others(tmp_path: Path, whole: TokenDataset) -> None:
    mine = newcomer(tmp_path, whole)
    names = [bytes.fromhex(name) for name in whole.manifest.training.pieces]
    assert len(names) == 4
    positions = np.array([10, 0, PIECE_BYTES // 1_000 * 2 + 5])  # a sequence of 1,000 bytes at a time
    assert mine.missing(positions, 1_000) == [names[0], names[2]]
    hand_over(whole, mine, [names[0], names[2]])
    assert mine.missing(positions, 1_000) == []
    assert np.array_equal(mine.batch(positions, 1_000), whole.batch(positions, 1_000))
    assert {path.name for path in (tmp_path / "mine" / "pieces").iterdir()} == {names[0].hex(), names[2].hex()}
    with pytest.raises(DataError, match=rf"{names[1].hex()} cannot be read"):
        mine.batch(np.array([PIECE_BYTES // 1_000 + 5]), 1_000)
    again = TokenDataset.open(tmp_path / "mine", manifest_digest(whole.manifest_bytes()))
    assert (
        again.missing_anywhere()
        == mine.missing_anywhere()
        == [
            names[1],
            names[3],
            *(bytes.fromhex(name) for name in whole.manifest.held_out.pieces),
        ]
    )


@given(length=st.integers(1, 3_000_000), drawn=st.data())
def test_what_is_missing_is_what_the_tokens_stand_in(whole: TokenDataset, length: int, drawn: st.DataObject) -> None:
    there = whole.sequences(length)
    if not there:
        return
    positions = drawn.draw(st.lists(st.integers(0, there - 1), min_size=1, max_size=4))
    tokens = {
        token for at in positions for token in (*range(at * length, at * length + length, 999), (at + 1) * length)
    }
    expected = sorted({token // PIECE_BYTES for token in tokens})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TokenDataset, "_size_on_disk", lambda self, name: -1)
        missing = whole.missing(np.array(positions), length)
    assert missing == [bytes.fromhex(whole.manifest.training.pieces[number]) for number in expected]


def test_a_last_target_alone_in_a_piece_is_needed_too(tmp_path: Path, whole: TokenDataset) -> None:
    mine = newcomer(tmp_path, whole)
    names = [bytes.fromhex(name) for name in whole.manifest.training.pieces]
    assert mine.missing(np.array([0]), PIECE_BYTES - 1) == names[:1]
    assert mine.missing(np.array([0]), PIECE_BYTES) == names[:2]
    assert mine.missing(np.array([PIECE_BYTES - 1]), 1) == names[:2]


def test_the_held_out_slice_is_fetched_as_far_as_it_is_looked_at(tmp_path: Path, whole: TokenDataset) -> None:
    mine = newcomer(tmp_path, whole)
    names = [bytes.fromhex(name) for name in whole.manifest.held_out.pieces]
    assert len(names) == 2
    assert mine.missing_held_out(64, 256) == names[:1]
    assert mine.missing_held_out(10**9, 256) == names
    assert mine.missing_held_out(0, 256) == mine.missing_held_out(64, 10**9) == []
    hand_over(whole, mine, names[:1])
    assert mine.missing_held_out(64, 256) == []
    assert mine.held_out_batch(np.arange(64), 256).shape == (64, 257)


def test_asking_for_no_position_or_for_one_that_is_not_there(whole: TokenDataset) -> None:
    assert whole.missing(np.array([], dtype=np.int64), 100) == []
    with pytest.raises(AssertionError, match="a position does not exist"):
        whole.missing(np.array([whole.sequences(100)]), 100)


# ---------------------------------------------------------------------------------------------------
# Pieces


def test_a_piece_is_handed_out_only_whole(tmp_path: Path, whole: TokenDataset) -> None:
    mine = newcomer(tmp_path, whole)
    digest = bytes.fromhex(whole.manifest.training.pieces[1])
    path = tmp_path / "mine" / "pieces" / digest.hex()
    assert mine.piece(digest) is None
    hand_over(whole, mine, [digest])
    good = path.read_bytes()
    assert mine.piece(digest) == good
    for damaged in (good[:-1], good + b"\0", b"", bytes([good[0] ^ 1]) + good[1:]):
        path.write_bytes(damaged)
        assert mine.piece(digest) is None
        assert digest in mine.missing_anywhere()
        hand_over(whole, mine, [digest])
        assert mine.piece(digest) == good


@pytest.mark.parametrize("digest", [b"", bytes(32), b"\xff" * 1_000, b"manifest.json"])
def test_what_the_manifest_does_not_name_is_neither_taken_nor_given(
    tmp_path: Path, whole: TokenDataset, digest: bytes
) -> None:
    mine = newcomer(tmp_path, whole)
    assert mine.piece(digest) is None
    with pytest.raises(RemoteProtocolError, match="belongs to another data set"):
        mine.add_piece(digest, b"anything")
    assert list((tmp_path / "mine" / "pieces").iterdir()) == []


def test_a_damaged_piece_that_cannot_be_removed_is_missing_all_the_same(
    tmp_path: Path, whole: TokenDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = newcomer(tmp_path, whole)
    digest = bytes.fromhex(whole.manifest.training.pieces[0])
    hand_over(whole, mine, [digest])
    path = tmp_path / "mine" / "pieces" / digest.hex()
    good = path.read_bytes()
    path.write_bytes(bytes([good[0] ^ 1]) + good[1:])

    def read_only(path: Path, missing_ok: bool = False) -> None:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", read_only)
        with pytest.raises(DataError, match="is damaged"):
            mine.batch(np.array([0]), 100)
    assert mine.missing(np.array([0]), 100) == [digest]
    hand_over(whole, mine, [digest])
    assert mine.missing(np.array([0]), 100) == []
    assert np.array_equal(mine.batch(np.array([0]), 100), whole.batch(np.array([0]), 100))


def test_a_piece_that_a_crash_cut_short_is_still_missing(
    tmp_path: Path, whole: TokenDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = newcomer(tmp_path, whole)
    digest = bytes.fromhex(whole.manifest.training.pieces[0])

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(data.os, "fsync", killed)
        with pytest.raises(KeyboardInterrupt):
            hand_over(whole, mine, [digest])
    again = TokenDataset.open(tmp_path / "mine", manifest_digest(whole.manifest_bytes()))
    assert (again.piece(digest), digest in again.missing_anywhere()) == (None, True)
    hand_over(whole, again, [digest])
    assert [path.name for path in (tmp_path / "mine" / "pieces").iterdir()] == [digest.hex()]


def test_two_threads_may_bring_the_same_piece(tmp_path: Path, whole: TokenDataset) -> None:
    mine = newcomer(tmp_path, whole)
    digests = [bytes.fromhex(name) for name in whole.manifest.training.pieces]
    failed: list[Exception] = []

    def bring() -> None:
        try:
            hand_over(whole, mine, digests)
        except DataError as error:
            failed.append(error)

    threads = [threading.Thread(target=bring) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert [mine.piece(digest) for digest in digests] == [whole.piece(digest) for digest in digests]


# ---------------------------------------------------------------------------------------------------
# Manifests


def test_a_manifest_comes_back_as_it_was_sent(tmp_path: Path, whole: TokenDataset) -> None:
    encoded = whole.manifest_bytes()
    assert encoded == (whole.directory / "manifest.json").read_bytes()
    mine = store_manifest(tmp_path / "a" / "b", encoded, manifest_digest(encoded))
    assert mine.manifest_bytes() == encoded
    assert TokenDataset.open(tmp_path / "a" / "b", manifest_digest(encoded)).manifest == whole.manifest


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda encoded: encoded[:-1], "data manifest [0-9a-f]{64} instead of"),
        (lambda encoded: encoded + b" ", "data manifest [0-9a-f]{64} instead of"),
        (lambda encoded: b"", "data manifest [0-9a-f]{64} instead of"),
        (lambda encoded: encoded + b" " * 2**16, r"data manifest of \d+ bytes; the limit is 65536"),
    ],
)
def test_bytes_that_are_not_the_manifest_are_the_peers_fault(
    tmp_path: Path, whole: TokenDataset, change: Callable[[bytes], bytes], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "MANIFEST_BYTES_MAX", 2**16)
    encoded = whole.manifest_bytes()
    with pytest.raises(RemoteProtocolError, match=why):
        store_manifest(tmp_path / "mine", change(encoded), manifest_digest(encoded))
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize("encoded", [b"{}", b"[" * 1_000_000, b'{"version":2}'])
def test_a_manifest_that_its_digest_names_and_nobody_can_use_is_not_the_peers_fault(
    tmp_path: Path, encoded: bytes
) -> None:
    with pytest.raises(DataError, match=r"data manifest [0-9a-f]{64}: "):
        store_manifest(tmp_path / "mine", encoded, manifest_digest(encoded))
    assert not (tmp_path / "mine").exists()


def test_a_damaged_manifest_is_mended_and_the_pieces_stay(tmp_path: Path, whole: TokenDataset) -> None:
    mine = newcomer(tmp_path, whole)
    hand_over(whole, mine, mine.missing_anywhere())
    encoded = whole.manifest_bytes()
    written(tmp_path / "mine" / "manifest.json", encoded[:-9])
    with pytest.raises(DataError, match="is manifest"):
        TokenDataset.open(tmp_path / "mine", manifest_digest(encoded))
    assert newcomer(tmp_path, whole).missing_anywhere() == []


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path, whole: TokenDataset) -> None:
    written(tmp_path / "mine", "a file")
    with pytest.raises(DataError, match=r"mine: cannot be written \((Not a directory|File exists)\)"):
        newcomer(tmp_path, whole)


# ---------------------------------------------------------------------------------------------------
# The tokenizer's file


@pytest.fixture
def tokenized(tmp_path: Path) -> TokenDataset:
    tokenizer = JsonTokenizer(tokenizer_json())
    made = prepared(tmp_path / "whole", json_lines(tmp_path / "a.jsonl", ["hello", "hell"]), tokenizer=tokenizer)
    return TokenDataset.open(made.path, made.digest)


def test_the_tokenizer_comes_with_the_data_it_was_made_with(tmp_path: Path, tokenized: TokenDataset) -> None:
    mine = newcomer(tmp_path, tokenized)
    assert (tokenized.tokenizer_bytes(), mine.tokenizer_bytes()) == (tokenizer_json(), None)
    with pytest.raises(DataError, match=r"tokenizer\.json is missing, or not the tokenizer"):
        mine.open_tokenizer()
    mine.store_tokenizer(tokenizer_json())
    assert mine.tokenizer_bytes() == tokenizer_json()
    assert mine.open_tokenizer().encode("hello").tolist() == JsonTokenizer(tokenizer_json()).encode("hello").tolist()
    written(tmp_path / "mine" / "tokenizer.json", tokenizer_json() + b" ")  # damaged
    assert mine.tokenizer_bytes() is None


def test_a_tokenizer_that_the_manifest_does_not_name_is_the_peers_fault(
    tmp_path: Path, tokenized: TokenDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = newcomer(tmp_path, tokenized)
    for file_bytes in (b"", tokenizer_json() + b"\n"):
        with pytest.raises(RemoteProtocolError, match=r"tokenizer file [0-9a-f]{64} instead of"):
            mine.store_tokenizer(file_bytes)
    monkeypatch.setattr(data.tokenizers, "TOKENIZER_BYTES_MAX", 10)
    with pytest.raises(RemoteProtocolError, match="tokenizer file of 11 bytes; the limit is 10"):
        mine.store_tokenizer(bytes(11))
    assert not (tmp_path / "mine" / "tokenizer.json").exists()


def test_bytes_need_no_file(whole: TokenDataset) -> None:
    assert whole.tokenizer_bytes() is None
    assert isinstance(whole.open_tokenizer(), BytesTokenizer)
    assert not (whole.directory / "tokenizer.json").exists()


def test_a_tokenizer_that_nobody_can_use_is_not_the_peers_fault(tmp_path: Path) -> None:
    """The starter of a run can name any file."""

    class LyingTokenizer(JsonTokenizer):
        def __init__(self, file_bytes: bytes, vocab_size: int) -> None:
            super().__init__(tokenizer_json())
            self.file_bytes, self.vocab_size = file_bytes, vocab_size
            self.digest = data.tokenizers.tokenizer_digest(file_bytes)

    file = json_lines(tmp_path / "a.jsonl", ["hello", "hell"])
    for number, (liar, why) in enumerate(
        [
            (LyingTokenizer(b"{}", 259), "not a tokenizer"),
            (LyingTokenizer(tokenizer_json(), 400), "has 259 tokens, but 400 by the manifest"),
        ]
    ):
        made = prepared(tmp_path / str(number), file, tokenizer=liar)
        with pytest.raises(DataError, match=why):
            TokenDataset.open(made.path, made.digest).open_tokenizer()
