"""House rules about what a user reads: help texts and configuration keys."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest
import typer
from pydantic import BaseModel, Field

from p2ptrain.cli import app as cli_app
from p2ptrain.cli.groups import COMMANDS
from p2ptrain.config import NodeConfig, RunConfig
from p2ptrain.config.text import fields

HELP_CHARACTERS_MAX = 55  # so that a list of commands needs one line for each


def keys_are_documented(model: type[BaseModel]) -> list[str]:
    return [f"{section}.{key}" for section, key, field in fields(model) if not (field.description or "").strip()]


@pytest.mark.parametrize("model", [RunConfig, NodeConfig])
def test_every_config_key_is_documented(model: type[BaseModel]) -> None:
    assert keys_are_documented(model) == []


def test_a_key_without_a_description_is_reported() -> None:
    class Example(BaseModel):
        documented: int = Field(0, description="what it is")
        blank: int = Field(0, description=" ")
        bare: int = 0

    assert keys_are_documented(Example) == [".blank", ".bare"]


def commands(group: click.Command, name: str = "p2ptrain") -> Iterator[tuple[str, click.Command]]:
    yield name, group
    for each, command in getattr(group, "commands", {}).items():
        yield from commands(command, f"{name} {each}")


def test_the_first_line_of_each_help_text_fits_a_list_of_commands() -> None:
    heads = {name: (each.help or "").strip().split("\n")[0] for name, each in commands(typer.main.get_command(cli_app))}
    assert len(heads) > 30
    assert {name: head for name, head in heads.items() if not 0 < len(head) <= HELP_CHARACTERS_MAX} == {}
    assert {name: line for name, (_, line) in COMMANDS.items() if heads[f"p2ptrain {name}"] != line} == {}
