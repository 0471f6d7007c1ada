"""The int8 kernels of torch for x86-64: FBGEMM's, and oneDNN's, which is quicker with AVX-512 VNNI and AMX.

For one row, oneDNN takes 0.65 to 0.95 of FBGEMM's time, for 16 rows 0.8 (VNNI) or 0.5 (AMX). With AVX2, it takes 5 times
FBGEMM's time.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_lite.products.processor import has_int8_sums

Kernel = Callable[[Tensor], Tensor]
"""A product with one matrix: float32 [rows, in], in -63 to 63, which the kernel rounds to integers -> float32 [rows, out].

The kernel may change its argument.
"""
ENGINE = "fbgemm"
"""torch's name of the library."""
_ZERO = 64
"""Kernels take activations as uint8, with this zero point."""


def has_int8_products() -> bool:
    """Return whether this torch has the kernels for this processor: x86-64 with AVX2."""
    return ENGINE in torch.backends.quantized.supported_engines


def kernel_of(values: Tensor, scales: Tensor) -> Kernel:
    """Copy a matrix into the quickest kernel's order of memory. values: int8 [out, in]. scales: float32 [out]."""
    if has_int8_sums() and hasattr(torch.ops.onednn, "qlinear_pointwise"):
        return _of_onednn(values, scales)
    return _of_fbgemm(values, scales)


def _of_fbgemm(values: Tensor, scales: Tensor) -> Kernel:
    zeros = torch.zeros(len(scales), dtype=torch.int64)
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = ENGINE
    try:
        with warnings.catch_warnings():
            # torch announces that tensors of this kind will go.
            warnings.simplefilter("ignore")
            quantized = torch._make_per_channel_quantized_tensor(values, scales.double(), zeros, 0)
            packed = torch.ops.quantized.linear_prepack(quantized, None)
    finally:
        torch.backends.quantized.engine = before
    # The overload is named, because torch takes 15 us to find it for each call.
    product = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default

    def multiply(activations: Tensor) -> Tensor:
        made: Tensor = product(activations, 1.0, _ZERO, packed)
        return made

    return multiply


def _of_onednn(values: Tensor, scales: Tensor) -> Kernel:
    packed = torch.ops.onednn.qlinear_prepack(values, None)
    zeros = torch.zeros(len(scales), dtype=torch.int8)
    no_bias, plain_output = None, (1.0, 0, torch.float32)
    nothing_after: tuple[str, list[Any], str] = ("none", [], "")
    product = torch.ops.onednn.qlinear_pointwise.default

    def multiply(activations: Tensor) -> Tensor:
        # Numbers are positive now, so that the conversion rounds them to the nearest integer.
        integers = activations.add_(_ZERO + 0.5).to(torch.uint8)
        made: Tensor = product(
            integers, 1.0, _ZERO, packed, scales, zeros, no_bias, *plain_output, *nothing_after
        )
        return made

    return multiply
