"""A peer that trains our model with others' libraries at a card's pace; benchmarks/frontier.py starts it on a host.

`torchft` is its DiLoCo: dense pseudo-gradients in fp32, averaged by gloo as one bucket; the first peer has the
lighthouse. With overlap its exchange begins after the first step and is waited for at the last one, the longest delay
that it accepts (`fragment_sync_delay`). `hivemind` is hivemind.Optimizer with local steps, which averages weights in
fp16. It prints the address that the others need, trains once there is a file `go`, and writes its weights when a mark's
time has come.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np
import torch
from paced import Notes, Pace
from torch import nn
from torch_inner import Inner, hidden_matrices

from p2ptrain.config import ModelConfig, RecipeConfig
from p2ptrain.data.assignment import shard
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.models.built_in import Transformer, initialise

STORE_PORT, LIGHTHOUSE_PORT = 29_500, 29_510
ENOUGH = timedelta(minutes=30)  # an exchange on a slow line takes minutes, which is no failure
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9  # DiLoCo's own
OWN_SHARE = 0.5  # of a peer's own weights that it keeps when it takes the others' in, with overlap: Streaming DiLoCo's
GO_SECONDS = 0.05


class Timed(Inner):
    """Takes its own time from the steps' pace, but not what a library does around it."""

    def __init__(self, pace: Pace, *rest: Any) -> None:
        super().__init__(*rest)
        self.pace = pace

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        began = monotonic()
        super().step(closure)
        self.pace.owed += monotonic() - began


def torchft_step(settings: dict[str, Any], model: Transformer, inner: torch.optim.Optimizer) -> Callable[[], None]:
    """Joins the others; returns what takes a step of the inner optimizer, and every so often one with all."""
    sys.path.append(settings["torchft"])  # its own; all else is ours
    os.environ["GLOO_SOCKET_IFNAME"] = "line0"
    from torch.distributed import TCPStore  # noqa: PLC0415
    from torchft import Manager, ProcessGroupGloo  # noqa: PLC0415
    from torchft.coordination import LighthouseServer  # noqa: PLC0415
    from torchft.local_sgd import DiLoCo  # noqa: PLC0415

    own, first = settings["address"], (settings["first"] or [f"http://{settings['address']}:{LIGHTHOUSE_PORT}"])[0]
    lighthouse = None
    if not settings["first"]:
        lighthouse = LighthouseServer(bind=f"0.0.0.0:{LIGHTHOUSE_PORT}", min_replicas=settings["peers"])
        print(json.dumps([first]), flush=True)
    store = TCPStore(own, STORE_PORT, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=ENOUGH), load_state_dict=None, state_dict=None,
        min_replica_size=settings["peers"], use_async_quorum=False, timeout=ENOUGH, quorum_timeout=ENOUGH,
        rank=0, world_size=1, store_addr=own, store_port=STORE_PORT, lighthouse_addr=first,
        replica_id=f"peer{settings['place']}", hostname=own, init_sync=False,
    )  # fmt: skip
    outer = torch.optim.SGD(model.parameters(), OUTER_RATE, OUTER_MOMENTUM, nesterov=True)
    delay = settings["period"] - 1 if settings["overlaps"] else 0
    method = DiLoCo(
        manager, [model], inner, outer, settings["period"], use_bucketization=True,
        fragment_sync_delay=delay, fragment_update_alpha=OWN_SHARE if delay else 0.0,
    )  # fmt: skip
    method.__enter__()

    def step() -> None:
        inner.step()
        inner.zero_grad()

    step.kept = store, lighthouse  # type: ignore[attr-defined]  # they end with it
    return step


def hivemind_step(settings: dict[str, Any], model: Transformer, recipe: RecipeConfig, pace: Pace) -> Callable[[], None]:
    import hivemind  # noqa: PLC0415
    from hivemind_peer import optimizer_of  # noqa: PLC0415

    dht = hivemind.DHT(
        host_maddrs=[f"/ip4/{settings['address']}/tcp/4001"], initial_peers=settings["first"], start=True
    )
    print(json.dumps([str(each) for each in dht.get_visible_maddrs()]), flush=True)
    optimizer = optimizer_of(settings, dht, model, recipe, partial(Timed, pace))

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


def keep_weights(settings: dict[str, Any], parameters: list[nn.Parameter], began: float) -> None:
    """Writes the weights at each mark, whatever the library does or waits for then."""
    for number, seconds in enumerate(settings["marks"]):
        sleep(max(0.0, began + seconds - monotonic()))
        weights = torch.cat([each.detach().reshape(-1) for each in parameters]).numpy()
        path = Path(settings["out"]) / f"{settings['place']}.{number}.npy"
        np.save(path.with_suffix(".partial.npy"), weights)
        path.with_suffix(".partial.npy").replace(path)


def train(settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    config, recipe = ModelConfig(**settings["model"]), RecipeConfig(**settings["recipe"])
    dataset = TokenDataset.open(Path(settings["dataset"]), settings["manifest"])
    model, out, place = Transformer(config), Path(settings["out"]), settings["place"]
    initialise(model, 0)
    parameters: list[nn.Parameter] = list(model.parameters())
    pace, length = Pace(settings["pace_seconds"], settings["real_every"]), config.sequence_length
    if settings["system"] == "torchft":
        inner = Timed(pace, parameters, hidden_matrices(model, str(recipe.inner)), recipe, settings["rate"])
        step = torchft_step(settings, model, inner)
    else:
        step = hivemind_step(settings, model, recipe, pace)

    def real() -> None:
        positions = shard(0, pace.steps, place, settings["peers"], recipe.sequences_per_pass, dataset.sequences(length))
        model.loss(torch.from_numpy(dataset.batch(positions, length))).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(parameters, float(recipe.clip))

    (out / f"{place}.ready").touch()
    while not (out / "go").exists():
        sleep(GO_SECONDS)
    notes, began = Notes(out / f"{place}.notes"), monotonic()
    notes.add(0)
    threading.Thread(target=keep_weights, args=(settings, parameters, began), daemon=True).start()
    while not (out / "stop").exists():
        pace.step(real)
        if pace.steps % settings["period"] == 0:
            notes.add(pace.steps)
        step()


if __name__ == "__main__":
    train(json.loads(sys.argv[1]))
