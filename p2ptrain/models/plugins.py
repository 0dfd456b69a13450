"""Plug-ins: models and recipes from packages that the owner of this machine has installed and allowed.

A run comes from strangers, so nothing is imported just because a run names it. A run names a package and its exact
version. Only if the owner has allowed exactly these (`[plugins] allow`) is the package looked up among the installed
ones, its version compared, and the entry point with the package's name loaded: a subclass of `Model` in the group
`p2ptrain.models`, or a class that follows `Recipe` in `p2ptrain.recipes`. It is constructed with the run's settings,
which its own `Settings` (a `Section`) reads. An error inside it becomes one line that names the plug-in."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from p2ptrain.config import ModelConfig, RunConfig, Section
from p2ptrain.config.fields import PluginSettings
from p2ptrain.errors import ConfigError

Part = Literal["model", "recipe"]
GROUPS: dict[Part, str] = {"model": "p2ptrain.models", "recipe": "p2ptrain.recipes"}
AUTHOR_FIX = "Tell its author, or take part in a run without it"
WHY_LENGTH_MAX = 300  # characters kept of an error from other people's code
# Python's own errors, which a plug-in's code may raise; our own error types are not among them.
FAILURES = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, OSError, RuntimeError,
    SyntaxError, TypeError, ValueError,
)  # fmt: skip

_ALLOWED: list[str] = []  # packages that the owner of this process has allowed


def allow(plugins: Sequence[str]) -> None:
    """Lets this process use these packages, which its owner has allowed, and no others."""
    _ALLOWED[:] = plugins


def load(part: Part, plugin: str) -> type[Any]:
    """Returns a package's class for a part of a run. Raises ConfigError if it is not allowed or not installed."""
    if plugin not in _ALLOWED:
        what = f"this run takes its {part} from the package {plugin}, which is not allowed on this node"
        fix = "It can do all that you can. If you trust it, install that version and write "
        fix += f'allow = ["{plugin}"] under [plugins] in the node\'s file, or set P2PTRAIN_PLUGINS__ALLOW="{plugin}"'
        raise ConfigError(what, key=f"{part}.plugin", fix=fix)
    return loaded(part, plugin)


@cache
def loaded(part: Part, plugin: str) -> type[Any]:
    """Loads the class of a package that is allowed, once."""
    key, (name, _, version) = f"{part}.plugin", plugin.partition(" ")
    install = f"Install that one: pip install {name}=={version}, or from where those who run it say"
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError as error:
        what = f"this run takes its {part} from the package {plugin}, which is not installed"
        raise ConfigError(what, key=key, fix=install) from error
    if found.version != version:
        what = f"this run takes its {part} from version {version} of {name}, but version {found.version} is installed"
        raise ConfigError(what, key=key, fix=install)
    point = next(iter(found.entry_points.select(group=GROUPS[part], name=name)), None)
    if point is None:
        what = f"{plugin} has no {part}: there is no entry point {name} in its group {GROUPS[part]}"
        raise ConfigError(what, key=key, fix=AUTHOR_FIX)
    with blamed(part, plugin, "was loaded"):
        kind: type[Any] = point.load()
    return kind


def make(part: Part, plugin: str, given: PluginSettings, *arguments: object) -> Any:
    """Constructs the plug-in's model or recipe from these arguments and its settings."""
    kind = load(part, plugin)
    with blamed(part, plugin, f"made its {part}"):
        return kind(*arguments, _settings(part, plugin, kind, given))


def _settings(part: Part, plugin: str, kind: type[Any], given: PluginSettings) -> Section:
    """Returns the run's settings as the plug-in reads them; without settings of its own, it accepts none."""
    reads: type[Section] = getattr(kind, "Settings", Section)
    try:
        return reads.model_validate_strings(given, strict=False)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join([part, "settings", *map(str, first["loc"])])
        what = f"{plugin} does not accept it: {first['msg']}"
        raise ConfigError(what, key=key, fix="Write what its documentation says") from error


@contextmanager
def blamed(part: Part, plugin: str, when: str) -> Iterator[None]:
    """Turns an error inside the block into a line that names the plug-in, and the line of code."""
    try:
        yield
    except FAILURES as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:WHY_LENGTH_MAX]
        what = f"{plugin} failed when it {when}: {why}{_place_of(error)}"
        raise ConfigError(what, key=f"{part}.plugin", fix=AUTHOR_FIX) from error


def _place_of(error: Exception) -> str:
    """Returns the last line of code before the error that belongs to neither p2ptrain, torch nor the import system."""
    places = [(each.filename, each.lineno) for each in traceback.extract_tb(error.__traceback__)]
    others = ("/torch/", "/importlib/", "<frozen", str(Path(__file__).parents[1]))
    theirs = [(Path(file).name, line) for file, line in places if not any(each in file for each in others)]
    return f" ({theirs[-1][0]}, line {theirs[-1][1]})" if theirs else ""


def blamed_in_model(model: ModelConfig, when: str) -> AbstractContextManager[None]:
    """Does the same for a plug-in's model; errors of other kinds of models are left as they are."""
    return blamed("model", model.plugin, when) if model.plugin else nullcontext()


def blamed_in_run(run: RunConfig, when: str) -> AbstractContextManager[None]:
    """Does the same for all plug-ins of a run."""
    return blamed("recipe", run.recipe.plugin, when) if run.recipe.plugin else blamed_in_model(run.model, when)
