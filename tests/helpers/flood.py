"""Strangers that flood a topic with junk, in a process of their own (benchmarks/strangers.py)."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from p2ptrain.core.messages import Ballot, Vote, encode, signed_bytes
from p2ptrain.identity import Identity

ROOT = Path(__file__).parent.parent.parent


def junk_vote(run_id: bytes) -> bytes:
    """Returns the vote of a throw-away key with a valid signature, which costs the most to decode."""
    stranger = Identity(os.urandom(32))
    vote = Vote(run_id, 1, 0, Ballot.PREVOTE, os.urandom(32), stranger.key)
    return encode(vote, stranger.sign(signed_bytes(run_id, vote)))


class Flooders:
    """The process with the strangers, ready to flood."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    @asynccontextmanager
    async def ready(
        cls, address: str, topic: str, *, seconds: float, rate: float, strangers: int = 1
    ) -> AsyncIterator[Flooders]:
        arguments = [address, topic, str(seconds), str(rate), str(strangers)]
        program, environment = str(ROOT / "benchmarks" / "strangers.py"), {**os.environ, "PYTHONPATH": str(ROOT)}
        process = await asyncio.create_subprocess_exec(
            sys.executable, program, *arguments, env=environment,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            assert process.stdout is not None and await process.stdout.readline() == b"ready\n"
            yield cls(process)
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()

    async def flood(self) -> int:
        """Floods, and returns how many messages the strangers' p2pd took."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(b"\n")
        return int(await self._process.stdout.readline())
