"""Served blobs, while the trainer's thread saves states and the disk's thread prunes them."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2ptrain.digest import PIECE_BYTES, leaf_digests
from p2ptrain.errors import DataError
from p2ptrain.models.adapters import read_base
from p2ptrain.net.blobs.blob import BlobName, WholeFile, verified
from p2ptrain.net.questions import STATES_MAX
from p2ptrain.node import served_blobs as module
from p2ptrain.node.served_blobs import (
    FETCH_SECONDS,
    PAUSE_SECONDS,
    STATES_SERVED,
    SavedStates,
    ServedBlobs,
    StateBlob,
)
from p2ptrain.store.checkpoints import STATE_NAME
from tests.helpers.net import some_bytes

NOBODY = b"n" * 32


@pytest.fixture
def library() -> ServedBlobs:
    nothing: Any = None  # what is not a state is served from elsewhere
    return ServedBlobs(nothing, nothing, SavedStates(), nothing, nothing)


def checkpoint(directory: Path, number: int) -> Any:
    path = directory / str(number)
    path.mkdir(exist_ok=True)
    return SimpleNamespace(round=number, root=number.to_bytes(32, "big"), path=path, state_bytes=10)


def test_the_last_states_that_were_saved_and_are_there_are_served(library: ServedBlobs, tmp_path: Path) -> None:
    made = [checkpoint(tmp_path, number) for number in range(STATES_SERVED + 3)]
    for each in made[:-1]:
        library.states.offer(each, b"")
    assert library.states.find(made[1].root) is None, "the oldest two made room"
    assert library.states.find(made[2].root) is not None
    assert library.states.places() == tuple((each.round, each.root) for each in made[-2 : -2 - STATES_MAX : -1])
    pruned, last = made[-2], made[-1]
    shutil.rmtree(pruned.path)
    assert library.states.places() == tuple((each.round, each.root) for each in made[-3 : -3 - STATES_MAX : -1])
    assert library.states.find(pruned.root) is None
    assert library.find(BlobName("state", pruned.root), NOBODY) is None
    library.states.offer(last, b"")  # in the place of what was pruned, and not of another
    library.states.offer(last, b"")
    newest = (last, *made[-3 : -2 - STATES_MAX : -1])
    assert library.states.places() == tuple((each.round, each.root) for each in newest)
    assert library.states.find(made[2].root) is not None
    found = library.states.find(last.root)
    assert found is not None and found.checkpoint is last
    assert library.find(BlobName("state", last.root), NOBODY) is not None


def test_the_states_that_peers_fetch_are_known_as_long_as_they_are_read_and_there(
    library: ServedBlobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1_000.0
    monkeypatch.setattr(module, "monotonic", lambda: now)
    made = [checkpoint(tmp_path, number) for number in range(3)]
    for each in made:
        (each.path / STATE_NAME).write_bytes(bytes(10))
        library.states.offer(each, b"".join(leaf_digests(bytes(10))))
    assert library.states.fetched() == []

    def read(number: int) -> None:
        blob = library.states.find(made[number].root)
        assert blob is not None and len(blob.read(0)) == 10

    for number in (2, 1, 0):
        read(number)
        assert library.states.fetched() == [each.path for each in made[number:]]
    made[0].path.rename(tmp_path / "pruned")
    assert library.states.fetched() == [each.path for each in made[1:]]
    now += PAUSE_SECONDS
    read(2)
    assert library.states.fetched() == [made[2].path]
    for _ in range(int(FETCH_SECONDS / PAUSE_SECONDS)):
        now += PAUSE_SECONDS
        read(2)
    assert library.states.fetched() == [], "one that is read for ever stands in nobody's way"


def test_peers_may_ask_for_states_while_others_are_saved(library: ServedBlobs, tmp_path: Path) -> None:
    """The trainer's thread may save a state between any two steps of an answer."""
    numbers = itertools.count(STATES_SERVED)
    before = [checkpoint(tmp_path, number) for number in range(STATES_SERVED)]
    for each in before:
        library.states.offer(each, b"")

    class WatchedPath:
        """A path whose `exists` lets another state be saved first."""

        is_asked = True

        def exists(self) -> bool:
            if WatchedPath.is_asked:
                WatchedPath.is_asked = False
                library.states.offer(checkpoint(tmp_path, next(numbers)), b"")
                WatchedPath.is_asked = True
            return True

    for each in before:
        each.path = WatchedPath()
    assert library.states.places() == tuple((each.round, each.root) for each in before[: -1 - STATES_MAX : -1])
    assert next(numbers) == 2 * STATES_SERVED
    assert [number for number, _ in library.states.places()] == [*range(STATES_SERVED, 2 * STATES_SERVED)][
        : -1 - STATES_MAX : -1
    ]


def test_a_piece_of_a_saved_state_that_is_damaged_is_not_served(tmp_path: Path) -> None:
    """The files are not verified when the node starts."""
    state = some_bytes(2 * PIECE_BYTES)
    pieces = [state[:PIECE_BYTES], state[PIECE_BYTES:-1] + bytes([state[-1] ^ 1])]
    (tmp_path / STATE_NAME).write_bytes(b"".join(pieces))
    kept: Any = SimpleNamespace(state_bytes=len(state), path=tmp_path)
    blob = StateBlob(kept, b"".join(leaf_digests(state)))
    assert blob.read(0) == pieces[0]
    with pytest.raises(DataError, match=f"{STATE_NAME} is damaged: piece 1"):
        blob.read(1)
    with pytest.raises(DataError, match="damaged: piece 1"):
        list(verified(blob))


def test_a_file_that_was_damaged_since_it_was_checked_is_not_served(tmp_path: Path) -> None:
    content, path = some_bytes(2 * PIECE_BYTES + 5), tmp_path / "manifest.json"
    path.write_bytes(content)
    checked: list[bytes] = []

    def is_right(whole: bytes) -> bool:
        checked.append(whole)
        return whole == content

    blob = WholeFile(path, len(content), is_right)
    assert b"".join(blob.read(index) for index in (0, 1, 2)) == content
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert blob.read(1) == content[PIECE_BYTES : 2 * PIECE_BYTES]
    with pytest.raises(DataError, match="is damaged: piece 2"):
        blob.read(2)
    assert checked == [content]
    wrong = WholeFile(path, len(content), is_right)
    for _ in range(2):
        with pytest.raises(DataError, match="is damaged"):
            wrong.read(0)
    assert len(checked) == 2


def test_frozen_weights_are_served_by_their_digest_and_checked_as_they_are_read(tmp_path: Path) -> None:
    path, nothing = tmp_path / "base", cast(Any, None)
    path.write_bytes(some_bytes(PIECE_BYTES + 7))
    base = read_base(path)
    run: Any = SimpleNamespace(adapt=SimpleNamespace(base=base.digest))
    library = ServedBlobs(run, nothing, SavedStates(), nothing, nothing, base)
    name = bytes.fromhex(base.digest)
    found = library.find(BlobName("base", name), NOBODY)
    assert found is not None
    assert b"".join(verified(found)) == path.read_bytes()
    assert library.find(BlobName("base", bytes(32)), NOBODY) is None
    assert library.find(BlobName("state", name), NOBODY) is None
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert found.read(0)
    with pytest.raises(DataError, match="is damaged: piece 1"):
        found.read(1)
    path.unlink()
    with pytest.raises(DataError, match="cannot be read"):
        found.read(0)
