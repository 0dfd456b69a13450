"""Adapts a model of Hugging Face to chats, with whoever joins: `lora_chat.py DIRECTORY MODEL CHATS`.

MODEL is a directory with config.json, model.safetensors, tokenizer.json and a chat template; CHATS a file or a folder
of chats, one a line. Only small matrices are trained and sent (LoRA), and of the chats only the assistant's words are
learned. Stop it with Ctrl-C; the same command goes on. `p2ptrain export OUT --data-dir DIRECTORY` writes the adapted
model.
"""

import os
import subprocess
import sys
from pathlib import Path

RUN = """\
name = "lora-chat"

[model]
kind = "transformers"
sequence_length = 512

[adapt]
kind = "lora"
rank = 16

[recipe]
sequences_per_pass = 2
inner_learning_rate = 0.001

"""


def main(directory: Path, model: Path, chats: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    data, file = directory / "chats", directory / "run.toml"
    if not file.exists():
        prepare = ["p2ptrain", "data", "prepare", data, chats, "--chat", "--tokenizer", model]
        printed = subprocess.run(prepare, check=True, stdout=subprocess.PIPE, text=True).stdout
        described = printed.partition("[model]")[0]  # whose sizes MODEL has
        file.write_text(RUN + described.replace("[data]", '[data]\ndocuments = "apart"  # chats in one sequence'))
    start = ["p2ptrain", "start", file, "--data", data, "--weights", model, "--data-dir", directory]
    os.execvp("p2ptrain", list(map(str, start)))


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit((__doc__ or "").splitlines()[0])
    main(*map(Path, sys.argv[1:]))
