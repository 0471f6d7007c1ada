"""Products by Transformer Engine's own linear layer, where it is installed and no other rank shares the matrix.

Written after its documentation; never run, for want of a GPU. `--transformer-impl local` keeps to torch's products.
"""

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatron_lite.parallel.product import Product
from megatron_lite.settings.options import FP8

ROWS = 32
"""Tokens are filled up to a multiple of this, for any recipe."""


@cache
def has_transformer_engine() -> bool:
    return find_spec("transformer_engine") is not None


class TransformerEngineProduct(Product):
    """Of one matrix. Amax histories and scales are the layer's own."""

    def __init__(self, options: FP8) -> None:
        self._options = options
        self._layer: Any = None

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        import transformer_engine.pytorch as te

        if self._layer is None:
            out, width = weight.shape
            self._layer = te.Linear(width, out, bias=False, params_dtype=weight.dtype, device="meta")
        self._layer.weight = weight  # the bucket's, whose gradient hooks it keeps
        rows = x.reshape(-1, x.shape[-1])
        filled = F.pad(rows, (0, 0, 0, -len(rows) % ROWS))
        with te.fp8_autocast(enabled=True, fp8_recipe=_recipe(self._options)):
            made: Tensor = self._layer(filled)
        made = made[: len(rows)].view(*x.shape[:-1], weight.shape[0])
        return made if bias is None else made + bias


@cache
def _recipe(options: FP8) -> Any:
    """Transformer Engine's object of the same name."""
    from transformer_engine.common import recipe

    form = recipe.Format.HYBRID if options.format == "hybrid" else recipe.Format.E4M3
    if options.recipe == "delayed":
        return recipe.DelayedScaling(
            margin=options.margin, fp8_format=form, amax_history_len=options.history,
            amax_compute_algo=options.algorithm, override_linear_precision=(False, False, not options.weight_gradient),
        )  # fmt: skip
    kinds = {
        "tensorwise": "Float8CurrentScaling",
        "blockwise": "Float8BlockScaling",
        "mxfp8": "MXFP8BlockScaling",
    }
    return getattr(recipe, kinds[options.recipe])(fp8_format=form)
