"""Loads both kinds of config from TOML files, environment variables and command-line options."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from p2ptrain.config.node import ENVIRONMENT_DELIMITER, ENVIRONMENT_PREFIX, NodeConfig
from p2ptrain.config.run import CONFIG_BYTES_MAX, RunConfig
from p2ptrain.config.text import config_error, fields, unknown_key
from p2ptrain.errors import ConfigError

FILE_BYTES_MAX = 4 * CONFIG_BYTES_MAX  # the largest config, and three times as much in comments

# A key of too many parts, such as a.b.c: tomllib's time and memory grow with their square.
LONG_KEY = re.compile(rb"""(?<![\w"'-])(?:[\w"'-]++[ \t]*+\.[ \t]*+){32}""")

Table = dict[str, Any]  # a parsed TOML table
# Settings that a run from another's weights has by its making, or that its start fills in.
DECIDED = ("model", "adapt", "tokenizer", "state", "predecessor")


def load_run_config(path: Path, config_beside: Callable[[], str] = str) -> RunConfig:
    """Loads a run's config from a TOML file.

    config_beside: returns the config.json beside the first weights, for a model of transformers that has none"""
    table = read_table(path)
    model = table.get("model")
    if isinstance(model, dict) and model.get("kind") == "transformers" and "config" not in model:
        table["model"] = {**model, "config": config_beside()}
    return run_config_of(table, path)


def load_node_config(path: Path | None) -> NodeConfig:
    """Loads a node's config. The environment overrides the file at `path`, which overrides the defaults."""
    return _node_config(read_table(path) if path else {}, path)


def with_options(config: NodeConfig, options: dict[tuple[str, str], object]) -> NodeConfig:
    """Applies command-line options, which override the file and the environment."""
    mistakes = []
    for (section, key), value in options.items():
        model = getattr(config, section)
        try:
            changed = type(model).model_validate({**model.model_dump(exclude_unset=True), key: value})
        except ValidationError as error:
            for details in error.errors(include_url=False):
                place = (section, *details["loc"]) if details["loc"] else (section, key)
                mistakes.append(config_error({**details, "loc": place}, NodeConfig, RunConfig, "command line"))
        else:
            config = config.model_copy(update={section: changed})
    if mistakes:
        raise _together(mistakes)
    return config


def load_config(path: Path) -> RunConfig | NodeConfig:
    """Loads a config of either kind, recognised by its top-level keys."""
    table = read_table(path)
    if _resemblance(table, RunConfig) > _resemblance(table, NodeConfig):
        return run_config_of(table, path)
    return _node_config(table, path)


def _resemblance(table: Table, model: type[BaseModel]) -> int:
    known = list(model.model_fields)
    return sum(2 if key in known else bool(difflib.get_close_matches(key, known, n=1)) for key in table)


def read_table(path: Path) -> Table:
    """Reads the tables of a config file, unchecked and without defaults."""
    try:
        with path.open("rb") as file:
            encoded = file.read(FILE_BYTES_MAX + 1)
    except (OSError, ValueError) as error:  # ValueError for a name with a zero byte
        reason = error.strerror if isinstance(error, OSError) else str(error)
        fix = "Check the name and the permissions"
        raise ConfigError(f"cannot be read: {reason}", source=str(path), fix=fix) from error
    if len(encoded) > FILE_BYTES_MAX:
        fix = "Check that this is the right file"
        raise ConfigError(f"larger than {FILE_BYTES_MAX:,} bytes, which no config needs", source=str(path), fix=fix)
    if LONG_KEY.search(encoded):
        raise ConfigError("a key has too many parts", source=str(path), fix="Write sections and keys")
    try:
        return tomllib.loads(encoded.decode(), parse_float=Decimal)
    except UnicodeDecodeError as error:
        line = encoded[: error.start].count(b"\n") + 1
        raise ConfigError(f"line {line} is not UTF-8 text", source=str(path), fix="Save it as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"not TOML: {error}", source=str(path), fix="Correct the file there") from error
    except (ValueError, InvalidOperation) as error:  # a number or an exponent has thousands of digits
        raise ConfigError("a number is too large", source=str(path), fix="Write one of ordinary size") from error
    except RecursionError as error:
        fix = "Write sections and keys"
        raise ConfigError("lists or tables are nested too deeply", source=str(path), fix=fix) from error


def exact(value: Any) -> Any:
    """Converts a script's settings to the form that a file would give: 0.1 means one tenth."""
    if isinstance(value, Mapping):
        return {key: exact(each) for key, each in value.items()}
    return Decimal(repr(float(value))) if isinstance(value, float) else value


def run_config_of(table: Table, path: Path) -> RunConfig:
    """Checks a run's settings from a file or a script, and makes its config."""
    try:
        return RunConfig.model_validate(table)
    except ValidationError as error:
        found = error.errors(include_url=False)
    raise _together([config_error(details, RunConfig, NodeConfig, str(path)) for details in found])


def renewed(run: RunConfig, settings: Mapping[str, object]) -> RunConfig:
    """Returns a run's config with other settings, for a run with the same model that has yet to begin."""
    raw = run.model_dump()
    raw.pop("predecessor", None)
    raw["state"]["initial_root"], raw["admission"]["founders"] = "", ()
    for name, value in settings.items():
        section, _, key = name.rpartition(".")
        table = raw.get(section) if section else raw
        if section in DECIDED or name == "admission.founders" or not isinstance(table, dict):
            what = "unknown" if table is None else "the weights decide it, or the start"
            fix = "Leave it out: `p2ptrain config schema run` has all keys"
            raise ConfigError(what, source="--set", key=name, fix=fix)
        table[key] = value
    return run_config_of(raw, Path("--set"))


def _node_config(table: Table, path: Path | None) -> NodeConfig:
    unknown_variables = dict(_unknown_variables())
    mistakes = [
        ConfigError("unknown", source=f"environment variable {name}", fix=fix)
        for name, fix in unknown_variables.items()
    ]
    # BaseSettings accepts keys of its own, all with a leading underscore; a file must not set them.
    unknown_keys = [key for key in table if key not in NodeConfig.model_fields]
    mistakes += [unknown_key([key], NodeConfig, RunConfig, str(path), table[key]) for key in unknown_keys]
    try:
        config = NodeConfig(**{key: value for key, value in table.items() if key not in unknown_keys})
    except ValidationError as error:
        for details in error.errors(include_url=False):
            variables = _variables_behind(details["loc"])
            if not unknown_variables.keys() & set(variables):  # otherwise the variable is already reported
                source = " and ".join([f"environment variable {name}" for name in variables] or [str(path)])
                mistakes.append(config_error(details, NodeConfig, RunConfig, source))
    if mistakes:
        raise _together(mistakes)
    return config


def _variables() -> Iterator[tuple[str, str, str]]:
    """Yields name, section and key of every environment variable that is meant for p2ptrain.

    It must name a section or contain two underscores: an orchestrator that runs a service named p2ptrain sets
    variables such as P2PTRAIN_SERVICE_HOST in every container."""
    for name, value in sorted(os.environ.items()):
        section, delimiter, key = name.upper().removeprefix(ENVIRONMENT_PREFIX).lower().partition(ENVIRONMENT_DELIMITER)
        is_ours = name.upper().startswith(ENVIRONMENT_PREFIX) and (delimiter or section in NodeConfig.model_fields)
        if is_ours and value:
            yield name, section, key


def _unknown_variables() -> Iterator[tuple[str, str]]:
    """Yields every variable that names no key, with a suggestion."""
    known = [f"{section}__{key}" for section, key, _ in fields(NodeConfig)]
    for name, section, key in _variables():
        if (written := f"{section}__{key}") not in known:
            close = difflib.get_close_matches(written, known, n=1)
            yield name, f"Did you mean {ENVIRONMENT_PREFIX}{close[0].upper()}?" if close else "Remove it"


def _variables_behind(place: Sequence[int | str]) -> list[str]:
    """Returns the variables that may have caused an error at `place`; for a section, all of its variables."""
    return [name for name, section, key in _variables() if section == place[0] and (len(place) < 2 or key == place[1])]


def _together(mistakes: Sequence[ConfigError]) -> ConfigError:
    """Combines errors into one, with a line for each."""
    return mistakes[0] if len(mistakes) == 1 else ConfigError("\n".join(map(str, mistakes)))
