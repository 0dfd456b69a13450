"""`p2ptrain export`, `generate` and `evaluate`: use the trained model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import isnan
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress

from p2ptrain.cli.node import DataDir, NodeFile, Run, home_of
from p2ptrain.errors import ConfigError, NoDaemonError, SilentDaemonError
from p2ptrain.models.sample import PROMPT_BYTES_MAX, SampleRequest, check, sample
from p2ptrain.node.control import ask
from p2ptrain.node.home import Home
from p2ptrain.visible import duration, visible

if TYPE_CHECKING:
    from p2ptrain.node.saved import SavedModel

STDIN = "-"
T = TypeVar("T")

Directory = Annotated[
    Path | None,
    typer.Option("--checkpoint", metavar="DIR", help="A copy made by `checkpoint export`, instead of this node's."),
]
Round = Annotated[
    int | None,
    typer.Option("--round", min=0, help="The round of this node's checkpoint; by default, the newest certified one."),
]


def export(
    out: Annotated[Path, typer.Argument(metavar="DIR", help="The directory to create; must not exist yet.")],
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Export the adapters alone, for peft, instead of merging them.")
    ] = False,
    checkpoint: Directory = None,
    number: Round = None,
    run: Run = None,
    config: NodeFile = None,
    data_dir: DataDir = None,
) -> None:
    """Export the model for Hugging Face transformers.

    Writes its config, weights, tokenizer and model card."""
    from p2ptrain.models.export import check_target
    from p2ptrain.models.export import export as write

    def use(found: SavedModel) -> None:
        if adapter and not found.run.adapt.is_on:
            raise ConfigError(f"{found.run.name} trains whole weights", key="--adapter", fix="Leave it out")
        write(out, found.weights, found.tokenizer, found.members, only_adapters=adapter)

    check_target(out)
    found, _ = _used(use, home_of(config, data_dir), run, number, checkpoint, needs_base=not adapter)
    typer.echo(f"{_which(found)}: {out}")


def generate(  # noqa: PLR0913, PLR0917  # a command has many options
    prompt: Annotated[str, typer.Argument(metavar="TEXT", help=f"The text to continue; {STDIN} reads it from stdin.")],
    tokens: Annotated[int, typer.Option(help="The maximum number of tokens; fewer if the model ends the text.")] = 100,
    seed: Annotated[int, typer.Option(help="Seed of the random choices.")] = 0,
    temperature: Annotated[
        float, typer.Option(help="0 takes the likeliest tokens, 1 samples from the model's distribution.")
    ] = 0.8,
    checkpoint: Directory = None,
    number: Round = None,
    run: Run = None,
    config: NodeFile = None,
    data_dir: DataDir = None,
) -> None:
    """Continue TEXT with the trained model.

    Uses the local daemon's model, or that of the newest certified checkpoint if no daemon is running."""
    if prompt == STDIN:
        prompt = _text(sys.stdin.buffer.read(PROMPT_BYTES_MAX + 1))
    request = SampleRequest(prompt, tokens, seed, temperature)
    check(request)
    home = home_of(config, data_dir)
    text, why_not = _from_daemon(home, run, request) if checkpoint is None and number is None else (None, "")
    if text is None:
        from p2ptrain.models.export import load_model
        from p2ptrain.train.learner import open_device

        device, _ = open_device(home.config.device)  # the daemon's device, for identical results
        found, model = _used(lambda found: load_model(found.weights, device), home, run, number, checkpoint)
        if why_not:
            age = duration(max(0.0, time() - found.saved_at))
            typer.echo(f"{why_not}. Using a checkpoint instead, saved {age} ago:", err=True)
        typer.echo(_which(found), err=True)  # stdout is for the text
        text = sample(model, found.tokenizer, request)
    _show(text)


def evaluate(
    data: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Measure on the held-out part of this data set, not of the run's."),
    ] = None,
    sequences: Annotated[int, typer.Option(min=0, help="At most this many sequences; 0: all that are here.")] = 0,
    checkpoint: Directory = None,
    number: Round = None,
    run: Run = None,
    config: NodeFile = None,
    data_dir: DataDir = None,
) -> None:
    """Measure the model's held-out loss.

    Takes the newest certified checkpoint of this node, or the one that is named."""
    from p2ptrain.data.run_data import packing_of
    from p2ptrain.models.export import load_model
    from p2ptrain.node.saved import held_out_of
    from p2ptrain.train.evaluate import evaluate as measure
    from p2ptrain.train.learner import open_device

    home = home_of(config, data_dir)
    device, _ = open_device(home.config.device)
    found, model = _used(lambda found: load_model(found.weights, device), home, run, number, checkpoint)
    dataset, count = held_out_of(home, found.run, data, sequences)
    packing = packing_of(found.run, dataset)
    typer.echo(_which(found), err=True)
    length = found.run.model.sequence_length
    at_a_time = home.config.device.sequences_per_pass or found.run.recipe.sequences_per_pass
    loss = partial(packing.loss, model)
    with _measuring() as progress:
        result = measure(
            loss, dataset, packing, length, sequences=count, at_a_time=at_a_time, device=device, on_pass=progress
        )
    error = "" if isnan(result.error) else f" (standard error {result.error:.4f})"
    typer.echo(
        f"held-out loss {result.loss:.4f} nats a token{error}, perplexity {result.perplexity:.2f}: "
        f"{result.tokens:,} tokens of {result.sequences:,} sequences"
    )


@contextmanager
def _measuring() -> Iterator[Callable[[int, int], None]]:
    """Shows a progress bar, if stderr is a terminal."""
    terminal = Console(stderr=True)
    with Progress(console=terminal, transient=True, disable=not terminal.is_terminal) as bar:
        task = bar.add_task("measuring", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _text(content: bytes) -> str:
    """Decodes a prompt. One over the limit may have been cut within a character; its length is refused later."""
    try:
        return content.decode(errors="strict" if len(content) <= PROMPT_BYTES_MAX else "replace")
    except UnicodeDecodeError as error:
        raise ConfigError("not text", key="prompt", fix="Write it in UTF-8") from error


def _from_daemon(home: Home, run: str | None, request: SampleRequest) -> tuple[str | None, str]:
    """Returns the daemon's text, or None with the reason why a hanging daemon does not answer.

    The reason is empty if no daemon is running, or if it takes part in another run."""
    try:
        status = ask(home.directory, {"do": "status"})
        if not str(status["run_id"]).startswith(run or ""):
            return None, ""
        return str(ask(home.directory, {"do": "sample", **msgspec.structs.asdict(request)})["text"]), ""
    except SilentDaemonError as error:
        return None, str(error)
    except NoDaemonError:
        return None, ""


def _used(
    use: Callable[[SavedModel], T],
    home: Home,
    run: str | None,
    number: int | None,
    directory: Path | None,
    *,
    needs_base: bool = True,
) -> tuple[SavedModel, T]:
    """Finds a saved model and uses it, or another one if a running node removes it meanwhile."""
    from p2ptrain.node.saved import find_model, reading, though_pruned

    def look() -> tuple[SavedModel, T]:
        found = find_model(home, run, number, directory, needs_base=needs_base)
        with reading(found.checkpoint):
            return found, use(found)

    return though_pruned(look)


def _which(found: SavedModel) -> str:
    """Describes the state in use, and why it can be trusted."""
    checkpoint = found.checkpoint
    return f"round {checkpoint.round} of {found.run.name}, root {checkpoint.root.hex()[:16]}, {found.judgement}"


def _show(text: str) -> None:
    """Prints the text unchanged, but escapes control characters on a terminal."""
    if sys.stdout.isatty():
        text = visible(text, keep="\n\t")
    sys.stdout.buffer.write(text.encode() + b"\n")
    sys.stdout.buffer.flush()
