"""The page about a run: its figures match the records, it is self-contained, and its charts are right."""

from __future__ import annotations

import errno
import json
import re
from datetime import UTC, datetime
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from p2ptrain.config import RunConfig
from p2ptrain.config.node import NodeConfig, StorageConfig
from p2ptrain.config.text import to_toml
from p2ptrain.identity import peer_id_of
from p2ptrain.node.home import Home
from p2ptrain.observe.export import CONTRIBUTORS_SHOWN, RecordedRun, exported, read_recorded_run, rows_of
from p2ptrain.observe.schema import RoundRecord
from p2ptrain.store.checkpoints import Checkpoints
from p2ptrain.store.records import RECORDS_NAME, Batch, Records
from p2ptrain.store.store import CHECKPOINTS_NAME
from tests.helpers.cli import p2ptrain
from tests.helpers.dashboard import CHROMIUM, a_page, until_drawn, until_shown
from tests.helpers.records import KEYS, RUN, RUN_ID, a_round
from tests.helpers.store import void
from tests.helpers.web import STATUS, a_status


def page(*rounds: RoundRecord, me: bytes = KEYS[0], run: RunConfig = RUN) -> str:
    return exported(RecordedRun(run, me, rounds, [], 0), made_at=datetime(2026, 3, 29, tzinfo=UTC))


class Outline(HTMLParser):
    """Parses HTML: checks that elements are closed, and collects what the page would load."""

    VOID = ("meta", "br", "link", "img", "hr", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        loading = ("src", "href", "xlink:href", "action")
        self.loads += [
            f"{tag} {name}" for name, value in attributes if name in loading and not str(value).startswith("#")
        ]
        self.loads += [tag] if tag in ("link", "iframe", "object", "img", "base") else []
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        self.open.remove(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


# ---------------------------------------------------------------------------------------------------
# The page


def test_its_figures_are_those_of_the_records() -> None:
    text = page(*map(a_round, range(1, 10)))
    for part in (
        "9 recorded, 1 to 9", "4.7500 to 2.7500 nats", "18 taken from 2 nodes, 0 refused", "9 of these (50.0%)",
        "4,608 tokens", "9,000 bytes sent, 18,000 received", "0 rounds took more than one try; 0 regroups",
        "09" * 32, "a round took 8.00 s on average: train 4.00 s, collect 2.00 s", "2023-11-14 22:13:21 UTC",
        peer_id_of(KEYS[1]), f"{peer_id_of(KEYS[0])}</code> (this node)", "2026-03-29 00:00 UTC", RUN.run_id,
        "sequence_length = ",
    ):  # fmt: skip
        assert part in text, part
    assert escape(to_toml(RUN)) in text
    other = page(
        *map(a_round, range(1, 10)),
        a_round(10, views=3, refused={"bad payload": 2}, branch=bytes(32), contributors=(KEYS[1],)),
    )
    for part in ("19 taken from 2 nodes, 2 refused", "1 rounds took more than one try; 1 regroups", "(47.4%)"):
        assert part in other, part


def test_it_tells_the_held_out_loss_in_short_where_there_is_one() -> None:
    none, first, last = a_round(1), a_round(2, held_out_loss=3.0, held_out_round=1), a_round(4, held_out_loss=2.5)
    last = last.model_copy(update={"held_out_round": 3})
    assert "as drawn members claim" not in page(none)
    assert "3.0000 after round 1 (perplexity 20.09), as drawn members claim" in page(none, first)
    assert "3.0000 after round 1 to 2.5000 after round 3 (perplexity 12.18), as drawn members claim" in page(
        first, last
    )


def test_it_needs_nothing_from_outside_and_is_well_formed() -> None:
    text = page(*map(a_round, range(1, 10)))
    assert Outline(text).loads == []
    assert "default-src 'none'" in text
    assert "url(" not in text.split("<script")[0]
    assert "@import" not in text.split("<script")[0]


@pytest.mark.parametrize(
    "rounds",
    [
        [a_round(1)],
        [a_round(1, loss=None), a_round(2, loss=None)],
        [a_round(1, loss=float("nan")), a_round(2, loss=float("inf"))],
        [a_round(1, contributors=())],
        [a_round(n, loss=2.5, train_seconds=0.0, collect_seconds=0.0, agree_seconds=0.0, apply_seconds=0.0)
         for n in range(3)],
        [a_round(n % 250 + 1) for n in range(2_000)],
    ],
    ids=["one", "untrained", "not finite", "without contributors", "without time", "many"],
)  # fmt: skip
def test_any_run_has_a_page(rounds: list[RoundRecord]) -> None:
    text = page(*rounds, me=b"")
    Outline(text)
    assert "</code> (this node)" not in text
    assert len(text) < 2_500_000  # of which nearly all is the library that draws the charts


def test_many_contributors_are_counted_and_not_all_listed() -> None:
    many = [number.to_bytes(32, "big") for number in range(CONTRIBUTORS_SHOWN + 7)]
    text = page(a_round(1, contributors=tuple(many)), a_round(2, contributors=(many[5],)))
    assert "and 7 more" in text
    assert text.index(peer_id_of(many[5])) < text.index(peer_id_of(many[0]))  # who was taken most comes first


def test_what_a_config_says_cannot_become_a_part_of_the_page() -> None:
    raw = {**RUN.model_dump(mode="json"), "recipe": {"name": "<script>alert(1)</script>:X"}}
    run = RunConfig.model_construct(
        **{**dict(RUN), "recipe": RUN.recipe.model_copy(update={"name": raw["recipe"]["name"]})}
    )
    text = page(a_round(1), run=run)
    assert "<script>alert" not in text
    assert "&lt;script&gt;" in text
    Outline(text)


# ---------------------------------------------------------------------------------------------------
# The dashboard's charts in it


def test_the_page_contains_its_rounds_as_numbers() -> None:
    rows = rows_of([*map(a_round, range(1, 12)), a_round(12, loss=float("nan"))])
    assert [(row["round"], row["contributors"]) for row in rows] == [(number, 2) for number in range(1, 13)]
    assert rows[-1]["loss"] is None
    assert [row["round"] for row in rows if "root" in row] == [*range(5, 13)], "those of the table"
    assert rows_of([a_round(1, loss=1 / 3)])[0]["loss"] == 0.333333


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium")
@pytest.mark.parametrize("kind", [None, "status"])
def test_the_page_draws_its_charts_from_a_file_and_asks_nobody(
    browser: Browser, tmp_path: Path, kind: str | None
) -> None:
    rounds = [a_round(number % 9 + 1, round=number) for number in range(1, 401)]
    evil = "</script><script>window.hacked=1</script>"
    status = json.loads(a_status(STATUS).model_dump_json()) | {"device": evil} if kind else None
    path = tmp_path / "page.html"
    path.write_text(exported(RecordedRun(RUN, KEYS[0], rounds, [], 0), status))
    with a_page(browser, path.as_uri(), draws=True) as page:
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        until_shown(page)
        assert page.locator("#shown").inner_text() == "400 rounds on this page; a point is the mean of 2"
        assert page.locator("#rounds tbody tr").count() == 8
        assert "the lowest is 2.7500" in page.locator("#c-loss").inner_text()
        until_drawn(page, 400)
        drawn = page.evaluate("() => [...document.getElementById('chart-loss').data[0].y]")
        assert drawn[:2] == [pytest.approx(4.375), pytest.approx(3.875)]
        assert page.locator("h2").all_inner_texts() == [
            "In short", *(["The node, when this was written"] if kind else []), "Rounds", "Contributors", "Checkpoints",
            "Configuration",
        ]  # fmt: skip
        assert page.evaluate("() => window.hacked") is None
        assert [url for url in asked if not url.startswith(("file:", "blob:"))] == []


# ---------------------------------------------------------------------------------------------------
# The command


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The data directory of a node with nine rounds and three checkpoints, one of which has a wrong root."""
    node = NodeConfig(storage=StorageConfig(directory=str(tmp_path / "node")))
    made = Home(node).of_run(RUN_ID)
    made.mkdir(parents=True)
    (made / "run.json").write_bytes(RUN.canonical())
    (made / "identity").write_text(KEYS[1].hex() + "\n")
    records = Records(made / RECORDS_NAME)
    records.write(Batch([a_round(number).row for number in range(1, 10)]))
    records.close()
    checkpoints = Checkpoints(made / CHECKPOINTS_NAME, RUN_ID)
    checkpoints.tidy()
    for number, root in ((4, 4), (8, 7), (99, 99)):
        name = bytes([root]) * 32
        checkpoints.write(number, RUN_ID, name, name, number, lambda path: void(path.write_bytes(b"x")), b"weights")
    return tmp_path / "node"


def test_the_command_writes_one_file_and_says_where(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "page.html"
    status, said, err = p2ptrain(capsys, "report", "--data-dir", directory, "--out", out)
    assert (status, said, err) == (0, f"{out}\n", "")
    text = out.read_text()
    assert "9 recorded, 1 to 9" in text
    assert f"{peer_id_of(KEYS[1])}</code> (this node)" in text
    verdicts = re.findall(r"<td>(as agreed|NOT as agreed|not recorded)</td>", text)
    assert verdicts == ["as agreed", "NOT as agreed", "not recorded"]
    assert out.stat().st_mode & 0o777 == 0o644
    monkeypatch.chdir(tmp_path)
    assert p2ptrain(capsys, "report", "--data-dir", directory, "--run", RUN.run_id[:8])[0] == 0
    assert (tmp_path / f"my-run-{RUN.run_id[:8]}.html").exists()
    assert [path.name for path in tmp_path.glob("*.partial")] == []
    link = tmp_path / "latest.html"
    link.symlink_to(out)
    status, said, err = p2ptrain(capsys, "report", "--data-dir", directory, "--out", link)
    assert (status, said) == (2, "") and f"{link}: --out: not a file. Name a file, which is replaced" in err
    assert link.is_symlink()


def test_a_directory_that_this_user_may_not_enter_is_told(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "glob", refused)
    status, out, err = p2ptrain(capsys, "report", "--data-dir", directory)
    assert (status, out) == (1, "") and err.startswith(f"{directory}: cannot be read (Permission denied)")


def test_a_run_without_rounds_or_a_directory_without_runs_is_told(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = p2ptrain(capsys, "report", "--data-dir", tmp_path / "none")
    assert (status, out) == (2, "")
    assert "no run in" in err
    (Home(NodeConfig(storage=StorageConfig(directory=str(directory)))).of_run(RUN_ID) / RECORDS_NAME).unlink()
    status, out, err = p2ptrain(capsys, "report", "--data-dir", directory)
    assert (status, out) == (1, "")
    assert "no round is recorded" in err
    unwritable = ("--out", tmp_path / "no" / "where.html")
    assert p2ptrain(capsys, "report", "--data-dir", directory, *unwritable)[0] == 1


def test_a_damaged_checkpoint_is_counted_and_a_damaged_owner_is_nobody(directory: Path) -> None:
    place = Home(NodeConfig(storage=StorageConfig(directory=str(directory)))).of_run(RUN_ID)
    (place / "identity").write_text("nonsense")
    stamp = next((place / CHECKPOINTS_NAME).glob("*/*.json"))
    stamp.write_text("{}")
    found = read_recorded_run(RUN, place)
    assert (found.me, len(found.checkpoints), found.damaged) == (b"", 2, 1)
    assert "1 more cannot be read" in exported(found)
