"""Finds the device that a node's config names."""

from __future__ import annotations

import torch

from p2ptrain.config import DeviceConfig
from p2ptrain.errors import DeviceError
from p2ptrain.exact.cards import cannot_be_opened

FOUND_FIX = "Set device.name to cpu or to an existing device"


def find_device(config: DeviceConfig) -> tuple[torch.device, bool]:
    """Returns the device to train on, and whether to train in bf16 there."""
    is_cpu = config.name == "cpu" or (config.name == "auto" and not torch.cuda.is_available())
    if config.name == "mps" and not torch.backends.mps.is_available():
        raise DeviceError("device mps not found", fix=FOUND_FIX)
    device = torch.device("cpu" if is_cpu else "mps" if config.name == "mps" else cards_of(config)[0])
    try:
        fast = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    except RuntimeError as error:  # the driver lists it, and it does not answer
        raise cannot_be_opened(device, error) from error
    fast = fast or (device.type == "cpu" and bool(torch.cpu._is_avx512_bf16_supported()))
    return device, config.autocast == "bf16" or (config.autocast == "auto" and fast)


def named_cards(config: DeviceConfig) -> list[str]:
    """Returns the cards of which each gets a rank; one is not asked whether it is there."""
    return cards_of(config) if "," in config.name or config.name == "cuda:all" else [config.name]


def cards_of(config: DeviceConfig) -> list[str]:
    """Returns the cards that the config names, as tensors name them; left open, the first, which is the fastest."""
    there = torch.cuda.device_count()
    every = [f"cuda:{number}" for number in range(there)]
    named = every if config.name == "cuda:all" else config.name.replace("auto", "cuda").split(",")
    named = ["cuda:0" if each == "cuda" else each for each in named]
    if absent := [each for each in named if each not in every] or ([] if named else [config.name]):
        raise DeviceError(f"device {absent[0]} not found ({there} CUDA devices found)", fix=FOUND_FIX)
    if len(named) == 1:
        return named
    kinds = {each: torch.cuda.get_device_properties(each) for each in named}
    if len({(kind.total_memory, kind.multi_processor_count, kind.name) for kind in kinds.values()}) > 1:
        what = f"{', '.join(f'{each} is {kind.name}' for each, kind in kinds.items())}: all would wait for the slowest"
        raise DeviceError(what, fix="Name devices that are alike")
    if len(set(named)) < len(named):
        raise DeviceError(f"device.name names a device twice: {config.name}", fix="Name each once")
    return named
