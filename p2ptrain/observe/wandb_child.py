"""What a node starts to write a run of Weights & Biases: lines of JSON come in, the rest is theirs.

It is a program of its own and imports nothing of ours, because their package brings threads, a service process and
hooks at the interpreter's end, none of which belongs into a node. It ends with its input, however the node ended, and
their service ends with it. Nothing is told of the machine, its programs or its files: only figures, and the run's name
and id.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading

FINISH_SECONDS = 60.0  # to send the last figures when the node has ended: a node that waits for them waits less


def main() -> None:
    wandb = importlib.import_module("wandb")  # it has types, but not where the extra is not installed
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
    run.define_metric("*", step_metric="round")  # one that is lived again, on another branch, is no error
    for line in sys.stdin.buffer:
        run.log(json.loads(line))
    timer = threading.Timer(FINISH_SECONDS, os._exit, [1])
    timer.daemon = True
    timer.start()
    run.finish()


if __name__ == "__main__":
    main()
