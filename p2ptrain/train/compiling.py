"""Compiles a model's layers with torch.compile before the first step; where that fails, training goes on without.

A pass of another size is compiled once more, then for sizes of all kinds, and once for a single sequence. Layers that
are computed again (checkpointing) are compiled as well."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import perf_counter

import torch
from torch import nn

from p2ptrain.config import DeviceConfig
from p2ptrain.errors import DeviceError
from p2ptrain.exact.kernels.launches import failures
from p2ptrain.models.built_in import Model

FIX = "Install a C++ compiler (apt-get install g++), or set device.compile = false"

log = logging.getLogger("p2ptrain.train")


class Compiling:
    """Whether a model's layers are compiled, and what remains to be done for it."""

    def __init__(
        self,
        model: Model,
        config: DeviceConfig,
        device: torch.device,
        *,
        is_built_in: bool,
        layers: nn.ModuleList | None = None,
    ) -> None:
        """is_built_in: other models take far longer to compile, and win less: these only if the owner wants it
        layers: are compiled one by one in passes in which other processes wait, so that none is taken to try it"""
        self.model, self.device = model, device
        self.is_wanted = config.compile is True  # by the owner, who is not to get anything else
        self.is_on = self.is_wanted or (config.compile == "auto" and device.type == "cuda" and is_built_in)
        self.is_due = self.is_on  # the first pass
        if self.is_on:
            self._try(lambda: torch.compile(torch.sin)(torch.ones(2, device=device)))
        if self.is_on and layers is not None:
            for each in layers:
                each.compile()
            self._leave_eager_what_fails()
        elif self.is_on:
            model.compile_layers()

    def begin(self, first_pass: Callable[[], object]) -> None:
        """Compiles in a first pass."""
        self.is_due, began = False, perf_counter()
        log.info("compiling the layers for %s before the first step", self.device)
        self._try(first_pass)
        if self.is_on:
            log.info("the layers are compiled: the first pass took %.1f s", perf_counter() - began)
            self._leave_eager_what_fails()  # a pass of another size

    def _leave_eager_what_fails(self) -> None:
        torch._dynamo.config.load_config({"suppress_errors": not self.is_wanted})

    def _try(self, work: Callable[[], object]) -> None:
        try:
            work()
        except failures() as error:
            first, *more = (str(error).strip() or type(error).__name__).splitlines()
            why = " ".join([first, *more[:1]]) if first.endswith(":") else first
            if self.is_wanted:
                raise DeviceError(f"torch.compile does not work here: {why}", fix=FIX) from error
            log.warning("training on %s goes on without torch.compile, which takes longer: %s", self.device, why)
            self.is_on = self.is_due = False
            for module in self.model.modules():
                module._compiled_call_impl = None  # as before `compile`, for which torch has no opposite
