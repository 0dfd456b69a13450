"""Where things lie on this machine's disk."""

from __future__ import annotations

from pathlib import Path

import platformdirs

from p2ptrain.config import NodeConfig


def data_directory(config: NodeConfig) -> Path:
    """Everything that the node keeps is in here."""
    return Path(config.storage.directory or platformdirs.user_data_dir("p2ptrain"))


def identity_file(config: NodeConfig) -> Path:
    return Path(config.identity.file) if config.identity.file else data_directory(config) / "identity.key"


def run_directory(config: NodeConfig, run_id: bytes) -> Path:
    return data_directory(config) / "runs" / run_id.hex()[:16]


def dataset_directory(config: NodeConfig, manifest: str) -> Path:
    return data_directory(config) / "data" / manifest[:16]
