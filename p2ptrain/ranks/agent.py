"""Starts the ranks of a node, and ends them together: torch's own elastic agent, in a process of its own.

    python -m p2ptrain.ranks.agent DIRECTORY RANKS

It lives as long as its standard input, which the node holds. All meet by files in the directory, which this user alone
may enter; nothing listens for strangers. It starts no rank again: the node decides with how many."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

END_SECONDS = 3  # for ranks to end, until they are killed


def _end_with_the_node(directory: Path) -> None:
    while os.read(0, 4_096):  # sys.stdin would be locked when this process ends before the node
        pass
    shutil.rmtree(directory, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    directory, ranks = Path(sys.argv[1]), int(sys.argv[2])
    threading.Thread(target=_end_with_the_node, args=(directory,), daemon=True).start()
    logging.disable()  # the node says itself which rank has ended
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # it would listen on all addresses
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=ranks, max_restarts=0, run_id=directory.name, local_addr="localhost",
        # One agent needs no sign of life, and each would be added to the file.
        rdzv_backend="c10d", rdzv_endpoint=str(directory / "agents"),
        rdzv_configs={"store_type": "file", "keep_alive_interval": 10**6},
        shutdown_timeout=END_SECONDS, logs_specs=DefaultLogsSpecs(log_dir=str(directory / "logs")),
    )  # fmt: skip
    with suppress(ChildFailedError):
        elastic_launch(config, sys.executable)("-m", "p2ptrain.ranks.rank", str(directory))


if __name__ == "__main__":
    with suppress(SignalException):  # also once all ranks have ended
        main()
    os._exit(1)  # before a signal meets an interpreter that ends, and a traceback is printed
