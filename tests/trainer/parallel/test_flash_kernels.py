"""FlashAttention 2 and 3 give the results and the gradients of the trainer's attention on a CPU.

`make test-kernels` installs FlashAttention, and has Triton's interpreter compute its kernels for AMD's GPUs.
See tests/flash_on_cpu.py. The trainer selects the versions and calls them as on a GPU.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron_lite.models import attention
from megatron_lite.models.flash import Kernel, kernel_for, kernel_of
from megatron_lite.models.passes import Packed, Pass
from tests import flash_on_cpu, triton_on_cpu
from tests.trainer.parallel.small import Case, train

GPU = torch.device("cuda")
CAPABILITIES = {2: (8, 0), 3: (9, 0)}
"""The version that the trainer prefers on a GPU of this compute capability: Ampere, Hopper."""
VERSIONS = pytest.mark.parametrize("version", CAPABILITIES)
BLOCK = 32
"""Queries and keys of a block in the forward pass."""
ERRORS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Allowed differences, as a share of the largest number of each result."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not triton_on_cpu.is_interpreting(),
        reason="Triton interprets kernels in `make test-kernels`",
    ),
]


class Shape(NamedTuple):
    length: int
    rows: int = 1
    heads: int = 2
    kv_heads: int = 2
    width: int = 64


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    """The gradient of the output."""


@pytest.fixture(autouse=True)
def prepared() -> Iterator[None]:
    missing = flash_on_cpu.missing()
    if missing:
        pytest.skip(
            f"not installed: {', '.join(missing)}; remove .venv/.interpreted and run `make test-kernels`"
        )
    flash_on_cpu.prepare()
    kernel_of.cache_clear()
    yield
    kernel_of.cache_clear()


def on_gpu(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    """Pretend the GPU on which the trainer prefers a version, and let it select a kernel for a CPU's tensors too."""

    def choose(_backend: str, q: Tensor, v: Tensor, dropout: float) -> Kernel | None:
        assert q.shape[-1] == v.shape[-1]
        kernel: Kernel | None = kernel_for(GPU, width=q.shape[-1], dropout=dropout > 0)
        assert kernel is not None
        assert kernel.version == version
        return kernel

    capability = CAPABILITIES[version]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(attention, "choose", choose)


def draw(shape: Shape, dtype: torch.dtype) -> Inputs:
    generator = torch.Generator().manual_seed(1)

    def drawn(heads: int) -> Tensor:
        size = (shape.length, shape.rows, heads, shape.width)
        return torch.randn(size, generator=generator).to(dtype)

    q, grad = drawn(shape.heads), drawn(shape.heads)
    return Inputs(q, drawn(shape.kv_heads), drawn(shape.kv_heads), grad)


def a_pass(shape: Shape, documents: list[list[int]] | None) -> Pass:
    nothing = torch.zeros(shape.rows, shape.length, dtype=torch.long)
    packed = None if documents is None else Packed(documents, nothing.device)
    return Pass(tokens=nothing, labels=nothing, weights=None, positions=nothing.T, packed=packed)


def results(inputs: Inputs, run: Pass, **how: Any) -> list[Tensor]:
    """The output and the gradients of q, k, v, by the trainer's own choice of a kernel."""
    leaves = [each.clone().requires_grad_() for each in inputs[:3]]
    out = attention.attend(*leaves, run, **how)
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs.grad)]


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        allowed = ERRORS[one.dtype] * other.abs().max().item() + 1e-6
        torch.testing.assert_close(one.float(), other, rtol=0, atol=allowed)


def compare(
    monkeypatch: pytest.MonkeyPatch,
    version: int,
    shape: Shape,
    dtype: torch.dtype,
    documents: list[list[int]] | None = None,
    **how: Any,
) -> None:
    """Compare all results with those of torch on a CPU in float32."""
    inputs, run = draw(shape, dtype), a_pass(shape, documents)
    expected = results(Inputs(*(each.float() for each in inputs)), run, **how)
    on_gpu(monkeypatch, version)
    assert_close(results(inputs, run, **how), expected)


SHAPES = {
    "two tokens": Shape(2),
    "several rows and blocks, grouped": Shape(70, rows=2, heads=4, kv_heads=2),
    "whole blocks": Shape(2 * BLOCK, heads=4, kv_heads=1),
    "96 wide": Shape(33, width=96),
    "128 wide": Shape(40, kv_heads=1, width=128),
    "an odd multiple of 8": Shape(40, width=72),
}
DTYPES = pytest.mark.parametrize("dtype", ERRORS, ids=str)


@VERSIONS
@DTYPES
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_kernels_give_our_attention_and_its_gradients(
    monkeypatch: pytest.MonkeyPatch, version: int, dtype: torch.dtype, shape: Shape
) -> None:
    compare(monkeypatch, version, shape, dtype)


@VERSIONS
def test_one_token_learns_by_its_value_only(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    """In 16 bits, the gradients of its query and key are rounding errors."""
    compare(monkeypatch, version, Shape(1), torch.float32)


def test_flash_attention_2_pads_heads_that_are_no_multiple_of_8(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The scale is that of the width without padding. kernel_for gives FlashAttention 3 no such heads."""
    compare(monkeypatch, 2, Shape(20, kv_heads=1, width=100), torch.float32)


@VERSIONS
def test_the_scale_of_scores_is_ours(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    compare(monkeypatch, version, Shape(40), torch.float32, scale=0.3)
    documents = [[25, 15]]
    monkeypatch.undo()
    compare(monkeypatch, version, Shape(40), torch.float32, documents, scale=0.3)


DOCUMENTS = {
    "of one token": [[1, 1, 1, 37]],
    "that end with a block": [[BLOCK, 2 * BLOCK]],
    "in several rows": [[3, 31], [34], [33, 1]],
}


@VERSIONS
@DTYPES
@pytest.mark.parametrize("documents", DOCUMENTS.values(), ids=DOCUMENTS)
def test_packed_documents_do_not_attend_to_each_other(
    monkeypatch: pytest.MonkeyPatch, version: int, dtype: torch.dtype, documents: list[list[int]]
) -> None:
    shape = Shape(sum(documents[0]), rows=len(documents), heads=4, kv_heads=2, width=32)
    compare(monkeypatch, version, shape, dtype, documents)


WINDOWS = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 69, 70, 71)


@VERSIONS
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("documents", [None, [[70], [1, 40, 29]]], ids=["rows", "documents"])
def test_a_window_has_our_border(
    monkeypatch: pytest.MonkeyPatch, version: int, window: int, documents: list[list[int]] | None
) -> None:
    """The output only: the backward pass of these kernels has no windows."""
    shape = Shape(70, rows=2, heads=2, kv_heads=1, width=32)
    inputs, run = draw(shape, torch.float32), a_pass(shape, documents)
    q, k, v, _ = inputs
    expected = attention.attend(q, k, v, run, window=window)
    on_gpu(monkeypatch, version)
    assert_close([attention.attend(q, k, v, run, window=window)], [expected])


def recorded(function: Callable[..., Any], seen: list[dict[str, Any]]) -> Callable[..., Any]:
    """The function, which then notes its arguments by name."""

    def called(*args: Any, **keywords: Any) -> Any:
        seen.append(inspect.signature(function).bind(*args, **keywords).arguments)
        return function(*args, **keywords)

    return called


@VERSIONS
@pytest.mark.parametrize("documents", [None, [[3, 9]]], ids=["rows", "documents"])
def test_the_backward_pass_gets_the_window_of_the_forward_pass(
    monkeypatch: pytest.MonkeyPatch, version: int, documents: list[list[int]] | None
) -> None:
    """The kernels' gradients can't show it."""
    seen: list[dict[str, Any]] = []
    functions = flash_on_cpu.amd_functions(version)
    for name in ("fwd", "bwd", "varlen_fwd", "varlen_bwd"):
        if hasattr(functions, name):
            monkeypatch.setattr(functions, name, recorded(getattr(functions, name), seen))
    on_gpu(monkeypatch, version)
    shape = Shape(12)
    results(draw(shape, torch.float32), a_pass(shape, documents), window=4)
    assert len(seen) == 2
    for arguments in seen:
        assert (arguments["window_size_left"], arguments["window_size_right"]) == (3, 0)
        assert arguments["causal"] is True


@VERSIONS
def test_gradients_of_a_window_are_ours(version: int) -> None:
    pytest.skip("AMD's kernels ignore the window in the backward pass")


@VERSIONS
def test_deterministic_algorithms_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    seen: list[dict[str, Any]] = []
    functions = flash_on_cpu.amd_functions(version)
    monkeypatch.setattr(functions, "bwd", recorded(functions.bwd, seen))
    torch.use_deterministic_algorithms(True)
    try:
        compare(monkeypatch, version, Shape(12), torch.float32)
    finally:
        torch.use_deterministic_algorithms(False)
    assert [arguments["deterministic"] for arguments in seen] == [True]


def test_dropout_keeps_the_sum_of_weights_on_average() -> None:
    pytest.skip("AMD's functions fail with dropout if their caller doesn't want the weights too")


@pytest.mark.parametrize("version", [2, 3])
def test_dropout_on_hopper_needs_version_2(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: CAPABILITIES[3])
    kernel = kernel_for(GPU, width=64, dropout=version == 2)
    assert kernel is not None
    assert kernel.version == version


@VERSIONS
def test_a_model_takes_the_step_that_it_takes_by_torch(
    monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    """The step has whole rows and packed documents, fewer key heads than heads, and four layers.

    It is SGD's: the first step of Adam has the learning rate's size, however small a gradient and its rounding are.
    """
    case = Case("llama", steps=1, kind="sgd")
    by_torch = train(0, case)
    on_gpu(monkeypatch, version)
    found = train(0, case)
    (expected,), (report,) = by_torch.reports, found.reports
    assert report.loss == pytest.approx(expected.loss, rel=1e-6)
    assert report.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    for name, weight in found.weights.items():
        torch.testing.assert_close(weight, by_torch.weights[name], rtol=0, atol=1e-5)
