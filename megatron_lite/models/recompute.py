"""Activation recomputation: the backward pass computes whole layers again, or the cheap parts of each layer."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from megatron_lite.parallel.tensor import Made
from megatron_lite.settings.options import Recompute


def keep(make: Made, x: Tensor, use: Made) -> Tensor:
    """use(make(x)) without recomputation: autograd decides what to keep."""
    return use(make(x))


def make_again(make: Made, x: Tensor, use: Made) -> Tensor:
    """use(make(x)), but `use` keeps x for its backward pass instead of make(x). torch.compile makes its own choice.

    If autograd would keep a view of all of make(x), the recomputed tensor gets the view's strides, because products may
    keep transposed views. A result that is not contiguous is kept.
    """
    made = make(x)
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not made.is_contiguous():
        return use(made)
    # These values identify make(x) among the tensors that autograd saves.
    address, count, dtype, version = made.data_ptr(), made.numel(), made.dtype, made._version

    def pack(saved: Tensor) -> Any:
        whole = saved.data_ptr() == address and saved.numel() == count and saved.dtype == dtype
        # A tensor that was changed in place is kept: recomputation would not repeat the change.
        changed = saved._version != version
        return (
            _Again(make, x.detach(), saved.shape, saved.stride())
            if whole and not changed
            else saved
        )

    with saved_tensors_hooks(
        pack, lambda packed: packed() if isinstance(packed, _Again) else packed
    ):
        return use(made)


@dataclass(frozen=True)
class _Again:
    """Stands for a tensor that autograd would have kept."""

    make: Made
    x: Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __call__(self) -> Tensor:
        with torch.no_grad():
            return self.make(self.x).contiguous().as_strided(self.shape, self.strides)


def recomputed(function: Callable[..., Any], *inputs: Tensor, **others: Any) -> Any:
    """function(*inputs, **others), of which only the inputs are kept; the backward pass computes it again.

    The inside of a scan in torch takes many times the memory of its inputs. A package's kernel keeps its inputs alone, and
    needs no recomputation. function: without random numbers.
    """
    if not torch.is_grad_enabled():
        return function(*inputs, **others)
    how: Any = {"use_reentrant": False, "preserve_rng_state": False}
    return checkpoint(function, *inputs, **how, **others)


State = TypeVar("State")
"""The data between two layers: a tensor, or a tuple of tensors."""


def run_layers(
    layers: Sequence[nn.Module],
    x: State,
    run: Callable[[nn.Module, State], State],
    settings: Recompute,
) -> State:
    """Run x through all layers. The inside of some groups of layers is recomputed in the backward pass."""
    for group, again in _groups(layers, settings):
        if again and torch.is_grad_enabled():
            # Dropout computes its seed each time, so no random state has to be kept.
            x = checkpoint(_through, group, x, run, use_reentrant=False, preserve_rng_state=False)
        else:
            x = _through(group, x, run)
    return x


def _through(
    layers: Sequence[nn.Module], x: State, run: Callable[[nn.Module, State], State]
) -> State:
    for layer in layers:
        x = run(layer, x)
    return x


def _groups(
    layers: Sequence[nn.Module], settings: Recompute
) -> Iterator[tuple[Sequence[nn.Module], bool]]:
    if settings.granularity != "full":
        yield layers, False
    elif settings.method == "uniform":
        for first in range(0, len(layers), settings.layers):
            yield layers[first : first + settings.layers], True
    else:
        for layer in layers[: settings.layers]:
            yield [layer], True
        yield layers[settings.layers :], False
