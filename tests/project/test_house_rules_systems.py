"""What only one system has is named in few modules: in `p2ptrain/system.py`, which has both halves, and where listed.

mypy finds what Python's own modules lack on macOS, in `make check`; the rest hides in strings and in units.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

import pytest

from tests.project.test_house_rules import MODULES, ROOT, dotted, layer, parsed

SYSTEM, CAPACITY, TRIAL = "system.py", "capacity.py", "data/tokenizer_trial.py"
DISK, MACHINE = "doctor/disk.py", "doctor/machine.py"
# By a pattern of names and strings: the modules that have such, and how each goes on elsewhere.
ONLY_HERE = {
    r"sys\.platform|os\.uname|platform\.(system|machine)": {SYSTEM, TRIAL, MACHINE, "loop/channel.py"},
    r"/proc\b": {CAPACITY, TRIAL, DISK, MACHINE},  # capacity: no limits; doctor: "unknown"
    r"/sys/|\bcgroup": {CAPACITY, MACHINE},
    r"sched_\w*affinity": {CAPACITY},  # os.cpu_count
    r"\bmallopt\b|malloc_trim": {CAPACITY},  # others return blocks by themselves
    r"CDLL": {CAPACITY, SYSTEM, "exact/native.py"},  # native: our own library
    r"prctl|PDEATHSIG|F_SETSIG|F_SETOWN|O_ASYNC|kqueue|KQ_": {SYSTEM},
    r"CLOCK_(?!MONOTONIC\b|WRONG\b)\w+": {SYSTEM},  # WRONG: a complaint
    r"\bos\.f(data)?sync|F_FULLFSYNC|F_BARRIERFSYNC": {SYSTEM, DISK, "models/tensor_file.py"},
    r"TCP_(USER_TIMEOUT|KEEP\w+)": {SYSTEM},
    r"memfd_create": {"loop/channel.py"},  # a file without a name
    r"RLIMIT_(AS|DATA|RSS)": {TRIAL},
    r"RLIMIT_NOFILE": {SYSTEM, "net/libp2p/process.py", "doctor/examine.py"},
    r"uvloop": {"daemon/launch.py"},  # asyncio's own loop
    r"NOTIFY_SOCKET|WATCHDOG_USEC": {"node/notify.py"},  # without a supervisor that speaks it, nothing is sent
    r"pynvml": {"node/gpu_use.py"},  # no card, no figure
    # Nobody names these, since there is nothing like them elsewhere, or in other units.
    r"ru_maxrss|RUSAGE|SOCK_(CLOEXEC|NONBLOCK)|epoll|eventfd|pidfd|inotify|sendfile|splice|copy_file_range": set(),
    r"posix_f\w+|O_(TMPFILE|DIRECT|PATH)\b|F_OFD_\w+|MSG_NOSIGNAL|TCP_CORK": set(),
    r"SO_(PEERCRED|BINDTODEVICE)|AF_(NETLINK|PACKET)|SCM_\w+|waitid|/dev/(shm|fd)|vm\.|getrandom": set(),
}


def words(tree: ast.Module) -> Iterator[str]:
    """Yields every name and every string but those that only document."""
    documents = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body and isinstance(node.body[0], ast.Expr)
    }  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            yield dotted(node)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documents:
            yield node.value


def names_of_one_system(tree: ast.Module) -> set[str]:
    """Returns the patterns of ONLY_HERE that a module has."""
    return {pattern for word in words(tree) for pattern in ONLY_HERE if re.search(pattern, word)}


def test_what_one_system_has_is_named_only_where_both_halves_are() -> None:
    found: dict[str, set[str]] = {pattern: set() for pattern in ONLY_HERE}
    for path in MODULES:
        if layer(path):
            for pattern in names_of_one_system(parsed(path)):
                found[pattern].add(str(path.relative_to("p2ptrain")))
    assert found == ONLY_HERE


@pytest.mark.parametrize(
    "source",
    [
        "import sys\nif sys.platform == 'linux': pass",
        "from sys import platform",
        "Path('/proc/self/fd')",
        "f'/proc/{pid}/stat'",
        "REQUEST = 'import ctypes; ctypes.CDLL(None).prctl(1, 9)'",
        "os.fsync(descriptor)",
        "from os import fsync",
        "resource.getrusage(resource.RUSAGE_SELF)",
        "socket.socket(type=socket.SOCK_STREAM | socket.SOCK_CLOEXEC)",
        "time.clock_gettime(time.CLOCK_BOOTTIME)",
        "import uvloop",
    ],
)
def test_a_name_of_one_system_is_found(source: str) -> None:
    assert names_of_one_system(ast.parse(source)) != set()


@pytest.mark.parametrize(
    "source",
    [
        '"""Reads /proc."""',
        'def sync():\n    """Calls os.fsync."""',
        "from p2ptrain.system import fsync\nfsync(0)",
        "time.monotonic()",
        "system.since_boot()",
    ],
)
def test_what_only_looks_like_one_is_not(source: str) -> None:
    assert names_of_one_system(ast.parse(source)) == set()


OF_LINUX = re.compile(r"/proc/(self|\{)|resource\.prlimit|SOCK_SEQPACKET|\bprctl\(")
KEPT_TO_LINUX = re.compile(r"mark\.(linux|network)\b|sys\.platform != \"linux\"|find_library\(\"seccomp\"\)")
# Which only tests use that are kept to Linux by themselves: it forks, forbids system calls, or takes root.
BEHIND_OTHERS = {"nursery_process.py", "sandbox.py", "namespaces.py"}


def test_tests_that_ask_linux_are_kept_to_linux() -> None:
    """The others run on macOS as well, in .github/workflows."""
    asking = [
        path
        for path in MODULES
        if path.parts[0] == "tests" and path.name not in BEHIND_OTHERS and path.parts[1] != "project"
        and OF_LINUX.search((ROOT / path).read_text())
    ]  # fmt: skip
    assert len(asking) > 8
    assert [str(path) for path in asking if not KEPT_TO_LINUX.search((ROOT / path).read_text())] == []


def test_make_check_reads_the_types_of_both_systems() -> None:
    rule = re.search(r"^check:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert rule is not None
    found = re.findall(r"bin/mypy(.*)", rule[1])
    assert [each.split()[:2] for each in found] == [[], ["--platform", "darwin"]]


def test_the_rule_reads_the_whole_package() -> None:
    assert PurePosixPath("p2ptrain/system.py") in MODULES
