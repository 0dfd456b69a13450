"""`ModelConfig`: the part of a run that says which model it trains."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from p2ptrain.config.fields import Accepts, Clashes, DigestOrEmpty, PluginOrEmpty, PluginSettings, Section, Settings
from p2ptrain.config.hf import HF_CONFIG_BYTES_MAX, HfConfig, Objective, read_hf_config
from p2ptrain.errors import SettingError

PARAMETERS_MAX, OWN_PARAMETERS_MAX = 4_096, 2**40
ParameterText = Annotated[  # a parameter's name and the sizes of its dimensions
    str,
    Field(max_length=200, pattern=r"^[A-Za-z0-9_.]+( [1-9][0-9]{0,8}){0,5}$"),
    Accepts('a name and the sizes of its dimensions, such as "layers.0.weight 768 768"'),
]
# These stand in the canonical encoding of a model with sizes of its own.
NO_SIZES: Final[dict[str, str | int]] = {
    "preset": "custom", "dim": 8, "layers": 1, "heads": 1, "kv_heads": 1, "ffn_dim": 8, "rope_theta": 10_000,
}  # fmt: skip
BELONGS = {"config": '"transformers"', "plugin": '"plugin"', "settings": '"plugin"', "parameters": '"own"'}
BELONGS["frozen"] = '"own"'
BELONGS["shapes"] = '"transformers", "plugin" or "own"'


class ModelConfig(Section):
    """The model: the built-in decoder-only transformer, for which a preset supplies every size that is not given; one
    of transformers, whose config.json has the sizes; a plug-in's, whose settings have them; or one in the members' own
    scripts, of which only the parameters are known here."""

    kind: Literal["builtin", "transformers", "plugin", "own"] = Field(
        "builtin",
        description="builtin: the transformer that the keys below describe; transformers: that of `config`; "
        "plugin: that of `plugin`; own: that of scripts that train it with `import p2ptrain`",
    )
    objective: Objective = Field(
        "causal",
        description="causal: each token from those before it; masked: hidden tokens from all around them, which takes "
        "an encoder such as BERT",
    )
    config: Annotated[str, Accepts(f"the text of a config.json, at most {HF_CONFIG_BYTES_MAX:,} bytes, or nothing")] = (
        Field("", max_length=HF_CONFIG_BYTES_MAX, description="kind transformers: the model's config.json, as it is")
    )
    plugin: PluginOrEmpty = Field(
        "",
        description="kind plugin: the package that has the model, and its version; each node's owner has to allow it",
    )
    settings: Settings = Field(PluginSettings(), description="kind plugin: what the model's settings are")
    shapes: DigestOrEmpty = Field(
        "", description="digest of all parameters' names and shapes, but for builtin; empty until the run is started"
    )
    parameters: tuple[ParameterText, ...] = Field(
        (), max_length=PARAMETERS_MAX, strict=False, description="kind own: name and shape of each trained parameter"
    )
    frozen: DigestOrEmpty = Field(
        "", description="kind own: digest of the parameters that do not train, with their names, shapes and types"
    )
    preset: str = Field("custom", description="sizes by name: 1m, 5m, 10m, 30m, 100m, 300m, 1b; custom: all given here")
    vocab_size: int = Field(256, ge=2, le=2**20, description="tokens the model knows")
    dim: int = Field(128, ge=8, le=65_536, description="width of the residual stream")
    layers: int = Field(4, ge=1, le=1_024, description="transformer blocks")
    heads: int = Field(4, ge=1, le=1_024, description="query heads")
    kv_heads: int = Field(2, ge=1, le=1_024, description="key and value heads; fewer than heads saves memory")
    ffn_dim: int = Field(384, ge=8, le=2**18, description="width of the SwiGLU layer")
    sequence_length: int = Field(256, ge=8, le=2**20, description="tokens in a training sequence")
    rope_theta: int = Field(10_000, ge=1, le=2**40, description="base of the rotary position encoding")

    @model_validator(mode="before")
    @classmethod
    def _expand_preset(cls, data: object) -> object:
        if not isinstance(data, dict) or data.get("preset", "custom") == "custom":
            return data
        preset = data["preset"]
        if not isinstance(preset, str) or preset not in MODEL_PRESETS:
            raise SettingError(f"unknown preset {preset!r}", f"use one of {', '.join(MODEL_PRESETS)} or custom")
        return {**MODEL_PRESETS[preset], **data}

    @model_validator(mode="before")
    @classmethod
    def _take_sizes(cls, data: object) -> object:
        """Fills in the sizes from config.json; different ones would describe a model that is not trained."""
        if not isinstance(data, dict):
            return data
        if (kind := data.get("kind")) in ("plugin", "own"):
            return _with_sizes(data, NO_SIZES, "settings" if kind == "plugin" else "the script's model")
        if data.get("kind", "builtin") != "transformers":
            return data
        text = data.get("config", "")
        if not isinstance(text, str):
            return data  # the field's own check reports it
        if not text:
            raise SettingError(
                'kind = "transformers" needs the config.json of a model',
                "write its text as config = '''{...}''', or begin with --weights DIR, which has one",
            )
        return _with_sizes(data, {**NO_SIZES, **read_hf_config(text).sizes}, "config")

    def clashes(self) -> Clashes:
        for key, kinds in BELONGS.items():
            if getattr(self, key) and f'"{self.kind}"' not in kinds:
                yield f"{key} belongs to a model of kind = {kinds}", "remove it, or set that kind"
        possible: Objective = "causal" if self.hf is None else self.hf.architecture.objective
        if self.objective != possible and possible == "masked":
            yield "the model of config reads a text from both sides", 'set objective = "masked"'
        if self.objective != possible and possible == "causal":
            what = 'objective = "masked" needs a model that reads a text from both sides, and this one sees only what'
            yield f"{what} comes before", 'set kind = "transformers" and the config of a bert, or objective = "causal"'
        if self.kind == "plugin" and not self.plugin:
            yield 'kind = "plugin" needs a package', 'write plugin = "NAME VERSION"'
        if self.hf is not None and self.sequence_length > self.hf.positions:
            fix = f"the model of config reads at most {self.hf.positions} tokens, lower it"
            yield f"sequence_length = {self.sequence_length}", fix
        if self.kind == "own":
            yield from self._clashes_of_parameters()
        if self.kind == "builtin":
            yield from self._clashes_of_sizes()

    def _clashes_of_sizes(self) -> Clashes:
        if self.dim % self.heads:
            yield f"heads = {self.heads} does not divide dim = {self.dim}", "make dim a multiple of heads"
        if self.dim // self.heads % 2:
            yield f"dim / heads = {self.dim // self.heads} is odd", "rotary positions need pairs, choose an even one"
        if self.heads % self.kv_heads:
            yield f"kv_heads = {self.kv_heads} does not divide heads = {self.heads}", "choose a divisor"

    def _clashes_of_parameters(self) -> Clashes:
        names = [name for name, _ in self.named]
        if not names:
            yield 'kind = "own" is for scripts', "begin the run with p2ptrain.start(model) in one"
        if len(set(names)) < len(names):
            yield "parameters has a name twice", "name each once"
        if (size := sum(prod(shape) for _, shape in self.named)) > OWN_PARAMETERS_MAX:
            yield f"parameters has {size:,} numbers, and {OWN_PARAMETERS_MAX:,} are possible", "take fewer"

    @property
    def named(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The name and shape of each parameter of a model of kind `own`."""
        split = [each.split(" ") for each in self.parameters]
        return tuple((name, tuple(map(int, sizes))) for name, *sizes in split)

    @property
    def has_known_layers(self) -> bool:
        """Whether it trains with a loss mask, documents kept apart (data/packing.py), adapters (models/adapters.py)."""
        return self.kind in ("builtin", "transformers")

    @property
    def hf(self) -> HfConfig | None:
        """The checked config.json of a model of transformers; None for any other."""
        return read_hf_config(self.config) if self.kind == "transformers" else None


def _with_sizes(data: dict[str, object], sizes: Mapping[str, object], place: str) -> dict[str, object]:
    """Fills in the sizes of a model of transformers or a plug-in, in place of those of the built-in model."""
    for key, value in sizes.items():
        if data.get(key, value) != value:
            raise SettingError(f'{key} describes a model of kind = "builtin"', f"remove it, {place} has the sizes")
    return {**data, **sizes}


MODEL_PRESETS: dict[str, dict[str, int]] = {
    "1m": {"dim": 128, "layers": 5, "heads": 4, "kv_heads": 2, "ffn_dim": 384, "sequence_length": 256},
    "5m": {"dim": 256, "layers": 6, "heads": 4, "kv_heads": 2, "ffn_dim": 768, "sequence_length": 256},
    "10m": {"dim": 320, "layers": 8, "heads": 5, "kv_heads": 5, "ffn_dim": 896, "sequence_length": 512},
    "30m": {"dim": 512, "layers": 10, "heads": 8, "kv_heads": 4, "ffn_dim": 1_408, "sequence_length": 512},
    "100m": {"dim": 768, "layers": 14, "heads": 12, "kv_heads": 4, "ffn_dim": 2_304, "sequence_length": 1_024},
    "300m": {"dim": 1_024, "layers": 26, "heads": 16, "kv_heads": 4, "ffn_dim": 2_816, "sequence_length": 1_024},
    "1b": {"dim": 2_048, "layers": 20, "heads": 32, "kv_heads": 8, "ffn_dim": 6_144, "sequence_length": 2_048},
}
