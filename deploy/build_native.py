"""Compiles p2ptrain/exact/native.c while the package is built or installed; without a compiler NumPy does its work.

The library needs no other one, so a wheel with it serves every Linux of its processor, whatever C library that has.
For another processor than this one: P2PTRAIN_MACHINE names it, and CC a compiler for it (`make dist MACHINE=aarch64`).
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FLAGS = "-O3 -std=c11 -shared -fPIC -nostdlib -ffreestanding -fno-stack-protector -Wl,--build-id=none,-s"
TAG = "py3-none-manylinux_2_17_{0}.musllinux_1_1_{0}"
NAME = "p2ptrain/exact/libnative.so"
ELF_MACHINES = {"x86_64": 62, "aarch64": 183}  # as a library's header has them, 18 bytes from its start


class NativeHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        machine = os.environ.get("P2PTRAIN_MACHINE") or platform.machine()
        compiler = shlex.split(os.environ.get("CC") or "cc")
        # Only an editable install finds it beside its source: a wheel may be for a processor other than this one.
        library = Path(NAME if version == "editable" else f"out/{machine}/libnative.so")
        (root / library).unlink(missing_ok=True)
        (root / library).parent.mkdir(parents=True, exist_ok=True)
        if sys.platform != "linux" or shutil.which(compiler[0]) is None:
            self.app.display_warning(
                "no C compiler, or not Linux: contributions are unpacked in NumPy, which takes longer"
            )
            return
        source = Path(NAME).with_name("native.c")
        made = subprocess.run([*compiler, *FLAGS.split(), "-o", str(library), str(source)], cwd=root, check=False)  # noqa: S603  # the compiler that CC names
        if made.returncode:
            self.app.display_warning("native.c was not compiled: contributions are unpacked in NumPy")
            return
        found = int.from_bytes((root / library).read_bytes()[18:20], "little")
        if found != ELF_MACHINES.get(machine, found):
            self.app.abort(f"{compiler[0]} compiles for another processor than {machine}: CC names one for it")
        if version != "editable":
            build_data["force_include"][str(root / library)] = NAME
        build_data["pure_python"] = False
        build_data["tag"] = TAG.format(machine)
