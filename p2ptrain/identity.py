"""A node's identity: an Ed25519 key pair, whose private key is a file on this machine.

The file has go-libp2p's format: a protobuf of the key's type (1, Ed25519) and 64 bytes, the seed and the public key.
The libp2p id of such a key is a prefix of six bytes and the key itself, in base58: 12D3KooW... So the id is enough to
verify its owner's signatures, and key and id can be computed from each other."""

from __future__ import annotations

import os
import stat
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from p2ptrain.digest import digest
from p2ptrain.errors import ConfigError, P2ptrainError
from p2ptrain.files import sync, write_all
from p2ptrain.system import fsync

KEY_BYTES = 32
SIGNATURE_BYTES = 64
PRIVATE_PREFIX = bytes.fromhex("08011240")  # field 1, varint 1: Ed25519; field 2, 64 bytes
ID_PREFIX = bytes.fromhex("002408011220")  # an identity multihash of 36 bytes: field 1, Ed25519; field 2, 32 bytes
IDS_KEPT = 4_096  # cached ids, one for each remembered peer; 1 MB
ID_TEXT_MAX = 64  # characters; an id has 52
BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"  # Bitcoin's
VALUES = {letter: value for value, letter in enumerate(BASE58)}
# The encodings, without the sign of x, of points whose eightfold is the neutral element: under such a key one signature
# verifies for any message (with "A" as in RFC 8032; libsodium refuses the same ones).
SMALL_ORDER = frozenset(
    bytes.fromhex(each)
    for each in (
        "00" * 32,
        "01" + "00" * 31,
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        *(first + "ff" * 30 + "7f" for first in ("ec", "ed", "ee")),
    )
)
VERIFIED_MAX = 65_536  # signatures that a signer remembers: 100 rounds of votes from 256 seats; 8 MB


class PeerIdError(P2ptrainError):
    """A text that is not a peer id. Only the caller knows who wrote it and is to blame."""


class Identity:
    """This node's key pair."""

    def __init__(self, seed: bytes) -> None:
        self._private = Ed25519PrivateKey.from_private_bytes(seed)
        self.key = self._private.public_key().public_bytes_raw()
        self.peer_id = peer_id_of(self.key)

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"

    @classmethod
    def make(cls, path: Path) -> Self:
        """Makes a new identity in a new file that only this user can read."""
        seed = os.urandom(KEY_BYTES)
        identity = cls(seed)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _write_new(path, PRIVATE_PREFIX + seed + identity.key)
        except FileExistsError as error:
            if not path.parent.is_dir():
                raise _problem(path, f"{path.parent} is no directory", "Choose another path") from error
            raise _problem(path, "already exists", "Use it, or choose another path for a new key") from error
        except OSError as error:
            raise _problem(path, f"cannot be written: {error.strerror}", "Choose another path") from error
        return identity

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads the identity from a file. ConfigError if it is missing, open to other users, or not a key."""
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                content = file.read(len(PRIVATE_PREFIX) + 2 * KEY_BYTES + 1) if stat.S_ISREG(status.st_mode) else b""
        except FileNotFoundError as error:
            raise _problem(path, "no such key file", "Name the right file, or let p2ptrain make a new one") from error
        except OSError as error:
            raise _problem(path, f"cannot be read: {error.strerror}", "Name a file that this user can read") from error
        if status.st_mode & 0o077:
            raise _problem(path, "others can read or change this private key", f"chmod 600 {path}")
        seed, key = content[len(PRIVATE_PREFIX) : -KEY_BYTES], content[-KEY_BYTES:]
        if not content.startswith(PRIVATE_PREFIX) or len(seed) != KEY_BYTES or (made := cls(seed)).key != key:
            fix = "Name a key that p2ptrain made, or remove the file to get a new one"
            raise _problem(path, "is not an Ed25519 key in libp2p's format", fix)
        return made

    @classmethod
    def load_or_make(cls, path: Path) -> Self:
        return cls.load(path) if path.exists() else cls.make(path)

    def sign(self, signed: bytes) -> bytes:
        return self._private.sign(signed)


class RunVerifier:
    """Verifies signatures of one run, and remembers the valid ones."""

    def __init__(self, run_id: bytes) -> None:
        self.run_id = run_id
        self._verified: dict[bytes, None] = {}  # the oldest first

    def __call__(self, key: bytes, signed: bytes, signature: bytes) -> bool:
        if len(key) != KEY_BYTES or len(signature) != SIGNATURE_BYTES:
            return False  # a different split into parts would have the same digest
        name = digest("verified signature", key, signature, signed)
        if name in self._verified:
            return True
        if not verify(key, signed, signature):
            return False
        self._verified[name] = None
        if len(self._verified) > VERIFIED_MAX:
            del self._verified[next(iter(self._verified))]
        return True


class RunSigner(RunVerifier):
    """This node's signer for one run."""

    def __init__(self, identity: Identity, run_id: bytes) -> None:
        super().__init__(run_id)
        self._identity, self.key = identity, identity.key

    def sign(self, signed: bytes) -> bytes:
        return self._identity.sign(signed)


def verify(key: bytes, signed: bytes, signature: bytes) -> bool:
    if len(key) != KEY_BYTES or len(signature) != SIGNATURE_BYTES:
        return False
    if key[:-1] + bytes([key[-1] & 0x7F]) in SMALL_ORDER:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, signed)
    except InvalidSignature:
        return False
    return True


def id_bytes_of(key: bytes) -> bytes:
    """Returns a peer's id as bytes, as in libp2p's messages."""
    assert len(key) == KEY_BYTES
    return ID_PREFIX + key


def key_of_bytes(peer_id: bytes) -> bytes:
    """Returns the key in an id given as bytes. PeerIdError if it is not an Ed25519 key."""
    if not peer_id.startswith(ID_PREFIX) or len(peer_id) != len(ID_PREFIX) + KEY_BYTES:
        raise PeerIdError("not the id of an Ed25519 key")
    return peer_id[len(ID_PREFIX) :]


@lru_cache(IDS_KEPT)
def peer_id_of(key: bytes) -> str:
    return _base58(id_bytes_of(key))


def key_of(peer_id: str) -> bytes:
    """Returns the public key in a peer's id. PeerIdError if the text is not an id."""
    if not peer_id or len(peer_id) > ID_TEXT_MAX or peer_id.strip(BASE58):
        raise PeerIdError(f"{peer_id[:ID_TEXT_MAX]!r} is not a peer id, which looks like 12D3KooW...")
    try:
        key = key_of_bytes(_from_base58(peer_id))
    except PeerIdError as error:
        raise PeerIdError(f"{peer_id} is {error}, which begins with 12D3KooW") from error
    return key


def _base58(data: bytes) -> str:
    """Encodes in base 58, with a leading 1 for every leading zero byte."""
    number, text = int.from_bytes(data, "big"), ""
    while number:
        number, digit = divmod(number, len(BASE58))
        text = BASE58[digit] + text
    return BASE58[0] * (len(data) - len(data.lstrip(b"\0"))) + text


def _from_base58(text: str) -> bytes:
    number = 0
    for letter in text:
        number = number * len(BASE58) + VALUES[letter]
    zeros = len(text) - len(text.lstrip(BASE58[0]))
    return bytes(zeros) + number.to_bytes((number.bit_length() + 7) // 8, "big")


def _write_new(path: Path, content: bytes) -> None:
    """Writes a new file that survives a crash once this returns.

    It gets its name when it is complete: half a key would keep the node from ever starting again. A rename would
    overwrite a key that another process has made meanwhile; a link does not."""
    descriptor, partial = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)  # readable only by us
    try:
        try:
            write_all(descriptor, content)
            fsync(descriptor)
        finally:
            os.close(descriptor)
        os.link(partial, path)
    finally:
        Path(partial).unlink()
    sync(path.parent)


def _problem(path: Path, what: str, fix: str) -> ConfigError:
    return ConfigError(what, source=str(path), key="identity.file", fix=fix)
