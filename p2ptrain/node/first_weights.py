"""Opens the first weights that `p2ptrain start` is given: files of a model, or a checkpoint of a run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from p2ptrain.models.given_weights import config_beside, read_checkpoint, read_weights
from p2ptrain.node.home import Home
from p2ptrain.node.saved import weights_in
from p2ptrain.store.checkpoints import STAMP_NAME
from p2ptrain.train.begin import GivenWeights


def open_weights(home: Home, place: Path) -> tuple[GivenWeights, Callable[[], str]]:
    """Returns the weights, and how to get the config.json that they come with. Both are read later."""
    if not (place / STAMP_NAME).exists():
        return GivenWeights(place, partial(read_weights, place)), partial(config_beside, place)
    weights = weights_in(home, place)
    return GivenWeights(place, partial(read_checkpoint, weights)), lambda: weights.run.model.config
