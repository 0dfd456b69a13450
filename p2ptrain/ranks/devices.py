"""Chooses the devices of a node: one process takes the steps on each, or the node itself where there is one.

Ranks of one group are alike: in each step all wait for the slowest."""

from __future__ import annotations

import logging

import torch

from p2ptrain.config import DeviceConfig, NodeConfig, RunConfig
from p2ptrain.errors import ConfigError
from p2ptrain.models.kinds import build, layers_of
from p2ptrain.train.devices import cards_of, find_device

log = logging.getLogger("p2ptrain.ranks")


def devices_of(run: RunConfig, config: NodeConfig) -> list[str]:
    """Returns the devices that take this run's steps, by what the owner has set; left open, the first card.

    Apple's are a rank's alone, for they lack the fp64 of a round's sums. Raises ConfigError or DeviceError."""
    device, devices = config.device, own_devices(config.device)
    if devices == ["cpu"] and device.name == "auto" and torch.backends.mps.is_available():
        try:
            return _checked(run, config, ["mps"])
        except ConfigError as error:
            log.info("training on the processor, not on mps: %s", error)
    if devices == ["cuda:0"] and device.name == "auto" and (there := torch.cuda.device_count()) > 1:
        what = 'training on %s alone, of %d cards; device.name = "cuda:all" takes all, which was not tried on cards yet'
        log.info(what, devices[0], there)
    return _checked(run, config, devices)


def own_devices(device: DeviceConfig) -> list[str]:
    """Returns the devices of this machine that its owner has set; left open, the first card."""
    first, _ = find_device(device)
    if first.type != "cuda":
        return ["cpu"] * device.processes if first.type == "cpu" else [first.type]
    cards = cards_of(device)
    if device.processes > len(cards):
        what = f"{device.processes} processes for {len(cards)} card(s): a card has one"
        fix = 'Leave it out, and name the cards: device.name = ["cuda:0", "cuda:1"]'
        raise ConfigError(what, key="device.processes", fix=fix)
    return cards


def kind_of(device: str) -> str:
    """Returns how such a device is called on every machine."""
    return str(torch.cuda.get_device_properties(device).name) if device.startswith("cuda") else device


def _checked(run: RunConfig, config: NodeConfig, devices: list[str]) -> list[str]:
    """Refuses devices that a step of this run cannot be dealt to."""
    device, recipe, is_apart = config.device, run.recipe, config.device.is_sharded or devices == ["mps"]
    ranks, sequences = len(devices) + device.nnodes - 1, run.recipe.step_sequences
    if ranks == 1 and not is_apart:
        return devices
    key, one = "device.name", 'Set it to "cpu"' if devices == ["mps"] else "Train it on one device"
    if device.nnodes > 1:
        key, one = "device.nnodes", "Train it on one machine"
    elif device.is_sharded:
        key, one = "device.shard", "Set it to false"
    elif devices[0] == "cpu":
        key, one = "device.processes", "Set it to 1"
    for is_so, what in (
        (device.nnodes > 1 and is_apart, "parts of a model and Apple's devices are not shared between machines"),
        (recipe.plugin, f"the steps are those of the plug-in {recipe.plugin}, which may need all sequences of a step"),
        (config.privacy.is_on, "privacy's noise is drawn once for a step, in one process"),
        (device.is_sharded and run.model.plugin, f"the layers of the model of {run.model.plugin} are not known"),
    ):
        if is_so:
            raise ConfigError(what, key=key, fix=one)
    if sequences < ranks:
        what = f"a step of this run has {sequences} sequences, too few for {ranks} ranks"
        raise ConfigError(what, key=key, fix=f"Use {sequences} or fewer")
    if device.is_sharded:
        with torch.device("meta"):
            model = build(run.model, adapt=run.adapt)
        layers_of(model, run.model)
        if scalars := [name for name, each in model.named_parameters() if each.dim() == 0]:
            raise ConfigError(f"{scalars[0]} is one number, which has no rows", key=key, fix=one)
    return devices
