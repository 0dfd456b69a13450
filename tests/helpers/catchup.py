"""Chains that others went on with, and a node that hears of them."""

from __future__ import annotations

from p2ptrain.core import events as ev
from p2ptrain.core.chain import Chain
from p2ptrain.core.history import Beginning, Step
from p2ptrain.core.state import AgreedState
from tests.helpers.core import KEYS, RUN, Bench, begun, line_of, root_of

ME = KEYS[1]


def other_line(bench: Bench, rounds: int, kept: int = 64) -> Chain:
    """The rounds that the other members decided, from the run's beginning."""
    line = Chain(bench.genesis, RUN, kept)
    extend(bench, line, rounds)
    return line


def extend(bench: Bench, line: Chain, rounds: int, which: bytes = b"") -> None:
    signers = tuple(key for key in line.state.members if key != bench.me)
    for entry, state in line_of(line.state, bench.run, rounds, signers[: line.state.roster.quorum], which):
        line.append(entry, state)


def regroup(line: Chain, members: tuple[bytes, ...]) -> Beginning:
    beginning = begun(members, members, line.state)
    line.append(beginning, line.state.regrouped(beginning.branch, beginning.members))
    return beginning


def meet(bench: Bench, line: Chain, peer: bytes = KEYS[0]) -> list[ev.Effect]:
    """A peer on that chain says where it is; the node asks for history as often as it wants, and gets it."""
    number = line.state.round + 1
    bench.hear(bench.hello(peer, branch=line.state.branch, round=number))
    effects: list[ev.Effect] = []
    until = bench.now + 3.0
    while bench.now < until:
        found = bench.tick()
        while asked := [effect for effect in found if isinstance(effect, ev.AskHistory)]:
            history = line.answer(asked[0].branch, asked[0].round)
            found = bench.do(ev.HistoryArrived(asked[0].peer, history))
            effects += found
    return effects


def steps(line: Chain, start: int = 0) -> list[tuple[Step, AgreedState]]:
    return [(each.step, each.state) for each in line.steps][start:]


def followed(effects: list[ev.Effect]) -> list[tuple[Step, AgreedState]]:
    records = [effect.record for effect in effects if isinstance(effect, ev.Persist)]
    return [(record.step, record.state) for record in records if isinstance(record, ev.Certified)]


def on_own_branch(rounds: int = 2, **settings: object) -> Bench:
    """A node that went on alone after a round with the others."""
    bench = Bench(4, me=1, agreement={"stall_seconds": 30, "settle_seconds": 3} | settings)
    bench.decide()
    while bench.state.branch == RUN:
        if bench.parts.work.training is not None:
            bench.train(2)
        bench.tick()
    assert bench.state.members == (ME,)
    for number in range(2, 2 + rounds):
        bench.train(number)
        while bench.state.round < number:
            bench.tick()
        bench.do(ev.Applied(bench.state.branch, number, root_of(number)))
    assert bench.state.round == 1 + rounds
    return bench


def shared(bench: Bench) -> Chain:
    """The others' chain at the time when the node was last among them."""
    line = Chain(bench.genesis, RUN, 64)
    first = bench.parts.chain.steps[0]
    line.append(first.step, first.state)
    return line
