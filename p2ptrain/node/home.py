"""Home: what a node has on this machine's disk, and where; and which run a run file has begun here.

Defaults change from release to release, and a run that exists does not. So a start finds the run that the same file has
begun: what the file said is stored beside the run at its first start, and a start goes on only with a run whose file
said exactly that. A key that was added or removed since begins another run."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import platformdirs

from p2ptrain.config import NodeConfig, RunConfig
from p2ptrain.errors import ConfigError, DataError, RemoteProtocolError, UnusableError
from p2ptrain.files import make_directory, read, trouble, write_atomically

RUN_NAME, SUCCESSOR_NAME, REFUSED_NAME, SAID_NAME = "run.json", "successor", "refused", "said.json"  # of one run
# Filled in when a run begins, and what a run file has there until then.
SEALED = {"data.manifest", "state.initial_root", "admission.founders", "model.shapes", "adapt.base", "adapt.base_bytes"}
UNFILLED: tuple[object, ...] = ("", [], "embedded", 0)
GENERATIONS_MAX = 64  # runs, one after the other

log = logging.getLogger("p2ptrain.node")


class Home:
    """A node's config, and the directory that it names, with identity, runs, data sets and frozen weights."""

    def __init__(self, config: NodeConfig) -> None:
        self.config = config
        self.directory = Path(config.storage.directory or platformdirs.user_data_dir("p2ptrain"))
        self.identity_file = Path(config.identity.file) if config.identity.file else self.directory / "identity.key"
        self.ports_file = self.directory / "ports"  # the addresses that it listened on last
        self.bases = self.directory / "bases"  # the frozen weights of runs that train adapters

    def of_run(self, run_id: bytes) -> Path:
        return self.directory / "runs" / run_id.hex()[:16]

    def stored(self) -> tuple[list[RunConfig], dict[Path, str]]:
        """Returns the runs that this node has taken part in, and why others cannot be read, by their directories."""
        runs, unreadable = list[RunConfig](), dict[Path, str]()
        with trouble(self.directory, "cannot be read"):
            paths = sorted((self.directory / "runs").glob(f"*/{RUN_NAME}"))
        for path in paths:
            try:
                runs.append(RunConfig.from_canonical(path.read_bytes()))
            except (OSError, RemoteProtocolError) as error:
                log.warning("%s: skipped: %s", path, error)
                unreadable[path.parent] = str(error)
        return runs, unreadable

    def runs(self, wanted: str | None = None) -> list[RunConfig]:
        """Returns the runs that this node has taken part in, whose ids begin with `wanted`."""
        return [run for run in self.stored()[0] if run.run_id.startswith(wanted or "")]

    def current(self, wanted: str | None = None) -> list[RunConfig]:
        """Returns the runs to choose from: those whose ids begin with `wanted`; without it those not gone on from."""
        stored = self.runs(wanted)
        left = {run.predecessor.run for run in stored}  # also while this node is still going over
        return [run for run in stored if wanted or not (run.run_id in left or self.heir_of(run.id))]

    def heir_of(self, run_id: bytes) -> bytes | None:
        """Returns the id of the run to which this node has gone over from this one, however many lie between."""
        heir: bytes | None = None
        seen = {run_id}
        while (found := read(self.of_run(heir or run_id) / SUCCESSOR_NAME)) is not None:
            with suppress(ValueError):
                if (after := bytes.fromhex(found.decode("ascii", "replace").strip())) not in seen:
                    heir = after
                    seen.add(after)
                    continue
            break
        return heir

    def is_going_over(self, run: RunConfig) -> bool:
        """Whether this node was ended while it went over to a run from the one before, which it has taken part in."""
        if not run.predecessor.run or not (self.of_run(run.id) / "origin").exists():
            return False
        before = bytes.fromhex(run.predecessor.run)
        return (self.of_run(before) / RUN_NAME).exists() and self.heir_of(before) is None

    def ancestors(self, run: RunConfig) -> tuple[bytes, ...]:
        """Returns the ids of the runs that a run follows, the last one first, as far as this disk has them."""
        from p2ptrain.store.store import origin_in  # noqa: PLC0415  # the command line does without

        found: list[bytes] = []
        while run.predecessor.run and len(found) < GENERATIONS_MAX:
            found.append(bytes.fromhex(run.predecessor.run))
            try:
                origin = origin_in(self.of_run(run.id))
            except DataError as error:
                log.warning("%s", error)
                break
            if origin is None:
                break
            run = RunConfig.from_canonical(origin.config)
        return tuple(found)

    def run(self, wanted: str | None) -> RunConfig:
        """Returns the one stored run whose id begins with `wanted`."""
        runs = self.current(wanted)
        if len(runs) == 1:
            return runs[0]
        if not runs:
            what = f"no run {wanted} in" if wanted else "no run in"
            raise ConfigError(f"{what} {self.directory}", key="--data-dir", fix="Name the directory of the node")
        names = "\n".join(f"  {run.run_id}  {run.name}" for run in runs)
        raise ConfigError(f"there are {len(runs)} runs:\n{names}", key="--run", fix="Name one of them")

    def check_whom_to_ask(self, stored: Sequence[RunConfig]) -> None:
        """Raises ConfigError if no address is known to ask for a run, and none of these may be gone on with."""
        if not self.config.network.bootstrap and not stored:
            fix = "Give a node's address: --bootstrap ADDR, or network.bootstrap in the config file"
            raise ConfigError("no address to ask", key="--bootstrap", fix=fix)

    def peers_of(self, run: RunConfig) -> Sequence[str]:
        """Returns the addresses that are remembered of a run's peers, and of those of the runs before it."""
        from p2ptrain.store.records import remembered_peers  # noqa: PLC0415  # the command line does without

        runs = (run.id, *self.ancestors(run))
        return tuple(dict.fromkeys(each for run_id in runs for each in remembered_peers(self.of_run(run_id))))

    def usual_dataset(self, manifest: str) -> Path:
        """Returns where a data set goes that is made or fetched."""
        return self.directory / "data" / manifest[:16]

    def dataset(self, manifest: str) -> Path:
        """Returns where a data set is, even if a run begun here has named it differently; else where it goes."""
        from p2ptrain.data.dataset import manifest_digest, read_manifest  # noqa: PLC0415  # numpy is slow to load

        usual = self.usual_dataset(manifest)
        for path in (usual, *sorted(usual.parent.glob("*"))):
            with suppress(DataError):
                if manifest_digest(read_manifest(path)) == manifest:
                    return path
        return usual


def begun_here(run: RunConfig, said: Mapping[str, object], home: Home, me: str) -> RunConfig | None:
    """Returns the run that this node began from the file, even if defaults have changed since, if there is one. Raises
    UnusableError if this release cannot read it. run: what the file means with today's defaults; said: what is in it"""
    encoded, (runs, unreadable) = _encoded(said), home.stored()
    ours = [each for each in runs if each.admission.founders == (me,)]
    begun = [each for each in ours if read(home.of_run(each.id) / SAID_NAME) == encoded]
    for place, why in unreadable.items():
        if not begun and read(place / SAID_NAME) == encoded:
            heir = (read(place / SUCCESSOR_NAME) or b"").decode("ascii", "replace").strip()
            on = f"It has gone on: `p2ptrain join --run {heir}`"
            fix = on if heir else "Start it with the release that spoke its protocol, or move it away if it is damaged"
            raise UnusableError(f"begun from this file, and not readable here: {why}", path=place, fix=fix)
    return max(begun, key=lambda each: _is_of(each, run), default=None)


def note_begun(run: RunConfig, wanted: RunConfig, said: Mapping[str, object], home: Home) -> None:
    """Stores what the file said beside the run that it has begun, unless only its defaults have made it another than
    `wanted`, which the file means with those of today."""
    directory = home.of_run(run.id)
    path, encoded = directory / SAID_NAME, _encoded(said)
    if read(path) != encoded and _is_of(run, wanted):
        make_directory(directory)
        write_atomically(path, encoded)


def _encoded(said: Mapping[str, object]) -> bytes:
    return json.dumps(said, sort_keys=True, default=str).encode() + b"\n"


def _is_of(run: RunConfig, wanted: RunConfig) -> bool:
    """Whether a sealed run is what is wanted, with the rest filled in."""
    theirs, ours = _flat(run), _flat(wanted)
    filled = {key for key in SEALED if ours[key] in UNFILLED}
    return all(theirs[key] == ours[key] for key in ours.keys() - filled)


def _flat(run: RunConfig) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, part in run.model_dump(mode="json").items():
        found |= {f"{name}.{key}": value for key, value in part.items()} if isinstance(part, dict) else {name: part}
    return found
