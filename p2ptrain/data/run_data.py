"""Checks that a data set fits a run, and derives how the run reads it."""

from __future__ import annotations

from p2ptrain.config import RunConfig
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.data.packing import Masking, Packing
from p2ptrain.data.tokenizer import MASK_NAMES
from p2ptrain.errors import ConfigError, DataError


def check_data(run: RunConfig, dataset: TokenDataset) -> None:
    """Refuses a data set that the run's model cannot train on."""
    check_tokens(run, dataset)
    _masking_of(run, dataset)
    if run.data.source == "own":
        if dataset.manifest.training.tokens:
            raise DataError("the run's shared data has a training split, and its nodes bring their own: begin it anew")
    elif not dataset.sequences(run.model.sequence_length):
        fix = "Add data, or train on shorter sequences"
        raise ConfigError("the data is shorter than one sequence", key="model.sequence_length", fix=fix)


def check_tokens(run: RunConfig, dataset: TokenDataset) -> None:
    """Refuses a data set made with a different tokenizer, because no other check would notice the wrong tokens."""
    made = dataset.tokenizer
    if (made.kind, made.digest) != (run.tokenizer.kind, run.tokenizer.digest):
        fix = "Prepare the data with the run's tokenizer, or name the data's tokenizer in the run"
        found = f"the data was made with tokenizer {made.kind} {made.digest}".strip()
        raise ConfigError(found, key="tokenizer", fix=fix)
    if made.vocab_size > run.model.vocab_size:
        fix = f"Set it to {made.vocab_size} or more"
        if run.model.hf is not None:
            fix = f"The model has {run.model.vocab_size}: prepare the data with its own tokenizer.json"
        raise ConfigError(f"the data has {made.vocab_size} tokens", key="model.vocab_size", fix=fix)
    if dataset.is_masked and not run.model.has_known_layers:
        what = f"the data has a loss mask, which a model of kind {run.model.kind} would ignore"
        fix = 'Use a model of kind "builtin" or "transformers", or data prepared from plain text'
        raise ConfigError(what, key="model.kind", fix=fix)


def packing_of(run: RunConfig, *datasets: TokenDataset) -> Packing:
    """Returns how the run's sequences are read, which is the same for all of its data sets."""
    is_apart = run.data.documents == "apart"
    is_masked = any(each.is_masked for each in datasets)
    document_end = datasets[0].open_tokenizer().end_of_document if is_apart else None
    return Packing(is_masked, document_end, _masking_of(run, datasets[0]))


def _masking_of(run: RunConfig, dataset: TokenDataset) -> Masking | None:
    """Returns how tokens are hidden, if the run's model fills them in. ConfigError if there is no token for that."""
    if run.model.objective != "masked":
        return None
    tokenizer = dataset.open_tokenizer()
    if tokenizer.mask is None:
        what = "the run's tokenizer has no token that stands for a masked one"
        fix = f"Use a tokenizer.json with a special token named {' or '.join(MASK_NAMES)}, such as BERT's"
        raise ConfigError(what, key="model.objective", fix=fix)
    return Masking(run.seed, tokenizer.mask, tokenizer.vocab_size, tokenizer.end_of_document)
