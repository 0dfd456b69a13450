"""A child process that loads a tokenizer from stdin and encodes a text, within limits of memory and time.

It is a separate program that imports nothing of p2ptrain: it only ends with status 0, or in another way.
"""

from __future__ import annotations

import os
import resource
import sys

MEMORY_BYTES = 4 * 2**30  # of addresses; a vocabulary of 262,144 tokens takes under one GiB
PROCESSOR_SECONDS = 30
TEXT = "The quick brown fox's 12,345 jumps.\r\n\tÜber \u4e2d\u6587 \U0001f600\x00 " + "  a" * 200 + "b" * 500


def main() -> None:
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR_SECONDS, PROCESSOR_SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from tokenizers import Tokenizer  # noqa: PLC0415  # under the limits, too

    tokenizer = Tokenizer.from_buffer(sys.stdin.buffer.read())
    tokenizer.decode(tokenizer.encode(TEXT).ids, skip_special_tokens=False)


if __name__ == "__main__":
    main()
