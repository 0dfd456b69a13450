"""What the daemon says about itself: the core's snapshot, and what the edges count, as plain data for JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from p2ptrain.identity import peer_id_of

if TYPE_CHECKING:
    from p2ptrain.core.snapshot import Snapshot
    from p2ptrain.daemon.daemon import Daemon
    from p2ptrain.daemon.driver import Driver


ROOTS_TOLD = 32  # rounds: whoever compares nodes asks more often than these take


def status_of(daemon: Daemon) -> dict[str, Any]:
    """Where the node stands. A key is never renamed; new ones may come."""
    snapshot, device = daemon.driver.node.snapshot(), daemon.driver.device
    me = peer_id_of(snapshot.me)
    driver = daemon.driver
    return {
        "run_id": snapshot.run_id.hex(),
        "run_name": daemon.run.name,
        "peer_id": me,
        "addresses": daemon.edges.transport.addresses(),
        "branch": snapshot.branch.hex(),
        "round": snapshot.round,
        "phase": snapshot.phase,
        "view": snapshot.view,
        "applied_round": snapshot.applied_round,
        "state_root": snapshot.root.hex(),
        "certified_round": snapshot.certified_round,
        "loss": device.loss,
        "step": device.step,
        "tokens": device.tokens,
        "tokens_per_second": round(device.tokens_per_second, 1),
        "training_seconds": round(device.training_seconds, 3),
        "peers": sorted(peer_id_of(peer) for peer in daemon.edges.connections.linked),
        "roster": [peer_id_of(key) for key in snapshot.members],
        "quorum": snapshot.quorum,
        "fault_tolerance": {
            "liars": snapshot.tolerated,
            "crashes": len(snapshot.members) - snapshot.quorum,
            "mode": "byzantine" if snapshot.tolerated else "crash-only",
        },
        "admitted": snapshot.admitted,
        "is_member": snapshot.is_member,
        "is_admitted": snapshot.is_admitted,
        "held": snapshot.held,
        "waiting_for": snapshot.waiting_for,
        "health": health_of(driver, snapshot),
        "http": None,  # nothing is served over TCP
        "loop_lag_seconds": round(daemon.lag.worst, 4),
        "uptime_seconds": round(daemon.uptime, 1),
        "roots": {str(number): root.hex() for number, root in sorted(driver.node.work.roots.items())[-ROOTS_TOLD:]},
        "payload_bytes": device.trainer.form.payload_bytes,
        "state_bytes": device.state_bytes,
        "bytes": daemon.edges.transport.counters(),
        "counters": snapshot.counters | dict(driver.counters) | daemon.edges.lines.counters(),
        "observed": snapshot.observed,
    }


def health_of(driver: Driver, snapshot: Snapshot) -> list[str]:
    """All that is not as it should be, the worst first."""
    return ([f"degraded: {driver.disk_trouble}"] if driver.disk_trouble else []) + [*snapshot.health]


def peers_of(daemon: Daemon) -> dict[str, Any]:
    """The peers that are connected, and what we think of them."""
    snapshot = daemon.driver.node.snapshot()
    connections = daemon.edges.connections
    scores = dict(snapshot.scores)
    return {
        "peers": [
            {
                "peer_id": peer_id_of(peer),
                "addresses": list(connections.known[peer].addresses) if peer in connections.known else [],
                "is_member": peer in snapshot.members,
                "points": round(scores.get(peer, 0.0), 2),
            }
            for peer in sorted(connections.linked)
        ]
    }
