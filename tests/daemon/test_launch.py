"""How a daemon's process ends, and with which error."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import stat
import sys
import weakref
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2ptrain.config import NodeConfig, RunConfig, load_node_config, with_options
from p2ptrain.config.node import StorageConfig
from p2ptrain.core.state import genesis
from p2ptrain.daemon import launch
from p2ptrain.daemon.assembly import Launch, Workshop
from p2ptrain.daemon.life import Daemon
from p2ptrain.daemon.order import JoinOrder
from p2ptrain.data.dataset import manifest_digest
from p2ptrain.errors import ConfigError, DataError, MemoryShortError
from p2ptrain.identity import Identity, peer_id_of
from p2ptrain.net.tasks import Tasks, report_crash
from p2ptrain.node.home import Home
from p2ptrain.node.local_worker import Note
from p2ptrain.node.saved import LOG_NAME
from p2ptrain.store.lock import beside
from p2ptrain.store.store import SPOKEN_SUFFIX, Store
from tests.helpers.driver import STATE, ChainTrainer, a_dataset, loop_workshop, root_of
from tests.helpers.memory_network import Network
from tests.helpers.net import key, skipping_time


def test_a_crash_in_the_network_ends_the_daemon_with_its_error() -> None:
    async def crash() -> None:
        raise ZeroDivisionError("a mistake of ours")

    async def life() -> None:
        Tasks(report_crash).spawn(crash())
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.Event().wait())

    with pytest.raises(ZeroDivisionError, match="a mistake of ours"):
        launch._run(life())


def test_what_a_cancelled_search_leaves_behind_is_no_news_and_any_other_lost_task_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def wait() -> None:
        await asyncio.get_running_loop().create_future()

    async def life() -> None:
        for work in (asyncio.Event().wait(), wait()):
            asyncio.get_running_loop().create_task(work)
        await asyncio.sleep(0)
        del work
        gc.collect()

    launch._run(life())
    assert ["wait()" in each.getMessage() and "Event" not in each.getMessage() for each in caplog.records] == [True]


def test_a_lack_of_memory_ends_the_daemon_with_its_line() -> None:
    async def fail() -> None:
        raise MemoryError

    async def life() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())

    with pytest.raises(MemoryShortError, match="the system refused this process memory"):
        launch._run(life())
    with pytest.raises(MemoryShortError, match="the system refused this process memory"):
        launch._run(fail())


def test_what_else_asyncio_is_told_of_ends_nothing() -> None:
    async def life() -> str:
        asyncio.get_running_loop().call_exception_handler({"message": "a socket was not closed"})
        await asyncio.sleep(0)
        return "done"

    assert launch._run(life()) == "done"


@pytest.mark.parametrize("beside", [None, AssertionError("a mistake of ours, which keeps its traceback")])
def test_an_error_in_a_group_comes_out_as_what_it_is(beside: Exception | None) -> None:
    async def err() -> None:
        try:
            await asyncio.Event().wait()
        finally:  # once the other has failed
            if beside is not None:
                raise beside

    async def fail() -> None:
        raise DataError("no such data")

    async def life() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(err())
            group.create_task(fail())

    with pytest.raises(ExceptionGroup if beside else DataError, match="unhandled errors" if beside else "no such data"):
        launch._run(life())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_there_is_anything_to_leave_ends_as_ctrl_c_does(number: signal.Signals) -> None:
    async def life() -> None:
        os.kill(os.getpid(), number)
        async with asyncio.timeout(20.0):
            await asyncio.Event().wait()

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell has it for what it runs in the background
    try:
        with pytest.raises(KeyboardInterrupt):
            launch._run(life())
    finally:
        signal.signal(signal.SIGINT, before)


@skipping_time
async def test_a_daemon_that_has_ended_leaves_no_trainer_in_memory_though_its_transport_stays(tmp_path: Path) -> None:
    """The run that follows needs the room."""
    me = Identity(bytes(31) + b"\1")
    dataset = a_dataset(tmp_path / "data")
    run = RunConfig(name="x").sealed(
        manifest=manifest_digest(dataset.manifest_bytes()), initial_root=root_of(STATE).hex(), founders=[me.key.hex()]
    )
    home = Home(NodeConfig(storage=StorageConfig(directory=str(tmp_path / "node"))))
    transport, trainers = Network().transport(me.key), list[weakref.ref[ChainTrainer]]()

    async def opened(order: Launch, note: Note) -> Workshop:
        trainer = ChainTrainer(dataset)
        trainers.append(weakref.ref(trainer))
        return loop_workshop(trainer, note, me.key)

    async with AsyncExitStack() as stack:
        await Daemon.open(stack, Launch(run, home, me, transport, dataset, state=STATE), opened)
        assert trainers[0]() is not None
    assert trainers[0]() is None
    await transport.close()


def test_a_signal_while_the_last_state_is_saved_before_going_over_ends_as_ctrl_c_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[str] = []
    daemon = SimpleNamespace(origins=("how the run ended",), is_leaving=False, edges=None)

    async def opened(*_: object) -> Any:
        return daemon

    async def live(*_: object) -> str:
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, heard.append, "leaving the run")
        return "the run has ended"

    async def save(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        async with asyncio.timeout(20.0):
            await asyncio.Event().wait()

    async def serve() -> None:
        async with AsyncExitStack() as stack:
            run = RunConfig(name="x").sealed(manifest="1" * 64, initial_root="2" * 64, founders=["3" * 64])
            made: Any = SimpleNamespace(config=NodeConfig(), run=run, transport=SimpleNamespace(addresses=list))
            faces: Any = SimpleNamespace(http=None, loop=None, note=lambda daemon: None)
            await launch._serve(stack, made, faces)

    monkeypatch.setattr(launch.Daemon, "open", opened)
    monkeypatch.setattr(launch, "live", live)
    monkeypatch.setattr(launch, "save_last", save)
    with pytest.raises(KeyboardInterrupt):
        launch._run(serve())
    assert heard == []


def tell_how_to_join() -> list[str]:
    """Returns the lines that others join by, once they are written."""
    addresses = [f"/ip4/192.0.2.{n}/tcp/4001/p2p/{peer_id_of(key(1))}" for n in (1, 2)]
    transport: Any = SimpleNamespace(addresses=lambda: addresses)
    run = RunConfig(name="x").sealed(manifest="1" * 64, initial_root="2" * 64, founders=["3" * 64])
    launch._tell_how_to_join(transport, run)
    return [f"p2ptrain join --bootstrap {each} --run {run.run_id}\n" for each in addresses]


def test_the_line_for_others_is_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With PYTHONUNBUFFERED, a log line used to get between it and its newline in the shared file."""
    written: list[bytes] = []
    monkeypatch.setattr(launch, "write_all", lambda descriptor, content: written.append(content))
    assert [each.encode() for each in tell_how_to_join()] == written


def test_a_node_whose_output_goes_nowhere_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that was closed, or a reader that has ended; nothing stays in a buffer that ends the process later."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        tell_how_to_join()
    monkeypatch.setattr(sys, "stdout", None)  # was closed before the start
    tell_how_to_join()


def test_the_run_of_the_nodes_file_is_the_only_one_to_join(tmp_path: Path) -> None:
    def wanted(pin: str, named: str | None) -> str | None:
        chosen = {("network", "run"): pin, ("storage", "directory"): str(tmp_path)}
        config = with_options(NodeConfig(), chosen)
        return launch._wanted(JoinOrder(config=config, wanted=named), Home(config))

    assert wanted("", None) is None
    assert wanted("", "ab") == "ab"
    assert wanted("ab" * 32, None) == wanted("ab" * 32, "abab") == "ab" * 32
    with pytest.raises(ConfigError, match=r"^--run: the config names run abab.* change network\.run"):
        wanted("ab" * 32, "cd")


def test_a_founder_whose_log_is_lost_goes_on_from_what_the_others_have(tmp_path: Path) -> None:
    """With its first weights made again it would begin a run a second time in which others have gone on."""
    mine = key(1)
    run = RunConfig(name="lost").sealed(manifest="11" * 32, initial_root="22" * 32, founders=[mine.hex()])
    home = Home(NodeConfig(storage=StorageConfig(directory=str(tmp_path))))
    assert not launch.goes_on(run, home)
    begun = genesis(run.id, (mine,), bytes.fromhex(run.state.initial_root))
    Store(home.of_run(run.id), run, begun, mine, home.identity_file).close()
    assert not launch.goes_on(run, home), "it was ended before it had saved its first weights"
    (home.of_run(run.id) / LOG_NAME).rename(tmp_path / "damaged")
    assert launch.goes_on(run, home)
    (beside(home.identity_file, SPOKEN_SUFFIX) / run.run_id).unlink()
    assert not launch.goes_on(run, home), "nobody else was ever there, as its owner says"


def test_a_port_is_chosen_by_whoever_names_or_announces_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_chosen(text: str = "", **options: object) -> bool:
        path = tmp_path / "node.toml"
        path.write_text(text)
        chosen = {("network", key): value for key, value in options.items()}
        return with_options(load_node_config(path), chosen).network.has_chosen_port

    usual = [*NodeConfig().network.listen]  # but named
    assert not is_chosen("[network]\nnat = false", bootstrap=[]) and is_chosen(listen=usual)
    assert is_chosen(f"[network]\nlisten = {usual}") and is_chosen(f"[network]\nannounce = {usual}")
    monkeypatch.setenv("P2PTRAIN_NETWORK__LISTEN", usual[0])
    assert is_chosen()


def test_a_data_directory_that_other_users_can_change_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, open_to_all, link = (tmp_path / name for name in ("mine", "open", "link"))
    launch._make_writable(mine)
    assert stat.S_IMODE(mine.stat().st_mode) == 0o700
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(ConfigError, match=r"every user of this machine may change.*chmod o-w"):
        launch._make_writable(open_to_all)
    link.symlink_to(mine)
    launch._make_writable(link)  # one's own link to another disk
    look = os.lstat

    def of_another(path: Path) -> Any:
        found = look(path)
        return os.stat_result([*found[:4], 12_345, *found[5:10]]) if path == link else found

    monkeypatch.setattr(os, "lstat", of_another)
    with pytest.raises(ConfigError, match="belongs to another user"):
        launch._make_writable(link)
