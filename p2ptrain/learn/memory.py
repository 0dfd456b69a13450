"""How much memory and disk a run takes, before anything is allocated.

What grows with the model is counted tensor by tensor. What a training pass keeps for its backward half is a formula,
and what a process takes without a model was measured. Tests hold both to a tenth of what a CPU really took; on a GPU
nothing of it was compared yet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from p2ptrain.config import ModelConfig, RunConfig
from p2ptrain.learn.aggregate import INT16_MAX
from p2ptrain.learn.codec import PayloadFormat
from p2ptrain.learn.model import Transformer, logits_rows, parameter_count
from p2ptrain.learn.root import FLOAT_BYTES
from p2ptrain.learn.transform import Layout, block_chunks

PROCESS_BYTES = 400 * 10**6  # Python, torch and hivemind, without a model: 360 MB on Linux
CHECKPOINTING_BYTES = 90 * 10**6  # of main memory: torch's way of computing a layer again imports its compiler
CUDA_CONTEXT_BYTES = 600 * 10**6  # what CUDA and its libraries take of a device; a guess, by its kind 300 to 900 MB
PAYLOADS_BYTES = 256 * 2**20  # the most that is kept in memory of contributions (store/payloads.py)
KEPT_COPIES = 2  # contributions whose fate is open as a rule: that of this round, and that of the last
# Copies of the weights beside the live ones: agreed, this round's start, and AdamW's two moments.
OPTIMIZER_COPIES = {"distro": 0, "demo": 0, "local": 4}
OPTIMIZER_COPIES_UNKNOWN = 4  # a recipe of somebody else's: taken for one as hungry as any of ours
SAVED_MOMENTS = {"distro": 0, "demo": 0, "local": 2}
WITHIN_OPERATIONS = 1.03  # of a pass: what operations also allocate for themselves; measured on a CPU
COEFFICIENT_BYTES = 48  # of one that is being chosen, as several arrays of it exist at a time; measured
BLOCK_COPIES = 4  # of a block of votes in fp64, while it becomes an update
CONTRIBUTIONS_USUAL = 64  # up to so many, votes are counted in as many bytes as is assumed here


@dataclass(frozen=True, slots=True)
class Passes:
    """How a device trains, as far as memory goes."""

    autocast: bool = False
    checkpointing: bool = False
    sequences_max: int = 0
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Need:
    """Of one run, in bytes."""

    parameters: int  # a count
    state: int  # the weights; their gradient is as large
    payload: int  # of a contribution
    residual: int
    optimizer: int  # what the recipe keeps of its inner steps
    activations: int  # of a training pass, at its peak
    codec: int  # of making a contribution, or applying a round's, at its peak; not while a pass is computed
    program: int  # without a model
    payloads: int  # contributions that are kept in memory
    checkpoint: int  # on the disk, and for the moment in which it is copied also in main memory

    @property
    def trainer(self) -> int:
        """Where the device keeps what it trains with."""
        return 2 * self.state + self.residual + self.optimizer + max(self.activations, self.codec)

    def main(self, device: str) -> int:
        """Main memory of the node's process, when `device` trains."""
        rest = self.program + self.payloads + self.checkpoint
        return rest if device.startswith("cuda") else rest + self.trainer

    def on_device(self) -> int:
        """Memory of a CUDA device."""
        return CUDA_CONTEXT_BYTES + self.trainer

    def of_trainer(self) -> str:
        """How `trainer` came about, for a person."""
        parts = {
            "weights": self.state,
            "gradient": self.state,
            "residual": self.residual,
            "inner state": self.optimizer,
            "activations": self.activations if self.activations >= self.codec else 0,
            "codec": self.codec if self.activations < self.codec else 0,
        }
        return " + ".join(f"{what} {mega(size)}" for what, size in parts.items() if size)

    def formula(self, device: str) -> str:
        """How `main` came about, for a person."""
        rest = {
            "a checkpoint being made": self.checkpoint,
            "contributions": self.payloads,
            "the program": self.program,
        }
        shown = [f"{what} {mega(size)}" for what, size in rest.items()]
        return " + ".join(shown if device.startswith("cuda") else [self.of_trainer(), *shown])

    def disk(self, checkpoints_kept: int, history_rounds: int, contributors: int) -> int:
        """For what a node keeps of the run; one more checkpoint is there while it is written, and a state that comes
        in lies on the disk first."""
        return (checkpoints_kept + 1) * self.checkpoint + self.state + history_rounds * contributors * self.payload


def mega(size: int) -> str:
    """Bytes, as a person compares them."""
    return f"{size / 10**9:,.1f} GB" if size >= 10**10 else f"{size / 10**6:,.0f} MB"


def need_of(run: RunConfig, passes: Passes = Passes()) -> Need:
    """Whatever the size, nothing of it is made."""
    with torch.device("meta"):
        shapes = [tuple(parameter.shape) for parameter in Transformer(run.model).parameters()]
    layout = Layout(shapes, run.recipe.chunk)
    form = PayloadFormat.of(layout, run.recipe)
    parameters = parameter_count(run.model)
    state, residual = FLOAT_BYTES * parameters, FLOAT_BYTES * layout.chunks * layout.area
    name, coefficients = run.recipe.name, layout.chunks * run.recipe.k
    sequences = min(run.recipe.sequences_per_pass, passes.sequences_max or run.recipe.sequences_per_pass)
    contributions = min(CONTRIBUTIONS_USUAL, run.admission.contributors_max)
    vote_bytes = 2 if contributions * run.recipe.vote_max <= INT16_MAX else 4
    work = BLOCK_COPIES * 8 * layout.area * min(layout.chunks, block_chunks(torch.device(passes.device)))
    saved = SAVED_MOMENTS.get(name, 2) * state
    return Need(
        parameters=parameters,
        state=state,
        payload=form.payload_bytes,
        residual=residual,
        optimizer=OPTIMIZER_COPIES.get(name, OPTIMIZER_COPIES_UNKNOWN) * state,
        activations=int(WITHIN_OPERATIONS * activations(run.model, sequences, passes)),
        codec=max(
            COEFFICIENT_BYTES * coefficients + (state if saved else 0), vote_bytes * layout.chunks * layout.area + work
        ),
        payloads=min(PAYLOADS_BYTES, run.admission.contributors_max * form.payload_bytes),
        program=PROCESS_BYTES + (CHECKPOINTING_BYTES if passes.checkpointing else 0),
        checkpoint=state + residual + saved + KEPT_COPIES * coefficients * 2 * FLOAT_BYTES,  # an index and a value
    )


def activations(model: ModelConfig, sequences: int, passes: Passes) -> int:
    """The most that a forward and backward pass has beside weights and their gradient.

    Fitted to what is alive at a time in a pass of the model on tensors without numbers (tests/alive_known.py).
    """
    tokens, vocabulary = sequences * model.sequence_length, model.vocab_size
    dim, shared, ffn = model.dim, model.dim // model.heads * model.kv_heads, model.ffn_dim
    is_half = passes.autocast
    rows = min(tokens, logits_rows(vocabulary, passes.device))
    # A layer keeps what its operations read; in half precision also its weights as they were cast.
    numbers = 32 * dim + 4 * shared + 8 * ffn if is_half else 36 * dim + 8 * shared + 16 * ffn
    layer = tokens * (numbers + 4 * model.heads + 8)
    if is_half:
        layer += 2 * (2 * dim * dim + 2 * dim * shared + 3 * dim * ffn)
    kept = model.layers * (4 * tokens * dim if passes.checkpointing else layer)
    # On top of that, the loss, or the backward pass of the last layer.
    loss = (12 if is_half else 16) * tokens * dim + 7 * vocabulary * dim + (6 if is_half else 4) * rows * vocabulary
    last = tokens * (20 * dim + (2 if is_half else 4) * ffn)
    if passes.checkpointing:  # which is computed again
        last += layer - (14 if is_half else 8) * tokens * dim
    # In the end three gradients of the embedding: of the loss, of the input, and their sum.
    return max(kept + max(loss, last), 12 * vocabulary * dim)
