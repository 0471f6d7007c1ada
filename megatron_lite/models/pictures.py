"""Images in a pass: the vectors that an encoder made of them, in the places of the tokens that stand for them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lite.models import rng
from megatron_lite.models.moving import moved
from megatron_lite.parallel.tensor import TensorGroup


def joint_of(places: Tensor) -> Tensor:
    """Return int64 [batch, sequence]: the number of each image's tokens in their row, -1 for other tokens.

    places: bool [batch, sequence], the tokens of images. Other tokens are between two images.
    """
    before = places.roll(1, 1)
    before[:, 0] = False
    numbers = (places & ~before).cumsum(1) - 1
    return numbers.masked_fill(~places, -1)


def in_order(places: Tensor) -> Tensor:
    """Return int64 [batch, sequence]: the number of each image's token among all such tokens. Other tokens have any of these.

    places: bool [batch, sequence], the tokens of images.
    """
    numbers = places.flatten().cumsum(0) - 1
    return numbers.clamp(min=0).view_as(places)


class Pictures(NamedTuple):
    """The images of a microbatch, as an encoder gives them. Its output is not differentiated."""

    places: Tensor
    """Bool [batch, sequence]: the tokens that stand for images."""
    vectors: Tensor
    """[tokens, hidden]: what takes the place of their embeddings, row by row."""
    further: tuple[Tensor, ...] = ()
    """[tokens, hidden] each: what is added to their hidden states after the first layers (Qwen3-VL's deepstack)."""
    rows: Tensor | None = None
    """int64 [batch, sequence]: the row of `vectors` of each such token, if several have the same image; None: in their order."""

    def to(self, device: torch.device) -> "Pictures":
        """Return the images with their tensors on the device."""
        places, vectors, *further = (
            moved(each, device) for each in (self.places, self.vectors, *self.further)
        )
        rows = None if self.rows is None else moved(self.rows, device)
        return Pictures(places, vectors, tuple(further), rows)

    def of(self, sequences: slice) -> "Pictures":
        """Return the images of some of the sequences. The vectors are those of all."""
        rows = in_order(self.places) if self.rows is None else self.rows
        return self._replace(places=self.places[sequences], rows=rows[sequences])

    def spread(self) -> "Spread":
        """Return the images with a vector for each token."""
        places = self.places.unsqueeze(-1)

        def spread(vectors: Tensor) -> Tensor:
            if self.rows is not None:
                return vectors[self.rows].masked_fill(~places, 0)
            empty = vectors.new_zeros(*self.places.shape, vectors.shape[-1])
            return empty.masked_scatter(places, vectors)

        return Spread(places, spread(self.vectors), [spread(each) for each in self.further])


class Spread(NamedTuple):
    """Images with a vector for each token of whole rows: 0 for tokens that stand for none."""

    places: Tensor
    """Bool [batch, sequence, 1]."""
    vectors: Tensor
    """[batch, sequence, hidden]."""
    further: Sequence[Tensor]
    """[batch, sequence, hidden] each."""

    def ahead(self, ends: Tensor) -> "Spread":
        """Return the images of each token's next token. ends: bool [batch, sequence], the tokens without a next one."""
        places = self.places.roll(-1, 1).masked_fill(ends.unsqueeze(-1), value=False)
        return Spread(places, self.vectors.roll(-1, 1), ())

    def own(self, own: Callable[[Tensor], Tensor]) -> "PlacedPictures":
        """Return the part of a context-parallel rank. own: returns its part of a tensor [batch, sequence, ...]."""
        places, vectors, *further = (
            own(each).transpose(0, 1) for each in (self.places, self.vectors, *self.further)
        )
        return PlacedPictures(places, vectors, further)


class PlacedPictures:
    """The images of a rank's tokens."""

    def __init__(self, places: Tensor, vectors: Tensor, further: Sequence[Tensor]) -> None:
        """The fields of Spread, [sequence, batch, ...]."""
        self._places, self._vectors, self._further = places, vectors, further

    def embedded(self, x: Tensor, ranks: TensorGroup) -> Tensor:
        """Return the embeddings with the images. x [sequence (/ tp), batch, hidden]."""
        places, vectors = ranks.own_part(self._places), ranks.own_part(self._vectors)
        return torch.where(places, vectors.to(x.dtype), x)

    def detached(self, x: Tensor, ranks: TensorGroup) -> Tensor:
        """Return x without gradients of the tokens of images. x: see `embedded`."""
        return torch.where(ranks.own_part(self._places), x.detach(), x)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after(self, at: rng.At, x: Tensor, ranks: TensorGroup) -> Tensor:
        """Return the output of a layer with what the encoder adds there. x: see `embedded`. at: of the layer.

        It is not compiled, because each layer would be compiled anew.
        """
        if at.layer >= len(self._further):
            return x
        return x + ranks.own_part(self._further[at.layer]).to(x.dtype)
