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
from formats.rows import Rows
from formats.safetensors import SafetensorsLayout
from formats.tensor import ITEMSIZE, LazyTensor, Shape, byte_count, read_tensor, row_blocks
from megaconv.engine.plan import BLOCK_BYTES
from megaconv.engine.record import RECORD_NAME
from megaconv.errors import TensorMismatch, UsageError
from megaconv.families.parts.hf_config import load_config
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.families.parts.language_model import INSIDE, put_inside
from megaconv.families.parts.llama_vision import (
    EMBEDDING,
    IMAGE_ROWS,
    LlamaInside,
    llama_inside,
)
from megaconv.hub import nothing_at
from megaconv.huggingface.quantization_files import QUANTIZATION_FILES
from megaconv.huggingface.stored_names import without_wrappers
from megaconv.huggingface.weight_files import is_weights, read_directory
from megaconv.model.ir import Header, Key
from megaconv.signatures.bundle import SIGNATURE_NAME
from megaconv.values.cast import CastTensor
from megaconv.values.quantized import dequantize


@dataclass(frozen=True)
class BaseModel:
    """An opened original model."""

    directory: Path
    tensors: Mapping[str, LazyTensor]
    llama: LlamaInside | None = None
    """Set if the model is the Llama inside a Llama 3.2 Vision, which is the original."""

    def fitting(self, natives: Mapping[str, Shape]) -> int:
        """The number of these tensors that the original has in the same shape, under the best fitting name prefix."""
        return max(
            sum(self._has(self._name(name, *words), name, shape) for name, shape in natives.items())
            for words in INSIDE
        )

    def _name(self, name: str, begin: str, inside: str) -> str:
        """The original's name of a tensor. begin, inside: one pair of INSIDE."""
        alone = name if self.llama is None else self.llama.name_in_original(name)
        return put_inside(alone, begin, inside)

    def _has(self, stored: str, name: str, shape: Shape) -> bool:
        """True if the original has a tensor of this model under a name, in its shape."""
        expected = shape if self.llama is None else self.llama.shape_in_original(name, shape)
        return stored in self.tensors and tuple(self.tensors[stored].shape) == expected

    def names_of(
        self, natives: Mapping[str, Shape], optional: Collection[str] = ()
    ) -> dict[str, str]:
        """The names that the original uses for these tensors.

        optional: further tensors, which the original may lack.
        Raises TensorMismatch unless the original has all the others in their shapes.
        """
        begin, inside = max(
            INSIDE,
            key=lambda words: sum(self._name(name, *words) in self.tensors for name in natives),
        )
        names = {name: self._name(name, begin, inside) for name in (*natives, *optional)}
        for name, shape in natives.items():
            if not self._has(names[name], name, shape):
                found = self.tensors.get(names[name])
                has = "no such tensor" if found is None else f"one of {list(found.shape)}"
                raise TensorMismatch(
                    f"{self.directory}: is not the original of this model, which has {name} {list(shape)}; it has {has}"
                )
        return names

    def last_rows(self, names: Mapping[str, str], header: Header) -> dict[str, LazyTensor]:
        """The rows that the original has after those of the model: name in the original -> its last rows.

        names: those of names_of. The rows get the dtype of the model's embedding.
        """
        if self.llama is None:
            return {}
        name = names[EMBEDDING]
        embedding = self.tensors[name]
        dtype = header.manifest[Key("embed.weight")].dtype
        rows = Rows(embedding, embedding.shape[0] - IMAGE_ROWS, IMAGE_ROWS)
        return {name: CastTensor(rows, dtype, name, overflow=False)}

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

    def files(self) -> dict[str, Path]:
        """Every small file, by name, that is neither weights nor config.json nor code."""
        return {path.name: path for path in sorted(self.directory.iterdir()) if _is_copied(path)}


_OF_WEIGHTS = (RECORD_NAME, SIGNATURE_NAME, *QUANTIZATION_FILES)
"""Files that are about the original's own weights: fingerprints, a signature, and quantizations, which the output lacks."""


def _is_copied(path: Path) -> bool:
    """True if a file of the original is copied to the output as it is."""
    if not path.is_file() or path.name in (CONFIG_NAME, *_OF_WEIGHTS) or is_weights(path):
        return False
    is_hidden_or_code = path.name[0] == "." or path.suffix == ".py"
    return not is_hidden_or_code and path.stat().st_size <= SIDECAR_BYTES


def open_base(
    directory: str | Path, dtype: str, *, overflow: bool, is_llama: bool = False
) -> BaseModel:
    """Open the original of a model.

    dtype, overflow: passed to dequantize() for quantized weights. is_llama: True for a model of the family llama.
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
    where, config = str(weights), load_config(described)
    stored = without_wrappers(stored, where)
    tensors = dequantize(stored, config, dtype, where, overflow=overflow)
    llama = llama_inside(described) if is_llama else None
    if llama is not None:
        llama.require_layers(tensors, where)
    return BaseModel(directory, tensors, llama)


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


class CompletedTensors(SafetensorsLayout):
    """A safetensors file in which the last rows of some tensors are copied from the original."""

    def __init__(
        self,
        tensors: Mapping[str, tuple[Shape, str]],
        last_rows: Mapping[str, LazyTensor],
        metadata: Mapping[str, str],
    ) -> None:
        """tensors: name -> (shape with all rows, dtype). last_rows: those of the original, by name.

        metadata: further entries of `__metadata__`.
        """
        super().__init__(tensors, metadata)
        self._last_rows = {name: rows for name, rows in last_rows.items() if name in tensors}
        for name, rows in self._last_rows.items():
            record = self.records[name]
            nbytes = record.nbytes - byte_count(tuple(rows.shape), rows.dtype)
            self.records[name] = record._replace(nbytes=nbytes)

    def headers(self, checksums: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        yield from super().headers(checksums)
        for name, rows in self._last_rows.items():
            offset, nbytes = self.records[name]
            yield offset + nbytes, read_tensor(rows).tobytes()
