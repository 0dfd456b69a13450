"""Access control of the HTTP server: hosts, methods, the token and security headers.

Any web page can make a browser call 127.0.0.1, and can read the answer if its own domain is made to resolve there (DNS
rebinding; Jackson et al. 2007). So a request must name one of our hosts. Beyond loopback it also needs the owner's
token: in a header or, for the dashboard, in a cookie set by `/?token=...`. The cookie is derived from the token,
because a browser sends it to whatever else listens on this host. The server is read-only and never sends the CORS
headers that would let other sites read the answers; what else a browser asks for another site is refused, since it
takes connections, except to open the dashboard by a link. Browsers tell (Origin; Fetch Metadata, W3C)."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import re
import stat
from collections.abc import Iterable
from functools import partial
from http import HTTPStatus
from pathlib import Path

from aiohttp import web

from p2ptrain.errors import ConfigError
from p2ptrain.observe.schema import Error

METHODS = ("GET", "HEAD")
OPEN = ("/healthz", "/readyz")  # without a token, for supervisors; they only learn whether all is well
COOKIE = "p2ptrain-{}"  # the port: browsers send cookies to all ports of a host
TOKEN_BYTES_MIN, TOKEN_BYTES_MAX = 16, 1_024  # shorter ones could be guessed
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
OWN_SITES = ("none", "same-origin")  # Sec-Fetch-Site of an address that was typed, and of our page
HTTP_PORT = 80  # the default if the Host header has none
# On loading, plotly adds one stylesheet, for maps, which are not used: allowed, so that browsers report no violation.
STYLE_HASH = "'sha256-ji27qzEtxXZW+7dun6UwjHXJ18e6WAin1VvNtkzIE/o='"

HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; script-src 'self'; style-src 'self' {STYLE_HASH}; img-src 'self'; "
    "connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Server": "p2ptrain",
}

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[0-9A-Za-z._-]{1,253})(?::([0-9]{1,5}))?", re.ASCII)


def secured(response: web.StreamResponse) -> web.StreamResponse:
    """Adds the headers that every response has, and closes the connection after it (http.py)."""
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
    response.force_close()
    return response


def refusal(status: HTTPStatus, why: str, fix: str = "", headers: dict[str, str] | None = None) -> web.Response:
    """An error response. `why` must not contain anything from the request."""
    text = Error(error=why, fix=fix).model_dump_json()
    response = web.Response(status=status, text=text, content_type="application/json", headers=headers)
    secured(response)
    return response


def read_token(path: Path) -> bytes:
    """Reads the token from a file; only the owner may have access to it, or a service whose credential it is."""
    fix = f"Make one: (umask 077; head -c 32 /dev/urandom | base64 > {path})"
    refused = partial(ConfigError, source=str(path), key="http.token_file")
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY), "rb") as file:
            found = os.fstat(file.fileno())  # of what is read, whatever the path is by now
            content = file.read(TOKEN_BYTES_MAX + 2) if stat.S_ISREG(found.st_mode) else b""
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise refused(f"cannot be read: {reason}", fix=fix) from error
    if found.st_uid not in (0, os.geteuid()):
        raise refused("belongs to another user", fix=fix)
    # systemd lets a service read its credentials by a list, whose mask stands where the group's mode does (acl(5)).
    is_credential = str(path.parent) == os.environ.get("CREDENTIALS_DIRECTORY")
    if (mode := stat.S_IMODE(found.st_mode)) & (0o037 if is_credential else 0o077):
        raise refused(f"other users can read it (mode {mode:04o})", fix=f"chmod 600 {path}")
    token = content.strip()
    if not TOKEN_BYTES_MIN <= len(token) <= TOKEN_BYTES_MAX or not re.fullmatch(rb"[!-~]+", token):
        problem = f"a token must be {TOKEN_BYTES_MIN} to {TOKEN_BYTES_MAX} ASCII characters, without spaces"
        raise refused(problem, fix=fix)
    return token


class Guard:
    """Decides which requests a server answers."""

    def __init__(self, host: str, port: int, allowed: Iterable[str] = (), token: bytes = b"") -> None:
        self._port, self._cookie_name = port, COOKIE.format(port)
        self._hosts = {f"{name}:{port}" for name in (*LOOPBACK, bracketed(host).lower())}
        self._hosts |= {each.lower() for each in allowed}  # one without a port is allowed with any
        self._token = token
        self._cookie = hmac.digest(token, b"p2ptrain dashboard", hashlib.sha256).hex().encode() if token else b""

    def refuse(self, request: web.Request) -> web.Response | None:
        if not request.raw_path.startswith("/"):
            return refusal(HTTPStatus.BAD_REQUEST, "this is not a proxy: request a path")
        if (foreign := self._refuse_foreign(request)) is not None:
            return foreign
        if request.method not in METHODS:
            fix = "Use commands such as `p2ptrain pause` to control a node"
            return refusal(HTTPStatus.METHOD_NOT_ALLOWED, "this is read-only", fix, {"Allow": ", ".join(METHODS)})
        if request.body_exists:
            return refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "a request must not have a body")
        if not self.may_read(request) and request.path not in OPEN:
            fix = "Send `Authorization: Bearer TOKEN`, or open /?token=TOKEN once in a browser"
            return refusal(HTTPStatus.UNAUTHORIZED, "the node's token is required", fix, {"WWW-Authenticate": "Bearer"})
        return None

    def _refuse_foreign(self, request: web.Request) -> web.Response | None:
        """Returns the refusal of a request for another host, or of another page."""
        if not self._is_ours(request):
            fix = "If this name is meant for the node, add it to http.allowed_hosts in its config"
            return refusal(HTTPStatus.MISDIRECTED_REQUEST, "unknown host", fix)
        if self._is_of_another_site(request):
            fix = "Open the node's own page: type its address, or use a program without a browser"
            return refusal(HTTPStatus.FORBIDDEN, "this request is another web page's", fix)
        return None

    def _is_ours(self, request: web.Request) -> bool:
        named = request.headers.getall("Host", [])
        parsed = _HOST.fullmatch(named[0]) if len(named) == 1 else None
        if parsed is None:
            return False
        name, port = parsed[1].lower(), int(parsed[2] or HTTP_PORT)
        if {name, f"{name}:{port}"} & self._hosts:
            return True
        sockname = request.transport.get_extra_info("sockname") if request.transport else None
        # A literal address cannot be rebound, so the address that the client connected to is allowed.
        return sockname is not None and (name, port) == (bracketed(sockname[0]), self._port)

    def _is_of_another_site(self, request: web.Request) -> bool:
        """Whether a browser asks on behalf of a page that is not ours; other programs send neither header."""
        host = request.headers["Host"].lower()
        origins = request.headers.getall("Origin", [])
        if any(origin.lower() not in (f"http://{host}", f"https://{host}") for origin in origins):
            return True
        sites = request.headers.getall("Sec-Fetch-Site", [])
        return any(site.lower() not in OWN_SITES for site in sites) and not _is_followed_link(request)

    def may_read(self, request: web.Request) -> bool:
        """True if the request has the token, or none is required."""
        if not self._token:
            return True
        kind, _, given = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() == "bearer" and _is_same(given.strip(), self._token):
            return True
        return _is_same(request.cookies.get(self._cookie_name, ""), self._cookie)

    def admit(self, request: web.Request) -> web.Response | None:
        """Answers /?token=... with a cookie and a redirect to a URL without the token; None for other requests."""
        given = request.query.get("token", "").replace(" ", "+")  # a space in a query; tokens have none
        if not (self._token and request.path == "/" and _is_same(given, self._token)):
            return None
        response = web.Response(status=HTTPStatus.SEE_OTHER, headers={"Location": "/"})
        response.set_cookie(self._cookie_name, self._cookie.decode(), httponly=True, samesite="Lax", path="/")
        return response


def _is_followed_link(request: web.Request) -> bool:
    """Whether the dashboard opens in a tab of its own, of which the page that has the link sees nothing."""
    found = request.headers.getall("Sec-Fetch-Mode", []), request.headers.getall("Sec-Fetch-Dest", [])
    return (request.method, request.path, *found) == ("GET", "/", ["navigate"], ["document"])


def _is_same(given: str, secret: bytes) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), secret)


def bracketed(host: str) -> str:
    """Formats an address for a URL: IPv6 in brackets."""
    try:
        return f"[{host}]" if ipaddress.ip_address(host).version == 6 else host
    except ValueError:
        return host
