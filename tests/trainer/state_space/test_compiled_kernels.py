"""Kernels of flash-linear-attention and mamba_ssm compile for an H100 at the sizes of real models.

`make test-kernels` installs the packages, and runs this file apart from the interpreted kernels.
"""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from megatron_lite.models.state_space.kernels import (
    DELTA,
    KIMI_DELTA,
    SCAN,
    Package,
    delta_by,
    scan_by,
)
from megatron_lite.models.state_space.mamba2 import CHUNK
from tests import triton_on_cpu
from tests.trainer.state_space.test_scans import Shape, of_delta, of_kimi, of_mamba
from tests.triton_for_h100 import SHARED, compiling


def reason_to_skip() -> str | None:
    if triton_on_cpu.is_interpreting() or torch.version.cuda is not None:
        return "compiled kernels need a process without a GPU and without Triton's interpreter"
    missing = [name for name in ("triton", "fla", "mamba_ssm") if find_spec(name) is None]
    return f"not installed: {', '.join(missing)}; run `make test-kernels`" if missing else None


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(reason_to_skip() is not None, reason=str(reason_to_skip())),
]


class Model(NamedTuple):
    package: Package
    scan: Callable[..., tuple[Tensor, Tensor]]
    inputs_of: Callable[..., list[Tensor]]
    heads: int
    groups: int
    """Key heads of a delta net, groups of Mamba."""
    width: int
    """Elements of a value's head."""
    state: int
    """Elements of a key's head, or of Mamba's state."""
    kernels: int
    """So many are compiled at least, forward and backward."""


MODELS = {
    "Kimi Linear 48B": Model(KIMI_DELTA, delta_by, of_kimi, 32, 32, 128, 128, 10),
    "Qwen3-Next 80B": Model(DELTA, delta_by, of_delta, 32, 16, 128, 128, 9),
    "Nemotron-H 8B": Model(SCAN, partial(scan_by, chunk=CHUNK), of_mamba, 128, 8, 64, 128, 12),
    "Bamba 9B": Model(SCAN, partial(scan_by, chunk=CHUNK), of_mamba, 128, 1, 64, 128, 12),
}
TOKENS = 2 * CHUNK


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "documents"])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_kernels_of_real_models_compile_and_fit_an_h100(model: Model, packed: bool) -> None:
    shape = Shape(1, TOKENS, model.heads, model.groups, model.width, model.state, CHUNK)
    documents = torch.arange(TOKENS).floor_divide(50).unsqueeze(0) if packed else None
    *given, _ = model.inputs_of(shape, torch.float32)
    inputs = [each.requires_grad_() for each in _in_bf16(given)]
    with compiling() as kernels:
        module = triton_on_cpu.import_without_gpu(model.package.module)
        kernel = getattr(module, model.package.function)
        y, last = model.scan(kernel, *inputs, documents=documents, state=None)
        torch.autograd.grad(y.float().sum() + last.sum(), inputs)
    assert len(kernels) >= model.kernels, sorted(kernels)
    for name, compiled in kernels.items():
        assert compiled.binary.startswith(b"\x7fELF"), name
        assert compiled.shared <= SHARED, name


def _in_bf16(inputs: list[Tensor]) -> list[Tensor]:
    """The inputs of a run in bf16. Decays and steps stay in float32."""
    return [each.detach().bfloat16() if each.dim() == 4 else each.detach() for each in inputs]
