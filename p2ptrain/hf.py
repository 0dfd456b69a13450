"""transformers' Trainer in a swarm: `Trainer(..., callbacks=[SwarmCallback(ADDRESS)])`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from p2ptrain.errors import ConfigError
from p2ptrain.swarm import Swarm, join, start

if TYPE_CHECKING:
    import torch


class SwarmCallback(TrainerCallback):  # type: ignore[misc]
    """Takes part in a run while a Trainer trains: it joins at this address, or starts a run without one.

    The Trainer keeps its data, optimizer and schedule. At the end of each round its model gets the agreed weights; what
    it saves are its own, and those that were agreed on are saved by `callback.swarm.save_pretrained(DIR)` during the
    training. options: those of `p2ptrain.start` or `p2ptrain.join`"""

    def __init__(self, address: str = "", **options: Any) -> None:
        self.address, self.options = address, options
        self.swarm: Swarm | None = None
        self._losses: list[torch.Tensor] = []
        self._hook: Any = None
        self._is_share = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        """Joins, or starts a run: the model has the agreed weights before the first step."""
        self.leave()  # of a training that was interrupted
        model = found["model"]
        self.swarm = join(self.address, model, **self.options) if self.address else start(model, **self.options)
        self._hook = model.register_forward_hook(self._note_loss, with_kwargs=True)

    def _note_loss(self, model: torch.nn.Module, inputs: Any, options: dict[str, Any], output: Any) -> None:
        loss = output.get("loss") if hasattr(output, "get") else None
        if loss is not None and model.training:
            self._is_share = "num_items_in_batch" in options
            self._losses.append(loss.detach())

    def on_step_end(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        """Counts a step of the optimizer. The losses of its passes are shares of it, or each is a mean of its own."""
        assert self.swarm is not None
        losses, self._losses = self._losses, []
        if not losses:
            what = "the model returns no loss: the Trainer computes it elsewhere, and the others could not be told"
            raise ConfigError(what, key="model", fix="Leave out label_smoothing_factor and compute_loss_func")
        self.swarm.step(sum(map(float, losses)) / (1 if self._is_share else len(losses)))

    def on_train_end(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        """Gives the model the weights that were agreed on, and leaves."""
        if self.swarm is not None:
            self.swarm.load_agreed()
        self.leave()

    def leave(self) -> None:
        """Leaves the run, also after a training that was interrupted. The next one joins again."""
        if self.swarm is not None:
            self._hook.remove()
            self.swarm.leave()
            self.swarm = None
