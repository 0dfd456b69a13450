"""Wheels for each processor: what is inside was compiled for it, and needs nothing from the machine."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIBRARY = "p2ptrain/exact/libnative.so"
MACHINES = {"x86_64": 62, "aarch64": 183}  # in an ELF header
DYNAMIC, NEEDED = 6, 1  # a section's type; an entry's tag
SYMBOLS, UNDEFINED = 11, 0
SECONDS = 100.0

pytest.importorskip("hatchling", reason="the [deploy] extra brings it")
zig = pytest.importorskip("ziglang", reason="the [deploy] extra brings it")


def built(folder: Path, machine: str, compiled_for: str) -> subprocess.CompletedProcess[str]:
    cache = str(folder / "cache")
    return subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder],
        cwd=ROOT,
        env=os.environ
        | {"P2PTRAIN_MACHINE": machine, "CC": f"{Path(zig.__file__).parent}/zig cc -target {compiled_for}-linux-musl"}
        | {"ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache},
        text=True, check=False, timeout=SECONDS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def entries(library: bytes, kind: int, form: str) -> list[tuple[int, ...]]:
    """Returns the entries of the one section of this type."""
    (start,) = struct.unpack_from("<Q", library, 40)
    size, count = struct.unpack_from("<HH", library, 58)
    sections = [struct.unpack_from("<IIQQQQ", library, start + number * size) for number in range(count)]
    [(offset, length)] = [each[4:6] for each in sections if each[1] == kind]
    return list(struct.iter_unpack(form, library[offset : offset + length]))


@pytest.mark.parametrize("machine", MACHINES)
def test_a_wheel_holds_what_was_compiled_for_the_processor_in_its_name(machine: str, tmp_path: Path) -> None:
    own = ROOT / LIBRARY
    before = own.read_bytes() if own.exists() else None
    done = built(tmp_path, machine, machine)
    [wheel] = tmp_path.glob("*.whl")
    assert wheel.name.endswith(f"-py3-none-manylinux_2_17_{machine}.musllinux_1_1_{machine}.whl"), done.stdout
    library = zipfile.ZipFile(wheel).read(LIBRARY)
    assert library[:6] == b"\x7fELF\x02\x01", "64 bits, little-endian"
    assert struct.unpack_from("<H", library, 18) == (MACHINES[machine],)
    assert [value for tag, value in entries(library, DYNAMIC, "<QQ") if tag == NEEDED] == [], "another library"
    undefined = [name for name, _, _, section, _, _ in entries(library, SYMBOLS, "<IBBHQQ") if section == UNDEFINED]
    assert undefined == [0], "a function of another library"
    assert (own.read_bytes() if own.exists() else None) == before, "the one of this checkout is for this processor"


def test_a_compiler_for_another_processor_makes_no_wheel(tmp_path: Path) -> None:
    done = built(tmp_path, "aarch64", "x86_64")
    assert (done.returncode, [*tmp_path.glob("*.whl")]) == (1, [])
    assert "compiles for another processor than aarch64" in done.stdout
