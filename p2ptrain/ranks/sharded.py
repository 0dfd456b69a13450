"""A rank that holds only its part of the model: torch's FSDP2 (`fully_shard`) over the layers.

Each parameter is cut by rows, and so are its gradient and the inner optimizer's state: a rank reads its rows from the
memory that it shares with the node, and writes them back there. For its pass a layer is gathered, and its gradient
summed over all ranks and cut again (ZeRO: Rajbhandari et al. 2020, arXiv 1910.02054). With autocast a layer's matrices
are gathered in bf16, to which a step would round them anyway, and gradients summed in fp32; what is no matrix, and what
lies outside the layers, stays in fp32.

AdamW takes each number by itself. Muon needs whole matrices: they are dealt to ranks (`owners_of`), who receive all
rows of the momentum, orthogonalise them, and send them back.

All ranks gather in each pass, also one that has no sequences left: its pass counts nothing. So a rank that fails within
a pass leaves all others waiting, and the node starts them again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from math import prod
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from p2ptrain.capacity import return_large_blocks
from p2ptrain.errors import P2ptrainError
from p2ptrain.exact.kernels.launches import to_card
from p2ptrain.exact.shortage import told
from p2ptrain.models.adapters import AdaptedModel, base_tensors
from p2ptrain.models.built_in import Model
from p2ptrain.models.kinds import build, layers_of, weightless
from p2ptrain.ranks.channel import BeginSteps, RankAnswer, RankFailed, RankJob, RoundMemory, StepTaken, TakeStep
from p2ptrain.ranks.together import Rank, add_up, gone_if_it_fails
from p2ptrain.train.compiling import Compiling
from p2ptrain.train.inner import MUON_MOMENTUM, MUON_RMS, AdamW, Muon, adamw, batches_of, orthogonalised
from p2ptrain.train.live import LiveModel, clip_factor, pass_sequences


def rows_of(length: int, rank: int, ranks: int) -> slice:
    """Returns a rank's rows of a tensor with so many, as FSDP2 deals them; the last ranks may have none."""
    each = -(-length // ranks)
    return slice(min(length, rank * each), min(length, (rank + 1) * each))


def dealt(sizes: Mapping[int, int], ranks: int) -> list[list[int]]:
    """Deals matrices with these sizes to ranks: in their order, each to the rank that has least so far."""
    held, places = [0] * ranks, [list[int]() for _ in range(ranks)]
    for place, size in sizes.items():
        owner = held.index(min(held))
        held[owner] += size
        places[owner].append(place)
    return places


class ShardedTrainer(Rank):
    """A rank with a part of the model and of the inner optimizer's state."""

    def __init__(self, job: RankJob, descriptor: int, store: dist.Store) -> None:  # type: ignore[name-defined]
        super().__init__(job, store)
        run, settings = self.run, self.settings
        return_large_blocks()  # what is gathered for a layer would leave holes
        with weightless():
            model = build(run.model, settings.is_checkpointed, run.seed, run.adapt)
        layers = layers_of(model.model if isinstance(model, AdaptedModel) else model, run.model)
        # Without numbers: names and shapes, in the order of the state, and how a loss is computed.
        self.whole = LiveModel(model, autocast=self.autocast, half_state=settings.is_half, packing=job.packing)
        inner = self.inner(self.whole)
        memory = RoundMemory(self.whole, inner, descriptor)
        Compiling(model, settings, self.device, is_built_in=run.model.kind == "builtin", layers=layers)
        with gone_if_it_fails():
            _shard(model, layers, init_device_mesh(self.device.type, (job.ranks,)), is_half=self.autocast)
        _fill(model, self.device)
        if isinstance(model, AdaptedModel):
            self._load_base(model, Path(job.base))
        self._parameters = list(model.parameters())
        self.weights = [_local(each.data) for each in self._parameters]
        # Its rows of the memory, each with its own tensor: those that a round goes on from, and of a gradient.
        (weights, _), *others = memory.given
        self._given = list(zip(self.rows(self.whole.parts(weights)), self.weights, strict=True))
        self._gradient_rows = self.rows(self.whole.parts(memory.made[0][0]))
        self.optimizer: ShardedInner | None = None
        if inner is not None:
            self.optimizer = ShardedInner(self, inner, dict(zip(inner.state(), (it for it, _ in others), strict=True)))
            self._given += self.optimizer.given

    @torch.no_grad()
    def _load_base(self, model: AdaptedModel, path: Path) -> None:
        """Loads its rows of the frozen weights, one tensor at a time."""
        wanted = model.base()
        for name, tensor in base_tensors(path, {name: tuple(each.shape) for name, each in wanted.items()}):
            _local(wanted[name].data).copy_(tensor[rows_of(len(tensor), self.rank, self.ranks)])

    def rows(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Returns its rows of whole tensors."""
        return [each[rows_of(len(each), self.rank, self.ranks)] for each in parts]

    @torch.no_grad()
    def begin(self, begun: BeginSteps) -> None:
        super().begin(begun)
        for place, own in self._given:
            own.copy_(place)

    @torch.no_grad()
    def bring_back(self) -> None:
        for place, own in self._given if self.optimizer else zip(self._gradient_rows, self.gradients(), strict=True):
            place.copy_(own)

    def gradients(self) -> list[Tensor]:
        """Returns its rows of the gradient; a parameter that no pass has used has none."""
        there = zip(self._parameters, self.weights, strict=True)
        return [torch.zeros_like(own) if each.grad is None else _local(each.grad) for each, own in there]

    def take(self, order: TakeStep) -> RankAnswer:
        """Takes a step with all others."""
        began, packing, (own, rows) = perf_counter(), self.whole.packing, self.part(order)
        number, limit = self.begun.round, self.begun.sequences_per_pass
        blank = packing.batch(np.zeros((1, rows.shape[1]), np.int64), np.zeros(1, np.int64), number)
        batch = packing.batch(rows, own, number) if len(own) else blank[:0]
        most, tokens = -(-len(order.positions) // self.ranks), packing.tokens(batch)
        at_once = min(max(1, most), pass_sequences(self.run.recipe, limit, self.device.type))
        passes = [batch[start : start + at_once] for start in range(0, most, at_once)]
        counts = torch.tensor([tokens, packing.learned(batch)], dtype=torch.float64, device=self.device)
        add_up(counts)
        all_tokens, all_learned = counts.tolist()
        try:
            with gone_if_it_fails(), told("training", self.device):
                loss = self._gradient(order.step, passes, blank, max(1, all_learned))
        except P2ptrainError as error:
            return RankFailed.by(error, -(-at_once // 2), leaves_others=True)
        seconds = perf_counter() - began
        gradients = self.gradients()
        squares = torch.stack([torch.linalg.vector_norm(each) for each in gradients]).to(torch.float64).square().sum()
        add_up(total := torch.stack([loss.to(torch.float64), squares]))
        mean, squared = total.tolist()
        factor = clip_factor(mean, norm := squared**0.5, order.step, order.positions, self.run.recipe)
        for each in gradients:
            each.mul_(factor)
        if self.optimizer is not None:
            self.optimizer.step(self.begun.rate, gradients)
        return StepTaken(mean, int(all_tokens), norm, int(all_learned), tokens, seconds, self.memory_taken(), limit)

    def _gradient(self, step: int, passes: Sequence[Tensor], blank: Tensor, learned: float) -> Tensor:
        """Leaves its rows of the gradient of the mean over all ranks; returns its part of that mean.

        blank: is passed where it has no sequences, and counts nothing"""
        total, whole = torch.zeros((), device=self.device), self.whole
        whole.model.zero_grad(set_to_none=True)
        with self.drawing(whole.model, step):
            for batch in passes:
                there = to_card((batch if len(batch) else blank).numpy(), self.device)
                loss = whole.loss(there) * (whole.packing.learned(batch) / learned)
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
        return total


class ShardedInner:
    """Its rows of the inner optimizer's state."""

    def __init__(self, trainer: ShardedTrainer, inner: AdamW | Muon, state: Mapping[str, Tensor]) -> None:
        """state: of the whole optimizer, in the memory"""
        whole, ranks, self.config = trainer.whole, trainer.ranks, trainer.run.recipe
        self.trainer, self.steps = trainer, torch.zeros((), dtype=torch.int64)
        muon = [place for place, it in enumerate(whole.is_hidden_matrix) if it and isinstance(inner, Muon)]
        self.others = [place for place in range(len(whole.shapes)) if place not in muon]
        self.means = [torch.zeros_like(each, dtype=whole.state_type) for each in trainer.weights]
        self.squares = [torch.zeros_like(trainer.weights[place]) for place in self.others]
        owned = dealt({place: prod(whole.shapes[place]) for place in muon}, ranks)
        batches = [batches_of(whole.shapes, each, trainer.device.type) for each in owned]
        self.turns = list(zip_longest(*batches, fillvalue=[]))  # the matrices of each owner that it has at a time
        if isinstance(inner, Muon):
            squares = [state[f"inner_square.{place}"].view(whole.shapes[place]) for place in self.others]
        else:
            squares = whole.parts(state["inner_square"])
        places = trainer.rows([*whole.parts(state["inner_mean"]), *squares])
        self.given = [(state["inner_steps"], self.steps), *zip(places, [*self.means, *self.squares], strict=True)]

    @torch.no_grad()
    def step(self, rate: float, gradients: list[Tensor]) -> None:
        self.steps += 1
        # One by one, of which bf16 takes a copy.
        for place, square in zip(self.others, self.squares, strict=True):
            one = [self.trainer.weights[place]], [gradients[place]], [self.means[place]], [square]
            adamw(*one, int(self.steps), rate, self.config)
        for turn in self.turns:
            self._muon(turn, rate, gradients)

    def _muon(self, turn: Sequence[Sequence[int]], rate: float, gradients: list[Tensor]) -> None:
        """Takes Muon's step on the matrices of one turn, given for each owner; in train/inner.py it is the same."""
        trainer, is_half, shapes = self.trainer, self.trainer.autocast, self.trainer.whole.shapes
        for place in (place for places in turn for place in places):
            mean, gradient = self.means[place], gradients[place]
            mean.lerp_(gradient.to(mean.dtype), 1 - MUON_MOMENTUM)
            gradient.lerp_(mean.to(torch.float32), MUON_MOMENTUM)  # Nesterov's look
        kind = torch.bfloat16 if is_half else torch.float32
        sent = [[gradients[place].to(kind) for place in places] for places in turn]
        mine = turn[trainer.rank]
        cut = [[rows_of(shapes[place][0], each, trainer.ranks) for place in mine] for each in range(trainer.ranks)]
        nothing, empty = gradients[0].new_empty(0, dtype=kind), [torch.empty(shapes[it], device="meta") for it in mine]
        came = _exchange(nothing, sent, [[each[rows] for each, rows in zip(empty, some, strict=True)] for some in cut])
        whole = [torch.cat(parts) for parts in zip(*came, strict=True)]
        turned: Sequence[Tensor] = [*orthogonalised(whole, is_half=is_half)] if mine else []
        done = [each if each.shape == shapes[place] else each.T for each, place in zip(turned, mine, strict=True)]
        back = [[each[rows] for each, rows in zip(done, some, strict=True)] for some in cut]
        updates = _exchange(nothing, back, [[gradients[place] for place in places] for places in turn])
        keep = 1 - rate * float(self.config.inner_weight_decay)
        for places, some in zip(turn, updates, strict=True):
            for place, update in zip(places, some, strict=True):
                size = rate * MUON_RMS * max(shapes[place]) ** 0.5
                trainer.weights[place].mul_(keep).sub_(update.to(torch.float32), alpha=size)


def _exchange(
    nothing: Tensor, sent: Sequence[Sequence[Tensor]], wanted: Sequence[Sequence[Tensor]]
) -> list[list[Tensor]]:
    """Sends these tensors to each rank, and returns those that come from each, which have the shapes of the wanted.

    nothing: an empty one of their type, where none is sent"""
    there, back = ([sum(each.numel() for each in some) for some in every] for every in (sent, wanted))
    came, flat = nothing.new_empty(sum(back)), [each.reshape(-1) for some in sent for each in some]
    with gone_if_it_fails(), told("taking a step", nothing.device):
        dist.all_to_all_single(came, torch.cat([nothing, *flat]), back, there)
    parts = iter(torch.split(came, [each.numel() for some in wanted for each in some]))
    return [[next(parts).view(each.shape) for each in some] for some in wanted]


def _shard(model: Model, layers: nn.ModuleList, mesh: DeviceMesh, *, is_half: bool) -> None:
    """Cuts the parameters of a model; a loss then gathers what it needs."""
    model.zero_grad(set_to_none=True)
    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for layer in layers:
        norms = [each for each in layer.modules() if _is_norm(each)] if is_half else []
        if norms:
            fully_shard(norms, mesh=mesh, reshard_after_forward=False)
        fully_shard(layer, mesh=mesh, mp_policy=half if is_half else MixedPrecisionPolicy())
    fully_shard(model, mesh=mesh)
    for each in model.modules():
        if isinstance(each, FSDPModule):  # a loss is weighted by what all ranks learn, and gloo cannot divide
            each.set_gradient_divide_factor(1.0)
            each.set_force_sum_reduction_for_comms(True)
    for name in ("loss", "packed_loss"):
        register_fsdp_forward_method(model, name)


def _is_norm(module: nn.Module) -> bool:
    own = [*module.parameters(recurse=False)]
    return bool(own) and all(each.dim() < 2 for each in own)


def _fill(model: Model, device: torch.device) -> None:
    """Gives the parameters memory on the device; buffers keep their numbers."""
    kept = {name: each.to(device) for name, each in model.named_buffers()}
    model.to_empty(device=device)
    for name, each in model.named_buffers():
        each.copy_(kept[name])


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor), "it has been cut"
    return tensor.to_local()
