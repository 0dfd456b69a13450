"""`p2ptrain invite`: an invitation admits as many nodes as it has uses, and invalid ones are not created."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.config import RunConfig
from p2ptrain.core.admission import decode_invitation, make_claim, read_claim
from p2ptrain.daemon.assembly import Launch
from p2ptrain.errors import NoDaemonError
from p2ptrain.identity import PRIVATE_PREFIX, Identity, RunSigner
from tests.helpers import memory_swarm
from tests.helpers.cli import p2ptrain
from tests.helpers.memory_swarm import FOUNDERS, Member, MemorySwarm, swarm
from tests.helpers.net import skipping_time, until

JOINER = bytes(range(32))


def sealed(name: str = "closed", **admission: Any) -> RunConfig:
    raw = {"name": name, "admission": admission}
    return RunConfig.model_validate(raw).sealed(manifest="ab" * 32, initial_root="cd" * 32, founders=["ef" * 32])


class Inviter:
    """The data directory of a node that may invite."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.identity = Identity.make(directory / "identity.key")
        self.run = sealed(policy="invite", keys=[self.identity.key.hex()])
        self.run_id = self.run.id
        self.keep(self.run)

    def keep(self, run: RunConfig) -> None:
        path = self.directory / "runs" / run.run_id[:16] / "run.json"
        path.parent.mkdir(parents=True)
        path.write_bytes(run.canonical())

    def invite(self, capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
        return p2ptrain(capsys, "invite", "--data-dir", self.directory, *arguments)

    def read(self, text: str) -> Any:
        return read_claim(self.claim(text, JOINER), JOINER, self.run, RunSigner(self.identity, self.run_id))

    def claim(self, text: str, joiner: bytes) -> bytes:
        invitation = decode_invitation(text)
        return make_claim(invitation.ticket, Identity(invitation.seed).sign, self.run_id, joiner)


@pytest.fixture
def host(tmp_path: Path) -> Inviter:
    return Inviter(tmp_path / "host")


# ---------------------------------------------------------------------------------------------------
# What it makes


def test_an_invitation_is_signed_for_this_run_and_ends_with_its_last_round(
    host: Inviter, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = host.invite(capsys, "--last-round", "1000")
    ticket = host.read(out)
    assert (status, err, ticket.signer, ticket.last_round) == (0, "", host.identity.key, 1_000)
    assert out.count("\n") == 1


def test_each_has_a_bearer_of_its_own_and_as_many_uses_as_are_named(
    host: Inviter, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = [host.read(host.invite(capsys, "--last-round", "9", "--uses", str(n))[1]) for n in range(1, 5)]
    assert len({ticket.bearer for ticket in drawn}) == 4
    assert [ticket.uses for ticket in drawn] == [1, 2, 3, 4]
    assert host.read(host.invite(capsys, "--last-round", "9")[1]).uses == 1


def test_a_file_with_it_is_for_its_owner_alone_and_never_replaces_one(
    host: Inviter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "friend.ticket"
    before = os.umask(0)
    try:
        done = host.invite(capsys, "--last-round", "9", "--out", out)
    finally:
        os.umask(before)
    assert done == (0, f"an invitation of a node to closed, good up to round 9: {out}\n", "")
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    content = out.read_text()
    assert host.read(content).last_round == 9
    status, said, err = host.invite(capsys, "--last-round", "10", "--out", out)
    assert (status, said, out.read_text()) == (2, "", content)
    assert err == f"{out}: --out: cannot be created: File exists. Choose another name\n"


# ---------------------------------------------------------------------------------------------------
# What it refuses


def test_a_run_that_is_open_takes_none(host: Inviter, capsys: pytest.CaptureFixture[str]) -> None:
    host.keep(run := sealed("wide-open"))
    status, out, err = host.invite(capsys, "--last-round", "9", "--run", run.run_id)
    assert (status, out) == (2, "")
    assert err == (
        "admission.policy: run wide-open does not use invitations: its policy is open. "
        "A run's policy is chosen before it starts\n"
    )


def test_a_key_that_may_not_invite_is_told_so(host: Inviter, capsys: pytest.CaptureFixture[str]) -> None:
    host.keep(run := sealed("theirs", policy="invite", keys=["12" * 32]))
    status, out, err = host.invite(capsys, "--last-round", "9", "--run", run.run_id)
    assert (status, out) == (2, "")
    assert err == (
        f"admission.keys: this node's key {host.identity.key.hex()} may not issue invitations to run theirs. "
        "Create it on a node whose key is listed there\n"
    )


def test_there_is_none_without_a_run_or_a_last_round(
    host: Inviter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty"
    assert p2ptrain(capsys, "invite", "--data-dir", empty, "--last-round", "9")[0] == 2
    assert not empty.exists()
    for wrong in ([], ["--last-round", "0"], ["--last-round", "9", "--uses", "0"]):
        status, out, err = host.invite(capsys, *wrong)
        assert (status, out) == (2, "")
        assert err.endswith("Try: p2ptrain invite --help\n")


def test_what_no_member_would_accept_is_not_made(host: Inviter, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong, key in (
        (["--last-round", str(2**48)], "--last-round"),
        (["--last-round", "9", "--uses", "1025"], "--uses"),
    ):
        status, out, err = host.invite(capsys, *wrong)
        assert (status, out, err.startswith(f"{key}: ")) == (2, "", True)
    assert host.read(host.invite(capsys, "--last-round", str(2**48 - 1), "--uses", "1024")[1]).uses == 1_024


@pytest.mark.parametrize(
    ("last_round", "of_this_run", "status"), [(41, True, 2), (42, True, 0), (1, False, 0)], ids=["over", "now", "other"]
)
def test_a_round_that_is_over_is_refused_as_far_as_the_daemon_knows(
    last_round: int,
    of_this_run: bool,
    status: int,
    host: Inviter,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = {"run_id": host.run.run_id if of_this_run else "ab" * 32, "round": 42}
    monkeypatch.setattr("p2ptrain.cli.invite.ask", lambda *_: told)
    got, out, err = host.invite(capsys, "--last-round", str(last_round))
    assert (got, bool(out)) == (status, status == 0)
    assert err == ("" if got == 0 else "--last-round: round 41 is over: the run is in round 42. Choose a later one\n")


def test_a_daemon_that_does_not_answer_hinders_nothing(
    host: Inviter, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*_: Any) -> Any:
        raise NoDaemonError("none here")

    monkeypatch.setattr("p2ptrain.cli.invite.ask", ask)
    assert host.invite(capsys, "--last-round", "1")[0] == 0


# ---------------------------------------------------------------------------------------------------
# What it is good for


@skipping_time
async def test_a_swarm_admits_who_was_invited_and_nobody_who_overheard_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    claims: dict[bytes, bytes] = {}

    def launch(*arguments: Any, **more: Any) -> Launch:
        identity = arguments[2]
        return Launch(*arguments, **more, claim=claims.get(identity.key, b""))

    monkeypatch.setattr(memory_swarm, "Launch", launch)
    monkeypatch.setattr(MemorySwarm, "__init__", _closed(MemorySwarm.__init__))
    async with swarm(tmp_path) as made:
        host = made.nodes[0]
        await made.reach(4)
        seed = bytes([host.number + 1]) * 32
        key = host.directory / "identity.key"
        key.write_bytes(PRIVATE_PREFIX + seed + host.key)
        key.chmod(0o600)
        status, out, err = p2ptrain(
            capsys, "invite", "--data-dir", host.directory, "--last-round", "100000", "--uses", "2"
        )
        assert (status, err) == (0, "")
        invitation, run_id = decode_invitation(out), made.run.id
        *friends, thief, stranger = (Member(made, FOUNDERS + n) for n in range(4))
        for friend in friends:
            bearer = Identity(invitation.seed)
            claims[friend.key] = make_claim(invitation.ticket, bearer.sign, run_id, friend.key)
        claims[thief.key] = claims[friends[1].key]  # overheard
        for late in (thief, stranger, *friends):
            made.nodes.append(late)
            await late.start()
        await until(lambda: all(friend.key in host.members for friend in friends))
        await made.reach(made.newest + 10)
        assert host.status["admitted"] == FOUNDERS + 2
        for late in (thief, stranger):
            assert not late.status["is_admitted"]
            assert late.status["health"] == ["not admitted"]
        made.compare(14)


def _closed(make: Any) -> Any:
    """An invitation-only swarm whose first founder may invite."""

    def init(self: MemorySwarm, *arguments: Any, **more: Any) -> None:
        make(self, *arguments, **more)
        admission = self.run.admission.model_copy(update={"policy": "invite", "keys": (self.nodes[0].key.hex(),)})
        self.run = self.run.model_copy(update={"admission": admission})

    return init
