"""A classifier of handwritten digits as a plug-in of p2ptrain: an image is a text, and its last letter the label.

`python -m p2ptrain_digits > digits.jsonl` writes scikit-learn's 1,797 images of 8 x 8 pixels, one a line. A pixel is a
letter, from A (blank) to Q (black). As bytes, with the end of a document, an image is 66 tokens; so with
`sequence_length = 66` every sequence begins with the first pixel of an image. (It has a token more, the next image's.)
"""

import json
import sys

from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from p2ptrain.config import ModelConfig, Section
from p2ptrain.models.built_in import Model

PIXELS, SHADES, BLANK, ZERO = 64, 16, ord("A"), ord("0")


class Digits(Model):
    """Two layers; what a run may choose is how many units lie between them."""

    class Settings(Section):
        """The keys of `[model] settings`, with their bounds: a run comes from strangers."""

        width: int = Field(64, ge=8, le=4_096)

    def __init__(self, config: ModelConfig, settings: Settings) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(PIXELS, settings.width), nn.ReLU(), nn.Linear(settings.width, 10))

    def forward(self, sequences: Tensor) -> Tensor:  # [batch, length] int64 -> [batch, 10]
        scores: Tensor = self.layers((sequences[:, :PIXELS] - BLANK) / SHADES)
        return scores

    def loss(self, sequences: Tensor) -> Tensor:  # [batch, length + 1] int64 -> scalar
        return functional.cross_entropy(self(sequences), sequences[:, PIXELS] - ZERO)


if __name__ == "__main__":
    from sklearn.datasets import load_digits

    found = load_digits()
    for image, label in zip(found.data.astype(int).tolist(), found.target.tolist(), strict=True):
        text = "".join(chr(BLANK + shade) for shade in image) + str(label)
        sys.stdout.write(json.dumps({"text": text}) + "\n")
