"""Activation offload: the GPU copies what a layer keeps for its backward pass to pinned main memory, and back.

Copies have a stream of their own. The forward pass may be two layers ahead of them, so that at most two layers'
activations wait. In the backward pass, a layer's activations come back while the following layer computes.

The GPU's memory belongs to the stream that computes. It is freed only after that stream has waited for the copy, so it
is reused at once.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

LEAST = 1 << 18
"""Elements of the smallest tensor that is offloaded. Transformer Engine has the same limit."""
AHEAD = 2
"""Layers whose copies to main memory may be under way."""

_CUDA: Any = torch.cuda  # its classes have no type hints


class OfLayer:
    """The tensors that one layer keeps for its backward pass of one microbatch."""

    def __init__(self, stream: Any, before: "OfLayer | None") -> None:
        """stream: of the copies. before: the layer whose backward pass follows."""
        self._stream, self._before = stream, before
        self._sources: list[Tensor] = []
        """The tensors on the GPU, until their copies are complete."""
        self._copies: list[Tensor] = []
        """The copies in main memory."""
        self._numbers: dict[tuple[Any, ...], int] = {}
        """The number of the copy of each tensor that the layer keeps. Several operations may keep the same tensor."""
        self._copied: Any = None
        self._back: list[Tensor] | None = None
        self._returned: Any = None

    def keep(self, saved: Tensor) -> int:
        """Start to copy a tensor to main memory. Returns its number."""
        name = saved.data_ptr(), saved.shape, saved.stride(), saved.dtype, saved._version
        if name in self._numbers:
            return self._numbers[name]
        copy = torch.empty_like(saved, device="cpu", pin_memory=True)
        self._stream.wait_stream(_CUDA.current_stream())
        with _CUDA.stream(self._stream):
            copy.copy_(saved, non_blocking=True)
        number = self._numbers[name] = len(self._copies)
        self._sources.append(saved)
        self._copies.append(copy)
        return number

    def end_forward(self) -> None:
        """Mark that the layer keeps no more tensors."""
        self._copied = self._stream.record_event()

    def free(self) -> None:
        """Free the tensors on the GPU. The work that follows waits until they are copied."""
        if self._sources:
            _CUDA.current_stream().wait_event(self._copied)
            self._sources.clear()
            self._numbers.clear()  # their addresses may have other contents from now on

    def fetch(self) -> None:
        """Start to copy the tensors back."""
        if self._back is not None:
            return
        if self._sources:
            self._keep_sources()
            return
        device = self._stream.device
        self._back = [torch.empty_like(copy, device=device) for copy in self._copies]
        # The new memory may be in use by earlier work.
        self._stream.wait_stream(_CUDA.current_stream())
        with _CUDA.stream(self._stream):
            for tensor, copy in zip(self._back, self._copies, strict=True):
                tensor.copy_(copy, non_blocking=True)
        self._returned = self._stream.record_event()

    def _keep_sources(self) -> None:
        """Use the tensors on the GPU themselves: no later layer has freed them."""
        current = _CUDA.current_stream()
        current.wait_event(self._copied)  # their memory may be reused as soon as they are freed
        self._back, self._sources = self._sources, []
        self._copies.clear()
        self._returned = current.record_event()

    def take(self, number: int) -> Tensor:
        """Return a tensor on the GPU again, and start to fetch those of the layer before."""
        self.fetch()
        assert self._back is not None
        _CUDA.current_stream().wait_event(self._returned)
        before, self._before = self._before, None  # it is freed after its own backward pass
        if before is not None:
            before.fetch()
        return self._back[number]


class Offload:
    """Offloads the activations of a stack's first layers."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._stream: Any = None

    def applies(self, x: Tensor) -> bool:
        """Return whether activations are offloaded in a pass with this input: in training, on a GPU."""
        return self._layers > 0 and x.is_cuda and torch.is_grad_enabled()

    def run(
        self,
        layers: Sequence[nn.Module],
        x: Tensor,
        run: Callable[[nn.Module, Tensor], Tensor],
        stay: Sequence[Tensor],
    ) -> Tensor:
        """Run x through all layers. stay: tensors of all layers, which stay on the GPU."""
        if self._stream is None:
            self._stream = _CUDA.Stream(x.device)
        kept: list[OfLayer] = []
        for number, layer in enumerate(layers):
            if number >= AHEAD and number - AHEAD < len(kept):
                kept[number - AHEAD].free()
            if number < self._layers:
                before = kept[-1] if kept else None
                own = OfLayer(self._stream, before)
                x = _offloaded(layer, x, run, own, stay)
                kept.append(own)
            else:
                x = run(layer, x)
            if number == len(kept) and kept and x.requires_grad:
                # This layer's backward pass begins: it hides the copies of the layer before.
                x.register_hook(_fetching(kept[-1]))  # type: ignore[no-untyped-call]
        return x


def _fetching(own: OfLayer) -> Callable[[Tensor], None]:
    # autograd keeps the hook until the whole graph is freed, and so would keep the layer.
    once = [own]

    def fetch(_: Tensor) -> None:
        if once:
            once.pop().fetch()

    return fetch


def _offloaded(
    layer: nn.Module,
    x: Tensor,
    run: Callable[[nn.Module, Tensor], Tensor],
    own: OfLayer,
    stay: Sequence[Tensor],
) -> Tensor:
    """Run a layer whose saved tensors are offloaded. stay: see Offload.run."""
    staying = set[int]()

    def pack(saved: Tensor) -> Tensor | int:
        if not staying:  # sharded parameters have memory only while the layer runs
            staying.update(_addresses(layer, stay))
        is_offloaded = (
            saved.is_cuda
            and saved.numel() >= LEAST
            and 0 not in saved.stride()
            and saved.untyped_storage().data_ptr() not in staying
        )
        return own.keep(saved.detach()) if is_offloaded else saved

    def unpack(packed: Tensor | int) -> Tensor:
        return own.take(packed) if isinstance(packed, int) else packed

    with saved_tensors_hooks(pack, unpack):
        made = run(layer, x)
    own.end_forward()
    return made


def _addresses(layer: nn.Module, stay: Sequence[Tensor]) -> set[int]:
    """Return the addresses of the memory that is not offloaded: parameters, and tensors of all layers."""
    return {each.untyped_storage().data_ptr() for each in _staying(layer, stay)}


def _staying(layer: nn.Module, stay: Sequence[Tensor]) -> Iterator[Tensor]:
    yield from layer.parameters()
    yield from layer.buffers()
    yield from stay
