"""The arithmetic on Arm, emulated: the golden roots, the codec and its compiled half, and all other tests of `exact`.

torch chooses its kernels by the processor, so there are two. The package is the wheel that people on Arm install.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.arm import MACHINE, is_there, lay_out, run, run_tests

pytestmark = [
    pytest.mark.arm,
    pytest.mark.timeout(3_600),
    pytest.mark.skipif(not is_there(), reason="make test-arm brings qemu, and Python for Arm"),
]
PROCESSORS = {  # what qemu calls them, and whose kernels torch then takes
    "neoverse-n1": "DEFAULT",  # NEON: Graviton 2, Ampere Altra
    "max,sme=off,sve256=on,sve512=off": "SVE256",  # Graviton 3
}
SECONDS = 3_500.0  # eleven minutes on two quiet cores
TESTS = [
    "tests/exact",
    "--ignore=tests/exact/test_budgets.py",  # counts what a card would do
    *(  # which would tell how fast qemu is
        f"--deselect=tests/exact/test_codec.py::{name}"
        for name in (
            "test_a_hundred_thousand_malformed_payloads_are_refused_or_canonical",
            "test_unpacking_ten_million_parameters_takes_less_than_five_milliseconds",
        )
    ),
]
PASSED = re.compile(r"^(\d+) passed, 2 deselected in ", re.MULTILINE)
PASSED_MIN = 600
ABOUT = """\
import platform, torch
from p2ptrain.exact import native
print(platform.machine(), torch.backends.cpu.get_cpu_capability(), native.library() is not None)
"""


@pytest.fixture(params=PROCESSORS)
def processor(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def laid(tmp_path: Path) -> Path:
    [wheel] = (MACHINE / "wheel").glob("p2ptrain-*aarch64.whl")
    lay_out(wheel, tmp_path)
    return tmp_path


def test_the_bits_are_those_of_other_processors(processor: str, laid: Path) -> None:
    about = run(laid, processor, ABOUT, seconds=SECONDS)
    assert about.stdout.split() == ["aarch64", PROCESSORS[processor], "True"], about.stdout
    tested = run_tests(laid, processor, "-q", "--no-skips", "--timeout=1800", *TESTS, seconds=SECONDS)
    found = PASSED.search(tested.stdout)
    assert tested.returncode == 0, tested.stdout[-10_000:]
    assert found
    assert int(found[1]) >= PASSED_MIN
