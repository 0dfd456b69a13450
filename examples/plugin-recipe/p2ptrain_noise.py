"""`local` with noise on its gradients, as a plug-in of p2ptrain.

Noise that fades (Neelakantan et al. 2015, arXiv 1511.06807) can help to train what is deep or badly begun. Its standard
deviation is a share of the gradient's root mean square, and falls with (1 + round) to the power -0.275.
"""

from collections.abc import Sequence
from fractions import Fraction

import torch
from pydantic import Field
from torch import Tensor

from p2ptrain.config import Rational, RecipeConfig, Section
from p2ptrain.exact.transform import Layout
from p2ptrain.train.live import LiveModel, StepResult
from p2ptrain.train.recipes import LocalRecipe


class Noisy(LocalRecipe):
    """Differs from `local` in what a step does; residual, contribution and inner optimizer are the same."""

    copies = 1  # of the weights, that this needs in memory more than `local`: the noise

    class Settings(Section):
        """The keys of `[recipe] settings`."""

        noise: Rational = Field(Fraction(1, 10), ge=0, le=10)

    def __init__(self, config: RecipeConfig, live: LiveModel, layouts: Sequence[Layout], settings: Settings) -> None:
        super().__init__(config, live, layouts)
        self.noise, self.share = float(settings.noise), 0.0

    def begin(self, round_number: int) -> None:
        super().begin(round_number)
        self.share = self.noise * (1 + round_number) ** -0.275

    def local_step(self, step: int, batch: Tensor, positions: Sequence[int]) -> StepResult:
        result = self.live.gradient_step(step, batch, positions, self.config)
        gradient = self.live.gradient
        mean_square = torch.linalg.vector_norm(gradient) / gradient.numel() ** 0.5
        gradient.add_(torch.randn_like(gradient) * (self.share * mean_square))  # from the seed of this step
        self.inner.step(self.rate)
        return result
