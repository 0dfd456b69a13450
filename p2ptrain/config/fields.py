"""The base class and the field types of both configurations."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Annotated, Self, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PlainSerializer,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from p2ptrain.errors import SettingError

RATIONAL_PART_MAX = 2**53  # both parts stay exact as a float, so that their quotient is rounded once
RATIONAL_TEXT_MAX = 40  # characters: two parts below 2**53 have 16 digits each
RATIONAL_PATTERN = r"-?[0-9]+(/[0-9]+|\.[0-9]+)?"
RATIONAL_WORDS = 'a number, or a fraction in quotes such as "1/3"'
SETTINGS_MAX = 32  # settings of a plug-in, which come from strangers; the bounds keep them within a message
SETTING_LENGTH_MAX = 200  # characters of one setting as text
SETTING_NAME = r"[a-z][a-z0-9_]{0,39}"
SETTINGS_WORDS = f"a table of at most {SETTINGS_MAX} numbers, texts and true or false"


@dataclass(frozen=True)
class Accepts:
    """Annotates a field with a description of its values, shown to people instead of a pattern."""

    text: str


@dataclass(frozen=True, slots=True)
class Option:
    """Annotates a limit with its option of `p2ptrain limit`, and what its value counts; a choice counts nothing."""

    name: str
    unit: str = ""


Clashes: TypeAlias = Iterator[tuple[str, str]]


class Section(BaseModel):
    """A table of a config file: immutable, and without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def clashes(self) -> Clashes:
        """Yields settings that do not go together, and a fix. Only the first counts: those after it may rely on it."""
        yield from ()

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if clash := next(self.clashes(), None):
            raise SettingError(*clash)
        return self


def parse_rational(value: object) -> Fraction:
    """Accepts 3, 0.001 as written in TOML, "1/1000" and "0.001", but never a binary float."""
    if isinstance(value, bool) or not isinstance(value, int | str | Decimal | Fraction):
        raise ValueError(f"expected {RATIONAL_WORDS}")
    if isinstance(value, str) and len(value) > RATIONAL_TEXT_MAX:
        raise ValueError(f"expected a fraction of at most {RATIONAL_TEXT_MAX} characters")
    if isinstance(value, str) and not re.fullmatch(RATIONAL_PATTERN, value):
        raise ValueError(f"expected {RATIONAL_WORDS}")
    # Without this bound the fraction of 1e999999999 would have a billion digits.
    if isinstance(value, Decimal) and not (value.is_finite() and abs(value.adjusted()) <= RATIONAL_TEXT_MAX):
        raise ValueError("expected a finite number of ordinary size")
    try:
        fraction = Fraction(value)
    except ZeroDivisionError as error:
        raise ValueError("the denominator is zero") from error
    if abs(fraction.numerator) >= RATIONAL_PART_MAX or fraction.denominator >= RATIONAL_PART_MAX:
        raise ValueError("numerator and denominator must stay below 2**53")
    return fraction


# str(Fraction) is the canonical text: lowest terms, "n/d", or "n" for an integer.
Rational = Annotated[
    Fraction,
    BeforeValidator(parse_rational),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string", "pattern": f"^{RATIONAL_PATTERN}$"}]}),
    Accepts(RATIONAL_WORDS),
]
K_MAX, K_CHOICES_MAX = 64**2, 8
K_WORDS = f"1 to {K_MAX:,}, or a rising list of 2 to {K_CHOICES_MAX} such numbers"


def parse_k(value: object) -> int | tuple[int, ...]:
    """Accepts a number of coefficients, or a rising list of two or more."""
    listed = tuple(value) if isinstance(value, list | tuple) else (value,)
    are_numbers = all(type(each) is int and 1 <= each <= K_MAX for each in listed)
    is_one = not isinstance(value, list | tuple)
    if not are_numbers or not (is_one or (2 <= len(listed) <= K_CHOICES_MAX and sorted({*listed}) == [*listed])):
        raise ValueError(f"expected {K_WORDS}")
    return listed[0] if is_one else listed


K = Annotated[
    int | tuple[int, ...],
    BeforeValidator(parse_k),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 1, "maximum": K_MAX},
                {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": K_CHOICES_MAX},
            ]
        }
    ),
    Accepts(K_WORDS),
]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$"), Accepts("64 hexadecimal digits in lower case")]
DigestOrEmpty = Annotated[
    str, Field(pattern=r"^([0-9a-f]{64})?$"), Accepts("64 hexadecimal digits in lower case, or nothing")
]
# TOML and JSON have arrays; pydantic's strict mode would insist on a tuple.
FromArray = Field(strict=False)


class PluginSettings(dict[str, str]):
    """The settings that a run gives to a plug-in, each as text; immutable."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        as_dict = core_schema.plain_serializer_function_ser_schema(dict)
        return core_schema.no_info_plain_validator_function(parse_settings, serialization=as_dict)


def parse_settings(value: object) -> PluginSettings:
    """Accepts a table of scalars, and turns each into text for the plug-in: 0.10 becomes 0.1."""
    if not isinstance(value, dict):
        raise ValueError(f"expected {SETTINGS_WORDS}")
    if len(value) > SETTINGS_MAX:
        raise ValueError(f"expected at most {SETTINGS_MAX} settings")
    settings = PluginSettings()
    for name, each in sorted(value.items(), key=str):
        if not isinstance(name, str) or not re.fullmatch(SETTING_NAME, name):
            raise ValueError("expected names of up to 40 lower-case letters, digits and _")
        settings[name] = _written_out(each)
        if len(settings[name]) > SETTING_LENGTH_MAX:
            raise ValueError(f"expected at most {SETTING_LENGTH_MAX} characters for {name}")
    return settings


def _written_out(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return value
        case int() if abs(value) < 2**63:
            return str(value)
        case Decimal() if value.is_finite() and abs(value.adjusted()) <= RATIONAL_TEXT_MAX:
            return f"{value.normalize():f}"
    raise ValueError("expected numbers of ordinary size, texts, and true or false")


Settings = Annotated[
    PluginSettings,
    WithJsonSchema({"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}}),
    Accepts(SETTINGS_WORDS),
]
PLUGIN_PATTERN = r"[a-z0-9]([a-z0-9-]{0,62}[a-z0-9])? [0-9][0-9A-Za-z.+!]{0,39}"  # a name has one spelling (PEP 503)
PLUGIN_WORDS = 'a package and its exact version such as "p2ptrain-digits 0.1.0"'
Plugin = Annotated[str, Field(pattern=f"^{PLUGIN_PATTERN}$"), Accepts(PLUGIN_WORDS)]
PluginOrEmpty = Annotated[str, Field(pattern=f"^({PLUGIN_PATTERN})?$"), Accepts(f"{PLUGIN_WORDS}, or nothing")]
