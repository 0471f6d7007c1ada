"""Chooses the matrices of a model that a quantized form can hold, and names those that it can't.

Inference engines fuse the experts of a layer. vLLM refuses experts of which only some matrices are quantized, and
transformers puts random numbers in place of the others. Sources: CompressedTensorsMoEMethod of vLLM; transformers 5.24.
"""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from megaconv.model.natives import NativeTensor

_LINEAR = re.compile(r"(.*\.)?(attn|mlp)\.(?!.*router\.|indexer\.|.*_norm\.).*\.weight")
_ROUTED = re.compile(r"(.*\.)?mlp\.experts\.\d+\..*\.weight")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class Fitting(NamedTuple):
    """The matrices that a form can hold."""

    holds: Callable[[NativeTensor], bool]
    condition: str
    """The condition in words, as the end of a message."""


def is_linear(native: NativeTensor) -> bool:
    """True for a matrix [out, in] of attention, an MLP or an expert."""
    return len(native.shape) == 2 and native.shape[0] != 1 and _has_linear_parts(native)


def is_stacked(native: NativeTensor) -> bool:
    """True for the weights of all experts of a layer in one tensor."""
    return native.of_experts and len(native.shape) == 3 and _has_linear_parts(native)


def is_routed(native: NativeTensor) -> bool:
    """True for weights of routed experts alone."""
    return all(map(_ROUTED.fullmatch, native.parts))


def kinds(natives: Sequence[NativeTensor]) -> str:
    """The names of matrices with their shapes, each kind once: `model.layers.*.mlp.down_proj [128, 200]`."""
    found = {
        f"{_NUMBER.sub('*', native.name.removesuffix('.weight'))} {list(native.shape)}"
        for native in natives
    }
    return ", ".join(sorted(found))


def _has_linear_parts(native: NativeTensor) -> bool:
    return all(map(_LINEAR.fullmatch, native.parts))
