"""`import p2ptrain`: a script and its node."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

import p2ptrain
from p2ptrain import ConfigError, DataError, NodeEndedError, P2ptrainError, Swarm, TrainingError
from tests.helpers.daemons import LISTEN, OWN, TEST_SECONDS

NAMES = [
    "ConfigError", "DataError", "DeviceError", "MemoryShortError", "NodeEndedError", "P2ptrainError", "Swarm",
    "TrainingError", "__version__", "join", "simulate", "start",
]  # fmt: skip
RUN = {"name": "lib", "model": {"sequence_length": 32}, "recipe": {"local_steps": 3, "k": 64, "learning_rate": 0.7}}
IMPORT_SECONDS = 0.2
NOBODY = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWM87ULyCQ4p5uagyH3ypi1uA1kM2paeTuzQhvQtzAb3C9"

pytestmark = pytest.mark.timeout(TEST_SECONDS)


class Net(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.scale = nn.Parameter(torch.ones(()))

    def loss(self, batch: Tensor) -> Tensor:
        logits = self.head(self.tokens(batch[:, :-1])) * self.scale
        return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


@pytest.fixture(autouse=True)
def _own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**OWN, "P2PTRAIN_NETWORK__LISTEN": LISTEN}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "node"
    assert [each for each in psutil.Process().children() if is_beside_a_script(each)] == []


def is_beside_a_script(process: psutil.Process) -> bool:
    try:
        return "p2ptrain.daemon.script" in process.cmdline()
    except psutil.Error:  # it has just ended
        return False


def started(here: Path, net: nn.Module | None = None, **options: Any) -> Swarm:
    net = net or Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    return p2ptrain.start(net, optimizer, directory=here, **{"run": RUN, **options})


def train(swarm: Swarm, rounds: int) -> list[float]:
    losses = []
    for batch in swarm.batches(rounds):
        loss = swarm.model.loss(batch)
        loss.backward()
        losses.append(float(loss.detach()))
        swarm.step(loss)
    return losses


def test_the_public_names_are_these_and_all_are_there() -> None:
    assert p2ptrain.__all__ == NAMES
    assert all(getattr(p2ptrain, name).__doc__ for name in NAMES)
    with pytest.raises(AttributeError, match="no attribute 'stop'"):
        p2ptrain.stop  # noqa: B018


def test_importing_it_costs_nothing_heavy() -> None:
    def seconds(code: str) -> float:
        began = monotonic()
        subprocess.run([sys.executable, "-c", code], check=True)
        return monotonic() - began

    subprocess.run([sys.executable, "-c", "import p2ptrain, sys; assert 'torch' not in sys.modules"], check=True)
    assert min(seconds("import p2ptrain") for _ in range(5)) - min(seconds("") for _ in range(5)) < IMPORT_SECONDS


def test_a_model_of_ones_own_is_trained_saved_and_gone_on_with(here: Path, tmp_path: Path) -> None:
    net = Net()
    with started(here, net) as swarm:
        before = swarm.evaluate(net.loss)
        losses = train(swarm, 6)
        assert len(losses) == 18
        assert sum(losses[-3:]) < sum(losses[:3]) - 0.5
        assert net.training
        assert swarm.evaluate(net.loss) < before - 0.2
        status = swarm.status()
        assert (status["run_name"], status["mine"]["tokens"]) == ("lib", 18 * 8 * 32)
        swarm.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    other = Net()  # from other random numbers
    with started(here, other) as swarm:
        assert swarm.round > 6
        swarm.save_pretrained(tmp_path / "again")
        again = load_file(tmp_path / "again" / "model.safetensors")
        found = dict(other.named_parameters())
        for name, weights in again.items():
            assert torch.equal(weights, found[name])
        assert all(torch.equal(saved[name], again[name]) for name in saved)
        train(swarm, 2)


def test_a_loss_that_is_not_finite_is_told_and_the_loop_may_go_on(here: Path) -> None:
    net = Net()
    with started(here, net) as swarm:
        train(swarm, 1)
        weights = [each.detach().clone() for each in net.parameters()]
        for batch in swarm.batches(1):
            loss = net.loss(batch) * math.nan
            loss.backward()
            with pytest.raises(TrainingError, match="the loss is not finite in step 0"):
                swarm.step(loss)
            break
        assert all(torch.equal(each, was) for each, was in zip(net.parameters(), weights, strict=True))
        assert swarm.step(1.0)  # takes the round up again
        train(swarm, 2)
        with torch.no_grad():
            net.scale.fill_(math.inf)
        with pytest.raises(TrainingError, match="a weight is not finite in step 2"):
            while not swarm.step(1.0):
                pass
        assert swarm.step(1.0)
        assert all(map(math.isfinite, train(swarm, 1)))


def test_in_the_middle_of_a_round_what_is_told_is_of_the_agreed_weights(here: Path, tmp_path: Path) -> None:
    net = Net()
    net.tokens.eval()
    with started(here, net) as swarm:
        train(swarm, 1)
        agreed = [each.detach().clone() for each in net.parameters()]
        before = swarm.evaluate(net.loss)
        for batch in swarm.batches():
            net.loss(batch).backward()
            assert not swarm.step(5.0)
            assert all(each.grad is None for each in net.parameters())
            with pytest.raises(ConfigError, match=r"batches\(\) was asked again before step"):
                for _ in swarm.batches():
                    pass
            break
        own = [each.detach().clone() for each in net.parameters()]
        assert not any(torch.equal(each, was) for each, was in zip(own, agreed, strict=True))
        assert swarm.evaluate(net.loss) == before
        swarm.save_pretrained(tmp_path / "saved")
        saved = load_file(tmp_path / "saved" / "model.safetensors")
        assert all(torch.equal(saved[name], was) for (name, _), was in zip(net.named_parameters(), agreed, strict=True))
        assert all(torch.equal(each, was) for each, was in zip(net.parameters(), own, strict=True))
        assert (net.training, net.tokens.training) == (True, False)
        with pytest.raises(DataError, match="no held-out sequence"):
            swarm.evaluate(net.loss, -1)
        net.scale = nn.Parameter(torch.ones(2))
        with pytest.raises(ConfigError, match=r"the model has no scale \[\] any more"):
            swarm.load_agreed()


def test_gradients_may_be_sparse(here: Path) -> None:
    net = nn.Embedding(256, 8, sparse=True)
    optimizer = torch.optim.SparseAdam(net.parameters(), lr=0.01)
    with p2ptrain.start(net, optimizer, directory=here, run=RUN) as swarm:
        tokens = torch.tensor([1, 2, 2])
        while swarm.round < 2:
            loss = net(tokens).square().mean()
            loss.backward()
            swarm.step(loss)
        (net(tokens) * math.inf).sum().backward()
        with pytest.raises(TrainingError, match="the gradient is not finite"):
            swarm.step(1.0)


def test_a_gradient_that_is_not_finite_does_not_stay_in_the_optimizer(here: Path) -> None:
    net = Net()
    with started(here, net) as swarm:
        train(swarm, 1)
        net.loss(next(swarm.batches())).backward()
        net.scale.grad = torch.tensor(math.nan)
        with pytest.raises(TrainingError, match="the gradient is not finite in step 0"):
            swarm.step(5.0)
        assert all(map(math.isfinite, train(swarm, 2)))


def test_who_is_interrupted_anywhere_may_go_on(here: Path) -> None:
    net, interrupts = Net(), 0
    with started(here, net) as swarm:

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            while interrupts < 40 or swarm.round < 10:
                signal.setitimer(signal.ITIMER_REAL, 0.02 + 0.1 * (interrupts % 7) / 7)
                try:
                    for batch in swarm.batches():
                        loss = net.loss(batch)
                        loss.backward()
                        swarm.step(loss)
                except KeyboardInterrupt:
                    interrupts += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        train(swarm, 2)


def test_a_copy_of_the_script_neither_leaves_for_it_nor_keeps_its_place(here: Path) -> None:
    with started(here) as swarm:
        if (copy := os.fork()) == 0:
            swarm.leave()
            os._exit(7 if swarm._socket.fileno() == -1 else 8)
        assert os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]) == 7
        train(swarm, 1)


def test_a_node_that_dies_is_told_with_the_end_of_its_log(here: Path) -> None:
    with started(here) as swarm:
        swarm._node.send_signal(signal.SIGKILL)
        with pytest.raises(NodeEndedError, match=r"status -9; .*node\.log ends with"):
            train(swarm, 3)


def test_what_a_node_refuses_is_raised_where_it_was_asked_for(here: Path, tmp_path: Path) -> None:
    with started(here) as swarm:
        with pytest.raises(P2ptrainError, match="in use"):
            started(here)
        assert [each.name for each in tmp_path.iterdir()] == ["node"]
        with pytest.raises(ConfigError, match=r"tokens\.weight is \[256, 8\] in the script's model, and \[256, 16\]"):
            p2ptrain.join(swarm.address, Net(8), directory=tmp_path / "b")
        less, more = Net(), Net()
        del less.scale
        more.extra = nn.Linear(3, 3)
        with pytest.raises(ConfigError, match=r"the script's model has no scale \[\]"):
            p2ptrain.join(swarm.address, less, directory=tmp_path / "c")
        with pytest.raises(ConfigError, match=r"the run does not train extra\.bias, which trains in the script's"):
            p2ptrain.join(swarm.address, more, directory=tmp_path / "d")
        train(swarm, 1)


def test_what_does_not_train_is_the_same_everywhere(here: Path, tmp_path: Path) -> None:
    def with_base(value: float) -> Net:
        net = Net()
        net.base = nn.Linear(3, 3).requires_grad_(False)
        nn.init.constant_(net.base.weight, value)
        nn.init.zeros_(net.base.bias)
        return net

    with started(here, with_base(1.0)) as swarm:
        train(swarm, 1)
        assert swarm.model.base.weight[0, 0] == 1.0
        with pytest.raises(ConfigError, match="the parameters that do not train are others than in the run"):
            p2ptrain.join(swarm.address, with_base(2.0), directory=tmp_path / "b")


@pytest.mark.parametrize(
    ("run", "what"),
    [
        ({"name": "x", "recipe": {"name": "distro"}}, "takes one gradient a round.*recipe local"),
        ({"name": "x", "recipe": {"local_step": 3}}, "the script: recipe.local_step: unknown key.*local_steps"),
        ({"name": "x", "model": {"preset": "1m"}}, r"the script's model has no embed_tokens\.weight \[256, 128\]"),
        ("nowhere.toml", "nowhere.toml: cannot be read"),
    ],
    ids=["a recipe of gradients", "a wrong key", "the built-in model", "no file"],
)
def test_a_run_that_cannot_be_begun_is_refused(here: Path, run: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        started(here, run=run)


@pytest.mark.parametrize(
    ("net", "what"),
    [
        (lambda: Net().half(), r"model: scale is float16\. Keep the weights in float32"),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), "BatchNorm1d 1 keeps running averages"),
        (lambda: Net().requires_grad_(False), "no parameter trains"),
        (lambda: nn.ModuleDict({"a b": nn.Linear(2, 2)}), r"'a b\.weight' has other characters than letters, digits"),
        (lambda: nn.ParameterDict({"weight": torch.ones(0)}), r"weight has no elements\. Remove it"),
    ],
    ids=["half precision", "running averages", "frozen", "a name with a blank", "an empty parameter"],
)
def test_a_model_that_cannot_be_agreed_on_is_refused_before_a_node_is_started(here: Path, net: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        p2ptrain.start(net(), directory=here)
    assert not here.exists()


def test_a_script_that_ends_without_a_word_leaves(here: Path) -> None:
    code = (
        "import os, sys, p2ptrain; from torch import nn; s = p2ptrain.start(nn.Linear(64, 64), directory=sys.argv[1]); "
    )
    for end in ("os._exit(3)", "1 / 0"):
        subprocess.run([sys.executable, "-c", code + end, str(here)], check=False, capture_output=True)
        with started(here, nn.Linear(64, 64), run=None):  # waits for nobody: the directory is free, or soon is
            pass
    assert (here / "node.log").read_text().count("left: ended") == 4


def test_a_script_that_waits_for_an_address_is_told_why(here: Path) -> None:
    code = (
        "import sys, p2ptrain; from torch import nn; p2ptrain.join(sys.argv[2], nn.Linear(4, 4), directory=sys.argv[1])"
    )
    command = [sys.executable, "-c", code, str(here), NOBODY]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as script:
        assert script.stderr is not None
        told = next(script.stderr)
        script.send_signal(signal.SIGINT)
    assert told.startswith(f"cannot connect to {NOBODY}: nobody listens there")
    assert script.returncode == -signal.SIGINT


def test_the_page_about_it_works(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "use-from-python.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "others join with /ip4/" in done.stdout
    assert float(done.stdout.split("held out: ")[1]) < 4.5
    assert (tmp_path / "trained" / "model.safetensors").exists()


def test_the_notebook_works(tmp_path: Path) -> None:
    cells = json.loads((Path(__file__).parents[2] / "examples" / "notebook.ipynb").read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split("held out ")[1].split()[0]) < 4.5
    assert "1 members; " in done.stdout
    assert (tmp_path / "notebook-model" / "model.safetensors").exists()


def test_a_simulated_swarm_learns_and_its_replicas_are_one() -> None:
    torch.manual_seed(1)
    tokens = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    places = torch.randint(len(tokens) - 33, (10_000, 8))
    batches = (torch.stack([tokens[place : place + 33] for place in row]) for row in places.tolist())
    net = Net()
    rows = p2ptrain.simulate(net, batches, Net.loss, peers=3, rounds=8, recipe={"local_steps": 3, "learning_rate": 0.9})
    assert [row.number for row in rows] == list(range(1, 9))
    assert rows[-1].loss < rows[0].loss - 0.15
    assert rows[0].payload_bytes == rows[-1].payload_bytes > 100
    with pytest.raises(ConfigError, match="only steps move weights"):
        p2ptrain.simulate(net, batches, Net.loss, recipe={"name": "demo"})
    with pytest.raises(DataError, match="the data has ended"):
        p2ptrain.simulate(net, iter([]), Net.loss)
