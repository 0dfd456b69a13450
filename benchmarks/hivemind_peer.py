"""A peer that trains our model with hivemind.Optimizer; benchmarks/against_hivemind.py starts it on a host of its own.

It prints its address, and then its weights go to a file after each of the minutes.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import hivemind
import numpy as np
import torch
from hivemind.compression import Float16Compression, NoCompression, Uniform8BitQuantization
from torch import nn
from torch_inner import Inner, hidden_matrices

from p2ptrain.config import ModelConfig, RecipeConfig
from p2ptrain.data.assignment import shard
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.models.built_in import Transformer, initialise

CODECS = {"fp16": Float16Compression, "8bit": Uniform8BitQuantization, "fp32": NoCompression}
AVERAGING_SECONDS = 30.0
STATE_EPOCHS = 5  # synchronous peers with one mean gradient stay together; a guess


def optimizer_of(
    settings: dict[str, Any], dht: Any, model: Transformer, recipe: RecipeConfig, make: Callable[..., Any] = Inner
) -> Any:
    codec = CODECS[settings["codec"]]()
    hidden, rate = hidden_matrices(model, settings["inner"]), settings["rate"]
    is_local = settings["mode"] == "local"
    own: dict[str, Any] = {"use_local_updates": True} if is_local else {"average_state_every": STATE_EPOCHS}
    return hivemind.Optimizer(
        dht=dht,
        run_id="wan",
        batch_size_per_step=recipe.sequences_per_pass,
        target_batch_size=recipe.sequences_per_pass * settings["period"] * settings["peers"],
        params=list(model.parameters()),
        optimizer=lambda params: make(params, hidden, recipe, rate),
        matchmaking_time=settings["matchmaking"],
        averaging_timeout=settings.get("averaging_seconds", AVERAGING_SECONDS),
        grad_compression=codec,
        delay_state_averaging=True,
        state_averaging_compression=codec,
        load_state_compression=Float16Compression(),
        tracker_opts={"min_refresh_period": 0.2},  # a peer tells its progress as often as that
        averager_opts={"request_timeout": settings["matchmaking"] / 3},  # hivemind warns of deadlocks if it is longer
        verbose=True,
        **own,
    )


def keep_weights(settings: dict[str, Any], parameters: list[nn.Parameter]) -> None:
    """Writes the weights when a minute is over, whatever hivemind does or waits for then."""
    for number, seconds in enumerate(settings["seconds"]):
        sleep(max(0.0, settings["began"] + seconds - monotonic()))
        weights = torch.cat([each.detach().reshape(-1) for each in parameters]).numpy()
        path = Path(settings["out"]) / f"{settings['place']}.{number}.npy"
        np.save(path.with_suffix(".partial.npy"), weights)
        path.with_suffix(".partial.npy").replace(path)


def train(settings: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    config, recipe = ModelConfig(**settings["model"]), RecipeConfig(**settings["recipe"])
    dht = hivemind.DHT(
        host_maddrs=[f"/ip4/{settings['address']}/tcp/4001"], initial_peers=settings["first"], start=True
    )
    print(json.dumps([str(each) for each in dht.get_visible_maddrs()]), flush=True)
    dataset = TokenDataset.open(Path(settings["dataset"]), settings["manifest"])
    model = Transformer(config)
    initialise(model, 0)
    optimizer = optimizer_of(settings, dht, model, recipe)
    length, step, trained, began = config.sequence_length, 0, 0.0, settings["began"]
    place, peers, parameters = settings["place"], settings["peers"], list(model.parameters())
    keeping = threading.Thread(target=keep_weights, args=(settings, parameters), daemon=True)
    keeping.start()
    while monotonic() < began + settings["seconds"][-1]:
        at = monotonic()
        positions = shard(0, step, place, peers, recipe.sequences_per_pass, dataset.sequences(length))
        model.loss(torch.from_numpy(dataset.batch(positions, length))).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(parameters, float(recipe.clip))
        trained += monotonic() - at
        optimizer.step()
        optimizer.zero_grad()
        step += 1
    keeping.join()
    epochs = optimizer.local_epoch
    told = {"steps": step, "epochs": epochs, "training_share": trained / (monotonic() - began)}
    optimizer.shutdown()
    dht.shutdown()
    return told


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    found = train(given)
    (Path(given["out"]) / f"{given['place']}.json").write_text(json.dumps(found) + "\n")
