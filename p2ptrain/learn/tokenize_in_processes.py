"""Tokenizes in several processes: the tokenizers library works on all cores by itself, but its results come back to
Python token by token, which takes as long as making them.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import numpy as np

from p2ptrain.errors import DataError
from p2ptrain.learn.corpus import Document
from p2ptrain.learn.tokenizer import JsonTokenizer, Tokenizer, Tokens, token_type

AHEAD = 3  # batches a process that are read before they are needed

Batch = tuple[list[Document], list[Tokens]]


def in_processes(tokenizer: Tokenizer, batches: Iterable[list[Document]], processes: int) -> Iterator[Batch]:
    """Yields each batch with its tokens, in order. A tokenizer without a file needs no processes."""
    if processes < 2 or not tokenizer.file_bytes:
        yield from ((batch, _tokens_of(batch, tokenizer.encode_batch(_texts_of(batch)))) for batch in batches)
        return
    kind = token_type(tokenizer.vocab_size)
    waiting: deque[tuple[list[Document], Future[list[bytes]]]] = deque()

    def first() -> Batch:
        batch, result = waiting.popleft()
        return batch, _tokens_of(batch, [np.frombuffer(each, kind) for each in result.result()])

    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, mp_context=spawn, initializer=_begin, initargs=(tokenizer.file_bytes,))
    try:
        for batch in batches:
            waiting.append((batch, pool.submit(_encode, _texts_of(batch))))
            if len(waiting) > AHEAD * processes:
                yield first()
        while waiting:
            yield first()
    except BrokenProcessPool as error:
        what = "a process that tokenizes was ended, perhaps for want of memory"
        raise DataError(f"{what}. Type the command again to go on, with fewer --processes") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _texts_of(batch: Sequence[Document]) -> list[str]:
    return [document.text for document in batch if document.tokens is None]


def _tokens_of(batch: Sequence[Document], encoded: Iterable[Tokens]) -> list[Tokens]:
    made = iter(encoded)
    return [next(made) if document.tokens is None else document.tokens for document in batch]


# ---------------------------------------------------------------------------------------------------
# In the other processes

_tokenizer: JsonTokenizer | None = None


def _begin(file_bytes: bytes) -> None:
    global _tokenizer  # noqa: PLW0603  (a process has one)
    threading.Thread(target=_end_with_the_first_one, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there are as many processes as cores
    _tokenizer = JsonTokenizer(file_bytes)


def _end_with_the_first_one() -> None:
    """Ends this process once the one that began it has been killed: its siblings keep the queue open."""
    first = multiprocessing.parent_process()
    assert first is not None, "another process has begun this one"
    first.join()
    os._exit(1)


def _encode(texts: list[str]) -> list[bytes]:
    assert _tokenizer is not None, "the process has begun"
    return [tokens.tobytes() for tokens in _tokenizer.encode_batch(texts)]
