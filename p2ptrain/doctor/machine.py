"""The machine: Python and torch, the device and its driver, memory, open files, and p2pd.

The checks take the facts as arguments, so that tests can run them with other machines' hardware.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from p2ptrain.config import DeviceConfig, TrackingConfig
from p2ptrain.doctor.findings import Diagnosis, refused
from p2ptrain.errors import ConfigError, DeviceError
from p2ptrain.exact.shortage import mega
from p2ptrain.net.libp2p.process import CONNECTIONS_HIGH, find_binary
from p2ptrain.net.transport import TransportError
from p2ptrain.node.limits import LESS_MEMORY
from p2ptrain.observe.wandb_run import require_wandb
from p2ptrain.train.memory import MemoryDemand

PYTHON_FROM, PYTHON_BELOW = (3, 11), (3, 14)  # from pyproject.toml; hivemind's pydantic.v1 does not work with 3.14
TORCH_FROM = (2, 6)
DRIVER_FILE = Path("/proc/driver/nvidia/version")
HIVEMIND = "1.1.12"  # the version whose p2pd is known: go-libp2p 0.32.1, pubsub 0.10.0, quic-go 0.40
# Known vulnerabilities of the libraries in that p2pd, by the setting that exposes them.
QUIC_WEAKNESS = "peers can make quic-go 0.40 in p2pd run out of memory (CVE-2024-22189), and this node listens on QUIC"
FILES_NEEDED = 1_024  # open files per process: one per stream here, or connection in p2pd, and 64 for HTTP
FILES_LEAST = CONNECTIONS_HIGH + 64  # the connections alone need this many
TIGHT = 1.1  # the need is an estimate, which may be a tenth too low
CLOSE = "It is tight: close other programs"


@dataclass(frozen=True, slots=True)
class Gpu:
    """A CUDA device."""

    name: str
    total_bytes: int
    is_bf16: bool


@dataclass(frozen=True, slots=True)
class Hardware:
    """The hardware that torch finds."""

    cuda_build: str  # the CUDA version that torch was built for; empty: none
    driver: str  # this machine's NVIDIA driver; empty: none
    gpus: tuple[Gpu, ...] = ()


def look_at_hardware() -> Hardware:
    """Asks torch and the driver about the hardware, which may take some time."""
    import torch  # noqa: PLC0415  # two seconds, within the deadline of the check

    driver = ""
    with suppress(OSError):
        match = re.search(r"Kernel Module\s+(?:for \S+\s+)?([0-9.]+)", DRIVER_FILE.read_text())
        driver = match[1] if match else "unknown"
    gpus = []
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(number)
        with torch.cuda.device(number):
            is_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        gpus.append(Gpu(properties.name, properties.total_memory, is_bf16))
    return Hardware(torch.version.cuda or "", driver, tuple(gpus))


def check_python(version: tuple[int, ...] = sys.version_info[:3], platform: str = sys.platform) -> Diagnosis:
    text = ".".join(map(str, version))
    if not PYTHON_FROM <= version[:2] < PYTHON_BELOW:
        wanted = f"{PYTHON_FROM[0]}.{PYTHON_FROM[1]} to {PYTHON_BELOW[0]}.{PYTHON_BELOW[1] - 1}"
        return Diagnosis("python", "failed", text, f"Install Python {wanted}, and p2ptrain with it")
    if platform != "linux":
        return Diagnosis("python", "failed", f"{text} on {platform}", "Use Linux: p2pd is not built for other systems")
    return Diagnosis("python", "good", text)


def check_torch(version: str) -> Diagnosis:
    """Checks torch's version; an empty one means that torch is not installed."""
    if not version:
        return Diagnosis("torch", "failed", "it is not installed", "Install p2ptrain with its dependencies")
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < TORCH_FROM:
        fix = f"Install torch {TORCH_FROM[0]}.{TORCH_FROM[1]} or newer; constraints.txt names the tested version"
        return Diagnosis("torch", "failed", version, fix)
    return Diagnosis("torch", "good", version)


def installed(package: str) -> str:
    """Returns a package's version; empty if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def check_tracking(config: TrackingConfig) -> list[Diagnosis]:
    """Checks, as a start does, that the tracking tools in the config are installed."""
    if not config.wandb:
        return []
    try:
        require_wandb()
    except ConfigError as error:
        return [refused("tracking", error)]
    return [Diagnosis("tracking", "good", f"wandb {installed('wandb')}")]


def chosen_device(config: DeviceConfig, found: Hardware) -> str:
    return config.name if config.name != "auto" else "cuda" if found.gpus else "cpu"


def check_device(config: DeviceConfig, found: Hardware, try_it: Callable[[str], str | None]) -> Diagnosis:
    """Checks the configured device; `try_it` computes something on it, says what is slow, and raises DeviceError if the
    result is wrong."""
    name = chosen_device(config, found)
    if name != "cpu":
        return _check_cuda(name, config, found, try_it)
    try:
        slow = _after(try_it(name))
    except DeviceError as error:
        return Diagnosis("device", "failed", str(error))
    if config.name != "auto":
        return Diagnosis("device", "good", f"cpu{slow}")
    if not found.driver:
        return Diagnosis("device", "good", f"cpu: there is no NVIDIA driver{slow}")
    if found.cuda_build:
        why, fix = "torch cannot use it", f"Update the driver to one that supports CUDA {found.cuda_build}"
    else:
        why, fix = "torch was installed without CUDA", "Install torch's CUDA build"
    return Diagnosis("device", "warning", f"cpu; there is an NVIDIA driver {found.driver}, and {why}", fix)


def _check_cuda(name: str, config: DeviceConfig, found: Hardware, try_it: Callable[[str], str | None]) -> Diagnosis:
    number = int(name.partition(":")[2] or 0)
    if number >= len(found.gpus):
        what = f"{name} not found: {len(found.gpus)} CUDA devices, driver {found.driver or 'none'}"
        return Diagnosis("device", "failed", what, "Set device.name to cpu or to an existing device")
    gpu = found.gpus[number]
    what = f"{name}: {gpu.name}, {mega(gpu.total_bytes)}, CUDA {found.cuda_build}, driver {found.driver or 'unknown'}"
    try:
        slow = _after(try_it(name))
    except DeviceError as error:
        return Diagnosis("device", "failed", f"{what}: {error}")
    except RuntimeError as error:  # torch raises it for any driver error
        first = str(error).splitlines()[0] if str(error) else "no reason given"
        fix = "Update the driver, or set device.name to cpu"
        return Diagnosis("device", "failed", f"{what}: it cannot compute: {first}", fix)
    if config.autocast == "bf16" and not gpu.is_bf16:
        return Diagnosis(
            "device", "warning", f"{what}, without bf16", 'Set device.autocast to "auto": bf16 is slow there'
        )
    return Diagnosis("device", "good", f"{what}, {'bf16' if gpu.is_bf16 else 'no bf16: it trains in fp32'}{slow}")


def _after(slow: str | None) -> str:
    return f"; {slow}" if slow else ""


def try_device(name: str) -> str | None:
    """Checks that the device's arithmetic is exact, including the edge cases; returns what of it is slow here."""
    import torch  # noqa: PLC0415

    from p2ptrain.exact import native  # noqa: PLC0415
    from p2ptrain.exact.aggregate import check_exactness  # noqa: PLC0415
    from p2ptrain.exact.kernels.launches import why_not  # noqa: PLC0415

    device = torch.device(name)
    check_exactness(64, device)
    if device.type == "cuda" and (why := why_not(device)):
        return f"a round's arithmetic is torch's, because {why}"
    if native.library() is None:
        return "contributions are unpacked in NumPy, because libnative.so was not built for this machine"
    return None


def check_memory(demands: Sequence[MemoryDemand], limit: int) -> list[Diagnosis]:
    """Compares the memory needed with the memory available, as a start does. `limit` is the config's; 0: none."""
    found = []
    for each in demands:
        text = f"{each.takes} are needed; {mega(each.free)} of {mega(each.total)} are free"
        name = "memory" if each is demands[0] else "device memory"
        if each.level == "good":
            close = each.needed * TIGHT > each.free
            found.append(Diagnosis(name, "warning" if close else "good", text, CLOSE if close else ""))
        else:
            found.append(Diagnosis(name, each.level, text, LESS_MEMORY))
    if limit and demands[0].needed > limit:
        text = f"{mega(demands[0].needed)} are needed, but limits.memory_bytes allows {mega(limit)}"
        found.append(Diagnosis("memory limit", "failed", text, "Raise limits.memory_bytes, or train a smaller run"))
    return found


def check_files(soft: int, hard: int) -> Diagnosis:
    text = f"{soft:,} open files per process"
    if soft >= FILES_NEEDED:
        return Diagnosis("open files", "good", text)
    fix = f"ulimit -n {min(hard, 4 * FILES_NEEDED) if hard > soft else 4 * FILES_NEEDED}; for a service, LimitNOFILE="
    return Diagnosis("open files", "failed" if soft < FILES_LEAST else "warning", text, fix)


def check_p2pd(listen: tuple[str, ...], version: str) -> list[Diagnosis]:
    """Checks p2pd, which comes with hivemind; `version` is hivemind's, empty if it is not installed."""
    try:
        binary = find_binary()
    except TransportError as error:
        return [Diagnosis("p2pd", "failed", str(error), f"pip install hivemind=={HIVEMIND}")]
    if version != HIVEMIND:
        text = f"from hivemind {version or 'unknown'}, which is untested"
        return [Diagnosis("p2pd", "warning", text, f"pip install hivemind=={HIVEMIND}")]
    if not binary.stat().st_mode & 0o111:
        return [Diagnosis("p2pd", "failed", f"{binary} is not executable", f"chmod +x {binary}")]
    found = [Diagnosis("p2pd", "good", f"from hivemind {version}: go-libp2p 0.32.1, pubsub 0.10.0, quic-go 0.40")]
    if any("quic" in address for address in listen):
        fix = "Listen on TCP only: remove the /udp/.../quic-v1 from network.listen"
        found.append(Diagnosis("p2pd weakness", "warning", QUIC_WEAKNESS, fix))
    return found
