"""Compiles p2ptrain/exact/native.c while the package is built or installed; without a compiler NumPy does its work.

The library needs no other one, so a wheel with it serves every Linux of its processor, whatever C library that has.
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


class NativeHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        library = root / NAME
        library.unlink(missing_ok=True)
        compiler = shlex.split(os.environ.get("CC") or "cc")
        if sys.platform != "linux" or shutil.which(compiler[0]) is None:
            self.app.display_warning(
                "no C compiler, or not Linux: contributions are unpacked in NumPy, which takes longer"
            )
            return
        source = library.with_name("native.c").relative_to(root)
        made = subprocess.run([*compiler, *FLAGS.split(), "-o", NAME, str(source)], cwd=root, check=False)  # noqa: S603  # the compiler that CC names
        if made.returncode:
            self.app.display_warning("native.c was not compiled: contributions are unpacked in NumPy")
            return
        build_data["artifacts"].append(NAME)
        build_data["pure_python"] = False
        build_data["tag"] = TAG.format(os.environ.get("P2PTRAIN_MACHINE", platform.machine()))
