"""The learner: what takes a node's steps, and turns them into contributions.

    train       takes a round's local steps, on this node's shard
    contribute  turns them into a payload
    settle      says what a round counted of an earlier contribution
    evaluate    computes the loss on the held-out split
    sample      writes text
    capture     copies everything that the next round depends on, to be written while training goes on
    load        goes on from what was written

It goes on from the weights of a replica, which another thread may change meanwhile: it copies them before a round, or
between two steps (`rebase`). So an error here costs a contribution, and never touches what was agreed on. It runs in
one thread and uses no clock and no network; a learner that loads a capture goes on with the same bits."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from p2ptrain.capacity import cores, return_large_blocks
from p2ptrain.config import DeviceConfig, RunConfig
from p2ptrain.data.assignment import WINDOW_PIECES, Positions, shard, shard_in_window, shard_of_slots
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.data.run_data import check_data, check_tokens, packing_of
from p2ptrain.digest import digest
from p2ptrain.errors import DataError, TrainingError
from p2ptrain.exact.exactness import check_exactness
from p2ptrain.exact.kernels.launches import OnCard
from p2ptrain.exact.outer import Uncounted
from p2ptrain.exact.replica import Replica
from p2ptrain.exact.shortage import told
from p2ptrain.models.kinds import build, first_model
from p2ptrain.models.plugins import blamed_in_run
from p2ptrain.models.sample import SampleRequest, sample
from p2ptrain.share import Share
from p2ptrain.train import saved_state
from p2ptrain.train.compiling import Compiling
from p2ptrain.train.devices import find_device
from p2ptrain.train.evaluate import evaluate
from p2ptrain.train.live import LiveModel, StepResult, drawing
from p2ptrain.train.matched_filter import Match, audit
from p2ptrain.train.own_data import OwnData
from p2ptrain.train.recipes import LocalRecipe, Recipe, make_recipe
from p2ptrain.train.saved_state import Capture, in_memory, is_agreed, read_kept

EVALUATED_SEQUENCES = 64  # 16 KB of held-out text at the smallest preset, enough for a curve; a guess
BLOCK = 2**22  # numbers that are compared at a time

log = logging.getLogger("p2ptrain.train")


def open_device(config: DeviceConfig) -> tuple[torch.device, bool]:
    """Sets how many threads torch uses, and returns the result of `find_device`: for a learner's own tensors, which lie
    in main memory where only ranks use the device."""
    torch.set_num_threads(config.threads or max(1, cores() - 1))  # one core stays free for the network and the user
    return find_device(config.model_copy(update={"name": "cpu"}) if config.is_apart else config)


@dataclass(slots=True)
class RankFigures:
    """A process that takes steps in a learner's place, in the current or the last round."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}  # used as it is in /status

    device: str = field(metadata={"description": "cpu, mps, cuda or cuda:N; at an address: of another machine"})
    pid: int = field(metadata={"description": "its process; 0: not begun yet"})
    memory_bytes: int = field(metadata={"description": "the most that its device held"})
    tokens: int = field(metadata={"description": "of its part of the round's sequences"})
    seconds: float = field(metadata={"description": "of its own work, without waiting for others"})


class StepsElsewhere(Protocol):
    """Takes a learner's steps in its place, such as processes with devices of their own."""

    figures: list[RankFigures]
    kept: int  # of the round's steps: those that were brought back; RanksLostError costs the others

    def wait(self) -> bool:
        """Waits until it can take steps; returns whether that took time."""

    def begin(self, number: int, place: int) -> None:
        """Begins a round's steps from the live weights and the state of the inner optimizer as they are now."""

    def hand_out(self) -> None:
        """Goes on with its steps from these as they are now."""

    def step(self, step: int, positions: Positions) -> StepResult:
        """Takes a step on the sequences at these positions."""

    def bring_back(self) -> None:
        """Sets what was handed out, or the gradient, to what the steps so far have made of it; not if they are lost."""

    def stop(self) -> None:
        """Waits no longer; may be called from any thread."""

    def close(self) -> None:
        """Ends; may be called from any thread."""


MakeElsewhere = Callable[[LiveModel, Recipe], StepsElsewhere]
SetRead = tuple[Positions, NDArray[np.int64]]  # of an audit, with tokens [sequences, length + 1]


class Learner:
    """A node's live model, residual and recipe.

    own: what it trains on in a run whose nodes bring their own data; a script with a loop of its own needs none.
    Only the node that begins the run needs `initial` weights; otherwise all matrices are zero, as in a new replica.
    base: the file of the frozen weights, if adapters train
    elsewhere: makes what takes the steps in place of this learner"""

    def __init__(
        self,
        run: RunConfig,
        device: DeviceConfig,
        dataset: TokenDataset,
        *,
        own: OwnData | None = None,
        initial: bool = True,
        base: Path | None = None,
        elsewhere: MakeElsewhere | None = None,
    ) -> None:
        check_data(run, dataset)
        self.run, self.dataset, self.own = run, dataset, own
        self._data_seed = run.seed  # regions of one world have the same, and are to train on different sequences
        if run.world.run:
            self._data_seed = int.from_bytes(digest("region's data", run.canonical())[:8], "little") >> 1
        self.trained_on = own.dataset if own else dataset
        check_tokens(run, self.trained_on)
        self.device, autocast = open_device(device)
        for each in {self.device, torch.device("cpu")}:  # exact work goes on in main memory where a card has no room
            check_exactness(run.recipe, each)
        if device.is_checkpointed:
            return_large_blocks()
        assert run.adapt.is_on == (base is not None), "the base is fetched before the node is built"
        make = partial(first_model, seed=run.seed) if initial else build
        model = make(run.model, checkpointing=device.is_checkpointed, adapt=run.adapt, base=base)
        self.compiling = Compiling(model, device, self.device, is_built_in=run.model.kind == "builtin")
        self.live = LiveModel(
            model.to(self.device),
            autocast=autocast,
            sequences_per_pass=device.sequences_per_pass,
            half_state=device.is_half,
            packing=packing_of(run, dataset, self.trained_on),
            privacy=own.privacy if own else None,
        )
        self.replica = Replica(run, list(zip(self.live.names, self.live.shapes, strict=True)), self.device)
        self.replica.weights.copy_(self.live.weights)
        self.outer = self.replica.outer
        self.recipe = make_recipe(run.recipe, self.live, self.outer.layouts)
        self.round = 0  # the replica's round whose weights `recipe.base` has
        self.drift: float | None = None  # how far these moved it, as a share of its norm
        self._adopted = 0  # states that the replica had adopted then
        self._settled: list[tuple[int, Uncounted]] = []  # contributions that rounds have taken since
        self._returned: list[int] = []  # rounds whose contributions none can take any more
        self._trained: int | None = None  # the round whose steps are done but not contributed yet
        self.elsewhere = elsewhere(self.live, self.recipe) if elsewhere else None

    @property
    def own_drift(self) -> float | None:
        """Norm of what the last round's local steps moved, over that of the weights; None without local steps."""
        return self.recipe.drift

    def positions_for(self, share: Share) -> Positions:
        """Returns the sequences that `train` uses, in its order. A node with too few slots uses them again."""
        count, length, seed = self.run.recipe.round_sequences, self.run.model.sequence_length, self._data_seed
        if self.run.data.source == "own":
            return self.own.positions(self.run, share.round, count) if self.own else np.empty(0, np.int64)
        sequences = self.dataset.sequences(length)
        if share.slots is not None:
            return np.resize(shard_of_slots(seed, share.slots, sequences), count)
        if self.run.data.assignment == "window":
            window = self.dataset.sequences_in(WINDOW_PIECES, length)
            return shard_in_window(seed, share.round, share.place, share.places, count, sequences, window)
        return shard(seed, share.round, share.place, share.places, count, sequences)

    # -- The replica's weights ----------------------------------------------------------------------

    def settle(self, round_number: int, uncounted: Uncounted | None) -> None:
        """Notes what a round counted of a contribution, while the replica is locked; None: none ever will."""
        if uncounted is None:
            self._returned.append(round_number)
        else:
            self._settled.append((round_number, uncounted))

    def restore_all_but(self, outstanding: Collection[int]) -> None:
        """Puts back into the residual what none can take any more; also what an earlier process did not announce."""
        returned, self._returned = self._returned, []
        for number in (*returned, *(kept for kept in self.kept_rounds if kept not in outstanding)):
            self.restore(number)

    def catch_up(self) -> None:
        """Goes on from the replica's weights."""
        with told("taking over the agreed weights", self.device), self.replica.lock:
            self._catch_up()

    @torch.no_grad()
    def _catch_up(self) -> None:
        if self.replica.round > self.round:
            is_known = self.replica.adopted == self._adopted
            self.drift = _distance(self.recipe.base, self.replica.weights) if is_known else None
        self.recipe.base.copy_(self.replica.weights)
        self.round, self._adopted = self.replica.round, self.replica.adopted
        while self._settled:  # one for which there was no memory stays
            self.recipe.residual.forget(*self._settled[0])
            del self._settled[0]

    @torch.no_grad()
    def rebase(self) -> bool:
        """Between two steps, goes on from what was agreed on meanwhile; False if that is nothing, or is not ready."""
        replica = self.replica

        def is_next() -> bool:
            return (replica.round, replica.adopted) == (self.round + 1, self._adopted)

        if not is_next():
            return False
        if self.elsewhere is not None:  # before the lock: who does not answer must not delay what is agreed on
            self.elsewhere.bring_back()
        if not replica.lock.acquire(blocking=False):
            return False
        try:
            if not is_next():  # more was agreed on while the ranks brought back what they have
                return False
            assert isinstance(self.recipe, LocalRecipe), "only steps move weights"
            with told("taking over the agreed weights", self.device), self.recipe.rebased():
                self._catch_up()
        finally:
            replica.lock.release()
        if self.elsewhere is not None:
            self.elsewhere.hand_out()
        return True

    @property
    def can_overlap(self) -> bool:
        """Whether steps may go on from other weights; not where every contribution has to be in time."""
        return isinstance(self.recipe, LocalRecipe) and self.run.agreement.staleness_rounds_max > 0

    # -- Steps --------------------------------------------------------------------------------------

    def wait(self) -> bool:
        """Waits for whoever takes the steps; returns whether that took time."""
        return self.elsewhere is not None and self.elsewhere.wait()

    def train(
        self,
        share: Share,
        on_step: Callable[[StepResult], bool | None] = lambda result: None,
        shifted: Callable[[Tensor], Tensor | None] = lambda weights: None,
        sequences: int = 0,
    ) -> list[StepResult]:
        """Takes a round's local steps on this share of its data.

        `on_step` is called after each; if it returns False, that was the last one. `shifted` returns what to add to the
        agreed weights before the first, [parameters], and so to contribute. sequences: of a step; 0: as the recipe says
        """
        recipe = self.run.recipe
        each = recipe.step_sequences
        positions, privacy = self.positions_for(share), self.live.privacy
        self._trained = None
        if privacy is not None:
            privacy.spend(recipe.local_steps)
        results = []
        self.wait()
        try:
            with told("training", self.device), self.replica.lock:
                self._catch_up()
                shift = shifted(self.recipe.base)
            with blamed_in_run(self.run, "trained"), told("training", self.device):
                self.recipe.begin(share.round)
                if sequences and isinstance(self.recipe, LocalRecipe):
                    self.recipe.shorten(sequences / each)
                if shift is not None:
                    assert isinstance(self.recipe, LocalRecipe), "only steps move weights"
                    self.live.weights.add_(shift.to(self.device))
            if self.elsewhere is not None:
                self.elsewhere.begin(share.round, share.place)
            for step in range(recipe.local_steps):
                own = positions[step * each : (step + 1) * each][: sequences or each]
                chosen = own if privacy is None else privacy.draw()
                results.append(self._step(share, step, chosen))
                if on_step(results[-1]) is False:
                    break
        finally:
            if privacy is not None:
                privacy.settle()
            if self.elsewhere is not None:  # also what a training that failed has moved
                self.elsewhere.bring_back()
        with blamed_in_run(self.run, "trained"), told("training", self.device):
            self.recipe.end()
        self._trained = share.round
        return results

    @torch.no_grad()
    def take_steps(self, round_number: int, moved: Tensor) -> None:
        """Takes how far a round's local steps, taken elsewhere, have moved the weights, in place of `train`."""
        assert isinstance(self.recipe, LocalRecipe), "only steps move weights"
        if not math.isfinite(torch.linalg.vector_norm(moved)):  # each by itself takes far longer
            raise TrainingError("how far the weights moved", step=self.run.recipe.local_steps - 1, positions=[])
        self.catch_up()
        self.recipe.take(moved)
        self._trained = round_number

    def _step(self, share: Share, step: int, chosen: Positions) -> StepResult:
        length = self.run.model.sequence_length
        if self.elsewhere is not None:
            return self.elsewhere.step(step, chosen)
        is_drawn = self.live.model.draws or bool(self.run.recipe.plugin)
        drawn = partial(drawing, self.run, self.device, share, step, is_drawn=is_drawn)
        with blamed_in_run(self.run, "trained"), told("training", self.device):
            batch = self.live.packing.batch(self.trained_on.batch(chosen, length), chosen, share.round)
            if self.compiling.is_due and len(batch):
                with drawn():
                    self.compiling.begin(partial(self.live.try_pass, batch, self.run.recipe))
            with drawn():
                return self.recipe.local_step(step, batch, chosen.tolist())

    def contribute(self, round_number: int, k: int = 0) -> bytes:
        """Encodes the round that was just trained, and subtracts the payload's values from the residual.

        k: numbers of each chunk; 0: the most that the run allows"""
        assert self._trained == round_number, "a contribution follows its training"
        assert round_number not in self.recipe.residual.kept, "a round's contribution is made once, and kept as bytes"
        self._trained = None
        with blamed_in_run(self.run, "made a contribution"), told("making a contribution", self.device):
            self.recipe.residual.set_k(k)
            contribution = self.recipe.contribute(round_number)
            payload = self.outer.pack(contribution, self.outer.fragment_of(round_number))
        # Kept as it is read, which a plug-in's own need not be; a card reads it from the payload.
        if not self.run.recipe.plugin and not isinstance(contribution, OnCard):
            self.replica.keep(payload, contribution)
        return payload

    # A learner that loaded an older state may not know a contribution that was announced after that state was saved.
    # Then it has not left the residual: there is nothing to restore, and what a manifest took may be sent again.

    def restore(self, round_number: int) -> bool:
        """Puts a contribution that no manifest can take any more back into the residual."""
        return self.recipe.residual.restore(round_number)

    @property
    def kept_rounds(self) -> tuple[int, ...]:
        """The rounds whose contributions are neither forgotten nor restored; some may never have been announced."""
        return tuple(sorted(self.recipe.residual.kept))

    # -- A look at the agreed weights ---------------------------------------------------------------

    @contextmanager
    def _looking(self) -> Iterator[None]:
        """Gives the model the agreed weights; a round that begins later begins from them in any case."""
        # Without this, each new length of text would be compiled.
        eager = torch.compiler.set_stance("force_eager") if self.compiling.is_on else nullcontext()
        with blamed_in_run(self.run, "was looked at"), told("looking at the agreed weights", self.device), eager:
            self.catch_up()
            self.live.weights.copy_(self.recipe.base)
            self.live.model.eval()  # without dropout
            try:
                yield
            finally:
                self.live.model.train()

    @torch.no_grad()
    def sample(self, request: SampleRequest, on_token: Callable[[], None] = lambda: None) -> str:
        """Continues the prompt with the agreed weights."""
        assert self._trained is None, "between two rounds"
        tokenizer = self.dataset.open_tokenizer()
        with self._looking():
            return sample(self.live.model, tokenizer, request, on_token)

    @torch.no_grad()
    def evaluate(self, sequences: int = EVALUATED_SEQUENCES) -> float:
        """Returns the agreed weights' mean loss, in nats per token, on the first held-out sequences."""
        assert self._trained is None, "between two rounds"
        with self._looking():
            return evaluate(
                self.live.loss,
                self.dataset,
                self.live.packing,
                self.run.model.sequence_length,
                sequences=sequences,
                at_a_time=self.live.sequences_at_a_time(self.run.recipe),
                device=self.device,
            ).loss

    def audit(
        self, number: int, weights: Tensor, payloads: Sequence[bytes], own: Sequence[SetRead], others: Sequence[SetRead]
    ) -> Match:
        """Measures the first of these contributions to a round, computed from these weights (matched_filter.py).

        own, others: sets of sequences that its author was given, and of others"""
        assert self._trained is None, "between two rounds"
        part = self.outer.fragment_of(number)
        if self.outer.fragment_in(payloads[0]) != part:  # a round counts it as nothing
            return Match(0.0, 0.0)
        layout = self.outer.layouts[part]
        contributions = [self.outer.unpack(each) for each in payloads if self.outer.fragment_in(each) == part]
        with self._looking():
            if self.recipe.base is self.live.weights:
                self._adopted = -1  # these are none that the next round moves
            self.live.weights.copy_(weights)
            sets, other_sets = (
                [self.live.packing.batch(tokens, positions, number) for positions, tokens in each]
                for each in (own, others)
            )
            return audit(self.run.recipe, self.live, layout, contributions, 0, sets, other_sets)

    # -- Saved state --------------------------------------------------------------------------------

    def _own_tensors(self) -> dict[str, Tensor]:
        """Returns the tensors that a round depends on besides the agreed ones, by name; not copied."""
        state = {f"recipe.{name}": tensor for name, tensor in self.recipe.state().items()}
        return {"residual": self.recipe.residual.coefficients} | state

    def capture(self) -> Capture:
        """Copies everything: the agreed state, the residual, the open contributions, and the inner optimizer.

        It lacks the steps of a training that has not been contributed: a learner that loads it trains that round again;
        the only difference is that the inner optimizer of `local` has seen those steps already. Between `contribute`
        and the announcement, it has a contribution that may never be announced: after `load`, the caller restores those
        of `kept_rounds` that were not announced."""
        with self.replica.lock:
            self._catch_up()
            agreed = in_memory(self.replica.state)
        tensors = self.replica.named(agreed) | {name: in_memory(each) for name, each in self._own_tensors().items()}
        for number, kept in self.recipe.residual.kept.items():  # these are never changed
            if not self.run.recipe.is_dense:  # otherwise they are known
                tensors[f"kept.{number}.indices"] = in_memory(kept.indices).to(torch.int32)
            tensors[f"kept.{number}.removed"] = in_memory(kept.removed)
        run = saved_state.run_digest(self.run)
        metadata = {"format": saved_state.STATE_FORMAT, "round": str(self.round), "run": run}
        if self.live.privacy is not None:
            metadata["private"] = "yes"
        return Capture(self.round, tensors, metadata, agreed)

    @torch.no_grad()
    def load(self, path: Path) -> None:
        """Loads a file that a capture wrote, into the replica as well; a file of another run changes nothing."""
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise DataError(f"{path}: not a saved state ({error})") from error
        expected = saved_state.STATE_FORMAT, saved_state.run_digest(self.run)
        if (metadata.get("format"), metadata.get("run")) != expected:
            raise DataError(f"{path}: not the saved state of run {self.run.name}: {json.dumps(metadata)[:200]}")
        if not re.fullmatch(r"\d{1,15}", metadata.get("round", "")):
            raise DataError(f"{path}: the round is missing")
        own = self._own_tensors()
        known = self.replica.named() | own
        kept = read_kept(path, {name: tensor for name, tensor in tensors.items() if name not in known}, self.outer)
        for name, tensor in known.items():
            saved = tensors.get(name)
            is_private = tensor.dtype in saved_state.STATE_TYPES and not is_agreed(name)
            types = saved_state.STATE_TYPES if is_private else (tensor.dtype,)  # device.half_state may have changed
            if saved is None or saved.shape != tensor.shape or saved.dtype not in types:
                raise DataError(f"{path}: {name} is missing or not of shape {tuple(tensor.shape)}, {tensor.dtype}")
            if saved.is_floating_point() and not saved_state.is_finite(saved):
                raise DataError(f"{path}: {name} is not finite")
        if self.live.privacy is not None and "private" not in metadata:  # what follows would tell of what came before
            log.warning("%s was trained without privacy: what was not contributed of it is dropped", path)
            kept = {}
            tensors = {name: each if is_agreed(name) else each.zero_() for name, each in tensors.items()}
        self.replica.restore(int(metadata["round"]), tensors)
        self.catch_up()
        self.drift = None
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
        self.recipe.residual.keep(kept)
        self._trained = None


def _distance(old: Tensor, new: Tensor) -> float | None:
    """Returns how far apart they are, over the norm of the old ones."""
    moved, size = torch.zeros((), device=old.device), torch.zeros((), device=old.device)
    for before, after in zip(torch.split(old, BLOCK), torch.split(new, BLOCK), strict=True):
        moved += (after.to(old.device) - before).square_().sum()
        size += before.square().sum()
    return float((moved / size).sqrt()) if size else None
