"""Audits over thousands of rounds: how soon liars are suspended, whether honest members ever are, and what seats cost.

    python benchmarks/audits.py [liars] [honest --rounds 200000] [keys --rounds 1000] [--seeds N]

The agreed state itself (p2ptrain/core/audits.py) is moved from round to round, with manifests as a swarm would agree on
them; nothing is sent, and z and strength are drawn as the matched filter was measured
(docs/explanation/matched-filter.md). Audits are as scarce as 3.5 % of training pays for.

    liars    a third of 16 members sends what nobody trained: rounds until it counts for nothing
    honest   f of 10 members accuse the others and praise themselves, in every audit that counts: honest suspensions
    keys     one machine joins with 1,000 keys and works for one of them a round, while honest newcomers join: seats
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable
from random import Random

from msgspec.structs import replace

from p2ptrain.config import RunConfig
from p2ptrain.core.auditing import CHANCE, OTHERS, TRIAL_CHANCE, sequences_of
from p2ptrain.core.audits import Measured, Tier
from p2ptrain.core.manifest import NO_BEARER, Join, Manifest, Request, manifest_of
from p2ptrain.core.messages import STRENGTH_MAX, Z_MAX, Announcement, Availability
from p2ptrain.core.roster import bitmap
from p2ptrain.core.state import AgreedState, genesis
from p2ptrain.digest import digest

SHARE = 0.035
NO_WORK = (0.0, 1.0)  # z and strength of copies, other data, resent and averaged contributions
LIES = {
    "copy, other data, resent, mean": NO_WORK,
    "noise": (0.0, 0.0),
    "flip": (-1.5, -1.0),
    "ascent": (-1.0, 0.2),
    "own less five means": (1.3, -1.4),
}
PARTS = {  # of a run: z of honest work, with its spread where four and where sixteen sets are read
    "batch 8, early": (1.35, 0.53, 0.34),
    "batch 8, later": (1.88, 0.23, 0.16),
    "batch 32, early": (0.78, 0.64, 0.32),
    "batch 32, later": (1.45, 0.43, 0.30),
}
IDLE_SPREAD = 0.6, 0.35  # of contributions without work


def run_of(batch: int) -> RunConfig:
    recipe = {"name": "local", "local_steps": 10, "sequences_per_pass": batch}
    return RunConfig.model_validate({"name": "audits", "recipe": recipe})


class Run:
    """A run of which only the agreed state is real."""

    def __init__(self, members: int, part: str, seed: int, typical: int | None = None) -> None:
        self.rng, self.part = Random(f"{members} {part} {seed}"), part  # noqa: S311
        self.config = run_of(32 if "32" in part else 8)
        self.keys = [digest("member", bytes([place]), str(seed).encode()) for place in range(members)]
        self.state = genesis(digest("run", str(seed).encode()), tuple(self.keys), bytes(32))
        self.state = replace(self.state, typical=round(1_000 * PARTS[part][0]) if typical is None else typical)
        self.work: Callable[[bytes], tuple[float, float] | None] = lambda key: None  # z and strength, if not of work
        self.reports: Callable[[bytes, bytes], tuple[int, int] | None] = lambda author, key: None  # false ones
        self.joining: list[bytes] = []
        self.found: dict[tuple[bytes, int, bool], tuple[int, int]] = {}
        first = OTHERS * sequences_of(self.config, is_summoned=False)
        self.saved = Counter(dict.fromkeys(self.keys, first))  # sequences that each member may spend
        self.spent = 0.0  # rounds' worth of training

    def measured(self, key: bytes, number: int, *, is_summoned: bool) -> tuple[int, int]:
        """Returns what all who read so many sequences of a contribution measure."""
        place = key, number, is_summoned
        if place not in self.found:
            lie, (z, few, many) = self.work(key), PARTS[self.part]
            strength, spread = 1.0, many if is_summoned else few
            if lie is not None:
                (z, strength), spread = lie, IDLE_SPREAD[is_summoned]
            drawn = max(-2.0, min(self.rng.gauss(z, spread), 2.0)), self.rng.gauss(strength, 0.06)
            self.found[place] = round(1_000 * drawn[0]), round(1_000 * drawn[1])
            if len(self.found) > 10_000:
                del self.found[next(iter(self.found))]
        return self.found[place]

    def audits(self) -> list[Measured]:
        """Returns the audits that members report in this round."""
        state, rng, made = self.state, self.rng, list[Measured]()
        whole, cost = self.config.recipe.round_sequences, OTHERS * sequences_of(self.config, is_summoned=False)
        taken = [key for key, number in state.taken_lately if number == state.round and key in state.place]
        new = [key for key in taken if state.admitted[state.place[key]].conduct.tier is not Tier.COUNTED]
        for author in state.members:
            for summons in state.summons:
                if summons.key != author:
                    self._report(made, author, summons.key, summons.round, is_summoned=True)
            self.saved[author] += SHARE * whole  # type: ignore[assignment]
            lies = [key for key in taken if self.reports(author, key) is not None]
            if lies:
                self._report(made, author, rng.choice(lies), state.round, is_summoned=False)
            elif taken and self.saved[author] >= cost and rng.random() < CHANCE:
                drawn = rng.choice(new if new and rng.random() < TRIAL_CHANCE else taken)
                self._report(made, author, drawn, state.round, is_summoned=False)
        return made

    def _report(self, made: list[Measured], author: bytes, key: bytes, number: int, *, is_summoned: bool) -> None:
        if author == key:
            return
        z, strength = self.reports(author, key) or self.measured(key, number, is_summoned=is_summoned)
        if self.reports(author, key) is None:
            cost = OTHERS * sequences_of(self.config, is_summoned=is_summoned)
            self.saved[author] -= 0 if is_summoned else cost
            self.spent += cost / self.config.recipe.round_sequences
            z = max(-Z_MAX, min(z + self.rng.randint(-20, 20), Z_MAX))
        made.append(Measured(author, key, number, z, max(-STRENGTH_MAX, min(strength, STRENGTH_MAX)), is_summoned))

    def turn(self, contribute: Callable[[bytes], bool] = lambda key: True) -> AgreedState:
        """Decides a round, as manifest.py does."""
        state, run = self.state, self.config
        number = state.round + 1
        keys = [entry.key for entry in state.admitted if contribute(entry.key)]
        offers = {
            key[:16]: Announcement(
                state.branch, number, state.round, state.root, digest("payload", key), 1,
                digest("content", key, number.to_bytes(8, "little"))[:16], 10, 0, 0, key,
            )
            for key in keys
        }  # fmt: skip
        joins = [Request(join=Join(key, NO_BEARER, 0, 0)) for key in self.joining if key not in state.place]
        asked = [Request(measured=each) for each in self.audits()] + self.rng.sample(joins, min(len(joins), 64))
        requests = {place.to_bytes(16, "big"): each for place, each in enumerate(asked)}
        held, names, heard = tuple(sorted(offers)), tuple(requests), bitmap(range(state.roster.size))
        root = state.root_round, state.root
        named = [
            Availability(state.branch, number, *root, held, (), names, heard, key)
            for key in state.members[: state.roster.quorum]
        ]
        manifest = manifest_of(state, run, named, offers.get, requests.get)
        assert isinstance(manifest, Manifest)
        self.state = state.after(manifest, run)
        return self.state


def liars(seeds: int) -> None:
    """Prints how many rounds pass until liars count for nothing."""
    for part in PARTS:
        for lie, found in LIES.items():
            waited = list[int]()
            for seed in range(seeds):
                run = Run(16, part, seed)
                bad = set(run.keys[:5])
                run.work = lambda key, bad=bad, found=found: found if key in bad else None
                left, limit = set(bad), 2_000
                for number in range(1, limit + 1):
                    state = run.turn()
                    out = {key for key in left if key not in state.place
                           or state.admitted[state.place[key]].conduct.tier is not Tier.COUNTED}  # fmt: skip
                    waited += [number] * len(out)
                    left -= out
                    if not left:
                        break
                waited += [limit] * len(left)
            late = sorted(waited)[int(0.95 * len(waited))]
            print(
                f"{part:16} {lie:32} suspended after {statistics.median(waited):.0f} rounds, 95 % within {late}",
                flush=True,
            )


def honest(rounds: int, seeds: int) -> None:
    """Prints how many honest members are suspended while f others audit falsely."""
    for part in PARTS:
        out, accused, spent = 0, 0, 0.0
        for seed in range(seeds):
            run = Run(10, part, seed)
            bad = set(run.keys[:3])

            def false(author: bytes, key: bytes, bad: set[bytes] = bad) -> tuple[int, int] | None:
                return None if author not in bad else (1_900, 1_000) if key in bad else (-Z_MAX, -STRENGTH_MAX)

            run.reports = false
            for _ in range(rounds // seeds):
                before = run.state
                state = run.turn()
                accused += sum(each not in before.summons for each in state.summons)
                lost = [entry.key for entry in state.admitted if entry.conduct.tier is not Tier.COUNTED]
                if lost:
                    out += len(lost)
                    back = (replace(e, conduct=replace(e.conduct, tier=Tier.COUNTED)) for e in state.admitted)
                    run.state = replace(state, admitted=tuple(back))
            spent += run.spent / (7 * run.state.round) / seeds
        print(f"{part:16} {rounds} rounds: {out} honest suspensions, {accused} summonses, "
              f"audits {spent:.2%} of training", flush=True)  # fmt: skip


def keys(rounds: int, seeds: int) -> None:
    """Prints the seats of one machine with 1,000 keys, and of honest newcomers."""
    for part in ("batch 8, later", "batch 32, later"):
        seats, waits = list[int](), list[int]()
        for seed in range(seeds):
            run = Run(16, part, seed)
            many = {digest("many", number.to_bytes(2, "little")) for number in range(1_000)}
            newcomers = [digest("newcomer", bytes([number])) for number in range(8)]
            came = {key: 50 * place for place, key in enumerate(newcomers)}
            busy = b""

            def work(key: bytes) -> tuple[float, float] | None:
                return NO_WORK if key in many and key != busy else None  # noqa: B023

            run.work = work
            first = dict[bytes, int]()
            for number in range(rounds):
                run.joining = [*many, *(key for key, at in came.items() if at <= number)]
                mine = [entry.key for entry in run.state.admitted if entry.key in many]
                busy = run.rng.choice(sorted(mine)) if mine else b""
                state = run.turn()
                for key in newcomers:
                    if key in state.roster.seat:
                        first.setdefault(key, number - came[key])
            count = Counter(key in many for key in run.state.members)
            seats.append(count[True])
            waits += [first.get(key, rounds) for key in newcomers if came[key] < rounds - 200]
        print(f"{part:16} one machine with 1,000 keys has {seats} seats after {rounds} rounds; honest newcomers wait "
              f"{statistics.median(waits):.0f} rounds, at most {max(waits)}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("what", nargs="*", choices=["liars", "honest", "keys", []], default=[])
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=10)
    arguments = parser.parse_args()
    start = time.perf_counter()
    what = arguments.what or ["liars", "honest", "keys"]
    if "liars" in what:
        liars(arguments.seeds)
    if "honest" in what:
        honest(arguments.rounds or 200_000, arguments.seeds)
    if "keys" in what:
        keys(arguments.rounds or 1_000, min(arguments.seeds, 4))
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
