"""The methods that benchmarks/learning.py compares, and their settings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from rivals import RIVALS

from p2ptrain.config import RecipeConfig


@dataclass(frozen=True)
class Size:
    """A model and how long it is trained."""

    steps: int
    model: dict[str, int]


SIZES = {
    "quick": Size(200, {"dim": 64, "ffn_dim": 192, "layers": 2, "sequence_length": 64}),
    "0.8m": Size(600, {"dim": 128, "ffn_dim": 384, "layers": 4, "sequence_length": 128}),
    "10m": Size(300, {"dim": 320, "ffn_dim": 896, "layers": 8, "heads": 5, "kv_heads": 5, "sequence_length": 128}),
}


@dataclass(frozen=True)
class Setting:
    """One simulated run."""

    system: str  # full, distro, demo, local, demo32 or one of RIVALS
    inner: str = "adamw"
    outer: str = "mean"
    k: int = 32
    chunk: int = 64
    value_bits: int = 1
    decay: str = "19/20"
    residual_share: str = "0"
    local_steps: int = 1
    peers: int = 4
    transform: str = "dct"
    momentum: str = "0"  # of the outer update, Nesterov's
    momentum_rounds: int = 1
    outer_rate: str = "1"
    fragments: int = 1
    delay: int = 0
    between: int = 0  # of the next round's steps, after which a delayed round is applied; 0: after all of them
    early_share: str = "1/2"  # of an own contribution that waits, with which the next steps begin
    speeds: tuple[int, ...] = ()  # of the peers: how many rounds a training of theirs takes
    regions: int = 0  # in which nodes agree among themselves
    region_steps: int = 2  # local steps of a region's round
    region_late: int = 0  # of these, until a round of the world is taken in
    regional: tuple[tuple[str, Any], ...] = ()  # what a region's recipe has otherwise
    steps_of: tuple[int, ...] = ()  # of a round's steps, how many each peer takes; empty: all
    sequences_of: tuple[int, ...] = ()  # of a step's sequences, how many each peer takes; empty: all
    window: int = 0  # sequences of a peer's window of the data; 0: they are drawn from all
    half_state: bool = False  # residual and momentum in bf16
    documents: str = ""  # together or apart, in a corpus of short ones
    noise: str = ""  # of DP-SGD, in which each peer has data of its own; 0: none, on as much data
    rate: str = "1/1000"  # of the inner optimizer where there is one
    seed: int = 0
    size: str = "quick"

    @property
    def sequences(self) -> int:
        """Returns the sequences in a peer's step: one for 16 peers or more, so that a run takes only minutes."""
        if self.noise:
            return 64  # noise is divided by their number
        return 4 if self.peers < 16 else 1

    @property
    def is_dense(self) -> bool:
        return self.transform == "none" and self.k == self.chunk**2

    @property
    def is_local(self) -> bool:
        return self.system == "local" or self.system in RIVALS

    @property
    def family(self) -> str:
        """What is compared with another: of each, the best goes on."""
        name = f"local {self.inner}" if self.system == "local" else f"{self.system} {self.inner}".removesuffix(" adamw")
        parts = [
            name,
            "one round late" * bool(self.delay),
            "some slow" * bool(self.steps_of or self.speeds),
            f"windows of {self.window} sequences" * bool(self.window),
            "bf16" * self.half_state,
        ]
        parts += [f"documents {self.documents}" * bool(self.documents), f"noise {self.noise}" * bool(self.noise)]
        return ", ".join([*filter(None, parts), f"{self.peers} peers"])

    @property
    def method(self) -> str:
        if self.system == "full":
            return f"{self.inner}, full synchronisation, {self.peers} peers"
        if self.system in RIVALS:
            return f"{self.system}, {self.local_steps} steps, {self.peers} peers"
        parts = [self.system]
        parts += [self.inner] if self.system == "local" else []
        parts += [self.outer] if self.outer != "mean" else []
        parts = [" ".join(parts), "all weights" if self.is_dense else f"k={self.k}"]
        parts += ["no DCT"] if self.transform == "none" and not self.is_dense else []
        parts += [f"chunk {self.chunk}"] if self.chunk != 64 else []
        parts += [f"{self.value_bits} bits"] if self.value_bits > 1 else []
        parts += [f"{self.local_steps} steps"] if self.local_steps > 1 else []
        parts += [f"decay {float(Fraction(self.decay)):g}"]
        parts += [f"starts with {self.residual_share} of the residual"] if Fraction(self.residual_share) else []
        parts += [f"{self.fragments} fragments"] if self.fragments > 1 else []
        carried = f" every {self.momentum_rounds} rounds" if self.momentum_rounds > 1 else ""
        parts += [f"momentum {float(Fraction(self.momentum)):g}{carried}"] if Fraction(self.momentum) else []
        parts += [f"outer rate {float(Fraction(self.outer_rate)):g}"] if Fraction(self.outer_rate) != 1 else []
        late = "one round" if self.delay == 1 else f"{self.delay} rounds"
        parts += [f"{late} late"] if self.delay and not self.between else []
        parts += [f"{self.between} steps late"] if self.between else []
        parts += [f"begins with {self.early_share} of its own"] if self.early_share != "1/2" else []
        inside = "".join(f", {key} {value}" for key, value in self.regional)
        after = f", {self.region_late} rounds late" if self.region_late else ""
        parts += [f"{self.regions} regions of {self.region_steps} steps{inside}{after}"] if self.regions else []
        parts += [f"speeds {'/'.join(map(str, self.speeds))}"] if self.speeds else []
        parts += [f"of which peers take {'/'.join(map(str, self.steps_of))}"] if self.steps_of else []
        parts += [f"on {'/'.join(map(str, self.sequences_of))} sequences"] if self.sequences_of else []
        parts += ["bf16 residual and momentum"] if self.half_state else []
        parts += [f"short documents {self.documents}"] if self.documents else []
        parts += [f"noise {self.noise} on 64 sequences a step"] if self.noise else []
        return ", ".join([*parts, f"{self.peers} peers"])


def grid() -> list[Setting]:
    """Returns every method at the rate in the middle of those that are tried first."""
    slow, signs = {"decay": "999/1000", "rate": "1/1000"}, {"outer": "sign"}
    found = [
        Setting("full", "adamw", rate="6/1000"),
        Setting("full", "muon", rate="1/100"),
        Setting("distro", k=32, **slow, **signs),
        Setting("distro", k=32, **(slow | {"decay": "99/100"}), **signs),
        Setting("distro", k=8, chunk=32, **(slow | {"decay": "99/100"}), **signs),
        Setting("demo", k=32, value_bits=3, outer="normalised", **slow),
        Setting("demo", k=8, chunk=32, value_bits=3, outer="normalised", **(slow | {"decay": "99/100"})),
        Setting("demo32", k=32, **slow, **signs),
        Setting("local", "adamw", k=64, local_steps=10, rate="3/1000"),
        Setting("local", "adamw", k=256, local_steps=10, rate="3/1000"),
        Setting("local", "muon", k=64, local_steps=10, delay=1, rate="1/100"),
        Setting("diloco", "adamw", local_steps=30, rate="3/1000"),
        Setting("diloco4", "adamw", local_steps=30, rate="3/1000"),
        Setting("muloco", "muon", local_steps=30, rate="1/100"),
        Setting("sparseloco", "adamw", local_steps=30, rate="3/1000"),
        Setting("sparseloco", "adamw", local_steps=10, rate="3/1000"),
    ]
    muon = Setting("local", "muon", local_steps=10, rate="1/100")
    found += [replace(muon, k=k) for k in (32, 64, 128, 256, 512)]
    found += [replace(muon, k=k, value_bits=bits) for k, bits in ((64, 2), (64, 3), (256, 2), (256, 8))]
    found += [replace(muon, k=k, local_steps=steps) for k, steps in ((128, 5), (256, 5), (512, 8), (256, 30))]
    found += [
        replace(muon, k=k, local_steps=steps, residual_share=share)
        for k, steps, share in ((64, 10, "1/4"), (64, 10, "1/2"), (128, 10, "1/4"), (256, 10, "1/4"), (512, 8, "1/4"))
    ]
    found += [replace(muon, k=256, decay=decay) for decay in ("9/10", "1")]
    found += [replace(muon, k=k, half_state=True) for k in (64, 256)]
    found += [replace(muon, k=256, documents=how) for how in ("together", "apart")]
    found += [replace(muon, k=256, peers=2, noise=noise) for noise in ("0", "1/2", "1", "2")]
    found += [replace(muon, k=k, chunk=32) for k in (16, 64)]
    found += [replace(muon, k=k, peers=16) for k in (64, 256)]
    share = replace(muon, residual_share="1/4")
    found += [replace(share, k=k, outer_rate=rate) for k in (64, 128, 256) for rate in ("3/2", "2")]
    found += [replace(share, k=512, local_steps=8, outer_rate="3/2")]
    found += [replace(share, k=k, outer_rate="3", peers=16) for k in (64, 160, 256)]
    found += [replace(share, k=512, local_steps=8, outer_rate="2", peers=16)]
    found += [replace(share, k=256, outer_rate="3", peers=32)]
    found += [replace(muon, k=160, outer_rate=rate, peers=16) for rate in ("2", "4")]
    found += [replace(share, k=128, delay=1, between=2)]
    found += family()
    found += [Setting("full", inner, peers=16, rate=rate) for inner, rate in (("adamw", "6/1000"), ("muon", "1/100"))]
    return found


def family() -> list[Setting]:
    """Returns the DiLoCo family with our codec and aggregate; what others publish, with their values."""
    dense = Setting("local", "adamw", k=64**2, transform="none", decay="0", local_steps=30, rate="3/1000")
    nesterov = {"momentum": "9/10", "outer_rate": "7/10"}
    muon = Setting("local", "muon", local_steps=10, rate="1/100")
    return [
        replace(dense, value_bits=16),  # Local SGD, FedAvg
        replace(dense, value_bits=16, **nesterov),  # DiLoCo, OpenDiLoCo
        replace(dense, value_bits=8, **nesterov),
        replace(dense, value_bits=4, **nesterov),
        replace(dense, value_bits=4, local_steps=10, fragments=3, **nesterov),  # Streaming DiLoCo
        replace(
            dense, inner="muon", value_bits=2, decay="9/10", momentum="3/5", outer_rate="7/10", rate="1/100"
        ),  # MuLoCo
        Setting("local", "adamw", k=64, transform="none", value_bits=2, local_steps=30, rate="3/1000"),  # SparseLoCo
        Setting("local", "adamw", k=64, transform="none", value_bits=2, local_steps=10, rate="3/1000"),
        replace(muon, k=256, transform="none"),
        replace(muon, k=64, transform="none"),
        replace(muon, k=64**2, transform="none", value_bits=4),
        replace(muon, k=64**2, transform="none", value_bits=1),
        replace(muon, k=256, fragments=2, local_steps=5),
        replace(muon, k=256, momentum="1/2"),
        replace(muon, k=256, momentum="1/2", outer_rate="7/10"),
        Setting("lowrank", "muon", local_steps=10, rate="1/100"),
        *(replace(muon, k=256, peers=8, regions=regions) for regions in (0, 2)),
        *(replace(muon, k=256, outer=outer, outer_rate=rate, peers=peers) for outer, rate, peers in RADIAL),
        *(replace(muon, k=256, delay=1, between=steps) for steps in (0, 2, 5)),
        *(replace(muon, k=256, speeds=(1, 2, 5, 10), **more) for more in DELAYED),
    ]


RADIAL = [("mean", "1", 32), *(("radial", rate, peers) for peers in (4, 16, 32) for rate in ("1", "1/2"))]
DELAYED: list[dict[str, Any]] = [{}, {"momentum": "1/2", "outer_rate": "7/10"}]
DELAYED += [DELAYED[1] | {"momentum_rounds": 4}]  # Delayed Nesterov


def recipe_of(setting: Setting, steps: int) -> RecipeConfig:
    rounds = steps // setting.local_steps
    rate = Fraction(setting.rate)
    has_inner = setting.is_local or setting.system == "full"
    return RecipeConfig(
        name=setting.system if setting.system in ("demo", "local") else "distro",
        outer=setting.outer if setting.outer != "radial" else "mean",  # type: ignore[arg-type]
        inner=setting.inner,  # type: ignore[arg-type]
        k=setting.k,
        chunk=setting.chunk,  # type: ignore[arg-type]
        value_bits=setting.value_bits,
        decay=Fraction(setting.decay),
        transform=setting.transform,  # type: ignore[arg-type]
        momentum=Fraction(setting.momentum),
        nesterov=bool(Fraction(setting.momentum)),
        momentum_rounds=setting.momentum_rounds,
        fragments=setting.fragments,
        residual_share=Fraction(setting.residual_share),
        local_steps=setting.local_steps if setting.system == "local" else 1,
        sequences_per_pass=setting.sequences,
        inner_learning_rate=rate if has_inner else Fraction(0),
        learning_rate=Fraction(setting.outer_rate) if has_inner else rate,
        schedule="linear",
        rounds=rounds,
        warmup_rounds=max(1, rounds // 15),
        final_ratio=Fraction(1, 10),
    )
