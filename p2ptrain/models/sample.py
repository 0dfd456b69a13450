"""Samples text from a model, to show what it has learned; it is not meant for serving.

For every token the model runs over all tokens before it, without a cache: seconds for a few hundred tokens of a small
model. The text begins as documents do in training, after the end of another one, and ends where the model ends it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from p2ptrain.errors import ConfigError, DataError

if TYPE_CHECKING:
    from p2ptrain.data.tokenizer import Tokenizer
    from p2ptrain.models.built_in import Model

PROMPT_BYTES_MAX = 8_192  # JSON may need six times as many, which still fits a request; the model reads only the end
TOKENS_MAX = 4_096  # this takes minutes, in which the node does not train
TEMPERATURE_MIN, TEMPERATURE_MAX = 0.01, 100.0  # beyond these, fp32 probabilities underflow or are all equal


class SampleRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request for a sample, from a command line or through the daemon's socket."""

    prompt: str
    tokens: int
    seed: int
    temperature: float = 0.8


def sample(
    model: Model, tokenizer: Tokenizer, request: SampleRequest, on_token: Callable[[], None] = lambda: None
) -> str:
    """Returns the prompt and its continuation: the same request gives the same text on the same device.

    `on_token` is called before each token is sampled; an exception from it ends the sampling."""
    import torch  # noqa: PLC0415  # two seconds, which errors need not wait for

    check(request)
    if not model.context:
        raise DataError("the run's model continues no text: only one that learned the next token from those before can")
    given, end = tokenizer.encode(request.prompt).tolist(), tokenizer.end_of_document
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(request.seed)
    text = torch.tensor([[end, *given]], device=device)
    begin = text.shape[1]
    for _ in range(request.tokens):
        on_token()
        text = model.generate(text, 1, request.temperature, generator)
        if int(text[0, -1]) == end:
            break
    drawn = text[0, begin:].tolist()
    if end in drawn:
        drawn = drawn[: drawn.index(end)]
    return tokenizer.decode([*given, *drawn])


def read_request(content: object) -> SampleRequest:
    """Reads a request; raises ConfigError if it is malformed."""
    try:
        request = msgspec.convert(content, SampleRequest)
    except msgspec.ValidationError as error:
        fix = "Ask for prompt (text), tokens and seed (whole numbers) and temperature (a number)"
        raise ConfigError(str(error), key="sample", fix=fix) from error
    check(request)
    return request


def check(request: SampleRequest) -> None:
    """Raises ConfigError if the requested sample cannot be drawn."""
    try:
        prompt = request.prompt.encode()
    except UnicodeEncodeError as error:
        raise ConfigError("not text", key="prompt", fix="Write it in UTF-8") from error
    if len(prompt) > PROMPT_BYTES_MAX:
        fix = "Give only its end: the model does not read more"
        raise ConfigError(f"more than {PROMPT_BYTES_MAX:,} bytes", key="prompt", fix=fix)
    if not 1 <= request.tokens <= TOKENS_MAX:
        raise ConfigError(f"{request.tokens} is not valid", key="tokens", fix=f"Choose 1 to {TOKENS_MAX:,}")
    if not 0 <= request.seed < 2**63:
        raise ConfigError(f"{request.seed} is not valid", key="seed", fix="Choose a number from 0 to 2**63 - 1")
    if request.temperature != 0 and not TEMPERATURE_MIN <= request.temperature <= TEMPERATURE_MAX:
        fix = f"Choose 0, or {TEMPERATURE_MIN} to {TEMPERATURE_MAX:g}"
        raise ConfigError(f"{request.temperature} is not valid", key="temperature", fix=fix)
