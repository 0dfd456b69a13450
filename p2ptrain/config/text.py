"""Describes configs to people: a field's allowed values, the errors in a file, and a whole config as TOML."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from p2ptrain.config.fields import Accepts, Section
from p2ptrain.errors import ConfigError, SettingError

SHOWN_LENGTH_MAX = (
    160  # characters of a value or key shown in an error: enough for a whole address, which ends with its id
)
TYPE_WORDS: dict[object, str] = {
    int: "a whole number",
    bool: "true or false",
    str: "text in quotes",
    Fraction: 'a number, or a fraction in quotes such as "1/3"',
    tuple: "a list in brackets",
}


# -- Fields -----------------------------------------------------------------------------------------


def sections(model: type[BaseModel]) -> dict[str, type[Section]]:
    """Returns the tables of a config, by name."""
    annotations = {name: field.annotation for name, field in model.model_fields.items()}
    return {name: kind for name, kind in annotations.items() if isinstance(kind, type) and issubclass(kind, Section)}


def fields(model: type[BaseModel]) -> Iterator[tuple[str, str, FieldInfo]]:
    """Yields section, key and field of every setting; the section is empty for a top-level key."""
    tables = sections(model)
    for name, field in model.model_fields.items():
        if name not in tables:
            yield "", name, field
    for name, table in tables.items():
        for key, field in table.model_fields.items():
            yield name, key, field


def allowed(field: FieldInfo) -> str:
    """Describes the values that a field accepts."""
    if get_origin(field.annotation) is Literal:
        *others, last = map(toml_of, get_args(field.annotation))
        return f"{', '.join(others)} or {last}" if others else last
    words = [item.text for item in _metadata(field) if isinstance(item, Accepts)]
    if get_origin(field.annotation) is tuple:
        return f"a list of at most {_limits(field)['max_length']:,}, each {words[0]}"
    return _bounds(field) or (words[0] if words else TYPE_WORDS[field.annotation])


def _metadata(field: FieldInfo) -> list[object]:
    """Returns the metadata of a field, including that of a list's entries."""
    found: list[object] = list(field.metadata)
    if get_origin(field.annotation) is tuple:
        entry = get_args(field.annotation)[0]
        found += entry.__metadata__ if get_origin(entry) is Annotated else []
    return found


def _limits(field: FieldInfo) -> dict[str, Any]:
    """Returns a field's constraints: ge, gt, le, lt and max_length."""
    names = ("ge", "gt", "le", "lt", "max_length")
    return {name: getattr(item, name) for item in field.metadata for name in names if hasattr(item, name)}


def _bounds(field: FieldInfo) -> str:
    limits = _limits(field)
    low = _number(limits["ge"]) if "ge" in limits else f"above {_number(limits['gt'])}" if "gt" in limits else ""
    high = _number(limits["le"]) if "le" in limits else f"below {_number(limits['lt'])}" if "lt" in limits else ""
    return f"{low} to {high}" if low and high else f"{low} or more" if low else f"up to {high}" if high else ""


def _number(value: Any) -> str:
    if isinstance(value, int) and value >= 2**20 and value & (value - 1) == 0:
        return f"2**{value.bit_length() - 1}"
    return f"{value:,}" if isinstance(value, int) else str(value)


# -- Mistakes ---------------------------------------------------------------------------------------

_BLOCKS = "recipe.chunk, the side of a block: 64 means blocks of 64 x 64"
_LIARS = "recipe.byzantine, the number of contributions that may be lies"
# The names of settings and sections in other systems: DeMo, DisTrO, DiLoCo, SparseLoCo, Psyche and other trainers.
THEIR_NAMES = {
    "compression": 'recipe.k, the numbers sent of each block; none: transform = "none", k = 4096 and value_bits = 24',
    "compression_decay": "recipe.decay",
    "compression_topk": "recipe.k",
    "compression_chunk": _BLOCKS,
    "quantize_1bit": "recipe.value_bits: 1 for true, 2 or more for false",
    "inner_steps": "recipe.local_steps",
    "outer_lr": "recipe.learning_rate",
    "outer_momentum": "recipe.momentum",
    "outer_nesterov": "recipe.nesterov",
    "inner_lr": "recipe.inner_learning_rate",
    "error_decay": "recipe.decay",
    "clip_grad_norm": "recipe.clip",
    "d_model": "model.dim",
    "d_ff": "model.ffn_dim",
    "topk": "recipe.k",
    "target_chunk": _BLOCKS,
    "use_dct": 'recipe.transform: "dct" for true, "none" for false',
    "max_staleness": "agreement.staleness_rounds_max",
    "compression_ratio": "recipe.k, the numbers sent of each block, and recipe.value_bits, the bits of each",
    "aggregation_rule": "recipe.rule, which contributions count, and recipe.outer, how their sum becomes an update",
    "bulyan_f": _LIARS,
    "krum_f": _LIARS,
    "trim_ratio": "recipe.trim, a number of contributions",
    "LLM": "[model], and its optimizer [recipe]",
    "Distro": '[recipe] with name = "distro"',
    "controller": "[agreement] and [admission]: the nodes settle it among themselves",
    "training": "[recipe], and what is trained on [data]",
}


def config_error(  # noqa: PLR0911  (a return for each kind)
    error: Mapping[str, Any], model: type[BaseModel], other: type[BaseModel], source: str = ""
) -> ConfigError:
    """Turns an error of pydantic into one in terms of the file; `other` is the other kind of config."""
    place = [part for part in error["loc"] if isinstance(part, str)]
    key, kind = _dotted(place), error["type"]

    def mistake(problem: str, fix: str) -> ConfigError:
        return ConfigError(problem, source=source, key=key, fix=fix)

    if kind == "extra_forbidden":
        return unknown_key(place, model, other, source, error["input"])
    if kind == "value_error" and isinstance(of_section := error["ctx"]["error"], SettingError):
        return mistake(of_section.problem, of_section.fix[:1].upper() + of_section.fix[1:])
    field, found = _field(place, model), _found(error["input"])
    example = "" if field.is_required() else f"Write for instance {place[-1]} = {toml_of(field.default)}"
    if kind == "value_error":
        return mistake(f"{error['ctx']['error']}, found {found}", example)
    if kind == "missing":
        return mistake("missing", f"Write {place[-1]} = ...: {allowed(field)}")
    if key in sections(model):
        return mistake(f"expected a table, found {found}", f"Write [{key}] and its keys below it")
    if kind.endswith("_type"):
        in_list = len(place) < len(error["loc"])
        expected = "text in quotes" if in_list else TYPE_WORDS[get_origin(field.annotation) or field.annotation]
        return mistake(f"expected {expected}, found {found}{' in the list' if in_list else ''}", example)
    if kind == "too_long":
        return mistake(f"a list of {error['ctx']['actual_length']} is too long", f"Write {allowed(field)}")
    why = error.get("ctx", {}).get("why", "")
    return mistake(f"{found} is not valid{why and f': {why}'}", f"Choose {allowed(field)}")


def unknown_key(
    place: Sequence[str], model: type[BaseModel], other: type[BaseModel], source: str, value: object = None
) -> ConfigError:
    """Describes an unknown key, with a suggestion; if it is another system's table, with one for each of its keys."""
    *tables, name = place
    section = ".".join(tables)
    keys = {table: [key for where, key, _ in fields(model) if where == table] for table in ["", *sections(model)]}
    known = keys[section] + ([] if section else list(sections(model)))
    if homes := [f"[{table}]" if table else "the top of the file" for table in keys if name in keys[table]]:
        fix = f"It belongs in {' or '.join(homes)}"
    elif theirs := [each for each in dict.fromkeys([name, *_names_in(value)]) if each in THEIR_NAMES]:
        fix = ". ".join(f"Here {each} is {THEIR_NAMES[each]}" for each in theirs)
    elif close := difflib.get_close_matches(name, known, n=1):
        fix = f"Did you mean {close[0]}?"
    elif not section and name in other.model_fields:
        fix = f"It belongs in the other kind of config, that of a {other.__name__.removesuffix('Config').lower()}"
    else:
        fix = f"Known here: {', '.join(known)}"
    return ConfigError("unknown key", source=source, key=_dotted(place), fix=fix)


def _names_in(value: object) -> Iterator[str]:
    """Yields the keys of a table and of the tables in it."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield name
            yield from _names_in(each)


def _dotted(place: Sequence[str]) -> str:
    """Returns a key in TOML's notation, quoted so that it cannot be mistaken for part of the message."""
    return ".".join(
        part if re.fullmatch(r"[A-Za-z0-9_-]{1,60}", part) else json.dumps(part)[:SHOWN_LENGTH_MAX] for part in place
    )


def _field(place: Sequence[str], model: type[BaseModel]) -> FieldInfo:
    *tables, name = place
    for table in tables:
        model = sections(model)[table]
    return model.model_fields[name]


def _found(value: object) -> str:
    """Describes a value as it is written in the file."""
    match value:
        case Mapping():
            return "a table"
        case list() | tuple():
            return "a list"
        case int() if value.bit_length() > 64:  # Python refuses to print thousands of digits
            return "a number beyond 64 bits"
        case bool() | str() | int() | Fraction() | Decimal():
            return toml_of(value)[:SHOWN_LENGTH_MAX]
        case _:
            return "a date or a time"  # TOML's remaining types


# -- TOML -------------------------------------------------------------------------------------------


def to_toml(config: BaseModel) -> str:
    """Writes all values with their descriptions; reading it back gives the same config."""
    lines, current = [], ""
    for section, key, field in fields(type(config)):
        if section != current:
            lines += ["", f"[{section}]"]
            current = section
        value = getattr(getattr(config, section) if section else config, key)
        lines += [f"# {description(field)}", f"{key} = {toml_of(value)}"]
    return "\n".join(lines) + "\n"


def description(field: FieldInfo) -> str:
    return f"{field.description} ({allowed(field)})"


def _escaped(character: str) -> str:
    number = ord(character)
    return f"\\u{number:04x}" if number < 2**16 else f"\\U{number:08x}"


def toml_of(value: object) -> str:
    """Writes a value as TOML does."""
    match value:
        case bool():
            return str(value).lower()
        case int() | float() | Decimal():
            return str(value)
        case Fraction():
            return str(value) if value.denominator == 1 else f'"{value}"'
        case tuple() | list():
            return f"[{', '.join(map(toml_of, value))}]"
        case dict():
            return f"{{ {', '.join(f'{name} = {toml_of(each)}' for name, each in value.items())} }}" if value else "{}"
        case _:  # JSON's strings are valid TOML, except for characters that TOML or a terminal needs escaped
            written = json.dumps(str(value), ensure_ascii=False)
            return "".join(each if each.isprintable() else _escaped(each) for each in written)
