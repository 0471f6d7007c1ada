"""Products by Transformer Engine's linear layer, if it is installed and no other rank shares the matrix.

Transformer Engine computes in FP8 inside its autocast. When the outermost autocast of a forward pass ends, Transformer
Engine reduces the largest elements of all matrices over the autocast's group, or over the world if there is no group.
Other pipeline stages are not at the end of a pass then. So `Autocast` gives the group of one stage's ranks.

Tests hold our calls against the signatures of Transformer Engine 1.11 to 2.20. `--transformer-impl local` uses torch's
products.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megaconv.errors import UsageError
from megatron_lite.products.accumulating import gradient_sum_of
from megatron_lite.products.product import PLAIN, Product
from megatron_lite.settings.options import FP8

ROWS = 32
"""The number of tokens is padded to a multiple of this, which suits every recipe."""
RECIPES = {
    "delayed": "DelayedScaling",
    "tensorwise": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
}
"""Transformer Engine's class of each recipe."""


@cache
def has_transformer_engine() -> bool:
    """Return whether Transformer Engine is installed."""
    return find_spec("transformer_engine") is not None


def require_loaded() -> None:
    """Raise UsageError if Transformer Engine is installed without its part for PyTorch, or made for another torch."""
    try:
        import_module("transformer_engine.pytorch")
    except Exception as error:  # also AssertionError and RuntimeError, by its versions
        raise UsageError(
            f"Transformer Engine is installed, but transformer_engine.pytorch can't be loaded: {error}; install "
            "transformer-engine[pytorch] for this torch, or take --transformer-impl local"
        ) from error


class TransformerEngineProduct(Product):
    """The products of one matrix, inside an Autocast. The layer holds the amax histories and scales."""

    def __init__(self, options: FP8) -> None:
        self._weight_gradient_in_fp8 = options.weight_gradient
        self._layer: Any = None

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if self._weight_gradient_in_fp8:
            made = self._by_layer(rows, weight)
        else:
            frozen = nn.Parameter(weight.detach(), requires_grad=False)
            made = self._by_layer(rows, frozen)
            made = _WithWeightGradient.apply(made, rows, weight)  # type: ignore[no-untyped-call]
        made = made.view(*x.shape[:-1], weight.shape[0])
        return made if bias is None else made + bias

    def _by_layer(self, rows: Tensor, weight: Tensor) -> Tensor:
        """rows [rows, in], weight [out, in] -> [rows, out]."""
        total = gradient_sum_of(weight)
        fused = total is not None and total.lasting
        if self._layer is None:
            self._layer = _linear(weight, fused=fused)
        if fused and torch.is_grad_enabled():
            assert total is not None
            total.give_to_library(weight)
        # The bucket's parameter, so that its gradient hooks stay.
        self._layer.weight = weight
        # At least one padded block: a layer that is never called on one rank would be missing from that rank's
        # reduction. An expert may have no rows.
        missing = ROWS if not len(rows) else -len(rows) % ROWS
        filled = F.pad(rows, (0, 0, 0, missing))
        made: Tensor = self._layer(filled)
        return made[: len(rows)]


def _linear(weight: Tensor, *, fused: bool) -> Any:
    """Return Transformer Engine's layer for a weight [out, in], without memory.

    fused: whether its product adds the weight's gradient to the weight's main_grad.
    """
    import transformer_engine.pytorch as te

    out, width = weight.shape
    how: Any = {"params_dtype": weight.dtype, "device": "meta"}
    return te.Linear(width, out, bias=False, fuse_wgrad_accumulation=fused, **how)


class _WithWeightGradient(torch.autograd.Function):
    """Returns `made` and computes the weight's gradient in the dtype of the tensors (--no-fp8-wgrad)."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.gradient_sum = gradient_sum_of(weight)
        return made.view_as(made)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        if not ctx.needs_input_grad[2]:
            return grad, None, None
        return grad, None, PLAIN.weight_gradient(grad, rows, weight, ctx.gradient_sum)


@dataclass(frozen=True)
class Autocast:
    """The regions of a step in which products are FP8: the passes of one chunk."""

    recipe: Any
    """Transformer Engine's recipe."""
    group: ProcessGroup | None
    """The ranks of a stage; None if there is one."""

    def forward_pass(self) -> AbstractContextManager[Any]:
        """Return the region of a forward pass. Its end updates the scales if gradients are on."""
        return _region(self.recipe, self.group)

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        """Return the region of a backward pass, for layers that are recomputed. It does not update forward scales."""
        region = _region(self.recipe, self.group)
        region.__enter__()
        try:
            yield
        finally:
            with torch.no_grad():  # without gradients, the end of a region reduces nothing
                region.__exit__(None, None, None)


def make_autocast(options: FP8, group: ProcessGroup | None) -> Autocast:
    """Return the regions for these options. group: the ranks of a stage.

    Raises UsageError if the installed version lacks the recipe.
    """
    return Autocast(_recipe(options, reduces=group is not None), group)


def _region(recipe: Any, group: ProcessGroup | None) -> AbstractContextManager[Any]:
    """Return Transformer Engine's context manager, by its new name (since 2.9) or its old one."""
    import transformer_engine.pytorch as te

    region: AbstractContextManager[Any]
    if hasattr(te, "autocast"):
        region = te.autocast(enabled=True, recipe=recipe, amax_reduction_group=group)
    else:
        region = te.fp8_autocast(enabled=True, fp8_recipe=recipe, fp8_group=group)
    return region


def _recipe(options: FP8, *, reduces: bool) -> Any:
    """Return Transformer Engine's recipe object. reduces: whether other ranks' largest elements count."""
    from transformer_engine.common import recipe

    name = RECIPES[options.recipe]
    kind = getattr(recipe, name, None)
    if kind is None:
        raise UsageError(
            f"--fp8-recipe {options.recipe} needs a newer Transformer Engine: the installed one has no {name}. "
            "Install a newer one, or take --fp8-recipe delayed"
        )
    form = recipe.Format.HYBRID if options.format == "hybrid" else recipe.Format.E4M3
    if options.recipe != "delayed":
        return kind(fp8_format=form)
    return kind(
        margin=options.margin,
        fp8_format=form,
        amax_history_len=options.history,
        amax_compute_algo=options.algorithm,
        reduce_amax=reduces,
    )
