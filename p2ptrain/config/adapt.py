"""`[adapt]` of a run: whether it trains a whole model, or small matrices beside frozen weights."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from p2ptrain.config.fields import Accepts, Clashes, DigestOrEmpty, Section

BASE_BYTES_MAX = 2**35  # size of the frozen weights: 17 billion values of two bytes; a fetch may be up to 63 GB
TargetName = Annotated[
    str,
    Field(max_length=80, pattern=r"^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*$"),
    Accepts('the end of a module\'s name such as "q_proj"'),
]


class AdaptConfig(Section):
    """Trains every weight of the model, or only adapters beside them (LoRA). With adapters, only these are the agreed
    state; the model's own weights stay as they were at the start, and each node fetches them once."""

    kind: Literal["none", "lora"] = Field(
        "none", description="none: every weight trains; lora: two small matrices beside each target do (LoRA)"
    )
    rank: int = Field(16, ge=1, le=1_024, description="rows of the first small matrix, and columns of the second")
    alpha: int = Field(32, ge=1, le=4_096, description="the product of the two is scaled by alpha / rank")
    targets: tuple[TargetName, ...] = Field(
        (), max_length=32, strict=False, description="the matrices to adapt; empty: all but embedding and output head"
    )
    base: DigestOrEmpty = Field("", description="digest of the frozen weights; empty until the run is started")
    base_bytes: int = Field(
        0, ge=0, le=BASE_BYTES_MAX, description="size of the frozen weights; 0 until the run is started"
    )

    def clashes(self) -> Clashes:
        if self.kind == "none" and self != type(self).model_construct():
            yield 'adapters are described, but kind is "none"', 'set kind = "lora", or remove the other keys'
        if bool(self.base) != bool(self.base_bytes):
            yield "base and base_bytes belong together", "give both, or leave them to `p2ptrain start`"

    @property
    def is_on(self) -> bool:
        """Whether only adapters train."""
        return self.kind != "none"


WHOLE: Final = AdaptConfig()  # every weight trains
