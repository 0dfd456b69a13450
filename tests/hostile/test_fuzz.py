"""Every decoder of foreign bytes: whatever failed once, and some inputs of those that `make fuzz` draws.

A file in tests/corpus has failed: `python -m benchmarks.fuzz FILE` tries it alone.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import msgspec
import pytest

from benchmarks import fuzz
from benchmarks.fuzz import Target, Trial, limits
from benchmarks.fuzz.__main__ import CORPUS, Fuzzer, read_corpus
from benchmarks.fuzz.__main__ import fuzz as fuzz_all
from benchmarks.fuzz.alter import KINDS, altered
from benchmarks.fuzz.targets import all_targets
from p2ptrain.core.wire import decode_strictly
from p2ptrain.errors import RemoteProtocolError

CORPUS_BYTES_MAX = 300_000
INPUTS = 40  # that are drawn for each target
SEED = 5


@pytest.fixture(scope="module")
def targets() -> Iterator[list[Target]]:
    with all_targets() as found:
        yield found


def test_each_target_accepts_its_seeds_and_none_is_named_twice(targets: list[Target]) -> None:
    assert len({target.name for target in targets}) == len(targets) >= 70
    for target in targets:
        trial = Trial(target)
        ways = [trial.run(seed, weighs=True) for seed in target.seeds]
        assert (target.name, {*ways}, trial.tally.failures) == (target.name, {"accepted"}, [])


def test_nothing_that_failed_once_fails_again(targets: list[Target]) -> None:
    corpus, trials = read_corpus(CORPUS), {target.name: Trial(target) for target in targets}
    assert corpus.keys() <= trials.keys()
    with limits():
        for name, files in corpus.items():
            for data in files.values():
                trials[name].run(data, weighs=True)
    assert [failure for trial in trials.values() for failure in trial.tally.failures] == []


def test_the_corpus_stays_small() -> None:
    files = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".hex"}
    assert sum(path.stat().st_size for path in files) < CORPUS_BYTES_MAX


def test_some_drawn_inputs_are_refused_or_taken_and_nothing_else(targets: list[Target], tmp_path: Path) -> None:
    trials = [Trial(target) for target in targets]
    with limits():
        for trial in trials:
            fuzzer = Fuzzer(trial, tmp_path, Random(f"{SEED} {trial.target.name}"))
            for _ in range(INPUTS // trial.target.every):
                fuzzer.step()
    assert [failure for trial in trials for failure in trial.tally.failures] == []


# ---------------------------------------------------------------------------------------------------
# The fuzzer's own power

_DECODER = msgspec.msgpack.Decoder(tuple[int, str])
SEEDS = (msgspec.msgpack.encode((1, "a")), msgspec.msgpack.encode((300, "text")))


def sound(data: bytes) -> object:
    return decode_strictly(_DECODER, data, "a pair")


def broken(how: Callable[[bytes], object]) -> Target:
    return Target("broken", "msgpack", SEEDS, how, (RemoteProtocolError,), msgspec.msgpack.encode)


def fails(data: bytes) -> object:
    found = sound(data)
    assert isinstance(found, tuple)
    "abcdefgh"[len(found[1])]
    return found


def lets_errors_out(data: bytes) -> object:
    return _DECODER.decode(data)


def is_lenient(data: bytes) -> object:
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError("no") from error


def eats_memory(data: bytes) -> object:
    bytearray(2**20)
    return sound(data)


def is_a_bomb(data: bytes) -> object:
    bytearray(2**36)
    return sound(data)


def takes_long(data: bytes) -> object:
    sum(range(500_000))
    return sound(data)


def takes_long_for_what_is_not_short(data: bytes) -> object:
    sum(range(2_000_000 if len(data) > 100 else 0))
    return sound(data)


def never_ends(data: bytes) -> object:
    while data:
        sum(range(100))
    return sound(data)


@pytest.mark.parametrize(
    ("how", "what"),
    [
        (fails, "IndexError"),
        (lets_errors_out, "ValidationError"),
        (is_lenient, "a second encoding was accepted"),
        (eats_memory, "bytes of memory"),
        (is_a_bomb, "MemoryError"),
        (takes_long, " ms for "),
        (takes_long_for_what_is_not_short, " ms for "),
        (never_ends, "HangError"),
    ],
)
def test_a_broken_decoder_is_reported_and_what_broke_it_is_kept(
    how: Callable[[bytes], object], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(fuzz, "HANG_SECONDS", 0.2)
    trial = Trial(broken(how))
    fuzzer = Fuzzer(trial, tmp_path / "corpus", Random(SEED))
    with limits():
        fuzzer.begin()
        while not [each for each in trial.tally.failures if what in each.what] and trial.tally.inputs < 5_000:
            fuzzer.step()
    fuzzer.report()
    assert [each for each in trial.tally.failures if what in each.what]
    said, kept = capsys.readouterr().out, read_corpus(tmp_path / "corpus")["broken"]
    assert "FAILED broken: " in said
    again = Trial(broken(how))
    with limits():
        for name, data in kept.items():
            assert name in said
            again.run(data, weighs=True)
    assert again.tally.failures


def test_what_grows_once_is_no_fault_of_an_input() -> None:
    """asyncio's set of all tasks, for instance, takes 128 KiB more at its 1,229th."""
    kept: list[bytes] = []

    def grows(data: bytes) -> object:
        if tracemalloc.is_tracing() and not kept:
            kept.extend([data] * 2**16)
        return sound(data)

    trial = Trial(broken(grows))
    trial.run(b"", weighs=True)
    assert kept
    assert not trial.tally.failures


def test_a_sound_decoder_is_not_reported(tmp_path: Path) -> None:
    trial = Trial(broken(sound))
    assert fuzz_all([trial], 0.5, 1, tmp_path / "corpus", tmp_path / "last") == 0
    assert not (tmp_path / "last").exists()
    assert trial.tally.inputs > trial.tally.accepted > len(SEEDS)
    assert not (tmp_path / "corpus").exists()


def test_a_run_over_a_broken_decoder_fails(tmp_path: Path) -> None:
    trials = [Trial(broken(sound)), Trial(broken(eats_memory))]
    assert fuzz_all(trials, 0.1, 1, tmp_path / "corpus", tmp_path / "last") > 0


def test_an_error_that_only_descends_from_the_decoder_s_own_is_another() -> None:
    assert fuzz.is_own(ValueError(), (ValueError,))
    assert not fuzz.is_own(UnicodeDecodeError("utf-8", b"", 0, 1, ""), (ValueError,))
    assert not fuzz.is_own(RecursionError(), (RemoteProtocolError,))


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_draws_the_same_inputs_and_they_differ(kind: str, targets: list[Target]) -> None:
    seeds = next(target.seeds for target in targets if target.kind == kind)
    first, again = (
        [altered(kind, seeds[0], seeds, rng) for _ in range(200)] for rng in (Random(SEED), Random(SEED))
    )  # fmt: skip
    assert first == again
    assert len({*first}) > 100
