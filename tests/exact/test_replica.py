"""Where the agreed state lies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from p2ptrain.config import RecipeConfig, RunConfig
from p2ptrain.exact.replica import CPU, Replica

RUN = RunConfig(name="x", recipe=RecipeConfig(name="local"))


def test_a_state_that_the_device_has_no_room_for_lies_in_main_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros, full = torch.zeros, torch.device("meta")

    def refusing(*size: int, device: torch.device) -> Any:
        if device == full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return zeros(*size, device=device)

    monkeypatch.setattr(torch, "zeros", refusing)
    replica = Replica(RUN, [("weight", (64, 64))], full)
    assert replica.state.device == CPU
    assert replica.state.numel() == replica.outer.state_numbers
