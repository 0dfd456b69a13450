"""The cases with known state roots, and their computation."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from p2ptrain.config import RecipeConfig
from p2ptrain.exact.aggregate import apply_votes, sum_votes
from p2ptrain.exact.codec import Contribution
from p2ptrain.exact.outer import Outer
from p2ptrain.exact.root import state_root
from p2ptrain.exact.scales import Scales, Sizes
from p2ptrain.exact.schedule import Terms
from p2ptrain.exact.transform import Layout
from tests.helpers.exact_numbers import contribution, weights

SHAPES = [(130, 128), (200,), (64, 192), (3, 7), (97, 101)]
BITS = {"distro": (1,), "demo": (3,), "local": (1, 5, 8)}
SIZES = [math.prod(shape) for shape in SHAPES]


def flat_weights(seed: int) -> torch.Tensor:
    return weights(seed, (sum(SIZES),))


def parts(flat: torch.Tensor) -> list[torch.Tensor]:
    return [part.view(shape) for part, shape in zip(torch.split(flat, SIZES), SHAPES, strict=True)]


def scales_of(
    layout: Layout, recipe: RecipeConfig, contributions: Sequence[Contribution], reach: int | None = None
) -> Scales | None:
    if not recipe.spec.is_scaled or not contributions:
        return None
    starts = [group.first_chunk for group in layout.groups]
    squares = [np.square(one.values.astype(np.int64)).sum(axis=1) for one in contributions]
    exponents = [one.exponents for one in contributions if one.exponents is not None]
    sizes = [Sizes(own, np.add.reduceat(each, starts)) for own, each in zip(exponents, squares, strict=True)]
    return Scales.of(sizes, layout, recipe, reach)


def updated(
    recipe: RecipeConfig,
    contributions: list[Contribution],
    rate: Fraction,
    flat: torch.Tensor,
    reach: int | None = None,
) -> torch.Tensor:
    layout = Layout(SHAPES, recipe.chunk)
    flat = flat.clone()
    scales = scales_of(layout, recipe, contributions, reach)
    votes = sum_votes(layout, recipe, contributions, len(contributions), scales, flat.device)
    apply_votes(layout, recipe, votes, Terms(rate), parts(flat))
    return flat


class Case(NamedTuple):
    recipe: RecipeConfig
    peers: int
    reach: int | None = None


def golden_cases() -> dict[str, Case]:
    cases = {}
    for name, outer, (chunk, k) in itertools.product(
        ("distro", "demo", "local"), ("normalised", "mean", "sign"), ((64, 32), (64, 8), (16, 5), (8, 32))
    ):
        for peers, bits in itertools.product((1, 7, 40), BITS[name]):
            recipe = RecipeConfig(
                name=name, outer=outer, chunk=chunk, k=k, value_bits=bits, weight_decay=Fraction(1, 10)
            )
            wide = f" value_bits={bits}" if bits > 3 else ""
            cases[f"{name} {outer} chunk={chunk} k={k} peers={peers}{wide}"] = Case(recipe, peers)
    for peers, bits in itertools.product((1, 2, 4, 40), (1, 5)):
        recipe = RecipeConfig(name="local", k=32, value_bits=bits)
        cases[f"local mean peers={peers} value_bits={bits} reach=-14"] = Case(recipe, peers, -14)
    return cases


_NESTEROV = {"momentum": Fraction(9, 10), "nesterov": True}
_DENSE = {"transform": "none", "k": 64**2}
FAMILY: dict[str, dict[str, object]] = {
    "momentum": {"k": 32, "momentum": Fraction(1, 3)},
    "nesterov": {"k": 32, **_NESTEROV},
    "delayed nesterov": {"k": 32, "momentum_rounds": 2, **_NESTEROV},
    "weights": {"transform": "none", "k": 64, "value_bits": 2},
    "dense 1 bit": {"value_bits": 1, **_DENSE},
    "dense 4 bits nesterov": {"value_bits": 4, **_DENSE, **_NESTEROV},
    "dense 8 bits": {"value_bits": 8, **_DENSE},
    "dense 16 bits": {"value_bits": 16, **_DENSE},
    "dense 24 bits": {"value_bits": 24, **_DENSE},
    "several k": {"k": (32, 128), "value_bits": 2},
    "fragments": {"k": 32, "fragments": 2},
    "dense fragments nesterov": {"value_bits": 4, "fragments": 3, **_DENSE, **_NESTEROV},
    "region": {"value_bits": 8, "inner_learning_rate": Fraction(1, 10**6), **_DENSE},
}
RULED: dict[str, dict[str, object]] = {  # with seven contributions or more
    "trimmed": {"k": (32, 128), "value_bits": 2, "rule": "trimmed", "trim": 2},
    "trimmed signs": {"name": "distro", "k": 64, "rule": "trimmed", "trim": 1},
    "trimmed coordinates": {"value_bits": 4, "rule": "trimmed_coordinates", "trim": 2, **_DENSE, **_NESTEROV},
    "trimmed coordinates of demo": {"name": "demo", "k": 256, "rule": "trimmed_coordinates", "trim": 1},
    "krum": {"k": 32, "rule": "krum", "byzantine": 2, "momentum": Fraction(1, 3)},
    "multi-krum": {"k": 32, "fragments": 2, "rule": "multi_krum", "byzantine": 1},
    "bulyan": {"value_bits": 8, "rule": "bulyan", "byzantine": 1, **_DENSE},
    "clipped": {"k": 32, "value_bits": 5, "rule": "clipped", "byzantine": 2},
}
COVERED = {"region": 10}  # rounds of others that a contribution may hold, whose bound is then what cuts


def family_root(name: str, peers: int, device: torch.device) -> str:
    """Returns the root after four rounds of whole payloads, at weights that decay."""
    settings = (FAMILY | RULED)[name]
    recipe = RecipeConfig(**({"learning_rate": Fraction(7, 10), "weight_decay": Fraction(1, 1000)} | settings))
    outer = Outer(recipe, SHAPES, covered=COVERED.get(name, 0))
    state = torch.zeros(outer.state_numbers, device=device)
    state[: outer.parameters] = flat_weights(len(name)).to(device)
    for number in range(4):
        fragment = outer.fragment_of(number + 1)
        own = [recipe.model_copy(update={"k": k}) for k in recipe.ks]
        offered = [
            contribution(1000 * number + peer, outer.layouts[fragment], own[peer % len(own)]) for peer in range(peers)
        ]
        outer.apply(state, number, [outer.pack(each, fragment) for each in offered])
    assert torch.isfinite(state).all()
    return state_root(state).hex()


def golden_root(case: Case, device: torch.device) -> str:
    """Returns the root after three rounds, at rates that are not binary fractions."""
    recipe, peers, reach = case
    layout = Layout(SHAPES, recipe.chunk)
    flat = flat_weights(len(recipe.name + recipe.outer)).to(device)
    for round_number, rate in enumerate((Fraction(1, 1000), Fraction(2, 3), Fraction(7, 300))):
        offered = [contribution(1000 * round_number + peer, layout, recipe) for peer in range(peers)]
        flat = updated(recipe, offered, rate, flat, reach)
    assert torch.isfinite(flat).all()
    return state_root(flat).hex()


GOLDEN = Path(__file__).parents[1] / "golden" / "state_roots.json"


def golden() -> dict[str, str]:
    """Returns the known root of each case."""
    found: dict[str, str] = json.loads(GOLDEN.read_text())
    return found


if __name__ == "__main__":  # python tests/helpers/golden.py: only with a new protocol version
    roots = {name: golden_root(case, torch.device("cpu")) for name, case in golden_cases().items()}
    roots |= {
        f"{name} peers={peers}": family_root(name, peers, torch.device("cpu")) for name in FAMILY for peers in (1, 7)
    }
    roots |= {
        f"{name} peers={peers}": family_root(name, peers, torch.device("cpu")) for name in RULED for peers in (7, 11)
    }
    GOLDEN.write_text(json.dumps(roots, indent=1) + "\n")
