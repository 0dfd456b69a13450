"""Writes constraints.txt: a version of each package, and the hashes of its files for Linux x86-64: `make lock`.

It also writes tests/arm/wheels.txt, with the files for Arm that `make test-arm` takes.

uv resolves what pyproject.toml names, for all supported versions of Python at once. PyTorch's builds for CPUs are not
on the usual index: their hashes stay while torch's version does, and `--torch-index URL` reads those of a new one.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from urllib.request import urlopen

LOCKED = Path(__file__).parents[1] / "constraints.txt"
FOR_ARM = LOCKED.with_name("tests") / "arm/wheels.txt"
TOOLS = ["editables", "pip>=26.3", "uv"]  # build an editable install, check the hashes, write this file
HERE = (
    "implementation_name == 'cpython' and platform_machine == '{machine}'"
    " and platform_python_implementation == 'CPython' and sys_platform == 'linux'"
)
# What tests/exact imports. torch: the last one whose wheel for Arm comes without CUDA, which takes gigabytes more.
ON_ARM = ["torch==2.10.0", "numpy", "blake3", "msgspec", "pydantic-settings", "psutil", "safetensors", "nvidia-ml-py"]
ON_ARM += ["scipy", "pytest", "pytest-asyncio", "pytest-timeout", "hypothesis"]
EXPORT = "-m uv export --quiet --format=requirements-txt --no-emit-project --no-annotate --no-header"
HEAD = """\
# The exact version of everything that is installed, on Linux x86-64 with Python 3.11 to 3.14, and the hashes of its
# files: pip refuses any other file. pyproject.toml says what the code needs, this file what it was tested with.
# Written by `make lock`. torch has the hashes of PyPI's builds, for CUDA, and of PyTorch's builds for CPUs (+cpu).
"""
HEAD_FOR_ARM = """\
# The files that `make test-arm` takes, for Linux on Arm with Python 3.11 to 3.14, at the versions of constraints.txt;
# but torch is the last one whose wheel for Arm comes without CUDA. Written by `make lock`.
"""
TORCH = re.compile(r"^torch==(\S+) \\\n((?: +--hash=\S+(?: \\)?\n)+)", re.MULTILINE)


def needed_here() -> list[str]:
    whole = tomllib.loads(LOCKED.with_name("pyproject.toml").read_text())
    needed: list[str] = TOOLS + whole["build-system"]["requires"]
    for more in (whole["project"]["dependencies"], *whole["project"]["optional-dependencies"].values()):
        needed += more
    return needed


def resolve(needed: list[str], pins: list[str], machine: str) -> str:
    """Returns what uv locks, in pip's format, at these versions where they are named."""
    project = tomllib.loads(LOCKED.with_name("pyproject.toml").read_text())["project"]
    about = {"name": "lock", "version": "0", "requires-python": project["requires-python"], "dependencies": needed}
    where = HERE.format(machine=machine)
    lines = ["[project]", *(f"{key} = {json.dumps(value)}" for key, value in about.items())]
    lines += ["[tool.uv]", f'environments = ["{where}"]', f"constraint-dependencies = {json.dumps(pins)}"]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "pyproject.toml").write_text("\n".join(lines))
        command = [sys.executable, *EXPORT.split()]
        done = subprocess.run(command, cwd=folder, check=True, text=True, stdout=subprocess.PIPE)  # noqa: S603
    return done.stdout.replace(f" ; {where}", "").replace(f" and {where}", "")


def pinned(text: str) -> list[str]:
    return re.findall(r"^[\w.-]+==[^\s;]+", text, re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--newest", action="store_true", help="take the newest versions, not those of constraints.txt")
    parser.add_argument("--torch-index", metavar="URL", help="read the hashes of torch's builds for CPUs there")
    arguments = parser.parse_args()
    old = LOCKED.read_text()
    locked = resolve(needed_here(), [] if arguments.newest else pinned(old), "x86_64")
    (version, hashes), (version_before, hashes_before) = TORCH.findall(locked)[0], TORCH.findall(old)[0]
    known = {*re.findall(r"sha256:(\w+)", hashes + (hashes_before if version == version_before else ""))}
    if arguments.torch_index:
        page = urlopen(f"{arguments.torch_index}/torch/").read().decode()  # noqa: S310  # a maintainer types it
        name = rf"torch-{re.escape(version)}(?:\+|%2B)cpu-(?:cp31[1234]-){{2}}manylinux\w+x86_64\.whl"
        known |= {*re.findall(rf"{name}#sha256=(\w+)", page)}
    torch = " \\\n".join([f"torch=={version}", *(f"    --hash=sha256:{each}" for each in sorted(known))])
    LOCKED.write_text(HEAD + TORCH.sub(lambda _: f"{torch}\n", locked))
    pins = [each for each in pinned(locked) if not each.startswith("torch==")]
    FOR_ARM.write_text(HEAD_FOR_ARM + resolve(ON_ARM, pins, "aarch64"))


if __name__ == "__main__":
    main()
