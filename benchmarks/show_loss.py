"""Prints the held-out loss of a state of the run to show: show_loss.py DIRECTORY RUN ROUND.

Members measure it themselves, on a tenth of the sequences of a round, which here are three: enough to see whether a run
goes wrong, and too few for a picture. It is measured on the first state of a run, too, and so after a roll-back.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import torch

from p2ptrain.config import NodeConfig
from p2ptrain.data.run_data import packing_of
from p2ptrain.models.export import load_model
from p2ptrain.node.home import Home
from p2ptrain.node.saved import find_model, held_out_of, though_pruned
from p2ptrain.train.evaluate import evaluate

SEQUENCES = 128


def main(directory: str, run: str, number: str) -> None:
    torch.set_num_threads(1)
    home = Home(NodeConfig.model_validate({"storage": {"directory": str(Path(directory).resolve())}}))
    saved = though_pruned(lambda: find_model(home, run, int(number)))
    model = load_model(saved.weights, torch.device("cpu"))
    dataset, count = held_out_of(home, saved.run, None, SEQUENCES)
    packing, length = packing_of(saved.run, dataset), saved.run.model.sequence_length
    found = evaluate(partial(packing.loss, model), dataset, packing, length, sequences=count, at_a_time=8)
    print(json.dumps({"run": run, "round": int(number), "loss": round(found.loss, 4), "error": round(found.error, 4)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
