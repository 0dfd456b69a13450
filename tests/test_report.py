"""The page about a run: its figures are the records', it needs nothing from outside, and its charts are right."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from test_cli import p2ptrain
from test_cli_checkpoint import run_of, void
from test_store_records import KEYS, lived

from p2ptrain.config import RunConfig
from p2ptrain.config_text import to_toml
from p2ptrain.daemon.places import run_directory
from p2ptrain.identity import peer_id_of
from p2ptrain.node_config import NodeConfig, StorageConfig
from p2ptrain.report.page import CONTRIBUTORS_SHOWN, Lived, page_of, read_lived
from p2ptrain.report.svg import HEIGHT, POINTS_MAX, WIDTH, line_chart, short, stacked_chart, thinned, ticks
from p2ptrain.store.checkpoints import Checkpoints
from p2ptrain.store.records import RECORDS_NAME, Batch, Records, RoundRecord
from p2ptrain.store.store import CHECKPOINTS_NAME

RUN = run_of("my-run")
RUN_ID = bytes.fromhex(RUN.run_id)


def a_round(number: int, **changes: object) -> RoundRecord:
    """Round 1 to 9 of the same branch: the loss falls, bytes and times are round numbers."""
    usual: dict[str, object] = {
        "branch": RUN_ID, "root": bytes([number]) * 32, "loss": 5.0 - number / 4, "applied_at": 1.7e9 + number,
        "contributors": (KEYS[0], KEYS[1]), "bytes_sent": 1_000, "bytes_received": 2_000, "tokens": 512, "views": 1,
        "train_seconds": 4.0, "collect_seconds": 2.0, "agree_seconds": 1.0, "apply_seconds": 1.0, "refused": {},
    }  # fmt: skip
    return msgspec.structs.replace(lived(number), **(usual | changes))


def page(*rounds: RoundRecord, me: bytes = KEYS[0], run: RunConfig = RUN) -> str:
    return page_of(Lived(run, me, rounds, [], 0), datetime(2026, 3, 29, tzinfo=UTC))


class Outline(HTMLParser):
    """That every element is closed where it should be, and what the page would load."""

    VOID = ("meta", "br", "link", "img", "hr", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.loads += [f"{tag} {name}" for name, _ in attributes if name in ("src", "href", "xlink:href", "action")]
        self.loads += [tag] if tag in ("script", "link", "iframe", "object", "img", "base") else []
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
        "9 recorded, 1 to 9", "4.7500 to 2.7500 nats", "18 of 2 nodes were taken, 0 refused", "9 of these (50.0%)",
        "4,608 tokens", "9,000 bytes sent, 18,000 received", "0 rounds took more than one try; 0 regroups",
        "09" * 32, "A round took 8.00 s on average: train 4.00 s, collect 2.00 s", "2023-11-14 22:13:21 UTC",
        peer_id_of(KEYS[1]), f"{peer_id_of(KEYS[0])}</code> (this node)", "2026-03-29 00:00 UTC", RUN.run_id,
        "sequence_length = ",
    ):  # fmt: skip
        assert part in text, part
    assert escape(to_toml(RUN)) in text
    other = page(
        *map(a_round, range(1, 10)),
        a_round(10, views=3, refused={"bad payload": 2}, branch=bytes(32), contributors=(KEYS[1],)),
    )
    for part in ("19 of 2 nodes were taken, 2 refused", "1 rounds took more than one try; 1 regroups", "(47.4%)"):
        assert part in other, part


def test_it_needs_nothing_from_outside_and_is_well_formed() -> None:
    text = page(*map(a_round, range(1, 10)))
    assert Outline(text).loads == []
    assert "default-src 'none'" in text
    assert "url(" not in text
    assert "@import" not in text
    assert text.count("<svg") == 3
    for picture in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(picture)


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
    assert "(this node)" not in text
    assert len(text) < 200_000


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
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    Outline(text)


# ---------------------------------------------------------------------------------------------------
# Charts


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.0, 10.0, [0, 2, 4, 6, 8, 10]), (0.0, 1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
     (2.1, 2.6, [2.1, 2.2, 2.3, 2.4, 2.5, 2.6]),
     (7.0, 7.0, [7.0]), (-1.0, 1.0, [-1.0, -0.5, 0.0, 0.5, 1.0])],
)  # fmt: skip
def test_ticks_are_round_numbers_within_the_axis(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_numbers_on_an_axis_are_short() -> None:
    assert [short(each) for each in (0.0, 0.25, 12.0, 1_500.0, 2e6, 3e9)] == ["0", "0.25", "12", "1.5k", "2M", "3G"]


def test_many_points_become_means_of_neighbours() -> None:
    points = [(float(n), float(n % 2)) for n in range(10 * POINTS_MAX)]
    found = thinned(points)
    assert len(found) == POINTS_MAX
    assert found[0] == (4.5, 0.5)
    assert thinned(points[:3]) == points[:3]
    assert thinned([]) == []


def drawn(picture: str) -> list[list[tuple[float, float]]]:
    root = ElementTree.fromstring(picture)
    paths = [each.get("d", "") for each in root.iter("path")]
    return [[(float(x), float(y)) for x, y in re.findall(r"([\d.]+) ([\d.]+)", path)] for path in paths]


def test_a_line_goes_through_its_points_within_the_picture() -> None:
    (line,) = drawn(line_chart([(0.0, 1.0), (5.0, 2.0), (10.0, 0.0)], "round", "loss", "it <falls>"))
    (x0, y0), (x1, y1), (x2, y2) = line
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y1 < y0 < y2  # more is higher up
    assert (y0 - y1) == pytest.approx(y2 - y0, abs=0.2)
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in line)
    assert 'aria-label="it &lt;falls&gt;"' in line_chart([(0.0, 1.0)], "a", "b", "it <falls>")
    assert "<circle" in line_chart([(0.0, 1.0)], "a", "b", "c")
    assert line_chart([], "a", "b", "c") == line_chart([(0.0, float("nan"))], "a", "b", "c") == ""


def test_areas_lie_on_each_other() -> None:
    series = [("a", [(0.0, 1.0), (1.0, 2.0)]), ("b", [(0.0, 3.0), (1.0, 2.0)])]
    first, second = drawn(stacked_chart(series, "round", "seconds", "times"))
    assert first[:2] == second[2:][::-1]  # the top of the one is the bottom of the other
    base = first[2][1]
    assert (base - first[0][1]) * 3 == pytest.approx(first[0][1] - second[0][1], abs=0.5)
    assert second[0][1] == pytest.approx(second[1][1], abs=0.2)  # both add up to 4
    assert len(drawn(stacked_chart([("a", [(0.0, 1.0)])], "x", "y", "z"))[0]) == 4
    assert stacked_chart([], "x", "y", "z") == stacked_chart([("a", [])], "x", "y", "z") == ""


# ---------------------------------------------------------------------------------------------------
# The command


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Of a node that has lived nine rounds, and saved three of them, one with another root than was agreed."""
    node = NodeConfig(storage=StorageConfig(directory=str(tmp_path / "node")))
    made = run_directory(node, RUN_ID)
    made.mkdir(parents=True)
    (made / "run.json").write_bytes(RUN.canonical())
    (made / "identity").write_text(KEYS[1].hex() + "\n")
    records = Records(made / RECORDS_NAME)
    records.write(Batch([*map(a_round, range(1, 10))]))
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


def test_a_run_without_rounds_or_a_directory_without_runs_is_told(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = p2ptrain(capsys, "report", "--data-dir", tmp_path / "none")
    assert (status, out) == (2, "")
    assert "no run in" in err
    (run_directory(NodeConfig(storage=StorageConfig(directory=str(directory))), RUN_ID) / RECORDS_NAME).unlink()
    status, out, err = p2ptrain(capsys, "report", "--data-dir", directory)
    assert (status, out) == (1, "")
    assert "no round is recorded" in err
    unwritable = ("--out", tmp_path / "no" / "where.html")
    assert p2ptrain(capsys, "report", "--data-dir", directory, *unwritable)[0] == 1


def test_a_damaged_checkpoint_is_counted_and_a_damaged_owner_is_nobody(directory: Path) -> None:
    place = run_directory(NodeConfig(storage=StorageConfig(directory=str(directory))), RUN_ID)
    (place / "identity").write_text("nonsense")
    stamp = next((place / CHECKPOINTS_NAME).glob("*/*.json"))
    stamp.write_text("{}")
    found = read_lived(RUN, place)
    assert (found.me, len(found.checkpoints), found.damaged) == (b"", 2, 1)
    assert "1 more cannot be read" in page_of(found)
