"""How long `p2ptrain data prepare` takes for much text, whole and with a kill in between, and how much memory.

    python benchmarks/prepare.py [--megabytes 1000] [--tokenizer FILE] [--processes N]

The text is the Python files and documents that are installed here, as JSON lines, again from the start where they are
not enough. Without --tokenizer a byte-level BPE with 32,768 tokens is trained on a part of it. The second call is
killed with SIGKILL after half of the time that the first one took, and typed again: both make the same data set, or
the exit status is 1. Memory is that of all processes together, looked at ten times a second (proportional set size).
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import msgspec
import psutil

SAMPLE_BYTES = 20_000_000  # on which a tokenizer is trained
VOCAB_SIZE = 32_768
END = "<|endoftext|>"
SUFFIXES = (".py", ".pyi", ".txt", ".rst", ".md", ".h")
LOOK_SECONDS = 0.1


def texts() -> Iterator[str]:
    """Yields the texts that are installed here, over and over."""
    folders = {sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")}
    found = sorted(path for folder in folders for path in Path(folder).rglob("*") if path.suffix in SUFFIXES)
    for path in cycle(found):
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError):
            continue
        if text:
            yield text


def write_corpus(path: Path, size: int) -> None:
    written = 0
    with path.open("wb") as file:
        for text in texts():
            written += file.write(msgspec.json.encode({"text": text}) + b"\n")
            if written >= size:
                return


def train_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415

    def some() -> Iterator[str]:
        left = SAMPLE_BYTES
        for text in texts():
            yield text
            left -= len(text)
            if left < 0:
                return

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(some(), trainer)
    tokenizer.save(str(path))


class Call:
    """One call of the command, with what it took."""

    def __init__(self, out: Path, corpus: Path, tokenizer: Path, processes: int, seconds: float | None = None) -> None:
        """seconds: after which it is killed"""
        command = [sys.executable, "-m", "p2ptrain", "data", "prepare", str(out), str(corpus)]
        command += ["--tokenizer", str(tokenizer), "--processes", str(processes)]
        began, self.memory = time.monotonic(), 0.0
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
            while process.poll() is None:
                self.memory = max(self.memory, _megabytes(process.pid))
                time.sleep(LOOK_SECONDS)
                if seconds is not None and time.monotonic() - began > seconds:
                    process.send_signal(signal.SIGKILL)
                    break
            self.text = process.communicate()[0]
        self.seconds = time.monotonic() - began
        self.status = process.returncode

    @property
    def manifest(self) -> str:
        found = re.search(r'manifest = "(\w+)"', self.text)
        return found[1] if found else ""

    @property
    def tokens(self) -> int:
        return sum(int(number.replace(",", "")) for number in re.findall(r"([\d,]+) (?:tokens|held)", self.text))


def _megabytes(pid: int) -> float:
    total = 0
    for process in (found := psutil.Process(pid), *found.children(recursive=True)):
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--megabytes", type=int, default=1_000)
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json")
    parser.add_argument("--processes", type=int, default=0, help="that tokenize; 0: one for each core")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        corpus, tokenizer = place / "corpus.jsonl", arguments.tokenizer or place / "tokenizer.json"
        write_corpus(corpus, arguments.megabytes * 10**6)
        if arguments.tokenizer is None:
            train_tokenizer(tokenizer)
        whole = Call(place / "whole", corpus, tokenizer, arguments.processes)
        print(
            f"{arguments.megabytes:,} MB in {whole.seconds:.0f} s: {whole.tokens:,} tokens, "
            f"{whole.tokens / whole.seconds:,.0f} a second, {whole.memory:,.0f} MB of memory",
            flush=True,
        )
        cut = Call(place / "cut", corpus, tokenizer, arguments.processes, whole.seconds / 2)
        again = Call(place / "cut", corpus, tokenizer, arguments.processes)
        both = cut.seconds + again.seconds
        print(
            f"killed after {cut.seconds:.0f} s and typed again: {both:.0f} s in all ({both / whole.seconds:.2f}), "
            f"{whole.tokens / both:,.0f} tokens a second, {again.memory:,.0f} MB of memory"
        )
        if not whole.manifest or whole.manifest != again.manifest:
            print("NOT the same data set")
            sys.exit(1)


if __name__ == "__main__":
    main()
