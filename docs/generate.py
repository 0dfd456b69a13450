"""Makes docs/reference/ from the code: `make docs`. A test does the same and compares (tests/project/test_docs.py).

What a page says stands where the code says it: the help of the commands, the descriptions of the config's keys, the
names and texts of the metrics, the models of the HTTP answers, and the docstrings of the library.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from types import SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import p2ptrain
from p2ptrain.cli import app, exits
from p2ptrain.config import NodeConfig, RunConfig
from p2ptrain.config.text import allowed, fields, sections, to_toml
from p2ptrain.core.complaints import MEANINGS
from p2ptrain.observe.app import PATHS, REFUSALS, MetricsPage
from p2ptrain.observe.guard import OPEN
from p2ptrain.observe.schema import Answer, RoundRecord, Status
from p2ptrain.train.memory import PassSettings, need_of

HERE = Path(__file__).parent / "reference"
HELP_COLUMNS = 80
MEMORY_MODELS: dict[str, dict[str, Any]] = {
    "100M, 1,024 tokens": {"preset": "100m"},
    "1B, 2,048 tokens": {"preset": "1b"},
    "3B, 2,048 tokens": {"preset": "1b", "dim": 3_072, "layers": 24, "heads": 24, "kv_heads": 8, "ffn_dim": 8_192},
}
MEMORY_SETTINGS = ((0, False, False), (1, False, False), (1, True, False), (1, True, True))
MEMORY_CARDS = (8, 12, 16, 24, 40, 80)
NOTE = "<!-- Made by `make docs` from {source}. Change that, not this. -->\n"


def pages() -> dict[str, str]:
    """Every page by its name."""
    return {
        "cli.md": "".join(_commands()),
        "config.md": "".join(_config()),
        "metrics.md": "".join(_metrics()),
        "http.md": "".join(_http()),
        "python.md": "".join(_python()),
        "memory.md": "".join(_memory()),
    }


def main() -> int:
    """Write them; exit status 1 if one was another."""
    has_changed = False
    for name, text in pages().items():
        path = HERE / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            has_changed = True
            sys.stderr.write(f"{path} has changed\n")
    return int(has_changed)


# ---------------------------------------------------------------------------------------------------
# Commands


def _commands() -> Iterator[str]:
    yield "# The commands\n\n" + NOTE.format(source="the commands' own help") + "\n"
    yield "| exit status | why | what to do |\n|---|---|---|\n"
    for status, told in exits.MEANINGS.items():
        yield _row(_code(str(int(status))), *told)
    yield "\nAbove 128: 128 plus a signal's number; 137 often means that the system killed it for lack of memory.\n"
    yield "For these commands status 1 may report what they found:\n\n"
    yield "| command | what it found | what to do |\n|---|---|---|\n"
    for command, told in exits.FOUND.items():
        yield _row(_code(command), *told)
    for words in command_names():
        yield f"\n## {' '.join(['p2ptrain', *words])}\n\n```text\n{_help(words)}\n```\n"


def command_names() -> list[tuple[str, ...]]:
    """Of all commands, in the order of `p2ptrain --help`."""

    def walk(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        yield words
        for name, each in getattr(command, "commands", {}).items():
            yield from walk(each, (*words, name))

    return list(walk(typer.main.get_command(app), ()))


def _help(words: tuple[str, ...]) -> str:
    out, columns = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(HELP_COLUMNS)
    try:
        with contextlib.redirect_stdout(out):
            app([*words, "--help"], prog_name="p2ptrain", standalone_mode=False)
    finally:
        if columns is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = columns
    return "\n".join(line.rstrip() for line in out.getvalue().strip().splitlines())


# ---------------------------------------------------------------------------------------------------
# Config


def _config() -> Iterator[str]:
    yield "# The files\n\n" + NOTE.format(source="p2ptrain/config/run.py and p2ptrain/config/node.py") + "\n"
    yield (
        "`p2ptrain config check FILE` checks a file, `p2ptrain config show FILE` prints every value.\n"
        'An unknown key is an error. A fraction is written as a decimal or as `"1/3"`.\n\n'
        "- [A run](#a-run): `p2ptrain start RUN.toml`. The same for everyone, and part of the run's id.\n"
        "- [A node](#a-node): `--config NODE.toml`. Yours alone.\n"
    )
    yield "\n## A run\n"
    yield from _keys(RunConfig)
    yield "\n## A node\n\nEach key also has an environment variable, which overrides the file:\n"
    yield "`P2PTRAIN_DEVICE__THREADS=4`, and for lists `P2PTRAIN_NETWORK__BOOTSTRAP=address,address`.\n"
    yield from _keys(NodeConfig)


def _keys(model: type[BaseModel]) -> Iterator[str]:
    defaults, section = _defaults(model), None
    for where, key, field in fields(model):
        if where != section:
            section = where
            yield f"\n### {f'[{where}]' if where else 'Without a section'}\n\n"
            yield f"{inspect.cleandoc(sections(model)[where].__doc__ or '')}\n\n" if where else ""
            yield "| key | default | takes | what it is |\n|---|---|---|---|\n"
        default = "none: write one" if field.is_required() else _code(defaults[where, key])
        yield _row(_code(key), default, allowed(field), field.description or "")


def _defaults(model: type[BaseModel]) -> dict[tuple[str, str], str]:
    """As a file would say them, by section and key."""
    unnamed = {name: "" for name, field in model.model_fields.items() if field.is_required()}
    found, where = {}, ""
    for line in to_toml(model.model_construct(**unnamed)).splitlines():
        if line.startswith("["):
            where = line.strip("[]")
        elif line and not line.startswith("#"):
            key, _, value = line.partition(" = ")
            found[where, key] = value
    return found


def _code(text: str) -> str:
    return f"`{text}`"


def _row(*cells: str) -> str:
    return (
        "| "
        + " | ".join(cell.replace("|", "\\|").replace("**", "\\*\\*").replace("\n", " ") for cell in cells)
        + " |\n"
    )


# ---------------------------------------------------------------------------------------------------
# Metrics


def _metrics() -> Iterator[str]:
    status = _example(Status)
    facts: Any = SimpleNamespace(status=lambda: status, rounds=lambda last: [_example(RoundRecord)])
    families = [each for each in MetricsPage("", facts).collect() if each.name.startswith("p2ptrain")]
    yield "# The metrics\n\n" + NOTE.format(source="p2ptrain/observe/schema.py and app.py") + "\n"
    yield (
        "For Prometheus, at `/metrics`. Names are stable. Counters start over with the daemon, except energy, and\n"
        "never fall while it lives; what goes up and down is a gauge.\n"
        f"There are also the usual metrics of the process: {', '.join(map(_code, _of_process()))}.\n\n"
    )
    yield "| name | type | labels | what it is |\n|---|---|---|---|\n"
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        yield _row(_code(name), family.type, _labels(family), family.documentation)


def _labels(family: Metric) -> str:
    names = dict.fromkeys(name for sample in family.samples for name in sample.labels)
    if family.name == "p2ptrain_build_info":
        return ", ".join(map(_code, names))
    values = {name: dict.fromkeys(sample.labels[name] for sample in family.samples) for name in names}
    known = [f"`{name}`: {', '.join(map(_code, each))}" for name, each in values.items()]
    return "; ".join(known) or ("`what`" if family.name == "p2ptrain_occurrences" else "")


def _of_process() -> list[str]:
    found = ProcessCollector(registry=CollectorRegistry()).collect()
    return sorted(f"{each.name}_total" if each.type == "counter" else each.name for each in found)


def _example(kind: Any) -> Any:
    """A value of a type, so that every metric is there."""
    arguments = [each for each in get_args(kind) if each is not type(None)]
    if get_origin(kind) is Annotated:
        return _example(arguments[0])
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind.model_construct(**{name: _example(field.annotation) for name, field in kind.model_fields.items()})
    if get_origin(kind) is Literal:
        return arguments[0]
    if get_origin(kind) in (Union, UnionType):
        return _example(arguments[0])
    if get_origin(kind) is dict:
        keys = get_args(arguments[0]) if get_origin(arguments[0]) is Literal else ()
        return {key: _example(arguments[1]) for key in keys}
    return None if is_dataclass(kind) else (get_origin(kind) or kind)()  # a motion, which has no metric


# ---------------------------------------------------------------------------------------------------
# HTTP


def _http() -> Iterator[str]:
    yield "# The HTTP answers\n\n" + NOTE.format(source="p2ptrain/observe/schema.py and app.py") + "\n"
    yield (
        "Read-only. The node answers from its own knowledge, without asking others. HEAD works like GET. A field is\n"
        "never renamed or removed within a `version`; new ones may be added. Beyond loopback a token is required,\n"
        "except for those marked *open*.\n\n"
    )
    yield "| address | what it tells |\n|---|---|\n"
    for path, text in PATHS.items():
        yield _row(_code(path), text + (" *open*" if path in OPEN else ""))
    yield "\nAny of them may also answer:\n\n| status | because |\n|---|---|\n"
    for code, text in REFUSALS.items():
        yield _row(str(code), text)
    for name, schema in _schemas():
        yield f"\n## {name}\n\n{schema.get('description', '')}\n\n| field | type | what it is |\n|---|---|---|\n"
        for field, each in schema["properties"].items():
            yield _row(_code(field), _type(each), each.get("description", ""))
    yield "\n## Code\n\nEvery complaint, the worst first. What to do: [Recover](../how-to/recover.md).\n\n"
    yield "| code | severity | `/readyz` | the text |\n|---|---|---|---|\n"
    for code, meaning in MEANINGS.items():
        yield _row(_code(code), meaning.severity, "503" if meaning.hinders else "200", meaning.text)


def _schemas() -> list[tuple[str, Any]]:
    """The answers first, then what they are made of; what has no fields is told where it is used."""
    answers = Answer.__subclasses__()
    schemas = models_json_schema([(each, "serialization") for each in answers])[1]["$defs"]
    names = [model.__name__ for model in answers]
    rest = [name for name in schemas if name not in names]
    return [(name, schemas[name]) for name in [*names, *rest] if "properties" in schemas[name]]


def _type(schema: dict[str, Any]) -> str:
    match schema:
        case {"$ref": path}:
            name = path.rpartition("/")[2]
            text = f"[{name}](#{name.lower()})"
        case {"anyOf": kinds}:
            text = " or ".join(map(_type, kinds))
        case {"const": value}:
            text = _code(str(value))
        case {"enum": values}:
            text = ", ".join(map(_code, values))
        case {"type": "array", "items": items}:
            text = f"list of {_type(items)}"
        case {"type": "object", "additionalProperties": values}:
            text = f"object of {_type(values)}"
        case {"type": kind}:
            text = {"integer": "whole number", "string": "text", "boolean": "true or false"}.get(kind, kind)
        case _:
            raise AssertionError(f"no words for {schema}")
    return text


# ---------------------------------------------------------------------------------------------------
# The library


def _python() -> Iterator[str]:
    yield "# The Python library\n\n" + NOTE.format(source="the docstrings of p2ptrain") + "\n"
    yield "`import p2ptrain` has these names. [Use it from Python](../how-to/use-from-python.md) shows them at work.\n"
    for name in (each for each in p2ptrain.__all__ if each != "__version__"):
        found = getattr(p2ptrain, name)
        if not inspect.isclass(found):
            yield _told(name, found)
            continue
        yield f"\n## {name}\n\n{inspect.getdoc(found)}\n"
        for method, value in vars(found).items() if not issubclass(found, Exception) else ():
            if isinstance(value, property):
                yield f"\n### {name}.{method}\n\n{inspect.getdoc(value)}\n"
            elif inspect.isfunction(value) and not method.startswith("_"):
                yield _told(f"{name}.{method}", value)
    yield from _callback()


def _callback() -> Iterator[str]:
    """Reads the source, because the module imports transformers, which is not here unless the extra is."""
    tree = ast.parse((Path(p2ptrain.__file__).parent / "hf.py").read_text(encoding="utf-8"))
    for each in tree.body:
        if isinstance(each, ast.ClassDef):
            (begin,) = (part for part in each.body if isinstance(part, ast.FunctionDef) and part.name == "__init__")
            signature = ast.unparse(begin.args).removeprefix("self, ")
            yield f"\n## hf.{each.name}\n\nIn `p2ptrain.hf`, with the extra `[hf]`.\n\n"
            yield f"```text\n{each.name}({signature})\n```\n\n{ast.get_docstring(each)}\n"


def _told(name: str, function: Callable[..., object]) -> str:
    signature = str(inspect.signature(function)).replace("self, ", "").replace("(self)", "()").replace("'", "")
    level = "###" if "." in name else "##"
    return f"\n{level} {name}\n\n```text\n{name}{signature}\n```\n\n{inspect.getdoc(function)}\n"


# ---------------------------------------------------------------------------------------------------
# Memory


def _memory() -> Iterator[str]:
    yield "# Which card trains what\n\n" + NOTE.format(source="p2ptrain/train/memory.py") + "\n"
    yield (
        "Memory of the card in GB, by the estimate that a node makes before it starts, with bf16 arithmetic, compiled\n"
        "layers and the run's other settings as they are by default. The last column names the smallest card that\n"
        "it fits, of 8, 12, 16, 24, 40 and 80 GB, whose GB has 1.04 * 10^9 bytes, as drivers tell it. The node\n"
        "chooses these settings by itself where you have not set them. The estimate of the round's own arithmetic\n"
        "has not been measured on a card yet. 1B with `local` in 24 GB was wanted: reached by this estimate, with\n"
        "both settings. 7B on one card of 80 GB was wanted, too, and [takes more](../explanation/scale.md).\n"
    )
    yield "\n" + _row("model", "recipe", "sequences of a pass", "`half_state`", "`checkpointing`", "GB", "card")
    yield "|---|---|---|---|---|---|---|\n"
    for name, model in MEMORY_MODELS.items():
        for recipe in ("distro", "local"):
            run = RunConfig.model_validate({"name": "memory", "model": model, "recipe": {"name": recipe}})
            for sequences, is_half, is_checkpointed in MEMORY_SETTINGS:
                passes = PassSettings(True, is_checkpointed, sequences, "cuda", is_half, is_compiled=True)
                needed = need_of(run, passes).trainer / 10**9
                card = next((str(size) for size in MEMORY_CARDS if needed <= size * 1.04), "none of them")
                marks = ["yes" if each else "no" for each in (is_half, is_checkpointed)]
                yield _row(name, recipe, str(sequences or run.recipe.sequences_per_pass), *marks, f"{needed:.1f}", card)


if __name__ == "__main__":
    sys.exit(main())
