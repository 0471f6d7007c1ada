"""The original of a model whose source lacks a part of it: missing tensors and files are copied from the original.

A run that trained a language model leaves out the frozen image encoder. A run without multi-token prediction leaves out
the layers for it. A Hugging Face directory needs both. Every copied tensor and file is listed.
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
from megaconv.errors import TensorMismatch, UsageError
from megaconv.families.parts.hf_config import load_config
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.families.parts.language_model import INSIDE, put_inside
from megaconv.families.parts.whole_model import whole_config_json
from megaconv.hub import nothing_at
from megaconv.huggingface.weight_files import is_weights, read_directory
from megaconv.values.quantized import dequantize


@dataclass(frozen=True)
class BaseModel:
    """An opened original model."""

    directory: Path
    tensors: Mapping[str, LazyTensor]

    def fitting(self, natives: Mapping[str, Shape]) -> int:
        """The number of these tensors that the original has in the same shape, under the best fitting name prefix."""

        def has(name: str, shape: Shape) -> bool:
            return name in self.tensors and tuple(self.tensors[name].shape) == shape

        return max(
            sum(has(put_inside(name, *words), shape) for name, shape in natives.items())
            for words in INSIDE
        )

    def names_of(
        self, natives: Mapping[str, Shape], optional: Collection[str] = ()
    ) -> dict[str, str]:
        """The names that the original uses for these tensors.

        optional: further tensors, which the original may lack.
        Raises TensorMismatch unless the original has all the others in their shapes.
        """
        begin, inside = max(
            INSIDE,
            key=lambda words: sum(put_inside(name, *words) in self.tensors for name in natives),
        )
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
        """The tensors of the original that the output doesn't hold yet.

        held: names that the output holds. ignored: patterns of names that aren't part of a model.
        """
        found = {}
        for name, tensor in self.tensors.items():
            is_ignored = any(re.fullmatch(pattern, name) for pattern in ignored)
            if name not in held and not is_ignored:
                found[name] = tensor
        return found

    def config_json(self, dtype: str) -> bytes:
        """The original's config.json, with the dtype that the weights have now."""
        return whole_config_json(load_config(self.directory / CONFIG_NAME), dtype)

    def files(self) -> dict[str, Path]:
        """Every small file, by name, that is neither weights nor config.json nor code."""
        return {path.name: path for path in sorted(self.directory.iterdir()) if _is_copied(path)}


def _is_copied(path: Path) -> bool:
    """True if a file of the original is copied to the output as it is."""
    if not path.is_file() or path.name == CONFIG_NAME or is_weights(path):
        return False
    is_hidden_or_code = path.name[0] == "." or path.suffix == ".py"
    return not is_hidden_or_code and path.stat().st_size <= SIDECAR_BYTES


def open_base(directory: str | Path, dtype: str, *, overflow: bool) -> BaseModel:
    """Open the original of a model.

    dtype, overflow: passed to dequantize() for quantized weights.
    Raises UsageError if the directory holds no model, CheckpointError if the model is damaged.
    """
    directory = Path(directory)
    if not directory.exists():
        raise UsageError(f"--base {nothing_at(directory)}", code="no-such-input")
    described = directory / CONFIG_NAME
    if not described.is_file():
        raise UsageError(
            f"--base {directory}: has no {CONFIG_NAME}; "
            "expected the Hugging Face directory of the original"
        )
    weights, stored = read_directory(directory)
    config = load_config(described)
    tensors = dequantize(stored, config, dtype, str(weights), overflow=overflow)
    return BaseModel(directory, tensors)


class CopiedTensors:
    """A safetensors file of tensors that are copied from other files when its header is written."""

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
