"""Audits over thousands of rounds: how soon liars are suspended, whether honest members ever are, and what seats cost.

    python benchmarks/audits.py [liars] [honest --rounds 200000] [keys --rounds 1000] [shares] [bytes] [--seeds N]

The agreed state itself (p2ptrain/core/audits.py) is moved from round to round, with manifests as a swarm would agree on
them; nothing is sent, and z and strength are drawn as the matched filter was measured
(docs/explanation/matched-filter.md). Audits are as scarce as 3.5 % of training pays for.

    liars    a third of 16 members sends what nobody trained: rounds until it counts for nothing, where these liars
             audit as others do, and where they praise one another and audit all others truthfully
    honest   f of 10 members accuse the others and praise themselves, in every audit that counts: honest suspensions
    keys     one machine joins with many keys and works for one of them a round, while honest newcomers join: seats
    shares   what audits cost of the training, in runs of 60, 600 and 3,000 rounds
    bytes    what they cost of all bytes, in a simulated swarm of ten with payloads of 10M parameters; and in data that
             auditors fetch, where each sequence lies in a piece of its own, as in a large set that no node holds
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from random import Random
from typing import Any

from msgspec.structs import replace

from p2ptrain.config import RunConfig
from p2ptrain.core import events as ev
from p2ptrain.core.auditing import CHANCE, OTHERS, draw, sequences_of
from p2ptrain.core.audits import FAR_OFF, FAR_OFF_ALONE, Measured, Tier, has_earned_seat
from p2ptrain.core.manifest import NO_BEARER, Join, Manifest, Request, joins_max, manifest_of
from p2ptrain.core.messages import STRENGTH_MAX, Z_MAX, Announcement, AuditReport, Availability
from p2ptrain.core.newcomers import few_of_each_range, looked_at
from p2ptrain.core.roster import bitmap
from p2ptrain.core.state import AgreedState, genesis
from p2ptrain.digest import PIECE_BYTES, digest
from p2ptrain.sim.cluster import Cluster
from p2ptrain.sim.machine import SimNode
from p2ptrain.sim.outcome import simulate
from p2ptrain.sim.scenario import scenario_of
from p2ptrain.train.memory import need_of

Reports = Callable[[bytes, bytes, int, bool], tuple[int, int] | None]
SHARE = 0.035
NO_WORK = (0.0, 1.0)  # z and strength of copies, other data, resent and averaged contributions
LIES = {
    "copy, other data, resent, mean": NO_WORK,
    "noise": (0.0, 0.0),
    "flip": (-1.5, -1.0),
    "ascent": (-1.0, 0.2),
    "own less five means": (1.3, -1.4),
}
# Of a run: z of honest work, its spread where four sets are read and where all measure, and there that of no work.
PARTS = {
    "batch 8, early": (1.35, 0.53, 0.34, 0.35),
    "batch 8, later": (1.88, 0.23, 0.16, 0.35),
    "batch 32, early": (0.78, 0.64, 0.25, 0.20),
    "batch 32, later": (1.45, 0.43, 0.21, 0.20),
}
IDLE_SPREAD = 0.6  # where four sets are read
LIMIT_ROUNDS = 2_000  # after which a liar is taken to count for ever
LIFTED = 1_000  # typical z from which patient liars accuse
CROWDS = 10, 30, 100, 1_000  # keys of one machine
# It works for any of them, or for one until that has a seat, while the others send what is no work; joins with one key
# after the other, and works for whichever is next, while the others only vote, or for a seat that is nearly lost
# before that; or takes a step for each.
QUIETLY = "the next, the rest vote", "a seat nearly lost"
WAYS = "any of them", "one until it has a seat", *QUIETLY, "a step of ten for each"
LENGTHS = 60, 600, 3_000  # rounds
NAME_BYTES = 18  # of a request in an availability
PARTS_OF_IT = ("liars", "honest", "keys", "shares", "bytes")


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
        # z and strength of what a round took of a key, if not of work
        self.work: Callable[[bytes, int], tuple[float, float] | None] = lambda key, number: None
        self.steps: Callable[[bytes], int] = lambda key: self.config.recipe.local_steps  # that a key claims
        self.reports: Reports = lambda author, key, number, is_summoned: None  # false ones
        self.joining: list[bytes] = []
        self.ranges = {key: key.hex() for key in self.keys}  # of addresses, a range each
        self.found: dict[tuple[bytes, int, bool], tuple[int, int]] = {}
        first = OTHERS * sequences_of(self.config, is_summoned=False)
        self.saved = Counter(dict.fromkeys(self.keys, first))  # sequences that each member may spend
        self.spent = 0.0  # rounds' worth of training

    def measured(self, key: bytes, number: int, *, is_summoned: bool) -> tuple[int, int]:
        """Returns what all who read so many sequences of a contribution measure."""
        place = key, number, is_summoned
        if place not in self.found:
            lie, (z, few, many, idle) = self.work(key, number), PARTS[self.part]
            strength, spread = 1.0, many if is_summoned else few
            if lie is not None:
                (z, strength), spread = lie, idle if is_summoned else IDLE_SPREAD
            drawn = max(-2.0, min(self.rng.gauss(z, spread), 2.0)), self.rng.gauss(strength, 0.06)
            self.found[place] = round(1_000 * drawn[0]), round(1_000 * drawn[1])
            if len(self.found) > 10_000:
                del self.found[next(iter(self.found))]
        return self.found[place]

    def audits(self) -> list[Measured]:
        """Returns the audits that members report in this round."""
        state, rng, made = self.state, self.rng, list[Measured]()
        whole, cost = self.config.recipe.round_sequences, OTHERS * sequences_of(self.config, is_summoned=False)
        taken = [key for key, number, _ in state.taken_lately if number == state.round and key in state.place]
        for author in state.members:
            for summons in state.summons:
                if summons.key != author:
                    self._report(made, author, summons.key, summons.round, is_summoned=True)
            self.saved[author] += SHARE * whole  # type: ignore[assignment]
            lies = [key for key in taken if self.reports(author, key, state.round, False) is not None]
            if lies:
                self._report(made, author, rng.choice(lies), state.round, is_summoned=False)
            elif taken and self.saved[author] >= cost and rng.random() < CHANCE:
                self._report(made, author, draw(state, author, taken, self.ranges, rng), state.round, is_summoned=False)
        return made

    def _report(self, made: list[Measured], author: bytes, key: bytes, number: int, *, is_summoned: bool) -> None:
        if author == key:
            return
        lie = self.reports(author, key, number, is_summoned)
        z, strength = lie or self.measured(key, number, is_summoned=is_summoned)
        if lie is None:
            cost = OTHERS * sequences_of(self.config, is_summoned=is_summoned)
            self.saved[author] -= 0 if is_summoned else cost
            self.spent += cost / self.config.recipe.round_sequences
            z = max(-Z_MAX, min(z + self.rng.randint(-20, 20), Z_MAX))
        made.append(Measured(author, key, number, z, max(-STRENGTH_MAX, min(strength, STRENGTH_MAX)), is_summoned))

    def turn(self, contribute: Callable[[bytes], bool] = lambda key: True) -> AgreedState:
        """Decides a round, as manifest.py does."""
        state, run = self.state, self.config
        number = state.round + 1
        attested = looked_at(state, run, self.ranges, number)
        keys = [entry.key for entry in state.admitted if entry.key in attested and contribute(entry.key)]
        offers = {
            key[:16]: Announcement(
                state.branch, number, state.round, state.root, digest("payload", key), 1,
                digest("content", key, number.to_bytes(8, "little"))[:16], self.steps(key), 0, 0, key,
            )
            for key in keys
        }  # fmt: skip
        outside = (key for key in self.joining if key not in state.place)
        few = few_of_each_range(outside, self.ranges, number, joins_max(state.roster.size))
        joins = [Request(join=Join(key, NO_BEARER, 0, 0)) for key in few]
        asked = [Request(measured=each) for each in self.audits()] + joins[:64]
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
    for praises, part, lie in product((False, True), PARTS, LIES):
        waited = sorted(each for seed in range(seeds) for each in rounds_counted(part, lie, seed, praises=praises))
        middle, late = statistics.median(waited), waited[int(0.95 * len(waited))]
        is_missed = middle > (100 if part.endswith("early") else 60) or late > 175
        print(
            f"{'praise' if praises else 'as measured':12} {part:16} {lie:32} suspended after {middle:.0f} rounds, "
            f"95 % within {late}{': missed' if is_missed else ''}",
            flush=True,
        )


def rounds_counted(part: str, lie: str, seed: int, *, praises: bool) -> list[int]:
    """Returns how many rounds each of five liars among 16 counts; early the typical z is that of a run's start."""
    run = Run(16, part, seed, typical=0 if part.endswith("early") else None)
    bad = set(run.keys[:5])
    run.work = lambda key, number: LIES[lie] if key in bad else None
    run.reports = praise(bad) if praises else run.reports
    waited, left = list[int](), set(bad)
    for number in range(1, LIMIT_ROUNDS + 1):
        state = run.turn()
        out = {key for key in left if key not in state.place
               or state.admitted[state.place[key]].conduct.tier is not Tier.COUNTED}  # fmt: skip
        waited += [number] * len(out)
        left -= out
        if not left:
            break
    return [*waited, *[LIMIT_ROUNDS] * len(left)]


def honest(rounds: int, seeds: int) -> None:
    """Prints how many honest members are suspended while f others audit falsely."""
    for part, habit in product(PARTS, (openly, patiently)):
        out, accused, spent = 0, 0, 0.0
        for seed in range(seeds):
            run = Run(10, part, seed)
            run.reports = habit(run, set(run.keys[:3]))
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
        print(f"{part:16} {habit.__name__:9} {rounds} rounds: {out} honest suspensions, {accused} summonses, "
              f"audits {spent:.2%} of training", flush=True)  # fmt: skip


def praise(bad: set[bytes]) -> Reports:
    """Praises the other liars, and tells of all others what was measured."""
    return lambda author, key, number, is_summoned: (1_900, 1_000) if author in bad and key in bad else None


def openly(run: Run, bad: set[bytes]) -> Reports:
    """Accuses whoever is honest, and praises the others."""
    return lambda author, key, number, is_summoned: (
        None if author not in bad else (1_900, 1_000) if key in bad else (-Z_MAX, -STRENGTH_MAX)
    )


def patiently(run: Run, bad: set[bytes]) -> Reports:
    """Lifts the typical z by praise, then accuses as far as nobody is struck for, and rather who has failed once; where
    all measure, says what moves the median and is not far off."""
    honest = [key for key in run.keys if key not in bad]
    low = round(1_000 * PARTS[run.part][0]) - FAR_OFF_ALONE + 200

    def report(author: bytes, key: bytes, number: int, is_summoned: bool) -> tuple[int, int] | None:
        if author not in bad:
            return None
        if is_summoned:
            z, strength = run.measured(key, number, is_summoned=True)
            return z + (FAR_OFF - 50) * (1 if key in bad else -1), strength
        if run.state.typical < LIFTED:
            return (1_900, 1_000) if key in bad else None
        failed = {each.key: each.conduct.failed for each in run.state.admitted}
        victim = max(honest, key=lambda each: (failed[each], run.state.round // 8 % (1 + honest.index(each))))
        return (low, 1_000) if key == victim else None

    return report


def shares(seeds: int) -> None:
    """Prints what audits cost of the training, by the length of a run that begins with them."""
    for part, bad in product(PARTS, (0, 5)):
        told = []
        for rounds in LENGTHS:
            spent, summoned = 0.0, 0
            for seed in range(seeds):
                run = Run(16, part, seed, typical=0)
                liars = set(run.keys[:bad])
                run.work = lambda key, number: (0.0, -1.5) if key in liars else None  # noqa: B023
                for _ in range(rounds):
                    before = run.state
                    summoned += sum(each not in before.summons for each in run.turn().summons)
                spent += run.spent / (16 * rounds) / seeds
            told.append(f"{spent:.1%} of {rounds} rounds ({summoned / seeds:.0f} summonses)")
        print(f"{part:16} {bad} liars of 16: audits cost {', '.join(told)}", flush=True)


def weigh(rounds: int) -> None:
    """Prints what audits cost of the bytes that nodes receive, payloads included."""
    model = RunConfig.model_validate({"name": "bytes", "model": {"preset": "10m"}})
    for bad in (0, 3):
        scenario = {
            "sentence": "Ten members audit each other.", "nodes": 10, "rounds": rounds,
            "recipe": {"name": "local", "local_steps": 10, "sequences_per_pass": 8},
            "training": {"audit_share": SHARE, "payload_bytes": need_of(model).payload, "seconds": 10.0},
            "fault": [{"kind": "liar", "at": 0, "nodes": list(range(10 - bad, 10)), "how": "no work"}] if bad else [],
        }  # fmt: skip
        audits, measured = Counter[str](), set[tuple[bytes, bytes, int, bool]]()

        def prepare(cluster: Cluster, audits: Counter[str] = audits, measured: set[Any] = measured) -> None:
            def note(node: SimNode, event: ev.Event, effects: Sequence[Any] | None, local: float) -> None:
                for effect in effects or ():
                    received = cluster.decode(effect.envelope) if isinstance(effect, ev.Publish) else None
                    message, receivers = received and received.message, len(cluster.nodes) - 1
                    if isinstance(message, AuditReport):
                        audits["reports"] += receivers * len(effect.envelope)
                        measured.add((message.author, message.key, message.round, message.is_summoned))
                    elif isinstance(message, Availability):  # nobody joins or leaves, so all requests are audits
                        audits["names"] += receivers * NAME_BYTES * len(message.requests)

            cluster.watch.observers.append(note)

        outcome = simulate(scenario_of(scenario), 1, prepare=prepare)
        assert outcome.is_good, outcome.failures
        metrics, share = outcome.cluster.metrics, audits.total() / outcome.cluster.metrics.heard_bytes
        print(f"{bad} liars of 10, {len(metrics.manifests)} rounds, payloads of {need_of(model).payload:,} bytes: "
              f"{metrics.audits.total()} audits, {share:.4%} of {metrics.heard_bytes / 1e6:,.1f} MB heard "
              f"(reports {audits['reports']:,} bytes, names {audits['names']:,})", flush=True)  # fmt: skip
        sizes = [OTHERS * sequences_of(run_of(8), is_summoned=is_summoned) for *_, is_summoned in measured]
        data, heard, turns = sum(sizes) * PIECE_BYTES, metrics.heard_bytes, 10 * len(metrics.manifests)
        trained = turns * run_of(8).recipe.round_sequences * PIECE_BYTES
        print(f"  data that auditors fetch, a sequence a piece: {data / turns / 2**20:.1f} MiB a node and round, "
              f"{data / heard:.0%} of what is heard, {data / (data + trained + heard):.1%} with all trainings' data; "
              f"of an audit at most {min(sizes)} MiB, of a summons {max(sizes)}", flush=True)  # fmt: skip


def keys(rounds: int, seeds: int) -> None:
    """Prints the seats of one machine with many keys, and how long honest newcomers beside them wait."""
    for part, crowd, way in product(("batch 8, later", "batch 32, later"), CROWDS, WAYS):
        seats, asked, tried = list[int](), list[int](), list[int]()
        for seed in range(seeds):
            run = Run(16, part, seed)
            many = {digest("many", number.to_bytes(2, "little")) for number in range(crowd)}
            came = {digest("newcomer", bytes([place])): 50 * place for place in range(8)}
            run.ranges |= dict.fromkeys(many, "the machine") | {key: key.hex() for key in came}
            admitted, seated, most, had = dict[bytes, int](), dict[bytes, int](), 0, set[bytes]()
            is_quiet = way in QUIETLY
            busy = dict[int, bytes]()  # by round: the key that the machine works for
            if way == "a step of ten for each":
                run.steps = lambda key: 1 if key in many else run.config.recipe.local_steps  # noqa: B023
            else:
                run.work = lambda key, number: NO_WORK if key in many and key != busy[number] else None  # noqa: B023
            for number in range(rounds):
                fresh = sorted(many - had)[:1] if is_quiet else many
                run.joining = [*fresh, *(key for key, at in came.items() if at <= number)]
                works = busy[number + 1] = _worked_for(run, many, way, busy.get(number, b""))
                state = run.turn(lambda key: key not in many or not is_quiet or key == works)  # noqa: B023
                most, had = max(most, len(many & {*state.members})), had | (many & {*state.members})
                for key, at in came.items():
                    if key in state.place:
                        admitted.setdefault(key, number - at)
                    if key in state.roster.seat:
                        seated.setdefault(key, number - at - admitted[key])
            seats.append(most)
            asked += admitted.values()
            tried += seated.values()
        told = f"{part:16} {crowd:5} keys, work for {way:23}: "
        told += f"{seats} seats at most in {rounds} rounds; of {8 * seeds} newcomers {len(asked)} admitted"
        told += f" after {_middle(asked)}, {len(tried)} seated {_middle(tried)} rounds later"
        print(told, flush=True)


def _worked_for(run: Run, many: set[bytes], way: str, last: bytes) -> bytes:
    """Returns the key that the machine works for in the next round."""
    mine = [entry for entry in run.state.admitted if entry.key in many]
    seated = [entry for entry in mine if entry.key in run.state.roster.seat]
    others = sorted(entry.key for entry in mine if entry.key not in run.state.roster.seat)
    if way == "a seat nearly lost" and seated:
        poorest = min(seated, key=lambda entry: (entry.work, entry.key))
        if not others or poorest.work <= 2 * run.config.recipe.local_steps:
            return poorest.key
    ready = [key for key in others if has_earned_seat(run.state, key, run.config)] if way in QUIETLY else []
    others = ready or others
    stays = way != "any of them" and last in others
    return last if stays else run.rng.choice(others) if others else b""


def _middle(rounds: list[int]) -> str:
    return f"{statistics.median(rounds):.0f} (at most {max(rounds)})" if rounds else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("what", nargs="*", choices=[*PARTS_OF_IT, []], default=[])
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=10)
    arguments = parser.parse_args()
    start = time.perf_counter()
    what = arguments.what or PARTS_OF_IT
    if "liars" in what:
        liars(arguments.seeds)
    if "honest" in what:
        honest(arguments.rounds or 200_000, arguments.seeds)
    if "keys" in what:
        keys(arguments.rounds or 1_000, min(arguments.seeds, 4))
    if "shares" in what:
        shares(min(arguments.seeds, 4))
    if "bytes" in what:
        weigh(arguments.rounds or 200)
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
