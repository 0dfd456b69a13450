"""Trainers so small that a round takes milliseconds, on texts that ship with Python."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

from p2ptrain.config import DeviceConfig, ModelConfig, RecipeConfig, RunConfig
from p2ptrain.learn.corpus import Reading
from p2ptrain.learn.data import TokenDataset
from p2ptrain.learn.prepare import prepare
from p2ptrain.learn.tokenizer import load_tokenizer
from p2ptrain.learn.trainer import Trainer

TINY = {"dim": 32, "layers": 2, "heads": 2, "kv_heads": 1, "ffn_dim": 64, "sequence_length": 64}
ONE_THREAD = DeviceConfig(name="cpu", threads=1, autocast="off")
RECIPES: dict[str, dict[str, Any]] = {
    "distro": {"learning_rate": Fraction(1, 250), "k": 32},
    "demo": {"learning_rate": Fraction(1, 250), "k": 32},
    "local": {"local_steps": 4, "inner_learning_rate": Fraction(1, 100), "k": 64},
}


def embedded(directory: Path) -> TokenDataset:
    tokenizer = load_tokenizer(None)
    held_out = Fraction(1, 50)
    made = prepare(
        directory, [], embedded=True, how=Reading(tokenizer=tokenizer), held_out=held_out, progress=lambda *_: None
    )
    return TokenDataset.open(directory, made.digest)


def make(
    dataset: TokenDataset, name: str = "distro", seed: int = 1, *, half_state: bool = False, **changes: Any
) -> Trainer:
    recipe = RecipeConfig(name=name, sequences_per_pass=4, **(RECIPES[name] | changes))
    run = RunConfig(name="test", seed=seed, model=ModelConfig(**TINY), recipe=recipe)
    return Trainer(run, ONE_THREAD.model_copy(update={"half_state": half_state}), dataset)


def swarm_round(trainers: list[Trainer], round_number: int) -> list[bytes]:
    """Trains and applies a round; each trainer applies the payloads in another order."""
    payloads = []
    for place, trainer in enumerate(trainers):
        trainer.train(round_number, place, len(trainers))
        payloads.append(trainer.contribute(round_number))
    for place, trainer in enumerate(trainers):
        assert [trainer.check(payload) for payload in payloads] == [None] * len(payloads)
        trainer.apply(round_number, payloads[place:] + payloads[:place], {round_number: payloads[place]})
    return payloads
