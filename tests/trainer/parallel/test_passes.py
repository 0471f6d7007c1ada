"""One pass of a microbatch: its positions, documents and cache, the tensors between stages, and its losses."""

from collections.abc import Mapping
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from megaconv.model.fields import changed
from megaconv.model.layout import Layout
from megaconv.planning.pipeline_order import Action, order
from megatron_lite.inference.cache import SlotCache
from megatron_lite.models.attention import attend
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.masks import window_mask
from megatron_lite.models.network_interface import Counted, Network
from megatron_lite.models.passes import Pass, Passes
from megatron_lite.parallel.grid import make_grid
from megatron_lite.parallel.payload import Payload, Wire, Wires, with_gradient
from megatron_lite.parallel.pipeline import Executor
from tests.trainer.parallel.small import MODELS, Case, batches, make_engine, step
from tests.trainer.parallel.worlds import World

CPU = torch.device("cpu")


def heads(count: int, length: int = 12, batch: int = 2, width: int = 8) -> torch.Tensor:
    return torch.randn(
        length, batch, count, width, generator=torch.Generator().manual_seed(count + width)
    )


def made(batch: Microbatch) -> Pass:
    return Passes(MODELS["gpt2"], CPU, torch.float32).make(batch)


def by_mask(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Attention of [length, batch, heads, width] by the formula, with a mask [batch, queries, keys]."""
    q, k, v = (x.permute(1, 2, 0, 3).double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~mask[:, None], -torch.inf)
    return (scores.softmax(-1) @ v).permute(2, 0, 1, 3).float()


@pytest.mark.parametrize("window", [None, 3])
def test_documents_are_what_a_block_mask_makes_of_them(window: int | None) -> None:
    tokens = torch.zeros(2, 12, dtype=torch.int64)
    run = made(Microbatch(tokens, tokens, documents=((5, 7), (12,))))
    assert run.packed is not None
    assert run.packed.cu_seqlens.tolist() == [0, 5, 12, 24]
    assert run.packed.longest == 12
    q, k, v = heads(4), heads(2), heads(2, width=5)
    number = torch.tensor([[0] * 5 + [1] * 7, [0] * 12])
    mask = (number[:, :, None] == number[:, None, :]) & window_mask(12, window or 12, CPU)
    torch.testing.assert_close(
        attend(q, k, v, run, window=window), by_mask(q, k, v, mask), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("window", [None, 3])
def test_queries_see_the_keys_up_to_their_own_positions(window: int | None) -> None:
    """Each row at its own, with values of another width than keys; whatever lies beyond isn't looked at."""
    tokens, positions = torch.zeros(2, 3, dtype=torch.int64), torch.tensor([[4, 5, 6], [9, 10, 11]])
    run = made(Microbatch(tokens, tokens, positions=positions))
    q, k, v = heads(4, length=3), heads(2), heads(2, width=5)
    back = positions[:, :, None] - torch.arange(12)
    mask = (back >= 0) & (back < (window or 12))
    expected = by_mask(q, k, v, mask)
    k[7:, 0], v[7:, 0] = 1e4, 1e4
    torch.testing.assert_close(attend(q, k, v, run, window=window), expected, rtol=1e-5, atol=1e-6)


def incremental(_rank: int, case: Case) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Logits of one pass, and of the same tokens in four."""
    engine = make_engine(case)
    tokens = next(batches(case, 0)).tokens
    whole, parts, start = engine.logits(Microbatch(tokens, tokens)), [], 0
    declared = {layer: engine.cache_of(layer) for layer in range(engine.config.layer_count)}
    cache = SlotCache(declared, len(tokens), 16, torch.float32, CPU)
    for count in (6, 1, 1, 8):
        part, positions = (
            tokens[:, start : start + count],
            cache.select((0, 1), (start, start), count, CPU),
        )
        parts.append(engine.logits(Microbatch(part, part, positions=positions), cache))
        start += count
    engine.grid.close()
    found = [part for part in parts if part is not None]
    return whole, torch.cat(found, 1) if found else None


@pytest.mark.parametrize("model", ["gpt2", "qwen3", "a window"])
def test_tokens_that_come_little_by_little_get_the_logits_of_the_whole_pass(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "a window", changed(MODELS["qwen3"], {"layers.window": 5}))
    whole, parts = incremental(0, Case(model))
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_cache_goes_through_stages_and_tensor_ranks(world: World) -> None:
    expected, _ = incremental(0, Case("qwen3"))
    found = [
        parts
        for _, parts in world.run(4, incremental, Case("qwen3", tp=2, pp=2))
        if parts is not None
    ]
    assert len(found) == 2  # the last stage's tensor ranks
    for parts in found:
        torch.testing.assert_close(parts, expected, rtol=1e-5, atol=1e-5)


def test_a_full_cache_is_an_error() -> None:
    cache = SlotCache({}, 1, 4, torch.float32, CPU)
    cache.select([0], [0], 3, CPU)
    with pytest.raises(ValueError, match="5 tokens don't fit into a cache of 4"):
        cache.select([0], [3], 2, CPU)


WIRES: Wires = (Wire((2, 3), torch.float32), Wire((4,), torch.int64), Wire((1,), torch.float32))


def pass_three_tensors(rank: int) -> list[list[float]]:
    """Two stages between which an activation, its numbers and a scalar that nobody uses pass; the gradients of the first."""
    grid = make_grid(Layout(1, 2, stage_layers=(1, 1)), 1, CPU)
    weights = [torch.full((2, 3), float(number + 1), requires_grad=True) for number in range(2)]
    actions = order(1 * 2, 1, 2, grid.pp_rank)

    def forward(action: Action, taken: Payload) -> Payload:
        number = action.microbatch
        if not rank:
            assert not taken
            return weights[number] * 3, torch.full((4,), number), weights[number].sum().view(1)
        x, counts, _ = taken
        assert counts.tolist() == [number] * 4
        return ((x.square() * (number + 1)).sum(),)

    def arriving(action: Action) -> Wires:
        return with_gradient(WIRES) if action.backward else WIRES

    Executor(grid, forward, arriving, lambda _: nullcontext()).run(actions)
    grid.close()
    return [weight.grad.flatten().tolist() if weight.grad is not None else [] for weight in weights]


def test_several_tensors_pass_between_stages_and_gradients_of_those_that_have_any(
    world: World,
) -> None:
    """3w becomes (n + 1)(3w)², whose gradient is 18(n + 1)w."""
    first, _ = world.run(2, pass_three_tensors)
    assert first == [[18.0] * 6, [72.0] * 6]


class AnotherLoss:
    """A loss that replaces that of a chunk: twice the loss of every second label."""

    def __init__(self, chunk: Network) -> None:
        self._loss = chunk.loss

    def __call__(self, given: Payload, run: Pass) -> tuple[torch.Tensor, Mapping[str, Counted]]:
        total, found = self._loss(given, run)
        losses, weights = found["loss"]
        half = torch.zeros_like(weights)
        half[:, ::2] = 1
        return total, {**found, "second": Counted(losses * 2, half)}


def test_a_model_may_have_more_than_one_loss() -> None:
    case = Case("gpt2", masked=False)
    plain, engine = make_engine(case), make_engine(case)
    expected = step(plain, case, 0)
    assert expected.others == {}
    (chunk,) = engine.chunks
    chunk.loss = AnotherLoss(chunk)  # type: ignore[method-assign]
    engine._loss_names = ("loss", "second")
    found = step(engine, case, 0)
    assert (found.loss, found.grad_norm, found.tokens) == (
        expected.loss,
        expected.grad_norm,
        expected.tokens,
    )
    by_hand, count = 0.0, 0
    fresh = make_engine(case)
    for batch in batches(case, 0):
        logits = fresh.logits(batch)
        assert logits is not None
        by_hand += (
            2
            * F.cross_entropy(
                logits[:, ::2].flatten(0, 1), batch.labels[:, ::2].flatten(), reduction="sum"
            ).item()
        )
        count += batch.labels[:, ::2].numel()
    assert found.others == {"second": pytest.approx(by_hand / count, rel=1e-6)}
