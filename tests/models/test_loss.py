"""The loss against torch's cross entropy."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from p2ptrain.models import loss as loss_module
from p2ptrain.models.loss import FusedLoss
from tests.helpers.exact_numbers import weights


@pytest.mark.parametrize("block_bytes", [4 * 50, 4 * 50 * 7, 2**25])
def test_the_fused_loss_and_its_gradients_are_those_of_cross_entropy(
    block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks of one token, of seven (which does not divide their number), and of all."""
    monkeypatch.setattr(loss_module, "LOGITS_BYTES", block_bytes)
    inputs, table = weights(1, (23, 16)).requires_grad_(), weights(2, (50, 16)).requires_grad_()
    targets = torch.arange(23) * 7 % 50
    found = FusedLoss.apply(inputs, table, targets, True)
    (found * 3.0).backward()
    reference = [each.detach().double().requires_grad_() for each in (inputs, table)]
    expected = functional.cross_entropy(reference[0] @ reference[1].T, targets)
    (expected * 3.0).backward()
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    for each, exact in zip((inputs, table), reference, strict=True):
        torch.testing.assert_close(each.grad.double(), exact.grad, rtol=1e-5, atol=1e-8)
    with torch.no_grad():
        assert float(FusedLoss.apply(inputs, table, targets, False)) == float(found.detach())


def test_the_fused_loss_in_bf16_is_that_of_cross_entropy_within_its_rounding() -> None:
    """Products are bf16, sums of exponentials are not."""
    inputs, table = weights(1, (64, 32)).requires_grad_(), weights(2, (50, 32)).requires_grad_()
    targets = torch.arange(64) * 7 % 50
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = FusedLoss.apply(inputs, table, targets, True)
    found.backward()
    exact = [each.detach().clone().requires_grad_() for each in (inputs, table)]
    expected = functional.cross_entropy(exact[0] @ exact[1].T, targets)
    expected.backward()
    assert found.dtype == torch.float32
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-3)
    assert float(found.detach()) != float(expected.detach()), "it was computed in bf16"
    for each, other in zip((inputs, table), exact, strict=True):
        assert float((each.grad - other.grad).norm() / other.grad.norm()) < 1e-2
