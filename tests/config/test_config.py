"""Config files: valid values, the errors for others, and configs sent by peers."""

from __future__ import annotations

import json
import re
import tomllib
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from p2ptrain.config import (
    MODEL_PRESETS,
    RECIPES,
    DeviceConfig,
    ModelConfig,
    NodeConfig,
    RecipeConfig,
    RunConfig,
    load,
    load_config,
    load_node_config,
    load_run_config,
    with_options,
)
from p2ptrain.config.fields import K_WORDS, Accepts
from p2ptrain.config.load import exact
from p2ptrain.config.text import THEIR_NAMES, allowed, fields, sections, to_toml
from p2ptrain.errors import ConfigError

ROOT = Path(__file__).parents[2]
KEY = "ab" * 32
PEER = "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooWD3bfmNbuuuVCYwkjnFt3ukm3qaB3hDED3peHHXawvRAi"


def said(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def complaint(load: Any, path: Path | None) -> str:
    """Returns the error of loading `path`, with the path shortened."""
    with pytest.raises(ConfigError) as caught:
        load(path)
    return str(caught.value).replace(str(path), "FILE")


# ---------------------------------------------------------------------------------------------------
# Right files


def test_a_run_file_with_its_name_alone_has_all_the_defaults(tmp_path: Path) -> None:
    assert load_run_config(said(tmp_path / "run.toml", 'name = "a"')) == RunConfig(name="a")


def test_a_number_with_a_point_is_the_fraction_it_was_written_as(tmp_path: Path) -> None:
    text = 'name = "a"\n[recipe]\nlearning_rate = 0.1\ndecay = "999/1000"\nclip = 2\nweight_decay = 1e-3\n'
    text += 'final_ratio = "0.25"'
    recipe = load_run_config(said(tmp_path / "run.toml", text)).recipe
    assert (recipe.learning_rate, recipe.decay, recipe.clip) == (Fraction(1, 10), Fraction(999, 1000), Fraction(2))
    assert (recipe.weight_decay, recipe.final_ratio) == (Fraction(1, 1000), Fraction(1, 4))


def test_a_preset_gives_the_sizes_that_are_not_written(tmp_path: Path) -> None:
    text = 'name = "a"\n[model]\npreset = "10m"\nlayers = 3'
    model = load_run_config(said(tmp_path / "run.toml", text)).model
    assert model == ModelConfig(**{**MODEL_PRESETS["10m"], "preset": "10m", "layers": 3})
    assert model.dim == 320


@pytest.mark.parametrize("name", MODEL_PRESETS)
def test_a_preset_has_about_as_many_parameters_as_its_name_says(name: str) -> None:
    from p2ptrain.models.kinds import parameter_count

    said_count = int(name[:-1]) * {"m": 10**6, "b": 10**9}[name[-1]]
    assert parameter_count(ModelConfig(preset=name)) == pytest.approx(said_count, rel=0.05)


def test_the_description_of_preset_names_every_preset() -> None:
    description = ModelConfig.model_fields["preset"].description
    assert description is not None
    assert re.findall(r"\d+[mb]", description) == list(MODEL_PRESETS)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_gives_the_values_that_are_not_written(name: str, tmp_path: Path) -> None:
    recipe = load_run_config(said(tmp_path / "run.toml", f'name = "a"\n[recipe]\nname = "{name}"\nk = 8')).recipe
    assert recipe == RecipeConfig(**{"name": name, "k": 8, **RECIPES[name].defaults})
    assert {key: getattr(recipe, key) for key in RECIPES[name].defaults} == RECIPES[name].defaults


def test_lists_are_read_from_files(tmp_path: Path) -> None:
    run = load_run_config(said(tmp_path / "run.toml", f'name = "a"\n[admission]\npolicy = "invite"\nkeys = ["{KEY}"]'))
    node = load_node_config(said(tmp_path / "node.toml", f'[network]\nbootstrap = ["{PEER}"]'))
    assert (run.admission.keys, node.network.bootstrap) == ((KEY,), (PEER,))


def test_without_a_file_a_node_has_its_defaults() -> None:
    assert load_node_config(None) == NodeConfig()


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('name = "a"', RunConfig),
        ('name = "a"\n[model]\npreset = "1m"\n[data]', RunConfig),
        ("", NodeConfig),
        ("[device]\nthreads = 3", NodeConfig),
        ("[storage]", NodeConfig),
    ],
)
def test_the_kind_of_a_file_is_told_from_its_keys(text: str, kind: type, tmp_path: Path) -> None:
    assert type(load_config(said(tmp_path / "some.toml", text))) is kind


@pytest.mark.parametrize("text", ["[recepi]\nk = 3\n[modle]\ndim = 3", "[state]"])
def test_a_misspelt_section_or_a_similar_one_does_not_hide_what_a_file_is(text: str, tmp_path: Path) -> None:
    path = said(tmp_path / "some.toml", text)
    assert complaint(load_config, path).startswith("FILE: name: missing. Write name = ")


NODES = {"several_processes.toml"}


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_the_examples_load(path: Path) -> None:
    assert isinstance(load_config(path), NodeConfig if path.name in NODES else RunConfig)


def test_the_tiny_example_has_less_than_a_million_parameters() -> None:
    from p2ptrain.models.kinds import parameter_count

    run = load_run_config(ROOT / "examples" / "tiny.toml")
    assert parameter_count(run.model) <= 1_000_000
    assert run.data.manifest == "embedded"


# ---------------------------------------------------------------------------------------------------
# Wrong files: the whole message, for it is all that a user has

IN_A_RUN = {
    "[recipe]\nkk = 3": "FILE: recipe.kk: unknown key. Did you mean k?",
    "[recipe]\nlerning_rate = 3": "FILE: recipe.lerning_rate: unknown key. Did you mean learning_rate?",
    "[recipe]\npolicy = 3": "FILE: recipe.policy: unknown key. It belongs in [admission]",
    "[recipe]\nseed = 3": "FILE: recipe.seed: unknown key. It belongs in the top of the file",
    "[data]\nzzz = 3": "FILE: data.zzz: unknown key. Known here: manifest, source, assignment, documents",
    "k = 3": "FILE: k: unknown key. It belongs in [recipe]",
    "[modle]": "FILE: modle: unknown key. Did you mean model?",
    "[http]": "FILE: http: unknown key. It belongs in the other kind of config, that of a node",
    '"a\\nb: c" = 3': 'FILE: "a\\nb: c": unknown key. Known here: protocol, name, seed, model, adapt, tokenizer, '
    "data, recipe, state, agreement, admission, eval, world, predecessor",
    "seed = 1.0": "FILE: seed: expected a whole number, found 1.0. Write for instance seed = 0",
    'seed = "3"': 'FILE: seed: expected a whole number, found "3". Write for instance seed = 0',
    "seed = true": "FILE: seed: expected a whole number, found true. Write for instance seed = 0",
    "seed = 1979-05-27": "FILE: seed: expected a whole number, found a date or a time. Write for instance seed = 0",
    "seed = {}": "FILE: seed: expected a whole number, found a table. Write for instance seed = 0",
    "seed = -1": "FILE: seed: -1 is not valid. Choose 0 to below 2**63",
    "seed = 0x" + "f" * 9_999: "FILE: seed: a number beyond 64 bits is not valid. Choose 0 to below 2**63",
    "model = 3": "FILE: model: expected a table, found 3. Write [model] and its keys below it",
    "[recipe]\nk = 0": f"FILE: recipe.k: expected {K_WORDS}, found 0. Write for instance k = 256",
    "[recipe]\nk = 4097": f"FILE: recipe.k: expected {K_WORDS}, found 4097. Write for instance k = 256",
    "[recipe]\ndecay = 1.5": 'FILE: recipe.decay: "3/2" is not valid. Choose 0 to 1',
    "[recipe]\ninner_beta1 = 1": "FILE: recipe.inner_beta1: 1 is not valid. Choose 0 to below 1",
    "[recipe]\nclip = -1": "FILE: recipe.clip: -1 is not valid. Choose 0 or more",
    f"[recipe]\nclip = {2**53}": "FILE: recipe.clip: numerator and denominator must stay below 2**53, "
    f"found {2**53}. Write for instance clip = 1",
    "[recipe]\nclip = nan": "FILE: recipe.clip: expected a finite number of ordinary size, found NaN. "
    "Write for instance clip = 1",
    "[recipe]\nclip = 1e99999": "FILE: recipe.clip: expected a finite number of ordinary size, found 1E+99999. "
    "Write for instance clip = 1",
    "[recipe]\nclip = true": 'FILE: recipe.clip: expected a number, or a fraction in quotes such as "1/3", found true. '
    "Write for instance clip = 1",
    '[recipe]\ndecay = "1/0"': 'FILE: recipe.decay: the denominator is zero, found "1/0". '
    'Write for instance decay = "19/20"',
    f'[recipe]\ndecay = "1/{2**53}"': "FILE: recipe.decay: numerator and denominator must stay below 2**53, "
    f'found "1/{2**53}". Write for instance decay = "19/20"',
    '[recipe]\nouter = "fast"': 'FILE: recipe.outer: "fast" is not valid. Choose "normalised", "mean" or "sign"',
    "[recipe]\nchunk = 48": "FILE: recipe.chunk: 48 is not valid. Choose 8, 16, 32 or 64",
    "protocol = 1": "FILE: protocol: 1 is not valid. Choose 2 or 3",
    '[data]\nmanifest = "abc"': 'FILE: data.manifest: "abc" is not valid. '
    "Choose embedded, or 64 hexadecimal digits in lower case",
    '[admission]\npolicy = "invite"\nkeys = "a"': 'FILE: admission.keys: expected a list in brackets, found "a". '
    "Write for instance keys = []",
    "[admission]\nkeys = [3]": "FILE: admission.keys: expected text in quotes, found 3 in the list. "
    "Write for instance keys = []",
    '[admission]\nkeys = ["AB"]': 'FILE: admission.keys: "AB" is not valid. '
    "Choose a list of at most 640, each 64 hexadecimal digits in lower case",
    "[admission]\nkeys = [" + f'"{KEY}",' * 641 + "]": "FILE: admission.keys: a list of 641 is too long. "
    "Write a list of at most 640, each 64 hexadecimal digits in lower case",
    # combinations
    f'[admission]\npolicy = "invite"\nkeys = ["{KEY}", "{KEY}"]': "FILE: admission: keys has the same key twice. "
    "Remove one",
    '[admission]\npolicy = "invite"': 'FILE: admission: keys belong to policy = "invite" or "allowlist". '
    "Add the public keys for invite",
    f'[admission]\nkeys = ["{KEY}"]': 'FILE: admission: keys belong to policy = "invite" or "allowlist". Remove them',
    '[model]\npreset = "2m"': "FILE: model: unknown preset '2m'. Use one of 1m, 5m, 10m, 30m, 100m, 300m, 1b or custom",
    "[model]\npreset = [1]": "FILE: model: unknown preset [1]. Use one of 1m, 5m, 10m, 30m, 100m, 300m, 1b or custom",
    "[model]\nheads = 3": "FILE: model: heads = 3 does not divide dim = 128. Make dim a multiple of heads",
    "[model]\ndim = 132": "FILE: model: dim / heads = 33 is odd. Rotary positions need pairs, choose an even one",
    "[model]\nkv_heads = 3": "FILE: model: kv_heads = 3 does not divide heads = 4. Choose a divisor",
    "[model]\nvocab_size = 300": "FILE: model.vocab_size = 300. The bytes tokenizer has 256 tokens, set 256",
    '[tokenizer]\nkind = "json"': 'FILE: tokenizer: kind = "json" needs a digest. '
    "Add the one that `p2ptrain data prepare` printed",
    f'[tokenizer]\ndigest = "{KEY}"': 'FILE: tokenizer: only kind = "json" takes a digest. Remove it',
    '[recipe]\nname = "distra"': "FILE: recipe: unknown recipe 'distra'. Use one of distro, demo, local",
    "[recipe]\nname = 3": 'FILE: recipe.name: expected text in quotes, found 3. Write for instance name = "local"',
    "[recipe]\nchunk = 8\nk = 33": "FILE: recipe: k = 33 is more than half of the 64 coefficients of a chunk. "
    'Choose at most 32, or with transform = "none" k = 64 to send every weight',
    '[recipe]\nname = "distro"\nvalue_bits = 2': "FILE: recipe: value_bits = 2. Recipe distro sends only signs, "
    "use 1 or recipe demo",
    '[recipe]\nname = "distro"\nlocal_steps = 2': "FILE: recipe: local_steps = 2. Recipe distro takes one step "
    "per round, use passes_per_step or recipe local",
    '[recipe]\nname = "distro"\nlocal_steps_min = 1': "FILE: recipe: local_steps_min = 1. Recipe distro takes one step "
    "per round, never fewer, use 0 or recipe local",
    "[recipe]\nlocal_steps_min = 11": "FILE: recipe: local_steps_min = 11 is above local_steps = 10. Lower it",
    '[recipe]\nname = "local"\nsequences_per_pass = 65536\nlocal_steps = 17': "FILE: recipe: sequences_per_pass * "
    "passes_per_step * local_steps = 1114112. Keep it at 1048576 or below",
    "[recipe]\nlearning_rate = 0.1\nweight_decay = 11": "FILE: recipe: learning_rate * weight_decay is above 1. "
    "Weights would change sign, lower weight_decay",
    "[recipe]\nrounds = 2": "FILE: recipe: rounds and decay_rounds shape a rate that ends. "
    'Remove them or set schedule = "linear" or "wsd"',
    '[recipe]\nschedule = "linear"': 'FILE: recipe: schedule = "linear" needs rounds > warmup_rounds, '
    "and no decay_rounds",
    '[recipe]\nschedule = "wsd"\nrounds = 10': 'FILE: recipe: schedule = "wsd" needs decay_rounds > 0 '
    "and rounds >= warmup_rounds + decay_rounds",
    '[recipe]\nname = "demo"\nk = 512': "FILE: admission.contributors_max = 1024 could leave exact arithmetic with "
    "recipe.k = 512 and value_bits = 3. Set at most 512, or fewer of those",
    "[agreement]\nview_seconds = 70": "FILE: agreement: view_seconds = 70 is above view_seconds_max = 60. Lower it",
    "[agreement]\noverlap_rounds = 1\nstaleness_rounds_max = 0": "FILE: agreement: nodes that overlap "
    "contribute from weights that are one round old. Set staleness_rounds_max to 1 or more",
    "[agreement]\noverlap_rounds = 2": 'FILE: agreement.overlap_rounds: 2 is not valid. Choose "auto", 0 or 1',
}


@pytest.mark.parametrize("text", IN_A_RUN, ids=lambda text: text[:40])
def test_a_mistake_in_a_run_file_is_told_with_its_key_and_what_to_do(text: str, tmp_path: Path) -> None:
    path = said(tmp_path / "run.toml", f'name = "a"\n{text}' if not text.startswith("name") else text)
    assert complaint(load_run_config, path) == IN_A_RUN[text]


BLOCKS = "recipe.chunk, the side of a block: 64 means blocks of 64 x 64"
BITS = "recipe.value_bits: 1 for true, 2 or more for false"
OF_OTHERS = {
    "[recipe]\ncompression_decay = 0.999": ["recipe.decay"],
    "[recipe]\ncompression_topk = 8": ["recipe.k"],
    "[recipe]\ncompression_chunk = 64": [BLOCKS],
    "[recipe]\nquantize_1bit = true": [BITS],
    "[recipe]\nquantize_1bit = false": [BITS],
    "[recipe]\ninner_steps = 30": ["recipe.local_steps"],
    "[recipe]\nouter_lr = 0.7": ["recipe.learning_rate"],
    "[recipe]\nouter_momentum = 0.9": ["recipe.momentum"],
    "[recipe]\nouter_nesterov = true": ["recipe.nesterov"],
    "[recipe]\ninner_lr = 0.001": ["recipe.inner_learning_rate"],
    "[recipe]\nerror_decay = 0.95": ["recipe.decay"],
    "[recipe]\nclip_grad_norm = 1.0": ["recipe.clip"],
    "[model]\nd_model = 512": ["model.dim"],
    "[model]\nd_ff = 2048": ["model.ffn_dim"],
    "topk = 32": ["recipe.k"],
    'compression = "none"': [
        'recipe.k, the numbers sent of each block; none: transform = "none", k = 4096 and value_bits = 24'
    ],
    "[recipe]\ntarget_chunk = 64": [BLOCKS],
    "[recipe]\nuse_dct = false": ['recipe.transform: "dct" for true, "none" for false'],
    "[recipe]\nmax_staleness = 2": ["agreement.staleness_rounds_max"],
    "[recipe]\ncompression_ratio = 100": [
        "recipe.k, the numbers sent of each block, and recipe.value_bits, the bits of each"
    ],
    '[agreement]\naggregation_rule = "mean"': [
        "recipe.rule, which contributions count, and recipe.outer, how their sum becomes an update"
    ],
    "[recipe]\nbulyan_f = 2": ["recipe.byzantine, the number of contributions that may be lies"],
    "[recipe]\nkrum_f = 2": ["recipe.byzantine, the number of contributions that may be lies"],
    "[recipe]\ntrim_ratio = 0.1": ["recipe.trim, a number of contributions"],
    "[controller]": ["[agreement] and [admission]: the nodes settle it among themselves"],
    "[training]": ["[recipe], and what is trained on [data]"],
    "[training]\nbatch_size = 8\nclip_grad_norm = 1.0": ["[recipe], and what is trained on [data]", "recipe.clip"],
    "[model.LLM]\nmax_seq_len = 2048": ["[model], and its optimizer [recipe]"],
    "[model.LLM.optimizer.Distro]\ncompression_chunk = 64\nquantize_1bit = false": [
        "[model], and its optimizer [recipe]", '[recipe] with name = "distro"', BLOCKS, BITS,
    ],
}  # fmt: skip


@pytest.mark.parametrize("text", OF_OTHERS, ids=lambda text: text[:60])
def test_another_systems_name_is_answered_with_what_it_is_here(text: str, tmp_path: Path) -> None:
    told = complaint(load_run_config, said(tmp_path / "run.toml", f'name = "a"\n{text}'))
    found = re.fullmatch(r"FILE: (\S+): unknown key\. (.*)", told)
    assert found is not None, told
    answers = re.findall(r"Here (\w+) is (.+?)(?:\. (?=Here)|$)", found[2])
    assert [answer for _, answer in answers] == OF_OTHERS[text]
    assert answers[0][0] == found[1].split(".")[-1]
    assert all(name in text for name, _ in answers)


def test_every_name_of_others_is_tested_and_none_is_ours() -> None:
    tested = {name for name in THEIR_NAMES if any(re.search(rf"\b{name}\b", text) for text in OF_OTHERS)}
    assert tested == THEIR_NAMES.keys()
    ours = {key for _, key, _ in fields(RunConfig)} | sections(RunConfig).keys()
    assert not ours & THEIR_NAMES.keys()
    named = {key for text in THEIR_NAMES.values() for key in re.findall(r"\b[a-z_]+\.([a-z_]+)\b", text)}
    assert named <= ours


def test_the_names_of_others_are_answered_in_a_nodes_file_too(tmp_path: Path) -> None:
    path = said(tmp_path / "node.toml", "[training]\ntopk = 8")
    assert complaint(load_node_config, path) == (
        "FILE: training: unknown key. Here training is [recipe], and what is trained on [data]. Here topk is recipe.k"
    )


IN_A_NODE = {
    "[network]\nlisten = ['tcp://0.0.0.0:4001']": 'FILE: network.listen: "tcp://0.0.0.0:4001" is not valid. Choose '
    'a list of at most 64, each an address of this machine such as "/ip4/0.0.0.0/tcp/4001"',
    "[network]\nbootstrap = ['/ip4/203.0.113.7/tcp/4001']": 'FILE: network.bootstrap: "/ip4/203.0.113.7/tcp/4001" is '
    "not valid. Choose a list of at most 64, each a node's address with its id at the end, such as "
    '"/ip4/203.0.113.7/tcp/4001/p2p/12D3KooW..."',
    "[device]\nname = 'gpu'": 'FILE: device.name: "gpu" is not valid. Choose '
    "auto, cpu, mps, cuda, cuda:N, cuda:all or a list of cuda:N",
    "[device]\nname = 'cuda:١'": 'FILE: device.name: "cuda:١" is not valid. Choose '
    "auto, cpu, mps, cuda, cuda:N, cuda:all or a list of cuda:N",
    "[limits]\nhours = '25:00-07:00'": 'FILE: limits.hours: "25:00-07:00" is not valid. '
    'Choose hours such as "22:00-07:00", or nothing',
    "[limits]\nhours = '07:00-07:00'": 'FILE: limits: hours = "07:00-07:00" leaves no time to train. '
    'Write "" for the whole day',
    "[http]\nport = 65536": "FILE: http.port: 65536 is not valid. Choose 0 to 65,535",
    "[http]\nhost = '0.0.0.0'": 'FILE: http: host = "0.0.0.0" would show the node to everyone on the network. '
    'Name a token_file, or set host = "127.0.0.1"',
    "[http]\nhost = 'example.org'": 'FILE: http: host = "example.org" would show the node to everyone on the network. '
    'Name a token_file, or set host = "127.0.0.1"',
    "[recipe]": "FILE: recipe: unknown key. It belongs in the other kind of config, that of a run",
    "[storage]\ndirectory = '~nobody at all/x'": "FILE: storage.directory: expected a path whose ~ stands for a known "
    'home directory, found "~nobody at all/x". Write for instance directory = ""',
    # pydantic-settings takes arguments with such names, which would read another file
    "_env_file = 'x'": "FILE: _env_file: unknown key. Known here: identity, network, device, limits, storage, "
    "privacy, audit, succession, http, plugins, region, tracking, logging",
    "[privacy]\nnoise = 2": "FILE: privacy: epsilon is 0, so there is no privacy. Set it, or remove the other keys",
    "[privacy]\nepsilon = -1": "FILE: privacy.epsilon: -1 is not valid. Choose 0 to 1,000",
}


@pytest.mark.parametrize("text", IN_A_NODE, ids=lambda text: text[:40])
def test_a_mistake_in_a_node_file_is_told_with_its_key_and_what_to_do(text: str, tmp_path: Path) -> None:
    assert complaint(load_node_config, said(tmp_path / "node.toml", text)) == IN_A_NODE[text]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "localhost"])
def test_http_on_loopback_needs_no_token(host: str, tmp_path: Path) -> None:
    assert load_node_config(said(tmp_path / "node.toml", f'[http]\nhost = "{host}"')).http.host == host


def test_http_for_the_network_is_possible_with_a_token(tmp_path: Path) -> None:
    node = load_node_config(said(tmp_path / "node.toml", '[http]\nhost = "0.0.0.0"\ntoken_file = "token"'))
    assert (node.http.host, node.http.token_file) == ("0.0.0.0", "token")


def test_all_mistakes_are_told_at_once_a_line_each(tmp_path: Path) -> None:
    path = said(tmp_path / "run.toml", 'nmae = "a"\nseed = -1\n[recipe]\nkk = 3\nouter = "x"')
    assert complaint(load_run_config, path).splitlines() == [
        "FILE: name: missing. Write name = ...: "
        "1 to 64 letters, digits, dots, dashes and underscores, a letter or digit first",
        "FILE: seed: -1 is not valid. Choose 0 to below 2**63",
        'FILE: recipe.outer: "x" is not valid. Choose "normalised", "mean" or "sign"',
        "FILE: recipe.kk: unknown key. Did you mean k?",
        "FILE: nmae: unknown key. Did you mean name?",
    ]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (
            b"a = 1\nb c = 2",
            "not TOML: Expected '=' after a key in a key/value pair (at line 2, column 3). Correct the file there",
        ),
        (b"a = 1\na = 2\n", "not TOML: Cannot overwrite a value (at line 2, column 6). Correct the file there"),
        (b"a = 1\nb = '\xff'", "line 2 is not UTF-8 text. Save it as UTF-8"),
        (b"a = " + b"9" * 5_000, "a number is too large. Write one of ordinary size"),
        (b"a = 1e" + b"9" * 30, "a number is too large. Write one of ordinary size"),
        (b"a = " + b"[" * 10_000, "lists or tables are nested too deeply. Write sections and keys"),
        (b"#" * 262_145, "larger than 262,144 bytes, which no config needs. Check that this is the right file"),
    ],
    ids=["syntax", "twice", "utf-8", "digits", "exponent", "nested", "large"],
)
@pytest.mark.parametrize("load", [load_run_config, load_node_config, load_config])
def test_a_file_that_cannot_be_parsed_is_told_with_its_place(
    content: bytes, problem: str, load: Any, tmp_path: Path
) -> None:
    assert complaint(load, said(tmp_path / "bad.toml", content)) == f"FILE: {problem}"


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    expected = "FILE: cannot be read: No such file or directory. Check the name and the permissions"
    assert complaint(load_run_config, tmp_path / "none.toml") == expected
    assert complaint(load_node_config, tmp_path) == expected.replace("No such file or directory", "Is a directory")
    assert complaint(load_config, Path("a\0b")) == expected.replace("No such file or directory", "embedded null byte")


TOML_VALUES = st.recursive(
    # TOML has no signalling NaN.
    st.integers() | st.decimals(allow_nan=False) | st.just(Decimal("nan")) | st.text(max_size=9) | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(data=st.data())
def test_any_value_in_any_key_is_taken_or_refused_with_a_config_error(data: st.DataObject) -> None:
    model, check = data.draw(st.sampled_from([(RunConfig, load.run_config_of), (NodeConfig, load._node_config)]))
    table: dict[str, Any] = {"name": "a"} if model is RunConfig else {}
    for section, key, _ in data.draw(st.lists(st.sampled_from(list(fields(model))), min_size=1, max_size=3)):
        (table.setdefault(section, {}) if section else table)[key] = data.draw(TOML_VALUES)
    table |= data.draw(st.dictionaries(st.text(max_size=5), TOML_VALUES, max_size=1))
    try:
        check(table, Path("FILE"))
    except ConfigError as error:
        assert all(line.startswith("FILE: ") for line in str(error).splitlines())


# ---------------------------------------------------------------------------------------------------
# The environment


def test_the_environment_goes_before_the_file_and_the_file_before_the_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("P2PTRAIN_DEVICE__THREADS", "3")
    monkeypatch.setenv("P2PTRAIN_LOGGING__LEVEL", "debug")
    node = load_node_config(said(tmp_path / "node.toml", '[device]\nthreads = 2\nname = "cpu"'))
    assert node.device == DeviceConfig(name="cpu", threads=3)
    assert node.logging.model_dump() == {"level": "debug", "format": "auto"}


def test_lists_in_the_environment_have_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P2PTRAIN_NETWORK__BOOTSTRAP", f"{PEER}, {PEER}")
    assert load_node_config(None).network.bootstrap == (PEER, PEER)


def test_a_path_may_begin_with_the_home_directory_wherever_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/at/mine")
    paths = {
        (section, key)
        for section, key, field in fields(NodeConfig)
        if any(isinstance(each, Accepts) and each.text == "a path" for each in field.metadata)
    }
    assert paths >= {("storage", "directory"), ("identity", "file"), ("http", "token_file"), ("tracking", "wandb")}
    for section, key in paths:
        node = load_node_config(said(tmp_path / "node.toml", f'[{section}]\n{key} = "~/a b"'))
        assert getattr(getattr(node, section), key) == "/at/mine/a b"
        node = load_node_config(said(tmp_path / "node.toml", f'[{section}]\n{key} = "a/~/b"'))
        assert getattr(getattr(node, section), key) == "a/~/b"  # only at the beginning, as a shell does
        node = with_options(NodeConfig(), {(section, key): "~"})
        assert getattr(getattr(node, section), key) == "/at/mine"
        monkeypatch.setenv(f"P2PTRAIN_{section}__{key}".upper(), "~/from/outside")
        assert getattr(getattr(load_node_config(None), section), key) == "/at/mine/from/outside"


def test_an_empty_variable_counts_as_unset_and_names_without_two_underscores_are_not_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("P2PTRAIN_DEVICE__THREADS", "")
    monkeypatch.setenv("P2PTRAIN_SERVICE_HOST", "10.0.0.1")
    assert load_node_config(None) == NodeConfig()


@pytest.mark.parametrize(
    ("variables", "problems"),
    [
        (
            {"DEVICE__THREADS": "two"},
            ['environment variable P2PTRAIN_DEVICE__THREADS: device.threads: expected a whole number, found "two". '
             "Write for instance threads = 0"],
        ),
        (
            {"DEVICE__THREADS": "2000"},
            ["environment variable P2PTRAIN_DEVICE__THREADS: device.threads: 2000 is not valid. Choose 0 to 1,024"],
        ),
        (
            {"DEVICE__THREDS": "2"},
            ["environment variable P2PTRAIN_DEVICE__THREDS: unknown. Did you mean P2PTRAIN_DEVICE__THREADS?"],
        ),
        (
            {"DEVISE__THREADS": "2"},
            ["environment variable P2PTRAIN_DEVISE__THREADS: unknown. Did you mean P2PTRAIN_DEVICE__THREADS?"],
        ),
        (
            {"DEVICE__THREADS__X": "2", "ZZ__Q": "1"},
            ["environment variable P2PTRAIN_DEVICE__THREADS__X: unknown. Did you mean P2PTRAIN_DEVICE__THREADS?",
             "environment variable P2PTRAIN_ZZ__Q: unknown. Remove it"],
        ),
        (
            {"HTTP__HOST": "::"},
            ['environment variable P2PTRAIN_HTTP__HOST: http: host = "::" would show the node to everyone on the '
             'network. Name a token_file, or set host = "127.0.0.1"'],
        ),
        (
            {"DEVICE": "x"},
            ["environment variable P2PTRAIN_DEVICE: unknown. Did you mean P2PTRAIN_DEVICE__NAME?"],
        ),
    ],
)  # fmt: skip
def test_a_mistake_in_the_environment_names_the_variable(
    variables: dict[str, str], problems: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"P2PTRAIN_{name}", value)
    assert complaint(load_node_config, None).splitlines() == problems
    assert complaint(load_node_config, said(tmp_path / "node.toml", "")).splitlines() == problems


# ---------------------------------------------------------------------------------------------------
# Every key is documented


@pytest.mark.parametrize("model", [RunConfig, NodeConfig])
def test_every_key_says_what_it_means_and_what_it_takes(model: type[BaseModel]) -> None:
    for section, key, field in fields(model):
        assert field.description, f"{section}.{key} has no description"
        assert allowed(field), f"{section}.{key} does not say what it takes"
    for name, table in sections(model).items():
        assert table.__doc__, f"[{name}] has no docstring"


@pytest.mark.parametrize("model", [RunConfig, NodeConfig])
def test_every_number_has_a_lower_bound_and_every_text_an_upper_one(model: type[BaseModel]) -> None:
    unbounded = []
    for section, key, field in fields(model):
        limits = {name for item in field.metadata for name in ("ge", "gt", "le", "lt") if hasattr(item, name)}
        if field.annotation is int and not (limits & {"ge", "gt"} and limits & {"le", "lt"}):
            unbounded.append(f"{section}.{key}")
        if field.annotation is Fraction and not limits & {"ge", "gt"}:
            unbounded.append(f"{section}.{key}")
        has_length = any(hasattr(item, "max_length") or hasattr(item, "pattern") for item in field.metadata)
        if (
            field.annotation is str
            and not has_length
            and (section, key) not in {("model", "preset"), ("recipe", "name")}
        ):
            unbounded.append(f"{section}.{key}")  # those two are checked against a list of their own
    assert unbounded == []


def test_the_example_shows_every_key_of_a_node_with_its_default() -> None:
    text = (ROOT / "node_config.example.toml").read_text()
    shown = tomllib.loads(re.sub(r"^#(?=\w+ = )", "", text, flags=re.MULTILINE))
    assert shown == json.loads(NodeConfig().model_dump_json())


def test_the_example_says_of_every_key_what_it_means_and_takes() -> None:
    text = (ROOT / "node_config.example.toml").read_text()
    for name, table in sections(NodeConfig).items():
        body = text.partition(f"\n[{name}]\n")[2].partition("\n[")[0]
        for key, field in table.model_fields.items():
            above = body.partition(f"\n#{key} = ")[0].rpartition("\n\n")[2]
            words = " ".join(line.removeprefix("# ") for line in above.splitlines())
            assert words == f"{field.description} takes {allowed(field)}", f"{name}.{key}"


def test_a_path_has_no_zero_byte(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"storage\.directory"):
        load_node_config(said(tmp_path / "node.toml", '[storage]\ndirectory = "a\\u0000b"\n'))


def test_a_script_may_say_numpys_numbers() -> None:
    assert exact({"rate": np.float64(0.1)}) == {"rate": Decimal("0.1")}


def test_the_example_is_a_right_file_as_it_stands() -> None:
    assert load_config(ROOT / "node_config.example.toml") == NodeConfig()


def test_a_node_comes_back_from_its_file(tmp_path: Path) -> None:
    text = f'[network]\nbootstrap = ["{PEER}"]\n[storage]\ndirectory = "a\\u007f\\"\\\\ü\\n"\n[device]\nthreads = 3'
    node = load_node_config(said(tmp_path / "node.toml", text))
    assert node.storage.directory == 'a\x7f"\\ü\n'
    assert load_node_config(said(tmp_path / "again.toml", to_toml(node))) == node
