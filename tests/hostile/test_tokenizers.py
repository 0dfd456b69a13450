"""A tokenizer's file from a stranger: bombs are refused, and those of real models are not."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from p2ptrain.data import tokenizer_rules
from p2ptrain.data.tokenizer import JsonTokenizer
from p2ptrain.data.tokenizer_rules import judged, try_out
from p2ptrain.errors import ConfigError, DataError
from tests.helpers.tokenizers import tokenizer_json

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def saved(tokenizer: Tokenizer, end: str) -> bytes:
    tokenizer.add_special_tokens([AddedToken(end, special=True, normalized=False)])
    return str(tokenizer.to_str()).encode()


def byte_level(regex: str = "", normalizer: Any = None) -> bytes:
    """A byte-level BPE, as GPT-2's without a regular expression, and as Llama 3's or Qwen's with theirs."""
    made = Tokenizer(models.BPE({each: index for index, each in enumerate(BYTES)}, []))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not regex)
    split = [pre_tokenizers.Split(Regex(regex), "isolated"), level]
    made.pre_tokenizer = pre_tokenizers.Sequence(split) if regex else level
    if normalizer is not None:
        made.normalizer = normalizer
    made.decoder = decoders.ByteLevel()
    template = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return saved(made, "<|endoftext|>")


def sentencepiece(*, is_gemma: bool) -> bytes:
    vocab = {each: index for index, each in enumerate(["<unk>", "<s>", "\u2581", *map(chr, range(33, 127))])}
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    made = Tokenizer(models.BPE(vocab, [], byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    space = normalizers.Replace(" ", "\u2581")
    made.normalizer = space if is_gemma else normalizers.Sequence([normalizers.Prepend("\u2581"), space])
    if is_gemma:
        made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    back = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence(back if is_gemma else [*back, decoders.Strip(" ", 1, 0)])
    return saved(made, "<eos>" if is_gemma else "</s>")


def bert() -> bytes:
    vocab = {each: index for index, each in enumerate(["[UNK]", "[CLS]", "[SEP]", "a", "##a", "b", "##b"])}
    made = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    special = [("[CLS]", 1), ("[SEP]", 2)]
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=special
    )
    made.decoder = decoders.WordPiece()
    return saved(made, "[SEP]")


REAL = {
    "GPT-2": byte_level(),
    "Llama 3": byte_level(LLAMA3),
    "Qwen 2": byte_level(QWEN2, normalizers.NFC()),
    "GPT-4o": byte_level(O200K),
    "Llama 2": sentencepiece(is_gemma=False),
    "Gemma": sentencepiece(is_gemma=True),
    "BERT": bert(),
}


@pytest.mark.parametrize("file_bytes", REAL.values(), ids=REAL)
def test_the_tokenizers_of_real_models_are_taken(file_bytes: bytes) -> None:
    try_out(file_bytes, "FILE")
    made, library = JsonTokenizer(file_bytes), Tokenizer.from_buffer(file_bytes)
    for text in ("Hello  you, don't 12345 b a ab!\r\n  x", "\u4e2d\u6587 \U0001f600", ""):
        assert made.encode(text).tolist() == library.encode(text, add_special_tokens=False).ids


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(*members: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": [*members]}


def splitting(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def nested(depth: int) -> dict[str, Any]:
    return sequence(nested(depth - 1)) if depth else {"type": "NFC"}


DOUBLE = replace({"String": "a"}, "aa")
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
BOMBS: dict[str, dict[str, Any]] = {
    "doubling": {"normalizer": sequence(*[DOUBLE] * 22)},
    "nested doubling": {"normalizer": sequence(sequence(DOUBLE, DOUBLE), sequence(DOUBLE, sequence(DOUBLE)))},
    "one long replacement": {"normalizer": replace({"String": "a"}, "a" * 2_000)},
    "nothing replaced by something": {"normalizer": replace({"String": ""}, "aa")},
    "a place replaced by something": {"normalizer": replace({"Regex": "(?=.)"}, "aa")},
    "a prefix of many": {"normalizer": sequence(*[{"type": "Prepend", "prepend": "a"}] * 30)},
    "a long prefix": {"normalizer": {"type": "Prepend", "prepend": "a" * 2_000}},
    "bytes of bytes": {"normalizer": sequence(*[{"type": "ByteLevel"}] * 12)},
    "bytes of bytes in words": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [LEVEL] * 12}},
    "an opaque map": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAAAAAAAA"}},
    "a doubling decoder": {"decoder": {"type": "Sequence", "decoders": [DOUBLE] * 22}},
    "a regular expression that never ends": {"pre_tokenizer": splitting("(a+)+$")},
    "a regular expression in a decoder": {"decoder": replace({"Regex": "(a+)+$"}, "a")},
    "two patterns": {"normalizer": replace({"String": "a", "Regex": "(a+)+$"}, "a")},
    "long words": {"model": {"type": "WordPiece", "unk_token": "a", "max_input_chars_per_word": 2**40, "vocab": {}}},
    "an unknown model": {"model": {"type": "Other", "vocab": {}}},
    "a long suffix": {"model": {"type": "BPE", "vocab": {}, "merges": [], "end_of_word_suffix": "a" * 2_000}},
    "no component": {"normalizer": {}},
    "deep sequences": {"normalizer": nested(400)},
    "deep templates": {"post_processor": {"type": "TemplateProcessing", "single": nested(400)}},
}


@pytest.mark.parametrize("changes", BOMBS.values(), ids=BOMBS)
def test_a_bomb_is_refused_by_arithmetic(changes: dict[str, Any]) -> None:
    file_bytes, before = tokenizer_json(**changes), time.process_time()
    with pytest.raises(ConfigError, match=r"FILE: a run cannot use this tokenizer: |FILE: not a tokenizer: "):
        JsonTokenizer(file_bytes, "FILE")
    assert time.process_time() - before < 0.1, "22 doublings took 3.8 s"


def test_a_key_that_is_given_twice_hides_nothing() -> None:
    bomb = json.dumps(sequence(*[DOUBLE] * 22)).encode()
    for twice in (b'{"normalizer":' + bomb + b',"normalizer":null,', b'{"normalizer":null,"normalizer":' + bomb + b","):
        try:
            JsonTokenizer(twice + tokenizer_json()[1:]).encode("a" * 10)
        except ConfigError:
            continue
    once = judged(b'{"normalizer":' + bomb + b',"normalizer":null,' + tokenizer_json()[1:], "FILE")
    assert b"normalizers" not in once


def test_what_takes_too_long_or_too_much_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for program, why in (("while True: pass", "within 1 s"), ("x = bytes(2**40)", "within the limits of memory")):
        (tmp_path / "trial.py").write_text(program)
        monkeypatch.setattr(tokenizer_rules, "TRIAL_PROGRAM", tmp_path / "trial.py")
        monkeypatch.setattr(tokenizer_rules, "TRIAL_SECONDS", 1.0)
        with pytest.raises(DataError, match=why):
            try_out(tokenizer_json(), "FILE")


def test_what_the_library_does_not_survive_ends_only_the_trial() -> None:
    panics = json.loads(tokenizer_json())["model"] | {"continuing_subword_prefix": "##"}
    with pytest.raises(DataError, match="it cannot be loaded within the limits"):
        try_out(tokenizer_json(model=panics), "FILE")
