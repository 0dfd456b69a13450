"""Chats as documents: the tokenizer's own template writes them as text, and only the assistant's turns are learned.

A chat is a list of messages, each with a `role` and a `content`, as Hugging Face's data sets have them. A template is
written in Jinja (https://huggingface.co/docs/transformers/chat_templating). It runs in Jinja's sandbox and sees neither
the date nor anything else of this machine, so that a chat always becomes the same text. It may come from a stranger,
and the sandbox does not stop endless loops or exhausted memory, so it runs in a process with limits on time and memory.

A turn begins after the generation prompt, or with its content if the template has no such prompt at this place. To find
its end, the chat is written once more with a placeholder as its content. The token that ends the turn is learned too.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import signal
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

from p2ptrain.data.tokenizer import Marked, read_beginning
from p2ptrain.data.tokenizer_trial import MEMORY_BYTES, PROCESSOR_SECONDS, limit_memory, limit_time
from p2ptrain.digest import digest
from p2ptrain.errors import ConfigError, DataError

TEMPLATE_NAME, SETTINGS_NAME = "chat_template.jinja", "tokenizer_config.json"  # as in Hugging Face's models
NAMES_IN = SETTINGS_NAME, "special_tokens_map.json"  # files that name the special tokens
NEEDED = f"Name a {TEMPLATE_NAME} or {SETTINGS_NAME} with --chat-template"
ASSISTANT = "assistant"
PLACEHOLDERS = range(0xE000, 0xF900)  # private-use characters; the first one that the text lacks is taken
PLACEHOLDER_OTHERWISE = "\ue000" * 9  # used if a text contains all of them
FILE_BYTES_MAX = 16 * 2**20  # a guess: a template has some 10 KB, a tokenizer_config.json a few MB at most
MESSAGES_MAX = 1_000  # the whole chat is written again for each answer; a thousand take seconds
TEXT_MAX = 2**26  # characters of a written chat: four times the longest line
WHY_MAX = 300  # characters kept of a template's error
# Besides Jinja's own errors, a template may raise these for a chat that its author did not expect.
FAILURES = ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError

Message = Mapping[str, Any]


class ChatTemplate:
    """Writes chats as text, in a process of its own, which ends as this object goes: its end of the pipe closes."""

    def __init__(self, text: str, names: Mapping[str, str], tokens: Mapping[str, bool], source: str) -> None:
        """names: special tokens by the names that templates use, such as bos_token; tokens: the tokens added to the
        vocabulary, and whether each is special."""
        self.source = source
        self.digest = digest("chat template", json.dumps([text, dict(names)], sort_keys=True).encode()).hex()
        spawn = multiprocessing.get_context("spawn")
        self._line, others = spawn.Pipe()
        made = others, text, dict(names), dict(tokens), source
        spawn.Process(target=_write_chats, args=made, daemon=True).start()
        others.close()
        self._answer("a first look at it")

    def write(self, messages: object, where: str) -> Marked:
        """Returns a chat's text, and the places in it that are learned. Raises ConfigError if the template does not fit
        the chat, and DataError if it takes too much time or memory."""
        try:
            self._line.send((messages, where))
        except RecursionError as error:
            raise ConfigError("nested too deeply", source=where, fix="A chat is a list of messages") from error
        except OSError:  # the process has ended: no answer will come
            pass
        marked: Marked = self._answer(where)
        return marked

    def _answer(self, where: str) -> Any:
        try:
            answer = self._line.recv()
        except (EOFError, OSError) as error:
            most = f"{PROCESSOR_SECONDS} s or {MEMORY_BYTES // 2**30} GiB"
            what = f"{self.source}: this chat template was ended, as it takes more than {most} for {where}"
            raise DataError(f"{what}. Name another with --chat-template") from error
        if isinstance(answer, dict):
            raise ConfigError(**answer)
        return answer


def _write_chats(line: Connection, *made: Any) -> None:
    """The other process: writes chats until its parent closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    limit_memory()
    writer, answer = None, cast(Any, None)
    with suppress(EOFError, MemoryError, RecursionError, OSError):  # the parent notices that this process has ended
        while True:
            limit_time()
            try:
                if writer is None:
                    writer = _Writer(*made)
                else:
                    answer = writer.write(*line.recv())
            except ConfigError as error:
                answer = vars(error)
            line.send(answer)


class _Writer:
    """Writes chats as text."""

    def __init__(self, text: str, names: Mapping[str, str], tokens: Mapping[str, bool], source: str) -> None:
        from jinja2 import TemplateError  # noqa: PLC0415  (only chats need it)

        self.source, self._names = source, dict(names)
        self._failures = TemplateError, *FAILURES
        self._special = _any_of(name for name, is_special in tokens.items() if is_special)
        # Some tokenizers declare few tokens special, so added tokens that the template writes count as control tokens
        # too; but not in the assistant's messages, which may contain some, such as <think>.
        self._control = _any_of(name for name, is_special in tokens.items() if is_special or name in text)
        self._ends = re.compile(rf"\s*(?:{_any_of(tokens).pattern})")
        try:
            self._template = _environment().from_string(text)
        except (TemplateError, SyntaxError, *FAILURES) as error:
            what = f"not a chat template: {str(error)[:WHY_MAX] or type(error).__name__}"
            raise ConfigError(what, source=source, fix=NEEDED) from error

    def write(self, messages: object, where: str) -> Marked:
        """Returns a chat's text, and the places in it that are learned."""
        chat = self._checked(messages, where)
        text = self._text(chat, where)
        learned = tuple(self._turns(chat, text, where))
        if not learned:
            fix = f"Look at the chat, or name another template with --chat-template: this is {self.source}"
            raise ConfigError("the chat template leaves out all that the assistant says", source=where, fix=fix)
        return Marked(text, learned)

    def _turns(self, chat: list[Message], text: str, where: str) -> Iterator[tuple[int, int]]:
        placeholder = next((chr(code) for code in PLACEHOLDERS if chr(code) not in text), PLACEHOLDER_OTHERWISE)
        for number, message in enumerate(chat):
            if message["role"] != ASSISTANT:
                continue
            prompt = self._prompt(chat[:number])
            begin = len(prompt) if prompt and text.startswith(prompt) else None
            if message["content"] is None:  # a tool call
                written = self._text(chat[: number + 1], where)
                if begin is not None and text.startswith(written.rstrip()):
                    yield begin, len(written.rstrip())
                continue
            replaced = self._text([*chat[:number], {**message, "content": placeholder}, *chat[number + 1 :]], where)
            before, *after = replaced.split(placeholder)
            if not after:
                continue  # the template leaves this message out
            if begin is None and text.startswith(before):
                begin = len(before)
            if begin is None or len(after) > 1 or not text.endswith(after[0]):
                raise ConfigError(
                    f"cannot find message {number + 1} in the text: the chat template changes or repeats more than it",
                    source=where,
                    fix=f"Name a simpler template with --chat-template: this is {self.source}",
                )
            yield begin, self._end_of_turn(text, max(begin, len(text) - len(after[0])), number == len(chat) - 1)

    def _end_of_turn(self, text: str, end: int, is_last: bool) -> int:
        """Returns the end of a turn whose words end at `end`: after the token that ends it, if there is one."""
        ends = self._ends.match(text, end)
        found = end if ends is None else ends.end()
        return len(text) if is_last and (ends is None or not text[found:].strip()) else found

    def _prompt(self, chat: list[Message]) -> str:
        """Returns the prompt before an answer to these messages; empty if the template has none."""
        try:
            asked, plain = (self._written(chat, prompts) for prompts in (True, False))
        except self._failures:
            return ""
        return asked if asked != plain else ""

    def _text(self, chat: list[Message], where: str) -> str:
        try:
            return self._written(chat, prompts=False)
        except self._failures as error:
            what = f"the chat template fails: {type(error).__name__}: {str(error)[:WHY_MAX]}"
            fix = f"Look at the chat, or name another template with --chat-template: this is {self.source}"
            raise ConfigError(what, source=where, fix=fix) from error

    def _written(self, chat: list[Message], prompts: bool) -> str:
        """Writes messages; with `prompts`, also the prompt for the assistant's next message."""
        given = {"messages": chat, "add_generation_prompt": prompts, "tools": None, "documents": None}
        text = str(self._template.render(**given, **self._names))
        if len(text) > TEXT_MAX:
            raise ValueError(f"a text of {len(text):,} characters; the limit is {TEXT_MAX:,}")
        text.encode()  # raises now if the text has half a character, rather than when it is stored
        return text

    def _checked(self, messages: object, where: str) -> list[Message]:
        fix = 'A chat is a list of {"role": ..., "content": ...}'
        if not isinstance(messages, list) or not messages:
            raise ConfigError("not a chat", source=where, fix=fix)
        if len(messages) > MESSAGES_MAX:
            fix = f"Cut it into chats of up to {MESSAGES_MAX:,}"
            raise ConfigError(f"a chat of {len(messages):,} messages", source=where, fix=fix)
        chat: list[Message] = []
        for number, message in enumerate(messages, 1):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise ConfigError(f"message {number} has no role", source=where, fix=fix)
            kept = {key: value for key, value in message.items() if value is not None}  # rows of a table have every key
            is_answer = kept["role"] == ASSISTANT
            if is_answer and not isinstance(kept.setdefault("content", None), str | None):
                raise ConfigError(f"message {number}, of the assistant, is not text", source=where, fix=fix)
            for text in _texts_in(kept):
                if found := (self._special if is_answer else self._control).search(text):
                    what = f"message {number} contains {found[0]}, which the tokenizer keeps for its own use"
                    raise ConfigError(what, source=where, fix="Leave it out: it would end the turn, or begin another")
            chat.append(kept)
        if not any(message["role"] == ASSISTANT for message in chat):
            fix = f'Add one, with "role": "{ASSISTANT}": its words are what is learned'
            raise ConfigError("a chat without a message of the assistant", source=where, fix=fix)
        return chat


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or r"(?!)")


def _texts_in(value: object) -> Iterator[str]:
    """Yields all texts in a message, however deep."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield str(key)
            yield from _texts_in(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts_in(each)


def load_template(path: Path | None, tokenizer: Path | None, tokens: Mapping[str, bool]) -> ChatTemplate:
    """Loads the template in the file at `path`, or without a path the one of the tokenizer at `tokenizer`.

    tokens: the tokens added to the tokenizer's vocabulary, and whether each is special"""
    folder = tokenizer.parent if tokenizer is not None and not tokenizer.is_dir() else tokenizer
    path = path or _template_in(folder)
    text = _template_of(_settings(path), path) if path.suffix == ".json" else _read(path)
    places = [each / name for each in (folder, path.parent) if each is not None for name in NAMES_IN]
    settings = next((place for place in places if place.is_file()), None)
    if settings is None and (unknown := re.search(r"\b\w+_token\b", text)):
        what = f"the template writes {unknown[0]}, and no {SETTINGS_NAME} says what that is"
        raise ConfigError(what, source=str(path), fix=f"Put the tokenizer's {SETTINGS_NAME} beside it")
    names = {} if settings is None else _names_of(_settings(settings))
    return ChatTemplate(text, names, tokens, str(path))


def _template_in(folder: Path | None) -> Path:
    """Returns the file with the template of the tokenizer in a folder."""
    if folder is None:
        raise ConfigError("chats need a template", key="--chat", fix=NEEDED)
    for name in (TEMPLATE_NAME, SETTINGS_NAME):
        if (path := folder / name).is_file() and (name == TEMPLATE_NAME or "chat_template" in _settings(path)):
            return path
    raise ConfigError("the tokenizer has no chat template beside it", source=str(folder), fix=NEEDED)


def _settings(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON: {error}", source=str(path), fix="Fetch the file again") from error
    return settings if isinstance(settings, dict) else {}


def _template_of(settings: Mapping[str, Any], path: Path) -> str:
    """Returns the template of a tokenizer_config.json; if it has several, the default one."""
    found = settings.get("chat_template")
    if isinstance(found, list):
        found = next(
            (each.get("template") for each in found if isinstance(each, dict) and each.get("name") == "default"), 0
        )
    if not isinstance(found, str):
        raise ConfigError("no chat_template", source=str(path), fix=NEEDED)
    return found


def _names_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the special tokens by the names that templates use, such as bos_token."""
    found = {key: each for key, each in settings.items() if key.endswith("_token")}
    contents = {key: each.get("content") if isinstance(each, dict) else each for key, each in found.items()}
    return {key: each for key, each in contents.items() if isinstance(each, str)}


def _read(path: Path) -> str:
    content = read_beginning(path, FILE_BYTES_MAX + 1, fix=NEEDED)
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"larger than {FILE_BYTES_MAX:,} bytes", source=str(path), fix=NEEDED)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError("not UTF-8", source=str(path), fix=NEEDED) from error


def _environment() -> Any:
    """Returns a Jinja environment as Hugging Face's templates expect it."""
    from jinja2 import TemplateError, nodes  # noqa: PLC0415
    from jinja2.ext import Extension  # noqa: PLC0415
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415

    class Generation(Extension):
        """Reads {% generation %}, by which a few templates mark the assistant's words."""

        tags = {"generation"}  # noqa: RUF012  (as Jinja has it)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def refuse(message: object) -> None:
        raise TemplateError(str(message))

    def to_json(value: object, ensure_ascii: bool = False, **how: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **how)

    extensions = [Generation, "jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    return environment
