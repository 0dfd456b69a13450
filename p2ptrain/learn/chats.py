"""Chats as documents: the tokenizer's own template writes them as text, and only the assistant's words are learned.

A chat is a list of messages, each with a `role` and a `content`, as Hugging Face's data sets have them. A template is
written in Jinja (https://huggingface.co/docs/transformers/chat_templating); it runs in Jinja's sandbox, and learns
neither the date nor anything else of this machine, so that a chat always becomes the same text.

What a message of the assistant has become is found by writing the chat once more with a mark in that message's place.
The special token that follows ends the turn and is learned with it; after the last message everything is.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2ptrain.digest import digest
from p2ptrain.errors import ConfigError
from p2ptrain.learn.tokenizer import TOKENIZER_BYTES_MAX, Marked

TEMPLATE_NAME, SETTINGS_NAME = "chat_template.jinja", "tokenizer_config.json"  # where Hugging Face's models have it
NEEDED = f"Name a {TEMPLATE_NAME} or {SETTINGS_NAME} with --chat-template"
ASSISTANT = "assistant"
MARKS = range(0xE000, 0xF900)  # characters of private use
WHY_MAX = 300  # characters kept of a template's error
# What a template may raise besides Jinja's own errors, if a chat is not what its author thought of.
FAILURES = ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a template is, and the special tokens that it may write by name."""

    path: Path
    text: str
    names: Mapping[str, str]


class ChatTemplate:
    """Writes chats as text."""

    def __init__(self, text: str, names: Mapping[str, str], special: Sequence[str], source: str) -> None:
        """names: special tokens by the names that templates use, such as bos_token; special: all of the tokenizer."""
        from jinja2 import TemplateError  # noqa: PLC0415  (only chats need it)

        self.source, self._names = source, dict(names)
        self._failures = TemplateError, *FAILURES
        self._special = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")
        self.digest = digest("chat template", json.dumps([text, self._names], sort_keys=True).encode()).hex()
        try:
            self._template = _environment().from_string(text)
        except TemplateError as error:
            raise ConfigError(f"not a chat template: {str(error)[:WHY_MAX]}", source=source, fix=NEEDED) from error

    def write(self, messages: object, where: str) -> Marked:
        """Returns a chat's text, and the places in it that are learned."""
        chat = self._checked(messages, where)
        text = self._written(chat, where)
        mark = next(chr(code) for code in MARKS if chr(code) not in text)
        return Marked(text, tuple(self._learned(chat, text, mark, where)))

    def _learned(self, chat: list[Message], text: str, mark: str, where: str) -> Iterator[tuple[int, int]]:
        for number, message in enumerate(chat):
            if message["role"] != ASSISTANT or message.get("content") is None:  # a call of a tool has no words
                continue
            marked = self._written([*chat[:number], {**message, "content": mark}, *chat[number + 1 :]], where)
            before, *after = marked.split(mark)
            if not after:
                continue  # the template leaves this message out
            if len(after) > 1 or not (text.startswith(before) and text.endswith(after[0])):
                raise ConfigError(
                    f"the chat template does not tell where message {number + 1} is: other words follow from it",
                    source=where,
                    fix=f"Name a simpler template with --chat-template: this is {self.source}",
                )
            end = len(text) - len(after[0])
            if number == len(chat) - 1:
                end = len(text)
            elif ends_turn := self._special.match(text, end):
                end = ends_turn.end()
            yield len(before), end

    def _written(self, chat: list[Message], where: str) -> str:
        try:
            return str(self._template.render(messages=chat, add_generation_prompt=False, **self._names))
        except self._failures as error:
            what = f"the chat template fails: {type(error).__name__}: {str(error)[:WHY_MAX]}"
            fix = f"Look at the chat, or name another template with --chat-template: this is {self.source}"
            raise ConfigError(what, source=where, fix=fix) from error

    def _checked(self, messages: object, where: str) -> list[Message]:
        fix = 'A chat is a list of {"role": ..., "content": ...}'
        if not isinstance(messages, list) or not messages:
            raise ConfigError("not a chat", source=where, fix=fix)
        chat: list[Message] = []
        for number, message in enumerate(messages, 1):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise ConfigError(f"message {number} has no role", source=where, fix=fix)
            kept = {key: value for key, value in message.items() if value is not None}  # a table has all keys
            if kept["role"] == ASSISTANT and not isinstance(kept.get("content", ""), str):
                raise ConfigError(f"message {number}, of the assistant, is not text", source=where, fix=fix)
            for value in kept.values():
                if isinstance(value, str) and (found := self._special.search(value)):
                    raise ConfigError(
                        f"message {number} contains {found[0]}, which the tokenizer keeps for its own use",
                        source=where,
                        fix="Leave it out: it would end the turn, or begin another",
                    )
            chat.append(kept)
        if not any(message["role"] == ASSISTANT and message.get("content") is not None for message in chat):
            fix = f'Add one, with "role": "{ASSISTANT}": its words are what is learned'
            raise ConfigError("a chat without a message of the assistant", source=where, fix=fix)
        return chat


def load_template(path: Path | None, tokenizer: Path | None, special: Sequence[str]) -> ChatTemplate:
    """Loads the template in the file at `path`, or without one that of the tokenizer at `tokenizer`.

    special: the tokenizer's special tokens
    """
    found = _named(path) if path is not None else _beside(tokenizer)
    return ChatTemplate(found.text, found.names, special, str(found.path))


def _named(path: Path) -> _Source:
    if path.suffix == ".json":
        settings = _settings(path)
        return _Source(path, _template_of(settings, path), _names_of(settings))
    settings_path = path.with_name(SETTINGS_NAME)
    return _Source(path, _text(path), _names_of(_settings(settings_path)) if settings_path.is_file() else {})


def _beside(tokenizer: Path | None) -> _Source:
    if tokenizer is None:
        raise ConfigError("chats need a template", key="--chat", fix=NEEDED)
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    for name in (TEMPLATE_NAME, SETTINGS_NAME):
        if (path := folder / name).is_file() and (name == TEMPLATE_NAME or "chat_template" in _settings(path)):
            return _named(path)
    raise ConfigError("the tokenizer has no chat template beside it", source=str(folder), fix=NEEDED)


def _settings(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON: {error}", source=str(path), fix="Fetch the file again") from error
    return settings if isinstance(settings, dict) else {}


def _template_of(settings: Mapping[str, Any], path: Path) -> str:
    """Returns the template of a tokenizer_config.json, which may have several: then the default one."""
    found = settings.get("chat_template")
    if isinstance(found, list):
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default")
    if not isinstance(found, str):
        raise ConfigError("no chat_template", source=str(path), fix=NEEDED)
    return found


def _names_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the special tokens that templates name, such as bos_token."""
    found = {key: each for key, each in settings.items() if key.endswith("_token")}
    contents = {key: each.get("content") if isinstance(each, dict) else each for key, each in found.items()}
    return {key: each for key, each in contents.items() if isinstance(each, str)}


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(min(os.fstat(file.fileno()).st_size, TOKENIZER_BYTES_MAX) + 1)
        return content.decode()
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", source=str(path), fix=NEEDED) from error
    except UnicodeDecodeError as error:
        raise ConfigError("not UTF-8", source=str(path), fix=NEEDED) from error


def _environment() -> Any:
    """Returns Jinja as templates of Hugging Face expect it."""
    from jinja2 import TemplateError, nodes  # noqa: PLC0415
    from jinja2.ext import Extension  # noqa: PLC0415
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415

    class Generation(Extension):
        """Reads {% generation %}, by which a few templates mark the assistant's words."""

        tags = {"generation"}  # noqa: RUF012  (as Jinja has it)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def refuse(message: object) -> None:
        raise TemplateError(str(message))

    extensions = [Generation, "jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = refuse
    return environment
