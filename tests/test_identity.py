"""Identities: key files, ids, signatures, and a signer that remembers valid signatures."""

from __future__ import annotations

import itertools
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain import files, identity
from p2ptrain.errors import ConfigError
from p2ptrain.identity import Identity, PeerIdError, RunSigner, id_bytes_of, key_of, key_of_bytes, peer_id_of, verify

# RFC 8032, 7.1, test 2; the id is the one go-libp2p's p2pd reports for this key.
SEED = bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb")
KEY = bytes.fromhex("3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c")
SIGNATURE = bytes.fromhex(
    "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
    "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
)
PEER_ID = "12D3KooWDwTirQce1RRKnasT5fPVFgzXCy6SiRgSwrwPGLC7zE91"
FILE = bytes.fromhex("08011240") + SEED + KEY


def key_file(path: Path, content: bytes = FILE, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_known_key_has_its_known_id_and_signature(tmp_path: Path) -> None:
    loaded = Identity.load(key_file(tmp_path / "key"))
    assert (loaded.key, loaded.peer_id, loaded.sign(b"\x72")) == (KEY, PEER_ID, SIGNATURE)


def test_a_new_identity_is_a_file_that_only_we_can_read(tmp_path: Path) -> None:
    path = tmp_path / "a" / "identity.key"
    made = Identity.make(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert len(path.read_bytes()) == 68
    assert Identity.load(path).key == Identity.load_or_make(path).key == made.key
    assert Identity.make(tmp_path / "b").key != made.key


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    path = key_file(tmp_path / "key")
    with pytest.raises(ConfigError, match="already exists"):
        Identity.make(path)
    assert path.read_bytes() == FILE


def test_a_key_whose_directory_is_a_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"identity.file: .*file is no directory"):
        Identity.make(tmp_path / "file" / "node.key")


def test_half_a_key_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ConfigError, match="cannot be written: No space left"):
        Identity.make(tmp_path / "key")
    assert list(tmp_path.iterdir()) == []


class Killed(BaseException):
    """Stands for SIGKILL: nothing is cleaned up after it."""


def test_wherever_it_is_killed_a_key_is_whole_or_not_there(tmp_path: Path) -> None:
    """Killed before each line of the code that makes the file."""
    outcomes = set()
    for at in itertools.count():
        path, lines = tmp_path / f"{at}" / "key", itertools.count()

        def trace(frame: FrameType, event: str, _: object, lines: Iterator[int] = lines, at: int = at) -> Any:
            is_ours = frame.f_code.co_filename in (identity.__file__, files.__file__)
            if is_ours and event == "line" and next(lines) == at:
                sys.settrace(None)
                raise Killed
            return trace if is_ours else None

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            Identity.make(path)
            break
        except Killed:
            outcomes.add(path.exists())
        finally:
            sys.settrace(before)
        assert Identity.load_or_make(path).key == Identity.load(path).key
    assert outcomes == {False, True}


def test_of_two_that_make_a_key_at_once_one_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, made = tmp_path / "key", []

    def link(source: str, target: Path) -> None:
        monkeypatch.undo()
        made.append(Identity.make(path))
        os.link(source, target)

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(ConfigError, match="already exists"):
        Identity.make(path)
    assert Identity.load(path).key == made[0].key
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644, 0o777])
def test_a_key_that_others_can_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    path = key_file(tmp_path / "key", mode=mode)
    with pytest.raises(ConfigError, match=f"identity.file: others can read or change this.*chmod 600 {path}"):
        Identity.load(path)


@pytest.mark.parametrize(
    "content",
    [b"", FILE[:-1], FILE + b"\0", b"\x08\x00" + FILE[2:], FILE[:-1] + b"\0", SEED, FILE[:36] + SEED, b"\0" * 10_000],
)
def test_what_is_no_such_key_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ConfigError, match="is not an Ed25519 key in libp2p's format"):
        Identity.load(key_file(tmp_path / "key", content))


def test_a_missing_key_and_a_directory_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path}/none: identity.file: no such key file"):
        Identity.load(tmp_path / "none")
    with pytest.raises(ConfigError, match=f"{tmp_path}: identity.file: cannot be read: Is a directory"):
        Identity.load(tmp_path)


def test_errors_and_texts_do_not_show_the_private_key(tmp_path: Path) -> None:
    damaged = key_file(tmp_path / "key", FILE[:-1] + b"\0")
    with pytest.raises(ConfigError) as caught:
        Identity.load(damaged)
    shown = repr(caught.value) + repr(Identity(SEED)) + str(Identity(SEED))
    assert all(secret not in shown for secret in (SEED.hex(), repr(SEED), repr(SEED)[2:-1]))


@given(st.binary(min_size=32, max_size=32))
def test_an_id_holds_its_key(key: bytes) -> None:
    assert key_of(peer_id_of(key)) == key_of_bytes(id_bytes_of(key)) == key
    assert peer_id_of(key).startswith("12D3KooW")


@pytest.mark.parametrize(
    "text",
    [
        "", "1", "12D3KooW", "nonsense", PEER_ID[:-1], PEER_ID + "1", "1" + PEER_ID, PEER_ID + "\n", PEER_ID.lower(),
        "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", "1" * 64, "z" * 64, "z" * 100_000, "12D3KooŴ",
    ],
)  # fmt: skip
def test_what_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(PeerIdError):
        key_of(text)


@given(st.text(max_size=70))
def test_whatever_is_read_as_an_id_is_that_id(text: str) -> None:
    try:
        key = key_of(text)
    except PeerIdError:
        return
    assert peer_id_of(key) == text


def test_only_the_signature_of_these_bytes_by_this_key_verifies() -> None:
    assert verify(KEY, b"\x72", SIGNATURE)
    assert not verify(KEY, b"\x73", SIGNATURE)
    assert not verify(Identity(bytes(32)).key, b"\x72", SIGNATURE)
    for key, signature in [
        (KEY, b""),
        (KEY, SIGNATURE + b"\0"),
        (b"", SIGNATURE),
        (KEY + SIGNATURE[:1], SIGNATURE[1:]),
    ]:
        assert not verify(key, b"\x72", signature)


def test_a_signer_verifies_once_what_it_is_asked_often(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bytes] = []

    def counted(key: bytes, signed: bytes, signature: bytes) -> bool:
        calls.append(signed)
        return verify(key, signed, signature)

    monkeypatch.setattr(identity, "verify", counted)
    monkeypatch.setattr(identity, "VERIFIED_MAX", 2)
    signer = RunSigner(Identity(SEED), b"run")
    signatures = {text: signer.sign(text) for text in (b"a", b"b", b"c")}
    assert all(signer(KEY, text, signatures[text]) for text in (b"a", b"b", b"a", b"b"))
    assert calls == [b"a", b"b"]
    assert signer(KEY, b"c", signatures[b"c"]) and signer(KEY, b"a", signatures[b"a"])  # the oldest was forgotten
    assert calls == [b"a", b"b", b"c", b"a"]
    assert not signer(KEY, b"a", signatures[b"b"]) and not signer(KEY, b"a", signatures[b"b"])
    assert calls[4:] == [b"a", b"a"]  # invalid signatures are not remembered


def test_bytes_moved_between_key_and_signature_do_not_pass_as_verified() -> None:
    signer = RunSigner(Identity(SEED), b"run")
    signature = signer.sign(b"text")
    assert signer(KEY, b"text", signature)
    assert not signer(KEY[:-1], b"text", KEY[-1:] + signature)
    assert not signer(KEY, b"ext", signature + b"t")


@pytest.mark.parametrize("sign", [0x00, 0x80])
@pytest.mark.parametrize("key", sorted(identity.SMALL_ORDER), ids=bytes.hex)
def test_under_a_key_of_small_order_nothing_verifies(key: bytes, sign: int) -> None:
    """Its holder, or anyone, could show one signature for many messages."""
    weak, signature = key[:-1] + bytes([key[-1] | sign]), b"\1" + bytes(63)  # R is the neutral element, S is 0
    passed = 0
    for number in range(64):
        signed = number.to_bytes(4, "big")
        with suppress(InvalidSignature, ValueError):
            Ed25519PublicKey.from_public_bytes(weak).verify(signature, signed)
            passed += 1
        assert not verify(weak, signed, signature)
        assert not RunSigner(Identity(SEED), bytes(32))(weak, signed, signature)
    assert passed, "without the refusal it would verify"
