"""A scripted node behind the real HTTP server on loopback, and clients of various kinds."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from string import Formatter
from typing import Any, ParamSpec, cast, get_args

import aiohttp
import pytest
import uvloop
from pydantic import Field, computed_field

from p2ptrain.core.complaints import MEANINGS, Code, Complaint, complaint
from p2ptrain.digest import digest
from p2ptrain.identity import peer_id_of
from p2ptrain.observe.app import ASSETS, App
from p2ptrain.observe.attention import looked_at
from p2ptrain.observe.guard import Guard
from p2ptrain.observe.http import HttpFace, HttpListener
from p2ptrain.observe.schema import LogLine, Peer, PeerList, Purpose, RoundRecord, Status

P = ParamSpec("P")
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
KEYS = (bytes([1]) * 32, bytes([2]) * 32)
ME, OTHER = map(peer_id_of, KEYS)
SECONDS = 30.0  # within which everything answers, also on a busy machine
LEARNING = {
    "held_out_loss": 2.75,
    "held_out_round": 5,
    "perplexity": 15.6426,
    "swarm_loss": 2.6,
    "gradient_norm": 0.5,
    "drift": 0.0009765625,
    "update_norm": 1.25,
    "compression_ratio": 40.0,
}


def told_of(*found: Complaint) -> dict[str, Any]:
    """Returns the fields of a status with these complaints."""
    troubles = [asdict(each) for each in found if each.code != Code.CRASH_ONLY]
    return {
        "health": [each.text for each in found],
        "complaints": [asdict(each) for each in found],
        "troubles": troubles,
    }


def every_complaint() -> list[Complaint]:
    """Makes every complaint once, with a number for each of its fields."""
    named = {code: [name for _, name, _, _ in Formatter().parse(MEANINGS[code].text) if name] for code in Code}
    return [complaint(code, **dict.fromkeys(names, 7)) for code, names in named.items()]


STATUS: dict[str, Any] = {
    "version": 1,
    "release": "1.2.3",
    "run_id": "ab" * 32,
    "run_name": "test",
    "peer_id": ME,
    "addresses": ["/ip4/203.0.113.7/tcp/4001/p2p/" + ME],
    "branch": "ab" * 32,
    "head": "12" * 32,
    "round": 8,
    "phase": "agree",
    "view": 1,
    "applied_round": 7,
    "since_applied_seconds": 1.5,
    "state_root": "cd" * 32,
    "certified_round": 6,
    **LEARNING,
    "text": "The swarm keeps what it has agreed on",
    "text_round": 5,
    "is_audited": True,
    "unaudited": "",
    "audits": 3,
    "audit_seconds": 1.5,
    "typical_z": 1.4,
    "suspended": 0,
    "motions": [
        {
            "motion": "3f" * 32,
            "text": "go on after round 40 with recipe.k 128 instead of 256",
            "author": OTHER,
            "last_round": 40,
            "weights_round": 40,
            "changes": {"recipe.k": ["256", "128"]},
            "costs": ["a contribution has 0.55 times the bytes: 550 at most"],
            "assents": 1,
            "needed": 2,
            "is_mine": False,
            "obstacle": "",
        }
    ],
    "successor": None,
    "ends_after_round": None,
    "own_data": "",
    "privacy_epsilon": None,
    "loss": 2.5,
    "step": 3,
    "tokens": 4_000,
    "tokens_per_second": 123.4,
    "training_seconds": 32.5,
    "swarm_tokens_per_second": 456.7,
    "contribution_tokens": 512,
    "mine": {
        "applied": 5,
        "applied_of_all": 20,
        "share": 0.25,
        "tokens": 9_000,
        "swarm_tokens": 30_000,
        "training_seconds": 70.0,
        "energy_joules": None,
    },
    "world_round": None,
    "device": "cpu",
    "ranks": [],
    "is_paused": False,
    "is_overlapping": True,
    "exchange_share": 0.2345,
    "peers": [OTHER],
    "roster": [ME, OTHER],
    "quorum": 2,
    "fault_tolerance": {"liars": 0, "crashes": 0, "mode": "crash-only"},
    "admitted": 3,
    "is_member": True,
    "is_admitted": True,
    "held": 2,
    "waiting_for": 1,
    **told_of(complaint(Code.CRASH_ONLY)),
    "http": "http://127.0.0.1:8420/",
    "loop_lag_seconds": 0.0123,
    "uptime_seconds": 99.5,
    "roots": {"6": "ef" * 32, "7": "cd" * 32},
    "k": 256,
    "payload_bytes": 1_000,
    "state_bytes": 40_000,
    "bytes": {"bytes sent": 10, "bytes received": 20},
    "traffic": {
        purpose: {"sent": number, "received": 10 * number} for number, purpose in enumerate(get_args(Purpose), start=1)
    },
    "limits": {
        "upload_bytes_per_second": 1_000,
        "download_bytes_per_second": 0,
        "memory_bytes": 0,
        "hours": "",
        "device_percent": 100,
        "k_max": 0,
        "threads": 3,
        "on_battery": "pause",
        "on_gpu_busy": "ignore",
    },
    "queued_frames": 12,
    "disk_free_bytes": 5_000_000_000,
    "counters": {
        "root mismatches": 2,
        "contributions taken": 5,
        "contributions too late": 1,
        "events dropped": 4,
        "trainings not finite": 6,
        "damaged files": 3,
    },
    "banned": {"bad payload": 1},
    "kept_away": 1,
    "staleness": {"0": 8, "2": 1},
    "observed": {"late": 3},
    "same_model": {
        "verdict": "same",
        "text": "Yes: at least 2 members signed that their model after round 6 was bit for bit this node's.",
    },
}
PEER: dict[str, Any] = {
    "peer_id": OTHER,
    "addresses": ["/ip4/10.0.0.7/tcp/4001/p2p/" + OTHER],
    "address_kind": "private",
    "release": "0.1.0",
    "owner": "",
    "latency_seconds": 0.0421,
    "is_connected": True,
    "is_member": True,
    "is_admitted": True,
    "offered": 9,
    "applied": 7,
    "late": 1,
    "refused": {"bad payload": 1},
    "points": 1.5,
    "ban": "",
    "arrival_seconds": 4.5,
    "arrival_seconds_mean": 5.25,
    "tokens_per_second": 512.0,
    "tokens_per_second_mean": 498.5,
    "staleness": 1,
    "staleness_mean": 0.25,
    "is_greylisted": False,
    "standing": "counted",
    "audits_passed": 4.5,
    "doubt": 0.0,
    "harm": 0.0,
    "muted": 0,
    "strikes": 0,
    "observed": {"malformed": 1},
    "heard_seconds": 2.5,
    "rounds_lately": 50,
    "taken_lately": 48,
    "is_elsewhere": False,
    "reasons": [],
}


def a_round(number: int) -> dict[str, Any]:
    return {
        "branch": "ab" * 32,
        "round": number,
        "applied_at": 1.7e9 + number,
        "root": f"{number:02x}" * 32,
        "manifest": "99" * 32,
        "contributors": [ME, OTHER],
        "mine_taken": [number],
        "views": 1,
        "train_seconds": 1.0,
        "collect_seconds": 0.25,
        "agree_seconds": 0.125,
        "apply_seconds": 0.5,
        "bytes_sent": 1_000,
        "bytes_received": 2_000,
        **LEARNING,
        "swarm_tokens": 1_024,
        "swarm_tokens_so_far": 1_024 * number,
        "tokens_so_far": 512 * number,
        "staleness_mean": 0.5,
        "loss": 2.5,
        "steps": 10,
        "own_drift": 0.02,
        "tokens": 512,
        "tokens_per_second": 512.0,
        "late": 0,
        "refused": {},
        "seconds": 1.875,
    }


def a_status(told: dict[str, Any]) -> Status:
    told = {name: value for name, value in told.items() if name not in Status.model_computed_fields}
    return Status(**told | {"mine": {name: value for name, value in told["mine"].items() if name != "share"}})


def a_record(told: dict[str, Any]) -> RoundRecord:
    """Makes a record from a round's JSON; keys are made up for invented peer ids."""
    keys = dict(zip((ME, OTHER), KEYS, strict=True))
    digests = {name: bytes.fromhex(told[name]) for name in ("branch", "root", "manifest")}
    contributors = tuple(keys.get(each, digest("a name", each.encode())) for each in told["contributors"])
    return RoundRecord(
        **{name: each for name, each in told.items() if name not in RoundRecord.model_computed_fields}
        | digests
        | {"contributors": contributors}
    )


class NamedPeer(Peer):
    """A peer with any id."""

    name: str = Field(exclude=True)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def peer_id(self) -> str:
        return self.name


def a_peer(told: dict[str, Any]) -> Peer:
    return NamedPeer(
        **{name: each for name, each in told.items() if name != "peer_id"}, peer=KEYS[1], name=told["peer_id"]
    )


class GivenFacts:
    """The facts of a node: those given, or none while it is starting."""

    def __init__(self) -> None:
        self.is_starting = False
        self.reasons: list[str] = []
        self.now = deepcopy(STATUS)
        self.known = [deepcopy(PEER)]
        self.lived = [a_round(number) for number in range(1, 8)]
        self.said: list[LogLine] = []

    def status(self) -> Status | None:
        return None if self.is_starting else a_status(self.now)

    def peers(self) -> PeerList | None:
        known = [a_peer(each) for each in self.known]
        return None if self.is_starting else looked_at(known, a_peer({**PEER, "peer_id": ME}))

    def rounds(self, last: int) -> list[RoundRecord] | None:
        return None if self.is_starting else [a_record(each) for each in self.lived[-last:]]

    def complaints(self) -> list[str]:
        return self.reasons

    def lines(self) -> list[LogLine]:
        return self.said


class Site:
    """A test's server, with a client."""

    def __init__(self, told: GivenFacts, app: App, server: HttpListener, port: int, address: str = "127.0.0.1") -> None:
        self.told, self.app, self.server, self.port = told, app, server, port
        self.url = f"http://{address}:{port}"
        self._writers: list[asyncio.StreamWriter] = []

    async def get(self, path: str, method: str = "GET", **more: Any) -> tuple[int, Any, bytes]:
        """Status, headers and body."""
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(SECONDS)) as session,
            session.request(method, self.url + path, allow_redirects=False, **more) as response,
        ):
            return response.status, response.headers, await response.read()

    async def json(self, path: str, **more: Any) -> Any:
        status, headers, body = await self.get(path, **more)
        assert (status, headers["Content-Type"]) == (200, "application/json; charset=utf-8"), body
        return json.loads(body)

    async def refused(self, path: str, **more: Any) -> tuple[int, str]:
        """Returns status and reason; checks that a refusal says nothing else."""
        status, headers, body = await self.get(path, **more)
        assert headers["Content-Type"] == "application/json; charset=utf-8"
        error = json.loads(body)
        assert error.keys() == {"version", "error", "fix"}
        return status, error["error"]

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self._writers.append(writer)
        return reader, writer

    async def raw(self, request: bytes) -> bytes:
        """Sends bytes and returns everything that comes back."""
        reader, writer = await self.connect()
        writer.write(request)
        return await until_closed(reader)

    def hang_up(self) -> None:
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    async def raw_status(self, request: bytes) -> int:
        return status_in(await self.raw(request))


def status_in(answer: bytes) -> int:
    """Returns the status code of a raw response; 0 if there is none."""
    return int(answer.split(b" ", 2)[1]) if answer else 0


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    found = bytearray()
    try:
        async with asyncio.timeout(SECONDS):
            while part := await reader.read(65_536):
                found += part
    except ConnectionError:
        pass
    return bytes(found)


@asynccontextmanager
async def site(
    host: str = "127.0.0.1",
    allowed: tuple[str, ...] = (),
    token: bytes = b"",
    assets: Path = ASSETS,
    address: str = "127.0.0.1",
) -> AsyncIterator[Site]:
    """Runs a server; `host` is the configured one, `address` the one it listens on."""
    listener = socket.socket()
    listener.setblocking(False)
    listener.bind((address, 0))
    port = listener.getsockname()[1]
    told = GivenFacts()
    app = App(cast(HttpFace, told), Guard(host, port, allowed, token), "1.2.3", assets)
    server = HttpListener(app.application)
    await server.start(listener)
    here = Site(told, app, server, port, address)
    try:
        yield here
    finally:
        here.hang_up()
        await server.close()


async def until(holds: Any) -> None:
    async with asyncio.timeout(SECONDS):
        while not holds():  # noqa: ASYNC110  # what happens has no event of its own
            await asyncio.sleep(0)


def on_both_loops(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs a test on asyncio's and uvloop's loops, which handle connections differently; the daemon prefers uvloop."""

    @functools.wraps(test)
    def run(loop_name: str, *args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=LOOPS[loop_name]) as runner:
            runner.run(test(*args, **kwargs))

    del run.__wrapped__
    mine = inspect.Parameter("loop_name", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    run.__signature__ = inspect.Signature([mine, *inspect.signature(test).parameters.values()])
    return pytest.mark.parametrize("loop_name", LOOPS)(run)
