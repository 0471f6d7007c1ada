"""`--quantize q8_0`: the matrices of a model are rounded to int8 while they are loaded, and computed in int8.

    matrices of layers, experts, the head       int8 (products/int8.py)
    embedding, router, convolutions, norms, biases, adapters    the dtype of the computation

A tied head has an int8 copy of the embedding. Matrices are read and rounded one after the other, in blocks of rows, so the
plain model never exists in memory.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from formats.tensor import LazyTensor, matrix_shape
from megaconv.errors import UsageError
from megaconv.model.natives import NativeTensor
from megatron_lite.checkpoint.weights import check_tensors, fill, fill_rows
from megatron_lite.engine import Engine
from megatron_lite.models.ends import Head
from megatron_lite.parallel.parameters import ParameterInfo, replace_parameter
from megatron_lite.parallel.tensor import VocabEmbedding
from megatron_lite.products.int8 import Int8Matrix, Int8Product, quantize
from megatron_lite.products.int8_kernels import has_int8_products
from megatron_lite.products.product import PLAIN

BLOCK_ELEMENTS = 2 << 20
"""Numbers of a matrix that exist in float32 at a time."""


def check_quantize(device: torch.device) -> None:
    """Raise UsageError if int8 can't be computed here."""
    if device.type != "cpu":
        raise UsageError(
            "--quantize computes on a CPU; leave it out on a GPU, or hide the GPU by CUDA_VISIBLE_DEVICES="
        )
    if not has_int8_products():
        raise UsageError(
            "--quantize q8_0 needs torch's FBGEMM, which this torch lacks for this processor; leave the flag out"
        )


@dataclass
class Quantized:
    """The sizes of a model that was loaded in int8, on this rank."""

    matrices: int = 0
    nbytes: int = 0
    plain: list[str] = field(default_factory=list)
    """Names of the matrices that stay plain, without the numbers of layers."""

    def __str__(self) -> str:
        """Return the line that a command prints."""
        kept = f"; plain: {', '.join(self.plain)}" if self.plain else ""
        return f"--quantize q8_0: {self.matrices} matrices in int8, {self.nbytes / 2**20:,.1f} MiB{kept}"


def load_quantized(engine: Engine, tensors: Mapping[str, LazyTensor]) -> Quantized:
    """Fill an engine without memory for parameters (allocates=False) from canonical tensors by name.

    Every rank reads its own part. Adapters get memory, and stay zero.
    Raises TensorMismatch for a missing, unknown or misshapen tensor, before any is read.
    """
    check_tensors(engine, tensors)
    loading = _Loading(engine, tensors, Quantized())
    for module, infos, adapters in zip(engine.chunks, engine.infos, engine.adapters, strict=True):
        for info in infos:
            loading.take(module, info)
        for info in adapters:
            replace_parameter(module, info.name, loading.empty(info))
    return loading.found


@dataclass(frozen=True)
class _Loading:
    engine: Engine
    tensors: Mapping[str, LazyTensor]
    found: Quantized

    def take(self, network: nn.Module, info: ParameterInfo) -> None:
        """Load one parameter."""
        path, _, name = info.name.rpartition(".")
        module = network.get_submodule(path)
        is_weight = name == "weight"
        if self._is_of_adapters(info):
            self._load_plain(network, info)
        elif is_weight and isinstance(module, Head):
            module.product_of_logits = self._product(info.native)
        elif is_weight and getattr(module, "product", None) is PLAIN:
            setattr(module, "product", self._product(info.native))  # noqa: B010
        else:
            self._load_plain(network, info)
            if isinstance(module, VocabEmbedding) and module.heads_share:
                self._quantize_tied_heads(network, info)

    def _is_of_adapters(self, info: ParameterInfo) -> bool:
        """Return whether adapters have a module whole, or rows of it."""
        lora = self.engine.options.lora
        path = info.name.rpartition(".")[0]
        return lora is not None and (not info.frozen or bool(lora.tokens_of(path)))

    def empty(self, info: ParameterInfo) -> nn.Parameter:
        """Return a parameter of zeros."""
        engine = self.engine
        zeros = torch.zeros(
            info.native.shape, dtype=engine.dtype_of(info), device=engine.grid.device
        )
        return nn.Parameter(zeros, requires_grad=False)

    def _load_plain(self, network: nn.Module, info: ParameterInfo) -> None:
        parameter = self.empty(info)
        fill(parameter, info.native, self.tensors)
        replace_parameter(network, info.name, parameter)
        kind = re.sub(r"\.\d+", "", info.name)
        if len(info.native.shape) > 1 and kind not in self.found.plain:
            self.found.plain.append(kind)

    def _quantize_tied_heads(self, network: nn.Module, info: ParameterInfo) -> None:
        for head in network.modules():
            if isinstance(head, Head) and head.weight is None:
                head.product_of_logits = self._product(info.native)

    def _product(self, native: NativeTensor) -> Int8Product:
        matrix = self._matrix(native)
        lora = self.engine.options.lora
        squares = matrix.row_squares() if lora is not None and lora.dora else None
        product = Int8Product(matrix, squares)
        self.found.matrices += 1
        self.found.nbytes += product.nbytes
        return product

    def _matrix(self, native: NativeTensor) -> Int8Matrix:
        """Read a matrix and round it, in blocks of rows."""
        rows, columns = matrix_shape(native.shape)
        values = torch.empty(rows, columns, dtype=torch.int8)
        scales = torch.empty(rows)
        step = max(1, BLOCK_ELEMENTS // columns)
        for first in range(0, rows, step):
            part = slice(first, min(first + step, rows))
            block = torch.empty(part.stop - first, columns)
            fill_rows(block, native, self.tensors, first)
            rounded = quantize(block)
            values[part], scales[part] = rounded.values, rounded.scales
        return Int8Matrix(values, scales)
