"""Home: what a node has on this machine's disk, and where."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import platformdirs

from p2ptrain.config import NodeConfig, RunConfig
from p2ptrain.errors import ConfigError, DataError, RemoteProtocolError

RUN_NAME = "run.json"  # in a run's directory

log = logging.getLogger("p2ptrain.node")


class Home:
    """A node's config, and the directory that it names, with identity, runs, data sets and frozen weights."""

    def __init__(self, config: NodeConfig) -> None:
        self.config = config
        self.directory = Path(config.storage.directory or platformdirs.user_data_dir("p2ptrain"))
        self.identity_file = Path(config.identity.file) if config.identity.file else self.directory / "identity.key"
        self.bases = self.directory / "bases"  # the frozen weights of runs that train adapters

    def of_run(self, run_id: bytes) -> Path:
        """Returns a run's directory."""
        return self.directory / "runs" / run_id.hex()[:16]

    def runs(self, wanted: str | None = None) -> list[RunConfig]:
        """Returns the runs that this node has taken part in, whose ids begin with `wanted`."""
        stored = []
        for path in sorted((self.directory / "runs").glob(f"*/{RUN_NAME}")):
            try:
                run = RunConfig.from_canonical(path.read_bytes())
            except (OSError, RemoteProtocolError) as error:
                log.warning("%s: skipped: %s", path, error)
            else:
                stored.append(run)
        return [run for run in stored if run.run_id.startswith(wanted or "")]

    def run(self, wanted: str | None) -> RunConfig:
        """Returns the one stored run whose id begins with `wanted`."""
        runs = self.runs(wanted)
        if len(runs) == 1:
            return runs[0]
        if not runs:
            what = f"no run {wanted} in" if wanted else "no run in"
            raise ConfigError(f"{what} {self.directory}", key="--data-dir", fix="Name the directory of the node")
        names = "\n".join(f"  {run.run_id}  {run.name}" for run in runs)
        raise ConfigError(f"there are {len(runs)} runs:\n{names}", key="--run", fix="Name one of them")

    def peers_of(self, run: RunConfig) -> Sequence[str]:
        """Returns the addresses that are remembered of a run's peers."""
        from p2ptrain.store.records import remembered_peers  # noqa: PLC0415  # the command line does without

        return remembered_peers(self.of_run(run.id))

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
