"""Measures what an address costs: told by a stranger, up to its place among the known peers, and in a person's config.

    python benchmarks/addresses.py

Each told address is a new one, as strangers can make them. The least of a hundred turns of twenty.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from random import Random
from time import perf_counter
from types import SimpleNamespace

from p2ptrain.config import NetworkConfig
from p2ptrain.identity import peer_id_of
from p2ptrain.net.connections import Connections

TURNS, AT_ONCE = 100, 20
ME, TELLER = bytes(32), bytes(range(32))


def end() -> str:
    return f"/p2p/{peer_id_of(os.urandom(32))}"


def place(number: int) -> str:
    return f"/ip4/{number % 100 + 1}.{os.urandom(1)[0]}.{os.urandom(1)[0]}.7/tcp/{4_001 + number}"


# By kind: a new address, or a text that looks like one.
TOLD: dict[str, Callable[[int], str]] = {
    "IPv4": lambda number: place(number) + end(),
    "IPv6": lambda number: f"/ip6/2001:db8::{os.urandom(2).hex().lstrip('0') or '1'}/tcp/{4_001 + number}{end()}",
    "relayed": lambda number: f"{place(number)}{end()}/p2p-circuit{end()}",
    "a long name": lambda number: f"/dns4/{'a.' * 126}a/tcp/{number + 1}{end()}",
    "a socket": lambda number: f"/unix{place(number)}{end()}",
    "a wrong id": lambda number: f"{place(number)}/p2p/{'z' * 64}",
    "a wrong number": lambda number: f"/ip4/1.2.3.{256 + number}/tcp/1{end()}",
    "a wrong port": lambda number: f"{place(number)}9999{end()}",
    "440 letters": lambda number: "x" * 440,
}


def least(kind: str, take: Callable[[str], object]) -> float:
    """Returns the microseconds that one such address takes."""
    seconds = []
    for _ in range(TURNS):
        texts = [TOLD[kind](number) for number in range(AT_ONCE)]
        began = perf_counter()
        for each in texts:
            take(each)
        seconds.append(perf_counter() - began)
    return 1e6 * min(seconds) / AT_ONCE


def main() -> None:
    connections = Connections(SimpleNamespace(me=ME), bytes(32), None, None, None, Random(1))  # type: ignore[arg-type]  # noqa: S311
    for kind in TOLD:
        print(f"told, {kind}: {least(kind, lambda each: connections._take_hint(each, TELLER)):.1f} us")
    for kind in ("IPv4", "IPv6", "relayed"):
        print(f"in a config, {kind}: {least(kind, lambda each: NetworkConfig(bootstrap=(each,))):.1f} us")


if __name__ == "__main__":
    main()
