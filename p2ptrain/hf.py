"""transformers' Trainer in a swarm: `Trainer(..., callbacks=[SwarmCallback(ADDRESS)])`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from p2ptrain.swarm import Swarm, join, start

if TYPE_CHECKING:
    import torch


class SwarmCallback(TrainerCallback):  # type: ignore[misc]
    """Takes part in a run while a Trainer trains: it joins at this address, or starts a run without one.

    The Trainer keeps its data, optimizer and schedule. At the end of each round its model gets the agreed weights; what
    it saves are its own, and those that were agreed on are saved by `callback.swarm.save_pretrained(DIR)` during the
    training. options: those of `p2ptrain.start` or `p2ptrain.join`
    """

    def __init__(self, address: str = "", **options: Any) -> None:
        self.address, self.options = address, options
        self.swarm: Swarm | None = None
        self._losses: list[torch.Tensor] = []
        self._hook: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        """Joins, or starts a run: the model has the agreed weights before the first step."""
        model = found["model"]
        self.swarm = join(self.address, model, **self.options) if self.address else start(model, **self.options)
        self._hook = model.register_forward_hook(self._note_loss)

    def _note_loss(self, model: torch.nn.Module, inputs: Any, output: Any) -> None:
        loss = output.get("loss") if hasattr(output, "get") else None
        if loss is not None and model.training:
            self._losses.append(loss.detach())

    def on_step_end(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        """Counts a step of the optimizer, whose loss is the mean of its passes."""
        assert self.swarm is not None
        losses, self._losses = self._losses, []
        self.swarm.step(sum(map(float, losses)) / max(1, len(losses)))

    def on_train_end(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        """Gives the model the weights that were agreed on, and leaves."""
        if self.swarm is not None:
            self._hook.remove()
            self.swarm.load_agreed()
            self.swarm.leave()
