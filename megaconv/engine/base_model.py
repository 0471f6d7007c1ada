"""The original of a model whose source holds a part of it only: what is missing is copied from its directory.

A run that trained a language model leaves out the image encoder that lay frozen beside it, one without multi-token
prediction those layers: a Hugging Face directory needs them all the same. Everything that is taken is named.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from formats.ceilings import SIDECAR_BYTES
from formats.output import Record
from formats.safetensors import SafetensorsLayout
from formats.tensor import ITEMSIZE, LazyTensor, Shape, row_blocks
from megaconv.engine.plan import BLOCK_BYTES
from megaconv.engine.quantized import dequantize
from megaconv.engine.weight_files import is_weights, read_directory
from megaconv.errors import TensorMismatch, UsageError
from megaconv.families.parts.hf_config import load_config
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.families.parts.language_model import INSIDE, put_inside
from megaconv.families.parts.whole_model import whole_config_json
from megaconv.hub import nothing_at


@dataclass(frozen=True)
class BaseModel:
    """An opened original."""

    directory: Path
    tensors: Mapping[str, LazyTensor]

    def fitting(self, natives: Mapping[str, Shape]) -> int:
        """How many of these tensors it has, in their shapes, by whichever name."""

        def has(name: str, shape: Shape) -> bool:
            return name in self.tensors and tuple(self.tensors[name].shape) == shape

        return max(sum(has(put_inside(name, *words), shape) for name, shape in natives.items()) for words in INSIDE)

    def names_of(self, natives: Mapping[str, Shape], optional: Collection[str] = ()) -> dict[str, str]:
        """What the original calls these tensors. Raises TensorMismatch unless it has all of them, in their shapes.

        optional: tensors that it may have as well.
        """
        begin, inside = max(INSIDE, key=lambda words: sum(put_inside(name, *words) in self.tensors for name in natives))
        names = {name: put_inside(name, begin, inside) for name in natives}
        for name, shape in natives.items():
            found = self.tensors.get(names[name])
            if found is None or tuple(found.shape) != shape:
                has = "no such tensor" if found is None else f"one of {list(found.shape)}"
                raise TensorMismatch(
                    f"{self.directory}: is not the original of this model, which has {name} {list(shape)}; it has {has}"
                )
        return names | {name: put_inside(name, begin, inside) for name in optional}

    def missing(self, held: Collection[str], ignored: Sequence[str]) -> dict[str, LazyTensor]:
        """What it has beside these; ignored: patterns of names that hold nothing of a model."""
        return {
            name: tensor
            for name, tensor in self.tensors.items()
            if name not in held and not any(re.fullmatch(pattern, name) for pattern in ignored)
        }

    def config_json(self, dtype: str) -> bytes:
        """Its config.json, with the dtype that the weights now have."""
        return whole_config_json(load_config(self.directory / CONFIG_NAME), dtype)

    def files(self) -> dict[str, Path]:
        """Everything that is neither weights nor config.json nor code, by file name."""
        found = (path for path in sorted(self.directory.iterdir()) if path.is_file() and path.name != CONFIG_NAME)
        return {
            path.name: path
            for path in found
            if not is_weights(path)
            and path.suffix != ".py"
            and path.name[0] != "."
            and path.stat().st_size <= SIDECAR_BYTES
        }


def open_base(directory: str | Path, dtype: str, *, overflow: bool) -> BaseModel:
    """dtype, overflow: of what is quantized there, as for dequantize().

    Raises UsageError where there is no model, CheckpointError for a damaged one.
    """
    directory = Path(directory)
    if not directory.exists():
        raise UsageError(f"--base {nothing_at(directory)}", code="no-such-input")
    if not (directory / CONFIG_NAME).is_file():
        raise UsageError(
            f"--base {directory}: has no {CONFIG_NAME}; it has to be the Hugging Face directory of the original"
        )
    weights, tensors = read_directory(directory)
    config = load_config(directory / CONFIG_NAME)
    return BaseModel(directory, dequantize(tensors, config, dtype, str(weights), overflow=overflow))


class CopiedTensors:
    """A safetensors file all of whose tensors are copied from other files when its header is written."""

    needs_checksums = False
    records: Mapping[str, Record] = {}

    def __init__(self, tensors: Mapping[str, LazyTensor]) -> None:
        self._tensors = tensors
        self._layout = SafetensorsLayout(
            {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        )
        self.size = self._layout.size

    def headers(self, checksums: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        yield from self._layout.headers(checksums)
        for name, tensor in self._tensors.items():
            offset = self._layout.records[name].offset
            for box in row_blocks(tensor.shape, tensor.dtype, BLOCK_BYTES):
                block = np.empty((box.rows, box.cols * ITEMSIZE[tensor.dtype]), np.uint8)
                tensor.read_into(box, block)
                yield offset, block.tobytes()
                offset += block.nbytes
