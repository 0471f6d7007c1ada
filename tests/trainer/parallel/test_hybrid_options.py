"""Options of a run on mixers with a state: dropout, recomputation, FP8 products and layers that predict further tokens."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megaconv.errors import NotExpressible
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.model.layout import Layout
from megatron_lite.models.build_plan import make_plan
from megatron_lite.models.mixers import mamba_mixer
from megatron_lite.models.recompute import recomputed
from megatron_lite.parallel.tensor import TensorGroup
from megatron_lite.products.product import PLAIN
from megatron_lite.settings.options import FP8, ModelOptions
from tests.trainer.parallel.small import (
    BLOCK,
    FULL,
    MODELS,
    SELECTIVE,
    Case,
    batches,
    make_engine,
    train,
)
from tests.trainer.parallel.small import step as one_step
from tests.trainer.parallel.worlds import World

WITH_STATES = ("mamba", "hybrid", "delta nets", "delta nets, experts", "kimi", "falcon h1")
DROPOUT = (("hidden_dropout", 0.1),)
LAYOUTS = [
    Case("mamba", tp=2, sequence_parallel=True, recompute=FULL),
    Case("delta nets", tp=2, cp=2),
    Case("delta nets, experts", pp=2, recompute=SELECTIVE),
    Case("kimi", tp=2, ep=2, sequence_parallel=True, recompute=SELECTIVE),
    Case("falcon h1", tp=2, cp=2, sequence_parallel=True, recompute=SELECTIVE),
]
FURTHER = [
    Case("hybrid", pp=2, vpp=2, recompute=BLOCK),
    Case("mamba", cp=2, recompute=SELECTIVE),
    Case("hybrid", tp=2, ep=2, sequence_parallel=True, recompute=FULL),
    Case("delta nets", pp=2, recompute=FULL),
    Case("delta nets, experts", tp=2, ep=2, sequence_parallel=True, recompute=FULL),
    Case("kimi", tp=2, cp=2, sequence_parallel=True, recompute=FULL),
    Case("kimi", pp=2, vpp=2, recompute=FULL),
    Case("falcon h1", pp=2, vpp=2, recompute=FULL),
    Case("delta nets, experts", dp=2, ep=2, distributed=True),
]
"""The last model has a layer that predicts a further token."""


def losses(found: Any) -> list[list[float]]:
    return [[report.loss, *report.others.values()] for report in found.reports]


@pytest.mark.parametrize(
    "case", [*LAYOUTS, *(pytest.param(case, marks=pytest.mark.slow) for case in FURTHER)], ids=str
)
def test_dropout_and_recomputation_give_the_losses_of_one_process(case: Case, world: World) -> None:
    """The single process doesn't recompute. Dropout depends on the token, not on the rank."""
    case = replace(case, options=DROPOUT, steps=3)
    (expected,) = world.run(1, train, case.alone())
    for found in world.run(case.world, train, case):
        for one, other in zip(losses(found), losses(expected), strict=True):
            assert one == pytest.approx(other, rel=2e-5)


@pytest.mark.parametrize("name", WITH_STATES)
def test_dropout_changes_the_loss_of_each_model(name: str) -> None:
    dropped, plain = (make_engine(Case(name, options=options)) for options in (DROPOUT, ()))
    one, other = (one_step(engine, Case(name), 0).loss for engine in (dropped, plain))
    assert one != pytest.approx(other, rel=1e-4)


def of_multiples(name: str) -> ModelConfig:
    """The model with matrices whose sides are multiples of 16."""
    wider = {"mlp.ffn": 48}
    if MODELS[name].has("mamba_layers"):
        # 2 x 64 for z and x, 2 x 32 for B and C, and 16 time steps
        wider |= {"mamba.heads": 16, "mamba.head_dim": 4, "mamba.groups": 2, "mamba.state": 16}
    elif MODELS[name].has("kda_layers"):
        sizes = ("key_dim", "value_dim", "value_heads", "key_heads")
        wider |= {f"linear.{size}": 16 for size in sizes}
        wider |= {f"latent.{size}": 16 for size in ("kv_rank", "q_rank", "rope_dim", "v_dim")}
        wider |= {"attention.head_dim": 32}
    else:
        wider |= {
            "linear.key_dim": 8,
            "linear.value_dim": 8,
            "linear.value_heads": 8,
            "linear.key_heads": 4,
        }
    if MODELS[name].experts.count:
        wider |= {"experts.ffn": 32, "experts.shared_ffn": 32}
    return changed(MODELS[name], wider)


@pytest.mark.parametrize("name", WITH_STATES)
def test_projections_of_mixers_are_multiplied_in_fp8(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses are near those without FP8 and differ from them. Convolutions and scans stay as they are."""
    monkeypatch.setitem(MODELS, "wider", of_multiples(name))
    found: dict[str, float] = {}
    for recipe in ("", "tensorwise"):
        fp8 = FP8(recipe=recipe) if recipe else None
        case = Case("wider", options=(("dtype", "bfloat16"), ("fp8", fp8)), masked=False)
        engine = make_engine(case)
        found[recipe] = one_step(engine, case, 0).loss
    assert found["tensorwise"] != found[""]
    assert found["tensorwise"] == pytest.approx(found[""], rel=2e-2)
    in_fp8 = {
        module.rpartition(".")[2]
        for module, matrix in engine.chunks[0].named_modules()
        if getattr(matrix, "product", PLAIN) is not PLAIN
    }
    assert {"linear_qkvb" if name == "kimi" else "in_proj", "out_proj"} <= in_fp8
    assert "conv1d" not in in_fp8


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("mamba", {"mtp_layers": 1}, "mamba2 that predicts further tokens"),
        ("hybrid", {"mtp_layers": 2}, "at most one layer that predicts further tokens"),
        ("hybrid", {"mtp_layers": 1, "experts.count": 0}, r"has experts \(\*E\)"),
        ("mixtral", {"experts.latent": 8}, "mixtral with experts of a latent width"),
    ],
)
def test_models_without_names_in_checkpoints_are_refused(
    name: str, change: dict[str, Any], message: str
) -> None:
    config = changed(MODELS[name], change)
    with pytest.raises(NotExpressible, match=message):
        make_plan(config, Layout(stage_layers=(4,)), ModelOptions(), TensorGroup())


def square_products(monkeypatch: pytest.MonkeyPatch, scan: Any) -> list[tuple[int, ...]]:
    """The shapes of tensors [..., chunk, chunk] that the forward pass keeps, if `scan` runs the chunked scans."""
    monkeypatch.setattr(mamba_mixer, "recomputed", scan)
    case = Case("mamba")
    engine = make_engine(case)
    kept: list[tuple[int, ...]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        engine.chunks[0]((), engine.make_pass(next(batches(case, 0))))
    return [shape for shape in kept if len(shape) > 3 and shape[-1] == shape[-2]]


def test_the_products_inside_a_scan_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take many times the memory of a scan's inputs. No flag is needed."""

    def kept(scan: Any, *inputs: torch.Tensor, **others: Any) -> Any:
        return scan(*inputs, **others)

    assert square_products(monkeypatch, kept)
    assert not square_products(monkeypatch, recomputed)
