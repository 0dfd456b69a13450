"""Changes of a run: which settings a successor may have otherwise, and how a change is written.

A change is canonical JSON with the changed settings alone, by section, in the values of the run config's own encoding:
`{"recipe":{"inner_learning_rate":"1/200"}}`. It has one spelling, so that members who mean the same sign the same. The
successor's config is the run's with the change, the weights at its end, and where it comes from.

A change to another protocol version is agreed on in form alone: members of releases that do not speak it have to find
the same as all others. Whether it is possible is for those to judge who assent to it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec
from pydantic import ValidationError

from p2ptrain.config.node import NodeConfig
from p2ptrain.config.run import CONFIG_BYTES_MAX, PROTOCOLS, PredecessorConfig, RunConfig
from p2ptrain.config.text import config_error
from p2ptrain.errors import ConfigError, RemoteProtocolError

PREDECESSOR_BYTES = 256  # of the config's encoding, at most
CHANGE_BYTES_MAX = 1_024  # a dozen settings; a list of keys may need more, and is no change of a run
# A setting that decides what the weights are, or how they become a contribution, would leave nothing to go on from.
MAY_CHANGE = {
    "protocol",
    "recipe.outer", "recipe.k", "recipe.value_bits", "recipe.decay", "recipe.residual_share", "recipe.clip",
    "recipe.sequences_per_pass", "recipe.passes_per_step", "recipe.local_steps", "recipe.local_steps_min",
    "recipe.inner_learning_rate", "recipe.inner_beta1", "recipe.inner_beta2", "recipe.inner_weight_decay",
    "recipe.learning_rate", "recipe.momentum", "recipe.nesterov", "recipe.momentum_rounds", "recipe.schedule",
    "recipe.warmup_rounds", "recipe.rounds", "recipe.decay_rounds", "recipe.final_ratio", "recipe.weight_decay",
    "data.manifest", "data.assignment",
    "agreement.staleness_rounds_max", "agreement.overlap_rounds", "agreement.inline_bytes_max",
    "agreement.avail_seconds", "agreement.view_seconds", "agreement.view_seconds_max", "agreement.idle_round_seconds",
    "agreement.stall_seconds", "agreement.settle_seconds", "agreement.on_quorum_loss", "agreement.history_rounds",
    "admission.contributors_max", "admission.seats_max", "admission.probation_rounds", "admission.absence_rounds_max",
    "admission.leave_seconds", "eval.every_rounds",
}  # fmt: skip
ONLY_MORE = ("admission.contributors_max", "admission.seats_max")  # with fewer, those who are there would have no place
FIX = "Begin another run with `p2ptrain start`, from a checkpoint's weights if they are to stay"


def change_between(run: RunConfig, wanted: RunConfig) -> bytes:
    """Returns the change that makes a run's config another; ConfigError for a setting that no successor may change."""
    old, new = (each.model_dump(mode="json") for each in (run, wanted))
    found: dict[str, Any] = {}
    for section, values in new.items():
        if not isinstance(values, dict):
            _check_may(section, old[section], values)
            if old[section] != values:
                found[section] = values
            continue
        for key, value in values.items():
            _check_may(f"{section}.{key}", old[section].get(key), value)
            if old[section].get(key) != value:
                found.setdefault(section, {})[key] = value
    change = _encoded(found)
    if len(change) > CHANGE_BYTES_MAX:
        raise ConfigError(f"a change of {len(change):,} bytes; the limit is {CHANGE_BYTES_MAX:,}", key="--set")
    return change


def change_of(run: RunConfig, settings: Mapping[str, object]) -> bytes:
    """Returns the change by settings such as `recipe.inner_learning_rate`, with values as in a run file."""
    raw = run.model_dump()
    for name, value in settings.items():
        section, _, key = name.partition(".")
        if name == "protocol":
            raw[name] = value
            continue
        if name not in MAY_CHANGE:
            known = name in raw or (isinstance(raw.get(section), dict) and key in raw[section])
            what = "a successor cannot change it" if known else "is no setting of a run"
            raise ConfigError(what, key=name, fix=FIX if known else "`p2ptrain config schema` lists them")
        raw[section][key] = value
    try:
        return change_between(run, RunConfig.model_validate(raw))
    except ValidationError as error:
        raise config_error(error.errors(include_url=False)[0], RunConfig, NodeConfig) from error


_Value = bool | int | str | None
_CHANGE = msgspec.json.Decoder(dict[str, int | dict[str, _Value | list[int | str]]])


def check_form(run: RunConfig, change: bytes) -> None:
    """Raises RemoteProtocolError for a change that all members, of whatever release, find impossible."""
    settings = _read(change)
    protocol = settings.get("protocol", run.protocol)
    if protocol == run.protocol:
        changed(run, change)
    elif type(protocol) is not int or not run.protocol < protocol < 2**16:
        raise RemoteProtocolError("a successor has a later protocol, or the same")
    elif _encoded(settings) != change:
        raise RemoteProtocolError("the change is not in its canonical encoding")


def changed(run: RunConfig, change: bytes) -> RunConfig:
    """Returns the run's config with a change; RemoteProtocolError if it is none that its members may make."""
    found = _changed(run.canonical(), change)
    if isinstance(found, str):
        raise RemoteProtocolError(found)
    return found


def _read(change: bytes) -> dict[str, Any]:
    """Decodes a change. Its values are as simple as settings are, so that every release decodes them alike."""
    try:
        return {**_CHANGE.decode(change)}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError("the change is no table of settings") from error


@lru_cache(maxsize=1_024)
def _changed(encoded: bytes, change: bytes) -> RunConfig | str:
    """Returns the changed config, or why there is none: pydantic takes milliseconds for either."""
    run = RunConfig.from_canonical(encoded)
    try:
        raw = run.model_dump()
        for section, values in _read(change).items():
            raw[section] = {**raw[section], **values} if section != "protocol" else values
        wanted = RunConfig.model_validate(raw)
        why = "" if change_between(run, wanted) == change else "the change is not in its canonical encoding"
        if len(wanted.canonical()) + PREDECESSOR_BYTES > CONFIG_BYTES_MAX:
            why = "the successor's config would not fit a message"
    except RemoteProtocolError as error:
        return error.why
    except (KeyError, TypeError):
        return "the change is no table of settings"
    except (ValidationError, ConfigError):
        version = _read(change).get("protocol", run.protocol)
        is_spoken = version in PROTOCOLS
        why = "the change is none that a successor may have"
        return why if is_spoken else f"it uses protocol {version}, which this release does not speak"
    return why or wanted


def successor_of(run: RunConfig, change: bytes, last_round: int, head: bytes, root: bytes) -> RunConfig:
    """Returns the config of the run that follows. It names no founders: the head fixes who is there.

    head: the last manifest, which fixes everything that was agreed; root: of the weights that it begins with"""
    raw = changed(run, change).model_dump()
    raw["predecessor"] = PredecessorConfig(run=run.run_id, round=last_round, head=head.hex()).model_dump()
    raw["state"]["initial_root"] = root.hex()
    raw["admission"]["founders"] = ()
    return RunConfig.model_validate(raw)


def told(run: RunConfig, change: bytes) -> dict[str, tuple[object, object]]:
    """Returns what a change of a run means, by setting: its present value, and the next."""
    old = run.model_dump(mode="json")
    found: dict[str, tuple[object, object]] = {}
    for section, values in _read(change).items():
        if isinstance(values, dict) and isinstance(table := old.get(section), dict):
            found |= {f"{section}.{key}": (table.get(key), value) for key, value in values.items()}
        else:
            found[section] = old.get(section), values
    return found


def _encoded(settings: Mapping[str, object]) -> bytes:
    return json.dumps(settings, sort_keys=True, separators=(",", ":")).encode()


def _check_may(name: str, old: object, new: object) -> None:
    if old == new:
        return
    if name not in MAY_CHANGE:
        raise ConfigError("a successor cannot change it", key=name, fix=FIX)
    if name in ONLY_MORE and isinstance(old, int) and isinstance(new, int) and new < old:
        raise ConfigError(f"a successor can only raise it, and it is {old}", key=name, fix="Leave it as it is")
    if name == "recipe.momentum" and (old == "0") != (new == "0"):
        what = "a successor keeps the outer momentum, or goes on without one: it is part of the state"
        raise ConfigError(what, key=name, fix=FIX)
