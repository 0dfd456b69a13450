"""Trust: only a history with the head that a person vouched for is adopted, whatever peers claim.

The forger has the keys of all founders, which leaked long after they left; the honest swarm has another roster by now.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from p2ptrain.cli import app
from p2ptrain.config import RunConfig
from p2ptrain.core import events as ev
from p2ptrain.core import trust
from p2ptrain.core.chain import Chain
from p2ptrain.core.complaints import Code, complaint
from p2ptrain.core.history import ENTRIES_MAX, BranchStart, Entry, History
from p2ptrain.core.reputation import Reason
from p2ptrain.core.state import AgreedState, genesis
from p2ptrain.core.trust import RETRY_SECONDS
from p2ptrain.daemon.assembly import TRUST_NAME, trusted_head
from p2ptrain.data.dataset import manifest_digest
from p2ptrain.digest import digest
from p2ptrain.errors import ConfigError, DataError
from p2ptrain.store.store import Store
from tests.helpers.core import KEYS, ROOT0, RUN, Bench, announced, begun, certified, line_of, plain_manifest, published
from tests.helpers.driver import STATE, a_dataset, root_of
from tests.helpers.lone_node import ME

FOUNDERS = 5
HONEST, FORGER = KEYS[7], KEYS[8]  # whom the newcomer is connected with
STRANGER = digest("trust test", b"root")


BEGUN = Bench(FOUNDERS, me=9, start=False)  # of which all histories are


def extend(line: Chain, rounds: int, which: bytes = b"") -> None:
    for entry, state in line_of(line.state, BEGUN.run, rounds, which=which):
        line.append(entry, state)


def turn_over(line: Chain) -> None:
    """A founder leaves, and from here on its key counts for nothing."""
    state, gone = line.state, line.state.members[:1]
    entry = certified(msgspec.structs.replace(plain_manifest(state, BEGUN.run), leaves=gone, unseated=gone), state)
    line.append(entry, state.after(entry.manifest, BEGUN.run))


def honest_line(before: int = 6, after: int = 12, kept: int = 256) -> Chain:
    line = Chain(BEGUN.genesis, RUN, kept)
    extend(line, before)
    turn_over(line)
    extend(line, after)
    return line


def regrouped_line() -> tuple[Chain, AgreedState]:
    """An honest chain that has just regrouped, and the state before that."""
    line = honest_line()
    parted = line.state
    beginning = begun(parted.members[:3], parted.members[:2], parted)
    line.append(beginning, parted.regrouped(beginning.branch, beginning.members))
    return line, parted


def forged_line(rounds: int = 40, kept: int = 256) -> Chain:
    """A longer chain, signed with all founders' keys and formally valid."""
    line = Chain(BEGUN.genesis, RUN, kept)
    extend(line, rounds, which=b"forged")
    return line


def newcomer(head: bytes = b"", kept: int = 256) -> Bench:
    bench = Bench(FOUNDERS, me=9, start=False, agreement={"history_rounds": kept})
    bench.do(ev.Started(bench.saved(applied_root=b""), trust=head))
    return bench


def asked(effects: list[ev.Effect]) -> list[tuple[bytes, int]]:
    return [(effect.peer, effect.round) for effect in effects if isinstance(effect, ev.AskHistory)]


def lead(bench: Bench, lines: dict[bytes, Chain], effects: list[ev.Effect], questions: int = 64) -> list[ev.Effect]:
    """Answers all requests from these peers' chains; returns all effects."""
    done: list[ev.Effect] = list(effects)
    for _ in range(questions):
        wanted = [effect for effect in effects if isinstance(effect, ev.AskHistory)]
        if not wanted:
            return done
        effects = []
        for each in wanted:
            history = lines[each.peer].answer(each.branch, each.round)
            effects += bench.do(ev.HistoryArrived(each.peer, history))
        done += effects
    return done


def meet(bench: Bench, **lines: Chain) -> list[ev.Effect]:
    """Connects the honest peer, the forger or both, and lets them say where they are."""
    by_peer = {HONEST if name == "honest" else FORGER: line for name, line in lines.items()}
    done: list[ev.Effect] = []
    for peer, line in by_peer.items():
        done += lead(bench, by_peer, bench.do(ev.PeerSeen(peer)))
        state = line.state
        done += lead(bench, by_peer, bench.hear(bench.hello(peer, branch=state.branch, round=state.round + 1)))
    return done + lead(bench, by_peer, bench.wait(0.9))


# ---------------------------------------------------------------------------------------------------
# What is adopted


def test_without_trust_a_longer_history_by_leaked_keys_is_adopted() -> None:
    bench = newcomer()
    forged = forged_line()
    meet(bench, forger=forged)
    assert bench.state.head == forged.state.head


def test_with_trust_it_is_not_and_the_honest_one_is() -> None:
    honest, forged = honest_line(), forged_line()
    bench = newcomer(honest.steps[-3].state.head)
    done = meet(bench, forger=forged)
    assert bench.state == bench.genesis
    assert [effect for effect in done if not isinstance(effect, ev.AskHistory)] == []
    meet(bench, honest=honest)
    assert bench.state.head == honest.state.head
    assert bench.parts.trust is None
    records = bench.node.context.reputation.records
    assert HONEST not in records
    assert bench.node.context.counters["histories without the trusted head"] == 1


def test_a_history_that_is_longer_than_an_answer_is_followed_to_its_head() -> None:
    rounds = 3 * ENTRIES_MAX + 5
    honest = honest_line(after=rounds)
    bench = newcomer(honest.state.head)
    done = meet(bench, honest=honest)
    assert [number for _, number in asked(done)][:4] == [0, 64, 128, 192]
    assert bench.state == honest.state
    assert list(bench.parts.chain.lineage) == list(honest.lineage)
    assert bench.parts.chain.changes == honest.changes
    assert len([effect for effect in done if isinstance(effect, ev.Persist)]) == rounds + 7


def test_a_history_of_which_peers_keep_the_end_alone_is_adopted_with_what_proves_its_roster() -> None:
    kept = 80
    honest = honest_line(after=150, kept=kept)
    bench = newcomer(honest.steps[-2].state.head, kept)
    done = meet(bench, honest=honest)
    assert bench.state == honest.state
    assert bench.parts.chain.changes == honest.changes
    persisted = [effect.record for effect in done if isinstance(effect, ev.Persist)]
    first = next(record for record in persisted if isinstance(record, ev.Certified))
    assert first.trunk is not None
    assert first.trunk.base is not None
    again = bench.make()
    again.handle(ev.Started(bench.saved(base=first.trunk.base, history=tuple(
        record for record in persisted if isinstance(record, ev.Certified)), trunk=first.trunk)), 0.0)  # fmt: skip
    assert again.participant.chain.state == honest.state
    assert again.participant.trust is None


def test_a_branch_that_the_head_names_is_adopted_when_its_members_have_certified_a_round() -> None:
    line, _ = regrouped_line()
    bench = newcomer(line.state.branch)
    meet(bench, honest=line)
    assert bench.state == bench.genesis
    extend(line, 1)
    lead(bench, {HONEST: line}, bench.wait(RETRY_SECONDS + 1.0))
    assert bench.state == line.state


def test_a_branch_that_began_after_the_head_is_not_adopted_with_it() -> None:
    """Two of four members may have begun it; the usual rules decide whether it binds anybody."""
    line, parted = regrouped_line()
    extend(line, 2)
    bench = newcomer(parted.head)
    bench.do(ev.PeerSeen(HONEST))
    bench.do(ev.HistoryArrived(HONEST, line.answer(RUN, 0)))
    assert bench.state == parted


def test_a_head_that_is_still_to_be_certified_is_waited_for() -> None:
    honest = honest_line()
    ahead = honest_line()
    extend(ahead, 5)
    bench = newcomer(ahead.state.head)
    meet(bench, honest=honest)
    assert bench.state == bench.genesis
    extend(honest, 6)
    lead(bench, {HONEST: honest}, bench.wait(RETRY_SECONDS + 1.0))
    assert bench.state == honest.state


# ---------------------------------------------------------------------------------------------------
# What a forger may try


def test_a_forger_who_names_the_head_in_a_state_that_he_jumps_to_is_refused() -> None:
    plain = newcomer()
    head = honest_line().state.head
    base = msgspec.structs.replace(forged_line(9).state, head=head)
    steps = tuple(entry for entry, _ in line_of(base, plain.run, 3, which=b"forged"))
    history = History((BranchStart(RUN, 0),), base.round + 3, (), base, steps)
    bench = newcomer(head)
    assert asked(bench.do(ev.PeerSeen(FORGER))) == [(FORGER, 0)]
    bench.do(ev.HistoryArrived(FORGER, history))
    assert bench.state == bench.genesis
    assert bench.parts.trust is not None
    plain.do(ev.PeerSeen(FORGER))
    plain.hear(plain.hello(FORGER, round=base.round + 4))
    plain.wait(0.9)
    plain.do(ev.HistoryArrived(FORGER, history))
    assert plain.state.round == base.round + 3  # without trust, nothing is wrong with it


def test_a_forger_who_signs_the_right_manifest_in_a_wrong_place_is_refused() -> None:
    """The manifest with the trusted digest, among the changes of a jump between rosters of the forger's own."""
    honest = honest_line()
    right = next(each.step for each in honest.steps if isinstance(each.step, Entry) and each.step.manifest.unseated)
    assert isinstance(right, Entry)
    before = forged_line(6).state
    change = certified(right.manifest, before)
    members = tuple(key for key in before.members if key not in right.manifest.unseated)
    base = msgspec.structs.replace(before, round=7, head=right.manifest.digest, members=members)
    steps = tuple(entry for entry, _ in line_of(base, BEGUN.run, 3, which=b"forged"))
    bench = newcomer(right.manifest.digest)
    bench.do(ev.PeerSeen(FORGER))
    bench.do(ev.HistoryArrived(FORGER, History((BranchStart(RUN, 0),), 10, (change,), base, steps)))
    assert bench.state == bench.genesis
    assert bench.parts.trust is not None


def test_a_state_root_that_others_have_is_no_head() -> None:
    """Anyone can copy it into a manifest of their own."""
    state = BEGUN.genesis
    manifest = plain_manifest(state, BEGUN.run, root_round=0, root=STRANGER)
    line = Chain(state, RUN, 256)
    line.append(entry := certified(msgspec.structs.replace(manifest, root=STRANGER), state), state.after(
        msgspec.structs.replace(manifest, root=STRANGER), BEGUN.run))  # fmt: skip
    assert entry.manifest.root == STRANGER
    bench = newcomer(STRANGER)
    meet(bench, forger=line)
    assert bench.state == bench.genesis


def test_one_who_leads_on_for_ever_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = spare = ENTRIES_MAX
    monkeypatch.setattr(trust, "ROUNDS_SPARE", spare)
    bench = newcomer(STRANGER, kept)
    done = meet(bench, forger=forged_line(3 * ENTRIES_MAX + 60, kept=1_000))
    assert [number for _, number in asked(done)] == [0, 64, 128]
    assert bench.parts.trust is not None
    assert len(bench.parts.trust.trial.steps) <= kept


def test_a_history_that_does_not_hold_is_held_against_who_showed_it_and_the_next_is_asked() -> None:
    honest = honest_line()
    bench = newcomer(honest.state.head)
    bench.do(ev.PeerSeen(FORGER))
    bent = msgspec.structs.replace(honest.answer(RUN, 0), steps=honest.answer(RUN, 0).steps[1:])
    bench.do(ev.HistoryArrived(FORGER, bent))
    assert bench.node.context.reputation.records[FORGER].counters == {Reason.MALFORMED: 1}
    assert asked(bench.do(ev.PeerSeen(HONEST))) == [(HONEST, 0)]
    assert asked(bench.wait(5.0)) == []  # it is still thinking
    assert bench.do(ev.HistoryArrived(FORGER, honest.answer(RUN, 0))) == []  # it was not asked
    lead(bench, {HONEST: honest}, bench.do(ev.HistoryArrived(HONEST, honest.answer(RUN, 0))))
    assert bench.state == honest.state


def test_until_then_a_node_takes_part_in_nothing_and_says_why() -> None:
    bench = newcomer(STRANGER)
    forged = forged_line()
    done = meet(bench, forger=forged)
    offer = announced(KEYS[0])
    rest = [published(done), bench.wait(60.0), bench.hear(offer)]
    assert [effect for effects in rest for effect in effects if not isinstance(effect, ev.AskHistory)] == []
    assert bench.health[0] == complaint(Code.UNTRUSTED, head=STRANGER.hex()[:16], others=1, peers=1).text
    assert bench.node.limits()["trial history"][0] <= bench.node.limits()["trial history"][1]
    assert [type(effect) for effect in bench.do(ev.StopRequested())] == [ev.Stop]


def slowly(bench: Bench, line: Chain, answer_seconds: int, seconds: int) -> list[tuple[bytes, int]]:
    """The requests of the node while the forger takes this long for each answer and all other peers are silent."""
    questions, age = asked(bench.do(ev.PeerSeen(FORGER))), 0
    for _ in range(seconds):
        effects, age = bench.wait(1.0), age + 1
        if not asked(effects) and questions[-1][0] == FORGER and age >= answer_seconds:
            effects = bench.do(ev.HistoryArrived(FORGER, line.answer(RUN, questions[-1][1])))
        if asked(effects):
            questions, age = questions + asked(effects), 0
    return questions


def test_who_tells_its_history_one_round_at_a_time_is_asked_once() -> None:
    honest = honest_line()
    bench = newcomer(honest.state.head)
    bench.do(ev.PeerSeen(FORGER))
    whole = forged_line().answer(RUN, 0)
    bench.do(ev.HistoryArrived(FORGER, msgspec.structs.replace(whole, steps=whole.steps[:1])))
    assert asked(bench.do(ev.PeerSeen(HONEST))) == [(HONEST, 0)]
    lead(bench, {HONEST: honest}, bench.do(ev.HistoryArrived(HONEST, honest.answer(RUN, 0))))
    assert bench.state == honest.state


def test_who_answers_slowly_makes_way_for_others_and_has_longer_the_next_time() -> None:
    bench, forged = newcomer(STRANGER), forged_line(4 * ENTRIES_MAX - 4)
    bench.do(ev.PeerSeen(HONEST))
    bench.do(
        ev.HistoryArrived(HONEST, honest_line().answer(RUN, 0))
    )  # it has not got the head yet, and is silent later
    of_forger = [(FORGER, number * ENTRIES_MAX) for number in range(4)]
    questions = slowly(bench, forged, 9, 80)
    assert questions == [*of_forger, (HONEST, 0), *of_forger, (HONEST, 0)]
    assert bench.node.context.counters["slow histories broken off"] == 1, "the second time it came to its end"
    assert FORGER not in bench.node.context.reputation.records, "it may be a slow line"


def until_trusted(bench: Bench, lines: dict[bytes, Chain], seconds_of: dict[bytes, list[float]]) -> float:
    """Returns the seconds until a history is trusted, with the given answer times (the last one repeats)."""
    open_since: dict[bytes, tuple[ev.AskHistory, float]] = {}

    def note(effects: list[ev.Effect]) -> None:
        for each in effects:
            if isinstance(each, ev.AskHistory):  # a question that was given up is answered all the same
                open_since.setdefault(each.peer, (each, bench.now))

    for peer in lines:
        note(bench.do(ev.PeerSeen(peer)))
    began = bench.now
    while bench.parts.trust is not None and bench.now < began + 3_600:
        note(bench.wait(0.5))
        for peer, (question, at) in list(open_since.items()):
            if bench.now - at >= seconds_of[peer][0]:
                del open_since[peer]
                seconds_of[peer] = seconds_of[peer][1:] or seconds_of[peer]
                note(bench.do(ev.HistoryArrived(peer, lines[peer].answer(question.branch, question.round))))
    return bench.now - began


@pytest.mark.parametrize("honest_seconds", [[9.0], [15.0, 1.0], [15.0]], ids=["slow", "late once", "always late"])
def test_liars_who_keep_to_the_limits_keep_no_honest_peer_out(honest_seconds: list[float]) -> None:
    honest, forged = honest_line(after=4 * ENTRIES_MAX - 12), forged_line(4 * ENTRIES_MAX - 4)
    bench = newcomer(honest.state.head)
    liars = [KEYS[10], KEYS[11]]
    lines = {**dict.fromkeys(liars, forged), HONEST: honest}
    took = until_trusted(bench, lines, {**{liar: [7.0] for liar in liars}, HONEST: honest_seconds})
    assert bench.state == honest.state
    assert took < 600
    counters = bench.node.context.reputation.records[HONEST].counters if len(honest_seconds) > 1 else {}
    assert Reason.MALFORMED not in counters, "it was the answer to what it had been asked before"


def test_while_nobody_else_can_be_asked_one_may_answer_slowly() -> None:
    forged = forged_line(4 * ENTRIES_MAX - 4)
    bench = newcomer(forged.state.head)
    assert slowly(bench, forged, 9, 40) == [(FORGER, number * ENTRIES_MAX) for number in range(4)]
    assert bench.state == forged.state


def test_one_who_is_silent_costs_one_question() -> None:
    honest = honest_line()
    bench = newcomer(honest.state.head)
    assert asked(bench.do(ev.PeerSeen(FORGER))) == [(FORGER, 0)]
    assert asked(bench.do(ev.PeerSeen(HONEST))) == []
    assert (HONEST, 0) in asked(bench.wait(10.1))
    assert bench.node.context.reputation.records[FORGER].counters == {Reason.SILENT: 1}


# ---------------------------------------------------------------------------------------------------
# Over a restart


@pytest.fixture
def store(tmp_path: Path) -> Store:
    dataset = a_dataset(tmp_path / "data")
    run = RunConfig.model_validate({"name": "trusted"}).sealed(
        manifest=manifest_digest(dataset.manifest_bytes()), initial_root=root_of(STATE).hex(), founders=[ME.key.hex()]
    )
    beginning = genesis(run.id, (ME.key,), root_of(STATE))
    return Store(tmp_path / "run", run, beginning, ME.key, tmp_path / "key")


def adopt(store: Store) -> AgreedState:
    """A history of one round."""
    state = store.genesis
    manifest = msgspec.structs.replace(
        plain_manifest(genesis(RUN, KEYS[:4], ROOT0), store_run(store)),
        branch=state.branch, parent=state.head, state=state.digest, root=state.root,
    )  # fmt: skip
    after = state.after(manifest, store_run(store))
    store.write([ev.Certified(certified(manifest, genesis(RUN, KEYS[:4], ROOT0)), after)])
    return after


def store_run(store: Store) -> RunConfig:
    return RunConfig.from_canonical((store.directory / "run.json").read_bytes())


def test_a_head_is_remembered_until_a_history_with_it_was_adopted(store: Store) -> None:
    assert trusted_head(store, b"") == b""
    assert trusted_head(store, STRANGER) == STRANGER
    assert trusted_head(store, b"") == STRANGER  # killed while it waited, and started without the option
    adopt(store)
    assert trusted_head(store, b"") == b""
    assert trusted_head(store, STRANGER) == b""


def test_a_head_that_an_adopted_history_has_not_got_is_the_users_error(store: Store) -> None:
    state = adopt(store)
    assert trusted_head(store, state.head) == b""
    with pytest.raises(
        ConfigError, match="--trust: the history that this node has adopted and kept does not contain the head"
    ):
        trusted_head(store, STRANGER)
    assert trusted_head(store, b"") == b""


def test_a_damaged_note_is_named(store: Store) -> None:
    (store.directory / TRUST_NAME).write_bytes(b"not a head")
    with pytest.raises(DataError, match=re.escape(str(store.directory / TRUST_NAME))):
        trusted_head(store, STRANGER)


@pytest.mark.parametrize("head", ["", "ab", "0x" + "ab" * 31, "ab" * 33, "zz" * 32, "ab" * 31 + "a\n"])
def test_what_is_no_head_is_refused_before_anything_is_done(head: str, tmp_path: Path) -> None:
    address = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWGzBrLeBgkGzJnLWYbGzHcQBvNZeHmfDmjVcJ5v4YsSsT"
    arguments = ["join", "--bootstrap", address, "--data-dir", str(tmp_path / "node"), "--trust", head]
    found = CliRunner().invoke(app, arguments)
    assert isinstance(found.exception, ConfigError)
    assert found.exception.key == "--trust"
    assert not (tmp_path / "node").exists()
