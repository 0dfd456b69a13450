"""What is saved of a run's model on this disk, for who wants to look at it: nothing is locked, and nothing changed.

A checkpoint names its run by the id alone. The run's settings and tokenizer lie beside it, where `p2ptrain checkpoint
export` has copied it, or with the node that took part in the run.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path

from p2ptrain.config import NodeConfig, RunConfig
from p2ptrain.core.events import Certified
from p2ptrain.core.state import AgreedState
from p2ptrain.daemon.find import choose_run, find_dataset
from p2ptrain.daemon.places import run_directory
from p2ptrain.errors import ConfigError, DataError, RemoteProtocolError
from p2ptrain.files import entries, read
from p2ptrain.learn.data import TOKENIZER_NAME, TokenDataset
from p2ptrain.learn.export import Weights
from p2ptrain.learn.tokenizer import TOKENIZER_BYTES_MAX, BytesTokenizer, JsonTokenizer, Tokenizer, tokenizer_digest
from p2ptrain.store.checkpoints import STAMP_NAME, STATE_NAME, Checkpoint, Checkpoints, read_stamp
from p2ptrain.store.log import Snapshot, decoded, frames_of
from p2ptrain.store.store import CHECKPOINTS_NAME

RUN_NAME = "run.json"

log = logging.getLogger("p2ptrain.daemon")


@dataclass(frozen=True, slots=True)
class SavedModel:
    """A checkpoint that is whole, and what it takes to read it."""

    run: RunConfig
    checkpoint: Checkpoint
    tokenizer: Tokenizer
    state: AgreedState | None  # what was agreed with it, if the node's log still tells

    @property
    def weights(self) -> Weights:
        stamp, path = self.checkpoint.stamp, self.checkpoint.path / STATE_NAME
        branch, head, root = self.checkpoint.branch, self.checkpoint.head, self.checkpoint.root
        return Weights(path, stamp.state.bytes, stamp.state.blake3, self.run, stamp.round, branch, head, root)

    @property
    def members(self) -> tuple[int, int] | None:
        """How many had a vote, and how many were admitted."""
        return None if self.state is None else (len(self.state.members), len(self.state.admitted))


def find_model(
    config: NodeConfig, wanted: str | None = None, number: int | None = None, directory: Path | None = None
) -> SavedModel:
    """The newest model that is whole, of the one run that is meant; or that of a round, or in a directory."""
    if directory is not None and number is not None:
        raise ConfigError("the directory is of one round", key="--round", fix="Leave it out, or name no directory")
    if directory is not None:
        checkpoint, run = _open(config, directory)
        if not run.run_id.startswith(wanted or ""):
            raise ConfigError(f"{directory} is of run {run.run_id}", key="--run", fix="Leave it out, or name that one")
    else:
        run = choose_run(config, wanted)
        run_id = bytes.fromhex(run.run_id)
        checkpoint = newest_whole(Checkpoints(run_directory(config, run_id) / CHECKPOINTS_NAME, run_id), number)
    state = _state_after(run_directory(config, bytes.fromhex(run.run_id)) / "wal", checkpoint)
    return SavedModel(run, checkpoint, _tokenizer(config, run, checkpoint.path), state)


def newest_whole(checkpoints: Checkpoints, number: int | None = None) -> Checkpoint:
    """The last made that is whole, of one round or of any; those that are damaged are named and passed over."""
    for each in reversed(checkpoints.found()):
        if isinstance(each, Checkpoint) and number not in (None, each.round):
            continue
        why = str(each) if isinstance(each, DataError) else checkpoints.verify(each)
        if isinstance(each, Checkpoint) and why is None:
            return each
        log.warning("passed over: %s", why)
    raise DataError(f"{checkpoints.directory}: no whole checkpoint" + ("" if number is None else f" of round {number}"))


def beside(config: NodeConfig, run: RunConfig) -> dict[str, bytes]:
    """The files that a checkpoint is read with, wherever it goes. It goes without a tokenizer that is lost."""
    files = {RUN_NAME: run.canonical()}
    if run.tokenizer.kind == "json":
        try:
            files[TOKENIZER_NAME] = _dataset(config, run).open_tokenizer().file_bytes
        except DataError as error:
            log.warning("no tokenizer beside it: %s", error)
    return files


def _open(config: NodeConfig, directory: Path) -> tuple[Checkpoint, RunConfig]:
    """A checkpoint and its run; `DataError` if it is not whole."""
    if not (directory / STAMP_NAME).exists():
        fix = "Name a directory that `p2ptrain checkpoint export` made"
        raise ConfigError(f"{directory} holds no checkpoint", key="--checkpoint", fix=fix)
    stamp = read_stamp(directory)
    run_id = bytes.fromhex(stamp.run)
    checkpoint = Checkpoint(directory, stamp)
    if why := Checkpoints(directory.parent, run_id).verify(checkpoint):
        raise DataError(why)
    for place in (directory, run_directory(config, run_id)):
        run = _run_in(place / RUN_NAME)
        if run is not None and run.run_id == stamp.run:
            return checkpoint, run
    fix = f"Name the directory of a node that took part in it, or put its {RUN_NAME} beside {STAMP_NAME}"
    raise ConfigError(f"the settings of run {stamp.run} are not here", key="--data-dir", fix=fix)


def _run_in(path: Path) -> RunConfig | None:
    if (encoded := read(path)) is None:
        return None
    try:
        run = RunConfig.from_canonical(encoded)
    except RemoteProtocolError as error:
        raise DataError(f"{path}: not the settings of a run: {error}") from error
    return run if run.is_sealed else None


def _dataset(config: NodeConfig, run: RunConfig) -> TokenDataset:
    return TokenDataset.open(find_dataset(config, run.data.manifest), run.data.manifest)


def _tokenizer(config: NodeConfig, run: RunConfig, directory: Path) -> Tokenizer:
    """The run's: from beside the checkpoint, or from its data."""
    if run.tokenizer.kind == "bytes":
        return BytesTokenizer()
    path = directory / TOKENIZER_NAME
    if not path.exists():
        return _dataset(config, run).open_tokenizer()
    file_bytes = read(path) or b""
    if len(file_bytes) > TOKENIZER_BYTES_MAX or tokenizer_digest(file_bytes) != run.tokenizer.digest:
        raise DataError(f"{path}: damaged, or not the run's: its digest is not {run.tokenizer.digest}")
    tokenizer = JsonTokenizer(file_bytes, str(path))
    if tokenizer.vocab_size > run.model.vocab_size:  # nobody could have trained with it
        raise DataError(f"{path}: {tokenizer.vocab_size} tokens, and the run's model knows {run.model.vocab_size}")
    return tokenizer


def _state_after(wal: Path, checkpoint: Checkpoint) -> AgreedState | None:
    """The agreed state of a checkpoint's round. A node may be writing its log: what cannot be read is not known."""
    paths = [path for path in entries(wal) if re.fullmatch(r"\d{8}\.log", path.name)]
    try:
        content = read(paths[-1]) if paths else None
        if content is None:
            return None
        number = int(paths[-1].name[:8])
        records = [decoded(paths[-1], at, body) for at, body in frames_of(paths[-1], number, content)[0]]
    except DataError as error:
        log.warning("the members are not known: %s", error)
        return None
    states = [each.state for each in records if isinstance(each, Certified)]
    for saved in (each.saved for each in records if isinstance(each, Snapshot)):
        states += [saved.base, *(certified.state for certified in saved.history)]
    return next((state for state in states if checkpoint.head and state.head == checkpoint.head), None)
