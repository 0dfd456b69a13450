"""The programs as a card would run them, compiled on this processor: what their instructions say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="make test-kernels brings Triton")
pytestmark = pytest.mark.kernels
COMPILED = Path(__file__).with_name("compiled.py")
CARDS = (80, 89, 90)  # A100, RTX 40, H100


def instructions(name: str, card: int, *options: str) -> str:
    """Returns the instructions of a program; in a process of its own, because here Triton only interprets."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, str(COMPILED), name, str(card), *options]
    made = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert made.returncode == 0, made.stderr[-2000:]
    return made.stdout


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("name", ["update", "update of few", "update of signs", "update of small chunks"])
def test_the_exact_path_fuses_nothing_and_flushes_nothing(name: str, card: int) -> None:
    found = instructions(name, card)
    assert re.search(r"\b[FD]MUL\b", found), "it multiplies"
    assert re.search(r"\b[FD]FMA\b", found) is None
    assert ".FTZ" not in found
    assert re.search(r"\bI(G)?MMA\b", found), "in the units for products of small integers"


def test_with_fusion_the_check_would_see_it() -> None:
    assert re.search(r"\bFFMA\b", instructions("update of signs", 90, "fusion"))


NAMES = re.findall(r'^    "([a-z_ ]+)": \(', COMPILED.read_text(), re.MULTILINE)  # without importing Triton to compile


@pytest.mark.parametrize("name", NAMES)
def test_no_program_spills_on_a_large_card(name: str) -> None:
    assert re.search(r"\b(LDL|STL)\b", instructions(name, 90)) is None
    assert len(NAMES) == 20
