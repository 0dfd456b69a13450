"""Reads sequences of tokens: finds the tokens to be learned, and where documents begin.

A sequence is cut from a stream of documents and may hold several. The token that ends one document also begins the
next, as it does when the model is asked for a text. With `data.documents = "apart"`, attention stays within a document
and positions restart; with "together", a document sees those before it.

In a data set with a loss mask, such as chats, a token that is read but not learned is stored as its complement, which
is negative. So the mask needs no array of its own.

With `model.objective = "masked"` a sequence is two rows, its inputs and its targets. The rule is BERT's (Devlin et al.
2018, arXiv 1810.04805): of a sequence's tokens 15 % are learned, and of these 80 % are read as the mask, 10 % as any
token and 10 % as they are. A token that ends a document is never learned. The draws come from BLAKE3 and are compared
as integers, so that they are the same on every machine. They depend on the run's seed, the round and the sequence's
place in the data, and on nothing else: who repeats a round learns the same. In held-out data they depend on the place
alone, so that losses of different rounds and runs compare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from p2ptrain.data.assignment import Positions
from p2ptrain.digest import digest

WORD_BYTES = 4
# A token is drawn by a word of 32 bits: below the last of these it is learned, below the first read as the mask, and
# below the second as any token.
READ_AS_MASK, READ_AS_ANY, LEARNED = (2**32 * share // 1_000 for share in (120, 135, 150))


@dataclass(frozen=True, slots=True)
class Masking:
    seed: int
    mask: int  # the token that is read in place of a hidden one
    vocab_size: int  # of the tokenizer
    document_end: int

    def draw(
        self, sequences: npt.NDArray[np.int64], positions: Positions, round_number: int | None
    ) -> npt.NDArray[np.int64]:
        """Returns inputs and targets [sequences, 2, length] of sequences [sequences, length + 1].

        Targets are -1 where nothing is learned. A complement is read, and not learned. round_number: None: held out"""
        kept, length = sequences[:, :-1], sequences.shape[1] - 1
        found = [self._words(int(position), round_number, length) for position in positions]
        words = np.array(found, np.uint32).reshape(-1, 2, length)  # privacy may draw none
        drawn, others = words[:, 0], words[:, 1]
        tokens = np.where(kept < 0, ~kept, kept)
        is_learned = (drawn < LEARNED) & (kept >= 0) & (kept != self.document_end)
        other = np.where(drawn < READ_AS_ANY, others % self.vocab_size, tokens)
        read = np.where(drawn < READ_AS_MASK, self.mask, other)
        return np.stack((np.where(is_learned, read, tokens), np.where(is_learned, tokens, -1)), axis=1)

    def _words(self, position: int, round_number: int | None, length: int) -> npt.NDArray[np.uint32]:  # [2, length]
        domain, numbers = "held-out masks", [position]
        if round_number is not None:
            domain, numbers = "masks", [self.seed, round_number, position]
        parts = (number.to_bytes(8, "little") for number in numbers)
        return np.frombuffer(digest(domain, *parts, size=2 * WORD_BYTES * length), "<u4").reshape(2, length)


class SequenceModel(Protocol):
    def loss(self, sequences: Tensor) -> Tensor:
        """Returns the mean loss of plain sequences."""

    def packed_loss(self, inputs: Tensor, targets: Tensor, positions: Tensor | None) -> Tensor:
        """Returns the mean loss of sequences that `Packing.split` has split."""


@dataclass(frozen=True, slots=True)
class Packing:
    is_masked: bool = False  # whether some tokens are complements
    document_end: int | None = None  # the token that ends a document, if documents are kept apart
    masking: Masking | None = None  # if tokens are hidden and filled in

    @property
    def is_plain(self) -> bool:
        """Whether each token is learned from all before it."""
        return not self.is_masked and self.document_end is None and self.masking is None

    def batch(self, sequences: npt.NDArray[np.int64], positions: Positions, round_number: int | None = None) -> Tensor:
        """Makes a batch of [sequences, length + 1] tokens; with masked tokens it is [sequences, 2, length].

        positions: the sequences' places in the data; round_number: None for held-out ones"""
        drawn = sequences if self.masking is None else self.masking.draw(sequences, positions, round_number)
        return torch.from_numpy(drawn)

    def split(self, sequences: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns inputs, targets (negative where nothing is to be learned) and positions, each [batch, length].

        sequences: what `batch` has made, int64; positions: each input's place in its document; None if not apart"""
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
    """Returns an additive attention mask: 0 for an input itself and those before it in its document, else -inf. Each
    layer would convert a boolean mask to floats and keep its own copy."""
    places = torch.arange(positions.shape[1], device=positions.device)
    is_seen = (places <= places[:, None]) & (places >= (places - positions)[:, :, None])
    hidden = torch.full((), -torch.inf, dtype=dtype, device=positions.device)
    return torch.where(is_seen, hidden.new_zeros(()), hidden)[:, None]
