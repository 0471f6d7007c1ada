"""Products in FP8: each against a plain emulation, and a model that learns with them as it does without."""

from dataclasses import replace
from math import ceil, log2
from typing import Any

import pytest
import torch
from torch import Tensor

from megaconv.errors import LayoutError, NotExpressible
from megaconv.model.fields import fields_of, from_fields
from megaconv.model.layout import Layout
from megatron_lite.models.fp8 import delayed_products
from megatron_lite.models.plan import make_plan
from megatron_lite.parallel.fp8 import KINDS, DelayedProduct
from megatron_lite.parallel.product import PLAIN
from megatron_lite.parallel.tensor import TensorGroup
from megatron_lite.settings.options import FP8, ModelOptions
from tests.trainer.parallel.small import MODELS, Case, make_engine, step
from tests.trainer.parallel.worlds import World

E4M3, E5M2 = (torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)
RECIPES = ("tensorwise", "delayed", "blockwise", "mxfp8")


def emulated(values: Tensor, recipe: str, kind: tuple[torch.dtype, float], weight: bool) -> Tensor:
    """Quantized along the last axis and back, number by number as the recipe says; float32."""
    dtype, most = kind
    rows, columns = values.shape
    wide = {"blockwise": 128, "mxfp8": 32}.get(recipe, columns)
    high = 128 if recipe == "blockwise" and weight else rows if recipe in ("tensorwise", "delayed") else 1
    found = torch.empty_like(values, dtype=torch.float32)
    for row in range(0, rows, high):
        for column in range(0, columns, wide):
            block = values[row : row + high, column : column + wide].float()
            largest = block.abs().max().item()
            scale = most / largest if recipe in ("tensorwise", "delayed") else 2.0 ** -ceil(log2(largest / most))
            found[row : row + high, column : column + wide] = (block * scale).clamp(-most, most).to(
                dtype
            ).float() / scale
    return found


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("form", ["e4m3", "hybrid"])
def test_three_products_are_those_of_quantized_and_dequantized_matrices(recipe: str, form: str) -> None:
    torch.manual_seed(3)
    x, weight, grad = torch.randn(37, 2, 160), torch.randn(192, 160), torch.randn(37, 2, 192) * 1e-4
    product, of_gradients = KINDS[recipe](FP8(form, recipe)), E5M2 if form == "hybrid" else E4M3
    rows, grads = x.flatten(0, 1), grad.flatten(0, 1)

    def quantized(values: Tensor, role: str) -> Tensor:
        return emulated(values, recipe, of_gradients if role == "gradient" else E4M3, role == "weight")

    made, dx, dw = (product.forward(x, weight), product.of_input(grad, weight), product.of_weight(grads, rows))
    for found, left, right in (
        (made.flatten(0, 1), quantized(rows, "input"), quantized(weight, "weight")),
        (dx.flatten(0, 1), quantized(grads, "gradient"), quantized(weight.t(), "weight")),
        (dw, quantized(grads.t(), "gradient"), quantized(rows.t(), "input")),
    ):
        expected = left @ right.t()
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_a_bias_an_expert_without_rows_and_zeros_are_what_they_are_without_fp8() -> None:
    product, weight, bias = KINDS["tensorwise"](FP8()), torch.randn(32, 16), torch.randn(32)
    assert torch.equal(product.linear(torch.zeros(4, 16), weight, bias), bias.expand(4, -1))
    assert product.linear(torch.zeros(0, 16), weight).shape == (0, 32)
    assert not product.of_weight(torch.zeros(0, 32), torch.zeros(0, 16)).any()


def test_delayed_scales_follow_the_largest_elements_of_the_steps_before() -> None:
    for algorithm, expected in (("most_recent", 448 / 2), ("max", 448 / 8)):
        product = DelayedProduct(FP8(recipe="delayed", history=3, algorithm=algorithm))
        for largest in (100.0, 8.0, 4.0, 2.0):  # the first is forgotten by then
            product.end_step(torch.tensor([largest, 0.0, 0.0]))
        assert product.scale("input", torch.tensor([[1000.0]]), torch.float8_e4m3fn).item() == expected
        assert product.forward(torch.full((1, 16), 1000.0), torch.eye(16)).max() <= 8.0, "larger ones are clamped"


SIZES = {"mlp.ffn": 64, "experts.count": 4, "experts.per_token": 2, "experts.ffn": 32}
MIXED = {"layers.mlp": ("dense", "experts", "dense", "experts"), **SIZES}
MODEL = from_fields("qwen3_moe", fields_of(MODELS["qwen3"]) | MIXED)


@pytest.fixture(autouse=True)
def model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "in fp8", MODEL)


def case(fp8: FP8 | None, **more: Any) -> Case:
    return Case("in fp8", masked=False, steps=12, options=(("dtype", "bfloat16"), ("fp8", fp8)), **more)


def losses(_rank: int, run: Case) -> list[float]:
    MODELS["in fp8"] = MODEL
    engine = make_engine(run)
    found = [step(engine, run, 0).loss for _ in range(run.steps)]
    engine.finish()
    engine.grid.close()
    return found


SLOW = ("tensorwise", "delayed")
"""On a CPU: torch's product by one scale of each matrix takes its elements one by one."""


@pytest.mark.parametrize(
    "recipe", [pytest.param(each, marks=pytest.mark.slow if each in SLOW else ()) for each in RECIPES]
)
def test_a_model_learns_in_fp8_almost_as_in_bf16(recipe: str) -> None:
    plain, found = losses(0, case(None)), losses(0, case(FP8("e4m3", recipe)))
    assert found != plain
    assert found[0] == pytest.approx(
        plain[0], rel=1e-3
    )  # before the first update: three bits of mantissa in each product
    assert found == pytest.approx(plain, rel=2e-2)  # gradients' rounding adds up over steps: 1.1% after twelve
    assert found[0] - found[-1] == pytest.approx(plain[0] - plain[-1], rel=0.05)


def test_layers_at_both_ends_stay_in_bf16_where_asked_for() -> None:
    engine = make_engine(case(FP8(first_in_bf16=1, last_in_bf16=2)))
    (chunk,) = engine.chunks
    kinds = [{type(getattr(module, "product", PLAIN)) for module in layer.modules()} for layer in chunk.decoder.layers]
    assert [DelayedProduct in found for found in kinds] == [False, True, False, False]
    assert chunk.output_layer is not None
    assert not hasattr(chunk.output_layer, "product")


def test_a_network_of_its_own_is_not_taken_for_a_decoder() -> None:
    with pytest.raises(NotExpressible, match="--fp8-format is for decoders; a bert is computed in bf16"):
        make_plan(
            replace(MODELS["gpt2"], family="bert"), Layout(stage_layers=(4,)), ModelOptions(fp8=FP8()), TensorGroup()
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
    found = [[float(history[0]) for history in product.history.values()] for _, product in delayed_products(chunk)]
    engine.finish()
    engine.grid.close()
    return found


@pytest.mark.slow
def test_ranks_train_in_fp8_as_one_process_and_share_what_was_largest(world: World) -> None:
    shared = case(FP8(), tp=2, sequence_parallel=True)
    first, second = world.run(2, largest_of_a_step, shared)
    assert first == second
    shared = replace(shared, steps=4)
    for run in (shared, replace(case(FP8("e4m3", "tensorwise"), dp=2, distributed=True), steps=4)):
        for found in world.run(run.world, losses, run):
            assert found == pytest.approx(losses(0, run.alone()), rel=1e-2)
