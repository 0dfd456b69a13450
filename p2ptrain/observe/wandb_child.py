"""A child process that writes a Weights & Biases run from JSON lines on stdin.

It is a separate program that imports nothing of p2ptrain, because the wandb package brings threads, a service process
and exit hooks, which do not belong in a node. It ends when its stdin closes, however the node ended, and wandb's
service ends with it. It reports nothing about the machine, its programs or its files: only figures, name and id."""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading

FINISH_SECONDS = 60.0  # to send the last figures; the node itself waits less


def main() -> None:
    wandb = importlib.import_module("wandb")  # imported by name, for mypy where the extra is missing
    told = json.loads(sys.argv[1])
    settings = wandb.Settings(
        mode=os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline"),
        console="off",
        silent=True,
        disable_git=True,
        disable_code=True,
        x_disable_stats=True,
        x_disable_meta=True,
        x_disable_machine_info=True,
        x_save_requirements=False,
    )
    run = wandb.init(dir=told["directory"], project=told["project"], config=told["config"], settings=settings)
    run.define_metric("*", step_metric="round")  # a round may be repeated on another branch
    for line in sys.stdin.buffer:
        run.log(json.loads(line))
    timer = threading.Timer(FINISH_SECONDS, os._exit, [1])
    timer.daemon = True
    timer.start()
    run.finish()


if __name__ == "__main__":
    main()
