"""Products in FP8: each against a plain emulation, and a model that learns with them as it does without."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import ceil, dist, log2
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch
from torch import Tensor

from megaconv.errors import LayoutError, NotExpressible
from megaconv.model.fields import fields_of, from_fields
from megaconv.model.layout import Layout
from megatron_lite.engine import Engine
from megatron_lite.models.build_plan import make_plan
from megatron_lite.parallel.tensor import TensorGroup
from megatron_lite.products.fp8 import KINDS, DelayedProduct
from megatron_lite.products.product import PLAIN, OtherProduct
from megatron_lite.products.selection import delayed_products
from megatron_lite.settings.options import FP8, ModelOptions
from tests.trainer.parallel.small import MODELS, Case, make_engine, own_batches, step
from tests.trainer.parallel.worlds import World

E4M3, E5M2 = (torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)
RECIPES = ("tensorwise", "delayed", "blockwise", "mxfp8")


def emulated(values: Tensor, recipe: str, kind: tuple[torch.dtype, float], weight: bool) -> Tensor:
    """Quantized along the last axis and back, number by number as the recipe says; float32."""
    dtype, most = kind
    rows, columns = values.shape
    wide = {"blockwise": 128, "mxfp8": 32}.get(recipe, columns)
    high = (
        128
        if recipe == "blockwise" and weight
        else rows
        if recipe in ("tensorwise", "delayed")
        else 1
    )
    found = torch.empty_like(values, dtype=torch.float32)
    for row in range(0, rows, high):
        for column in range(0, columns, wide):
            block = values[row : row + high, column : column + wide].float()
            largest = block.abs().max().item()
            scale = (
                most / largest
                if recipe in ("tensorwise", "delayed")
                else 2.0 ** -ceil(log2(largest / most))
            )
            found[row : row + high, column : column + wide] = (block * scale).clamp(-most, most).to(
                dtype
            ).float() / scale
    return found


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("form", ["e4m3", "hybrid"])
def test_three_products_are_those_of_quantized_and_dequantized_matrices(
    recipe: str, form: str
) -> None:
    """Tokens and outputs are of very different sizes, though their products aren't: along the wrong axis blocks would lose small ones."""
    torch.manual_seed(3)
    of_tokens, of_outputs = (
        2.0 ** (torch.arange(count) * 7 % 13 - 6).float() for count in (74, 192)
    )
    of_x = of_tokens.view(37, 2, 1)
    x, weight = torch.randn(37, 2, 160) * of_x, torch.randn(192, 160) * of_outputs[:, None]
    grad = torch.randn(37, 2, 192) * 1e-4 / of_x / of_outputs
    product, of_gradients = (
        KINDS[recipe](FP8(format=form, recipe=recipe)),
        E5M2 if form == "hybrid" else E4M3,
    )
    rows, grads = x.flatten(0, 1), grad.flatten(0, 1)

    def quantized(values: Tensor, role: str) -> Tensor:
        return emulated(
            values, recipe, of_gradients if role == "gradient" else E4M3, role == "weight"
        )

    made, dx, dw = (
        product.forward(x, weight),
        product.of_input(grad, weight),
        product.of_weight(grads, rows),
    )
    tokens = of_tokens[:, None]
    for found, left, right, sizes in (
        (
            made.flatten(0, 1),
            quantized(rows, "input"),
            quantized(weight, "weight"),
            tokens * of_outputs,
        ),
        (
            dx.flatten(0, 1),
            quantized(grads, "gradient"),
            quantized(weight.t(), "weight"),
            1 / tokens,
        ),
        (
            dw,
            quantized(grads.t(), "gradient"),
            quantized(rows.t(), "input"),
            1 / of_outputs[:, None],
        ),
    ):
        expected = left @ right.t() / sizes
        assert (found / sizes - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_a_bias_an_expert_without_rows_and_zeros_are_what_they_are_without_fp8() -> None:
    product, weight, bias = KINDS["tensorwise"](FP8()), torch.randn(32, 16), torch.randn(32)
    assert torch.equal(product.linear(torch.zeros(4, 16), weight, bias), bias.expand(4, -1))
    assert product.linear(torch.zeros(0, 16), weight).shape == (0, 32)
    assert not product.of_weight(torch.zeros(0, 32), torch.zeros(0, 16)).any()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_beside_numbers_near_the_smallest_of_float32_are_finite(
    recipe: str, dtype: torch.dtype
) -> None:
    """The factor of such numbers would be infinite: activations of gates that are closed, gradients of unlikely experts."""
    product = KINDS[recipe](FP8(recipe=recipe))
    x = torch.zeros(2, 128, dtype=dtype)
    x[0, ::2] = 1e-37
    weight = torch.ones(32, 128, dtype=dtype)
    expected = torch.tensor([[64e-37], [0.0]]).expand(2, 32)
    torch.testing.assert_close(product.forward(x, weight).float(), expected, rtol=0.07, atol=1e-45)
    assert product.of_weight(x[:, :32], x).isfinite().all()


def test_delayed_scales_follow_the_largest_elements_of_the_steps_before() -> None:
    for algorithm, expected in (("most_recent", 448 / 2), ("max", 448 / 8)):
        product = DelayedProduct(FP8(recipe="delayed", history=3, algorithm=algorithm))
        for largest in (100.0, 8.0, 4.0, 2.0):  # the first is forgotten by then
            product.end_step(torch.tensor([largest, 0.0, 0.0]))
        assert (
            product.scale("input", torch.tensor([[1000.0]]), torch.float8_e4m3fn).item() == expected
        )
        assert product.forward(torch.full((1, 16), 1000.0), torch.eye(16)).max() <= 8.0, (
            "larger ones are clamped"
        )


@pytest.mark.parametrize("largest", [0.0, torch.inf, torch.nan])
@pytest.mark.parametrize("algorithm", ["most_recent", "max"])
def test_a_step_without_finite_values_leaves_the_scale_to_the_current_ones(
    algorithm: str, largest: float
) -> None:
    """Else the gradients of an expert that had no tokens in the step before would be rounded to 0."""
    product = DelayedProduct(FP8(recipe="delayed", algorithm=algorithm))
    product.end_step(torch.full((3,), largest))
    small = torch.full((16, 16), 1e-6)
    torch.testing.assert_close(product.of_input(small, torch.eye(16)), small, rtol=1e-5, atol=0)


SIZES = {"mlp.ffn": 64, "experts.count": 4, "experts.per_token": 2, "experts.ffn": 32}
MIXED = {"layers.mlp": ("dense", "experts", "dense", "experts"), **SIZES}
MODEL = from_fields("qwen3_moe", fields_of(MODELS["qwen3"]) | MIXED)
DENSE = from_fields("qwen3", fields_of(MODELS["qwen3"]) | {"mlp.ffn": 64})
Found = TypeVar("Found")


@pytest.fixture(autouse=True)
def model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "in fp8", MODEL)
    monkeypatch.setitem(MODELS, "dense in fp8", DENSE)


def case(fp8: FP8 | None, **more: Any) -> Case:
    return Case(
        "in fp8", masked=False, steps=12, options=(("dtype", "bfloat16"), ("fp8", fp8)), **more
    )


def losses(_rank: int, run: Case) -> list[float]:
    MODELS["in fp8"] = MODEL
    engine = make_engine(run)
    found = [step(engine, run, 0).loss for _ in range(run.steps)]
    engine.finish()
    engine.grid.close()
    return found


SLOW = ("tensorwise", "delayed")
"""Recipes that are slow on a CPU: torch's product with one scale for a matrix takes the elements one by one."""
EACH_RECIPE = [
    pytest.param(each, marks=pytest.mark.slow if each in SLOW else ()) for each in RECIPES
]


class IdealProduct(OtherProduct):
    """A product with FP8's mantissa and any exponent: no scale, and no number too large or too small.

    Each product draws a factor between 1 and 2 that its operands are rounded with, so that other draws round otherwise and as well:
    how far these part is what a format of this precision does to a model, however it is computed.
    """

    draws = random.Random()

    def __init__(self, options: FP8) -> None:
        self.of_gradients = 2 if options.format == "hybrid" else 3
        self.factor = 2 ** self.draws.random()

    def rounded(self, values: Tensor, mantissa: int = 3) -> Tensor:
        fraction, exponent = torch.frexp(values.float() * self.factor)
        steps = 2.0 ** (mantissa + 1)  # the fraction is at least a half
        return (torch.ldexp((fraction * steps).round() / steps, exponent) / self.factor).to(
            values.dtype
        )

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        made = self.rounded(x) @ self.rounded(weight).t()
        return made if bias is None else made + bias

    def of_input(self, grad: Tensor, weight: Tensor) -> Tensor:
        return self.rounded(grad, self.of_gradients) @ self.rounded(weight)

    def of_weight(self, grad: Tensor, x: Tensor) -> Tensor:
        return self.rounded(grad, self.of_gradients).t() @ self.rounded(x)

    def gradient_sum(self, weight: Tensor) -> None:
        """The gradient is rounded, so of_weight makes it."""


def ideal(make: Callable[[FP8], Found], form: str, draws: int) -> list[Found]:
    """The results of `make` in each draw."""
    found = []
    with mock.patch.dict(KINDS, mxfp8=IdealProduct):
        for draw in range(draws):
            IdealProduct.draws.seed(draw)
            found.append(make(FP8(format=form, recipe="mxfp8")))
    return found


def gradients(fp8: FP8 | None) -> dict[str, Tensor]:
    """The gradients of the layers of a dense model in float32. No other rounding happens, and no token changes its
    expert.

    What lies behind the layers has gradients that no product rounds.
    """
    run = replace(case(fp8), model="dense in fp8", options=(("fp8", fp8),), clip=0.0)
    engine = make_engine(run)
    engine.train_step(own_batches(run, 0, engine), lr=0.0, weight_decay=0.0)
    assert engine.optimizer is not None
    return {
        item.name: item.gradient.clone()
        for item in engine.optimizer.ranges()
        if ".layers." in item.name
    }


@cache
def gradients_by_chance(form: str) -> list[dict[str, Tensor]]:
    return ideal(gradients, form, 8)


def departures(found: dict[str, Tensor], plain: dict[str, Tensor]) -> Tensor:
    """Relative, of each parameter's gradient."""
    return torch.stack([(found[name] - plain[name]).norm() / plain[name].norm() for name in plain])


def geometric_mean(values: Tensor) -> float:
    return float(values.log().mean().exp())


@pytest.mark.parametrize("recipe", EACH_RECIPE)
def test_gradients_part_as_far_as_the_precision_of_the_format_has_it(recipe: str) -> None:
    """The gradients are compared with those without FP8. Those of `hybrid` are compared with those of `e4m3`, which
    has the same forward pass.

    Neither more nor less: a mean over all parameters to 15%, thrice what one draw's parts from that of all draws.
    """
    plain = gradients(None)
    e4m3, hybrid = (gradients(FP8(format=form, recipe=recipe)) for form in ("e4m3", "hybrid"))
    ideal_e4m3, ideal_hybrid = (gradients_by_chance(form) for form in ("e4m3", "hybrid"))
    for found, expected in (
        (departures(e4m3, plain), [departures(each, plain) for each in ideal_e4m3]),
        (departures(hybrid, plain), [departures(each, plain) for each in ideal_hybrid]),
        (departures(hybrid, e4m3), list(map(departures, ideal_hybrid, ideal_e4m3))),
    ):
        assert (torch.stack(expected) > 0).all(), "else a mean is 0 whatever the others are"
        assert geometric_mean(found) == pytest.approx(
            geometric_mean(torch.stack(expected)), rel=0.15
        )


@cache
def in_bf16() -> list[float]:
    return losses(0, case(None))


@cache
def departed() -> float:
    """The distance between the losses of all steps and those in bf16, by rounding of this precision: the root mean
    square of the draws."""
    drawn = ideal(lambda fp8: losses(0, case(fp8)), "e4m3", 4)
    return (sum(dist(found, in_bf16()) ** 2 for found in drawn) / len(drawn)) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize("recipe", EACH_RECIPE)
def test_a_model_learns_in_fp8_as_in_any_rounding_of_its_precision(recipe: str) -> None:
    """Within half of how far such rounding parts from bf16 by chance: single draws are within a quarter of their root mean square."""
    plain, found = in_bf16(), losses(0, case(FP8(format="e4m3", recipe=recipe)))
    assert dist(found, plain) == pytest.approx(departed(), rel=0.5)
    assert plain[-1] < 0.7 * plain[0], "else there was nothing to learn"


def test_layers_at_both_ends_stay_in_bf16_where_asked_for() -> None:
    engine = make_engine(case(FP8(first_in_bf16=1, last_in_bf16=2)))
    (chunk,) = engine.chunks
    kinds = [
        {type(getattr(module, "product", PLAIN)) for module in layer.modules()}
        for layer in chunk.decoder.layers
    ]
    assert [DelayedProduct in found for found in kinds] == [False, True, False, False]
    assert chunk.output_layer is not None
    assert not hasattr(chunk.output_layer, "product")


def test_a_network_of_its_own_is_not_taken_for_a_decoder() -> None:
    with pytest.raises(
        NotExpressible, match="--fp8-format is for decoders; a bert is computed in bf16"
    ):
        make_plan(
            replace(MODELS["gpt2"], family="bert"),
            Layout(stage_layers=(4,)),
            ModelOptions(fp8=FP8()),
            TensorGroup(),
        )


def test_matrices_whose_sides_are_no_multiples_are_refused_by_name() -> None:
    odd = replace(case(FP8(recipe="mxfp8")), model="qwen3")
    with pytest.raises(LayoutError, match=r"multiples of 32, but layers' .* is 32 x 48 at tp = 1"):
        make_engine(odd)


def largest_of_a_step(_rank: int, run: Case) -> list[list[float]]:
    MODELS["in fp8"] = MODEL
    engine = make_engine(run)
    step(engine, run, 0)
    (chunk,) = engine.chunks
    found = [
        [float(history[0]) for history in product.history.values()]
        for _, product in delayed_products(chunk)
    ]
    engine.finish()
    engine.grid.close()
    return found


def histories_of(engine: Engine) -> list[Tensor]:
    return [product.state() for chunk in engine.chunks for _, product in delayed_products(chunk)]


def test_an_evaluation_leaves_the_histories_of_the_next_step_alone() -> None:
    run = replace(case(FP8()), model="dense in fp8")
    found = []
    for evaluates in (False, True):
        engine = make_engine(run)
        step(engine, run, 0)
        if evaluates:
            engine.evaluate(own_batches(run, 7, engine))
        step(engine, run, 1)
        found.append(torch.stack(histories_of(engine)))
    assert torch.equal(*found)


def test_a_step_without_tokens_for_the_first_expert_of_a_stage_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The expert's matrices are the first in FP8, and have no values in the step."""
    options = FP8(first_in_bf16=1)
    sizes = {"layers.mixer": ("attention", "none", "none", "attention")}
    layers = {**sizes, "layers.mlp": ("none", "experts", "dense", "none")}
    hybrid = fields_of(MODELS["hybrid"]) | layers | {"mlp.ffn": 64, "experts.ffn": 32}
    monkeypatch.setitem(
        MODELS, "in fp8", from_fields("nemotron_h", {**hybrid, "experts.shared_ffn": 32})
    )
    run = case(options)
    engine = make_engine(run)
    (chunk,) = engine.chunks
    chunk.decoder.layers[1].mlp.router.expert_bias.data[0] = -10
    step(engine, run, 0)
    name, product = next(delayed_products(chunk))
    assert name.endswith("local_experts.0.linear_fc1")
    assert not product.state().any()
    assert len(histories_of(engine)) > 1


@pytest.mark.slow
def test_ranks_train_in_fp8_as_one_process_and_share_what_was_largest(world: World) -> None:
    shared = case(FP8(), tp=2, sequence_parallel=True)
    first, second = world.run(2, largest_of_a_step, shared)
    assert first == second
    shared = replace(shared, steps=4)
    for run in (
        shared,
        replace(case(FP8(format="e4m3", recipe="tensorwise"), dp=2, distributed=True), steps=4),
    ):
        for found in world.run(run.world, losses, run):
            assert found == pytest.approx(losses(0, run.alone()), rel=1e-2)
