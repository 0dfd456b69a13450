"""The trainer owns model, residual and recipe; the daemon uses nothing else of these packages to train.

    train       takes a round's local steps, on this node's shard
    contribute  turns them into a payload
    check       says why a peer's payload is refused, if it is
    apply       applies the payloads that the swarm agreed on to the master weights, exactly
    root        computes the digest of the weights
    evaluate    computes the loss on the held-out split
    sample      writes text with the agreed weights
    adopt       replaces the weights by those that others agreed on
    capture     copies everything that the next round depends on, to be written while training goes on
    save, load  do the same with one safetensors file

It runs in one thread, uses no clock and no network, and between rounds `save` writes its complete
state: a trainer that loads it continues with the same bits. Its `round` is the number of rounds
applied. `apply` takes the number of the round to apply, counted from 0.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from threading import Lock
from types import MappingProxyType

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from p2ptrain.capacity import cores, return_large_blocks
from p2ptrain.config import DeviceConfig, RunConfig
from p2ptrain.data.assignment import Positions, shard
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.data.run_data import check_data, check_tokens, packing_of
from p2ptrain.digest import digest
from p2ptrain.errors import DataError, DeviceError, RemoteProtocolError, TrainingError
from p2ptrain.exact.aggregate import check_exactness
from p2ptrain.exact.codec import Contribution
from p2ptrain.exact.outer import Outer
from p2ptrain.exact.root import FLOAT_BYTES, covered_pieces, octets, state_leaves, state_root
from p2ptrain.exact.shortage import told
from p2ptrain.models.kinds import build, first_model
from p2ptrain.models.plugins import blamed_in_run
from p2ptrain.models.sample import SampleRequest, sample
from p2ptrain.train.evaluate import evaluate
from p2ptrain.train.live import LiveModel, StepResult
from p2ptrain.train.memory import UNPACKED_BYTES, find_device
from p2ptrain.train.own_data import OwnData
from p2ptrain.train.recipes import LocalRecipe, make_recipe
from p2ptrain.train.saved_state import (
    MOMENTUM_NAME,
    STATE_FORMAT,
    STATE_TYPES,
    WEIGHTS_PREFIX,
    Capture,
    in_memory,
    is_agreed,
    is_finite,
    read_kept,
)

EVALUATED_SEQUENCES = 64  # 16 KB of held-out text at the smallest preset, enough for a curve; a guess

log = logging.getLogger("p2ptrain.train")


def open_device(config: DeviceConfig) -> tuple[torch.device, bool]:
    """Sets how many threads torch uses, and returns the result of `find_device`."""
    torch.set_num_threads(config.threads or max(1, cores() - 1))  # one core stays free for the network and the user
    return find_device(config)


def _check_compiler() -> None:
    try:
        torch.compile(torch.sin)(torch.ones(2))
    except (RuntimeError, OSError) as error:  # without a compiler, the first step would fail
        first = str(error).strip().splitlines()[0]
        fix = "Install a C++ compiler (apt-get install g++), or set device.compile = false"
        raise DeviceError(f"torch.compile does not work here: {first}", fix=fix) from error


class Trainer:
    """A node's model, residual and recipe.

    own: what it trains on in a run whose nodes bring their own data; a script with a loop of its own needs none.
    Only the node that begins a run needs `initial` weights; otherwise all matrices are zero until `adopt` or `load`.
    base: the file of the frozen weights, if adapters train
    """

    def __init__(
        self,
        run: RunConfig,
        device: DeviceConfig,
        dataset: TokenDataset,
        *,
        own: OwnData | None = None,
        initial: bool = True,
        base: Path | None = None,
    ) -> None:
        check_data(run, dataset)
        self.run, self.dataset, self.own = run, dataset, own
        self._data_seed = run.seed  # regions of one world have the same, and are to train on different sequences
        if run.world.run:
            self._data_seed = int.from_bytes(digest("region's data", run.canonical())[:8], "little") >> 1
        self.trained_on = own.dataset if own else dataset
        check_tokens(run, self.trained_on)
        self.device, autocast = open_device(device)
        check_exactness(run.recipe.chunk, self.device)
        if device.checkpointing:
            return_large_blocks()
        is_frugal = device.checkpointing
        assert run.adapt.is_on == (base is not None), "the base is fetched before the node is built"
        make = partial(first_model, seed=run.seed) if initial else build
        model = make(run.model, checkpointing=is_frugal, adapt=run.adapt, base=base)
        if device.compile:
            _check_compiler()
            model.compile_layers()
        self.live = LiveModel(
            model.to(self.device),
            autocast=autocast,
            sequences_per_pass=device.sequences_per_pass,
            half_state=device.half_state,
            packing=packing_of(run, dataset, self.trained_on),
            privacy=own.privacy if own else None,
        )
        self.outer = Outer.of(run, self.live.shapes)
        self.recipe = make_recipe(run.recipe, self.live, self.outer.layouts)
        self.round = 0  # rounds applied so far
        self.drift: float | None = None  # of the last of them: the distance moved over the norm of the weights
        self._is_compiled = device.compile
        # By payload, most recently checked last: how many rounds were applied then, and the contribution.
        self._unpacked: OrderedDict[bytes, tuple[int, Contribution]] = OrderedDict()
        self._lock = Lock()  # guards `_unpacked`: payloads are checked while a round trains
        self._trained: int | None = None  # the round whose steps are done but not contributed yet

    @property
    def own_drift(self) -> float | None:
        """Norm of what the last round's local steps moved, over that of the weights; None without local steps."""
        return self.recipe.drift

    def positions_for(self, round_number: int, place: int, places: int) -> Positions:
        """Returns the sequences that `train` uses, in its order."""
        count = self.run.recipe.round_sequences
        if self.run.data.source == "own":
            return self.own.positions(self.run, round_number, count) if self.own else np.empty(0, np.int64)
        sequences = self.dataset.sequences(self.run.model.sequence_length)
        return shard(self._data_seed, round_number, place, places, count, sequences)

    def train(
        self,
        round_number: int,
        place: int,
        places: int,
        on_step: Callable[[StepResult], bool | None] = lambda result: None,
        shift: Tensor | None = None,
    ) -> list[StepResult]:
        """Takes the round's local steps as the node at `place` of `places` in the roster.

        `on_step` is called after each; if it returns False, that was the last one. shift: [parameters] added to the
        weights before the first, and so a part of what is contributed
        """
        recipe, length = self.run.recipe, self.run.model.sequence_length
        each = recipe.passes_per_step * recipe.sequences_per_pass
        positions, privacy = self.positions_for(round_number, place, places), self.live.privacy
        self._trained = None
        if privacy is not None:
            privacy.spend(recipe.local_steps)
        results = []
        try:
            with told("training", self.device):
                self.recipe.begin(round_number)
                if shift is not None:
                    assert isinstance(self.recipe, LocalRecipe), "only steps move weights"
                    self.live.weights.add_(shift.to(self.device))
            for step in range(recipe.local_steps):
                chosen = positions[step * each : (step + 1) * each] if privacy is None else privacy.draw()
                drawing, at_work = self._drawing(round_number, place, step), blamed_in_run(self.run, "trained")
                with at_work, told("training", self.device), drawing:
                    batch = torch.from_numpy(self.trained_on.batch(chosen, length)).to(self.device)
                    results.append(self.recipe.local_step(step, batch, chosen.tolist()))
                if on_step(results[-1]) is False:
                    break
        finally:
            if privacy is not None:
                privacy.settle()
        with told("training", self.device):
            self.recipe.end()
        self._trained = round_number
        return results

    @property
    def can_rebase(self) -> bool:
        """Whether a round may be applied between two local steps; not where every contribution has to be in time."""
        return isinstance(self.recipe, LocalRecipe) and self.run.agreement.staleness_rounds_max > 0

    @contextmanager
    def rebased(self) -> Iterator[None]:
        """Lets a round be applied between two local steps."""
        assert isinstance(self.recipe, LocalRecipe), "only steps move weights"
        with torch.no_grad(), self.recipe.rebased():
            yield

    @torch.no_grad()
    def take_steps(self, round_number: int, moved: Tensor) -> None:
        """Takes how far a round's local steps, taken elsewhere, have moved the weights, in place of `train`."""
        assert isinstance(self.recipe, LocalRecipe), "only steps move weights"
        if not math.isfinite(torch.linalg.vector_norm(moved)):  # each by itself takes far longer
            raise TrainingError("how far the weights moved", step=self.run.recipe.local_steps - 1, positions=[])
        self.recipe.take(moved)
        self._trained = round_number

    @contextmanager
    def _drawing(self, round_number: int, place: int, step: int) -> Iterator[None]:
        """Seeds what is drawn in a step (dropout, plug-ins): a training that is repeated gives the same bits."""
        if not self.live.model.draws and not self.run.recipe.plugin:
            yield
            return
        told_apart = json.dumps([self.run.seed, round_number, place, step]).encode()
        seed = int.from_bytes(digest("dropout", told_apart)[:8], "little") >> 1
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(seed)
            yield

    def contribute(self, round_number: int) -> bytes:
        """Encodes the round that was just trained, and subtracts the payload's values from the residual."""
        assert self._trained == round_number, "a contribution follows its training"
        assert round_number not in self.recipe.residual.kept, "a round's contribution is made once, and kept as bytes"
        self._trained = None
        with blamed_in_run(self.run, "made a contribution"), told("making a contribution", self.device):
            contribution = self.recipe.contribute(round_number)
            payload = self.outer.pack(contribution, self.outer.fragment_of(round_number))
        if not self.run.recipe.plugin:  # whose own contribution may not be what others read in its payload
            self._keep_unpacked(payload, contribution)
        return payload

    # A trainer that loaded an older state may not know a contribution that was announced after that state was saved.
    # Then it has not left the residual: there is nothing to restore, and a part that a manifest took may be sent again
    # in later rounds.

    def restore(self, round_number: int) -> bool:
        """Puts a contribution that no manifest can take any more back into the residual."""
        return self.recipe.residual.restore(round_number)

    @property
    def kept_rounds(self) -> tuple[int, ...]:
        """The rounds whose contributions are neither forgotten nor restored.

        After `load`, some of these contributions may never have been announced.
        """
        return tuple(sorted(self.recipe.residual.kept))

    def check(self, payload: bytes) -> str | None:
        """Returns why a payload is refused, or None if it is good. Thread-safe; `apply` does not unpack it again."""
        try:
            contribution = self.outer.unpack(payload)
        except RemoteProtocolError as error:
            return error.why
        self._keep_unpacked(payload, contribution)
        return None

    def _keep_unpacked(self, payload: bytes, contribution: Contribution) -> None:
        """Keeps a contribution for `apply`, so that it need not unpack it."""
        with self._lock:
            self._unpacked[payload] = self.round, contribution
            while len(self._unpacked) * self.outer.contribution_bytes > UNPACKED_BYTES:
                self._unpacked.popitem(last=False)

    @torch.no_grad()
    def apply(
        self, round_number: int, payloads: Sequence[bytes], own: Mapping[int, bytes] = MappingProxyType({})
    ) -> None:
        """Applies the round's one update, from payloads that `check` found good, in any order.

        own: this node's contributions among them, by their rounds. Nothing of them is kept, but what was not counted
        returns to the residual.
        """
        assert round_number == self.round, f"round {round_number} cannot follow {self.round} applied rounds"
        unpacked = self._take_unpacked(payloads)
        # The next step's gradient has room for the weights before, unless this round's steps are not contributed yet.
        before = self.live.gradient.copy_(self.recipe.agreed) if self._trained is None else None
        size = 0.0 if before is None else float(torch.linalg.vector_norm(before))
        counted = self.outer.apply(self.recipe.agreed_state, round_number, payloads, unpacked)
        moved = None if before is None else float(torch.linalg.vector_norm(before.sub_(self.recipe.agreed)))
        self.drift = moved / size if moved is not None and size else None
        for number, payload in own.items():
            self.recipe.residual.forget(number, counted.uncounted(payload))
        self.round = round_number + 1

    def _take_unpacked(self, payloads: Sequence[bytes]) -> dict[bytes, Contribution]:
        """Removes these contributions, and those that came too late for a round, and returns the former."""
        oldest = self.round - self.run.agreement.staleness_rounds_max
        with self._lock:
            found = {payload: self._unpacked.pop(payload) for payload in payloads if payload in self._unpacked}
            while self._unpacked and next(iter(self._unpacked.values()))[0] < oldest:
                self._unpacked.popitem(last=False)
        return {payload: contribution for payload, (_, contribution) in found.items()}

    def root(self, manifest_digest: bytes = bytes(32)) -> bytes:
        """Computes the root of the current state; the manifest's digest draws the sample of a large one."""
        pieces = covered_pieces(self.state_size, self.run.state, self.round, manifest_digest)
        return state_root(self.recipe.agreed_state, pieces)

    @property
    def state_size(self) -> int:
        """Bytes of the agreed state: the weights, and the outer momentum if there is one."""
        return self.recipe.agreed_state.numel() * FLOAT_BYTES

    def state_bytes(self) -> bytes:
        """A copy of the agreed state, in the form from which the state root is computed."""
        return bytes(octets(self.recipe.agreed_state))

    def leaves(self) -> list[bytes]:
        """Hashes the pieces of the agreed state."""
        return state_leaves(self.recipe.agreed_state)

    @torch.no_grad()
    def adopt(self, round_number: int, pieces: Iterable[bytes | memoryview], keep_residual: bool = True) -> None:
        """Continues from the state that others have after `round_number` rounds; drops a training in progress.

        With `keep_residual`, the residual and all contributions whose fate is open stay. Invalid pieces change nothing:
        they are assembled in the memory of the next step's gradient and, with an outer momentum, in that of the live
        weights, so a state read from disk needs no memory of its own.
        """
        assert round_number >= 0, f"the state of round {round_number}"
        size, is_aligned, self._trained = 0, True, None
        received = [self.live.gradient]
        if self.recipe.agreed_state.numel() > self.live.gradient.numel():
            received.append(self.live.weights)  # each round begins with the agreed ones
        for piece in pieces:
            start, size = size // FLOAT_BYTES, size + len(piece)
            is_aligned = is_aligned and len(piece) % FLOAT_BYTES == 0
            if is_aligned and size <= self.state_size:  # otherwise it is refused for its size
                values = np.frombuffer(piece, dtype="<f4")
                if not np.isfinite(values).all():
                    raise RemoteProtocolError("the state has a weight that is not finite")
                _write(torch.from_numpy(values.copy()), received, start)
        if size != self.state_size or not is_aligned:
            raise RemoteProtocolError(f"the state has {size} bytes; this run's has {self.state_size}")
        for half, part in zip(received, torch.split(self.recipe.agreed_state, len(received[0])), strict=True):
            part.copy_(half)
        if not keep_residual:
            self.recipe.residual.clear()
        self.round = round_number

    @contextmanager
    def _agreed_weights(self) -> Iterator[None]:
        """Gives the model the agreed weights inside the block, and its own again afterwards."""
        # Without this, each new length of text would be compiled.
        eager = torch.compiler.set_stance("force_eager") if self._is_compiled else nullcontext()
        with blamed_in_run(self.run, "was looked at"), told("looking at the agreed weights", self.device), eager:
            # These are of a recipe whose contributions do not need the gradient: each step begins with its own.
            own = None if self.recipe.agreed is self.live.weights else self.live.gradient.copy_(self.live.weights)
            if own is not None:
                self.live.weights.copy_(self.recipe.agreed)
            self.live.model.eval()  # without dropout
            try:
                yield
            finally:
                self.live.model.train()
                if own is not None:
                    self.live.weights.copy_(own)

    @torch.no_grad()
    def sample(self, request: SampleRequest, on_token: Callable[[], None] = lambda: None) -> str:
        """Continues the prompt with the agreed weights."""
        tokenizer = self.dataset.open_tokenizer()
        with self._agreed_weights():
            return sample(self.live.model, tokenizer, request, on_token)

    def evaluate(self, sequences: int = EVALUATED_SEQUENCES) -> float:
        """Returns the agreed weights' mean loss, in nats per token, on the first held-out sequences."""
        with self._agreed_weights():
            return evaluate(
                self.live.loss,
                self.dataset,
                self.live.packing,
                self.run.model.sequence_length,
                sequences=sequences,
                at_a_time=self.live.sequences_at_a_time(self.run.recipe),
                device=self.device,
            ).loss

    # -----------------------------------------------------------------------------------------------
    # Saved state

    def _run_digest(self) -> str:
        """Digest of the run's settings, which identifies the run even before its config is sealed."""
        return digest("saved state's run", self.run.canonical()).hex()

    def _tensors(self, agreed: Tensor) -> dict[str, Tensor]:
        """Returns all tensors that a round depends on, by name, with this agreed state; not copied."""
        weights, momentum = agreed[: self.outer.parameters], agreed[self.outer.parameters :]
        parts = zip(self.live.names, self.live.parts(weights), strict=True)
        named = {WEIGHTS_PREFIX + name: part for name, part in parts}
        if len(momentum):
            named[MOMENTUM_NAME] = momentum
        named["residual"] = self.recipe.residual.coefficients
        return named | {f"recipe.{name}": tensor for name, tensor in self.recipe.state().items()}

    def capture(self, is_copied: bool = True) -> Capture:
        """Captures everything; without a copy if the caller does not use the trainer until it is written.

        The capture has the agreed weights, the round, the residual, the contributions whose fate is open, and the inner
        optimizer. It lacks the steps of a training that has not been contributed: a trainer that loads it trains that
        round again; the only difference is that the inner optimizer of `local` has seen those steps already. Between
        `contribute` and the announcement, it has a contribution that may never be announced: after `load`, the caller
        restores those of `kept_rounds` that were not announced.
        """
        agreed = in_memory(self.recipe.agreed_state, is_copied)
        tensors = {
            name: each if is_agreed(name) else in_memory(each, is_copied)
            for name, each in self._tensors(agreed).items()
        }
        for number, kept in self.recipe.residual.kept.items():  # these are never changed
            if not self.run.recipe.is_dense:  # otherwise they are known
                tensors[f"kept.{number}.indices"] = torch.from_numpy(kept.indices.astype(np.int32))
            tensors[f"kept.{number}.removed"] = torch.from_numpy(kept.removed)
        metadata = {"format": STATE_FORMAT, "round": str(self.round), "run": self._run_digest()}
        if self.live.privacy is not None:
            metadata["private"] = "yes"
        return Capture(tensors, metadata, agreed)

    def save(self, path: Path) -> None:
        """Writes everything to a new file."""
        self.capture(is_copied=False).write(path)

    @torch.no_grad()
    def load(self, path: Path) -> None:
        """Loads a file that `save` wrote; a file of another run changes nothing."""
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise DataError(f"{path}: not a saved state ({error})") from error
        if metadata.get("format") != STATE_FORMAT or metadata.get("run") != self._run_digest():
            raise DataError(f"{path}: not the saved state of run {self.run.name}: {json.dumps(metadata)[:200]}")
        if not re.fullmatch(r"\d{1,15}", metadata.get("round", "")):
            raise DataError(f"{path}: the round is missing")
        own = self._tensors(self.recipe.agreed_state)
        kept = read_kept(path, {name: tensor for name, tensor in tensors.items() if name not in own}, self.outer)
        for name, tensor in own.items():
            found = tensors.get(name)
            is_private = tensor.dtype in STATE_TYPES and not is_agreed(name)
            types = STATE_TYPES if is_private else (tensor.dtype,)  # device.half_state may have changed
            if found is None or found.shape != tensor.shape or found.dtype not in types:
                raise DataError(f"{path}: {name} is missing or not of shape {tuple(tensor.shape)}, {tensor.dtype}")
            if found.is_floating_point() and not is_finite(found):
                raise DataError(f"{path}: {name} is not finite")
        if (
            self.live.privacy is not None and "private" not in metadata
        ):  # all that follows would tell of what came before
            log.warning("%s was trained without privacy: what was not contributed of it is dropped", path)
            kept = {}
            tensors = {name: each if is_agreed(name) else each.zero_() for name, each in tensors.items()}
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
        self.recipe.residual.keep(kept)
        self.round, self._trained = int(metadata["round"]), None


def _write(values: Tensor, halves: Sequence[Tensor], start: int) -> None:
    """Writes values into flat tensors that follow one another."""
    for half in halves:
        end = min(start + len(values), len(half))
        if start < end:
            half[start:end] = values[: end - start]
            values, start = values[end - start :], end
        start -= len(half)
