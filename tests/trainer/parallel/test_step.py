"""One pass over a batch: documents, masks, padding, windows, recomputation, dropout."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from megaconv.errors import TensorMismatch
from megaconv.families import family
from megaconv.model.fields import changed
from megaconv.model.table import canonical_shapes
from megatron_lite.checkpoint.initial_weights import RandomTensor, normal
from megatron_lite.checkpoint.weights import init_weights, load_weights
from megatron_lite.engine import Engine
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.loss import _gpu_rows
from megatron_lite.models.rng import mix
from tests.trainer.parallel.small import (
    BLOCK,
    FULL,
    MODELS,
    SELECTIVE,
    SEQUENCE,
    Case,
    batches,
    make_engine,
    own_batches,
    saved_bytes,
    step,
    train,
    weights_of,
)  # fmt: skip
from tests.trainer.parallel.worlds import World


def test_packed_documents_are_as_if_each_was_alone() -> None:
    """Positions begin anew in each document."""
    engine = make_engine(Case("gpt2"))
    tokens = next(batches(Case("gpt2"), 0)).tokens[:1]
    positions = torch.cat([torch.arange(6), torch.arange(10)])[None]
    packed = engine.logits(Microbatch(tokens, tokens, positions=positions, documents=((6, 10),)))
    parts = [engine.logits(Microbatch(part, part)) for part in (tokens[:, :6], tokens[:, 6:])]
    assert packed is not None
    assert parts[0] is not None
    assert parts[1] is not None
    torch.testing.assert_close(packed, torch.cat([parts[0], parts[1]], 1), rtol=1e-5, atol=1e-5)


def test_masked_labels_take_no_part() -> None:
    """Neither in the loss nor in any gradient: whatever they are."""
    case = Case("qwen3")
    changed = make_engine(case)
    plain = [replace(batch, documents=None) for batch in batches(case, 0)]
    others = [
        replace(batch, labels=torch.where(batch.loss_mask, batch.labels, 0)) for batch in plain
    ]  # type: ignore[arg-type]
    engine = make_engine(case)
    assert engine.train_step(plain, 1e-3) == changed.train_step(others, 1e-3)
    same = weights_of(changed)
    assert all(torch.equal(tensor, same[name]) for name, tensor in weights_of(engine).items())


def test_the_loss_is_the_mean_over_the_tokens_of_all_microbatches() -> None:
    """Not the mean of their means."""
    case = Case("qwen3")
    engine = make_engine(case)
    own = list(batches(case, 0))
    loss_sum, tokens = engine.evaluate(own)["loss"]
    report = engine.train_step(own, 0.0)
    assert (
        report.tokens
        == tokens
        == sum(float(batch.loss_mask.sum()) for batch in own if batch.loss_mask is not None)
    )
    assert report.loss == pytest.approx(loss_sum / tokens, rel=1e-12)
    by_hand = torch.zeros(())
    for batch in own:
        logits = engine.logits(batch)
        assert logits is not None
        assert batch.loss_mask is not None
        losses = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
        by_hand += losses[batch.loss_mask.flatten()].sum()
    assert report.loss == pytest.approx(by_hand.item() / tokens, rel=1e-6)


def test_a_step_without_a_token_that_counts_changes_nothing() -> None:
    case = Case("qwen3")
    engine = make_engine(case)
    before = weights_of(engine)
    nothing = [replace(batch, loss_mask=torch.zeros(2, SEQUENCE)) for batch in batches(case, 0)]
    assert engine.train_step(nothing, 1e-3).skipped
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(engine).items())


@pytest.mark.parametrize("rows", [1, 7, 32])
def test_padding_and_the_rows_at_a_time_leave_the_loss_unchanged(rows: int) -> None:
    losses = {}
    for divisor in (1, 64, 256):
        case = Case("llama", options=(("vocab_divisor", divisor), ("loss_rows", rows)))
        engine = make_engine(case)
        losses[divisor] = [step(engine, case, number) for number in range(3)]
    plain = make_engine(Case("llama"))
    expected = [step(plain, Case("llama"), number) for number in range(3)]
    for reports in losses.values():
        for found, wanted in zip(reports, expected, strict=True):
            assert found.loss == pytest.approx(wanted.loss, rel=1e-6)
            assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-6)


@pytest.mark.parametrize("model", ["qwen3", "gpt2", "deepseek_v3"])
def test_norms_that_multiply_with_their_weight_plus_one_learn_as_others(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their weights begin at 0 instead of at 1, and stay 1 below. (By SGD: Adam makes steps of rounding, where a gradient is 0.)"""
    case = Case(model, steps=5, kind="sgd")
    plain = train(0, case)
    monkeypatch.setitem(MODELS, model, changed(MODELS[model], {"norm.zero_centered": True}))
    centered = train(0, case)
    assert centered.losses == pytest.approx(plain.losses, rel=1e-6)
    for name, weight in plain.weights.items():
        is_norm = "norm" in name and name.endswith("weight")
        torch.testing.assert_close(
            centered.weights[name] + is_norm, weight, rtol=0, atol=3e-7, msg=name
        )


def padded(_rank: int, case: Case) -> float:
    engine = make_engine(case)
    loss = step(engine, case, 0).loss
    engine.finish()
    engine.grid.close()
    return loss


def test_a_rank_with_nothing_but_padding_does_no_harm(world: World) -> None:
    """61 words of 128 rows on each of two ranks."""
    case = Case("llama", tp=2, options=(("vocab_divisor", 128),))
    expected = padded(0, case.alone())
    assert world.run(2, padded, case) == pytest.approx([expected] * 2, rel=1e-6)


@pytest.mark.parametrize("recompute", [FULL, BLOCK, SELECTIVE], ids=["full", "block", "selective"])
@pytest.mark.parametrize("model", ["qwen3", "gpt2"])
def test_recomputation_gives_the_same_bits(
    model: str, recompute: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model has both kinds of dropout."""
    options = (("hidden_dropout", 0.1), ("attention_dropout", 0.1))
    case = Case(model, options=options)
    engine, again = make_engine(case), make_engine(replace(case, recompute=recompute))  # type: ignore[arg-type]
    for number in range(2):
        assert step(engine, case, number) == step(again, case, number)
    same = weights_of(again)
    assert all(torch.equal(tensor, same[name]) for name, tensor in weights_of(engine).items())


def test_recomputing_keeps_less() -> None:
    kept = {
        mode.granularity: kept_bytes(Case("llama", recompute=mode))
        for mode in (Case().recompute, SELECTIVE, FULL)
    }
    assert kept["full"] < 0.5 * kept["selective"]
    assert kept["selective"] < 0.85 * kept[None]


def kept_bytes(case: Case) -> int:
    return saved_bytes(make_engine(case), next(batches(case, 0)))


def test_dropout_draws_anew_for_every_step_microbatch_and_place() -> None:
    assert (
        len(
            {
                mix(1, step, batch, layer, place)
                for step in range(5)
                for batch in range(5)
                for layer in range(5)
                for place in range(4)
            }
        )
        == 500
    )
    case = Case("llama", options=(("hidden_dropout", 0.1),))
    first, second = make_engine(case), make_engine(case)
    second.step = 1
    assert step(first, case, 0).loss != step(second, case, 0).loss


def test_overlap_changes_no_bit(world: World) -> None:
    case = Case("qwen3", dp=2, distributed=True, clip=0.0)
    ranks = [world.run(2, weights_after_steps, case, overlap) for overlap in (True, False)]
    for one, other in zip(*ranks, strict=True):
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def weights_after_steps(_rank: int, case: Case, overlap: bool) -> dict[str, torch.Tensor]:
    engine = make_engine(case, overlap=overlap)
    for number in range(3):
        step(engine, case, number)
    engine.finish()
    engine.grid.close()
    return weights_of(engine)


def evaluated(_rank: int, case: Case, count: int) -> tuple[float, float]:
    engine = make_engine(case)
    found = engine.evaluate(own_batches(case, 0, engine)[:count])["loss"]
    engine.grid.close()
    return found


def test_evaluation_takes_any_number_of_microbatches_at_any_layout(world: World) -> None:
    for count in (3, 4):
        expected = evaluated(0, Case("gpt2"), count)
        for case in (Case("gpt2", pp=2, vpp=2), Case("gpt2", tp=2, pp=2, sequence_parallel=True)):
            for found in world.run(case.world, evaluated, case, count):
                assert found == pytest.approx(expected, rel=1e-6)


def test_an_engine_for_evaluation_alone_needs_no_optimizer() -> None:
    case = Case("gpt2")
    engine = make_engine(case)
    bare = Engine(engine.config, engine.grid, engine.options, None)
    init_weights(bare, std=0.1, seed=5)
    own = list(batches(case, 0))
    assert bare.evaluate(own) == engine.evaluate(own)


@pytest.mark.parametrize("threads", [1, 3])
def test_any_rectangle_of_a_random_tensor_is_cut_from_the_same_one(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several threads draw the same numbers."""
    import numpy as np

    from formats.tensor import Box

    tensor = RandomTensor((700, 6), 3, normal(1.0))
    whole = np.empty((700, 24), np.uint8)
    tensor.read_into(Box(0, 700, 0, 6), whole)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for box in (Box(250, 520, 2, 5), Box(699, 700, 0, 1), Box(0, 256, 0, 6), Box(0, 700, 0, 6)):
        part = np.empty((box.rows, box.cols * 4), np.uint8)
        tensor.read_into(box, part)
        assert np.array_equal(part, whole[box.row0 : box.row1, box.col0 * 4 : box.col1 * 4])


def test_weights_that_do_not_fit_are_refused_before_anything_changes() -> None:
    engine = make_engine(Case("llama"))
    config = MODELS["llama"]
    tensors = {
        name: RandomTensor(shape, 1, normal(1.0))
        for name, shape in canonical_shapes(family("llama").rows, config).items()
    }
    before = weights_of(engine)
    missing = {name: tensor for name, tensor in tensors.items() if name != "layers.2.attn.k.weight"}
    unknown = {**tensors, "layers.9.attn.k.weight": tensors["layers.2.attn.k.weight"]}
    misshapen = {**tensors, "final_norm.weight": RandomTensor((33,), 1, normal(1.0))}
    for wrong, said in (
        (missing, "layers.2.attn.k.weight is missing"),
        (unknown, "layers.9.attn.k.weight is not a tensor of this model"),
        (misshapen, r"final_norm.weight has shape \[33\], the model needs \[32\]"),
    ):
        with pytest.raises(TensorMismatch, match=said):
            load_weights(engine, wrong)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(engine).items())


def test_layers_are_traced_whole_and_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile traces the layers, with a backend that runs the graphs instead of compiling them."""
    from torch._dynamo.utils import counters

    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    case = Case("qwen3", masked=False, options=(("compile", True),))
    traced, plain = make_engine(case), make_engine(replace(case, options=()))
    for number in range(2):
        assert step(traced, case, number).loss == pytest.approx(
            step(plain, case, number).loss, rel=1e-6
        )
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_a_compiled_mixture_is_traced_once_and_left_for_its_experts_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rows of an expert change from step to step. The mixture is not compiled, apart from its activation for any number of rows."""
    from torch._dynamo.utils import counters

    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    case = Case("mixtral", masked=False, options=(("compile", True),))
    traced, plain = make_engine(case), make_engine(replace(case, options=()))
    found = []
    for number in range(3):
        assert step(traced, case, number).loss == pytest.approx(
            step(plain, case, number).loss, rel=1e-6
        )
        found.append(counters["stats"]["unique_graphs"])
    assert found[0] == found[-1] <= 3, "before the mixture, its activation, and behind it"


@pytest.mark.slow
def test_with_dropout_all_layers_share_what_was_traced_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A layer is then four graphs: up to the attention, from there to each of its two dropouts, and the sum at its end."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    dropout = (("hidden_dropout", 0.1), ("attention_dropout", 0.1))
    case = Case("qwen3", masked=False, options=(("compile", True), *dropout))
    traced, plain = make_engine(case), make_engine(replace(case, options=dropout))
    for number in range(2):
        assert step(traced, case, number).loss == pytest.approx(
            step(plain, case, number).loss, rel=1e-6
        )
    assert counters["stats"]["unique_graphs"] == 4


class Waits(TorchFunctionMode):
    """Counts operations that would make a program wait for a GPU, on a CPU."""

    WAITS = (
        "item",
        "tolist",
        "numpy",
        "cpu",
        "nonzero",
        "unique",
        "__bool__",
        "__float__",
        "__int__",
        "__index__",
    )

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in self.WAITS or (func is torch.tensor and "device" in kwargs):
            self.found.append(name)
        return func(*args, **kwargs)


@pytest.mark.parametrize("model", ["qwen3", "gpt2"])
def test_a_step_waits_once_for_its_device(model: str) -> None:
    case = Case(model, options=(("hidden_dropout", 0.1), ("attention_dropout", 0.1)))
    engine, microbatches = make_engine(case), list(batches(case, 0))
    with Waits() as waits:
        engine.train_step(microbatches, lr=1e-3, weight_decay=0.1, signals=(0.0, 1.0))
    assert waits.found == ["tolist"]


def test_logits_of_as_many_tokens_exist_as_fit_a_gpu() -> None:
    h100, h200, l4 = 80 << 30, 141 << 30, 24 << 30
    assert _gpu_rows(h100, 128_256) == 2048
    assert _gpu_rows(h200, 128_256) == 4096
    assert _gpu_rows(h200, 4000) == 16384
    assert _gpu_rows(l4, 262_144) == 256


@pytest.mark.slow
def test_compiled_layers_train_alike(world: World) -> None:
    for case in (
        Case("qwen3"),
        Case("qwen3", tp=2, dp=2, sequence_parallel=True, distributed=True, recompute=FULL),
    ):
        expected = _train_some(0, Case("qwen3"))
        compiled = replace(case, options=(("compile", True),))
        for found in world.run(case.world, _train_some, compiled):
            assert found == pytest.approx(expected, rel=1e-5)


def _train_some(_rank: int, case: Case) -> list[float]:
    engine = make_engine(case)
    found = [step(engine, case, number).loss for number in range(3)]
    engine.finish()
    engine.grid.close()
    return found


class Gathering:
    """A stand-in for the gathering of a bucket. The bucket is NaN until it is waited for."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data, self.arriving = data, data.clone()
        data.fill_(float("nan"))

    def wait(self) -> None:
        self.data.copy_(self.arriving)


def test_logits_wait_for_every_parameter_that_is_still_being_gathered() -> None:
    case = Case("qwen3")
    # Each parameter has its own bucket, so that none waits for another.
    engine = make_engine(case, bucket_elements=1)
    (batch, *_) = batches(case, 0)
    expected = engine.logits(batch)
    for bucket in (bucket for chunk in engine.buckets for bucket in chunk.buckets):
        bucket.gathering = Gathering(bucket.data)  # type: ignore[assignment]
    found = engine.logits(batch)
    assert expected is not None
    assert found is not None
    assert torch.equal(found, expected)
