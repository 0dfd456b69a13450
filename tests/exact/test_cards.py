"""A graphics card on its bad days: what it says then, and who does its work."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from subprocess import CalledProcessError
from typing import Any

import pytest
import torch

from p2ptrain.config import DeviceConfig, RecipeConfig
from p2ptrain.errors import DeviceError, MemoryShortError
from p2ptrain.exact import exactness
from p2ptrain.exact.cards import failure_of, why_unusable
from p2ptrain.exact.exactness import check_exactness, check_kernels
from p2ptrain.exact.kernels import launches
from p2ptrain.exact.shortage import told
from p2ptrain.train.devices import find_device

CPU, CARD = torch.device("cpu"), torch.device("cuda", 0)
NO_COMPILER = RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")
NO_HEADERS = CalledProcessError(1, ["gcc", "main.c"])  # Python.h is missing
SMALL = RecipeConfig(name="local", chunk=32, k=8)
LOST = [
    torch.AcceleratorError("CUDA error: device-side assert triggered\nmore"),
    RuntimeError("CUDA error: unspecified launch failure\nmore"),
    RuntimeError("HIP error: the operation cannot be performed"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[torch.device, str]]:
    found: dict[torch.device, str] = {}
    monkeypatch.setattr(launches, "refused", found)
    yield found
    launches.tables.clear()


def test_without_triton_torch_does_the_arithmetic_and_a_line_says_so(
    refused: dict[torch.device, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launches.importlib.util, "find_spec", lambda name: None)
    for _ in range(3):
        assert not launches.is_usable(CARD)
    assert [each.getMessage() for each in caplog.records] == [
        "cuda:0 does a round's arithmetic in torch, which takes longer: Triton is not installed"
    ]


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (NO_COMPILER, "(RuntimeError: Failed to find C compiler. Please specify via CC environment variable.)"),
        (NO_HEADERS, "(CalledProcessError: Command '['gcc', 'main.c']' returned non-zero exit status 1.)"),
        (ModuleNotFoundError("No module named 'triton'"), "(ModuleNotFoundError: No module named 'triton')"),
    ],
)
def test_programs_that_cannot_be_compiled_at_the_start_are_left_to_torch_with_a_line(
    refused: dict[torch.device, str],
    error: Exception,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def program(name: str) -> Any:
        raise error

    monkeypatch.setattr(launches, "_program", program)
    for module in (launches, exactness):
        monkeypatch.setattr(module, "is_usable", lambda device: True)
    check_kernels(SMALL, CPU)
    assert refused == {torch.device("cpu", 0): f"the programs for a card do not run here {says}"}
    assert len(caplog.records) == 1


@pytest.mark.parametrize("error", [NO_COMPILER, NO_HEADERS])
def test_a_compiler_that_goes_away_later_costs_no_round(refused: dict[torch.device, str], error: Exception) -> None:
    def work() -> None:
        raise error

    assert launches.attempt(work, CARD) is None
    assert refused[CARD].startswith("a program cannot be compiled (")


@pytest.mark.parametrize("error", LOST)
def test_a_card_that_fails_is_told_from_a_mistake_and_from_short_memory(error: Exception) -> None:
    found = failure_of(ExceptionGroup("", [ValueError("another"), ExceptionGroup("", [error])]))
    assert found is not None
    assert found.problem == f"the graphics card has failed: {str(error).splitlines()[0]}"
    assert "continues from what is on its disk" in found.fix
    with pytest.raises(DeviceError, match="the graphics card has failed"), told("training", CPU):
        raise error
    with pytest.raises(type(error)):
        launches.attempt(lambda: (_ for _ in ()).throw(error), CARD)  # torch could not do its work either


def test_what_is_no_failure_of_a_card_stays_what_it_is() -> None:
    for error in (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("CUDA error: quoted")):
        assert failure_of(error) is None
        with pytest.raises(type(error)), told("training", CPU):
            raise error
    with pytest.raises(MemoryShortError), told("training", CPU):
        raise RuntimeError("CUDA error: out of memory")


def unavailable(text: str) -> Callable[[], bool]:
    def look() -> bool:
        if text:
            warnings.warn(text, UserWarning, stacklevel=2)
        return False

    return look


def test_an_old_driver_is_named_in_a_line_and_no_card_is_no_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    old = "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040)."
    monkeypatch.setattr(torch.cuda, "is_available", unavailable(f"{old} Please update your GPU driver\nby downloading"))
    assert why_unusable() == old
    for there in (unavailable(""), lambda: True):
        monkeypatch.setattr(torch.cuda, "is_available", there)
        assert why_unusable() == ""


def test_a_card_that_the_driver_lists_and_cannot_open_ends_the_start_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def busy(**_: object) -> bool:
        raise RuntimeError("CUDA-capable device(s) is/are busy or unavailable\nmore")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", busy)
    for name in ("auto", "cuda"):
        with pytest.raises(DeviceError, match=r"^cuda:0 cannot be opened: CUDA-capable device\(s\) is/are busy or "):
            find_device(DeviceConfig(name=name))
    assert find_device(DeviceConfig(name="cpu"))[0] == CPU


@pytest.mark.parametrize("name", ["mps", "xpu"])
def test_a_kind_of_device_without_exact_sums_is_refused_in_a_line(name: str) -> None:
    with pytest.raises(DeviceError, match=f"^{name} is not known to compute exactly"):
        check_exactness(SMALL, torch.device(name))


def test_an_apple_gpu_is_never_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device(DeviceConfig())[0] == CPU
