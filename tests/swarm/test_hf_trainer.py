"""transformers' Trainer takes part by a callback; its example, as it is."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from safetensors.torch import load_file

from tests.helpers.daemons import SECONDS, TEST_SECONDS, DaemonSwarm
from tests.helpers.scripts import script

pytestmark = [
    pytest.mark.hf,
    pytest.mark.timeout(TEST_SECONDS),
    pytest.mark.skipif(find_spec("accelerate") is None, reason="needs the extra [hf]: make test-hf"),
]


def test_two_trainers_train_one_model(swarm: DaemonSwarm) -> None:
    first = script(swarm, "first", example="hf_trainer.py").start().until_up()
    second = script(swarm, "second", first.address, example="hf_trainer.py")
    second.start()
    second.until_member()
    second.until(lambda: bool(first.status()) and int(second.status()["mine"]["applied"]) > 5)
    assert swarm.compared() > 3
    assert first.until_ended(SECONDS) == 0, first.text
    assert second.until_ended(SECONDS) == 0, second.text
    for node in (first, second):
        weights = load_file(node.directory / "trained" / "model.safetensors")
        assert sum(each.numel() for each in weights.values()) > 50_000
        assert "left: ended" in node.text
