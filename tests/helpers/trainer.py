"""Trainers so small that a round takes milliseconds, on texts that ship with Python."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any

from p2ptrain.config import AgreementConfig, DeviceConfig, ModelConfig, RecipeConfig, RunConfig
from p2ptrain.data.corpus import Reading
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.data.prepare import prepare
from p2ptrain.data.tokenizer import load_tokenizer
from p2ptrain.exact.root import octets
from p2ptrain.share import Share
from p2ptrain.train.learner import Learner

TINY = {"dim": 32, "layers": 2, "heads": 2, "kv_heads": 1, "ffn_dim": 64, "sequence_length": 64}
ONE_THREAD = DeviceConfig(name="cpu", threads=1, autocast="off")
RECIPES: dict[str, dict[str, Any]] = {
    "distro": {"learning_rate": Fraction(1, 250), "k": 32},
    "demo": {"learning_rate": Fraction(1, 250), "k": 32},
    "local": {"local_steps": 4, "inner_learning_rate": Fraction(1, 100), "k": 64},
}
_LOCAL = {"name": "local", "inner": "adamw", "local_steps": 4, "inner_learning_rate": Fraction(1, 100)}
_NESTEROV = {"momentum": Fraction(9, 10), "nesterov": True, "learning_rate": Fraction(7, 10)}
_DENSE = _LOCAL | {"transform": "none", "k": 64**2}
FAMILY: dict[str, dict[str, Any]] = {  # what the recipe `local` can be besides
    "momentum": _LOCAL | {"k": 64, "momentum": Fraction(1, 2)},
    "delayed momentum": _LOCAL | {"k": 64, "momentum_rounds": 3} | _NESTEROV,
    "sparse weights": _LOCAL | {"transform": "none", "k": 64, "value_bits": 2},
    "sixteen bits": _DENSE | {"value_bits": 16, "decay": 0},
    "diloco": _DENSE | {"value_bits": 4, "decay": 0} | _NESTEROV,
    "all signs": _DENSE | {"value_bits": 1},
    "several k": _LOCAL | {"k": (16, 64)},
    "fragments": _LOCAL | {"k": 64, "fragments": 3},
    "streaming": _DENSE | {"value_bits": 8, "decay": 0, "fragments": 2} | _NESTEROV,
}


class Trainer(Learner):
    """A learner that also changes its replica, as swarms in one process do: in one thread, one round after another.

    `apply` counts rounds from 0; its `own` are this trainer's payloads among the others, by their rounds.
    """

    def check(self, payload: bytes) -> str | None:
        return self.replica.check(payload)

    def apply(
        self, round_number: int, payloads: Sequence[bytes], own: Mapping[int, bytes] = MappingProxyType({})
    ) -> None:
        counted = self.replica.apply(round_number + 1, payloads)
        for number, payload in own.items():
            self.settle(number, counted.uncounted(payload))
        self.catch_up()

    def root(self, manifest: bytes = bytes(32)) -> bytes:
        return self.replica.root(manifest)

    def leaves(self) -> list[bytes]:
        return self.replica.leaves()

    @property
    def state_size(self) -> int:
        return self.replica.state_bytes

    def state_bytes(self) -> bytes:
        return bytes(octets(self.replica.state))

    def adopt(self, number: int, pieces: Iterable[bytes | memoryview]) -> None:
        self.replica.adopt(number, pieces)
        self.catch_up()

    def save(self, path: Path) -> None:
        self.capture().write(path)


def embedded(directory: Path) -> TokenDataset:
    tokenizer = load_tokenizer(None)
    held_out = Fraction(1, 50)
    made = prepare(
        directory, [], embedded=True, how=Reading(tokenizer=tokenizer), held_out=held_out, progress=lambda *_: None
    )
    return TokenDataset.open(directory, made.digest)


def make(
    dataset: TokenDataset,
    name: str = "distro",
    seed: int = 1,
    *,
    half_state: bool = False,
    is_late: bool = False,
    **changes: Any,
) -> Trainer:
    """Makes a trainer; is_late: contributions may be one round late."""
    recipe = RecipeConfig(**({"name": name, "sequences_per_pass": 4} | (RECIPES | FAMILY)[name] | changes))
    agreement = AgreementConfig(overlap_rounds=1) if is_late else AgreementConfig(overlap_rounds=0)
    run = RunConfig(name="test", seed=seed, model=ModelConfig(**TINY), recipe=recipe, agreement=agreement)
    return Trainer(run, ONE_THREAD.model_copy(update={"half_state": half_state}), dataset)


def swarm_round(trainers: list[Trainer], round_number: int) -> list[bytes]:
    """Trains and applies a round; each trainer applies the payloads in another order."""
    payloads = []
    for place, trainer in enumerate(trainers):
        trainer.train(Share(round_number, place, len(trainers)))
        payloads.append(trainer.contribute(round_number))
    for place, trainer in enumerate(trainers):
        assert [trainer.check(payload) for payload in payloads] == [None] * len(payloads)
        trainer.apply(round_number, payloads[place:] + payloads[:place], {round_number: payloads[place]})
    return payloads
