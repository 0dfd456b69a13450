"""The keys by which a run names plug-ins, and a node's owner allows them. None of them imports anything."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.config import ModelConfig, RecipeConfig, RunConfig, load_node_config, load_run_config
from p2ptrain.config.text import to_toml
from p2ptrain.errors import ConfigError

KEY = "ab" * 32
PLUGIN = "their-package 1.0"
OF_A_PLUGIN = {"kind": "plugin", "plugin": PLUGIN}


def run_of(**sections: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate({"name": "a", **sections})


def loaded(tmp_path: Path, text: str) -> RunConfig:
    path = tmp_path / "run.toml"
    path.write_text(f'name = "a"\n{text}')
    return load_run_config(path)


def complaint(tmp_path: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, text)
    return str(caught.value).removeprefix(f"{tmp_path / 'run.toml'}: ")


def test_settings_are_written_out_sorted_and_come_back(tmp_path: Path) -> None:
    settings = 'settings = { width = 32, rate = 0.10, is_deep = true, name = "ü", small = 1e-3 }'
    run = loaded(tmp_path, f'[model]\nkind = "plugin"\nplugin = "{PLUGIN}"\n{settings}')
    wanted = {"is_deep": "true", "name": "ü", "rate": "0.1", "small": "0.001", "width": "32"}
    assert list(run.model.settings.items()) == list(wanted.items())
    assert (
        b'"settings":{"is_deep":"true","name":"\xc3\xbc","rate":"0.1","small":"0.001","width":"32"}' in run.canonical()
    )
    assert RunConfig.from_canonical(run.canonical()) == run
    (tmp_path / "again.toml").write_text(to_toml(run))
    assert load_run_config(tmp_path / "again.toml") == run
    assert hash(run.model) == hash(load_run_config(tmp_path / "again.toml").model)


def test_a_run_with_plugins_is_sealed_with_the_digest_of_its_parameters() -> None:
    run = run_of(model={**OF_A_PLUGIN, "settings": {"width": 1}}, recipe={"plugin": PLUGIN, "settings": {"noise": 2}})
    assert not run.sealed(manifest=KEY, initial_root=KEY, founders=[KEY]).is_sealed
    sealed = run.sealed(manifest=KEY, initial_root=KEY, founders=[KEY], shapes=KEY)
    assert sealed.is_sealed
    assert RunConfig.from_canonical(sealed.canonical()) == sealed


def test_version_and_settings_are_part_of_the_run() -> None:
    ids = {
        run_of(model=model, recipe=recipe).sealed(manifest=KEY, initial_root=KEY, founders=[KEY], shapes=KEY).run_id
        for model in (OF_A_PLUGIN, OF_A_PLUGIN | {"plugin": "their-package 1.1"}, OF_A_PLUGIN | {"settings": {"a": 1}})
        for recipe in ({}, {"plugin": PLUGIN}, {"plugin": PLUGIN, "settings": {"a": 1}})
    }
    assert len(ids) == 9


MANY = "{ " + ", ".join(f"a{number} = 1" for number in range(33)) + " }"
MODEL = f'[model]\nkind = "plugin"\nplugin = "{PLUGIN}"\n'
ELSEWHERE = "Remove it, or set that kind"
EMPTY = "Write for instance settings = {}"
STRANGE = f"model.settings: expected numbers of ordinary size, texts, and true or false, found a table. {EMPTY}"
NO_PLUGIN = 'is not valid. Choose a package and its exact version such as "p2ptrain-digits 0.1.0", or nothing'
MISTAKES = {
    '[model]\nkind = "plugin"': 'model: kind = "plugin" needs a package. Write plugin = "NAME VERSION"',
    '[model]\nplugin = "a 1"': f'model: plugin belongs to a model of kind = "plugin". {ELSEWHERE}',
    "[model]\nsettings = { a = 1 }": f'model: settings belongs to a model of kind = "plugin". {ELSEWHERE}',
    f'[model]\nshapes = "{KEY}"': 'model: shapes belongs to a model of kind = "transformers", "plugin" or "own". '
    f"{ELSEWHERE}",
    MODEL + 'config = "{}"': f'model: config belongs to a model of kind = "transformers". {ELSEWHERE}',
    MODEL + "dim = 64": 'model: dim describes a model of kind = "builtin". Remove it, settings has the sizes',
    MODEL + 'preset = "1m"': 'model: preset describes a model of kind = "builtin". Remove it, settings has the sizes',
    MODEL + "vocab_size = 10": "model.vocab_size = 10. The bytes tokenizer has 256 tokens, set 256",
    '[model]\nkind = "plugin"\nplugin = "os:system 1"': f'model.plugin: "os:system 1" {NO_PLUGIN}',
    "[recipe]\nsettings = { a = 1 }": "recipe: settings belong to a plug-in. Remove them, or name it as plugin",
    MODEL + "settings = 3": "model.settings: expected a table of at most 32 numbers, texts and true or false, found 3. "
    f"{EMPTY}",
    MODEL + f"settings = {MANY}": f"model.settings: expected at most 32 settings, found a table. {EMPTY}",
    MODEL
    + "settings = { A = 1 }": "model.settings: expected names of up to 40 lower-case letters, digits and _, found "
    f"a table. {EMPTY}",
    MODEL + "settings = { a = [1] }": STRANGE,
    MODEL + "settings = { a = nan }": STRANGE,
    MODEL + "settings = { a = 1e999999 }": STRANGE,
    MODEL + f'settings = {{ a = "{"x" * 201}" }}': "model.settings: expected at most 200 characters for a, found a "
    f"table. {EMPTY}",
}


@pytest.mark.parametrize("text", MISTAKES, ids=lambda text: text[-40:])
def test_a_mistake_is_told_with_what_to_do(text: str, tmp_path: Path) -> None:
    assert complaint(tmp_path, text) == MISTAKES[text]


def test_numbers_of_any_size_cost_nothing() -> None:
    for value in (10**4_000, Decimal("1e1000000000"), Decimal("Infinity"), 0.5):
        with pytest.raises(ValueError, match="ordinary size"):
            ModelConfig(**OF_A_PLUGIN, settings={"a": value})
    assert RecipeConfig(plugin=PLUGIN, settings={"a": 2**63 - 1}).settings == {"a": str(2**63 - 1)}


def test_the_settings_of_strangers_fit_a_message_with_all_keys() -> None:
    full = {f"a{number:02}{'_' * 30}": "ü" * 200 for number in range(32)}
    keys = tuple(f"{number:064x}" for number in range(640))
    with pytest.raises(ValueError, match=r"settings and admission\.keys make a config of"):
        run_of(
            model={**OF_A_PLUGIN, "settings": full},
            recipe={"plugin": PLUGIN, "settings": full},
            admission={"policy": "allowlist", "keys": keys},
        )


def test_an_owner_allows_packages_with_their_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_node_config(None).plugins.allow == ()
    path = tmp_path / "node.toml"
    path.write_text(f'[plugins]\nallow = ["{PLUGIN}", "another 0.2rc1"]')
    assert load_node_config(path).plugins.allow == (PLUGIN, "another 0.2rc1")
    monkeypatch.setenv("P2PTRAIN_PLUGINS__ALLOW", f"{PLUGIN}, third 3")
    assert load_node_config(path).plugins.allow == (PLUGIN, "third 3")
    for wrong in ("their-package", "Their_Package 1.0", "their-package >=1", "their-package *"):
        monkeypatch.setenv("P2PTRAIN_PLUGINS__ALLOW", wrong)
        with pytest.raises(ConfigError, match=r"environment variable P2PTRAIN_PLUGINS__ALLOW: plugins\.allow: "):
            load_node_config(None)
