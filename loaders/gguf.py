"""GGUF of llama.cpp, in F32, F16, BF16 and Q8_0, of the architectures that are written too.

Matrices keep their dtype; those of Q8_0 become bfloat16, or what --dtype says. Norms, biases and routers, which GGUF has in float32
whatever the model had, are rounded to the matrices' dtype; biases that choose experts, which models have in float32, stay. Rows of q
and k, stacked experts, what is stored head by head, and norms + 1 are undone. --config, or a config.json beside, describes the model
and has its tokenizer; without one the file's own metadata do, as far as they say everything.
"""

import logging
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from formats import gguf_header
from formats.gguf import BLOCK, BLOCK_BYTES
from formats.gguf_header import GgufHeader, GgufTensor
from formats.lazy_numpy import np
from formats.tensor import Box, Bytes, FileTensor, InputFile, LazyTensor, Shape, matrix_shape
from megaconv.engine.cast import CastTensor
from megaconv.engine.rounding import rounded
from megaconv.engine.sidecars import find_sidecars
from megaconv.engine.stored_forms import AddedTensor
from megaconv.engine.weight_files import has_weights, whole_model
from megaconv.errors import TensorMismatch, UnknownFormat, UnsupportedInput
from megaconv.families import Family, family_of_hf, read_config
from megaconv.families.parts.gguf_config import config_of
from megaconv.families.parts.gguf_names import ARCHITECTURES, DIVISORS, ROUTER_BIAS, gguf_rows
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.model.ceilings import require_countable
from megaconv.model.check import well_formed
from megaconv.model.config import ModelConfig
from megaconv.model.ir import Header, OpenedSource, describe, main_dtype
from megaconv.model.naming import GGUF
from megaconv.options import LoadOptions

DESCRIPTION = "GGUF of llama.cpp in F32, F16, BF16 or Q8_0; --config has its tokenizer"
READS_FILES = True

_log = logging.getLogger("megaconv")

_PLAIN = ("float32", "float16", "bfloat16")
_UNSPLIT = ".attn_kv_b.weight"
_SPLIT = re.compile(r".*-\d{5}-of-\d{5}\.gguf")


def detect(path: Path) -> bool:
    return _file(path) is not None


def open(path: Path, options: LoadOptions) -> OpenedSource:  # noqa: A001
    """Raises CheckpointError for a file that is damaged, of types that can't be read, or of another model than --config says."""
    file = _file(path)
    if file is None:
        raise UnknownFormat(f"{path}: is no GGUF file, and no directory with one")
    if _SPLIT.fullmatch(file.name):
        raise UnsupportedInput(f"{file}: is one of several files; join them with llama.cpp's llama-gguf-split --merge")
    header = gguf_header.read(file)
    directory = next((each for each in (options.config, file.parent) if each and (each / CONFIG_NAME).is_file()), None)
    family, config = _described(file, header) if directory is None else read_config(directory / CONFIG_NAME)
    _require_same_model(file, header, family.name, config)
    tensors = _tensors(file, header, config, options.dtype)
    config, canonical = whole_model(replace(family, rows=gguf_rows(family)), config, GGUF, tensors, str(file))
    manifest = describe(canonical)
    described = Header(
        replace(config, dtype=main_dtype(manifest)),
        manifest,
        files={} if directory is None else find_sidecars(directory),
        source=f"gguf, {header.keys['general.architecture']}, {_types(header)}",
    )
    return OpenedSource(described, canonical)


def _types(header: GgufHeader) -> str:
    """For people, that of most tensors' bytes first."""
    sizes: Counter[str] = Counter()
    for tensor in header.tensors.values():
        sizes[tensor.dtype] += tensor.nbytes
    short = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
    return ", ".join(short.get(name, name.upper()) for name, _ in sizes.most_common())


def _described(file: Path, header: GgufHeader) -> tuple[Family, ModelConfig]:
    """The model by the file's own metadata. Raises as config_of."""
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise TensorMismatch(f"{file}: has no token_embd.weight [vocabulary, hidden]", code="missing-tensor")
    _log.warning("%s: its tokenizer is not converted; --config with the model's Hugging Face directory has it", file)
    with well_formed(str(file)):
        found = config_of(header.keys, header.tensors, embedding.shape[0], str(file))
        require_countable(found, str(file))
        family = family_of_hf(found, str(file))
        return family, family.read_hf(found)


def _file(path: Path) -> Path | None:
    """The GGUF file that is meant: the path itself, or the only one of a directory without other weights."""
    if path.is_dir():
        found = [] if has_weights(path) else sorted(path.glob("*.gguf"))
        path = found[0] if len(found) == 1 else path
    try:
        return path if path.suffix == ".gguf" and path.is_file() and gguf_header.is_gguf(path) else None
    except OSError:
        return None


def _require_same_model(file: Path, header: GgufHeader, family: str, config: ModelConfig) -> None:
    """Raises TensorMismatch where sizes differ that no tensor shows, UnsupportedInput for another architecture."""
    architecture = header.keys.get("general.architecture")
    wanted = ARCHITECTURES.get(family)
    if wanted is None or wanted != architecture:
        raise UnsupportedInput(
            f"{file}: is of llama.cpp's architecture {architecture!r:.40}; the configuration is of a {family}"
            + (
                f", which is {wanted!r} there"
                if wanted
                else f", which is not supported; supported are {', '.join(ARCHITECTURES)}"
            )
        )
    if any(name.endswith(_UNSPLIT) for name in header.tensors):
        raise UnsupportedInput(
            f"{file}: has {_UNSPLIT}, as older converters of llama.cpp wrote; convert the model again with a newer one"
        )
    said = {
        "attention.head_count": config.attention.heads,
        "block_count": config.layer_count,
        "expert_used_count": config.experts.per_token if config.experts.count else None,
        "rope.freq_base": config.positions.theta,
    }
    for name, expected in said.items():
        found: Any = header.keys.get(f"{architecture}.{name}")
        if found is None or expected is None:
            continue
        if not isinstance(found, (int, float)) or found != np.float32(expected):
            raise TensorMismatch(f"{file}: says {architecture}.{name} = {found!r:.60}, the configuration {expected}")


def _tensors(file: Path, header: GgufHeader, config: ModelConfig, dtype: str | None) -> dict[str, LazyTensor]:
    """By GGUF's names, in the dtype that the model is to have."""
    opened = InputFile.open(file)
    matrices = {each.dtype for each in header.tensors.values() if len(each.shape) > 1 and each.dtype != "float32"}
    main = dtype or ("float32" if not matrices else "bfloat16" if "q8_0" in matrices else min(matrices))
    found: dict[str, LazyTensor] = {}
    for name, stored in header.tensors.items():
        if name in DIVISORS:
            continue
        tensor = _plain(opened, name, stored, main)
        if config.norm.zero_centered and name.endswith("_norm.weight"):
            tensor = AddedTensor(tensor, -1)
        wanted = "float32" if dtype is None and name.endswith(ROUTER_BIAS) else main
        found[name] = tensor if tensor.dtype == wanted else CastTensor(tensor, wanted, name, overflow=False)
    return found


def _plain(file: InputFile, name: str, stored: GgufTensor, dtype: str) -> LazyTensor:
    if stored.dtype in _PLAIN:
        return FileTensor(file, stored.offset, stored.shape, stored.dtype)
    if stored.dtype != "q8_0":
        raise UnsupportedInput(
            f"{file.path}: {name} is of type {stored.dtype.upper()}, which can't be undone; only F32, F16, BF16 and Q8_0 are read"
        )
    rows, cols = matrix_shape(stored.shape)
    blocks = FileTensor(file, stored.offset, (rows, cols // BLOCK * BLOCK_BYTES), "uint8")
    return Q8Values(blocks, stored.shape, dtype)


@dataclass(frozen=True)
class Q8Values:
    """[..., cols] of blocks of Q8_0: 32 signed bytes times a float16 before them, in float32, rounded to a dtype."""

    blocks: LazyTensor
    """[rows, cols / 32 * 34] bytes."""
    shape: Shape
    dtype: str

    def read_into(self, box: Box, out: Bytes) -> None:
        first, last = box.col0 // BLOCK, -(-box.col1 // BLOCK)
        stored = np.empty((box.rows, (last - first) * BLOCK_BYTES), np.uint8)
        self.blocks.read_into(Box(box.row0, box.row1, first * BLOCK_BYTES, last * BLOCK_BYTES), stored)
        blocks = stored.reshape(box.rows, last - first, BLOCK_BYTES)
        scales = np.ascontiguousarray(blocks[:, :, :2]).view(np.float16).astype(np.float32)
        values = blocks[:, :, 2:].view(np.int8).astype(np.float32) * scales
        cols = slice(box.col0 - first * BLOCK, box.col1 - first * BLOCK)
        np.copyto(out, rounded(np.ascontiguousarray(values.reshape(box.rows, -1)[:, cols]), self.dtype))
