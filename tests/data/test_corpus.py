"""Documents: where text is split, and the place of what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.data import corpus
from p2ptrain.data.corpus import BLOCK_BYTES_MAX, SourceFile, documents, embedded_sources, file_sources
from p2ptrain.errors import ConfigError
from tests.helpers.tokenizers import written


def read(path: Path) -> list[str]:
    return [document.text for source in file_sources([path]) for document in documents(source)]


@pytest.mark.parametrize("size", [1, 100, BLOCK_BYTES_MAX - 1, BLOCK_BYTES_MAX, BLOCK_BYTES_MAX + 1, 100_000])
@pytest.mark.parametrize("unit", ["a", "ä", "語", "😀", "line\n", "line\r\n", "\n", "wide 語😀\r\n"])
def test_blocks_make_up_the_text_and_end_with_lines(tmp_path: Path, unit: str, size: int) -> None:
    text = unit * (size // len(unit.encode()) + 1) + "x"
    found = read(written(tmp_path / "text.txt", text))
    assert "".join(found) == text
    assert all(0 < len(block.encode()) <= BLOCK_BYTES_MAX for block in found)
    assert all(len(block.encode()) > BLOCK_BYTES_MAX - 20 for block in found[:-1])
    if "\n" in unit:
        assert all(block.endswith(unit) for block in found[:-1])


@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=50), times=st.integers(1, 3_000))
def test_no_character_is_cut(tmp_path_factory: pytest.TempPathFactory, text: str, times: int) -> None:
    path = written(tmp_path_factory.getbasetemp() / "any.txt", text * times)
    assert "".join(read(path)) == (text * times).removeprefix("\ufeff")


def test_the_same_text_is_cut_at_the_same_places_in_another_file(tmp_path: Path) -> None:
    text = "".join(f"line {number}\n" for number in range(10_000))
    assert read(written(tmp_path / "a.txt", text)) == read(written(tmp_path / "b.md", text))


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    assert read(written(tmp_path / "a.txt", b"\xef\xbb\xbfabc\n")) == ["abc\n"]
    assert read(written(tmp_path / "a.txt", b"\xef\xbb\xbf")) == []
    assert read(written(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "abc"}\n')) == ["abc"]


def test_an_empty_file_has_no_documents(tmp_path: Path) -> None:
    assert read(written(tmp_path / "a.txt", "")) == read(written(tmp_path / "a.jsonl", "\n \r\n")) == []


def test_bytes_that_are_no_utf8_are_refused_with_their_offset(tmp_path: Path) -> None:
    for offset in (0, 5, BLOCK_BYTES_MAX - 1, BLOCK_BYTES_MAX, 50_000):
        path = written(tmp_path / "latin.txt", b"a" * offset + b"\xe9 caf")
        with pytest.raises(ConfigError, match=rf"latin\.txt, byte {offset}: not UTF-8 .*iconv"):
            read(path)
        path = written(tmp_path / "latin.txt", b"\xef\xbb\xbf" + b"a" * offset + b"\xe9 caf")
        with pytest.raises(ConfigError, match=rf"latin\.txt, byte {offset + 3}: not UTF-8"):
            read(path)


def test_a_text_that_is_cut_off_within_a_character_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"byte 3: not UTF-8 \(unexpected end of data\)"):
        read(written(tmp_path / "cut.txt", "abc語".encode()[:-1]))
    with pytest.raises(ConfigError, match=rf"byte {BLOCK_BYTES_MAX - 1}: not UTF-8"):
        read(written(tmp_path / "cut.txt", b"a" * (BLOCK_BYTES_MAX - 1) + b"\xe8"))
    with pytest.raises(ConfigError, match=r"byte 0: not UTF-8"):
        read(written(tmp_path / "cut.txt", b"\x80" * 20_000))


def test_a_json_line_is_a_document(tmp_path: Path) -> None:
    lines = (
        b'{"text": "one\\nline", "id": [1, {}]}\r\n\n{"id": 2, "text": "\\ud83d\\ude00"}\n{"text": ""}\n{"text":"last"}'
    )
    expected = ["one\nline", "😀", "last"]
    assert read(written(tmp_path / "a.jsonl", lines)) == expected
    assert read(written(tmp_path / "a.NDJSON", lines)) == expected


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"not json", "JSON is malformed: invalid character"),
        (b'{"text": "a"', "truncated"),
        (b'{"text": "a"} {"text": "b"}', "trailing characters"),
        (b'{"body": "a"}', "missing required field `text`"),
        (b'{"text": 1}', "Expected `str`, got `int`"),
        (b'{"text": null}', "Expected `str`, got `null`"),
        (b'["text"]', "Expected `object`, got `array`"),
        (b'{"text": "\xff"}', "can't decode byte 0xff"),
        (b'{"text": "\\ud800"}', r"[Tt]runcated|surrogate|utf-16"),
        (b'{"text": "a", "deep": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "recursion"),
    ],
)
def test_a_bad_json_line_is_refused_with_its_number(tmp_path: Path, line: bytes, problem: str) -> None:
    path = written(tmp_path / "bad.jsonl", b'{"text": "good"}\n\n' + line + b"\n")
    with pytest.raises(ConfigError, match=problem) as caught:
        read(path)
    assert caught.value.source == f"{path}, line 3"
    assert 'a string under "text"' in caught.value.fix


def test_a_line_beyond_the_limit_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "LINE_BYTES_MAX", 30)
    path = written(tmp_path / "long.jsonl", '{"text": "short"}\n' + '{"text": "' + "a" * 100 + '"}\n')
    with pytest.raises(ConfigError, match=r"long\.jsonl, line 2: longer than 30 bytes"):
        read(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.txt: cannot be read: No such file"):
        file_sources([tmp_path / "absent.txt"])
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(ConfigError, match=r"pipe\.txt: not a file"):
        file_sources([tmp_path / "pipe.txt"])


def test_a_file_that_vanishes_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "gone.txt", "text")
    (source,) = file_sources([path])
    path.unlink()
    with pytest.raises(ConfigError, match=r"gone\.txt: cannot be read: No such file"):
        list(documents(source))


def test_the_embedded_corpus_is_the_language_reference_and_the_library() -> None:
    sources = embedded_sources()
    names = [source.name for source in sources]
    texts = [document.text for source in sources for document in documents(source)]
    assert names == [source.name for source in embedded_sources()]
    assert [Path(name).name for name in names if name.endswith(".py")] == sorted(
        Path(name).name for name in names if name.endswith(".py")
    )
    assert any('The "if" statement' in text for text in texts)
    assert any("class Fraction(" in text for text in texts)
    assert not any("_sysconfigdata" in name for name in names)
    assert sum(source.size for source in sources) == sum(len(text.encode()) for text in texts)
    assert 4_000_000 < sum(source.size for source in sources) < 10_000_000


def test_a_python_without_its_library_cannot_embed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ConfigError, match="Install the complete standard library, or name files"):
        embedded_sources()


def test_documents_say_what_they_took_up(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", '{"text": "abc"}\n{"text": "de"}\n')
    (source,) = file_sources([path])
    assert isinstance(source, SourceFile)
    assert [document.source_bytes for document in documents(source)] == [16, 15]
