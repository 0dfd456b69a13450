"""Checks payloads and checkpoints, and replays the certified rounds.

The replay starts with the weights of the oldest checkpoint for which all later payloads are present. It applies the
payloads of each certified round after it (exact/aggregate.py), and compares the resulting state root with the one that
later manifests certify, and with every other checkpoint on the way. A wrong bit changes the next certified root."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

import torch
from msgspec.structs import replace
from torch import Tensor

from p2ptrain.audit.findings import Grade, Replay, Report
from p2ptrain.audit.history import RESTORE_FIX, SIGNED_FIX, ProvedLog
from p2ptrain.capacity import free_memory_bytes
from p2ptrain.config import RunConfig
from p2ptrain.core.history import Entry
from p2ptrain.core.messages import KEY_BYTES, author_of, content_name, content_of, contents_by_author, payload_digest
from p2ptrain.core.state import Taken
from p2ptrain.data.dataset import TOKENIZER_NAME
from p2ptrain.data.tokenizer import TOKENIZER_BYTES_MAX, tokenizer_digest
from p2ptrain.digest import DIGEST_BYTES
from p2ptrain.errors import DataError, DeviceError, RemoteProtocolError
from p2ptrain.exact.exactness import check_exactness
from p2ptrain.exact.outer import Outer
from p2ptrain.exact.root import FLOAT_BYTES, covered_pieces, octets, state_root
from p2ptrain.files import listed, open_regular, read_regular, trouble
from p2ptrain.models.adapters import base_file, read_base
from p2ptrain.models.kinds import named_shapes
from p2ptrain.store.backup import BASES, is_backup
from p2ptrain.store.checkpoints import STATE_NAME, TRAINER_NAME, Checkpoint, Checkpoints, read_stamp
from p2ptrain.store.store import CHECKPOINTS_NAME

PAYLOAD_FIX = "Remove the file: a node fetches what it needs again"
LARGER_FIX = "Audit it on a larger machine, or allow the container more"
FROZEN = "the frozen weights that the run adapts"
CHECKPOINT_FIX = "Remove the directory: an older checkpoint or a peer's state takes its place"
MISSING_TOLD = 8  # rounds with missing payloads that are listed; the others are only counted
PAYLOADS_MAX = 2**20  # files: 4,096 rounds of 256 contributors; a run normally keeps 256 rounds
CHECKPOINTS_MAX = 4_096  # directories: a node keeps at most 1,000, and as many of an abandoned branch
SMALL_BYTES = 2**20  # up to this size a file is read without checking the free memory, which takes 2 ms
DENSE_WORK_BYTES = 24  # a weight, where all are sent: votes, and a contribution in several forms; measured
HEADER_BYTES_MAX = 2**24  # of a trainer's file: 1,024 layers with five copies of nine parameters take 6 MB
TRAINER_STATES_MAX = 256  # times the state's size: copies of it, and up to 128 contributions, none larger
_NAME = re.compile(f"[0-9a-f]{{{2 * DIGEST_BYTES}}}")


class RunModel:
    """The shapes of a run's weights, with their layout, payload format and size."""

    def __init__(self, run: RunConfig) -> None:
        self.run = run
        self.outer = Outer.of(run, [shape for _, shape in named_shapes(run.model, run.adapt)])

    @property
    def state_bytes(self) -> int:
        return self.outer.state_numbers * FLOAT_BYTES

    @property
    def memory_bytes(self) -> int:
        """Memory of the state, and of an update's work."""
        dense = DENSE_WORK_BYTES * self.outer.parameters if self.run.recipe.is_dense else 0
        return 2 * self.state_bytes + dense

    def root(self, state: Tensor, number: int, manifest: bytes) -> bytes:
        """Computes the root as `Trainer.root` does: the manifest draws the sample of a large state."""
        return state_root(state, covered_pieces(self.state_bytes, self.run.state, number, manifest))


@dataclass(slots=True)
class State:
    checkpoint: Checkpoint
    is_proved: bool  # its root is certified

    @property
    def round(self) -> int:
        return self.checkpoint.round


# -- Payloads ---------------------------------------------------------------------------------------


class PayloadFiles:
    """The payloads in a directory, each read only when it is needed."""

    def __init__(self, directory: Path, model: RunModel) -> None:
        self.directory, self.model = directory, model
        self.bytes_max = KEY_BYTES + model.outer.payload_bytes
        self.bad: set[bytes] = set()

    def check(self, proved: ProvedLog, report: Report) -> None:
        """Checks every file against its name and against the rounds that took it."""
        taken = {each.payload: each for entry in proved.entries for each in entry.manifest.taken}
        whole = 0
        try:
            found = listed(self.directory, PAYLOADS_MAX)
        except DataError as error:
            report.open(self.directory, error.problem, error.fix)
            return
        for path, kind in found:
            if not _NAME.fullmatch(path.name):
                report.note(Grade.NOTE, path, "not a payload; perhaps left by a crash")
                continue
            name = bytes.fromhex(path.name)
            if stat.S_ISREG(kind.st_mode) and kind.st_size > self.bytes_max and name not in taken:
                self.bad.add(name)
                report.note(Grade.NOTE, path, "larger than this run's payloads, so no round has applied it")
                continue
            if kind.st_size > SMALL_BYTES and kind.st_size > (free := free_memory_bytes()):
                self.bad.add(name)
                what = f"it has {kind.st_size:,} bytes, but only {free:,} bytes of memory are free here"
                report.open(path, what, LARGER_FIX)
                continue
            try:
                content = read_regular(path, self.bytes_max)
            except DataError as error:
                self.bad.add(name)
                report.wrong(path, error.problem, PAYLOAD_FIX)
                continue
            if content is None:
                continue  # a running node has just removed it
            if payload_digest(content) != name:
                self.bad.add(name)
                report.wrong(path, "damaged: it does not match its name", PAYLOAD_FIX)
            elif why := self._refused(content, taken.get(name)):
                self.bad.add(name)
                report.wrong(path, why, SIGNED_FIX)
            else:
                whole += 1
        report.holds(self.directory, f"{whole} payloads match their names, and decode")

    def _refused(self, content: bytes, taken: Taken | None) -> str | None:
        """Returns why an honest swarm would not have applied a payload. One that no round took may be a peer's lie."""
        if taken is None:
            return None
        if len(content) != taken.payload_bytes:
            return f"round {taken.round} took it as {taken.payload_bytes} bytes, but it has {len(content)}"
        if author_of(content) != taken.author:
            return f"round {taken.round} took it as another author's"
        if content_name(content) != taken.content:
            return f"round {taken.round} took it as another content"
        try:
            self.model.outer.unpack(content_of(content))
        except RemoteProtocolError as error:
            return f"it was applied, but the strict decoder refuses it: {error.why}"
        return None

    def of(self, entry: Entry) -> list[bytes] | None:
        """Returns the contents of all payloads that a round applies; None if one of them is missing or bad."""
        found = [self.read(taken) for taken in entry.manifest.counted]
        return None if None in found else contents_by_author([each for each in found if each is not None])

    def read(self, taken: Taken) -> bytes | None:
        if taken.payload in self.bad:
            return None
        try:
            content = read_regular(self.directory / taken.payload.hex(), self.bytes_max)
        except DataError:  # it was replaced since it was checked
            return None
        return content if content is not None and payload_digest(content) == taken.payload else None

    def lacks(self, entry: Entry) -> bool:
        names = [taken.payload for taken in entry.manifest.counted]
        return any(name in self.bad or not os.path.lexists(self.directory / name.hex()) for name in names)


# -- Backups ----------------------------------------------------------------------------------------


def check_beside(backup: Path, run: RunConfig, report: Report) -> None:
    """Checks the files without which a backup's state is of no use: frozen weights and tokenizer."""
    if run.adapt.is_on:
        path = base_file(backup.parent / BASES, run.adapt.base)
        is_it = not path.is_symlink() and path.is_file() and path.stat().st_size == run.adapt.base_bytes
        is_whole = is_it and read_base(path).digest == run.adapt.base
        (report.holds if is_whole else report.wrong)(path, FROZEN if is_whole else f"damaged, or missing: {FROZEN}")
    if run.tokenizer.kind == "json":
        content = read_regular(path := backup / TOKENIZER_NAME, TOKENIZER_BYTES_MAX)
        if content is None:
            report.note(Grade.NOTE, path, "not in it: whoever begins another run has to have it")
        elif tokenizer_digest(content) != run.tokenizer.digest:
            report.wrong(path, "damaged: it is not the run's tokenizer", "Name another backup")


# -- Checkpoints ------------------------------------------------------------------------------------


def found_checkpoints(directory: Path, run: RunConfig, report: Report) -> list[Checkpoint | DataError]:
    """Lists the checkpoints. Call it before reading the log: later checkpoints may be of rounds that the log lacks."""
    try:
        if is_backup(directory):
            return [Checkpoint(directory, read_stamp(directory))]
        listed(directory / CHECKPOINTS_NAME, CHECKPOINTS_MAX)
    except DataError as error:
        report.open(directory / CHECKPOINTS_NAME, error.problem, error.fix)
        return []
    return Checkpoints(directory / CHECKPOINTS_NAME, run.id).found()


def check_checkpoints(
    found: list[Checkpoint | DataError], directory: Path, model: RunModel, proved: ProvedLog, report: Report
) -> list[State]:
    """Returns the intact checkpoints that are on the history, by round."""
    checkpoints = Checkpoints(directory / CHECKPOINTS_NAME, model.run.id)
    states = []
    for each in found:
        if isinstance(each, DataError):
            if each.path is not None and not each.path.parent.exists():
                continue  # a running node has removed it
            report.wrong("checkpoint", str(each), CHECKPOINT_FIX)
            continue
        why = _has_other_sizes(each, model) or checkpoints.verify(each) or _differs(each, model)
        if not each.path.exists():
            continue  # a running node has removed it
        if why is not None:
            report.wrong(each.path, why, CHECKPOINT_FIX)
            continue
        if (placed := _place(each, proved, report)) is not None:
            states.append(placed)
    return sorted(states, key=lambda state: (state.round, state.checkpoint.path.name))


def _has_other_sizes(checkpoint: Checkpoint, model: RunModel) -> str | None:
    """Returns how the sizes in a checkpoint's stamp contradict this run's model; None if they agree."""
    if checkpoint.state_bytes != model.state_bytes:
        return f"{STATE_NAME} has {checkpoint.state_bytes} bytes, but this run's state has {model.state_bytes}"
    size, size_max = checkpoint.stamp.trainer.bytes, TRAINER_STATES_MAX * model.state_bytes + HEADER_BYTES_MAX
    if size > size_max:
        return f"{TRAINER_NAME} has {size} bytes, but a trainer of this run has at most {size_max}"
    return None


def _differs(checkpoint: Checkpoint, model: RunModel) -> str | None:
    """Returns how the saved state differs from the one that its stamp names; None if it does not."""
    try:
        weights = read_flat(checkpoint.path / STATE_NAME, model.state_bytes)
    except DataError as error:
        return f"not a saved state ({error})"
    is_same = model.root(weights, checkpoint.round, checkpoint.head) == checkpoint.root
    return None if is_same else f"the root of {STATE_NAME} is not the one in its stamp"


def read_flat(path: Path, size: int) -> Tensor:
    """Reads a file of exactly `size` bytes as fp32 values; raises `DataError` if it has another size."""
    values = torch.empty(size // FLOAT_BYTES, dtype=torch.float32)
    with trouble(path, "cannot be read"), open_regular(path) as file:
        found = os.fstat(file.fileno()).st_size
        if found != size or file.readinto(octets(values)) != size:
            raise DataError(f"{path}: {found:,} bytes, but the state has {size:,}")
    return values


def _place(checkpoint: Checkpoint, proved: ProvedLog, report: Report) -> State | None:
    """Places a checkpoint on the history; None if it cannot be used."""
    path, number, certified = checkpoint.path, checkpoint.round, proved.roots
    if not proved.states:
        report.open(path, "there is no proved history to compare it with")
        return None
    first, last = proved.states[0].round, proved.states[-1].round
    is_proved = certified.get(number) == checkpoint.root
    if number in certified and not is_proved:
        what = f"from another history: round {number} was certified with the root {certified[number].hex()[:16]}"
        report.wrong(path, f"{what}, but this one has {checkpoint.root.hex()[:16]}", CHECKPOINT_FIX)
    elif number < first:
        what = "its root is certified" if is_proved else "only its digests can be checked"
        report.note(Grade.NOTE, path, f"intact, but older than the history, which begins after round {first}: {what}")
    elif number > last:
        report.open(path, f"of round {number}, but the certified history ends with {last}", CHECKPOINT_FIX)
    elif checkpoint.stamp.branch and not is_proved and checkpoint.head != _head_of(proved, number):
        report.open(path, f"from another history: it follows a different manifest of round {number}", CHECKPOINT_FIX)
    else:
        what = "whose root is certified" if is_proved else "on the history"
        report.holds(path, f"intact, of round {number}, {what}")
        return State(checkpoint, is_proved)
    return None


def _head_of(proved: ProvedLog, number: int) -> bytes:
    """Returns the digest of a round's manifest, or the agreed state's head before the first round."""
    found = [entry.manifest.digest for entry in proved.entries if entry.manifest.round == number]
    return found[0] if found else proved.states[0].head


# -- The replay -------------------------------------------------------------------------------------


def replay(
    states: list[State], payloads: PayloadFiles, model: RunModel, proved: ProvedLog, report: Report
) -> Replay | None:
    """Applies the certified rounds again and compares the roots; None if there is no state to begin with."""
    last = proved.entries[-1].manifest.round if proved.entries else 0
    if not states:
        if proved.states:
            report.open("replay", "no checkpoint to start from", "Let the node save one, and try again")
        return None
    try:
        check_exactness(model.run.recipe, torch.device("cpu"))
    except DeviceError as error:
        report.open("replay", str(error))
        return None
    _tell_missing(states, payloads, proved, report)
    lacking = [entry.manifest.round for entry in proved.entries if payloads.lacks(entry)]
    behind = max((number for number in lacking if number <= proved.newest_root), default=-1)
    start = next((state for state in states if state.round >= behind), states[-1])
    weights = read_flat(start.checkpoint.path / STATE_NAME, model.state_bytes)
    if model.root(weights, start.round, start.checkpoint.head) != start.checkpoint.root:
        what = f"{start.checkpoint.path} changed after it was checked"
        report.open("replay", what, "First stop whatever writes there")
        return None
    done = Replay(start.round, start.round, start.checkpoint.root.hex(), start.round if start.is_proved else None)
    saved = {state.round: state for state in states if state.round > start.round}
    for entry in proved.entries:
        number = entry.manifest.round
        if number <= start.round:
            continue
        content = _content(entry, f"ends after round {number - 1} of {last}", payloads, proved, report)
        if content is None:
            return done
        model.outer.apply(weights, number - 1, content)
        root = model.root(weights, number, entry.manifest.digest)
        if proved.roots.get(number) == root:
            done = replace(done, proved_round=number)
        if not _compare(number, root, start, saved.get(number), proved, report):
            return done
        done = replace(done, last=number, final_root=root.hex())
    if done.proved_round is None:
        what = f"no root of round {start.round} or later is certified yet, so it proves nothing"
        report.open("replay", what, "Let the node finish a few more rounds")
    elif not last > start.round:
        report.holds("replay", f"the state of round {start.round} is the certified one; no round follows it")
    else:
        report.holds("replay", f"rounds {start.round + 1} to {last} give the certified roots, and the saved states")
    return done


def _content(
    entry: Entry, so_far: str, payloads: PayloadFiles, proved: ProvedLog, report: Report
) -> list[bytes] | None:
    """Returns the payloads that a round took; if the replay cannot go on, reports why and returns None."""
    number, size = entry.manifest.round, payloads.bytes_max * len(entry.manifest.taken)
    if size > (free := free_memory_bytes()):
        what = f"{so_far}: round {number} has {size:,} bytes of payloads, but only {free:,} bytes of memory are free"
        report.open("replay", what, "Audit it on a larger machine")
        return None
    content = payloads.of(entry)
    if content is None and number > proved.newest_root:
        what = f"{so_far}: payloads of round {number} are missing, and its root is not certified yet"
        report.note(Grade.NOTE, "replay", what)
    elif content is None:
        fix = "If the node is running, try again; otherwise start it, and it fetches them"
        report.open("replay", f"{so_far}: payloads of round {number} are not here", fix)
    return content


def _compare(number: int, root: bytes, start: State, saved: State | None, proved: ProvedLog, report: Report) -> bool:
    """Compares the root of a replayed round with the certified one and the saved one."""
    certified = proved.roots.get(number)
    if certified is not None and certified != root:
        what = f"it gives the state root {root.hex()[:16]}, but {certified.hex()[:16]} was certified"
        from_where = "a certified" if start.is_proved else "an uncertified"
        what += f"; the replay started from {from_where} state of round {start.round}"
        report.wrong(f"round {number}", what, SIGNED_FIX)
        return False
    if saved is not None and saved.checkpoint.root != root:
        what = f"of another history: round {number} gives the state root {root.hex()[:16]}, "
        what += f"but this checkpoint has {saved.checkpoint.root.hex()[:16]}"
        report.wrong(saved.checkpoint.path, what, CHECKPOINT_FIX)
    return True


def _tell_missing(states: list[State], payloads: PayloadFiles, proved: ProvedLog, report: Report) -> None:
    """Reports missing payloads that the node promises to keep, since the last adopted state."""
    adopted = [state.round for state in states if not state.checkpoint.stamp.branch]  # and needed no round before
    needed = max(max(adopted, default=states[0].round), proved.kept_from)
    missing = [entry.manifest.round for entry in proved.entries if payloads.lacks(entry)]
    promised = [number for number in missing if needed < number <= proved.newest_root]  # later ones may still arrive
    for number in promised[:MISSING_TOLD]:
        report.open(f"round {number}", "some of its payloads are missing or damaged", RESTORE_FIX)
    if len(promised) > MISSING_TOLD:
        report.open("payloads", f"of {len(promised) - MISSING_TOLD} more rounds some are not here", RESTORE_FIX)
    if before := [number for number in missing if number <= needed]:
        what = f"rounds {before[0]} to {before[-1]} are not replayed: not all of their payloads are kept"
        report.note(Grade.NOTE, "payloads", what)
