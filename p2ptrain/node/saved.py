"""Finds and opens saved models of a run on this disk, read-only: it takes no lock and changes nothing.

A checkpoint names its run by the id alone. The run's config and tokenizer are beside an exported checkpoint (`p2ptrain
checkpoint export`), or in the data directory of the node that took part in the run.

A checkpoint also names its root, but anyone can write that. The evidence is the node's own log, whose certified rounds
name the roots of earlier ones: checkpoints that the log certifies come first, and those it contradicts are rejected."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from p2ptrain.config import ModelConfig, RunConfig
from p2ptrain.config.run import CONFIG_BYTES_MAX
from p2ptrain.core.journal import HistoryVerdict, Journal
from p2ptrain.core.state import AgreedState
from p2ptrain.data.dataset import TOKENIZER_NAME, TokenDataset, manifest_digest, read_manifest
from p2ptrain.data.run_data import check_tokens
from p2ptrain.data.tokenizer import TOKENIZER_BYTES_MAX, BytesTokenizer, JsonTokenizer, Tokenizer, tokenizer_digest
from p2ptrain.errors import ConfigError, DataError, RemoteProtocolError
from p2ptrain.files import PARTIAL_SUFFIX, make_directory, read, read_regular, trouble, write_atomically
from p2ptrain.models.adapters import base_file, read_base
from p2ptrain.models.export import Weights
from p2ptrain.models.given_weights import config_beside, read_checkpoint, read_weights
from p2ptrain.node.home import RUN_NAME, SUCCESSOR_NAME, Home
from p2ptrain.store.backup import BASES, SEGMENT, BackupPlace, copy_to, newest_certified, newest_round, proof_of
from p2ptrain.store.checkpoints import LOOKS_MAX, STAMP_NAME, STATE_NAME, Checkpoint, Checkpoints, read_stamp
from p2ptrain.store.log import read_journal
from p2ptrain.store.store import CHECKPOINTS_NAME, ORIGIN_NAME
from p2ptrain.train.begin import GivenWeights

LOG_NAME = "wal"
OTHER_HISTORY = "not part of this node's history"

log = logging.getLogger("p2ptrain.node")
T = TypeVar("T")


class _GoneError(DataError):
    """The running node has removed a checkpoint since it was found."""


def though_pruned(look: Callable[[], T]) -> T:
    """Calls `look`, again if a running node has removed a checkpoint meanwhile."""
    for _ in range(LOOKS_MAX):
        try:
            return look()
        except _GoneError as error:
            log.debug("%s", error)
    raise DataError("the node removes checkpoints faster than they can be read. Stop it first")


@contextmanager
def reading(checkpoint: Checkpoint) -> Iterator[None]:
    """Turns an error into one that `though_pruned` retries if the checkpoint has been removed meanwhile."""
    try:
        yield
    except DataError as error:
        if checkpoint.path.exists():
            raise
        raise _GoneError(str(error)) from error


@dataclass(frozen=True, slots=True)
class JudgedCheckpoint:
    """A checkpoint, and the verdict of the node's log on it."""

    checkpoint: Checkpoint
    judgement: HistoryVerdict
    state: AgreedState | None  # the agreed state of its round, if the log still has it


@dataclass(frozen=True, slots=True)
class SavedModel(JudgedCheckpoint):
    """An undamaged checkpoint, with all that is needed to load its model."""

    run: RunConfig
    tokenizer: Tokenizer
    base: Path | None  # the frozen weights, if adapters train

    @property
    def weights(self) -> Weights:
        return _weights(self.checkpoint, self.run, self.base)

    @property
    def saved_at(self) -> float:
        """The time of the checkpoint, in seconds since 1970."""
        with trouble(self.checkpoint.path, "cannot be read"):
            return (self.checkpoint.path / STAMP_NAME).stat().st_mtime

    @property
    def members(self) -> tuple[int, int] | None:
        """The number of members with a vote, and of admitted nodes."""
        return None if self.state is None else (len(self.state.members), len(self.state.admitted))


def find_model(
    home: Home,
    wanted: str | None = None,
    number: int | None = None,
    directory: Path | None = None,
    *,
    needs_base: bool = True,
) -> SavedModel:
    """Finds a saved model: by default the newest undamaged one that the node's log certifies, or the one of a round or
    in a directory. Raises `DataError` if there is none, or if the log contradicts it."""
    if directory is not None and number is not None:
        raise ConfigError("the directory holds one round only", key="--round", fix="Leave it out, or name no directory")
    if directory is not None:
        checkpoint, run = _open(home, directory)
        if not run.run_id.startswith(wanted or ""):
            raise ConfigError(
                f"{directory} belongs to run {run.run_id}", key="--run", fix="Leave it out, or name that one"
            )
        chosen = _judged_by(_journal_of(home.of_run(run.id)), checkpoint)
        if chosen.judgement.is_refuted:
            raise DataError(f"{directory}: {OTHER_HISTORY}: {chosen.judgement.why}")
    else:
        run = home.run(wanted)
        run_id = run.id
        checkpoints = Checkpoints(home.of_run(run_id) / CHECKPOINTS_NAME, run_id)
        chosen = newest_whole(checkpoints, number)
    tokenizer = _tokenizer(home, run, chosen.checkpoint.path)
    base = _base(home, run, chosen.checkpoint.path) if needs_base else None
    return SavedModel(chosen.checkpoint, chosen.judgement, chosen.state, run, tokenizer, base)


def _base(home: Home, run: RunConfig, directory: Path) -> Path | None:
    """Returns the file of the frozen weights of a run that trains adapters, from beside the checkpoint or the node."""
    if not run.adapt.is_on:
        return None
    beside, own = (base_file(place, run.adapt.base) for place in (directory, home.bases))
    path = beside if beside.exists() else own
    if not path.exists() or read_base(path).digest != run.adapt.base:
        raise DataError(
            f"{path}: damaged, or missing: it holds the weights that the run adapts. Take part in the run "
            "once more, which fetches them, name the directory of a node that does with --data-dir, or put the "
            "file of such a node beside the checkpoint"
        )
    return path


def weights_in(home: Home, directory: Path) -> Weights:
    """Returns the weights of the checkpoint in a directory, undamaged, of whatever run."""
    return _weights(*_open(home, directory))


def open_weights(home: Home, place: Path) -> tuple[GivenWeights, Callable[[], str]]:
    """Opens the first weights that `p2ptrain start` is given: files of a model, or a checkpoint of a run. Returns them,
    and how to get the config.json that they come with. Both are read later."""
    if not (place / STAMP_NAME).exists():
        return GivenWeights(place, partial(read_weights, place)), partial(config_beside, place)
    weights = weights_in(home, place)
    return GivenWeights(place, partial(read_checkpoint, weights)), lambda: weights.run.model.config


def backed_up(home: Home, run: RunConfig, place: BackupPlace, every: int | None, kept: int) -> str | None:
    """Backs up the newest certified state, and returns the folder; None until `every` rounds, or one, are new."""
    directory = home.of_run(run.id)
    with place.trouble():
        last = newest_round(place, run.id)
        after = -1 if last < 0 else last + (every or 1) - 1
        found = Checkpoints(directory / CHECKPOINTS_NAME, run.id).present()  # before the log, which may lack later ones
        journal = read_journal(directory / LOG_NAME) if found and found[-1].round > after else None
        chosen = newest_certified(found, journal, after) if journal else None
        if journal is None or chosen is None:
            if (heir := read(directory / SUCCESSOR_NAME)) is not None:
                what = f"the run has a successor, {heir.decode('ascii', 'replace')[:64]}"
                raise ConfigError(what, key="--run", fix="Name that one, and another place for it")
            if last < 0 and every is None:
                fix = "Try again later, or give --every, which waits for one"
                raise DataError("no certified state yet", path=directory, fix=fix)
            return None
        with reading(chosen):
            small = beside(home, run) | {SEGMENT: proof_of(chosen, journal)}
            if (origin := read(directory / ORIGIN_NAME)) is not None:
                small[ORIGIN_NAME] = origin
            return copy_to(place, chosen, small, _base(home, run, directory), kept)


def open_state(home: Home, backup: Path) -> tuple[RunConfig, GivenWeights]:
    """Opens a backup for a run that goes on from it: returns its config and, read later, all of its state. The frozen
    weights of a run that trains adapters are copied to where this node keeps such."""
    weights = weights_in(home, backup)
    run, name = weights.run, weights.run.adapt.base
    if run.adapt.is_on and not (own := base_file(home.bases, name)).exists():
        make_directory(home.bases)
        with trouble(own):
            shutil.copyfile(base_file(backup.parent / BASES, name), part := own.with_name(own.name + PARTIAL_SUFFIX))
            part.replace(own)

    def state_for(model: ModelConfig) -> Tensor:
        log.info("goes on from the state of round %d of run %s, %s", weights.round, run.name, run.run_id)
        return weights.state()

    return run, GivenWeights(backup, state_for, is_state=True)


def _weights(checkpoint: Checkpoint, run: RunConfig, base: Path | None = None) -> Weights:
    stamp, path = checkpoint.stamp, checkpoint.path / STATE_NAME
    branch, head, root = checkpoint.branch, checkpoint.head, checkpoint.root
    return Weights(path, stamp.state.bytes, stamp.state.blake3, run, stamp.round, branch, head, root, base)


def newest_whole(checkpoints: Checkpoints, number: int | None = None) -> JudgedCheckpoint:
    """Returns the newest undamaged checkpoint (of one round, if `number` is given) that the log certifies, or if there
    is none, the newest that the log does not contradict."""
    judged = _judged(checkpoints, number)
    for each in sorted(judged, key=lambda each: not each.judgement.is_certified):
        if not _is_whole(checkpoints, each.checkpoint):
            continue
        if each.judgement.is_certified:
            for other in judged[: judged.index(each)]:
                if not other.judgement.is_certified:
                    path, number = other.checkpoint.path, other.checkpoint.round
                    log.warning("skipped: %s: %s; choose it with --round %d", path, other.judgement, number)
        return each
    which = "" if number is None else f" of round {number}"
    if number is not None or checkpoints.found():
        raise DataError(f"{checkpoints.directory}: no undamaged checkpoint{which}")
    why = "no checkpoint yet; a node writes the first once it has the run's weights"
    if (checkpoints.directory.parent / SUCCESSOR_NAME).exists():
        why = "no checkpoint any more: they went when the run that follows had its own"
    raise DataError(f"{checkpoints.directory}: {why}")


def _judged(checkpoints: Checkpoints, number: int | None) -> list[JudgedCheckpoint]:
    """Returns the readable checkpoints that the log does not contradict, newest first; logs the others."""
    found = checkpoints.found()  # before reading the log, which may lack what a running node saves later
    journal = _journal_of(checkpoints.directory.parent)
    judged = []
    for each in reversed(found):
        if isinstance(each, DataError):
            log.warning("skipped: %s", each)
        elif number in (None, each.round):
            chosen = _judged_by(journal, each)
            if chosen.judgement.is_refuted:
                log.warning("skipped: %s: %s: %s", each.path, OTHER_HISTORY, chosen.judgement.why)
            else:
                judged.append(chosen)
    return judged


def _is_whole(checkpoints: Checkpoints, checkpoint: Checkpoint) -> bool:
    why = checkpoints.verify(checkpoint)
    if why is not None:
        if not checkpoint.path.exists():
            raise _GoneError(why)
        log.warning("skipped: %s", why)
    return why is None


def _journal_of(directory: Path) -> Journal | str:
    """Returns the journal of a run's directory, or why there is none to judge checkpoints by."""
    try:
        return read_journal(directory / LOG_NAME) or "there is no log of its run here"
    except DataError as error:
        log.warning("checkpoints cannot be certified, and the members are unknown: %s", error)
        return "the log of its run here cannot be read"


def _judged_by(journal: Journal | str, checkpoint: Checkpoint) -> JudgedCheckpoint:
    if isinstance(journal, str):
        return JudgedCheckpoint(checkpoint, HistoryVerdict("open", journal), None)
    state = next((each for each in journal.states if checkpoint.head and each.head == checkpoint.head), None)
    return JudgedCheckpoint(checkpoint, checkpoint.judged_by(journal), state)


def keep_tokenizer(home: Home, run: RunConfig, data: TokenDataset) -> None:
    """Stores the run's tokenizer beside the run, if the data does not lie in the node's directory: it may be moved."""
    if data.tokenizer.kind == "json" and home.dataset(run.data.manifest).resolve() != data.directory.resolve():
        place = home.of_run(run.id)
        make_directory(place)
        write_atomically(place / TOKENIZER_NAME, data.open_tokenizer().file_bytes)


def beside(home: Home, run: RunConfig) -> dict[str, bytes]:
    """Returns the files to export beside a checkpoint: config and tokenizer, a lost one left out with a warning."""
    files = {RUN_NAME: run.canonical()}
    if run.tokenizer.kind == "json":
        try:
            files[TOKENIZER_NAME] = _tokenizer(home, run, home.of_run(run.id)).file_bytes
        except DataError as error:
            log.warning("exporting without the tokenizer: %s", error)
    return files


def _open(home: Home, directory: Path) -> tuple[Checkpoint, RunConfig]:
    """Opens a checkpoint and its run's config. Raises `DataError` if it is damaged."""
    if not (directory / STAMP_NAME).exists():
        fix = "Name a directory made by `p2ptrain checkpoint export`"
        raise ConfigError(f"{directory} holds no checkpoint", key="--checkpoint", fix=fix)
    stamp = read_stamp(directory)
    run_id = bytes.fromhex(stamp.run)
    checkpoint = Checkpoint(directory, stamp)
    if why := Checkpoints(directory.parent, run_id).verify(checkpoint):
        raise DataError(why)
    for place in (directory, home.of_run(run_id)):
        run = _run_in(place / RUN_NAME)
        if run is not None and run.run_id == stamp.run:
            return checkpoint, run
    fix = f"Name the directory of a node that took part in it, or put its {RUN_NAME} beside {STAMP_NAME}"
    raise ConfigError(f"the config of run {stamp.run} is not here", key="--data-dir", fix=fix)


def _run_in(path: Path) -> RunConfig | None:
    if (encoded := read_regular(path, CONFIG_BYTES_MAX)) is None:
        return None
    try:
        run = RunConfig.from_canonical(encoded)
    except RemoteProtocolError as error:
        raise DataError(f"{path}: not a run's config: {error}") from error
    return run if run.is_sealed else None


def _dataset(home: Home, run: RunConfig) -> TokenDataset:
    return TokenDataset.open(home.dataset(run.data.manifest), run.data.manifest)


def held_out_of(home: Home, run: RunConfig, directory: Path | None, sequences: int) -> tuple[TokenDataset, int]:
    """Opens the data set in `directory`, or without one the run's; returns it and how many sequences to measure: as
    many as are wanted, or for 0 as are here."""
    if run.model.kind == "own":
        fix = "Call swarm.evaluate(loss) in the script"
        raise ConfigError("only the script that trains this model can compute its loss", key="model.kind", fix=fix)
    if directory is None:
        dataset = _dataset(home, run)
    else:
        dataset = TokenDataset.open(directory, manifest_digest(read_manifest(directory)))
    check_tokens(run, dataset)
    length = run.model.sequence_length
    here, count = dataset.held_out_here(length), dataset.held_out_sequences(length)
    if here < min(sequences or 1, count):
        fix = "Measure fewer with --sequences" if here else "Name a complete data set with --data"
        raise DataError(f"only {here:,} of {count:,} held-out sequences are on this machine. {fix}")
    if not sequences and here < count:
        log.warning("measuring %s of %s held-out sequences: the others are not here", f"{here:,}", f"{count:,}")
    return dataset, min(sequences or here, here)


def _tokenizer(home: Home, run: RunConfig, directory: Path) -> Tokenizer:
    """Opens the run's tokenizer, from beside the checkpoint, from the run's directory or from its data."""
    if run.tokenizer.kind == "bytes":
        return BytesTokenizer()
    places = (directory, home.of_run(run.id))
    path = next((each / TOKENIZER_NAME for each in places if (each / TOKENIZER_NAME).exists()), None)
    if path is None:
        return _dataset(home, run).open_tokenizer()
    file_bytes = read_regular(path, TOKENIZER_BYTES_MAX) or b""
    if tokenizer_digest(file_bytes) != run.tokenizer.digest:
        raise DataError(f"{path}: damaged, or from another run: its digest is not {run.tokenizer.digest}")
    tokenizer = JsonTokenizer(file_bytes, str(path))
    if tokenizer.vocab_size > run.model.vocab_size:  # nobody could have trained with it
        raise DataError(f"{path}: {tokenizer.vocab_size} tokens, but the run's model has {run.model.vocab_size}")
    return tokenizer
