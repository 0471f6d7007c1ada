"""Samples of examples with images. A sample has the numbers of its images, and the positions of its tokens."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_lite.data.finetuning.dataset import FinetuneDataset
from megatron_lite.data.finetuning.pair_dataset import PairDataset
from megatron_lite.data.images.places import Images
from megatron_lite.data.samples import Dataset, Sample

READ_AT_ONCE = 4
"""Number of samples whose images a rank reads at the same time. Decoding and scaling leave Python's lock to other threads."""


class ImageSample(NamedTuple):
    """A sample with images; other fields as in data.samples.Sample."""

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    loss_mask: NDArray[np.float32]
    position_ids: NDArray[np.int64]
    documents: NDArray[np.int32]
    images: NDArray[np.int64]
    """The numbers of the images in order, filled up with NO_IMAGE to the most images of a sample."""
    axes: NDArray[np.int64]
    """[seq_length, 3]: frame, row and column of each token; [0, 3] for a model without these positions."""


class ImageDataset:
    """The samples of another dataset, with their images."""

    def __init__(self, packed: FinetuneDataset, images: Images) -> None:
        self._packed, self._images = packed, images
        self._most = max((len(self._numbers(index)) for index in range(len(packed))), default=0)
        """The most images of a sample."""

    def __len__(self) -> int:
        return len(self._packed)

    @property
    def epoch_samples(self) -> int:
        """See FinetuneDataset."""
        return self._packed.epoch_samples

    def __getitem__(self, index: int) -> ImageSample:
        sample = self._packed[index]
        images = self._images.taken(self._numbers(index), self._most)
        return ImageSample(*sample, images, self._axes(index, sample))

    def _numbers(self, index: int) -> list[int]:
        """Return the numbers of a sample's images."""
        return [
            image.number
            for part in self._packed.parts(index)
            for image in self._images.within(part.first, part.last - 1)
        ]

    def _axes(self, index: int, sample: Sample) -> NDArray[np.int64]:
        if self._images.reader.axes is None:
            return np.zeros((0, 3), np.int64)
        # Unused positions count as a text does.
        axes = np.repeat(sample.position_ids[:, None], 3, axis=1)
        for part in self._packed.parts(index):
            axes[part.place] = self._images.positions(part.first, part.last - 1)
        return axes


def read_at_once(dataset: Dataset) -> int:
    """Return the number of samples that a rank reads at the same time."""
    has_images = isinstance(dataset, PairDataset) and dataset.images is not None
    return READ_AT_ONCE if has_images or isinstance(dataset, ImageDataset) else 1
