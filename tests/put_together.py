"""A native tensor from canonical ones, in plain numpy, to compare with what real software wrote."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from formats import safetensors, torch_zip
from formats.tensor import ITEMSIZE, LazyTensor, matrix_shape, read_tensor
from megaconv.checkpoint import Checkpoint
from megaconv.families import families
from megaconv.model.ir import Key
from megaconv.model.layout import Chunk, Layout
from megaconv.model.naming import HF
from megaconv.model.natives import NativeTensor, native_tensors
from megaconv.model.training import EXP_AVG, EXP_AVG_SQ, MASTER


def elements(tensor: LazyTensor) -> np.ndarray[Any, Any]:
    """The content of a tensor as a matrix of raw elements."""
    return read_tensor(tensor).view(np.dtype((np.void, ITEMSIZE[tensor.dtype])))


def put_together(native: NativeTensor, tensors: Mapping[str, LazyTensor]) -> np.ndarray[Any, Any]:
    """A native tensor from the canonical ones, rectangle by rectangle."""
    first = elements(tensors[next(iter(native.parts))])
    made = np.empty(native.view or matrix_shape(native.shape), first.dtype)
    for name, regions in native.parts.items():
        whole = elements(tensors[name])
        for region in regions:
            piece = whole[region.box.row0 : region.box.row1, region.box.col0 : region.box.col1]
            piece = piece.T if region.transposed else piece
            made[
                region.row : region.row + piece.shape[0], region.col : region.col + piece.shape[1]
            ] = piece
    return made


def assert_holds(checkpoint: Checkpoint, expected_file: Path) -> None:
    """Check that a checkpoint has every tensor of a file with Hugging Face names, bit for bit, and no other."""
    expected = safetensors.read(expected_file)
    config = checkpoint.config
    whole = Chunk(0, 0, 0, config.layer_count, is_first=True, is_last=True)
    rows = families()[config.family].rows
    seen = set()
    for native in native_tensors(rows, config, HF, Layout(), 0, whole, config.vocab):
        if native.copy:
            continue
        wanted = expected[native.name]
        assert {checkpoint.tensors[name].dtype for name in native.parts} == {wanted.dtype}
        assert native.shape == wanted.shape, native.name
        assert np.array_equal(put_together(native, checkpoint.tensors), elements(wanted)), (
            native.name
        )
        seen.add(native.name)
    assert seen == set(expected)


EXPECTED_SLOTS = {"fp32_param": MASTER, "fp32": MASTER, EXP_AVG: EXP_AVG, EXP_AVG_SQ: EXP_AVG_SQ}
"""The beginning of a name in files of expected tensors -> ours."""


def assert_holds_optimizer(checkpoint: Checkpoint, expected_file: Path) -> None:
    """Check that a checkpoint has every optimizer tensor of such a file, bit for bit. An fp32 weight is its own
    master."""
    config = checkpoint.config
    whole = Chunk(0, 0, 0, config.layer_count, is_first=True, is_last=True)
    rows = families()[config.family].rows
    natives = [
        n
        for n in native_tensors(rows, config, HF, Layout(), 0, whole, config.vocab)
        if n.copy is None
    ]
    expected = safetensors.read(expected_file)
    words = {name.partition(".")[0] for name in expected} & set(EXPECTED_SLOTS)
    for native in natives:
        for word in words:
            held = {
                name: checkpoint.slots.get(Key(name, EXPECTED_SLOTS[word])) for name in native.parts
            }
            parts = {
                name: checkpoint.tensors[name] if tensor is None else tensor
                for name, tensor in held.items()
            }
            name = f"{word}.{native.name}"
            assert np.array_equal(put_together(native, parts), elements(expected[name])), name
    assert len(words) * len(natives) == len(
        [name for name in expected if name.partition(".")[0] in words]
    )
    assert {key.name for key in checkpoint.slots} == set(checkpoint.tensors)


def rank_files(root: Path) -> dict[str, Any]:
    """path below the root -> what torch saved there."""
    return {
        str(path.relative_to(root)): torch_zip.read(path)
        for path in sorted(root.glob("*/mp_rank_*/model_optim_rng.pt"))
    }
