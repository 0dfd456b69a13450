"""Any damage to a node's files is detected or harmless: the node never continues with other bits.

The node of tests/helpers/lone_node.py, killed in the middle of a run; one of its files is damaged, and it starts again.
It then ends with the bits of a run that was left alone, or says what is wrong, or waits for peers to give it what it
lost, which a node that is a swarm by itself has not got, and says for what. Without its diary, it may have other things
to tell: then the weights of the rounds that were agreed on are the same. And a state that an earlier life has begun to
fetch, damaged in the meantime: what is taken over is what was agreed on.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections import Counter
from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from p2ptrain.core import events as ev
from p2ptrain.daemon.assembly import TRUST_NAME
from p2ptrain.data.dataset import TokenDataset, manifest_digest
from p2ptrain.digest import PIECE_BYTES
from p2ptrain.errors import P2ptrainError
from p2ptrain.identity import PRIVATE_PREFIX, Identity
from p2ptrain.net import questions
from p2ptrain.net.blobs.blob import BlobName, FileSink
from p2ptrain.store.mismatches import Mismatches
from p2ptrain.store.records import RECORDS_NAME, Batch, Records
from tests.helpers.blobs import BlobNode, MemoryBlob
from tests.helpers.core import KEYS
from tests.helpers.driver import STATE_BYTES, a_dataset, bench, doing, root_of
from tests.helpers.lone_node import ME, ROUNDS, Bits, lived
from tests.helpers.net import SkippingLoop, some_bytes, until

KILLED_AFTER = 8  # rounds, the last checkpoint being of the sixth
SEED = bytes(31) + b"\1"  # of the node's key
HEAD = bytes(range(32))  # that it was told to trust once
STATE = some_bytes(STATE_BYTES, 8)  # to be taken over
TRIES = 3  # to fetch it
FROM_PEERS = {"wal", "payloads", "data"}  # what it lost of these, only peers can give it
ASKING = ("silent", "untrusted")  # how the health begins of who asks peers what it has said, and which history is ours
KINDS = {
    "wal",
    "payloads",
    "checkpoints",
    "diary.jsonl",
    "run.json",
    "identity",
    "events",
    "identity.key",
    "identity.key.spoken",
    "data",
    "trust",
    "mismatches",
    "records.sqlite",
    "records.sqlite-wal",
}


def damage(path: Path, others: list[Path], rng: Random) -> tuple[str, set[Path]]:
    """Damages a file. Returns how, and which one."""
    touched = {path}
    content = bytearray(path.read_bytes())
    kind = rng.choice(("flip", "cut", "swap", "zeros", "remove", "append"))
    if kind == "flip" and content:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(content))
    elif kind == "cut" and content:
        path.write_bytes(bytes(content[: rng.randrange(len(content))]))
    elif kind == "swap":
        other = rng.choice(others)
        touched.add(other)
        mine, theirs = bytes(content), other.read_bytes()
        path.write_bytes(theirs)
        other.write_bytes(mine)
    elif kind == "zeros" and content:
        start = rng.randrange(len(content))
        path.write_bytes(bytes(content[:start]) + bytes(len(content) - start))
    elif kind == "append":
        path.write_bytes(bytes(content) + rng.randbytes(rng.randrange(1, 100)))
    else:
        path.unlink()
        kind = "remove"
    return kind, touched


def lived_again(root: Path, manifest: str, rounds: int = ROUNDS) -> dict[int, Bits]:
    """Runs the node again with the key and the data in this directory."""
    me = Identity.load_or_make(root / "identity.key")
    return lived(root, TokenDataset.open(root / "data", manifest), rounds, me)


def killed(tmp_path: Path, dataset: TokenDataset, manifest: str) -> Path:
    """Makes the directory of a node killed in the middle of a run, with every kind of file."""
    living, sound = tmp_path / "living", tmp_path / "sound"
    shutil.copytree(dataset.directory, living / "data")
    key = living / "identity.key"
    key.touch(0o600)
    key.write_bytes(PRIVATE_PREFIX + SEED + ME.key)
    lived_again(living, manifest, KILLED_AFTER)
    (directory,) = (living / "runs").iterdir()
    (directory / TRUST_NAME).write_text(f"{HEAD.hex()}\n")
    Mismatches(directory / "mismatches").note(KILLED_AFTER)
    with closing(Records(directory / RECORDS_NAME)) as records:
        records.write(Batch(mine={"applied": 7}))
        shutil.copytree(living, sound)  # before sqlite has tidied up
    return sound


def kind_of(place: Path) -> str:
    return place.parts[2] if place.parts[0] == "runs" else place.parts[0]


def names_why(told: str, touched: set[Path], root: Path) -> bool:
    """Whether a waiting node names the file that only peers can provide, or its request to them."""
    lost = {path for path in touched if kind_of(path.relative_to(root)) in FROM_PEERS}
    is_asking = any(path.suffix == ".log" for path in lost) and any(each in told for each in ASKING)
    return is_asking or any(path.name in told for path in lost)


def corrupted(
    tmp_path: Path,
    dataset: TokenDataset,
    count: int,
    caplog: pytest.LogCaptureFixture,
) -> Counter[tuple[str, str, str]]:
    """Counts the outcomes of these corruptions, by kind of file and of damage."""
    caplog.set_level(logging.INFO, "p2ptrain")
    (tmp_path / "whole").mkdir()
    expected = lived(tmp_path / "whole", dataset)
    manifest = manifest_digest(dataset.manifest_bytes())
    sound = killed(tmp_path, dataset, manifest)
    files = sorted(path.relative_to(sound) for path in sound.rglob("*") if path.is_file() and path.name != "lock")
    outcomes: Counter[tuple[str, str, str]] = Counter()
    for number in range(count):
        rng, root = Random(number), tmp_path / "damaged"
        shutil.copytree(sound, root)
        place = files[number % len(files)]
        kind, touched = damage(root / place, [root / each for each in files if each != place], rng)
        caplog.clear()
        try:
            bits = lived_again(root, manifest)
        except P2ptrainError as error:
            assert str(error)
            outcome = "refused"
        except TimeoutError as health:
            told = f"{caplog.text}{health}"
            assert names_why(told, touched, root), f"{kind} of {place}, {number}: {told}"
            outcome = "waits for peers"
        else:
            assert ROUNDS in bits
            wrong = [at for at, found in bits.items() if found != expected.get(at, found)]
            weights = [at for at in wrong if bits[at][0] != expected[at][0] and at <= KILLED_AFTER]
            # Of two at once, one may be the trainer's and the other what would have made up for it.
            may_differ = len(touched) > 1 or any(path.name == "diary.jsonl" for path in touched)
            assert (weights, wrong if not may_differ else []) == ([], []), f"{kind} of {place}, {number}"
            outcome = "other things to tell" if wrong else "the same bits"
        outcomes[kind_of(place), kind, outcome] += 1
        shutil.rmtree(root)
    return outcomes


@pytest.mark.timeout(600)  # a minute and a half on two quiet cores
def test_a_file_that_was_damaged_is_found_out_or_does_no_harm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    outcomes = corrupted(tmp_path, a_dataset(tmp_path / "data"), 60, caplog)
    assert {outcome for *_, outcome in outcomes} >= {"refused", "the same bits", "waits for peers"}


@pytest.mark.slow
def test_a_thousand_corruptions_are_found_out_or_do_no_harm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    outcomes = corrupted(tmp_path, a_dataset(tmp_path / "data"), 1_000, caplog)
    print(*sorted(outcomes.items()), sep="\n")  # noqa: T201  # what it counts, with -s
    assert outcomes.total() == 1_000
    assert {place for place, *_ in outcomes} >= KINDS


# ---------------------------------------------------------------------------------------------------
# A state that is on its way


async def half_fetched(tmp_path: Path, number: int) -> str:
    """Damages a partly fetched state and resumes the fetch. Returns how it was damaged."""
    rng, begun = Random(number), tmp_path / "fetching" / root_of(STATE).hex()
    begun.parent.mkdir(parents=True)
    sink = FileSink(begun)
    sink.begin(STATE_BYTES, b"")
    is_whole = number % 5 == 0
    for index in range(2 if is_whole else rng.choice((1, 2))):
        sink.write(index, STATE[index * PIECE_BYTES : (index + 1) * PIECE_BYTES])
    if is_whole:
        sink.finish()  # and killed before it was read
    files = sorted(begun.parent.iterdir())
    path = rng.choice(files)
    kind, _ = damage(path, [each for each in files if each != path] or [path], rng)
    wanted = ((8, root_of(STATE)),)
    async with bench(tmp_path) as each, each.running():
        server: BlobNode = await each.serve(KEYS[1])
        server.blobs[BlobName("state", root_of(STATE))] = MemoryBlob.tree(STATE)
        await questions.serve(server.transport, lambda peer, question: questions.States(wanted))
        for attempt in range(1, TRIES + 1):
            doing(each, ev.CatchUp(wanted, (KEYS[1],), attempt))
            await until(lambda attempt=attempt: len(each.node.events) == attempt)  # type: ignore[misc]
            if each.node.events[-1] == ev.CaughtUp(8, root_of(STATE), attempt):
                break
        assert each.trainer.state == STATE, f"{kind} of {path.name}, {number}: {each.node.events}"
        assert list(begun.parent.iterdir()) == []
    return f"{kind} {path.suffix}"


def fetched(tmp_path: Path, count: int) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    for number in range(count):
        root = tmp_path / "fetched"
        root.mkdir()
        with asyncio.Runner(loop_factory=SkippingLoop) as runner:
            outcomes[runner.run(half_fetched(root, number))] += 1
        shutil.rmtree(root)
    return outcomes


def test_a_state_that_was_damaged_when_half_of_it_was_there_is_fetched_all_the_same(tmp_path: Path) -> None:
    fetched(tmp_path, 12)


@pytest.mark.slow
def test_so_is_one_that_was_damaged_in_any_of_a_hundred_ways(tmp_path: Path) -> None:
    outcomes = fetched(tmp_path, 100)
    print(*sorted(outcomes.items()), sep="\n")  # noqa: T201  # what it counts, with -s
    assert {each.split()[0] for each in outcomes} == {"flip", "cut", "swap", "zeros", "remove", "append"}
