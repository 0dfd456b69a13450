"""Scenarios: simulations as data, with a file format.

A scenario has a sentence that says what it shows, a swarm, a network, faults and expectations.
It is written as TOML and read strictly, so that a typo is an error and not a fault that never happened. Times are
virtual seconds since the start. Nodes are numbered from 0; those that join later get the next numbers. A key
for nodes takes a list (`[0, 3]`) or text: "0-10", "0-3 7", "all", or "f", the last f of the founders.
`links.line` names one of LINES, whose values hold where `links` gives none.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct
from pydantic import ValidationError

from p2ptrain.config import NodeConfig, RunConfig
from p2ptrain.config.text import config_error
from p2ptrain.core.roster import tolerated_by
from p2ptrain.errors import ConfigError
from p2ptrain.sim.keys import node_key

FILE_BYTES_MAX = 2**20  # a scenario is a page of text
NODES_MAX = 4_096  # four times as many as a run admits

Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=0, le=2**40)]
Nodes: TypeAlias = list[int] | str


# ---------------------------------------------------------------------------------------------------
# The swarm


class Slow(Struct, frozen=True, forbid_unknown_fields=True):
    """Trainers that take longer."""

    nodes: Nodes
    times: Annotated[float, Meta(gt=0)]


class Workload(Struct, frozen=True, forbid_unknown_fields=True):
    """How long a contribution takes, and how large it is."""

    seconds: Seconds = 1.0
    spread: Share = 0.1  # share of `seconds` by which a machine's pace, and each round's, may differ either way
    payload_bytes: Annotated[int, Meta(ge=1, lt=2**32)] = 40
    state_bytes: Count = 1_000_000  # what a node that catches up has to fetch
    apply_seconds: Seconds = 0.01
    audit_share: Share = 0.0  # of its training, that a node spends on audits
    slow: list[Slow] = []


class Links(Struct, frozen=True, forbid_unknown_fields=True):
    """Every link between two nodes."""

    latency_seconds: Seconds = 0.02  # one way, at least
    jitter_seconds: Seconds = 0.01  # mean of the additional delay, exponentially distributed
    bytes_per_second: Annotated[float, Meta(ge=0)] = 0.0  # of a node's uplink; 0: no limit
    loss: Share = 0.0  # share of gossip's messages; a stream resends, which takes time
    duplicate: Share = 0.0
    reorder: Share = 0.0  # share of messages that are delayed
    reorder_seconds: Seconds = 1.0  # mean


@dataclass(frozen=True, slots=True)
class Line:
    """A node's line to all others, which have the same: `links.line` of a scenario, and the benchmarks with daemons.

    Values are what one may expect of such a line, not the best that is sold; all are guesses.
    """

    down_megabits: float  # a second
    up_megabits: float
    delay_seconds: float  # one way, from any node to any other; `ping` shows twice as much
    jitter_seconds: float = 0.0  # mean of what comes on top
    loss: float = 0.0  # share of packets

    def as_links(self) -> dict[str, float]:
        """Returns keys of a scenario's `links`, where messages are lost, that a real line would send again."""
        return {
            "latency_seconds": self.delay_seconds,
            "jitter_seconds": self.jitter_seconds,
            "bytes_per_second": self.up_megabits * 125_000,
            "loss": self.loss,
        }


LINES = {
    "wifi": Line(100.0, 40.0, 0.015, 0.01, 0.005),  # a crowded one, behind a cable
    "dsl": Line(50.0, 10.0, 0.025, 0.002),
    "fibre": Line(500.0, 200.0, 0.01, 0.001),
    "lte": Line(30.0, 10.0, 0.04, 0.015, 0.002),
    "satellite": Line(50.0, 5.0, 0.3, 0.01, 0.005),  # geostationary
    "datacentre": Line(10_000.0, 10_000.0, 0.0005, 0.0001),
}


class Durability(Struct, frozen=True, forbid_unknown_fields=True):
    """How long writes take, and how much of them survives a crash."""

    fsync_seconds: Seconds = 0.002  # mean
    kept: Share = 0.5  # chance that a write in progress survives a crash
    checkpoint_rounds: Annotated[int, Meta(ge=1)] = 4  # how often the trainer's state is saved


# ---------------------------------------------------------------------------------------------------
# Faults


class Fault(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """Base of all faults."""

    at: Seconds


class Crash(Fault, frozen=True, tag="crash"):
    """SIGKILL at `at`; the process restarts at `until`, if given. `forgetful`: with an empty disk."""

    nodes: Nodes
    until: Seconds | None = None
    forgetful: bool = False


class Storm(Fault, frozen=True, tag="storm"):
    """Repeated SIGKILLs, also between one effect and the next."""

    nodes: Nodes
    until: Seconds
    every_seconds: Annotated[float, Meta(gt=0)]  # mean per node
    down_seconds: Seconds = 2.0  # mean
    at_once: Count = 1  # most nodes down at the same time


class Partition(Fault, frozen=True, tag="partition"):
    """Groups that do not hear one another. A node in none of them hears, and is heard by, everyone."""

    groups: list[Nodes]
    until: Seconds
    one_way: bool = False  # the others hear the first group, which hears nothing
    flap_seconds: Seconds = 0.0  # cut and healed in turn, each this long; 0: cut all the time


class Clog(Fault, frozen=True, tag="clog"):
    """Nothing that these nodes send arrives before `until`; then everything does at once."""

    nodes: Nodes
    until: Seconds


class Lossy(Fault, frozen=True, tag="lossy"):
    """A bad network for a while."""

    until: Seconds
    loss: Share
    duplicate: Share = 0.0
    reorder: Share = 0.0


class Lose(Fault, frozen=True, tag="lose"):
    """Gossip loses these nodes' messages of these kinds everywhere; streams get through."""

    nodes: Nodes
    until: Seconds
    messages: list[Literal["announcement", "availability", "proposal", "prevote", "precommit", "hello"]]


class Sleep(Fault, frozen=True, tag="sleep"):
    """SIGSTOP, or a closed lid: events wait until `until`, and then all arrive."""

    nodes: Nodes
    until: Seconds


class Clock(Fault, frozen=True, tag="clock"):
    """The node's clock jumps, and runs at a different rate from then on."""

    nodes: Nodes
    jump_seconds: float = 0.0
    rate: Annotated[float, Meta(gt=0, le=100)] = 1.0


class Stall(Fault, frozen=True, tag="stall"):
    """Training that is running at `at`, or begins before `until`, does not end before `until`."""

    nodes: Nodes
    until: Seconds


class Flip(Fault, frozen=True, tag="flip"):
    """A bit flips in the device: the state is wrong from then on, unnoticed."""

    nodes: Nodes


class SlowDisk(Fault, frozen=True, tag="slow disk"):
    """Writes are slow for a while."""

    nodes: Nodes
    until: Seconds
    fsync_seconds: Seconds


class Newcomers(Fault, frozen=True, tag="join"):
    """Newcomers join, each with a ticket: none, a new invitation, the one that the last newcomer used, what that one
    sent, an expired one, or one that they signed themselves."""

    count: Annotated[int, Meta(ge=1, le=NODES_MAX)] = 1
    ticket: Literal["none", "new", "spent", "stolen", "expired", "false"] = "none"


class Departure(Fault, frozen=True, tag="leave"):
    """A user's Ctrl-C."""

    nodes: Nodes


class Lie(Fault, frozen=True, tag="liar"):
    """These nodes are Byzantine: `how` is one of KINDS (liars.py). They never become honest again."""

    nodes: Nodes
    how: str
    until: Seconds | None = None


AnyFault: TypeAlias = (
    Crash | Storm | Partition | Clog | Lossy | Lose | Sleep | Clock | Stall | Flip | SlowDisk | Newcomers | Departure
    | Lie
)  # fmt: skip


# ---------------------------------------------------------------------------------------------------
# Expectations


class Pause(Struct, frozen=True, forbid_unknown_fields=True):
    """These nodes apply nothing in this period."""

    nodes: Nodes
    since: Seconds
    until: Seconds


class ExpectedRounds(Struct, frozen=True, forbid_unknown_fields=True):
    """Each of these nodes applies at least this many rounds in this period."""

    nodes: Nodes
    since: Seconds
    until: Seconds
    rounds: Count


class Expect(Struct, frozen=True, forbid_unknown_fields=True):
    """Expectations of the outcome, besides the checkers' invariants. Absent: anything goes."""

    # Rounds a minute, relative to the same swarm with nothing slow and no fault, in which nodes wait for each round.
    rate_share_min: Annotated[float, Meta(ge=0, le=10)] | None = None
    taken_share_min: Share | None = None  # contributions taken, out of one per member and round
    taken_from: dict[str, Count] = {}  # by node: minimum of contributions taken from it
    counted_max: dict[str, Count] = {}  # by node: maximum of those that were not only taken, but applied
    paused: list[Pause] = []
    progress: list[ExpectedRounds] = []
    resumed_seconds_max: Seconds | None = None  # from the end of the faults until everyone has applied another round
    regroups_min: Count | None = None
    regroups_max: Count | None = None
    banned: Nodes | None = None  # exactly these
    members: Nodes | None = None  # exactly these, in the end
    left: Nodes | None = None  # these have left, and are in nobody's roster
    kept: Nodes | None = None  # the final history has all that these have applied: their branch has won
    views_max: Count | None = None  # of any round
    views_min: Count | None = None  # of the longest round
    empty_rounds_max: Count | None = None  # manifests that took nothing
    stalls_max: Count | None = None
    stalls_min: Count | None = None
    catch_ups_min: Count | None = None  # states that were fetched from others
    mismatches_min: Count | None = None  # nodes that found that their own root differs
    mismatches_max: Count | None = None
    returned_max: Count | None = None  # contributions that no round could take any more
    events_max: Annotated[float, Meta(gt=0)] | None = None  # ticks per node and round


class Scenario(Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """A simulation without its seed."""

    sentence: Annotated[str, Meta(min_length=1, max_length=400)]  # says what the scenario shows
    nodes: Annotated[int, Meta(ge=1, le=NODES_MAX)]
    rounds: Annotated[int, Meta(ge=1)]  # it ends when every running node has applied this many
    seconds: Annotated[float, Meta(gt=0, le=1e9)] = 3_600.0  # the time limit
    rounds_after: Count = 5  # everyone must apply this many after the faults have ended
    faults_end: Seconds | None = None  # default: the end of the last fault
    training: Workload = Workload()
    links: Links = Links()
    disk: Durability = Durability()
    # With local steps, `training.seconds` are for all of them.
    recipe: dict[str, Any] = msgspec.field(default_factory=lambda: {"name": "distro"})
    data: dict[str, Any] = {}
    agreement: dict[str, Any] = {}
    admission: dict[str, Any] = {}
    admission_keys: Nodes = []  # nodes whose keys are in `admission.keys`: those that may invite, or the allowlist
    fault: list[AnyFault] = []
    expect: Expect = Expect()

    def run(self, seed: int) -> RunConfig:
        """The run's config. Nodes have different keys with each seed."""
        keys = [node_key(seed, index).hex() for index in self.pick(self.admission_keys)]
        admission = {**self.admission, "keys": keys} if keys else self.admission
        sections = {"recipe": self.recipe, "data": self.data, "agreement": self.agreement, "admission": admission}
        return RunConfig.model_validate({"name": "simulated", **sections})

    @cached_property
    def end_of_faults(self) -> float:
        """When the last fault is over: the network is as in `links`, and every node that comes back is running."""
        if self.faults_end is not None:
            return self.faults_end
        return max((getattr(fault, "until", None) or fault.at for fault in self.fault), default=0.0)

    @property
    def size(self) -> int:
        """The number of nodes, newcomers included."""
        return self.nodes + sum(fault.count for fault in self.fault if isinstance(fault, Newcomers))

    def _no_node(self, node: int) -> ConfigError:
        return ConfigError(f"there is no node {node}", key="nodes", fix=f"Name nodes from 0 to {self.size - 1}")

    def pick(self, nodes: Nodes) -> list[int]:
        """The indices of the nodes that a key names, sorted."""
        if isinstance(nodes, list):
            return sorted(set(nodes))
        found: set[int] = set()
        for word in nodes.split():
            numbers = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", word)  # longer numbers name no node
            if word == "all":
                found.update(range(self.nodes))
            elif word == "f":
                found.update(range(self.nodes - tolerated_by(self.nodes), self.nodes))
            elif numbers and int(numbers[1]) <= int(numbers[2] or numbers[1]):
                first, last = int(numbers[1]), int(numbers[2] or numbers[1])
                if last >= self.size:  # checked before a range of a billion is expanded
                    raise self._no_node(last)
                found.update(range(first, last + 1))
            else:
                shown = word if len(word) <= 40 else f"{word[:40]}..."
                raise ConfigError(f"{shown!r} names no nodes", key="nodes", fix='Write numbers, "0-3", "all" or "f"')
        return sorted(found)


# ---------------------------------------------------------------------------------------------------
# Files


def load_scenario(path: Path, nodes: int | None = None) -> Scenario:
    """Reads a scenario from a file, perhaps with a different number of nodes."""
    source = str(path)
    try:
        text = path.read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"cannot be read: {reason}", source=source, fix="Check the name") from error
    if len(text) > FILE_BYTES_MAX:
        raise ConfigError(f"larger than {FILE_BYTES_MAX:,} bytes", source=source, fix="Check that it is a scenario")
    try:
        table = tomllib.loads(text.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, ValueError, RecursionError) as error:
        raise ConfigError(f"not TOML: {error}", source=source, fix="Correct the file there") from error
    return scenario_of(table if nodes is None else {**table, "nodes": nodes}, source)


def scenario_of(table: Mapping[str, Any], source: str = "") -> Scenario:
    """Makes a scenario from the table in a file."""
    try:
        scenario = msgspec.convert(_with_line(table, source), Scenario)
    except msgspec.ValidationError as error:
        raise _mistake(str(error), source) from error
    try:
        _check_nodes(scenario)
        scenario.run(0)
    except ValidationError as error:
        raise config_error(error.errors(include_url=False)[0], RunConfig, NodeConfig, source) from error
    except ConfigError as error:
        raise ConfigError(error.problem, source=source, key=error.key, fix=error.fix) from error
    return scenario


def _with_line(table: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """Replaces `links.line` by that line's values; keys beside it go first."""
    links = table.get("links")
    if not isinstance(links, dict) or "line" not in links:
        return table
    own = dict(links)
    name = own.pop("line")
    if not isinstance(name, str) or name not in LINES:
        raise ConfigError(f"no line is {name!r}", source=source, key="links.line", fix=f"Choose {', '.join(LINES)}")
    return {**table, "links": LINES[name].as_links() | own}


def _check_nodes(scenario: Scenario) -> None:
    """Raises ConfigError if a key names a node that never exists, or a fault ends before it begins."""
    expect = scenario.expect
    places: list[tuple[str, Nodes]] = [
        (f"training.slow[{at}]", slow.nodes) for at, slow in enumerate(scenario.training.slow)
    ]
    places.append(("admission_keys", scenario.admission_keys))
    for at, fault in enumerate(scenario.fault):
        key = f"fault[{at}]"
        until = getattr(fault, "until", None)
        if until is not None and until < fault.at:
            raise ConfigError(f"ends at {until}, before it begins", key=f"{key}.until", fix=f"Write {fault.at} or more")
        places += [(f"{key}.nodes", nodes) for nodes in [getattr(fault, "nodes", None)] if nodes is not None]
        places += [(f"{key}.groups", nodes) for nodes in getattr(fault, "groups", [])]
    places += [
        (f"expect.{name}", nodes) for name in ("banned", "members", "left", "kept") if (nodes := getattr(expect, name))
    ]
    places += [("expect.paused", pause.nodes) for pause in expect.paused]
    places += [("expect.progress", progress.nodes) for progress in expect.progress]
    for name in expect.taken_from:
        if not re.fullmatch("[0-9]+", name):
            raise ConfigError("is not a node's number", key=f"expect.taken_from.{name}", fix="Write such as 3 = 10")
        places.append((f"expect.taken_from.{name}", name))
    for key, nodes in places:
        try:
            beyond = [node for node in scenario.pick(nodes) if not 0 <= node < scenario.size]
        except ConfigError as error:
            raise ConfigError(error.problem, key=key, fix=error.fix) from error
        if beyond:
            raise ConfigError(f"there is no node {beyond[0]}", key=key, fix=f"Name nodes from 0 to {scenario.size - 1}")


def _mistake(text: str, source: str) -> ConfigError:
    """Turns msgspec's message into ours: "Object contains unknown field `x` - at `$.links`"."""
    what, _, place = text.partition(" - at `$")
    key, fix = place.rstrip("`").lstrip("."), "Compare with the files in scenarios/"
    return ConfigError(what[:1].lower() + what[1:], source=source, key=key, fix=fix)


def to_toml(scenario: Scenario) -> str:
    """Returns the scenario as TOML that reads back as the same scenario; defaults are left out."""
    lines: list[str] = []
    _write_table(_plain(scenario), "", lines)
    return "\n".join(lines).strip() + "\n"


def _plain(struct: Struct) -> dict[str, Any]:
    """Returns the values that differ from the defaults, as tables."""
    found: dict[str, Any] = {}
    tag = struct.__struct_config__.tag
    if tag is not None:
        found["kind"] = tag
    for field in msgspec.structs.fields(struct):
        value = getattr(struct, field.name)
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        if value is None or value == default:
            continue
        if isinstance(value, Struct):
            value = _plain(value)
        elif isinstance(value, list) and value and isinstance(value[0], Struct):
            value = [_plain(each) for each in value]
        found[field.name] = value
    return found


def _write_table(table: dict[str, Any], prefix: str, lines: list[str]) -> None:
    def is_table(value: Any) -> bool:
        return isinstance(value, dict) or (isinstance(value, list) and bool(value) and isinstance(value[0], dict))

    for key, value in table.items():
        if not is_table(value):
            name = key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else msgspec.json.encode(key).decode()
            lines.append(f"{name} = {msgspec.json.encode(value).decode()}")
    for key, value in table.items():
        if isinstance(value, dict):
            lines += ["", f"[{prefix}{key}]"]
            _write_table(value, f"{prefix}{key}.", lines)
        elif is_table(value):
            for each in value:
                lines += ["", f"[[{prefix}{key}]]"]
                _write_table(each, f"{prefix}{key}.", lines)
