"""The page: what a run was like, as one node has recorded it, in one HTML file without anything from outside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from itertools import accumulate
from pathlib import Path

from p2ptrain import __version__
from p2ptrain.config import RunConfig
from p2ptrain.config_text import to_toml
from p2ptrain.errors import DataError
from p2ptrain.files import read
from p2ptrain.identity import peer_id_of
from p2ptrain.learn.model import parameter_count
from p2ptrain.report.svg import line_chart, stacked_chart
from p2ptrain.store.checkpoints import Checkpoint, Checkpoints
from p2ptrain.store.records import ROUNDS_MAX, RoundRecord, read_rounds
from p2ptrain.store.store import CHECKPOINTS_NAME

CONTRIBUTORS_SHOWN = 100
CHECKPOINTS_SHOWN = 20
PHASES = ("train", "collect", "agree", "apply")

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --dim: #6a737d; --grid: #d8dee4;
  --c0: #0969da; --c1: #8250df; --c2: #bf3989; --c3: #bc4c00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --paper: #0d1117; --dim: #8d96a0; --grid: #30363d;
  --c0: #4493f8; --c1: #ab7df8; --c2: #db61a2; --c3: #db6d28; } }
body { color: var(--ink); background: var(--paper); font: 16px/1.5 system-ui, sans-serif; max-width: 760px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { margin-bottom: 0; } h2 { margin-top: 2.5rem; }
.dim, figcaption { color: var(--dim); } figure { margin: 0; }
code, pre { font: 0.85em/1.5 ui-monospace, monospace; overflow-wrap: anywhere; } pre { overflow-x: auto; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.2rem 1.5rem; }
dt { color: var(--dim); } dd { margin: 0; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th, td { padding: 0.2rem 0.8rem 0.2rem 0; text-align: left; border-bottom: 1px solid var(--grid); }
td.n, th.n { text-align: right; }
svg { width: 100%; height: auto; } svg text { fill: var(--dim); font: 11px system-ui, sans-serif; }
.grid { stroke: var(--grid); } .line { fill: none; stroke-width: 1.8; } .area { stroke: none; }
.line.c0 { stroke: var(--c0); } .dot.c0, .area.c0, .key.c0 { fill: var(--c0); background: var(--c0); }
.area.c1, .key.c1 { fill: var(--c1); background: var(--c1); }
.area.c2, .key.c2 { fill: var(--c2); background: var(--c2); }
.area.c3, .key.c3 { fill: var(--c3); background: var(--c3); }
.key { display: inline-block; width: 0.8em; height: 0.8em; margin: 0 0.3em 0 1em; }
"""


@dataclass(frozen=True, slots=True)
class Lived:
    """A run, as it lies on this disk."""

    run: RunConfig
    me: bytes  # whose disk it is; empty: not known
    rounds: Sequence[RoundRecord]  # the newest last
    checkpoints: Sequence[Checkpoint]
    damaged: int  # checkpoints that cannot be read


def read_lived(run: RunConfig, directory: Path) -> Lived:
    """Nothing is locked or changed; a node that runs there may go on. DataError: there is no round to tell of."""
    rounds = read_rounds(directory, ROUNDS_MAX)
    if not rounds:
        raise DataError(f"{directory}: no round is recorded: the run has applied none, or its records were lost")
    found = Checkpoints(directory / CHECKPOINTS_NAME, bytes.fromhex(run.run_id)).found()
    whole = [each for each in found if not isinstance(each, DataError)]
    content = (read(directory / "identity") or b"").strip()
    try:
        me = bytes.fromhex(content.decode())
    except ValueError:
        me = b""
    return Lived(run, me, rounds, whole, len(found) - len(whole))


def page_of(lived: Lived, made_at: datetime | None = None) -> str:
    """HTML. Everything that could be a peer's is escaped, and the page itself forbids what is not in it."""
    made = made_at or datetime.now(UTC)
    name = escape(lived.run.name)
    sections = (_summary(lived), _loss(lived), _times(lived), _contributors(lived), _checkpoints(lived), _config(lived))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name}: a run of p2ptrain</title><style>{STYLE}</style></head><body>"
        f'<h1>{name}</h1><p class="dim">run <code>{lived.run.run_id}</code>, as one node has recorded it; written '
        f"{made:%Y-%m-%d %H:%M} UTC by p2ptrain {__version__}</p>{''.join(sections)}</body></html>\n"
    )


# ---------------------------------------------------------------------------------------------------
# Sections


def _terms(rows: Sequence[tuple[str, str]]) -> str:
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{text}</dd>' for name, text in rows)}</dl>"


def _summary(lived: Lived) -> str:
    rounds, run = lived.rounds, lived.run
    first, last = rounds[0], rounds[-1]
    losses = [each.loss for each in rounds if each.loss is not None]
    taken = Counter(key for each in rounds for key in each.contributors)
    mine, all_of_them = taken[lived.me], sum(taken.values())
    sent, received = sum(each.bytes_sent for each in rounds), sum(each.bytes_received for each in rounds)
    refused = sum(sum(each.refused.values()) for each in rounds)
    repeated = sum(each.views > 1 for each in rounds)
    branches = len({each.branch for each in rounds})
    rows = [
        ("rounds", f"{len(rounds):,} recorded, {first.round:,} to {last.round:,}"),
        ("from, to", f"{_time(first.applied_at)} to {_time(last.applied_at)}"),
        ("model", f"{parameter_count(run.model):,} parameters, recipe {escape(run.recipe.name)}"),
        ("loss", f"{losses[0]:.4f} to {losses[-1]:.4f} nats a token, of what was trained here" if losses else "none"),
        ("contributions", f"{all_of_them:,} of {len(taken):,} nodes were taken, {refused:,} refused"),
        (
            "this node",
            f"{mine:,} of these ({mine / max(1, all_of_them):.1%}); {sum(e.tokens for e in rounds):,} tokens",
        ),
        ("traffic of this node", f"{sent:,} bytes sent, {received:,} received"),
        ("agreement", f"{repeated:,} rounds took more than one try; {branches - 1:,} regroups"),
        ("state root", f"<code>{last.root.hex()}</code> after round {last.round:,}"),
    ]
    return f"<h2>In short</h2>{_terms(rows)}"


def _time(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _loss(lived: Lived) -> str:
    rounds = lived.rounds
    passed = [*accumulate(each.bytes_sent + each.bytes_received for each in rounds)]
    over_rounds = [(float(each.round), each.loss) for each in rounds if each.loss is not None]
    over_bytes = [
        (float(so_far), each.loss) for so_far, each in zip(passed, rounds, strict=True) if each.loss is not None
    ]
    if not over_rounds:
        return "<h2>Loss</h2><p>Nothing was trained here.</p>"
    ends = f"from {over_rounds[0][1]:.3f} to {over_rounds[-1][1]:.3f} nats a token"
    by_round = line_chart(over_rounds, "round", "nats a token", f"loss over rounds, {ends}")
    by_byte = line_chart(over_bytes, "bytes sent and received here", "nats a token", f"loss over bytes, {ends}")
    return (
        f"<h2>Loss</h2><figure>{by_round}<figcaption>Of what this node trained in each round, {ends}.</figcaption>"
        f"</figure><figure>{by_byte}<figcaption>The same over the bytes that this node has sent and received."
        "</figcaption></figure>"
    )


def _times(lived: Lived) -> str:
    rounds = lived.rounds
    series = [(phase, [(float(each.round), getattr(each, f"{phase}_seconds")) for each in rounds]) for phase in PHASES]
    mean = sum(each.seconds for each in rounds) / len(rounds)
    shares = {phase: sum(seconds for _, seconds in points) / len(rounds) for phase, points in series}
    told = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in shares.items())
    chart = stacked_chart(series, "round", "seconds", f"seconds of a round by phase; on average {told}")
    keys = "".join(f'<span class="key c{number}"></span>{phase}' for number, phase in enumerate(PHASES))
    return (
        f"<h2>Time of a round</h2><figure>{chart}<figcaption>{keys}<br>A round took {mean:.2f} s on average: {told}."
        "</figcaption></figure>"
    )


def _contributors(lived: Lived) -> str:
    taken = Counter(key for each in lived.rounds for key in each.contributors)
    total = sum(taken.values())
    rows = []
    for key, count in sorted(taken.items(), key=lambda each: (-each[1], each[0]))[:CONTRIBUTORS_SHOWN]:
        who = " (this node)" if key == lived.me else ""
        rows.append(
            f"<tr><td><code>{peer_id_of(key)}</code>{who}</td><td class=n>{count:,}</td>"
            f"<td class=n>{count / total:.1%}</td></tr>"
        )
    more = f"<p class=dim>and {len(taken) - len(rows):,} more</p>" if len(taken) > len(rows) else ""
    head = "<tr><th>node</th><th class=n>contributions taken</th><th class=n>share</th></tr>"
    return f"<h2>Contributors</h2><div class=wide><table>{head}{''.join(rows)}</table></div>{more}"


def _checkpoints(lived: Lived) -> str:
    roots = {(each.branch, each.round): each.root for each in lived.rounds}
    rows = []
    for each in lived.checkpoints[-CHECKPOINTS_SHOWN:]:
        known = roots.get((each.branch, each.round))
        verdict = "not recorded" if known is None else "as agreed" if known == each.root else "NOT as agreed"
        rows.append(
            f"<tr><td class=n>{each.round:,}</td><td><code>{each.root.hex()[:32]}</code></td>"
            f"<td class=n>{each.stamp.trainer.bytes + each.stamp.state.bytes:,}</td><td>{verdict}</td></tr>"
        )
    if not rows:
        return "<h2>Checkpoints</h2><p>None is here.</p>"
    head = "<tr><th class=n>round</th><th>state root</th><th class=n>bytes</th><th>root</th></tr>"
    damaged = f"<p>{lived.damaged:,} more cannot be read.</p>" if lived.damaged else ""
    return f"<h2>Checkpoints</h2><div class=wide><table>{head}{''.join(rows)}</table></div>{damaged}"


def _config(lived: Lived) -> str:
    return f"<h2>Configuration</h2><pre>{escape(to_toml(lived.run))}</pre>"
