"""Whatever happens to a file of a node, it is found out or does no harm: never does it go on with other bits.

The node of test_crash_points.py, killed in the middle of a run; one of its files is damaged, and it starts again.
It then ends with the bits of a run that was left alone, or says what is wrong, or waits for peers to give it what it
lost, which a node that is a swarm by itself has not got. Without its diary, it may have other things to tell:
then the weights of the rounds that were agreed on are the same.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from test_crash_points import ROUNDS, dataset, lived  # noqa: F401  # a fixture

from p2ptrain.errors import P2ptrainError
from p2ptrain.learn.data import TokenDataset

KILLED_AFTER = 8  # rounds, the last checkpoint being of the sixth


def damage(path: Path, others: list[Path], rng: Random) -> tuple[str, set[Path]]:
    """Do something to a file; what, and to which."""
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


def corrupted(tmp_path: Path, dataset: TokenDataset, count: int) -> Counter[tuple[str, str, str]]:  # noqa: F811
    """How many of these corruptions ended how, by kind of file and of damage."""
    (tmp_path / "whole").mkdir()
    expected = lived(tmp_path / "whole", dataset)
    sound = tmp_path / "sound"
    sound.mkdir()
    lived(sound, dataset, KILLED_AFTER)
    files = sorted(path.relative_to(sound) for path in sound.rglob("*") if path.is_file() and path.name != "lock")
    outcomes: Counter[tuple[str, str, str]] = Counter()
    for number in range(count):
        rng, root = Random(number), tmp_path / "damaged"
        shutil.copytree(sound, root)
        place = files[number % len(files)]
        kind, touched = damage(root / place, [root / each for each in files if each != place], rng)
        try:
            bits = lived(root, dataset)
        except P2ptrainError as error:
            assert str(error)
            outcome = "refused"
        except TimeoutError:
            outcome = "waits for peers"
        else:
            assert ROUNDS in bits
            wrong = [at for at, found in bits.items() if found != expected.get(at, found)]
            weights = [at for at in wrong if bits[at][0] != expected[at][0] and at <= KILLED_AFTER]
            # Of two at once, one may be the trainer's and the other what would have made up for it.
            may_differ = len(touched) > 1 or any(path.name == "diary.jsonl" for path in touched)
            assert (weights, wrong if not may_differ else []) == ([], []), f"{kind} of {place}, {number}"
            outcome = "other things to tell" if wrong else "the same bits"
        outcomes[place.parts[2] if len(place.parts) > 2 else place.name, kind, outcome] += 1
        shutil.rmtree(root)
    return outcomes


def test_a_file_that_was_damaged_is_found_out_or_does_no_harm(
    tmp_path: Path,
    dataset: TokenDataset,  # noqa: F811
) -> None:
    outcomes = corrupted(tmp_path, dataset, 60)
    assert {outcome for *_, outcome in outcomes} >= {"refused", "the same bits"}


@pytest.mark.slow
def test_a_thousand_corruptions_are_found_out_or_do_no_harm(tmp_path: Path, dataset: TokenDataset) -> None:  # noqa: F811
    outcomes = corrupted(tmp_path, dataset, 1_000)
    assert outcomes.total() == 1_000
    assert {place for place, *_ in outcomes} >= {
        "wal",
        "payloads",
        "checkpoints",
        "diary.jsonl",
        "run.json",
        "identity",
    }
