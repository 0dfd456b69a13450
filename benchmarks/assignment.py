"""Policies of data assignment: what members fetch of a set ten times their cache, and what a pass leaves out.

    python benchmarks/assignment.py [--rounds N] [--seed N]
    python benchmarks/assignment.py --learning [--seeds N] [--json FILE]

The real shards, shares and cache, without a network: eight members, 1,000 pieces of 1 MiB and room for 100 each; rounds
of ten steps of 8 sequences of 4,096 bytes, so 399 rounds a pass. What is printed:

    first       MiB that a member fetches a round, in the first pass
    later       the same in the second
    origin      MiB a round, in the second pass, of pieces that no other member held
    changing    as `first`, while a ninth member comes or goes every 20 rounds
    slowest     as `later`, of one that takes one step of ten; two members each take 10, 5, 2 and 1
    left out    of the data given out to these, the share that nobody trained on

With --learning: the held-out loss of benchmarks/learning.py's quick size (four peers, 20 rounds of ten steps), drawn
and by window: one that lasts as many rounds as above (8,160 sequences), one that lasts for the run, and less.

Two policies are not built, and are simulated here to compare. "one window": all members share a window. "matched": in
each turn members and the windows that are left of the pass are matched by Gale and Shapley's deferred acceptance;
members rank windows by the pieces of them that they hold, and windows rank members by speed. Its windows are the same
in every pass, since otherwise none would be held.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import msgspec
import numpy as np
from learning import Runs, prepare_corpus
from methods import Setting

from p2ptrain.config import RunConfig
from p2ptrain.core.manifest import Manifest
from p2ptrain.core.state import AgreedState, Taken, genesis
from p2ptrain.data.assignment import WINDOW_PIECES, Positions, shard, shard_in_window, shard_of_slots
from p2ptrain.data.kept_pieces import KeptPieces
from p2ptrain.digest import PIECE_BYTES

PIECES, ROOM = 1_000, 100
MEMBERS, STEPS, STEP_SEQUENCES = 8, 10, 8
LENGTH = 4_096  # one byte a token
COUNT = STEPS * STEP_SEQUENCES  # sequences of a member's round
SEQUENCES = (PIECES * PIECE_BYTES - 1) // LENGTH
WINDOW = WINDOW_PIECES * PIECE_BYTES // LENGTH
PASS_ROUNDS = SEQUENCES // (MEMBERS * COUNT)
SPEEDS = (10, 10, 5, 5, 2, 2, 1, 1)
CHANGE_ROUNDS = 20
ROUNDS_CHANGING = 200
KNOWN_ROUNDS = 20  # after which the members' steps are known
TURNS = -(-PASS_ROUNDS // (WINDOW // COUNT))  # of a pass of equal windows
TURN_ROUNDS = PASS_ROUNDS // TURNS
MIB = 2**20
WINDOWS_LEARNED = WINDOW // COUNT * 40, 800, 160  # sequences; a peer's round has 40

Shares = Iterator[list[Positions]]  # of each member, round by round
Policy = Callable[[int, Sequence[int], Callable[[int], int], list["Member"]], Shares]


class Member:
    """A member's cache: the real one, whose pieces have names and sizes and no contents."""

    def __init__(self, directory: Path) -> None:
        self.here: set[str] = set()
        self.kept = KeptPieces(directory, ROOM * PIECE_BYTES, (), self.here.discard)

    def lacks(self, positions: Positions) -> list[str]:
        """Keeps the pieces that these sequences need, and returns those that are missing."""
        names = dict.fromkeys(map(str, pieces_of(positions)), PIECE_BYTES)
        self.kept.hold("training", names)
        return [name for name in names if name not in self.here]

    def fetch(self, names: Sequence[str]) -> None:
        for name in names:
            self.kept.add(name, PIECE_BYTES, lambda: None)
            self.here.add(name)


def pieces_of(positions: Positions) -> list[int]:
    firsts, lasts = positions * LENGTH // PIECE_BYTES, (positions + 1) * LENGTH // PIECE_BYTES
    found: list[int] = np.union1d(firsts, lasts).tolist()
    return found


# ---------------------------------------------------------------------------------------------------
# The policies


def drawn(seed: int, speeds: Sequence[int], places: Callable[[int], int], members: list[Member]) -> Shares:
    for number in count():
        many = places(number)
        yield [shard(seed, number, place, many, COUNT, SEQUENCES) for place in range(many)]


def window(seed: int, speeds: Sequence[int], places: Callable[[int], int], members: list[Member]) -> Shares:
    for number in count():
        many = places(number)
        yield [shard_in_window(seed, number, place, many, COUNT, SEQUENCES, WINDOW) for place in range(many)]


def one_window(seed: int, speeds: Sequence[int], places: Callable[[int], int], members: list[Member]) -> Shares:
    for number in count():
        many = places(number)
        yield np.split(shard_in_window(seed, number, 0, 1, many * COUNT, SEQUENCES, WINDOW), many)


def capability(seed: int, speeds: Sequence[int], places: Callable[[int], int], members: list[Member]) -> Shares:
    """Runs the real agreed state, to which each round's manifest tells the steps."""
    raw = {"name": "benchmark", "data": {"assignment": "capability"}, "recipe": {"local_steps": STEPS}}
    run = RunConfig.model_validate(raw)
    assert run.recipe.round_sequences == COUNT
    keys = [bytes([number]) * 32 for number in range(1, len(members) + 1)]
    state = genesis(bytes(32), tuple(keys[: places(0)]), bytes(32))
    while True:
        state = with_members(state, keys[: places(state.round)])
        found = [state.slots_of(key, state.round + 1, run) for key in state.members]
        yield [shard_of_slots(seed, slots, SEQUENCES) for slots in found if slots is not None]
        taken = zip(state.members, speeds, strict=False)
        state = state.after(taking(state, list(taken)), run)


def with_members(state: AgreedState, keys: Sequence[bytes]) -> AgreedState:
    known = {entry.key: entry for entry in state.admitted}
    fresh = genesis(bytes(32), tuple(keys), bytes(32))
    return msgspec.structs.replace(
        state, members=tuple(keys), admitted=tuple(known.get(entry.key, entry) for entry in fresh.admitted), window=()
    )


def taking(state: AgreedState, contributed: Sequence[tuple[bytes, int]]) -> Manifest:
    number = state.round + 1
    taken = tuple(Taken(key, number, state.round, bytes(32), 1, steps, key[:16]) for key, steps in contributed)
    none: tuple[bytes, ...] = ()
    return Manifest(
        state.branch, number, state.head, state.digest, 0, bytes(32), taken, none, none, (), none, none, b"", none, none
    )  # fmt: skip


def matched(seed: int, speeds: Sequence[int], places: Callable[[int], int], members: list[Member]) -> Shares:
    """Windows that are the same in every pass, matched in each turn to the members."""
    size, random = TURN_ROUNDS * COUNT, np.random.default_rng(seed)
    while True:
        left = random.permutation(TURNS * MEMBERS).tolist()
        while left:
            chosen = stable_matching(members[:MEMBERS], speeds, left)
            left = [at for at in left if at not in chosen]
            orders = [random.permutation(size) + at * size for at in chosen]
            for number in range(TURN_ROUNDS):
                yield [order[number * COUNT : (number + 1) * COUNT] for order in orders]


def stable_matching(members: Sequence[Member], speeds: Sequence[int], windows: Sequence[int]) -> list[int]:
    """Returns the window of each member, by deferred acceptance (Gale and Shapley, 1962)."""
    size = TURN_ROUNDS * COUNT
    span = {at: {str(piece) for piece in pieces_of(np.arange(at * size, (at + 1) * size))} for at in windows}
    wishes = [iter(sorted(windows, key=lambda at, here=each.here: -len(span[at] & here))) for each in members]
    taken: dict[int, int] = {}
    free = list(range(len(members)))
    while free:
        suitor = free.pop()
        at = next(wishes[suitor])
        holder = taken.get(at)
        if holder is None or (speeds[suitor], -suitor) > (speeds[holder], -holder):
            taken[at] = suitor
            suitor = -1 if holder is None else holder
        if suitor >= 0:
            free.append(suitor)
    found = {member: at for at, member in taken.items()}
    return [found[number] for number in range(len(members))]


# ---------------------------------------------------------------------------------------------------
# What is measured


def fetched(
    policy: Policy, seed: int, speeds: Sequence[int], first: int, rounds: int, places: Callable[[int], int]
) -> tuple[list[float], float]:
    """Returns the MiB a round that each member fetched after the first rounds, and those that no other member held."""
    with tempfile.TemporaryDirectory() as directory:
        members = [Member(Path(directory) / str(number)) for number in range(MEMBERS + 1)]
        bytes_of, alone = [0] * len(members), 0
        shares = policy(seed, speeds, places, members)
        for number in range(first + rounds):
            for at, positions in enumerate(next(shares)):
                missing = members[at].lacks(positions)
                if number >= first:
                    bytes_of[at] += len(missing) * PIECE_BYTES
                    alone += sum(not any(name in each.here for each in members) for name in missing)
                members[at].fetch(missing)
    return [each / rounds / MIB for each in bytes_of], alone * PIECE_BYTES / rounds / MIB


def left_out(policy: Policy, seed: int) -> float:
    """Returns the share of what rounds gave out that nobody trained on, once the steps are known."""
    given = trained = 0
    with tempfile.TemporaryDirectory() as directory:
        members = [Member(Path(directory) / str(number)) for number in range(MEMBERS)]
        shares = policy(seed, SPEEDS, lambda number: MEMBERS, members)
        for number in range(PASS_ROUNDS):
            counts = [len(positions) for positions in next(shares)]
            if number >= KNOWN_ROUNDS:
                given += sum(counts)
                trained += sum(min(steps * STEP_SEQUENCES, n) for steps, n in zip(SPEEDS, counts, strict=True))
    return 1 - trained / given


def learning(seeds: int, path: Path | None) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    prepare_corpus(has_short=False)
    runs = Runs(path, processes=1)
    muon = Setting("local", "muon", k=256, local_steps=STEPS, rate="1/50")
    for size in (0, *WINDOWS_LEARNED):
        losses = [
            each["validation_loss"] for each in runs.all(replace(muon, window=size, seed=n) for n in range(seeds))
        ]
        each = " ".join(f"{loss:.3f}" for loss in losses)
        print(f"{size or 'drawn':>8}  {sum(losses) / len(losses):.3f}  ({each})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=PASS_ROUNDS, help="measured, after a first pass")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--learning", action="store_true")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.learning:
        learning(arguments.seeds, arguments.json)
        return
    seed, rounds = arguments.seed, arguments.rounds
    equal = [STEPS] * (MEMBERS + 1)
    print(f"{'policy':12}{'first':>8}{'later':>8}{'origin':>8}{'changing':>10}{'slowest':>9}{'left out':>10}")
    policies: dict[str, Policy] = {
        "drawn": drawn, "window": window, "capability": capability, "one window": one_window, "matched": matched,
    }  # fmt: skip
    for name, policy in policies.items():
        each, origin = fetched(policy, seed, equal, PASS_ROUNDS, rounds, lambda number: MEMBERS)
        begun, _ = fetched(policy, seed, equal, 0, PASS_ROUNDS, lambda number: MEMBERS)
        cells = [f"{sum(begun) / MEMBERS:8.2f}", f"{sum(each) / MEMBERS:8.2f}", f"{origin:8.2f}"]
        if policy is matched:
            cells += [f"{'':10}"]
        else:
            ninth, _ = fetched(
                policy, seed, equal, CHANGE_ROUNDS, ROUNDS_CHANGING,
                lambda number: MEMBERS + number // CHANGE_ROUNDS % 2,
            )  # fmt: skip
            cells += [f"{sum(ninth[:MEMBERS]) / MEMBERS:10.2f}"]
        unequal, _ = fetched(policy, seed, SPEEDS, PASS_ROUNDS, rounds, lambda number: MEMBERS)
        print(f"{name:12}" + "".join(cells) + f"{unequal[MEMBERS - 1]:9.2f}{left_out(policy, seed):10.1%}", flush=True)


if __name__ == "__main__":
    main()
