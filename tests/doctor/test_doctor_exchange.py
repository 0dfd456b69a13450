"""What doctor says of the exchange of contributions: its share of the time, and settings that keep it low."""

from __future__ import annotations

import re

import pytest

from p2ptrain.config import ModelConfig, RecipeConfig, RunConfig
from p2ptrain.doctor.exchange import judge_exchange
from p2ptrain.train.memory import need_of


def run_of(**recipe: object) -> RunConfig:
    settings = {"sequences_per_pass": 4} | recipe
    return RunConfig(name="x", model=ModelConfig(preset="10m"), recipe=RecipeConfig.model_validate(settings))


@pytest.mark.parametrize(
    ("recipe", "wanted"),
    [
        ({"name": "local", "k": 256, "local_steps": 10}, 1 / 3),
        ({"name": "distro", "k": 32}, 0.05),
        ({"name": "demo", "k": 8}, 0.05),
    ],
    ids=["local", "distro", "demo"],
)
@pytest.mark.parametrize("rate", [10_000, 125_000, 2_500_000, 10**9])
def test_the_settings_that_are_told_keep_the_exchange_as_short_as_is_wanted(
    recipe: dict[str, object], wanted: float, rate: int
) -> None:
    """Where nodes train meanwhile, it may take half as long as training."""
    run, nodes, pace = run_of(**recipe), 8, 2_000.0
    found = judge_exchange(run, nodes, pace, rate)

    def share(other: RunConfig) -> float:
        seconds = 4 * 512 * other.recipe.passes_per_step * other.recipe.local_steps / pace
        received = 7 * need_of(other).payload / rate
        return received / (received + seconds)

    assert f"{share(run):.0%} of the time" in found.result
    assert ("in which nodes train on" in found.result) is (wanted > 0.05)
    assert found.level == ("good" if share(run) <= wanted else "warning")
    settings = dict(re.findall(r"(\w+) = \[?(\d+)", found.fix))
    assert ("of which each node takes what its line carries" in found.fix) is ("k = [" in found.fix)
    assert bool(settings) == (found.level == "warning")
    for key, value in settings.items():
        changed = run.model_copy(update={"recipe": run.recipe.model_copy(update={key: int(value)})})
        assert share(changed) <= wanted, key
        if key != "k":
            less = run.model_copy(update={"recipe": run.recipe.model_copy(update={key: int(value) - 1})})
            assert share(less) > wanted, "and no more than it takes"


@pytest.mark.parametrize(("download", "upload"), [(10**8, 20_000), (20_000, 10**8), (0, 20_000)])
def test_the_slower_way_of_a_line_counts(download: int, upload: int) -> None:
    run = run_of(name="local", k=256)
    found, slow = (judge_exchange(run, 8, 2_000.0, *each) for each in ((download, upload), (20_000, 20_000)))
    assert (found.level, found.fix) == (slow.level, slow.fix)
    assert ("its upload" in found.result) is (upload == 20_000)
    assert "not measured" not in found.result


def test_who_knows_only_the_download_is_told_what_the_upload_needs() -> None:
    found = judge_exchange(run_of(name="local", k=256), 8, 2_000.0, 10**9)
    assert re.search(r"as much is sent, and the upload is not measured: it needs [0-9.]+ [kM]B/s$", found.result)


def test_without_a_measured_line_the_rate_that_is_needed_is_told() -> None:
    run = run_of(name="local", k=256)
    found = judge_exchange(run, 8, 2_000.0, 0.0)
    assert found.level == "good"
    (rate,) = re.findall(r"at ([0-9.]+) kB/s or more, both ways", found.result) or re.findall(
        r"at ([0-9.]+) MB/s", found.result
    )
    assert (
        judge_exchange(run, 8, 2_000.0, float(rate) * 1.1 * (10**3 if "kB/s" in found.result else 10**6)).level
        == "good"
    )


def test_of_several_k_the_smallest_counts_and_no_smaller_one_is_advised_where_it_fits() -> None:
    line = 7 * need_of(run_of(name="local", k=64)).payload / 10.0  # bytes a second: ten steps take 10.24 s
    assert judge_exchange(run_of(name="local", k=256), 8, 2_000.0, line).level == "warning"
    found = judge_exchange(run_of(name="local", k=[16, 64, 256]), 8, 2_000.0, line)
    assert found.level == "good"
    assert " with k = 16 in " in found.result
    fix = judge_exchange(run_of(name="local", k=256), 8, 2_000.0, line).fix
    assert re.search(r"k = \[(\d+, )+256\], of which each node takes what its line carries$", fix)
