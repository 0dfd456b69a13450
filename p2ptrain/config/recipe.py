"""`[recipe]` of a run: how steps become a contribution, and contributions an update.

All that is special about a recipe stands in its `RecipeSpec`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal, NamedTuple

from pydantic import Field, model_validator

from p2ptrain.config.fields import Clashes, K, PluginOrEmpty, PluginSettings, Rational, Section, Settings

ROUND_SEQUENCES_MAX = 2**20  # sequences of a node per round: at 1,024 tokens each, days of work


class Limit(NamedTuple):
    """The largest value that a recipe accepts for a setting."""

    most: int
    why: str
    fix: str


@dataclass(frozen=True)
class RecipeSpec:
    """Everything that is special about a recipe; no other code depends on a recipe's name."""

    kind: Literal["gradient", "local"]  # names its class in train/recipes.py, so that no config needs torch
    is_scaled: bool  # whether its contributions carry a power-of-two scale per tensor
    defaults: Mapping[str, object] = field(default_factory=dict)  # defaults that differ from those of `local`
    adamw_defaults: Mapping[str, object] = field(default_factory=dict)  # further ones if the inner optimizer is AdamW
    limits: Mapping[str, Limit] = field(default_factory=dict)  # the largest values that work with the recipe
    is_family: bool = False  # whether it takes the settings of the DiLoCo family: FAMILY
    copies: int = 0  # copies of the weights in memory, besides agreed and live ones, a gradient and the inner optimizer


_SIGNS_ALONE = Limit(1, "sends only signs", "use 1 or recipe demo")
_FOUR_BITS = Limit(4, "sends at most four bits", "use 4 or recipe local")
_ONE_GRADIENT: dict[str, object] = {  # retuned on small models (log/); the authors' values are 0.999, 64 and 32
    "decay": Fraction(99, 100),
    "chunk": 32,
    "k": 8,
    "local_steps": 1,
    "local_steps_min": 0,
    "residual_share": Fraction(0),
    "inner": "adamw",
    "learning_rate": Fraction(1, 1000),
}
FAMILY = "transform", "momentum", "nesterov", "momentum_rounds", "fragments"
_ONE_GRADIENT_LIMITS = {
    "local_steps": Limit(1, "takes one step per round", "use passes_per_step or recipe local"),
    "local_steps_min": Limit(0, "takes one step per round, never fewer", "use 0 or recipe local"),
    "residual_share": Limit(0, "takes its gradient at the agreed weights", "use 0 or recipe local"),
}
RECIPES: dict[str, RecipeSpec] = {
    "distro": RecipeSpec(
        kind="gradient",
        is_scaled=False,
        defaults=_ONE_GRADIENT | {"value_bits": 1, "outer": "sign"},
        limits={"value_bits": _SIGNS_ALONE} | _ONE_GRADIENT_LIMITS,
    ),
    "demo": RecipeSpec(
        kind="gradient",
        is_scaled=True,
        defaults=_ONE_GRADIENT | {"value_bits": 3, "outer": "normalised"},
        limits={"value_bits": _FOUR_BITS} | _ONE_GRADIENT_LIMITS,
    ),
    "local": RecipeSpec(
        kind="local",
        is_scaled=True,
        is_family=True,
        adamw_defaults={"inner_learning_rate": Fraction(3, 1000)},  # AdamW's best rate is lower (log/)
        copies=1,  # the weights that a round began from
    ),
}


class RuleSpec(NamedTuple):
    """The setting of a robust rule, and the contributions that it needs (exact/rules.py)."""

    setting: Literal["trim", "byzantine"]  # how many contributions may be bad
    times: int  # a round needs this many times as many contributions, and `more`
    more: int
    takes_several_k: bool
    is_selection: bool  # whether it only chooses contributions, and leaves their numbers as they are

    def least(self, bad: int) -> int:
        """Returns the fewest contributions with which its theory allows so many bad ones."""
        return self.times * bad + self.more


RULES: dict[str, RuleSpec] = {
    "trimmed": RuleSpec("trim", 2, 1, takes_several_k=True, is_selection=True),
    "trimmed_coordinates": RuleSpec("trim", 2, 1, takes_several_k=False, is_selection=False),
    "krum": RuleSpec("byzantine", 2, 3, takes_several_k=False, is_selection=True),
    "multi_krum": RuleSpec("byzantine", 2, 3, takes_several_k=False, is_selection=True),
    "bulyan": RuleSpec("byzantine", 4, 3, takes_several_k=False, is_selection=False),
    "clipped": RuleSpec("byzantine", 2, 1, takes_several_k=True, is_selection=False),
}
MOMENTUM_MAX = Fraction(9_999, 10_000)  # a slightly larger value would round to 1
BAD_MAX = 511  # contributions of a round, which are at most 1,024
SPARSE_BITS_MAX = 8  # bits of a value that is sent with its index; more are not worth their bytes
SCALE_ROOM_BITS = 5  # the unit of votes is at least this many bits below the measure's root mean square
SCALE_TOP_BITS = 3  # bits above that up to which a single vote counts (exact/scales.py)
DENSE_TOP_BITS = 4  # the same for a dense payload, whose largest values are further above the mean


class RecipeConfig(Section):
    """How steps become a contribution, and contributions an update. The recipe supplies the defaults."""

    name: str = Field("local", description=", ".join(RECIPES))
    plugin: PluginOrEmpty = Field(
        "", description="package that makes the contributions in the recipe's place; each node's owner has to allow it"
    )
    settings: Settings = Field(PluginSettings(), description="the settings of that plug-in")
    outer: Literal["normalised", "mean", "sign"] = Field("mean", description="how summed votes become an update")
    rule: Literal["all", "trimmed", "trimmed_coordinates", "krum", "multi_krum", "bulyan", "clipped"] = Field(
        "all",
        description="which contributions of a round count: all; trimmed: all but those that agree least; "
        "trimmed_coordinates: of each number all but the extremes; krum, multi_krum, bulyan, clipped: against liars",
    )
    trim: int = Field(0, ge=0, le=BAD_MAX, description="how many contributions the trimmed rules leave out")
    byzantine: int = Field(
        0, ge=0, le=BAD_MAX, description="how many contributions of a round the other rules expect to lie"
    )
    chunk: Literal[8, 16, 32, 64] = Field(
        64, description="side of the square blocks from which numbers are chosen: 64 means blocks of 64 x 64"
    )
    transform: Literal["dct", "none"] = Field(
        "dct", description="none: send how far weights moved; dct: that as DCT coefficients, of which a few say most"
    )
    k: K = Field(
        256,
        description="numbers sent of each chunk: at most half; without a transform also chunk * chunk, all. Of a list "
        "each node takes the largest that its line carries in the time that a round leaves",
    )
    value_bits: int = Field(
        1, ge=1, le=24, description="bits of a sent number and its sign; 1: only the sign; above 8 only if all are sent"
    )
    decay: Rational = Field(Fraction(95, 100), ge=0, le=1, description="share of the residual that stays each round")
    residual_share: Rational = Field(
        Fraction(1, 4),
        ge=0,
        le=1,
        description="share of the residual applied to a node's own weights before its steps, not to a script's",
    )
    clip: Rational = Field(Fraction(1), ge=0, description="largest norm of a step's gradient; 0: no limit")
    sequences_per_pass: int = Field(8, ge=1, le=65_536, description="sequences of one forward and backward pass")
    passes_per_step: int = Field(1, ge=1, le=65_536, description="passes whose gradients make one step")
    local_steps: int = Field(10, ge=1, le=65_536, description="steps of a round, at most")
    local_steps_min: int = Field(
        1, ge=0, le=65_536, description="fewest steps of a round, on a machine slower than most; 0: always local_steps"
    )
    inner: Literal["muon", "adamw"] = Field("muon", description="optimizer of the local steps")
    inner_learning_rate: Rational = Field(
        Fraction(1, 100), ge=0, description="highest rate of the local steps; with adamw 3/1000 by default"
    )
    inner_beta1: Rational = Field(
        Fraction(9, 10), ge=0, lt=1, description="AdamW's memory of gradients, for recipes with local steps"
    )
    inner_beta2: Rational = Field(
        Fraction(95, 100), ge=0, lt=1, description="AdamW's memory of their squares, for recipes with local steps"
    )
    inner_weight_decay: Rational = Field(Fraction(0), ge=0, description="weight decay of the local steps")
    learning_rate: Rational = Field(Fraction(1), ge=0, description="highest learning rate of the outer update")
    momentum: Rational = Field(
        Fraction(0), ge=0, lt=1, description="outer momentum (DiLoCo: 0.9): how much of past updates each round repeats"
    )
    nesterov: bool = Field(False, description="Nesterov's form of the outer momentum, as in DiLoCo")
    momentum_rounds: int = Field(
        1, ge=1, le=65_536, description="apply the outer momentum only every so many rounds (Delayed Nesterov)"
    )
    fragments: int = Field(
        1, ge=1, le=256, description="split the model into so many parts and agree on one a round (Streaming DiLoCo)"
    )
    schedule: Literal["constant", "linear", "wsd"] = Field(
        "constant", description="after the warm-up: constant, linear to the end, or stable and then linear decay (wsd)"
    )
    warmup_rounds: int = Field(0, ge=0, le=2**40, description="rounds in which the rate rises linearly from zero")
    rounds: int = Field(
        0, ge=0, le=2**40, description="round at which the rate reaches its last value; 0 with constant: no end"
    )
    decay_rounds: int = Field(0, ge=0, le=2**40, description="length of wsd's decay")
    final_ratio: Rational = Field(Fraction(0), ge=0, le=1, description="last learning rate over the highest")
    weight_decay: Rational = Field(Fraction(0), ge=0, description="share of a weight that an update at rate 1 removes")

    @model_validator(mode="before")
    @classmethod
    def _fill_from_recipe(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        name = data.get("name", "local")
        if not isinstance(name, str) or name not in RECIPES:
            return data
        spec = RECIPES[name]
        return {**spec.defaults, **(spec.adamw_defaults if data.get("inner") == "adamw" else {}), **data}

    @property
    def step_sequences(self) -> int:
        return self.passes_per_step * self.sequences_per_pass

    @property
    def round_sequences(self) -> int:
        """The number of sequences that a node trains on in a round, in all local steps together."""
        return self.local_steps * self.step_sequences

    def steps_of(self, claimed: int) -> int:
        """Returns the local steps that count behind a contribution: all, if it claims none or more."""
        return min(claimed or self.local_steps, self.local_steps)

    def clashes(self) -> Clashes:
        if self.name not in RECIPES:  # never anything to import: a config comes from strangers
            yield f"unknown recipe {self.name!r}", f"use one of {', '.join(RECIPES)}"
        if self.settings and not self.plugin:
            yield "settings belong to a plug-in", "remove them, or name it as plugin"
        yield from self._clashes_of_numbers(self.chunk**2)
        if not self.spec.is_family:
            for key in FAMILY:
                if (value := getattr(self, key)) != type(self).model_fields[key].default:
                    yield f"{key} = {value} belongs to recipe local", "remove it, or use that"
        yield from self._clashes_of_family()
        yield from self._clashes_of_rule()
        if self.round_sequences > ROUND_SEQUENCES_MAX:
            what = f"sequences_per_pass * passes_per_step * local_steps = {self.round_sequences}"
            yield what, f"keep it at {ROUND_SEQUENCES_MAX} or below"
        for key, limit in self.spec.limits.items():
            if (value := getattr(self, key)) > limit.most:
                yield f"{key} = {value}", f"recipe {self.name} {limit.why}, {limit.fix}"
        if self.local_steps_min > self.local_steps:
            yield f"local_steps_min = {self.local_steps_min} is above local_steps = {self.local_steps}", "lower it"
        yield from self._clashes_of_rate()

    def _clashes_of_numbers(self, area: int) -> Clashes:
        if len(self.ks) > 1 and not self.spec.is_scaled:
            yield f"k is a list, and recipe {self.name} sends signs of one size", "use one k, or recipe local or demo"
        if self.k_max > area // 2 and not self.is_dense:
            all_of_it = f', or with transform = "none" k = {area} to send every weight' if self.spec.is_family else ""
            what = f"k = {self.k_max} is more than half of the {area} coefficients of a chunk"
            yield what, f"choose at most {area // 2}{all_of_it}"
        if self.value_bits > SPARSE_BITS_MAX and not self.is_dense:
            fix = f"the largest numbers of a chunk take at most {SPARSE_BITS_MAX}, use that, or send every weight"
            yield f"value_bits = {self.value_bits}", f'{fix} (transform = "none", k = {area})'

    def _clashes_of_family(self) -> Clashes:
        if self.transform == "none" and self.outer != "mean":
            yield f'transform = "none" needs outer = "mean", not "{self.outer}"', "change one"
        if self.momentum > MOMENTUM_MAX:
            yield f"momentum = {self.momentum} is above {MOMENTUM_MAX}, and rounds to 1", "lower it"
        if not self.momentum and (self.nesterov or self.momentum_rounds > 1):
            yield "nesterov and momentum_rounds need a momentum", "set one, such as 0.9, or remove them"
        if self.momentum_rounds > 1 and not self.nesterov:
            yield "momentum_rounds above 1 delays Nesterov's momentum", "set nesterov = true"
        if self.momentum_rounds > 1 and self.fragments > 1:
            yield "momentum_rounds above 1 does not work with fragments", "set one of them to 1"

    def _clashes_of_rule(self) -> Clashes:
        spec, named = RULES.get(self.rule), f'rule = "{self.rule}"'
        for key in ("trim", "byzantine"):
            if (value := getattr(self, key)) and (spec is None or spec.setting != key):
                yield f"{key} = {value} does not belong to {named}", "remove it"
        if spec is None:
            return
        if not getattr(self, spec.setting):
            what = f"{named} has to know how many contributions of a round may be bad"
            yield what, f"set {spec.setting} to 1 or more"
        if self.value_bits > SPARSE_BITS_MAX:
            what = f"{named} cannot compare numbers of value_bits = {self.value_bits} exactly"
            yield what, f"use at most {SPARSE_BITS_MAX}"
        if len(self.ks) > 1 and not spec.takes_several_k:
            what = f"{named} and several k: the smallest contributions would be nearest to all others"
            yield what, "use one k, or rule trimmed or clipped"
        if not self.spec.is_scaled and not spec.is_selection:
            what = f"{named} changes what contributions weigh, and those of recipe {self.name} have no scale"
            yield what, "use recipe local or demo, or another rule"

    def _clashes_of_rate(self) -> Clashes:
        if self.learning_rate * self.weight_decay > 1:
            yield "learning_rate * weight_decay is above 1", "weights would change sign, lower weight_decay"
        if self.schedule == "constant" and (self.decay_rounds or self.rounds):
            fix = 'remove them or set schedule = "linear" or "wsd"'
            yield "rounds and decay_rounds shape a rate that ends", fix
        if self.schedule == "linear" and (self.decay_rounds or self.rounds <= self.warmup_rounds):
            yield 'schedule = "linear" needs rounds > warmup_rounds, and no decay_rounds', ""
        if self.schedule == "wsd" and (not self.decay_rounds or self.warmup_rounds + self.decay_rounds > self.rounds):
            yield 'schedule = "wsd" needs decay_rounds > 0 and rounds >= warmup_rounds + decay_rounds', ""

    @property
    def contributions_min(self) -> int:
        """The fewest contributions with which a round moves the weights, by the rule's theory."""
        spec = RULES.get(self.rule)
        return spec.least(getattr(self, spec.setting)) if spec else 1

    @property
    def state_copies(self) -> int:
        """The number of values per parameter in the agreed state: the weight and, if there is one, its momentum."""
        return 2 if self.momentum else 1

    @property
    def ks(self) -> tuple[int, ...]:
        """How many numbers of a chunk a contribution may have; they rise."""
        return self.k if isinstance(self.k, tuple) else (self.k,)

    @property
    def k_max(self) -> int:
        return self.ks[-1]

    def k_within(self, *limits: int) -> int:
        """Returns the largest k within these limits, of which 0 is none; the smallest if there is no such k."""
        return max((k for k in self.ks if all(k <= limit for limit in limits if limit)), default=self.ks[0])

    @property
    def is_dense(self) -> bool:
        """Whether a contribution holds every weight."""
        return self.transform == "none" and self.k == self.chunk**2

    @property
    def spec(self) -> RecipeSpec:
        return RECIPES[self.name]

    @property
    def vote_max(self) -> int:
        """The largest integer that one contribution can add to one coefficient's votes."""
        if not self.spec.is_scaled:
            return 1 << (self.value_bits - 1)
        top_bits = DENSE_TOP_BITS if self.is_dense else SCALE_TOP_BITS
        return 1 << (self.room_bits + (top_bits if self.value_bits > 1 else 0))  # signs are all of one size

    @property
    def room_bits(self) -> int:
        """By how many bits the unit of scaled votes lies below the root mean square of their measure."""
        return max(SCALE_ROOM_BITS, self.value_bits)
