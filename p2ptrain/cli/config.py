"""`p2ptrain config`: checks and shows configurations."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from p2ptrain.cli.groups import group
from p2ptrain.cli.node import home_of
from p2ptrain.config import NodeConfig, RunConfig, load_config, load_run_config
from p2ptrain.config.text import to_toml
from p2ptrain.errors import ConfigError

app = group("Check and show configurations.")

ConfigFile = Annotated[Path, typer.Argument(help="A run's or a node's config; its keys tell which it is.")]


@app.command()
def check(file: ConfigFile) -> None:
    """Check FILE, and say what to fix if it is wrong."""
    config = load_config(file)
    if not isinstance(config, RunConfig):
        typer.echo(f"{file}: OK, a node's settings")
        return
    from p2ptrain.exact.outer import Outer
    from p2ptrain.models.kinds import shapes_of

    home_of(None)  # the owner's settings may allow the run's plug-ins
    outer = Outer.of(config, shapes_of(config.model, config.adapt))
    sizes = outer.sizes
    typer.echo(f"{file}: OK, a run")
    typer.echo(f"model    {outer.parameters:,} parameters")
    by_k = [f"{size:,}" + (f" with k = {k}" if len(sizes) > 1 else "") for k, size in sizes.items()]
    typer.echo(f"payload  {', '.join(by_k)} bytes a contribution")
    typer.echo(f"run id   {config.run_id if config.is_sealed else 'none until the run is started with its data'}")


@app.command()
def example(name: Annotated[str | None, typer.Argument(help="Which one; without it, they are listed.")] = None) -> None:
    """Print a file to begin with.

    p2ptrain config example tiny > tiny.toml; p2ptrain start tiny.toml"""
    here = Path(__file__).parents[1]
    folder = here / "examples" if (here / "examples").is_dir() else here.parent / "examples"  # installed; in a checkout
    found = {path.stem: path.read_text("utf-8") for path in sorted(folder.rglob("*.toml")) if path.stem != "pyproject"}
    if (settings := here.parent / "node_config.example.toml").is_file():  # where an installed package has it
        found["node"] = settings.read_text("utf-8")
    if name is None:
        width = max(map(len, found))
        for each, text in found.items():
            typer.echo(f"{each:<{width}}  {text.removeprefix('# ').partition(':')[0]}")
    elif name in found:
        typer.echo(found[name].encode(), nl=False)  # as it is read, whatever the terminal has
    else:
        raise ConfigError(f"there is no example {name!r}", key="NAME", fix=f"Take one of {', '.join(found)}")


@app.command()
def schema(kind: Annotated[Literal["run", "node"], typer.Argument(help="Which configuration.")] = "run") -> None:
    """Print a configuration's JSON schema."""
    typer.echo(json.dumps((RunConfig if kind == "run" else NodeConfig).model_json_schema(), indent=2))


@app.command()
def show(
    file: ConfigFile,
    canonical: Annotated[
        bool, typer.Option("--canonical", help="Print the exact bytes whose hash is the run's id.")
    ] = False,
) -> None:
    """Print FILE with all defaults and explanations."""
    config = load_run_config(file) if canonical else load_config(file)
    if canonical and isinstance(config, RunConfig):
        sys.stdout.buffer.write(config.canonical())
        return
    typer.echo(to_toml(config).encode(), nl=False)
