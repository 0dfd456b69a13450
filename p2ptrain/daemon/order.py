"""Order: what a person or a script asks of a node. The command line, the library and tests hand one in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # so that a wrong option is answered before torch is imported
    from p2ptrain.config import NodeConfig, RunConfig
    from p2ptrain.train.begin import GivenWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """An order to take part in a run."""

    config: NodeConfig
    data: Path | None = None  # this node's own; or the run's, if it is begun here


@dataclass(frozen=True, kw_only=True, slots=True)
class StartOrder(Order):
    """To begin a run, or to go on with the one begun here."""

    run: RunConfig
    said: Mapping[str, object]  # what the run's file says, without defaults
    given: GivenWeights | None = None  # the first weights, if they are not made from the seed


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinOrder(Order):
    """To join a run that others train."""

    wanted: str | None = None  # the run: all of its id, or how it begins
    invitation: str | None = None  # its text, or a file that has it
    trust: str | None = None  # a head that the run's history must contain
    asks: bool = False  # before anything is fetched, ask the person at the terminal, if there is one
