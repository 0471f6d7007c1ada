"""The real kernels of flash-linear-attention and mamba_ssm give the results and the gradients of our scans in torch.

`make test-kernels` installs the packages, and has Triton's interpreter compute their kernels on a CPU.
"""

import sys
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lite.models.state_space.gated_delta import gated_delta_rule
from megatron_lite.models.state_space.kernels import (
    DELTA,
    KIMI_DELTA,
    SCAN,
    Kernel,
    Package,
    delta_by,
    scan_by,
)
from megatron_lite.models.state_space.kimi_delta import kimi_delta_rule
from megatron_lite.models.state_space.mamba2 import ssd
from tests import triton_on_cpu
from tests.trainer.state_space.test_scans import (
    SHAPES,
    Shape,
    draws,
    numbers_of,
    of_delta,
    of_kimi,
    of_mamba,
)

Scan = Callable[..., tuple[Tensor, Tensor]]

CHUNK = 16
CHOSEN = [SHAPES[number] for number in (0, 1, 2, 4, 6, 8, 9, 11)]
"""One token, several chunks, heads that share a key, documents of one token, documents that end with a chunk."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not triton_on_cpu.is_interpreting(),
        reason="Triton interprets kernels in `make test-kernels`",
    ),
]


@cache
def kernel(package: Package) -> Kernel:
    """A package's real kernel. Skips the test if the package is not installed."""
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed: run `make test-kernels`")
    name = package.module.split(".")[0]
    if name not in sys.modules and find_spec(name) is None:
        pytest.skip(f"{name} is not installed: run `make test-kernels`")
    triton_on_cpu.prepare()
    found: Kernel = getattr(triton_on_cpu.import_kernels(package.module), package.function)
    return found


def results(
    scan: Scan, inputs: list[Tensor], state: Tensor | None, documents: Tensor | None
) -> list[Tensor]:
    """y, the last state, and the gradients of all inputs for a random weight of each result, in float32."""
    leaves = [each.clone().requires_grad_() for each in inputs]
    before = None if state is None else state.clone().requires_grad_()
    y, last = scan(*leaves, documents=documents, state=before)
    draw = draws(torch.float32)
    total = (y.float() * draw(*y.shape)).sum() + (last.float() * draw(*last.shape)).sum()
    learned = leaves if before is None else [*leaves, before]
    found = [y.detach(), last.detach(), *torch.autograd.grad(total, learned)]
    return [each.float() for each in found]


def in_16_bits(inputs: list[Tensor]) -> list[Tensor]:
    """The inputs of a delta rule in fp16, with the decays in float32, as a run in 16 bits has them."""
    q, k, v, g, beta = inputs
    return [q.half(), k.half(), v.half(), g, beta.half()]


def assert_close(found: list[Tensor], expected: list[Tensor], error: float) -> None:
    """error: of the largest number of each result. The gradient of an unused decay is not exactly zero."""
    for one, other in zip(found, expected, strict=True):
        allowed = error * other.abs().max().item() + 1e-6
        torch.testing.assert_close(one, other, rtol=0, atol=allowed)


def ways(shape: Shape, state: Tensor) -> list[dict[str, Any]]:
    """The documents and the states before the first token that a kernel takes."""
    documents = numbers_of(shape)
    if documents is not None:
        return [{"documents": documents, "state": None}]
    return [{"documents": None, "state": before} for before in (None, state)]


@pytest.mark.parametrize("shape", CHOSEN, ids=str)
@pytest.mark.parametrize(
    ("package", "rule", "inputs_of"),
    [(DELTA, gated_delta_rule, of_delta), (KIMI_DELTA, kimi_delta_rule, of_kimi)],
    ids=["gated delta rule", "kimi delta rule"],
)
def test_the_kernel_of_a_delta_rule_gives_our_results_and_gradients(
    package: Package, rule: Scan, inputs_of: Any, shape: Shape
) -> None:
    """The kernels take 16 bits only. Ours computes in float32 from the same inputs."""
    by_kernel = partial(delta_by, kernel(package))
    *given, state = inputs_of(shape, torch.float32)
    inputs = in_16_bits(given)
    for way in ways(shape, state):
        found = results(by_kernel, inputs, **way)
        assert_close(found, results(rule, inputs, **way), error=2e-3)


@pytest.mark.parametrize("shape", CHOSEN, ids=str)
def test_the_kernel_of_a_scan_gives_our_results_and_gradients(shape: Shape) -> None:
    by_kernel = partial(scan_by, kernel(SCAN), chunk=CHUNK)
    by_torch = partial(ssd, chunk=CHUNK)
    *inputs, state = of_mamba(shape, torch.float32)
    for way in ways(shape, state):
        found = results(by_kernel, inputs, **way)
        assert_close(found, results(by_torch, inputs, **way), error=2e-5)
