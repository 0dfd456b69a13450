"""The trainer owns model, residual and recipe; the daemon reaches learning through it alone.

    train       a round's local steps, on the shard that the assignment gives this node
    contribute  the payload they amount to
    check       someone's payload: the reason it is refused, or nothing
    apply       the payloads that the swarm agreed on, to the master weights, exactly
    root        the digest of the weights
    evaluate    the loss on the held-out slice
    sample      text that the agreed weights write
    adopt       the weights that others agreed on, in place of one's own
    capture     a copy of everything the next round depends on, to be written while training goes on
    save, load  the same as one safetensors file

It runs in one thread, knows no clock and no network, and between rounds it is fully described by what
`save` writes: a trainer that loads it goes on to the same bits. Its `round` is the number of rounds applied:
that of the state as `root` names it. `apply` takes the number of the round to apply, counted from 0.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from p2ptrain.capacity import cores, return_large_blocks
from p2ptrain.config import DeviceConfig, RunConfig
from p2ptrain.digest import digest
from p2ptrain.errors import ConfigError, DataError, DeviceError, RemoteProtocolError
from p2ptrain.learn.aggregate import apply_payloads, check_exactness
from p2ptrain.learn.assignment import Positions, shard
from p2ptrain.learn.codec import Contribution, PayloadFormat, pack, unpack
from p2ptrain.learn.data import TokenDataset
from p2ptrain.learn.live import LiveModel, StepResult
from p2ptrain.learn.memory import UNPACKED_BYTES, find_device
from p2ptrain.learn.model import Transformer, initialise
from p2ptrain.learn.recipes import KEPT_ROUNDS_MAX, Withdrawal, make_recipe
from p2ptrain.learn.root import FLOAT_BYTES, covered_pieces, octets, state_leaves, state_root
from p2ptrain.learn.sample import SampleRequest, sample
from p2ptrain.learn.schedule import learning_rate
from p2ptrain.learn.shortage import told
from p2ptrain.learn.transform import Layout

STATE_FORMAT = "p2ptrain trainer 1"
FINITE_BLOCK = 2**20  # numbers that are looked at together
EVALUATED_SEQUENCES = 64  # 16 KB of held-out text at the smallest preset, enough for a curve; a guess


def open_device(config: DeviceConfig) -> tuple[torch.device, bool]:
    """Sets how many threads torch uses, and returns the result of `find_device`."""
    torch.set_num_threads(config.threads or max(1, cores() - 1))  # one core stays free for the network and the person
    return find_device(config)


def _check_compiler() -> None:
    try:
        torch.compile(torch.sin)(torch.ones(2))
    except (RuntimeError, OSError) as error:  # without one, the first step would fail
        first = str(error).strip().splitlines()[0]
        fix = "Install a C++ compiler (apt-get install g++), or set device.compile = false"
        raise DeviceError(f"torch.compile does not work here: {first}", fix=fix) from error


def check_data(run: RunConfig, dataset: TokenDataset) -> None:
    """Refuses a data set made with another tokenizer, because no other check would notice the wrong tokens."""
    made = dataset.tokenizer
    if (made.kind, made.digest) != (run.tokenizer.kind, run.tokenizer.digest):
        fix = "Prepare the data with the run's tokenizer, or name the data's in the run"
        found = f"the data was made with tokenizer {made.kind} {made.digest}".strip()
        raise ConfigError(found, key="tokenizer", fix=fix)
    if made.vocab_size > run.model.vocab_size:
        fix = f"Set it to {made.vocab_size} or more"
        raise ConfigError(f"the data has {made.vocab_size} tokens", key="model.vocab_size", fix=fix)
    if not dataset.sequences(run.model.sequence_length):
        fix = "Add data, or train on shorter sequences"
        raise ConfigError("the data is shorter than one sequence", key="model.sequence_length", fix=fix)


@dataclass(frozen=True)
class Capture:
    """A trainer's state at one moment, to be written while training continues."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    agreed: Tensor  # flat; the weights in `tensors` are views of it

    @property
    def state(self) -> memoryview:
        """The agreed weights, in the form from which the state root is computed."""
        return octets(self.agreed)

    def write(self, path: Path) -> None:
        """Writes a new file; the caller syncs it and renames it into place."""
        try:
            save_file(self.tensors, path, self.metadata)
        except SafetensorError as error:
            raise DataError(f"{path}: cannot be written ({error})") from error


class Trainer:
    """Model, residual and recipe of one node.

    Only the node that begins a run needs `initial` weights; otherwise all matrices are zero until `adopt` or `load`.
    """

    def __init__(self, run: RunConfig, device: DeviceConfig, dataset: TokenDataset, *, initial: bool = True) -> None:
        check_data(run, dataset)
        self.run, self.dataset = run, dataset
        self.device, autocast = open_device(device)
        check_exactness(run.recipe.chunk, self.device)
        if device.checkpointing:
            return_large_blocks()
        model = Transformer(run.model, checkpointing=device.checkpointing)
        if initial:
            initialise(model, run.seed)
        if device.compile:
            _check_compiler()
            model.compile_layers()
        self.live = LiveModel(model.to(self.device), autocast=autocast, sequences_per_pass=device.sequences_per_pass)
        self.layout = Layout(self.live.shapes, run.recipe.chunk)
        self.form = PayloadFormat.of(self.layout, run.recipe)
        self.recipe = make_recipe(run.recipe, self.live, self.layout)
        self.round = 0  # applied so far
        self._unpacked: OrderedDict[bytes, Contribution] = OrderedDict()  # by payload, those checked last at the end
        self._lock = Lock()  # guards them: payloads are checked while a round trains
        self._trained: int | None = None  # the round whose steps are done and not contributed yet

    def positions_for(self, round_number: int, place: int, places: int) -> Positions:
        """Returns the sequences that `train` takes, in its order."""
        recipe = self.run.recipe
        count = recipe.local_steps * recipe.passes_per_step * recipe.sequences_per_pass
        sequences = self.dataset.sequences(self.run.model.sequence_length)
        return shard(self.run.seed, round_number, place, places, count, sequences)

    def train(
        self,
        round_number: int,
        place: int,
        places: int,
        on_step: Callable[[StepResult], None] = lambda result: None,
    ) -> list[StepResult]:
        """Takes the round's local steps, as the node at `place` of `places` in the roster."""
        recipe, length = self.run.recipe, self.run.model.sequence_length
        each = recipe.passes_per_step * recipe.sequences_per_pass
        positions = self.positions_for(round_number, place, places)
        self._trained = None
        self.recipe.begin()
        results = []
        for step in range(recipe.local_steps):
            chosen = positions[step * each : (step + 1) * each]
            with told("training", self.device):
                batch = torch.from_numpy(self.dataset.batch(chosen, length)).to(self.device)
                results.append(self.recipe.local_step(step, batch, chosen.tolist()))
            on_step(results[-1])
        self._trained = round_number
        return results

    def contribute(self, round_number: int) -> bytes:
        """Encodes the round that was just trained, and subtracts the payload's values from the residual."""
        assert self._trained == round_number, "a contribution follows its training"
        assert round_number not in self.recipe.residual.kept, "a round's contribution is made once, and kept as bytes"
        self._trained = None
        with told("making a contribution", self.device):
            return pack(self.recipe.contribute(round_number), self.form)

    # A trainer that loaded an older state may not know of a contribution that was announced after that state was
    # saved. Then nothing of it left the residual: there is nothing to restore, and what a manifest took of it may be
    # sent again in later rounds. Both return False then.

    def forget(self, round_number: int) -> bool:
        """Notes that a manifest took this node's contribution of that round."""
        return self.recipe.residual.forget(round_number)

    def restore(self, round_number: int) -> bool:
        """Returns a contribution that no manifest can take any more to the residual."""
        return self.recipe.residual.restore(round_number)

    @property
    def kept_rounds(self) -> tuple[int, ...]:
        """Rounds whose contribution is neither forgotten nor restored.

        After `load`, some of these contributions may never have been announced.
        """
        return tuple(sorted(self.recipe.residual.kept))

    def check(self, payload: bytes) -> str | None:
        """Returns why a payload is refused, None if it is good. For any thread; `apply` does not unpack it again."""
        try:
            contribution = unpack(payload, self.form)
        except RemoteProtocolError as error:
            return error.why
        with self._lock:
            self._unpacked[payload] = contribution
            while len(self._unpacked) * self.form.contribution_bytes > UNPACKED_BYTES:
                self._unpacked.popitem(last=False)
        return None

    @torch.no_grad()
    def apply(self, round_number: int, payloads: Sequence[bytes]) -> None:
        """Applies the round's one update, from payloads that `check` found good, in any order."""
        assert round_number == self.round, f"round {round_number} cannot follow {self.round} applied rounds"
        recipe = self.run.recipe
        parameters = self.live.parts(self.recipe.agreed)
        with self._lock:
            found = {payload: self._unpacked.pop(payload, None) for payload in payloads}
        unpacked = {payload: contribution for payload, contribution in found.items() if contribution is not None}
        rate = learning_rate(recipe, round_number)
        apply_payloads(self.layout, recipe, self.form, payloads, rate, parameters, unpacked)
        self.round = round_number + 1

    def root(self, manifest_digest: bytes = bytes(32)) -> bytes:
        """The state root after the rounds applied so far; the manifest's digest draws the sample of a large state."""
        pieces = covered_pieces(self.state_size, self.run.state, self.round, manifest_digest)
        return state_root(self.recipe.agreed, pieces)

    @property
    def state_size(self) -> int:
        """Bytes of the agreed weights."""
        return self.recipe.agreed.numel() * FLOAT_BYTES

    def state_bytes(self) -> bytes:
        """A copy of the agreed weights, in the form from which the state root is computed."""
        return bytes(octets(self.recipe.agreed))

    def leaves(self) -> list[bytes]:
        """Hashes the pieces of the agreed weights."""
        return state_leaves(self.recipe.agreed)

    @torch.no_grad()
    def adopt(self, round_number: int, pieces: Iterable[bytes | memoryview], keep_residual: bool = True) -> None:
        """Goes on from the state that others have after `round_number` rounds; a training in progress is dropped.

        What this node has not told the swarm yet stays, and so do its contributions whose fate is open. Invalid
        pieces change nothing: they are assembled in the memory for the next step's gradient, so that a state read from
        disk never needs memory of its own beside the weights.
        """
        assert round_number >= 0, f"the state of round {round_number}"
        received, size, is_aligned = self.live.gradient, 0, True
        for piece in pieces:
            start, size = size // FLOAT_BYTES, size + len(piece)
            is_aligned = is_aligned and len(piece) % FLOAT_BYTES == 0
            if is_aligned and size <= self.state_size:  # otherwise it is refused, and only its size is reported
                values = np.frombuffer(piece, dtype="<f4")
                if not np.isfinite(values).all():
                    raise RemoteProtocolError("state with a weight that is not finite")
                received[start : start + len(values)] = torch.from_numpy(values.copy())
        if size != self.state_size or not is_aligned:
            raise RemoteProtocolError(f"state of {size} bytes, this run's has {self.state_size}")
        self.recipe.agreed.copy_(received)
        if not keep_residual:
            self.recipe.residual.clear()
        self.round, self._trained = round_number, None

    @contextmanager
    def _agreed_weights(self) -> Iterator[None]:
        """Context manager: the model has the agreed weights inside the block, and its own again afterwards."""
        with told("looking at the agreed weights", self.device):
            own = self.live.weights.clone()
            self.live.weights.copy_(self.recipe.agreed)
            try:
                yield
            finally:
                self.live.weights.copy_(own)

    @torch.no_grad()
    def sample(self, request: SampleRequest, on_token: Callable[[], None] = lambda: None) -> str:
        """Continues the prompt with the agreed weights."""
        tokenizer = self.dataset.open_tokenizer()
        with self._agreed_weights():
            return sample(self.live.model, tokenizer, request, on_token)

    @torch.no_grad()
    def evaluate(self, sequences: int = EVALUATED_SEQUENCES) -> float:
        """Mean loss of the agreed weights, in nats a token, on the first sequences of the held-out slice."""
        length = self.run.model.sequence_length
        count = min(sequences, self.dataset.held_out_sequences(length))
        if not count:
            raise DataError(f"the held-out slice is shorter than one sequence of {length + 1} tokens")
        total = 0.0
        with self._agreed_weights():
            step = self.live.sequences_at_a_time(self.run.recipe)
            for start in range(0, count, step):
                positions = np.arange(start, min(start + step, count))
                batch = torch.from_numpy(self.dataset.held_out_batch(positions, length)).to(self.device)
                total += float(self.live.loss(batch)) * len(positions)
        return total / count

    # -----------------------------------------------------------------------------------------------
    # Saved state

    def _run_digest(self) -> str:
        """Digest of the run's settings, which identifies the run even before its config is sealed."""
        return digest("saved state's run", self.run.canonical()).hex()

    def _tensors(self, agreed: Tensor) -> dict[str, Tensor]:
        """Returns all tensors that a round depends on, by name, with these agreed weights; not copied."""
        parts = zip(self.live.names, self.live.parts(agreed), strict=True)
        named = {f"weights.{name}": part for name, part in parts}
        named["residual"] = self.recipe.residual.coefficients
        return named | {f"recipe.{name}": tensor for name, tensor in self.recipe.state().items()}

    def capture(self, is_copied: bool = True) -> Capture:
        """Copies everything; a caller that keeps the trainer still until it is written can do without the copy.

        It holds the agreed weights, the round, the residual, the contributions whose fate is open, and the inner
        optimizer. It does not hold the steps of a training that has not been contributed: a trainer that loads it
        trains that round again, and of `local` alone differs in that the inner optimizer has seen those steps.
        Between `contribute` and the announcement, it holds a contribution that nobody may ever hear of: after
        `load`, whoever announces restores those of `kept_rounds` that were not announced.
        """
        agreed = _in_memory(self.recipe.agreed, is_copied)
        tensors = {
            name: each if name.startswith("weights.") else _in_memory(each, is_copied)
            for name, each in self._tensors(agreed).items()
        }
        for number, kept in self.recipe.residual.kept.items():  # which is never changed
            tensors[f"kept.{number}.indices"] = torch.from_numpy(kept.indices.astype(np.int32))
            tensors[f"kept.{number}.removed"] = torch.from_numpy(kept.removed)
        metadata = {"format": STATE_FORMAT, "round": str(self.round), "run": self._run_digest()}
        return Capture(tensors, metadata, agreed)

    def save(self, path: Path) -> None:
        """Writes everything to a new file."""
        self.capture(is_copied=False).write(path)

    @torch.no_grad()
    def load(self, path: Path) -> None:
        """Loads what `save` wrote; a file of another run leaves everything as it was."""
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise DataError(f"{path}: not readable as saved state ({error})") from error
        if metadata.get("format") != STATE_FORMAT or metadata.get("run") != self._run_digest():
            raise DataError(f"{path}: not the saved state of run {self.run.name}: {json.dumps(metadata)[:200]}")
        if not re.fullmatch(r"\d{1,15}", metadata.get("round", "")):
            raise DataError(f"{path}: the round is missing")
        own = self._tensors(self.recipe.agreed)
        kept = self._read_kept(path, {name: tensor for name, tensor in tensors.items() if name not in own})
        for name, tensor in own.items():
            found = tensors.get(name)
            if found is None or found.shape != tensor.shape or found.dtype != tensor.dtype:
                raise DataError(f"{path}: {name} is missing or not of shape {tuple(tensor.shape)}, {tensor.dtype}")
            if found.is_floating_point() and not _is_finite(found):
                raise DataError(f"{path}: {name} is not finite")
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
        self.recipe.residual.keep(kept)
        self.round, self._trained = int(metadata["round"]), None

    def _read_kept(self, path: Path, tensors: dict[str, Tensor]) -> dict[int, Withdrawal]:
        shape = (self.form.chunks, self.form.k)
        kept = {}
        for name in list(tensors):
            match = re.fullmatch(r"kept\.(\d{1,15})\.indices", name)
            removed_name = name.removesuffix("indices") + "removed"
            if match is None or removed_name not in tensors:
                continue
            indices, removed = tensors.pop(name), tensors.pop(removed_name)
            types = (indices.dtype, removed.dtype) == (torch.int32, torch.float32)
            if indices.shape != shape or removed.shape != shape or not types:
                raise DataError(f"{path}: kept.{match[1]} is not of shape {shape}")
            rising = bool((indices.diff(dim=1) > 0).all())
            if not rising or not 0 <= int(indices.min()) <= int(indices.max()) < self.form.area:
                raise DataError(f"{path}: kept.{match[1]} names a coefficient that is not there")
            if not _is_finite(removed):
                raise DataError(f"{path}: kept.{match[1]} is not finite")
            kept[int(match[1])] = Withdrawal(indices.numpy().astype(np.uint16), removed.numpy())
        if len(kept) > KEPT_ROUNDS_MAX:
            raise DataError(f"{path}: keeps {len(kept)} rounds, the limit is {KEPT_ROUNDS_MAX}")
        if tensors:
            raise DataError(f"{path}: does not belong to this run: {min(tensors)}")
        return kept


def _is_finite(tensor: Tensor) -> bool:
    """Checks in blocks, because torch would make several copies of a tensor as large as the model."""
    return all(bool(torch.isfinite(part).all()) for part in torch.split(tensor.reshape(-1), FINITE_BLOCK))


def _in_memory(tensor: Tensor, is_copied: bool) -> Tensor:
    """Returns the tensor contiguous in main memory, as a copy of its own if `is_copied`."""
    return tensor.detach().to("cpu", copy=is_copied).contiguous()
