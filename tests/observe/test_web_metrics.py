"""/metrics, checked with Prometheus' own parser and conventions."""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from p2ptrain.core.complaints import Code, complaint
from p2ptrain.core.reputation import PEERS_MAX, Reason, Reputation
from p2ptrain.observe.schema import Purpose
from tests.helpers.web import STATUS, site, told_of

# What Prometheus' guide on naming says, and promtool looks for.
UNITS_THAT_ARE_NOT_BASE = {
    "milliseconds", "microseconds", "minutes", "hours", "days", "kilobytes", "megabytes", "bits", "percent", "ms", "kb",
}  # fmt: skip
RESERVED = ("_count", "_sum", "_bucket")


async def families(**changed: Any) -> dict[str, Metric]:
    async with site() as here:
        here.told.now |= changed
        status, headers, body = await here.get("/metrics")
        assert (status, headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
        return {each.name: each for each in text_string_to_metric_families(body.decode())}


def values(family: Metric, label: str = "") -> dict[str, float]:
    return {each.labels.get(label, ""): each.value for each in family.samples}


async def test_the_metrics_are_the_status() -> None:
    found = await families()

    def value(name: str) -> float:
        (sample,) = found[f"p2ptrain_{name}"].samples
        return sample.value

    for name, expected in {
        "round": 8, "applied_round": 7, "certified_round": 6, "since_applied_seconds": 1.5, "view": 1,
        "held_contributions": 2, "root_mismatches": 2, "roster_members": 2, "quorum_members": 2, "admitted_peers": 3,
        "connected_peers": 1, "is_member": 1, "is_admitted": 1, "loss_nats": 2.5, "tokens": 4_000,
        "trainings_not_finite": 6, "damaged_files": 3,
        "training_seconds": 32.5, "numbers_per_chunk": 256,
        "payload_bytes": 1_000, "state_bytes": 40_000, "is_paused": 0,
        "event_loop_lag_seconds": 0.0123, "queued_frames": 12, "disk_free_bytes": 5e9,
        "uptime_seconds": 99.5,
    }.items():  # fmt: skip
        assert value(name) == expected, name
    phases = values(found["p2ptrain_phase"], "phase")
    assert phases == {"train": 0, "collect": 0, "agree": 1, "apply": 0}
    assert values(found["p2ptrain_tolerated_members"], "fault") == {"liar": 0, "crash": 0}
    outcomes = values(found["p2ptrain_contributions"], "outcome")
    assert outcomes == {"taken": 5, "expired": 0, "too_late": 1, "failed": 0}
    assert values(found["p2ptrain_taken_contributions"], "staleness_rounds") == {"0": 8, "2": 1}
    assert values(found["p2ptrain_peer_faults"], "reason") == {
        each.value: 3 * (each.value == "late") for each in Reason
    }
    assert values(found["p2ptrain_limit_bytes_per_second"], "direction") == {"sent": 1_000, "received": 0}
    (build,) = found["p2ptrain_build_info"].samples
    assert (build.labels["version"], build.value) == ("1.2.3", 1)
    for name in ("process_resident_memory_bytes", "process_cpu_seconds", "process_open_fds"):
        assert found[name].samples[0].value > 0


async def test_bytes_have_a_purpose_and_a_direction() -> None:
    found = {
        (each.labels["purpose"], each.labels["direction"]): each.value
        for each in (await families())["p2ptrain_traffic_bytes"].samples
    }
    assert found == {
        (purpose, direction): STATUS["traffic"][purpose][direction]
        for purpose in get_args(Purpose)
        for direction in ("sent", "received")
    }


async def test_what_has_no_value_yet_is_not_there() -> None:
    found = await families(mine=STATUS["mine"] | {"energy_joules": 4.5e6})
    assert values(found["p2ptrain_energy_joules"]) == {"": 4.5e6}
    found = await families(loss=None, since_applied_seconds=None, disk_free_bytes=None)
    assert "p2ptrain_energy_joules" not in found
    assert "p2ptrain_loss_nats" not in found
    assert "p2ptrain_since_applied_seconds" not in found
    assert "p2ptrain_disk_free_bytes" not in found


async def test_the_health_is_one_series_for_each_complaint() -> None:
    found = await families(**told_of(complaint(Code.DEGRADED, why="it is full"), complaint(Code.STALLED)))
    told = values(found["p2ptrain_health"], "kind")
    assert told.keys() == {*Code}
    assert {kind for kind, value in told.items() if value} == {"degraded", "stalled"}
    unsaved = [complaint(code, why="it is full") for code in (Code.CHECKPOINTS_NOT_SAVED, Code.RECORDS_NOT_WRITTEN)]
    found = await families(**told_of(*unsaved))
    told = values(found["p2ptrain_health"], "kind")
    assert {kind for kind, value in told.items() if value} == {"checkpoints_not_saved", "records_not_written"}


async def test_names_and_units_keep_the_conventions() -> None:
    async with site() as here:
        text = (await here.get("/metrics"))[2].decode()
    found = {each.name: each for each in text_string_to_metric_families(text)}
    assert len(found) > 40
    for name, family in found.items():
        assert re.fullmatch(r"(p2ptrain|process)_[a-z][a-z0-9_]*[a-z0-9]", name), name
        assert not UNITS_THAT_ARE_NOT_BASE.intersection(name.split("_")), name
        assert not name.endswith(RESERVED), name
        assert family.documentation.endswith("."), name
        assert family.type in ("counter", "gauge"), name
        for sample in family.samples:
            assert sample.name.endswith("_total") == (family.type == "counter"), sample.name
            assert all(re.fullmatch(r"[a-z_]+", label) for label in sample.labels), sample.labels
    helps, types = re.findall(r"^# HELP (\S+) ", text, re.MULTILINE), re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE)
    assert helps == types
    assert len(set(types)) == len(types)


def test_faults_that_were_counted_stay_so_when_their_peers_are_forgotten_and_begin_anew_with_the_node() -> None:
    """Prometheus takes a falling counter for a restart, and counts all that is left as new."""
    reputation, after = Reputation(), Reputation()
    for number in range(1, PEERS_MAX + 2):
        reputation.note(number.to_bytes(32, "big"), Reason.LATE, 0.0)
        assert reputation.noted == {"late": number}
    assert len(reputation.records) < PEERS_MAX, "some are forgotten"
    after.restore(reputation.saved(1.0), 1.0)
    assert after.noted == {}
    after.note(bytes(32), Reason.LATE, 2.0)
    assert after.noted == {"late": 1}


async def test_what_waits_now_is_no_count_of_what_has_happened() -> None:
    found = await families()
    assert found["p2ptrain_queued_frames"].type == found["p2ptrain_disk_free_bytes"].type == "gauge"
    assert not {"queued", "queued_frames"} & values(found["p2ptrain_occurrences"], "what").keys()


async def test_no_peer_and_no_name_of_a_peer_makes_a_series() -> None:
    quiet = await families()
    loud = await families(
        peers=[f"12D3KooW{number}" for number in range(500)],
        roster=[f"12D3KooW{number}" for number in range(500)],
        **told_of(*(complaint(Code.DEGRADED, why=str(number)) for number in range(500))),
        observed={"made up": 7},
        bytes={f"sent {number}": 1 for number in range(500)},
    )
    assert {name: len(each.samples) for name, each in loud.items()} == {
        name: len(each.samples) for name, each in quiet.items()
    }


@pytest.mark.parametrize("name", ["p2ptrain_round", "p2ptrain_tokens"])
async def test_every_scrape_reads_anew(name: str) -> None:
    async with site() as here:
        seen = []
        for number in (3, 4):
            here.told.now |= {"round": number, "tokens": number}
            body = (await here.get("/metrics"))[2].decode()
            (family,) = (each for each in text_string_to_metric_families(body) if each.name == name)
            seen.append(family.samples[0].value)
        assert seen == [3, 4]
