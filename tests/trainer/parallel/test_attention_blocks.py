"""Windows, sinks, capped scores and chunks of long sequences: in blocks, with the results of one call, without a mask of all tokens."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_lite.models import attention, scored_attention
from megatron_lite.models.attention import causal
from megatron_lite.models.masks import block_mask
from megatron_lite.models.passes import Packed, Pass
from megatron_lite.models.scored_attention import Rules, attend_by_scores

HEADS, KV_HEADS, WIDTH = 4, 2, 8


def tensors(length: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    made = [torch.randn(length, 1, each, WIDTH, generator=generator, dtype=dtype) for each in heads]
    return [x.requires_grad_() for x in made]


def gradients(length: int, window: int | None, with_sinks: bool) -> list[Tensor]:
    """The output and all gradients."""
    q, k, v = tensors(length)
    sinks = torch.linspace(-1, 1, HEADS, dtype=torch.float64).requires_grad_()
    out = causal(q, k, v, window, 0.0, None, sinks if with_sinks else None)
    out.square().sum().backward()
    leaves = [q, k, v, *([sinks] if with_sinks else [])]
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 3, 40])
def test_blocks_compute_what_one_call_computes(
    window: int | None, with_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = gradients(70, window, with_sinks)
    monkeypatch.setattr(attention, "QUERIES", 16)
    monkeypatch.setattr(attention, "LONG", 32)
    for one, other in zip(gradients(70, window, with_sinks), expected, strict=True):
        torch.testing.assert_close(one, other)


def test_the_blocks_see_each_pair_of_query_and_key_once() -> None:
    """A plain emulation computes the pairs."""
    q, k, v = (x.detach() for x in tensors(1100, torch.float32))
    seen = block_mask(1100, 1100, 0, 600, q.device)
    scores = torch.einsum("qbhd,kbhd->bhqk", q, k.repeat_interleave(2, 2)) * WIDTH**-0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    expected = torch.einsum("bhqk,kbhd->qbhd", weights, v.repeat_interleave(2, 2))
    torch.testing.assert_close(causal(q, k, v, 600, 0.0), expected, rtol=1e-5, atol=1e-5)


class Largest(TorchDispatchMode):
    """Notes the largest number of elements of any tensor."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, Tensor):
                self.found = max(self.found, x.numel())
        return made


@pytest.mark.parametrize(("window", "with_sinks"), [(1024, False), (128, True), (None, True)])
def test_no_tensor_of_all_queries_and_all_keys_is_made(
    window: int | None, with_sinks: bool
) -> None:
    """Forward and backward, for 32,768 tokens, without elements."""
    length = 1 << 15
    with FakeTensorMode(), Largest() as largest:
        q, k, v = (
            torch.empty(length, 1, heads, WIDTH, requires_grad=True)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        sinks = torch.zeros(HEADS, requires_grad=True) if with_sinks else None
        causal(q, k, v, window, 0.0, None, sinks).sum().backward()
    rows = attention.QUERIES
    keys = length if window is None else window + rows
    assert largest.found <= max(rows * (keys + 8) * HEADS, length * HEADS * 16)
    assert largest.found < length * length // 8


def a_pass(length: int, documents: list[list[int]] | None = None) -> Pass:
    """The pass of one row."""
    tokens = torch.zeros(1, length, dtype=torch.int64)
    packed = None if documents is None else Packed(documents, torch.device("cpu"))
    positions = torch.arange(length).unsqueeze(1)
    return Pass(
        tokens=tokens,
        labels=tokens,
        weights=None,
        positions=positions,
        in_order=True,
        packed=packed,
    )


SCORED: dict[str, tuple[Rules, int | None]] = {
    "capped": (Rules(cap=1.5), None),
    "capped with a window": (Rules(cap=1.5), 13),
    "chunks": (Rules(chunk=20), None),
    "capped chunks with a window": (Rules(cap=1.5, chunk=20), 7),
}


def by_scores(
    length: int, run: Pass, rules: Rules, window: int | None
) -> tuple[list[Tensor], Tensor]:
    """The output and all gradients, and the largest scores."""
    q, k, v = tensors(length)
    how: Any = {"window": window, "dropout": 0.0, "scale": None}
    largest = torch.full((HEADS,), -torch.inf)
    out = attend_by_scores(q, k, v, run, rules, largest=largest, **how)
    out.square().sum().backward()
    return [out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)], largest


@pytest.mark.parametrize("documents", [None, [[25, 5, 40]]], ids=["one document", "packed"])
@pytest.mark.parametrize(("rules", "window"), SCORED.values(), ids=SCORED)
def test_blocks_of_scores_compute_what_a_whole_mask_computes(
    rules: Rules,
    window: int | None,
    documents: list[list[int]] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A block computes with the keys in its reach alone."""
    expected, expected_largest = by_scores(70, a_pass(70, documents), rules, window)
    monkeypatch.setattr(scored_attention, "BLOCK", 16)
    found, largest = by_scores(70, a_pass(70, documents), rules, window)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(largest, expected_largest)


def test_scores_agree_with_a_plain_emulation() -> None:
    q, k, v = (x.detach() for x in tensors(70))
    places = torch.arange(70)
    back = places[:, None] - places
    seen = (back >= 0) & (places[:, None] // 20 == places // 20)
    scores = torch.einsum("qbhd,kbhd->bhqk", q, k.repeat_interleave(2, 2)) * WIDTH**-0.5
    weights = (torch.tanh(scores / 1.5) * 1.5).masked_fill(~seen, -torch.inf).softmax(-1)
    expected = torch.einsum("bhqk,kbhd->qbhd", weights, v.repeat_interleave(2, 2))
    found, _ = by_scores(70, a_pass(70), Rules(cap=1.5, chunk=20), None)
    torch.testing.assert_close(found[0], expected)


@pytest.mark.parametrize(("rules", "window"), [(Rules(cap=50.0), 2048), (Rules(chunk=2048), None)])
def test_no_mask_of_all_queries_and_all_keys_is_made_for_scores(
    rules: Rules, window: int | None
) -> None:
    """Gemma 2's caps and Llama 4's chunks, forward and backward, for 8,192 tokens, without elements."""
    length = 1 << 13
    with FakeTensorMode(), Largest() as largest:
        by_scores(length, a_pass(length), rules, window)
    reach = (window or rules.chunk or length) + scored_attention.BLOCK
    assert largest.found <= max(scored_attention.BLOCK * reach * HEADS, length * HEADS * 16)
    assert largest.found < length * length // 8
