"""Scenarios: simulations as data, with a file format.

A scenario has a sentence that says what it shows, a swarm, a network, faults and expectations.
It is written as TOML and read strictly, so that a typo is an error and not a fault that never happened. Times are
virtual seconds since the start. Nodes are numbered from 0; those that join later get the next numbers. A key
for nodes takes a list (`[0, 3]`) or text: "0-10", "0-3 7", "all", or "f", the last f of the founders.
`links.line` names one of LINES, whose values hold where `links` gives none."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct
from pydantic import ValidationError

from p2ptrain.config import PROTOCOL_VERSION, NodeConfig, RunConfig, read_table
from p2ptrain.config.text import config_error, toml_of
from p2ptrain.core.roster import tolerated_by
from p2ptrain.errors import ConfigError
from p2ptrain.sim.keys import node_key

NODES_MAX = 4_096  # four times as many as a run admits
NAMING = ("banned", "members", "left", "ended", "kept")  # expectations of which each names nodes

Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=0, le=2**40)]
Nodes: TypeAlias = list[int] | str


# -- The swarm --------------------------------------------------------------------------------------


class Slow(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    nodes: Nodes
    times: Annotated[float, Meta(gt=0)]


class Workload(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How long a contribution takes, and how large it is."""

    seconds: Seconds = 1.0
    spread: Share = 0.1  # share of `seconds` by which a machine's pace, and each round's, may differ either way
    payload_bytes: Annotated[int, Meta(ge=1, lt=2**32)] = 40
    state_bytes: Count = 1_000_000  # what a node that catches up has to fetch
    apply_seconds: Seconds = 0.01
    audit_share: Share = 0.0  # of its training, that a node spends on audits
    slow: list[Slow] = []


class Links(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
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

    Values are what one may expect of such a line, not the best that is sold; all are guesses."""

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


class Durability(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How long writes take, and how much of them survives a crash."""

    fsync_seconds: Seconds = 0.002  # mean
    kept: Share = 0.5  # chance that a write in progress survives a crash
    checkpoint_rounds: Annotated[int, Meta(ge=1)] = 4  # how often the trainer's state is saved


# -- Faults -----------------------------------------------------------------------------------------


class Fault(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="kind"):
    at: Seconds


class NodeFault(Fault, frozen=True):
    nodes: Nodes


class PassingFault(NodeFault, frozen=True):
    until: Seconds


class Crash(NodeFault, frozen=True, tag="crash"):
    """SIGKILL at `at`; the process restarts at `until`, if given. `forgetful`: with an empty disk."""

    until: Seconds | None = None
    forgetful: bool = False


class Storm(PassingFault, frozen=True, tag="storm"):
    """Repeated SIGKILLs, also between one effect and the next."""

    every_seconds: Annotated[float, Meta(gt=0)]  # mean per node
    down_seconds: Seconds = 2.0  # mean
    at_once: Count = 1  # most nodes down at the same time


class Partition(Fault, frozen=True, tag="partition"):
    """Groups that do not hear one another. A node in none of them hears, and is heard by, everyone."""

    groups: list[Nodes]
    until: Seconds
    one_way: bool = False  # the others hear the first group, which hears nothing
    flap_seconds: Seconds = 0.0  # cut and healed in turn, each this long; 0: cut all the time


class Clog(PassingFault, frozen=True, tag="clog"):
    """Nothing that these nodes send arrives before `until`; then everything does at once."""


class Lossy(Fault, frozen=True, tag="lossy"):
    until: Seconds
    loss: Share
    duplicate: Share = 0.0
    reorder: Share = 0.0


class Lose(PassingFault, frozen=True, tag="lose"):
    """Gossip loses these nodes' messages of these kinds everywhere; streams get through."""

    messages: list[Literal["announcement", "availability", "proposal", "prevote", "precommit", "hello"]]


class Sleep(PassingFault, frozen=True, tag="sleep"):
    """SIGSTOP, or a closed lid: events wait until `until`, and then all arrive."""


class Clock(NodeFault, frozen=True, tag="clock"):
    """The node's clock jumps, and runs at a different rate from then on."""

    jump_seconds: float = 0.0
    rate: Annotated[float, Meta(gt=0, le=100)] = 1.0


class Stall(PassingFault, frozen=True, tag="stall"):
    """Training that is running at `at`, or begins before `until`, does not end before `until`."""


class Flip(NodeFault, frozen=True, tag="flip"):
    """A bit flips in the device: the state is wrong from then on, unnoticed."""


class SlowDisk(PassingFault, frozen=True, tag="slow disk"):
    fsync_seconds: Seconds


class Newcomers(Fault, frozen=True, tag="join"):
    """Newcomers join, each with a ticket: none, a new invitation, the one that the last newcomer used, what that one
    sent, an expired one, or one that they signed themselves."""

    count: Annotated[int, Meta(ge=1, le=NODES_MAX)] = 1
    ticket: Literal["none", "new", "spent", "stolen", "expired", "false"] = "none"


class Departure(NodeFault, frozen=True, tag="leave"):
    """A user's Ctrl-C."""


class OwnersMove(NodeFault, frozen=True, tag="move"):
    """These nodes' owners move that the run end, a drawn number of rounds later, and go on as another; `back`: from the
    newest certified weights."""

    rounds_ahead_max: Annotated[int, Meta(ge=1, le=2**16)] = 20  # besides the notice that is due
    back: bool = False


class Lie(NodeFault, frozen=True, tag="liar"):
    """These nodes are Byzantine: `how` is one of KINDS (liars.py). They never become honest again."""

    how: str
    until: Seconds | None = None


AnyFault: TypeAlias = (
    Crash | Storm | Partition | Clog | Lossy | Lose | Sleep | Clock | Stall | Flip | SlowDisk | Newcomers | Departure
    | OwnersMove | Lie
)  # fmt: skip


# -- Expectations -----------------------------------------------------------------------------------


class Pause(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """These nodes apply nothing in this period."""

    nodes: Nodes
    since: Seconds
    until: Seconds


class ExpectedRounds(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Each of these nodes applies at least this many rounds in this period."""

    nodes: Nodes
    since: Seconds
    until: Seconds
    rounds: Count


class Expect(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
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
    ended: Nodes | None = None  # for exactly these of the honest, the run is over
    kept: Nodes | None = None  # the final history has all that these have applied: their branch has won
    views_max: Count | None = None  # of any round
    views_min: Count | None = None  # of the longest round
    empty_rounds_max: Count | None = None  # manifests that took nothing
    stalls_max: Count | None = None
    catch_ups_min: Count | None = None  # states that were fetched from others
    mismatches_min: Count | None = None  # nodes that found that their own root differs
    mismatches_max: Count | None = None
    events_max: Annotated[float, Meta(gt=0)] | None = None  # ticks per node and round


class Scenario(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, dict=True):
    sentence: Annotated[str, Meta(min_length=1, max_length=400)]  # says what the scenario shows
    nodes: Annotated[int, Meta(ge=1, le=NODES_MAX)]
    rounds: Annotated[int, Meta(ge=1)]  # it ends when every running node has applied this many
    seconds: Annotated[float, Meta(gt=0, le=1e9)] = 3_600.0  # the time limit
    rounds_after: Count = 5  # everyone must apply this many after the faults have ended
    faults_end: Seconds | None = None  # default: the end of the last fault
    training: Workload = Workload()
    links: Links = Links()
    disk: Durability = Durability()
    protocol: int = PROTOCOL_VERSION
    # With local steps, `training.seconds` are for all of them.
    recipe: dict[str, Any] = msgspec.field(default_factory=lambda: {"name": "distro"})
    data: dict[str, Any] = {}
    agreement: dict[str, Any] = {}
    admission: dict[str, Any] = {}
    admission_keys: Nodes = []  # nodes whose keys are in `admission.keys`: those that may invite, or the allowlist
    refusing: Nodes = []  # their owners assent to no motion
    fault: list[AnyFault] = []
    expect: Expect = Expect()

    def run(self, seed: int) -> RunConfig:
        """The run's config. Nodes have different keys with each seed."""
        keys = [node_key(seed, index).hex() for index in self.pick(self.admission_keys)]
        admission = {**self.admission, "keys": keys} if keys else self.admission
        sections = {"recipe": self.recipe, "data": self.data, "agreement": self.agreement, "admission": admission}
        return RunConfig.model_validate({"name": "simulated", "protocol": self.protocol, **sections})

    @cached_property
    def end_of_faults(self) -> float:
        """When the last fault is over: the network is as in `links`, and every node that comes back is running."""
        if self.faults_end is not None:
            return self.faults_end
        return max((getattr(fault, "until", None) or fault.at for fault in self.fault), default=0.0)

    @property
    def size(self) -> int:
        return self.nodes + sum(fault.count for fault in self.fault if isinstance(fault, Newcomers))

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
                    fix = f"Name nodes from 0 to {self.size - 1}"
                    raise ConfigError(f"there is no node {last}", key="nodes", fix=fix)
                found.update(range(first, last + 1))
            else:
                shown = word if len(word) <= 40 else f"{word[:40]}..."
                raise ConfigError(f"{shown!r} names no nodes", key="nodes", fix='Write numbers, "0-3", "all" or "f"')
        return sorted(found)


# -- Files ------------------------------------------------------------------------------------------


def load_scenario(path: Path, nodes: int | None = None) -> Scenario:
    table = read_table(path)
    return scenario_of(table if nodes is None else {**table, "nodes": nodes}, str(path))


def scenario_of(table: Mapping[str, Any], source: str = "") -> Scenario:
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
    places += [("admission_keys", scenario.admission_keys), ("refusing", scenario.refusing)]
    for at, fault in enumerate(scenario.fault):
        key = f"fault[{at}]"
        until = getattr(fault, "until", None)
        if until is not None and until < fault.at:
            raise ConfigError(f"ends at {until}, before it begins", key=f"{key}.until", fix=f"Write {fault.at} or more")
        places += [(f"{key}.nodes", nodes) for nodes in [getattr(fault, "nodes", None)] if nodes is not None]
        places += [(f"{key}.groups", nodes) for nodes in getattr(fault, "groups", [])]
    places += [(f"expect.{name}", nodes) for name in NAMING if (nodes := getattr(expect, name))]
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
    lines = []
    for name, value in msgspec.to_builtins(scenario).items():
        is_long = isinstance(value, list) and isinstance(value[0], dict)  # a table a line
        written = "".join(f"\n    {toml_of(each)}," for each in value) if is_long else ""
        lines.append(f"{name} = [{written}\n]\n" if is_long else f"{name} = {toml_of(value)}\n")
    return "".join(lines)
