"""Wheels for a machine without a network that has Python 3.12, torch, numpy and transformers: `make gpu-wheels`.

All that `p2ptrain.train`, these benchmarks and tests/gpu import besides those three, and what a daemon imports besides:
hivemind's wheel brings p2pd, go-libp2p as one program. A test holds the lists to it. The versions and hashes are those
of constraints.txt, for Linux on x86-64. With --without-node the daemon's are left out, and so is the part `node`.
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
    *("execnet", "iniconfig", "packaging", "pluggy", "pygments", "pytest", "pytest-xdist"),  # the tests
)
NODE_PACKAGES = (
    *("aiohappyeyeballs", "aiohttp", "aiosignal", "attrs", "frozenlist", "idna", "multidict", "propcache", "yarl"),
    *("cffi", "cryptography", "platformdirs", "prometheus-client", "uvloop"),
    *("annotated-doc", "rich", "shellingham", "typer"),  # the commands
    *("base58", "hivemind", "mmh3", "msgpack", "multiaddr", "netaddr", "protobuf", "py-multihash", "sortedcontainers"),
)
NODE_SOURCES = ("varint",)  # published without a wheel: one file of Python
BYTES_MAX = 50_000_000  # of all wheels: lent machines take 64 MB with the checkout


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "out" / "gpu-wheels")
    parser.add_argument("--without-node", action="store_true", help="leave out what a daemon needs")
    arguments = parser.parse_args()
    folder, pinned = arguments.folder, ["--quiet", "--no-deps", "--constraint", str(ROOT / "constraints.txt")]
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    platforms = [part for platform in PLATFORMS for part in ("--platform", platform)]
    names = PACKAGES if arguments.without_node else (*PACKAGES, *NODE_PACKAGES)
    pip("download", *pinned, "--require-hashes", "--only-binary=:all:", "--python-version", PYTHON,
        "--implementation", "cp", *platforms, "--dest", str(folder), *names)  # fmt: skip
    if not arguments.without_node:
        pip("wheel", *pinned, "--require-hashes", "--build-constraint", str(ROOT / "constraints.txt"),
            "--wheel-dir", str(folder), *NODE_SOURCES)  # fmt: skip
    found = sorted(folder.glob("*.whl"))
    for wheel in found:
        print(f"{wheel.stat().st_size / 1e6:6.2f} MB  {wheel.name}")
    total = sum(wheel.stat().st_size for wheel in found)
    print(f"{total / 1e6:6.2f} MB in {folder}")
    if total > BYTES_MAX:
        sys.exit(f"more than the {BYTES_MAX / 1e6:.0f} MB that can be carried: use --without-node")


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True)  # noqa: S603  # pip, for what is listed here


if __name__ == "__main__":
    main()
