"""Wheels for a machine without a network that has Python 3.12, torch, numpy and transformers: `make gpu-wheels`.

All that `p2ptrain.train`, these benchmarks and tests/gpu import besides those three; a test holds the list to it. The
versions and hashes are those of constraints.txt, for Linux on x86-64.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON = "3.12"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux_2_12_x86_64")
PACKAGES = (
    *("annotated-types", "blake3", "msgspec", "nvidia-ml-py", "psutil"),
    *("pydantic", "pydantic-core", "pydantic-settings", "python-dotenv", "typing-extensions", "typing-inspection"),
    *("iniconfig", "packaging", "pluggy", "pygments", "pytest"),  # the tests
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "out" / "gpu-wheels")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", PYTHON, "--implementation", "cp", "--dest", str(folder)]
    command += ["--constraint", str(ROOT / "constraints.txt"), "--require-hashes"]
    command += [part for platform in PLATFORMS for part in ("--platform", platform)]
    subprocess.run([*command, *PACKAGES], check=True)  # noqa: S603  # pip, for what is listed here
    found = sorted(folder.glob("*.whl"))
    for wheel in found:
        print(f"{wheel.stat().st_size / 1e6:6.2f} MB  {wheel.name}")
    print(f"{sum(wheel.stat().st_size for wheel in found) / 1e6:6.2f} MB in {folder}")


if __name__ == "__main__":
    main()
