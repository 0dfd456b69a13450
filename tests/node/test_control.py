"""The control socket: requests and answers, and the errors when no daemon answers."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.errors import DataError, NoDaemonError, P2ptrainError, SilentDaemonError
from p2ptrain.files import DiskError
from p2ptrain.node import control
from p2ptrain.node.control import CONNECTIONS_MAX, NAME, REQUEST_BYTES_MAX, Control, ask


async def answer(request: dict[str, Any]) -> dict[str, Any]:
    if request.get("do") == "fail":
        raise DataError("the disk is full")
    return {"asked": request}


@asynccontextmanager
async def running(data: Path) -> AsyncIterator[Control]:
    with tempfile.TemporaryDirectory(prefix="p2p-") as runtime:  # pytest's own paths are too long for sockets
        made = Control(data, Path(runtime), answer)
        await made.start()
        try:
            yield made
        finally:
            await made.close()


async def asked(data: Path, request: dict[str, Any], seconds: float = 20.0) -> dict[str, Any]:
    return await asyncio.to_thread(ask, data, request, seconds)


async def raw(made: Control, request: bytes) -> bytes:
    """Returns the reply to these bytes."""
    reader, writer = await asyncio.open_unix_connection(made.socket)
    try:
        writer.write(request)
        return await reader.readline()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_what_is_asked_is_answered_and_only_the_owner_can_ask(tmp_path: Path) -> None:
    async with running(tmp_path) as made:
        assert await asked(tmp_path, {"do": "x", "ß": [1, None]}) == {"asked": {"do": "x", "ß": [1, None]}}
        with pytest.raises(P2ptrainError, match=r"^the disk is full$"):
            await asked(tmp_path, {"do": "fail"})
        assert made.socket.stat().st_mode & 0o777 == 0o600
    assert not made.socket.exists()
    assert not (tmp_path / NAME).exists()


async def test_the_socket_is_in_the_data_directory_which_a_logout_leaves_alone(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="p2p-") as short:
        data = Path(short)
        async with running(data) as made:
            assert made.socket == data / "control.sock"
            assert made.socket.stat().st_mode & 0o777 == 0o600
            assert await asked(data, {}) == {"asked": {}}
        assert os.listdir(data) == []  # noqa: PTH208


async def test_a_full_disk_does_not_keep_a_node_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, *_: object, **__: object) -> None:
        raise DiskError(path, "cannot be written", OSError(errno.ENOSPC, "No space left on device"))

    monkeypatch.setattr("p2ptrain.node.control.replace_file", full)
    async with running(tmp_path) as made:
        assert made.socket.exists() and not made.note.exists()
    assert f"{made.note}: cannot be written (No space left on device)" in caplog.text


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.EINVAL])
async def test_where_a_file_system_has_no_sockets_it_is_elsewhere(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="p2p-") as short:

        class Bound(socket.socket):
            def bind(self, address: str) -> None:  # type: ignore[override]
                if address.startswith(short):
                    raise OSError(code, os.strerror(code))
                super().bind(address)

        monkeypatch.setattr(socket, "socket", Bound)
        async with running(Path(short)) as made:
            assert made.socket.parent != Path(short)
            assert await asked(Path(short), {}) == {"asked": {}}


async def test_the_longest_request_is_answered_and_a_longer_one_is_refused_by_name(tmp_path: Path) -> None:
    async with running(tmp_path) as made:
        room = REQUEST_BYTES_MAX - len(json.dumps({"prompt": ""})) - 1
        assert await asked(tmp_path, {"prompt": "x" * room}) == {"asked": {"prompt": "x" * room}}
        with pytest.raises(P2ptrainError, match=f"the limit is {REQUEST_BYTES_MAX}") as raised:
            await asked(tmp_path, {"prompt": "x" * (room + 1)})
        assert not isinstance(raised.value, NoDaemonError)
        assert await raw(made, b"x" * (2 * REQUEST_BYTES_MAX) + b"\n") == b""
        assert await asked(tmp_path, {}) == {"asked": {}}


@pytest.mark.parametrize(
    ("request_bytes", "reply"),
    [
        (b"nonsense\n", b'{"error": "not JSON"}\n'),
        (b"\xff\xfe\n", b'{"error": "not JSON"}\n'),
        (b"\n", b'{"error": "not JSON"}\n'),
        (b"[" * 60_000 + b"\n", b'{"error": "not JSON"}\n'),
        (b"[1]\n", b'{"error": "not an object"}\n'),
        (b"null\n", b'{"error": "not an object"}\n'),
        (b'{"do": 1}\nand more\n', b'{"asked": {"do": 1}}\n'),
    ],
    ids=lambda content: repr(content[:16]),
)
async def test_what_is_no_request_is_told_so(request_bytes: bytes, reply: bytes, tmp_path: Path) -> None:
    async with running(tmp_path) as made:
        assert await raw(made, request_bytes) == reply
        assert await asked(tmp_path, {}) == {"asked": {}}


async def test_one_connection_too_many_is_told_so_and_those_that_ask_nothing_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "CLIENT_SECONDS", 0.3)
    async with running(tmp_path) as made:
        idle = [await asyncio.open_unix_connection(made.socket) for _ in range(CONNECTIONS_MAX)]
        with pytest.raises(P2ptrainError, match=r"^busy: 16 commands are waiting already; try again$") as raised:
            await asked(tmp_path, {})
        assert not isinstance(raised.value, NoDaemonError)
        for reader, writer in idle:
            assert await reader.read() == b""
            writer.close()
        assert await asked(tmp_path, {}) == {"asked": {}}


async def test_what_an_earlier_daemon_left_does_not_stop_the_next(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="p2p-") as runtime:
        first = Control(tmp_path, Path(runtime), answer)
        await first.start()
        assert first._server is not None
        first._server.close()  # killed: nothing is removed
        with pytest.raises(NoDaemonError, match="did not shut down cleanly"):
            await asked(tmp_path, {})
        second = Control(tmp_path, Path(runtime), answer)
        await second.start()
        assert await asked(tmp_path, {}) == {"asked": {}}
        await second.close()


# ---------------------------------------------------------------------------------------------------
# Nobody is there


def note(data: Path, content: str) -> None:
    (data / NAME).write_text(content)


def test_of_another_users_daemon_nobody_is_told_that_it_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    (tmp_path / control.NAME).write_text(json.dumps({"socket": str(tmp_path / "socket"), "pid": 1}))
    for kind, name in ((socket.socket, "connect"), (Path, "read_text")):
        with monkeypatch.context() as patch:
            patch.setattr(kind, name, refused)
            with pytest.raises(P2ptrainError, match=r"this user may not ask the daemon .* Ask as the user") as raised:
                ask(tmp_path, {"do": "status"})
        assert not isinstance(raised.value, NoDaemonError)


@pytest.mark.parametrize("content", ["", "nonsense", "[]", "{}", '{"socket": "x"}', '{"socket": "x", "pid": "y"}', "7"])
def test_a_note_that_says_nothing_is_no_daemon(content: str, tmp_path: Path) -> None:
    with pytest.raises(NoDaemonError, match=f"^no daemon is running in {tmp_path}$"):
        ask(tmp_path, {})
    note(tmp_path, content)
    with pytest.raises(NoDaemonError, match=f"^no daemon is running in {tmp_path}$"):
        ask(tmp_path, {})


@pytest.mark.parametrize("place", ["gone.sock", "a" * 200, "daemon.json"])
def test_a_socket_on_which_nobody_listens_is_no_daemon(place: str, tmp_path: Path) -> None:
    note(tmp_path, json.dumps({"socket": str(tmp_path / place), "pid": 77}))
    with pytest.raises(NoDaemonError, match=r"the last one \(pid 77\) did not shut down cleanly"):
        ask(tmp_path, {})


@asynccontextmanager
async def saying(data: Path, *parts: bytes, ends: bool = True) -> AsyncIterator[None]:
    """Listens on the control socket and replies with these bytes."""
    over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        for part in parts:
            writer.write(part)
        if not ends:
            await over.wait()
        writer.close()

    with tempfile.TemporaryDirectory(prefix="p2p-") as runtime:
        path = Path(runtime) / "x"
        server = await asyncio.start_unix_server(serve, path)
        note(data, json.dumps({"socket": str(path), "pid": 77}))
        yield
        over.set()
        server.close()


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ((), "did not finish its answer"),
        ((b"nonsense\n",), "did not finish its answer"),
        ((b"[1]\n",), "is not a p2ptrain daemon"),
        ((b'{"half": ',), "did not finish its answer"),
    ],
)
async def test_an_answer_that_is_none_is_no_daemon(parts: tuple[bytes, ...], why: str, tmp_path: Path) -> None:
    async with saying(tmp_path, *parts):
        with pytest.raises(NoDaemonError, match=why):
            await asked(tmp_path, {})


async def test_a_mistake_in_the_daemon_is_not_called_its_absence(tmp_path: Path) -> None:
    """A user told that no daemon is running would start a second one, or think that the run is over."""
    said: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: said.append(context.get("exception")))

    async def err(request: dict[str, Any]) -> dict[str, Any]:
        raise NameError("kind_of_address")

    async with running(tmp_path) as made:
        made.answer = err
        with pytest.raises(P2ptrainError, match="its log has an error"):
            await asked(tmp_path, {})
        made.answer = answer
        assert await asked(tmp_path, {}) == {"asked": {}}
    assert "kind_of_address" in str(said)


async def test_an_answer_without_end_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "REPLY_BYTES_MAX", 100_000)
    async with saying(tmp_path, b" " * 2_000_000):
        with pytest.raises(NoDaemonError):
            await asked(tmp_path, {})


async def test_a_daemon_that_is_stopped_does_not_answer_and_it_is_said_so(tmp_path: Path) -> None:
    async with saying(tmp_path, ends=False):
        with pytest.raises(SilentDaemonError, match=r"\(pid 77\) does not answer; it may be suspended"):
            await asked(tmp_path, {}, seconds=0.2)


async def test_one_look_at_a_daemon_does_not_wait_as_long_as_an_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert control.LOOK_SECONDS + control.SLACK_SECONDS <= 10  # in which nothing is seen
    monkeypatch.setattr(control, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(control, "SLACK_SECONDS", 0.1)
    for what in ("status", "peers", "rounds"):
        async with saying(tmp_path, ends=False), asyncio.timeout(20):
            with pytest.raises(NoDaemonError, match="does not answer"):
                await asyncio.to_thread(ask, tmp_path, {"do": what})


async def test_a_daemon_that_cannot_tell_yet_says_that_it_is_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wait(request: dict[str, Any]) -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(control, "LOOK_SECONDS", 0.1)
    async with running(tmp_path) as made:
        made.answer = wait
        with pytest.raises(P2ptrainError, match=r"^busy: no answer within") as raised:
            await asked(tmp_path, {"do": "status"})
        assert not isinstance(raised.value, NoDaemonError)


async def test_a_part_that_comes_in_parts_is_one_answer(tmp_path: Path) -> None:
    async with saying(tmp_path, b'{"a"', b": 1}", b"\n"):
        assert await asked(tmp_path, {}) == {"a": 1}
