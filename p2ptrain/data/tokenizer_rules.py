"""Decides which tokenizer files may be loaded: those with a bounded number of components from real tokenizers.

A run's file comes from strangers. A chain of replacements that double the text is 2 KB long and takes all memory, and a
regular expression with nested repetitions takes forever. So components and regular expressions have to be on lists
taken from well-known tokenizers, and the growth of a text is computed from the file. `try_out` then loads a file and
encodes with it in a process of its own, with limits on memory and time."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec

from p2ptrain.errors import ConfigError, DataError

COMPONENTS_MAX = 24  # components of one kind; DeepSeek's file has seven
ONCE = {"BertNormalizer", "ByteLevel", "Metaspace", "NFC", "NFD", "NFKC", "NFKD"}  # repeated, these could double a text
TEXT_MAX = 64  # characters of a prefix, a separator or a replacement
ADDED_MAX = 100_000  # tokens beside the vocabulary
GROWTH_MAX = 4.0  # growth of a text, in characters, through all replacements together
WORD_MAX = 1_000  # characters of a word for WordPiece, whose time is quadratic in it; BERT's limit is 100
TRIAL_SECONDS = 60.0  # enough for a file of 33 MB on a slow machine
TRIAL_PROGRAM = Path(__file__).with_name("tokenizer_trial.py")

KINDS = {
    "normalizer": {
        *("Sequence", "Prepend", "Replace", "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents"),
        *("BertNormalizer", "ByteLevel"),
    },
    "pre_tokenizer": {
        *("Sequence", "ByteLevel", "BertPreTokenizer", "Metaspace", "Whitespace", "WhitespaceSplit", "Digits"),
        *("Punctuation", "Split"),
    },
    "post_processor": {"Sequence", "ByteLevel", "TemplateProcessing", "BertProcessing", "RobertaProcessing"},
    "decoder": {
        *("Sequence", "Replace", "ByteFallback", "Fuse", "Strip", "WordPiece", "ByteLevel", "Metaspace", "BPEDecoder")
    },
    "model": {"BPE", "WordPiece", "Unigram", "WordLevel"},
}
MEMBERS = ("normalizers", "pretokenizers", "processors", "decoders")  # keys for the members of a Sequence

_ENGLISH = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LOWER, _UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_O200K_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
REGEXES = {  # from well-known tokenizers; none has nested repetitions
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",  # GPT-2
    rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}",  # GPT-4, Llama 3
    rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}",  # Qwen 2
    rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",  # Qwen 3
    rf"{_WORDS[0]}{_ENGLISH}?|{_WORDS[1]}{_ENGLISH}?|\p{{N}}{{1,3}}|{_O200K_REST}",  # GPT-4o, Llama 4
    rf"{_WORDS[0]}|{_WORDS[1]}|\p{{N}}|{_O200K_REST}",  # Mistral's Tekken
    r"\p{N}{1,3}",  # DeepSeek, with the next two
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
    *(r"\d", r"\d+", r"\d{1,3}", r"\p{N}", "[0-9]", "[0-9][0-9][0-9]", " ", r"\s", r"\s+", r"\s+$", r"\n", r"[\r\n]"),
    *(r"\s?\p{L}+", r"\s?\p{P}+", r"\s?[^\s\w]+", r"[一-龥]+", " {2,}", "\u2581+"),
}


class _Model(msgspec.Struct):
    """The parts of a model that are judged; the vocabulary is left to the library."""

    type: str
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    max_input_chars_per_word: int = 0


class _File(msgspec.Struct, omit_defaults=True):
    """A tokenizer file. It is encoded again, with every key once, so that the library reads exactly what was judged."""

    model: msgspec.Raw
    added_tokens: list[dict[str, object]] = []
    normalizer: dict[str, object] | None = None
    pre_tokenizer: dict[str, object] | None = None
    post_processor: dict[str, object] | None = None
    decoder: dict[str, object] | None = None
    version: str = ""


def judged(file_bytes: bytes, source: str) -> bytes:
    """Returns the file in the form that the library may read. Raises ConfigError if it breaks the rules above."""
    try:
        file = msgspec.json.decode(file_bytes, type=_File)
        why = _refused(file, msgspec.json.decode(file.model, type=_Model))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        fix = "Name a tokenizer.json as the tokenizers library saves it"
        raise ConfigError(f"not a tokenizer: {str(error)[:300]}", source=source, fix=fix) from error
    if why:
        fix = "Choose a tokenizer like those of GPT-2, Llama, Qwen or BERT"
        raise ConfigError(f"a run cannot use this tokenizer: {ascii(why)[1:-1][:300]}", source=source, fix=fix)
    return msgspec.json.encode(file)


def _refused(file: _File, model: _Model) -> str:
    """Returns the reason to refuse a file, or an empty text."""
    if model.type not in KINDS["model"]:
        return f"unknown model {model.type}"
    if max(len(model.continuing_subword_prefix or ""), len(model.end_of_word_suffix or "")) > TEXT_MAX:
        return "a prefix or suffix that is too long"
    if model.max_input_chars_per_word > WORD_MAX:
        return f"max_input_chars_per_word is above {WORD_MAX}"
    if len(file.added_tokens) > ADDED_MAX:
        return f"more than {ADDED_MAX} added tokens"
    for kind in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (part := getattr(file, kind)) is not None and (why := _refused_part(kind, part)):
            return why
    return ""


def _refused_part(kind: str, part: dict[str, object]) -> str:
    components = [*islice(_components(part), COMPONENTS_MAX + 1)]
    if len(components) > COMPONENTS_MAX:
        return f"more than {COMPONENTS_MAX} parts in {kind}"
    counts, growth = Counter(str(each.get("type")) for each in components), 1.0
    for each in components:
        name = str(each.get("type"))
        if name not in KINDS[kind]:
            return f"unknown {kind} {name[:TEXT_MAX]}"
        if name in ONCE and counts[str(name)] > 1:
            return f"{name} more than once in {kind}"
        pattern = each.get("pattern")
        if pattern is not None and _shortest(pattern) is None:
            return f"an unknown regular expression or a pattern that is empty or too long in {kind}"
        others = {key: value for key, value in each.items() if key not in ("pattern", *MEMBERS)}
        if any(len(text) > TEXT_MAX for text in _texts(others)):
            return f"a text of more than {TEXT_MAX} characters in {kind}"
        if name == "Replace":
            growth *= max(1.0, len(str(each.get("content", ""))) / (_shortest(pattern) or 1))
    return "" if growth <= GROWTH_MAX else f"replacements in {kind} make a text {growth:.0f} times as long"


def _components(part: dict[str, object]) -> Iterator[dict[str, object]]:
    """Yields a component and, for a sequence, all of its members."""
    yield part
    for key in MEMBERS:
        members = part.get(key)
        for each in members if isinstance(members, list) else ():
            if isinstance(each, dict):
                yield from _components(each)


def _shortest(pattern: object) -> int | None:
    """Returns the fewest characters that a pattern matches; None if it is not allowed."""
    match [*pattern.items()] if isinstance(pattern, dict) else None:
        case [("String", str(text))] if 1 <= len(text) <= TEXT_MAX:
            return len(text)
        case [("Regex", str(text))] if text in REGEXES:
            return 1  # or more
    return None


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)


def try_out(file_bytes: bytes, source: str) -> None:
    """Loads a file that `judged` has accepted, in a process of its own. Raises DataError if loading fails there."""
    try:
        done = subprocess.run(  # noqa: S603  # our own program
            [sys.executable, "-I", str(TRIAL_PROGRAM)],
            input=judged(file_bytes, source),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=TRIAL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise DataError(f"{source}: no text was encoded with it within {TRIAL_SECONDS:.0f} s") from error
    if done.returncode:
        raise DataError(f"{source}: it cannot be loaded within the limits of memory and time, or is no tokenizer")
