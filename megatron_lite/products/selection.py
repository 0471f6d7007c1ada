"""Selects the matrices that are multiplied in FP8: those of layers, but not the head, the embedding and the router."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.distributed import ProcessGroup

from megaconv.errors import LayoutError, UsageError
from megatron_lite.products.fp8 import KINDS, MULTIPLE, DelayedProduct
from megatron_lite.products.product import PLAIN, Product
from megatron_lite.products.transformer_engine import (
    Autocast,
    TransformerEngineProduct,
    has_transformer_engine,
    make_autocast,
    require_loaded,
)
from megatron_lite.settings.options import FP8

MXFP8_GPUS = (10, 11)
"""Major numbers of compute capabilities with MXFP8, from Transformer Engine's check_mxfp8_support."""
OLDEST_FP8_GPU = (8, 9)
"""The first compute capability with FP8, from torch's _scaled_mm and Transformer Engine's check_fp8_support."""
OLDEST_BLOCKWISE_GPU = 9
"""The first major number with scales of blocks, from Transformer Engine's check_fp8_block_scaling_support."""


def use_fp8(module: nn.Module, options: FP8 | None, *, layer: int, layers: int, tp: int) -> None:
    """Put FP8 products into the matrices of a layer if the options select it. Raises LayoutError for an unsuitable shape."""
    if options is None or layer < options.first_in_bf16 or layer >= layers - options.last_in_bf16:
        return
    for name, matrix in module.named_modules():
        if getattr(matrix, "product", None) is not PLAIN:
            continue
        shape, multiple = tuple(matrix.get_parameter("weight").shape), MULTIPLE[options.recipe]
        if any(side % multiple for side in shape):
            raise LayoutError(
                f"--fp8-recipe {options.recipe} takes matrices whose sides on each rank are multiples of {multiple}, "
                f"but layers' {name} is {shape[0]} x {shape[1]} at tp = {tp}"
            )
        setattr(matrix, "product", _product(options, tp))  # noqa: B010


def fp8_of_device(options: FP8 | None, device: torch.device) -> FP8 | None:
    """Return the options for products on the run's device. Transformer Engine computes on a GPU only."""
    if options is None or device.type == "cuda":
        return options
    return replace(options, transformer_engine=False)


def _product(options: FP8, tp: int) -> Product:
    if uses_transformer_engine(options, tp):
        return TransformerEngineProduct(options)
    return KINDS[options.recipe](options)


def uses_transformer_engine(options: FP8, tp: int) -> bool:
    """Return whether Transformer Engine computes the products. options: those of the device."""
    return options.transformer_engine and tp == 1 and has_transformer_engine()


def check_device(options: FP8 | None, device: torch.device, tp: int) -> None:
    """Raise UsageError if the recipe has no kernel on this device, or if Transformer Engine can't be loaded."""
    if options is None or device.type != "cuda":
        return
    recipe = f"--fp8-recipe {options.recipe}"
    engine = uses_transformer_engine(options, tp)
    if engine:
        require_loaded()
    elif options.recipe in ("blockwise", "mxfp8"):
        raise UsageError(
            f"{recipe} on a GPU needs Transformer Engine, at tp = 1; take tensorwise or delayed"
        )
    major, minor = torch.cuda.get_device_capability(device)
    has = f"but this one has {major}.{minor}"
    if (major, minor) < OLDEST_FP8_GPU:
        raise UsageError(
            f"products in FP8 need a GPU of compute capability 8.9 (Ada, Hopper) or newer, {has}; leave --fp8-format out"
        )
    if options.recipe == "mxfp8" and major not in MXFP8_GPUS:
        raise UsageError(
            f"{recipe} needs a GPU of compute capability 10 or 11 (Blackwell), {has}; take blockwise, tensorwise or delayed"
        )
    if options.recipe == "blockwise" and major < OLDEST_BLOCKWISE_GPU:
        raise UsageError(
            f"{recipe} needs a GPU of compute capability 9.0 (Hopper) or newer, {has}; take tensorwise or delayed"
        )


def autocast_of(
    chunks: Sequence[nn.Module], options: FP8 | None, group: ProcessGroup | None
) -> Autocast | None:
    """Return the regions for Transformer Engine's products, or None if these chunks have none.

    group: the ranks that compute the same layers from other tokens. At tp = 1, these are all ranks of a stage.
    """
    modules = (module for chunk in chunks for module in chunk.modules())
    products = (getattr(module, "product", None) for module in modules)
    if options is None or not any(isinstance(each, TransformerEngineProduct) for each in products):
        return None
    return make_autocast(options, group)


def delayed_products(chunk: nn.Module) -> Iterator[tuple[str, DelayedProduct]]:
    """Yield the products with delayed scaling by the names of their matrices."""
    for name, module in chunk.named_modules():
        product = getattr(module, "product", None)
        if isinstance(product, DelayedProduct):
            yield name, product
