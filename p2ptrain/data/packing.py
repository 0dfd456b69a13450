"""Reads sequences of tokens: finds the tokens to be learned, and where documents begin.

A sequence is cut from a stream of documents and may hold several. The token that ends one document also begins the
next, as it does when the model is asked for a text. With `data.documents = "apart"`, attention stays within a document
and positions restart; with "together", a document sees those before it.

In a data set with a loss mask, such as chats, a token that is read but not learned is stored as its complement, which
is negative. So the mask needs no array of its own.

With `model.objective = "masked"` a sequence is two rows, its inputs and its targets (data/masking.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from p2ptrain.data.assignment import Positions
from p2ptrain.data.masking import Masking


class SequenceModel(Protocol):
    """A model that learns from sequences."""

    def loss(self, sequences: Tensor) -> Tensor:
        """Returns the mean loss of plain sequences."""

    def packed_loss(self, inputs: Tensor, targets: Tensor, positions: Tensor | None) -> Tensor:
        """Returns the mean loss of sequences that `Packing.split` has split."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How a data set's sequences are read."""

    is_masked: bool = False  # whether some tokens are complements
    document_end: int | None = None  # the token that ends a document, if documents are kept apart
    masking: Masking | None = None  # if tokens are hidden and filled in

    @property
    def is_plain(self) -> bool:
        """Whether each token is learned from all before it."""
        return not self.is_masked and self.document_end is None and self.masking is None

    def batch(self, sequences: npt.NDArray[np.int64], positions: Positions, round_number: int | None = None) -> Tensor:
        """Makes a batch of [sequences, length + 1] tokens; with masked tokens it is [sequences, 2, length].

        positions: the sequences' places in the data; round_number: None for held-out ones
        """
        drawn = sequences if self.masking is None else self.masking.draw(sequences, positions, round_number)
        return torch.from_numpy(drawn)

    def split(self, sequences: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns inputs, targets (negative where nothing is to be learned) and positions, each [batch, length].

        sequences: what `batch` has made, int64; positions: each input's place in its document, None if documents are
        not kept apart
        """
        if self.masking is not None:
            return sequences[:, 0], sequences[:, 1], None
        inputs, targets = sequences[:, :-1], sequences[:, 1:]
        if self.is_masked:
            inputs = torch.where(inputs < 0, ~inputs, inputs)
        if self.document_end is None:
            return inputs, targets, None
        places = torch.arange(inputs.shape[1], device=inputs.device)
        starts = torch.where(inputs == self.document_end, places, 0).cummax(dim=1).values
        return inputs, targets, places - starts

    def loss(self, model: SequenceModel, sequences: Tensor) -> Tensor:
        """Returns a model's mean loss of a batch."""
        return model.loss(sequences) if self.is_plain else model.packed_loss(*self.split(sequences))

    def learned(self, sequences: Tensor) -> int:
        """Counts the tokens of a batch that are targets."""
        targets = sequences[:, 1:]  # the second row, with masked tokens
        return int((targets >= 0).sum()) if self.is_masked or self.masking else targets.numel()

    def tokens(self, sequences: Tensor) -> int:
        """Counts the tokens of a batch that are read."""
        return len(sequences) * (sequences.shape[-1] - (self.masking is None))


PLAIN = Packing()


def within_documents(positions: Tensor, dtype: torch.dtype) -> Tensor:  # [batch, length] -> [batch, 1, length, length]
    """Returns an additive attention mask: 0 for an input itself and those before it in its document, else -inf.

    Additive rather than boolean: each layer would convert a boolean mask to floats and keep its own copy.
    """
    places = torch.arange(positions.shape[1], device=positions.device)
    starts = places - positions
    is_seen = (places <= places[:, None]) & (places >= starts[:, :, None])
    hidden = torch.full((), -torch.inf, dtype=dtype, device=positions.device)
    return torch.where(is_seen, hidden.new_zeros(()), hidden)[:, None]
