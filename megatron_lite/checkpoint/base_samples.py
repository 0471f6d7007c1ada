"""Samples of a base's weights: a run of adapters records them, and its continuation compares those of its own base.

    {"layers.0.mlp.up.weight": "9f86d081884c7d65", …}      canonical name -> hash of a part of one row

A few matrices are enough, because training changes all of them. Values are rounded to bfloat16 before, so that a base in
float32 equals its copy in bfloat16.
"""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

import torch

from formats.lazy_numpy import np
from formats.tensor import ITEMSIZE, Box, LazyTensor, matrix_shape
from megaconv.errors import UsageError

TENSORS, ELEMENTS = 16, 1024
"""The most matrices that are sampled, and the most elements of each."""
_DIGITS = 16


def samples_of(weights: Mapping[str, LazyTensor]) -> dict[str, str]:
    """Return the samples of a model. weights: by canonical name."""
    matrices = sorted(
        name
        for name, tensor in weights.items()
        if ".layers." in f".{name}" and len(tensor.shape) > 1
    )
    step = -(-len(matrices) // TENSORS)
    return {name: _sample(weights[name]) for name in matrices[:: max(step, 1)]}


def check_same_base(
    weights: Mapping[str, LazyTensor], before: Mapping[str, str], version: Path, load: str
) -> None:
    """Compare a base with the recorded samples. Names that it lacks aren't compared. Raises UsageError for another base.

    before: empty for a run that has recorded none. version: the iteration of the run. load: the value of --load.
    """
    for name in weights.keys() & before.keys():
        if _sample(weights[name]) != before[name]:
            raise UsageError(
                f"--save {version.parent}: holds adapters of other weights than those of {load} now, such as {name}; restore the base, "
                f"or start a new run with --lora-load {version} and another --save"
            )


def _sample(tensor: LazyTensor) -> str:
    """Return the hash of elements of the middle row."""
    rows, columns = matrix_shape(tensor.shape)
    box = Box(rows // 2, rows // 2 + 1, 0, min(columns, ELEMENTS))
    content = np.empty((1, box.cols * ITEMSIZE[tensor.dtype]), np.uint8)
    tensor.read_into(box, content)
    values = torch.from_numpy(content).view(getattr(torch, tensor.dtype))
    rounded = values.to(torch.bfloat16).view(torch.uint8).numpy()
    return sha256(rounded.tobytes()).hexdigest()[:_DIGITS]
