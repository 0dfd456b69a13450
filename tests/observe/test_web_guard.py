"""Access control over HTTP: hosts, methods, bodies and the token."""

from __future__ import annotations

import http.cookies
import json
import os
from pathlib import Path

import pytest

from p2ptrain.errors import ConfigError
from p2ptrain.observe.guard import COOKIE, TOKEN_BYTES_MAX, read_token
from tests.helpers.web import Site, site

TOKEN = b"correct-horse-battery-staple"
ALL = ("/", "/assets/x.js", "/status", "/peers", "/rounds", "/log", "/metrics", "/nowhere")


def request(host: str | None, target: str = "/status", method: str = "GET", more: str = "") -> bytes:
    line = "" if host is None else f"Host: {host}\r\n"
    return f"{method} {target} HTTP/1.1\r\n{line}{more}\r\n".encode()


# ---------------------------------------------------------------------------------------------------
# Hosts


async def test_a_request_names_a_host_of_ours_with_our_port() -> None:
    async with site(host="node.example.org", allowed=("proxy.example.org", "[2001:db8::1]:9000", "Other:81")) as here:
        port = here.port
        for host in (
            f"127.0.0.1:{port}", f"localhost:{port}", f"LOCALHOST:{port}", f"[::1]:{port}", f"node.example.org:{port}",
            "proxy.example.org", "proxy.example.org:443", f"proxy.example.org:{port}", "[2001:db8::1]:9000", "other:81",
        ):  # fmt: skip
            assert await here.raw_status(request(host)) == 200, host


@pytest.mark.parametrize(
    "host",
    [
        None, "", " ", "evil.example:{port}", "localhost", "localhost:1", "127.0.0.1", "localhost.evil.example:{port}",
        "localhost:{port}.evil.example", "evil.example/localhost:{port}", "evil@localhost:{port}", "localhost.:{port}",
        "127.0.0.2:{port}", "2130706433:{port}", "0x7f.1:{port}", "0:{port}", "0.0.0.0:{port}", "[::]:{port}",
        "[::ffff:127.0.0.1]:{port}", "::1:{port}", "localhost:{port}0", "localhost:0{port}1", "localhost:",
        "loc\xe9:{port}",
        "localhost:{port}, evil.example", "localhost:{port}\r\nHost: localhost:{port}",
        "localhost:{port}\r\nHost: evil.example", "other:82", "a" * 300 + ":{port}",
    ],
)  # fmt: skip
async def test_a_request_that_names_another_host_is_refused(host: str | None) -> None:
    async with site(allowed=("other:81",)) as here:
        named = None if host is None else host.format(port=here.port)
        answer = await here.raw(request(named))
        assert answer.split(b" ")[1] in (b"421", b"400"), answer
        assert b"run_id" not in answer
        assert b"evil" not in answer, "nothing of the request is in the answer"


async def test_the_address_that_was_called_is_a_host_of_ours_and_another_of_this_machine_is_not() -> None:
    async with site(host="0.0.0.0") as here:
        assert await here.raw_status(request(f"127.0.0.1:{here.port}")) == 200
        assert await here.raw_status(request(f"0.0.0.0:{here.port}")) == 200  # configured
        assert await here.raw_status(request(f"127.0.0.9:{here.port}")) == 421


@pytest.mark.parametrize(
    "target",
    [
        "http://127.0.0.1:{port}/status",
        "http://evil.example/status",
        "HTTP://x/",
        "*",
        "status",
        "evil.example:443",
        "?",
    ],
)
async def test_whoever_takes_it_for_a_proxy_is_refused(target: str) -> None:
    async with site() as here:
        for method in ("GET", "OPTIONS", "CONNECT"):
            line = request(f"127.0.0.1:{here.port}", target.format(port=here.port), method)
            assert await here.raw_status(line) == 400, (method, target)


# ---------------------------------------------------------------------------------------------------
# Methods and bodies


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND", "QUERY"])
async def test_nothing_but_reading_is_possible(method: str) -> None:
    async with site() as here:
        for path in ("/status", "/", "/nowhere"):
            status, headers, body = await here.get(path, method=method)
            assert (status, headers["Allow"]) == (405, "GET, HEAD")
            assert json.loads(body)["error"] == "this is read-only"


async def test_a_foreign_page_gets_no_leave_to_read() -> None:
    async with site() as here:
        asked = {"Origin": "https://evil.example", "Access-Control-Request-Method": "GET"}
        for method in ("GET", "OPTIONS"):
            _, headers, _ = await here.get("/status", method=method, headers=asked)
            assert [name for name in headers if name.lower().startswith("access-control")] == []
            assert headers["Cross-Origin-Resource-Policy"] == "same-origin"


@pytest.mark.parametrize(
    "more", ["Content-Length: 5\r\n\r\nhello", "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n"]
)
async def test_a_question_with_a_body_is_refused(more: str) -> None:
    async with site() as here:
        assert await here.raw_status(request(f"127.0.0.1:{here.port}", more=more)) == 413


# ---------------------------------------------------------------------------------------------------
# The token


async def shown(here: Site, path: str, headers: dict[str, str]) -> int:
    return (await here.get(path, headers=headers))[0]


async def test_without_its_token_a_node_tells_only_that_it_lives() -> None:
    async with site(token=TOKEN) as here:
        here.told.reasons = ["stalled: quorum lost"]
        for path in ALL:
            status, headers, body = await here.get(path)
            assert (status, headers["WWW-Authenticate"]) == (401, "Bearer"), path
            assert json.loads(body)["error"] == "the node's token is required"
        assert (await here.get("/healthz"))[0] == 200
        status, _, body = await here.get("/readyz")
        assert (status, json.loads(body)["reasons"]) == (503, [])


async def test_whoever_shows_the_token_reads() -> None:
    async with site(token=TOKEN) as here:
        here.told.reasons = ["stalled: quorum lost"]
        right = {"Authorization": f"Bearer {TOKEN.decode()}"}
        assert [await shown(here, path, right) for path in ("/status", "/metrics", "/")] == [200] * 3
        assert await shown(here, "/status", {"Authorization": f"bearer  {TOKEN.decode()} "}) == 200
        _, _, body = await here.get("/readyz", headers=right)
        assert json.loads(body)["reasons"] == here.told.reasons


@pytest.mark.parametrize(
    "wrong",
    ["", "Bearer", "Bearer ", "Bearer x", f"Basic {TOKEN.decode()}", TOKEN.decode(), f"Bearer {TOKEN.decode()}x",
     f"Bearer {TOKEN.decode()[:-1]}", f"Bearer {TOKEN.decode().upper()}", "Bearer \udcff", "Bearer \u0130"],
)  # fmt: skip
async def test_a_wrong_token_is_none(wrong: str) -> None:
    async with site(token=TOKEN) as here:
        line = f"Authorization: {wrong}\r\n".encode("utf-8", "surrogateescape")
        host = f"Host: 127.0.0.1:{here.port}\r\n".encode()
        assert await here.raw_status(b"GET /status HTTP/1.1\r\n" + host + line + b"\r\n") in (400, 401)


async def test_a_browser_gets_a_cookie_for_the_token_and_an_address_without_it() -> None:
    async with site(token=TOKEN) as here:
        status, headers, body = await here.get("/", params={"token": TOKEN.decode()})
        assert (status, headers["Location"], body) == (303, "/", b"")
        cookie = http.cookies.SimpleCookie(headers["Set-Cookie"])[name := COOKIE.format(here.port)]
        assert (cookie["httponly"], cookie["samesite"], cookie["path"], cookie["domain"]) == (True, "Lax", "/", "")
        assert TOKEN.decode() not in headers["Set-Cookie"], "other servers of this host see it too"
        for path in ("/", "/status", "/rounds"):
            assert await shown(here, path, {"Cookie": f"{name}={cookie.value}"}) == 200
        for wrong in (TOKEN.decode(), cookie.value[:-1], ""):
            assert await shown(here, "/status", {"Cookie": f"{name}={wrong}"}) == 401
        assert await shown(here, "/status", {"Authorization": f"Bearer {cookie.value}"}) == 401
        for path, given in (("/", "wrong"), ("/", ""), ("/status", TOKEN.decode()), ("/log", TOKEN.decode())):
            status, headers, _ = await here.get(path, params={"token": given})
            assert (status, "Set-Cookie" in headers) == (401, False)


async def test_a_token_is_typed_as_it_stands_in_its_file() -> None:
    """A browser does not encode base64's special characters in a URL."""
    typed = "/?token=Zm9v+mJh/iYX++cXV4Zm9vYmFyYmF6cXV4Zm9vYmE="
    async with site(token=typed.removeprefix("/?token=").encode()) as here:
        for target in (
            typed,
            typed.replace("+", "%2B").replace("/i", "%2Fi").replace("=", "%3D").replace("%3D", "=", 1),
        ):
            assert await here.raw_status(request(f"127.0.0.1:{here.port}", target)) == 303, target
        for wrong in (typed.replace("+", "-"), typed.replace("+", ""), typed.replace("/i", "+i")):
            assert await here.raw_status(request(f"127.0.0.1:{here.port}", wrong)) == 401, wrong


async def test_a_token_in_the_address_of_another_host_sets_no_cookie() -> None:
    async with site(token=TOKEN) as here:
        answer = await here.raw(request("evil.example", f"/?token={TOKEN.decode()}"))
        assert (answer.split(b" ")[1], b"Set-Cookie" in answer) == (b"421", False)


async def test_where_no_token_is_asked_for_none_is_looked_at() -> None:
    async with site() as here:
        assert await shown(here, "/", {}) == 200
        assert (await here.get("/", params={"token": ""}))[0] == 200
        assert (
            await shown(here, "/status", {"Authorization": "Bearer x", "Cookie": f"{COOKIE.format(here.port)}="}) == 200
        )


async def test_the_cookies_of_two_tokens_differ_and_one_page_leaves_those_of_another_port() -> None:
    told = dict[str, str]()
    async with site(token=TOKEN) as here, site(token=TOKEN + b"x") as there:
        for each, token in ((here, TOKEN), (there, TOKEN + b"x")):
            _, headers, _ = await each.get("/", params={"token": token.decode()})
            told |= {name: one.value for name, one in http.cookies.SimpleCookie(headers["Set-Cookie"]).items()}
        jar = "; ".join(f"{name}={value}" for name, value in told.items())  # a browser's, which knows no ports
        assert len({*told.values()}) == 2
        assert [await shown(each, "/status", {"Cookie": jar}) for each in (here, there)] == [200, 200]


# ---------------------------------------------------------------------------------------------------
# The token's file


def test_a_token_is_read_from_a_file_of_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_bytes(b" " + TOKEN + b"\n")
    for mode in (0o600, 0o400):
        path.chmod(mode)
        assert read_token(path) == TOKEN
    for mode in (0o640, 0o604, 0o660, 0o620, 0o601):
        path.chmod(mode)
        with pytest.raises(ConfigError, match=rf"token_file: other users can read it \(mode {mode:04o}\)\. chmod 600 "):
            read_token(path)


def test_a_token_that_systemd_passes_may_be_read_by_the_group_that_stands_for_its_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A credential is root's, and the service reads it by an access list, whose mask stands for the group's mode."""
    path, elsewhere = tmp_path / "credentials/token", tmp_path / "token"
    path.parent.mkdir()
    for each in (path, elsewhere):
        each.write_bytes(TOKEN)
        each.chmod(0o440)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(path.parent))
    assert read_token(path) == TOKEN
    with pytest.raises(ConfigError, match=r"other users can read it \(mode 0440\)"):
        read_token(elsewhere)
    for mode in (0o444, 0o460, 0o450):
        path.chmod(mode)
        with pytest.raises(ConfigError, match=rf"other users can read it \(mode {mode:04o}\)"):
            read_token(path)


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"x" * 15, b"two words, sixteen", b"\xff" * 32, b"x" * (TOKEN_BYTES_MAX + 1), b"x" * 10**6]
)
def test_a_file_without_a_token_is_told_with_the_way_to_make_one(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"http\.token_file: a token must be 16 to 1024 ASCII .* Make one: .*base64"):
        read_token(path)


def test_the_file_that_is_read_is_the_one_that_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, private = tmp_path / "token", os.stat_result([0o100600, *tmp_path.stat()[1:]])
    path.write_bytes(TOKEN)
    path.chmod(0o644)
    monkeypatch.setattr(Path, "stat", lambda path: private)  # another file has its name by now
    with pytest.raises(ConfigError, match=r"other users can read it \(mode 0644\)"):
        read_token(path)


def test_a_token_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, look = tmp_path / "token", os.fstat
    path.write_bytes(TOKEN)
    path.chmod(0o600)
    monkeypatch.setattr(os, "fstat", lambda file: os.stat_result([*look(file)[:4], 12_345, *look(file)[5:10]]))
    with pytest.raises(ConfigError, match=r"http\.token_file: belongs to another user\. Make one: "):
        read_token(path)


def test_a_pipe_is_no_token_file_and_nobody_waits_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "token", 0o600)
    with pytest.raises(ConfigError, match=r"http\.token_file: a token must be 16 to 1024 ASCII"):
        read_token(tmp_path / "token")


def test_a_token_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"http\.token_file: cannot be read: No such file or directory\. Make one:"):
        read_token(tmp_path / "none")
