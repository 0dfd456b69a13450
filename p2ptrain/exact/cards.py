"""Tells what is wrong with a graphics card: one that torch cannot use, or that has failed at work."""

from __future__ import annotations

import re
import warnings

import torch

from p2ptrain.errors import DeviceError

# Older torch, Triton and the libraries of a card raise no specific error type.
ACCELERATOR_ERROR: type[BaseException] | tuple[()] = getattr(torch, "AcceleratorError", ())
SIGNS = re.compile(r"(CUDA|HIP|cuDNN|MIOpen) error|CU(BLAS|DNN|SOLVER)_STATUS|Triton Error \[")
AGAIN = (
    "Start the node again: it continues from what is on its disk. If this comes back, `dmesg` and `nvidia-smi` say why "
    '(heat, power, overclocking, the driver); device.name = "cpu" does without the card'
)


def first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def failure_of(error: BaseException) -> DeviceError | None:
    """Returns what to say of an error by which a card fails; all that this process asks of it later fails, too."""
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, map(failure_of, error.exceptions)), None)
    if isinstance(error, ACCELERATOR_ERROR) or (isinstance(error, RuntimeError) and SIGNS.search(str(error))):
        return DeviceError(f"the graphics card has failed: {first_line(error)}", fix=AGAIN)
    return None


def lacks_compiler(error: BaseException) -> bool:
    """Whether Triton has found no C compiler, which it says in a RuntimeError."""
    return "C compiler" in str(error)


def cannot_be_opened(device: torch.device, error: BaseException) -> DeviceError:
    fix = "Close other programs that use it, or set device.name"
    return DeviceError(f"{device} cannot be opened: {first_line(error)}", fix=fix)


def why_unusable() -> str:
    """Returns why torch cannot use a card that is there, such as an old driver; torch itself says so only once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.cuda.is_available() or not caught:
            return ""
    return " ".join(str(caught[0].message).split()).split(" Please update")[0]
