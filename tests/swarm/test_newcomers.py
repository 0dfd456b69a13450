"""Three people's first hour with p2ptrain, each with what README and docs/ told them, and with their mistakes.

`make test-docs` walks with this checkout, `make test-release` with the installed wheel.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from p2ptrain import __version__
from p2ptrain.cli.exits import ExitStatus
from tests.helpers.daemons import TEST_SECONDS, swarm_in
from tests.helpers.walks import Walk, walk_in

pytestmark = [pytest.mark.docs, pytest.mark.timeout(TEST_SECONDS)]
SCENARIO = """\
sentence = "One of four crashes, and comes back."
nodes = 4
rounds = 20

[[fault]]
kind = "crash"
at = 20
until = 40
nodes = [3]
"""


def test_a_volunteer_joins_by_the_line_sets_limits_leaves_and_comes_again(tmp_path: Path) -> None:
    with swarm_in(tmp_path) as swarm:
        theirs = swarm.first("theirs").start().until_up()
        with walk_in(tmp_path / "volunteer", theirs.address) as walk:
            walk.types("p2ptrain --version", f"p2ptrain {__version__}")
            walk.is_refused("p2ptrain jion --bootstrap ADDR", "No such command 'jion'. Did you mean 'join'?")
            walk.is_refused("p2ptrain join --bootstarp ADDR", "No such option: --bootstarp ...--bootstrap...")
            walk.is_refused(
                "p2ptrain join --bootstrap 203.0.113.7:4001", '...network.bootstrap: "203.0.113.7:4001" is not valid...'
            )
            walk.is_refused("p2ptrain status", "no daemon is running in ...", status=ExitStatus.NO_DAEMON)
            walk.types("p2ptrain doctor --bootstrap ADDR", "... a node can work here...")

            # Ctrl-C before it has a seat, or the run; nothing is in the way of the next try.
            join = "p2ptrain join --bootstrap ADDR"
            assert walk.loses_patience(join, when="open this node in a browser") == ExitStatus.INTERRUPTED
            node = walk.starts(join)
            mine = node.status["peer_id"]
            walk.until(node, lambda status: status["is_member"], "a member")
            walk.types("p2ptrain status", "run ... test ...", "peers ... 1", "roster ... 2 members, ...")
            walk.types("p2ptrain peers", "1 peers")
            walk.types("p2ptrain limit --percent 20 --upload 200000", "upload ... 200,000 bytes/s")
            walk.is_refused("p2ptrain limit --percent 300", "--percent: 300 is not valid. Give 1 to 100")
            walk.types("p2ptrain pause", "paused: ...")
            walk.types("p2ptrain resume")
            walk.is_refused(join, "...is in use...")
            walk.interrupts()
            walk.is_refused("p2ptrain status", "no daemon is running in ...", status=ExitStatus.NO_DAEMON)

            again = walk.starts(join)
            assert again.status["peer_id"] == mine
            number = walk.until(again, lambda status: status["is_member"], "a member again")["applied_round"]
            walk.until(again, lambda status: status["applied_round"] > number + 2, "in step")
            walk.types("p2ptrain leave", "leaving: ...")
        theirs.until(lambda: len(theirs.status().get("roster", ())) == 1)


def test_an_operator_begins_a_run_changes_it_backs_it_up_and_begins_again(tmp_path: Path) -> None:
    with walk_in(tmp_path / "operator") as walk:
        walk.types("p2ptrain config example tiny > tiny.toml")
        walk.types("p2ptrain data prepare my-data book.txt more.jsonl")
        walk.types("p2ptrain config check tiny.toml", "tiny.toml: OK...")
        walk.is_refused("p2ptrain config check my-run.toml", "...Did you mean learning_rate?")
        start = "p2ptrain start tiny.toml --data my-data --data-dir first"
        walk.is_refused(
            start, "data.manifest: ... Write the digest that `p2ptrain data prepare` printed for my-data..."
        )
        with (walk.folder / "tiny.toml").open("a") as run:
            run.write(f'[data]\nmanifest = "{walk.reader.printed["manifest"]}"\n')
        first = walk.starts(start, "p2ptrain join --bootstrap ...", at="one")
        others = [
            walk.starts(f"p2ptrain join --yes --bootstrap ADDR --data-dir {name}", at=name) for name in ("two", "three")
        ]
        for node in (first, *others):
            old = walk.until(node, lambda status: len(status["roster"]) == 3, "one of three")
        walk.types("p2ptrain swarm --data-dir first")

        after = first.status["applied_round"] + 100
        walk.types(f"p2ptrain propose --set recipe.learning_rate=0.001 --after {after} --data-dir first")
        for node in others:
            walk.until(node, lambda status: status["motions"], "told")
        (motion,) = walk.asks("p2ptrain agenda --data-dir two")["motions"]
        for name in ("two", "three"):
            walk.types(f"p2ptrain assent {motion['motion'][:8]} --data-dir {name}")
        for node in (first, *others):
            walk.until(node, lambda status: status["run_id"] != old["run_id"] and status["applied_round"] > 1, "over")

        walk.types("p2ptrain checkpoint list --data-dir first", "round ...")
        walk.types("p2ptrain checkpoint copy --to backups --data-dir first", "backups/00000001-backup-of-round-...")
        walk.types("p2ptrain audit backups", "OK ...")
        for name in ("three", "two", "one"):
            walk.interrupts(at=name)
        walk.is_refused("p2ptrain start --from nothing --data-dir again", status=2)
        again = "p2ptrain start --from backups --data my-data --data-dir again --set recipe.warmup_rounds=2"
        walk.starts(again, "p2ptrain join --bootstrap ...", at="again")
        walk.interrupts(at="again")
        node = walk.starts(again, at="again")
        walk.until(node, lambda status: status["applied_round"] > 1, "at work")
        walk.interrupts(at="again")


def test_a_researcher_audits_simulates_measures_and_takes_the_model_away(tmp_path: Path) -> None:
    with walk_in(tmp_path / "researcher") as walk:
        walk.types("p2ptrain config example tiny > tiny.toml")
        first = walk.starts("p2ptrain start tiny.toml --data-dir first", at="one")
        second = walk.starts("p2ptrain join --bootstrap ADDR --data-dir second", at="two")
        number = walk.until(second, lambda status: status["is_member"], "a member")["applied_round"]
        walk.until(second, lambda status: status["applied_round"] > number + 10, "ten rounds on")
        walk.types("p2ptrain audit first", "OK ...")  # beside the node
        walk.types(f"p2ptrain receipt {second.status['peer_id']} --out second.receipt --data-dir first")
        walk.types("p2ptrain audit --receipt second.receipt")
        for name in ("two", "one"):
            walk.interrupts(at=name)
        assert first.status == {}

        walk.types("p2ptrain audit second", "OK ...")
        walk.is_refused("p2ptrain audit nowhere", "DIR: ...")
        _lies_are_found(walk)
        walk.types("p2ptrain evaluate --data-dir first --sequences 8", "held-out loss ... nats a token...")
        walk.types("p2ptrain generate Once --tokens 8 --data-dir first", "Once...")
        walk.types("p2ptrain report --data-dir first --out report.html")
        assert "<title>" in (walk.folder / "report.html").read_text()
        walk.types("p2ptrain export model --data-dir first")
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
            path.name for path in (walk.folder / "model").iterdir()
        }
        walk.is_refused("p2ptrain export model --data-dir first", "...model...")

        (walk.folder / "mine.toml").write_text(SCENARIO)
        walk.types("p2ptrain simulate mine.toml --seed 7 --trace-node 1 --events node1.jsonl")
        assert walk.says("p2ptrain simulate mine.toml --seed 7") == walk.says("p2ptrain simulate mine.toml --seed 7")
        walk.types("p2ptrain replay node1.jsonl")
        walk.types("p2ptrain replay first/runs/*/events/*.jsonl")


def _lies_are_found(walk: Walk) -> None:
    """Flips a bit of what a node has kept, in a copy."""
    walk.types("cp -r second altered")
    log = max((walk.folder / "altered").glob("runs/*/checkpoints/*/*"), key=lambda path: path.stat().st_size)
    content = bytearray(log.read_bytes())
    content[len(content) // 2] ^= 1
    log.write_bytes(content)
    walk.is_refused("p2ptrain audit altered", "WRONG ... damaged: ...", status=ExitStatus.FAILED)
