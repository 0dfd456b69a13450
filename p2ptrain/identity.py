"""Who a node is: an Ed25519 key pair, its public half known to everyone, its private half a file of this machine.

The file is what go-libp2p reads: a protobuf of the key's type (1, Ed25519) and 64 bytes, the seed and the public key.
A libp2p id of such a key is the key itself, behind six bytes that say so, in base58: 12D3KooW... Whoever knows the id
can verify what its owner signs, and one follows from the other without asking anybody.
"""

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

KEY_BYTES = 32
SIGNATURE_BYTES = 64
PRIVATE_PREFIX = bytes.fromhex("08011240")  # field 1, varint 1: Ed25519; field 2, 64 bytes
ID_PREFIX = bytes.fromhex(
    "002408011220"
)  # a multihash of nothing but its 36 bytes: field 1, Ed25519; field 2, 32 bytes
IDS_KEPT = 4_096  # ids that are not worked out again: as many peers as are remembered; 1 MB
ID_TEXT_MAX = 64  # characters; an id has 52
BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"  # Bitcoin's
VERIFIED_MAX = 65_536  # signatures that a signer remembers: the votes of 100 rounds of 256 seats; 8 MB


class PeerIdError(P2ptrainError):
    """A text that is no peer's id. Who wrote it is to blame, and only the caller knows who that is."""


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
        """A new identity in a new file, which nobody else can read."""
        seed = os.urandom(KEY_BYTES)
        identity = cls(seed)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _write_new(path, PRIVATE_PREFIX + seed + identity.key)
        except FileExistsError as error:
            raise _problem(path, "there is a file already", "Use it, or choose another place for a new key") from error
        except OSError as error:
            raise _problem(path, f"cannot be written: {error.strerror}", "Choose a place that can be") from error
        return identity

    @classmethod
    def load(cls, path: Path) -> Self:
        """The identity in a file; ConfigError if it is not there, not ours alone, or not a key."""
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                content = file.read(len(PRIVATE_PREFIX) + 2 * KEY_BYTES + 1) if stat.S_ISREG(status.st_mode) else b""
        except FileNotFoundError as error:
            raise _problem(path, "there is no such key", "Name the right file, or let a new one be made") from error
        except OSError as error:
            raise _problem(path, f"cannot be read: {error.strerror}", "Name a file that this user may read") from error
        if status.st_mode & 0o077:
            raise _problem(path, "others can read or change this private key", f"chmod 600 {path}")
        seed, key = content[len(PRIVATE_PREFIX) : -KEY_BYTES], content[-KEY_BYTES:]
        if not content.startswith(PRIVATE_PREFIX) or len(seed) != KEY_BYTES or (made := cls(seed)).key != key:
            fix = "Name a key that this program has made, or remove the file and let a new one be made"
            raise _problem(path, "is not an Ed25519 key as libp2p keeps it", fix)
        return made

    @classmethod
    def load_or_make(cls, path: Path) -> Self:
        return cls.load(path) if path.exists() else cls.make(path)

    def sign(self, signed: bytes) -> bytes:
        return self._private.sign(signed)


class RunSigner:
    """Signs as this node for one run, and verifies anyone; what has verified once is remembered."""

    def __init__(self, identity: Identity, run_id: bytes) -> None:
        self._identity, self.run_id, self.key = identity, run_id, identity.key
        self._verified: dict[bytes, None] = {}  # the oldest first

    def sign(self, signed: bytes) -> bytes:
        return self._identity.sign(signed)

    def __call__(self, key: bytes, signed: bytes, signature: bytes) -> bool:
        if len(key) != KEY_BYTES or len(signature) != SIGNATURE_BYTES:
            return False  # or else other parts would have the same name
        name = digest("verified signature", key, signature, signed)
        if name in self._verified:
            return True
        if not verify(key, signed, signature):
            return False
        self._verified[name] = None
        if len(self._verified) > VERIFIED_MAX:
            del self._verified[next(iter(self._verified))]
        return True


def verify(key: bytes, signed: bytes, signature: bytes) -> bool:
    if len(key) != KEY_BYTES or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, signed)
    except InvalidSignature:
        return False
    return True


def id_bytes_of(key: bytes) -> bytes:
    """A peer's id as libp2p's messages carry it."""
    assert len(key) == KEY_BYTES
    return ID_PREFIX + key


def key_of_bytes(peer_id: bytes) -> bytes:
    """The key in an id as libp2p's messages carry it. PeerIdError for any but Ed25519."""
    if not peer_id.startswith(ID_PREFIX) or len(peer_id) != len(ID_PREFIX) + KEY_BYTES:
        raise PeerIdError("not the id of an Ed25519 key")
    return peer_id[len(ID_PREFIX) :]


@lru_cache(IDS_KEPT)
def peer_id_of(key: bytes) -> str:
    return _base58(id_bytes_of(key))


def key_of(peer_id: str) -> bytes:
    """The public key in a peer's id."""
    if not peer_id or len(peer_id) > ID_TEXT_MAX or any(letter not in BASE58 for letter in peer_id):
        raise PeerIdError(f"{peer_id[:ID_TEXT_MAX]!r} is not a peer's id, which looks like 12D3KooW...")
    try:
        key = key_of_bytes(_from_base58(peer_id))
    except PeerIdError as error:
        raise PeerIdError(f"{peer_id} is {error}, which begins with 12D3KooW") from error
    return key


def _base58(data: bytes) -> str:
    """Digits to base 58, and a 1 for every zero byte at the front."""
    number, text = int.from_bytes(data, "big"), ""
    while number:
        number, digit = divmod(number, len(BASE58))
        text = BASE58[digit] + text
    return BASE58[0] * (len(data) - len(data.lstrip(b"\0"))) + text


def _from_base58(text: str) -> bytes:
    number = 0
    for letter in text:
        number = number * len(BASE58) + BASE58.index(letter)
    zeros = len(text) - len(text.lstrip(BASE58[0]))
    return bytes(zeros) + number.to_bytes((number.bit_length() + 7) // 8, "big")


def _write_new(path: Path, content: bytes) -> None:
    """A file that is not there yet and, once this returns, survives a crash.

    It gets its name when it is whole: half a key would keep the node from ever starting again. A rename would put it in
    the place of a key that another process has made meanwhile; a link does not.
    """
    descriptor, partial = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)  # which only we can read
    try:
        try:
            write_all(descriptor, content)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.link(partial, path)
    finally:
        Path(partial).unlink()
    sync(path.parent)


def _problem(path: Path, what: str, fix: str) -> ConfigError:
    return ConfigError(what, source=str(path), key="identity.file", fix=fix)
