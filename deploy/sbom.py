"""Writes a software bill of materials, CycloneDX 1.6 in JSON, of the wheel and all that it takes (deploy/release.py).

Versions and hashes are those of constraints.txt, licences and dependencies those of the metadata of what is installed.
hivemind's wheel brings p2pd, a program in Go: its modules are read from the memory of one that runs, because the file
is compressed.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

GO = b"\xff Go buildinf:"  # before what Go's linker has noted; debug/buildinfo describes the form
GO_HEADER_BYTES, GO_INLINE, GO_FENCE_BYTES = 32, 2, 16
SEGMENT_BYTES_MAX = 1 << 28
MIT = [{"license": {"id": "MIT"}}]


class Locked(Protocol):
    """A package with its lines of constraints.txt."""

    name: str
    version: str
    entry: str


def of(wheel: str, digest: str, taken: Iterable[Locked], compiler: str, committed: int) -> bytes:
    """Returns the bill of a wheel, which has this SHA-256: the same for the same wheel.

    committed: when, in seconds since 1970
    """
    version = wheel.split("-")[1]
    refs = {each.name: f"pkg:pypi/{each.name}@{each.version}" for each in taken}
    own = f"pkg:pypi/p2ptrain@{version}"
    p2pd = p2pd_component()
    components = [component(each) for each in taken]
    next(each for each in components if each["name"] == "hivemind")["components"] = [p2pd]
    needs = {own: needed("p2ptrain", refs)} | {ref: needed(name, refs) for name, ref in refs.items()}
    needs[refs["hivemind"]].append(p2pd["bom-ref"])
    needs[p2pd["bom-ref"]] = [each["bom-ref"] for each in p2pd["components"]]
    bill = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, digest)}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(committed, UTC).isoformat(),
            "component": {
                "type": "application",
                "bom-ref": own,
                "name": "p2ptrain",
                "version": version,
                "purl": own,
                "licenses": MIT,
                "hashes": [{"alg": "SHA-256", "content": digest}],
            },
            "properties": [{"name": "p2ptrain:compiler of libnative.so", "value": compiler}],
        },
        "components": components,
        "dependencies": [{"ref": ref, "dependsOn": sorted(needs[ref])} for ref in sorted(needs)],
    }
    return (json.dumps(bill, indent=1, sort_keys=True) + "\n").encode()


def component(package: Locked) -> dict[str, Any]:
    """Returns a package's entry; its files are references, because an entry of its own is for one file."""
    purl = f"pkg:pypi/{package.name}@{package.version}"
    files = [
        {"type": "distribution", "url": purl, "hashes": [{"alg": "SHA-256", "content": each}]}
        for each in re.findall(r"sha256:([0-9a-f]{64})", package.entry)
    ]
    found = {"type": "library", "bom-ref": purl, "name": package.name, "version": package.version, "purl": purl}
    with suppress(metadata.PackageNotFoundError):  # CUDA's, where torch is a build for CPUs
        about = metadata.metadata(package.name)
        own = about["Version"].partition("+")[0]
        assert own == package.version, f"{package.name} {own} is installed, constraints.txt says {package.version}"
        if licences := licences_of(about):
            found |= {"licenses": licences}
    return found | {"externalReferences": files}


def licences_of(about: Any) -> list[dict[str, Any]]:
    """Returns what a package says of its licence: an expression, else a name."""
    if expression := about["License-Expression"]:
        return [{"expression": expression}]
    names = [line.rpartition(" :: ")[2] for line in about.get_all("Classifier") or [] if line.startswith("License ::")]
    if not names and about["License"]:
        names = [about["License"].splitlines()[0]]
    return [{"license": {"name": name}} for name in names]


def needed(name: str, refs: dict[str, str]) -> list[str]:
    """Returns which of these packages one needs here."""
    with suppress(metadata.PackageNotFoundError):
        wanted = [Requirement(line) for line in metadata.requires(name) or []]
        here = [each for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]
        return sorted({refs[key] for each in here if (key := canonicalize_name(each.name)) in refs})
    return []


# ---------------------------------------------------------------------------------------------------
# p2pd


def p2pd_component() -> dict[str, Any]:
    """Returns hivemind's p2pd with the Go modules in it."""
    found = metadata.distribution("hivemind").locate_file("hivemind/hivemind_cli/p2pd")
    program = Path(str(found))
    version, lines = notes_of(program)
    built = dict(line[1].split("=", 1) for line in lines if line[0] == "build" and "=" in line[1])
    (name,) = (line[1] for line in lines if line[0] == "mod")
    ref = f"pkg:golang/{name}@{built['vcs.revision']}"
    modules = [(line[1], line[2]) for line in lines if line[0] == "dep"]
    return {
        "type": "application",
        "bom-ref": ref,
        "name": "p2pd",
        "version": built["vcs.revision"],
        "purl": ref,
        "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(program.read_bytes()).hexdigest()}],
        "components": [
            {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
            for name, version, purl in (
                *((module, version, f"pkg:golang/{module}@{version}") for module, version in modules),
                ("stdlib", version, f"pkg:golang/stdlib@{version.removeprefix('go')}"),
            )
        ],
    }


def notes_of(program: Path) -> tuple[str, list[list[str]]]:
    """Returns Go's version, and what the linker has noted: lines of `path`, `mod`, `dep` and `build`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [program, "-hostAddrs=/ip4/127.0.0.1/tcp/0", f"-listen=/unix/{folder}/socket"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:  # noqa: S603  # hivemind's
            assert process.stdout is not None
            process.stdout.readline()  # it has been unpacked
            try:
                for memory in segments(process.pid):
                    at = memory.find(GO)
                    if at >= 0 and memory[at + len(GO) + 1] & GO_INLINE:
                        version, end = text_at(memory, at + GO_HEADER_BYTES)
                        notes, _ = text_at(memory, end)
                        lines = notes[GO_FENCE_BYTES:-GO_FENCE_BYTES].decode().splitlines()
                        return version.decode(), [line.split("\t") for line in lines]
            finally:
                process.terminate()
    raise LookupError(f"{program} says nothing of its modules")


def segments(pid: int) -> Iterator[bytes]:
    with Path(f"/proc/{pid}/mem").open("rb") as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            place, rights = line.split()[:2]
            start, end = (int(each, 16) for each in place.split("-"))
            if rights.startswith("r") and end - start <= SEGMENT_BYTES_MAX:
                with suppress(OSError):  # the kernel's own pages
                    memory.seek(start)
                    yield memory.read(end - start)


def text_at(memory: bytes, at: int) -> tuple[bytes, int]:
    """Returns bytes after their length, a varint, and where they end."""
    size = shift = 0
    while True:
        size |= (memory[at] & 0x7F) << shift
        at, shift, is_last = at + 1, shift + 7, memory[at] < 0x80
        if is_last:
            return memory[at : at + size], at + size
