"""A node's saved state: its tensors in a file, and what of such a file is refused."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from p2ptrain.config import RunConfig
from p2ptrain.digest import digest
from p2ptrain.errors import DataError
from p2ptrain.exact.outer import Outer
from p2ptrain.exact.replica import MOMENTUM_NAME, WEIGHTS_PREFIX
from p2ptrain.exact.root import octets
from p2ptrain.train.residual import KEPT_ROUNDS_MAX, Withdrawal

STATE_FORMAT = "p2ptrain trainer 1"
STATE_TYPES = torch.float32, torch.bfloat16
FINITE_BLOCK = 2**20  # numbers that are checked at a time


@dataclass(frozen=True)
class Capture:
    """A copy of a node's state after one round, to be written while training goes on."""

    round: int
    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    agreed: Tensor  # flat; weights and momentum in `tensors` are views into it
    trained: int = 0  # the number of the last training in it, by the diary

    @property
    def state(self) -> memoryview:
        """Returns the agreed state, in the form from which the state root is computed."""
        return octets(self.agreed)

    def write(self, path: Path) -> None:
        """Writes a new file; the caller syncs it and renames it into place."""
        try:
            save_file(self.tensors, path, self.metadata)
        except SafetensorError as error:
            raise DataError(f"{path}: cannot be written ({error})") from error


def run_digest(run: RunConfig) -> str:
    """Digest of the run's settings, which identifies the run even before its config is sealed."""
    return digest("saved state's run", run.canonical()).hex()


def as_of_another_run(path: Path, run: RunConfig, number: int) -> Capture:
    """Reads a run's saved state as that of another with its model, after its round `number`, without what is open."""
    try:
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if not name.startswith("kept.")]  # noqa: SIM118
            tensors, metadata = {name: file.get_tensor(name) for name in names}, dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path}: not a saved state ({error})") from error
    metadata |= {"round": str(number), "run": run_digest(run)}
    return Capture(number, tensors, metadata, torch.empty(0))


def read_kept(path: Path, tensors: dict[str, Tensor], outer: Outer) -> dict[int, Withdrawal]:
    """Returns the contributions whose fate is open; DataError if something else is among these tensors."""
    kept = {}
    for name in list(tensors):
        match = re.fullmatch(r"kept\.(\d{1,15})\.removed", name)
        indices_name = name.removesuffix("removed") + "indices"
        if match is None or (indices_name in tensors) == outer.recipe.is_dense:
            continue
        fragment, columns = outer.fragment_of(int(match[1])), tensors[name].shape[-1] if tensors[name].ndim else 0
        form = outer.forms.get(columns, outer.forms[outer.recipe.k_max])[fragment]
        shape = (form.chunks, form.k)
        what, removed, indices = f"{path}: kept.{match[1]}", tensors.pop(name), tensors.pop(indices_name, None)
        is_like_it = removed.shape == shape and removed.dtype == torch.float32
        if not is_like_it or (indices is not None and (indices.shape, indices.dtype) != (shape, torch.int32)):
            raise DataError(f"{what} is not of shape {shape}")
        if not is_finite(removed):
            raise DataError(f"{what} is not finite")
        every = torch.arange(form.k, dtype=torch.int16).expand(shape)
        if indices is not None and not (
            bool((indices.diff(dim=1) > 0).all()) and 0 <= int(indices.min()) <= int(indices.max()) < form.area
        ):
            raise DataError(f"{what} names a coefficient that does not exist")
        kept[int(match[1])] = Withdrawal(every if indices is None else indices.to(torch.int16), removed)
    if len(kept) > KEPT_ROUNDS_MAX:
        raise DataError(f"{path}: keeps {len(kept)} rounds; the limit is {KEPT_ROUNDS_MAX}")
    if tensors:
        raise DataError(f"{path}: does not belong to this run: {min(tensors)}")
    return kept


def is_agreed(name: str) -> bool:
    """Whether a tensor of a saved state is part of the agreed state."""
    return name.startswith(WEIGHTS_PREFIX) or name == MOMENTUM_NAME


def is_finite(tensor: Tensor) -> bool:
    """Checks in blocks, because torch would make several copies of a tensor as large as the model."""
    return all(bool(torch.isfinite(part).all()) for part in torch.split(tensor.reshape(-1), FINITE_BLOCK))


def in_memory(tensor: Tensor) -> Tensor:
    """Returns a contiguous copy in main memory."""
    return tensor.detach().to("cpu", copy=True).contiguous()
