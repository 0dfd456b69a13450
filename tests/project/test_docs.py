"""The documentation is correct: its claims hold, its links exist, and its commands work.

The reference is made again and compared. Every command of README.md and docs/ is run, in the order of its page, with
real daemons; those that are not are listed here, with the reason that the page gives.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from urllib.request import urlopen

import pytest
import typer

from p2ptrain.cli import app, exits
from p2ptrain.config import RunConfig
from p2ptrain.core.complaints import MEANINGS
from p2ptrain.exact.outer import Outer
from p2ptrain.models.kinds import parameter_count, shapes_of
from tests.helpers.daemons import TEST_SECONDS, swarm_in
from tests.helpers.docs import (
    FILES,
    INSTALL_SECONDS,
    PAGES,
    ROOT,
    SECONDS,
    boxes_of,
    is_seen,
    outside_boxes,
    reader_in,
    wheel_in,
)
from tests.helpers.hf_models import raw_config
from tests.helpers.tokenizers import tokenizer_json

DOCS = ROOT / "docs"
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
# Boxes with commands that no test runs, and why. A new one is a decision.
EXCEPTIONS: dict[tuple[str, str], list[str]] = {
    ("README.md", "clone"): ["make demo", "make test"],
    ("docs/how-to/write-a-plug-in.md", "plugin"): [
        "pip install ./examples/plugin-model",
        "python -m p2ptrain_digits > digits.jsonl",
        "p2ptrain data prepare my-digits digits.jsonl --held-out 20",
        'P2PTRAIN_PLUGINS__ALLOW="p2ptrain-digits 0.1.0" p2ptrain start digits.toml --data my-digits',
        'P2PTRAIN_PLUGINS__ALLOW="p2ptrain-digits 0.1.0" p2ptrain join --bootstrap ADDR',
    ],
    ("docs/how-to/on-a-gpu-server.md", "gpu"): [
        "p2ptrain doctor",
        "p2ptrain join --bootstrap ADDR --config gpu.toml --data-dir gpu1",
        "p2ptrain doctor --measure",
    ],
    ("docs/how-to/on-a-gpu-server.md", "wheels"): ["make gpu-wheels"],
    ("docs/how-to/backups.md", "long"): ["p2ptrain checkpoint copy --every 500 --to /mnt/backups/my-run"],
    ("docs/how-to/backups.md", "bucket"): [
        "pip install 'p2ptrain[backup]' s3fs",
        "p2ptrain checkpoint copy --every 500 --to s3://my-bucket/my-run",
    ],
    ("docs/how-to/run-a-bootstrap.md", "root"): ["sudo ufw allow 4001/tcp"],
    ("docs/how-to/windows.md", "powershell"): [
        "wsl --install -d Ubuntu-24.04",
        "Register-ScheduledTask p2ptrain -Trigger (New-ScheduledTaskTrigger -AtLogOn -User $env:USERNAME) "
        "-Action (New-ScheduledTaskAction wsl.exe '-d Ubuntu-24.04 -- "
        "~/p2ptrain/bin/p2ptrain join --yes --bootstrap ADDR') -Settings (New-ScheduledTaskSettingsSet "
        "-ExecutionTimeLimit ([TimeSpan]::Zero) -RestartCount 9 -RestartInterval (New-TimeSpan -Minutes 1))",
        "New-NetFirewallHyperVRule -Name p2ptrain -DisplayName p2ptrain -Direction Inbound "
        "-VMCreatorId '{40E0AC32-46A5-438A-A0B2-2B479E8F2E90}' -Protocol TCP -LocalPorts 4001",
        "powercfg /change standby-timeout-ac 0",
    ],
    ("docs/how-to/windows.md", "ubuntu"): [
        "nvidia-smi",
        "sudo apt update && sudo apt install --yes python3-venv",
        "python3 -m venv ~/p2ptrain",
        "~/p2ptrain/bin/pip install /mnt/c/Users/*/Downloads/p2ptrain-*.whl",
        "~/p2ptrain/bin/p2ptrain doctor --bootstrap ADDR",
        "~/p2ptrain/bin/p2ptrain join --bootstrap ADDR",
        "sudo hwclock -s",
    ],
    ("docs/how-to/macos.md", "mac"): [
        "python3.13 -m venv ~/p2ptrain",
        "~/p2ptrain/bin/pip install ~/Downloads/p2ptrain-*.whl",
        "~/p2ptrain/bin/p2ptrain demo --nodes 2 --rounds 8",
        "~/p2ptrain/bin/p2ptrain doctor --bootstrap ADDR",
        "~/p2ptrain/bin/p2ptrain join --bootstrap ADDR",
        "mkdir -p ~/.config/p2ptrain ~/Library/LaunchAgents",
        "~/.local/bin/p2ptrain config check ~/.config/p2ptrain/node.toml",
        "cp deploy/launchd/p2ptrain.node.plist ~/Library/LaunchAgents/",
        "launchctl bootstrap gui/$(id -u) ~/Library/LaunchAgents/p2ptrain.node.plist",
        "launchctl print gui/$(id -u)/p2ptrain.node",
        "launchctl bootout gui/$(id -u)/p2ptrain.node",
        "caffeinate -s ~/p2ptrain/bin/p2ptrain join --bootstrap ADDR",
    ],
    ("docs/how-to/evaluate.md", "eval"): [  # its tasks come from the hub
        "p2ptrain export my-model",
        "pip install 'lm-eval[hf]'",
        "lm_eval --model hf --model_args pretrained=my-model,dtype=float32 --tasks arc_easy,piqa --limit 200",
    ],
    ("docs/how-to/privacy.md", "join"): [  # a test of tests/swarm/test_own_data.py does
        "p2ptrain join --bootstrap ADDR --invitation friends.invitation --config private.toml"
    ],
    ("docs/how-to/regions.md", "world"): [  # tests/swarm/test_regions.py begins these runs
        "p2ptrain config example halos_world > world.toml",
        "p2ptrain start world.toml",
        "p2ptrain pause",
    ],
    ("docs/how-to/regions.md", "region"): [  # likewise
        "p2ptrain config example halos > region.toml",
        "p2ptrain start region.toml --config node.toml",
    ],
    ("docs/how-to/several-devices.md", "machines"): [  # tests/swarm/test_daemon_ranks.py does
        "p2ptrain join --nnodes 3 --rendezvous /ip4/192.168.1.10/tcp/4100 --bootstrap ADDR",
        "p2ptrain lend /ip4/192.168.1.10/tcp/4100",
    ],
    ("docs/how-to/operate-a-swarm.md", "one"): ["p2ptrain swarm"],
    ("docs/how-to/recover.md", "root"): ["sudo timedatectl set-ntp true"],
    ("docs/how-to/recover.md", "chosen"): [
        "mv ~/.local/share/p2ptrain/runs/RUN runs.old",
        "p2ptrain join --bootstrap ADDR --trust HEAD",
    ],
}  # Pages that are read one after the other by one reader, and whether somebody else has a run already.
SITTINGS: dict[str, tuple[bool, list[str]]] = {
    "invitations": (False, ["docs/how-to/invite-only-runs.md"]),
    "backups": (False, ["docs/how-to/backups.md"]),
    "recheck": (False, ["docs/how-to/recheck.md"]),
    "own data": (False, ["docs/how-to/own-data.md", "docs/how-to/privacy.md"]),
    "how-to": (
        True,
        [
            "docs/how-to/prepare-data.md",
            "docs/how-to/chats.md",
            "docs/how-to/join-from-home.md",
            "docs/how-to/evaluate.md",
            "docs/how-to/run-a-bootstrap.md",
            "docs/how-to/behind-nat.md",
            "docs/how-to/on-a-gpu-server.md",
            "docs/how-to/recover.md",
        ],
    ),
}
FROM_THE_WHEEL = ["docs/tutorial.md", "README.md"]  # by a reader who has nothing else
WITH_TRANSFORMERS = ["docs/how-to/continue-a-checkpoint.md", "docs/how-to/lora.md"]


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---------------------------------------------------------------------------------------------------
# The reference


def test_the_reference_is_what_the_code_says(generate: ModuleType) -> None:
    kept = {path.name: path.read_text(encoding="utf-8") for path in (DOCS / "reference").iterdir()}
    made = generate.pages()
    assert sorted(kept) == sorted(made)
    for name, text in made.items():
        assert kept[name] == text, f"docs/reference/{name} is not current: make docs"


def test_the_reference_has_every_command_key_metric_and_address(generate: ModuleType) -> None:
    made = generate.pages()
    assert [line[3:] for line in made["cli.md"].splitlines() if line.startswith("## ")] == [
        " ".join(["p2ptrain", *words]) for words in generate.command_names()
    ]
    for key in ("on_quorum_loss", "device_percent", "keys", "token_file"):
        assert f"| `{key}` |" in made["config.md"]
    for metric in ("p2ptrain_applied_round", "p2ptrain_traffic_bytes_total", "p2ptrain_loss_nats", "p2ptrain_health"):
        assert f"| `{metric}` |" in made["metrics.md"]
    for address in ("/status", "/readyz", "/log"):
        assert f"| `{address}` |" in made["http.md"]
    for name in ("start", "join", "simulate", "Swarm.step", "Swarm.leave"):
        assert f"\n{name}(" in made["python.md"]
    for name, text in made.items():
        assert "None" not in text or name == "python.md"
        assert str(ROOT) not in text


def test_every_exit_status_and_every_command_that_chooses_one_are_told(generate: ModuleType) -> None:
    assert [*exits.MEANINGS] == [*exits.ExitStatus]
    assert {*exits.FOUND} <= {" ".join(words) for words in generate.command_names()}
    sources = "".join(path.read_text() for path in Path(exits.__file__).parent.glob("*.py"))
    functions = re.findall(
        r"^def _?(\w+)\((?:(?!^def )(?:.|\n))*?typer\.Exit\(ExitStatus\.FAILED\)", sources, re.MULTILINE
    )
    assert {name.split("_")[0] for name in functions} == {words.split()[-1] for words in exits.FOUND}
    assert sources.count("Exit(") == sources.count("Exit(ExitStatus.FAILED)"), "by their names"


def test_the_reference_has_every_name_of_the_library_that_pages_and_examples_use() -> None:
    reference = (DOCS / "reference" / "python.md").read_text()
    swarm = reference.partition("\n## Swarm\n")[2].split("\n## ")[0]
    texts = [path.read_text() for path in (*PAGES, *(ROOT / "examples").glob("*.py"))]
    used = {name for text in texts for name in re.findall(r"\bswarm\.([a-z_]+)\b", text)} - {"md", "py"}
    assert {"round", "step", "evaluate"} <= used
    assert [name for name in sorted(used) if not re.search(rf"Swarm\.{name}\n|\b{name}: ", swarm)] == []
    classes = {name for text in texts for name in re.findall(r"p2ptrain\.hf import (\w+)", text)}
    assert [name for name in classes if f"\n## hf.{name}\n" not in reference] == []


def test_writing_the_reference_twice_changes_nothing(
    generate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "HERE", tmp_path)
    assert generate.main() == 1
    assert generate.main() == 0


# ---------------------------------------------------------------------------------------------------
# What pages say


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as code hosts generate them."""
    titles = [re.sub(r"`|\[|\]|\*", "", line.lstrip("# ")) for _, line in outside_boxes(page) if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def links(page: Path) -> Iterator[tuple[int, str]]:
    for number, line in outside_boxes(page):
        for target in re.findall(r"\]\(([^)\s]+)\)", line):
            yield number, target


def test_the_index_leads_to_every_page() -> None:
    found = {(DOCS / target).resolve() for _, target in links(DOCS / "README.md")}
    assert [page for page in sorted(DOCS.rglob("*.md")) if page not in found and page.name != "README.md"] == []


def test_every_box_says_what_it_is_and_every_command_that_is_not_run_is_listed() -> None:
    left: dict[tuple[str, str], list[str]] = {}
    for box in (box for page in PAGES for box in boxes_of(page)):
        where = f"{box.page}:{box.line}"
        assert box.kind in ("console", "text", *FILES), where  # tests run Python from its pages
        assert box.kind != "console" or box.commands or "^C" in box.lines, f"{where}: nothing to do"
        if box.kind == "text" and (box.commands or box.word):
            assert box.word, f"{where}: commands, and no word on why nobody runs them"
            left.setdefault((box.page, box.word), []).extend(box.commands)
    assert left == EXCEPTIONS


def test_every_page_with_commands_is_read_in_a_sitting() -> None:
    read = [*FROM_THE_WHEEL, *WITH_TRANSFORMERS, *(name for _, names in SITTINGS.values() for name in names)]
    assert len(read) == len(set(read))
    assert sorted(read) == sorted({box.page for page in PAGES for box in boxes_of(page) if box.kind == "console"})


@pytest.mark.parametrize("name", [name for name in NAMES if "/reference/" not in name])
def test_commands_in_the_text_are_there_with_their_options(name: str) -> None:
    """Checks commands in backticks, and in boxes that no test runs."""
    page, wrong = ROOT / name, []
    spoken = [(n, each) for n, line in outside_boxes(page) for each in re.findall(r"`([^`]*)`", line)]
    spoken += [(box.line, command) for box in boxes_of(page) if box.kind == "text" for command in box.commands]
    for number, text in spoken:
        words = text.replace("\\|", "|").split()  # as tables write it
        if words and words[0].rpartition("/")[2] == "p2ptrain" and (problem := _problem(words[1:])):
            wrong.append(f"{name}:{number}: {text}: {problem}")
    assert wrong == []


def _problem(words: list[str]) -> str:
    """Returns what is wrong with a quoted command; alternatives are separated by |."""
    place = typer.main.get_command(app)
    for word in words:
        commands = getattr(place, "commands", {})
        if word.startswith("-"):
            options = {option for each in place.params for option in each.opts} | {"--help"}
            if word.rstrip(",") not in options:
                return f"no option {word}"
        elif commands and "|" in word:
            return "" if all(each in commands for each in word.split("|")) else f"not all of {word}"
        elif commands:
            if word.rstrip(",") not in commands:
                return f"no command {word}"
            place = commands[word.rstrip(",")]
    return ""


def test_a_command_that_is_not_there_would_be_found() -> None:
    assert _problem(["join", "--bootstrap", "ADDR"]) == ""
    assert _problem(["checkpoint", "list|export"]) == ""
    assert _problem(["jion"]) == "no command jion"
    assert _problem(["join", "--bootstarp", "ADDR"]) == "no option --bootstarp"
    assert _problem(["checkpoint", "lsit|export"]) == "not all of lsit|export"


def test_recover_tells_of_every_complaint() -> None:
    rows = [line for _, line in outside_boxes(DOCS / "how-to" / "recover.md") if line.startswith("| `")]
    told = [line.split("`")[1] for line in rows]
    heads = [re.split("[:,]", meaning.text)[0] for meaning in MEANINGS.values()]
    assert [each for each in heads if each not in told] == []


def test_what_is_seen_is_compared_line_by_line() -> None:
    text = "one  two\n  three four\nfive\n"
    assert is_seen(("one two", "five"), text)
    assert is_seen(("one ...", "...four"), text)
    assert is_seen((), text)
    assert not is_seen(("five", "one two"), text)
    assert not is_seen(("one",), text)
    assert not is_seen(("five", "five"), text)


# ---------------------------------------------------------------------------------------------------
# The documents as a whole

HOUSE = [
    *PAGES,
    *(ROOT / name for name in ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "log/README.md")),
    *(ROOT / name for name in ("benchmarks/README.md", "deploy/README.md")),
]
LINES_MAX = {
    "README.md": 130,
    "ARCHITECTURE.md": 240,
    "CHANGELOG.md": 90,
}  # what is read before anything else, and at one sitting
FOLDERS = (ROOT, ROOT / "p2ptrain", ROOT / "deploy")  # from which a page may name a file, besides its own
FILE = re.compile(r"[A-Za-z][\w.-]*(?:/[\w.-]+)*/[\w-]+\.(?:py|toml|json|md|js|yml|yaml|png|service|conf)")
MADE_AT_WORK = re.compile(r"(runs|out|checkpoints)/")  # in a data directory, or by a command
SELECTED = re.compile(r"pytest [^`]*-k ([\w]+)")


@pytest.mark.parametrize("page", HOUSE, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for number, target in links(page):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            broken.append(f"{number}: {target}")
    assert broken == []


@pytest.mark.parametrize(("name", "lines"), LINES_MAX.items())
def test_what_is_read_first_is_short(name: str, lines: int) -> None:
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= lines


@pytest.mark.parametrize("name", ["own_loop.py", "own_data.py", "hf_trainer.py", "lora_chat.py"])
def test_an_example_is_short(name: str) -> None:
    assert len((ROOT / "examples" / name).read_text().splitlines()) < 60


def test_a_training_script_takes_part_with_less_than_fifteen_lines_more() -> None:
    code = (ROOT / "examples" / "own_loop.py").read_text().split('"""')[2].splitlines()
    added = [line for line in code if line.endswith("# +")]
    assert 5 < len(added) < 15
    assert all(line in added for line in code if "p2ptrain" in line or "swarm.step" in line)


def test_the_package_tells_mypy_that_it_is_typed() -> None:
    assert (ROOT / "p2ptrain" / "py.typed").exists()


def test_every_entry_of_the_log_opens_with_its_result_in_one_line() -> None:
    months = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "log").glob("20??-??.md"))]
    entries = [entry for month in months for entry in month.split("\n## ")[1:]]
    assert len(entries) > 60
    assert [entry.splitlines()[0] for entry in entries if not re.match(r".+\n\nResult: .{10,112}\n\n", entry)] == []


@pytest.mark.parametrize("page", HOUSE, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    """Checks names in backticks, relative to the project, the package, deploy/ or the page's own folder."""
    missing = []
    for number, line in outside_boxes(page):
        for text in re.findall(r"`([^`]*)`", line):
            for name in FILE.findall(text):
                is_named = not MADE_AT_WORK.match(name) and name in text.split()  # else it is a part of something
                if is_named and not any((folder / name).exists() for folder in (*FOLDERS, page.parent)):
                    missing.append(f"{number}: {name}")
    assert missing == []


def test_every_package_says_what_each_of_its_modules_does() -> None:
    packages = [path.parent for path in sorted((ROOT / "p2ptrain").glob("*/**/__init__.py"))]
    assert len(packages) > 15
    for package in packages:
        text = ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8"))) or ""
        paths = [*package.glob("*.py"), *(path.parent for path in package.glob("*/__init__.py"))]
        assert {*re.findall(r"`([a-z]\w*)`", text)} == {path.stem for path in paths} - {"__init__"}, package.name


def test_tests_that_a_page_selects_are_there() -> None:
    tests = list((ROOT / "tests").rglob("test_*.py"))
    for page in HOUSE:
        for word in SELECTED.findall(page.read_text(encoding="utf-8")):
            found = any(word in path.stem or f"{word}" in path.read_text(encoding="utf-8") for path in tests)
            assert found, f"{page.relative_to(ROOT)}: -k {word}"


def test_the_plot_shows_the_figures_that_the_page_tells() -> None:
    page = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    files = sorted((ROOT / "benchmarks" / "figures").glob("learning*.json"))
    for row in [row for file in files for row in json.loads(file.read_text())["rows"]]:
        loss = f"{row['loss']:.3f}" + (f" ± {row['deviation']:.3f}" if row["deviation"] else "") + "*" * row["edge"]
        ratio = 4 * row["parameters"] / row["bytes_per_peer_step"]
        assert f"| {row['method']} | {loss} | {row['bytes_per_peer_step']:,.0f} | {ratio:,.0f} |" in page


def test_the_page_of_the_rules_tells_the_figures_of_its_plot() -> None:
    page = (DOCS / "explanation" / "rules.md").read_text(encoding="utf-8")
    rows = json.loads((ROOT / "benchmarks" / "figures" / "poison.json").read_text())["rows"]
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    for row in rows:
        ways = f"`{row['rule']}`", f"| {row['lie']} |", "liars absent"
        assert any(f"{row['loss']:.3f}" in line and any(way in line for way in ways) for line in lines), row


def test_every_cell_of_the_comparison_has_a_source_or_a_command() -> None:
    text = (DOCS / "explanation" / "compared.md").read_text(encoding="utf-8")
    sources = re.findall(r"^- \[(\d+)\] ", text, re.MULTILINE)
    tables = [part.split("\n\n")[0].splitlines() for part in text.split("\n\n| system | ")[1:]]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for table in tables for line in table[2:]]
    systems = [row[0] for row in rows]
    assert systems == systems[:9] * 3
    bare = [f"{row[0]}: {cell}" for row in rows for cell in row[1:] if not re.search(r"\[\d+\]|`|\]\(", cell)]
    assert bare == []
    assert sorted(sources, key=int) == sorted(set(re.findall(r"\[(\d+)\](?!\()", text)), key=int)


def test_the_payloads_that_the_recipes_tell_are_those_of_the_codec() -> None:
    page = (DOCS / "explanation" / "recipes.md").read_text(encoding="utf-8")
    parameters = 10_245_440
    told = re.findall(
        r"^\| (\d+), (\d+)(?: \(default\))? \| ([\d.]+) \| ([\d,]+) \| (.+) \| (.+) \|$", page, re.MULTILINE
    )
    assert len(told) == 6
    for chunk, k, *cells in told:
        recipe = {"name": "local", "chunk": int(chunk), "k": int(k)}
        run = RunConfig.model_validate({"name": "told", "model": {"preset": "10m"}, "recipe": recipe})
        assert parameter_count(run.model, run.adapt) == parameters
        payload, sent = Outer.of(run, shapes_of(run.model, run.adapt)).payload_bytes, int(chunk) ** 2 / int(k)
        ratios = f"{sent:.1f}", f"{32 * sent:,.0f}", f"{payload:,}", f"{4 * parameters / payload:.1f}"
        assert tuple(cells) == ratios


def test_the_pictures_are_small() -> None:
    assert sum(path.stat().st_size for path in (DOCS / "pictures").iterdir()) < 200_000


# ---------------------------------------------------------------------------------------------------
# What pages have one type


@pytest.mark.docs
@pytest.mark.timeout(TEST_SECONDS)
@pytest.mark.parametrize("sitting", SITTINGS)
def test_what_the_pages_say_works(sitting: str, tmp_path: Path) -> None:
    needs_run, names = SITTINGS[sitting]
    with swarm_in(tmp_path) as swarm:
        address = swarm.first("theirs").start().until_up().address if needs_run else ""
        with reader_in(tmp_path / "reader", address) as reader:
            for name in names:
                reader.read(ROOT / name)


@pytest.mark.docs
@pytest.mark.timeout(TEST_SECONDS + INSTALL_SECONDS)
def test_the_wheel_alone_gives_what_the_tutorial_and_the_readme_say(tmp_path: Path) -> None:
    wheel = wheel_in(tmp_path)
    with reader_in(tmp_path / "reader", wheel=wheel) as reader:
        for name in FROM_THE_WHEEL:
            reader.read(ROOT / name)
        with urlopen(reader.nodes[-1].status["http"], timeout=SECONDS) as page:
            assert b"<title>p2ptrain" in page.read()
        (package,) = (reader.folder / ".venv" / "lib").glob("python3*/site-packages/p2ptrain")
        shipped = {str(file.relative_to(ROOT / "examples")) for file in (ROOT / "examples").rglob("*.*")}
        assert {"own_loop.py", "notebook.ipynb", "tiny.toml"} <= shipped
        found = {str(file.relative_to(package / "examples")) for file in (package / "examples").rglob("*.*")}
        assert {name for name in shipped if "__pycache__" not in name} <= found


@pytest.mark.hf
@pytest.mark.timeout(TEST_SECONDS)
def test_what_the_pages_say_works_with_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers: make test-hf installs it")
    with reader_in(tmp_path / "reader") as reader:
        raw = raw_config("llama", vocab_size=512, max_position_embeddings=512)
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**raw))
        model.save_pretrained(reader.folder / "my-model")
        (reader.folder / "my-model" / "tokenizer.json").write_bytes(tokenizer_json())
        for name in WITH_TRANSFORMERS:
            reader.read(ROOT / name)
