"""The machine: Python and torch, the device and its driver, memory, open files, p2pd, and Windows beneath WSL2.

The checks take the facts as arguments, so that tests can run them with other machines' hardware. Those of WSL2 have not
been tried on Windows; they follow its documentation."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil
import torch

from p2ptrain.config import DeviceConfig, RecipeConfig, TrackingConfig
from p2ptrain.doctor.findings import Diagnosis, refused
from p2ptrain.errors import ConfigError, DeviceError
from p2ptrain.exact import native
from p2ptrain.exact.cards import cannot_be_opened, why_unusable
from p2ptrain.exact.exactness import check_exactness
from p2ptrain.exact.kernels.launches import why_not
from p2ptrain.exact.shortage import mega
from p2ptrain.net.libp2p.process import CONNECTIONS_HIGH, find_binary
from p2ptrain.net.questions import SKEW_SECONDS_MAX
from p2ptrain.net.transport import TransportError
from p2ptrain.node.limits import LESS_MEMORY
from p2ptrain.observe.tracking import require
from p2ptrain.train.memory import MemoryDemand

PYTHON_FROM, PYTHON_BELOW = (3, 11), (3, 15)  # from pyproject.toml: what this has run with
TORCH_FROM = (2, 6)
DRIVER_FILE = Path("/proc/driver/nvidia/version")
HIVEMIND = "1.1.12"  # the version whose p2pd is known: go-libp2p 0.32.1, pubsub 0.10.0, quic-go 0.40
# Known vulnerabilities of the libraries in that p2pd, by the setting that exposes them.
QUIC_WEAKNESS = "peers can make quic-go 0.40 in p2pd run out of memory (CVE-2024-22189), and this node listens on QUIC"
FILES_NEEDED = 1_024  # open files per process: one per stream here, or connection in p2pd, and 64 for HTTP
FILES_LEAST = CONNECTIONS_HIGH + 64  # the connections alone need this many
TIGHT = 1.1  # the need is an estimate, which may be a tenth too low
CLOSE = "It is tight: close other programs"
APPLE = "Apple's GPU (mps) takes the steps, and has no fp64 for a round's sums; not tried on a Mac yet"
ROCM = "nobody has run a node on ROCm yet, and its energy and its use by games are not told"
TELL = "Tell us what `p2ptrain doctor --measure` says"
KERNEL = Path("/proc/sys/kernel/osrelease")
MODE_SECONDS = 5.0
TIME_KEEPERS = ("systemd-timesyn", "chronyd", "ntpd")  # beginnings of process names


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    total_bytes: int
    is_bf16: bool


@dataclass(frozen=True, slots=True)
class Hardware:
    """The hardware that torch finds."""

    cuda_build: str  # the CUDA version that torch was built for; empty: none
    driver: str  # this machine's NVIDIA driver; empty: none
    gpus: tuple[Gpu, ...] = ()
    trouble: str = ""  # why torch cannot use a card that is there
    rocm_build: str = ""  # the ROCm version that torch was built for; empty: none
    has_mps: bool = False  # an Apple GPU


def look_at_hardware() -> Hardware:
    """Asks torch and the driver about the hardware, which may take some time. DeviceError if a card does not answer."""
    driver, trouble = "", why_unusable()
    with suppress(OSError):
        match = re.search(r"Kernel Module\s+(?:for \S+\s+)?([0-9.]+)", DRIVER_FILE.read_text())
        driver = match[1] if match else "unknown"
    gpus = []
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        try:
            properties = torch.cuda.get_device_properties(number)
            with torch.cuda.device(number):
                is_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        except RuntimeError as error:
            raise cannot_be_opened(torch.device("cuda", number), error) from error
        gpus.append(Gpu(properties.name, properties.total_memory, is_bf16))
    builds, has_mps = (torch.version.cuda or "", torch.version.hip or ""), torch.backends.mps.is_available()
    return Hardware(builds[0], driver, tuple(gpus), trouble, builds[1], has_mps)


def check_python(version: tuple[int, ...] = sys.version_info[:3], platform: str = sys.platform) -> Diagnosis:
    text = ".".join(map(str, version))
    if not PYTHON_FROM <= version[:2] < PYTHON_BELOW:
        wanted = f"{PYTHON_FROM[0]}.{PYTHON_FROM[1]} to {PYTHON_BELOW[0]}.{PYTHON_BELOW[1] - 1}"
        return Diagnosis("python", "failed", text, f"Install Python {wanted}, and p2ptrain with it")
    if platform == "darwin":
        return Diagnosis("python", "warning", f"{text} on macOS; no node has run on a Mac yet", TELL)
    if platform != "linux":
        fix = "Use Linux or macOS: hivemind has no p2pd for other systems"
        return Diagnosis("python", "failed", f"{text} on {platform}", fix)
    return Diagnosis("python", "good", text)


def check_torch(version: str) -> Diagnosis:
    """Checks torch's version; an empty one means that torch is not installed."""
    if not version:
        return Diagnosis("torch", "failed", "it is not installed", "Install p2ptrain with its dependencies")
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < TORCH_FROM:
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
    found = []
    for package in (name for name in ("tensorboard", "wandb") if getattr(config, name)):
        try:
            require(package)
        except ConfigError as error:
            found.append(refused("tracking", error))
        else:
            found.append(Diagnosis("tracking", "good", f"{package} {installed(package)}"))
    return found


def check_device(config: DeviceConfig, found: Hardware, try_it: Callable[[str], str | None]) -> Diagnosis:
    """Checks the configured device; `try_it` computes something on it, says what is slow; DeviceError if wrong."""
    named = config.name.split(",")[0].removesuffix(":all")  # of several, the first
    name = "cpu" if named == "mps" else named if named != "auto" else "cuda" if found.gpus else "cpu"
    if name != "cpu":
        return _check_cuda(name, config, found, try_it)
    try:
        slow = _after(try_it(name))
    except DeviceError as error:
        return Diagnosis("device", "failed", str(error))
    if config.name == "mps" and not found.has_mps:
        return Diagnosis("device", "failed", "mps not found", "Set device.name to cpu or to an existing device")
    if config.name not in ("auto", "mps"):
        return Diagnosis("device", "good", f"cpu{slow}")
    what, fix = _why_cpu(found)
    return Diagnosis("device", "warning" if fix else "good", f"cpu{what}{'' if fix else slow}", fix)


def _why_cpu(found: Hardware) -> tuple[str, str]:
    """Returns why no card trains, and what to do if one could."""
    newer = f"Update the driver to one that supports {_build_of(found)}"
    if found.has_mps:
        return f": {APPLE}", ""
    if found.trouble:
        return f"; torch cannot use the graphics card: {found.trouble}", newer
    if not found.driver:
        return ": there is no NVIDIA driver", ""
    there = f"; there is an NVIDIA driver {found.driver}, and torch"
    if found.cuda_build:
        return f"{there} cannot use it", newer
    return f"{there} was installed without CUDA", "Install torch's CUDA build"


def _build_of(found: Hardware) -> str:
    return f"ROCm {found.rocm_build}" if found.rocm_build else f"CUDA {found.cuda_build}"


def _check_cuda(name: str, config: DeviceConfig, found: Hardware, try_it: Callable[[str], str | None]) -> Diagnosis:
    number = int(name.partition(":")[2] or 0)
    if number >= len(found.gpus):
        what = f"{name} not found: {len(found.gpus)} CUDA devices, driver {found.driver or 'none'}"
        what += f"; {found.trouble}" if found.trouble else ""
        return Diagnosis("device", "failed", what, "Set device.name to cpu or to an existing device")
    gpu = found.gpus[number]
    driver = "" if found.rocm_build else f", driver {found.driver or 'unknown'}"
    what = f"{name}: {gpu.name}, {mega(gpu.total_bytes)}, {_build_of(found)}{driver}"
    try:
        slow = _after(try_it(name))
    except DeviceError as error:
        return Diagnosis("device", "failed", f"{what}: {error}")
    except RuntimeError as error:  # torch raises it for any driver error
        first = str(error).splitlines()[0] if str(error) else "no reason given"
        fix = "Update the driver, or set device.name to cpu"
        return Diagnosis("device", "failed", f"{what}: it cannot compute: {first}", fix)
    if config.autocast == "bf16" and not gpu.is_bf16:
        fix = 'Set device.autocast to "auto": bf16 is slow there'
        return Diagnosis("device", "warning", f"{what}, without bf16", fix)
    what = f"{what}, {'bf16' if gpu.is_bf16 else 'no bf16: it trains in fp32'}{slow}"
    if found.rocm_build:
        return Diagnosis("device", "warning", f"{what}; {ROCM}", TELL)
    return Diagnosis("device", "good", what)


def _after(slow: str | None) -> str:
    return f"; {slow}" if slow else ""


def try_device(name: str) -> str | None:
    """Checks that the device's arithmetic is exact, including the edge cases; returns what of it is slow here."""
    device = torch.device(name)
    check_exactness(RecipeConfig(), device)
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


# -- WSL2: the NAT, the clock and the sleep settings of Windows -------------------------------------


@dataclass(frozen=True, slots=True)
class Wsl:
    networking: str  # the networking mode, such as nat or mirrored; empty: unknown
    keeps_time: bool  # whether a program sets the clock


def look_at_wsl() -> Wsl | None:
    """Looks for WSL2; returns None if this machine is not in it."""
    try:
        if "microsoft" not in KERNEL.read_text().lower():
            return None
    except OSError:
        return None
    return Wsl(networking_mode(), keeps_time(each.info["name"] or "" for each in psutil.process_iter(["name"])))


def networking_mode() -> str:
    """Asks WSL for its networking mode; empty if it has no answer, as before WSL 2.0."""
    program = shutil.which("wslinfo")
    if program is None:
        return ""
    with suppress(OSError, subprocess.SubprocessError):
        told = subprocess.run(  # noqa: S603
            [program, "--networking-mode"], capture_output=True, text=True, timeout=MODE_SECONDS, check=True
        )
        return told.stdout.strip().lower()
    return ""


def keeps_time(programs: Iterable[str]) -> bool:
    return any(name.startswith(TIME_KEEPERS) for name in programs)


def check_wsl(found: Wsl | None) -> list[Diagnosis]:
    if found is None:
        return []
    return [_check_network(found.networking), _check_clock(found.keeps_time), _check_sleep()]


def _check_network(mode: str) -> Diagnosis:
    if mode == "mirrored":
        text = "mirrored: this node has the addresses of Windows, whose firewall decides who may connect"
        return Diagnosis("WSL2 network", "good", text)
    text = f"{mode or 'its mode is unknown'}: behind a NAT of Windows, others reach this node only through relays"
    fix = "Write [wsl2] and networkingMode=mirrored to .wslconfig in your folder of Windows, then wsl --shutdown there"
    return Diagnosis("WSL2 network", "warning", text, fix)


def _check_clock(keeps: bool) -> Diagnosis:
    if keeps:
        return Diagnosis("WSL2 clock", "good", "a program sets it, also after Windows has slept")
    text = f"nothing sets it: it is behind after Windows has slept, and {SKEW_SECONDS_MAX:.0f} s are too many"
    return Diagnosis("WSL2 clock", "warning", text, "sudo hwclock -s after each sleep, or let systemd-timesyncd run")


def _check_sleep() -> Diagnosis:
    text = "not seen from here: Windows ends WSL2 when its last window is closed, and stops the node while it sleeps"
    fix = "Keep a window open, or start the node as a task of Windows; no sleep: powercfg /change standby-timeout-ac 0"
    return Diagnosis("WSL2 sleep", "warning", text, fix)
