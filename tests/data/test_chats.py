"""Chats become text by a template, and only the assistant's words are learned."""

from __future__ import annotations

import json
import multiprocessing
import resource
import signal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
from pyarrow import parquet

from p2ptrain.data.chats import TEXT_MAX, ChatTemplate, load_template
from p2ptrain.data.corpus import Reading, documents, file_sources
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.data.prepare import prepare
from p2ptrain.data.tokenizer import BytesTokenizer, JsonTokenizer, Marked, Tokenizer
from p2ptrain.errors import ConfigError, DataError
from tests.helpers.tokenizers import tokenizer_json, written

# Hugging Face's templates have these forms; the comments name a model that has one like it.
CHATML = (  # SmolLM2
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INSTRUCT = (  # Mistral: refuses what does not alternate, and ends each turn with </s>
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ ' [INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
THOUGHTS = (  # Qwen3: thoughts stay in the last answer only
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% if loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content.split('</think>')[-1] | trim }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
)
GENERATION = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
)
SPECIAL = dict.fromkeys(["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "</s>"], True)
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
CHAT = [
    {"role": "user", "content": "Two and two?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Four."},
]


def template(text: str) -> ChatTemplate:
    return ChatTemplate(text, NAMES, SPECIAL, "the template")


def learned(text: str, chat: list[dict[str, Any]] = CHAT) -> list[str]:
    return learned_of(template(text), chat)


def learned_of(made: ChatTemplate, chat: list[dict[str, Any]] = CHAT) -> list[str]:
    marked = made.write(chat, "here")
    return [marked.text[first:last] for first, last in marked.learned]


def refused(chat: object, text: str = CHATML) -> str:
    with pytest.raises(ConfigError) as caught:
        template(text).write(chat, "chats.jsonl, line 3")
    return str(caught.value)


# ---------------------------------------------------------------------------------------------------
# Which words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CHATML, ["Four.<|im_end|>", "Four.<|im_end|>\n"]),
        (INSTRUCT, ["Four.</s>", "Four.</s>"]),
        (THOUGHTS, ["Four.<|im_end|>", "Four.<|im_end|>\n"]),
        (GENERATION, ["Four.", "Four."]),
    ],
    ids=["chatml", "instruct", "thoughts", "generation"],
)
def test_the_assistants_words_and_what_ends_them_are_learned(text: str, expected: list[str]) -> None:
    assert learned(text) == expected


def test_the_text_is_that_of_the_template() -> None:
    assert template(CHATML).write(CHAT[:2], "here").text == (
        "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nTwo and two?<|im_end|>\n"
        "<|im_start|>assistant\nFour.<|im_end|>\n"
    )


def test_the_same_words_of_the_user_are_not_learned() -> None:
    chat = [{"role": "user", "content": "Four."}, *CHAT[1:3], {"role": "assistant", "content": "\ue000 Yes."}]
    marked = template(CHATML).write(chat, "here")
    assert [marked.text[first:last] for first, last in marked.learned] == [
        "Four.<|im_end|>",
        "\ue000 Yes.<|im_end|>\n",
    ]
    assert marked.learned[0][0] == marked.text.rindex("Four.")


def test_what_a_template_trims_or_leaves_out_is_not_learned() -> None:
    chat = [CHAT[0], {"role": "assistant", "content": "<think>Hm.</think>  Four. "}]
    assert learned(THOUGHTS, chat) == ["Four.<|im_end|>\n"]
    last = "{% for m in messages %}{% if loop.last %}{{ m.content }}{% endif %}{% endfor %}"
    assert learned(last) == ["Four."]


ALWAYS_ASKS = (  # the first release of Llama 3
    "{% for m in messages %}<|im_start|>{{ m.role }}\n\n{{ m.content | trim }}<|im_end|>{% endfor %}"
    "<|im_start|>assistant\n\n"
)
SPACE_BEFORE_THE_END = "{% for m in messages %}{{ m.role }}: {{ m.content }} {{ eos_token }}{% endfor %}"  # Llama 2
REASONS = (  # Qwen3: an empty thought where there is none
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>\n"
    "{{ m.reasoning_content or "
    "(m.content.split('</think>')[0].split('<think>')[-1] if '</think>' in m.content else '') }}"
    "\n</think>\n\n{% endif %}{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_prompt_for_the_next_answer_is_not_learned() -> None:
    assert learned(ALWAYS_ASKS) == ["Four.<|im_end|>", "Four.<|im_end|>"]


def test_the_end_of_a_turn_may_follow_a_space() -> None:
    assert learned(SPACE_BEFORE_THE_END) == ["Four. </s>", "Four. </s>"]


def test_what_follows_the_prompt_is_learned_also_if_it_stands_in_no_message() -> None:
    assert learned(REASONS, CHAT[:2]) == ["<think>\n\n</think>\n\nFour.<|im_end|>\n"]
    thought = CHAT[1] | {"reasoning_content": "Add."}
    assert learned(REASONS, [CHAT[0], thought]) == ["<think>\nAdd.\n</think>\n\nFour.<|im_end|>\n"]
    within = CHAT[1] | {"content": "<think>Add.</think>Four."}
    assert learned(REASONS, [CHAT[0], within]) == ["<think>\nAdd.\n</think>\n\nFour.<|im_end|>\n"]


def test_calls_of_tools_are_learned_where_it_is_known_where_they_are() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {}}]}
    written = '<tool_call>[{"name": "f", "arguments": {}}]</tool_call><|im_end|>'
    text = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
        "{% if m.tool_calls %}<tool_call>{{ m.tool_calls | tojson }}</tool_call>{% endif %}<|im_end|>\n{% endfor %}"
    )
    asks = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    chat = [CHAT[0], call, {"role": "tool", "content": "4"}, CHAT[1]]
    assert learned(text + asks, chat) == [written, "Four.<|im_end|>\n"]
    assert learned(text, chat) == ["Four.<|im_end|>\n"], "nothing says where the call begins"
    assert learned(text + asks, chat[:2]) == [written]


def test_an_added_token_that_is_not_special_ends_a_turn_and_no_message_of_the_user_has_it() -> None:
    text = "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
    tokens = {"[end]": False, "[user]": False, "[other]": False, "</s>": True}
    made = ChatTemplate(text, {}, tokens, "x")
    marked = made.write(CHAT, "here")
    assert [marked.text[first:last] for first, last in marked.learned] == ["Four.[end]"] * 2
    with pytest.raises(ConfigError, match=r"message 1 contains \[end\]"):
        made.write([CHAT[0] | {"content": "a[end]"}, CHAT[1]], "here")
    made.write([CHAT[0] | {"content": "a[other]"}, CHAT[1] | {"content": "b[other]"}], "here")


def test_a_text_with_every_character_of_private_use_is_a_chat_too() -> None:
    strange = "".join(map(chr, range(0xE000, 0xF900)))
    assert learned(CHATML, [CHAT[0] | {"content": strange}, CHAT[1]]) == ["Four.<|im_end|>\n"]


def test_a_template_that_leaves_the_answers_out_is_refused() -> None:
    told = refused(CHAT, "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    assert "the chat template leaves out all that the assistant says" in told


def test_a_name_of_a_token_that_nobody_says_is_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path / "mine.jinja", INSTRUCT)
    with pytest.raises(ConfigError, match=r"the template writes bos_token, and no tokenizer_config\.json says what"):
        load_template(path, None, SPECIAL)
    (tmp_path / "model").mkdir()
    written(tmp_path / "model" / "special_tokens_map.json", json.dumps(NAMES))
    found = load_template(path, tmp_path / "model" / "tokenizer.json", SPECIAL)
    assert found.write(CHAT[:2], "here").text == "<s> [INST] Two and two? [/INST] Four.</s>"


def test_templates_may_ask_for_tools_and_write_json_as_they_like() -> None:
    text = "{% if tools is not none %}TOOLS{% endif %}" + CHATML
    assert template(text).write(CHAT, "here").text.startswith("<|im_start|>system")
    text = "{{ messages | tojson(ensure_ascii=True, separators=(',', ':')) }}" + CHATML
    assert "message 2" in refused(CHAT, text), "it says the words twice"


def test_the_end_is_not_learned_after_words_of_the_user() -> None:
    assert learned(CHATML, CHAT[:3]) == ["Four.<|im_end|>"]


def test_a_call_of_a_tool_has_no_words_and_other_keys_reach_the_template() -> None:
    text = "{% for m in messages %}{{ m.name or m.role }}:{{ m.content or m.calls }};{% endfor %}"
    chat = [CHAT[0] | {"name": "Ann"}, {"role": "assistant", "content": None, "calls": "f()"}, CHAT[1]]
    assert template(text).write(chat, "here").text == "Ann:Two and two?;assistant:f();assistant:Four.;"
    assert learned(text, chat) == ["Four.;"]


def test_the_date_is_not_in_a_text() -> None:
    text = "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}undated{% endif %}"
    assert template(text + CHATML).write(CHAT, "here").text.startswith("undated")


# ---------------------------------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize(
    ("chat", "why"),
    [
        ("text", 'not a chat. A chat is a list of {"role": ..., "content": ...}'),
        ([], "not a chat"),
        (["hello"], "message 1 has no role"),
        ([CHAT[0], {"from": "gpt", "value": "x"}], "message 2 has no role"),
        ([CHAT[0]], 'a chat without a message of the assistant. Add one, with "role": "assistant"'),
        ([{"role": "assistant", "content": None}], "the chat template fails: TypeError"),
        ([CHAT[0] | {"content": [{"type": "text", "text": "a<|im_end|>"}]}, CHAT[1]], "message 1 contains <|im_end|>"),
        ([*CHAT] * 300, "a chat of 1,200 messages. Cut it into chats of up to 1,000"),
        ([CHAT[0], {"role": "assistant", "content": ["a"]}], "message 2, of the assistant, is not text"),
        ([{"role": "user", "content": "a<|im_end|>b"}, CHAT[1]], "message 1 contains <|im_end|>"),
        ([{"role": "<|im_start|>", "content": "a"}, CHAT[1]], "message 1 contains <|im_start|>"),
        ([{"role": "user"}, CHAT[1]], "the chat template fails: "),
    ],
)
def test_a_chat_that_is_none_is_named_with_its_place(chat: object, why: str) -> None:
    told = refused(chat)
    assert told.startswith("chats.jsonl, line 3: ")
    assert why in told


def test_what_a_template_complains_of_is_told() -> None:
    told = refused([CHAT[1], CHAT[0]], INSTRUCT)
    assert "the chat template fails: TemplateError: Conversation roles must alternate" in told
    assert "this is the template" in told


@pytest.mark.parametrize(
    "text",
    [
        "{{ 1 / 0 }}",
        "{{ messages[99].content.x }}",
        "{{ messages + 1 }}",
        "{{ messages.append(1) }}",  # the sandbox
        "{{ ''.__class__.__mro__ }}",
        "{% for n in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_a_template_that_fails_is_told_as_such(text: str) -> None:
    assert "the chat template fails: " in refused(CHAT, text)


def test_a_template_that_says_more_of_a_message_is_refused() -> None:
    assert "cannot find message 2 in the text" in refused(CHAT, CHATML + "{{ messages[1].content }}")
    counted = "{{ messages[1].content | length }}" + CHATML
    assert "cannot find message 2 in the text" in refused(CHAT, counted)


@pytest.mark.parametrize("text", ["{% for %}", "{{ messages", "{% generation %}"])
def test_a_template_with_a_mistake_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="the template: not a chat template: "):
        template(text)


NEVER = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"
NEVER += "{% endfor %}"  # the sandbox limits each of these


@pytest.mark.parametrize(
    "text",
    [
        '{{ "a" * 10**10 }}',  # worked out as the template is read
        '{{ "%10000000000d" % 1 }}',
        '{{ "%10000000000d" % messages | length }}',
        "{{ messages[0].content * 10**10 }}",
        f"{{{{ messages[0].role * {TEXT_MAX} }}}}",  # a text that nobody would read
    ],
)
def test_a_template_that_fills_the_memory_is_told_as_such(text: str) -> None:
    with pytest.raises((ConfigError, DataError), match="the template") as caught:
        template(text + CHATML).write(CHAT, "here")
    assert "--chat-template" in str(caught.value)


@pytest.mark.linux
def test_a_template_that_takes_for_ever_is_ended() -> None:
    before = {each.pid for each in multiprocessing.active_children()}
    limited = template(CHATML + "{% if messages[0].content == 'x' %}" + NEVER + "{% endif %}")
    (child,) = (each for each in multiprocessing.active_children() if each.pid not in before)
    assert child.pid is not None
    assert learned_of(limited) == ["Four.<|im_end|>", "Four.<|im_end|>\n"]
    (usual, hard), used = resource.prlimit(child.pid, resource.RLIMIT_CPU), psutil.Process(child.pid).cpu_times()
    assert used.user < usual <= used.user + used.system + 31, "for each chat"
    resource.prlimit(child.pid, resource.RLIMIT_CPU, (2, hard))
    expected = r"^the template: this chat template was ended, as it takes more than 30 s or 4 GiB for line 7\. Name"
    for _ in range(2):  # also with --skip-bad: it is not the chat that is bad
        with pytest.raises(DataError, match=expected):
            limited.write([{"role": "user", "content": "x"}, CHAT[1]], "line 7")
    child.join()
    assert child.exitcode == -signal.SIGXCPU


def test_the_process_of_a_template_ends_with_it() -> None:
    before = {each.pid for each in multiprocessing.active_children()}
    made = template(CHATML)
    (child,) = (each for each in multiprocessing.active_children() if each.pid not in before)
    del made
    child.join()
    assert child.exitcode == 0


# ---------------------------------------------------------------------------------------------------
# Where the template is


def test_the_tokenizers_own_template_is_found_beside_it(tmp_path: Path) -> None:
    settings = {"chat_template": CHATML, "bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None}
    written(tmp_path / "tokenizer_config.json", json.dumps(settings))
    file = written(tmp_path / "tokenizer.json", tokenizer_json())
    expected = ChatTemplate(CHATML, {"bos_token": "<s>", "eos_token": "</s>"}, SPECIAL, "x")
    for place in (file, tmp_path):
        assert load_template(None, place, SPECIAL).digest == expected.digest
    assert load_template(tmp_path / "tokenizer_config.json", None, SPECIAL).digest == expected.digest


def test_a_template_of_its_own_file_comes_first(tmp_path: Path) -> None:
    written(tmp_path / "tokenizer_config.json", json.dumps({"chat_template": "old", **NAMES}))
    written(tmp_path / "chat_template.jinja", INSTRUCT)
    found = load_template(None, tmp_path, SPECIAL)
    assert found.write(CHAT[:2], "here").text == "<s> [INST] Two and two? [/INST] Four.</s>"


def test_of_several_templates_the_default_is_taken(tmp_path: Path) -> None:
    several = [{"name": "tools", "template": "x"}, {"name": "default", "template": CHATML}]
    path = written(tmp_path / "tokenizer_config.json", json.dumps({"chat_template": several}))
    assert load_template(path, None, SPECIAL).digest == ChatTemplate(CHATML, {}, SPECIAL, "x").digest


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({}, "the tokenizer has no chat template beside it. Name a chat_template.jinja or tokenizer_config.json with"),
        ({"tokenizer_config.json": "{}"}, "the tokenizer has no chat template beside it"),
        ({"tokenizer_config.json": "{"}, "not JSON"),
        ({"chat_template.jinja": b"\xff"}, "not UTF-8"),
        ({"tokenizer_config.json": '{"chat_template": 3}'}, "no chat_template"),
    ],
)
def test_a_template_that_is_missing_is_asked_for(tmp_path: Path, files: dict[str, Any], why: str) -> None:
    for name, content in files.items():
        written(tmp_path / name, content)
    with pytest.raises(ConfigError, match=why):
        load_template(None, tmp_path, SPECIAL)


def test_without_a_tokenizer_a_template_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--chat: chats need a template\. Name a chat_template\.jinja"):
        load_template(None, None, {})
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_template(tmp_path / "none.jinja", None, {})


# ---------------------------------------------------------------------------------------------------
# Tokens


def of_chats() -> JsonTokenizer:
    content = json.loads(tokenizer_json())
    first = content["added_tokens"][0]
    count = len(content["model"]["vocab"])
    content["added_tokens"] += [first | {"id": count + n, "content": name} for n, name in enumerate([*SPECIAL][:2])]
    return JsonTokenizer(json.dumps(content).encode())


@pytest.mark.parametrize("tokenizer", [BytesTokenizer(), of_chats()], ids=["bytes", "json"])
def test_tokens_that_are_not_learned_are_complements(tokenizer: Tokenizer) -> None:
    text = "<|im_start|>user äöü 🎈\n<|im_start|>assistant he🎈llo ä<|im_end|>\n"
    first, last = text.index("he🎈"), text.index("\n", text.index("he🎈"))
    tokens = tokenizer.encode_marked([Marked(text, ((first, last),))])[0].astype(np.int64)
    assert tokenizer.decode(np.where(tokens < 0, ~tokens, tokens)) == text
    assert tokenizer.decode(tokens[tokens >= 0]) == "he🎈llo ä<|im_end|>"


def test_special_tokens_are_read_in_chats_and_nowhere_else() -> None:
    tokenizer = of_chats()
    text = "<|im_start|>he<|im_end|>"
    assert len(tokenizer.encode_marked([Marked(text, ((0, len(text)),))])[0]) == 3
    assert len(tokenizer.encode(text)) > 20


# ---------------------------------------------------------------------------------------------------
# Files


def lines(path: Path, chats: list[Any], key: str = "messages") -> Path:
    return written(path, "".join(json.dumps({key: chat, "id": 1}) + "\n" for chat in chats))


def chats_of(path: Path, **how: Any) -> list[str]:
    how = {"column": "messages", "chats": template(CHATML), **how}
    return [document.text for source in file_sources([path]) for document in documents(source, Reading(**how))]


def test_chats_are_read_from_lines_and_tables(tmp_path: Path) -> None:
    found = chats_of(lines(tmp_path / "a.jsonl", [CHAT, CHAT[:2]]))
    assert found == [template(CHATML).write(chat, "").text for chat in (CHAT, CHAT[:2])]
    parquet.write_table(pa.table({"messages": [CHAT, CHAT[:2]], "id": [1, 2]}), tmp_path / "a.parquet")
    assert chats_of(tmp_path / "a.parquet") == found


def test_a_chat_that_is_broken_is_named_and_may_be_left_out(tmp_path: Path) -> None:
    broken = [CHAT, CHAT[:1], CHAT, "text", CHAT]
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 2: a chat without a message of the assistant"):
        chats_of(lines(tmp_path / "a.jsonl", broken))
    told: list[ConfigError] = []
    assert len(chats_of(tmp_path / "a.jsonl", skipped=told.append)) == 3
    assert [str(error.source).rpartition("/")[2] for error in told] == ["a.jsonl, line 2", "a.jsonl, line 4"]
    assert 'under "messages"; --column names another: this line has messages, id' in str(told[1])
    parquet.write_table(pa.table({"messages": [CHAT, CHAT[:1], CHAT]}), tmp_path / "a.parquet")
    told.clear()
    assert len(chats_of(tmp_path / "a.parquet", skipped=told.append)) == 2
    assert [str(error.source).rpartition("/")[2] for error in told] == ["a.parquet, row 2"]


def test_a_column_without_chats_is_refused(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"messages": ["text"]}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r'column "messages" holds string, not chats\. Name another with --column'):
        chats_of(tmp_path / "a.parquet")


def test_several_processes_and_a_second_call_make_the_same_data_set(tmp_path: Path) -> None:
    sources = [lines(tmp_path / "a.jsonl", [CHAT, CHAT[:2], CHAT[:3]] * 40), written(tmp_path / "b.txt", "plain text")]
    how = Reading("messages", of_chats(), None, template(CHATML))
    made = [
        prepare(
            tmp_path / f"data{processes}",
            sources,
            embedded=False,
            how=how,
            held_out=Fraction(0),
            progress=lambda *_: None,
            processes=processes,
        )
        for processes in (1, 2)
    ]
    assert made[0].digest == made[1].digest
    dataset = TokenDataset.open(made[0].path, made[0].digest)
    assert dataset.is_masked
    tokens = dataset.batch(np.array([0]), dataset.manifest.training.tokens - 1)[0]
    end = how.tokenizer.end_of_document
    assert (tokens == end).sum() == 81, "after the user's words the end of the chat is not learned"
    assert (tokens == ~end).sum() == 40
    assert how.tokenizer.decode(tokens[-11:-1]) == "plain text"
