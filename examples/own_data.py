"""Trains one model with others on texts that stay where they are: nobody gets another's.

`own_data.py DIRECTORY TEXT` starts a run, `own_data.py OTHER TEXT ADDRESS INVITATION` joins it with another text."""

import sys
from pathlib import Path
from subprocess import check_output

import torch
from torch import nn
from torch.nn import functional

import p2ptrain

WIDTH, LENGTH = 64, 64


class Next(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.memory = nn.Embedding(256, WIDTH), nn.GRU(WIDTH, 2 * WIDTH, batch_first=True)
        self.head = nn.Linear(2 * WIDTH, 256)

    def forward(self, batch):
        hidden, _ = self.memory(self.tokens(batch[:, :-1]))
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), batch[:, 1:].flatten())


def command(*words):
    return check_output([sys.executable, "-m", "p2ptrain", *words], text=True)


if __name__ == "__main__":
    directory, text, *friend = sys.argv[1:]
    data, file = (str(Path(directory) / name) for name in ("own", "friends.invitation"))
    if not Path(data).exists():
        command("data", "prepare", data, text, "--held-out", "5")
    model = Next()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    if friend:
        address, invitation = friend
        swarm = p2ptrain.join(address, model, optimizer, directory=directory, data=data, invitation=invitation)
    else:
        if not (Path(directory) / "identity.key").exists():
            command("identity", "new", "--data-dir", directory)
        key = command("identity", "show", "--data-dir", directory).split()[-1]
        run = {"name": "own-data", "model": {"sequence_length": LENGTH}, "recipe": {"local_steps": 10, "k": 128}}
        run |= {"data": {"source": "own"}, "admission": {"policy": "invite", "keys": [key]}}
        swarm = p2ptrain.start(model, optimizer, directory=directory, data=data, run=run)
    with swarm:
        if not friend and not Path(file).exists():
            command("invite", "--last-round", "100000", "--uses", "8", "--out", file, "--data-dir", directory)
        if not friend:
            print("others join with", swarm.address, "and", file, flush=True)
        for batch in swarm.batches():  # of this node's own text
            loss = model(batch)
            loss.backward()
            if swarm.step(loss) and swarm.round % 10 == 0:  # measured on held-out text, which all nodes share
                print(f"round {swarm.round}: held-out loss {swarm.evaluate(model, 16):.3f}", flush=True)
