"""Scripts with loops of their own train one model, whatever the scripts do."""

from __future__ import annotations

import signal
from time import monotonic

import pytest

from p2ptrain.core.newcomers import ROUNDS
from tests.helpers.daemons import AGREEMENT, LISTEN, STOP_SECONDS, TEST_SECONDS, TINY_MODEL, DaemonSwarm, p2ptrain
from tests.helpers.scripts import script, until_both_contributed

LATE = 50
BUILTIN_RUN = f"""\
name = "builtin"

{TINY_MODEL}
[recipe]
local_steps = 4
sequences_per_pass = 8

{AGREEMENT}"""
BUILTIN_SCRIPT = """\
import sys
import torch
import p2ptrain
from p2ptrain.config import ModelConfig
from p2ptrain.models.built_in import Transformer
sizes = {"dim": 32, "layers": 1, "heads": 2, "kv_heads": 1, "ffn_dim": 64, "sequence_length": 64}
model = Transformer(ModelConfig(**sizes))
model.initialise(4711)  # not the run's
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
with p2ptrain.join(sys.argv[2], model, optimizer, directory=sys.argv[1]) as swarm:
    for batch in swarm.batches():
        loss = model.loss(batch)
        loss.backward()
        swarm.step(loss)
"""

TOY_SCRIPT = """\
import sys
import torch
from torch import nn
import p2ptrain
model = nn.Sequential(nn.Embedding(64, 16), nn.Linear(16, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
directory, address = sys.argv[1], sys.argv[2:]
options = {} if address else {"run": {"recipe": {"local_steps": 1}}}
take_part = p2ptrain.join if address else p2ptrain.start
with take_part(*address, model=model, optimizer=optimizer, directory=directory, **options) as swarm:
    while True:
        letters = torch.randint(64, (32,))
        loss = nn.functional.cross_entropy(model(letters), (letters + 1) % 64)
        loss.backward()
        swarm.step(loss)
"""

pytestmark = pytest.mark.timeout(TEST_SECONDS)


def test_three_scripts_train_one_model_of_which_one_comes_late_and_one_is_killed(swarm: DaemonSwarm) -> None:
    first = script(swarm, "first").start().until_up()
    second = script(swarm, "second", first.address)
    second.start()
    second.until_member()
    first.until_applied(first.applied + LATE)
    third = script(swarm, "third", first.address)
    third.start()
    third.until_member()
    node = second.node
    second.kill()
    node.wait(STOP_SECONDS)  # it sees that its script is gone, and leaves
    number = first.applied + LATE
    for each in (first, third):
        each.until_applied(number)
    assert swarm.compared() > 2 * LATE / 3
    statuses = [first.status(), third.status()]
    assert all(status["mine"]["applied"] > 10 for status in statuses)
    assert len(first.status()["roster"]) == 2
    assert statuses[0]["loss"] < 3.5
    for each in (third, first):
        each.signal(signal.SIGINT)
        each.until_left()


def test_a_toy_whose_rounds_take_milliseconds_can_be_joined(swarm: DaemonSwarm) -> None:
    code = swarm.directory / "toy.py"
    code.write_text(TOY_SCRIPT)
    first = script(swarm, "first", example=str(code)).start().until_up()
    first.until_applied(LATE)
    second = script(swarm, "second", first.address, example=str(code))
    second.start()
    until_both_contributed(swarm, first, second)
    late = second.status()["counters"].get("contributions too late", 0)
    assert late < ROUNDS  # for as long as rounds are held open for it
    for each in (second, first):
        each.signal(signal.SIGINT)
        each.until_left()


def test_nobody_waits_for_a_script_that_is_elsewhere_and_it_comes_back(swarm: DaemonSwarm) -> None:
    first = script(swarm, "first").start().until_up()
    second = script(swarm, "second", first.address)
    second.start()
    second.until_member()
    first.until_applied(first.applied + 10)
    before, began = first.applied, monotonic()
    first.until_applied(before + 30)
    usual = monotonic() - began
    second.signal(signal.SIGSTOP)  # a breakpoint; its node goes on
    before, began = first.applied, monotonic()
    first.until_applied(before + 60)
    assert monotonic() - began < 3 * 2 * usual  # it stops waiting for it after some rounds
    assert second.is_member
    assert second.applied >= before + 50
    second.signal(signal.SIGCONT)
    taken = int(second.status()["mine"]["applied"])
    second.until(lambda: int(second.status()["mine"]["applied"]) > taken + 5)
    assert swarm.compared() > 30


def test_a_command_cannot_train_a_model_that_only_scripts_have(swarm: DaemonSwarm) -> None:
    first = script(swarm, "first").start().until_up()
    arguments = ("--bootstrap", first.address, "--listen", LISTEN, "--data-dir", swarm.directory / "other")
    status, _, error = p2ptrain("join", *arguments)
    assert status == 1
    assert "trains a model that only its members' own scripts have" in error
    assert "p2ptrain.join" in error


def test_a_script_and_a_command_train_the_built_in_model_together(swarm: DaemonSwarm) -> None:
    file, code = swarm.directory / "builtin.toml", swarm.directory / "builtin.py"
    file.write_text(BUILTIN_RUN)
    code.write_text(BUILTIN_SCRIPT)
    first = swarm.add("first", "start", file).start().until_up()
    second = script(swarm, "second", first.address, example=str(code))
    second.start()
    until_both_contributed(swarm, first, second)
    second.signal(signal.SIGINT)
    second.until_left()
    number = first.applied
    first.until_applied(number + 3)
