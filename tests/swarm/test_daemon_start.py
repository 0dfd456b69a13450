"""Starts that fail or are interrupted: the message, the exit status, and a clean next start."""

from __future__ import annotations

import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import save_file

from p2ptrain.config import load_run_config
from p2ptrain.identity import Identity
from p2ptrain.models.kinds import exported_shapes, first_model
from tests.helpers.daemons import TEST_SECONDS, DaemonSwarm, p2ptrain, swarm_in

SECONDS_TO_END = 30.0  # of what ends at once, where twenty others want the cores

pytestmark = pytest.mark.timeout(TEST_SECONDS)


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[DaemonSwarm]:
    with swarm_in(tmp_path) as swarm:
        swarm.imports_itself = True  # a start from its first line on
        yield swarm


def some_address(port: int = 9) -> str:
    return f"/ip4/127.0.0.1/tcp/{port}/p2p/{Identity(bytes(range(32))).peer_id}"


@pytest.mark.parametrize(
    "address",
    ["nonsense", "/ip4/127.0.0.1/tcp/4001", "/ip4/127.0.0.1/tcp/4001/p2p/12D3KooWNobody", some_address()[:-1]],
)
def test_an_address_that_is_none_is_named(address: str, tmp_path: Path) -> None:
    status, _, err = p2ptrain(
        "join", "--bootstrap", address, "--data-dir", tmp_path / "data", "--listen", "/ip4/127.0.0.1/tcp/0"
    )
    assert status == 2
    assert address in err
    assert "bootstrap" in err
    assert "Traceback" not in err


def test_a_port_in_use_is_named_with_what_to_do(swarm: DaemonSwarm) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"/ip4/127.0.0.1/tcp/{other.getsockname()[1]}"
        first = swarm.first(listen=address).start()
        assert first.until_ended() == 2
    assert first.text.splitlines()[-1] == (
        f"network.listen: {address} is in use by another program. "
        "Stop it (perhaps another node of yours), or choose another port"
    )


def test_what_a_node_keeps_is_its_users_alone_whatever_the_umask(swarm: DaemonSwarm) -> None:
    swarm.imports_itself = False
    (swarm.directory / "first").mkdir()
    (swarm.directory / "first").chmod(0o755)  # its owner's choice, which stays
    first = swarm.first()
    first.prefix = ("sh", "-c", 'umask 000; exec "$@"', "sh")
    first.start().until_up()
    second = swarm.add("second", "join", "--bootstrap", first.address, "--data-dir", swarm.directory / "a" / "second")
    second.prefix, second.directory = first.prefix, swarm.directory / "a" / "second"
    second.start().until_applied(3)
    for node in (first, second):
        found = {path: path.lstat().st_mode for path in node.directory.rglob("*")}
        assert {"daemon.json", "data", "identity.key", "manifest.json", "run.json"} <= {path.name for path in found}
        assert [f"{mode:o} {path}" for path, mode in found.items() if mode & 0o077] == []
    assert [(swarm.directory / name).stat().st_mode & 0o777 for name in ("first", "a", "a/second")] == [
        *(0o755, 0o700, 0o700)
    ]


def test_a_directory_and_an_identity_are_of_one_process(swarm: DaemonSwarm) -> None:
    first = swarm.first().start().until_up()
    again = swarm.add("again", *first.arguments, "--data-dir", first.directory).start()
    key = first.directory / "identity.key"
    same_key = swarm.joiner("other", first.address, P2PTRAIN_IDENTITY__FILE=str(key)).start()
    assert (again.until_ended(), same_key.until_ended()) == (2, 2)
    assert f"the directory {first.directory} is in use by process {first.pid}. Stop that process" in again.text
    assert f"the identity {key} is in use by process {first.pid}. Stop that process" in same_key.text
    assert first.status()["round"] >= 1


@pytest.mark.parametrize("place", ["/proc/p2ptrain", "a-file/data"])
def test_a_directory_that_cannot_be_written_is_named(swarm: DaemonSwarm, place: str) -> None:
    (swarm.directory / "a-file").write_text("")
    directory = swarm.directory / place
    first = swarm.add("first", "start", swarm.run_file(), "--data-dir", directory).start()
    assert first.until_ended() == 2
    assert first.text.startswith(f"{directory}: storage.directory: cannot be written: ")
    assert first.text.endswith(". Choose another with --data-dir\n")
    assert first.text.count("\n") == 1


def test_a_search_that_is_broken_off_ends_at_once(swarm: DaemonSwarm) -> None:
    searching = [swarm.joiner(f"searching{number}", some_address()).start() for number in (1, 2, 3)]
    for each in searching:
        took = each.until_says(f"cannot connect to {some_address()}: nobody listens there (connection refused)")
        swarm.note("says that nobody is there", took)
    owner = ("--data-dir", searching[2].directory)
    status, _, err = p2ptrain("status", *owner)
    assert (status, err) == (1, "the node is starting or looking for the run; see its log\n")
    assert p2ptrain("leave", *owner)[0] == 0
    assert searching[2].until_ended(SECONDS_TO_END) == 130
    for each, number, status in zip(searching, (signal.SIGINT, signal.SIGTERM), (130, 130), strict=False):
        each.signal(number)
        assert each.until_ended(SECONDS_TO_END) == status
        lines = [line for line in each.text.splitlines() if "in a browser" not in line]
        assert all(line.endswith("; the node keeps trying") for line in lines), each.text


def test_a_first_start_may_be_killed_anywhere(swarm: DaemonSwarm) -> None:
    first = swarm.first()
    for place in ("identity.key", "data/*", "runs/*/wal", "runs/*/checkpoints/*", "runs/*/events/*"):
        first.start()
        first.until(lambda place=place: any(first.directory.glob(place)), look=0.01)
        first.kill()
    first.start().until_applied(3)
    assert first.is_member
    assert "warning" not in first.text


def test_a_start_goes_on_without_the_weights_that_it_began_with_and_with_data_missing(swarm: DaemonSwarm) -> None:
    run, weights = swarm.run_file(), swarm.directory / "weights"
    weights.mkdir()
    model = load_run_config(run).model
    named = zip(exported_shapes(model), first_model(model, 7).parameters(), strict=True)
    save_file({name: each.detach() for (name, _), each in named}, weights / "model.safetensors")
    first = swarm.add("first", "start", run, "--weights", weights).start().until_up()
    first.until_applied(2)
    first.kill()
    next(first.directory.glob("data/*/pieces/*")).unlink()
    first.arguments = ["start", str(run)]
    first.start().until_says("continuing from the checkpoint of round")
    first.until_up()


def test_what_a_killed_process_left_for_its_sockets_is_removed(swarm: DaemonSwarm) -> None:
    with tempfile.TemporaryDirectory(prefix="p2p-") as private:  # pytest's own paths are too long for sockets
        first = swarm.first(XDG_RUNTIME_DIR=private).start().until_up()
        [left] = Path(private).iterdir()
        first.kill()
        first.start().until_up()
        [found] = Path(private).iterdir()
        assert found != left
        first.leave()
        assert list(Path(private).iterdir()) == []


def test_without_a_daemon_it_is_said_so(tmp_path: Path) -> None:
    for command in ("status", "peers", "leave"):
        status, out, err = p2ptrain(command, "--data-dir", tmp_path)
        assert (status, out, err) == (3, "", f"no daemon is running in {tmp_path}\n")


def test_an_identity_is_made_once_and_shown(tmp_path: Path) -> None:
    place = ("--data-dir", tmp_path / "data")
    path = tmp_path / "data" / "identity.key"
    assert p2ptrain("identity", "path", *place) == (0, f"{path}\n", "")
    status, _, err = p2ptrain("identity", "show", *place)
    assert (status, "no such key file" in err) == (2, True)
    status, out, _ = p2ptrain("identity", "new", *place)
    identity = Identity.load(path)
    assert (status, out) == (0, f"{identity.peer_id}\n{path}\n")
    shown = f"peer id     {identity.peer_id}\npublic key  {identity.key.hex()}\n"
    assert p2ptrain("identity", "show", *place) == (0, shown, "")
    status, _, err = p2ptrain("identity", "new", *place)
    assert (status, "identity.file: already exists" in err) == (2, True)
    assert Identity.load(path).key == identity.key


def test_a_run_that_does_not_fit_is_refused_on_both_ways_in_before_anything_is_made(swarm: DaemonSwarm) -> None:
    """With a limit of one byte it is refused; with enough memory, its need is logged before it is allocated."""
    first = swarm.first().start().until_up()
    assert first.text.index("needs about") < first.text.index("p2ptrain join --bootstrap")
    assert " of main memory (agreed weights " in first.text
    limit = {"P2PTRAIN_LIMITS__MEMORY_BYTES": "1"}
    beginning = swarm.add("beginning", "start", swarm.run_file("other"), **limit).start()
    joining = swarm.joiner("joining", first.address, **limit).start()
    for node, status in ((beginning, 2), (joining, 1)):  # who joins may be offered another run
        assert node.until_ended(SECONDS_TO_END) == status
        assert "limits.memory_bytes: run " in node.text.splitlines()[-1]
        assert not list(node.directory.rglob("*.bin")) and not (node.directory / "data").exists()
        assert not (node.directory / "runs").exists() or not list((node.directory / "runs").rglob("run.json"))
