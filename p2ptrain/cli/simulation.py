"""`p2ptrain simulate` and `p2ptrain replay`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from p2ptrain.cli.exits import ExitStatus
from p2ptrain.errors import ConfigError
from p2ptrain.replay import EventLog
from p2ptrain.replay import replay as replay_file
from p2ptrain.sim.checkers import standard
from p2ptrain.sim.keys import FakeSigner
from p2ptrain.sim.outcome import Outcome, summary
from p2ptrain.sim.outcome import simulate as run_scenario
from p2ptrain.sim.scenario import Scenario, load_scenario
from p2ptrain.sim.swarm import SwarmSummary, swarm
from p2ptrain.sim.watch import SIMULATED

TELL_SECONDS = 60.0  # between progress lines in a log


def simulate(
    file: Annotated[Path | None, typer.Argument(help="A scenario, such as those in scenarios/.")] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, max=2**48, help="Seed of all random choices; by default 0, or the time with --swarm."),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, max=4096, help="Number of nodes, instead of the scenario's.")
    ] = None,
    trace_node: Annotated[int | None, typer.Option(min=0, help="Write the events of this node to --events.")] = None,
    events: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The file for --trace-node, for `p2ptrain replay`.")
    ] = None,
    swarm: Annotated[
        int | None,
        typer.Option(min=1, metavar="ROUNDS", help="Simulate random scenarios until this many rounds are done."),
    ] = None,
    seconds: Annotated[float | None, typer.Option(min=0, help="With --swarm, stop after this time.")] = None,
) -> None:
    """Simulate a swarm in virtual time.

    Nodes fail and lie as the scenario says, and the guarantees of the protocol are checked throughout."""
    if (file is None) == (swarm is None):
        raise typer.BadParameter("give either a scenario or --swarm", param_hint="FILE")
    if file is None:
        given = {"--nodes": nodes, "--trace-node": trace_node, "--events": events}
        if wrong := [name for name, value in given.items() if value is not None]:
            raise typer.BadParameter("only works with a scenario, not with --swarm", param_hint=wrong[0])
        _simulate_swarm(swarm or 0, int(time.time()) if seed is None else seed, seconds)
        return
    if seconds is not None:
        raise typer.BadParameter("only works with --swarm; a scenario has its own duration", param_hint="--seconds")
    if (trace_node is None) != (events is None):
        raise typer.BadParameter("--trace-node and --events must be given together", param_hint="--events")

    scenario, seed = load_scenario(file, nodes), seed or 0
    outcome = _simulate_file(scenario, seed, trace_node, events)
    typer.echo(summary(outcome, seed))
    if not outcome.is_good:
        raise typer.Exit(ExitStatus.FAILED)


def _simulate_file(scenario: Scenario, seed: int, trace_node: int | None, events: Path | None) -> Outcome:
    if trace_node is None or events is None:
        return run_scenario(scenario, seed, standard())
    if trace_node >= scenario.size:
        raise typer.BadParameter(f"the scenario has no node {trace_node}", param_hint="--trace-node")
    try:
        with events.open("wb") as file:
            log = EventLog(file)
            return run_scenario(scenario, seed, standard(), lambda each: each.watch.log(each.setup, trace_node, log))
    except OSError as error:
        fix = "Choose another file"
        raise ConfigError(f"cannot be written: {error.strerror}", source=str(events), fix=fix) from error


def _simulate_swarm(rounds: int, seed: int, seconds: float | None) -> None:
    done = SwarmSummary()
    terminal, told = sys.stderr.isatty(), 0.0
    typer.echo(f"seed {seed}")

    def tell(summary: SwarmSummary) -> None:
        nonlocal done, told
        done = summary
        if terminal:
            typer.echo(f"\r{summary}", err=True, nl=False)
        elif summary.seconds >= told + TELL_SECONDS:
            told = summary.seconds
            typer.echo(summary, err=True)

    try:
        summary = swarm(rounds, seed, seconds, tell)
    except KeyboardInterrupt:
        typer.echo(f"\n{done}; to continue: --seed {seed + done.seeds}")
        raise
    if terminal:
        typer.echo(err=True)
    typer.echo(summary)
    if summary.failed:
        typer.echo(f"\n{summary.failed}")
        raise typer.Exit(ExitStatus.FAILED)


def replay(file: Annotated[Path, typer.Argument(help="A node's events, as JSON lines.")]) -> None:
    """Replay a node's events, and compare the effects."""
    replayed = replay_file(file, {SIMULATED: lambda header: FakeSigner(header.run_id, header.me)})
    if replayed.unrepeated:
        typer.echo(
            f"begins at round {replayed.begins_at} of a process whose start is gone: "
            f"{replayed.unrepeated:,} events are readable, and cannot be repeated"
        )
    if not replayed.lives:
        return
    found = replayed.difference or "all effects are the same"
    typer.echo(f"{replayed.events:,} events of {replayed.lives} starts: {found}")
    if replayed.difference:
        raise typer.Exit(ExitStatus.FAILED)
