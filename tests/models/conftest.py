"""What the tests of models share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.data.dataset import TokenDataset
from p2ptrain.models import kinds as models
from p2ptrain.models import plugins
from p2ptrain.train import memory
from tests.helpers.trainer import embedded


@pytest.fixture(scope="session")
def transformers() -> Any:
    return pytest.importorskip("transformers", reason="needs transformers: make test-hf installs it")


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    return embedded(tmp_path_factory.mktemp("data"))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that this process imports from, with nothing allowed in it; afterwards all of it is forgotten."""
    folder, before = tmp_path / "site", {*sys.modules}
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    caches: tuple[Callable[[], None], ...] = (
        plugins.loaded.cache_clear,
        models.named_shapes.cache_clear,
        memory.measured_activations.cache_clear,
    )
    for clear in caches:
        clear()
    yield folder
    plugins.allow(())
    for clear in caches:
        clear()
    for name in {*sys.modules} - before:
        if getattr(sys.modules[name], "__file__", None) and str(folder) in str(sys.modules[name].__file__):
            del sys.modules[name]
