"""The canonical encoding of a run's config, which its id is the digest of, as peers send it."""

from __future__ import annotations

import json
import re
import tomllib
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from p2ptrain.config import (
    BASIS_PEAK,
    CONFIG_BYTES_MAX,
    EXACT_MAX,
    AdmissionConfig,
    DataConfig,
    ModelConfig,
    RecipeConfig,
    RunConfig,
    TokenizerConfig,
    load,
)
from p2ptrain.config.adapt import BASE_BYTES_MAX
from p2ptrain.config.run import EvalConfig
from p2ptrain.config.text import sections, to_toml
from p2ptrain.errors import ConfigError, RemoteProtocolError

ROOT = Path(__file__).parents[2]
KEY = "ab" * 32


def rationals(low: int, high: int | None) -> st.SearchStrategy[Fraction]:
    return (
        st.fractions(low, high, max_denominator=10**6)
        if high is not None
        else st.fractions(low, 10**6, max_denominator=10**6)
    )


@st.composite
def runs(draw: st.DrawFn) -> RunConfig:
    """Draws run configs of every kind, most of them valid."""
    heads = draw(st.sampled_from([1, 2, 4, 8]))
    kind = draw(st.sampled_from(["bytes", "json"]))
    name = draw(st.sampled_from(["distro", "demo", "local"]))
    chunk = draw(st.sampled_from([8, 16, 32, 64]))
    warmup = draw(st.integers(0, 100))
    schedule = draw(
        st.sampled_from(
            [
                {"schedule": "constant"},
                {"schedule": "linear", "rounds": warmup + 1},
                {"schedule": "wsd", "rounds": warmup + 7, "decay_rounds": 7},
            ]
        )
    )
    policy = draw(st.sampled_from(["open", "invite", "allowlist"]))
    keys = draw(st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=5, unique=True))
    founders = draw(st.lists(st.binary(min_size=32, max_size=32), max_size=5, unique=True))
    return RunConfig(
        name=draw(st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")),
        seed=draw(st.integers(0, 2**63 - 1)),
        model=ModelConfig(
            vocab_size=256 if kind == "bytes" else draw(st.integers(2, 2**20)),
            heads=heads,
            kv_heads=heads,
            dim=heads * 2 * draw(st.integers(4, 100)),
            rope_theta=draw(st.integers(1, 2**40)),
        ),
        tokenizer=TokenizerConfig(kind=kind, digest=KEY if kind == "json" else ""),
        data=DataConfig(manifest=draw(st.sampled_from(["embedded", KEY]))),
        recipe=RecipeConfig(
            **{
                "name": name,
                "chunk": chunk,
                "k": draw(st.integers(1, min(chunk**2 // 2, 128))),
                "decay": draw(rationals(0, 1)),
                "learning_rate": draw(rationals(0, None)),
                "warmup_rounds": warmup,
                **schedule,
            }
        ),
        admission=AdmissionConfig(
            policy=policy,
            keys=() if policy == "open" else tuple(key.hex() for key in keys),
            founders=tuple(key.hex() for key in founders),
        ),
    )


@given(run=runs())
def test_a_run_comes_back_from_its_canonical_encoding(run: RunConfig) -> None:
    encoded = run.canonical()
    assert RunConfig.from_canonical(encoded) == run
    assert RunConfig.from_canonical(encoded).canonical() == encoded
    assert b"." not in re.sub(rb'"[^"]*"', b"", encoded), "a number with a point"


@given(run=runs())
def test_a_run_comes_back_from_its_file(run: RunConfig) -> None:
    assert load.run_config_of(tomllib.loads(to_toml(run), parse_float=Decimal), Path("FILE")) == run


def test_the_canonical_encoding_is_golden() -> None:
    """Once 0.1.0 is out, only a new protocol version may change it; until then, a new key does. Defaults may change."""
    kept = (ROOT / "tests" / "golden" / "run_config.json").read_bytes()
    run = RunConfig.from_canonical(kept)
    assert run.canonical() == kept
    assert run.run_id == "1beb7eab5605d0306bce62d2e459c661b8ca999bb3988f77eacb73d1bc51d25c"


def test_a_config_without_one_of_the_keys_is_refused() -> None:
    for part in (b'"idle_round_seconds":60,', b'"eval":{"every_rounds":50},'):
        assert part in GOOD
        with pytest.raises(RemoteProtocolError, match="canonical"):
            RunConfig.from_canonical(GOOD.replace(part, b""))


def test_the_held_out_loss_is_measured_every_so_many_rounds() -> None:
    assert [number for number in range(101) if RunConfig(name="a").eval.is_due(number)] == [0, 50, 100]
    assert not any(EvalConfig(every_rounds=0).is_due(number) for number in (0, 1, 50))


def test_every_key_changes_the_run_id() -> None:
    run = RunConfig(name="a").sealed(manifest=KEY, initial_root=KEY, founders=[KEY])
    changed = {
        run.model_copy(update={"name": "b"}).run_id,
        run.model_copy(update={"seed": 1}).run_id,
        run.sealed(manifest="cd" * 32, initial_root=KEY, founders=[KEY]).run_id,
        run.sealed(manifest=KEY, initial_root="cd" * 32, founders=[KEY]).run_id,
        run.sealed(manifest=KEY, initial_root=KEY, founders=["cd" * 32]).run_id,
        run.sealed(manifest=KEY, initial_root=KEY, founders=[KEY, "cd" * 32]).run_id,
        run.model_copy(update={"recipe": RecipeConfig(decay=Fraction(1, 3))}).run_id,
    }
    assert len(changed | {run.run_id}) == 8
    assert run.run_id == run.id.hex()


def test_the_founders_make_the_same_run_in_any_order() -> None:
    keys = [f"{index:064x}" for index in range(4)]
    ids = {
        RunConfig(name="a").sealed(manifest=KEY, initial_root=KEY, founders=order).run_id
        for order in (keys, keys[::-1])
    }
    assert len(ids) == 1


@pytest.mark.parametrize(
    ("admission", "why"),
    [
        ({"founders": (KEY, KEY)}, "founders has the same key twice: remove one"),
        ({"founders": (KEY, "cd" * 32), "seats_max": 1}, "founders has 2 keys, and seats_max is 1: raise seats_max"),
        ({"founders": (KEY, "cd" * 32), "contributors_max": 1}, "and contributors_max is 1: raise contributors_max"),
    ],
)
def test_founders_that_cannot_be_the_first_members_are_refused(admission: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        AdmissionConfig(**admission)


def test_an_unsealed_run_has_no_id_and_says_what_to_do() -> None:
    with pytest.raises(
        ConfigError, match=r"^state.initial_root: the run has no id yet. Start it first, which makes the first"
    ):
        _ = RunConfig(name="a").run_id
    assert not RunConfig(name="a").is_sealed
    assert not RunConfig(name="a").sealed(manifest="embedded", initial_root=KEY, founders=[KEY]).is_sealed
    assert not RunConfig(name="a").sealed(manifest=KEY, initial_root="", founders=[KEY]).is_sealed
    assert not RunConfig(name="a").sealed(manifest=KEY, initial_root=KEY, founders=[]).is_sealed
    assert RunConfig(name="a").sealed(manifest=KEY, initial_root=KEY, founders=[KEY]).is_sealed


def test_the_largest_config_fits_its_limit() -> None:
    largest: dict[str, Any] = {"name": "a" * 64, "seed": 2**63 - 1}
    for name, table in sections(RunConfig).items():
        largest[name] = {
            key: next(item.le for item in field.metadata if hasattr(item, "le"))
            for key, field in table.model_fields.items()
            if field.annotation is int
        }
        largest[name] |= {
            key: Fraction(2**53 - 2, 2**53 - 1)
            for key, field in table.model_fields.items()
            if field.annotation is Fraction
        }
    largest["model"] |= {"dim": 2**16, "heads": 1024, "kv_heads": 1024}
    targets = tuple("a" * 78 + f"{number:02}" for number in range(32))
    largest["adapt"] |= {"kind": "lora", "base": KEY, "targets": targets}
    largest["tokenizer"] = {"kind": "json", "digest": KEY}
    largest["predecessor"] |= {"run": KEY, "head": KEY}
    largest["data"] = {"manifest": KEY}
    largest["recipe"] |= {"name": "local", "schedule": "wsd", "value_bits": 1, "transform": "none", "fragments": 1}
    largest["recipe"] |= {"momentum": Fraction(2**53 - 2**40, 2**53 - 1), "nesterov": True}
    largest["recipe"] |= {"warmup_rounds": 2**39, "decay_rounds": 2**39, "passes_per_step": 4, "local_steps": 4}
    largest["agreement"]["staleness_rounds_max"] = 20
    largest["recipe"] |= {"local_steps_min": 4, "rule": "trimmed_coordinates", "trim": 127, "byzantine": 0}
    largest["admission"] |= {"policy": "allowlist", "keys": tuple(f"{index:064x}" for index in range(640))}
    founders = [f"{index:064x}" for index in range(256)]
    base = KEY, BASE_BYTES_MAX
    run = RunConfig.model_validate(largest).sealed(manifest=KEY, initial_root=KEY, founders=founders, base=base)
    assert run.is_sealed
    assert len(run.canonical()) <= CONFIG_BYTES_MAX
    assert RunConfig.from_canonical(run.canonical()) == run


def test_the_exact_bound_is_that_of_the_arithmetic() -> None:
    run = RunConfig(name="a")
    votes = run.admission.contributors_max * run.recipe.k_max * run.recipe.vote_max
    assert votes * BASIS_PEAK**2 < EXACT_MAX


def altered(**changes: Any) -> bytes:
    """Returns a run's canonical encoding with some keys of its recipe replaced."""
    raw = json.loads(RunConfig(name="a").canonical())
    raw["recipe"] |= changes
    return json.dumps(raw, sort_keys=True, separators=(",", ":")).encode()


GOOD = RunConfig(name="a").canonical()
HOSTILE = {
    "nothing": b"",
    "no JSON": b"\x00\xff",
    "another type": b"[]",
    "a number": b"1",
    "cut short": GOOD[:-1],
    "followed by a space": GOOD + b" ",
    "preceded by a space": b" " + GOOD,
    "with a byte order mark": b"\xef\xbb\xbf" + GOOD,
    "white space inside": GOOD.replace(b",", b", ", 1),
    "another order": json.dumps(dict(reversed(json.loads(GOOD).items())), separators=(",", ":")).encode(),
    "a key twice": GOOD.replace(b'"seed":0', b'"seed":0,"seed":0'),
    "a key twice, differing": GOOD.replace(b'"seed":0', b'"seed":1,"seed":0'),
    "a key missing": GOOD.replace(b'"seed":0,', b""),
    "an unknown key": GOOD.replace(b'"seed":0', b'"seed":0,"seee":0'),
    "escaped text": GOOD.replace(b'"name":"a"', b'"name":"\\u0061"'),
    "a lone surrogate as value": GOOD.replace(b'"name":"a"', b'"name":"\\ud800"'),
    "a lone surrogate as key": GOOD.replace(b'"seed":0', b'"seed":0,"\\ud800":0'),
    "raw surrogate bytes": GOOD.replace(b'"name":"a"', b'"name":"\xed\xa0\x80"'),
    "a minus before zero": GOOD.replace(b'"seed":0', b'"seed":-0'),
    "a float": GOOD.replace(b'"seed":0', b'"seed":0.0'),
    "an exponent": GOOD.replace(b'"seed":0', b'"seed":0e0'),
    "a leading zero": GOOD.replace(b'"seed":0', b'"seed":00'),
    "NaN": GOOD.replace(b'"seed":0', b'"seed":NaN'),
    "infinity": GOOD.replace(b'"seed":0', b'"seed":-Infinity'),
    "true for one": GOOD.replace(b'"absence_rounds_max":10', b'"absence_rounds_max":true'),
    "text for a number": GOOD.replace(b'"seed":0', b'"seed":"0"'),
    "thousands of digits": GOOD.replace(b'"seed":0', b'"seed":' + b"9" * 50_000),
    "thousands of digits in a fraction": altered(decay="9" * 50_000),
    "thousands of digits as a fraction": GOOD.replace(b'"19/20"', b"9" * 50_000),
    "a fraction not in lowest terms": altered(decay="2/4"),
    "a decimal": altered(decay="0.5"),
    "a whole number with a point": altered(decay="1.0"),
    "a denominator of one": altered(decay="1/1"),
    "minus zero": altered(decay="-0"),
    "a plus": altered(decay="+1"),
    "a number for a fraction": altered(decay=1),
    "a float for a fraction": altered(decay=0.5),
    "NaN for a fraction": GOOD.replace(b'"19/20"', b"NaN"),
    "a zero denominator": altered(decay="1/0"),
    "other digits": altered(decay="١/٢"),
    "an underscore": altered(decay="1_0/2_0"),
    "nested lists": b"[" * 60_000,
    "nested tables": b'{"a":' * 12_000,
    "nested in a key": GOOD.replace(b'"seed":0', b'"seed":' + b"[" * 30_000 + b"]" * 30_000),
    "nested in a preset": GOOD.replace(b'"preset":"custom"', b'"preset":' + b"[" * 150 + b"]" * 150),
    "a list for a preset": GOOD.replace(b'"preset":"custom"', b'"preset":[]'),
    "a table for a recipe's name": altered(name={}),
    "a recipe of another alphabet": altered(name="ｄｉｓｔｒｏ"),
    "a recipe to import": altered(name="package.module:Name"),
    "an impossible combination": altered(k=512, chunk=8),
    "many unknown keys": b"{" + b",".join(b'"%d":0' % index for index in range(6_000)) + b"}",
    "a megabyte": b" " * 2**20,
    "a megabyte of a name": GOOD.replace(b'"name":"a"', b'"name":"' + b"a" * 2**20 + b'"'),
}


@pytest.mark.parametrize("encoded", HOSTILE.values(), ids=HOSTILE)
def test_what_is_not_canonical_is_the_peers_fault(encoded: bytes) -> None:
    assert encoded != GOOD
    with pytest.raises(RemoteProtocolError) as caught:
        RunConfig.from_canonical(encoded)
    assert caught.value.why.isascii()
    assert caught.value.why.isprintable()
    assert caught.value.why.startswith("run config")
    assert len(caught.value.why) <= 500


@given(data=st.data())
@settings(max_examples=300)
def test_no_change_of_a_canonical_encoding_is_taken_for_the_same_run(data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(GOOD) - 1))
    cut = data.draw(st.integers(0, 3))
    changed = GOOD[:position] + data.draw(st.binary(max_size=4)) + GOOD[position + cut :]
    try:
        run = RunConfig.from_canonical(changed)
    except RemoteProtocolError:
        return
    assert run.canonical() == changed
    assert (run == RunConfig(name="a")) == (changed == GOOD)


def test_a_config_beyond_the_limit_is_refused_by_its_length_alone() -> None:
    with pytest.raises(RemoteProtocolError, match=r"^run config of 65537 bytes; the limit is 65536$"):
        RunConfig.from_canonical(bytes(65_537))


def test_each_inner_optimizer_has_a_rate_of_its_own() -> None:
    rates = {inner: RecipeConfig(name="local", inner=inner).inner_learning_rate for inner in ("muon", "adamw")}
    assert rates == {"muon": Fraction(1, 100), "adamw": Fraction(3, 1000)}
    assert RecipeConfig(inner="adamw", inner_learning_rate=Fraction(1, 7)).inner_learning_rate == Fraction(1, 7)


@pytest.mark.parametrize(
    ("said", "overlap", "late"),
    [
        ({}, "auto", 1),
        ({"agreement": {"overlap_rounds": 1}}, 1, 1),
        ({"agreement": {"overlap_rounds": 0}}, 0, 0),
        ({"agreement": {"staleness_rounds_max": 0}}, 0, 0),
        ({"agreement": {"staleness_rounds_max": 20}}, "auto", 20),
        ({"agreement": {"overlap_rounds": 0, "staleness_rounds_max": 8}}, 0, 8),
        ({"recipe": {"fragments": 2}}, 0, 0),
        ({"recipe": RecipeConfig(fragments=2)}, 0, 0),
        ({"recipe": {"plugin": "p2ptrain-digits 0.1.0"}}, 0, 0),
        ({"recipe": {"name": "demo"}}, 0, 0),
        ({"recipe": {"name": "demo"}, "agreement": {"overlap_rounds": "auto"}}, "auto", 1),
        ({"recipe": {"name": "distro"}, "agreement": {"staleness_rounds_max": 4}}, 0, 4),
        ({"world": {"run": KEY}, "recipe": {"transform": "none", "k": 4096, "value_bits": 4}}, 0, 0),
    ],
)
def test_nodes_may_overlap_by_default_where_steps_can_go_on_from_other_weights(
    said: dict[str, Any], overlap: int | str, late: int
) -> None:
    agreement = RunConfig(name="a", **said).agreement
    assert (agreement.overlap_rounds, agreement.staleness_rounds_max) == (overlap, late)
    assert agreement.overlap_rounds_max == (overlap != 0)


def test_a_run_is_audited_where_others_have_the_data_and_the_steps() -> None:
    local = {"recipe": {"name": "local", "local_steps": 10, "sequences_per_pass": 8}}
    assert RunConfig.model_validate({"name": "a"} | local).is_audited
    small = {"recipe": {"name": "local", "local_steps": 3, "sequences_per_pass": 8}}
    closed = {"data": {"source": "own"}, "admission": {"policy": "allowlist", "keys": ["ab" * 32]}}
    script = {"model": {"kind": "own", "parameters": ["weight 2 2"]}}
    plugin = {"recipe": {"plugin": "p2ptrain-noise 0.1.0"}}
    for other, why in (
        (small, "a contribution is made of 24 sequences, and 32 are needed"),
        (closed, "nobody else has the data behind a contribution"),
        (script, "scripts train as they like"),
        (plugin, "p2ptrain-noise 0.1.0 makes the contributions"),
    ):
        run = RunConfig.model_validate({"name": "a"} | local | other)
        assert (run.is_audited, run.why_not_audited) == (False, why)


def test_contributions_that_audits_could_not_reach_back_to_are_refused() -> None:
    late = {"agreement": {"staleness_rounds_max": 21}}
    with pytest.raises(ValidationError, match="audits do not reach back"):
        RunConfig.model_validate({"name": "late", **late})
    small = {"recipe": {"name": "local", "local_steps": 3, "sequences_per_pass": 8}}
    assert RunConfig.model_validate({"name": "late", **late, **small}).agreement.staleness_rounds_max == 21
