"""Joining a run when the first peers to report it give nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from p2ptrain.config import RunConfig
from p2ptrain.config.node import NetworkConfig, NodeConfig, StorageConfig
from p2ptrain.data.dataset import MANIFEST_NAME, TokenDataset, manifest_digest
from p2ptrain.digest import digest
from p2ptrain.errors import ConfigError, DataError, TooLargeError
from p2ptrain.identity import peer_id_of
from p2ptrain.net import questions
from p2ptrain.net.blobs.blob import BlobName
from p2ptrain.net.blobs.server import Server, blob_protocol
from p2ptrain.net.rate_limit import TokenBucket
from p2ptrain.net.transport import Stream, everyone
from p2ptrain.node import limits
from p2ptrain.node.find import (
    FIND_SECONDS_MAX,
    OfferError,
    RunSources,
    as_offered,
    fetch_dataset,
    find_run,
    open_dataset,
    with_relays,
)
from p2ptrain.node.home import SUCCESSOR_NAME, Home
from p2ptrain.store.records import RECORDS_NAME, Records
from tests.helpers.blobs import MemoryBlob
from tests.helpers.core import KEYS
from tests.helpers.driver import STATE, a_dataset, root_of
from tests.helpers.memory_network import MemoryTransport, Network
from tests.helpers.net import at, skipping_time

ME, LIAR, GOOD = KEYS[:3]
FAR_SECONDS = 3.0  # to one who is an ocean away, or only starting: others have told of the run long before


@dataclass
class RunReporters:
    """Two nodes that report a run, of which only one provides its config and data."""

    network: Network
    run: RunConfig
    data: TokenDataset
    config: NodeConfig
    me: MemoryTransport
    asked: list[bytes] = field(default_factory=list)  # who has asked for the data

    def find(self, name: BlobName, peer: bytes) -> MemoryBlob:
        self.asked.append(peer)
        return MemoryBlob(self.data.manifest_bytes())


@asynccontextmanager
async def swarm(directory: Path) -> AsyncIterator[RunReporters]:
    network = Network(latency_seconds=0.01)
    data = a_dataset(directory / "data")
    run = RunConfig.model_validate({"name": "x"}).sealed(
        manifest=manifest_digest(data.manifest_bytes()), initial_root=root_of(STATE).hex(), founders=[KEYS[0].hex()]
    )
    run_id = run.id

    def answer(peer: bytes, question: questions.Question) -> questions.Answer:
        if isinstance(question, questions.AskRuns):
            return questions.Runs((questions.RunInfo(run_id, "x", 1, 1),))
        return questions.Config(run.canonical())

    async def hang(stream: Stream) -> None:
        await asyncio.get_running_loop().create_future()

    me, liar, good = (network.transport(key) for key in (ME, LIAR, GOOD))
    config = NodeConfig(
        network=NetworkConfig(bootstrap=(network.address(LIAR), network.address(GOOD))),
        storage=StorageConfig(directory=str(directory / "mine")),
    )
    made = RunReporters(network, run, data, config, me)
    connect = me.connect

    async def from_afar(address: str) -> bytes:
        if address == network.address(GOOD):
            await at(asyncio.get_running_loop().time() + FAR_SECONDS)
        return await connect(address)

    me.connect = from_afar  # type: ignore[method-assign]
    for each in (liar, good):
        await questions.serve(each, answer)
    await liar.serve(blob_protocol(run_id), hang)
    async with Server(
        good, run_id, made.find, upload=TokenBucket(0), blame=lambda peer, why: None, is_admitted=everyone
    ):
        yield made
    for node in list(network.nodes.values()):
        await node.close()


@pytest.mark.parametrize("is_silent", [True, False])
@skipping_time
async def test_who_tells_of_the_run_first_and_gives_nothing_keeps_nobody_from_joining(
    tmp_path: Path, is_silent: bool
) -> None:
    async with swarm(tmp_path) as each:
        if not is_silent:  # but does not even speak of data
            each.network.nodes[LIAR].handlers.pop(blob_protocol(each.run.id))
        run, sources = await find_run(each.me, Home(each.config), None)
        assert (run, sources.peers) == (each.run, [LIAR])
        got = await fetch_dataset(each.me, Home(each.config), run, tmp_path / "got", sources)
        assert got.manifest_bytes() == each.data.manifest_bytes()
        assert each.asked == [ME]
        assert sources.peers == [GOOD, LIAR]  # who came late is asked first
        assert asyncio.get_running_loop().time() < 60.0


@skipping_time
async def test_a_run_that_is_on_the_disk_without_its_data_is_joined_once_somebody_is_there(tmp_path: Path) -> None:
    async with swarm(tmp_path) as each:
        directory = Home(each.config).of_run(each.run.id)
        directory.mkdir(parents=True)
        (directory / "run.json").write_bytes(each.run.canonical())
        with closing(Records(directory / RECORDS_NAME)) as records:
            records.remember([each.network.address(GOOD)])
        for peer in (LIAR, GOOD):
            each.network.cut(ME, peer)
        run, sources = await find_run(each.me, Home(each.config), None)
        assert (run, sources.peers) == (each.run, [])
        fetching = asyncio.create_task(fetch_dataset(each.me, Home(each.config), run, tmp_path / "got", sources))
        await at(1_000.0)
        assert not fetching.done()
        each.network.heal()
        assert (await fetching).manifest_bytes() == each.data.manifest_bytes()
        assert asyncio.get_running_loop().time() < 1_000.0 + 4 * FIND_SECONDS_MAX


@skipping_time
async def test_whoever_names_a_stranger_to_the_runs_on_the_disk_means_another_run(tmp_path: Path) -> None:
    async with swarm(tmp_path) as each:
        old = RunConfig.model_validate({"name": "old"}).sealed(
            manifest="1" * 64, initial_root="2" * 64, founders=[KEYS[5].hex()]
        )
        directory = Home(each.config).of_run(old.id)
        directory.mkdir(parents=True)
        (directory / "run.json").write_bytes(old.canonical())
        for peer in (LIAR, GOOD):
            each.network.cut(ME, peer)
        finding = asyncio.create_task(find_run(each.me, Home(each.config), None))
        await at(100.0)
        assert not finding.done()
        assert (await find_run(each.me, Home(each.config), old.run_id[:8]))[0] == old  # which is then named
        each.network.heal()
        with pytest.raises(
            ConfigError, match=rf"know only {each.run.run_id} \(x\), and this directory has {old.run_id}"
        ):
            await finding
        assert (await find_run(each.me, Home(each.config), each.run.run_id))[0] == each.run, "once it is named"


@skipping_time
async def test_whoever_has_gone_over_before_the_bootstraps_goes_on_with_the_run_that_follows(tmp_path: Path) -> None:
    """It was killed on the way, and has met nobody there yet."""
    async with swarm(tmp_path) as each:
        home = Home(each.config)
        raw = each.run.model_dump()
        raw["predecessor"] = {"run": each.run.run_id, "round": 7, "head": "3" * 64}
        raw["admission"]["founders"] = ()
        heir = RunConfig.model_validate(raw)
        for run in (each.run, heir):
            home.of_run(run.id).mkdir(parents=True)
            (home.of_run(run.id) / "run.json").write_bytes(run.canonical())
        (home.of_run(each.run.id) / SUCCESSOR_NAME).write_text(f"{heir.run_id}\n")
        with closing(Records(home.of_run(each.run.id) / RECORDS_NAME)) as records:
            records.remember([each.network.address(GOOD)])
        assert (await find_run(each.me, home, None))[0] == heir


@skipping_time
async def test_a_run_of_another_protocol_is_told_with_what_to_do(tmp_path: Path) -> None:
    async with swarm(tmp_path) as each:
        other = each.run.canonical().replace(b'"protocol":2', b'"protocol":1')
        run_id = digest("run id", other)

        def answer(peer: bytes, question: questions.Question) -> questions.Answer:
            if isinstance(question, questions.AskRuns):
                return questions.Runs((questions.RunInfo(run_id, "x", 1, 1),))
            return questions.Config(other)

        for key in (LIAR, GOOD):
            each.network.nodes[key].handlers.pop(questions.PROTOCOL)
            await questions.serve(each.network.nodes[key], answer)
        with pytest.raises(ConfigError, match=r"uses protocol 1, and this release speaks 2 and 3. Install a release"):
            await find_run(each.me, Home(each.config), None)


@skipping_time
async def test_a_config_that_is_not_the_runs_is_refused_and_the_next_is_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with swarm(tmp_path) as each:
        other = RunConfig.model_validate({"name": "y"}).sealed(
            manifest="1" * 64, initial_root="2" * 64, founders=[KEYS[5].hex()]
        )

        def answer(peer: bytes, question: questions.Question) -> questions.Answer:
            if isinstance(question, questions.AskRuns):
                return questions.Runs((questions.RunInfo(each.run.id, "x", 1, 1),))
            return questions.Config(other.canonical())

        each.network.nodes[LIAR].handlers.pop(questions.PROTOCOL)
        await questions.serve(each.network.nodes[LIAR], answer)
        assert (await find_run(each.me, Home(each.config), None))[0] == each.run
        assert f"{LIAR.hex()[:16]} sent a config that is not the run's" in caplog.text


@skipping_time
async def test_a_bootstrap_without_the_named_run_does_not_speak_for_those_that_have_not_answered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with swarm(tmp_path) as each:

        def answer(peer: bytes, question: questions.Question) -> questions.Answer:
            return questions.Runs((questions.RunInfo(bytes(32), "another", 1, 1),))

        each.network.nodes[LIAR].handlers.pop(questions.PROTOCOL)
        await questions.serve(each.network.nodes[LIAR], answer)
        run, sources = await find_run(each.me, Home(each.config), each.run.run_id)
        assert (run, sources.peers) == (each.run, [GOOD])
        assert f"do not know run {each.run.run_id}, only 0000000000000000 (another); the node keeps" in caplog.text
        with pytest.raises(OfferError, match=r"^--run: the bootstrap nodes do not know run 12, only 0000"):
            await find_run(each.me, Home(each.config), "12")  # all of them have answered


def test_only_of_the_run_that_its_owner_names_a_mistake_is_the_owners() -> None:
    asks = NodeConfig(network=NetworkConfig(bootstrap=("/ip4/192.0.2.1/tcp/4001/p2p/" + peer_id_of(GOOD),)))
    erred, too_large = ConfigError("x", key="y", fix="Do z"), TooLargeError("much", fix="Take less")
    for error in (erred, too_large):
        for wanted in (None, "ab", "ab" * 31):  # whoever makes runs can make one whose id begins like that
            with (
                pytest.raises(OfferError, match=f"^{error}. The bootstrap nodes choose the run"),
                as_offered(Home(asks), wanted),
            ):
                raise error
        for config, wanted in ((asks, "ab" * 32), (NodeConfig(), None)):
            with pytest.raises(type(error), match=f"^{error}$"), as_offered(Home(config), wanted):
                raise error
    with pytest.raises(DataError, match=r"^damaged$"), as_offered(Home(asks), None):
        raise DataError("damaged")


@skipping_time
async def test_a_damaged_list_of_the_data_is_fetched_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with swarm(tmp_path) as each:
        run, sources = await find_run(each.me, Home(each.config), None)
        directory = tmp_path / "got"
        assert open_dataset(directory, run.data.manifest) is None
        directory.mkdir()
        (directory / MANIFEST_NAME).write_bytes(each.data.manifest_bytes()[:-1] + b" ")
        assert open_dataset(directory, run.data.manifest) is None
        assert "fetching it again" in caplog.text
        await fetch_dataset(each.me, Home(each.config), run, directory, sources)
        found = open_dataset(directory, run.data.manifest)
        assert found is not None
        assert found.manifest_bytes() == each.data.manifest_bytes()


def test_data_that_a_run_begun_here_has_made_is_found_under_its_other_name(tmp_path: Path) -> None:
    config = NodeConfig(storage=StorageConfig(directory=str(tmp_path)))
    made = a_dataset(tmp_path / "data" / "embedded")
    name = manifest_digest(made.manifest_bytes())
    assert Home(config).dataset(name) == tmp_path / "data" / "embedded"
    assert Home(config).dataset("0" * 64) == tmp_path / "data" / ("0" * 16)


def test_relays_are_the_bootstraps_and_whom_a_node_reached_last_time(tmp_path: Path) -> None:
    storage = StorageConfig(directory=str(tmp_path))
    run = RunConfig.model_validate({"name": "x"}).sealed(
        manifest="1" * 64, initial_root="2" * 64, founders=[KEYS[0].hex()]
    )
    hosts = ["192.168.1.7", *(f"11.0.0.{number}" for number in range(1, len(KEYS)))]
    addresses = [f"/ip4/{host}/tcp/4001/p2p/{peer_id_of(key)}" for host, key in zip(hosts, KEYS, strict=True)]
    config = NodeConfig(storage=storage)
    directory = Home(config).of_run(run.id)
    directory.mkdir(parents=True)
    (directory / "run.json").write_bytes(run.canonical())
    with closing(Records(directory / RECORDS_NAME)) as records:
        records.remember(addresses)
    given = NodeConfig(storage=storage, network=NetworkConfig(bootstrap=(addresses[-1],)))
    for wanted in (None, run.run_id[:8]):
        first, *rest = with_relays(Home(given), wanted).trusted_relays
        assert (first, rest[-1]) == (addresses[-1], addresses[0])  # the neighbour at home last
        assert sorted(rest) == sorted(addresses)
    assert (
        len({with_relays(Home(config), None).trusted_relays for _ in range(9)}) > 1
    )  # in no order that peers could choose
    named = NetworkConfig(bootstrap=(addresses[0],), trusted_relays=(addresses[-1],))
    assert with_relays(Home(NodeConfig(storage=storage, network=named)), None) == named
    assert with_relays(Home(config), "0" * 65).trusted_relays == ()  # of another run's peers, none


@skipping_time
async def test_data_that_do_not_fit_the_disk_end_the_start_before_a_piece_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with swarm(tmp_path) as each:
        monkeypatch.setattr(limits.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
        await each.me.connect(each.network.address(GOOD))
        with pytest.raises(ConfigError, match=r"^limits\.disk_bytes: run x needs about .* and may have 0 MB"):
            async with asyncio.timeout(60.0):
                await fetch_dataset(each.me, Home(each.config), each.run, tmp_path / "got", RunSources((), [GOOD]))
        assert each.asked == [ME], "for the list of pieces alone"
