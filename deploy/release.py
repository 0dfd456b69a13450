"""Makes the files of a release from the last commit, in dist/: `make release`.

The wheel and the source archive are built twice, in two folders, as two users and at two dates, and have to be the
same bytes; the wheel comes from the source archive. Beside them: requirements.txt with the hashes of all that the wheel
takes, requirements-cpu.txt for PyTorch's builds for CPUs, sbom.cdx.json, and SHA256SUMS.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy import sbom

ROOT = Path(__file__).parents[1]
ENTRY = re.compile(r"^([a-z0-9-]+)==([^\s;]+)(?: \\\n +--hash=\S+)+\n", re.MULTILINE)
CUDA = re.compile(
    r"(nvidia|cuda)-(?!ml-py)|triton$"
)  # what torch takes where it is built for CUDA, and nothing else does
DATES = (1_000_000_000, 1_700_000_000)  # of the files that are built from, which must not matter
HEAD = """\
# All that p2ptrain {version} takes on Linux x86-64 with Python {pythons}, and the hash of each file. In the folder
# of this file and the wheel: pip install --require-hashes -r {name}
"""
FOR_CPUS = """\
# Without CUDA: add --extra-index-url with the index that PyTorch's installation page names for CPUs.
"""


class ReleaseError(Exception):
    """What was built is not fit to be released."""


@dataclass(frozen=True, slots=True)
class Package:
    """A package of constraints.txt.

    entry: its lines there, with the hashes
    """

    name: str
    version: str
    entry: str


def packages(project: dict[str, object], constraints: str) -> list[Package]:
    """Returns all that the wheel takes without extras, by name, under any of its versions of Python, and for CUDA."""
    known = {entry[1]: Package(entry[1], entry[2], entry[0]) for entry in ENTRY.finditer(constraints)}
    seen, todo = set[tuple[str, str]](), [Requirement(each) for each in project["dependencies"]]  # type: ignore[attr-defined]
    while todo:
        each = todo.pop()
        for extra in {"", *each.extras}:
            name = canonicalize_name(each.name)
            if (name, extra) not in seen:
                seen.add((name, extra))
                todo += needed_by(name, extra, pythons(project))
    needed = {name for name, _ in seen} | {*filter(CUDA.match, known)}
    return [known[name] for name in sorted(needed)]


def needed_by(name: str, extra: str, versions: list[str]) -> list[Requirement]:
    """Returns what the metadata of an installed package names, under any of these versions of Python."""
    wanted = [Requirement(line) for line in metadata.requires(name) or []]
    places = [
        {"extra": extra, "python_version": version, "python_full_version": f"{version}.0"} for version in versions
    ]
    return [each for each in wanted if each.marker is None or any(map(each.marker.evaluate, places))]


def pythons(project: dict[str, object]) -> list[str]:
    return re.findall(r"Python :: (3\.\d+)", str(project["classifiers"]))


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout  # noqa: S603, S607


def committed_at(commit: str) -> int:
    """Returns the seconds since 1970."""
    return int(git("log", "-1", "--format=%ct", commit))


def build(commit: str, date: int, folder: Path) -> dict[str, bytes]:
    """Builds the source archive, and the wheel from it. Returns what is in each file."""
    source, built = folder / "source", folder / "dist"
    with tarfile.open(fileobj=io.BytesIO(git("archive", commit))) as file:
        file.extractall(source, filter="data")
    for path in [*source.rglob("*"), source]:
        os.utime(path, (date, date))
        path.chmod(path.stat().st_mode & (0o777 if date == DATES[0] else 0o700))
    command = [sys.executable, "-m", "uv", "build", "--quiet", "--python", sys.executable, "--require-hashes"]
    command += ["--build-constraint", str(source / "constraints.txt"), "--out-dir", str(built), str(source)]
    own = os.environ | {"SOURCE_DATE_EPOCH": str(committed_at(commit)), "TZ": f"here{date % 12}"}
    subprocess.run(command, check=True, env=own, umask=0o022 if date == DATES[0] else 0o077)  # noqa: S603
    return {path.name: path.read_bytes() for path in sorted(built.glob("p2ptrain-*"))}


def build_twice(commit: str) -> dict[str, bytes]:
    """Builds, and once more elsewhere; raises ReleaseError unless each byte is the same."""
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory(suffix="-of-another-length") as second:
        built, again = (build(commit, date, Path(folder)) for date, folder in zip(DATES, (first, second), strict=True))
    if unequal := [name for name in {*built, *again} if built.get(name) != again.get(name)]:
        raise ReleaseError(f"built twice, these differ: {', '.join(sorted(unequal))}")
    return built


def requirements(project: dict[str, object], taken: list[Package], wheel: str, digest: str, is_cpu: bool) -> str:
    """Returns a file for pip: the wheel and all that it takes, each with its hashes."""
    versions = pythons(project)
    head = HEAD.format(
        version=wheel.split("-")[1],
        pythons=f"{versions[0]} to {versions[-1]}",
        name="requirements-cpu.txt" if is_cpu else "requirements.txt",
    )
    entries = [each.entry for each in taken if not is_cpu or not CUDA.match(each.name)]
    if is_cpu:  # by its name: pip would take PyPI's where an index does not tell hashes, and uv has none for this name
        entries = [re.sub(r"^(torch==\S+)", r"\1+cpu", entry) for entry in entries]
    return head + FOR_CPUS * is_cpu + f"./{wheel} \\\n    --hash=sha256:{digest}\n" + "".join(entries)


def compiler() -> str:
    """Returns what the compiler calls itself: another one makes other bytes of libnative.so."""
    command = [*shlex.split(os.environ.get("CC") or "cc"), "--version"]
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout.splitlines()[0]  # noqa: S603  # CC


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folder", type=Path, help="where the files go")
    parser.add_argument("--commit", default="HEAD", help="what is released")
    arguments = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    commit = git("rev-parse", arguments.commit).decode().strip()
    files = build_twice(commit)
    (wheel,) = (name for name in files if name.endswith(".whl"))
    digest = hashlib.sha256(files[wheel]).hexdigest()
    taken = packages(project, (ROOT / "constraints.txt").read_text())
    for is_cpu in (False, True):
        name = "requirements-cpu.txt" if is_cpu else "requirements.txt"
        files[name] = requirements(project, taken, wheel, digest, is_cpu).encode()
    files["sbom.cdx.json"] = sbom.of(wheel, digest, taken, compiler(), committed_at(commit))
    sums = "".join(f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in sorted(files.items()))
    files["SHA256SUMS"] = sums.encode()
    arguments.folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (arguments.folder / name).write_bytes(content)
    sys.stdout.write(sums)


if __name__ == "__main__":
    main()
