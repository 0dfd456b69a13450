"""Figures: the numbers of the schema that every face shows.

A field of the schema (schema.py) carries its figure: what people call it, its unit, its metric. /metrics, tracking, the
terminal, the dashboard and the exported page go through all figures there are. Some have a place of their own on a
face, made by hand; whatever has none is listed there, or gets a chart. So a new figure shows everywhere, by its field
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel

from p2ptrain.visible import count_of

REASONS_SHOWN = 8
Unit = Literal["", "nats a token", "bytes", "bytes/s", "seconds", "tokens", "tokens/s", "share", "joules", "is"]


@dataclass(frozen=True, slots=True)
class Figure:
    """What is to be known of a number to show it. The number of a list is its length; of an object, the sum of it."""

    title: str  # for people
    unit: Unit = ""
    metric: str = ""  # its name after p2ptrain_; empty: made of the field's
    kind: Literal["gauge", "counter"] = "gauge"
    text: str = ""  # about the metric; empty: the title, and the field's description
    labels: tuple[tuple[str, str], ...] = ()  # of the metric, where several figures share one
    label: str = ""  # which tells the entries of an object apart, or the values that a text may have
    values: tuple[str, ...] = ()  # of that label; empty: whatever there is
    key: str = ""  # of the one entry of an object that is meant
    tracked: str = ""  # its name for trackers; empty: made of the field's
    skips_zero: bool = False  # trackers are not told that it is zero


@dataclass(frozen=True, slots=True)
class Shown:
    """A figure, and where its number is found in an answer."""

    path: tuple[str, ...]
    figure: Figure
    description: str

    @property
    def name(self) -> str:
        return ".".join(self.path) + (f":{self.figure.key}" if self.figure.key else "")

    def found(self, told: Any) -> Any:
        """What an answer has there: the answer itself, or its JSON, which an older node may have written."""
        for name in self.path:
            told = told.get(name) if isinstance(told, dict) else getattr(told, name, None)
        if isinstance(told, dict) and self.figure.key:
            return told.get(self.figure.key, 0)
        return told

    def number(self, told: Any) -> float | None:
        """None: there is none yet."""
        value = self.found(told)
        if isinstance(value, dict):
            return float(sum(value.values()))
        if isinstance(value, list | tuple):
            return float(len(value))
        return None if value is None or isinstance(value, str) else float(value)

    def words(self, told: Any) -> str:
        """For people; empty: there is none yet."""
        value = self.found(told)
        if isinstance(value, str):
            return value
        if isinstance(value, dict):
            return reasons(value)
        number = self.number(told)
        return "" if number is None else _WORDS[self.figure.unit](number)

    def samples(self, told: Any) -> Iterator[tuple[dict[str, str], float]]:
        """For Prometheus."""
        value, figure = self.found(told), self.figure
        labels = dict(figure.labels)
        if figure.label and isinstance(value, dict):
            for name in figure.values or sorted(value):
                yield labels | {figure.label: name.replace(" ", "_")}, float(value.get(name, 0))
        elif figure.label:
            for name in figure.values:
                yield labels | {figure.label: name}, float(name == value)
        elif (number := self.number(told)) is not None:
            yield labels, number


@cache
def figures_of(model: type[BaseModel]) -> tuple[Shown, ...]:
    """All figures of an answer, in the order of its fields."""
    return tuple(_walk(model, (), ()))


def _walk(model: type[BaseModel], path: tuple[str, ...], labels: tuple[tuple[str, str], ...]) -> Iterator[Shown]:
    for name, field in model.model_fields.items():
        found = [each for each in field.metadata if isinstance(each, Figure)]
        parts = get_args(field.annotation)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _walk(field.annotation, (*path, name), labels)
        elif get_origin(field.annotation) is dict and isinstance(parts[1], type) and issubclass(parts[1], BaseModel):
            for each in get_args(parts[0]):
                yield from _walk(parts[1], (*path, name, each), ((found[0].label, each),))
        else:
            for figure in found:
                yield Shown((*path, name), _labelled(figure, labels), field.description or "")
    for name, computed in model.model_computed_fields.items():
        if get_origin(computed.return_type) is Annotated:
            for figure in get_args(computed.return_type)[1:]:
                yield Shown((*path, name), _labelled(figure, labels), computed.description or "")


def _labelled(figure: Figure, labels: tuple[tuple[str, str], ...]) -> Figure:
    """With the name of the entry in which it stands before its own."""
    if not labels:
        return figure
    title = " ".join([*(value for _, value in labels), figure.title])
    return replace(figure, title=title, labels=(*labels, *figure.labels))


# ---------------------------------------------------------------------------------------------------
# Numbers for people


_WORDS: dict[Unit, Callable[[float], str]] = {
    "": lambda number: f"{number:,.0f}" if number.is_integer() else f"{number:,.4g}",
    "nats a token": lambda number: f"{number:.4f} nats a token",
    "bytes": count_of,
    "bytes/s": lambda number: f"{count_of(number)}/s",
    "seconds": lambda number: f"{number:,.2f} s",
    "tokens": lambda number: f"{number:,.0f}",
    "tokens/s": lambda number: f"{number:,.0f} tokens/s",
    "share": lambda number: f"{number:.1%}",
    "joules": lambda number: f"{number / 3.6e6:,.2f} kWh",
    "is": lambda number: "yes" if number else "no",
}


def reasons(counts: dict[str, int]) -> str:
    """The most frequent first."""
    order = sorted(counts.items(), key=lambda each: -each[1])
    return ", ".join(f"{why} {count:,}" for why, count in order[:REASONS_SHOWN] if count > 0)
