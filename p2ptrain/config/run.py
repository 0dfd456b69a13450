"""`RunConfig`: the settings that all nodes of a run share; the run's id is their digest.

It contains everything that affects the bits of the agreed state or how the swarm agrees on it. The canonical encoding
is JSON with sorted keys, no white space and no floating-point numbers: fractions are written as "n/d", so that every
machine reads the same value. The run's id is the BLAKE3 digest of that encoding, with its own domain. A run whose data
or first weights are not known yet (as in a new file) is unsealed and has no id; `sealed` adds both, and the founders.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, ValidationError, model_validator

from p2ptrain.config.adapt import AdaptConfig
from p2ptrain.config.fields import Accepts, Clashes, Digest, DigestOrEmpty, FromArray, Section
from p2ptrain.config.model import ModelConfig
from p2ptrain.config.recipe import RECIPES, RULES, RecipeConfig
from p2ptrain.digest import digest
from p2ptrain.errors import ConfigError, RemoteProtocolError

PROTOCOL_VERSION: Final = 2  # of new runs: a release later than it is first spoken, so that most nodes speak it
PROTOCOLS = (2, 3)  # spoken here; what 3 does otherwise stands in docs/protocol.md, 25
ENDING: dict[int, str] = {}  # by protocol: the release that speaks it no more, at least two releases after this one
PAYLOAD_BYTES_MAX: Final = 2**32  # a billion parameters at k = 512 take a tenth of that
CONFIG_BYTES_MAX = 65_536  # usually a few KB; 60 KB with 256 founders and 640 other keys, as a test checks
REGION_BITS_MIN = 4  # enough bits for a region's contributions to carry the world's changes in a round or two
WHY_LENGTH_MAX = 500  # characters of a reason, which becomes evidence and quotes a peer's data
BASIS_PEAK = 11_585  # the largest entry of the integer DCT basis (exact/transform.py)
EXACT_MAX = 2**53  # up to this, every integer is exact in float64
AUDITED_STALENESS_MAX = 20  # a summons ends up to 12 rounds after that, and audits reach back 32 (core/auditing.py)
AUDIT_SEQUENCES = 32  # of an author, without which its contribution cannot be told from others (core/audits.py)


class TokenizerConfig(Section):
    """The tokenizer; its file is part of the run."""

    kind: Literal["bytes", "json"] = Field(
        "bytes", description="bytes: 256 tokens; json: a file of the tokenizers library"
    )
    digest: DigestOrEmpty = Field(
        "", description="BLAKE3 of the tokenizer's JSON file, as `p2ptrain data prepare` prints it"
    )

    def clashes(self) -> Clashes:
        if self.kind == "json" and not self.digest:
            yield 'kind = "json" needs a digest', "add the one that `p2ptrain data prepare` printed"
        if self.kind != "json" and self.digest:
            yield 'only kind = "json" takes a digest', "remove it"


class DataConfig(Section):
    """The training data."""

    manifest: Annotated[
        str, Field(pattern=r"^(embedded|[0-9a-f]{64})$"), Accepts("embedded, or 64 hexadecimal digits in lower case")
    ] = Field(
        "embedded",
        description="digest that `p2ptrain data prepare` printed; embedded: text that every Python has, or with "
        'source = "own" the held-out data that `p2ptrain start` makes',
    )
    source: Literal["shared", "own"] = Field(
        "shared", description="own: each node trains on what its owner prepared, and only held-out data is shared"
    )
    assignment: Literal["drawn", "window", "capability"] = Field(
        "drawn",
        description="which part of the data a node trains on: drawn from all of it; window: drawn from a part that it "
        "keeps for many rounds; capability: drawn, and as much as it has lately trained on",
    )
    documents: Literal["together", "apart"] = Field(
        "together", description="apart: documents in one sequence do not see each other, and positions restart"
    )

    def clashes(self) -> Clashes:
        if self.source == "own" and self.assignment != "drawn":
            yield f'assignment = "{self.assignment}" shares data out that all have', 'set "drawn"'


class StateConfig(Section):
    """The part of the state that a root covers. Hashing a few GB would delay a round; 64 pieces do not."""

    initial_root: DigestOrEmpty = Field("", description="root of the first weights; empty until the run is started")
    full_root_bytes_max: int = Field(
        2**30, ge=2**20, le=2**50, description="up to this size every root covers everything; in bytes"
    )
    partial_root_leaves: int = Field(64, ge=1, le=65_536, description="pieces of 1 MiB that a partial root covers")
    full_root_rounds: int = Field(50, ge=1, le=2**20, description="rounds between roots that cover everything")


class AgreementConfig(Section):
    """The rules by which rounds are agreed on and closed."""

    staleness_rounds_max: int = Field(
        1,
        ge=0,
        le=64,
        description="non-empty manifests that may lie between a contribution's base and the round that takes it; "
        "with overlap_rounds = 0, 0 by default",
    )
    overlap_rounds: Literal["auto", 0, 1] = Field(
        "auto",
        description="1: train while the last round is agreed on, which costs some loss; auto: each node does so where "
        "exchange takes more than a tenth of a round; 0: never, as by default with fragments, a plug-in, distro or "
        "demo, and in a region",
    )
    inline_bytes_max: int = Field(
        16_384, ge=0, le=262_144, description="payloads up to this size ride along with the announcement; in bytes"
    )
    avail_seconds: int = Field(
        2, ge=1, le=600, description="a proposer waits this long for all availabilities, a quarter of a view at most"
    )
    view_seconds: int = Field(2, ge=1, le=600, description="length of the first view")
    view_seconds_max: int = Field(60, ge=1, le=3_600, description="views double up to this length")
    idle_round_seconds: int = Field(
        60, ge=1, le=86_400, description="shortest time between rounds without a contribution"
    )
    stall_seconds: int = Field(
        120, ge=1, le=86_400, description="after this long without an applied round, the quorum counts as lost"
    )
    settle_seconds: int = Field(10, ge=1, le=600, description="quiet time before a set of survivors is signed")
    on_quorum_loss: Literal["regroup", "halt"] = Field(
        "regroup", description="regroup: go on with those who are left; halt: wait"
    )
    history_rounds: int = Field(
        256, ge=1, le=65_536, description="rounds whose manifests and payloads are kept for others"
    )

    @property
    def overlap_rounds_max(self) -> int:
        """How many rounds ahead of the next one a node may announce a contribution."""
        return int(self.overlap_rounds != 0)

    def is_inline(self, payload_bytes: int) -> bool:
        """Whether a payload of this size rides along with its announcement."""
        return payload_bytes <= self.inline_bytes_max

    @model_validator(mode="before")
    @classmethod
    def _fill_from_one_another(cls, data: object) -> object:
        """Without overlap contributions need not be late by default, and without late ones there is no overlap."""
        if isinstance(data, dict) and data.get("overlap_rounds") == 0:
            return {"staleness_rounds_max": 0, **data}
        if isinstance(data, dict) and data.get("staleness_rounds_max") == 0:
            return {"overlap_rounds": 0, **data}
        return data

    def clashes(self) -> Clashes:
        if self.view_seconds > self.view_seconds_max:
            yield f"view_seconds = {self.view_seconds} is above view_seconds_max = {self.view_seconds_max}", "lower it"
        if self.overlap_rounds_max and not self.staleness_rounds_max:
            what = "nodes that overlap contribute from weights that are one round old"
            yield what, "set staleness_rounds_max to 1 or more"


class AdmissionConfig(Section):
    """Who may contribute, and who gets a vote."""

    policy: Literal["open", "invite", "allowlist"] = Field(
        "open", description="open: anyone, after probation; invite: holders of an invitation; allowlist: listed keys"
    )
    keys: Annotated[tuple[Digest, ...], FromArray] = Field(
        (), max_length=640, description="allowlist: admitted public keys; invite: keys that may sign invitations"
    )
    founders: Annotated[tuple[Digest, ...], FromArray] = Field(
        (), max_length=256, description="public keys of the first members; empty: `p2ptrain start` fills it in"
    )
    contributors_max: int = Field(
        1_024, ge=1, le=1_024, description="nodes admitted at once; more would not fit a message"
    )
    seats_max: int = Field(256, ge=1, le=256, description="members with a vote")
    probation_rounds: int = Field(
        2, ge=0, le=1_024, description="manifests that took a newcomer's contribution before it gets a seat"
    )
    absence_rounds_max: int = Field(10, ge=1, le=65_536, description="rounds unheard before a member loses its seat")
    leave_seconds: int = Field(
        30,
        ge=0,
        le=600,
        description="how long a leaving member waits for a manifest with its leave; two rounds, where these are longer",
    )

    def clashes(self) -> Clashes:
        if (self.policy == "open") == bool(self.keys):
            fix = "remove them" if self.keys else f"add the public keys for {self.policy}"
            yield 'keys belong to policy = "invite" or "allowlist"', fix
        for name, keys in (("keys", self.keys), ("founders", self.founders)):
            if len(set(keys)) != len(keys):
                yield f"{name} has the same key twice", "remove one"
        for name, limit in (("seats_max", self.seats_max), ("contributors_max", self.contributors_max)):
            if len(self.founders) > limit:
                yield f"founders has {len(self.founders)} keys, and {name} is {limit}", f"raise {name}"


class EvalConfig(Section):
    """Measurements of what the model has learned. Agreement does not depend on them."""

    every_rounds: int = Field(
        50, ge=0, le=2**20, description="rounds between measurements of the held-out loss; 0: none"
    )

    def is_due(self, round_number: int) -> bool:
        """Whether the weights after this round are measured."""
        return self.every_rounds > 0 and round_number % self.every_rounds == 0


class WorldConfig(Section):
    """The run to which the nodes of this run contribute as one, which makes this run a region of it."""

    run: DigestOrEmpty = Field("", description="its id; empty: this run is no region")
    rounds: int = Field(
        10, ge=1, le=4_096, description="rounds of this run from one contribution to that run to the next"
    )

    @property
    def covered(self) -> int:
        """How many more rounds of movement a contribution may hold, because it includes the world's updates."""
        return self.rounds if self.run else 0


class PredecessorConfig(Section):
    """The run that this one follows (core/succession.py); the successor of a run begins where that ended."""

    run: DigestOrEmpty = Field("", description="its id; empty: this run follows none. `p2ptrain propose` leads to one")
    round: int = Field(0, ge=0, le=2**48 - 1, description="its last round, from which the rounds are counted on")
    head: DigestOrEmpty = Field("", description="the digest of its last manifest")


class RunConfig(Section):
    """One shared training effort; the digest of its canonical encoding is the run's id."""

    protocol: Literal[2, 3] = Field(
        PROTOCOL_VERSION, description="version of messages and arithmetic, which only a successor changes"
    )
    name: Annotated[
        str,
        Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"),
        Accepts("1 to 64 letters, digits, dots, dashes and underscores, a letter or digit first"),
    ] = Field(description="what people call the run")
    seed: int = Field(0, ge=0, lt=2**63, description="of the first weights and of the data assignment")
    model: ModelConfig = ModelConfig()
    adapt: AdaptConfig = AdaptConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    data: DataConfig = DataConfig()
    recipe: RecipeConfig = RecipeConfig()
    state: StateConfig = StateConfig()
    agreement: AgreementConfig = AgreementConfig()
    admission: AdmissionConfig = AdmissionConfig()
    eval: EvalConfig = EvalConfig()
    world: WorldConfig = WorldConfig()
    predecessor: PredecessorConfig = PredecessorConfig()

    @property
    def why_not_audited(self) -> str:
        """Returns why members cannot measure each other's contributions; empty if they can."""
        count = self.recipe.round_sequences
        reasons = (
            (self.data.source == "own", "nobody else has the data behind a contribution"),
            (self.model.kind == "own", "scripts train as they like"),
            (bool(self.recipe.plugin), f"{self.recipe.plugin} makes the contributions"),
            (bool(self.world.run), "a region's contributions move by the world's rounds, too"),
            (count < AUDIT_SEQUENCES, f"a contribution is made of {count} sequences, and {AUDIT_SEQUENCES} are needed"),
        )
        return next((why for holds, why in reasons if holds), "")

    @property
    def is_audited(self) -> bool:
        return not self.why_not_audited

    @model_validator(mode="before")
    @classmethod
    def _fill_overlap(cls, data: object) -> object:
        """By default nodes overlap only where steps can go on from weights that change between them."""
        if not isinstance(data, dict) or not isinstance(agreement := data.get("agreement", {}), dict):
            return data

        def said(section: str, key: str) -> Any:
            found = data.get(section)
            return found.get(key) if isinstance(found, dict) else getattr(found, key, None)

        name, fragments = said("recipe", "name"), said("recipe", "fragments")
        has_gradient = isinstance(name, str) and name in RECIPES and RECIPES[name].kind == "gradient"
        if has_gradient or fragments not in (None, 1) or said("recipe", "plugin") or said("world", "run"):
            return {**data, "agreement": {"overlap_rounds": 0, **agreement}}
        return data

    def clashes(self) -> Clashes:
        model, recipe = self.model, self.recipe
        if self.data.documents == "apart" and not model.has_known_layers:
            yield f'data.documents = "apart" does not work with a model of kind {model.kind}', 'set "together"'
        if model.objective == "masked" and (clash := self._why_not_masked):
            yield f'model.objective = "masked" does not work with {clash[0]}', clash[1]
        if self.adapt.is_on and not model.has_known_layers:
            what = f'adapt.kind = "{self.adapt.kind}" does not work with a model of kind {model.kind}'
            yield what, 'set "none", or train a model of kind builtin or transformers'
        if self.data.source == "own" and self.admission.policy == "open":
            what = (
                'data.source = "own" does not work with admission.policy = "open", because nobody can look at the data'
            )
            yield f"{what} of a stranger", 'set "invite" or "allowlist"'
        if model.hf is not None and model.vocab_size < 256 and self.tokenizer.kind == "bytes":
            yield f"model.config has {model.vocab_size} tokens", "the bytes tokenizer has 256, name another"
        if model.hf is None and self.tokenizer.kind == "bytes" and model.vocab_size != 256:
            yield f"model.vocab_size = {model.vocab_size}", "the bytes tokenizer has 256 tokens, set 256"
        is_long = model.config or model.settings or recipe.settings or model.parameters
        if is_long and (size := len(self.canonical())) > CONFIG_BYTES_MAX:
            long = "model.parameters" if model.parameters else "model.config" if model.config else "settings"
            what = f"{long} and admission.keys make a config of {size:,} bytes, and {CONFIG_BYTES_MAX:,} fit a message"
            yield what, "shorten them"
        if recipe.fragments > 1 and (late := self.agreement.staleness_rounds_max):
            what = f"recipe.fragments = {recipe.fragments} does not work with agreement.staleness_rounds_max = {late}"
            yield what, "a late contribution would be of another fragment, set 0"
        if self.is_audited and (late := self.agreement.staleness_rounds_max) > AUDITED_STALENESS_MAX:
            yield f"audits do not reach back staleness_rounds_max = {late}", f"set {AUDITED_STALENESS_MAX} or less"
        if self.world.run and (why := self._why_no_region):
            fix = "a region moves by the mean of all that its nodes have moved"
            yield f"world.run does not work with {why}", fix
        yield from self._clashes_of_contributors()

    def _clashes_of_contributors(self) -> Clashes:
        recipe, most = self.recipe, self.admission.contributors_max
        if recipe.rule in RULES:
            spec, least = RULES[recipe.rule], recipe.contributions_min
            bad = getattr(recipe, spec.setting)
            sums = f"{spec.times} * {bad} + {spec.more} = {least}"
            what = f'recipe.rule = "{recipe.rule}" with {spec.setting} = {bad} needs {sums} contributions in a round'
            if most < least:
                yield f"{what}, and admission.contributors_max is {most}", "raise it"
            founders = 0 if self.predecessor.run else len(self.admission.founders)  # of a successor, who was left
            if 0 < founders < least:
                fix = f"name {least} founders or more, a few in reserve for rounds that miss some, or lower"
                yield f"{what}, and admission.founders has {founders}", f"{fix} {spec.setting}"
        exact = (EXACT_MAX - 1) // recipe.vote_max
        if recipe.transform == "dct":
            exact //= BASIS_PEAK**2 * recipe.k_max
        if most > exact:
            what = f"admission.contributors_max = {most} could leave exact arithmetic with recipe.k = {recipe.k_max}"
            yield f"{what} and value_bits = {recipe.value_bits}", f"set at most {exact}, or fewer of those"

    @property
    def _why_no_region(self) -> str:
        """Returns the setting that keeps this run from being a region; empty if there is none."""
        recipe, late = self.recipe, self.agreement.staleness_rounds_max
        reasons = (
            (recipe.spec.kind != "local", f'recipe.name = "{recipe.name}"'),
            (bool(recipe.plugin), f"recipe.plugin = {recipe.plugin}"),
            (recipe.fragments > 1, f"recipe.fragments = {recipe.fragments}"),
            (not recipe.is_dense, f'recipe.transform = "{recipe.transform}" and k = {recipe.k}'),
            (recipe.value_bits < REGION_BITS_MIN, f"recipe.value_bits = {recipe.value_bits}"),
            (recipe.learning_rate != 1, f"recipe.learning_rate = {recipe.learning_rate}"),
            (recipe.momentum > 0, f"recipe.momentum = {recipe.momentum}"),
            (recipe.rule != "all", f'recipe.rule = "{recipe.rule}"'),
            (late > 0, f"agreement.staleness_rounds_max = {late}"),
            (self.adapt.is_on, f'adapt.kind = "{self.adapt.kind}"'),
            (self.model.kind == "own", 'model.kind = "own"'),
        )
        return next((why for holds, why in reasons if holds), "")

    @property
    def _why_not_masked(self) -> tuple[str, str] | None:
        """Returns the setting that keeps tokens from being masked, and what to set; None if there is none."""
        if self.data.documents == "apart":
            return 'data.documents = "apart", because the model reads a whole sequence at once', 'set "together"'
        if self.adapt.is_on:
            return f'adapt.kind = "{self.adapt.kind}", because adapters are for causal models', 'set "none"'
        if self.tokenizer.kind == "bytes" and self.model.vocab_size < 257:
            what = f"the bytes tokenizer and a model of {self.model.vocab_size} tokens: the mask is token 256"
            return what, "raise vocab_size in model.config to 257 or more"
        return None

    @property
    def is_sealed(self) -> bool:
        is_complete = (self.model.shapes or self.model.kind == "builtin") and (self.adapt.base or not self.adapt.is_on)
        has_members = bool(self.admission.founders or self.predecessor.run)
        return bool(self.state.initial_root and has_members and is_complete) and (self.data.manifest != "embedded")

    def sealed(
        self,
        *,
        manifest: str,
        initial_root: str,
        founders: Sequence[str],
        shapes: str = "",
        base: tuple[str, int] = ("", 0),
    ) -> RunConfig:
        """Returns this run with its data, first weights and founders filled in, so that it has an id.

        shapes: the parameters' digest, unless the model is the built-in one; base: digest and size of frozen weights"""
        raw = self.model_dump()
        raw["model"]["shapes"] = shapes or self.model.shapes
        raw["adapt"]["base"], raw["adapt"]["base_bytes"] = base
        raw["data"]["manifest"], raw["state"]["initial_root"] = manifest, initial_root
        raw["admission"]["founders"] = tuple(sorted(founders))  # their order must not matter
        return RunConfig.model_validate(raw)

    def canonical(self) -> bytes:
        """Encodes the config, with all keys, so that a changed default never changes a run that exists; but the usual
        objective and rule are left out, and so is the predecessor of a run that follows none."""
        raw = self.model_dump(mode="json")
        if self.model.objective == "causal":
            del raw["model"]["objective"]
        if self.recipe.rule == "all":
            for key in ("rule", "trim", "byzantine"):
                del raw["recipe"][key]
        if not self.predecessor.run:
            del raw["predecessor"]
        return json.dumps(raw, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()

    @cached_property
    def id(self) -> bytes:
        if not self.is_sealed:
            fix = "Start it first, which makes the first weights"
            raise ConfigError("the run has no id yet", key="state.initial_root", fix=fix)
        return digest("run id", self.canonical())

    @property
    def run_id(self) -> str:
        """The id in hexadecimal digits, as people, files and addresses have it."""
        return self.id.hex()

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        copied = super().model_copy(update=update, deep=deep)
        copied.__dict__.pop("id", None)  # pydantic copies what was computed, too
        return copied

    @classmethod
    def from_canonical(cls, encoded: bytes) -> RunConfig:
        """Decodes a run's config from a peer, and accepts only the canonical encoding."""
        if len(encoded) > CONFIG_BYTES_MAX:
            raise RemoteProtocolError(f"run config of {len(encoded)} bytes; the limit is {CONFIG_BYTES_MAX}")
        try:
            config = cls.model_validate_json(encoded)
        except ValidationError as error:
            raise RemoteProtocolError(_why(error)) from error
        # Rejects other spellings of a number, duplicate keys, another order and white space.
        if config.canonical() != encoded:
            raise RemoteProtocolError("run config is not in its canonical encoding")
        return config


def _why(error: ValidationError) -> str:
    """Returns the first error as a line of printable ASCII, whatever the keys and values contain."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"])[:100]
    return ascii(f"run config: {place}: {first['msg']}")[1:-1][:WHY_LENGTH_MAX]
