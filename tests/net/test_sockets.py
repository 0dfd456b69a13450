"""The directory of p2pd's sockets is made again when it was removed, and never shared with other users."""

from __future__ import annotations

import asyncio
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2ptrain.net.libp2p.control import Sockets
from p2ptrain.net.transport import TransportError


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="p2p-") as made:  # pytest's paths are too long for sockets
        (Path(made) / "runtime").mkdir(mode=0o700)
        yield Path(made) / "runtime" / "node"


class Accepted:
    """Collects the connections that would come from p2pd."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.count += 1
        writer.transport.abort()


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def p2pd_listens(sockets: Sockets) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(sockets.control))
    return listening


async def is_served(sockets: Sockets, accepted: Accepted) -> bool:
    before = accepted.count
    reader, writer = await asyncio.open_unix_connection(sockets.streams)
    assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()
    return accepted.count == before + 1


async def test_a_directory_that_was_removed_is_made_again_for_us_alone(place: Path) -> None:
    accepted = Accepted()
    sockets = Sockets(place, accepted)
    for _ in range(3):
        await sockets.open()
        assert (sockets.directory, mode_of(place)) == (place, 0o700)
        assert await is_served(sockets, accepted)
        assert not sockets.are_there  # p2pd has not made its socket yet
        with p2pd_listens(sockets):
            assert sockets.are_there
            shutil.rmtree(place)
            assert not sockets.are_there
    await sockets.open()
    await sockets.close()


async def test_a_socket_that_was_removed_is_made_again(place: Path) -> None:
    accepted = Accepted()
    sockets = Sockets(place, accepted)
    await sockets.open()
    with p2pd_listens(sockets):
        sockets.streams.unlink()
        assert not sockets.are_there
    await sockets.open()
    assert await is_served(sockets, accepted)
    assert not sockets.control.exists()  # the next p2pd makes a new one
    await sockets.close()


def spoil(place: Path, trouble: str) -> None:
    match trouble:
        case "no place":
            shutil.rmtree(place.parent)
        case "open to others":
            place.chmod(0o755)
        case "a link":
            place.rename(place.with_name("moved"))
            place.symlink_to("moved")
        case _:
            shutil.rmtree(place)
            place.write_bytes(b"")


@pytest.mark.parametrize("trouble", ["no place", "open to others", "a link", "a file"])
async def test_where_it_cannot_be_ours_it_lies_elsewhere_until_the_end(
    place: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    elsewhere, accepted = place.parents[1] / "elsewhere", Accepted()
    elsewhere.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    sockets = Sockets(place, accepted)
    await sockets.open()
    spoil(place, trouble)
    await sockets.open()
    assert sockets.directory.parent == elsewhere
    assert mode_of(sockets.directory) == 0o700
    assert await is_served(sockets, accepted)
    found = sockets.directory
    await sockets.open()  # the new directory is kept
    assert sockets.directory == found
    await sockets.close()
    assert list(elsewhere.iterdir()) == []


async def test_without_any_place_it_is_said_and_tried_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(place / "none"))
    sockets = Sockets(place, Accepted())
    shutil.rmtree(place.parent)
    with pytest.raises(TransportError, match=r"cannot open sockets in .*: No such file or directory"):
        await sockets.open()
    place.parent.mkdir()
    await sockets.open()
    assert sockets.directory == place
    await sockets.close()
