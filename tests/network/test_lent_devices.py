"""A node and another machine of its owner on separate hosts, whose cable is pulled."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.daemons import MANY_STEPS, contributed, lending, swarm_in
from tests.helpers.hosts import ROUNDS, SECONDS, daemon_on
from tests.helpers.namespaces import Lan, made, why_impossible

pytestmark = [
    *(pytest.mark.network, pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("network")),
    pytest.mark.skipif(bool(why_impossible()), reason=f"no network namespaces: {why_impossible()}"),
]


def test_a_machine_whose_network_is_gone_costs_a_contribution_and_comes_back(tmp_path: Path) -> None:
    with made(lambda: Lan(3)) as lan, swarm_in(tmp_path) as swarm:
        run = tmp_path / "run.toml"
        run.write_text(MANY_STEPS)
        first = daemon_on(lan.hosts[0], swarm, "start", str(run))
        first.start().until(lambda: first.status().get("addresses"), SECONDS)
        place, away = f"/ip4/{lan.hosts[1].address}/tcp/4100", lan.hosts[2]
        spread = "join", "--nnodes", "2", "--rendezvous", place, "--bootstrap", first.address
        several = daemon_on(lan.hosts[1], swarm, *spread)
        several.start().until(lambda: several.status().get("addresses"), SECONDS)
        with lending(several, place, *away.prefix):
            several.until(lambda: contributed(several) >= 2, SECONDS)
            assert [each["device"] for each in several.status()["ranks"]] == ["cpu", f"cpu at {away.address}"]
            away.cut()
            took = several.until_says(f"1 of 1 other machines are not there ({away.address}): waiting", SECONDS)
            swarm.note("from the cut of a machine's network to the line that says so", took)
            applied = several.applied
            several.until(lambda: several.applied >= applied + ROUNDS, SECONDS)
            away.heal()
            before = contributed(several)
            took = several.until(lambda: first.status() and contributed(several) > before + 1, SECONDS)
            swarm.note("from the repair to the second contribution", took)
        assert swarm.compared() >= ROUNDS
        swarm.look_at_logs()
