"""The images in the rows of a model: on every rank, the vectors of their tokens, and the positions of rows with images."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_lite.data.images.kinds import Joint
from megatron_lite.data.images.positions import patches
from megatron_lite.data.images.reader import ImageReader
from megatron_lite.data.images.written import Grid
from megatron_lite.engine import Engine
from megatron_lite.inference.gallery import Picture
from megatron_lite.inference.image_tokens import FIRST, images_of, place_of, runs_of
from megatron_lite.inference.slots import Feed
from megatron_lite.inference.turns import Turn, send
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.pictures import Pictures, joint_of
from megatron_lite.parallel import comm

MOST_VECTORS = 1 << 16
"""Vectors that a rank keeps. Rank 0 gives an image that a rank has no longer to all ranks again."""


class Seen(NamedTuple):
    """The input of a pass."""

    tokens: Tensor
    """int64 [rows, tokens], with a token of the vocabulary in the places of images."""
    pictures: Pictures | None = None
    pair_positions: Tensor | None = None
    joint: Tensor | None = None
    joint_in_windows: bool = False
    """See models.batch.Microbatch."""

    def microbatch(self, positions: Tensor) -> Microbatch:
        """Return the microbatch. positions: the places in the cache."""
        return Microbatch(
            self.tokens,
            self.tokens,
            positions=positions,
            pair_positions=self.pair_positions,
            pictures=self.pictures,
            joint=self.joint,
            joint_in_windows=self.joint_in_windows,
        )


class Traits(NamedTuple):
    """The properties of a model that decide on its input of images."""

    axes_of_pairs: Tensor | None
    """See objectives.image_feeder.ImageFeeder."""
    stand_in: int
    """The token for which layers with embeddings of their own take the parts of images."""
    joint: Joint


def traits_of(reader: ImageReader, axes_of_pairs: Tensor | None) -> Traits:
    """Return the traits of a model. axes_of_pairs: see Traits."""
    kind = reader.require_kind()
    return Traits(axes_of_pairs, kind.stand_in(reader.config) or 0, kind.joint(reader.config))


class Pictured(Protocol):
    """The images of requests."""

    def picture(self, number: int) -> Picture:
        """Return an image with its vectors. Called on rank 0."""
        ...


class _Image(NamedTuple):
    patches: NDArray[np.int64]
    """[tokens, 3]: frame, row and column of each part."""
    vectors: Tensor
    """[1 + further, tokens, hidden]: see models.pictures.Pictures."""


class ShownImages:
    """The images of one rank. All ranks get the same ones, in the same order."""

    def __init__(self, gallery: Pictured, engine: Engine, length: int, traits: Traits) -> None:
        """length: of the longest row."""
        self._gallery, self._traits = gallery, traits
        self._grid, self._device = engine.grid, engine.grid.device
        self._hidden, self._dtype = engine.config.hidden, engine.dtype
        self._length, self._axes = length, traits.axes_of_pairs
        self._images: dict[int, _Image] = {}
        self._positions: dict[int, NDArray[np.int64]] = {}
        """By slot, for rows with an image: [length, 3], frame, row and column of each token."""

    def show_missing(self, feeds: Sequence[Feed]) -> None:
        """Give all ranks the images of the feeds that they don't have. Called on rank 0."""
        for feed in feeds:
            for number in images_of(feed.tokens):
                if number not in self._images:
                    self._show(number)

    def _show(self, number: int) -> None:
        picture = self._gallery.picture(number)
        grid, vectors = picture.written.grid, picture.vectors.to(self._device, self._dtype)
        send([Turn.SHOW, number, *grid, len(vectors)], self._grid)
        self._take(number, grid, vectors)

    def receive(self, number: int, frames: int, rows: int, columns: int, layers: int) -> None:
        """Take an image from rank 0. Called on other ranks, with the numbers of its turn."""
        grid = Grid(frames, rows, columns)
        shape = (layers, grid.tokens, self._hidden)
        self._take(number, grid, torch.empty(shape, dtype=self._dtype, device=self._device))

    def _take(self, number: int, grid: Grid, vectors: Tensor) -> None:
        """Add an image with rank 0's vectors. Collective."""
        world = self._grid.group("world")
        if world is not None:
            comm.broadcast(vectors, 0, world)
        self._images[number] = _Image(patches(grid), vectors)

    def drop_others(self, feeds: Sequence[Feed]) -> None:
        """Drop the images that were used least recently, if there are too many, and none of these feeds.

        feeds: of all replicas, so that all ranks drop the same images.
        """
        used = [number for feed in feeds for number in images_of(feed.tokens)]
        for number in used:
            self._images[number] = self._images.pop(number)  # to the end
        spare = sum(each.vectors.shape[1] for each in self._images.values()) - MOST_VECTORS
        for number in [each for each in self._images if each not in used]:
            if spare <= 0:
                return
            spare -= self._images.pop(number).vectors.shape[1]

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the positions of each source slot to its target."""
        found = [self._positions.get(source) for source in sources]
        for target, positions in zip(targets, found, strict=True):
            self._positions.pop(target, None)
            if positions is not None:
                self._positions[target] = positions.copy()

    def see(self, feeds: Sequence[Feed], tokens: Tensor) -> Seen:
        """Return the input of a pass. tokens: of the feeds, int64 [feeds, longest], on the CPU."""
        of_images = tokens >= FIRST
        lengths = torch.tensor([len(feed.tokens) for feed in feeds])
        # A token of padding repeats the last one, and may not be a part of its image.
        places = of_images & (torch.arange(tokens.shape[1]) < lengths.unsqueeze(1))
        positions = self._positions_of(feeds, tokens.shape[1])
        pairs = None
        if positions is not None and self._axes is not None:
            pairs = positions.to(self._device)[..., self._axes]
        known = tokens.masked_fill(of_images, self._traits.stand_in).to(self._device)
        if not bool(places.any()):
            return Seen(known, None, pairs)
        joint = self._traits.joint
        return Seen(
            known,
            self._pictures(tokens, places),
            pairs,
            None if joint is Joint.NOWHERE else joint_of(places).to(self._device),
            joint_in_windows=joint is Joint.IN_WINDOWS,
        )

    def _pictures(self, tokens: Tensor, places: Tensor) -> Pictures:
        ids = tokens[places].tolist()
        numbers = images_of(ids)
        vectors = [self._images[number].vectors for number in numbers]
        ends = accumulate(each.shape[1] for each in vectors)
        firsts = dict(zip(numbers, [0, *ends], strict=False))
        rows = [firsts[number] + part for number, part in map(place_of, ids)]
        own, *further = torch.cat(vectors, 1)[:, torch.tensor(rows, device=self._device)].unbind()
        return Pictures(places.to(self._device), own, tuple(further))

    def _positions_of(self, feeds: Sequence[Feed], longest: int) -> Tensor | None:
        """Return int64 [feeds, longest, 3]; None if no row has an image."""
        if self._axes is None:
            return None
        made = [self._continued(feed) for feed in feeds]
        if not any(feed.slot in self._positions for feed in feeds):
            return None
        # Nothing reads the result of padding.
        padded = [np.pad(each, ((0, longest - len(each)), (0, 0)), mode="edge") for each in made]
        return torch.from_numpy(np.stack(padded))

    def _continued(self, feed: Feed) -> NDArray[np.int64]:
        """Return [tokens, 3]: the positions of a feed. They are kept if the row has an image."""
        start, count = feed.start, len(feed.tokens)
        if start == 0:
            self._positions.pop(feed.slot, None)
        if feed.slot not in self._positions:
            if not images_of(feed.tokens):
                return _of_text(start, start + count)
            self._positions[feed.slot] = _of_text(0, self._length)
        kept = self._positions[feed.slot]
        at = kept[start - 1] if start else np.full(3, -1)
        place = start
        for run in runs_of(feed.tokens):
            end = place + len(run)
            kept[place:end] = self._after(at, run)
            at, place = kept[end - 1], end
        return kept[start : start + count]

    def _after(self, before: NDArray[np.int64], run: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return [tokens, 3]: the positions of a run behind another position. See data.images.positions.positions_of."""
        text: NDArray[np.int64] = np.full((1, 3), before.max() + 1)
        if run[0] < FIRST:
            return text + np.arange(len(run))[:, None]
        number, part = place_of(int(run[0]))
        places = self._images[number].patches
        base = text if part == 0 else before - places[part - 1]
        moved: NDArray[np.int64] = base + places[part : part + len(run)]
        return moved


def _of_text(first: int, end: int) -> NDArray[np.int64]:
    """Return [end - first, 3]: the positions of tokens without an image before them."""
    return np.repeat(np.arange(first, end)[:, None], 3, axis=1)
