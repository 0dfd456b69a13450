"""What a round asks of a card: launches, copies and waits, counted at the sizes of real models.

Tensors are on torch's device `meta`, which takes no memory and computes nothing; every operation that is no view is a
launch, and copies either way are counted. Left out are the steps, the copies of the agreed weights before and after
them with two norms, and what an author gets back of a contribution that was cut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu import model_config
from p2ptrain.config import RecipeConfig
from p2ptrain.digest import PIECE_BYTES
from p2ptrain.exact import aggregate, root
from p2ptrain.exact.codec import Packed
from p2ptrain.exact.kernels import launches
from p2ptrain.exact.outer import Outer
from p2ptrain.exact.schedule import Terms
from p2ptrain.exact.transform import Layout
from p2ptrain.models.built_in import Transformer
from p2ptrain.train.residual import Residual

CARD = torch.device("meta")
CONTRIBUTIONS = 8
LAUNCHES_MAX, TO_HOST_MAX, SPARE_BYTES = 60, 3, 64 * 1024
VIEWS = {
    "view", "permute", "split", "split_with_sizes", "slice", "transpose", "expand", "unsqueeze", "as_strided", "detach",
    "t", "select", "_unsafe_view", "squeeze", "_reshape_alias", "empty", "empty_like", "alias", "diff", "lift_fresh",
}  # fmt: skip


class Counting(TorchDispatchMode):
    """Counts what is asked of the card."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.to_card = self.to_host = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        if name in ("_to_copy", "copy_"):
            source = args[1] if name == "copy_" else args[0]
            if source.device != CARD and made.device == CARD:  # no launch, but bytes on the bus
                self.to_card += source.numel() * source.itemsize
                return made
        here = [each for each in (*args, made) if isinstance(each, Tensor)]
        if name not in VIEWS and any(each.device == CARD for each in here):
            self.calls[name] += 1
        return made


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counting]:
    counts = Counting()

    def to_card(array: NDArray[Any], device: torch.device) -> Tensor:
        counts.to_card += array.nbytes
        return torch.empty(array.shape, dtype=torch.from_numpy(array).dtype, device=device)

    def to_host(tensor: Tensor) -> NDArray[Any]:
        counts.to_host += tensor.numel() * tensor.itemsize
        counts.calls["to host"] += 1
        return np.zeros(tuple(tensor.shape), torch.empty(0, dtype=tensor.dtype).numpy().dtype)

    def launch(name: str, grid: tuple[int, ...], *_: Any, **__: Any) -> None:
        counts.calls[name] += 1 if all(grid) else 0

    monkeypatch.setattr(launches, "is_usable", lambda device: device == CARD)
    monkeypatch.setattr(root, "is_usable", lambda device: device == CARD)
    monkeypatch.setattr(aggregate, "to_host", to_host)
    monkeypatch.setattr(Layout, "padding_masks", lambda layout, device: (torch.empty(0), torch.empty(0)))  # computed
    for name, made in (("to_card", to_card), ("to_host", to_host), ("launch", launch)):
        monkeypatch.setattr(launches, name, made)
    yield counts
    launches.tables.clear()


@pytest.mark.parametrize("contributions", [CONTRIBUTIONS, 100])
@pytest.mark.parametrize("name", ["distro", "local"])
def test_a_round_of_124m_stays_within_its_budget(counted: Counting, name: str, contributions: int) -> None:
    recipe = RecipeConfig(name=name)
    with torch.device(CARD):
        shapes = [tuple(each.shape) for each in Transformer(model_config("124m", vocab_size=50_304)).parameters()]
    outer = Outer(recipe, shapes)
    residual = Residual(outer.layouts, CARD)
    flat, agreed = (torch.empty(outer.parameters, device=CARD) for _ in range(2))
    (form,) = outer.forms[recipe.k_max]
    payloads = [Packed(bytes(form.payload_bytes), form)] * contributions
    launches.launches_of(outer.layouts[0], CARD)  # whose tables are made once
    outer.pack(residual.take(0, recipe), 0)
    counted.calls.clear()
    counted.to_card = counted.to_host = 0
    with counted:
        if name == "local":  # with a contribution whose fate is open
            residual.subtract_own_from(outer.parts(flat), 0.5)
            residual.subtract_from(outer.parts(flat), 0.25)
        residual.add(1, outer.parts(flat), 0.9)
        payload = outer.pack(residual.take(1, recipe), 0)
        aggregate.apply_payloads(outer.layouts[0], recipe, payloads, Terms(Fraction(1, 10)), outer.parts(agreed))
        root.state_leaves(agreed)
    launched = sum(counted.calls.values()) - counted.calls["to host"]
    assert launched <= LAUNCHES_MAX, counted.calls
    assert counted.calls["to host"] <= TO_HOST_MAX
    assert not {"_local_scalar_dense", "nonzero"} & set(counted.calls), "each would wait for the card"
    assert counted.to_host <= len(payload) + SPARE_BYTES + PIECE_BYTES  # the state's last piece, if it is a short one
    assert counted.to_card <= contributions * (len(payload) + 64) + SPARE_BYTES
