"""A run's config from a stranger: nothing in it is imported, opened or run, whatever it says."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from p2ptrain.config import RunConfig
from p2ptrain.config.node import LimitsConfig, NodeConfig, StorageConfig
from p2ptrain.config.recipe import ROUND_SEQUENCES_MAX
from p2ptrain.config.text import to_toml
from p2ptrain.data.assignment import shard
from p2ptrain.data.dataset import TokenDataset, manifest_digest, store_manifest
from p2ptrain.digest import PIECE_BYTES, digest
from p2ptrain.errors import ConfigError, DataError, P2ptrainError, RemoteProtocolError, TooLargeError
from p2ptrain.node import limits
from p2ptrain.node.find import open_dataset
from p2ptrain.node.home import Home
from p2ptrain.train import memory
from p2ptrain.train.learner import EVALUATED_SEQUENCES
from p2ptrain.train.memory import need_of
from tests.helpers.large_sets import manifest_of
from tests.helpers.plugins import install
from tests.helpers.trainer import ONE_THREAD, TINY, Trainer, embedded

PROBE = "a_module_that_a_stranger_names"
TEXTS = (
    f"{PROBE}:Recipe",
    f"{PROBE}.Recipe",
    "p2ptrain.train.recipes:LocalRecipe",
    "os:system",
    "builtins:eval",
    "../../outside",
    "/outside",
    "~/outside",
    "file:///outside",
    "outside\x00.json",
    "$(touch outside)",
    "{0.__class__}",
    "%s%n",
    "\u202e\U0001f600",
    "00" * 32,
    "x" * 60_000,
    "1" * 60_000,
)
REACHES_OUT = ("exec", "import", "open", "os.", "socket.", "subprocess.", "ctypes.", "shutil.", "pickle.")


@dataclass
class WatchedAccess:
    """The files and modules that were reached for since the process began to be watched."""

    is_on: bool = False
    seen: list[str] = field(default_factory=list)

    def hear(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.is_on and event.startswith(REACHES_OUT):
            self.seen.append(f"{event} {arguments!r}"[:300])

    @contextmanager
    def watching(self) -> Iterator[list[str]]:
        self.seen, self.is_on = [], True
        try:
            yield self.seen
        finally:
            self.is_on = False


WATCHED = WatchedAccess()
sys.addaudithook(WATCHED.hear)  # it stays for the life of the process, and is off outside these tests


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    return embedded(tmp_path_factory.mktemp("data") / "set")


def sealed() -> dict[str, Any]:
    run = RunConfig.model_validate({"name": "x", "model": TINY, "recipe": {"sequences_per_pass": 4}})
    whole = run.sealed(manifest="ab" * 32, initial_root="cd" * 32, founders=["ef" * 32])
    encoded: dict[str, Any] = json.loads(whole.canonical())
    return encoded


def texts_of(value: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yields the place of every text in a config, those in lists included."""
    if isinstance(value, str):
        yield path
    elif isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from texts_of(each, (*path, key))


def altered(raw: dict[str, Any], path: tuple[str | int, ...], value: object) -> bytes:
    changed = json.loads(json.dumps(raw))
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return json.dumps(changed, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def load_all(encoded: bytes, node: NodeConfig, dataset: TokenDataset) -> bool:
    """Does with a peer's config all that a joiner does before it trains. False if it is refused as it comes in."""
    try:
        run = RunConfig.from_canonical(encoded)
    except RemoteProtocolError as error:
        assert error.why.isascii() and error.why.isprintable()
        return False
    to_toml(run)
    need_of(run)
    if run.is_sealed:
        assert Home(node).of_run(digest("run id", encoded)).is_relative_to(node.storage.directory)
        open_dataset(Home(node).dataset(run.data.manifest), run.data.manifest)
    with suppress(P2ptrainError):  # of a tokenizer that the data was not made with
        Trainer(run, ONE_THREAD, dataset, initial=False)
    return True


def test_no_text_of_a_hostile_config_imports_opens_or_runs_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dataset: TokenDataset
) -> None:
    (tmp_path / f"{PROBE}.py").write_text("class Recipe: ...\n")
    (tmp_path / "outside").write_text("outside")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    node = NodeConfig(storage=StorageConfig(directory=str(tmp_path / "mine")))
    raw = sealed()
    assert load_all(altered(raw, ("seed",), 1), node, dataset), "and loads all that is loaded later"
    before, places, taken = {*sys.modules}, list(texts_of(raw)), 0
    assert len(places) > 15
    for path in places:
        for text in TEXTS:
            with WATCHED.watching() as seen:
                taken += load_all(altered(raw, path, text), node, dataset)
            mine = os.fspath(tmp_path / "mine")
            assert [each for each in seen if mine not in each] == [], f"{path} = {text[:80]!r}"
    assert {*sys.modules} == before
    assert taken >= 5, "some texts are digests or names"


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("model", {"kind": "plugin", "plugin": "a-plugin 1.0", "settings": {"a": f"{PROBE}:Recipe"}}),
        ("recipe", {"plugin": "a-plugin 1.0", "settings": {"a": "1"}}),
    ],
)
def test_a_plugin_that_is_installed_but_not_allowed_is_not_looked_for(
    section: str, values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dataset: TokenDataset
) -> None:
    (tmp_path / f"{PROBE}.py").write_text("class Recipe: ...\n")
    install(tmp_path, "a-plugin 1.0", {"p2ptrain.models": f"{PROBE}:Recipe", "p2ptrain.recipes": f"{PROBE}:Recipe"})
    monkeypatch.syspath_prepend(str(tmp_path))
    run, shapes = RunConfig.model_validate({"name": "theirs", section: values}), "ab" * 32 if section == "model" else ""
    theirs = run.sealed(manifest="ab" * 32, initial_root="cd" * 32, founders=["ef" * 32], shapes=shapes)
    with WATCHED.watching() as seen:
        taken = RunConfig.from_canonical(theirs.canonical())
        with pytest.raises(ConfigError, match=r"^(model|recipe)\.plugin: .* a-plugin 1\.0, which is not allowed"):
            need_of(taken)
        with pytest.raises(ConfigError):
            Trainer(taken, ONE_THREAD, dataset, initial=False)
    assert [each for each in seen if f"'{PROBE}" in each or "dist-info" in each] == []
    assert PROBE not in sys.modules


NUMBERS = (0, -1, 1, 2**16, 2**20, 2**24, 2**31, 2**40, 2**53, 2**63, 2**64, 10**1_000)
NEED_SECONDS = 0.5  # for one config of 1,024 layers; building them took 2 s, and 2**24 positions 4 s


def numbers_of(value: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yields the place of every whole number and every fraction in a config."""
    if isinstance(value, int) or (isinstance(value, str) and value.replace("/", "").isdigit() and len(value) < 64):
        yield path
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from numbers_of(each, (*path, key))


@pytest.mark.usefixtures("no_collection")
def test_no_number_of_a_hostile_config_costs_anything_before_it_is_judged() -> None:
    raw, taken, longest = sealed(), 0, 0.0
    places = list(numbers_of(raw))
    assert len(places) > 40
    for path in places:
        for number in NUMBERS:
            is_text = isinstance(raw[path[0]], dict) and isinstance(raw[path[0]][path[-1]], str)
            before = time.process_time()
            try:
                run = RunConfig.from_canonical(altered(raw, path, str(number) if is_text else number))
            except RemoteProtocolError:
                continue
            finally:
                longest = max(longest, time.process_time() - before)
            before = time.process_time()
            need_of(run)
            longest = max(longest, time.process_time() - before)
            taken += 1
    assert taken > 100
    assert longest < NEED_SECONDS


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Python collects no garbage: among a million objects of other tests that takes a second."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def of_sizes(**sections: dict[str, Any]) -> RunConfig:
    run = RunConfig.model_validate({"name": "large", **sections})
    return run.sealed(manifest="ab" * 32, initial_root="cd" * 32, founders=["ef" * 32])


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (of_sizes(recipe={"sequences_per_pass": 65_536}), r"GB of main memory .* Set device\.sequences_per_pass = \d"),
        (
            of_sizes(model={"sequence_length": 2**20, "layers": 64}),
            "GB even with one sequence per pass, but there are only",
        ),
        (
            of_sizes(model={"layers": 1_024, "dim": 1_024}, recipe={"sequences_per_pass": 65_536}),
            "GB even with one sequence per pass, but there are only",
        ),
        (
            of_sizes(model={"layers": 1_024, "dim": 4_096, "ffn_dim": 2**14}, recipe={"k": 32}),
            "GB even with one sequence per pass",
        ),
        (
            of_sizes(
                recipe={"name": "distro", "passes_per_step": 2**16, "sequences_per_pass": 16},
                model={"sequence_length": 65_536},
            ),
            "GB",
        ),
        (
            of_sizes(agreement={"history_rounds": 65_536}, model={"preset": "30m"}),
            r"^limits\.disk_bytes: .* 65536 rounds",
        ),
    ],
)
@pytest.mark.usefixtures("no_collection")
def test_a_run_that_this_machine_cannot_hold_is_refused_in_a_line(
    run: RunConfig, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "memory_bytes", lambda: 32 * 10**9)
    monkeypatch.setattr(limits.shutil, "disk_usage", lambda path: SimpleNamespace(free=100 * 10**9))
    said = {"half_state": False, "checkpointing": False, "sequences_per_pass": 65_536}  # by the owner
    device = ONE_THREAD.model_copy(update=said if "Set device" in why else {})
    node = NodeConfig(storage=StorageConfig(directory=str(tmp_path)), device=device)
    before = time.process_time()
    with pytest.raises((TooLargeError, ConfigError), match=why) as caught:
        limits.refuse_too_large(run, Home(node))
    assert time.process_time() - before < 2 * NEED_SECONDS
    assert "\n" not in str(caught.value)
    assert [*tmp_path.iterdir()] == []


def test_a_run_is_refused_only_if_the_data_of_one_round_do_not_fit_the_disk_beside_it(tmp_path: Path) -> None:
    names = [f"{number:064x}" for number in range(100_000)]
    encoded, run = manifest_of(names), of_sizes(recipe={"local_steps": 2})
    data = store_manifest(tmp_path / "data", encoded, manifest_digest(encoded))
    least = data.fetched_bytes_min(run.recipe.round_sequences, EVALUATED_SEQUENCES, run.model.sequence_length)
    assert run.recipe.round_sequences < least / PIECE_BYTES < 1.5 * run.recipe.round_sequences

    def allowed(disk_bytes: int) -> NodeConfig:
        storage = StorageConfig(directory=str(tmp_path))
        return NodeConfig(storage=storage, limits=LimitsConfig(disk_bytes=disk_bytes))

    needed = limits.disk_demand(run, Home(allowed(0)), need_of(run)).needed + len(encoded) + least
    limits.keep_data_within(run, Home(allowed(needed)), data)
    with pytest.raises(
        ConfigError,
        match=r"^limits\.disk_bytes: run large needs .* MB of data for a round\), and may have .*\. Make room, .*"
        r"or allow it with limits\.disk_bytes$",
    ):
        limits.keep_data_within(run, Home(allowed(needed - 1)), data)
    fetched = [bytes.fromhex(name) for name in names[: least // PIECE_BYTES]]
    assert data.need(np.arange(len(fetched)) * PIECE_BYTES // 256, 256) == fetched
    with pytest.raises(DataError, match="are needed at once"):
        data.need(np.arange(len(fetched) + 1) * PIECE_BYTES // 256, 256)


def test_the_places_of_the_largest_round_take_little() -> None:
    before = time.process_time()
    positions = shard(1, 7, 0, 1, ROUND_SEQUENCES_MAX, 2**40)
    assert len(positions) == ROUND_SEQUENCES_MAX
    assert time.process_time() - before < 2.0
