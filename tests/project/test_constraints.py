"""What is installed has a version and hashes in constraints.txt, and pip takes no other file."""

from __future__ import annotations

import ast
import hashlib
import platform
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TEXT = (ROOT / "constraints.txt").read_text()
ENTRY = re.compile(r"^([a-z0-9-]+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n", re.MULTILINE)
LOCKED = {name: (version, hashes.count("--hash")) for name, version, hashes in ENTRY.findall(TEXT)}
SECONDS = 60.0


def test_each_entry_is_a_version_with_hashes_and_no_index_is_named() -> None:
    assert ENTRY.sub("", re.sub(r"^#.*\n", "", TEXT, flags=re.MULTILINE)) == ""
    assert "://" not in TEXT
    assert LOCKED["torch"][1] >= 6, "three versions of Python, for CUDA and for CPUs"
    assert Version(LOCKED["pip"][0]) >= Version("26.3"), "older ones take no hashes from constraints"


def test_files_for_arm_have_hashes_and_the_same_versions_but_for_torch() -> None:
    text = (ROOT / "tests/arm/wheels.txt").read_text()
    entry = re.compile(
        r"^([a-z0-9-]+)==(\S+)(?: ; \S+ >= '\S+')?(?: \\\n    --hash=sha256:[0-9a-f]{64})+\n", re.MULTILINE
    )
    assert entry.sub("", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)) == ""
    versions = dict(entry.findall(text))
    assert {"torch", "numpy", "blake3", "pytest"} <= versions.keys()
    assert {name for name, version in versions.items() if LOCKED[name][0] != version} == {"torch"}


def with_what_they_need(requirements: list[str]) -> set[str]:
    """Returns the names of these packages and of all that they need in turn, as far as they are installed."""
    todo, seen = [Requirement(each) for each in requirements], set[tuple[str, str]]()
    while todo:
        each = todo.pop()
        name = canonicalize_name(each.name)
        for extra in {"", *each.extras}:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            try:
                needed = [Requirement(line) for line in metadata.requires(name) or []]
            except metadata.PackageNotFoundError:
                continue  # of an extra that is not installed here: its own name is checked
            todo += [more for more in needed if more.marker is None or more.marker.evaluate({"extra": extra})]
    return {name for name, _ in seen}


@pytest.mark.skipif((sys.platform, platform.machine()) != ("linux", "x86_64"), reason="it lists what this system takes")
def test_all_that_the_package_takes_is_listed_with_its_extras_and_what_builds_it() -> None:
    named = [*PROJECT["project"]["dependencies"], *PROJECT["build-system"]["requires"], "editables"]
    named += [each for extra in PROJECT["project"]["optional-dependencies"].values() for each in extra]
    assert with_what_they_need(named) - LOCKED.keys() == set()
    for name in ("torch", "msgspec", "pytest"):
        assert metadata.version(name).partition("+")[0] == LOCKED[name][0]


def test_what_tests_import_comes_with_what_setup_installs() -> None:
    """A package that happens to be here, from an extra or by hand, is missing elsewhere."""
    installed = with_what_they_need(
        [*PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"]["dev"], "p2ptrain"]
    )
    own = {"p2ptrain", "tests", "benchmarks", "docs", "deploy", *sys.stdlib_module_names}
    distributions = metadata.packages_distributions()
    imported = {
        name.partition(".")[0]
        for path in (ROOT / "tests").rglob("*.py")
        if path.name not in ("other_libp2p.py", "compiled.py")  # which run with packages of their own
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([each.name for each in node.names] if isinstance(node, ast.Import) else [node.module or ""])
    }
    assert "torch" in imported
    missing = {
        name: distributions.get(name)
        for name in imported - own
        if not installed & {canonicalize_name(each) for each in distributions.get(name, [])}
    }
    assert missing == {}


@pytest.mark.parametrize(("is_changed", "status"), [(False, 0), (True, 2)])
def test_a_file_with_another_hash_is_not_installed(is_changed: bool, status: int, tmp_path: Path) -> None:
    """Runs the command of `make setup`, with a wheel and constraints made here."""
    wheel = tmp_path / "smallest-1.0-py3-none-any.whl"
    about = "smallest-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: smallest\nVersion: 1.0\n")
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{about}/RECORD", f"{about}/METADATA,,\n{about}/WHEEL,,\n{about}/RECORD,,\n")
    expected = hashlib.sha256(wheel.read_bytes() + b"changed" * is_changed).hexdigest()
    (tmp_path / "constraints.txt").write_text(f"smallest==1.0 \\\n    --hash=sha256:{expected}\n")
    rule = "try: ; $(INSTALL) --dry-run --no-index --find-links . smallest"
    done = subprocess.run(
        ["make", "-C", str(tmp_path), "-f", str(ROOT / "Makefile"), "--eval", rule, f"VENV={sys.prefix}", "try"],
        text=True, check=False, timeout=SECONDS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert (done.returncode, "DO NOT MATCH THE HASHES" in done.stdout) == (status, is_changed), done.stdout
