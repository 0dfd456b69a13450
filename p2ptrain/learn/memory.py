"""How much memory and disk a run takes, before anything is allocated.

What grows with the model is counted, tensor by tensor; activations are estimated from the shapes that a pass keeps for
its backward half; what the process takes without a model was measured. The estimate is for telling "fits easily" from
"does not fit": within a tenth of the limit, only trying tells.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from p2ptrain.config import ModelConfig, RunConfig
from p2ptrain.learn.codec import PayloadFormat
from p2ptrain.learn.model import Transformer, parameter_count
from p2ptrain.learn.root import FLOAT_BYTES
from p2ptrain.learn.transform import Layout

PROCESS_BYTES = 400 * 10**6  # Python, torch and hivemind, without a model: 360 MB on Linux
CUDA_CONTEXT_BYTES = 600 * 10**6  # what CUDA and its libraries take of a device; a guess, by its kind 300 to 900 MB
PAYLOADS_BYTES = 256 * 2**20  # of contributions that are kept in memory (store/payloads.py)
KEPT_COPIES = 2  # contributions whose fate is open as a rule: that of this round, and that of the last
# Copies of the weights beside the live ones: agreed, this round's start, and AdamW's two moments.
OPTIMIZER_COPIES = {"distro": 0, "demo": 0, "local": 4}
OPTIMIZER_COPIES_UNKNOWN = 4  # a recipe of somebody else's: taken for one as hungry as any of ours
SAVED_MOMENTS = {"distro": 0, "demo": 0, "local": 2}


@dataclass(frozen=True, slots=True)
class Need:
    """Of one run, in bytes."""

    parameters: int  # a count
    state: int  # the weights
    payload: int  # of a contribution
    residual: int
    optimizer: int
    activations: int  # an estimate
    checkpoint: int  # on the disk, and for the moment in which it is copied also in main memory

    @property
    def trainer(self) -> int:
        """Where the device keeps what it trains with."""
        return 2 * self.state + self.residual + self.optimizer + self.activations

    def main(self, device: str) -> int:
        """Main memory of the node's process, when `device` trains."""
        rest = PROCESS_BYTES + PAYLOADS_BYTES + self.checkpoint
        return rest if device.startswith("cuda") else rest + self.trainer

    def on_device(self) -> int:
        """Memory of a CUDA device."""
        return CUDA_CONTEXT_BYTES + self.trainer

    def formula(self, device: str) -> str:
        """How `main` came about, for a person."""
        parts = {
            "weights": self.state,
            "gradient": self.state,
            "residual": self.residual,
            "optimizer": self.optimizer,
            "activations": self.activations,
        }
        rest = {
            "a checkpoint being made": self.checkpoint,
            "contributions": PAYLOADS_BYTES,
            "the program": PROCESS_BYTES,
        }
        shown = rest if device.startswith("cuda") else parts | rest
        return " + ".join(f"{what} {mega(size)}" for what, size in shown.items() if size)

    def disk(self, checkpoints_kept: int, history_rounds: int, contributors: int) -> int:
        """For what a node keeps of the run; one more checkpoint is there while it is written, and a state that comes
        in lies on the disk first."""
        return (checkpoints_kept + 1) * self.checkpoint + self.state + history_rounds * contributors * self.payload


def mega(size: int) -> str:
    """Bytes, as a person compares them."""
    return f"{size / 10**9:,.1f} GB" if size >= 10**10 else f"{size / 10**6:,.0f} MB"


def need_of(run: RunConfig) -> Need:
    """Whatever the size, nothing of it is made."""
    with torch.device("meta"):
        shapes = [tuple(parameter.shape) for parameter in Transformer(run.model).parameters()]
    layout = Layout(shapes, run.recipe.chunk)
    form = PayloadFormat.of(layout, run.recipe)
    parameters = parameter_count(run.model)
    state, residual = FLOAT_BYTES * parameters, FLOAT_BYTES * layout.chunks * layout.area
    name = run.recipe.name
    kept = KEPT_COPIES * layout.chunks * run.recipe.k * 2 * FLOAT_BYTES  # an index and a value
    return Need(
        parameters=parameters,
        state=state,
        payload=form.payload_bytes,
        residual=residual,
        optimizer=OPTIMIZER_COPIES.get(name, OPTIMIZER_COPIES_UNKNOWN) * state,
        activations=_activations(run.model, run.recipe.sequences_per_pass),
        checkpoint=state + residual + SAVED_MOMENTS.get(name, 2) * state + kept,
    )


def _activations(model: ModelConfig, sequences: int) -> int:
    """fp32 numbers that one pass keeps for its way back: each block's normed inputs, projections and products, the
    attention's weights, and three times the logits."""
    tokens = sequences * model.sequence_length
    projections = model.dim + 2 * model.kv_heads * (model.dim // model.heads)
    block = 6 * model.dim + 2 * projections + 4 * model.ffn_dim + model.heads * model.sequence_length
    return FLOAT_BYTES * tokens * (model.layers * block + 3 * model.vocab_size + 2 * model.dim)
