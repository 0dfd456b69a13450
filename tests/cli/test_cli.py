"""The commands as a user types them: output on stdout and stderr, and exit status."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from p2ptrain import __version__
from p2ptrain.config import NodeConfig, RunConfig, load_config, load_run_config
from p2ptrain.config.text import to_toml
from p2ptrain.errors import DataError
from tests.helpers.cli import p2ptrain

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "tiny.toml"
HELP_SECONDS_MAX = 0.3  # longer, and a command feels stuck; about 0.15 is usual
# What no one needs for help, and takes long to import.
HEAVY = ("torch", "hivemind", "numpy", "pydantic", "pydantic_settings", "rich", "msgspec", "tokenizers", "aiohttp")


def process(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a command in its own process."""
    command = [sys.executable, "-W", "error", "-m", "p2ptrain", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


# ---------------------------------------------------------------------------------------------------
# Help


def test_help_answers_at_once() -> None:
    def seconds() -> float:
        start = time.perf_counter()
        assert process("--help").returncode == 0
        return time.perf_counter() - start

    assert min(seconds() for _ in range(5)) < HELP_SECONDS_MAX  # the best: others may be using the machine


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['p2ptrain', '--help']\n"
        "from p2ptrain.cli import main\n"
        "assert main() == 0\n"
        "print(sorted(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "'p2ptrain.cli'" in done.stderr
    assert [name for name in HEAVY if f"'{name}'" in done.stderr] == []


@pytest.mark.parametrize("command", ["join", "runs"])
def test_without_an_address_to_ask_it_ends_before_anything_opens(command: str, tmp_path: Path) -> None:
    code = (
        f"import sys; sys.argv = ['p2ptrain', {command!r}]\n"
        "from p2ptrain.cli import main\n"
        "status = main()\n"
        "assert 'torch' not in sys.modules\n"
        "sys.exit(status)"
    )
    place = {**os.environ, "HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT, env=place
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("--bootstrap: no address to ask. ")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("arguments", "commands"),
    [
        (
            (),
            [
                "start",
                "join",
                "lend",
                "leave",
                "pause",
                "resume",
                "limit",
                "status",
                "swarm",
                "peers",
                "agenda",
                "propose",
                "assent",
                "runs",
                "invite",
                "doctor",
                "demo",
                "export",
                "generate",
                "evaluate",
                "audit",
                "receipt",
                "report",
                "simulate",
                "replay",
                "config",
                "data",
                "checkpoint",
                "identity",
            ],
        ),
        (("config",), ["check", "example", "schema", "show"]),
        (("data",), ["prepare"]),
        (("checkpoint",), ["list", "export", "copy", "now"]),
        (("identity",), ["show", "new", "path"]),
    ],
)
def test_without_a_command_it_lists_them(
    arguments: tuple[str, ...], commands: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = p2ptrain(capsys, *arguments)
    listed = [line.split()[0] for line in out.partition("Commands:\n")[2].splitlines()]
    assert (status, listed, err) == (0, commands, "")
    assert p2ptrain(capsys, *arguments, "--help") == (status, out, err)


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert p2ptrain(capsys, "--version") == (0, f"p2ptrain {__version__}\n", "")


# ---------------------------------------------------------------------------------------------------
# Errors


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["cofig"], "No such command 'cofig'. Did you mean 'config'?\nTry: p2ptrain --help\n"),
        (["config", "check"], "Missing argument 'file'.\nTry: p2ptrain config check --help\n"),
        (["--loud"], "No such option: --loud\nTry: p2ptrain --help\n"),
        (["config", "schema", "all"], "Try: p2ptrain config schema --help\n"),
        (
            ["config", "check", "none.toml"],
            "none.toml: cannot be read: No such file or directory. Check the name and the permissions\n",
        ),
        (
            ["data", "prepare", "out", "--held-out", "100"],
            "Invalid value for --held-out: 100 is out of range: choose at least 0 and less than 100\n"
            "Try: p2ptrain data prepare --help\n",
        ),
        (["data", "prepare", "out", "--held-out", "x"], "Try: p2ptrain data prepare --help\n"),
    ],
)
def test_a_mistake_of_the_user_is_told_on_stderr_with_status_2(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = p2ptrain(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.endswith(complaint)
    assert "Usage" not in err
    assert len(err.splitlines()) <= 2


@pytest.mark.parametrize("command", ["status", "export", "config"])
def test_in_a_directory_that_was_deleted_a_command_says_what_to_do(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    complaint = "the directory that this was started in has been deleted. Change to another, such as by `cd`\n"
    assert p2ptrain(capsys, command) == (2, "", complaint)


def test_a_typo_in_a_file_is_told_without_a_traceback(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(TINY.read_text().replace("warmup_rounds", "warmpu_rounds"))
    done = process("config", "check", file)
    expected = f"{file}: recipe.warmpu_rounds: unknown key. Did you mean warmup_rounds?\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)


def test_a_failure_of_the_world_is_told_with_status_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: object, **__: object) -> None:
        raise DataError("the disk is full")

    monkeypatch.setattr("p2ptrain.cli.data.make", full)
    assert p2ptrain(capsys, "data", "prepare", tmp_path, "--embedded") == (1, "", "the disk is full\n")


def test_the_end_of_the_input_where_something_is_asked_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(_: str) -> str:
        raise EOFError

    monkeypatch.setattr("p2ptrain.cli.node.getpass", ended)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    assert p2ptrain(capsys, "lend", "/ip4/127.0.0.1/tcp/4100") == (2, "", "\nnothing was entered\n")


def test_a_demo_that_cannot_be_kept_there_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("notes")
    status, out, err = p2ptrain(capsys, "demo", "--keep", tmp_path / "notes.txt")
    assert (status, out) == (1, "") and err.startswith(f"{tmp_path / 'notes.txt'}: cannot be made")


def test_a_bug_of_ours_keeps_its_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(_: object) -> None:
        raise AssertionError("ours")

    monkeypatch.setattr("p2ptrain.cli.config.load_config", wrong)
    with pytest.raises(AssertionError, match="ours"):
        p2ptrain(capsys, "config", "check", TINY)


def test_ctrl_c_ends_a_command_with_status_130_and_without_a_traceback(tmp_path: Path) -> None:
    waits = tmp_path / "pipe.toml"
    os.mkfifo(waits)
    code = (
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
        f"sys.argv = ['p2ptrain', 'config', 'check', {str(waits)!r}]\n"
        "from p2ptrain.cli import main\n"
        "sys.exit(main())"
    )
    command = [sys.executable, "-c", code]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    with child:
        with waits.open("w"):  # opens when the command has opened it to read; it then waits for us to write or close
            child.send_signal(signal.SIGINT)
        out, err = child.communicate()
    assert (child.returncode, out, err.strip()) == (130, "", "")


def test_a_ctrl_c_while_it_is_being_loaded_ends_it_so_as_well() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"] == {
        "p2ptrain": "p2ptrain.__main__:main"
    }
    code = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from p2ptrain.__main__ import main\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, *_):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_reader_that_goes_away_is_no_bug() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-W", "error", "-m", "p2ptrain", "config", "schema"]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, check=False, cwd=ROOT)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (1, "")


# ---------------------------------------------------------------------------------------------------
# p2ptrain config


def test_check_says_what_a_run_weighs(capsys: pytest.CaptureFixture[str]) -> None:
    from p2ptrain.exact.codec import PayloadFormat
    from p2ptrain.exact.transform import Layout
    from p2ptrain.models.built_in import Transformer

    run = load_run_config(TINY)
    shapes = [tuple(parameter.shape) for parameter in Transformer(run.model).parameters()]
    payload = PayloadFormat.of(Layout(shapes, run.recipe.chunk), run.recipe).payload_bytes
    count = sum(parameter.numel() for parameter in Transformer(run.model).parameters())
    expected = (
        f"{TINY}: OK, a run\n"
        f"model    {count:,} parameters\n"
        f"payload  {payload:,} bytes a contribution\n"
        "run id   none until the run is started with its data\n"
    )
    assert p2ptrain(capsys, "config", "check", TINY) == (0, expected, "")


def test_check_says_the_id_of_a_sealed_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = load_run_config(TINY).sealed(manifest="ab" * 32, initial_root="cd" * 32, founders=["ef" * 32])
    file = tmp_path / "run.toml"
    file.write_text(to_toml(run))
    status, out, err = p2ptrain(capsys, "config", "check", file)
    assert (status, out.splitlines()[-1], err) == (0, f"run id   {run.run_id}", "")


def test_check_knows_a_nodes_file(capsys: pytest.CaptureFixture[str]) -> None:
    file = ROOT / "node_config.example.toml"
    assert p2ptrain(capsys, "config", "check", file) == (0, f"{file}: OK, a node's settings\n", "")


def test_check_says_that_a_plugin_has_to_be_allowed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "theirs.toml"
    file.write_text('name = "theirs"\n[recipe]\nplugin = "not-there 1.0"\n')
    assert p2ptrain(capsys, "config", "check", file)[0] == 0, "its size does not depend on the plug-in"
    file.write_text('name = "theirs"\n[model]\nkind = "plugin"\nplugin = "not-there 1.0"\n')
    status, out, err = p2ptrain(capsys, "config", "check", file)
    assert (status, out) == (2, "")
    assert err.startswith("model.plugin: this run takes its model from the package not-there 1.0, which is not allowed")
    monkeypatch.setenv("P2PTRAIN_PLUGINS__ALLOW", "not-there 1.0")
    status, out, err = p2ptrain(capsys, "config", "check", file)
    assert (status, out) == (2, "")
    assert err.endswith("Install that one: pip install not-there==1.0, or from where those who run it say\n")


@pytest.mark.parametrize(("arguments", "model"), [((), RunConfig), (("run",), RunConfig), (("node",), NodeConfig)])
def test_schema_is_the_models_and_describes_every_key(
    arguments: tuple[str, ...], model: type[RunConfig] | type[NodeConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = p2ptrain(capsys, "config", "schema", *arguments)
    schema = json.loads(out)
    assert (status, schema, err) == (0, model.model_json_schema(), "")
    undescribed = [
        f"{name}.{key}"
        for name, table in schema["$defs"].items()
        for key, field in table["properties"].items()
        if not field.get("description")
    ]
    assert undescribed == []


@pytest.mark.parametrize("file", [TINY, ROOT / "node_config.example.toml"], ids=lambda file: file.name)
def test_show_prints_a_file_with_all_values_that_means_the_same(
    file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, out, err = p2ptrain(capsys, "config", "show", file)
    assert (status, err) == (0, "")
    (tmp_path / "shown.toml").write_text(out)
    assert load_config(tmp_path / "shown.toml") == load_config(file)
    shown = tomllib.loads(out)
    assert set(shown) == set(type(load_config(file)).model_fields)


def test_show_canonical_prints_the_bytes_of_the_run_id() -> None:
    done = process("config", "show", TINY, "--canonical")
    assert (done.returncode, done.stdout.encode(), done.stderr) == (0, load_run_config(TINY).canonical(), "")


def test_a_node_has_no_canonical_bytes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text("[device]")
    status, out, err = p2ptrain(capsys, "config", "show", file, "--canonical")
    assert (status, out) == (2, "")
    assert (
        err.splitlines()[-1] == f"{file}: device: unknown key. It belongs in the other kind of config, that of a node"
    )


# ---------------------------------------------------------------------------------------------------
# p2ptrain data prepare


def test_prepare_prints_the_lines_for_a_run_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox\n" * 1_000)
    status, out, err = p2ptrain(capsys, "data", "prepare", tmp_path / "out", text, "--held-out", "0")
    assert (status, err) == (0, "")
    (tmp_path / "run.toml").write_text(f'name = "a"\n{out}')
    run = load_run_config(tmp_path / "run.toml")

    from p2ptrain.data.dataset import TokenDataset

    dataset = TokenDataset.open(tmp_path / "out", run.data.manifest)
    tokens = dataset.manifest.training.tokens
    assert tokens >= 20_000
    assert out.splitlines()[0] == f"# {tokens:,} tokens to train on, 0 held out: {tmp_path / 'out'}"
    assert (run.tokenizer.kind, run.tokenizer.digest) == (dataset.tokenizer.kind, dataset.tokenizer.digest)


def test_prepare_takes_files_of_any_name_and_columns_of_text_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = tmp_path / "caf\udce9.txt"  # Latin-1 on the disk
    text.write_text("the quick brown fox\n" * 1_000)
    assert p2ptrain(capsys, "data", "prepare", tmp_path / "out", text)[0] == 0
    status, _, err = p2ptrain(capsys, "data", "prepare", tmp_path / "other", text, "--column", "caf\udce9")
    assert (status, err) == (2, "--column: not UTF-8. Name a key or a column of the files\n")


def test_prepare_with_a_tokenizer_prints_its_digest_and_vocabulary(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    library = Tokenizer(WordLevel({"[UNK]": 0, "fox": 1, "dog": 2}, unk_token="[UNK]"))
    library.pre_tokenizer = Whitespace()
    library.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("fox dog " * 500)
    arguments = ("data", "prepare", tmp_path / "out", tmp_path / "text.txt", "--tokenizer", tmp_path / "tokenizer.json")
    status, out, err = p2ptrain(capsys, *arguments)
    assert (status, err) == (0, "")
    (tmp_path / "run.toml").write_text(f'name = "a"\n{out}')
    run = load_run_config(tmp_path / "run.toml")

    from p2ptrain.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert (run.tokenizer.kind, run.tokenizer.digest) == ("json", tokenizer.digest)
    assert run.model.vocab_size == tokenizer.vocab_size == 4


def test_prepare_holds_out_the_share_that_is_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from fractions import Fraction

    seen: dict[str, object] = {}

    def spy(*_: object, **named: object) -> None:
        seen.update(named)
        raise DataError("seen")

    monkeypatch.setattr("p2ptrain.cli.data.make", spy)
    p2ptrain(capsys, "data", "prepare", tmp_path, "--embedded", "--held-out", "2.5")
    assert (seen["held_out"], seen["embedded"]) == (Fraction(1, 40), True)
    p2ptrain(capsys, "data", "prepare", tmp_path)
    assert (seen["held_out"], seen["embedded"]) == (Fraction(1, 100), False)


def test_prepare_shows_its_progress_on_a_terminal(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox\n" * 1_000)
    master, slave = os.openpty()
    command = [sys.executable, "-m", "p2ptrain", "data", "prepare", str(tmp_path / "out"), str(text)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=slave, env=environment, check=True, cwd=ROOT)
    os.close(slave)
    shown = os.read(master, 65_536).decode()
    os.close(master)
    assert "20.0/20.0 kB" in shown
    assert b"\n[data]\nmanifest = " in done.stdout


RECIPES = sorted(path.stem for path in (ROOT / "examples" / "recipes").glob("*.toml"))


def test_an_example_is_printed_to_begin_with_and_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = p2ptrain(capsys, "config", "example")
    assert (status, [line.split()[0] for line in out.splitlines()]) == (
        0,
        ["masked", "digits", "noisy", *RECIPES, "several_processes", "tiny", "node"],
    )
    status, out, _ = p2ptrain(capsys, "config", "example", "tiny")
    assert (status, out) == (0, (ROOT / "examples" / "tiny.toml").read_text())
    status, out, _ = p2ptrain(capsys, "config", "example", "node")
    assert (status, out) == (0, (ROOT / "node_config.example.toml").read_text())
    status, _, err = p2ptrain(capsys, "config", "example", "huge")
    names = ", ".join(["masked", "digits", "noisy", *RECIPES, "several_processes", "tiny", "node"])
    assert (status, err) == (2, f"NAME: there is no example 'huge'. Take one of {names}\n")


def test_an_example_is_utf8_whatever_the_terminal_has() -> None:
    """It is read as UTF-8, and one names a person whose name has other letters than ASCII."""
    command = [sys.executable, "-m", "p2ptrain", "config", "example", "muloco"]
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    printed = subprocess.run(command, env=environment, capture_output=True, check=True).stdout
    assert printed == (ROOT / "examples" / "recipes" / "muloco.toml").read_bytes() and not printed.isascii()
