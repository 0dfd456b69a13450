"""`ModelConfig`: the part of a run that says which model it trains."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from p2ptrain.config.fields import Accepts, DigestOrEmpty, Section
from p2ptrain.config.hf import HF_CONFIG_BYTES_MAX, HfConfig, read_hf_config

PARAMETERS_MAX = 4_096
ParameterText = Annotated[  # a name and the sizes of its dimensions
    str,
    Field(max_length=200, pattern=r"^[A-Za-z0-9_.]+( [1-9][0-9]{0,8}){0,5}$"),
    Accepts('a name and the sizes of its dimensions, such as "layers.0.weight 768 768"'),
]
BUILTIN_THETA = 10_000  # in the canonical encoding of a model that has a theta of its own


class ModelConfig(Section):
    """The model: the built-in decoder-only transformer, for which a preset supplies every size that is not given; one
    of transformers, whose config.json has the sizes; or that of the members' own scripts, of which only the
    parameters are known here."""

    kind: Literal["builtin", "transformers", "own"] = Field(
        "builtin",
        description="builtin: the transformer that the keys below describe; transformers: that of `config`; own: "
        "that of scripts that train it with `import p2ptrain`",
    )
    config: Annotated[str, Accepts(f"the text of a config.json, at most {HF_CONFIG_BYTES_MAX:,} bytes, or nothing")] = (
        Field("", max_length=HF_CONFIG_BYTES_MAX, description="kind transformers: the model's config.json, as it is")
    )
    shapes: DigestOrEmpty = Field(
        "", description="digest of all parameters' names and shapes, but for builtin; empty until the run is started"
    )
    parameters: tuple[ParameterText, ...] = Field(
        (), max_length=PARAMETERS_MAX, strict=False, description="kind own: name and shape of each trained parameter"
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
            raise ValueError(f"unknown preset {preset!r}: use one of {', '.join(MODEL_PRESETS)} or custom")
        return {**MODEL_PRESETS[preset], **data}

    @model_validator(mode="before")
    @classmethod
    def _take_sizes(cls, data: object) -> object:
        """Fills in the sizes that config.json has; others would describe a model that is not trained."""
        if not isinstance(data, dict) or data.get("kind", "builtin") != "transformers":
            return data
        text = data.get("config", "")
        if not isinstance(text, str):
            return data  # the field's own check says so
        if not text:
            raise ValueError(
                'kind = "transformers" needs the config.json of a model: write its text as config = '
                "'''{...}''', or begin with --weights DIR, which has one"
            )
        taken = {"preset": "custom", "rope_theta": BUILTIN_THETA, **read_hf_config(text).sizes}
        for key, value in taken.items():
            if data.get(key, value) != value:
                raise ValueError(f'{key} describes a model of kind = "builtin": remove it, config has the sizes')
        return {**data, **taken}

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.kind == "own":
            self._check_parameters()
            return self
        if self.parameters:
            raise ValueError('parameters belong to a model of kind = "own": remove them, or set that kind')
        if self.hf is not None:
            if self.sequence_length > self.hf.positions:
                raise ValueError(
                    f"sequence_length = {self.sequence_length}: the model of config reads at most "
                    f"{self.hf.positions} tokens, lower it"
                )
            return self
        for key in ("config", "shapes"):
            if getattr(self, key):
                raise ValueError(f'{key} belongs to a model of kind = "transformers": remove it, or set that kind')
        if self.dim % self.heads:
            raise ValueError(f"heads = {self.heads} does not divide dim = {self.dim}: make dim a multiple of heads")
        if self.dim // self.heads % 2:
            raise ValueError(
                f"dim / heads = {self.dim // self.heads} is odd: rotary positions need pairs, choose an even one"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads = {self.kv_heads} does not divide heads = {self.heads}: choose a divisor")
        return self

    def _check_parameters(self) -> None:
        names = [name for name, _ in self.named]
        if not names:
            raise ValueError('kind = "own" is for scripts: begin the run with p2ptrain.start(model) in one')
        if len(set(names)) < len(names):
            raise ValueError("parameters has a name twice: name each once")
        if self.config:
            raise ValueError('config belongs to a model of kind = "transformers": remove it, or set that kind')

    @property
    def named(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The name and shape of each parameter of a model of kind own."""
        split = [each.split(" ") for each in self.parameters]
        return tuple((name, tuple(map(int, sizes))) for name, *sizes in split)

    @property
    def hf(self) -> HfConfig | None:
        """The checked config.json of a model of transformers; None for the built-in one."""
        return read_hf_config(self.config) if self.kind == "transformers" else None


MODEL_PRESETS: dict[str, dict[str, int]] = {
    "1m": {"dim": 128, "layers": 5, "heads": 4, "kv_heads": 2, "ffn_dim": 384, "sequence_length": 256},
    "5m": {"dim": 256, "layers": 6, "heads": 4, "kv_heads": 2, "ffn_dim": 768, "sequence_length": 256},
    "10m": {"dim": 320, "layers": 8, "heads": 5, "kv_heads": 5, "ffn_dim": 896, "sequence_length": 512},
    "30m": {"dim": 512, "layers": 10, "heads": 8, "kv_heads": 4, "ffn_dim": 1_408, "sequence_length": 512},
    "100m": {"dim": 768, "layers": 14, "heads": 12, "kv_heads": 4, "ffn_dim": 2_304, "sequence_length": 1_024},
    "300m": {"dim": 1_024, "layers": 26, "heads": 16, "kv_heads": 4, "ffn_dim": 2_816, "sequence_length": 1_024},
    "1b": {"dim": 2_048, "layers": 20, "heads": 32, "kv_heads": 8, "ffn_dim": 6_144, "sequence_length": 2_048},
}
