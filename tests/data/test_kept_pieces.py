"""A joiner's pieces stay within their room: the least recently needed go, and never what its owner has put there."""

from __future__ import annotations

import errno
import itertools
import os
import time
from pathlib import Path

import numpy as np
import pytest

from p2ptrain.config import DataConfig, ModelConfig, RunConfig
from p2ptrain.data.dataset import TokenDataset, manifest_digest, store_manifest
from p2ptrain.data.kept_pieces import KeptPieces
from p2ptrain.digest import PIECE_BYTES
from p2ptrain.errors import DataError
from p2ptrain.files import DiskError
from p2ptrain.train.begin import begin
from tests.helpers.large_sets import set_of_names, set_of_pieces
from tests.helpers.trainer import TINY

LENGTH = 1_024
PIECES = 8
ROOM = 4 * PIECE_BYTES
START_SECONDS = 5.0


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    return set_of_pieces(tmp_path_factory.mktemp("whole") / "data", PIECES)


def joiner(directory: Path, whole: TokenDataset, room: int = ROOM) -> TokenDataset:
    """Opens a joiner's copy, as at a start."""
    encoded = whole.manifest_bytes()
    mine = store_manifest(directory / "mine", encoded, manifest_digest(encoded))
    mine.keep_within(room)
    return mine


def at(*pieces: int) -> np.ndarray:
    """Returns a sequence in each of these pieces."""
    return np.array([piece * PIECE_BYTES // LENGTH for piece in pieces], dtype=np.int64)


def hand_over(whole: TokenDataset, mine: TokenDataset, digests: list[bytes]) -> None:
    for digest in digests:
        piece = whole.piece(digest)
        assert piece is not None
        mine.add_piece(digest, piece)


def fetch(whole: TokenDataset, mine: TokenDataset, *pieces: int) -> None:
    hand_over(whole, mine, mine.need(at(*pieces), LENGTH))


def kept(mine: TokenDataset) -> list[int]:
    """Returns the numbers of the fetched pieces that are on the disk."""
    names = mine.manifest.training.pieces
    return sorted(names.index(path.name) for path in (mine.directory / "fetched").iterdir() if path.name in names)


def test_the_least_recently_needed_go_and_those_needed_now_stay(tmp_path: Path, whole: TokenDataset) -> None:
    mine = joiner(tmp_path, whole)
    fetch(whole, mine, 0, 1)
    fetch(whole, mine, 2, 3)
    assert kept(mine) == [0, 1, 2, 3]
    fetch(whole, mine, 0)  # needed again: now 1 is the oldest
    fetch(whole, mine, 4)
    assert kept(mine) == [0, 2, 3, 4]
    fetch(whole, mine, 5, 6, 7)
    assert kept(mine) == [4, 5, 6, 7]
    fetch(whole, mine, 4, 5, 6)
    hand_over(whole, mine, mine.missing(at(0, 1), LENGTH)[:1])
    with pytest.raises(DataError, match=r"cannot be read"):
        mine.batch(at(7), LENGTH)  # it had to go, and the three that are needed did not
    assert kept(mine) == [0, 4, 5, 6]
    assert np.array_equal(mine.batch(at(4, 5, 6), LENGTH), whole.batch(at(4, 5, 6), LENGTH))
    assert mine.missing(at(7), LENGTH) == whole_digests(whole, 7)


def whole_digests(whole: TokenDataset, *pieces: int) -> list[bytes]:
    return [bytes.fromhex(whole.manifest.training.pieces[piece]) for piece in pieces]


def test_the_order_survives_a_restart_on_a_disk_without_times_of_access(tmp_path: Path, whole: TokenDataset) -> None:
    mine = joiner(tmp_path, whole)
    fetch(whole, mine, 0, 1, 2, 3)
    for age, piece in enumerate([2, 0, 3, 1]):
        path = mine.directory / "fetched" / mine.manifest.training.pieces[piece]
        os.utime(path, ns=(10**18 - age, 10**18 + age))
    fetch(whole, mine, 2)  # the oldest, until it is needed
    again = joiner(tmp_path, whole)
    fetch(whole, again, 5)
    assert kept(again) == [1, 2, 3, 5]
    fetch(whole, again, 6)
    assert kept(again) == [1, 2, 5, 6]


def test_with_less_room_after_a_restart_the_oldest_go_and_what_a_crash_has_left(
    tmp_path: Path, whole: TokenDataset
) -> None:
    mine = joiner(tmp_path, whole)
    for piece in (3, 1, 2, 0):
        fetch(whole, mine, piece)
        os.utime(mine.directory / "fetched" / mine.manifest.training.pieces[piece], ns=(0, 10**18 - piece))
    torn = mine.directory / "fetched" / f"{mine.manifest.training.pieces[4]}.partial"
    torn.write_bytes(b"half")
    again = joiner(tmp_path, whole, 2 * PIECE_BYTES)
    assert (kept(again), torn.exists()) == ([0, 1], False)


def test_what_the_owner_has_prepared_is_never_removed(tmp_path: Path, whole: TokenDataset) -> None:
    own = tmp_path / "mine" / "pieces"
    own.mkdir(parents=True)
    for digest in whole_digests(whole, 0, 1, 2):
        piece = whole.piece(digest)
        assert piece is not None
        (own / digest.hex()).write_bytes(piece)
    mine = joiner(tmp_path, whole, PIECE_BYTES)
    before = {path.name for path in own.iterdir()}
    for piece in (3, 4, 5):
        fetch(whole, mine, 0, 1, 2, piece)  # its own take nothing of the room
        assert kept(mine) == [piece]
        assert mine.batch(at(0, 1, 2, piece), LENGTH).shape == (4, LENGTH + 1)
    joiner(tmp_path, whole, 0)
    assert (kept(mine), {path.name for path in own.iterdir()}) == ([], before)
    assert mine.missing(at(0, 1, 2), LENGTH) == []


def test_more_than_there_is_room_for_is_refused_before_anything_goes(tmp_path: Path, whole: TokenDataset) -> None:
    mine = joiner(tmp_path, whole)
    fetch(whole, mine, 0, 1)
    with pytest.raises(DataError, match=r"^5,242,880 bytes .* room for 4,194,304. Allow more with limits.disk_bytes$"):
        mine.need(at(2, 3, 4, 5, 6), LENGTH)
    assert kept(mine) == [0, 1]
    fetch(whole, mine, 0, 1, 2)
    hand_over(whole, mine, mine.need_held_out(1, LENGTH))
    assert kept(mine) == [0, 1, 2]
    with pytest.raises(DataError, match="are needed at once"):  # beside what is held out
        mine.need(at(0, 1, 2, 3), LENGTH)


def test_what_is_expected_fits_beside_what_is_needed(tmp_path: Path, whole: TokenDataset) -> None:
    mine = joiner(tmp_path, whole)
    fetch(whole, mine, 5)
    fetch(whole, mine, 0)
    fetch(whole, mine, 1, 2)
    expected = mine.expect(at(2, 3, 4, 5), LENGTH)
    assert expected == whole_digests(whole, 3)  # 2 is needed now, and 5 is here
    hand_over(whole, mine, expected)
    assert kept(mine) == [1, 2, 3, 5]
    fetch(whole, mine, 1)
    assert mine.expect(at(2, 3, 5, 6), LENGTH) == []  # with 1, these fill the room
    hand_over(whole, mine, mine.need_held_out(1, LENGTH))
    assert kept(mine) == [1, 3, 5], "the one that is needed stays, although it is the oldest by now"
    assert whole.expect(at(6), LENGTH) == []


@pytest.mark.linux
def test_the_space_of_a_piece_that_had_to_go_is_free(tmp_path: Path, whole: TokenDataset) -> None:
    mine = joiner(tmp_path, whole)
    for pieces in ((0, 1, 2, 3), (4, 5, 6, 7)):
        fetch(whole, mine, *pieces)
        mine.batch(at(*pieces), LENGTH)
    assert Path("/proc/self/maps").read_text().count(f"{tmp_path}/mine/fetched/") == 4  # and none that is deleted


def test_a_damaged_piece_is_fetched_again_into_its_own_room(tmp_path: Path, whole: TokenDataset) -> None:
    mine = joiner(tmp_path, whole, PIECE_BYTES)
    fetch(whole, mine, 0)
    (mine.directory / "fetched" / mine.manifest.training.pieces[0]).write_bytes(bytes(PIECE_BYTES))
    with pytest.raises(DataError, match="is damaged"):
        mine.batch(at(0), LENGTH)
    fetch(whole, mine, 0)
    assert np.array_equal(mine.batch(at(0), LENGTH), whole.batch(at(0), LENGTH))


def test_what_a_round_needs_is_more_than_nearly_all_rounds_take(tmp_path: Path) -> None:
    many = set_of_names(tmp_path, 2_000)
    assert many.fetched_bytes_min(64, 0, LENGTH) == 0  # all is here
    (tmp_path / "pieces").rename(tmp_path / "elsewhere")
    drawn = np.random.default_rng(0)
    for sequences, length in ((64, 1_024), (32, 300_000), (8, 5 * PIECE_BYTES // 2)):
        least = many.fetched_bytes_min(sequences, 0, length)
        rounds = (drawn.integers(0, many.sequences(length), sequences) for _ in range(500))
        takes = [len(many.missing(positions, length)) * PIECE_BYTES for positions in rounds]
        assert max(takes) <= least < 1.4 * np.mean(takes)
    assert many.fetched_bytes_min(10**6, 64, LENGTH) == 2_001 * PIECE_BYTES


# ---------------------------------------------------------------------------------------------------
# Many pieces


def test_a_run_of_100_000_pieces_starts_in_seconds(tmp_path: Path) -> None:
    digest = manifest_digest(set_of_names(tmp_path, 100_000).manifest_bytes())
    before = time.process_time()
    run = RunConfig(name="large", model=ModelConfig(**TINY), data=DataConfig(manifest=digest))
    begun = begin(run, tmp_path / "none", ["ab" * 32], tmp_path)
    data = TokenDataset.open(begun.dataset, begun.run.data.manifest)
    assert data.missing(np.arange(0, data.sequences(LENGTH), data.sequences(LENGTH) // 500), LENGTH) == []
    assert time.process_time() - before < START_SECONDS


@pytest.mark.linux
def test_a_piece_that_was_read_does_not_stay_in_memory(whole: TokenDataset) -> None:
    fresh = TokenDataset(whole.directory, whole.manifest)
    fresh.batch(at(*range(PIECES)), LENGTH)
    blocks = Path("/proc/self/smaps").read_text().split(f"{whole.directory}/pieces/")[1:]
    resident = [int(block.split("Rss:")[1].split()[0]) for block in blocks]  # kB
    assert len(resident) >= PIECES
    assert max(resident) < PIECE_BYTES // 1_024 // 4


def test_what_is_no_piece_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "README").write_bytes(bytes(100))
    (tmp_path / "link").symlink_to(tmp_path / "README")
    kept = KeptPieces(tmp_path, 10, {"a", "link", "lost+found"}, lambda name: None)
    kept.add("a", 10, lambda: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README", "link", "lost+found"]


def test_a_disk_that_others_have_filled_costs_older_pieces_and_not_the_new_one(tmp_path: Path) -> None:
    gone: list[str] = []
    kept = KeptPieces(tmp_path, 100, {"a", "b", "c"}, gone.append)
    for name in ("a", "b"):
        kept.add(name, 10, lambda: None)

    def write() -> None:
        if not gone:
            raise DiskError(tmp_path, "cannot be written", OSError(errno.ENOSPC, "full"))

    kept.add("c", 10, write)
    assert (gone, kept.room) == (["a"], 20)
    with pytest.raises(DiskError):
        kept.add("a", 10, lambda: write_to_a_broken_disk(tmp_path))


def test_room_that_others_took_for_a_while_comes_back(tmp_path: Path) -> None:
    kept, tries = KeptPieces(tmp_path, 100, {"a", "b", "c"}, lambda name: None), itertools.count()

    def write() -> None:
        if next(tries) == 0:
            raise DiskError(tmp_path, "cannot be written", OSError(errno.ENOSPC, "full"))

    kept.add("a", 10, write)
    assert kept.room == 10
    kept.hold("training", {"a": 10, "b": 40, "c": 40})
    kept.add("b", 40, write)
    kept.add("c", 40, write)
    with pytest.raises(DataError, match="there is room for 100"):
        kept.hold("training", {"a": 10, "b": 40, "c": 51})


def write_to_a_broken_disk(path: Path) -> None:
    raise DiskError(path, "cannot be written", OSError(errno.EIO, "broken"))
