"""The base class and the field types of both configurations."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema

RATIONAL_PART_MAX = 2**53  # both parts stay exact as a float, so that their quotient is rounded once
RATIONAL_TEXT_MAX = 40  # characters: two parts below 2**53 have 16 digits each
RATIONAL_PATTERN = r"-?[0-9]+(/[0-9]+|\.[0-9]+)?"
RATIONAL_WORDS = 'a number, or a fraction in quotes such as "1/3"'


@dataclass(frozen=True)
class Accepts:
    """Annotates a field with a description of its values, shown to people instead of a pattern."""

    text: str


class Section(BaseModel):
    """A table of a config file: immutable, and without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


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
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$"), Accepts("64 hexadecimal digits in lower case")]
DigestOrEmpty = Annotated[
    str, Field(pattern=r"^([0-9a-f]{64})?$"), Accepts("64 hexadecimal digits in lower case, or nothing")
]
# TOML and JSON have arrays; pydantic's strict mode would insist on a tuple.
FromArray = Field(strict=False)
