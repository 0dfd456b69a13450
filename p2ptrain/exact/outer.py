"""The outer step of a run: the form of its payloads, and how a round's payloads change the agreed state.

The agreed state is one flat tensor: all parameters in the model's order and, if the recipe has a momentum, as many
numbers again. A run with `fragments` (Streaming DiLoCo: Douillard et al. 2025, arXiv 2501.18512) agrees on one part of
the model each round, in turn; all other weights and momenta stay as they are.

In a run that names several k, a payload begins with a byte that says which it has. With fragments, the next byte names
its fragment, and zeros at the end make it as long as all others of its k, so that receivers know the few lengths that
there are in advance. A payload for a different fragment than its round's counts as zeros.

In a region (`world.run`), a payload ends with its author's view of the world's run (`Tail`). The update does not depend
on it; the region's nodes use it to keep track of the world (p2ptrain/region/shift.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from math import prod
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from p2ptrain.config import PAYLOAD_BYTES_MAX, RecipeConfig, RunConfig
from p2ptrain.errors import ConfigError, RemoteProtocolError
from p2ptrain.exact.aggregate import apply_payloads, rounded_fp32
from p2ptrain.exact.codec import Contribution, Packed, PayloadFormat, pack, unpack
from p2ptrain.exact.kernels.launches import OnCard
from p2ptrain.exact.scales import Scales
from p2ptrain.exact.schedule import Terms, terms_of
from p2ptrain.exact.transform import Layout, fragment_of

ROOM_BYTES = 1_024  # space in each payload for its author's key; rounded up
NAME_BYTES = 1  # of a payload's k, and of its fragment
TAIL_BYTES = 9


@dataclass(frozen=True, slots=True)
class Tail:
    """The nine bytes at the end of a contribution to a region, which relate it to the world's run."""

    followed: int | None = None  # the world's newest round that the author knew when it began to train
    is_shifted: bool = False  # the contribution includes the world's changes up to that round
    is_aware: bool = False  # the author knows the point from which the region goes on
    has_told: bool = False  # the author knows that the region has contributed to the world's next round

    def encoded(self) -> bytes:
        flags = self.is_shifted | self.is_aware << 1 | self.has_told << 2
        return (0 if self.followed is None else self.followed + 1).to_bytes(8, "little") + bytes([flags])

    @classmethod
    def of(cls, payload: bytes) -> Tail:
        """Reads the tail of a payload; raises RemoteProtocolError if it has no meaning."""
        followed, flags = int.from_bytes(payload[-TAIL_BYTES:-1], "little"), payload[-1]
        found = cls(followed - 1 if followed else None, bool(flags & 1), bool(flags & 2), bool(flags & 4))
        if flags > 7 or (found.is_shifted and not followed) or (found.has_told and not found.is_aware):
            raise RemoteProtocolError(f"a tail of {payload[-TAIL_BYTES:].hex()}")
        return found


# Picks the part of the values that left the residual that a round did not count; returns None if it counted all.
Uncounted: TypeAlias = Callable[[NDArray[np.float32]], NDArray[np.float32] | None]


def all_counted(removed: NDArray[np.float32]) -> None:
    """The `Uncounted` of a contribution that a round has counted whole."""


@dataclass(frozen=True, slots=True)
class Counted:
    """The payloads that a round has counted, and the scales that tell an author which part of its own was not."""

    payloads: Sequence[bytes]  # those of the round's fragment that its rule has chosen, in the order of the scales
    scales: Scales | None
    norm: float  # of the update, about, before momentum and weight decay

    def uncounted(self, payload: bytes) -> Uncounted:
        if payload not in self.payloads:  # late, for another fragment, or left out by the rule
            return lambda removed: removed
        place = self.payloads.index(payload)
        if self.scales is None or self.scales.counts_all_of(place):
            return all_counted
        return partial(self.scales.uncounted, place)


class _Read(NamedTuple):
    """A payload after its names have been read."""

    fragment: int
    packed: Packed
    end: int  # of the packed bytes


class Outer:
    """A run's layout, payloads and outer step.

    rounds_late: how old a contribution may be; covered: how many more rounds of movement it may hold"""

    def __init__(
        self, recipe: RecipeConfig, shapes: Sequence[Sequence[int]], rounds_late: int = 0, covered: int = 0
    ) -> None:
        self.recipe, self.rounds_late, self.covered = recipe, rounds_late, covered
        self.shapes = [tuple(shape) for shape in shapes]
        self.parameters = sum(map(prod, self.shapes))
        whole = Layout.of(shapes, recipe)
        if recipe.fragments > len(whole.groups):
            what = f"{recipe.fragments} fragments, but the model has only {len(whole.groups)} groups of weights"
            raise ConfigError(what, key="recipe.fragments", fix=f"Use at most {len(whole.groups)}")
        self.layouts = whole.fragments(recipe.fragments)
        self.forms = {k: [PayloadFormat.of(layout, recipe, k) for layout in self.layouts] for k in recipe.ks}
        self.tail_bytes = TAIL_BYTES if covered else 0
        fixed = NAME_BYTES * ((len(recipe.ks) > 1) + (recipe.fragments > 1)) + self.tail_bytes
        # By k, which rises, and the lengths with it.
        self.sizes = {k: fixed + max(form.payload_bytes for form in forms) for k, forms in self.forms.items()}
        self.payload_bytes = self.sizes[recipe.k_max]  # the longest
        if self.payload_bytes > PAYLOAD_BYTES_MAX - ROOM_BYTES:
            what = f"a contribution of {self.payload_bytes:,} bytes, and there is room for 4 GiB less 1 KiB"
            raise ConfigError(what, key="recipe.k", fix="Send fewer coefficients, fewer value_bits, or more fragments")
        self.contribution_bytes = max(form.contribution_bytes for form in self.forms[recipe.k_max])

    @classmethod
    def of(cls, run: RunConfig, shapes: Sequence[Sequence[int]]) -> Outer:
        return cls(run.recipe, shapes, run.agreement.staleness_rounds_max, run.world.covered)

    @property
    def state_numbers(self) -> int:
        """The number of values in the agreed state."""
        return self.parameters * self.recipe.state_copies

    def fragment_of(self, number: int) -> int:
        """Returns the part of the model that is updated in round `number`, counted from 1."""
        return fragment_of(number, self.recipe.fragments)

    def pack(self, contribution: Contribution | OnCard, fragment: int) -> bytes:
        ks, k = self.recipe.ks, contribution.indices.shape[1]
        head = bytes([ks.index(k)]) if len(ks) > 1 else b""
        head += bytes([fragment]) if self.recipe.fragments > 1 else b""
        form = self.forms[k][fragment]
        payload = head + (contribution.packed(form) if isinstance(contribution, OnCard) else pack(contribution, form))
        return payload + bytes(self.sizes[k] - len(payload))  # a region's tail, or padding: it has no fragments

    def unpack(self, payload: bytes) -> Contribution:
        """Decodes a payload strictly; raises RemoteProtocolError, with the reason, if it is not a valid encoding."""
        read = self._read(payload)
        if self.tail_bytes:
            Tail.of(payload)
        elif any(payload[read.end :]):
            raise RemoteProtocolError("a payload's padding is not zero")
        return unpack(*read.packed)

    def fragment_in(self, payload: bytes) -> int:
        """Returns the part of the model that a payload is for, whatever round it was made for."""
        return self._read(payload).fragment

    def _read(self, payload: bytes) -> _Read:
        """Reads the names at a payload's beginning."""
        ks, fragment, start = self.recipe.ks, 0, 0
        k = ks[-1]
        if len(ks) > 1:
            if not (payload and payload[0] < len(ks)):
                raise RemoteProtocolError(f"k of number {payload[0] if payload else None} of {len(ks)}")
            k, start = ks[payload[0]], NAME_BYTES
        if len(payload) != self.sizes[k]:
            raise RemoteProtocolError(f"payload of {len(payload)} bytes; this run's have {self.sizes[k]}")
        if self.recipe.fragments > 1:
            fragment, start = payload[start], start + NAME_BYTES
            if not fragment < self.recipe.fragments:
                raise RemoteProtocolError(f"fragment {fragment} of {self.recipe.fragments}")
        form = self.forms[k][fragment]
        end = start + form.payload_bytes
        return _Read(fragment, Packed(memoryview(payload)[start:end], form), end)

    def parts(self, flat: Tensor) -> list[Tensor]:
        """Splits a flat tensor of all parameters into views of their shapes."""
        pieces = torch.split(flat, [prod(shape) for shape in self.shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def apply(
        self,
        state: Tensor,
        round_number: int,
        payloads: Sequence[bytes],
        unpacked: Mapping[bytes, Contribution] = MappingProxyType({}),
    ) -> Counted:
        """Applies payloads that `unpack` has accepted to the state, in place; `round_number` counts from 0.

        payloads: in any order, or with a rule in that of their authors' keys"""
        counted, terms = self._counted(round_number, payloads)
        weights, momenta = state[: self.parameters], state[self.parameters :]
        places, scales, norm = apply_payloads(
            self.layouts[self.fragment_of(round_number + 1)],
            self.recipe,
            [packed for _, packed in counted],
            terms,
            self.parts(weights),
            self.parts(momenta) if len(momenta) else (),
            {packed: unpacked[payload] for payload, packed in counted if payload in unpacked},
        )
        return Counted([counted[place][0] for place in places], scales, norm)

    def _counted(self, round_number: int, payloads: Sequence[bytes]) -> tuple[list[tuple[bytes, Packed]], Terms]:
        """Returns the payloads for the round's fragment, and the terms on which they are applied."""
        fragment = self.fragment_of(round_number + 1)
        terms = terms_of(self.recipe, round_number, self.rounds_late, self.covered)
        read = [(payload, self._read(payload)) for payload in payloads]
        counted = [(payload, each.packed) for payload, each in read if each.fragment == fragment]
        if counted and len(counted) < len(payloads):  # payloads for other fragments count, but move nothing
            terms = replace(terms, rate=terms.rate * Fraction(len(counted), len(payloads)))
        return counted, terms

    def undo(self, state: Tensor, round_number: int, payloads: Sequence[bytes]) -> None:
        """Takes back what `apply` did to the state, but for the rounding of its sums."""
        layout, alone = self.layouts[self.fragment_of(round_number + 1)], torch.zeros_like(state)
        if not self.apply(alone, round_number, payloads).payloads:
            return
        _, terms = self._counted(round_number, payloads)
        keep = rounded_fp32(1 - terms.rate * self.recipe.weight_decay)
        mu = rounded_fp32(self.recipe.momentum)
        kept = mu if terms.carries else 1.0  # share of the momentum that is left after the round
        weights, momenta = (list(map(self.parts, torch.split(each, self.parameters))) for each in (state, alone))
        for place in {place for group in layout.groups for place in group.members}:
            moved = momenta[0][place].neg_()  # as if there had been no momentum before
            if self.recipe.momentum:
                before = weights[1][place].div_(kept).sub_(momenta[1][place].div_(kept))
                if terms.carries:
                    moved.add_(before, alpha=mu if self.recipe.nesterov else 1.0)
            weights[0][place].add_(moved).div_(keep)
