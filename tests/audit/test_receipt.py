"""A receipt proves to a stranger what a key has contributed, and anything else in its place is refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from p2ptrain.audit.receipt import Receipt, check, decode_receipt, receipt_of
from p2ptrain.config import RunConfig
from p2ptrain.core.history import HISTORY_BYTES_MAX, Beginning, Entry
from p2ptrain.core.messages import Regroup, signed_bytes
from p2ptrain.core.wire import encode
from p2ptrain.errors import RemoteProtocolError
from p2ptrain.identity import Identity, peer_id_of
from p2ptrain.store.log import read_journal
from tests.helpers.audit import BY_KEY, FOUNDERS, IDENTITIES, KEPT, certified_of, compacted, entries_of, forged
from tests.helpers.cli import p2ptrain

ME, NEWCOMER, NOBODY = IDENTITIES[0].key, IDENTITIES[FOUNDERS].key, Identity(b"n" * 32)
Change = Callable[[Receipt, RunConfig], Any]


def made(directory: Path, run: RunConfig, key: bytes) -> Receipt:
    journal = read_journal(directory / "wal")
    assert journal is not None
    return receipt_of(run, None, journal, key)


@pytest.fixture(scope="module")
def sound(history: tuple[RunConfig, list[Path]]) -> Receipt:
    """The newcomer's receipt: its rounds, and the one that gave it a seat."""
    return made(history[1][0], history[0], NEWCOMER)


@pytest.fixture
def node(directory: Path) -> Path:
    """A node's data directory, on a machine without its daemon."""
    return directory.parents[1]


def refused(data: bytes | Receipt, *known: str) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        check(decode_receipt(data if isinstance(data, bytes) else encode(data)), *known)
    return caught.value.why


def rounds_of(directory: Path, key: bytes) -> list[int]:
    manifests = [entry.manifest for entry in entries_of(directory)]
    return [each.round for each in manifests if key in {taken.author for taken in each.taken}]


# ---------------------------------------------------------------------------------------------------
# What is right


@pytest.mark.parametrize("key", [ME, NEWCOMER], ids=["a founder", "a newcomer"])
def test_it_proves_exactly_what_the_manifests_took(history: tuple[RunConfig, list[Path]], key: bytes) -> None:
    run, directories = history
    for directory in directories:
        found = check(decode_receipt(encode(made(directory, run, key))), run.run_id)
        taken = {
            entry.manifest.round: (each, len(entry.manifest.taken))
            for entry in entries_of(directory)
            for each in entry.manifest.taken
            if each.author == key
        }
        assert found["rounds"] == [
            {
                "round": number,
                "payload": each.payload.hex(),
                "bytes": each.payload_bytes,
                "sequences": run.recipe.round_sequences,
                "share": 1 / beside,
            }
            for number, (each, beside) in taken.items()
        ]
        assert (found["peer"], found["run"]) == (peer_id_of(key), {"id": run.run_id, "name": run.name})
        assert found["signatures"] >= 3 * len(taken)
        last = certified_of(directory)[-1].state
        assert found["standing"] == f"counted, with a seat after round {last.round}"
        assert found["root"] == {"round": last.root_round, "root": last.root.hex()}
        assert (found["audits"], found["audits_passed"]) == (0, 0), "rounds are too small for audits"


def test_it_has_no_rounds_that_say_nothing_of_the_key(sound: Receipt, history: tuple[RunConfig, list[Path]]) -> None:
    names = [step.manifest.round for step in sound.steps if isinstance(step, Entry)]
    entries = entries_of(history[1][0])
    seated = seat_in(history[1][0]).manifest.round
    assert names == sorted({*rounds_of(history[1][0], NEWCOMER), seated, entries[-1].manifest.round})
    assert len(names) < len(entries)


def test_a_log_that_has_forgotten_rounds_still_proves_the_others(directory: Path, run: RunConfig) -> None:
    before, seated = rounds_of(directory, ME), seat_in(directory).manifest.round
    compacted(directory)
    found = check(made(directory, run, ME), run.run_id)
    assert [each["round"] for each in found["rounds"]] == [each for each in before if each in (seated, *before[-KEPT:])]


def seat_in(directory: Path) -> Entry:
    """Returns the round that changed the roster."""
    return next(entry for entry in entries_of(directory) if entry.manifest.seated)


# ---------------------------------------------------------------------------------------------------
# What somebody does who wants to deceive, or a disk that fails


def small(sound: Receipt) -> Receipt:
    """The same with two rounds of the key: the one that gave it a seat, and the last."""
    seated = next(at for at, step in enumerate(sound.steps) if isinstance(step, Entry) and step.manifest.seated)
    return replace(sound, steps=(sound.steps[seated], sound.steps[-1]))


def test_a_flipped_bit_in_any_byte_is_refused(sound: Receipt) -> None:
    data, rng = encode(small(sound)), Random(1)
    assert check(decode_receipt(data))
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << rng.randrange(8)
        assert refused(bytes(flipped)), at


@given(at=st.integers(min_value=0), bits=st.integers(min_value=1, max_value=255))
def test_other_bits_anywhere_in_a_long_one_are_refused(sound: Receipt, at: int, bits: int) -> None:
    data = bytearray(encode(sound))
    data[at % len(data)] ^= bits
    assert refused(bytes(data))


@given(end=st.integers(min_value=0), tail=st.binary(max_size=40))
def test_one_that_is_cut_off_or_goes_on_is_refused(sound: Receipt, end: int, tail: bytes) -> None:
    data = encode(sound)
    spoiled = data[: end % len(data)] + tail
    assert spoiled == data or refused(spoiled)
    assert not tail or refused(data + tail)


def _a_branch_of_its_own(receipt: Receipt, run: RunConfig) -> Receipt:
    """A member goes on alone, and certifies for itself whatever it likes."""
    me, last = BY_KEY[receipt.key], receipt.steps[-1]
    assert isinstance(last, Entry)
    state = receipt.state.after(last.manifest, run)
    said = Regroup(state.branch, state.head, 0, (me.key,), me.key)
    signature = me.sign(signed_bytes(run.id, said))
    begun = Beginning(state.branch, state.round, state.head, 0, (me.key,), (me.key,), (signature,))
    alone = state.regrouped(begun.branch, begun.members)
    manifest = replace(
        last.manifest, branch=alone.branch, round=alone.round + 1, parent=alone.head, state=alone.digest, absent=b"",
        taken=tuple([replace(each, round=alone.round + 1) for each in last.manifest.taken]),
    )  # fmt: skip
    return replace(receipt, steps=(*receipt.steps, begun, forged(run, alone, manifest)), state=alone)


def _an_unnamed_state(receipt: Receipt, run: RunConfig) -> Receipt:
    """Most members go on, and no round of theirs names the agreed state."""
    state, members = replace(receipt.state, bans=(NOBODY.key,)), receipt.state.members
    said = [Regroup(state.branch, state.head, 0, members, key) for key in members]
    signatures = tuple([BY_KEY[each.author].sign(signed_bytes(run.id, each)) for each in said])
    begun = Beginning(state.branch, state.round, state.head, 0, members, members, signatures)
    return replace(receipt, steps=(*receipt.steps[:-1], begun), state=state)


def _of_too_few(receipt: Receipt, run: RunConfig) -> Receipt:
    last = receipt.steps[-1]
    assert isinstance(last, Entry)
    return replace(receipt, steps=(*receipt.steps[:-1], forged(run, receipt.state, last.manifest, signers=2)))


def _with_a_foreign_round(receipt: Receipt, run: RunConfig) -> Receipt:
    """A certified round that says nothing of the key makes a receipt longer, and nothing else."""
    last, state = receipt.steps[-1], receipt.state
    assert isinstance(last, Entry)
    others, mine = (
        tuple([each for each in last.manifest.taken if (each.author == receipt.key) == is_mine])
        for is_mine in (False, True)
    )
    between = replace(last.manifest, taken=others)
    after = state.after(between, run)
    manifest = replace(last.manifest, round=after.round + 1, parent=after.head, state=after.digest, taken=mine)
    steps = (*receipt.steps[:-1], forged(run, state, between), forged(run, after, manifest))
    return replace(receipt, steps=steps, state=after)


def _with(change: Callable[[Any], Any]) -> Change:
    return lambda receipt, run: replace(receipt, steps=tuple(change([*receipt.steps])))


def _without_the_seat(steps: list[Any]) -> list[Any]:
    return [step for step in steps if not step.manifest.changes_roster]


def _more_work(steps: list[Any]) -> list[Any]:
    manifest = steps[0].manifest
    taken = tuple([replace(each, payload_bytes=each.payload_bytes + 1) for each in manifest.taken])
    return [Entry(replace(manifest, taken=taken), steps[0].certificate), *steps[1:]]


LIES: dict[str, tuple[Change, str]] = {
    "a round twice": (_with(lambda steps: [steps[0], *steps]), "do not follow one another"),
    "the last round twice": (_with(lambda steps: [*steps, steps[-1]]), "do not lead to the base"),
    "rounds in another order": (
        _with(lambda steps: [*steps[:2], steps[3], steps[2], *steps[4:]]), "do not follow one another",
    ),
    "a certificate by too few": (_of_too_few, "the certificate has 2 signatures; the quorum is 4"),
    "another round's certificate": (
        _with(lambda steps: [Entry(steps[0].manifest, steps[1].certificate), *steps[1:]]), "for another manifest",
    ),
    "more work than was certified": (_with(_more_work), "the certificate is for another manifest"),
    # Without it the seats are those of others, or do not exist: it depends on who has signed.
    "a change of the roster left out": (_with(_without_the_seat), "the certificate "),
    "a manifest that does not name the key": (_with_a_foreign_round, "rounds that neither name the key"),
    "somebody else's key": (lambda receipt, run: replace(receipt, key=NOBODY.key), "rounds that neither name the key"),
    "a branch of the few": (_a_branch_of_its_own, "it rests on a branch of the few"),
    "a state that no round names": (_an_unnamed_state, "or ends with none"),
    "another standing": (
        lambda receipt, run: replace(receipt, state=replace(receipt.state, bans=(NOBODY.key,))), "does not follow",
    ),
    "another config": (
        lambda receipt, run: replace(receipt, config=run.model_copy(update={"name": "other"}).canonical()),
        "do not follow one another",
    ),
    "no config": (lambda receipt, run: replace(receipt, config=b"{}"), ""),
    "a run that has not begun": (
        lambda receipt, run: replace(receipt, config=RunConfig.model_validate({"name": "x"}).canonical()),
        "never began",
    ),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_refused_with_its_reason(lie: str, sound: Receipt, run: RunConfig) -> None:
    change, why = LIES[lie]
    assert why in refused(change(sound, run))


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", b"\x91" * 100_000, b"\x96" + encode("p2ptrain receipt 1") + b"\x91" * 100_000, encode("p2ptrain")],
    ids=["nothing", "no msgpack", "endless nesting", "endless nesting inside", "a word"],
)
def test_what_is_no_receipt_is_refused(data: bytes) -> None:
    assert "a receipt" in refused(data)


# ---------------------------------------------------------------------------------------------------
# The commands


Capsys = pytest.CaptureFixture[str]


def test_a_stranger_verifies_what_a_node_has_written(
    node: Path, run: RunConfig, tmp_path: Path, capsys: Capsys
) -> None:
    path, peer = tmp_path / "mine.receipt", peer_id_of(NEWCOMER)
    status, out, error = p2ptrain(capsys, "receipt", peer, "--data-dir", node, "--out", path)
    assert (status, error) == (0, "")
    told = out.splitlines()
    assert told[-1] == str(path)
    shutil.rmtree(node / "runs")
    for known in ((), ("--run", run.run_id)):
        assert p2ptrain(capsys, "audit", "--receipt", path, *known) == (0, "\n".join(told[:-1]) + "\n", "")
    assert f"run        {run.name}, {run.run_id}: is it the one that you mean?" in told
    status, out, _ = p2ptrain(capsys, "audit", "--receipt", path, "--json")
    assert (status, json.loads(out)) == (0, check(decode_receipt(path.read_bytes())))
    status, out, error = p2ptrain(capsys, "audit", "--receipt", path, "--run", "ab" * 32)
    assert (status, out) == (1, "")
    assert error == f"{path}: it proves nothing: it is of run audited, {run.run_id}, and not of {'ab' * 32}\n"


def test_of_ten_gigabytes_only_the_size_is_read(tmp_path: Path, capsys: Capsys) -> None:
    path = tmp_path / "huge.receipt"
    path.touch()
    os.truncate(path, 10 * 2**30)
    status, out, error = p2ptrain(capsys, "audit", "--receipt", path)
    assert (status, out, error) == (1, "", f"{path}: 10,737,418,240 bytes; the limit is {HISTORY_BYTES_MAX:,}\n")


def test_what_is_no_receipt_or_cannot_be_made_is_a_line(node: Path, tmp_path: Path, capsys: Capsys) -> None:
    path, nobody = tmp_path / "a", peer_id_of(NOBODY.key)
    status, _, error = p2ptrain(capsys, "receipt", nobody, "--data-dir", node, "--out", path)
    assert (status, error) == (1, f"{path}: it proves nothing: none of its rounds took a contribution of the key\n")
    assert not path.exists()
    status, _, error = p2ptrain(capsys, "receipt", "nobody", "--data-dir", node)
    assert (status, "PEER: nobody is not the id of" in error) == (2, True)
    path.mkdir()
    (tmp_path / "empty").touch()
    for place, why in ((tmp_path / "empty", "it proves nothing: not a receipt"), (path, "not a regular file")):
        status, _, error = p2ptrain(capsys, "audit", "--receipt", place)
        assert (status, why in error) == (1, True), error
    status, _, error = p2ptrain(capsys, "audit", "--receipt", tmp_path / "none")
    assert (status, f"no such file: {tmp_path}/none" in error) == (2, True)
    status, _, error = p2ptrain(capsys, "audit")
    assert (status, "nothing to audit" in error) == (2, True)
