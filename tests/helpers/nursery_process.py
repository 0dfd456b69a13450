"""A process that has imported a daemon's modules and forks daemons on request.

To import torch and the rest takes two of the three seconds of processor time that a daemon takes to start, and the
tests start more than a hundred. What is forked here is a process of its own, in a session of its own, that runs
`python -m p2ptrain` from its first line; only nothing is imported any more, and what is read at an import is the
nursery's (OMP_NUM_THREADS, PYTHONHASHSEED).

A request is a message on the socket that is given by its number: the arguments, the environment and the directory as
JSON, with two files: where the daemon writes, and a pipe that is told its process id and, once it has ended, its
status.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
from typing import Any

REQUEST_BYTES_MAX = 131_072  # an environment, mostly
IMPORTED = ("p2ptrain.cli", "p2ptrain.cli.node", "p2ptrain.daemon.launch", "p2ptrain.net.libp2p.p2pd", "uvloop")


def main() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # or else the first collection of each child would copy all of it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers
    with socket.socket(fileno=int(sys.argv[1])) as line:
        while True:
            content, files, _, _ = socket.recv_fds(line, REQUEST_BYTES_MAX, 2)
            if not content:
                return
            if os.fork() == 0:
                break
            for each in files:
                os.close(each)
    _keep(json.loads(content), *files)


def _keep(request: dict[str, Any], log: int, told: int) -> None:
    """Forks the daemon and reports its exit status, which only its parent can read."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    process = os.fork()
    if process == 0:
        _become(request, log, told)
    else:
        os.close(log)
        ended = os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)  # its number stays its own until all know
        assert ended is not None
        status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        os.write(told, f"{status}\n".encode())
        os.waitpid(process, 0)
        os._exit(0)


def _become(request: dict[str, Any], log: int, told: int) -> None:
    os.setsid()
    os.write(told, f"{os.getpid()}\n".encode())
    os.close(told)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, file in enumerate((nothing, log, log)):
        os.dup2(file, number)
    os.close(nothing)
    os.close(log)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = ["p2ptrain", *request["arguments"]]
    runpy.run_module("p2ptrain", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
