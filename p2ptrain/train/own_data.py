"""Own data: in a run with `data.source = "own"`, each node trains on what its owner prepared, and nobody else gets it.

What all nodes share is a held-out data set, which has no training split: a list of digests of the training pieces would
let others test what they guess to be in them. The node that begins the run makes it of its own held-out split. Own data
is an object of its own that only the trainer has: what serves and fetches data knows the shared set alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from p2ptrain.config import RunConfig
from p2ptrain.data.assignment import Positions, shard
from p2ptrain.data.dataset import (
    MANIFEST_NAME,
    PIECES_NAME,
    TOKENIZER_NAME,
    Split,
    TokenDataset,
    manifest_digest,
    read_manifest,
)
from p2ptrain.digest import digest
from p2ptrain.errors import ConfigError, DataError
from p2ptrain.files import trouble, write_atomically

if TYPE_CHECKING:
    from p2ptrain.train.private import Privacy  # which needs more packages

KEY = "--data"
PREPARE_FIX = "Give the directory that `p2ptrain data prepare` made with --data, or as own_data in [storage]"
DIGITS = 16  # of a data set's digest, in the name of its directory


@dataclass(frozen=True)
class OwnData:
    """A node's own data, and the key of the node, by which nodes with the same data train on different parts of it.

    privacy: what contributions may tell of the data, if there is a limit"""

    dataset: TokenDataset
    me: bytes
    privacy: Privacy | None = None

    def positions(self, run: RunConfig, round_number: int, count: int) -> Positions:
        """Returns the sequences of a round: the same ones when it is repeated, in whatever place of the roster."""
        seed = int.from_bytes(digest("own data order", run.seed.to_bytes(8, "little"), self.me)[:8], "little") >> 1
        return shard(seed, round_number, 0, 1, count, self.dataset.sequences(run.model.sequence_length))


def open_own(run: RunConfig, directory: Path, me: bytes) -> OwnData:
    """Opens a node's own data. ConfigError if this run cannot be trained on it."""
    try:
        dataset = TokenDataset.open(directory, manifest_digest(read_manifest(directory)))
    except DataError as error:
        raise ConfigError(str(error), key=KEY, fix=PREPARE_FIX) from error
    made, wanted = dataset.tokenizer, run.tokenizer
    if (made.kind, made.digest) != (wanted.kind, wanted.digest):
        ours, theirs = (
            f"tokenizer {each.digest[:DIGITS]}" if each.digest else "the bytes tokenizer" for each in (made, wanted)
        )
        what = f"{directory} was prepared with {ours}, and the run has {theirs}"
        fix = "Prepare the data again without --tokenizer"
        if wanted.digest:
            fix = "Prepare the data again with --tokenizer FILE, and the tokenizer.json of whoever began the run"
        raise ConfigError(what, key=KEY, fix=fix)
    if not dataset.sequences(run.model.sequence_length):
        what = f"{directory} has too little text to train on: a sequence of this run has {run.model.sequence_length}"
        raise ConfigError(f"{what} tokens", key=KEY, fix="Prepare more")
    if missing := dataset.missing_anywhere():
        fix = "Nobody else has them: prepare it again, or copy the whole directory"
        raise ConfigError(f"{directory} lacks {len(missing)} pieces", key=KEY, fix=fix)
    return OwnData(dataset, me)


def share_held_out(own: TokenDataset, parent: Path) -> TokenDataset:
    """Makes the data set that all nodes of a run share: the held-out split of the own data, in a directory of `parent`.

    Idempotent. Its manifest comes last: without one, a directory holds no data set."""
    index = msgspec.structs.replace(own.manifest, training=Split((), 0))
    encoded = index.encode()
    named = manifest_digest(encoded)
    directory = parent / named[:DIGITS]
    with trouble(directory):
        (directory / PIECES_NAME).mkdir(parents=True, exist_ok=True)
        for name in index.held_out.pieces:
            if (piece := own.piece(bytes.fromhex(name))) is None:
                raise DataError(f"held-out piece {name} of {own.directory} is missing or damaged. Prepare it again")
            write_atomically(directory / PIECES_NAME / name, piece)
        if own.tokenizer.kind == "json":
            write_atomically(directory / TOKENIZER_NAME, own.open_tokenizer().file_bytes)
        write_atomically(directory / MANIFEST_NAME, encoded)
    return TokenDataset.open(directory, named)
