"""Prints the instructions of a program for a card: `python compiled.py NAME CAPABILITY [fusion]`."""

# ruff: noqa: E501, T201
from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from p2ptrain.exact.kernels import blake, programs
from p2ptrain.exact.kernels.launches import COMPILED
from p2ptrain.models import loss_program

UPDATE = dict.fromkeys(("weights", "momentum"), "*fp32") | {
    "votes": "*i32", "high": "*i8", "low": "*i8", "steps": "*fp64", "table": "*i64", "addresses": "*i64",
    "groups": "*i32", "squares": "*i64", "first": "i32", "keep": "fp32", "mu": "fp32", "sign_step": "fp32",
}  # fmt: skip
PLACES = {"basis": "*bf16", "table": "*i64", "addresses": "*i64"}
SECTIONS = {"payloads": "*u8", "which": "*i64"} | dict.fromkeys(
    ("pitch", "upper_at", "low_at", "signs_at", "sizes_at"), "i32"
)
VOTES = {"votes": "*i32", "shifts": "*i32", "groups": "*i32", "first": "i32", "contributions": "i32", "most": "i32"}
HASHES = {"key": "*u32"}
SIZES = {"KEEPS": True, "C": 64, "VOTE_LIMBS": 2, "HALF_LIMBS": 5}
SMALL = {"C": 32, "VOTE_LIMBS": 1, "HALF_LIMBS": 3}
CASES: dict[str, tuple[Any, dict[str, str], dict[str, Any], int]] = {
    "update": (programs.update, UPDATE, SIZES | {"OUTER": 2, "MOMENTUM": 2}, 8),
    "update of few": (programs.update, UPDATE, SIZES | {"OUTER": 2, "MOMENTUM": 0, "HALF_LIMBS": 4}, 4),
    "update of signs": (programs.update, UPDATE, SIZES | SMALL | {"OUTER": 1, "MOMENTUM": 0}, 2),
    "update of small chunks": (programs.update, UPDATE, SIZES | SMALL | {"OUTER": 2, "MOMENTUM": 1}, 2),
    "accumulate": (
        programs.accumulate, {"tensor": "*fp32", "residual": "*fp32", **PLACES, "keep": "fp32"}, {"TRANSFORMED": True, "C": 64}, 4,
    ),
    "project": (programs.project, {"residual": "*fp32", "which": "*i64", **PLACES}, {"TRANSFORMED": True, "C": 64}, 4),
    "subtract": (
        programs.subtract, {"tensor": "*fp32", "coefficients": "*fp32", **PLACES, "share": "fp32", "first": "i32"},
        {"TRANSFORMED": True, "C": 64}, 4,
    ),
    "select": (
        programs.select, {"residual": "*fp32", "indices": "*i16", "chosen": "*fp32", "means": "*fp64"}, {"AREA": 4096, "K": 256}, 2,
    ),
    "withdraw": (
        programs.withdraw, {"residual": "*fp32", "indices": "*i16", "chosen": "*fp32", "values": "*i8", "removed": "*fp32",
        "exponents": "*i8", "groups": "*i32", "turn": "i32", "top": "fp32"}, {"SCALED": True, "AREA": 4096, "K": 256, "WIDE": 256}, 4,
    ),
    "count_strings": (
        programs.count_strings, SECTIONS | VOTES, {"SCALED": True, "AREA": 4096, "P": 1279, "WIDE": 2048, "K": 256, "LOW": 2, "BITS": 4}, 4,
    ),
    "count_ranks": (
        programs.count_ranks, SECTIONS | {"binomials": "*i64", "votes": "*i32", "shifts": "*i32", "groups": "*i32", "first": "i32", "last": "i32", "contributions": "i32", "most": "i32"},
        {"SCALED": False, "AREA": 1024, "WIDTH": 40, "TOP": 64, "STEPS": 7, "K": 8, "LOW": 4, "BITS": 1, "LANES": 128}, 4,
    ),
    "subtract_sparse": (
        programs.subtract_sparse, {"tensor": "*fp32", "indices": "*i16", "values": "*fp32", "room": "*fp32", **PLACES, "share": "fp32", "first": "i32"},
        {"TRANSFORMED": True, "C": 64, "K": 256, "WIDE": 256}, 4,
    ),
    "errors": (
        programs.errors, {"chosen": "*fp32", "exponents": "*i32", "groups": "*i32", "found": "*fp64", "chunks": "i32", "group_count": "i32", "top": "fp32"},
        {"K": 256, "WIDE": 256}, 4,
    ),
    "mark": (programs.mark, {"indices": "*i16", "ones": "*u8"}, {"LOW": 2, "P": 1279, "K": 256, "WIDE": 256}, 4),
    "pack_fields": (programs.pack_fields, {"fields": "*i16", "section": "*u8", "octets": "i32", "count": "i32"}, {"WIDTH": 3, "LANES": 128}, 4),
    "sum_groups": (programs.sum_groups, {"numbers": "*fp64", "starts": "*i32", "sums": "*fp64"}, {"LANES": 128}, 4),
    "tails": (blake.tails, {"state": "*u32", **HASHES, "values": "*u32", "count": "i32"}, {"LANES": 128}, 4),
    "chunks": (blake.chunks, {"state": "*u32", **HASHES, "values": "*u32"}, {"LANES": 128}, 4),
    "parents": (
        blake.parents, {"left": "*u32", "right": "*u32", **HASHES, "above": "*u32", "step": "i32", "stride": "i32", "count": "i32", "flags": "i32"},
        {"LANES": 128}, 4,
    ),
    "cross_entropy": (
        loss_program.cross_entropy, {"logits": "*bf16", "targets": "*i64", "losses": "*fp32", "vocabulary": "i32", "scale": "fp32"},
        {"GRADIENT": True, "BLOCK": 4096}, 8,
    ),
}  # fmt: skip


def main() -> None:
    name, card, *options = sys.argv[1:]
    program, signature, constants, warps = CASES[name]
    source = ASTSource(program, {**signature, **dict.fromkeys(constants, "constexpr")}, constants)
    chosen = {"num_warps": warps} | COMPILED | ({"enable_fp_fusion": True} if "fusion" in options else {})
    made = triton.compile(source, target=GPUTarget("cuda", int(card), 32), options=chosen)
    reader = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        print(subprocess.run([reader, "-c", file.name], capture_output=True, text=True, check=True).stdout)


if __name__ == "__main__":
    main()
