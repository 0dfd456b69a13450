"""The exchange of contributions: the share of a round that it takes on a line, and the settings that lower it."""

from __future__ import annotations

import math

from p2ptrain.config import RunConfig
from p2ptrain.config.fields import K_CHOICES_MAX
from p2ptrain.doctor.findings import Diagnosis
from p2ptrain.exact.shortage import mega
from p2ptrain.node.consent import exchanged_bytes
from p2ptrain.train.memory import need_of

SHARE_WANTED = 0.05  # the share of a round's time that the exchange should take at most
SHARE_WANTED_OVERLAPPING = 1 / 3  # where nodes train meanwhile: votes need room, too; a guess


def judge_exchange(
    run: RunConfig, nodes: int, tokens_per_second: float, download: float, upload: float = 0.0
) -> Diagnosis:
    """Compares the time that contributions take on the line with the time of a round's training.

    Each node receives the others' contributions and sends as much on average, at the same time, so the slower direction
    counts. Of several k the smallest counts, which a node takes whose line carries no more.

    tokens_per_second: this node's speed; download, upload: its line, in bytes per second; 0: unknown
    """
    known = [(rate, way) for rate, way in ((download, ""), (upload, ", its upload")) if rate]
    bytes_per_second, slower = min(known, default=(0.0, ""))
    recipe = run.recipe
    tokens = recipe.step_sequences * run.model.sequence_length  # tokens in a step
    need = need_of(_with(run, "k", recipe.ks[0]))
    received = exchanged_bytes(need, nodes)
    training = recipe.local_steps * tokens / tokens_per_second
    overlaps = run.agreement.overlap_rounds != 0
    wanted = SHARE_WANTED_OVERLAPPING if overlaps else SHARE_WANTED
    rate = received / training * (1 / wanted - 1)  # the rate at which the share is as wanted
    several = f" with k = {recipe.ks[0]}" if len(recipe.ks) > 1 else ""
    text = f"the contributions of {nodes - 1} others come to {mega(received)}{several} in {training:.1f} s of training"
    if not bytes_per_second:
        needed = f"under {wanted:.0%} of the time at {mega(math.ceil(rate))}/s or more, both ways"
        return Diagnosis("exchange", "good", f"{text}: {needed}")
    share = received / (received + training * bytes_per_second)
    text += f", {share:.0%} of the time at {mega(int(bytes_per_second))}/s{slower}"
    if overlaps:
        text += ", in which nodes train on"
    if not upload:
        text += f"; as much is sent, and the upload is not measured: it needs {mega(math.ceil(rate))}/s"
    if share <= wanted:
        return Diagnosis("exchange", "good", text)
    factor = rate / bytes_per_second
    if recipe.spec.kind == "local":
        key, value = "local_steps", math.ceil(recipe.local_steps * factor)
    else:
        key, value = "passes_per_step", math.ceil(recipe.passes_per_step * factor)
    fix = f"For {wanted:.0%}, begin a run with {key} = {value}"
    key = "value_bits" if recipe.is_dense else "k"  # a dense payload can shrink only in bits
    if fewer := _largest(run, key, need.payload / factor):
        ks = [k for k in (fewer << bits for bits in range(K_CHOICES_MAX - 1)) if k < recipe.k_max]
        is_choice = key == "k" and recipe.spec.is_scaled
        more = f"{[*ks, recipe.k_max]}, of which each node takes what its line carries" if is_choice else fewer
        fix += f", or {key} = {more}"
    return Diagnosis("exchange", "warning", text, fix)


def _with(run: RunConfig, key: str, value: int) -> RunConfig:
    return run.model_copy(update={"recipe": run.recipe.model_copy(update={key: value})})


def _largest(run: RunConfig, key: str, payload_bytes: float) -> int:
    """Returns the largest power of two for a recipe's key that makes contributions small enough; 0 if there is none."""
    most = run.recipe.k_max if key == "k" else getattr(run.recipe, key)
    tried = [1 << bits for bits in range(most.bit_length())]
    return max((value for value in tried if need_of(_with(run, key, value)).payload <= payload_bytes), default=0)
