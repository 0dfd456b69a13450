"""A release: built twice with the same bytes, hashes of all that it takes, a bill of materials; tools install it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_string
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from deploy import release, sbom
from p2ptrain import __version__
from tests.helpers.deploy import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SECONDS = 300.0
INSTALL_SECONDS = 1_200.0  # for a tool that fetches torch; a minute is usual
NAMES = ["requirements-cpu.txt", "requirements.txt", "sbom.cdx.json"]

pytestmark = pytest.mark.slow  # `make test-deploy` runs them all
for needed in ("uv", "cyclonedx", "pipx"):
    pytest.importorskip(needed, reason="the [deploy] extra brings it")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder with the release of the last commit, which `make test-deploy` has made."""
    if given := os.environ.get("RELEASE"):
        return ROOT / given
    folder = tmp_path_factory.mktemp("release")
    command = [sys.executable, "-m", "deploy.release", folder]
    done = subprocess.run(command, cwd=ROOT, check=False, text=True, stdout=subprocess.PIPE, timeout=INSTALL_SECONDS)
    assert done.returncode == 0
    assert done.stdout == (folder / "SHA256SUMS").read_text(), "what is printed"
    return folder


@pytest.fixture
def wheel(dist: Path) -> Path:
    (name,) = re.findall(r"p2ptrain-\S+\.whl", (dist / "SHA256SUMS").read_text())
    return dist / name


@pytest.fixture
def bill(dist: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((dist / "sbom.cdx.json").read_text())
    return found


def names_in(file: Path) -> set[str]:
    return {*re.findall(r"^([a-z0-9-]+)==", file.read_text(), re.MULTILINE)}


def own_environment(home: Path) -> dict[str, str]:
    """A user's who has nothing, but for what was fetched before."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL", "P2PTRAIN"))}
    if links := os.environ.get("PIP_FIND_LINKS"):
        kept["UV_FIND_LINKS"] = links
    return kept | {"HOME": str(home), "UV_CACHE_DIR": os.environ.get("UV_CACHE_DIR", str(Path.home() / ".cache/uv"))}


# ---------------------------------------------------------------------------------------------------
# The files


@pytest.mark.timeout(INSTALL_SECONDS)
def test_a_release_has_the_wheel_the_source_and_their_sums(dist: Path, wheel: Path) -> None:
    assert wheel.name.startswith(f"p2ptrain-{__version__}-py3-none-manylinux")
    names = [line.split("  ")[1] for line in (dist / "SHA256SUMS").read_text().splitlines()]
    assert names == sorted([wheel.name, f"p2ptrain-{__version__}.tar.gz", *NAMES])
    for line in (dist / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((dist / name).read_bytes()).hexdigest() == digest


def test_what_was_not_committed_is_in_no_release(dist: Path, wheel: Path) -> None:
    committed = {*release.git("ls-files").decode().splitlines()}
    with tarfile.open(dist / f"p2ptrain-{__version__}.tar.gz") as file:
        held = {name.partition("/")[2] for name in file.getnames()}
    assert held - committed == {"PKG-INFO"}
    assert {"docs/tutorial.md", "scenarios", "p2ptrain/exact/native.c"} <= held | {"scenarios"}
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("p2ptrain/")}
    examples = {name.replace("p2ptrain/examples/", "examples/", 1) for name in inside}
    assert examples - committed == {"examples/node.toml", "p2ptrain/exact/libnative.so"}


def test_two_builds_that_differ_are_no_release(monkeypatch: pytest.MonkeyPatch) -> None:
    made = iter([{"a.whl": b"1", "a.tar.gz": b"1"}, {"a.whl": b"2", "a.tar.gz": b"1"}])
    monkeypatch.setattr(release, "build", lambda *_: next(made))
    with pytest.raises(release.ReleaseError, match=r"differ: a\.whl$"):
        release.build_twice("HEAD")


def test_all_that_the_wheel_takes_has_its_hashes(dist: Path, wheel: Path) -> None:
    without = names_in(dist / "requirements-cpu.txt")
    cuda = names_in(dist / "requirements.txt") - without
    assert {"triton", "nvidia-nccl-cu13"} <= cuda
    assert {"torch", "hivemind", "nvidia-ml-py"} <= without
    assert not {"pytest", "ruff", "mypy"} & without
    assert [bool(re.search(r"^torch==\S+\+cpu ", (dist / name).read_text(), re.MULTILINE)) for name in NAMES[:2]] == [
        True,
        False,
    ]
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    for name in ("requirements.txt", "requirements-cpu.txt"):
        assert f"\n./{wheel.name} \\\n    --hash=sha256:{digest}\n" in (dist / name).read_text()


@pytest.mark.timeout(INSTALL_SECONDS)
def test_all_that_the_wheel_takes_is_what_uv_finds(dist: Path, tmp_path: Path) -> None:
    """uv reads what packages say in the index, where torch is for CUDA, and not what is installed here."""
    (tmp_path / "own.in").write_text("\n".join(PROJECT["dependencies"]))
    (tmp_path / "locked.txt").write_text(
        "\n".join(re.findall(r"^[a-z0-9-]+==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    )
    own = {name: value for name, value in os.environ.items() if name not in ("UV_FIND_LINKS", "VIRTUAL_ENV")}
    found = set[str]()
    for version in release.pythons(PROJECT):
        subprocess.run(
            [
                *(sys.executable, "-m", "uv", "pip", "compile", "--quiet", "own.in", "--constraint", "locked.txt"),
                *("--python-version", version, "--python-platform", "x86_64-manylinux_2_28", "--no-header"),
                *("--no-annotate", "--output-file", f"{version}.txt"),
            ],
            cwd=tmp_path, env=own, check=True, timeout=SECONDS,
        )  # fmt: skip
        found |= {*(tmp_path / f"{version}.txt").read_text().split()}
    held = {*re.findall(r"^[a-z0-9-]+==\S+", (dist / "requirements.txt").read_text(), re.MULTILINE)}
    assert found == held


# ---------------------------------------------------------------------------------------------------
# The bill of materials


def test_the_bill_is_what_its_schema_wants(dist: Path, bill: dict[str, Any]) -> None:
    validation = pytest.importorskip("cyclonedx.validation.json")
    checks = validation.JsonStrictValidator(pytest.importorskip("cyclonedx.schema").SchemaVersion.V1_6)
    assert checks.validate_str((dist / "sbom.cdx.json").read_text()) is None
    del bill["components"][0]["name"]
    assert checks.validate_str(json.dumps(bill)) is not None


def test_the_bill_has_all_that_the_wheel_takes(dist: Path, wheel: Path, bill: dict[str, Any]) -> None:
    assert {each["name"] for each in bill["components"]} == names_in(dist / "requirements.txt")
    assert bill["metadata"]["component"]["hashes"][0]["content"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    text = (ROOT / "constraints.txt").read_text()
    for each in bill["components"]:
        hashes = [file["hashes"][0]["content"] for file in each["externalReferences"]]
        assert hashes and all(f"--hash=sha256:{digest}" in text for digest in hashes), each["name"]
        assert "licenses" in each or release.CUDA.match(each["name"]), each["name"]
    needs = {each["ref"]: each["dependsOn"] for each in bill["dependencies"]}
    refs = {each["bom-ref"] for each in bill["components"]}
    assert refs <= {*needs}
    own = needs[bill["metadata"]["component"]["bom-ref"]]
    assert {ref.split("/")[1].split("@")[0] for ref in own} == {
        re.split(r"[^a-z0-9-]", each)[0] for each in PROJECT["dependencies"]
    }


def test_the_bill_tells_what_p2pd_is_made_of(bill: dict[str, Any]) -> None:
    (hivemind,) = (each for each in bill["components"] if each["name"] == "hivemind")
    (p2pd,) = hivemind["components"]
    program = Path(str(metadata.distribution("hivemind").locate_file("hivemind/hivemind_cli/p2pd")))
    assert p2pd["hashes"][0]["content"] == hashlib.sha256(program.read_bytes()).hexdigest()
    modules = {each["name"]: each["version"] for each in p2pd["components"]}
    assert len(modules) > 90
    assert modules["github.com/libp2p/go-libp2p"] == "v0.32.1"
    assert modules["github.com/quic-go/quic-go"] == "v0.40.0", "SECURITY.md tells what is known of it"


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ("License-Expression: MIT\nLicense: no", [{"expression": "MIT"}]),
        ("License: BSD\n  and more", [{"license": {"name": "BSD"}}]),
        ("Classifier: License :: OSI Approved :: MIT License", [{"license": {"name": "MIT License"}}]),
        ("Classifier: Typing :: Typed", []),
    ],
)
def test_a_licence_is_what_the_metadata_says(lines: str, found: list[dict[str, Any]]) -> None:
    assert sbom.licences_of(message_from_string(lines)) == found


# ---------------------------------------------------------------------------------------------------
# Tools that install it


@pytest.mark.timeout(INSTALL_SECONDS)
@pytest.mark.parametrize("tool", ["pipx", "uv"])
def test_a_tool_installs_the_wheel_where_nothing_is(tool: str, wheel: Path, tmp_path: Path) -> None:
    command = {"pipx": ["pipx", "install", "--python", sys.executable], "uv": ["uv", "tool", "install", "--quiet"]}[
        tool
    ]
    own = own_environment(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", *command, wheel],
        cwd=tmp_path, env=own, text=True, check=False, timeout=INSTALL_SECONDS,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    program = tmp_path / ".local/bin/p2ptrain"
    for arguments, said in (
        (["--version"], f"p2ptrain {__version__}"),
        (["config", "example", "tiny"], 'name = "tiny"'),
    ):
        done = subprocess.run(
            [program, *arguments], cwd=tmp_path, env=own, text=True, check=True, timeout=SECONDS, stdout=subprocess.PIPE
        )
        assert said in done.stdout
    (python,) = tmp_path.glob(".local/**/p2ptrain/bin/python")
    imports = "import p2ptrain.net.libp2p.p2pd; from p2ptrain.exact.native import library; assert library()"
    subprocess.run([python, "-c", imports], cwd=tmp_path, env=own, check=True, timeout=SECONDS)
