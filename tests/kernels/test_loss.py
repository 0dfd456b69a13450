"""The loss's program, in Triton's interpreter: what torch computes, within its rounding."""

from __future__ import annotations

import math
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from p2ptrain.models import loss as loss_module
from p2ptrain.models.loss import FusedLoss
from tests.helpers.exact_numbers import weights

pytest.importorskip("triton", reason="make test-kernels brings Triton")
pytestmark = pytest.mark.kernels
TOKENS, DIM = 23, 16


def found(
    vocabulary: int, monkeypatch: pytest.MonkeyPatch, *, in_program: bool, frozen: bool = False, half: bool = False
) -> list[Tensor]:
    """Returns the loss and its gradients."""
    monkeypatch.setattr(loss_module, "is_usable", lambda device: in_program)
    inputs, table = weights(1, (TOKENS, DIM)).requires_grad_(), weights(2, (vocabulary, DIM)).requires_grad_(not frozen)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
        loss = FusedLoss.apply(inputs, table, torch.arange(TOKENS) * 7 % vocabulary, True)
    (loss * 3.0).backward()
    return [loss.detach(), inputs.grad, *([] if frozen else [table.grad])]


@pytest.mark.parametrize("rows", [7, TOKENS])  # of a block
@pytest.mark.parametrize("lanes", [16, 4_096])
@pytest.mark.parametrize("vocabulary", [2, 31, 64])
@pytest.mark.parametrize(("half", "tolerance"), [(False, 1e-5), (True, 1e-2)])
def test_the_program_computes_what_torch_does(
    vocabulary: int, lanes: int, rows: int, half: bool, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_module, "LANES", lanes)
    monkeypatch.setattr(loss_module, "LOGITS_BYTES", rows * vocabulary * (2 if half else 4))
    started = Mock(wraps=loss_module.program())
    started.__getitem__ = Mock(wraps=loss_module.program().__getitem__)
    monkeypatch.setattr(loss_module, "program", lambda: started)
    expected = found(vocabulary, monkeypatch, in_program=False, half=half)
    assert not started.__getitem__.called
    ours = found(vocabulary, monkeypatch, in_program=True, half=half)
    assert started.__getitem__.call_count == -(-TOKENS // rows)
    for each, other in zip(ours, expected, strict=True):
        assert each.dtype == other.dtype
        assert float((each - other).norm() / other.norm()) < tolerance


def test_a_frozen_matrix_has_no_gradient_and_a_look_at_the_loss_none_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = found(31, monkeypatch, in_program=True)
    for each, other in zip(found(31, monkeypatch, in_program=True, frozen=True), whole, strict=False):
        assert torch.equal(each, other)
    with torch.no_grad():
        loss = FusedLoss.apply(weights(1, (TOKENS, DIM)), weights(2, (31, DIM)), torch.arange(TOKENS) * 7 % 31, False)
        nothing = FusedLoss.apply(torch.empty(0, DIM), weights(2, (31, DIM)), torch.arange(0), False)
    assert (float(loss), float(nothing)) == (float(whole[0]), 0.0)


def losses(logits: Tensor, targets: Tensor) -> Tensor:  # [rows, vocabulary], [rows] -> [rows]
    found = torch.empty(len(logits))
    with np.errstate(all="ignore"):  # the interpreter computes with NumPy
        loss_module.program()[len(logits),](logits, targets, found, logits.shape[1], 1.0, GRADIENT=False, BLOCK=16)
    return found


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 4, 16, 30])
def test_a_logit_that_is_not_finite_gives_a_loss_that_is_not(poison: float, place: int) -> None:
    logits = torch.zeros(3, 31)
    logits[1, place] = poison
    assert losses(logits, torch.tensor([3, 4, 5])).isfinite().tolist() == [True, False, True]


def test_a_token_that_cannot_be_is_impossible_and_a_row_of_them_an_error() -> None:
    logits = torch.zeros(3, 31)
    logits[0, 4] = logits[1] = -float("inf")
    found = losses(logits, torch.tensor([4, 4, 4]))
    assert found.isfinite().tolist() == [False, False, True]
    assert float(losses(logits, torch.tensor([3, 3, 3]))[0]) == pytest.approx(math.log(30))


def test_a_target_that_is_no_token_gives_a_loss_that_is_not_finite() -> None:
    assert losses(torch.zeros(3, 31), torch.tensor([-1, 31, 2**40])).isnan().all()
