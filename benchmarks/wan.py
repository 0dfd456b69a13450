"""Real daemons on a line between homes: what they have learned after some minutes, and what that cost in bytes.

    OMP_NUM_THREADS=1 python benchmarks/wan.py [--nodes 4] [--minutes 2 5]
        [--line dsl | --rate 20 [5 ...] --delay 100 --loss 0] [--slow PERCENT] [--regions N [--world FILE]]
        [--run FILE] [--keep] [--json FILE]

Each node is `p2ptrain start` or `p2ptrain join` on a host of its own (relay.py), which takes root and /dev/net/tun.
Time counts from the start of the first process, so starting and joining are part of it. After each of `--minutes` the
first node saves its state, which all have; its loss on held-out text is computed when the last minute is over. Bytes
are all that a host sends and receives. The shares of the time in which a node trains, and of the rounds that took its
contribution, count from when all were members.

--slow: per cent of the time that the last node may train (`p2ptrain limit`), from when all are members. The last line
compares the tokens of all nodes with those that each would have trained alone.
--run: a run's config; without it 1.0M parameters on the text that every Python carries, with recipe `local`.
--world: the world's run; each of the `--regions` is then a run of its own, `--run`, whose [world] has `run = "WORLD"`
for the id. A node on another host of the first region begins the world's run, and then pauses; the loss is that of the
world's weights, and in brackets of the first region's.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np
import torch
from daemon_logs import life_in, report_phases
from daemons import START_SECONDS, Swarm, swarm_in
from relay import Hosts, add_line_options, address, hosts_on, lines_of, why_impossible
from torch import Tensor

from p2ptrain.config import NodeConfig, RunConfig, load_run_config
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.demo import DemoNode
from p2ptrain.models.built_in import Transformer
from p2ptrain.models.export import load_model
from p2ptrain.node.control import ask
from p2ptrain.node.home import Home
from p2ptrain.node.saved import find_model, though_pruned

RUN = """\
name = "wan"
[model]
preset = "1m"
[recipe]
name = "local"
inner = "muon"
local_steps = 10
k = 256
inner_learning_rate = 0.01
sequences_per_pass = 4
warmup_rounds = 3
[admission]
probation_rounds = 1
"""
PORT = 4001
LOOK_SECONDS = 1.0
EVALUATED = 128  # held-out sequences
SETTLED_ROUNDS = 3  # after a node was slowed down, before tokens are counted
LATE_SECONDS = 0.005  # beyond this the relay, and not the line, held packets up


@dataclass(frozen=True)
class Progress:
    """How far a node is at a moment."""

    at: float
    tokens: int
    training_seconds: float


def over_alone(before: Sequence[Progress], after: Sequence[Progress], allowed: Sequence[float]) -> float | None:
    """Returns the tokens of all nodes over those they would have trained alone; None if one has trained nothing.

    allowed: share of the time in which each may train
    """
    tokens = alone = 0.0
    for then, now, share in zip(before, after, allowed, strict=True):
        if now.training_seconds <= then.training_seconds:
            return None
        trained = now.tokens - then.tokens
        tokens += trained
        alone += trained / (now.training_seconds - then.training_seconds) * (now.at - then.at) * share
    return tokens / alone if alone else None


class Homes(Swarm):
    """A swarm with a host for each node."""

    def __init__(self, directory: Path, run: str, hosts: Hosts) -> None:
        self.hosts = hosts
        super().__init__(directory, run, len(hosts.namespaces))
        self.trained: dict[str, list[tuple[float, float]]] = {}  # by node: when its time of training grew, and to what

    def make(self, arguments: list[str]) -> DemoNode:
        node, place = super().make(arguments), self.named - 1
        node.listen, node.prefix = f"/ip4/{address(place)}/tcp/{PORT}", tuple(self.hosts.prefix(place))
        return node

    def saved(self) -> list[tuple[Path, int]]:
        """Has models saved; returns in which directories, and the rounds that they are of."""
        return [(node.directory, ask(node.directory, {"do": "checkpoint"})["round"]) for node in self.nodes[:1]]

    def look(self) -> None:
        super().look()
        for node in self.nodes:
            told, seconds = self.trained.setdefault(node.name, []), node.status.get("training_seconds", 0.0)
            if not told or told[-1][1] != seconds:
                told.append((monotonic(), seconds))

    def progress(self) -> list[Progress]:
        """Returns how far each node is; nothing if one did not answer."""
        found = [node.status for node in self.nodes]
        if not all(found):
            return []
        return [Progress(monotonic(), each["tokens"], each["training_seconds"]) for each in found]

    def training_share(self, node: DemoNode, since: float) -> float | None:
        """Returns the share of time in which a node trained; None if no two trainings ended.

        It is the slope of a line through the ends of all trainings: each is seen up to a second late.
        """
        told = [each for each in self.trained[node.name] if each[0] >= since]
        return statistics.linear_regression(*zip(*told, strict=True)).slope if len(told) > 1 else None


class Regions(Homes):
    """A swarm for each region, and a node on a host of its own that began the world's run."""

    def __init__(self, directory: Path, run: str, world: str, hosts: Hosts, regions: int) -> None:
        super().__init__(directory, world, hosts)  # the node of the world's run is on the first host
        self.text, self.regions, self.size = run, regions, self.size - 1
        self.world, self.nodes = self.nodes[0], []

    def begin(self) -> None:
        self.world.start()
        self.until(lambda: bool(self.world.status.get("addresses")), START_SECONDS)
        ask(self.world.directory, {"do": "pause"})
        reached = self.world.status["addresses"][0]
        run = self.directory / "region.toml"
        run.write_text(self.text.replace("WORLD", self.world.status["run_id"]))
        os.environ["P2PTRAIN_REGION__BOOTSTRAP"] = reached
        for place in range(self.size):
            if place == self.regions:
                self.until(lambda: all(node.status.get("addresses") for node in self.nodes), START_SECONDS)
            arguments = ["start", str(run)]
            if place >= self.regions:
                first = self.nodes[place % self.regions]
                arguments = ["join", "--bootstrap", str(first.status["addresses"][0])]
            self.nodes.append(self.make(arguments))
            self.nodes[-1].start()

    def is_whole(self) -> bool:
        found = [node.status for node in self.nodes]
        are_members = all(len(each.get("roster", ())) == self.size // self.regions for each in found)
        return are_members and len(self.world.status.get("roster", ())) == self.size + 1

    def look(self) -> None:
        super().look()
        self.world.look()
        self.world.assert_alive()

    def saved(self) -> list[tuple[Path, int]]:
        both = (self.world, self.nodes[0])
        return [(node.directory, ask(node.directory, {"do": "checkpoint"})["round"]) for node in both]

    def stop(self) -> None:
        trained, self.nodes = self.nodes, [*self.nodes, self.world]
        super().stop()
        self.nodes = trained


def held_out_loss(model: Transformer, dataset: TokenDataset, length: int) -> float:
    """Returns the mean loss on held-out text, in nats a token."""
    count, total = min(EVALUATED, dataset.held_out_sequences(length)), 0.0
    with torch.no_grad():
        for positions in np.array_split(np.arange(count), -(-count // 16)):
            batch: Tensor = torch.from_numpy(dataset.held_out_batch(positions, length))
            total += float(model.loss(batch)) * len(positions)
    return total / count


def measure(swarm: Homes, minutes: Sequence[float], slow: int = 100) -> dict[str, Any]:
    """Trains, and returns what there is to tell after each of the minutes; slow: per cent of the time in which the last
    node may train."""
    began = monotonic()
    whole: tuple[float, int, dict[str, Any]] | None = None  # when all were members, the round, what hosts had sent
    taken: list[int] = []  # contributions of each node until then
    swarm.begin()
    marks, models = [], []
    allowed, settled = [1.0] * (swarm.size - 1) + [slow / 100], 0
    before: list[Progress] = []
    for minute in sorted(minutes):
        while monotonic() < began + 60 * minute:
            sleep(LOOK_SECONDS)
            swarm.look()
            if whole is None and swarm.is_whole():
                whole = monotonic(), swarm.round, traffic(swarm.hosts)
                taken = contributions(swarm)
                if slow < 100:
                    ask(swarm.nodes[-1].directory, {"do": "limit", "percent": slow})
                settled = swarm.round + SETTLED_ROUNDS
            if whole is not None and not before and swarm.round >= settled:
                before = swarm.progress()
        found_models = []
        for directory, number in swarm.saved():
            config = NodeConfig.model_validate({"storage": {"directory": str(directory)}})
            saved = though_pruned(lambda config=config, number=number: find_model(Home(config), number=number))  # type: ignore[misc]
            found_models.append(load_model(saved.weights, torch.device("cpu")))
        models.append(found_models)
        marks.append({"minutes": minute, "seconds": monotonic() - began, "round": number} | traffic(swarm.hosts))
        print(f"{minute:g} minutes: round {number}", flush=True)
    swarm.look()
    after = swarm.progress()
    relay = swarm.hosts.counts()
    statuses, taken_after, last = [node.status for node in swarm.nodes], contributions(swarm), swarm.round
    swarm.stop()
    dataset = TokenDataset.open(Home(config).dataset(saved.run.data.manifest), saved.run.data.manifest)
    for mark, model in zip(marks, models, strict=True):
        length = saved.run.model.sequence_length
        mark["loss"], *inside = [held_out_loss(each, dataset, length) for each in model]
        mark["region_loss"] = inside[0] if inside else None
    found: dict[str, Any] = {
        "system": "p2ptrain",
        "parameters": sum(each.numel() for each in models[0][0].parameters()),
        "recipe": saved.run.recipe.model_dump(mode="json"),
        "marks": marks,
        "rounds": [status["applied_round"] for status in statuses],
        "payload_bytes": statuses[0]["payload_bytes"],
        "tokens": [status["tokens"] for status in statuses],
        "whole_seconds": None,  # from the start until all were members
        "slow_percent": slow,
        "tokens_over_alone": over_alone(before, after, allowed) if before and after else None,
        "contributions": taken_after,
        "k": [status["k"] for status in statuses],  # of each node's last contribution
        "taken_shares": None,  # of the rounds since all were members
        "training_shares": None,
        "received_a_round": None,  # by a node on average, since all were members
        "round_seconds": None,
        "rounds_since_whole": 0,
        "bytes_until_whole": None,
    }
    if whole is not None:
        at, since, until = whole
        shares = [swarm.training_share(node, at) for node in swarm.nodes]
        found |= {"whole_seconds": at - began, "training_shares": shares, "bytes_until_whole": until}
        found["taken_shares"] = [
            (now - then) / max(1, last - since) for then, now in zip(taken, taken_after, strict=True)
        ]
        rounds = found["rounds_since_whole"] = marks[-1]["round"] - since
        if rounds > 0:
            received = statistics.mean(marks[-1]["received"]) - statistics.mean(until["received"])
            found |= {
                "received_a_round": received / rounds,
                "round_seconds": (began + marks[-1]["seconds"] - at) / rounds,
            }
        if last > since + 2:
            lives = [life_in(node.directory) for node in swarm.nodes]
            found["phases"] = report_phases(lives, since + 2, last)
    return found | {"relay": relay}


def contributions(swarm: Homes) -> list[int]:
    """Returns how many contributions of each node were taken."""
    return [node.status["counters"].get("contributions taken", 0) for node in swarm.nodes]


def traffic(hosts: Hosts) -> dict[str, Any]:
    """Returns all bytes that the hosts have sent and received."""
    counts = hosts.counts()["hosts"]
    return {name: [each[f"{name}_bytes"] for each in counts] for name in ("sent", "received", "far")}


def load_run(path: Path | None) -> tuple[str, RunConfig]:
    """Returns the run's text and its config."""
    if path is None:
        with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
            file.write(RUN)
            file.flush()
            return RUN, load_run_config(Path(file.name))
    return path.read_text(), load_run_config(path)


def tell(found: dict[str, Any]) -> None:
    line = found["lines"][0]  # they differ in rates alone
    rates = ", ".join(f"{each['down_megabits']:g} and {each['up_megabits']:g}" for each in found["lines"])
    print(
        f"{found['system']}, {found['nodes']} nodes, {rates} Mbit/s, "
        f"{1_000 * line['delay_seconds']:g} ms, {line['loss']:.1%} of packets lost"
    )
    print(" minutes   held-out loss   MB sent by a node (the most)   received")
    for mark in found["marks"]:
        sent, received = mark["sent"], mark["received"]
        print(
            f"{mark['minutes']:8g} {_losses(mark):>15} {statistics.mean(sent) / 1e6:12.2f} ({max(sent) / 1e6:.2f})"
            f" {statistics.mean(received) / 1e6:22.2f}"
        )
    relay, late = found["relay"], ""
    if relay["mean_late_seconds"] > LATE_SECONDS:
        late = "; the processor held packets up, not only the line"
    print(f"packets arrived {1e3 * relay['mean_late_seconds']:.1f} ms late on average{late}")


def _losses(mark: dict[str, Any]) -> str:
    inside = mark.get("region_loss")
    return f"{mark['loss']:.3f}" if inside is None else f"{mark['loss']:.3f} ({inside:.3f})"


def tell_more(found: dict[str, Any]) -> None:
    if found["whole_seconds"] is None:
        print("some nodes never became members")
        return
    until, shares = found["bytes_until_whole"]["sent"], found["training_shares"]
    print(f"all were members after {found['whole_seconds']:.0f} s and {statistics.mean(until) / 1e6:.2f} MB each")
    told = ", ".join("unknown" if each is None else f"{each:.1%}" for each in shares)
    print(f"rounds {min(found['rounds'])}; share of time in which a node trained since: {told}")
    told = ", ".join(f"{share:.2f} with k = {k}" for share, k in zip(found["taken_shares"], found["k"], strict=True))
    print(f"share of rounds that took a node's contribution: {told}")
    if (received := found["received_a_round"]) is not None:
        beside = received - (found["nodes"] - 1) * found["payload_bytes"]
        told = f"{received:,.0f} bytes received by a node, {max(0.0, beside):,.0f} or more besides payloads"
        print(f"a round of {found['round_seconds']:.1f} s: {told}")
    if found.get("regions") and (rounds := found["rounds_since_whole"]):
        joining, far = (sum(each["far"]) / 1e6 for each in (found["bytes_until_whole"], found["marks"][-1]))
        print(
            f"MB between the regions: {joining:.2f} until all were members, then {(far - joining) / rounds:.2f} a round"
            f" and {(far - joining) / (rounds * found['round_seconds']) * 60:.2f} a minute"
        )
    print(f"tokens trained on: {sum(found['tokens']):,}")
    if (share := found["tokens_over_alone"]) is not None:
        slow = f", the last at {found['slow_percent']} % of its time" if found["slow_percent"] < 100 else ""
        taken = ", ".join(map(str, found["contributions"]))
        print(f"tokens over those that each would train alone{slow}: {share:.3f}; contributions taken {taken}")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds what the comparison has, too."""
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--minutes", type=float, nargs="+", default=[2.0, 5.0])
    parser.add_argument("--run", type=Path, metavar="FILE")
    parser.add_argument("--keep", action="store_true", help="keep the nodes' directories and logs")
    parser.add_argument("--json", type=Path)
    add_line_options(parser)


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parses the options, and exits where there can be no hosts."""
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no host outlives us
    if why := why_impossible():
        sys.exit(f"no hosts here: {why}")
    return chosen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--slow", type=int, default=100, metavar="PERCENT", help="of its time the last node may train")
    parser.add_argument("--world", type=Path, metavar="FILE", help="the world's run, of which the regions are regions")
    chosen = parsed(parser)
    if chosen.world and not (chosen.regions and chosen.run):
        parser.error("--world needs --regions and --run")
    lines = lines_of(chosen)
    text = chosen.run.read_text() if chosen.world else load_run(chosen.run)[0]

    def make(directory: Path) -> Homes:
        if chosen.world is None:
            return Homes(directory, text, hosts)
        return Regions(directory, text, chosen.world.read_text(), hosts, chosen.regions)

    with (
        hosts_on(lines, chosen.nodes + bool(chosen.world), regions=chosen.regions) as hosts,
        swarm_in(chosen.keep, make) as swarm,
    ):
        found = measure(swarm, chosen.minutes, chosen.slow)
    found |= {"nodes": chosen.nodes, "regions": chosen.regions, "load": os.getloadavg()}
    found["lines"] = [asdict(line) for line in lines]
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")
    tell(found)
    tell_more(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
