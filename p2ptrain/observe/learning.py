"""The figures that say whether a run learns: part of the status and of each round."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import BaseModel, Field, computed_field

from p2ptrain.observe.figures import Figure

LOSS_SHOWN_MAX = 100.0  # nats a token: the perplexity of a larger claim would not fit a float


class LearningFigures(BaseModel):
    """How well the agreed weights do, and how the last round moved them. Claims are signed, and not verified."""

    held_out_loss: Annotated[float | None, Figure("held-out loss", "nats a token")] = Field(
        None,
        description="of agreed weights, nats a token: the median of what three drawn members (all, if there are fewer) "
        "claim to have measured on the same held-out text; null: not measured, in a round: not since the previous one",
    )
    held_out_round: int | None = Field(
        None, ge=0, description="the round after which the weights had the held-out loss; null: it was not measured"
    )
    held_out_said: int = Field(
        0, ge=0, description="how many of the drawn members said it: of two, the lower loss counts"
    )
    swarm_loss: Annotated[float | None, Figure("training loss of the swarm", "nats a token")] = Field(
        None,
        description="median over the steps behind the round's contributions, nats a token, as their authors claim; "
        "null: unknown",
    )
    gradient_norm: Annotated[float | None, Figure("gradient norm", tracked="mine/gradient_norm")] = Field(
        None, description="mean over the steps of the last training here, before clipping; null: there was none"
    )
    drift: Annotated[float | None, Figure("drift")] = Field(
        None, description="how far the round moved the weights, over their norm; null: unknown"
    )
    compression_ratio: Annotated[float | None, Figure("compression")] = Field(
        None,
        description="bytes that the gradients of all steps have in fp32, over those of the contribution; in a round "
        "by the steps that the authors claim; null: unknown",
    )

    @computed_field(description="e to the held-out loss")  # type: ignore[prop-decorator]  # as its own documentation does it
    @property
    def perplexity(self) -> Annotated[float | None, Figure("perplexity")]:
        loss = self.held_out_loss
        return None if loss is None else round(math.exp(min(loss, LOSS_SHOWN_MAX)), 4)
