"""Which matrices are multiplied in FP8: those of layers, each with a product of its own; neither head nor embedding nor router."""

from collections.abc import Iterator

import torch
from torch import nn

from megaconv.errors import LayoutError, UsageError
from megatron_lite.models.plan import Plan
from megatron_lite.parallel.fp8 import KINDS, MULTIPLE, DelayedProduct
from megatron_lite.parallel.product import PLAIN, Product
from megatron_lite.parallel.transformer_engine import TransformerEngineProduct, has_transformer_engine
from megatron_lite.settings.options import FP8


def use_fp8(module: nn.Module, plan: Plan, layer: int) -> None:
    """Put FP8 products into the matrices of a layer that is to have them. Raises LayoutError for one that can't."""
    options = plan.options.fp8
    if options is None or layer < options.first_in_bf16 or layer >= plan.config.layer_count - options.last_in_bf16:
        return
    for name, matrix in module.named_modules():
        if getattr(matrix, "product", None) is not PLAIN:
            continue
        shape, multiple = tuple(matrix.get_parameter("weight").shape), MULTIPLE[options.recipe]
        if any(side % multiple for side in shape):
            raise LayoutError(
                f"--fp8-recipe {options.recipe} takes matrices whose sides on each rank are multiples of {multiple}, "
                f"but layers' {name} is {shape[0]} x {shape[1]} at tp = {plan.ranks.size}"
            )
        setattr(matrix, "product", _product(options, plan.ranks.size))  # noqa: B010


def _product(options: FP8, tp: int) -> Product:
    if options.transformer_engine and tp == 1 and has_transformer_engine() and torch.cuda.is_available():
        return TransformerEngineProduct(options)
    return KINDS[options.recipe](options)


def check_device(options: FP8 | None, device: torch.device, tp: int) -> None:
    """Raises UsageError for a recipe that has no kernel on this device."""
    if options is None or device.type != "cuda" or options.recipe not in ("blockwise", "mxfp8"):
        return
    if not (options.transformer_engine and has_transformer_engine() and tp == 1):
        raise UsageError(
            f"--fp8-recipe {options.recipe} on a GPU needs Transformer Engine, at tp = 1; take tensorwise or delayed"
        )


def delayed_products(chunk: nn.Module) -> Iterator[tuple[str, DelayedProduct]]:
    """Those whose scales follow from the steps before, by the names of their matrices."""
    for name, module in chunk.named_modules():
        product = getattr(module, "product", None)
        if isinstance(product, DelayedProduct):
            yield name, product
