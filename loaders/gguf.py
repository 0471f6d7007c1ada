"""GGUF files of llama.cpp in F32, F16, BF16, Q4_0, Q8_0, Q4_K, Q5_K and Q6_K, of the architectures that megaconv also writes.

Matrices keep their dtype, except quantized matrices, which become bfloat16 or the dtype of --dtype. 16-bit matrices beside
quantized ones become bfloat16 too. GGUF stores norms, biases and routers in float32, whatever the model had. They are
rounded to the dtype of the matrices.
Biases that select experts are float32 in models too, and stay float32. The loader reverses llama.cpp's changes: the row
order of q and k, stacked experts, tensors stored head by head, and norms + 1. A --config, or a config.json in the
directory, describes the model and has its tokenizer. Without one, the file's metadata describe the model, if they are
complete, and the file's tokenizer is restored.
"""

import logging
import re
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from formats import gguf_header
from formats.gguf import READ_TYPES
from formats.gguf_header import GgufHeader, GgufTensor
from formats.lazy_numpy import Floats, np
from formats.tensor import FileTensor, InputFile, LazyTensor
from megaconv.engine.completeness import has_tokenizer
from megaconv.engine.sidecars import find_sidecars
from megaconv.errors import TensorMismatch, UnknownFormat, UnsupportedInput
from megaconv.families import Family, family_of_hf, read_config
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.gguf.agreement import name_other_keys, require_agreement
from megaconv.gguf.config import config_of
from megaconv.gguf.names import DIVISORS, ROUTER_BIAS, gguf_rows
from megaconv.gguf.stored_tokenizer import LONG, tokenizer_files, unread_tokenizer
from megaconv.gguf.types import is_always_f32
from megaconv.huggingface.canonical import whole_model
from megaconv.huggingface.weight_files import has_weights
from megaconv.loader import Loader
from megaconv.model.ceilings import require_countable
from megaconv.model.check import well_formed
from megaconv.model.config import ModelConfig
from megaconv.model.ir import Header, OpenedSource, describe, main_dtype
from megaconv.model.naming import GGUF
from megaconv.options import LoadOptions
from megaconv.values.added import AddedTensor
from megaconv.values.cast import CastTensor
from megaconv.values.ggml_blocks import BlockValues, blocks_shape

_log = logging.getLogger("megaconv")

_PLAIN = ("float32", "float16", "bfloat16")
_UNSPLIT = ".attn_kv_b.weight"
_SPLIT = re.compile(r".*-\d{5}-of-\d{5}\.gguf")


def detect(path: Path) -> bool:
    return _file(path) is not None


def open(path: Path, options: LoadOptions) -> OpenedSource:  # noqa: A001
    """Open a file. Raises CheckpointError if it is damaged, has unsupported types, or doesn't match --config."""
    file = _file(path)
    if file is None:
        raise UnknownFormat(f"{path}: is no GGUF file, and no directory with one")
    if _SPLIT.fullmatch(file.name):
        raise UnsupportedInput(
            f"{file}: is one of several files; join them with llama.cpp's llama-gguf-split --merge"
        )
    directory = next(
        (each for each in (options.config, file.parent) if each and (each / CONFIG_NAME).is_file()),
        None,
    )
    files = {} if directory is None else find_sidecars(directory)
    restores = not has_tokenizer(files)
    header = gguf_header.read(file, LONG if restores else ())
    family, config = (
        _described(file, header) if directory is None else read_config(directory / CONFIG_NAME)
    )
    _require_same_model(file, header, config)
    if directory is not None:
        name_other_keys(header.keys, config, str(file))
    tensors = _tensors(file, header, config, options.dtype)
    config, canonical = whole_model(
        replace(family, rows=gguf_rows(family)), config, GGUF, tensors, str(file)
    )
    manifest = describe(canonical)
    described = Header(
        replace(config, dtype=main_dtype(manifest)),
        manifest,
        files=files,
        made=_tokenizer(file, header, files) if restores else {},
        source=f"gguf, {header.keys['general.architecture']}, {_types(header)}",
    )
    return OpenedSource(described, canonical)


def _types(header: GgufHeader) -> str:
    """The storage types of the tensors, for people, sorted by total size."""
    sizes: Counter[str] = Counter()
    for tensor in header.tensors.values():
        sizes[tensor.dtype] += tensor.nbytes
    short = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
    return ", ".join(short.get(name, name.upper()) for name, _ in sizes.most_common())


def _described(file: Path, header: GgufHeader) -> tuple[Family, ModelConfig]:
    """The family and the model from the file's own metadata. Raises as config_of does."""
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise TensorMismatch(
            f"{file}: has no token_embd.weight [vocabulary, hidden]", code="missing-tensor"
        )
    with well_formed(str(file)):
        found = config_of(
            header.keys, header.tensors, embedding.shape[0], str(file), _divisors(file, header)
        )
        require_countable(found, str(file))
        family = family_of_hf(found, str(file))
        return family, family.read_hf(found)


def _tokenizer(file: Path, header: GgufHeader, files: Collection[str]) -> dict[str, bytes]:
    """The files of the tokenizer by name, without those that the directory has; empty, with a warning, for a kind that isn't
    read. header: with the arrays of LONG."""
    reason = unread_tokenizer(header.keys)
    if reason:
        _log.warning(
            "%s: its tokenizer is not read: %s; the model's Hugging Face directory has it (--config DIR, or --tokenizer-model DIR "
            "of megatron-lite)",
            file,
            reason,
        )
        return {}
    made = tokenizer_files(header.keys, str(file))
    return {name: content for name, content in made.items() if name not in files}


def _file(path: Path) -> Path | None:
    """The GGUF file of a path: the path itself, or the only GGUF file of a directory without other weights."""
    if path.is_dir():
        found = [] if has_weights(path) else sorted(path.glob("*.gguf"))
        path = found[0] if len(found) == 1 else path
    try:
        return (
            path
            if path.suffix == ".gguf" and path.is_file() and gguf_header.is_gguf(path)
            else None
        )
    except OSError:
        return None


def _require_same_model(file: Path, header: GgufHeader, config: ModelConfig) -> None:
    """Check what no tensor shows. Raises TensorMismatch if a value differs, and UnsupportedInput for another
    architecture or an older form."""
    require_agreement(header.keys, _divisors(file, header), config, str(file))
    if any(name.endswith(_UNSPLIT) for name in header.tensors):
        raise UnsupportedInput(
            f"{file}: has {_UNSPLIT}, as older converters of llama.cpp wrote; convert the model again with a newer one"
        )


def _divisors(file: Path, header: GgufHeader) -> dict[str, Floats]:
    """The tensors of divisors of frequencies, by name."""
    opened = InputFile.open(file)
    found: dict[str, Floats] = {}
    for name in DIVISORS:
        each = header.tensors.get(name)
        if each is not None and each.dtype == "float32":
            found[name] = np.frombuffer(opened.read(each.offset, each.nbytes), np.float32)
    return found


def _main_dtype(matrices: set[str]) -> str:
    """The dtype of the converted model. matrices: the stored dtypes of matrices, except for float32."""
    if not matrices:
        return "float32"
    is_quantized = bool(matrices - {*_PLAIN})
    return "bfloat16" if is_quantized else min(matrices)


def _tensors(
    file: Path, header: GgufHeader, config: ModelConfig, dtype: str | None
) -> dict[str, LazyTensor]:
    """Tensors by GGUF's names, in the dtype of the converted model."""
    opened = InputFile.open(file)
    matrices = {
        each.dtype
        for each in header.tensors.values()
        if len(each.shape) > 1 and each.dtype != "float32"
    }
    main = dtype or _main_dtype(matrices)
    is_quantized = bool(matrices - {*_PLAIN})
    found: dict[str, LazyTensor] = {}
    for name, stored in header.tensors.items():
        if name in DIVISORS:
            continue
        tensor = _plain(opened, name, stored, main)
        if config.norm.zero_centered and name.endswith("_norm.weight"):
            tensor = AddedTensor(tensor, -1)
        keeps = dtype is None and _keeps_dtype(name, stored, beside_blocks=is_quantized)
        wanted = stored.dtype if keeps else main
        found[name] = (
            tensor if tensor.dtype == wanted else CastTensor(tensor, wanted, name, overflow=False)
        )
    return found


def _keeps_dtype(name: str, stored: GgufTensor, *, beside_blocks: bool) -> bool:
    """Return whether a tensor has the file's dtype in the model too. beside_blocks: whether other matrices are quantized."""
    is_of_file = is_always_f32(name, stored.shape) and not name.endswith(ROUTER_BIAS)
    return not is_of_file and stored.dtype in (("float32",) if beside_blocks else _PLAIN)


def _plain(file: InputFile, name: str, stored: GgufTensor, dtype: str) -> LazyTensor:
    if stored.dtype in _PLAIN:
        return FileTensor(file, stored.offset, stored.shape, stored.dtype)
    if stored.dtype not in READ_TYPES:
        raise UnsupportedInput(
            f"{file.path}: {name} is of type {stored.dtype.upper()}, which can't be undone; only F32, F16, BF16 and "
            f"{', '.join(READ_TYPES).upper()} are read"
        )
    blocks = FileTensor(file, stored.offset, blocks_shape(stored.shape, stored.dtype), "uint8")
    return BlockValues(blocks, stored.dtype, stored.shape, dtype)


LOADER = Loader(
    name="gguf",
    description="GGUF of llama.cpp in F32, F16, BF16, Q4_0, Q8_0 or Q4_K to Q6_K, with its tokenizer",
    detect=detect,
    open=open,
)
