"""Two machines of one owner: processes at two addresses of this one, of which one lends the other its devices."""

from __future__ import annotations

import hmac
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Event
from time import monotonic, perf_counter

import msgspec
import psutil
import pytest
import torch
from msgspec.structs import replace

from p2ptrain.config import DeviceConfig, NodeConfig
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.errors import ConfigError, RanksLostError, StoppedError
from p2ptrain.ranks import machines as machines_module
from p2ptrain.ranks.channel import RankJob, RankStarted, exactly, hear_order
from p2ptrain.ranks.group import Patience, RankGroup, RankWork
from p2ptrain.ranks.machines import GREETED_AT_ONCE, LENDING, RELEASES, Machines, lend_devices, lent_here, token_in
from p2ptrain.share import Share
from tests.helpers.ranks import GONE_SECONDS, adapted, ranked, with_ranks
from tests.helpers.trainer import ONE_THREAD, embedded, make

TOKEN, OTHER_TOKEN = b"a token of enough characters", b"another token"
TWO_MACHINES = ONE_THREAD.model_copy(update={"nnodes": 2, "rendezvous": "/ip4/127.0.0.2/tcp/0"})
SPREAD = {"token": TOKEN, "settings": TWO_MACHINES, "inner": "muon"}
SOON = Patience(machines_seconds=0.0, again_seconds=0.0)
COME_SECONDS = 150.0  # for a machine whose processes import torch one after the other, on a busy one
BOTH = ["cpu", "cpu at 127.0.0.1"]
pytestmark = [
    pytest.mark.timeout(300),  # each start of processes imports torch
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere loopback has one address"),
]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    return embedded(tmp_path_factory.mktemp("data"))


def begun(place: str, token: bytes = TOKEN) -> subprocess.Popen[str]:
    """Starts `p2ptrain lend`."""
    settings = {"P2PTRAIN_DEVICE__NAME": "cpu", "P2PTRAIN_DEVICE__THREADS": "1", "P2PTRAIN_LOGGING__FORMAT": "text"}
    command, both = [sys.executable, "-m", "p2ptrain", "lend", place], subprocess.PIPE
    lender = subprocess.Popen(
        command, stdin=both, stdout=both, stderr=subprocess.STDOUT, text=True, env={**os.environ, **settings}
    )
    assert lender.stdin is not None
    lender.stdin.write(token.decode() + "\n")
    lender.stdin.flush()
    return lender


@contextmanager
def lending(group: RankGroup) -> Iterator[subprocess.Popen[str]]:
    """Yields another machine; at the end none of its processes is left."""
    assert group.machines is not None
    with begun(group.machines.place) as lender:
        there = list[psutil.Process]()
        try:
            yield lender
        finally:
            with suppress(psutil.NoSuchProcess):
                there = psutil.Process(lender.pid).children(recursive=True)
            lender.terminate()
            _, alive = psutil.wait_procs(there, GONE_SECONDS)
            assert alive == []


def until(condition: Callable[[], object]) -> None:
    began, never = monotonic(), Event()
    while not condition():
        assert monotonic() - began < COME_SECONDS
        never.wait(0.05)


@pytest.mark.parametrize("is_adapted", [False, True], ids=["whole", "adapters"])
def test_two_machines_contribute_what_one_process_contributes(
    dataset: TokenDataset, is_adapted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")  # as a cluster may for each of its processes
    alone, other, base = make(dataset, "local", inner="muon"), make(dataset, "local", inner="muon"), None
    if is_adapted:  # the other machine gets the frozen weights, too
        alone, other, base = adapted(tmp_path)
    spread = with_ranks(other, ["cpu"], settings=TWO_MACHINES, base=base, token=TOKEN)
    with spread as (together, group), lending(group) as lender:
        for number in range(2):
            ours, theirs = alone.train(Share(number, 0, 1)), together.train(Share(number, 0, 1))
            for one, other in zip(ours, theirs, strict=True):
                assert other.loss == pytest.approx(one.loss, rel=1e-5)
                assert (other.tokens, other.learned) == (one.tokens, one.learned)
            moved = alone.live.weights, together.live.weights
            assert float((moved[1] - moved[0]).norm() / moved[0].norm()) < 1e-4
            payloads = [alone.contribute(number), together.contribute(number)]
            for each, own in zip((alone, together), payloads, strict=True):
                each.apply(number, payloads[:1], {number: own})
            assert together.root() == alone.root()
        assert [each.device for each in group.figures] == BOTH
        assert [each.tokens for each in group.figures] == [sum(each.tokens for each in theirs) // 2] * 2
        there = psutil.Process(lender.pid).children(recursive=True)
        assert len(there) == 2, "torch's agent and a rank"
        assert not any(TOKEN.decode() in " ".join(each.cmdline()) for each in there)
        group.close()
        assert psutil.wait_procs(there, GONE_SECONDS)[1] == []
        assert lender.poll() is None, "it outlives the node"


def test_a_node_trains_without_a_machine_that_is_lost_and_with_one_that_comes(
    dataset: TokenDataset, caplog: pytest.LogCaptureFixture
) -> None:
    with ranked(dataset, ["cpu"], patience=SOON, **SPREAD) as (trainer, group), ExitStack() as stack:
        assert len(trainer.train(Share(0, 0, 1))) == 4
        assert "1 of 1 other machines are not there: going on without" in caplog.text
        assert [each.device for each in group.figures] == BOTH[:1]
        machine = stack.enter_context(lending(group))
        assert group.machines is not None
        until(group.machines.waiting)
        trainer.train(Share(1, 0, 1))  # its ranks have met all that are there
        assert [each.device for each in group.figures] == BOTH

        def kill(_: object) -> None:
            machine.kill()

        with pytest.raises(RanksLostError, match=r"rank 1 \(cpu at 127\.0\.0\.1, process \d+\) has ended; all ranks"):
            while True:
                trainer.train(Share(2, 0, 1), kill)
        began = perf_counter()
        assert len(trainer.train(Share(3, 0, 1))) == 4
        sys.stderr.write(f"from the loss of a machine to the next contribution: {perf_counter() - began:.1f} s\n")
        assert [each.device for each in group.figures] == BOTH[:1]
        assert "1 of 1 other machines are not there (127.0.0.1): going on without" in caplog.text
        stack.enter_context(lending(group))
        until(group.machines.waiting)
        trainer.train(Share(4, 0, 1))
        assert [each.device for each in group.figures] == BOTH


def test_a_machine_that_was_not_there_is_not_waited_for_again(
    dataset: TokenDataset, caplog: pytest.LogCaptureFixture
) -> None:
    with ranked(dataset, ["cpu"], patience=Patience(machines_seconds=1.0), **SPREAD) as (trainer, group):
        trainer.train(Share(0, 0, 1))
        for times in (2, 3):
            os.kill(group.figures[0].pid, signal.SIGKILL)
            psutil.wait_procs([psutil.Process(group.figures[0].pid)], GONE_SECONDS)
            trainer.train(Share(times, 0, 1))
            assert caplog.text.count("1 of 1 other machines are not there: going on without") == times
        assert caplog.text.count("are not there: waiting") == 1


def test_a_node_that_ends_waits_for_no_machine(dataset: TokenDataset) -> None:
    with ranked(dataset, ["cpu"], **SPREAD) as (trainer, group):
        group.stop()
        with pytest.raises(StoppedError, match="the node ends"):
            trainer.train(Share(0, 0, 1))


# ---------------------------------------------------------------------------------------------------
# Who is let in


@pytest.fixture
def machines() -> Iterator[Machines]:
    made = Machines(TWO_MACHINES, TOKEN, "cpu")
    yield made
    made.close()


@contextmanager
def connected(machines: Machines) -> Iterator[socket.socket]:
    at = machines.address, int(machines.place.rpartition("/")[2])
    with socket.create_connection(at, timeout=GONE_SECONDS) as connection:
        yield connection


def lend(place: str, token: bytes = TOKEN) -> None:
    device = DeviceConfig(name="cpu", rendezvous=place)
    lend_devices(NodeConfig(device=device), token)


def come(place: str, monkeypatch: pytest.MonkeyPatch, **changes: object) -> socket.socket:
    """Connects as a rank on another machine does."""
    lent = replace(RankStarted(0, 1, "name", ("cpu",), "cpu", (), 1), **changes)
    monkeypatch.setenv(LENDING, msgspec.json.encode((place, TOKEN, lent)).decode())
    found = lent_here(lent.rank)
    assert found is not None
    return found[1]


def impostor(connection: socket.socket, releases: bytes, *, is_node: bool) -> bytes:
    """Goes through a greeting with other releases; returns those of the other side."""
    ours = releases.ljust(len(RELEASES)) + bytes(32)
    connection.sendall(ours)
    theirs = exactly(connection, len(ours))
    said = ours + theirs if is_node else theirs + ours
    connection.sendall(hmac.digest(TOKEN, (b"node" if is_node else b"lender") + said, "sha256"))
    exactly(connection, 32)
    return theirs[: len(RELEASES)]


def test_another_token_is_refused_on_both_sides(machines: Machines, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"another token\. Give `p2ptrain lend` the token"):
        lend(machines.place, OTHER_TOKEN)
    until(lambda: "refused a connection from 127.0.0.1: the other machine has another token" in caplog.text)
    assert machines.waiting() == []


def test_one_that_names_no_device_of_its_own_is_refused_and_others_come(
    machines: Machines, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(GREETED_AT_ONCE + 1):
        with pytest.raises((EOFError, OSError)):
            come(machines.place, monkeypatch, rank=1)
    until(lambda: caplog.text.count("it names no device of its own") > GREETED_AT_ONCE)
    with come(machines.place, monkeypatch):
        until(machines.waiting)


def test_another_release_is_refused_on_both_sides(machines: Machines, caplog: pytest.LogCaptureFixture) -> None:
    said = f"the other machine has p2ptrain 9, torch 9, this one {RELEASES.decode().strip()}. Install the same on both"
    with connected(machines) as connection:
        assert impostor(connection, b"p2ptrain 9, torch 9", is_node=False) == RELEASES
        assert connection.recv(1) == b""
    until(lambda: f"refused a connection from 127.0.0.1: {said}" in caplog.text)
    with socket.create_server(("127.0.0.2", 0)) as server, ThreadPoolExecutor() as pool:

        def greet() -> bytes:
            with server.accept()[0] as connection:
                return impostor(connection, b"p2ptrain 9, torch 9", is_node=True)

        node = pool.submit(greet)
        with pytest.raises(ConfigError, match=re.escape(said)):
            lend(f"/ip4/127.0.0.2/tcp/{server.getsockname()[1]}")
        assert node.result() == RELEASES


def test_a_proof_that_is_sent_back_proves_nothing(machines: Machines) -> None:
    with connected(machines) as connection:
        connection.sendall(exactly(connection, len(RELEASES) + 32))
        connection.sendall(exactly(connection, 32))
        assert connection.recv(1) == b""


def test_strangers_are_heard_for_a_while_and_then_no_more(
    machines: Machines, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(machines_module, "GREETING_SECONDS", 1.0)
    monkeypatch.setattr(machines_module, "TOLD_MAX", 3)
    before = psutil.Process().memory_info().rss
    with ExitStack() as stack:
        silent = [stack.enter_context(connected(machines)) for _ in range(GREETED_AT_ONCE)]
        for each in silent:
            exactly(each, len(RELEASES) + 32)
            assert each.recv(1) == b""
    with connected(machines) as slow:
        exactly(slow, len(RELEASES) + 32)
        slow.settimeout(0.1)
        sent, is_heard = 0, True
        while is_heard:  # a byte now and then
            try:
                slow.sendall(b"x")
                is_heard = slow.recv(1) != b""
            except TimeoutError:
                sent += 1
            except OSError:
                is_heard = False
        assert sent < 20
    with connected(machines) as talkative, suppress(OSError):
        while True:
            talkative.sendall(bytes(2**20))
    assert psutil.Process().memory_info().rss - before < 2**25
    come(machines.place, monkeypatch).close()
    assert caplog.text.count("refused a connection from 127.0.0.1") == 3


def test_it_listens_at_the_address_that_its_owner_named_alone(machines: Machines) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(machines.place.rpartition("/")[2])))
    for place in (machines.place, "/ip4/192.0.2.1/tcp/4100"):
        settings = TWO_MACHINES.model_copy(update={"rendezvous": place})
        with pytest.raises(ConfigError, match=rf"device\.rendezvous: cannot listen at {place}: .*Name an address of"):
            Machines(settings, TOKEN, "cpu")


def test_a_machine_is_there_when_all_of_its_ranks_are_and_no_more_than_wanted(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = {"machine": "a", "devices": ("cpu", "cpu")}
    with come(machines.place, monkeypatch, rank=1, **two) as first, come(machines.place, monkeypatch, machine="b"):
        until(lambda: [each.lent.machine for each in machines.waiting()] == ["b"])
        with come(machines.place, monkeypatch, rank=0, **two):
            until(lambda: [(it.lent.machine, it.lent.rank) for it in machines.waiting()] == [("a", 0), ("a", 1)])
            first.close()
            until(lambda: [each.lent.machine for each in machines.waiting()] == ["b"])
            (taken,) = machines.waiting(takes=True)
            taken.connection.close()
            assert machines.waiting() == []


def test_those_that_took_part_are_waited_for_and_those_that_did_not_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    three = Machines(TWO_MACHINES.model_copy(update={"nnodes": 3}), TOKEN, "cpu")
    with ExitStack() as stack:
        stack.callback(three.close)

        def comes(*names: str) -> None:
            for name in names:
                stack.enter_context(come(three.place, monkeypatch, machine=name))
            until(lambda: {each.lent.machine for each in three.waiting()} >= {*names})

        def took(names: list[str], seconds: float = 1e9) -> list[str]:
            taken = three.come(monotonic() + seconds, lambda: comes(*(names.pop() for _ in names[:1])))
            for each in taken:
                stack.enter_context(each.connection)
            return [each.lent.machine for each in taken]

        comes("a")
        assert took([], -1.0) == ["a"]
        assert took(["a"]) == ["a"], "b was not there before either"
        comes("b")
        assert took(["a"]) == ["a", "b"], "a is waited for, not replaced"
        comes("b")
        assert took([], -1.0) == ["b"], "a is lost"
        assert took(["b"]) == ["b"]


def test_lent_processors_compute_as_precisely_as_the_node_does(
    dataset: TokenDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    automatic = TWO_MACHINES.model_copy(update={"autocast": "auto"})
    with ranked(dataset, ["cpu"], token=TOKEN, settings=automatic) as (_, group):
        assert group.machines is not None
        with come(group.machines.place, monkeypatch) as connection:
            until(group.machines.waiting)
            with ThreadPoolExecutor() as pool:
                meeting = pool.submit(group.wait)
                job = hear_order(connection)
                assert isinstance(job, RankJob)
                assert DeviceConfig.model_validate_json(job.settings).autocast == "bf16"
                group.stop()
                with pytest.raises(StoppedError):
                    meeting.result()


def test_devices_of_another_kind_and_plug_ins_that_are_not_allowed_are_refused(
    dataset: TokenDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ranked(dataset, ["cpu"], **SPREAD) as (trainer, group):
        assert group.machines is not None
        with pytest.raises(ConfigError, match=r"its devices \(H100\) are of another kind than the node's \(cpu\)"):
            come(group.machines.place, monkeypatch, kind="H100")
    model = trainer.run.model.model_copy(update={"plugin": "p2ptrain-noise 0.1.0"})
    work = RankWork(trainer.run.model_copy(update={"model": model}), TWO_MACHINES, dataset, token=TOKEN)
    theirs = RankGroup(work, ["cpu"], trainer.live, trainer.recipe)
    try:
        assert theirs.machines is not None
        with pytest.raises(ConfigError, match=r"does not take this machine: its owner does not allow p2ptrain-noise"):
            come(theirs.machines.place, monkeypatch)
        come(theirs.machines.place, monkeypatch, plugins=("p2ptrain-noise 0.1.0",)).close()
    finally:
        theirs.close()


def test_the_token_is_made_once_and_for_its_owner_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "node"
    with caplog.at_level(logging.INFO):
        token = token_in(directory, TWO_MACHINES)
    path = directory / "rendezvous.token"
    assert len(token) >= 43
    assert token_in(directory, TWO_MACHINES) == token == path.read_bytes().strip()
    assert path.stat().st_mode & 0o077 == 0
    assert f"run: p2ptrain lend /ip4/127.0.0.2/tcp/0 (it asks for the token in {path})" in caplog.text
    assert token.decode() not in caplog.text
