"""A script's place in a swarm: the library's functions and classes, used as `import p2ptrain`.

The node runs in a process of its own (p2ptrain/loop), so a script may think for ten minutes, stop at a breakpoint or
evaluate: the others do not wait for it. `step` is called after each backward pass; at the end of a round it contributes
how far the weights have moved, and puts the agreed weights into the model."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import re
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from operator import index
from pathlib import Path
from time import perf_counter
from typing import Any, ParamSpec, Self, TypeVar
from weakref import WeakSet

import msgspec
import platformdirs
import torch
from safetensors.torch import save_model
from torch import Tensor

from p2ptrain import errors
from p2ptrain.core.pace import takes_another
from p2ptrain.errors import ConfigError, NodeEndedError, P2ptrainError, TrainingError
from p2ptrain.loop import channel
from p2ptrain.loop.channel import Begin, NodeAnswer, ScriptRequest
from p2ptrain.models.kinds import frozen_digest, refuse_trained_buffers
from p2ptrain.node.control import ask

LOG_LINES = 5  # of it in the message, if the node dies

NAME = re.compile(r"[A-Za-z0-9_.]{1,150}")  # of a parameter
RENAME = "Rename the module that has it"

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger("p2ptrain")
_OPEN: WeakSet[Swarm] = WeakSet()
_DECODER = msgspec.msgpack.Decoder(NodeAnswer)


def keeps_gradients(function: Callable[P, T]) -> Callable[P, T]:
    """Leaves gradients on or off as they were, wherever the function is interrupted.

    An interrupt just after torch.no_grad has turned them off, before its block begins, would leave them off for good.
    """

    @wraps(function)
    def keeping(*args: P.args, **kwargs: P.kwargs) -> T:
        before = torch.is_grad_enabled()
        try:
            try:
                return function(*args, **kwargs)
            finally:
                torch.set_grad_enabled(before)
        finally:  # the first may have been interrupted
            torch.set_grad_enabled(before)

    return keeping


def start(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    run: Mapping[str, object] | str | Path | None = None,
    data: str | Path | None = None,
    directory: str | Path | None = None,
    config: str | Path | None = None,
    listen: Sequence[str] | None = None,
) -> Swarm:
    """Starts a run that trains this model, from its present weights, or goes on with the one begun in this directory.

    run: what a run file says, or its path, such as {"name": "mine", "recipe": {"local_steps": 20}}; data: a directory
    that `p2ptrain data prepare` made, for `Swarm.batches`; directory: the node's own, by default that of the command
    line; config: a node's settings file; listen: addresses, such as ["/ip4/0.0.0.0/tcp/4001"]"""
    begin = Begin(
        joins=False,
        run={} if run is None or isinstance(run, str | Path) else dict(run),
        options=_options(directory, listen),
        parameters=_trained(model),
        frozen=_frozen(model),
        run_file=str(run) if isinstance(run, str | Path) else "",
        config_file=str(config or ""),
        data=str(data or ""),
    )
    return Swarm(begin, model, optimizer)


def join(  # noqa: PLR0913  # a node has many settings
    address: str | Sequence[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    run: str = "",
    directory: str | Path | None = None,
    config: str | Path | None = None,
    listen: Sequence[str] | None = None,
    invitation: str = "",
    trust: str = "",
    data: str | Path | None = None,
) -> Swarm:
    """Joins the run of the node at this address, which trains the same model; its weights become the agreed ones.

    run: the id, if the node knows several, or how it begins; invitation: a text or file, if the run requires one;
    trust: join only a history with this head; data: this node's own, for `Swarm.batches` in a run with data.source =
    "own"; the rest as in `start`"""
    begin = Begin(
        joins=True,
        run={},
        options=_options(directory, listen) | {"network.bootstrap": [address] if isinstance(address, str) else address},
        parameters=_trained(model),
        frozen=_frozen(model),
        config_file=str(config or ""),
        data=str(data or ""),
        wanted=run,
        invitation=invitation,
        trust=trust,
    )
    return Swarm(begin, model, optimizer)


def _options(directory: str | Path | None, listen: Sequence[str] | None) -> dict[str, object]:
    place = Path(directory).expanduser() if directory else platformdirs.user_data_path("p2ptrain")
    return {"storage.directory": str(place)} | ({"network.listen": list(listen)} if listen else {})


def _trained(model: torch.nn.Module) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Returns names and shapes of the parameters that train. ConfigError if they, or a buffer, cannot be agreed on."""
    refuse_trained_buffers(model)
    found = [(_plain(name), each) for name, each in model.named_parameters() if each.requires_grad]
    for name, each in found:
        if each.dtype != torch.float32:
            fix = "Keep the weights in float32, and compute in less with torch.autocast"
            raise ConfigError(f"{name} is {str(each.dtype).removeprefix('torch.')}", key="model", fix=fix)
        if not NAME.fullmatch(name):
            raise ConfigError(f"{name!r} has other characters than letters, digits, _ and .", key="model", fix=RENAME)
        if not each.numel():
            raise ConfigError(f"{name} has no elements", key="model", fix="Remove it, or set requires_grad = False")
    if not found:
        raise ConfigError("no parameter trains", key="model", fix="Set requires_grad on those that should")
    return tuple((name, tuple(each.shape)) for name, each in found)


def _frozen(model: torch.nn.Module) -> str:
    """Returns the digest of the parameters that do not train."""
    return frozen_digest((_plain(name), each) for name, each in model.named_parameters() if not each.requires_grad)


def _plain(name: str) -> str:
    """Returns a parameter's name without what torch.compile and DistributedDataParallel put before it."""
    return re.sub(r"^(_orig_mod\.)?(module\.)?(_orig_mod\.)?", "", name)


class Swarm:
    """This script's place in a run. It is a context manager: leaving the block leaves the run.

    round: the one that is being trained; run_id: the run's id; addresses: the node's, for `join` on other machines;
    directory: the node's own, with its log"""

    def __init__(self, begin: Begin, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self.model, self.optimizer = model, optimizer
        self.directory = Path(str(begin.options["storage.directory"]))  # of the node, with its log
        self.round = 0  # that is being trained
        self._shapes = dict(begin.parameters)
        self._node, self._socket, self._memory = channel.spawn_node(begin.parameters, self.directory)
        named = {_plain(name): each for name, each in model.named_parameters()}
        weights = [named[name].detach().reshape(-1).cpu() for name, _ in begin.parameters]
        torch.cat(weights, out=self._memory.base)
        self._asked, self._received = 0, bytearray()
        self._work: channel.RoundToTrain | None = None
        self._losses: list[float] = []
        self._tokens, self._began = 0, 0.0
        self._calls = 0  # of `step`
        self._is_ending = False  # this round's steps are over
        self._process = os.getpid()
        _OPEN.add(self)
        atexit.register(self.leave)
        with contextlib.ExitStack() as stack:
            stack.callback(self.leave)
            self._send(ScriptRequest(0, begin))
            ready = self._await(0)
            assert isinstance(ready, channel.NodeReady)
            self.run_id, self.addresses = ready.run_id, list(ready.addresses)
            self._ready = ready
            self._take_next()
            stack.pop_all()

    @property
    def address(self) -> str:
        """An address for `join` on other machines, if this one can be reached from there."""
        return self.addresses[0]

    # -- Training -----------------------------------------------------------------------------------

    def batches(self, rounds: int | None = None) -> Iterator[Tensor]:
        """Yields the run's own data, a step's sequences at a time, for this many rounds; for ever without.

        Each is int64 [sequences, sequence_length + 1] on the model's device: inputs, and targets one further."""
        last = None if rounds is None else self.round + rounds
        while last is None or self.round < last:
            self._begin_if_over()
            calls = self._calls
            yield self._sequences(channel.TakeSequences(len(self._losses)), counts=True)
            if self._calls == calls:
                fix = "For gradient accumulation, split the batch, and call step() once"
                raise ConfigError("batches() was asked again before step()", fix=fix)

    @keeps_gradients
    def step(self, loss: Tensor | float) -> bool:
        """Ends a step: call it after the backward pass, or after your own optimizer's step if none was given.

        At the end of a round it waits for the others, and puts what was agreed into the model; then it returns True."""
        self._calls += 1
        value = float(loss.detach() if hasattr(loss, "detach") else loss)
        if self._begin_if_over():
            return True
        if not math.isfinite(value):
            self._drop(TrainingError("the loss", step=len(self._losses), positions=[]))
        if self.optimizer is not None:
            if not self._is_gradient_finite():  # or the optimizer would remember it
                self._drop(TrainingError("the gradient", step=len(self._losses), positions=[]))
            self.optimizer.step()
            self._clear_gradient()
        self._losses.append(value)
        self._memory.note_step()
        self._is_ending = self._is_over()
        if not self._is_ending:
            return False
        self._contribute()
        self._take_next()
        return True

    @keeps_gradients
    def evaluate(self, loss: Callable[[Tensor], Tensor], sequences: int = 0) -> float:
        """Returns the mean of a loss over held-out sequences [n, length + 1], with the weights that were agreed on."""
        batch = self._sequences(channel.TakeHeldOut(index(sequences)))
        with torch.no_grad(), self._agreed_weights():
            at_once = max(1, self._work.sequences) if self._work is not None else 1
            losses = [float(loss(part)) * len(part) for part in torch.split(batch, at_once)]
        return sum(losses) / len(batch)

    def status(self) -> dict[str, Any]:
        """Returns what `p2ptrain status --json` tells of this node."""
        return ask(Path(self._ready.directory), {"do": "status"})

    @keeps_gradients
    def save_pretrained(self, directory: str | Path) -> None:
        """Writes the weights that were agreed on: as the model does it, if it has this method, or model.safetensors."""
        with self._agreed_weights():
            save = getattr(self.model, "save_pretrained", None)
            if save is not None:
                save(directory)
                return
            Path(directory).mkdir(parents=True, exist_ok=True)
            save_model(self.model, str(Path(directory) / "model.safetensors"))

    # -- Leaving ------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Leaves the run, and waits until the node has saved and ended. Called again, it does nothing."""
        if os.getpid() != self._process:
            return  # a copy of the script: the swarm is its parent's
        atexit.unregister(self.leave)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # the node then leaves
        self._socket.close()
        try:
            self._node.wait(channel.LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            log.warning("the node does not end, and is killed; its directory %s is consistent", self.directory)
            self._node.kill()
            self._node.wait()
        except KeyboardInterrupt:  # a second one: it goes on saving by itself
            self._node.terminate()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    # -- Rounds -------------------------------------------------------------------------------------

    def _begin_if_over(self) -> bool:
        """Takes up the next round if there is none, or if the end of one was interrupted; returns whether it did."""
        if self._work is not None and not self._is_ending and len(self._losses) < self._ready.steps:
            return False
        if self._work is not None:
            self._contribute()
        self._take_next()
        self._clear_gradient()
        return True

    def _is_over(self) -> bool:
        assert self._work is not None
        done, ready = len(self._losses), self._ready
        pace = self._memory.pace(self._work.number)
        if pace is None:
            return done >= ready.steps
        each = (perf_counter() - self._began) / done
        return not takes_another(done, ready.steps_min, ready.steps, each, *pace)

    def _is_gradient_finite(self) -> bool:
        sums = [each.grad.sum() for each in self.model.parameters() if each.grad is not None]  # sparse ones as well
        return not sums or bool(torch.isfinite(torch.stack([each.to(sums[0].device) for each in sums])).all())

    def _contribute(self) -> None:
        """Gives the node how far this round's steps have moved the weights."""
        with torch.no_grad():
            for moved, base, parameter in self._parts():
                moved.copy_(parameter)
                torch.sub(base, moved, out=moved)
        if not math.isfinite(torch.linalg.vector_norm(self._memory.moved)):  # each by itself takes far longer
            self._drop(TrainingError("a weight", step=len(self._losses) - 1, positions=[]))
        losses, seconds = self._losses, perf_counter() - self._began
        self._work = None
        self._ask(channel.RoundTrained(len(losses), sum(losses) / len(losses), self._tokens, seconds))

    def _take_next(self) -> None:
        """Waits for the next round, and puts its weights into the model."""
        work = self._ask(channel.NextRound())
        assert isinstance(work, channel.RoundToTrain)
        self.load_agreed()
        self._work, self.round = work, work.number
        self._losses, self._tokens, self._began = [], 0, perf_counter()
        self._is_ending = False

    def _drop(self, error: TrainingError) -> None:
        """Gives up the round: nothing computed from what is not finite may reach the others."""
        self._work = None
        self._ask(channel.RoundDropped(str(error)))
        self.load_agreed()
        self._clear_gradient()
        raise error

    def _clear_gradient(self) -> None:
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)

    @keeps_gradients
    def load_agreed(self) -> None:
        """Puts the weights that were agreed on into the model; what it has learned since is lost."""
        with torch.no_grad():
            for _, base, parameter in self._parts():
                parameter.copy_(base)

    @contextlib.contextmanager
    def _agreed_weights(self) -> Iterator[None]:
        """Gives the model the weights that were agreed on inside the block, and its own again afterwards."""
        own = [parameter.detach().clone() for _, _, parameter in self._parts()]
        modes = [(module, module.training) for module in self.model.modules()]
        self.load_agreed()
        self.model.eval()
        try:
            yield
        finally:
            for module, is_training in modes:
                module.training = is_training
            with torch.no_grad():
                for (_, _, parameter), mine in zip(self._parts(), own, strict=True):
                    parameter.copy_(mine)

    def _parts(self) -> Iterator[tuple[Tensor, Tensor, torch.nn.Parameter]]:
        """Yields each parameter with its part of both halves of the shared memory, in the run's order."""
        place, named = 0, {_plain(name): each for name, each in self.model.named_parameters()}  # they may be new
        for name in self._ready.names:
            if (parameter := named.get(name)) is None or parameter.shape != self._shapes[name]:
                fix = "Change no parameter's name or shape between start() or join() and leave()"
                raise ConfigError(f"the model has no {name} {list(self._shapes[name])} any more", key="model", fix=fix)
            stop = place + parameter.numel()
            moved, base = (half[place:stop].view(parameter.shape) for half in (self._memory.moved, self._memory.base))
            yield moved, base, parameter
            place = stop

    def _sequences(self, request: channel.Request, counts: bool = False) -> Tensor:
        found = self._ask(request)
        assert isinstance(found, channel.Sequences)
        batch = torch.frombuffer(bytearray(found.data), dtype=torch.int32).view(found.count, -1)
        self._tokens += batch.shape[0] * (batch.shape[1] - 1) if counts else 0
        return batch.to(next(self.model.parameters()).device, torch.int64)

    # -- The channel --------------------------------------------------------------------------------

    def _ask(self, request: channel.Request) -> channel.Answer:
        self._asked += 1
        self._send(ScriptRequest(self._asked, request))
        return self._await(self._asked)

    def _send(self, asked: ScriptRequest) -> None:
        try:
            self._socket.sendall(channel.framed(asked))
        except OSError:
            self._await(asked.number)  # it may have said why

    def _await(self, number: int) -> channel.Answer:
        """Waits for the answer to a request. Raises what the node says instead, or that it has ended."""
        while True:
            try:
                answered = _DECODER.decode(channel.receive_frame(self._socket, self._received))
            except (OSError, EOFError):
                raise self._ended() from None
            match answered.body:
                case channel.NodeFailed(kind=kind, text=text) if answered.number in (0, number):
                    raise _error(kind, text)
                case channel.NodeNote(text=text) if answered.number == number:
                    log.warning("%s", text)
                case body if answered.number == number:
                    return body

    def _ended(self) -> NodeEndedError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._node.wait(channel.LEAVE_SECONDS)
        place = self.directory / channel.LOG_NAME
        last = "\n".join(place.read_text(errors="replace").splitlines()[-LOG_LINES:])
        status = self._node.returncode
        return NodeEndedError(f"the node has ended with status {status}; {place} ends with:\n{last}")


def _let_go_in_child() -> None:
    """Closes a forked copy's ends of its parent's swarms, or nodes would not see that their script has died."""
    for each in list(_OPEN):
        atexit.unregister(each.leave)
        each._socket.close()


os.register_at_fork(after_in_child=_let_go_in_child)


def _error(kind: str, text: str) -> P2ptrainError:
    """Makes the error that the node has raised."""
    found = getattr(errors, kind, P2ptrainError)
    error: P2ptrainError = found.__new__(found) if issubclass(found, P2ptrainError) else P2ptrainError()
    error.args = (text,)
    return error
