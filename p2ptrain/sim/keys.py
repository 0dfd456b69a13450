"""Keys and signatures for simulations: cheap, and strong enough among nodes of one process.

Ed25519 takes a hundred times as long. A signature here is the keyed BLAKE3 of what is signed; its key is derived from
the author's public key, so anyone can verify it by computing it again. A liar could forge it the same way, so it is
given its own signer and nothing else, and what it makes up without one does not verify."""

from __future__ import annotations

from functools import lru_cache

from blake3 import blake3

from p2ptrain.core.messages import SIGNATURE_BYTES
from p2ptrain.digest import digest

KEYS_MAX = 8_192  # signing keys remembered: twice those of the largest simulation


def node_key(seed: int, index: int) -> bytes:
    """Returns a node's public key, whose rank among all keys is random."""
    return digest("simulated key", seed.to_bytes(16, "little", signed=True), index.to_bytes(8, "little"))


@lru_cache(maxsize=KEYS_MAX)
def _signing_key(run_id: bytes, key: bytes) -> bytes:
    return digest("simulated signing key", run_id, key)


def sign_as(run_id: bytes, key: bytes, signed: bytes) -> bytes:
    return blake3(signed, key=_signing_key(run_id, key)).digest(SIGNATURE_BYTES)


class FakeSigner:
    checks = True  # tests switch it off to see that the checkers notice

    def __init__(self, run_id: bytes, key: bytes) -> None:
        self.run_id, self.key = run_id, key

    def sign(self, signed: bytes) -> bytes:
        return sign_as(self.run_id, self.key, signed)

    def __call__(self, key: bytes, signed: bytes, signature: bytes) -> bool:
        return not FakeSigner.checks or signature == sign_as(self.run_id, key, signed)
