"""Payloads on a slow disk: storing one in memory does not wait for it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from p2ptrain.core.messages import payload_digest
from p2ptrain.store import payloads as payloads_module
from p2ptrain.store.payloads import PayloadStore
from tests.helpers.net import some_bytes


def test_a_payload_is_held_while_others_are_on_their_way_to_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    payloads, bodies = PayloadStore(tmp_path), [some_bytes(100, seed) for seed in (1, 2)]
    names = [payload_digest(body) for body in bodies]
    is_writing, may_end, real = threading.Event(), threading.Event(), payloads_module.replace_file

    def slow(path: Path, content: bytes) -> None:
        is_writing.set()
        assert may_end.wait(30)
        real(path, content)

    monkeypatch.setattr(payloads_module, "replace_file", slow)
    payloads.put(names[0], bodies[0])
    writing = threading.Thread(target=payloads.keep, args=([names[0]],))
    writing.start()
    assert is_writing.wait(30)
    holding = threading.Thread(target=payloads.put, args=(names[1], bodies[1]))  # as the event loop does
    holding.start()
    holding.join(10)
    was_waiting = holding.is_alive()
    may_end.set()
    for thread in (writing, holding):
        thread.join(30)
    assert not was_waiting
    assert [payloads.get(name) for name in names] == bodies
