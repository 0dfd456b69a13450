"""Plug-ins: what has to hold before one is imported, what it may make, and how its failures are told."""

from __future__ import annotations

import importlib
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from p2ptrain.config import AgreementConfig, ModelConfig, RunConfig, load_run_config
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.errors import ConfigError, DataError, DeviceError
from p2ptrain.models import plugins
from p2ptrain.models.given_weights import read_weights
from p2ptrain.models.kinds import build, build_with, first_model, named_shapes, refuse_trained_buffers, shapes_digest
from p2ptrain.models.sample import SampleRequest
from p2ptrain.share import Share
from p2ptrain.train.memory import need_of
from tests.helpers.plugins import EXAMPLES, MODEL, RECIPE, install, install_example
from tests.helpers.trainer import ONE_THREAD, TINY, Trainer, embedded, swarm_round

THEIRS = "a-plugin 1.0"
HEAD = """\
import torch
from torch import nn
from p2ptrain.config import Section
from p2ptrain.models.built_in import Model

class Theirs(Model):
    def __init__(self, config, settings):
        super().__init__()
        self.one = nn.Embedding(256, 8)
        self.two = nn.Linear(8, 256)

    def loss(self, sequences):
        scores = self.two(self.one(sequences[:, :-1])).flatten(0, 1)
        return nn.functional.cross_entropy(scores, sequences[:, 1:].flatten())
"""
LOSS = "def loss(self, sequences):"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    return embedded(tmp_path_factory.mktemp("data") / "set")


def written(place: Path, code: str, point: str = "theirs:Theirs") -> None:
    """Installs a package of this code, and allows it."""
    (place / "theirs.py").write_text(code)
    install(place, THEIRS, {"p2ptrain.models": point, "p2ptrain.recipes": point})
    importlib.invalidate_caches()
    plugins.allow([THEIRS])


def model_of(plugin: str = THEIRS, **settings: Any) -> ModelConfig:
    return ModelConfig(kind="plugin", plugin=plugin, settings=settings, sequence_length=16)


def run_of(model: ModelConfig, **recipe: Any) -> RunConfig:
    small = {"local_steps": 2, "sequences_per_pass": 4, "k": 64, "inner_learning_rate": "1/100"}
    return RunConfig.model_validate({"name": "test", "model": model.model_dump(), "recipe": small | recipe})


def refusal(config: ModelConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        need_of(run_of(config))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------------------------------------------
# Before anything is imported


def test_what_the_owner_has_not_allowed_is_not_even_looked_for(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(place, "raise SystemExit('imported')")

    def looked(name: str) -> metadata.Distribution:
        raise AssertionError(f"looked for {name}")

    monkeypatch.setattr(metadata, "distribution", looked)
    for allowed in ((), ("a-plugin 1.0.0",), ("a-plugin 2.0", "another 1.0")):
        plugins.allow(allowed)
        told = refusal(model_of())
        assert told.startswith("model.plugin: this run takes its model from the package a-plugin 1.0, which is not all")
        assert 'write allow = ["a-plugin 1.0"] under [plugins] in the node\'s file' in told
        with pytest.raises(ConfigError, match=r"recipe\.plugin: this run takes its recipe from the package a-plugin"):
            need_of(run_of(ModelConfig(**TINY), plugin=THEIRS))
    assert "theirs" not in sys.modules


def test_a_plugin_that_is_missing_or_of_another_version_is_told(place: Path) -> None:
    plugins.allow([THEIRS, "a-plugin 1.1"])
    assert refusal(model_of()) == (
        "model.plugin: this run takes its model from the package a-plugin 1.0, which is not installed. "
        "Install that one: pip install a-plugin==1.0, or from where those who run it say"
    )
    written(place, "raise SystemExit('imported')")
    plugins.allow(["a-plugin 1.1"])
    assert refusal(model_of("a-plugin 1.1")) == (
        "model.plugin: this run takes its model from version 1.1 of a-plugin, but version 1.0 is installed. "
        "Install that one: pip install a-plugin==1.1, or from where those who run it say"
    )
    assert "theirs" not in sys.modules


def test_a_package_without_such_a_part_is_told(place: Path) -> None:
    install(place, THEIRS, {"p2ptrain.recipes": "theirs:Theirs", "console_scripts": "theirs:main"})
    plugins.allow([THEIRS])
    assert refusal(model_of()).startswith(
        "model.plugin: a-plugin 1.0 has no model: there is no entry point a-plugin in its group p2ptrain.models"
    )


# ---------------------------------------------------------------------------------------------------
# Models

EMBEDDING, LINEAR = "nn.Embedding(256, 8)", "nn.Linear(8, 256)"
NORMED = f"nn.Sequential({LINEAR}, nn.BatchNorm1d(256))"
CHANGES = {
    "raise OSError('no disk')\n" + HEAD: "a-plugin 1.0 failed when it was loaded: OSError: no disk (theirs.py, line 1)",
    "import not_there\n": "was loaded: ModuleNotFoundError: No module named 'not_there' (theirs.py, line 1)",
    "def broken(:\n": "failed when it was loaded: SyntaxError",
    "x = 1\n": "failed when it was loaded: AttributeError: module 'theirs' has no attribute 'Theirs'",
    HEAD.replace("super().__init__()", "raise ValueError('two\\nlines')"): "made its model: ValueError: two lines "
    "(theirs.py, line 8)",
    HEAD.replace("(self, config, settings)", "(self, config)"): "failed when it made its model: TypeError",
    "Theirs = lambda config, settings: 3\n": "makes int, which is no p2ptrain.models.built_in.Model",
    HEAD.replace(EMBEDDING, "None").replace(LINEAR, "None"): "the model of a-plugin 1.0 has no parameters",
    HEAD.replace(LINEAR, "nn.Linear(8, 256, dtype=torch.float64)"): "two.weight of a-plugin 1.0 is float64. "
    "A parameter is float32 and trained; what does not change is a buffer",
    HEAD.replace(LINEAR, f"{LINEAR}.requires_grad_(False)"): "two.weight of a-plugin 1.0 is float32, and frozen",
    HEAD.replace(LINEAR, NORMED): "BatchNorm1d two.1 keeps running averages, which training changes",
}


@pytest.mark.parametrize("code", CHANGES, ids=lambda code: CHANGES[code][:40])
def test_a_model_that_fails_or_does_not_fit_is_told_in_a_line(code: str, place: Path) -> None:
    written(place, code)
    told = refusal(model_of())
    assert CHANGES[code] in told
    assert told.startswith(("model.plugin: ", "model.kind: BatchNorm1d"))


def test_settings_are_read_by_the_plugin(place: Path) -> None:
    settings = "\n    class Settings(Section):\n        width: int = 8\n        deep: bool = False\n"
    code = HEAD.replace("class Theirs(Model):", f"class Theirs(Model):{settings}").replace(
        "256, 8)", "256, settings.width)"
    )
    written(place, code.replace("nn.Linear(8, 256)", "nn.Linear(settings.width, 256 if settings.deep else 257)"))
    assert dict(named_shapes(model_of()))["two.weight"] == (257, 8)
    assert dict(named_shapes(model_of(width=24, deep=True)))["two.weight"] == (256, 24)
    assert refusal(model_of(width="many")).startswith("model.settings.width: a-plugin 1.0 does not accept it: Input sh")
    assert refusal(model_of(wide=3)).startswith("model.settings.wide: a-plugin 1.0 does not accept it: Extra inputs")
    (place / "theirs.py").write_text(HEAD)


def test_a_model_without_settings_accepts_none(place: Path) -> None:
    written(place, HEAD)
    assert refusal(model_of(a=1)).startswith("model.settings.a: a-plugin 1.0 does not accept it: Extra inputs")


def test_first_weights_follow_from_the_seed_and_nothing_else_is_drawn(place: Path) -> None:
    written(place, HEAD)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, two, other = (first_model(model_of(), seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["two.weight"], other["two.weight"])
    build(model_of())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_may_draw_its_first_weights_itself(place: Path) -> None:
    draws = (
        "\n    def initialise(self, seed):\n        torch.manual_seed(seed + 1)\n        self.two.reset_parameters()\n"
    )
    written(place, HEAD + draws)
    before = torch.get_rng_state()
    assert torch.equal(first_model(model_of(), 3).two.weight, first_model(model_of(), 3).two.weight)
    assert torch.equal(torch.get_rng_state(), before)
    (place / "theirs.py").write_text(HEAD + "\n    def initialise(self, seed):\n        raise KeyError(seed)\n")
    del sys.modules["theirs"]
    plugins.loaded.cache_clear()
    importlib.invalidate_caches()
    why = "a-plugin 1.0 failed when it made its first weights: KeyError: 3"
    with pytest.raises(ConfigError, match=re.escape(why)):
        first_model(model_of(), 3)


def test_another_list_of_parameters_than_the_runs_is_told(place: Path) -> None:
    written(place, HEAD)
    right = model_of().model_copy(update={"shapes": shapes_digest(named_shapes(model_of()))})
    assert [name for name, _ in named_shapes(right)] == ["one.weight", "two.weight", "two.bias"]
    wrong = right.model_copy(update={"shapes": "ab" * 32})
    with pytest.raises(DeviceError, match=r"a-plugin 1\.0 makes other parameters than the run's: [0-9a-f]{64} instead"):
        need_of(run_of(wrong))


DROPS = HEAD.replace(
    "self.one(sequences[:, :-1])", "nn.functional.dropout(self.one(sequences[:, :-1]), 0.5, self.training)"
)


def test_random_numbers_are_seeded_and_replicas_stay_equal(place: Path, dataset: TokenDataset) -> None:
    written(place, DROPS)
    run = run_of(model_of())
    first, again = Trainer(run, ONE_THREAD, dataset), Trainer(run, ONE_THREAD, dataset)
    assert first.root() == again.root()
    for trainer in (first, again):
        torch.manual_seed(id(trainer))  # as if something else had drawn
        trainer.train(Share(0, 0, 2))
    assert first.contribute(0) == again.contribute(0)
    trainers = [Trainer(run, ONE_THREAD, dataset) for _ in range(2)]
    before = trainers[0].evaluate()
    for number in range(3):
        swarm_round(trainers, number)
        assert len({trainer.root() for trainer in trainers}) == 1
    assert trainers[0].evaluate() < before


def test_a_loss_that_fails_is_told_in_a_line(place: Path, dataset: TokenDataset) -> None:
    written(
        place, HEAD.replace("    def loss(self, sequences):", "    def loss(self, sequences):\n        sequences[7, 7]")
    )
    with pytest.raises(ConfigError) as caught:
        Trainer(run_of(model_of()), ONE_THREAD, dataset).train(Share(0, 0, 1))
    told = str(caught.value)
    assert told.startswith("model.plugin: a-plugin 1.0 failed when it trained: IndexError: index 7 is out of bounds")
    assert "(theirs.py, line 13)" in told


def test_memory_of_a_pass_is_measured_without_data(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    written(place, HEAD)
    small, large = (need_of(run_of(model_of(), sequences_per_pass=count)) for count in (8, 800))
    kept = 4 * 16 * 256 * 8  # at least the scores, of 8 sequences of 16 tokens
    assert kept < small.activations < 8 * kept
    assert small.activations * 50 < large.activations < small.activations * 120
    assert small.parameters == 256 * 8 + 8 * 256 + 256
    assert not caplog.records


def test_a_loss_that_looks_at_its_data_is_not_measured_but_trains(
    place: Path, dataset: TokenDataset, caplog: pytest.LogCaptureFixture
) -> None:
    written(
        place, HEAD.replace("def loss(self, sequences):", "def loss(self, sequences):\n        int(sequences.sum())")
    )
    need_of(run_of(model_of()))
    assert "the memory of a pass of a-plugin 1.0 is not known beforehand" in caplog.text
    Trainer(run_of(model_of()), ONE_THREAD, dataset).train(Share(0, 0, 1))


def test_it_writes_no_text_and_says_so(place: Path, dataset: TokenDataset) -> None:
    written(place, HEAD)
    with pytest.raises(DataError, match="the run's model continues no text"):
        Trainer(run_of(model_of()), ONE_THREAD, dataset).sample(SampleRequest("a", 3, 0))


def test_it_may_continue_texts(place: Path, dataset: TokenDataset) -> None:
    scores = "    def forward(self, tokens):\n        return self.two(self.one(tokens))\n"
    written(place, HEAD.replace("self.one = ", "self.context = 16\n        self.one = ") + scores)
    text = Trainer(run_of(model_of()), ONE_THREAD, dataset).sample(SampleRequest("Once ", 5, 0))
    assert text.startswith("Once ")


def test_a_run_of_it_may_begin_with_weights_that_exist(place: Path, tmp_path: Path) -> None:
    written(place, HEAD)
    model = first_model(model_of(), 5)
    save_file({name: each.detach() for name, each in model.named_parameters()}, tmp_path / "model.safetensors")
    flat = torch.cat([each.detach().reshape(-1) for each in model.parameters()])
    assert torch.equal(read_weights(tmp_path, model_of()), flat)
    save_file({"one.weight": model.one.weight.detach()[:3].contiguous()}, tmp_path / "model.safetensors")
    told = r"one\.weight is \[3, 8\] there and \[256, 8\] in the model; 2 missing: two\.bias, two\.weight"
    with pytest.raises(ConfigError, match=told):
        read_weights(tmp_path, model_of())


def test_the_example_is_a_model_with_one_setting(place: Path) -> None:
    install_example(place, "plugin-model")
    plugins.allow([MODEL])
    config = model_of(MODEL, width=16)
    shapes = [shape for _, shape in named_shapes(config)]
    assert shapes == [(16, 64), (16,), (10, 16), (10,)]
    model = first_model(config, 1)
    again = build_with(config, dict(model.named_parameters()))
    images = torch.tensor([[ord("A")] * 64 + [ord("3"), 0, 0], [ord("Q")] * 64 + [ord("9"), 0, 0]])
    assert torch.equal(again.loss(images), model.loss(images))
    refuse_trained_buffers(model)
    assert "width" in refusal(model_of(MODEL, width=7))


# ---------------------------------------------------------------------------------------------------
# Recipes


def noisy(dataset: TokenDataset, noise: str, name: str = "local") -> Trainer:
    recipe = {"name": name, "plugin": RECIPE, "settings": {"noise": noise}}
    return Trainer(run_of(ModelConfig(**TINY), **recipe), ONE_THREAD, dataset)


@pytest.fixture
def example(place: Path) -> None:
    install_example(place, "plugin-recipe")
    plugins.allow([RECIPE])


@pytest.mark.usefixtures("example")
def test_the_example_is_local_but_for_its_noise(dataset: TokenDataset) -> None:
    trainers = [noisy(dataset, "0"), noisy(dataset, "1/2"), noisy(dataset, "0.5")]
    trainers.append(Trainer(run_of(ModelConfig(**TINY)), ONE_THREAD, dataset))
    for trainer in trainers:
        torch.manual_seed(id(trainer))
        trainer.train(Share(0, 0, 1))
    without, first, again, local = (trainer.contribute(0) for trainer in trainers)
    assert without == local, "no noise is `local`, to the bit"
    assert first == again != local, "and noise is drawn from the run's seed"


@pytest.mark.usefixtures("example")
def test_contributions_of_a_recipe_plugin_are_applied_as_ours(dataset: TokenDataset) -> None:
    trainers = [noisy(dataset, "0.1") for _ in range(3)]
    before = trainers[0].evaluate()
    for number in range(4):
        swarm_round(trainers, number)
        assert len({trainer.root() for trainer in trainers}) == 1
    assert trainers[0].evaluate() < before
    plain = Trainer(run_of(ModelConfig(**TINY)), ONE_THREAD, dataset)  # whoever only applies needs no noise
    payloads = swarm_round([trainers[0]], 4)
    plain.adopt(4, [trainers[1].state_bytes()])
    plain.apply(4, payloads)
    assert plain.root() == trainers[0].root()


@pytest.mark.usefixtures("example")
def test_what_a_recipe_plugin_has_packed_is_applied_as_others_read_it(dataset: TokenDataset) -> None:
    trainer = noisy(dataset, "0.1")
    trainer.train(Share(0, 0, 1))
    trainer.contribute(0)
    assert not trainer.replica.unpacked, "it may be something else than its payload says"


@pytest.mark.usefixtures("example")
def test_what_a_recipe_plugin_needs_more_of_is_counted() -> None:
    in_time = AgreementConfig(staleness_rounds_max=0, overlap_rounds=0)  # as is the default with a plug-in
    runs = (run_of(ModelConfig(**TINY), **more) for more in ({}, {"plugin": RECIPE}))
    ours, theirs = (need_of(run.model_copy(update={"agreement": in_time})) for run in runs)
    assert theirs.optimizer == ours.optimizer + ours.state
    assert theirs.checkpoint == ours.checkpoint + ours.state


@pytest.mark.usefixtures("example")
def test_a_wrong_setting_of_a_recipe_is_told(dataset: TokenDataset) -> None:
    with pytest.raises(ConfigError, match=r"recipe\.settings\.noise: p2ptrain-noise 0\.1\.0 does not accept it: "):
        noisy(dataset, "much")


def test_a_contribution_that_breaks_the_format_never_leaves_the_node(place: Path, dataset: TokenDataset) -> None:
    code = "from p2ptrain.train.recipes import LocalRecipe\nclass Theirs(LocalRecipe):\n"
    code += "    def __init__(self, config, live, layout, settings):\n        super().__init__(config, live, layout)\n"
    code += "    def contribute(self, number):\n        made = super().contribute(number)\n"
    written(place, code + "        made.values[:] = 0\n        return made\n")
    trainer = Trainer(run_of(ModelConfig(**TINY), plugin=THEIRS), ONE_THREAD, dataset)
    trainer.train(Share(0, 0, 1))
    with pytest.raises(
        ConfigError, match=r"recipe\.plugin: a-plugin 1\.0 failed when it made a contribution: Assertion"
    ):
        trainer.contribute(0)


@pytest.mark.parametrize("call", ["begin", "end"])
def test_a_recipe_plugin_that_fails_before_or_after_the_steps_is_told_in_a_line(
    call: str, place: Path, dataset: TokenDataset
) -> None:
    code = "from p2ptrain.train.recipes import LocalRecipe\nclass Theirs(LocalRecipe):\n"
    code += "    def __init__(self, config, live, layout, settings):\n        super().__init__(config, live, layout)\n"
    written(place, code + f"    def {call}(self, *arguments):\n        {{}}['missing']\n")
    trainer = Trainer(run_of(ModelConfig(**TINY), plugin=THEIRS), ONE_THREAD, dataset)
    with pytest.raises(ConfigError, match=r"recipe\.plugin: a-plugin 1\.0 failed when it trained: KeyError: 'missing'"):
        trainer.train(Share(0, 0, 1))


# ---------------------------------------------------------------------------------------------------
# What is written about them


@pytest.mark.parametrize("folder", ["plugin-model", "plugin-recipe"])
def test_the_page_shows_the_example_as_it_is_and_the_example_a_run_that_is_right(folder: str, place: Path) -> None:
    page = (EXAMPLES.parent / "docs" / "how-to" / "write-a-plug-in.md").read_text()
    install_example(place, folder)
    [module] = place.glob("*.py")
    shown = [box for box in re.findall(r"```text\n(.*?)```", page, re.DOTALL) if box.startswith("class ")]
    assert len(shown) == 2
    assert sum(box in module.read_text() for box in shown) == 1
    [file] = (path for path in (EXAMPLES / folder).glob("*.toml") if path.stem != "pyproject")
    run = load_run_config(file)
    named = [each for each in (run.model.plugin, run.recipe.plugin) if each]
    assert named in ([MODEL], [RECIPE])
    plugins.allow(named)
    assert need_of(run).parameters > 1_000
    assert all(f'"{each}"' in page for each in named)
