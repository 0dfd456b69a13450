"""Helpers for tests of the store: records of simulated nodes, and a disk that loses power.

`Power` stands between the store and the system. It counts what changes anything, cuts the power before a chosen
change (in the middle of it, if it is a write), and then says what the disk would hold: of each directory the names,
and of each file the content, that were synced last, or what came after, as chance has it. Nothing that was not synced
is promised, and nothing that was is lost. Instead of a power cut the chosen change may fail, once.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import pytest

from p2ptrain.config import RunConfig
from p2ptrain.core import events as ev
from p2ptrain.core.history import Entry
from p2ptrain.core.journal import Journal
from p2ptrain.core.state import AgreedState
from p2ptrain.sim.cluster import Cluster
from p2ptrain.sim.outcome import simulate
from p2ptrain.sim.scenario import load_scenario
from p2ptrain.store.log import read_own
from p2ptrain.store.store import Store
from tests.helpers.core import KEYS

FOLDER = Path(__file__).parents[2] / "scenarios"
ME = b"m" * 32
KEPT = 6  # rounds of history: few, so that they go


@lru_cache(maxsize=8)
def lives(name: str, seed: int = 1) -> tuple[AgreedState, int, list[list[ev.Record]]]:
    """Returns the state before the first round, the rounds, and the records of each disk of a scenario."""
    disks: dict[int, tuple[Any, list[ev.Record]]] = {}
    clusters = []

    def listen(cluster: Cluster) -> None:
        write = cluster.executor.write
        clusters.append(cluster)

        def heard(node: Any, records: Any) -> None:
            disks.setdefault(id(node.disk), (node.disk, []))[1].extend(records)  # a disk that is held keeps its id
            write(node, records)

        cluster.executor.write = heard  # type: ignore[method-assign]

    simulate(load_scenario(FOLDER / f"{name}.toml"), seed, (), listen)
    [cluster] = clusters
    kept = cluster.setup.run_config.agreement.history_rounds
    return cluster.setup.genesis, kept, [records for _, records in disks.values()]


def some_records(count: int = 40) -> tuple[AgreedState, list[ev.Record]]:
    """Returns a node's first records, and some rare ones."""
    base, _, disks = lives("leaves")
    records = disks[0][:count]
    entries = [record.step for record in records if isinstance(record, ev.Certified) and type(record.step) is Entry]
    rare = [ev.Silence(b"b" * 32, 7), ev.Observed(b"scores"), ev.Halted(entries[0], entries[1])]
    return base, records[:-10] + rare + records[-10:]


def folded(base: AgreedState, records: list[ev.Record], kept: int = KEPT, staleness: int = 0) -> Journal:
    journal = Journal(base, kept, staleness)
    for record in records:
        journal.write(record, read_own(record.envelope) if isinstance(record, ev.Said) else None)
    return journal


class PowerCut(BaseException):
    """The power is cut: no error handler may run after it."""


class Power:
    """A fake power supply that tracks all changes in a directory."""

    def __init__(self, root: Path, cut_at: int, rng: Random, fails: bool = False) -> None:
        if sys.platform != "linux":
            pytest.skip("asks Linux for the path of a descriptor")
        self.root, self.cut_at, self.rng = root, cut_at, rng
        self.trouble = OSError(errno.EIO, "the disk fails once") if fails else PowerCut()
        self.changes = 0
        self.is_off = False  # for good
        self.inside: set[int] = set()  # descriptors
        self.names: dict[int, dict[str, int]] = {}  # of a directory, by its inode: what was synced
        self.contents: dict[int, bytes] = {}
        self.unsyncable: set[int] = set()  # files of which a sync has failed: what it has dropped, no other writes
        self.held: dict[int, int] = {}  # by inode: a descriptor, so that its number is not used again
        self.real: dict[str, Callable[..., Any]] = {}
        for path in (root, *root.rglob("*")):  # what is there already
            self._sync(path)

    def _sync(self, place: Path | int) -> None:
        path = place if isinstance(place, Path) else Path(f"/proc/self/fd/{place}")
        inode = path.stat().st_ino
        if path.is_dir():
            self.names[inode] = {each.name: each.inode() for each in os.scandir(path)}
        else:
            self.contents[inode] = path.read_bytes()

    def _hold(self, path: Any, dir_fd: int | None = None) -> None:
        try:
            descriptor = self.real["open"](path, os.O_RDONLY, dir_fd=dir_fd)
        except FileNotFoundError:
            return
        self.held[os.fstat(descriptor).st_ino] = descriptor

    def _change(self) -> bool:
        """Counts a change. Returns whether the power is cut now."""
        if self.is_off:
            raise PowerCut
        self.changes += 1
        is_now = self.changes - 1 == self.cut_at
        self.is_off = is_now and isinstance(self.trouble, PowerCut)
        return is_now

    def _is_inside(self, path: Any, dir_fd: int | None = None) -> bool:
        return dir_fd in self.inside or (not isinstance(path, int) and str(path).startswith(str(self.root)))

    def hooks(self) -> dict[str, Callable[..., Any]]:
        def open_(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            inside = self._is_inside(path, dir_fd)
            if inside and flags & (os.O_CREAT | os.O_TRUNC) and self._change():
                raise self.trouble
            descriptor: int = self.real["open"](path, flags, mode, dir_fd=dir_fd)
            if inside:
                self.inside.add(descriptor)
            return descriptor

        def close(descriptor: int) -> None:
            self.inside.discard(descriptor)
            self.real["close"](descriptor)

        def write(descriptor: int, content: Any) -> int:
            if descriptor in self.inside and self._change():
                self.real["write"](descriptor, memoryview(content)[: self.rng.randint(0, len(content))])
                raise self.trouble
            written: int = self.real["write"](descriptor, content)
            return written

        def fsync(descriptor: int) -> None:  # no real one: what counts is in `names` and `contents`
            inode = os.fstat(descriptor).st_ino
            if self._change():
                self.unsyncable.add(inode)
                raise self.trouble
            if inode not in self.unsyncable or inode in self.names:
                self._sync(descriptor)

        def changing(name: str, removes: bool) -> Callable[..., Any]:
            def change(path: Any, *arguments: Any, **options: Any) -> Any:
                dir_fd = options.get("dir_fd")
                if self._is_inside(path, dir_fd) or path in self.inside:
                    if self._change():
                        raise self.trouble
                    if removes:
                        self._hold(path, dir_fd)
                    if arguments and name == "replace":
                        self._hold(arguments[0])
                return self.real[name](path, *arguments, **options)

            return change

        kinds = {"ftruncate": False, "mkdir": False, "rename": False, "replace": False, "unlink": True, "rmdir": True}
        plain = {"open": open_, "close": close, "write": write, "fsync": fsync}
        return plain | {name: changing(name, removes) for name, removes in kinds.items()}

    @contextmanager
    def on(self) -> Iterator[None]:
        """Runs until the power is cut, or to the end."""
        hooks = self.hooks()
        self.real = {name: getattr(os, name) for name in hooks}
        with pytest.MonkeyPatch.context() as patch:
            for name, hook in hooks.items():
                patch.setattr(os, name, hook)
            try:
                yield
            except PowerCut:
                assert self.is_off

    def disk_after(self, target: Path) -> None:
        """Restores the directory as it is after the power cut."""
        now = {path.stat().st_ino: path for path in (self.root, *self.root.rglob("*"))}
        self._restore(self.root.stat().st_ino, target, now)
        self.close()

    def close(self) -> None:
        for descriptor in self.held.values():
            os.close(descriptor)

    def _restore(self, inode: int, target: Path, now: dict[int, Path]) -> None:
        target.mkdir()
        synced = self.names.get(inode, {})
        path = now.get(inode)
        present = {each.name: each.inode() for each in os.scandir(path)} if path is not None else {}
        for name in sorted({*synced, *present}):
            found = synced.get(name), present.get(name)
            child = found[0] if found[0] == found[1] else self.rng.choice(found)
            if child is None:
                continue
            where = now.get(child)
            if child in self.names or (where is not None and where.is_dir()):
                self._restore(child, target / name, now)
            else:
                (target / name).write_bytes(self._content(child, where))

    def _content(self, inode: int, where: Path | None) -> bytes:
        synced = self.contents.get(inode, b"")
        if where is None and inode not in self.held:  # sqlite removes its files by itself, and ours were never synced
            return synced
        place = where if where is not None else Path(f"/proc/self/fd/{self.held[inode]}")
        latest = place.read_bytes()
        if not latest.startswith(synced):
            return self.rng.choice((synced, latest))
        return latest[: self.rng.choice((len(synced), self.rng.randint(len(synced), len(latest)), len(latest)))]


def named_run(name: str = "x") -> RunConfig:
    return RunConfig.model_validate({"name": name}).sealed(
        manifest="1" * 64, initial_root="2" * 64, founders=[KEYS[0].hex()]
    )


def void(_: object) -> None:
    """Discards a lambda's result, for mypy."""


def opened(root: Path, run: RunConfig | None = None, me: bytes = ME) -> Store:
    return Store(root / "run", run or named_run(), some_records()[0], me, root / "identity.key")
