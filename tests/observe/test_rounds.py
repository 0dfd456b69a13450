"""Records of rounds add up and match the core's view, and a failing disk costs only records."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from p2ptrain.config import NodeConfig, RunConfig
from p2ptrain.config.node import StorageConfig
from p2ptrain.core import events as ev
from p2ptrain.core.complaints import Code, complaint
from p2ptrain.core.tally import AUTHORS_MAX, Tallies, drawn
from p2ptrain.core.view import PeerView
from p2ptrain.daemon.assembly import Launch, Workshop
from p2ptrain.daemon.life import Daemon, save_last
from p2ptrain.data.dataset import manifest_digest
from p2ptrain.errors import DataError
from p2ptrain.identity import Identity, peer_id_of
from p2ptrain.node.home import Home
from p2ptrain.node.local_worker import Note
from p2ptrain.observe import rounds as module
from p2ptrain.observe.build import complaints_of, peers_of, status_of, unreadiness_of
from p2ptrain.observe.rounds import ROUNDS_KEPT
from p2ptrain.observe.schema import Mine, PeerRecord, RoundRecord
from p2ptrain.store.records import Batch, Records, SavedRows
from tests.helpers.core import KEYS, RUN, Bench, announced, payload, root_of, signed
from tests.helpers.driver import STATE, ChainTrainer, a_dataset, loop_workshop
from tests.helpers.driver import root_of as root_of_state
from tests.helpers.memory_network import Network
from tests.helpers.net import skipping_time, until
from tests.helpers.records import lived
from tests.helpers.rounds import NOW, WatchedCore

ME, A, B, C = KEYS[:4]


def test_a_round_is_recorded_with_what_it_took_and_what_it_cost(tmp_path: Path) -> None:
    watched = WatchedCore(tmp_path)
    watched.traffic = {"bytes sent": 1_100, "bytes received": 2_200}
    watched.figures.loss, watched.figures.tokens, watched.figures.seconds = 2.5, 640, 8.0
    watched.figures.steps, watched.figures.own_drift = 3, 0.02
    watched.figures.gradient_norm, watched.worker.drift = 0.75, 0.001
    watched.worker.replica.update_norm = 0.375
    watched.round()
    entry = watched.bench.parts.chain.entry(1)
    assert entry is not None
    (record,) = watched.rounds.last()
    assert record == lived(
        1,
        branch=RUN,
        applied_at=NOW + 17.0,
        root=root_of(1),
        manifest=entry.manifest.digest,
        contributors=KEYS[:4],
        mine_taken=(1,),
        train_seconds=10.0,
        collect_seconds=0.0,
        agree_seconds=5.0,
        apply_seconds=2.0,
        bytes_sent=1_000,
        bytes_received=2_000,
        loss=2.5,
        steps=3,
        own_drift=0.02,
        swarm_loss=2.5,
        swarm_tokens=4 * 2_048,
        swarm_tokens_so_far=4 * 2_048,
        tokens_so_far=640,
        staleness_mean=0.0,
        update_norm=0.375,
        gradient_norm=0.75,
        drift=0.001,
        compression_ratio=round(4_000 * 4 / sum(taken.payload_bytes for taken in entry.manifest.taken), 1),
        tokens=640,
        tokens_per_second=80.0,
        late=0,
        refused={},
    )
    told = json.loads(record.model_dump_json())
    assert told["contributors"] == [peer_id_of(key) for key in KEYS[:4]]
    assert told["root"] == root_of(1).hex()


def test_what_is_recorded_of_a_round_is_not_recorded_of_the_next(tmp_path: Path) -> None:
    watched = WatchedCore(tmp_path)
    watched.traffic, watched.figures.loss, watched.figures.tokens = {"bytes sent": 1_100}, 2.5, 640
    watched.figures.seconds = 8.0
    watched.round()
    watched.round()
    first, second = watched.rounds.last()
    assert (first.round, first.bytes_sent, first.tokens) == (1, 1_000, 640)
    assert (second.round, second.bytes_sent, second.tokens, second.loss) == (2, 0, 0, None)
    assert (second.steps, second.own_drift) == (0, None)
    assert (second.tokens_so_far, second.swarm_tokens_so_far) == (640, 2 * 4 * 2_048), "these add up"
    assert (second.tokens_per_second, second.seconds) == (0.0, 17.0)


def test_of_a_script_that_reads_data_of_its_own_all_is_recorded_but_tokens(tmp_path: Path) -> None:
    watched = WatchedCore(tmp_path)
    watched.figures.loss, watched.figures.steps, watched.figures.own_drift = 2.5, 3, 0.02
    watched.figures.seconds = 8.0
    watched.figures.rates.clear()
    watched.round()
    (record,) = watched.rounds.last()
    assert (record.loss, record.steps, record.own_drift) == (2.5, 3, 0.02)
    assert (record.tokens, record.tokens_per_second, record.swarm_tokens) == (0, 0.0, 0)


def test_a_held_out_loss_is_recorded_once_and_known_after_a_restart(tmp_path: Path) -> None:
    watched = WatchedCore(tmp_path, every_rounds=2)
    claims = watched.bench.parts.pools.claims
    for author, loss in zip(drawn(watched.bench.state), (3_000_000, 51_500_000, 2_900_000), strict=True):
        assert claims.held_out is None, "a record keeps what it had first"
        claims.hear(announced(author, 1, held_out=loss))
    for _ in range(2):
        watched.round()
    told = [(each.held_out_loss, each.held_out_round, each.perplexity) for each in watched.rounds.last()]
    assert told == [(3.0, 0, 20.0855), (None, None, None)]
    asyncio.run(watched.rounds.save(all_of_it=True))
    watched.persistence.store.records.close()
    again = WatchedCore(tmp_path, Records(tmp_path / "records.sqlite").past(ROUNDS_KEPT))
    assert again.rounds.measured == watched.rounds.last()[0]


def test_the_perplexity_of_any_claim_is_a_number() -> None:
    assert lived(1, held_out_loss=2.0**28).perplexity == lived(1, held_out_loss=100.0).perplexity
    assert lived(1, held_out_loss=0.0).perplexity == 1.0


def test_the_phases_of_a_round_add_up_to_its_time(tmp_path: Path) -> None:
    watched = WatchedCore(tmp_path)
    bench = watched.bench
    watched.round()
    mine = announced(ME, 2)
    others = [announced(key, 2, inline=True) for key in bench.others]
    began, bench.now = bench.now, bench.now + 5.0
    bench.train(2)  # before the others: then the node collects
    for offer in others:
        bench.now += 1.0
        bench.hear_offer(offer)
    bench.now += 4.0
    bench.agree((*others, mine), apply=False)
    watched.apply()
    record = watched.rounds.last()[-1]
    assert (record.train_seconds, record.collect_seconds) == (5.0, 3.0)
    assert (record.agree_seconds, record.apply_seconds) == (4.0, 2.0)
    assert record.seconds == bench.now - began


def test_the_views_that_agreeing_took_are_counted_from_one(tmp_path: Path) -> None:
    watched = WatchedCore(tmp_path)
    watched.round()
    assert [each.views for each in watched.rounds.last()] == [1]


def test_a_state_that_was_applied_on_a_line_that_was_left_is_no_round(tmp_path: Path) -> None:
    watched = WatchedCore(tmp_path)
    bench = watched.bench
    bench.agree(bench.collect(), apply=False)
    bench.do(ev.Applied(b"o" * 32, 1, root_of(1)))
    assert watched.rounds.last() == []
    watched.apply()
    assert [each.round for each in watched.rounds.last()] == [1]


# ---------------------------------------------------------------------------------------------------
# Peers


def test_contributions_are_counted_by_the_rounds_that_they_waited() -> None:
    bench = Bench(agreement={"staleness_rounds_max": 2})
    bench.decide()
    bench.now += 10.0
    *others, late = bench.others
    offers = tuple(announced(key, 2, inline=True, branch=bench.state.branch) for key in others)
    stale = announced(late, 2, inline=True, branch=bench.state.branch, base_round=0, base_root=root_of(0))
    for offer in (*offers, stale):
        bench.hear_offer(offer)
    bench.train(2)
    assert bench.node.view().staleness == {0: 4}
    bench.agree((*offers, stale, announced(bench.me, 2, branch=bench.state.branch)))
    assert bench.node.view().staleness == {0: 7, 1: 1}


def test_how_soon_and_how_fast_a_peer_contributes_is_kept_with_its_moving_averages(tmp_path: Path) -> None:
    watched = WatchedCore(tmp_path, agreement={"staleness_rounds_max": 2})
    bench = watched.bench
    watched.round()
    for took in (4.0, 12.0):
        number, at = bench.state.round + 1, bench.now
        bench.train(number)
        offers = [announced(key, number, inline=True, branch=bench.state.branch) for key in (A, B)]
        stale = {"base_round": number - 2, "base_root": root_of(number - 2)}
        offers.append(announced(C, number, inline=True, branch=bench.state.branch, **stale))
        bench.now = at + took
        for offer in offers:
            bench.hear_offer(offer)
        bench.agree((*offers, announced(ME, number, branch=bench.state.branch)), apply=False)
        watched.apply()
    assert [each.staleness_mean for each in watched.rounds.last()] == [0.0, 0.25, 0.25]
    first, later = watched.rounds.peers.by_key[A], watched.rounds.peers.by_key[C]
    # A round begins when the one before is decided, two seconds before that is applied: the times are 10, 6 and 14.
    assert (first.arrival_seconds, first.tokens_per_second, first.staleness) == (14.0, 146.3, 0)
    assert first.arrival_seconds_mean == pytest.approx((7 * (7 * 10.0 + 6.0) / 8 + 14.0) / 8, abs=0.001)
    assert first.tokens_per_second_mean == pytest.approx((7 * (7 * 204.8 + 341.3) / 8 + 146.3) / 8, abs=0.001)
    assert (later.staleness, later.staleness_mean) == (1, round(1 / 8 + 7 / 64, 3))


def test_contributions_are_counted_by_what_became_of_them(tmp_path: Path) -> None:
    watched = WatchedCore(tmp_path)
    bench = watched.bench
    watched.round()
    bench.hear(announced(A, 1, b"again"))  # a repetition: of round 1 it has been heard
    offers = bench.collect()
    bench.hear_offer(announced(B, 2, b"another", inline=True), which=b"another")
    bad = announced(C, 3, inline=True)
    bench.hear(bad, attachment=payload(C, 3), good=False)
    bench.agree(offers, apply=False)
    bench.hear(announced(KEYS[9], 1))  # nobody who was admitted
    watched.apply()
    counts = {
        each.peer: (each.offered, each.applied, each.late, each.refused)
        for each in watched.rounds.peers.by_key.values()
    }
    assert counts == {
        ME: (2, 2, 0, {}),
        A: (2, 2, 0, {}),
        B: (3, 2, 0, {"two for one round": 1}),
        C: (3, 2, 0, {"bad payload": 1}),
    }
    assert [each.refused for each in watched.rounds.last()] == [{}, {"two for one round": 1, "bad payload": 1}]
    assert watched.rounds.peers.by_key[C].observed == {"malformed": 1}
    assert (watched.rounds.mine.applied, watched.rounds.mine.applied_of_all, watched.rounds.mine.share) == (2, 8, 0.25)


def test_a_contribution_that_comes_too_late_is_counted_once(tmp_path: Path) -> None:
    watched = WatchedCore(tmp_path)
    bench = watched.bench
    watched.round()
    offers = [announced(key, 2, inline=True) for key in (A, B)]
    for offer in offers:
        bench.hear_offer(offer)
    bench.train(2)
    bench.wait(60.0)  # for the third, which is too late
    bench.agree((*offers, announced(ME, 2)), apply=False)
    late = announced(C, 2, inline=True)
    for _ in range(3):
        bench.hear_offer(late)
    watched.apply()
    assert [each.late for each in watched.rounds.last()] == [0, 1]
    assert {each.peer: each.late for each in watched.rounds.peers.by_key.values() if each.late} == {C: 1}


def test_my_own_that_comes_too_late_is_counted(tmp_path: Path) -> None:
    watched = WatchedCore(tmp_path)
    bench = watched.bench
    watched.round()
    offers = tuple(announced(key, 2, inline=True) for key in bench.others)
    for offer in offers:
        bench.hear_offer(offer)
    bench.wait(60.0)
    bench.agree(offers, apply=False)
    bench.train(2)
    watched.apply()
    record = watched.rounds.last()[-1]
    assert (record.mine_taken, record.late, watched.rounds.peers.by_key[ME].late) == ((), 1, 1)


def test_everyone_connected_or_lately_admitted_has_a_standing() -> None:
    bench = Bench(4, agreement={"stall_seconds": 1})
    bench.do(ev.PeerSeen(KEYS[9]), 0.0)
    bench.do(ev.PeerLost(B))
    bench.hear_offer(announced(A, inline=True))
    bench.do(ev.Tick(), 1.0)  # nobody else is waited for any longer
    bench.do(ev.MalformedReceived(KEYS[9], "junk"))
    assert bench.node.view().standings() == [
        PeerView(A, 0.0, False, 1, 0, 0, {}, {}, steps=1),
        PeerView(C, 0.05, False, 0, 0, 0, {}, {"silent": 1}),
        PeerView(KEYS[9], 1.0, False, 0, 0, 0, {}, {"malformed": 1}),
    ]


def test_an_author_of_too_many_rounds_at_once_is_refused_what_is_too_much() -> None:
    bench = Bench(4, agreement={"staleness_rounds_max": 4, "overlap_rounds": 1})
    offers = tuple(announced(key, inline=True) for key in (A, B))
    bench.train()
    for offer in offers:
        bench.hear_offer(offer)
    bench.agree((*offers, announced(ME)))
    for number in (1, 2, 3, 4):
        bench.hear(announced(C, number, base_round=0, base_root=bytes(32)))
    tally = bench.parts.pools.tallies.by_author[C]
    assert (tally.offered, tally.refused) == (3, {"too many at once": 1})


def test_what_was_counted_before_a_restart_is_not_counted_again() -> None:
    bench = Bench(4)
    bench.parts.inbox.announcement(ME, signed(announced(A)), is_needed=True)  # from what backs a vote of ours
    assert [*bench.parts.pools.offers.by_author] == [A]
    assert bench.parts.pools.tallies.by_author == {}


def test_a_round_lets_go_of_authors_who_are_gone_when_there_are_many() -> None:
    bench = Bench(4)
    tallies = bench.parts.pools.tallies
    bench.decide()
    for number in range(AUTHORS_MAX - 4):
        tallies.of(number.to_bytes(32, "big"))
    bench.decide()
    assert len(tallies.by_author) == AUTHORS_MAX // 2
    assert [tallies.of(key).applied for key in KEYS[:4]] == [2, 2, 2, 2]


def test_authors_come_and_go_and_the_tallies_stay_bounded() -> None:
    tallies = Tallies()
    for generation in range(5):
        admitted = {(1_024 * generation + number).to_bytes(32, "big") for number in range(1_024)}
        tallies.forget(admitted)
        for author in sorted(admitted):
            tallies.of(author).offered += 1
        (size, most) = tallies.limits()["authors tallied"]
        assert size <= most == AUTHORS_MAX
        assert admitted <= tallies.by_author.keys()


# ---------------------------------------------------------------------------------------------------
# What is kept


def test_a_restart_goes_on_counting_and_records_no_round_twice(tmp_path: Path) -> None:
    first = WatchedCore(tmp_path)
    first.figures.tokens, first.figures.seconds = 64, 7_200.0
    first.bench.do(ev.MalformedReceived(A, "junk"))
    first.round()
    first.round()
    asyncio.run(first.rounds.save(all_of_it=True))
    first.persistence.store.records.close()
    records = Records(tmp_path / "records.sqlite")
    second = WatchedCore(tmp_path, records.past(ROUNDS_KEPT))
    assert second.rounds.last() == first.rounds.last()
    assert second.rounds.peers.by_key == first.rounds.peers.by_key
    assert second.rounds.mine == Mine(
        applied=2, applied_of_all=8, tokens=64, swarm_tokens=2 * 4 * 2_048, training_seconds=7_200.0
    )
    for _ in range(3):  # the first two again, as after a checkpoint of the beginning
        second.round()
    assert [each.round for each in second.rounds.last()] == [1, 2, 3]
    assert second.rounds.last()[:2] == first.rounds.last()
    assert second.rounds.last()[2].seconds == 17.0, "what was done again is not of the next round"


def test_more_rounds_than_are_in_memory_come_from_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROUNDS_KEPT", 3)
    watched = WatchedCore(tmp_path)
    for number in range(1, 8):
        watched.round()
        if number <= 5:
            asyncio.run(watched.rounds.save())
    assert [each.round for each in watched.rounds.last(2)] == [6, 7]
    assert [each.round for each in watched.rounds.last(3)] == [5, 6, 7]
    assert [each.round for each in watched.rounds.last(6)] == [2, 3, 4, 5, 6, 7]
    assert [each.round for each in watched.rounds.last(100)] == [1, 2, 3, 4, 5, 6, 7]
    assert watched.rounds.last(0) == []


def test_what_a_disk_does_not_take_waits_up_to_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROUNDS_KEPT", 3)
    watched = WatchedCore(tmp_path)
    watched.persistence.takes = False
    for _ in range(5):
        watched.round()
        asyncio.run(watched.rounds.save(all_of_it=True))
    watched.persistence.takes = True
    asyncio.run(watched.rounds.save(all_of_it=True))
    past = watched.persistence.store.records.past(100)
    assert [each["round"] for each in past.rounds] == [3, 4, 5]
    assert {each["peer"]: each["applied"] for each in past.peers} == dict.fromkeys(KEYS[:4], 5)
    assert Mine.of(past.mine) == watched.rounds.mine
    count = len(watched.persistence.batches)
    asyncio.run(watched.rounds.save(all_of_it=True))
    assert len(watched.persistence.batches) == count, "nothing is new"


def test_what_happens_while_the_disk_is_at_it_is_written_the_next_time(tmp_path: Path) -> None:
    watched = WatchedCore(tmp_path)
    record = watched.persistence.record
    watched.round()

    async def slow(batch: Batch) -> bool:
        watched.persistence.record = record  # type: ignore[method-assign]
        watched.round()
        return await record(batch)

    watched.persistence.record = slow  # type: ignore[method-assign]
    asyncio.run(watched.rounds.save(all_of_it=True))
    asyncio.run(watched.rounds.save(all_of_it=True))
    past = watched.persistence.store.records.past(9)
    assert [[each["round"] for each in batch.rounds] for batch in watched.persistence.batches] == [[1], [2]]
    assert ([*map(RoundRecord.of, past.rounds)], Mine.of(past.mine)) == (watched.rounds.last(), watched.rounds.mine)
    assert {each["peer"]: each["applied"] for each in past.peers} == dict.fromkeys(KEYS[:4], 2)


def test_peers_beyond_the_bound_are_forgotten_the_longest_unchanged_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PEERS_MAX", 6)
    before = [PeerRecord(peer=key, offered=1).row for key in (A, *KEYS[8:12])]
    watched = WatchedCore(tmp_path, SavedRows(peers=before))
    watched.round()
    assert [*watched.rounds.peers.by_key] == [KEYS[10], KEYS[11], *KEYS[:4]]
    assert watched.rounds.peers.by_key[A].offered == 2


def test_the_speed_of_the_swarm_is_that_of_what_was_taken(tmp_path: Path) -> None:
    watched = WatchedCore(tmp_path)
    assert watched.rounds.swarm_tokens_per_second is None
    watched.round()
    tokens = 8 * 256  # a step of one pass of eight sequences
    assert watched.rounds.swarm_tokens_per_second == 4 * tokens / 17.0


# ---------------------------------------------------------------------------------------------------
# A whole daemon


async def taking_part(root: Path, stack: AsyncExitStack, rounds: int) -> Daemon:
    """Runs a swarm of one until this many rounds are applied."""
    me = Identity(bytes(31) + b"\1")
    dataset = a_dataset(root / "data")
    run = RunConfig.model_validate(
        {"name": "alone", "recipe": {"name": "distro"}, "agreement": {"inline_bytes_max": 0}}
    ).sealed(
        manifest=manifest_digest(dataset.manifest_bytes()),
        initial_root=root_of_state(STATE).hex(),
        founders=[me.key.hex()],
    )
    transport = Network().transport(me.key)
    stack.push_async_callback(transport.close)

    async def opened(launch: Launch, note: Note) -> Workshop:
        return loop_workshop(ChainTrainer(dataset), note, me.key)

    config = NodeConfig(storage=StorageConfig(directory=str(root / "node"), checkpoint_every_rounds=3))
    daemon = await Daemon.open(stack, Launch(run, Home(config), me, transport, dataset, state=STATE), opened=opened)
    running = asyncio.create_task(daemon.driver.run(daemon.started))
    stack.push_async_callback(asyncio.wait, [running])
    stack.callback(running.cancel)
    await daemon.driver.has_begun.wait()
    await until(lambda: running.done() or daemon.driver.node.view().applied_round >= rounds)
    if running.done():
        running.result()
    return daemon


@skipping_time
async def test_a_daemon_records_its_rounds_and_goes_on_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncExitStack() as stack:
        daemon = await taking_part(tmp_path, stack, 5)
        await daemon.records.save(all_of_it=True)
        first = daemon.records.last()[:5]
        assert [each.round for each in first] == [1, 2, 3, 4, 5]
        me = daemon.driver.node.view().me
        assert all((each.contributors, each.loss, each.tokens) == ((me,), 1.0, 64) for each in first)
        assert all(each.train_seconds > 0 and each.mine_taken == (each.round,) for each in first)
        assert [each.root for each in first] == [daemon.driver.node.view().roots[number] for number in range(1, 6)]
        daemon.driver.worker.figures.not_finite, daemon.driver.replica.replica.drift = 3, 0.001
        status = status_of(daemon).model_dump()
        assert status["counters"]["trainings not finite"] == 3
        assert status["drift"] == 0.001, "the round's, not that of the training here"
        assert status["mine"]["applied"] >= 5
        assert (status["mine"]["share"], status["mine"]["tokens"]) == (1.0, 64 * status["applied_round"])
        assert status["swarm_tokens_per_second"] > 0
        assert peers_of(daemon).me.applied == status["mine"]["applied"]
    async with AsyncExitStack() as stack:
        daemon = await taking_part(tmp_path, stack, 8)
        await save_last(daemon)
        numbers = [each.round for each in daemon.records.last()]
        assert numbers == [*range(1, numbers[-1] + 1)]
        assert daemon.records.last()[:5] == first
        past = daemon.edges.persistence.store.records.past(100)
        assert [*map(RoundRecord.of, past.rounds)] == daemon.records.last()


@skipping_time
async def test_records_that_cannot_be_written_are_told_and_stop_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Records, batch: Batch) -> None:
        raise DataError("records.sqlite: cannot be written")

    async with AsyncExitStack() as stack:
        daemon = await taking_part(tmp_path, stack, 3)
        driver = daemon.driver
        with monkeypatch.context() as patch:
            patch.setattr(Records, "write", refuse)
            await daemon.records.save()
            told = complaint(Code.RECORDS_NOT_WRITTEN, why="records.sqlite: cannot be written")
            assert told in complaints_of(daemon)
            assert Code.DEGRADED not in {each.code for each in complaints_of(daemon)}
            assert told.text not in unreadiness_of(daemon)
            await until(lambda: driver.node.view().applied_round >= 6)
        await daemon.records.save()
        assert told not in complaints_of(daemon)
        assert len(daemon.edges.persistence.store.records.past(100).rounds) >= 6
