"""The benchmarks on a line between homes: what the relay does to packets, options, rivals, reports."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from p2ptrain.config import ModelConfig, RecipeConfig
from p2ptrain.models.built_in import Transformer, initialise
from p2ptrain.sim.scenario import LINES, Line
from p2ptrain.train.inner import INNER_OPTIMIZERS
from p2ptrain.train.live import LiveModel
from tests.helpers.benchmarks import load

QUICK = Line(8.0, 8.0, 0.0)  # a byte a microsecond


def packet(relay: Any, target: int, size: int = 1_000, number: int = 0) -> bytes:
    """Returns the start of an IPv4 packet, and bytes up to its size."""
    head = bytes([0x45, *bytes(15)]) + relay.address_bytes(target)
    return (head + number.to_bytes(4, "big")).ljust(size, b".")


class Ends:
    """Hosts of a relay, two without regions, whose devices are sockets."""

    def __init__(self, line: Line, regions: Sequence[int] = ()) -> None:
        self.relay = load("relay")
        self.pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in regions or range(2)]
        for pair in self.pairs:
            for end in pair:
                end.setblocking(False)
        self.under_test = self.relay.Relay([ours.fileno() for ours, _ in self.pairs], line, 1, regions)

    def send(self, *packets: bytes, source: int = 0) -> None:
        for each in packets:
            self.pairs[source][1].send(each)
            self.under_test.take(source)

    def received(self) -> list[int]:
        """Delivers all that is under way, and returns the numbers of what the second host got."""
        found = []
        while self.under_test.under_way:
            self.under_test.deliver()
            while True:
                try:
                    found.append(int.from_bytes(self.pairs[1][1].recv(2_048)[20:24], "big"))
                except BlockingIOError:
                    break
        return found

    def close(self) -> None:
        for pair in self.pairs:
            for end in pair:
                end.close()


@pytest.fixture
def ends() -> Iterator[Callable[..., Ends]]:
    made: list[Ends] = []

    def make(line: Line, regions: Sequence[int] = ()) -> Ends:
        made.append(Ends(line, regions))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_packets_wait_for_the_uplink_and_then_for_the_delay(ends: Callable[..., Ends]) -> None:
    net = ends(Line(8.0, 8.0, 0.5))
    began = monotonic()
    net.send(*(packet(net.relay, 1, 1_000, number) for number in range(10)))
    arrivals = [at for at, *_ in sorted(net.under_test.under_way)]
    assert began + 0.501 <= arrivals[0] < monotonic() + 0.501
    assert arrivals[-1] >= began + 0.51, "ten packets of a millisecond each"


def test_packets_arrive_once_in_their_order_and_are_counted(ends: Callable[..., Ends]) -> None:
    net = ends(Line(8_000.0, 8.0, 0.001, jitter_seconds=0.01))
    net.send(*(packet(net.relay, 1, 100, number) for number in range(50)))
    assert net.received() == list(range(50))
    sender, receiver = net.under_test.counts
    assert (sender.sent_packets, sender.sent_bytes, receiver.received_bytes) == (50, 5_000, 5_000)
    assert net.under_test.report()["hosts"][1]["received_bytes"] == 5_000


@pytest.mark.parametrize("line", [Line(8_000.0, 0.8, 0.0), Line(0.8, 8_000.0, 0.0)], ids=["uplink", "downlink"])
def test_what_comes_while_a_queue_is_full_is_dropped(line: Line, ends: Callable[..., Ends]) -> None:
    net = ends(line)
    began = monotonic()
    net.send(*(packet(net.relay, 1, 1_000, number) for number in range(100)))
    left_meanwhile = 100 * (monotonic() - began)
    received = net.received()  # a packet takes 10 ms, and the queue is 100 ms long
    assert 10 <= len(received) <= 12 + left_meanwhile
    assert sum(each.dropped_packets for each in net.under_test.counts) == 100 - len(received)


def test_hosts_of_a_region_share_one_line_to_the_others_and_have_a_fast_one_inside(ends: Callable[..., Ends]) -> None:
    net = ends(Line(8.0, 8.0, 0.5), (0, 0, 1))
    began = monotonic()
    net.send(packet(net.relay, 1))
    net.send(*(packet(net.relay, 2) for _ in range(10)), source=0)
    net.send(*(packet(net.relay, 2) for _ in range(10)), source=1)
    (near, *_), *far = sorted(net.under_test.under_way)
    assert near < monotonic() + 0.002
    assert began + 0.501 <= far[0][0]
    assert far[-1][0] >= began + 0.52, "twenty packets of a millisecond each, on one line"
    assert [each.far_bytes for each in net.under_test.counts] == [10_000, 10_000, 0]
    assert [each.sent_bytes for each in net.under_test.counts] == [11_000, 10_000, 0]


def test_the_line_loses_its_share(ends: Callable[..., Ends]) -> None:
    net = ends(Line(80_000.0, 80_000.0, 0.0, loss=0.3))
    total = 0
    for _ in range(100):
        net.send(*(packet(net.relay, 1, 24) for _ in range(10)))
        total += len(net.received())
    assert 600 < total < 800
    assert net.under_test.counts[0].lost_packets == 1_000 - total


def test_packets_for_nobody_go_nowhere(ends: Callable[..., Ends]) -> None:
    net = ends(QUICK)
    net.send(packet(net.relay, 9), bytes([0x60, *bytes(39)]), b"short")
    assert net.under_test.under_way == []
    assert net.under_test.counts[0].sent_packets == 0


def test_the_relay_ends_with_its_stdin(ends: Callable[..., Ends], monkeypatch: pytest.MonkeyPatch) -> None:
    net = ends(QUICK)
    reading, writing = os.pipe()
    monkeypatch.setattr(net.relay, "STDIN", reading)
    os.close(writing)
    net.under_test.serve()
    os.close(reading)


# ---------------------------------------------------------------------------------------------------
# Options and reports


def options(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    load("relay").add_line_options(parser)
    return parser.parse_args(given)


def test_a_line_is_a_named_one_or_given_in_numbers_or_both() -> None:
    line_of = load("relay").line_of
    assert line_of(options()) == Line(20.0, 20.0, 0.1)
    assert line_of(options("--line", "lte")) == LINES["lte"]
    asked = options("--rate", "5", "--delay", "30", "--jitter", "4", "--loss", "2")
    assert line_of(asked) == Line(5.0, 5.0, 0.03, 0.004, 0.02)
    assert line_of(options("--line", "dsl", "--delay", "80")) == Line(50.0, 10.0, 0.08, 0.002)


@pytest.mark.parametrize(
    "given", [("--rate", "0"), ("--rate", "nan"), ("--delay", "-1"), ("--loss", "100"), ("--loss", "nan")]
)
def test_a_line_that_cannot_be_is_refused(given: tuple[str, str]) -> None:
    with pytest.raises(SystemExit, match="--rate must be above 0"):
        load("relay").line_of(options(*given))


@pytest.mark.parametrize("name", LINES)
def test_every_named_line_is_possible(name: str) -> None:
    assert load("relay").line_of(options("--line", name)) == LINES[name]


def report(**changes: Any) -> dict[str, Any]:
    mark = {"minutes": 2.0, "seconds": 120.4, "round": 9, "loss": 2.5, "sent": [4 * 10**6, 10**6], "received": [0, 0]}
    line = {"down_megabits": 20.0, "up_megabits": 20.0, "delay_seconds": 0.1, "jitter_seconds": 0.0, "loss": 0.01}
    relay = {"mean_late_seconds": 0.001, "latest_seconds": 0.1, "processor_seconds": 1.0, "hosts": []}
    own = {"system": "p2ptrain", "nodes": 2, "line": line, "marks": [mark], "relay": relay, "rounds": [9, 10]}
    shares = {"whole_seconds": 40.0, "training_shares": [0.9, 0.8], "bytes_until_whole": {"sent": [2 * 10**6, 0]}}
    rates = {"payload_bytes": 300, "received_a_round": 1_000.0, "round_seconds": 2.5, "rounds_since_whole": 5}
    own |= {"tokens": [3_000, 1_000]}
    return own | shares | rates | {"tokens_over_alone": None, "slow_percent": 100, "contributions": [9, 4]} | changes


def test_the_report_tells_loss_bytes_and_whether_the_relay_kept_up(capsys: pytest.CaptureFixture[str]) -> None:
    wan = load("wan")
    wan.tell(report())
    wan.tell_more(report())
    told = capsys.readouterr().out
    assert "2 nodes, 20 and 20 Mbit/s, 100 ms, 1.0% of packets lost" in told
    assert "2.500         2.50 (4.00)" in told
    assert "held packets up" not in told
    assert "all were members after 40 s and 1.00 MB each" in told
    assert "rounds 9; share of time in which a node trained since: 90.0%, 80.0%" in told
    wan.tell(report(relay={"mean_late_seconds": 0.02}))
    wan.tell_more(report(whole_seconds=None))
    wan.tell_more(report(training_shares=[0.9, None]))
    told = capsys.readouterr().out
    assert "held packets up" in told
    assert "never became members" in told
    assert "since: 90.0%, unknown" in told
    assert "a round of 2.5 s: 1,000 bytes received by a node, 700 or more besides payloads" in told
    far = {"regions": 2, "bytes_until_whole": {"sent": [0, 0], "far": [10**6, 0]}}
    wan.tell_more(report(**far, marks=[{"far": [2 * 10**6, 4 * 10**6]}], received_a_round=None))
    told = capsys.readouterr().out
    assert "MB between the regions: 1.00 until all were members, then 1.00 a round and 24.00 a minute" in told
    assert "tokens trained on: 4,000" in told
    mark = {"minutes": 2.0, "loss": 2.5, "region_loss": 2.25, "sent": [0], "received": [0]}
    wan.tell(report(marks=[mark]))
    assert "2.500 (2.250)" in capsys.readouterr().out
    assert "a round of" not in told
    wan.tell_more(report(slow_percent=10, tokens_over_alone=0.9512))
    told = capsys.readouterr().out
    assert "would train alone, the last at 10 % of its time: 0.951; contributions taken 9, 4" in told


def test_tokens_are_compared_with_those_of_each_alone() -> None:
    wan = load("wan")
    begun = [wan.Progress(100.0, 50, 10.0), wan.Progress(100.0, 0, 0.0)]
    # The first trained 9 of 10 s, the second 0.8 s where it may train 1.
    ended = [wan.Progress(110.0, 950, 19.0), wan.Progress(110.0, 80, 0.8)]
    assert wan.over_alone(begun, ended, [1.0, 0.1]) == pytest.approx((900 + 80) / (1_000 + 100))
    assert wan.over_alone(begun, [ended[0], begun[1]], [1.0, 0.1]) is None, "one has trained nothing"


def test_the_share_of_training_hardly_depends_on_when_a_node_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wan = load("wan")
    hosts = SimpleNamespace(namespaces=[None], prefix=lambda place: ["on", str(place)])
    swarm = wan.Homes(tmp_path, "", hosts)
    (node,) = swarm.nodes
    assert (node.listen, node.prefix) == ("/ip4/11.78.0.1/tcp/4001", ("on", "0"))
    monkeypatch.setattr(wan.Swarm, "look", lambda swarm: None)
    for now in range(20, 111):  # a training every 3.15 s; from the first end to the last, as seen: 1 % too little
        monkeypatch.setattr(wan, "monotonic", lambda now=now: now)
        node.status = {"training_seconds": 3.087 * ((now - 0.9) // 3.15)}
        swarm.look()
    assert swarm.training_share(node, 21) == pytest.approx(0.98, abs=0.003)
    assert swarm.training_share(node, 108) is None


# ---------------------------------------------------------------------------------------------------
# The rival


def test_a_comparison_that_was_broken_off_goes_on(tmp_path: Path) -> None:
    rival = load("against_hivemind")
    path = tmp_path / "runs.json"
    rival.Done(path).add({"mode": "local", "rate": 0.01, "marks": []})
    again = rival.Done(path)
    assert again.find({"mode": "local", "rate": 0.01}) is not None
    assert again.find({"mode": "local", "rate": 0.02}) is None
    again.add({"mode": "local", "rate": 0.02})
    assert len(rival.Done(path).runs) == 2
    assert rival.Done(None).runs == []


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
