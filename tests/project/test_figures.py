"""Pages tell the figures of benchmarks/figures/*.json, and no other number stands where figures stand."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.benchmarks import load
from tests.helpers.docs import ROOT

FIGURES = load("figures")
PAGE = ROOT / "benchmarks" / "README.md"
TEXT = PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", FIGURES.pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_tells_the_figures_of_the_files(page: Path) -> None:
    """If it fails: `python benchmarks/figures.py --check`; without --check it writes the figures into the pages."""
    text = page.read_text(encoding="utf-8")
    assert FIGURES.filled(page, text) == (text, [])


def test_each_file_says_how_where_and_when_it_was_measured_and_what_it_is_about() -> None:
    assert FIGURES.wrong_heads() == []


@pytest.mark.parametrize(
    "figure", ["| 1.482 ± 0.014* |", "| 116 ms |", "a start reads it in 0.23 s", "560,194 bytes", "| 98,829 B |"]
)
def test_one_other_digit_is_found(figure: str) -> None:
    assert figure in TEXT
    last = re.search(r"\d(?=\D*$)", figure)
    assert last is not None
    other = figure[: last.start()] + str(9 - int(last[0])) + figure[last.end() :]
    assert FIGURES.filled(PAGE, TEXT.replace(figure, other, 1)) == (TEXT, [])


@pytest.mark.parametrize(
    ("added", "problem"),
    [
        ("\n\n| joining | 14.2 s |\n", "no marker: | joining | 14.2 s |"),
        ("\n\nIt takes 14.2 s.\n", "no marker: It takes 14.2 s."),
        (
            "\n\n<!-- figures history: rounds -->\nIt takes 14.2 s, 3 times.\n",
            "2 numbers, but 1 figures: history: rounds",
        ),
        ("\n\n<!-- figures history: hours -->\nIt takes 14.2 s.\n", "history: no 'hours' in 'hours'"),
        ("\n\n<!-- figures mystery: hours -->\nIt takes 14.2 s.\n", "there is no benchmarks/figures/mystery.json"),
        ("\n\nThe start\n<!-- figure history: rounds -->3\n", "<!-- figure history: rounds --> begins a line: "),
        (
            "\n\nThe start <!-- figure history: rounds --> of 3\n",
            "<!-- figure history: rounds -->: 1 figures, and None",
        ),
    ],
)
def test_a_number_without_its_file_is_found(added: str, problem: str) -> None:
    text, problems = FIGURES.filled(PAGE, TEXT + added)
    assert text == TEXT + added
    assert problems[0].startswith(f"benchmarks/README.md: {problem}")


@pytest.mark.parametrize(
    ("printed", "told"),
    [
        ("takes <!-- figure history: rounds -->7 rounds", "takes <!-- figure history: rounds -->100,000 rounds"),
        ("<!-- figures history: MB on the disk; - -->\n18.2 MB, of 30", None),
        ("<!-- figures history: MB on the disk * 100 -->\n1,800 of `7` on 2026-11-28 by an H100, v1.2.3", "1,819"),
        ("<!-- figures history: members; rounds @ 0 -->\n16 in 100,000", None),
        ("<!-- figures gpu-h100/parts/steps/figures: 124m, adamw/tokens_per_second -->\n208,500", None),
        ("<!-- figures gpu-h100/parts/steps/figures: 124m, adamw/tokens_per_second -->\n208,400", "208,507"),
    ],
)
def test_a_figure_is_printed_as_exactly_as_the_page_does(printed: str, told: str | None) -> None:
    text, problems = FIGURES.filled(ROOT / "docs" / "tutorial.md", printed)
    assert problems == []
    assert told in text if told else text == printed


def test_a_benchmark_writes_the_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(ROOT / "benchmarks" / "history.py"), "--rounds", "7"])
    path = tmp_path / "rows.json"
    assert FIGURES.rows_of(path) == []
    FIGURES.save(path, [{"loss": 1.5}], ["p2ptrain"])
    head: dict[str, Any] = json.loads(path.read_text())
    assert list(head) == [*FIGURES.HEAD, "rows"]
    assert head["command"] == "python benchmarks/history.py --rounds 7"
    assert FIGURES.rows_of(path) == [{"loss": 1.5}]


def test_figures_are_old_once_what_they_are_about_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *who, *arguments], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    git("init", "-q")
    for name, text in (
        ("code.py", "a = 1\n"),
        ("other.py", "a = 1\n"),
        ("code.py", "a = 1\na = 2\na = 3\n"),
        ("other.py", '"""Says why."""\n\na = 1  # and more\n'),
    ):
        (tmp_path / name).write_text(text)
        git("add", name)
        git("commit", "-q", "-m", f"{name} has {text.count('a =')}")
    monkeypatch.setattr(FIGURES, "ROOT", tmp_path)
    newest, before = git("rev-parse", "HEAD"), git("rev-parse", "HEAD~2")
    head = {"command": "c", "machine": "m", "date": "2020-01-01"}
    assert FIGURES.stale(head | {"commit": newest, "about": ["code.py"]}) == (0, "")
    assert FIGURES.stale(head | {"commit": before, "about": ["other.py"]}) == (0, "")
    lines, change = FIGURES.stale(head | {"commit": before, "about": ["code.py"]})
    assert (lines, change.split(" ", 2)[2]) == (2, "code.py has 3")
    unknown = FIGURES.stale(head | {"commit": "0123abcd", "about": ["code.py"]})
    assert unknown == (1, "git does not know 0123abcd here")
