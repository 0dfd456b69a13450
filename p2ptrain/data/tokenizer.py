"""Tokenizers: turn text into the integers that the model reads, and back.

Two kinds. `bytes` needs no file: a token is a byte of UTF-8. `json` is a file of the `tokenizers`
library (Hugging Face's tokenizer.json), and its bytes are part of the run: their digest is
`RunConfig.tokenizer.digest`, because two files that differ in one merge split the same text differently.

A tokenizer file has settings that are meant for inference and would silently spoil training data: truncation, padding,
a token in front, and parsing "<|endoftext|>" in a text as the special token. All of these are switched off here, except
that special tokens are parsed in chats, where the template writes them. Dropout of merges (Provilkov et al. 2020) makes
each encoding different, so a file that asks for it is refused.

The library is written in Rust, and some files make it panic, while loading or on a text. The panic is an error that is
not an `Exception` and would end a daemon: here it becomes a `DataError` about the file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from p2ptrain.data.tokenizer_rules import judged
from p2ptrain.digest import digest
from p2ptrain.errors import ConfigError, DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as LibraryTokenizer

Tokens = npt.NDArray[np.integer[Any]]
"""Tokens as they are stored: little-endian, in the narrowest type that fits the vocabulary."""

TOKENIZER_BYTES_MAX = 64 * 2**20  # the largest in common use (262,144 tokens) has 33 MB; each newcomer fetches it
VOCAB_SIZE_MAX = 2**20  # the bound of RunConfig.model.vocab_size
WHY_MAX = 300  # characters kept of a message by the library, which may quote the file
FILE_NAME = "tokenizer.json"
PANIC = "PanicException"  # pyo3_runtime's error, which cannot be imported; each Rust library has its own
# The end tokens of common tokenizers, in order of preference.
END_OF_DOCUMENT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>", "[SEP]")
MASK_NAMES = ("[MASK]", "<mask>")  # what BERT and RoBERTa call the token that stands for a hidden one


@dataclass(frozen=True, slots=True)
class Marked:
    """A chat's text, in which special tokens are parsed, and the places in it that are learned."""

    text: str
    learned: tuple[tuple[int, int], ...]  # start and end of each place, in characters


def token_type(vocab_size: int, is_masked: bool = False) -> np.dtype[np.integer[Any]]:
    """Returns the integer type that stores tokens below `vocab_size`; with a mask also their complements."""
    if is_masked:
        return np.dtype("<i1" if vocab_size <= 2**7 else "<i2" if vocab_size <= 2**15 else "<i4")
    return np.dtype("<u1" if vocab_size <= 2**8 else "<u2" if vocab_size <= 2**16 else "<u4")


def tokenizer_digest(file_bytes: bytes) -> str:
    return digest("tokenizer", file_bytes).hex()


class BytesTokenizer:
    """Maps text to its UTF-8 bytes, without a file. Zero ends a document, because it does not occur in text."""

    vocab_size = 256
    kind: Literal["bytes"] = "bytes"
    digest = ""
    file_bytes = b""
    end_of_document = 0
    mask: int | None = 256  # beyond all bytes: data never has it
    added: dict[str, bool] = {}  # noqa: RUF012  (nobody changes it)

    def encode(self, text: str) -> Tokens:
        return np.frombuffer(text.encode(), dtype=token_type(self.vocab_size))

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        return [self.encode(text) for text in texts]

    def encode_marked(self, texts: Sequence[Marked]) -> list[Tokens]:
        encoded = []
        for marked in texts:
            codes = np.frombuffer(marked.text.encode("utf-32-le"), dtype="<u4")
            sizes = 1 + (codes >= 2**7) + (codes >= 2**11) + (codes >= 2**16)  # bytes of a character
            places = np.repeat(np.arange(len(codes)), sizes)
            encoded.append(_masked(self.encode(marked.text), places, places + 1, marked, self.vocab_size))
        return encoded

    def decode(self, tokens: Sequence[int] | npt.NDArray[Any]) -> str:
        # A model may write bytes that are not UTF-8, which are replaced, and tokens that have no text.
        return bytes(each for each in np.asarray(tokens).tolist() if each < self.vocab_size).decode(errors="replace")


class WithoutPanic:
    """Turns a panic of the library into a `DataError` about the file."""

    def __init__(self, source: str) -> None:
        self.source = source

    def __enter__(self) -> None:
        """Nothing to do yet."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None or kind.__name__ != PANIC:
            return
        what = f"{self.source}: the tokenizers library failed on it ({str(error)[:WHY_MAX]})"
        raise DataError(f"{what}. Use a file as the library saves it") from error


class JsonTokenizer:
    """The tokenizer of a tokenizer.json; `source` is its name in error messages.

    vocab_size: the largest token, plus one; file_bytes: what newcomers fetch; digest: of these, in hex;
    end_of_document: the token that follows each document in training data; mask: the one that a model reads in place of
    one that it has to fill in"""

    kind: Literal["json"] = "json"

    def __init__(self, file_bytes: bytes, source: str = "tokenizer file") -> None:
        if len(file_bytes) > TOKENIZER_BYTES_MAX:
            what = f"{len(file_bytes)} bytes; the limit is {TOKENIZER_BYTES_MAX}: every node of the run has to fetch it"
            raise ConfigError(what, source=source, fix="Choose a tokenizer with a smaller vocabulary")
        self.source = source
        with WithoutPanic(source):
            self._library = _load_library_tokenizer(file_bytes, source)
            # Not the number of tokens, because vocabularies may have gaps.
            self.vocab_size = max(self._library.get_vocab().values(), default=0) + 1
        self.file_bytes, self.digest = file_bytes, tokenizer_digest(file_bytes)
        if not 2 <= self.vocab_size <= VOCAB_SIZE_MAX:
            fix = "Choose another tokenizer"
            raise ConfigError(f"{self.vocab_size} tokens; a run needs 2 to {VOCAB_SIZE_MAX}", source=source, fix=fix)
        self.end_of_document = self._find_end_of_document(source)
        self.mask = next((self._special[name] for name in MASK_NAMES if name in self._special), None)

    def encode(self, text: str) -> Tokens:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        with WithoutPanic(self.source):
            encodings = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=token_type(self.vocab_size)) for encoding in encodings]

    def encode_marked(self, texts: Sequence[Marked]) -> list[Tokens]:
        """Encodes texts with their special tokens; tokens that are not learned become complements."""
        if not texts:
            return []  # saves loading the file once more
        with WithoutPanic(self.source):
            encodings = self._of_chats.encode_batch([each.text for each in texts], add_special_tokens=False)
        encoded, added = [], list(self._library.get_added_tokens_decoder())
        for marked, encoding in zip(texts, encodings, strict=True):
            places, ids = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2), np.array(encoding.ids)
            # An added token may include spaces that follow it, so its start decides.
            ends = np.where(np.isin(ids, added), places[:, 0] + 1, places[:, 1])
            encoded.append(_masked(ids, places[:, 0], ends, marked, self.vocab_size))
        return encoded

    def decode(self, tokens: Sequence[int] | npt.NDArray[Any]) -> str:
        with WithoutPanic(self.source):
            return self._library.decode(np.asarray(tokens).tolist(), skip_special_tokens=False)

    @cached_property
    def _of_chats(self) -> LibraryTokenizer:
        """The same tokenizer, but special tokens in a text are parsed as such."""
        return _load_library_tokenizer(self.file_bytes, self.source, reads_special=True)

    @property
    def added(self) -> dict[str, bool]:
        """The tokens that were added to the vocabulary, such as the end of a turn, and whether they are special."""
        return {token.content: token.special for token in self._library.get_added_tokens_decoder().values()}

    @cached_property
    def _special(self) -> dict[str, int]:
        """The tokens that no text has, by their names."""
        added = self._library.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

    def _find_end_of_document(self, source: str) -> int:
        for name in END_OF_DOCUMENT_NAMES:  # any other token could occur in a text and end it early
            if name in self._special:
                return self._special[name]
        fix = f"Add a special token with one of the names {', '.join(END_OF_DOCUMENT_NAMES)}"
        raise ConfigError("no token that ends a document", source=source, fix=fix)


Tokenizer: TypeAlias = BytesTokenizer | JsonTokenizer


def _masked(
    tokens: npt.NDArray[Any], begins: npt.NDArray[Any], ends: npt.NDArray[Any], marked: Marked, vocab_size: int
) -> Tokens:
    """Replaces each token outside the learned places by its complement."""
    is_learned = np.zeros(len(tokens), dtype=bool)
    for first, last in marked.learned:
        is_inside = np.where(begins == ends, (first < ends) & (ends <= last), (begins < last) & (ends > first))
        is_learned |= is_inside  # tokens of trimmed spaces have no length
    tokens = tokens.astype(token_type(vocab_size, True))
    return np.where(is_learned, tokens, ~tokens)


def load_tokenizer(path: Path | None) -> Tokenizer:
    """Loads the tokenizer from a file or a model's directory; without a path, the bytes tokenizer."""
    if path is None:
        return BytesTokenizer()
    path = path / FILE_NAME if path.is_dir() else path
    file_bytes = read_beginning(path, TOKENIZER_BYTES_MAX + 1, fix="Name a tokenizer.json, or none to train on bytes")
    return JsonTokenizer(file_bytes, str(path))


def read_beginning(path: Path, size: int, fix: str) -> bytes:
    """Reads so many bytes of a file that a person names; called with more than there are, `read` would allocate all."""
    try:
        with path.open("rb") as file:
            return file.read(min(os.fstat(file.fileno()).st_size + 1, size))
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", source=str(path), fix=fix) from error


def _load_library_tokenizer(file_bytes: bytes, source: str, reads_special: bool = False) -> LibraryTokenizer:
    from tokenizers import Tokenizer as LibraryTokenizer  # noqa: PLC0415  (bytes do not need it)

    try:
        library = LibraryTokenizer.from_buffer(judged(file_bytes, source))
    except ValueError as error:
        fix = "Name a tokenizer.json as the tokenizers library saves it"
        raise ConfigError(f"not a tokenizer: {str(error)[:WHY_MAX]}", source=source, fix=fix) from error
    if getattr(library.model, "dropout", None):
        what = "the model has dropout, so a text is encoded differently each time"
        raise ConfigError(what, source=source, key="model.dropout", fix="Set it to null")
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = not reads_special  # otherwise those in a text are plain text
    return library
