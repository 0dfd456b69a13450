"""A script like nanoGPT's that trains with others: `own_loop.py DIRECTORY` starts a run, `own_loop.py OTHER ADDRESS`
joins it. The lines marked # + are all that plain training does not have."""

import sys
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import p2ptrain  # +

WIDTH, LENGTH, BATCH, ACCUMULATED = 64, 64, 4, 2


class Text(Dataset):
    def __init__(self, text):
        self.tokens = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()

    def __len__(self):
        return len(self.tokens) // LENGTH - 1

    def __getitem__(self, index):
        return self.tokens[index * LENGTH : (index + 1) * LENGTH + 1]


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, batch):
        inputs, mask = batch[:, :-1], nn.Transformer.generate_square_subsequent_mask(LENGTH)
        hidden = self.blocks(self.tokens(inputs) + self.places.weight, mask, is_causal=True)
        return functional.cross_entropy((hidden @ self.tokens.weight.T).flatten(0, 1), batch[:, 1:].flatten())


if __name__ == "__main__":
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=20)
    directory, address = sys.argv[1], sys.argv[2:]  # +
    take_part = p2ptrain.join if address else p2ptrain.start  # +
    with take_part(*address, model=model, directory=directory) as swarm:  # +
        print("others join with", swarm.address, flush=True)  # +
        while True:
            for number, batch in enumerate(DataLoader(Text("".join(topics.values())), BATCH, True, num_workers=2)):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(batch)
                (loss / ACCUMULATED).backward()
                if number % ACCUMULATED == ACCUMULATED - 1:
                    optimizer.step()
                    optimizer.zero_grad()
                    schedule.step()
                    if swarm.step(loss) and swarm.round % 10 == 0:  # +
                        print(f"round {swarm.round}: loss {loss.item():.3f}", flush=True)
