"""An emulated Arm machine without root, in a folder: qemu, Debian's CPython and libraries for Arm, wheels from PyPI.

`python -m tests.helpers.arm FOLDER` makes one (`make test-arm` does). It takes Debian's apt, which checks signatures;
wheels are checked against the hashes of tests/arm/wheels.txt.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]
MACHINE = Path(os.environ.get("ARM", HERE / "out/arm")).absolute()
WHEELS = HERE / "tests/arm/wheels.txt"
PACKAGES = ("python3", "libstdc++6", "qemu-user-static:{here}")
APT = """\
APT::Architecture "arm64";
APT::Architectures {{ "arm64"; "{here}"; }};
APT::Sandbox::User "";
Acquire::Languages "none";
Dir::State "{folder}";
Dir::State::status "{folder}/status";
Dir::Cache "{folder}/cache";
"""
GLIBC = (17, 24, 26, 27, 28)  # the minor versions that wheels for Arm name
# qemu starts a program for Arm, but not what that starts: to Python, Python is this script.
STARTER = """\
#!/bin/sh
exec "{machine}/debian/usr/bin/qemu-aarch64-static" "{python}" "$@"
"""
NAMED = "import sys; sys.executable = {starter!r}; import pytest; sys.exit(pytest.main(sys.argv[1:]))"
LAID = ("tests", "benchmarks", "scenarios", "pyproject.toml", "node_config.example.toml")  # beside the package


def is_there() -> bool:
    return (MACHINE / ".installed").exists()


def install(machine: Path) -> None:
    """Makes the machine; what is there of an earlier one goes."""
    shutil.rmtree(machine, ignore_errors=True)
    _unpack_debian(machine)
    starter, python = machine / "python", _python(machine)
    starter.write_text(STARTER.format(machine=machine, python=python))
    starter.chmod(0o755)
    tags = [f"--platform=manylinux_2_{minor}_aarch64" for minor in GLIBC] + ["--platform=manylinux2014_aarch64"]
    version = python.name.removeprefix("python")
    subprocess.run(
        [
            sys.executable, "-m", "pip", "install", "--quiet", "--quiet", "--no-deps", "--require-hashes", *tags,
            f"--python-version={version}", "--only-binary=:all:", "--target", machine / "site", "--requirement", WHEELS,
        ],
        check=True,
    )  # fmt: skip


def _unpack_debian(machine: Path) -> None:
    apt, root = machine / "apt", machine / "debian"
    for folder in (apt / "lists/partial", apt / "cache/archives/partial", root):
        folder.mkdir(parents=True)
    (apt / "status").touch()  # nothing is installed, so that all that is needed is fetched
    here = subprocess.run(
        ["dpkg", "--print-architecture"], check=True, text=True, stdout=subprocess.PIPE
    ).stdout.strip()
    (apt / "apt.conf").write_text(APT.format(here=here, folder=apt))
    environment = os.environ | {"APT_CONFIG": str(apt / "apt.conf")}
    fetch = ["apt-get", "install", "--download-only", "--yes", "--no-install-recommends"]
    for command in (["apt-get", "update"], [*fetch, *(each.format(here=here) for each in PACKAGES)]):
        subprocess.run([*command, "-q", "-q"], check=True, env=environment)
    for package in sorted((apt / "cache/archives").glob("*.deb")):
        subprocess.run(["dpkg", "-x", package, root], check=True)
    shutil.rmtree(apt)


def _python(machine: Path) -> Path:
    return next(each for each in sorted(machine.glob("debian/usr/bin/python3.*")) if each.name[8:].isdigit())


def lay_out(wheel: Path, folder: Path) -> None:
    """Lays the package of a wheel into a folder, and the tests beside it."""
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder)
    for name in LAID:
        source = HERE / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder)


def run(folder: Path, processor: str, code: str, *arguments: str, seconds: float) -> subprocess.CompletedProcess[str]:
    """Runs a line of Python there, on a processor that qemu knows."""
    environment = {
        "QEMU_LD_PREFIX": str(MACHINE / "debian"),
        "QEMU_CPU": processor,
        "PYTHONPATH": str(MACHINE / "site"),
    }
    environment |= {name: os.environ[name] for name in ("CI", "PATH") if name in os.environ}
    return subprocess.run(
        [MACHINE / "python", "-c", code, *arguments],
        cwd=folder, env=environment | {"OMP_NUM_THREADS": "1"}, timeout=seconds, check=False, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def run_tests(folder: Path, processor: str, *arguments: str, seconds: float) -> subprocess.CompletedProcess[str]:
    code = NAMED.format(starter=str(MACHINE / "python"))
    return run(folder, processor, code, "-p", "no:cacheprovider", *arguments, seconds=seconds)


if __name__ == "__main__":
    install(Path(sys.argv[1]).absolute())
