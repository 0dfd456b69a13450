"""Makes data sets of many pieces quickly: pieces of zeros that take little of the disk, or only their names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from p2ptrain.data.dataset import DatasetIndex, Split, TokenDataset, TokenizerName, manifest_digest, piece_digest
from p2ptrain.digest import PIECE_BYTES

LINKS_MAX = 50_000  # of one file; ext4 allows 65,000


def set_of_pieces(directory: Path, pieces: int) -> TokenDataset:
    """Makes a data set of so many pieces to train on, all different, and one held out. Tokens are bytes."""
    (directory / "pieces").mkdir(parents=True)
    names = []
    for number in range(pieces + 1):
        head = b"piece %d, and nothing more" % number
        names.append(piece_digest(head + bytes(PIECE_BYTES - len(head))))
        _sparse(directory / "pieces" / names[-1], head)
    return _indexed(directory, names)


def set_of_names(directory: Path, pieces: int) -> TokenDataset:
    """Makes a data set whose pieces have the right sizes, and nothing else: they cannot be trained on."""
    (directory / "pieces").mkdir(parents=True)
    names = [f"{number:064x}" for number in range(pieces + 1)]
    for first in range(0, len(names), LINKS_MAX):
        like = directory / "pieces" / names[first]
        _sparse(like, b"")
        for name in names[first + 1 : first + LINKS_MAX]:
            os.link(like, directory / "pieces" / name)
    return _indexed(directory, names)


def _sparse(path: Path, head: bytes) -> None:
    with path.open("wb") as file:
        file.write(head)
        file.truncate(PIECE_BYTES)


def manifest_of(names: Sequence[str]) -> bytes:
    """Returns the manifest of a data set of these pieces, the last of which is held out."""
    training, held_out = (Split(tuple(part), len(part) * PIECE_BYTES) for part in (names[:-1], names[-1:]))
    tokenizer = TokenizerName(digest="", kind="bytes", vocab_size=256)
    index = DatasetIndex(held_out=held_out, token_bytes=1, tokenizer=tokenizer, training=training, version=1)
    return index.encode()


def _indexed(directory: Path, names: list[str]) -> TokenDataset:
    encoded = manifest_of(names)
    (directory / "manifest.json").write_bytes(encoded)
    return TokenDataset.open(directory, manifest_digest(encoded))
