"""Draws the tokens that a model of `model.objective = "masked"` has to fill in from those around them.

The rule is BERT's (Devlin et al. 2018, arXiv 1810.04805): of a sequence's tokens 15 % are learned, and of these 80 %
are read as the mask, 10 % as any token and 10 % as they are. A token that ends a document is never learned.

The draws come from BLAKE3 and are compared as integers, so that they are the same on every machine. They depend on the
run's seed, the round and the sequence's place in the data, and on nothing else: who repeats a round learns the same. In
held-out data they depend on the place alone, so that losses of different rounds and runs compare.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from p2ptrain.data.assignment import Positions
from p2ptrain.digest import digest

WORD_BYTES = 4
# A token is drawn by a word of 32 bits: below the last of these it is learned, below the first read as the mask, and
# below the second as any token.
READ_AS_MASK, READ_AS_ANY, LEARNED = (2**32 * share // 1_000 for share in (120, 135, 150))


@dataclass(frozen=True, slots=True)
class Masking:
    """How a run's tokens are hidden."""

    seed: int
    mask: int  # the token that is read in place of a hidden one
    vocab_size: int  # of the tokenizer
    document_end: int

    def draw(
        self, sequences: npt.NDArray[np.int64], positions: Positions, round_number: int | None
    ) -> npt.NDArray[np.int64]:
        """Returns inputs and targets [sequences, 2, length] of sequences [sequences, length + 1].

        Targets are -1 where nothing is learned. A complement is read, and not learned (packing.py). round_number: None
        for held-out sequences
        """
        kept, length = sequences[:, :-1], sequences.shape[1] - 1
        words = np.stack([self._words(int(position), round_number, length) for position in positions])
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
