"""Numbers, verdicts and courses, as `p2ptrain top` tells them: the words of the dashboard (web/assets/words.js)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from p2ptrain.core.complaints import Code

LEVELS = " ▁▂▃▄▅▆▇█"
REASONS_SHOWN = 8


def few(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def duration(seconds: float) -> str:
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3_600:
        return f"{whole // 60} min"
    if whole < 86_400:
        return f"{whole // 3_600} h {whole % 3_600 // 60} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3_600} h"


def hours(seconds: float) -> str:
    found = seconds / 3_600
    return f"{found:.2f}" if found < 10 else f"{found:,.1f}"


def reasons(counts: dict[str, int]) -> str:
    """The most frequent first."""
    order = sorted(counts.items(), key=lambda each: -each[1])
    return ", ".join(f"{why} {count:,}" for why, count in order[:REASONS_SHOWN] if count > 0)


def troubles(status: dict[str, Any]) -> list[dict[str, Any]]:
    """The complaints, the worst first; that a run is small is none. An older daemon tells only their texts."""
    texts = [{"code": "", "severity": "error", "text": each} for each in status["health"]]
    return [each for each in status.get("complaints", texts) if each["code"] != Code.CRASH_ONLY]


def agreement(status: dict[str, Any]) -> tuple[str, str]:
    """Whether all have the same model, as far as this node can know: word for word what the dashboard says of it.

    A certificate has as many members as the liars of a quorum leave (core/roster.py). Nothing: the daemon is older.
    """
    if any(each["code"] == Code.QUARANTINED for each in troubles(status)):
        return "other", "No: this node's model differs from the certified one. It is fetching that."
    if not {"certified_round", "roots", "quorum"} <= status.keys():
        return "unknown", ""
    number, liars = status["certified_round"], status["fault_tolerance"]["liars"]
    if number == 0:
        return "unknown", "Not known yet: the roster has certified no round so far."
    if str(number) not in status["roots"]:
        why = f"The roster has certified round {number:,}, which this node cannot compare: it was not here."
        return "unknown", why
    if status["roster"] == [status["peer_id"]]:
        return "same", f"Yes: this node alone has a vote, and signed its own model after round {number:,}."
    members = few(status["quorum"] - liars, "member", "members")
    but = f", and at most {liars:,} of them may lie" if liars > 0 else ""
    signed = f"signed that after round {number:,} they had bit for bit the model of this node"
    return "same", f"Yes: at least {members} {signed}{but}."


# ---------------------------------------------------------------------------------------------------
# Lines of blocks


def sparkline(values: Sequence[float], width: int) -> str:
    """The last values as blocks, from their least to their largest; several to a block where there are more."""
    if not values or width < 1:
        return ""
    each = -(-len(values) // width)
    means = [sum(part) / len(part) for part in (values[i : i + each] for i in range(0, len(values), each))]
    low, high = min(means), max(means)
    steps = len(LEVELS) - 2
    return "".join(LEVELS[1 + (round((mean - low) / (high - low) * steps) if high > low else 0)] for mean in means)


def spread(places: Sequence[int], values: Sequence[float], width: int) -> list[float]:
    """Values at rising places, at even steps from the first place to the last; a step without any is as the one before.

    Nothing, if all are at one place.
    """
    steps = min(width, len(values))
    if steps < 1 or places[-1] <= places[0]:
        return []
    found: list[list[float]] = [[] for _ in range(steps)]
    for place, value in zip(places, values, strict=True):
        found[min(steps - 1, (place - places[0]) * steps // (places[-1] - places[0]))].append(value)
    means: list[float] = []
    for each in found:
        means.append(sum(each) / len(each) if each else means[-1])  # the first is never without
    return means
