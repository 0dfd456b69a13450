"""Which devices a node takes, and which it refuses."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from p2ptrain.cli.exits import ExitStatus
from p2ptrain.config import NodeConfig, RecipeConfig, RunConfig
from p2ptrain.errors import ConfigError, DeviceError
from p2ptrain.ranks.devices import devices_of
from p2ptrain.train.learner import open_device
from tests.helpers.cli import p2ptrain

H100, A100 = ("H100", 80), ("A100", 40)


def config(privacy: bool = False, **device: Any) -> NodeConfig:
    more = {"privacy": {"epsilon": 4}} if privacy else {}
    return NodeConfig.model_validate({"device": {"autocast": "off", **device}, **more})


def run(**recipe: Any) -> RunConfig:
    return RunConfig(name="test", recipe=RecipeConfig(**({"sequences_per_pass": 4, "passes_per_step": 1} | recipe)))


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The machine has these cards."""
    there = [SimpleNamespace(name=name, total_memory=size, multi_processor_count=1) for name, size in request.param]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(there))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(there))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda name: there[int(name[5:])])


@pytest.mark.parametrize(
    ("cards", "device", "devices"),
    [
        ([], {}, ["cpu"]),
        ([], {"processes": 3}, ["cpu"] * 3),
        ([H100], {}, ["cuda:0"]),
        ([H100, H100], {}, ["cuda:0"]),
        ([A100, H100], {}, ["cuda:0"]),
        ([H100, H100], {"name": "cpu", "processes": 2}, ["cpu", "cpu"]),
        ([H100, H100], {"name": "cuda"}, ["cuda:0"]),
        ([A100, H100], {"name": "cuda:0"}, ["cuda:0"]),
        ([H100, H100], {"name": "cuda:all"}, ["cuda:0", "cuda:1"]),
        ([A100, H100, H100], {"name": ["cuda:2", "cuda:1"]}, ["cuda:2", "cuda:1"]),
    ],
    indirect=["cards"],
)
def test_a_node_takes_what_its_owner_names_or_the_first_card(
    cards: None, device: dict[str, Any], devices: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert devices_of(run(), config(**device)) == devices
    is_told = not device and torch.cuda.device_count() > 1
    assert bool(caplog.records) == is_told, "what the node chooses itself, it says"


@pytest.mark.parametrize(
    ("device", "more", "devices"),
    [
        ({}, {}, ["mps"]),
        ({"name": "mps"}, {}, ["mps"]),
        ({"name": "cpu"}, {}, ["cpu"]),
        ({"processes": 2}, {}, ["cpu", "cpu"]),
        ({"privacy": True}, {}, ["cpu"]),
        ({}, {"plugin": "p2ptrain-noise 0.1.0"}, ["cpu"]),
    ],
)
def test_apples_gpu_gets_a_rank_where_steps_can_be_dealt(
    device: dict[str, Any], more: dict[str, Any], devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert devices_of(run(**more), config(**device)) == devices
    learner, _ = open_device(config(**device, threads=1).device)
    assert learner.type == "cpu", "a round's sums need fp64"


def test_apples_gpu_is_refused_where_it_is_named_and_cannot_be() -> None:
    with pytest.raises(DeviceError, match=r"device mps not found\. Set device.name to cpu"):
        devices_of(run(), config(name="mps"))


def test_on_apples_gpu_no_noise_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    with pytest.raises(ConfigError, match=r'in one process\. Set it to "cpu"'):
        devices_of(run(), config(privacy=True, name="mps"))


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (
            {"kind": "plugin", "plugin": "p2ptrain-conv 0.1.0", "shapes": "1" * 64},
            "the layers of the model of p2ptrain-conv",
        ),
    ],
)
def test_a_model_whose_layers_are_not_known_is_not_cut(model: dict[str, Any], why: str) -> None:
    theirs = run().model_copy(update={"model": run().model.model_copy(update=model)})
    with pytest.raises(ConfigError, match=rf"device\.shard: {why}.* Set it to false"):
        devices_of(theirs, config(name="cpu", processes=2, shard=True))


def test_parts_are_refused_as_whole_models_are() -> None:
    with pytest.raises(ConfigError, match=r"device\.shard: a step of this run has 4 sequences, too few for 5 ranks"):
        devices_of(run(), config(name="cpu", processes=5, shard=True))


@pytest.mark.parametrize(
    ("cards", "device", "why"),
    [
        ([], {"name": "cuda:all"}, r"device cuda:all not found \(0 CUDA devices found\)\. Set device\.name to cpu"),
        ([H100], {"name": ["cuda:0", "cuda:1"]}, r"device cuda:1 not found \(1 CUDA devices found\)"),
        ([A100, H100], {"name": "cuda:all"}, "cuda:0 is A100, cuda:1 is H100: all would wait .* Name devices that are"),
        ([H100, H100], {"name": ["cuda:1", "cuda:1"]}, "names a device twice: cuda:1,cuda:1"),
        ([H100], {"name": "cuda:0", "processes": 2}, r"2 processes for 1 card\(s\): a card has one\. Leave it out"),
        ([], {"processes": 5}, "a step of this run has 4 sequences, too few for 5 ranks. Use 4 or fewer"),
        ([H100] * 8, {"name": "cuda:all"}, "a step of this run has 4 sequences, too few for 8 ranks. Use 4 or fewer"),
        ([], {"processes": 2, "privacy": True}, "noise is drawn once for a step, in one process. Set it to 1"),
    ],
    indirect=["cards"],
)
def test_devices_that_cannot_work_together_are_refused_with_what_to_do(
    cards: None, device: dict[str, Any], why: str
) -> None:
    with pytest.raises((ConfigError, DeviceError), match=why):
        devices_of(run(), config(**device))


def test_the_steps_of_a_plug_in_are_not_dealt() -> None:
    theirs = run(plugin="p2ptrain-noise 0.1.0")
    with pytest.raises(ConfigError, match=r"device\.processes: the steps are those of the plug-in p2ptrain-noise"):
        devices_of(theirs, config(name="cpu", processes=2))


@pytest.mark.parametrize("name", [["cpu", "cuda:0"], ["cuda", "cuda:1"], "cuda:all,cuda:1", []])
def test_devices_of_different_kinds_are_not_named_together(name: object) -> None:
    with pytest.raises(ValueError, match=r"device\.name"):
        config(name=name)


PLACE = "/ip4/192.168.1.10/tcp/4100"


@pytest.mark.parametrize(
    ("rendezvous", "why"),
    [
        (None, "2 machines, and no place to meet. Set rendezvous to this one's address"),
        ("/ip4/0.0.0.0/tcp/4100", "this machine's address in your own network and a port, such as"),
        ("/ip6/::/tcp/4100", "this machine's address in your own network and a port, such as"),
        ("/ip4/192.168.1.10/udp/4100/quic-v1", "this machine's address in your own network and a port, such as"),
        ("/dns4/node.example.org/tcp/4100", "this machine's address in your own network and a port, such as"),
    ],
)
def test_machines_meet_at_one_address_that_was_named(
    rendezvous: str | None, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, said = p2ptrain(capsys, "join", "--nnodes", 2, *(["--rendezvous", rendezvous] if rendezvous else []))
    assert status == ExitStatus.USER_ERRED
    assert why in said


def test_parts_of_a_model_stay_on_one_machine() -> None:
    with pytest.raises(ConfigError, match=r"device\.nnodes: parts of a model .* Train it on one machine"):
        devices_of(run(), config(name="cpu", nnodes=2, rendezvous=PLACE, shard=True))
