"""Tokenizers: text survives, end of document cannot be forged, and a bad file is refused with its fix."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.data import tokenizer as tokenizer_module
from p2ptrain.data.tokenizer import BytesTokenizer, JsonTokenizer, load_tokenizer, token_type
from p2ptrain.digest import digest
from p2ptrain.errors import ConfigError, DataError
from p2ptrain.models.export import _name
from tests.helpers.tokenizers import END, tokenizer_json, written

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)  # all but lone surrogates, which are no text
JSON_TOKENIZER = JsonTokenizer(tokenizer_json())


@given(TEXTS)
def test_bytes_give_back_any_text(text: str) -> None:
    tokenizer = BytesTokenizer()
    tokens = tokenizer.encode(text)
    assert tokens.tolist() == list(text.encode())
    assert tokenizer.decode(tokens) == text


@given(TEXTS)
def test_a_tokenizer_file_gives_back_any_text(text: str) -> None:
    tokens = JSON_TOKENIZER.encode(text)
    assert JSON_TOKENIZER.decode(tokens) == text
    assert JSON_TOKENIZER.end_of_document not in tokens


def test_the_bytes_tokenizer_needs_no_file() -> None:
    tokenizer = load_tokenizer(None)
    assert (tokenizer.kind, tokenizer.vocab_size, tokenizer.digest, tokenizer.end_of_document) == ("bytes", 256, "", 0)


def test_a_tokenizer_file_is_named_by_the_digest_of_its_bytes(tmp_path: Path) -> None:
    content = tokenizer_json()
    tokenizer = load_tokenizer(written(tmp_path / "tokenizer.json", content))
    assert (tokenizer.kind, tokenizer.vocab_size, tokenizer.end_of_document) == ("json", 259, 0)
    assert tokenizer.digest == digest("tokenizer", content).hex()
    assert JsonTokenizer(content + b"\n").digest != tokenizer.digest


def test_merges_are_applied() -> None:
    assert len(JSON_TOKENIZER.encode("hello")) == 3  # he, ll, o


def test_several_texts_are_encoded_as_each_alone() -> None:
    for tokenizer in (BytesTokenizer(), JSON_TOKENIZER):
        texts = ["hello", "", "a longer text\n"]
        batch = tokenizer.encode_batch(texts)
        assert [tokens.tolist() for tokens in batch] == [tokenizer.encode(text).tolist() for text in texts]


def test_end_of_document_written_in_a_text_stays_text() -> None:
    tokens = JSON_TOKENIZER.encode(f"a{END}b")
    assert JSON_TOKENIZER.end_of_document not in tokens
    assert JSON_TOKENIZER.decode(tokens) == f"a{END}b"


def test_settings_for_inference_do_not_touch_training_data() -> None:
    cut = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    pad = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": END}
    pad["pad_to_multiple_of"] = None
    piece = {"SpecialToken": {"id": END, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": list(piece),
        "pair": [*piece, {"Sequence": {"id": "B", "type_id": 0}}],
    }
    template["special_tokens"] = {END: {"id": END, "ids": [0], "tokens": [END]}}
    tokenizer = JsonTokenizer(tokenizer_json(truncation=cut, padding=pad, post_processor=template))
    assert tokenizer.encode("a text of more than four tokens").tolist() == (
        JSON_TOKENIZER.encode("a text of more than four tokens").tolist()
    )


def test_tokens_are_as_narrow_as_the_vocabulary_allows() -> None:
    widths = [(2, 1), (256, 1), (257, 2), (65_536, 2), (65_537, 4), (2**20, 4)]
    assert [(size, token_type(size).itemsize) for size, _ in widths] == widths
    assert BytesTokenizer().encode("a").dtype == np.dtype("<u1")
    assert JSON_TOKENIZER.encode("a").dtype == np.dtype("<u2")
    assert JsonTokenizer(tokenizer_json(fill=65_536)).encode("a").dtype == np.dtype("<u4")


def test_a_vocabulary_with_gaps_counts_up_to_its_largest_token() -> None:
    raw = json.loads(tokenizer_json())
    raw["model"]["vocab"]["he"] = 5_000
    assert JsonTokenizer(json.dumps(raw).encode()).vocab_size == 5_001


def test_what_a_model_writes_is_shown_even_if_it_is_no_text() -> None:
    assert BytesTokenizer().decode([104, 105, 0xFF]) == "hi\N{REPLACEMENT CHARACTER}"
    assert BytesTokenizer().decode([104, 300, 105]) == "hi"  # of a model with more tokens
    assert JSON_TOKENIZER.decode(np.array([0])) == END


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"{", b"\xff\xfe", b"[]", b'{"model": {}}'):
        path = written(tmp_path / "bad.json", content)
        with pytest.raises(ConfigError, match=r"bad\.json: not a tokenizer: .*Name a tokenizer\.json"):
            load_tokenizer(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.json: cannot be read: No such file or directory\. Name a"):
        load_tokenizer(tmp_path / "absent.json")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: cannot be read: No such file or directory\. Name a"):
        load_tokenizer(tmp_path)


def panics_in_loading() -> bytes:
    """A tokenizer whose second tokens have a prefix longer than themselves."""
    model = json.loads(tokenizer_json())["model"] | {"continuing_subword_prefix": "##"}
    return tokenizer_json(model=model)


def panics_at_a_text() -> bytes:
    """A tokenizer whose character cache has one slot, so that each character evicts another."""
    table = struct.pack("<II", 4, 0) + b"\0"
    normalizer = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}
    return tokenizer_json(normalizer=normalizer)


def test_a_file_at_which_the_library_panics_is_named_and_ends_nothing(tmp_path: Path) -> None:
    path = written(tmp_path / "loud.json", panics_in_loading())
    with pytest.raises(DataError, match=r"loud\.json: the tokenizers library failed on it \(.*\)\. Use a file as"):
        load_tokenizer(path)


def test_a_file_at_which_the_library_panics_later_is_named_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "judged", lambda file_bytes, source: file_bytes)  # it knows no such file
    tokenizer = load_tokenizer(written(tmp_path / "late.json", panics_at_a_text()))
    with pytest.raises(DataError, match=r"late\.json: the tokenizers library failed on it"):
        tokenizer.encode("text")


def test_an_export_does_not_end_in_a_panic_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JSON_TOKENIZER, "file_bytes", panics_in_loading())
    with pytest.raises(DataError, match="the run's tokenizer: the tokenizers library failed on it"):
        _name(JSON_TOKENIZER, JSON_TOKENIZER.end_of_document)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_only_a_panic_is_taken_for_one(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(*_: object) -> None:
        raise error

    monkeypatch.setattr(tokenizer_module, "_load_library_tokenizer", ends)
    with pytest.raises(error):
        JsonTokenizer(tokenizer_json())


def test_a_tokenizer_with_dropout_is_refused() -> None:
    model = json.loads(tokenizer_json())["model"] | {"dropout": 0.1}
    with pytest.raises(ConfigError, match=r"model\.dropout: .*encoded differently each time\. Set it to null"):
        JsonTokenizer(tokenizer_json(model=model))


def test_a_tokenizer_without_an_end_of_document_is_refused() -> None:
    with pytest.raises(ConfigError, match="no token that ends a document"):
        JsonTokenizer(tokenizer_json(end="<|start|>"))
    added = json.loads(tokenizer_json())["added_tokens"][0] | {"special": False}
    with pytest.raises(ConfigError, match="Add a special token"):
        JsonTokenizer(tokenizer_json(added_tokens=[added]))


def test_a_file_or_vocabulary_beyond_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "large.json", tokenizer_json())
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer_module, "TOKENIZER_BYTES_MAX", 1_000)
        with pytest.raises(ConfigError, match=r"large\.json: 1001 bytes; the limit is 1000"):
            load_tokenizer(path)
    monkeypatch.setattr(tokenizer_module, "VOCAB_SIZE_MAX", 258)
    with pytest.raises(ConfigError, match=r"large\.json: 259 tokens; a run needs 2 to 258"):
        load_tokenizer(path)
