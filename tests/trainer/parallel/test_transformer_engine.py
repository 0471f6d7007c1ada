"""Transformer Engine's products, by a stub with the real signatures and the real rule for the end of an autocast.

The rule: when the outermost autocast ends with gradients on, delayed scaling reduces the largest elements of all layers
over the autocast's group, or over the world if the group is None.
"""

import sys
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn

from megaconv.errors import UsageError
from megaconv.families import family
from megaconv.model.fields import fields_of, from_fields
from megaconv.model.layout import Layout
from megaconv.model.naming import CORE_GROUPED
from megaconv.model.natives import native_tensors
from megatron_lite.parallel.grid import make_grid
from megatron_lite.parallel.tensor import ColumnLinear, NormColumnLinear, RowLinear
from megatron_lite.products import selection
from megatron_lite.products.product import PLAIN
from megatron_lite.products.transformer_engine import RECIPES, TransformerEngineProduct
from megatron_lite.products.transformer_engine import make_autocast as regions
from megatron_lite.rank.chunks import build_chunks
from megatron_lite.settings.options import FP8, ModelOptions
from tests.library_signatures import ENGINE, signatures, states, stub
from tests.trainer.parallel.small import FULL, MODELS, Case, make_engine, step
from tests.trainer.parallel.worlds import World

OLDEST, NEWEST = ENGINE[0], ENGINE[-1]
FIRST = {"delayed": "v1.11", "tensorwise": "v2.2", "blockwise": "v2.3", "mxfp8": "v2.0"}
"""The first version, among those with signatures, that has each recipe."""


class Format(Enum):
    HYBRID = "hybrid"
    E4M3 = "e4m3"


@dataclass
class Stub:
    """Transformer Engine of one version, and what happened in it."""

    version: str
    depth: int = 0
    amaxes: list[torch.Tensor] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    """For each call of a layer, the number of the autocast's region."""
    reduced: list[int] = field(default_factory=list)
    """For each reduction, the number of ranks."""
    fused: list[bool] = field(default_factory=list)
    """For each layer, whether it adds its weight's gradient to main_grad."""
    ended: int = 0
    """Ends of regions that update scales."""
    recipe: Any = None
    group: Any = None

    def modules(self) -> dict[str, Any]:
        """Return the modules by name."""
        found = signatures("engine")["transformer_engine"][self.version]
        own = {"fp8_autocast": self.autocast, "autocast": self.autocast, "Linear": self.linear}
        calls = {name: stub(found[name], body) for name, body in own.items() if name in found}
        recipes = {
            name: stub(found[name], lambda **fields: SimpleNamespace(**fields))
            for name in RECIPES.values()
            if name in found
        }
        common = ModuleType("transformer_engine.common")
        setattr(common, "recipe", SimpleNamespace(Format=Format, **recipes))  # noqa: B010
        root, pytorch = ModuleType("transformer_engine"), SimpleNamespace(**calls)
        setattr(root, "pytorch", pytorch)  # noqa: B010
        return {
            "transformer_engine": root,
            "transformer_engine.pytorch": pytorch,
            "transformer_engine.common": common,
        }

    @contextmanager
    def autocast(self, **given: Any) -> Any:
        assert given["enabled"]
        self.recipe = given.get("recipe", given.get("fp8_recipe"))
        self.group = given.get("amax_reduction_group", given.get("fp8_group"))
        self.depth += 1
        yield
        self.depth -= 1
        if not self.depth and torch.is_grad_enabled():
            self._reduce()

    def _reduce(self) -> None:
        self.ended += 1
        wanted = getattr(self.recipe, "reduce_amax", False) and dist.is_initialized()
        if not wanted or not self.amaxes or dist.get_world_size(self.group) == 1:
            return
        dist.all_reduce(torch.stack(self.amaxes), dist.ReduceOp.MAX, self.group)
        self.reduced.append(dist.get_world_size(self.group))

    def linear(self, **given: Any) -> nn.Module:
        assert given["device"] == "meta"
        self.fused.append(given.get("fuse_wgrad_accumulation", False))
        return Layer(self, len(self.amaxes))


class Layer(nn.Module):
    """A product in the dtype of the tensors."""

    def __init__(self, engine: Stub, index: int) -> None:
        super().__init__()
        self.engine, self.weight = engine, nn.Parameter(torch.empty(0))
        self.fused = engine.fused[-1]
        engine.amaxes.append(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.engine.depth == 1, "not in an autocast, or in two"
        assert x.shape[0] > 0
        assert x.shape[0] % 32 == 0
        self.engine.calls.append(self.engine.ended)
        if self.fused:
            made: torch.Tensor = Fused.apply(x, self.weight)  # type: ignore[no-untyped-call]
            return made
        return F.linear(x, self.weight)


class Fused(torch.autograd.Function):
    """A product that adds the weight's gradient to main_grad, by the rules of Transformer Engine's Linear."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        weight.main_grad.add_(grad.t() @ x)
        if not hasattr(weight, "grad_added_to_main_grad"):
            return grad @ weight, None
        weight.grad_added_to_main_grad = True
        return grad @ weight, torch.full_like(weight, torch.nan)  # no content


@contextmanager
def installed(version: str) -> Any:
    """Install a stub, which computes on the CPU too."""
    made = Stub(version)
    always = mock.patch.object(selection, "uses_transformer_engine", return_value=True)
    with mock.patch.dict(sys.modules, made.modules()), always:
        yield made


MODEL = from_fields("qwen3", fields_of(MODELS["qwen3"]) | {"mlp.ffn": 64})


def case(**more: Any) -> Case:
    options = (("fp8", FP8(**more.pop("fp8", {}))),)
    return Case("in engine", masked=False, steps=2, options=options, **more)


def losses(_rank: int, run: Case, version: str) -> tuple[list[float], Stub]:
    MODELS["in engine"] = MODEL
    with installed(version) as engine_stub:
        engine = make_engine(run)
        found = [step(engine, run, 0).loss for _ in range(run.steps)]
        engine.finish()
        engine.grid.close()
    engine_stub.group = engine_stub.recipe = None  # a group can't be sent
    return found, engine_stub


def plain(run: Case) -> list[float]:
    MODELS["in engine"] = MODEL
    alone = replace(run.alone(), options=())
    engine = make_engine(alone)
    return [step(engine, alone, 0).loss for _ in range(run.steps)]


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_stages_of_one_rank_train_without_waiting_for_each_other(
    world: World, version: str
) -> None:
    run = case(pp=2)
    for found, made in world.run(2, losses, run, version):
        assert found == pytest.approx(plain(run), rel=1e-5)
        assert made.reduced == []
        assert made.ended == 8, "one autocast for each of four microbatches in two steps"
        assert made.calls == sorted(made.calls)
        assert {made.calls.count(region) for region in range(8)} == {len(made.amaxes)}


@pytest.mark.parametrize(
    ("options", "fused"),
    [({}, True), ({"recompute": FULL}, False), ({"distributed": True, "zero": 2, "dp": 2}, False)],
    ids=["kept", "recomputed", "sharded gradients"],
)
def test_gradients_are_added_to_the_bucket_where_it_lasts(
    world: World, options: dict[str, Any], fused: bool
) -> None:
    """Recomputation gives a backward pass a copy of the parameter, on which the library finds no main_grad."""
    run = case(**options)
    for found, made in world.run(run.world, losses, run, NEWEST):
        assert found == pytest.approx(plain(run), rel=1e-5)
        assert set(made.fused) == {fused}


def test_ranks_of_one_stage_reduce_once_for_each_pass(world: World) -> None:
    run = case(dp=2)
    for found, made in world.run(2, losses, run, NEWEST):
        assert found == pytest.approx(plain(run), rel=1e-5)
        assert made.reduced == [2] * 4


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_recipe_fits_every_version_that_has_it(recipe: str) -> None:
    versions = ENGINE[ENGINE.index(FIRST[recipe]) :]
    for version in versions:
        with installed(version) as made:
            given = regions(FP8(recipe=recipe, format="e4m3", margin=3), None)
            with given.forward_pass():
                assert made.recipe.fp8_format == Format.E4M3
            if recipe == "delayed":
                assert made.recipe.margin == 3
                assert made.recipe.reduce_amax is False


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8"])
def test_a_version_without_the_recipe_is_refused(recipe: str) -> None:
    with installed(OLDEST), pytest.raises(UsageError, match=f"{recipe} needs a newer"):
        regions(FP8(recipe=recipe), None)


@pytest.mark.parametrize("in_fp8", [True, False])
def test_gradients_are_right_with_and_without_weight_gradients_in_fp8(in_fp8: bool) -> None:
    x, weight = torch.randn(5, 16, requires_grad=True), torch.randn(32, 16, requires_grad=True)
    options = FP8(weight_gradient=in_fp8, recipe="tensorwise")
    with installed(NEWEST):
        product, region = TransformerEngineProduct(options), regions(options, None)
        parameter = nn.Parameter(weight.detach())
        with region.forward_pass():
            made = product.linear(x, parameter)
        grad = torch.randn_like(made)
        made.backward(grad)
    assert x.grad is not None
    assert parameter.grad is not None
    torch.testing.assert_close(made, x @ weight.t())
    torch.testing.assert_close(x.grad, grad @ weight)
    torch.testing.assert_close(parameter.grad, grad.t() @ x)


def test_an_expert_without_rows_is_called_so_that_ranks_reduce_the_same() -> None:
    with installed(NEWEST) as made:
        region = regions(FP8(), None)
        weight = nn.Parameter(torch.randn(32, 16))
        with region.forward_pass():
            found = TransformerEngineProduct(FP8()).linear(torch.zeros(0, 16), weight)
        assert found.shape == (0, 32)
        assert len(made.calls) == 1


def test_recomputed_layers_are_in_fp8_too_and_leave_the_scales() -> None:
    run = case(recompute=FULL)
    found, made = losses(0, run, NEWEST)
    assert found == pytest.approx(plain(run), rel=1e-5)
    assert made.ended == 8
    assert len(made.calls) == 2 * 8 * len(made.amaxes)


@pytest.mark.parametrize(("device", "takes_engine"), [("cpu", False), ("cuda", True)])
def test_the_device_of_the_run_decides_and_not_that_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, device: str, takes_engine: bool
) -> None:
    """A run on CPUs stays on torch's products if the machine has a GPU and Transformer Engine."""
    monkeypatch.setattr(selection, "has_transformer_engine", lambda: True)
    monkeypatch.setattr(selection, "require_loaded", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    grid = make_grid(Layout(stage_layers=(MODEL.layer_count,)), 1, torch.device(device))
    built = build_chunks(MODEL, grid, ModelOptions(fp8=FP8()))
    products = [getattr(module, "product", PLAIN) for module in built.chunks[0].modules()]
    in_fp8 = [product for product in products if product is not PLAIN]
    assert len(in_fp8) == 4 * MODEL.layer_count
    assert {isinstance(each, TransformerEngineProduct) for each in in_fp8} == {takes_engine}


def test_mxfp8_is_refused_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "uses_transformer_engine", lambda *_: True)
    monkeypatch.setattr(selection, "require_loaded", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    options, gpu = FP8(recipe="mxfp8", format="e4m3"), torch.device("cuda")
    with pytest.raises(UsageError, match=r"compute capability 10 or 11 .* this one has 9\.0"):
        selection.check_device(options, gpu, 1)
    selection.check_device(replace(options, recipe="blockwise"), gpu, 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    selection.check_device(options, gpu, 1)


@pytest.mark.parametrize(
    ("recipe", "capability", "words"),
    [
        ("tensorwise", (8, 0), r"8\.9 .* or newer, but this one has 8\.0; leave --fp8-format out"),
        ("blockwise", (8, 9), r"9\.0 .* or newer, but this one has 8\.9; take tensorwise"),
    ],
)
def test_fp8_is_refused_on_gpus_without_it(
    monkeypatch: pytest.MonkeyPatch, recipe: str, capability: tuple[int, int], words: str
) -> None:
    monkeypatch.setattr(selection, "uses_transformer_engine", lambda *_: recipe == "blockwise")
    monkeypatch.setattr(selection, "require_loaded", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    with pytest.raises(UsageError, match=words):
        selection.check_device(FP8(recipe=recipe), torch.device("cuda"), 1)


def test_an_engine_that_can_not_be_loaded_is_refused_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`pip install transformer-engine` installs no part for PyTorch."""
    monkeypatch.setattr(selection, "uses_transformer_engine", lambda *_: True)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    with pytest.raises(UsageError, match=r"pytorch can't be loaded: .*--transformer-impl local"):
        selection.check_device(FP8(), torch.device("cuda"), 1)


@pytest.mark.parametrize("version", ENGINE)
def test_parameters_have_the_names_of_transformer_engines_modules(version: str) -> None:
    names = states(version)
    assert set(names["LayerNormLinear"]) == {*NormColumnLinear.kinds, "_extra_state"}
    for module in (ColumnLinear, RowLinear):
        assert set(names["Linear"]) == {*module.kinds, "_extra_state"}
    assert {"weight{}", "bias{}", "_extra_state"} <= set(names["GroupedLinear"])


def test_experts_have_the_names_of_transformer_engines_grouped_module() -> None:
    config = MODELS["mixtral"]
    layout = Layout(stage_layers=(config.layer_count,))
    (chunk,) = layout.chunks()
    rows = family(config.family).rows
    found = native_tensors(rows, config, CORE_GROUPED, layout, 0, chunk, config.vocab)
    ends = {
        native.name.rsplit(".", 1)[1] for native in found if ".experts.linear_fc" in native.name
    }
    assert ends == {f"weight{expert}" for expert in range(config.experts.count)}
