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
from typing import Any

import numpy as np

from p2ptrain.data.corpus import Document
from p2ptrain.data.tokenizer import JsonTokenizer, Marked, Tokenizer, Tokens
from p2ptrain.errors import DataError

AHEAD = 3  # batches per process that are read ahead

Batch = tuple[list[Document], list[Tokens]]


def in_processes(
    tokenizer: Tokenizer, dtype: np.dtype[Any], batches: Iterable[list[Document]], processes: int
) -> Iterator[Batch]:
    """Yields each batch with its tokens, of type `dtype`, in order. The bytes tokenizer runs in this process."""
    if processes < 2 or not tokenizer.file_bytes:
        for batch in batches:
            yield batch, _tokens_of(batch, _encoded(tokenizer, _texts_of(batch)), dtype)
        return
    waiting: deque[tuple[list[Document], Future[list[bytes]]]] = deque()

    def first() -> Batch:
        batch, result = waiting.popleft()
        return batch, _tokens_of(batch, (np.frombuffer(each, dtype) for each in result.result()), dtype)

    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, mp_context=spawn, initializer=_begin, initargs=(tokenizer.file_bytes, dtype))
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


def _texts_of(batch: Sequence[Document]) -> list[str | Marked]:
    found = (document for document in batch if document.tokens is None)
    return [each.text if each.learned is None else Marked(each.text, each.learned) for each in found]


def _tokens_of(batch: Sequence[Document], encoded: Iterable[Tokens], dtype: np.dtype[Any]) -> list[Tokens]:
    made = iter(encoded)
    found = (next(made) if document.tokens is None else document.tokens for document in batch)
    return [tokens.astype(dtype, copy=False) for tokens in found]


def _encoded(tokenizer: Tokenizer, texts: Sequence[str | Marked]) -> list[Tokens]:
    plain = iter(tokenizer.encode_batch([each for each in texts if isinstance(each, str)]))
    marked = iter(tokenizer.encode_marked([each for each in texts if isinstance(each, Marked)]))
    return [next(plain if isinstance(each, str) else marked) for each in texts]


# ---------------------------------------------------------------------------------------------------
# In the other processes

_tokenizer: JsonTokenizer | None = None
_dtype: np.dtype[Any] | None = None


def _begin(file_bytes: bytes, dtype: np.dtype[Any]) -> None:
    global _tokenizer, _dtype
    threading.Thread(target=_end_with_the_first_one, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there are as many processes as cores
    _tokenizer, _dtype = JsonTokenizer(file_bytes), dtype


def _end_with_the_first_one() -> None:
    """Ends this process if its parent is killed, which the queue would not show, since siblings keep it open."""
    first = multiprocessing.parent_process()
    assert first is not None, "another process has begun this one"
    first.join()
    os._exit(1)


def _encode(texts: list[str | Marked]) -> list[bytes]:
    assert _tokenizer is not None and _dtype is not None, "the process has begun"
    return [tokens.astype(_dtype, copy=False).tobytes() for tokens in _encoded(_tokenizer, texts)]
