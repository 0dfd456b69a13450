"""Serves the chart library, a large JavaScript file from the plotly package.

For the sake of slow tunnels, it is sent compressed to browsers that accept that: 1.5 MB instead of 4.8 MB. It is
compressed once, in a thread, when it is first requested.
"""

from __future__ import annotations

import asyncio
import gzip
from hashlib import sha256
from http import HTTPStatus
from importlib.util import find_spec
from pathlib import Path

from aiohttp import web

NAME = "plotly.min.js"
KIND = "text/javascript; charset=utf-8"
LEVEL = 6  # of gzip: higher ones take three times as long to save another 2 %
# On loading, the library adds one stylesheet to the page, for maps, which are not used. The policy allows exactly this
# text, so that the browser reports no violation.
STYLE_HASH = "'sha256-ji27qzEtxXZW+7dun6UwjHXJ18e6WAin1VvNtkzIE/o='"


def path_of() -> Path | None:
    """Returns the path of the library, or None. The Python package itself is not imported: it is not needed."""
    spec = find_spec("plotly")
    places = spec.submodule_search_locations if spec is not None else None
    found = Path(places[0]) / "package_data" / NAME if places else None
    return found if found is not None and found.is_file() else None


def tagged(request: web.Request, body: bytes, tag: str, headers: dict[str, str]) -> web.Response:
    """A response with an ETag; 304 if the client already has these bytes."""
    headers = headers | {"ETag": f'"{tag}"'}
    if any(each.value in (tag, "*") for each in request.if_none_match or ()):
        return web.Response(status=HTTPStatus.NOT_MODIFIED, headers=headers)
    return web.Response(body=body, headers=headers)


class PlotlyAsset:
    """The chart library as a response, compressed if the client accepts it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tag = ""
        self._packed: asyncio.Task[bytes] | None = None

    async def answer(self, request: web.Request) -> web.StreamResponse:
        headers = {"Content-Type": KIND, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
        taken = request.headers.get("Accept-Encoding", "").lower()
        if "gzip" not in taken or "Range" in request.headers:
            return web.FileResponse(self.path, headers=headers)
        if self._packed is None:
            self._packed = asyncio.create_task(asyncio.to_thread(self._pack), name="the charts' library")
        body = await asyncio.shield(self._packed)
        return tagged(request, body, self._tag, headers | {"Content-Encoding": "gzip"})

    def _pack(self) -> bytes:
        content = self.path.read_bytes()
        self._tag = sha256(content).hexdigest()[:32]
        return gzip.compress(content, LEVEL, mtime=0)
