"""Estimates the memory and disk space of a run before anything is allocated.

Everything that grows with the model is counted tensor by tensor. The activations of a training pass follow a formula,
and the size of a process without a model was measured. Tests hold both to within a tenth of the real use on a CPU, and
the formula to within 8 % of passes that were measured on an H100."""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Literal

import psutil
import torch
from torch import Tensor

from p2ptrain.capacity import free_memory_bytes, memory_bytes
from p2ptrain.config import ModelConfig, NodeConfig, RunConfig
from p2ptrain.config.hf import HfConfig
from p2ptrain.digest import PIECE_BYTES
from p2ptrain.errors import DeviceError
from p2ptrain.exact.aggregate import COUNTED_AT_ONCE, INT16_MAX, INT32_MAX
from p2ptrain.exact.cards import cannot_be_opened
from p2ptrain.exact.kernels.launches import CHUNK_LEAST, SLAB_BYTES, is_usable
from p2ptrain.exact.outer import Outer
from p2ptrain.exact.replica import UNPACKED_BYTES
from p2ptrain.exact.root import FETCHED_PIECES, FLOAT_BYTES
from p2ptrain.exact.rules import BY_COORDINATE
from p2ptrain.exact.shortage import mega
from p2ptrain.exact.transform import block_chunks
from p2ptrain.models.kinds import build, parameter_count, shapes_of, without_adapters
from p2ptrain.models.loss import logits_rows
from p2ptrain.models.plugins import FAILURES
from p2ptrain.train.devices import find_device, named_cards
from p2ptrain.train.inner import batch_elements
from p2ptrain.train.live import pass_sequences
from p2ptrain.train.recipes import copies_of

PROCESS_BYTES = 400 * 10**6  # Python, torch and hivemind, without a model: 360 MB on Linux
RANK_BYTES = 280 * 10**6  # Python, torch and torch.distributed: 272 MB on Linux
CHECKPOINTING_BYTES = 90 * 10**6  # main memory: torch imports its compiler for checkpointing
PAYLOADS_BYTES = 256 * 2**20  # limit of contributions kept in memory (store/payloads.py)
# A checkpoint holds the node's contributions that may still be taken: of this round, of the last one, and late ones.
KEPT_COPIES = 2
WITHIN_OPERATIONS = 1.03  # factor for memory that operations allocate internally in a pass; measured on a CPU
# glibc leaves holes between blocks below 32 MiB, more of them if fp32 and bf16 alternate; measured. Larger blocks go
# back to the system, and so do all with checkpointing; torch's allocator for CUDA is assumed to leave none.
HOLES, HOLES_HALF, HOLES_UP_TO_BYTES = 1.18, 1.4, 2**25
CUDA_LIBRARIES_BYTES = 64 * 2**20  # allocated by cuBLAS through torch, for two threads; measured on an H100
# For each number of a contribution, in several arrays that exist at a time; measured. The second where every weight is
# sent in more than a bit.
COEFFICIENT_BYTES, WEIGHT_BYTES = 48, 20
WITHDRAWN_BYTES = 6  # of a number of a contribution whose fate is open, on the card
MADE_BYTES = 16  # of a number, while a card makes a contribution: counted in launches.py, not measured yet
COPIED_BYTES = FETCHED_PIECES * PIECE_BYTES  # of a GPU's weights on their way to their root, twice in main memory
AUDITED_CONTRIBUTIONS = 17  # unpacked at a time in an audit: the one, and those that it is compared with
FILTER_BYTES = 36  # of a number of a contribution, while it is compared with a filter
MUON_COPIES = 4  # of the matrices that it orthogonalises at a time
BLOCK_COPIES = 4  # fp64 copies of a block of votes while it becomes an update
CONTRIBUTIONS_USUAL = 64  # the vote counters assumed here are wide enough for this many
CONTRIBUTORS_USUAL = 8  # on the disk, if their number is unknown; a guess
ENTRY_BYTES = 400  # of the history in memory, for each contribution: two digests, their record and a signature
# Copies of the weights: up to eight here, to tell how far they moved, two shared with the world node, and its own.
WORLD_COPIES = 8 + 2 + 8
BATCH_COPIES = 2  # of a step's sequences, while they are gathered
POSITION_BYTES = 48  # for each sequence of a round, while its place in the data is worked out
SHOWN_BYTES = 10**6  # parts smaller than this are not spelled out
DISK_SHARE = 0.95  # of the free disk space that a run may need, unless limits.disk_bytes tells
COMPILED_SHARE = 0.7  # of what a layer keeps, on a card: 124M on an H200, with 16, 32 and 64 sequences
CARD_SHARE = 0.9  # of a card's free memory that larger passes may fill: the estimate errs by up to 8 %
ROOM_LEFT = 1.25  # a nearly full disk causes other trouble first

log = logging.getLogger("p2ptrain.train")


@dataclass(frozen=True, slots=True)
class PassSettings:
    """The device settings that determine the memory of a training pass."""

    autocast: bool = False
    checkpointing: bool = False
    sequences_per_pass: int = 0
    device: str = "cpu"
    half_state: bool = False
    is_private: bool = False  # one sequence at a time, and a sum of gradients beside the gradient
    has_programs: bool = True  # a card: whether it runs programs of our own
    is_compiled: bool = False  # the layers of a built-in model
    audits: bool = False  # whether the node measures others' contributions

    @property
    def in_programs(self) -> bool:
        return self.device == "cuda" and self.has_programs

    @property
    def logits_bytes(self) -> int:
        """Bytes in which the loss keeps a logit: torch always in fp32."""
        return FLOAT_BYTES // 2 if self.in_programs and self.autocast else FLOAT_BYTES

    @property
    def state_bytes(self) -> int:
        """Bytes of a number of what no other node sees: the residual, and the momentum of local steps."""
        return FLOAT_BYTES // 2 if self.half_state else FLOAT_BYTES


@dataclass(frozen=True, slots=True)
class Need:
    """The memory and disk space that a run takes, in bytes."""

    parameters: int  # a count
    state: int  # the weights that train; their gradient is as large
    base: int  # the frozen ones, if adapters train
    payload: int  # one contribution
    residual: int
    momentum: int  # of the outer update
    optimizer: int  # the weights that a round began from, if steps move the live ones, and the inner optimizer's state
    activations: int  # peak of a training pass
    codec: int  # peak of making a contribution or applying a round; never during a pass
    program: int  # without a model
    payloads: int  # contributions kept in memory
    checkpoint: int  # on the disk, and in main memory while a copy waits to be written
    data: int  # the sequences of a step, and the places of a round's in the data
    history: int  # rounds that are kept for others
    world: int  # what a node of a region keeps of the world's weights, and its world node
    audit: int = 0  # during an audit: the weights that a contribution began from, and those that it is compared with
    filter: int = 0  # peak of comparing them with the gradient
    inner: int = 0  # of `optimizer`, the inner one's state
    gathered: int = 0  # where ranks hold parts: weights that are whole at a time, and their gradient twice

    def rank(self, parts: int = 1) -> int:
        """Memory of each process that takes steps beside the node, on its device, which holds one of so many parts."""
        if parts == 1:
            return 2 * self.state + self.base + self.optimizer + self.activations
        return (2 * self.state + self.base + self.inner) // parts + self.gathered + self.activations

    @property
    def trainer(self) -> int:
        """Memory that the run needs on the training device."""
        kept = 3 * self.state + self.base + self.residual + self.momentum + self.optimizer + self.audit
        return kept + max(self.activations, self.codec, self.filter)

    def main(self, device: str) -> int:
        """Main memory that the node's process needs when `device` trains."""
        rest = self.program + self.payloads + self.checkpoint + self.data + self.history + self.world
        begun = self.program + 2 * self.base  # whoever begins the run has them twice for a moment
        on_gpu = device.startswith("cuda")
        return max(begun, rest + (2 * min(COPIED_BYTES, self.state) if on_gpu else self.trainer))

    def of_trainer(self) -> str:
        """Spells out how `trainer` adds up, for a person."""
        parts = {
            "frozen weights": self.base,
            "agreed weights": self.state,
            "weights": self.state,
            "gradient": self.state,
            "residual": self.residual,
            "outer momentum": self.momentum,
            "inner state": self.optimizer,
            "activations": self.activations if self.activations >= self.codec else 0,
            "codec": self.codec if self.activations < self.codec else 0,
            "audits": self.audit + max(0, self.filter - max(self.activations, self.codec)),
        }
        return " + ".join(f"{what} {mega(size)}" for what, size in parts.items() if size)

    def formula(self, device: str) -> str:
        """Spells out how `main` adds up, for a person."""
        rest = {
            "a checkpoint being made": self.checkpoint,
            "contributions": self.payloads,
            "sequences": self.data,
            "history": self.history,
            "the program": self.program,
            "the world's run": self.world,
        }
        shown = [f"{what} {mega(size)}" for what, size in rest.items() if size >= SHOWN_BYTES]
        return " + ".join(shown if device.startswith("cuda") else [self.of_trainer(), *shown])

    @property
    def agreed(self) -> int:
        """The size of what all nodes agree on: weights, and an outer momentum."""
        return self.state + self.momentum

    def disk(self, checkpoints_kept: int, history_rounds: int, contributors: int) -> int:
        """Disk space of a run without its data, with a checkpoint that is being written and a state being fetched."""
        one = self.checkpoint + self.agreed  # the trainer's file, and the one that peers are served from
        return (checkpoints_kept + 1) * one + self.agreed + history_rounds * contributors * self.payload

    def disk_formula(self, checkpoints_kept: int, history_rounds: int, contributors: int) -> str:
        """Spells out how `disk` adds up, for a person."""
        return (
            f"{checkpoints_kept + 1} checkpoints of {mega(self.checkpoint + self.agreed)}, "
            f"a state of {mega(self.agreed)}, "
            f"{history_rounds} rounds of {contributors} contributions of {self.payload:,} bytes"
        )


@dataclass(frozen=True, slots=True)
class DiskDemand:
    """A run's demand on the disk, and the room that there is for it."""

    needed: int
    used: int  # what the run and its data have there already
    free: int
    limit: int  # limits.disk_bytes; 0: a share of what is free
    formula: str

    @property
    def room(self) -> int:
        return self.limit or self.used + int(DISK_SHARE * self.free)

    @property
    def takes(self) -> str:
        return f"{mega(self.needed)} of disk space ({self.formula})"

    @property
    def level(self) -> Literal["good", "warning", "failed"]:
        if self.needed > self.room:
            return "failed"
        return "warning" if max(0, self.needed - self.used) * ROOM_LEFT > self.free else "good"


@dataclass(frozen=True, slots=True)
class MemoryDemand:
    """A run's demand on one memory, and that memory's total and free size."""

    what: str  # main memory, or a device
    needed: int
    least: int  # with one sequence a pass
    free: int
    total: int
    formula: str
    is_shared: bool = False  # with all other programs, of which the system ends one when it runs out

    @property
    def takes(self) -> str:
        return f"{mega(self.needed)} of {self.what} ({self.formula})"

    @property
    def level(self) -> Literal["good", "warning", "failed"]:
        if (self.needed if self.is_shared else self.least) > self.total:
            return "failed"
        return "warning" if self.needed > self.free else "good"


def demands_of(run: RunConfig, config: NodeConfig, taken: int | None = None) -> list[MemoryDemand]:
    """Returns demand and size of main memory and, if the device has its own, of that. DeviceError without a device.

    taken: bytes that the node occupies already; by default this process's"""
    settings, is_private = config.device, config.privacy.is_on
    device, autocast = find_device(settings)
    sequences = 1 if is_private else settings.sequences_per_pass
    passes = PassSettings(
        autocast, settings.is_checkpointed, sequences, device.type, settings.is_half, is_private, is_usable(device),
        bool(settings.compile), run.is_audited and config.audit.share > 0,
    )  # fmt: skip
    of_ranks = need, least = need_of(run, passes), need_of(run, replace(passes, sequences_per_pass=1))
    kind = "cpu" if settings.is_apart else device.type  # where the node's own tensors lie
    if kind != device.type:
        need, least = (need_of(run, replace(passes, sequences_per_pass=each, device=kind)) for each in (sequences, 1))
    if taken is None:
        memory = psutil.Process().memory_info()
        taken = int(memory.rss - getattr(memory, "shared", 0))
    free, total = free_memory_bytes() + taken, memory_bytes()
    ranks = settings.processes if device.type == "cpu" else len(named_cards(settings)) if device.type == "cuda" else 1
    has_ranks = ranks > 1 or settings.is_apart or settings.nnodes > 1
    parts = ranks if settings.is_sharded else 1
    main, formula = [need.main(kind), least.main(kind)], need.formula(kind)
    if has_ranks:  # and the process that starts them; a round's tensors lie in memory that all of them see
        beside = (ranks + (ranks > 1)) * RANK_BYTES + need.state + (need.inner or need.state)
        more = [beside + ranks * (each.rank(parts) if device.type != "cuda" else 0) for each in of_ranks]
        main, formula = [a + b for a, b in zip(main, more, strict=True)], f"{formula} + {ranks} ranks {mega(more[0])}"
    demands = [MemoryDemand("main memory", main[0], main[1], free, total, formula, True)]
    if device.type == "cuda":
        try:
            free, total = torch.cuda.mem_get_info(device)
        except RuntimeError as error:  # other programs have taken all of it
            raise cannot_be_opened(device, error) from error
        ranked = [each.rank(parts) if has_ranks else 0 for each in of_ranks]
        own, fewest = ranked if settings.is_apart else (need.trainer + ranked[0], least.trainer + ranked[1])
        formula = "" if settings.is_apart else need.of_trainer() + " + " * has_ranks
        formula += f"a rank {mega(ranked[0])}" * has_ranks
        demands.append(MemoryDemand(str(device), own, fewest, free, total, formula))
    return demands


def fitting(run: RunConfig, config: NodeConfig) -> NodeConfig:
    """Returns the config with what its owner has left to the node chosen so that the run fits this machine: first what
    costs least. If nothing makes it fit, the config as it is. A card takes as many sequences at a time as fit."""
    device = config.device
    halved: dict[str, object] = {"half_state": True} if device.half_state == "auto" else {}
    checkpointed = {"checkpointing": True} if device.checkpointing == "auto" else {}
    alone, sharded = [halved | checkpointed], _shards_of(run, config)
    alone[:0] = {}, halved
    for chosen in alone + [each | sharded for each in alone if sharded]:
        tried = config.model_copy(update={"device": device.model_copy(update=chosen)})
        if _fits(run, tried):
            return tried if device.sequences_per_pass else _with_passes(tried, _passes_of_a_card(run, tried))
        sequences = 0 if device.sequences_per_pass else passes_that_fit(run, tried)
        if sequences:
            return _with_passes(tried, sequences)
    return config


def _shards_of(run: RunConfig, config: NodeConfig) -> dict[str, object]:
    """Returns the settings that shard a model over several cards, where the owner has left that open."""
    device, is_dealt = config.device, not (run.model.plugin or run.recipe.plugin or config.privacy.is_on)
    name = "cuda:all" if device.name == "auto" else device.name
    if device.shard != "auto" or not is_dealt or not torch.cuda.is_available():
        return {}
    with suppress(DeviceError):  # they are not alike
        if len(named_cards(device.model_copy(update={"name": name}))) > 1:
            return {"shard": True, "name": name}
    return {}


def _passes_of_a_card(run: RunConfig, config: NodeConfig) -> int:
    """Returns how many sequences a card takes at a time: those of a step, in as few equal passes as its free memory has
    room for; 0 (as many as the run says) without a card, or where that is not known cheaply or not what decides."""
    if find_device(config.device)[0].type != "cuda" or run.model.kind == "plugin" or config.privacy.is_on:
        return 0
    step, card = run.recipe.step_sequences, demands_of(run, config)[-1]
    fit = bisect_right(
        range(1, step + 1),
        CARD_SHARE * card.free,
        key=lambda sequences: demands_of(run, _with_passes(config, sequences))[-1].needed,
    )
    # All of one size: another would be compiled once more.
    return max((each for each in range(1, fit + 1) if step % each == 0), default=0)


def passes_that_fit(run: RunConfig, config: NodeConfig) -> int:
    """Returns the largest number of sequences per pass with which the run fits this machine; 0 if none does."""
    if not _fits(run, _with_passes(config, 1)):  # first: an estimate for a stranger's model takes up to half a second
        return 0
    more = range(2, run.recipe.sequences_per_pass + 1)
    return 1 + bisect_left(more, True, key=lambda each: not _fits(run, _with_passes(config, each)))


def _with_passes(config: NodeConfig, sequences: int) -> NodeConfig:
    return config.model_copy(update={"device": config.device.model_copy(update={"sequences_per_pass": sequences})})


def _fits(run: RunConfig, config: NodeConfig) -> bool:
    demands, limit = demands_of(run, config), config.limits.memory_bytes
    return all(each.level != "failed" for each in demands) and not (limit and demands[0].needed > limit)


def need_of(run: RunConfig, passes: PassSettings = PassSettings()) -> Need:
    """Computes a run's demand for memory and disk without allocating anything."""
    shapes = shapes_of(run.model, run.adapt)
    outer = Outer.of(run, shapes)
    area, chunks = run.recipe.chunk**2, sum(layout.chunks for layout in outer.layouts)
    at_once = max(layout.chunks for layout in outer.layouts)  # of a round's fragment
    parameters = outer.parameters
    state, residual = FLOAT_BYTES * parameters, passes.state_bytes * chunks * area
    momentum, pending = state * (run.recipe.state_copies - 1), state * (run.recipe.fragments > 1)
    spec, coefficients = run.recipe.spec, at_once * run.recipe.k_max
    each = WEIGHT_BYTES if run.recipe.is_dense and run.recipe.value_bits > 1 else COEFFICIENT_BYTES
    copies = copies_of(run.recipe)
    sequences = pass_sequences(run.recipe, passes.sequences_per_pass, passes.device)
    contributions = min(CONTRIBUTIONS_USUAL, run.admission.contributors_max)
    largest = contributions * run.recipe.vote_max
    takes_middle = run.recipe.rule in BY_COORDINATE  # then votes are int32, and no program of a card sums them
    vote_bytes = 2 if largest <= INT16_MAX and not takes_middle else 4 if largest <= INT32_MAX else 8
    counted = 0 if run.recipe.is_dense else min(COUNTED_AT_ONCE, contributions) * outer.contribution_bytes
    work = BLOCK_COPIES * 8 * area * min(at_once, block_chunks(torch.device(passes.device)))
    codec = max(each * coefficients, vote_bytes * at_once * area + work + counted)
    if passes.in_programs and not (run.recipe.is_dense or takes_middle) and run.recipe.chunk >= CHUNK_LEAST:
        votes = min(SLAB_BYTES, 4 * at_once * area)
        codec = max(MADE_BYTES * coefficients, votes + contributions * outer.payload_bytes)
    holes = 1.0 if passes.checkpointing or passes.device != "cpu" else _holes(run.model, sequences, passes.autocast)
    libraries = CUDA_LIBRARIES_BYTES if passes.device == "cuda" else 0
    open_contributions = KEPT_COPIES + run.agreement.staleness_rounds_max + run.agreement.overlap_rounds_max
    withdrawn = open_contributions * coefficients * WITHDRAWN_BYTES if passes.device == "cuda" else 0
    step = run.recipe.step_sequences
    rows = 2 if run.model.objective == "masked" else 1  # of a sequence: with masked tokens, inputs and targets
    inner, orthogonal = _inner_bytes(run, shapes, passes) if spec.kind == "local" else (0, 0)
    pass_bytes = int(holes * WITHIN_OPERATIONS * activations(run.model, sequences, passes))
    pass_bytes += _attention_mask_bytes(run, sequences, passes) + _adapter_bytes(run, shapes, sequences)
    pass_bytes += state if passes.is_private else 0
    saved = momentum + pending + inner + residual + open_contributions * coefficients * 2 * FLOAT_BYTES
    compared = max(FILTER_BYTES * coefficients, orthogonal)
    return Need(
        parameters=parameters,
        state=state,
        base=FLOAT_BYTES * parameter_count(without_adapters(run.model)) if run.adapt.is_on else 0,
        payload=outer.payload_bytes,
        residual=residual,
        momentum=momentum,
        optimizer=copies * state + inner + pending + libraries + withdrawn,
        inner=inner,
        gathered=_gathered_bytes(run, parameters),
        activations=pass_bytes,
        codec=max(codec, orthogonal),
        payloads=min(PAYLOADS_BYTES, run.admission.contributors_max * outer.payload_bytes)
        + min(UNPACKED_BYTES, run.admission.contributors_max * outer.contribution_bytes),
        program=PROCESS_BYTES + (CHECKPOINTING_BYTES if passes.checkpointing else 0),
        checkpoint=(1 + copies - spec.copies) * state + saved,
        data=rows * BATCH_COPIES * 8 * step * (run.model.sequence_length + 1)
        + POSITION_BYTES * step * run.recipe.local_steps,
        history=ENTRY_BYTES * contributions * run.agreement.history_rounds,
        world=PROCESS_BYTES + WORLD_COPIES * state if run.world.run else 0,
        audit=state + momentum + AUDITED_CONTRIBUTIONS * outer.contribution_bytes if passes.audits else 0,
        filter=_filter_bytes(FLOAT_BYTES * at_once * area, compared, pass_bytes, passes) if passes.audits else 0,
    )


def _gathered_bytes(run: RunConfig, trained: int) -> int:
    """Returns the memory of what ranks that hold parts have whole at a time: two layers, and what lies outside of all
    layers; with its gradient, and a copy of that on its way."""
    model = run.model.hf or run.model
    whole = parameter_count(without_adapters(run.model)) if run.adapt.is_on else trained
    outside = model.vocab_size * model.dim * (1 if run.model.hf is None or run.model.hf.is_tied else 2)
    return 3 * FLOAT_BYTES * (outside + 2 * max(0, whole - outside) // model.layers)


def _inner_bytes(run: RunConfig, shapes: Sequence[tuple[int, ...]], passes: PassSettings) -> tuple[int, int]:
    """Returns the memory of the inner optimizer's state, and of what it computes from that in a step."""
    sizes = [prod(shape) for shape in shapes]
    if run.recipe.inner == "adamw":
        return (FLOAT_BYTES + passes.state_bytes) * sum(sizes), 0
    if run.adapt.is_on:
        return passes.state_bytes * sum(sizes), _orthogonal_bytes(sizes, passes)
    # The first is the embedding; an output matrix of its own is the last that is a matrix.
    is_untied = run.model.hf is not None and not run.model.hf.is_tied  # of a plug-in's nothing is known
    hidden = [prod(shape) for shape in shapes[1:] if len(shape) == 2][: -1 if is_untied else None]
    inner = passes.state_bytes * sum(sizes) + FLOAT_BYTES * (sum(sizes) - sum(hidden))
    return inner, _orthogonal_bytes(hidden, passes)


def _filter_bytes(whole: int, compared: int, pass_bytes: int, passes: PassSettings) -> int:
    """Returns the peak of comparing contributions with a filter, whose length is taken in fp64. On a CPU small blocks
    do not fit into the holes that a pass has left."""
    beside = pass_bytes if passes.device == "cpu" and whole < HOLES_UP_TO_BYTES else 0
    return whole + max(2 * whole, compared) + beside


def _orthogonal_bytes(sizes: Sequence[int], passes: PassSettings) -> int:
    """Returns the memory that orthogonalising matrices of these sizes takes at a time."""
    at_once = max([min(batch_elements(passes.device), sum(sizes)), *sizes])
    return MUON_COPIES * (2 if passes.autocast else 4) * at_once


def _adapter_bytes(run: RunConfig, shapes: Sequence[tuple[int, ...]], sequences: int) -> int:
    """Returns the memory of the adapters' activations: the outputs of all first matrices, and the widest change."""
    if not run.adapt.is_on:
        return 0
    tokens, pairs = sequences * run.model.sequence_length, len(shapes) // 2
    return FLOAT_BYTES * tokens * (pairs * run.adapt.rank + 2 * max(shape[0] for shape in shapes[1::2]))


def _attention_mask_bytes(run: RunConfig, sequences: int, passes: PassSettings) -> int:
    """Returns the memory of attention masks that keep documents apart: one, in transformers one for each layer."""
    if run.data.documents == "together":
        return 0
    elements = sequences * run.model.sequence_length**2
    masks = 1 if run.model.hf is None or passes.checkpointing else run.model.hf.layers
    return elements * (FLOAT_BYTES * masks + 3)  # and three boolean ones while it is made


def _holes(model: ModelConfig, sequences: int, is_half: bool) -> float:
    """Returns the ratio of a pass's footprint on a CPU to its live tensors, due to holes in the heap."""
    if model.kind != "builtin":
        return HOLES_HALF if is_half else HOLES  # at most; their shapes were not measured
    tokens, most = sequences * model.sequence_length, HOLES_HALF if is_half else HOLES
    wide, rest = (2 * 8 * model.ffn_dim, 36 * model.dim) if not is_half else (8 * model.ffn_dim, 32 * model.dim)
    if FLOAT_BYTES * tokens * model.dim >= HOLES_UP_TO_BYTES:
        return 1.0
    is_all_small = (2 if is_half else 4) * tokens * model.ffn_dim < HOLES_UP_TO_BYTES
    return most if is_all_small else 1.0 + (most - 1.0) * rest / (rest + wide)


def activations(model: ModelConfig, sequences: int, passes: PassSettings) -> int:
    """Returns the peak of a forward and backward pass, without weights and their gradient. Fitted to the live tensors
    of a pass of the model on the meta device (tests/helpers/live_memory.py)."""
    if model.kind == "own":
        return 0  # the script's process computes them
    if model.kind == "plugin":
        return measured_activations(model, sequences)
    if model.hf is not None:
        return hf_activations(model.hf, sequences, model.sequence_length, passes)
    tokens, vocabulary = sequences * model.sequence_length, model.vocab_size
    dim, shared, ffn = model.dim, model.dim // model.heads * model.kv_heads, model.ffn_dim
    is_half, on_cuda = passes.autocast, passes.device == "cuda"
    rows = min(tokens, logits_rows(vocabulary, passes.device, passes.logits_bytes))
    # A layer keeps the inputs of its operations; in half precision also its cast weights.
    if on_cuda:  # there a norm is one operation, and fp32 attention repeats the shared heads for each query
        numbers = 24 * dim + 4 * shared + 8 * ffn if is_half else 32 * dim + 16 * ffn
    else:
        numbers = 32 * dim + 4 * shared + 8 * ffn if is_half else 36 * dim + 8 * shared + 16 * ffn
    layer = tokens * (numbers + 4 * model.heads + 8)
    if on_cuda and passes.is_compiled:
        layer = int(COMPILED_SHARE * layer)
    if is_half:
        layer += 2 * (2 * dim * dim + 2 * dim * shared + 3 * dim * ffn)
    kept = model.layers * (4 * tokens * dim if passes.checkpointing else layer)
    # Plus the loss, or the backward pass of the last layer.
    # In torch, logsumexp takes another block on a card.
    of_logits = passes.logits_bytes if passes.in_programs else 8 if on_cuda else 6 if is_half else 4
    of_matrix = 8 if passes.in_programs else 7
    loss = (12 if is_half else 16) * tokens * dim + of_matrix * vocabulary * dim + of_logits * rows * vocabulary
    last = tokens * (4 * dim + 8 * ffn if on_cuda and not is_half else 20 * dim + (2 if is_half else 4) * ffn)
    if passes.checkpointing:  # the layer is computed again
        last += layer - (14 if is_half else 8) * tokens * dim
    # At the end, three gradients of the embedding: from the loss, from the input, and their sum.
    return max(kept + max(loss, last), 12 * vocabulary * dim)


def hf_activations(hf: HfConfig, sequences: int, length: int, passes: PassSettings) -> int:
    """Returns a generous bound of `activations` for a model of transformers; architectures differ, so none is fitted.

    It counts 18 numbers of a token for each unit of width, 6 for each of the heads' width and 4 for each of the
    feed-forward layer, in fp32 whatever is computed in half precision; with dropout also the attention weights."""
    tokens, wide, shared = sequences * length, hf.heads * hf.head_dim, hf.kv_heads * hf.head_dim
    numbers = 18 * hf.dim + 6 * wide + 6 * shared + 4 * hf.ffn_dim
    if hf.dropout:
        numbers += 4 * hf.heads * length
    cast = 4 * hf.dim * (wide + shared) + 6 * hf.dim * hf.ffn_dim if passes.autocast else 0
    layer = FLOAT_BYTES * tokens * numbers + cast
    kept = FLOAT_BYTES * tokens * hf.dim * hf.layers + layer if passes.checkpointing else layer * hf.layers
    at_once = logits_rows(hf.vocab_size, passes.device, passes.logits_bytes)
    rows = min(tokens, at_once) if hf.architecture.is_head_plain else tokens
    return kept + 4 * FLOAT_BYTES * (hf.vocab_size * (rows + hf.dim) + tokens * hf.dim)


@lru_cache(maxsize=8)
def measured_activations(model: ModelConfig, sequences: int) -> int:
    """Returns a bound of `activations` for a plug-in's model: twice what the loss of tensors without data keeps."""
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.device("meta"):
        net = build(model)
        batch = torch.zeros(sequences, model.sequence_length + 1, dtype=torch.int64)
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.random.fork_rng(devices=[]):
            net.loss(batch)
    except FAILURES as error:  # it may look at its data
        what = "the memory of a pass of %s is not known beforehand: its loss takes no tensors without data (%s)"
        log.warning(what, model.plugin, " ".join(str(error).split())[:200])
    own = {parameter.untyped_storage()._cdata for parameter in net.parameters()}
    return 2 * sum(tensor.untyped_storage().nbytes() for name, tensor in kept.items() if name not in own)
