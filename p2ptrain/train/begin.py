"""Begins a run: makes its data, first weights and first members, which seal its config and give it an id.

The first weights are made once, by the node that begins the run, from its seed or from weights that its owner has
(given_weights.py): random numbers differ from machine to machine, so all others get the weights from the swarm."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import ValidationError
from torch import Tensor

from p2ptrain.config import WHOLE, ModelConfig, NodeConfig, RunConfig
from p2ptrain.config.text import config_error
from p2ptrain.data.corpus import Reading
from p2ptrain.data.dataset import MANIFEST_NAME, TOKENIZER_NAME, TokenDataset, manifest_digest, read_manifest
from p2ptrain.data.prepare import prepare
from p2ptrain.data.run_data import check_data
from p2ptrain.data.tokenizer import TOKENIZER_BYTES_MAX, tokenizer_digest
from p2ptrain.errors import ConfigError, DataError
from p2ptrain.exact.root import octets, state_root
from p2ptrain.files import forget, read_regular
from p2ptrain.models.adapters import FrozenBase, base_file, base_tensors, make_base, read_base
from p2ptrain.models.kinds import by_name, first_model, named_shapes, parameter_count, shapes_digest, without_adapters
from p2ptrain.train.own_data import KEY, PREPARE_FIX, open_own, share_held_out

log = logging.getLogger("p2ptrain.train")
EMBEDDED = "embedded"
HELD_OUT = Fraction(1, 50)  # of the embedded corpus: 100 KB


class NewRun(NamedTuple):
    """A sealed run with its data set and first weights."""

    run: RunConfig  # sealed
    dataset: Path
    state: bytes  # the first weights, as the state root hashes them
    base: FrozenBase | None = None  # the frozen ones, if adapters train


@dataclass(frozen=True, slots=True)
class GivenWeights:
    """First weights that the owner has, and where."""

    place: Path
    read: Callable[[ModelConfig], Tensor]  # -> [parameters] fp32
    is_state: bool = False  # all of a run's state: of adapters, if they train; with the outer momentum


def begin(
    run: RunConfig,
    directory: Path,
    founders: Sequence[str],
    dataset: Path | None = None,
    given: GivenWeights | None = None,
    bases: Path | None = None,
) -> NewRun:
    """Seals `run`. The embedded data set is made in `directory`; any other is read from `dataset`. If the run's nodes
    bring their own data, `dataset` is this node's, and what is shared of it is made beside `directory`.

    founders: public keys in hex; given: the first weights, if they are not made from the seed; bases: where frozen ones
    are kept. Idempotent: called again with the original or the sealed run, it returns the same result and reuses the
    data it made. Raises ConfigError for a run that others began."""
    assert founders, "the node that begins a run is a founder"
    if run.admission.founders and sorted(run.admission.founders) != sorted(founders):
        fix = "Join the run if it was begun elsewhere; to begin another, remove the key"
        raise ConfigError("names different founders", key="admission.founders", fix=fix)
    data = _open_data(run, directory, dataset)
    if missing := data.missing_anywhere():  # nobody else has them yet
        fix = "Prepare it again, or copy the whole directory"
        raise ConfigError(f"{data.directory} lacks {len(missing)} pieces", key="data.manifest", fix=fix)
    whole = given if given is not None and given.is_state else None
    base = _base(run, bases, None if whole else given) if run.adapt.is_on else None
    if run.model.hf is not None:
        origin = f"those of {given.place}" if given else f"drawn from seed {run.seed}, because no --weights are given"
        log.info("first weights of the %s: %s", run.model.hf.model_type, origin)
    weights = given.read(run.model) if given and (whole or base is None) else first_weights(run)
    if given:
        _suggest_tokenizer(given.place, data)
    count = parameter_count(run.model, run.adapt)
    if not run.recipe.momentum:
        weights = weights[:count]
    elif len(weights) == count:  # it begins with zeros, after all weights
        weights = torch.cat([weights, torch.zeros_like(weights)])
    root = state_root(weights).hex()
    if run.state.initial_root not in ("", root):
        fix = "Join the run if it was begun elsewhere, or give the --weights that it began with; "
        fix += "to begin another, remove the key"
        raise ConfigError(f"this machine makes different first weights ({root})", key="state.initial_root", fix=fix)
    try:
        manifest = manifest_digest(data.manifest_bytes())
        shapes = "" if run.model.kind == "builtin" else shapes_digest(named_shapes(run.model, run.adapt))
        named = ("", 0) if base is None else (base.digest, base.size)
        sealed = run.sealed(manifest=manifest, initial_root=root, founders=founders, shapes=shapes, base=named)
    except ValidationError as error:  # everything else was valid already
        raise config_error(error.errors(include_url=False)[0], RunConfig, NodeConfig) from error
    return NewRun(sealed, data.directory, bytes(octets(weights)), base)


def begin_again(
    run: RunConfig, directory: Path, dataset: Path | None, given: GivenWeights | None, bases: Path
) -> NewRun:
    """Returns a run that was begun here before and whose state is kept elsewhere, with its data, of which peers have
    what is missing, and its frozen weights. Its first weights are not made again: another machine would make others."""
    data = _open_data(run, directory, dataset)
    base = _base(run, bases, None if given is not None and given.is_state else given) if run.adapt.is_on else None
    return NewRun(run, data.directory, b"", base)


def first_weights(run: RunConfig) -> Tensor:
    """Makes the run's first weights from its seed, flat.  # [parameters]"""
    parameters = first_model(run.model, run.seed, adapt=run.adapt).parameters()
    return torch.cat([parameter.detach().reshape(-1) for parameter in parameters])


def _base(run: RunConfig, directory: Path | None, given: GivenWeights | None) -> FrozenBase:
    """Returns the frozen weights: those of a run that was begun here before, or the given ones, or from the seed."""
    assert directory is not None, "whoever begins a run that trains adapters has a directory for frozen weights"
    wanted, model = run.adapt.base, without_adapters(run.model)
    kept, shapes = base_file(directory, wanted), named_shapes(model)
    base = read_base(kept) if wanted and kept.exists() else None
    if base is not None and base.digest != wanted:
        log.warning("%s: damaged: making it again", kept)
        base = None
    if base is not None and given is None:
        return base
    flat = given.read(model) if given else first_weights(run.model_copy(update={"model": model, "adapt": WHOLE}))
    named = by_name(flat, shapes)
    if base is None:
        there = [*directory.glob("*")]  # which other runs may adapt
        base = make_base(directory, named)
        is_same = wanted in ("", base.digest)
        if not is_same and base.path not in there:
            forget(base.path)
    else:  # not written a second time
        is_same = all(torch.equal(each, named[name]) for name, each in base_tensors(kept, dict(shapes)))
    if not is_same:
        what = "these weights are others than those that the run adapts"
        fix = "Give the --weights that it began with; to begin another run, remove adapt.base and adapt.base_bytes"
        raise ConfigError(what, key="adapt.base", fix=fix)
    return base


def _suggest_tokenizer(place: Path, data: TokenDataset) -> None:
    """Warns if weights come with another tokenizer than the data was prepared with: the tokens mean other texts."""
    file = (place if place.is_dir() else place.parent) / TOKENIZER_NAME
    encoded = read_regular(file, TOKENIZER_BYTES_MAX)
    if encoded is not None and tokenizer_digest(encoded) != data.tokenizer.digest:
        how = "`p2ptrain data prepare ... --tokenizer %s` makes data whose tokens these weights know"
        log.warning("%s is not the tokenizer of the data: " + how, file, file)


def _open_data(run: RunConfig, directory: Path, dataset: Path | None) -> TokenDataset:
    """Opens the run's data set, of which pieces may be missing."""
    is_own = run.data.source == "own"
    path = _shared_of_own(run, directory, dataset) if is_own else _find_data(run, directory, dataset)
    try:
        found = manifest_digest(read_manifest(path))
        if run.data.manifest not in (EMBEDDED, found):
            fix = f'Write manifest = "{found}", or give the right directory with --data'
            raise ConfigError(f"{path} holds data set {found}", key="data.manifest", fix=fix)
        data = TokenDataset.open(path, found)
    except DataError as error:
        fix = "Give the directory that `p2ptrain data prepare` made with --data"
        raise ConfigError(str(error), key="data.manifest", fix=fix) from error
    check_data(run, data)
    if data.tokenizer.kind == "json" and data.tokenizer_bytes() is None:
        fix = f"Copy the tokenizer's file there as {TOKENIZER_NAME}"
        raise ConfigError(f"{path} lacks the tokenizer {data.tokenizer.digest}", key="tokenizer.digest", fix=fix)
    return data


def _shared_of_own(run: RunConfig, directory: Path, dataset: Path | None) -> Path:
    """Returns the directory of the held-out data that the nodes share; makes it first if it does not exist yet."""
    if run.data.manifest != EMBEDDED and (directory / MANIFEST_NAME).exists():
        return directory  # the owner's data may be other data by now
    if dataset is None:
        raise ConfigError("the run's nodes bring their own data, and this one has none", key=KEY, fix=PREPARE_FIX)
    own = open_own(run, dataset, b"").dataset
    if not own.held_out_sequences(run.model.sequence_length):
        what = f"{dataset} has no held-out sequence, and the nodes measure what they learn by those of the first"
        raise ConfigError(what, key=KEY, fix="Prepare it with a larger --held-out")
    made = share_held_out(own, directory.parent)
    if run.data.manifest not in (EMBEDDED, manifest_digest(made.manifest_bytes())):
        what = f"names other data than what the nodes share, which is the held-out part of {dataset}"
        raise ConfigError(what, key="data.manifest", fix="Leave it out: `p2ptrain start` fills it in")
    return made.directory


def _find_data(run: RunConfig, directory: Path, dataset: Path | None) -> Path:
    """Returns the data set's directory; makes the embedded data set first if it does not exist yet."""
    is_made = (directory / MANIFEST_NAME).exists()
    if run.data.manifest != EMBEDDED:
        if dataset is None and not is_made:
            fix = "Give its directory with --data"
            raise ConfigError(f"names data set {run.data.manifest}, but none was given", key="data.manifest", fix=fix)
        return dataset or directory
    if dataset is not None:
        fix = f"Write the digest that `p2ptrain data prepare` printed for {dataset}, or leave --data out"
        raise ConfigError(f"is {EMBEDDED}, but a data set was given", key="data.manifest", fix=fix)
    if run.tokenizer.kind != "bytes":
        fix = "Prepare it with `p2ptrain data prepare --embedded --tokenizer FILE`, "
        fix += "and write the digest that this prints"
        what = f"{EMBEDDED} text is read as bytes, but the run has a tokenizer"
        raise ConfigError(what, key="data.manifest", fix=fix)
    if not is_made:  # the bytes tokenizer reads it
        prepare(directory, [], embedded=True, how=Reading(), held_out=HELD_OUT, progress=lambda *_: None)
    return directory
