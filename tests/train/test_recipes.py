"""The recipes against an independent DeMo and torch's AdamW; what leaves the residual and comes back."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from scipy import fft
from torch.utils._python_dispatch import TorchDispatchMode

from p2ptrain.config import RECIPES, ModelConfig, RecipeConfig, RunConfig
from p2ptrain.errors import MemoryShortError, TrainingError
from p2ptrain.exact.transform import Layout
from p2ptrain.models.built_in import Transformer, initialise
from p2ptrain.train import inner
from p2ptrain.train.inner import orthogonalised
from p2ptrain.train.live import LiveModel, pass_sequences
from p2ptrain.train.memory import need_of
from p2ptrain.train.recipes import GradientRecipe, LocalRecipe, make_recipe
from p2ptrain.train.residual import Residual, quantise
from tests.helpers.exact_numbers import integers, weights

CPU = torch.device("cpu")
TINY = ModelConfig(vocab_size=256, dim=32, layers=1, heads=2, kv_heads=1, ffn_dim=48, sequence_length=16)


def live_model(seed: int = 1, *, layers: int = 1, half_state: bool = False) -> LiveModel:
    model = Transformer(TINY.model_copy(update={"layers": layers}))
    initialise(model, seed)
    return LiveModel(model, autocast=False, half_state=half_state)


def batch(seed: int, sequences: int = 4) -> torch.Tensor:
    drawn = integers(seed, sequences * 17) % np.uint64(256)
    return torch.from_numpy(drawn.astype(np.int64).reshape(sequences, 17))


class PlainDeMo:
    """DeMo as the paper has it, on one matrix: a momentum of parameters, the DCT of its padded 64 x 64 chunks."""

    def __init__(self, shape: tuple[int, int], k: int, decay: float) -> None:
        self.shape, self.k, self.decay = shape, k, decay
        self.tiles = tuple(-(-size // 64) for size in shape)
        self.momentum = np.zeros(shape)

    def step(self, gradient: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Indices [chunks, k], values [chunks, k] and how far the weakest chosen is above the strongest left out."""
        rows, columns = self.tiles
        self.momentum = self.decay * self.momentum + gradient
        padded = np.zeros((rows * 64, columns * 64))
        padded[: self.shape[0], : self.shape[1]] = self.momentum
        chunks = padded.reshape(rows, 64, columns, 64).transpose(0, 2, 1, 3).reshape(-1, 64, 64)
        flat = fft.dctn(chunks, axes=(1, 2), norm="ortho").reshape(-1, 4096)
        order = np.argsort(-np.abs(flat), axis=1)
        indices = np.sort(order[:, : self.k], axis=1)
        values = np.take_along_axis(flat, indices, 1)
        left_out = np.abs(np.take_along_axis(flat, order[:, self.k : self.k + 1], 1))
        sent = np.zeros_like(flat)
        np.put_along_axis(sent, indices, values, 1)
        decoded = fft.idctn(sent.reshape(-1, 64, 64), axes=(1, 2), norm="ortho")
        decoded = decoded.reshape(rows, columns, 64, 64).transpose(0, 2, 1, 3).reshape(rows * 64, columns * 64)
        self.momentum -= decoded[: self.shape[0], : self.shape[1]]
        return indices, values, np.abs(values).min(axis=1) / left_out[:, 0]


@pytest.mark.parametrize("shape", [(128, 192), (100, 97)])
def test_distro_offers_what_an_independent_demo_would(shape: tuple[int, int]) -> None:
    """Padding included: there the residual of coefficients must be projected, or it drifts from the paper's."""
    recipe = RecipeConfig(chunk=64, name="distro", k=16, decay=Fraction(9, 10))
    layout = Layout([shape], 64)
    residual = Residual((layout,), CPU)
    reference = PlainDeMo(shape, 16, 0.9)
    agreeing = chosen = 0
    for step in range(12):
        gradient = weights(step, shape)
        residual.add(0, [gradient], 0.9)
        offered = residual.take(step, recipe)
        residual.forget(step)
        indices, values, margin = reference.step(gradient.double().numpy())
        for chunk in range(layout.chunks):
            ours = dict(zip(offered.indices[chunk].tolist(), offered.values[chunk].tolist(), strict=True))
            theirs = dict(zip(indices[chunk].tolist(), np.sign(values[chunk]).tolist(), strict=True))
            if margin[chunk] > 1.01:  # a choice that rounding cannot turn
                assert ours == theirs
            agreeing += len(ours.items() & theirs.items())
            chosen += 16
    assert agreeing / chosen > 0.99


def test_gradients_of_the_opposite_sign_give_the_opposite_signs_and_zero_gives_no_memory() -> None:
    recipe = RecipeConfig(chunk=64, name="distro", k=8)
    layout = Layout([(64, 128)], 64)
    one, other = Residual((layout,), CPU), Residual((layout,), CPU)
    one.add(0, [weights(1, (64, 128))], 0.5)
    other.add(0, [-weights(1, (64, 128))], 0.5)
    first, second = one.take(0, recipe), other.take(0, recipe)
    assert np.array_equal(first.indices, second.indices)
    assert np.array_equal(first.values, -second.values)
    assert not np.array_equal(first.values, np.ones_like(first.values))


def test_what_a_contribution_of_signs_carries_is_gone_from_the_residual() -> None:
    layout = Layout([(64, 128)], 64)
    residual = Residual((layout,), CPU)
    residual.add(0, [weights(1, (64, 128))], 0.5)
    before = residual.coefficients.clone()
    offered = residual.take(3, RecipeConfig(name="distro", chunk=64, k=32))
    places = torch.from_numpy(offered.indices.astype(np.int64))
    assert (residual.coefficients.gather(1, places) == 0).all()
    changed = residual.coefficients != before
    assert changed.sum() == 64
    assert torch.equal(residual.kept[3].removed, before.gather(1, places))


@pytest.mark.parametrize(("name", "value_bits"), [("demo", 1), ("demo", 3), ("demo", 4), ("local", 1)])
def test_a_scaled_contribution_carries_what_left_the_residual(name: str, value_bits: int) -> None:
    recipe = RecipeConfig(chunk=64, name=name, k=32, value_bits=value_bits)
    layout = Layout([(64, 128), (192, 64), (30,)], 64)
    residual = Residual((layout,), CPU)
    residual.add(0, [weights(1, (64, 128)), weights(2, (192, 64)) / 1000, weights(3, (30,)) * 7], 0.5)
    before = residual.coefficients.clone()
    offered = residual.take(0, recipe)
    assert offered.exponents is not None
    units = np.repeat(np.float32(2) ** offered.exponents, [2, 3, 1])[:, None]
    places = torch.from_numpy(offered.indices.astype(np.int64))
    left = (before.gather(1, places) - residual.coefficients.gather(1, places)).numpy()
    assert np.allclose(left, offered.values * units, rtol=1e-5, atol=float(units.min()) * 1e-4)
    assert offered.values.min() >= -(1 << (value_bits - 1))
    assert offered.values.max() <= 1 << (value_bits - 1)
    assert (offered.values != 0).all()


def test_quantising_finds_the_unit_with_the_least_squared_error() -> None:
    chosen = (weights(5, (6, 32)) + 0.6 * torch.sign(weights(5, (6, 32)))).numpy()
    chosen[3:] *= 2.0**-9
    for value_bits in range(1, 9):
        values, exponents = quantise(torch.from_numpy(np.abs(chosen)), [3, 3], value_bits)
        top = 2 ** (value_bits - 1)
        for group, rows in enumerate((slice(0, 3), slice(3, 6))):
            errors = {}
            for exponent in range(-30, 8):
                levels = np.clip(np.rint(np.abs(chosen[rows]) / 2.0**exponent), 1, top) * 2.0**exponent
                errors[exponent] = float(np.square(np.abs(chosen[rows]) - levels).sum())
            best = min(errors, key=lambda exponent: errors[exponent])
            assert exponents[group] == best
        assert (values >= 1).all()
        assert values.max() <= top


def test_quantising_nothing_and_extremes_stays_in_range() -> None:
    for size in (0.0, 1e-38, 1e30):
        values, exponents = quantise(torch.full((2, 4), size), [1, 1], 3)
        assert (values >= 1).all()
        assert size > 0 or (exponents == -64).all(), "nothing is sent as next to nothing"
        assert (exponents >= -64).all() and (exponents <= 15).all()


def test_a_group_without_a_gradient_is_offered_as_next_to_nothing() -> None:
    recipe = RecipeConfig(name="local")
    layout = Layout([(64, 64), (64, 64)], 64)
    residual = Residual((layout,), CPU)
    residual.add(0, [weights(1, (64, 64)) / 100, torch.zeros(64, 64)], 0.95)
    offered = residual.take(0, recipe)
    assert offered.exponents is not None
    assert offered.exponents[1] == -64 < offered.exponents[0]
    assert residual.coefficients[1].abs().max() < 1e-18


def test_signs_of_nothing_change_from_round_to_round_and_from_place_to_place() -> None:
    layout = Layout([(64, 64)], 64)
    residual = Residual((layout,), CPU)
    first, second = (
        residual.take(0, RecipeConfig(name="distro", chunk=64, k=32)),
        residual.take(1, RecipeConfig(name="distro", chunk=64, k=32)),
    )
    assert np.array_equal(first.indices, second.indices)
    assert np.array_equal(first.values, -second.values)
    assert set(first.values.ravel().tolist()) == {1, -1}


def test_a_contribution_that_nobody_took_comes_back_value_for_value() -> None:
    layout = Layout([(64, 128)], 64)
    recipe = RecipeConfig(name="distro", chunk=64, k=32)
    residual = Residual((layout,), CPU)
    residual.add(0, [weights(1, (64, 128))], 0.5)
    before = residual.coefficients.clone()
    residual.take(0, recipe)
    residual.restore(0)
    assert torch.equal(residual.coefficients, before)
    residual.restore(0)  # there is nothing left to restore
    assert torch.equal(residual.coefficients, before)
    residual.take(1, recipe)
    residual.forget(1)
    after = residual.coefficients.clone()
    residual.restore(1)
    assert torch.equal(residual.coefficients, after)


def test_contributions_come_back_in_any_order_to_a_later_residual() -> None:
    layout = Layout([(64, 128)], 64)
    recipe = RecipeConfig(name="distro", chunk=64, k=32)
    residual = Residual((layout,), CPU)
    for number in range(3):
        residual.add(0, [weights(number, (64, 128))], 0.5)
        residual.take(number, recipe)
    kept = residual.kept[1]
    before = residual.coefficients.clone()
    residual.restore(1)
    expected = before.clone().scatter_add_(1, kept.indices.long(), kept.removed)
    assert torch.equal(residual.coefficients, expected)
    assert sorted(residual.kept) == [0, 2]


def ours_and_theirs(**settings: Any) -> tuple[LiveModel, LocalRecipe, Transformer]:
    """Returns a model with its local steps, and the same model to be trained by torch's own optimizers."""
    rates = {"inner_learning_rate": Fraction(3, 1000), "inner_weight_decay": Fraction(1, 10)}
    live = live_model()
    recipe, model = RecipeConfig(name="local", **rates, **settings), Transformer(TINY)
    initialise(model, 1)
    return live, LocalRecipe(recipe, live, (Layout(live.shapes, 64),)), model


@pytest.mark.parametrize("is_fused", [False, True])
def test_local_steps_are_those_of_torchs_adamw(is_fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inner, "is_fused", lambda mean: is_fused)
    live, local, model = ours_and_theirs(inner="adamw", clip=Fraction(1, 2), sequences_per_pass=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003, betas=(0.9, 0.95), weight_decay=0.1, eps=1e-8)
    local.begin(0)
    for step in range(6):
        local.local_step(step, batch(step), [])
        optimizer.zero_grad()
        for part in batch(step).split(2):
            (model.loss(part) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    theirs = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    assert torch.allclose(live.weights, theirs, atol=2e-5)
    assert not torch.allclose(live.weights, local.base, atol=1e-3)
    moved = local.base - live.weights
    local.end()
    assert local.drift == pytest.approx(np.linalg.norm(moved.numpy()) / np.linalg.norm(local.base.numpy()), rel=1e-5)
    local.contribute(0)
    expected = Residual((Layout(live.shapes, 64),), CPU)
    expected.add(0, live.parts(moved), 0.95)
    restored = local.residual
    restored.restore(0)
    assert torch.allclose(restored.coefficients, expected.coefficients, atol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_momentum_in_bf16_is_the_same_in_one_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for is_fused in (False, True):
        monkeypatch.setattr(inner, "is_fused", lambda mean, is_fused=is_fused: is_fused)
        live = live_model(half_state=True)
        optimizer = inner.INNER_OPTIMIZERS[name](RecipeConfig(name="local"), live)
        for seed in range(3):
            live.gradient.copy_(weights(seed, live.gradient.shape))
            optimizer.step(0.003)
        assert optimizer.mean.dtype == torch.bfloat16
        found.append((live.weights - live_model().weights, optimizer.mean.float()))
    for one, other in zip(*found, strict=True):
        assert float((one - other).norm() / one.norm()) < 0.01


def test_the_schedule_shapes_the_rate_of_local_steps() -> None:
    live, local, _ = ours_and_theirs(inner="muon", sequences_per_pass=4, warmup_rounds=4)
    moved = []
    for number in (1, 4):
        local = LocalRecipe(local.config, live, (Layout(live.shapes, 64),))  # with a new optimizer
        local.begin(number)
        local.local_step(0, batch(0), [])
        moved.append(float((live.weights - local.base).norm()))
        live.weights.copy_(local.base)
    assert moved[1] == pytest.approx(4 * moved[0], rel=1e-3)


def test_muons_steps_are_those_of_torchs_muon_and_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch's own always multiplies in bf16
    monkeypatch.setattr(inner, "orthogonalised", lambda each, is_half: orthogonalised(each, is_half=True))
    live, local, model = ours_and_theirs(inner="muon", sequences_per_pass=4)
    named = dict(model.named_parameters())
    hidden = {name: each for name, each in named.items() if each.dim() == 2 and name != "embed_tokens.weight"}
    others = [each for name, each in named.items() if name not in hidden]
    settings = {"lr": 0.003, "weight_decay": 0.1}
    muon = torch.optim.Muon(hidden.values(), momentum=0.95, adjust_lr_fn="match_rms_adamw", **settings)
    adamw = torch.optim.AdamW(others, betas=(0.9, 0.95), **settings)
    local.begin(0)
    for step in range(12):
        local.local_step(step, batch(step), [])
        model.zero_grad()
        model.loss(batch(step)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step()
        adamw.step()
    before = dict(zip(named, live.parts(local.base), strict=True))
    for name, ours in zip(named, live.parts(live.weights), strict=True):
        moved, theirs = ours - before[name], named[name].detach() - before[name]
        apart = float((moved - theirs).norm() / theirs.norm())
        assert apart < (0.08 if name in hidden else 0.01), name  # sums in bf16 differ by their order


class OperationCount(TorchDispatchMode):
    """Counts operations that compute or copy; on a card each is a launch or a few."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, _: Any, arguments: Any = (), named: Any = None) -> Any:
        self.count += not function.is_view
        return function(*arguments, **(named or {}))


@pytest.mark.parametrize("half_state", [False, True])
def test_a_step_of_muon_on_a_card_is_as_many_operations_for_many_layers_as_for_few(
    half_state: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the casts of a momentum in bf16."""
    monkeypatch.setattr(inner, "is_fused", lambda mean: True)
    counts = []
    for layers in (2, 12):
        live = live_model(layers=layers, half_state=half_state)
        muon = inner.Muon(RecipeConfig(name="local"), live)
        with OperationCount() as started:
            muon.step(0.01)
        counts.append(started.count)
    casts = 10 * (7 * 2 + 2 * 1) if half_state else 0  # of a layer's matrices, both ways, and of its norms
    assert counts[1] - counts[0] == casts
    assert counts[0] < 150


@pytest.mark.parametrize("is_half", [False, True])
def test_an_orthogonalised_matrix_has_singular_values_near_one(is_half: bool) -> None:
    matrices = [weights(1, (48, 96)), weights(2, (96, 48)) * 1e-6, weights(3, (48, 96)) * 1e6]
    found = orthogonalised(matrices, is_half=is_half)
    assert found.shape == (3, 48, 96)
    values = torch.linalg.svdvals(found.float())
    assert 0.6 < float(values.min()) <= float(values.max()) < 1.3
    left, _, right = torch.linalg.svd(matrices[0], full_matrices=False)
    cosine = float((found[0].float() * (left @ right)).sum() / (found[0].float().norm() * (left @ right).norm()))
    assert cosine > 0.98
    assert not orthogonalised([torch.zeros(8, 16)], is_half=is_half).any()


def test_accumulated_passes_are_one_step_over_the_whole_batch() -> None:
    once, thrice = live_model(), live_model()
    whole = once.gradient_step(
        0, batch(1, 6), [], RecipeConfig(name="distro", chunk=64, k=32, sequences_per_pass=6, clip=Fraction(0))
    )
    parts = thrice.gradient_step(
        0, batch(1, 6), [], RecipeConfig(name="distro", chunk=64, k=32, sequences_per_pass=2, clip=Fraction(0))
    )
    assert torch.allclose(once.gradient, thrice.gradient, atol=1e-6)
    assert (whole.loss, whole.gradient_norm) == pytest.approx((parts.loss, parts.gradient_norm), rel=1e-5)
    assert whole.tokens == parts.tokens == 96
    assert whole.gradient_norm == pytest.approx(float(once.gradient.norm()))


def test_a_step_waits_for_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its passes: only then is known whether it is finite, and how far it is clipped."""
    live, waits = live_model(), []
    for name in ("tolist", "item", "__float__", "__int__", "__bool__", "cpu", "numpy"):
        real = getattr(torch.Tensor, name)

        def noted(tensor: torch.Tensor, *rest: Any, name: str = name, real: Any = real) -> Any:
            waits.append(name)
            return real(tensor, *rest)

        monkeypatch.setattr(torch.Tensor, name, noted)
    recipe = RecipeConfig(name="distro", chunk=64, k=32, sequences_per_pass=1, clip=Fraction(1, 100))
    live.gradient_step(0, batch(1), [], recipe)
    assert waits == ["tolist"]


def test_only_a_card_takes_more_sequences_at_a_time_than_the_run_says() -> None:
    recipe = RecipeConfig(sequences_per_pass=4, passes_per_step=3)
    found = {device: [pass_sequences(recipe, limit, device) for limit in (0, 3, 9, 99)] for device in ("cpu", "cuda")}
    assert found == {"cpu": [4, 3, 4, 4], "cuda": [4, 3, 9, 12]}


def test_the_gradient_is_clipped_to_its_norm_and_the_norm_before_is_reported() -> None:
    live = live_model()
    result = live.gradient_step(0, batch(1), [], RecipeConfig(name="distro", chunk=64, k=32, clip=Fraction(1, 100)))
    assert result.gradient_norm > 0.01
    assert float(live.gradient.norm()) == pytest.approx(0.01, rel=1e-4)


def test_gradients_and_parameters_stay_views_of_the_flat_tensors() -> None:
    live = live_model()
    live.gradient_step(0, batch(1), [], RecipeConfig(name="distro", chunk=64, k=32))
    live.gradient_step(1, batch(2), [], RecipeConfig(name="distro", chunk=64, k=32))
    starts = [part.data_ptr() for part in live.parts(live.weights)]
    assert [parameter.data_ptr() for parameter in live.model.parameters()] == starts
    gradients = [parameter.grad.data_ptr() for parameter in live.model.parameters() if parameter.grad is not None]
    assert gradients == [part.data_ptr() for part in live.parts(live.gradient)]


@pytest.mark.parametrize(("poison", "what"), [(float("nan"), "the loss"), (float("inf"), "the loss")])
def test_a_loss_that_is_not_finite_names_the_step_and_the_sequences(poison: float, what: str) -> None:
    live = live_model()
    live.weights[5] = poison
    with pytest.raises(TrainingError) as caught:
        live.gradient_step(
            7, torch.zeros(2, 17, dtype=torch.int64), [40, 41], RecipeConfig(name="distro", chunk=64, k=32)
        )
    assert (caught.value.what, caught.value.step, caught.value.positions) == (what, 7, [40, 41])
    assert (live.gradient == 0).all()


def test_a_gradient_that_is_not_finite_is_found_though_the_loss_is(monkeypatch: pytest.MonkeyPatch) -> None:
    live = live_model()
    live.model.norm.weight.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(TrainingError, match="the gradient is not finite in step 0"):
        live.gradient_step(0, batch(1), [1], RecipeConfig(name="distro", chunk=64, k=32))
    assert (live.gradient == 0).all()


def test_a_recipe_is_chosen_by_name() -> None:
    live = live_model()
    layout = Layout(live.shapes, 64)
    kinds = {name: type(make_recipe(RecipeConfig(chunk=64, k=32, name=name), live, (layout,))) for name in RECIPES}
    assert kinds == {"distro": GradientRecipe, "demo": GradientRecipe, "local": LocalRecipe}
    for name in RECIPES:
        assert (
            make_recipe(RecipeConfig(chunk=64, k=32, name=name), live, (layout,)).base.numel() == live.weights.numel()
        )


# ---------------------------------------------------------------------------------------------------
# Memory


@pytest.mark.parametrize(
    ("name", "by"), [("distro", "adamw"), ("demo", "adamw"), ("local", "adamw"), ("local", "muon")]
)
def test_a_recipe_takes_the_memory_that_is_told_of_it(name: str, by: str) -> None:
    run = RunConfig(name="x", model=TINY, recipe=RecipeConfig(chunk=64, k=32, name=name, inner=by))  # type: ignore[arg-type]
    live = live_model()
    recipe = make_recipe(run.recipe, live, (Layout(live.shapes, 64),))
    tensors = (each for name, each in vars(recipe).items() if name != "agreed")  # a view of the agreed state
    own = [each for each in tensors if isinstance(each, torch.Tensor) and each is not live.weights]
    saved = sum(each.nbytes for each in recipe.state().values() if each.dim())
    need = need_of(run)
    assert sum(each.nbytes for each in own) + saved == need.optimizer
    least = need_of(
        run.model_copy(update={"recipe": RecipeConfig(name="distro", chunk=run.recipe.chunk, k=run.recipe.k_max)})
    )
    scaled = need.checkpoint - least.checkpoint
    assert scaled == saved


def failing_above(live: LiveModel, sequences: int, error: Exception) -> list[int]:
    """Makes passes of more sequences fail halfway; returns the sizes that were tried."""
    tried: list[int] = []
    real = live.model.loss

    def loss(batch: torch.Tensor) -> torch.Tensor:
        tried.append(len(batch))
        found = real(batch)
        if len(batch) > sequences:
            found.backward()  # something of it is in the gradient already
            raise error
        return found

    live.model.loss = loss  # type: ignore[method-assign]
    return tried


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
)
def test_a_step_that_runs_out_of_memory_is_taken_with_half_of_the_sequences(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    whole, short = live_model(), live_model()
    recipe = RecipeConfig(name="distro", chunk=64, k=32, sequences_per_pass=6)
    expected = whole.gradient_step(0, batch(1, 6), [], recipe)
    tried = failing_above(short, 2, error)
    found = short.gradient_step(0, batch(1, 6), [], recipe)
    assert tried == [6, 3, 2, 2, 2]
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    torch.testing.assert_close(short.gradient, whole.gradient)
    assert "out of memory in a pass of 6 sequences" in caplog.text and "continuing with 3 per pass" in caplog.text
    assert "device.sequences_per_pass" in caplog.text
    tried.clear()
    short.gradient_step(1, batch(1, 6), [], recipe)
    assert tried == [2, 2, 2], "those that follow begin with what fitted"


def test_parts_of_different_sizes_weigh_as_much_as_they_have_sequences() -> None:
    whole, parts = live_model(), live_model()
    parts.sequences_per_pass = 4
    recipe = RecipeConfig(name="distro", chunk=64, k=32, sequences_per_pass=5)
    losses = [live.gradient_step(0, batch(1, 5), [], recipe).loss for live in (whole, parts)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    torch.testing.assert_close(whole.gradient, parts.gradient)


def test_where_not_one_sequence_fits_it_is_said_with_the_settings_that_help() -> None:
    live = live_model()
    failing_above(live, 0, torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(MemoryShortError, match=r"one sequence of 16 tokens does not fit: .* are free\. device\."):
        live.gradient_step(0, batch(1), [], RecipeConfig(name="distro", chunk=64, k=32))
    assert (live.gradient == 0).all()


def test_another_mistake_is_no_lack_of_memory() -> None:
    live = live_model()
    failing_above(live, 0, RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        live.gradient_step(0, batch(1), [], RecipeConfig(name="distro", chunk=64, k=32))
