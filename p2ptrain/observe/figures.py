"""Figures: the numbers in the schema that every interface shows.

A field of the schema (schema.py) is annotated with its figure: its title, unit and metric. /metrics, trackers, the
terminal, the dashboard and the exported page go through all figures. Some of these place certain figures by hand, and
list or chart the others. So a new field with a figure shows up everywhere without further work."""

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
    """How to show a number. A list counts as its length, and an object as the sum of its values."""

    title: str  # for people
    unit: Unit = ""
    metric: str = ""  # the metric's name after p2ptrain_; by default, the field's
    kind: Literal["gauge", "counter"] = "gauge"
    text: str = ""  # the metric's help; by default, the title and the field's description
    labels: tuple[tuple[str, str], ...] = ()  # the metric's labels, if several figures share it
    label: str = ""  # distinguishes the entries of an object, or the values of a text
    values: tuple[str, ...] = ()  # possible values of that label; by default, those present
    key: str = ""  # if only this entry of an object, or field of a model, is meant
    tracked: str = ""  # the name in trackers; by default, the field's
    skips_zero: bool = False  # zeros are not sent to trackers


@dataclass(frozen=True, slots=True)
class FigureField:
    """A figure and the path to its number in an answer."""

    path: tuple[str, ...]
    figure: Figure
    description: str

    @property
    def name(self) -> str:
        return ".".join(self.path) + (f":{self.figure.key}" if self.figure.key else "")

    def found(self, told: Any) -> Any:
        """Returns the value in an answer, or in its JSON."""
        for name in self.path:
            told = told.get(name) if isinstance(told, dict) else getattr(told, name, None)
        if isinstance(told, dict) and self.figure.key:
            return told.get(self.figure.key, 0)
        return told

    def number(self, told: Any) -> float | None:
        """Returns the number in an answer; None if there is none yet."""
        value = self.found(told)
        if isinstance(value, dict):
            return float(sum(value.values()))
        if isinstance(value, list | tuple):
            return float(len(value))
        return None if value is None or isinstance(value, str) else float(value)

    def words(self, told: Any) -> str:
        """Formats the value for people; empty if there is none yet."""
        value = self.found(told)
        if isinstance(value, str):
            return value
        if isinstance(value, dict):
            return reasons(value)
        number = self.number(told)
        return "" if number is None else _WORDS[self.figure.unit](number)

    def samples(self, told: Any) -> Iterator[tuple[dict[str, str], float]]:
        """Yields the samples for Prometheus: labels and value."""
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
def figures_of(model: type[BaseModel]) -> tuple[FigureField, ...]:
    """Returns all figures of an answer, in the order of its fields."""
    return tuple(_walk(model, (), ()))


def _walk(model: type[BaseModel], path: tuple[str, ...], labels: tuple[tuple[str, str], ...]) -> Iterator[FigureField]:
    for name, field in model.model_fields.items():
        found = [each for each in field.metadata if isinstance(each, Figure)]
        parts = get_args(field.annotation)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _walk(field.annotation, (*path, name), labels)
            for figure in found:
                text = field.annotation.model_fields[figure.key].description or ""
                yield FigureField((*path, name, figure.key), _labelled(replace(figure, key=""), labels), text)
        elif get_origin(field.annotation) is dict and isinstance(parts[1], type) and issubclass(parts[1], BaseModel):
            for each in get_args(parts[0]):
                yield from _walk(parts[1], (*path, name, each), ((found[0].label, each),))
        else:
            for figure in found:
                yield FigureField((*path, name), _labelled(figure, labels), field.description or "")
    for name, computed in model.model_computed_fields.items():
        if get_origin(computed.return_type) is Annotated:
            for figure in get_args(computed.return_type)[1:]:
                yield FigureField((*path, name), _labelled(figure, labels), computed.description or "")


def _labelled(figure: Figure, labels: tuple[tuple[str, str], ...]) -> Figure:
    """Prefixes the title with the name of the entry that holds the figure."""
    if not labels:
        return figure
    title = " ".join([*(value for _, value in labels), figure.title])
    return replace(figure, title=title, labels=(*labels, *figure.labels))


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
    """Lists counts by reason, the most frequent first."""
    order = sorted(counts.items(), key=lambda each: -each[1])
    return ", ".join(f"{why} {count:,}" for why, count in order[:REASONS_SHOWN] if count > 0)
