"""What a round asks of a card: launches, copies and waits, counted at the sizes of real models.

How it is counted: benchmarks/gpu/counted.py. Left out are the steps, the copies of the agreed weights before and after
them with two norms, and what an author gets back of a contribution that was cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch

from benchmarks.gpu import model_config
from benchmarks.gpu.counted import CARD, TO_HOST, WAITS, Counting, counting
from p2ptrain.config import RecipeConfig
from p2ptrain.digest import PIECE_BYTES
from p2ptrain.exact import aggregate, root
from p2ptrain.exact.codec import Packed
from p2ptrain.exact.kernels import launches
from p2ptrain.exact.outer import Outer
from p2ptrain.exact.schedule import Terms
from p2ptrain.models.built_in import Transformer
from p2ptrain.train.residual import Residual

CONTRIBUTIONS = 8
LAUNCHES_MAX, TO_HOST_MAX, SPARE_BYTES = 60, 3, 64 * 1024


@pytest.fixture
def counted() -> Iterator[Counting]:
    with counting() as counts:
        yield counts


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
    counted.clear()
    with counted:
        if name == "local":  # with a contribution whose fate is open
            residual.subtract_ahead_from(outer.parts(flat), 0.25, 0.5)
        residual.add(1, outer.parts(flat), 0.9)
        payload = outer.pack(residual.take(1, recipe), 0)
        aggregate.apply_payloads(outer.layouts[0], recipe, payloads, Terms(Fraction(1, 10)), outer.parts(agreed))
        root.state_leaves(agreed)
    assert counted.launches <= LAUNCHES_MAX, counted.calls
    assert counted.calls[TO_HOST] <= TO_HOST_MAX
    assert not set(WAITS) & set(counted.calls), "each would wait for the card"
    assert counted.to_host <= len(payload) + SPARE_BYTES + PIECE_BYTES  # the state's last piece, if it is a short one
    assert counted.to_card <= contributions * (len(payload) + 64) + SPARE_BYTES
