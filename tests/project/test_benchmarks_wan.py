"""The benchmarks on a line between homes: the relay delivers packets, and the rival has our inner optimizers."""

from __future__ import annotations

import argparse
import socket
from contextlib import ExitStack
from time import monotonic

import pytest
import torch

from p2ptrain.config import ModelConfig, RecipeConfig
from p2ptrain.models.built_in import Transformer, initialise
from p2ptrain.sim.scenario import LINES, Line
from p2ptrain.train.inner import INNER_OPTIMIZERS
from p2ptrain.train.live import LiveModel
from tests.helpers.benchmarks import load


def test_packets_arrive_once_in_their_order_late_and_are_counted() -> None:
    relay, began = load("relay"), monotonic()
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2)]
    with ExitStack() as stack:
        for end in (end for pair in pairs for end in pair):
            stack.enter_context(end).setblocking(False)
        line = Line(8_000.0, 8.0, 0.001, jitter_seconds=0.01)
        net = relay.Relay([ours.fileno() for ours, _ in pairs], [line], 1, ())
        head = bytes([0x45, *bytes(15)]) + relay.address_bytes(1)  # an IPv4 packet to the second
        for number in range(50):
            pairs[0][1].send((head + bytes([number])).ljust(100, b"."))
            net.take(0)
        while net.under_way:
            net.deliver()
        assert [pairs[1][1].recv(2_048)[20] for _ in range(50)] == list(range(50))
        with pytest.raises(BlockingIOError):
            pairs[1][1].recv(2_048)
    assert monotonic() - began >= 0.005, "fifty packets of a tenth of a millisecond each, on the uplink"
    sender, receiver = net.report()["hosts"]
    assert (sender["sent_packets"], sender["sent_bytes"], receiver["received_bytes"]) == (50, 5_000, 5_000)


def test_a_line_is_a_named_one_or_given_in_numbers_or_both() -> None:
    relay, parser = load("relay"), argparse.ArgumentParser()
    relay.add_line_options(parser)
    for given, line in (
        ([], Line(20.0, 20.0, 0.1)),
        (["--line", "lte"], LINES["lte"]),
        (["--rate", "5", "--delay", "30", "--jitter", "4", "--loss", "2"], Line(5.0, 5.0, 0.03, 0.004, 0.02)),
        (["--line", "dsl", "--delay", "80"], Line(50.0, 10.0, 0.08, 0.002)),
    ):
        assert relay.lines_of(parser.parse_args(given)) == [line]
    several = relay.lines_of(parser.parse_args(["--rate", "1/10", "100"]))
    assert several == [Line(10.0, 1.0, 0.1), Line(100.0, 100.0, 0.1)]


@pytest.mark.parametrize("inner", ["muon", "adamw"])
def test_the_rival_has_our_inner_optimizers(inner: str) -> None:
    theirs = load("torch_inner")
    config = ModelConfig(dim=16, layers=2, heads=2, kv_heads=1, ffn_dim=24, sequence_length=16)
    recipe = RecipeConfig(name="local", inner=inner, inner_weight_decay="1/100")  # type: ignore[arg-type]
    one, other = Transformer(config), Transformer(config)
    initialise(one, 1)
    initialise(other, 1)
    live = LiveModel(one, autocast=False)
    ours = INNER_OPTIMIZERS[inner](recipe, live)
    rival = theirs.Inner(other.parameters(), theirs.hidden_matrices(other, inner), recipe, 0.01)
    random = torch.Generator().manual_seed(1)
    for _ in range(5):
        batch = torch.randint(0, 256, (2, 17), generator=random)
        live.gradient.zero_()
        one.loss(batch).backward()  # type: ignore[no-untyped-call]
        other.zero_grad()
        other.loss(batch).backward()  # type: ignore[no-untyped-call]
        ours.step(0.01)
        rival.step()
    for mine, its in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)
