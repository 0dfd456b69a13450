"""Runs a command under the restrictions of deploy/systemd/p2ptrain.service, without systemd.

`python sandbox.py COMMAND...` reads the unit and takes from itself, by the kernel's own means, new rights, all
capabilities, other families of sockets and all system calls that the unit does not name; it is then COMMAND. What
concerns the file system and namespaces is left to systemd.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

UNIT = Path(__file__).parents[2] / "deploy/systemd/p2ptrain.service"
# <linux/prctl.h>, <seccomp.h>, <socket.h>
SET_NO_NEW_PRIVILEGES, DROP_CAPABILITY = 38, 24
ALLOW, ERRNO_EPERM, IS_EQUAL = 0x7FFF0000, 0x00050000 | 1, 4
FAMILIES = {"AF_UNIX": 1, "AF_INET": 2, "AF_INET6": 10, "AF_NETLINK": 16}
CAPABILITIES = 41


class Comparison(ctypes.Structure):
    _fields_ = (("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


def settings(unit: str) -> dict[str, list[str]]:
    """Returns every setting with its values; an empty one clears those before it, as in systemd."""
    found: dict[str, list[str]] = {}
    for key, value in re.findall(r"^(\w+)=(.*)$", unit, re.MULTILINE):
        found.setdefault(key, []).append(value)
    return found


def system_calls(lists: Iterable[str]) -> set[str]:
    """Returns the system calls that SystemCallFilter= allows; systemd-analyze resolves the groups."""
    allowed: set[str] = set()
    for text in lists:
        names = members(text.removeprefix("~").split())
        allowed = allowed - names if text.startswith("~") else allowed | names
    return allowed


def members(names: Iterable[str]) -> set[str]:
    found: set[str] = set()
    for name in names:
        if name.startswith("@"):
            text = subprocess.run(
                ["systemd-analyze", "syscall-filter", "--no-pager", name], capture_output=True, text=True, check=True
            ).stdout
            inside = [line.strip() for line in text.splitlines()[1:]]
            found |= members(each for each in inside if each and not each.startswith("#"))
        else:
            found.add(name)
    return found


def put_on(unit: dict[str, list[str]]) -> None:
    libc, library = ctypes.CDLL(None, use_errno=True), ctypes.CDLL("libseccomp.so.2")

    def control(option: int, value: int) -> None:
        if libc.prctl(option, value, 0, 0, 0):
            raise OSError(ctypes.get_errno(), f"prctl {option}")

    for number in range(CAPABILITIES if os.geteuid() == 0 else 0):
        control(DROP_CAPABILITY, number)
    assert unit["NoNewPrivileges"] == ["yes"]
    control(SET_NO_NEW_PRIVILEGES, 1)
    library.seccomp_init.restype = ctypes.c_void_p
    rules = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(ERRNO_EPERM)))
    families = {FAMILIES[name] for name in unit["RestrictAddressFamilies"][0].split()}
    for name in sorted(system_calls(unit["SystemCallFilter"])):
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number < 0:
            continue  # another machine's
        for each in sorted(families) if name == "socket" else (None,):
            if each is None:
                failed = library.seccomp_rule_add_array(rules, ctypes.c_uint32(ALLOW), number, 0, None)
            else:
                is_it = Comparison(0, IS_EQUAL, each, 0)
                failed = library.seccomp_rule_add_array(rules, ctypes.c_uint32(ALLOW), number, 1, ctypes.byref(is_it))
            assert failed == 0, name
    assert library.seccomp_load(rules) == 0


if __name__ == "__main__":
    put_on(settings(UNIT.read_text()))
    os.execvp(sys.argv[1], sys.argv[1:])
