"""Context parallelism: whichever way the ranks of a sequence attend to each other's tokens, it is what one process computes."""

from dataclasses import replace
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch

from megaconv.errors import LayoutError
from megaconv.model.layout import Layout
from megatron_lite.models import across
from megatron_lite.models.across import blocks_of
from megatron_lite.models.attention import attend, sdpa
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.passes import Packed, Passes
from megatron_lite.parallel import comm, tensor
from megatron_lite.parallel.context import ContextGroup
from megatron_lite.parallel.grid import make_grid
from megatron_lite.settings.options import Balancing, ModelOptions
from megatron_lite.settings.sizes import check_sizes
from tests.trainer.parallel.small import (
    FULL,
    MODELS,
    SELECTIVE,
    Case,
    batches,
    make_engine,
    saved_bytes,
    train,
)
from tests.trainer.parallel.test_layouts import compare
from tests.trainer.parallel.worlds import World

CPU = torch.device("cpu")


ONE_LEVEL = ("p2p", "all_gather", "a2a")
TWO_LEVELS = (("context", "a2a+p2p"), ("near", 2))


def member(rank: int, size: int) -> ContextGroup:
    """A context group for arithmetic alone."""
    return ContextGroup(None, rank, size, "p2p")  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_parts_are_megatrons_and_make_the_whole_again(size: int) -> None:
    """Megatron's cut: pieces r and 2n - 1 - r of 2n."""
    whole = torch.arange(size * 8).view(1, -1)
    parts = [member(rank, size).own_part(whole, 1) for rank in range(size)]
    assert parts[0].tolist() == [[0, 1, 2, 3, *range(size * 8 - 4, size * 8)]]
    assert torch.equal(member(0, size).glue(torch.stack(parts), 1), whole)


@pytest.mark.parametrize("documents", [None, ((3, 9, 12), (24,)), ((24,), (1, 1, 14, 8))])
@pytest.mark.parametrize("window", [None, 1, 5, 13])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_pair_of_a_query_and_a_key_that_it_sees_is_in_one_block(
    size: int, window: int | None, documents: tuple[tuple[int, ...], ...] | None
) -> None:
    packed = None if documents is None else Packed(documents, CPU)
    places, half = torch.arange(24), 24 // (2 * size)
    found = torch.zeros(2, 24, 24, dtype=torch.int64)
    for rank, source in product(range(size), repeat=2):
        queries, keys = (member(at, size).own_part(places, 0) for at in (rank, source))
        for rows, of_q, of_k, causal, ahead in blocks_of(
            member(rank, size), source, half, packed, window
        ):
            seen = (
                queries[of_q][:, None] >= keys[of_k]
                if causal
                else torch.ones(1, 1, dtype=torch.bool)
            )
            if ahead is not None:
                assert ahead == queries[of_q][0] - keys[of_k][0]
                seen = across._visible(queries[of_q].float(), keys[of_k], (ahead, window)) == 0  # type: ignore[operator]
                assert seen.any(1).all(), "a query without a key would have no softmax"
                sizes = across._window_size(queries[of_q], keys[of_k], (ahead, window))  # type: ignore[arg-type]
                assert torch.equal(flash_sees(*seen.shape, **sizes), seen)
            for row in range(2)[rows]:
                found[row, queries[of_q][:, None], keys[of_k]] += seen.long()
    lengths = [torch.tensor(row) for row in documents or ((24,), (24,))]
    number = torch.stack([torch.arange(len(row)).repeat_interleave(row) for row in lengths])
    same = number[:, :, None] == number[:, None, :]
    back = places[:, None] - places
    assert torch.equal(found.bool(), same & (back >= 0) & (back < (window or 24)))
    assert found.max() == 1


def flash_sees(
    queries: int, keys: int, window_size_left: int, window_size_right: int
) -> torch.Tensor:
    """Flash attention's rule: key j for query i where i + shift - left <= j <= i + shift + right; less than 0 would be no bound."""
    assert min(window_size_left, window_size_right) >= 0
    back = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
    return (back <= window_size_left) & (back >= -window_size_right)


def test_every_rank_has_as_much_to_do() -> None:
    def pairs(rank: int) -> int:
        own = member(rank, 4).own_part(torch.arange(64), 0)
        return int((own + 1).sum())

    assert len({pairs(rank) for rank in range(4)}) == 1


@pytest.mark.parametrize(
    ("device", "dtype", "tolerance"),
    [
        ("cpu", torch.float32, 1e-5),
        pytest.param("cuda", torch.bfloat16, 2e-2, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_blocks_put_together_are_one_call(
    device: str, dtype: torch.dtype, tolerance: float, causal: bool
) -> None:
    """Both devices' kernels are tested: keys before the queries, and then (causal) their own keys or more that all
    queries see."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(16, 2, 4, 64), (32, 2, 2, 64), (32, 2, 2, 64), (16, 2, 4, 64)]
    q, k, v, grad = (
        torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
        for shape in shapes
    )
    mask = torch.ones(16, 32, dtype=torch.bool, device=device).tril(16 if causal else 32)
    expected = sdpa(q, k, v, mask, 0.0)
    gradients = torch.autograd.grad(expected, (q, k, v), grad)
    out, logs = (
        torch.zeros_like(expected, dtype=torch.float32),
        torch.full((16, 2, 4), -torch.inf, device=device),
    )
    q, k, v, grad = (x.detach() for x in (q, k, v, grad))
    halves = (slice(0, 16), False), (slice(16, 32), causal)
    for part, own in halves:
        across._merge(out, logs, *across._attended(q, k[part], v[part], None, causal=own))
    found = [
        across._gradients(grad, q, k[part], v[part], out.to(dtype), logs, None, causal=own)
        for part, own in halves
    ]
    torch.testing.assert_close(out, expected.float(), rtol=tolerance, atol=tolerance)
    dq = found[0][0].float() + found[1][0].float()
    for one, other in zip(
        (dq, *(torch.cat(parts) for parts in list(zip(*found, strict=True))[1:])),
        gradients,
        strict=True,
    ):
        torch.testing.assert_close(one.float(), other.float(), rtol=tolerance, atol=tolerance)


DOCUMENTS = ((5, 11), (16,))


def attended(
    rank: int,
    size: int,
    how: str,
    *,
    packed: bool,
    window: int | None,
    value: int,
    sinks: bool,
    length: int = 16,
) -> list[torch.Tensor]:
    """Output and gradients of q, k, v, of whole sequences, and of sinks.

    In float64, of which sums over blocks alone are float32: how a processor's kernels round the products doesn't count.
    """
    grid = make_grid(Layout(), 1, CPU, cp=size)
    group = grid.group("cp")
    context = None if group is None else ContextGroup(group, rank, size, how)
    generator = torch.Generator().manual_seed(3)
    shapes = [
        (length, 2, 4, 8),
        (length, 2, 2, 8),
        (length, 2, 2, value),
        (length, 2, 4, value),
    ]
    whole = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    own = [x if context is None else context.own_part(x, 0) for x in whole]
    q, k, v = (x.clone().requires_grad_() for x in own[:3])
    tokens = torch.zeros(2, length, dtype=torch.int64)
    batch = Microbatch(tokens, tokens, documents=DOCUMENTS if packed else None)
    run = Passes(MODELS["gpt2"], CPU, torch.float64, context).make(batch)
    at = torch.randn(4, generator=generator, dtype=torch.float64).requires_grad_()
    how_else: dict[str, Any] = {"scale": 0.2, "sinks": at} if sinks else {}
    out = attend(q, k, v, run, window=window, **how_else)
    out.backward(own[3])
    found = [out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]
    found = found if context is None else [context.whole(x.contiguous(), 0) for x in found]
    of_sinks = torch.zeros(4, dtype=torch.float64) if at.grad is None else at.grad
    comm.all_reduce(of_sinks, group)
    grid.close()
    return [*found, of_sinks]


@pytest.mark.parametrize("how", ONE_LEVEL)
@pytest.mark.parametrize("packed", [False, True])
def test_attention_and_its_gradients_are_those_of_one_process(
    how: str, packed: bool, world: World
) -> None:
    for window, sinks in ((None, False), (None, True), (5, False), (5, True)):
        arguments = {"packed": packed, "window": window, "value": 6, "sinks": sinks}
        expected = attended(0, 1, how, **arguments)  # type: ignore[arg-type]
        for found in world.run(2, attended_by, 2, how, arguments):
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def attended_by(rank: int, size: int, how: str, arguments: dict[str, Any]) -> list[torch.Tensor]:
    return attended(rank, size, how, **arguments)


def _events_of_a_ring(rank: int) -> list[str]:
    """The order of products and of waits for gradients in a backward pass of three ranks."""
    seen: list[str] = []
    shift, product = comm.shift, across._gradients

    def shifting(tensor: torch.Tensor, group: Any, *, tag: int = 0) -> Any:
        arrived = shift(tensor, group, tag=tag)
        if tag == 0:
            return arrived
        seen.append("send")

        def waiting() -> torch.Tensor:
            seen.append("wait")
            return arrived()

        return waiting

    def computing(*arguments: Any, **named: Any) -> Any:
        seen.append("compute")
        return product(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "shift", shifting)
        patch.setattr(across, "_gradients", computing)
        attended(rank, 3, "p2p", packed=False, window=None, value=6, sinks=False, length=24)
    return seen


def test_a_ring_computes_while_the_gradient_of_the_same_keys_is_on_its_way(world: World) -> None:
    """Each wait for a gradient comes after the products to which it is added."""
    for events in world.run(3, _events_of_a_ring):
        assert events == ["compute", "send", *["compute", "wait", "send"] * 2, "wait"]


def how(word: str) -> tuple[tuple[str, Any], ...]:
    return (("context", word),)


BALANCED = Balancing((("aux_loss", 0.1), ("seq_aux_loss", 0.1)), z_loss=0.01)
COVERING = [
    Case("qwen3", cp=2, tp=2, sequence_parallel=True, recompute=FULL, options=how("p2p")),
    Case("gpt2", cp=2, pp=2, vpp=2, distributed=True, options=how("all_gather")),
    Case("llama", cp=2, dp=2, distributed=True, recompute=SELECTIVE, options=how("a2a")),
    Case("qwen3", cp=4, options=how("p2p")),
    Case(
        "mixtral", cp=2, tp=2, sequence_parallel=True, distributed=True, options=how("all_gather")
    ),
    Case("deepseek_v3", cp=2, options=how("p2p")),
    Case("gpt_oss", cp=2, options=how("all_gather")),
    Case("mixtral", cp=2, options=(*how("p2p"), ("balance", BALANCED))),
    Case("further tokens", cp=2, pp=2, options=how("p2p")),
    Case("gpt2", cp=4, options=TWO_LEVELS),
    Case("gemma3", cp=2, options=how("p2p")),
    Case("gemma4", cp=2, options=how("a2a")),
    Case("kimi", cp=2, options=how("p2p")),
    Case("mimo_v2_flash", cp=2, options=how("a2a")),
    Case("mimo_v2_flash", cp=2, options=how("p2p")),
    Case("laguna", cp=2, options=how("all_gather")),
    Case("gemma4, layer inputs", cp=2, options=how("p2p")),
]
EVERY = [
    Case(model, distributed=distributed, recompute=recompute, options=how(word), **layout)
    for model, word, (layout, distributed, recompute) in product(
        ("qwen3", "gpt2"),
        ONE_LEVEL,
        [
            ({"cp": 2}, False, FULL),
            ({"cp": 4}, True, SELECTIVE),
            ({"cp": 2, "dp": 2}, True, FULL),
            ({"cp": 2, "tp": 2}, False, SELECTIVE),
            ({"cp": 2, "tp": 2, "sequence_parallel": True}, True, FULL),
            ({"cp": 2, "pp": 2}, True, FULL),
            ({"cp": 2, "pp": 2, "vpp": 2}, False, SELECTIVE),
        ],
    )
    if word != "a2a"
    or model == "gpt2"
    or (layout["cp"] * layout.get("tp", 1) <= 2)  # qwen3 has two kv heads here
]

EVERY += [
    Case(model, distributed=distributed, recompute=recompute, options=TWO_LEVELS, cp=4)
    for model in ("qwen3", "gpt_oss", "deepseek_v3", "mixtral")
    for distributed, recompute in ((False, SELECTIVE), (True, FULL))
]


@pytest.mark.parametrize("case", COVERING, ids=str)
def test_a_layout_trains_as_one_process_does(case: Case, world: World) -> None:
    """Batches have packed documents, and labels that don't count."""
    compare(replace(case, steps=3), world)


@pytest.mark.slow
@pytest.mark.parametrize("case", EVERY, ids=str)
def test_every_layout_trains_as_one_process_does(case: Case, world: World) -> None:
    compare(case, world)


@pytest.mark.slow
def test_the_same_run_twice_gives_the_same_bits(world: World) -> None:
    case = Case("qwen3", cp=2, tp=2, sequence_parallel=True, distributed=True, steps=3)
    first, second = (world.run(case.world, train, case) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one.reports == other.reports
        assert all(torch.equal(tensor, other.weights[name]) for name, tensor in one.weights.items())


def test_dropout_is_the_same_at_every_layout(world: World) -> None:
    compare(
        Case(
            "gpt2", cp=2, tp=2, sequence_parallel=True, steps=3, options=(("hidden_dropout", 0.2),)
        ),
        world,
    )


def gradients(_rank: int, case: Case) -> dict[str, torch.Tensor]:
    """The first step's, of every parameter; on every rank whole."""
    engine = make_engine(case)
    engine.train_step(list(batches(case, 0))[engine.grid.dp_rank :: case.dp], lr=0.0)
    assert engine.optimizer is not None
    found = {
        f"{item.chunk} {item.name}": item.gradient.clone() for item in engine.optimizer.ranges()
    }
    engine.grid.close()
    return found


@pytest.mark.parametrize("word", ONE_LEVEL)
def test_every_gradient_is_that_of_one_process(word: str, world: World) -> None:
    case = Case("qwen3", cp=2, clip=0.0, options=how(word))
    expected = gradients(0, case.alone())
    for found in world.run(2, gradients, case):
        assert set(found) == set(expected)
        for name, gradient in found.items():
            largest = expected[name].abs().max()
            torch.testing.assert_close(gradient, expected[name], rtol=0, atol=float(largest) * 1e-5)


def kept(_rank: int, case: Case) -> int:
    """The bytes that a pass keeps. The norm is the one for many rows: the norm for few rows, as in half of a small
    batch, keeps more."""
    engine = make_engine(case)
    with mock.patch.object(tensor, "FEW_ROWS", 0):
        found = saved_bytes(engine, next(batches(case, 1)))
    engine.grid.close()
    return found


@pytest.mark.parametrize("word", ONE_LEVEL)
def test_a_rank_keeps_its_share_of_the_activations(word: str, world: World) -> None:
    """A rank keeps no tensors of other ranks. (Blocks keep keys and values less often than one call does.)"""
    case = Case("llama", masked=False, options=how(word))
    alone = kept(0, case.alone())
    for shared in world.run(2, kept, replace(case, cp=2)):
        assert 0.4 * alone < shared < 0.52 * alone


@pytest.mark.slow
def test_heads_for_tokens_drop_what_tensor_ranks_with_these_heads_do(world: World) -> None:
    """Whoever has the second half of the heads draws the same for them."""
    dropout, a2a = ("attention_dropout", 0.3), ("context", "a2a")
    case = Case("gpt2", steps=3)
    plain, by_tensor, by_context, again = (
        world.run(2, train, replace(case, **layout, options=options))[0].losses
        for layout, options in (
            ({"tp": 2}, ()), ({"tp": 2}, (dropout,)), ({"cp": 2}, (dropout, a2a)), ({"cp": 2}, (dropout, a2a)),
        )
    )  # fmt: skip
    assert by_context == pytest.approx(by_tensor, rel=1e-5)
    assert by_context == again
    assert by_context != pytest.approx(plain, rel=1e-3)


def logits(_rank: int, case: Case) -> torch.Tensor | None:
    engine = make_engine(case)
    found = engine.logits(next(batches(case, 0)))
    engine.grid.close()
    return found


def test_logits_are_those_of_the_whole_sequence(world: World) -> None:
    expected = logits(0, Case("qwen3"))
    assert expected is not None
    for found in world.run(2, logits, Case("qwen3", cp=2)):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


REFUSED = [
    ("qwen3", {"world": 6, "cp": 4}, {}, "6 processes can't be divided over tp x cp x pp = 1 x 4 x 1 = 4"),
    ("qwen3", {"world": 2, "sequence": 18}, {}, "cuts 18 tokens into 2 x cp = 2 x 2 blocks; take .* multiple of 4"),
    ("qwen3", {"world": 4, "cp": 4}, {"context": "a2a"}, "kv_heads = 2 can't be divided over tp x cp = 1 x 4 = 4"),
    ("qwen3", {"world": 2}, {"attention_dropout": 0.1}, r"dropout of attention weights \(0.1\)"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "sizes", "options", "said"), REFUSED, ids=lambda value: str(value)[:30]
)
def test_impossible_sizes_are_refused_with_the_arithmetic(
    model: str, sizes: dict[str, int], options: dict[str, Any], said: str
) -> None:
    config = MODELS[model]
    arguments = {"world": 2, "sequence": 16, "microbatches": 4, "cp": 2, **sizes}
    with pytest.raises(LayoutError, match=said):
        check_sizes(config, Layout(stage_layers=(4,)), options=ModelOptions(**options), **arguments)
