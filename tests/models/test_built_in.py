"""The model against independent formulas, and the guarantees that other modules rely on."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from p2ptrain.config import MODEL_PRESETS, ModelConfig
from p2ptrain.models.built_in import (
    Attention,
    FeedForward,
    Transformer,
    initialise,
    parameter_shapes,
    rotary_tables,
    rotate,
)
from p2ptrain.models.kinds import parameter_count

TINY = ModelConfig(vocab_size=31, dim=24, layers=2, heads=6, kv_heads=2, ffn_dim=40, sequence_length=16, rope_theta=500)
PRESET_SIZES = {"1m": 1e6, "5m": 5e6, "10m": 10e6, "30m": 30e6, "100m": 100e6, "300m": 300e6, "1b": 1e9}


@pytest.fixture
def model() -> Transformer:
    made = Transformer(TINY)
    initialise(made, seed=1)
    with (
        torch.no_grad()
    ):  # at their first size attention scores are too small to tell right from wrong, and norms are 1
        generator = torch.Generator().manual_seed(2)
        for parameter in made.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.mul_(12)
    return made


def random_tokens(*shape: int, vocab_size: int = TINY.vocab_size, seed: int = 3) -> Tensor:
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------------------------------------
# Against numpy, in fp64 and with complex numbers, one position at a time


def numpy_rms_norm(rows: np.ndarray, weight: np.ndarray) -> np.ndarray:  # [length, dim]
    return np.stack([row / math.sqrt(np.dot(row, row) / len(row) + 1e-5) * weight for row in rows])


def numpy_turn(vector: np.ndarray, position: int, theta: int) -> np.ndarray:  # [head_dim]
    half = len(vector) // 2
    pairs = vector[:half] + 1j * vector[half:]
    turned = pairs * np.exp(1j * position * np.array([theta ** (-2 * i / len(vector)) for i in range(half)]))
    return np.concatenate((turned.real, turned.imag))


def numpy_attention(rows: np.ndarray, weights: dict[str, np.ndarray], config: ModelConfig) -> np.ndarray:
    head_dim = config.dim // config.heads
    queries = (rows @ weights["q_proj.weight"].T).reshape(-1, config.heads, head_dim)
    keys = (rows @ weights["k_proj.weight"].T).reshape(-1, config.kv_heads, head_dim)
    values = (rows @ weights["v_proj.weight"].T).reshape(-1, config.kv_heads, head_dim)
    mixed = np.zeros_like(queries)
    for here in range(len(rows)):
        for head in range(config.heads):
            shared = head // (config.heads // config.kv_heads)
            query = numpy_turn(queries[here, head], here, config.rope_theta)
            past = [numpy_turn(keys[there, shared], there, config.rope_theta) for there in range(here + 1)]
            share = np.exp([np.dot(query, key) / math.sqrt(head_dim) for key in past])
            mixed[here, head] = (share / share.sum()) @ values[: here + 1, shared]
    return mixed.reshape(len(rows), -1) @ weights["o_proj.weight"].T


def numpy_feed_forward(rows: np.ndarray, weights: dict[str, np.ndarray]) -> np.ndarray:
    gate = rows @ weights["gate_proj.weight"].T
    return (gate / (1 + np.exp(-gate)) * (rows @ weights["up_proj.weight"].T)) @ weights["down_proj.weight"].T


def numpy_weights(module: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: parameter.detach().double().numpy() for name, parameter in module.named_parameters()}


def numpy_logits(model: Transformer, tokens: Tensor) -> np.ndarray:  # [length] -> [length, vocab]
    weights = numpy_weights(model)
    rows = weights["embed_tokens.weight"][tokens.numpy()]
    for layer in range(model.config.layers):
        mine = {
            name.removeprefix(f"layers.{layer}."): weight
            for name, weight in weights.items()
            if name.startswith(f"layers.{layer}.")
        }
        attention = {name.removeprefix("self_attn."): weight for name, weight in mine.items()}
        feed_forward = {name.removeprefix("mlp."): weight for name, weight in mine.items()}
        rows = rows + numpy_attention(numpy_rms_norm(rows, mine["input_layernorm.weight"]), attention, model.config)
        rows = rows + numpy_feed_forward(numpy_rms_norm(rows, mine["post_attention_layernorm.weight"]), feed_forward)
    return numpy_rms_norm(rows, weights["norm.weight"]) @ weights["embed_tokens.weight"].T


def test_logits_are_those_of_the_formulas_in_numpy(model: Transformer) -> None:
    tokens = random_tokens(2, 16)
    expected = np.stack([numpy_logits(model, row) for row in tokens])
    assert np.abs(expected).max() > 1  # or else closeness would say nothing
    np.testing.assert_allclose(model(tokens).detach().numpy(), expected, rtol=1e-4, atol=1e-4)


def test_attention_is_that_of_the_formula_in_numpy(model: Transformer) -> None:
    attention = model.get_submodule("layers.0.self_attn")
    rows = torch.randn(1, 16, TINY.dim, generator=torch.Generator().manual_seed(4))
    tables = rotary_tables(16, TINY.dim // TINY.heads, TINY.rope_theta, rows.device)
    expected = numpy_attention(rows[0].double().numpy(), numpy_weights(attention), TINY)
    np.testing.assert_allclose(attention(rows, *tables)[0].detach().numpy(), expected, rtol=1e-4, atol=1e-4)


def test_feed_forward_is_that_of_the_formula_in_numpy(model: Transformer) -> None:
    feed_forward = model.get_submodule("layers.1.mlp")
    assert isinstance(feed_forward, FeedForward)
    rows = torch.randn(1, 5, TINY.dim, generator=torch.Generator().manual_seed(5))
    expected = numpy_feed_forward(rows[0].double().numpy(), numpy_weights(feed_forward))
    np.testing.assert_allclose(feed_forward(rows)[0].detach().numpy(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])  # at 1e-3 the epsilon decides
def test_norm_is_that_of_the_formula_in_numpy(model: Transformer, size: float) -> None:
    rows = size * torch.randn(5, TINY.dim, generator=torch.Generator().manual_seed(6))
    expected = numpy_rms_norm(rows.double().numpy(), model.norm.weight.detach().double().numpy())
    np.testing.assert_allclose(model.norm(rows).detach().numpy(), expected, rtol=1e-5, atol=1e-6)


def test_loss_is_the_mean_cross_entropy_of_the_next_tokens(model: Transformer) -> None:
    sequences = random_tokens(3, 17)
    surprise = []
    for sequence in sequences:
        logits = numpy_logits(model, sequence[:-1])
        normaliser = np.log(np.exp(logits).sum(-1))
        surprise += [normaliser[place] - logits[place, token] for place, token in enumerate(sequence[1:])]
    assert model.loss(sequences).item() == pytest.approx(np.mean(surprise), rel=1e-5)


# ---------------------------------------------------------------------------------------------------
# Properties


@pytest.mark.parametrize("changed", [0, 7, 15])
def test_a_token_changes_no_logits_before_it_and_all_from_it_on(model: Transformer, changed: int) -> None:
    tokens = random_tokens(1, 16)
    other = tokens.clone()
    other[0, changed] = (other[0, changed] + 1) % TINY.vocab_size
    before, after = model(tokens)[0], model(other)[0]
    assert torch.equal(before[:changed], after[:changed])
    assert (before[changed:] != after[changed:]).any(dim=-1).all()


def test_sequences_of_a_batch_do_not_mix(model: Transformer) -> None:
    tokens = random_tokens(4, 16)
    alone = torch.cat([model(row[None]) for row in tokens])
    torch.testing.assert_close(model(tokens), alone, rtol=1e-5, atol=1e-5)


def test_rotated_products_depend_on_the_distance_alone() -> None:
    cosine, sine = rotary_tables(200, 16, 10_000, torch.device("cpu"))
    generator = torch.Generator().manual_seed(8)
    query, key = torch.randn(16, generator=generator), torch.randn(16, generator=generator)
    everywhere = torch.ones(200, 1)
    queries = rotate((everywhere * query)[None, None], cosine, sine)[0, 0]  # [200, 16]
    keys = rotate((everywhere * key)[None, None], cosine, sine)[0, 0]
    products = queries @ keys.T  # [position of the query, position of the key]
    for distance in (-150, -3, 0, 1, 60):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=2e-4)
    assert products.diagonal(0)[0] == pytest.approx(torch.dot(query, key).item(), rel=1e-5)
    assert abs(products.diagonal(0)[0] - products.diagonal(1)[0]) > 0.1  # a distance does make a difference
    torch.testing.assert_close(queries.norm(dim=-1), query.norm().expand(200))


def test_as_many_key_heads_as_heads_is_ordinary_attention() -> None:
    config = TINY.model_copy(update={"kv_heads": TINY.heads})
    attention = Attention(config)
    ordinary = torch.nn.MultiheadAttention(config.dim, config.heads, bias=False, batch_first=True)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(9)
        for parameter in attention.parameters():
            parameter.normal_(0.0, 0.5, generator=generator)
        projections = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
        ordinary.in_proj_weight.copy_(torch.cat(projections))
        ordinary.out_proj.weight.copy_(attention.o_proj.weight)
    stream = torch.randn(2, 10, config.dim, generator=generator)
    unturned = torch.ones(10, 2), torch.zeros(10, 2)  # ordinary attention knows no positions
    hidden = torch.ones(10, 10, dtype=torch.bool).triu(1)
    expected, _ = ordinary(stream, stream, stream, attn_mask=hidden, need_weights=False)
    torch.testing.assert_close(attention(stream, *unturned), expected, rtol=1e-4, atol=1e-5)


def test_shared_key_heads_are_repeated_key_heads() -> None:
    grouped = Attention(TINY)
    full = Attention(TINY.model_copy(update={"kv_heads": TINY.heads}))
    head_dim, sharers = TINY.dim // TINY.heads, TINY.heads // TINY.kv_heads
    with torch.no_grad():
        generator = torch.Generator().manual_seed(10)
        for parameter in grouped.parameters():
            parameter.normal_(0.0, 0.5, generator=generator)
        for name, parameter in full.named_parameters():
            weight = grouped.get_parameter(name)
            if name.startswith(("k_proj", "v_proj")):
                weight = weight.unflatten(0, (-1, head_dim)).repeat_interleave(sharers, dim=0).flatten(0, 1)
            parameter.copy_(weight)
    stream = torch.randn(2, 10, TINY.dim, generator=generator)
    tables = rotary_tables(10, head_dim, TINY.rope_theta, stream.device)
    torch.testing.assert_close(grouped(stream, *tables), full(stream, *tables), rtol=1e-4, atol=1e-5)


def test_one_batch_can_be_learned_by_heart() -> None:
    model = Transformer(TINY)
    initialise(model, seed=0)
    sequences = random_tokens(4, 17)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    first = model.loss(sequences).item()
    assert first == pytest.approx(math.log(TINY.vocab_size), rel=0.02)  # it starts by guessing
    for _ in range(100):
        optimizer.zero_grad()
        model.loss(sequences).backward()
        optimizer.step()
    assert model.loss(sequences).item() < 0.05


# ---------------------------------------------------------------------------------------------------
# Parameters


def test_the_embedding_is_the_output_matrix_too(model: Transformer) -> None:
    square = [name for name, parameter in model.named_parameters() if parameter.shape == (TINY.vocab_size, TINY.dim)]
    assert square == ["embed_tokens.weight"]
    before = model(torch.tensor([[0]]))
    with torch.no_grad():
        model.embed_tokens.weight[30] *= 2  # never read as an input here
    after = model(torch.tensor([[0]]))
    assert torch.equal(after[..., :30], before[..., :30])
    torch.testing.assert_close(after[..., 30], 2 * before[..., 30])


def test_parameters_come_in_the_order_of_the_state_root(model: Transformer) -> None:
    layer = [
        "input_layernorm.weight",
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
        "self_attn.o_proj.weight",
        "post_attention_layernorm.weight",
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
        "mlp.down_proj.weight",
    ]
    names = ["embed_tokens.weight", *(f"layers.{i}.{name}" for i in range(2) for name in layer), "norm.weight"]
    assert [name for name, _ in model.named_parameters()] == names
    assert list(model.state_dict()) == names  # and nothing else is saved: no tables, no second output matrix
    assert not list(model.buffers())


def test_parameters_are_fp32_whatever_the_default_is() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        model = Transformer(TINY)
        initialise(model, seed=1)
    finally:
        torch.set_default_dtype(torch.float32)
    again = Transformer(TINY)
    initialise(again, seed=1)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("preset", MODEL_PRESETS)
def test_a_preset_has_the_parameters_that_are_counted_and_that_its_name_says(preset: str) -> None:
    config = ModelConfig(preset=preset)
    with torch.device("meta"):
        model = Transformer(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameter_count(config)
    assert parameter_count(config) == pytest.approx(PRESET_SIZES[preset], rel=0.2)


def test_odd_sizes_are_counted_too() -> None:
    assert sum(parameter.numel() for parameter in Transformer(TINY).parameters()) == parameter_count(TINY)


# ---------------------------------------------------------------------------------------------------
# First weights


def test_first_weights_follow_from_the_seed_and_leave_the_global_generator_alone() -> None:
    models = [Transformer(TINY) for _ in range(3)]
    for model, seed in zip(models, (5, 5, 6), strict=True):
        torch.rand(seed)  # what others drew in between does not matter
        state = torch.get_rng_state()
        initialise(model, seed)
        Transformer(TINY)
        assert torch.equal(torch.get_rng_state(), state)
    first, same, other = (torch.nn.utils.parameters_to_vector(model.parameters()) for model in models)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_what_writes_to_the_residual_stream_starts_smaller() -> None:
    config = ModelConfig(preset="1m")
    model = Transformer(config)
    initialise(model, seed=0)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert torch.equal(parameter, torch.ones(config.dim)), name
            continue
        writes = "o_proj" in name or "down_proj" in name
        assert parameter.std().item() == pytest.approx(0.02 / math.sqrt(10) if writes else 0.02, rel=0.03), name
        assert abs(parameter.mean().item()) < 1e-3, name


def test_a_model_off_the_meta_device_needs_nothing_but_its_weights(model: Transformer) -> None:
    with torch.device("meta"):
        moved = Transformer(TINY)
        assert moved(random_tokens(1, 8).to("meta")).shape == (1, 8, TINY.vocab_size)
    moved.to_empty(device="cpu")
    moved.load_state_dict(model.state_dict())
    assert torch.equal(moved(random_tokens(2, 16)), model(random_tokens(2, 16)))


# ---------------------------------------------------------------------------------------------------
# Use


@pytest.mark.filterwarnings("default")  # a CPU without bf16 in hardware may say so
def test_under_autocast_matrices_are_bf16_and_the_loss_is_fp32(model: Transformer) -> None:
    sequences = random_tokens(3, 17)
    exact = model.loss(sequences)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(sequences).dtype == torch.bfloat16
        loss = model.loss(sequences)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=0.05)
    assert loss.item() != loss.bfloat16().item()  # not rounded on the way
    loss.backward()
    assert {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None} == {torch.float32}
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_model_cast_to_bf16_as_a_whole_works_and_its_loss_is_still_fp32(model: Transformer) -> None:
    sequences = random_tokens(3, 17)
    exact = model.loss(sequences).item()
    loss = model.bfloat16().loss(sequences)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact, rel=0.05)


def test_generated_tokens_follow_from_the_generator_and_at_zero_from_the_logits(model: Transformer) -> None:
    start = random_tokens(2, 3)
    lengths: list[int] = []
    handle = model.register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    likeliest = model.generate(start, 20, 0.0, torch.Generator())
    handle.remove()
    assert lengths == [*range(3, 16), *7 * [16]]  # never more than the model was trained on
    assert likeliest.shape == (2, 23)
    assert torch.equal(likeliest[:, :3], start)
    for length in range(3, 23):
        window = likeliest[:, max(0, length - TINY.sequence_length) : length]
        assert torch.equal(likeliest[:, length], model(window)[:, -1].argmax(-1))
    drawn = [model.generate(start, 5, 1.0, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@pytest.mark.hf
@pytest.mark.parametrize("kv_heads", [2, 6])
@pytest.mark.filterwarnings("default")  # what another package deprecates is not ours to mend
def test_logits_are_those_of_hugging_face_llama(kv_heads: int) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install p2ptrain[hf]")
    config = TINY.model_copy(update={"kv_heads": kv_heads})
    model = Transformer(config)
    initialise(model, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(12 if parameter.dim() == 2 else 1.5)
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.dim,
            intermediate_size=config.ffn_dim,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            max_position_embeddings=config.sequence_length,
            rope_theta=config.rope_theta,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    ours = {f"model.{name}": parameter for name, parameter in model.named_parameters()}
    theirs = dict(llama.named_parameters())
    assert {name: parameter.shape for name, parameter in ours.items()} == {
        name: parameter.shape for name, parameter in theirs.items()
    }
    with torch.no_grad():
        for name, parameter in theirs.items():
            parameter.copy_(ours[name])
    tokens = random_tokens(2, 16)
    logits = model(tokens)
    assert logits.abs().max() > 1
    torch.testing.assert_close(logits, llama.eval()(tokens).logits, rtol=1e-4, atol=1e-4)


def test_a_layer_that_is_computed_again_gives_the_same_gradients() -> None:
    gradients = []
    for checkpointing in (False, True):
        model = Transformer(TINY, checkpointing=checkpointing)
        initialise(model, 3)
        model.loss(random_tokens(2, TINY.sequence_length + 1)).backward()
        gradients.append(torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()]))
    assert torch.equal(*gradients)


def test_the_shapes_of_a_model_are_known_without_building_it() -> None:
    for config in (ModelConfig(), ModelConfig(preset="100m"), ModelConfig(dim=48, heads=3, kv_heads=1, layers=3)):
        with torch.device("meta"):
            built = [tuple(each.shape) for each in Transformer(config).parameters()]
        assert parameter_shapes(config) == built
