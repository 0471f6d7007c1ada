"""The optimizer: PyTorch's AdamW on whole parameters, in as many bytes as promised, and what fp16 needs."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from megaconv.megatron.arguments.param_groups import class_of
from megaconv.model.fields import changed, from_fields
from megaconv.model.layout import Layout
from megatron_lite.checkpoint.restore import load_state
from megatron_lite.checkpoint.weights import init_weights
from megatron_lite.engine import Engine
from megatron_lite.optimizer.muon import MUON
from megatron_lite.optimizer.precision import LossScaler
from megatron_lite.parallel.grid import make_grid
from megatron_lite.rank.report import StepReport
from megatron_lite.settings.options import LossScale, ModelOptions, OptimizerOptions
from tests.trainer.parallel.small import (
    MODELS,
    SIZES,
    Case,
    batches,
    make_engine,
    own_batches,
    step,
    weights_of,
)
from tests.trainer.parallel.worlds import World


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_a_step_is_pytorchs_own_on_whole_parameters(kind: str) -> None:
    """Weight decay for matrices alone."""
    case = Case("gpt2", kind=kind, clip=0.0)
    engine = make_engine(case)
    assert engine.optimizer is not None
    copies = {name: tensor.clone().requires_grad_() for _, name, tensor in engine.parameters()}
    groups = [
        {"params": [p for p in copies.values() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in copies.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    theirs: torch.optim.Optimizer = torch.optim.AdamW(
        groups, lr=1e-3, betas=(0.9, 0.95), foreach=False
    )
    if kind == "sgd":
        theirs = torch.optim.SGD(groups, lr=1e-3, momentum=0.9, foreach=False)
    for number in range(5):
        engine.train_step(own_batches(case, number, engine), lr=1e-3, weight_decay=0.1)
        for item in engine.optimizer.ranges():
            copies[item.name].grad = item.gradient.view(item.shape).clone()
        theirs.step()
        for _, name, tensor in engine.parameters():
            torch.testing.assert_close(tensor, copies[name].detach(), rtol=1e-6, atol=1e-8)


def test_norms_of_single_heads_are_not_decayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Command R+ has norms of q and k with a row for each head, which are no matrices."""
    command = {
        **SIZES, "attention.qk_norm": True, "attention.qk_norm_width": "own", "norm.kind": "LayerNorm", "norm.bias": False,
        "norm.shared": True, "parallel_residual": True, "tie_embeddings": True,
    }  # fmt: skip
    monkeypatch.setitem(MODELS, "command", from_fields("cohere", command))
    found = []
    for decay in (0.0, 0.5):
        engine = make_engine(Case("command"))
        engine.train_step(own_batches(Case("command"), 0, engine), lr=1e-2, weight_decay=decay)
        found.append(weights_of(engine))
    plain, decayed = found
    unchanged = {name for name in plain if torch.equal(plain[name], decayed[name])}
    assert unchanged == {name for name in plain if "norm" in name}
    listed = {info.name: info for infos in engine.infos for info in infos}
    for name, info in listed.items():
        assert class_of(name, info.native.shape, decoupled=False).decay == info.decays, name
        assert "norm" not in name or not MUON.takes(info)


def test_muon_leaves_tables_to_adam() -> None:
    engine = make_engine(Case("gemma4, layer inputs", kind="muon"))
    infos = {info.name: info for infos in engine.infos for info in infos}
    tables = {name for name in infos if "word_embeddings" in name}
    assert len(tables) == 2
    assert not any(MUON.takes(infos[name]) for name in tables)
    assert MUON.takes(infos["decoder.layers.0.mlp.linear_fc1.weight"])


def test_gradients_are_clipped_by_the_norm_of_all_of_them() -> None:
    case = Case("llama")
    engine, clipped = make_engine(replace(case, clip=0.0)), make_engine(replace(case, clip=0.25))
    norm = step(engine, case, 0).grad_norm
    assert norm == step(clipped, case, 0).grad_norm > 0.25
    assert engine.optimizer is not None
    assert clipped.optimizer is not None
    whole = torch.cat([item.gradient for item in engine.optimizer.ranges()])
    less = torch.cat([item.gradient for item in clipped.optimizer.ranges()])
    assert whole.norm().item() == pytest.approx(norm, rel=1e-6)
    torch.testing.assert_close(less, whole * (0.25 / norm), rtol=1e-4, atol=0)


def weights_after_a_step(
    _rank: int, case: Case, lr: float, decoupled_lr: float | None
) -> dict[str, torch.Tensor]:
    engine = make_engine(case)
    engine.train_step(own_batches(case, 0, engine), lr, weight_decay=0.1, decoupled_lr=decoupled_lr)
    engine.finish()
    engine.grid.close()
    return weights_of(engine)


OF_WORDS = ("word_embeddings.weight", "output_layer.weight")


@pytest.mark.parametrize(
    ("case", "tables"),
    [
        (Case("gpt2"), 1),
        (Case("qwen3"), 2),
        (Case("gpt2", tp=2, pp=2), 1),
        (Case("qwen3", dp=2, distributed=True), 2),
        (Case("further tokens", kind="muon"), 2),
    ],
    ids=str,
)
def test_embedding_and_head_may_have_a_rate_of_their_own(
    case: Case, tables: int, world: World
) -> None:
    """Bit for bit what the whole model's rate would have made of each; positions that are learned have that of all others."""

    def ranks(lr: float, decoupled_lr: float | None = None) -> list[dict[str, torch.Tensor]]:
        return world.run(case.world, weights_after_a_step, case, lr, decoupled_lr)

    for slow, quick, both in zip(ranks(1e-3), ranks(3e-3), ranks(1e-3, 3e-3), strict=True):
        assert len([name for name in both if name.endswith(OF_WORDS)]) == tables
        for name, found in both.items():
            of_words = name.endswith(OF_WORDS)
            assert torch.equal(found, (quick if of_words else slow)[name]), name
            assert not of_words or not torch.equal(found, slow[name]), name


def gradients(_rank: int, case: Case) -> list[tuple[str, bool, bool, torch.Tensor]]:
    """(name, whether replicated, whether tied, gradient) of each parameter after a step."""
    engine = make_engine(case)
    assert engine.optimizer is not None
    step(engine, case, 0)
    found = [
        (item.name, item.info.replicated, item.info.tied, item.gradient.clone())
        for item in engine.optimizer.ranges()
    ]
    engine.finish()
    engine.grid.close()
    return found


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_replicated_parameter_has_one_gradient_on_all_its_ranks(
    sequence_parallel: bool, world: World
) -> None:
    """Bit for bit; so copies never drift apart."""
    for model, names in (("qwen3", "qk_norm"), ("gpt2", "bias")):
        case = Case(model, tp=2, pp=2, sequence_parallel=sequence_parallel)
        ranks = world.run(4, gradients, case)
        for first, second in ((ranks[0], ranks[1]), (ranks[2], ranks[3])):
            compared = [name for name, replicated, _, _ in first if replicated]
            assert len(compared) >= 4, names
            for (name, replicated, _, one), (_, _, _, other) in zip(first, second, strict=True):
                assert torch.equal(one, other) == replicated, name
        for tp_rank in range(2):
            tied = [
                gradient
                for rank in (tp_rank, tp_rank + 2)
                for _, _, is_tied, gradient in ranks[rank]
                if is_tied
            ]
            assert len(tied) == (2 if MODELS[model].tie_embeddings else 0)
            assert not tied or torch.equal(tied[0], tied[1])


def live_bytes(
    _rank: int, dtype: str, dp: int, distributed: bool, zero: int = 1
) -> tuple[float, float]:
    """(bytes of all tensors that are alive after a step, by formula) per parameter."""
    gc.collect()
    before = _tensor_bytes()
    config = changed(
        MODELS["qwen3"], {"layers.count": 2, "hidden": 128, "mlp.ffn": 512, "vocab": 2048}
    )
    grid = make_grid(Layout(stage_layers=(2,)), dp, torch.device("cpu"))
    optimizer = OptimizerOptions(
        distributed=distributed,
        shards_gradients=zero > 1,
        shards_parameters=zero > 2,
        bucket_elements=200_000,
    )
    engine = Engine(config, grid, ModelOptions(dtype=dtype), optimizer)
    init_weights(engine, 0.02, 1)
    assert engine.optimizer is not None
    case = Case("qwen3")
    engine.train_step(list(batches(case, 0))[:1], lr=1e-3)
    engine.finish()
    gc.collect()
    parameters = sum(tensor.numel() for _, _, tensor in engine.parameters())
    found = (_tensor_bytes() - before) / parameters, engine.optimizer.bytes_per_parameter()
    grid.close()
    return found


def _tensor_bytes() -> int:
    """Return the bytes of all tensors. Compiled code keeps fake ones, which have no memory."""
    storages = {}
    for item in gc.get_objects():
        kind = type(item)
        if issubclass(kind, FakeTensor) or not issubclass(kind, torch.Tensor):
            continue
        if item.device.type == "cpu":
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize(
    ("dtype", "dp", "distributed", "promised"),
    [
        ("bfloat16", 1, False, 18), ("bfloat16", 2, True, 12), ("bfloat16", 4, True, 9), ("bfloat16", 2, False, 18),
        ("float32", 4, True, 10), ("float32", 1, False, 16),
    ],
)  # fmt: skip
def test_a_parameter_takes_as_many_bytes_as_promised(
    dtype: str, dp: int, distributed: bool, promised: float, world: World
) -> None:
    """6 + 12/d for 16 bits and a distributed optimizer."""
    for found, formula in world.run(dp, live_bytes, dtype, dp, distributed):
        assert formula == promised
        assert found == pytest.approx(promised, rel=0.01)


def one_layer(dtype: str, scale: float = 1.0) -> Engine:
    """An engine with one layer. One batch for each step is fast enough in fp16, for which CPUs have no
    instructions."""
    config = changed(MODELS["qwen3"], {"layers.count": 1})
    loss_scale = LossScale(initial=scale, window=2, hysteresis=1)
    grid = make_grid(Layout(stage_layers=(1,)), 1, torch.device("cpu"))
    options = ModelOptions(dtype=dtype, vocab_divisor=1)
    engine = Engine(config, grid, options, OptimizerOptions(loss_scale=loss_scale))
    init_weights(engine, 0.1, 5)
    return engine


def one_step(engine: Engine) -> StepReport:
    return engine.train_step(list(batches(Case("qwen3"), 0))[:1], lr=1e-3)


def test_an_overflow_in_fp16_changes_nothing_but_the_scale() -> None:
    engine, exact = one_layer("float16", 2.0**22), one_step(one_layer("float32"))
    before = weights_of(engine)
    for overflows in range(1, 20):
        report = one_step(engine)
        if not report.skipped:
            break
        assert report.grad_norm == float("inf")
        assert report.loss == pytest.approx(exact.loss, rel=1e-3), "the loss itself is no overflow"
        assert report.loss_scale == 2.0 ** (23 - overflows)
        assert engine.scaler.scale == 2.0 ** (22 - overflows)
        assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(engine).items())
        assert engine.state()["optimizer"] == {"steps": 0}
    assert overflows > 1
    assert report.grad_norm == pytest.approx(exact.grad_norm, rel=2e-3)
    assert engine.state()["optimizer"] == {"steps": 1}
    assert any(not torch.equal(tensor, before[name]) for name, tensor in weights_of(engine).items())


@pytest.mark.parametrize(("dtype", "scale"), [("bfloat16", 2.0**32), ("float16", 4.0), (None, 4.0)])
def test_a_run_in_another_dtype_goes_on_in_fp16_with_a_scale_of_its_own(
    dtype: str | None, scale: float
) -> None:
    """Such a run records a scale of 1, with which small gradients would be 0."""
    engine = make_engine(Case("gpt2", options=(("dtype", "float16"),)))
    found = engine.state()
    recorded = {"scale": 4.0, "good_steps": 7, "overflows_left": 1}
    load_state(engine, {**found, "step": 3, "scaler": recorded}, dtype)
    assert engine.scaler.scale == scale
    assert engine.step == 3


def test_the_scale_of_fp16_changes_no_gradient() -> None:
    """It is a power of two, and is taken out in fp32."""
    norms = [one_step(one_layer("float16", scale)).grad_norm for scale in (2.0**6, 2.0**10)]
    assert norms[0] == pytest.approx(norms[1], rel=2e-3)


def test_a_scale_halves_after_its_hysteresis_and_doubles_after_its_window() -> None:
    scaler = LossScaler(LossScale(initial=8.0, minimum=2.0, window=2, hysteresis=2))
    scales = []
    for overflow in (True, True, True, False, False, True, False, False, False, False):
        scaler.update(overflow)
        scales.append(scaler.scale)
    assert scales == [8, 4, 2, 2, 4, 4, 4, 8, 8, 16]
    again = LossScaler(LossScale(initial=1.0))
    again.load_state(scaler.state())
    assert again.state() == scaler.state()
    constant = LossScaler(LossScale(constant=128.0))
    constant.update(True)
    assert constant.scale == 128.0


def save_and_continue(
    _rank: int, case: Case
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights after six steps at one go, and with everything given up and taken over after three."""
    engine = make_engine(case)
    for number in range(3):
        step(engine, case, number)
    engine.finish()
    assert engine.optimizer is not None
    saved = [
        {name: tensor.clone() for name, tensor in item.tensors.items()}
        for item in engine.optimizer.ranges()
    ]
    state = engine.state()
    for number in range(3, 6):
        step(engine, case, number)
    engine.finish()
    straight = weights_of(engine)
    engine.grid.close()

    engine = make_engine(case)
    assert engine.optimizer is not None
    for item, tensors in zip(engine.optimizer.ranges(), saved, strict=True):
        for name, tensor in tensors.items():
            item.tensors[name].copy_(tensor)
    engine.optimizer.weights_from_masters()
    engine.load_state(state)
    for number in range(3, 6):
        step(engine, case, number)
    engine.finish()
    engine.grid.close()
    return straight, weights_of(engine)


@pytest.mark.parametrize(
    "case",
    [
        Case("qwen3", dp=2, distributed=True, options=(("dtype", "bfloat16"),)),
        Case("gpt2", tp=2, options=(("hidden_dropout", 0.1), ("attention_dropout", 0.1))),
    ],
    ids=str,
)
def test_a_run_goes_on_from_its_state_to_the_same_bits(case: Case, world: World) -> None:
    for straight, continued in world.run(2, save_and_continue, case):
        assert all(torch.equal(tensor, continued[name]) for name, tensor in straight.items())


@pytest.mark.parametrize("model", ["gpt2", "mixtral"])
def test_an_engine_that_nothing_refers_to_is_freed(model: str) -> None:
    """Otherwise its parameters and its groups, with three threads each, would stay until the process ends."""
    case = Case(model)
    engine = make_engine(case)
    step(engine, case, 0)
    alive = weakref.ref(engine.grid), weakref.ref(engine)
    del engine
    gc.collect()
    assert [each() for each in alive] == [None, None]
