"""A run that goes on as another, with real daemons: who agreed goes over, who was away finds it, who did not ends."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from fractions import Fraction
from pathlib import Path

import pytest

from p2ptrain.audit.findings import Grade
from p2ptrain.audit.run import audit
from p2ptrain.cli.exits import ExitStatus
from p2ptrain.errors import DataError
from p2ptrain.node.control import ask
from p2ptrain.node.saved import newest_whole
from p2ptrain.store.checkpoints import Checkpoints
from tests.helpers.daemons import TEST_SECONDS, DaemonSwarm, StartableDaemon, p2ptrain, swarm_in
from tests.helpers.supervisor import SupervisorEnd
from tests.helpers.tokenizers import prepared

pytestmark = [pytest.mark.daemons, pytest.mark.timeout(TEST_SECONDS)]
ROOT = Path(__file__).parents[2]
ALL = {"P2PTRAIN_SUCCESSION__ACCEPT": "all"}
RATE = "recipe.learning_rate=0.001"


def members(swarm: DaemonSwarm, count: int) -> list[StartableDaemon]:
    run = swarm.run_file()
    run.write_text(run.read_text().replace("stall_seconds = 10", "stall_seconds = 60"))  # who sleeps goes on with none
    nodes = [swarm.add("first", "start", run, **ALL).start().until_up()]
    nodes += [swarm.joiner(f"node{number}", nodes[0].address, **ALL).start() for number in range(2, count + 1)]
    for node in nodes:
        node.until(lambda node=node: len(node.status().get("roster", ())) == count)
    return nodes


def run_of(node: StartableDaemon) -> str:
    return str(node.status().get("run_id", ""))


def moves(node: StartableDaemon, *options: str) -> None:
    status, _, err = p2ptrain("propose", "--data-dir", node.directory, *options)
    assert status == 0, err


def until_over(node: StartableDaemon, old: str) -> str:
    """Waits until a node takes part in the run that follows. Returns that run's id."""
    node.until(lambda: run_of(node) not in ("", old))
    return run_of(node)


def audited(node: StartableDaemon) -> None:
    for directory in sorted((node.directory / "runs").iterdir()):
        status, out, err = p2ptrain("audit", directory)
        assert status == 0, out + err


def test_all_go_over_by_themselves_and_who_was_away_or_is_new_finds_the_way(tmp_path: Path) -> None:
    with swarm_in(tmp_path) as swarm:
        nodes = members(swarm, 4)
        first, second, third, away = nodes
        old, residual = run_of(first), first.applied
        away.kill()
        moves(second, "--set", RATE)
        new = until_over(first, old)
        for node in (second, third):
            assert until_over(node, old) == new
        goal = first.applied + 4
        for node in (first, second, third):
            node.until_applied(goal)
            assert len(node.status()["roster"]) >= 3
        assert goal > residual  # the rounds are counted on
        away.start()  # by the command of before, which names the first node and no run
        assert until_over(away, old) == new
        stranger = swarm.add("stranger", "join", "--bootstrap", first.address, "--run", old).start()
        stranger.until_member()
        assert run_of(stranger) == new
        away.until_applied(goal + 4)
        third.kill()
        third.start()  # with the old address again
        third.until_applied(third.applied + 3)
        assert run_of(third) == new
        first.kill()
        first.start()  # `start` with the first run's file goes on with the last run
        first.until_applied(goal + 8)
        assert run_of(first) == new
        assert swarm.compared() > 8
        for node in (first, second):
            node.leave()
            audited(node)


def test_a_supervisor_is_told_nothing_of_an_end_when_a_node_goes_over(tmp_path: Path) -> None:
    """systemd kills whoever has said that it stops, and does not; or whoever is silent while it saves and fetches."""
    supervisor = SupervisorEnd(name := f"@p2ptrain test {os.getpid()}")
    with swarm_in(tmp_path) as swarm:
        watched = {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "60000000"}
        node = swarm.add("alone", "start", swarm.run_file(), **watched, **ALL).start().until_up()
        old = run_of(node)
        moves(node, "--set", RATE)
        until_over(node, old)
        node.until_applied(node.applied + 2)
        node.until(lambda: len(supervisor.was_told("READY")) == 2)
        assert supervisor.was_told("STOPPING") == []
        assert supervisor.was_told("WATCHDOG_USEC") == ["60000000", "21600000000", "60000000"]
        node.leave()
        assert supervisor.was_told("STOPPING") != []
    supervisor.socket.close()


def test_a_roll_back_begins_from_the_weights_of_then_and_a_kill_at_the_end_costs_nothing(tmp_path: Path) -> None:
    with swarm_in(tmp_path) as swarm:
        nodes = members(swarm, 3)
        first, _, third = nodes
        old = run_of(first)
        saved = first.ask("checkpoint")["round"]
        first.until(lambda: first.status()["certified_round"] >= saved)
        root = first.status()["roots"].get(str(saved))
        changed = {"recipe.learning_rate": "1/1000"}  # by the socket: a command takes rounds
        ask(first.directory, {"do": "propose", "settings": changed, "back_to": saved})
        third.until_says("decided: ")
        last = int(third.status()["successor"]["last_round"])
        third.until_applied(last)
        third.kill()  # while others go over, or just before
        third.start()
        new = {until_over(node, old) for node in nodes}
        assert len(new) == 1
        for node in nodes:
            node.until_applied(last + 4)
        assert root is None or swarm.roots[f"{new.pop()} {last}"].get("first") in (None, root)


def test_what_a_run_has_saved_goes_when_the_next_has_a_certified_state_but_for_the_last_and_what_that_began_with(
    tmp_path: Path,
) -> None:
    with swarm_in(tmp_path) as swarm:
        first, *others = nodes = members(swarm, 3)

        def saved(run: str) -> list[int]:
            places = (first.directory / "runs" / run[:16] / "checkpoints").glob("*-round-*[0-9]")
            return sorted(int(each.name.rpartition("-")[2]) for each in places)

        old = run_of(first)
        back = first.ask("checkpoint")["round"]
        first.until(lambda: first.status()["certified_round"] >= back)
        ask(first.directory, {"do": "propose", "settings": {}, "back_to": back})
        new = until_over(first, old)
        before = saved(old)
        assert len(before) > 3
        first.until(lambda: len(saved(old)) <= 3)
        assert (saved(old)[0], saved(old)[-1]) == (back, before[-1])
        assert len(saved(new)) >= 2
        for node in others:
            assert until_over(node, old) == new
        moves(first, "--set", RATE)
        last = until_over(first, new)
        first.until(lambda: len(saved(new)) <= 2 and not saved(old))
        assert saved(new)
        assert not (first.directory / "runs" / old[:16] / "payloads").exists()
        audits = [audit(first.directory / "runs" / run[:16]) for run in (old, new)]
        assert audits[1].all_holds, audits[1].lines()
        (missing,) = [line for line in audits[0].lines() if line.startswith("NOT CHECKABLE")]
        assert "replay: no checkpoint to start from" in missing
        assert not audits[0].counts[Grade.WRONG]
        with pytest.raises(DataError, match="no checkpoint any more: they went when the run that follows had its own"):
            newest_whole(Checkpoints(first.directory / "runs" / old[:16] / "checkpoints", bytes.fromhex(old)))
        for node in nodes:
            node.until_applied(saved(last)[-1] + 2)


def test_a_run_goes_on_with_data_that_one_member_has_prepared_and_the_others_fetch(tmp_path: Path) -> None:
    text, data = tmp_path / "text", tmp_path / "prepared"
    text.write_text("A story that nobody has told before.\n" * 20_000)
    manifest = prepared(data, text, held_out=Fraction(1, 20)).digest
    with swarm_in(tmp_path) as swarm:
        nodes = members(swarm, 3)
        old = run_of(nodes[0])
        moves(nodes[1], "--data", str(data))
        shutil.rmtree(data)  # the node has it
        (new,) = {until_over(node, old) for node in nodes}
        goal = nodes[0].applied + 4
        for node in nodes:
            node.until_applied(goal)
            run = json.loads((node.directory / "runs" / new[:16] / "run.json").read_text())
            assert run["data"]["manifest"] == manifest
            kept = node.directory / "data" / manifest[:16]
            node.until(lambda kept=kept: [*kept.glob("*/*")])  # it trains on pieces of it


def test_who_does_not_agree_ends_with_a_line_and_a_way_to_go_along(tmp_path: Path) -> None:
    with swarm_in(tmp_path) as swarm:
        nodes = members(swarm, 3)
        stubborn = swarm.joiner("stubborn", nodes[0].address, P2PTRAIN_SUCCESSION__ACCEPT="ask").start()
        stubborn.until_member()
        old = run_of(nodes[0])
        moves(nodes[0], "--set", RATE)
        assert stubborn.until_ended() == ExitStatus.OWNER_NEEDED
        new = until_over(nodes[0], old)
        assert stubborn.start().until_ended() == ExitStatus.OWNER_NEEDED  # by a supervisor, with the command of before
        first, second = re.findall("To go along: `p2ptrain (.*)`", stubborn.text)
        assert first == second and f"join --run {new} " in first
        again = swarm.add("again", *shlex.split(first))
        again.directory = stubborn.directory
        again.start().until_member()
        assert run_of(again) == new
        again.leave()
        stubborn.start().until_member()  # the command of before leads on, once its owner has named the run
        assert run_of(stubborn) == new


def test_a_node_that_slept_through_the_end_finds_the_run_that_follows(tmp_path: Path) -> None:
    with swarm_in(tmp_path) as swarm:
        nodes = members(swarm, 4)
        sleeper, old = nodes[3], run_of(nodes[0])
        sleeper.stop()
        moves(nodes[1], "--set", RATE)
        new = {until_over(node, old) for node in nodes[:3]}
        sleeper.cont()
        assert until_over(sleeper, old) in new
        sleeper.until_applied(nodes[0].applied + 2)


def of_an_earlier_release(tmp_path: Path) -> dict[str, str]:
    """Makes a release that speaks only the first protocol of this one. Returns the environment of its nodes."""
    place = tmp_path / "earlier"
    shutil.copytree(ROOT / "p2ptrain", place / "p2ptrain", ignore=shutil.ignore_patterns("__pycache__"))
    config = place / "p2ptrain" / "config" / "run.py"
    text = config.read_text()
    assert "PROTOCOLS = (2, 3)" in text
    config.write_text(text.replace("PROTOCOLS = (2, 3)", "PROTOCOLS = (2,)").replace("Literal[2, 3]", "Literal[2]"))
    return {**ALL, "PYTHONPATH": str(place), "PYTHONSAFEPATH": "1"}


def test_releases_that_speak_another_protocol_upgrade_while_they_train_and_an_earlier_one_says_what_it_lacks(
    tmp_path: Path,
) -> None:
    with swarm_in(tmp_path) as swarm:
        nodes = members(swarm, 3)
        earlier = swarm.joiner("earlier", nodes[0].address, **of_an_earlier_release(tmp_path)).start()
        earlier.until_member()
        old = run_of(nodes[0])
        moves(nodes[0], "--set", "protocol=3")
        nodes[2].until_says("decided: ")
        nodes[2].kill()
        nodes[2].start()
        new = {until_over(node, old) for node in nodes}
        assert len(new) == 1
        assert earlier.until_ended() == ExitStatus.OWNER_NEEDED
        assert "protocol 3, which this release does not speak" in earlier.text
        assert "Install a newer release" in earlier.text
        goal = nodes[0].applied + 5
        for node in nodes:
            node.until_applied(goal)
        run = json.loads(next((nodes[0].directory / "runs" / new.pop()[:16]).glob("run.json")).read_text())
        assert run["protocol"] == 3
