"""Exports a run, as one node has recorded it, as a single HTML file: the dashboard's page with the data embedded.

The live parts of the page are cut out and replaced by what is on disk besides the rounds. The rounds, styles, scripts
and the chart library are embedded; the page merges the rounds to a few hundred points, as it does beside a node."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import Any

from p2ptrain import __version__
from p2ptrain.config import RunConfig
from p2ptrain.config.text import to_toml
from p2ptrain.errors import DataError
from p2ptrain.files import read
from p2ptrain.identity import peer_id_of
from p2ptrain.models.kinds import parameter_count
from p2ptrain.observe.app import ASSETS, INDEX, library_path, page_of
from p2ptrain.observe.figures import figures_of
from p2ptrain.observe.rounds import recorded, tokens_of
from p2ptrain.observe.schema import PHASES, RoundRecord, Status
from p2ptrain.store.checkpoints import Checkpoint, Checkpoints
from p2ptrain.store.records import ROUNDS_MAX
from p2ptrain.store.store import CHECKPOINTS_NAME

CONTRIBUTORS_SHOWN = 100
CHECKPOINTS_SHOWN = 20
RECENT_MAX = 8  # rounds in the page's table, as in assets/history.js
NOT_SHOWN = {"version", "applied_at", "manifest", "contributors"}
SCRIPTS = ("words", "figures", "history", "packed", "charts", "panels", "exported")  # each after those that it imports


@dataclass(frozen=True, slots=True)
class RecordedRun:
    run: RunConfig
    me: bytes  # this node's key; empty if unknown
    rounds: Sequence[RoundRecord]  # the newest last
    checkpoints: Sequence[Checkpoint]
    damaged: int  # checkpoints that cannot be read


def read_recorded_run(run: RunConfig, directory: Path) -> RecordedRun:
    """Reads a run's data, also while its node runs, and changes nothing. DataError if no round is recorded."""
    rounds = recorded(directory, ROUNDS_MAX)
    if not rounds:
        raise DataError(f"{directory}: no round is recorded: none was applied yet, or the records were lost")
    found = Checkpoints(directory / CHECKPOINTS_NAME, run.id).found()
    whole = [each for each in found if not isinstance(each, DataError)]
    content = (read(directory / "identity") or b"").strip()
    try:
        me = bytes.fromhex(content.decode())
    except ValueError:
        me = b""
    return RecordedRun(run, me, rounds, whole, len(found) - len(whole))


def exported(recorded_run: RecordedRun, status: dict[str, Any] | None = None, made_at: datetime | None = None) -> str:
    """Returns the HTML page; `status` is that of the running node, if any.

    Everything that could come from a peer is escaped, and the page's policy forbids loading anything."""
    made = made_at or datetime.now(UTC)
    name, script = escape(recorded_run.run.name), _script()
    style = (ASSETS / "style.css").read_text("utf-8")
    index = page_of((ASSETS / INDEX).read_text("utf-8"), exported={"contribution_tokens": tokens_of(recorded_run.run)})
    parts = re.split(r"<!-- /?live -->", index)
    hashed = base64.b64encode(sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{hashed}' blob:"
    found = library_path()
    library = _packed("library", b"" if found is None else found.read_bytes())
    rounds = _packed("rounds-packed", json.dumps(rows_of(recorded_run.rounds)).encode())
    parts[1] = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<style id="plotly.js-style-global" class="no-inline-styles">{style}</style>'
    )
    parts[3] = (
        f'<header class="top"><div class="top-row"><div class="brand"><p class="product">'
        f'<span class="mark" aria-hidden="true"></span>p2ptrain</p><h1><bdi>{name}</bdi></h1></div></div>'
        f'<p class="facts">run <code>{recorded_run.run.run_id}</code>, as one node has recorded it; written '
        f"{made:%Y-%m-%d %H:%M} UTC by p2ptrain {__version__}</p></header>"
    )
    parts[5] = _section("In short", _summary(recorded_run)) + figures_section(status)
    parts[7] = "".join(
        _section(title, body)
        for title, body in (
            ("Contributors", _contributors(recorded_run)),
            ("Checkpoints", _checkpoints(recorded_run)),
            ("Configuration", f"<pre>{escape(to_toml(recorded_run.run))}</pre>"),
        )
    )
    parts[9] = f'{library}{rounds}<script type="module">{script}</script>'
    page = "".join(parts)
    return page.replace("<title>p2ptrain</title>", f"<title>{name}: a run of p2ptrain</title>")


def figures_section(status: dict[str, Any] | None) -> str:
    """Lists the figures of a running node's status, without addresses and peers."""
    if status is None:
        return ""
    rows = [(each.figure.title, escape(each.words(status))) for each in figures_of(Status)]
    return _section("The node, when this was written", _terms([(title, words) for title, words in rows if words]))


def rows_of(rounds: Sequence[RoundRecord]) -> list[dict[str, Any]]:
    """Returns the rounds as the page's scripts take them: what is not shown is left out, and what is, is rounded."""
    rows = [
        json.loads(each.model_dump_json(exclude=NOT_SHOWN), parse_float=lambda text: float(f"{float(text):.6g}"))
        | {"contributors": len(each.contributors)}
        for each in rounds
    ]
    for row in rows[:-RECENT_MAX]:
        del row["root"]  # random digits: most of what a page of many rounds would hold
    return rows


def _packed(name: str, content: bytes) -> str:
    text = base64.b64encode(gzip.compress(content, 9, mtime=0)).decode()
    return f'<script type="application/gzip" id="{name}">{text}</script>'


def _script() -> str:
    """Bundles the page's modules into one script, because the exported file has none beside it."""
    parts = []
    for name in SCRIPTS:
        text = (ASSETS / f"{name}.js").read_text("utf-8")
        text = re.sub(r'^import \* as (\w+) from "\./(\w+)\.js";$', r"const \1 = modules.\2;", text, flags=re.MULTILINE)
        text = re.sub(r'^import (\{.*\}) from "\./(\w+)\.js";$', r"const \1 = modules.\2;", text, flags=re.MULTILINE)
        names = re.findall(r"^export (?:const|class|function) (\w+)", text, re.MULTILINE)
        text = re.sub(r"^export ", "", text, flags=re.MULTILINE)
        parts.append(f"modules.{name} = (() => {{\n{text}\nreturn {{ {', '.join(names)} }};\n}})();\n")
    return f"const modules = {{}};\n{''.join(parts)}"


def _section(title: str, body: str) -> str:
    return f'<section class="card"><h2>{title}</h2>{body}</section>'


def _terms(rows: Sequence[tuple[str, str]]) -> str:
    return f"<dl class=rows>{''.join(f'<div><dt>{escape(name)}</dt><dd>{text}</dd></div>' for name, text in rows)}</dl>"


def _held_out(measured: Sequence[RoundRecord]) -> list[tuple[str, str]]:
    """Tells how well the weights do on text that nobody trains on, if it was measured."""
    if not measured:
        return []
    first, last = measured[0], measured[-1]
    told = f"{first.held_out_loss:.4f} after round {first.held_out_round:,}"
    if last is not first:
        told += f" to {last.held_out_loss:.4f} after round {last.held_out_round:,}"
    return [("held-out loss", f"{told} (perplexity {last.perplexity:,.2f}), as drawn members claim")]


def _summary(recorded_run: RecordedRun) -> str:
    rounds, run = recorded_run.rounds, recorded_run.run
    first, last = rounds[0], rounds[-1]
    losses = [each.loss for each in rounds if each.loss is not None]
    measured = [each for each in rounds if each.held_out_loss is not None]
    taken = Counter(key for each in rounds for key in each.contributors)
    mine, all_of_them = taken[recorded_run.me], sum(taken.values())
    sent, received = sum(each.bytes_sent for each in rounds), sum(each.bytes_received for each in rounds)
    refused = sum(sum(each.refused.values()) for each in rounds)
    repeated = sum(each.views > 1 for each in rounds)
    branches = len({each.branch for each in rounds})
    means = {phase: sum(getattr(each, f"{phase}_seconds") for each in rounds) / len(rounds) for phase in PHASES}
    times = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in means.items())
    rows = [
        ("rounds", f"{len(rounds):,} recorded, {first.round:,} to {last.round:,}"),
        ("from, to", f"{_time(first.applied_at)} to {_time(last.applied_at)}"),
        ("model", f"{parameter_count(run.model, run.adapt):,} parameters, recipe {escape(run.recipe.name)}"),
        ("loss", f"{losses[0]:.4f} to {losses[-1]:.4f} nats per token, in training here" if losses else "none"),
        *_held_out(measured),
        ("contributions", f"{all_of_them:,} taken from {len(taken):,} nodes, {refused:,} refused"),
        (
            "this node",
            f"{mine:,} of these ({mine / max(1, all_of_them):.1%}); {sum(e.tokens for e in rounds):,} tokens",
        ),
        ("time", f"a round took {sum(means.values()):.2f} s on average: {times}"),
        ("traffic of this node", f"{sent:,} bytes sent, {received:,} received"),
        ("agreement", f"{repeated:,} rounds took more than one try; {branches - 1:,} regroups"),
        ("state root", f"<code>{last.root.hex()}</code> after round {last.round:,}"),
    ]
    return _terms(rows)


def _time(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _contributors(recorded_run: RecordedRun) -> str:
    taken = Counter(key for each in recorded_run.rounds for key in each.contributors)
    total = sum(taken.values())
    rows = []
    for key, count in sorted(taken.items(), key=lambda each: (-each[1], each[0]))[:CONTRIBUTORS_SHOWN]:
        who = " (this node)" if key == recorded_run.me else ""
        rows.append(
            f"<tr><td><code>{peer_id_of(key)}</code>{who}</td><td class=number>{count:,}</td>"
            f"<td class=number>{count / total:.1%}</td></tr>"
        )
    more = f"<p class=note>and {len(taken) - len(rows):,} more</p>" if len(taken) > len(rows) else ""
    head = "<tr><th>node</th><th class=number>contributions taken</th><th class=number>share</th></tr>"
    return f"<div class=scroll><table>{head}{''.join(rows)}</table></div>{more}"


def _checkpoints(recorded_run: RecordedRun) -> str:
    roots = {(each.branch, each.round): each.root for each in recorded_run.rounds}
    rows = []
    for each in recorded_run.checkpoints[-CHECKPOINTS_SHOWN:]:
        known = roots.get((each.branch, each.round))
        verdict = "not recorded" if known is None else "as agreed" if known == each.root else "NOT as agreed"
        rows.append(
            f"<tr><td class=number>{each.round:,}</td><td><code>{each.root.hex()[:32]}</code></td>"
            f"<td class=number>{each.stamp.trainer.bytes + each.stamp.state.bytes:,}</td><td>{verdict}</td></tr>"
        )
    if not rows:
        return "<p>There is none.</p>"
    head = "<tr><th class=number>round</th><th>state root</th><th class=number>bytes</th><th>root</th></tr>"
    damaged = f"<p>{recorded_run.damaged:,} more cannot be read.</p>" if recorded_run.damaged else ""
    return f"<div class=scroll><table>{head}{''.join(rows)}</table></div>{damaged}"
