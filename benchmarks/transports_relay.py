"""A relay for iroh's endpoints, for transports.py: python benchmarks/transports_relay.py HOST PORT

iroh's own is a Rust program that no package registry has. This speaks its protocol over http, as far as a measurement
needs it, and believes the keys that its clients name.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

from aiohttp import web


async def serve(host: str, port: int) -> None:
    """Passes datagrams on between iroh's endpoints, as its own relay does, but believes their keys unproved."""
    sockets: dict[bytes, Any] = {}

    async def relay(request: Any) -> Any:
        socket = web.WebSocketResponse(protocols=("iroh-relay-v2", "iroh-relay-v1"), max_msg_size=2**20)
        await socket.prepare(request)
        await socket.send_bytes(b"\0" + os.urandom(16))
        key = (await socket.receive_bytes())[1:33]
        await socket.send_bytes(b"\2")
        sockets[key] = socket
        async for message in socket:
            kind, data = message.data[0], message.data
            if kind in (4, 5) and (there := sockets.get(data[1:33])) is not None:
                await there.send_bytes(bytes([kind + 2]) + key + data[33:])
            elif kind == 9:
                await socket.send_bytes(b"\12" + data[1:])
        return socket

    async def ping(request: Any) -> Any:
        return web.Response(text="ok")

    app = web.Application()
    app.add_routes([web.get("/relay", relay), web.get("/ping", ping), web.get("/", ping)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2])))
