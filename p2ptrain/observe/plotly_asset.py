"""The library that draws the dashboard's charts: one large file, which comes with the package plotly.

It is sent compressed to browsers that take that, for those who look at their node through a slow tunnel. It is
compressed once, when somebody asks for it, in a thread: 4.8 MB become 1.5 MB.
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
LEVEL = 6  # of gzip: more takes three times as long for two hundredths
# The one stylesheet that the library adds to a page by itself, on loading: for maps, of which there are none. The
# policy lets it through, so that nothing is reported that is no fault; what it lets through is this text alone.
STYLE_HASH = "'sha256-ji27qzEtxXZW+7dun6UwjHXJ18e6WAin1VvNtkzIE/o='"


def path_of() -> Path | None:
    """Where it is installed. The package is not imported: it is for drawing in Python."""
    spec = find_spec("plotly")
    places = spec.submodule_search_locations if spec is not None else None
    found = Path(places[0]) / "package_data" / NAME if places else None
    return found if found is not None and found.is_file() else None


def tagged(request: web.Request, body: bytes, tag: str, headers: dict[str, str]) -> web.Response:
    """With a name for just these bytes; nothing but that name for who has them."""
    headers = headers | {"ETag": f'"{tag}"'}
    if any(each.value in (tag, "*") for each in request.if_none_match or ()):
        return web.Response(status=HTTPStatus.NOT_MODIFIED, headers=headers)
    return web.Response(body=body, headers=headers)


class PlotlyAsset:
    """As it is sent."""

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
