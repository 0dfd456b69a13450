"""transformers' Trainer that trains with others: `hf_trainer.py DIRECTORY` starts a run, `hf_trainer.py OTHER ADDRESS`
joins it. The lines marked # + are all that plain training does not have."""

import sys
from pydoc_data.topics import topics

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from p2ptrain.hf import SwarmCallback  # +

LENGTH = 64


class Text(torch.utils.data.Dataset):
    def __init__(self, text):
        self.tokens = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()

    def __len__(self):
        return len(self.tokens) // LENGTH

    def __getitem__(self, index):
        tokens = self.tokens[index * LENGTH : (index + 1) * LENGTH]
        return {"input_ids": tokens, "labels": tokens}


if __name__ == "__main__":
    directory, *address = sys.argv[1:]
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, **sizes))
    settings = TrainingArguments(
        output_dir=f"{directory}/trainer", max_steps=1_000, per_device_train_batch_size=8, learning_rate=2e-3,
        gradient_accumulation_steps=2, logging_steps=50, save_strategy="no", report_to=[], use_cpu=True,
    )  # fmt: skip
    others = SwarmCallback(*address, directory=directory)  # +
    trainer = Trainer(model, settings, train_dataset=Text("".join(topics.values())), callbacks=[others])  # +
    trainer.train()
    model.save_pretrained(f"{directory}/trained")
