"""`p2ptrain data`: makes training data."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from time import monotonic
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from p2ptrain.capacity import cores
from p2ptrain.cli.groups import group
from p2ptrain.config.fields import parse_rational
from p2ptrain.data.chats import load_template
from p2ptrain.data.corpus import Reading
from p2ptrain.data.prepare import prepare as make
from p2ptrain.data.tokenizer import load_tokenizer
from p2ptrain.errors import ConfigError
from p2ptrain.visible import visible

NAMED_MAX = 20  # documents named as left out; the rest is counted

app = group("Make training data.")


class Preparing:
    """Shows the progress, and names the documents that are left out."""

    def __init__(self) -> None:
        self._terminal = Console(stderr=True)
        columns = (BarColumn(), DownloadColumn(), TextColumn("{task.fields[pace]}"), TimeRemainingColumn())
        self._bar = Progress(*columns, console=self._terminal, transient=True, disable=not self._terminal.is_terminal)
        self._task = self._bar.add_task("reading", total=None, pace="")
        self._began: tuple[float, int] | None = None
        self._named: set[str] = set()
        self._skipped, self._done = 0, 0

    def __enter__(self) -> Preparing:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        if self._skipped > len(self._named):
            typer.echo(f"{self._skipped - len(self._named)} more were left out", err=True)

    def progress(self, done: int, total: int, tokens: int) -> None:
        now = monotonic()
        if done < self._done:  # a second reading has begun, because a split was empty
            self._skipped = 0
        self._done = done
        began, before = self._began = self._began or (now, tokens)
        pace = f"{(tokens - before) / (now - began):,.0f} tokens/s" if now > began else ""
        self._bar.update(self._task, completed=done, total=total, pace=pace)

    def skip(self, error: ConfigError) -> None:
        text = f"{error.source}: {error.problem}"
        if text not in self._named and len(self._named) < NAMED_MAX:
            self._named.add(text)
            self._bar.console.print(visible(f"left out: {text}"), markup=False, highlight=False, soft_wrap=True)
        self._skipped += 1


def _percent(text: str) -> Fraction:
    try:
        share = parse_rational(text) / 100
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--held-out") from error
    if not 0 <= share < 1:
        what = f"{text} is out of range: choose at least 0 and less than 100"
        raise typer.BadParameter(what, param_hint="--held-out")
    return share


@app.command()
def prepare(  # noqa: PLR0913, PLR0917  # a command has many options
    out: Annotated[Path, typer.Argument(help="Directory to create; it must be empty if it exists.")],
    files: Annotated[
        list[Path] | None, typer.Argument(help="Directories, text, JSON lines, Parquet, Arrow, .npy or .bin.")
    ] = None,
    embedded: Annotated[bool, typer.Option("--embedded", help="Also use the texts that ship with Python.")] = False,
    wikitext: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also use WikiText's files in this directory, split as they are.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer.json, or a model's directory; by default, tokens are bytes.")
    ] = None,
    held_out: Annotated[
        str, typer.Option(metavar="PERCENT", help="Share of documents to keep for validation, never trained on.")
    ] = "1",
    column: Annotated[
        str, typer.Option(metavar="NAME", help='The key or column to read; by default "text", with --chat "messages".')
    ] = "",
    chat: Annotated[
        bool, typer.Option("--chat", help="The files hold chats; train only on the assistant's turns.")
    ] = False,
    chat_template: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Jinja template that turns a chat into text; by default, the tokenizer's own."
        ),
    ] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Name what is broken, and leave it out.")] = False,
    processes: Annotated[
        int, typer.Option(min=0, max=1_024, help="Processes that tokenize; 0: one for each core.")
    ] = 0,
) -> None:
    """Turn text into a data set for training.

    The data set consists of pieces of tokens and a manifest of their digests. Text and JSON
    lines may end with .gz or .zst, too. If this is interrupted, the same command goes on where it was."""
    share = _percent(held_out)

    chosen = load_tokenizer(tokenizer)
    if chat_template is not None and not chat:
        raise ConfigError("a template is for chats", key="--chat-template", fix="Add --chat, or leave it out")
    if wikitext is not None and chat:
        raise ConfigError("WikiText holds no chats", key="--wikitext", fix="Leave out --chat, or --wikitext")
    template = load_template(chat_template, tokenizer, chosen.added) if chat else None
    column = column or ("messages" if chat else "text")
    if column.encode(errors="replace").decode() != column:
        raise ConfigError("not UTF-8", key="--column", fix="Name a key or a column of the files")
    with Preparing() as shown:
        prepared = make(
            out,
            files or [],
            embedded=embedded,
            wikitext=wikitext,
            how=Reading(column, chosen, shown.skip if skip_bad else None, template),
            held_out=share,
            progress=shown.progress,
            processes=processes or cores(),
        )
    if prepared.chats_cut:
        what = f"{prepared.chats_cut:,} chats contain the token that ends a document"
        typer.echo(f'{what}: leave data.documents = "together", or their turns would not see each other', err=True)
    typer.echo(f"# {prepared.tokens:,} tokens to train on, {prepared.held_out_tokens:,} held out: {prepared.path}")
    typer.echo(f'[data]\nmanifest = "{prepared.digest}"\n\n[tokenizer]\nkind = "{chosen.kind}"')
    if chosen.digest:
        typer.echo(f'digest = "{chosen.digest}"\n\n[model]\nvocab_size = {chosen.vocab_size}')
