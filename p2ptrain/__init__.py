"""p2ptrain: train one model together over the internet, without a coordinator.

    with p2ptrain.join("/ip4/...", model, optimizer) as swarm:
        for batch in swarm.batches(rounds=100):
            loss = model(batch[:, :-1], batch[:, 1:])
            loss.backward()
            swarm.step(loss)

`start` begins a run, `join` takes part in one; both return a `Swarm`. `P2ptrainError` is the base of all errors."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from p2ptrain.errors import (
        ConfigError,
        DataError,
        DeviceError,
        MemoryShortError,
        NodeEndedError,
        P2ptrainError,
        TrainingError,
    )
    from p2ptrain.loop.simulated import simulate
    from p2ptrain.swarm import Swarm, join, start

__version__ = "0.1.0"
__all__ = [
    "ConfigError",
    "DataError",
    "DeviceError",
    "MemoryShortError",
    "NodeEndedError",
    "P2ptrainError",
    "Swarm",
    "TrainingError",
    "__version__",
    "join",
    "simulate",
    "start",
]
_PLACES = {"simulate": "p2ptrain.loop.simulated", "Swarm": "p2ptrain.swarm", "join": "p2ptrain.swarm"}
_PLACES["start"] = "p2ptrain.swarm"


def __getattr__(name: str) -> Any:
    """Imports what is used, when it is: the library costs a command nothing."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES.get(name, "p2ptrain.errors")), name)


def __dir__() -> list[str]:
    return __all__
