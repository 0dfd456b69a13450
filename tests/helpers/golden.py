"""The cases with known state roots, and their computation."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch

from p2ptrain.config import RecipeConfig
from p2ptrain.learn.aggregate import apply_votes, sum_votes
from p2ptrain.learn.codec import Contribution
from p2ptrain.learn.root import state_root
from p2ptrain.learn.scales import Scales, Sizes
from p2ptrain.learn.transform import Layout
from tests.helpers.exact_numbers import contribution, weights

SHAPES = [(130, 128), (200,), (64, 192), (3, 7), (97, 101)]
BITS = {"distro": (1,), "demo": (3,), "local": (1, 5, 8)}
SIZES = [math.prod(shape) for shape in SHAPES]


def flat_weights(seed: int) -> torch.Tensor:
    return weights(seed, (sum(SIZES),))


def parts(flat: torch.Tensor) -> list[torch.Tensor]:
    return [part.view(shape) for part, shape in zip(torch.split(flat, SIZES), SHAPES, strict=True)]


def scales_of(layout: Layout, recipe: RecipeConfig, contributions: Sequence[Contribution]) -> Scales | None:
    if not recipe.spec.is_scaled or not contributions:
        return None
    starts = [group.first_chunk for group in layout.groups]
    squares = [np.square(one.values.astype(np.int64)).sum(axis=1) for one in contributions]
    exponents = [one.exponents for one in contributions if one.exponents is not None]
    sizes = [Sizes(own, np.add.reduceat(each, starts)) for own, each in zip(exponents, squares, strict=True)]
    return Scales.of(sizes, layout, recipe)


def updated(
    recipe: RecipeConfig,
    contributions: list[Contribution],
    rate: Fraction,
    flat: torch.Tensor,
) -> torch.Tensor:
    layout = Layout(SHAPES, recipe.chunk)
    flat = flat.clone()
    votes = sum_votes(
        layout, recipe, contributions, len(contributions), scales_of(layout, recipe, contributions), flat.device
    )
    apply_votes(layout, recipe, votes, rate, parts(flat))
    return flat


def golden_cases() -> dict[str, tuple[RecipeConfig, int]]:
    cases = {}
    for name, outer, (chunk, k) in itertools.product(
        ("distro", "demo", "local"), ("normalised", "mean", "sign"), ((64, 32), (64, 8), (16, 5), (8, 32))
    ):
        for peers, bits in itertools.product((1, 7, 40), BITS[name]):
            recipe = RecipeConfig(
                name=name, outer=outer, chunk=chunk, k=k, value_bits=bits, weight_decay=Fraction(1, 10)
            )
            wide = f" value_bits={bits}" if bits > 3 else ""
            cases[f"{name} {outer} chunk={chunk} k={k} peers={peers}{wide}"] = recipe, peers
    return cases


def golden_root(recipe: RecipeConfig, peers: int, device: torch.device) -> str:
    """Returns the root after three rounds, at rates that are not binary fractions."""
    layout = Layout(SHAPES, recipe.chunk)
    flat = flat_weights(len(recipe.name + recipe.outer)).to(device)
    for round_number, rate in enumerate((Fraction(1, 1000), Fraction(2, 3), Fraction(7, 300))):
        offered = [contribution(1000 * round_number + peer, layout, recipe) for peer in range(peers)]
        flat = updated(recipe, offered, rate, flat)
    assert torch.isfinite(flat).all()
    return state_root(flat).hex()


GOLDEN = Path(__file__).parents[1] / "golden" / "state_roots.json"


def golden() -> dict[str, str]:
    """Returns the known root of each case."""
    found: dict[str, str] = json.loads(GOLDEN.read_text())
    return found


if __name__ == "__main__":  # python tests/helpers/golden.py: only with a new protocol version
    roots = {case: golden_root(recipe, peers, torch.device("cpu")) for case, (recipe, peers) in golden_cases().items()}
    GOLDEN.write_text(json.dumps(roots, indent=1) + "\n")
