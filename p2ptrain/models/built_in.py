"""The built-in model: a decoder-only transformer like Llama.

Each block adds attention and then a feed-forward layer to the residual stream, and normalises its
input rather than its output, which keeps a clean path for the gradient from the loss to the
embedding (pre-norm, Xiong et al., arXiv 2002.04745). The parts:

    RMSNorm     x / sqrt(mean(x^2) + 1e-5) * weight; no mean to subtract, no bias (arXiv 1910.07467)
    RoPE        pair i of a query or key at position p is rotated by the angle p * theta^(-2i / head_dim), so
                that their product depends only on the distance of their positions (arXiv 2104.09864)
    GQA         several query heads share one key and value head (arXiv 2305.13245)
    SwiGLU      down(silu(gate(x)) * up(x)) (arXiv 2002.05202)
    tied        the embedding is the output matrix as well (arXiv 1608.05859)

There are no biases and no dropout: a run sees fresh tokens, so it has nothing to memorise.

It computes what Hugging Face's Llama computes, with the same names below `model.`: converting a
checkpoint means adding or removing that prefix. That is why modules carry Llama's names rather than ours.

All parameters are fp32. `named_parameters()` yields them in the order in which the modules are created
below, which is the order of the state root: moving a line in an `__init__` changes the protocol."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from p2ptrain.config import ModelConfig
from p2ptrain.data.packing import within_documents
from p2ptrain.errors import DataError
from p2ptrain.models.loss import cross_entropy

NORM_EPSILON = 1e-5  # Llama's
INITIAL_DEVIATION = 0.02  # GPT-2's and Llama's
RESIDUAL_OUTPUTS = ("o_proj.weight", "down_proj.weight")  # matrices that write to the residual stream


class Linear(nn.Linear):
    """A matrix without a bias; zero until `initialise` or a checkpoint fills it. PyTorch would fill it from the global
    generator, which is slow before weights are loaded, and changes the random numbers of all other code."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False, dtype=torch.float32)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


class Embedding(nn.Embedding):
    """A row for each token; zero at first, like `Linear`."""

    def __init__(self, tokens: int, dim: int) -> None:
        super().__init__(tokens, dim, dtype=torch.float32)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


def rotary_tables(length: int, head_dim: int, theta: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns cosine and sine of every position's angles, each [length, head_dim / 2] fp32.

    They are computed in every forward pass, once for all layers: this takes microseconds, fits any length,
    and a model moved off the meta device cannot be left with garbage tables."""
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim  # [head_dim / 2]
    positions = torch.arange(length, device=device, dtype=torch.float32)  # [length]
    angles = torch.outer(positions, 1.0 / theta**exponents)  # [length, head_dim / 2]
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotates each pair of `heads` [batch, heads, length, head_dim] by its position's angle. A pair is coordinates i
    and i + head_dim / 2, as in Llama; the paper pairs neighbours."""
    first, second = heads.chunk(2, dim=-1)
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    return turned.type_as(heads)  # the tables are fp32, the heads may be bf16


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.heads
        self.q_proj = Linear(config.dim, config.dim)
        self.k_proj = Linear(config.dim, config.kv_heads * self.head_dim)
        self.v_proj = Linear(config.dim, config.kv_heads * self.head_dim)
        self.o_proj = Linear(config.dim, config.dim)

    def forward(  # stream: [batch, length, dim]; mask: [batch, 1, length, length], added; None: plain causal
        self, stream: Tensor, cosine: Tensor, sine: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        def split(projected: Tensor) -> Tensor:  # -> [batch, heads or kv_heads, length, head_dim]
            batch, length, _ = projected.shape
            return projected.view(batch, length, -1, self.head_dim).transpose(1, 2)

        queries = rotate(split(self.q_proj(stream)), cosine, sine)
        keys = rotate(split(self.k_proj(stream)), cosine, sine)
        values = split(self.v_proj(stream))
        if stream.device.type == "cuda" and queries.dtype == torch.float32:
            # CUDA has no fused kernel for shared heads in fp32, and without it all attention weights are kept.
            shared = queries.shape[1] // keys.shape[1]
            if shared > 1:
                keys, values = (each.repeat_interleave(shared, dim=1) for each in (keys, values))
        # Query head h uses key and value head h // (heads / kv_heads).
        mixed = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        output: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(-2))
        return output


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.dim, config.ffn_dim)
        self.up_proj = Linear(config.dim, config.ffn_dim)
        self.down_proj = Linear(config.ffn_dim, config.dim)

    def forward(self, stream: Tensor) -> Tensor:  # [batch, length, dim]
        output: Tensor = self.down_proj(functional.silu(self.gate_proj(stream)) * self.up_proj(stream))
        return output


class Block(nn.Module):
    """One layer: attention mixes positions, the feed-forward network treats each one separately."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.dim, eps=NORM_EPSILON, dtype=torch.float32)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.dim, eps=NORM_EPSILON, dtype=torch.float32)
        self.mlp = FeedForward(config)

    def forward(self, stream: Tensor, cosine: Tensor, sine: Tensor, mask: Tensor | None = None) -> Tensor:
        stream = stream + self.self_attn(self.input_layernorm(stream), cosine, sine, mask)
        output: Tensor = stream + self.mlp(self.post_attention_layernorm(stream))
        return output


def _working_type(device: str) -> torch.dtype:
    """Returns the type in which a device computes attention."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32


def only_learned(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Drops the places whose target is not learned: [batch, length, ...] -> hidden [tokens, dim], targets [tokens]."""
    is_learned = targets >= 0
    return hidden[is_learned], targets[is_learned]


class Model(nn.Module):
    """A model that a run can train: a module with a loss.

    A plug-in's model is constructed with (config, settings), where `settings` is an instance of its `Settings`."""

    context = 0  # how many tokens it can read in order to continue a text; 0: it cannot
    draws = False  # whether a training pass draws random numbers (dropout)

    def loss(self, sequences: Tensor) -> Tensor:  # [batch, length + 1] int64 -> scalar fp32
        """Returns the mean loss of a batch."""
        raise NotImplementedError

    def packed_loss(self, inputs: Tensor, targets: Tensor, positions: Tensor | None) -> Tensor:  # -> scalar fp32
        """Returns the mean loss of the targets that are not negative, or 0 if there are none.

        inputs, targets: [batch, length] int64; positions: the inputs' places in their documents, each of which attends
        only to itself; None: documents are not kept apart (data/packing.py)"""
        raise NotImplementedError

    def initialise(self, seed: int) -> None:
        """Fills the model with its first weights: the same for the same seed on the same machine.

        A plug-in need not override this: its constructor may draw them from torch's generator, which has that seed."""

    def compile_layers(self) -> None:
        """Compiles the model with torch.compile."""
        self.compile()

    def vocabulary_matrices(self) -> list[Tensor]:
        """Returns the matrices with a row for each token or position, which do not count as hidden layers."""
        return [module.weight for module in self.modules() if isinstance(module, nn.Embedding)]

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int, temperature: float, generator: torch.Generator) -> Tensor:
        """Appends `count` sampled tokens to `tokens` [batch, length]; temperature 0 takes the likeliest ones."""
        for _ in range(count):
            logits = self(tokens[:, -self.context :])[:, -1].float() / (temperature or 1.0)  # [batch, vocab]
            if not bool(torch.isfinite(logits.logsumexp(-1)).all()):  # on a card it would end the process
                what = "a score of a next token is not finite: the run has diverged"
                raise DataError(what, fix="Begin another from an older checkpoint, with a smaller learning rate")
            drawn = logits.argmax(-1, keepdim=True)
            if temperature > 0:
                drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            tokens = torch.cat((tokens, drawn), dim=1)
        return tokens


class Transformer(Model):
    """The built-in model; its matrices are zero until `initialise` or a checkpoint fills them.

    checkpointing: a layer keeps only its input for the backward pass, and is recomputed there (arXiv 1604.06174)."""

    def __init__(self, config: ModelConfig, *, checkpointing: bool = False) -> None:
        super().__init__()
        self.config, self.checkpointing, self.context = config, checkpointing, config.sequence_length
        self.embed_tokens = Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=NORM_EPSILON, dtype=torch.float32)

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, length] int64 -> [batch, length, vocab]
        return functional.linear(self.hidden(tokens), self.embed_tokens.weight)

    def hidden(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:  # [batch, length] int64
        """Returns the residual stream [batch, length, dim] that the output matrix turns into logits."""
        config = self.config
        # RoPE uses only distances between positions, so they need not restart at each document.
        mask = None if positions is None else within_documents(positions, _working_type(tokens.device.type))
        cosine, sine = rotary_tables(tokens.shape[1], config.dim // config.heads, config.rope_theta, tokens.device)
        stream = self.embed_tokens(tokens)
        for block in self.layers:
            if self.checkpointing and torch.is_grad_enabled():
                stream = checkpoint(block, stream, cosine, sine, mask, use_reentrant=False, preserve_rng_state=False)
            else:
                stream = block(stream, cosine, sine, mask)
        output: Tensor = self.norm(stream)
        return output

    def compile_layers(self) -> None:
        """Compiles layer by layer with torch.compile: all layers are alike, so one compilation serves them all."""
        for block in self.layers:
            block.compile()

    def loss(self, sequences: Tensor) -> Tensor:  # [batch, length + 1] int64 -> scalar fp32
        """Returns the mean cross entropy, in nats, of every token but the first, given those before it."""
        hidden, targets = self.hidden(sequences[:, :-1]).flatten(0, 1), sequences[:, 1:].flatten()
        return cross_entropy(hidden, self.embed_tokens.weight, targets)

    def packed_loss(self, inputs: Tensor, targets: Tensor, positions: Tensor | None) -> Tensor:
        hidden, kept = only_learned(self.hidden(inputs, positions), targets)
        return cross_entropy(hidden, self.embed_tokens.weight, kept)

    def initialise(self, seed: int) -> None:
        initialise(self, seed)


@torch.no_grad()
def initialise(model: Transformer, seed: int) -> None:
    """Fills the model with its first weights: the same for the same seed on the same machine.

    Matrices that write to the residual stream start smaller, by sqrt(writers), so that the stream does not
    grow with depth (GPT-2). Numbers are drawn on the CPU, so that the model's device does not matter; other
    machines may still draw different ones, which is why a run's creator makes the first weights for everyone."""
    generator = torch.Generator("cpu").manual_seed(seed)
    writers = 2 * model.config.layers
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0)  # a norm's weight
            continue
        deviation = INITIAL_DEVIATION / (writers**0.5 if name.endswith(RESIDUAL_OUTPUTS) else 1.0)
        drawn = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
        parameter.copy_(drawn.normal_(0.0, deviation, generator=generator))


def parameter_shapes(config: ModelConfig) -> list[tuple[int, ...]]:
    """Returns the shapes of the built-in model's parameters, in its order, without building it."""
    dim, shared, ffn = config.dim, config.kv_heads * (config.dim // config.heads), config.ffn_dim
    attention = [(dim, dim), (shared, dim), (shared, dim), (dim, dim)]
    block = [(dim,), *attention, (dim,), (ffn, dim), (ffn, dim), (dim, ffn)]
    return [(config.vocab_size, dim), *(block * config.layers), (dim,)]
