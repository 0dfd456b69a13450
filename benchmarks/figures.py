"""Keeps the figures in README.md, docs/ and benchmarks/README.md equal to those in benchmarks/figures/*.json.

    python benchmarks/figures.py            fills the figures of all pages in
    python benchmarks/figures.py --check    changes nothing; exit status 1 if a page tells another figure
    python benchmarks/figures.py --stale    lists figures that are older than the code that they are about

Every file is an object with a head. A part of it may have a head of its own, or what differs in it:

    {
     "command": "OMP_NUM_THREADS=1 python benchmarks/history.py --rounds 100000",
     "commit": "63cc6bb5",                       what ran; null where that is not known
     "machine": "two cores of an AMD EPYC, ...",
     "date": "2026-11-28",
     "about": ["p2ptrain/core/history.py", ...],  what they measure, not the benchmark; --stale asks git about these
     "rounds": 100000, ...                       the figures; a program that has a list puts it under "rows"
    }

`save` writes such a file for a benchmark. A key like "a round takes # s, where four nodes take # s" names two numbers:
so are figures kept that were copied from a sentence.

A page says which figures it tells in a comment, which nobody sees who reads the page rendered. Above a paragraph, a
list or a table, up to the next empty line, all numbers in order:

    <!-- figures history: rounds; members; - -->

A path leads into the JSON by keys and places, with "/" between them. In a list of rows a value that only one of them
has leads to that one: `rows/sparseloco, 10 steps, 4 peers/loss`. A list or an object stands for all numbers in it,
in order, those in texts among them; a head's keys do not count. `table/rows/0 @ 3` is the fourth of these, and
`overhead * 100` is in percent. A path is ended by ";", and paths of another file go on a line of their own or behind
" | ", as do those that have a beginning in common: `gpu-h100/parts: ...`.
"-" stands for a number that is no figure, say a setting, and "- 3" for three of them. figure_tables.py adds to a file
what is derived from it; a table that it makes replaces the one that is there.

One number in a sentence: `takes <!-- figure history: seconds of a start -->0.23 s`.

A number is compared as exactly as the page prints it, and 208,500 as rounded to hundreds. Code, addresses, dates,
versions and names such as H100 are no numbers. In benchmarks/README.md, in README.md's figures and in tables of some
pages (MEASURED) each number has to have such a comment; where none is a figure, `<!-- no figures -->` says so.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from difflib import unified_diff
from functools import cache
from pathlib import Path
from time import strftime
from typing import Any

from figure_tables import VIEWS

ROOT = Path(__file__).resolve().parents[1]
FIGURES = Path(__file__).resolve().parent / "figures"
HEAD = ("command", "commit", "machine", "date", "about")
NO_FIGURES = "<!-- no figures -->"
BLOCK = re.compile(r"\A *<!-- figures\s(.*?)-->\n", re.DOTALL)
ONE = re.compile(r"<!-- figure ([\w.-]+): ([^>]+?) -->")
MASKED = re.compile(r"<!--.*?-->|!\[[^\]]*\]|`[^`]*`|\]\([^)\s]*\)|https?://\S+|\b\d{4}-\d\d-\d\d\b", re.DOTALL)
NUMBER = re.compile(r"(?<![\w.,])(?<!\w-)[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?![.,]?\w*\d)")
MEASURED = tuple(  # all tables of these have figures
    f"docs/{name}.md"
    for name in (
        *(f"explanation/{name}" for name in ("lateness", "matched-filter", "recipes", "rules", "scale")),
        "how-to/privacy",
    )
)
Json = Any


class FigureError(Exception):
    """A marker that leads nowhere, or a block whose numbers are not as many as the figures."""


# ---------------------------------------------------------------------------------------------------
# The files


def rows_of(path: Path) -> list[dict[str, Json]]:
    """Returns the rows of a file that `save` has written, none if there is no such file."""
    return json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []


def measured_now() -> dict[str, Json]:
    """Returns what a row of a file that grows has of its own: command, commit, machine and date of this process."""
    program = Path(sys.argv[0]).resolve()
    name = str(program.relative_to(ROOT)) if program.is_relative_to(ROOT) else program.name
    command = " ".join(["python", name, *sys.argv[1:]])
    return {"command": command, "commit": STARTED_AT, "machine": machine(), "date": strftime("%Y-%m-%d")}


def save(path: Path, found: dict[str, Json] | Sequence[Json], about: Sequence[str]) -> None:
    """Writes what a benchmark found, with the head: `measured_now`, and the code that it is about."""
    head = measured_now() | {"about": list(about)}
    whole = head | (dict(found) if isinstance(found, dict) else {"rows": list(found)})
    path.write_text(as_text(whole), encoding="utf-8")


def as_text(value: Json) -> str:
    """Returns JSON that can be read and compared: a row of numbers and texts is a line."""
    return _lines(value, "") + "\n"


def _lines(value: Json, indent: str) -> str:
    short = json.dumps(value, ensure_ascii=False)
    within = list(value.values() if isinstance(value, dict) else value) if isinstance(value, dict | list) else []
    is_curve = isinstance(value, list) and not any(kind in short for kind in '{"')
    is_short = len(indent + short) <= 118 and not any(isinstance(each, dict) for each in within)
    if not within or is_curve or (indent and is_short):
        return short
    if isinstance(value, dict):
        parts = [f"{json.dumps(key, ensure_ascii=False)}: {_lines(each, indent + ' ')}" for key, each in value.items()]
        return "{\n" + ",\n".join(f"{indent} {part}" for part in parts) + f"\n{indent}}}"
    return "[\n" + ",\n".join(f"{indent} {_lines(each, indent + ' ')}" for each in value) + f"\n{indent}]"


def machine() -> str:
    """Returns this machine in words."""
    info = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    name = models[0] if models else platform.processor() or platform.machine()
    return f"{os.cpu_count()} cores of {name}, {platform.platform()}, Python {platform.python_version()}"


def _git(*arguments: str) -> str | None:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)  # noqa: S603, S607
    return done.stdout.strip() if done.returncode == 0 else None


STARTED_AT = _git("describe", "--always", "--dirty", "--exclude=*", "--abbrev=8")  # others may commit meanwhile


@cache
def load(name: str) -> Json:
    """Returns a file of figures, with the views that are derived from it."""
    path = FIGURES / f"{name}.json"
    if not path.exists():
        raise FigureError(f"there is no {path.relative_to(ROOT)}")
    found = json.loads(path.read_text(encoding="utf-8"))
    for view, make in VIEWS.get(name, {}).items():
        found[view] = make(found)
    return found


def at(name: str, path: str) -> Json:
    """Returns what a path of a marker leads to."""
    path, _, factor = path.partition(" * ")
    if factor:
        return [float(factor) * each for each in numbers(at(name, path))]
    path, _, place = path.partition(" @ ")
    if place:
        some = list(numbers(at(name, path)))
        if int(place) >= len(some):
            raise FigureError(f"{name}: {path} has {len(some)} numbers")
        return some[int(place)]
    found, parts = load(name), path.split("/")
    while parts:
        for end in range(len(parts), 0, -1):  # a name may have a slash itself
            if (some := _part(found, "/".join(parts[:end]))) is not None:
                found, parts = some, parts[end:]
                break
        else:
            raise FigureError(f"{name}: no {'/'.join(parts)!r} in {path!r}")
    return found


def _part(found: Json, name: str) -> Json:
    if isinstance(found, dict):
        return found.get(name)
    if not isinstance(found, list):
        return None
    if name.isdecimal():  # a place
        return found[int(name)] if int(name) < len(found) else None
    rows = [row for row in found if name in (row.values() if isinstance(row, dict) else row)]
    return rows[0] if len(rows) == 1 else None


def numbers(value: Json) -> Iterator[float]:
    """Yields all numbers of a part of a file, in order."""
    if isinstance(value, dict):
        for key, each in value.items():
            if key not in HEAD:
                yield from numbers(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from numbers(each)
    elif isinstance(value, str):
        yield from (_number(found[0]) for found in _numbers_in(value))
    elif value is not None and not isinstance(value, bool):
        yield value


# ---------------------------------------------------------------------------------------------------
# The pages


def pages() -> list[Path]:
    """Returns the pages with figures; docs/reference is made from the code."""
    docs = [page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name != "reference"]
    return [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *docs]


def must_be_marked(page: Path, heading: str, text: str) -> bool:
    """Whether each number of this part, below this heading, has to come from a file."""
    name = page.relative_to(ROOT).as_posix()
    is_table = name in MEASURED and text.lstrip().startswith("|")
    return name == "benchmarks/README.md" or (name == "README.md" and heading == "## Figures") or is_table


def filled(page: Path, before: str) -> tuple[str, list[str]]:
    """Returns a page with the figures of the files, and what is wrong with it."""
    heading, done, problems, boxes = "", [], [], 0
    for part in re.split(r"(\n{2,})", before):
        heading = next((line for line in reversed(part.splitlines()) if line.startswith("#")), heading)
        is_text = boxes % 2 == 0 and "```" not in part and not part.startswith("#")
        boxes += len(re.findall(r"^ *```", part, re.MULTILINE))
        if not is_text:
            done.append(part)
            continue
        try:
            text = _filled(part)
        except FigureError as error:
            problems.append(f"{page.relative_to(ROOT)}: {error}")
            text = part
        done.append(text)
        if must_be_marked(page, heading, part):
            problems += [f"{page.relative_to(ROOT)}: no marker: {line}" for line in _unmarked(part)]
    return "".join(done), problems


def _filled(text: str) -> str:
    marker = BLOCK.match(text)
    if marker is None:
        return _with_single_figures(text)
    expected: list[float | None] = []
    for line in re.split(r"\n| \| ", marker[1].strip()):
        place, _, paths = line.strip().partition(": ")
        name, _, within = place.partition("/")
        for path in (each.strip() for each in paths.split(";")):
            if path.startswith("-"):
                expected += [None] * int(path[1:] or 1)
                continue
            value = at(name, f"{within}/{path}" if within else path)
            if isinstance(value, str) and value.startswith("|"):
                return marker[0] + value.strip() + "\n" * text.endswith("\n")
            expected += numbers(value)
    places = _numbers_in(text)
    if len(places) != len(expected):
        raise FigureError(f"{len(places)} numbers, but {len(expected)} figures: {marker[1].strip()[:100]}")
    for place, value in reversed(list(zip(places, expected, strict=True))):
        if value is not None:
            text = text[: place.start()] + _printed(value, place[0]) + text[place.end() :]
    return text


def _with_single_figures(text: str) -> str:
    places = _numbers_in(text)
    for marker in reversed(list(ONE.finditer(text))):
        if not text[: marker.start()].rpartition("\n")[2].strip():
            raise FigureError(f"{marker[0]} begins a line: there Markdown takes the line for HTML")
        place = next((each for each in places if each.start() == marker.end()), None)
        found = list(numbers(at(marker[1], marker[2])))
        if place is None or len(found) != 1:
            raise FigureError(f"{marker[0]}: {len(found)} figures, and {place and place[0]} stands behind it")
        text = text[: place.start()] + _printed(found[0], place[0]) + text[place.end() :]
    return text


def _unmarked(text: str) -> list[str]:
    if BLOCK.match(text) or text.startswith(NO_FIGURES):
        return []
    marked = {marker.end() for marker in ONE.finditer(text)}
    return [
        text[text.rfind("\n", 0, place.start()) + 1 :].split("\n", maxsplit=1)[0][:100]
        for place in _numbers_in(text)
        if place.start() not in marked
    ]


def _numbers_in(text: str) -> list[re.Match[str]]:
    return list(NUMBER.finditer(MASKED.sub(lambda found: " " * len(found[0]), text)))


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _printed(value: float, before: str) -> str:
    """Returns the figure as the page prints it; as it stands there if it is equal when rounded like that."""
    decimals = len(before.partition(".")[2])
    digits = re.sub(r"\D", "", before)
    cut = 0 if decimals else min(len(digits) - len(digits.rstrip("0")), max(0, len(digits) - 3))  # 208,500 of 208,507
    if abs(value - _number(before)) <= 0.5 * 10 ** (cut - decimals) * (1 + 1e-9):
        return before
    sign = "+" if before.startswith("+") else ""
    return f"{value:{sign}{',' if ',' in before or abs(value) >= 10_000 else ''}.{decimals}f}"


# ---------------------------------------------------------------------------------------------------
# What is older than its code


def heads(value: Json, around: dict[str, Json], where: str) -> Iterator[tuple[str, dict[str, Json]]]:
    """Yields each part of a file that has figures and a head or what differs in one, with all of it."""
    if isinstance(value, dict):
        whole = around | {key: value[key] for key in HEAD if key in value}
        has_figures = any(key not in HEAD and next(numbers(each), None) is not None for key, each in value.items())
        if has_figures and len(whole) == len(HEAD) and whole != around:
            yield where, whole
        for key, each in value.items():
            if key not in HEAD:
                yield from heads(each, whole, f"{where}/{key}")
    elif isinstance(value, list):
        for place, each in enumerate(value):
            yield from heads(each, around, f"{where}/{place}")


def wrong_heads() -> list[str]:
    """Returns what the heads of the files lack."""
    problems = []
    for path in sorted(FIGURES.glob("*.json")):
        whole = json.loads(path.read_text(encoding="utf-8"))
        for where, head in heads(whole, {}, path.stem):
            if not re.fullmatch(r"20\d\d-\d\d-\d\d", head["date"]) or not head["command"] or not head["machine"]:
                problems.append(f"{where}: {head}")
            problems += [f"{where}: there is no {each}" for each in head["about"] if not (ROOT / each).exists()]
            problems += [f"{where}: it is about nothing"] * (not head["about"])
        problems += [f"{path.stem}{where}: no {key}" for where, key in _headless(whole, frozenset(), "")]
    return problems


def _headless(value: Json, known: frozenset[str], where: str) -> Iterator[tuple[str, str]]:
    known |= {key for key in HEAD if isinstance(value, dict) and key in value}
    missing = [key for key in HEAD if key not in known]
    if not missing or next(numbers(value), None) is None:
        return
    parts = [(key, each) for key, each in value.items() if key not in HEAD] if isinstance(value, dict) else []
    if not parts or not all(isinstance(each, dict) for _, each in parts):
        yield where, missing[0]
        return
    for key, each in parts:
        yield from _headless(each, known, f"{where}/{key}")


def stale(head: dict[str, Json]) -> tuple[int, str]:
    """Returns how many lines of what the figures are about were added or removed since, and the newest change of it.
    Files of which only comments and docstrings have changed do not count."""
    measured = (head["commit"] or "").removesuffix("-dirty")
    measured = measured or _git("rev-list", "-1", f"--before={head['date']}T23:59:59", "HEAD") or "HEAD"
    changed = _git("diff", "--raw", "--numstat", "--no-renames", "--no-abbrev", measured, "HEAD", "--", *head["about"])
    if changed is None:
        return 1, f"git does not know {measured} here"
    lines, files = 0, []
    raw = [line for line in changed.splitlines() if line.startswith(":")]
    for blobs, counts in zip(raw, changed.splitlines()[len(raw) :], strict=True):
        before, after = blobs.split()[2:4]
        added, removed, file = counts.split("\t")
        if not file.endswith(".py") or _code(before) != _code(after):
            files.append(file)
            lines += sum(int(count) for count in (added, removed) if count.isdecimal())  # "-" of what is no text
    return lines, (_git("log", "-1", "--format=%h %cs %s", f"{measured}..HEAD", "--", *files) or "") if files else ""


@cache
def _code(blob: str) -> str:
    """Returns a Python file without comments and docstrings; one that is not there is empty."""
    tree = ast.parse(_git("cat-file", "blob", blob) or "")
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            has_docstring = bool(node.body) and ast.get_docstring(node, clean=False) is not None
            node.body = node.body[has_docstring:]
    return ast.dump(tree)


def report_stale() -> None:
    """Prints what is older than its code, most changed first; parts of one commit that are about the same, together."""
    parts: dict[tuple[str, ...], list[tuple[str, dict[str, Json]]]] = {}
    for path in sorted(FIGURES.glob("*.json")):
        for where, head in heads(json.loads(path.read_text(encoding="utf-8")), {}, path.stem):
            parts.setdefault((head["commit"] or "", head["date"], *head["about"]), []).append((where, head))
    found = [(*stale(same[0][1]), same) for same in parts.values()]
    old = [each for each in found if each[0]]
    for lines, newest, same in sorted(old, key=lambda each: -each[0]):
        head = same[0][1]
        print(f"{'; '.join(where for where, _ in same)}: {head['date']}, {head['commit'] or 'commit not known'}")
        print(f"    {lines:,} lines of {', '.join(head['about'])} since; the last: {newest}")
        print("\n".join(f"    {command}" for command in dict.fromkeys(head["command"] for _, head in same)))
    told = [sum(len(same) for _, _, same in some) for some in (old, found)]
    print(f"{told[0]} of {told[1]} parts are older than the code that they are about")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 if something differs")
    parser.add_argument("--stale", action="store_true", help="list figures that are older than their code")
    asked = parser.parse_args()
    if asked.stale:
        report_stale()
        return 0
    problems = wrong_heads()
    for page in pages():
        before = page.read_text(encoding="utf-8")
        text, found = filled(page, before)
        problems += found
        if text != before and asked.check:
            lines = unified_diff(before.splitlines(), text.splitlines(), "the page", "the files", lineterm="", n=0)
            problems += [f"{page.relative_to(ROOT)}:", *lines]
        elif text != before:
            page.write_text(text, encoding="utf-8")
            print(f"{page.relative_to(ROOT)} has changed")
    print("\n".join(problems), file=sys.stderr, end="\n" * bool(problems))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
