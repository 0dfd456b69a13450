"""Text drawn from a model: a look at what it has learned, not a way to serve it.

Every token runs the model over all that stands before it, without a cache: seconds for a few hundred tokens
of a small model. The text begins as a document does in training, after the end of another one, and ends
where the model ends it.
"""

from __future__ import annotations

import torch

from p2ptrain.errors import ConfigError
from p2ptrain.learn.model import Transformer
from p2ptrain.learn.tokenizer import Tokenizer

TOKENS_MAX = 4_096  # minutes, in which this node trains nothing
TEMPERATURE_MIN, TEMPERATURE_MAX = 0.01, 100.0  # beyond, fp32 has no such probabilities, or all are the same


def sample(
    model: Transformer, tokenizer: Tokenizer, prompt: str, tokens: int, seed: int, temperature: float = 0.8
) -> str:
    """The prompt and up to `tokens` tokens that follow it; the same text for the same seed on the same device."""
    _check(prompt, tokens, seed, temperature)
    given, end = tokenizer.encode(prompt).tolist(), tokenizer.end_of_document
    device = model.embed_tokens.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    before = torch.tensor([[end, *given]], device=device)
    drawn = model.generate(before, tokens, temperature, generator)[0, before.shape[1] :].tolist()
    if end in drawn:
        drawn = drawn[: drawn.index(end)]
    return tokenizer.decode([*given, *drawn])


def _check(prompt: str, tokens: int, seed: int, temperature: float) -> None:
    """It comes from a person, on a command line or through the daemon's socket."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ConfigError("not text", key="prompt", fix="Write it in UTF-8") from error
    if not 1 <= tokens <= TOKENS_MAX:
        raise ConfigError(f"{tokens} is not possible", key="tokens", fix=f"Choose 1 to {TOKENS_MAX:,}")
    if not 0 <= seed < 2**63:
        raise ConfigError(f"{seed} is not possible", key="seed", fix="Choose 0 to below 2**63")
    if temperature != 0 and not TEMPERATURE_MIN <= temperature <= TEMPERATURE_MAX:
        fix = f"Choose 0, or {TEMPERATURE_MIN} to {TEMPERATURE_MAX:g}"
        raise ConfigError(f"{temperature} is not possible", key="temperature", fix=fix)
