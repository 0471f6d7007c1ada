"""Directories of MLX (mlx-lm): config.json, and safetensors that are plain or quantized by MLX.

The loader reverses mlx-lm's changes: quantized weights, stacked experts, absorbed matrices of latent attention, the axes of
convolutions, and norms + 1.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from formats.safetensors import read_metadata
from formats.tensor import LazyTensor
from megaconv.engine.sidecars import find_sidecars
from megaconv.errors import CorruptCheckpoint, UnsupportedInput, UsageError
from megaconv.families import Family, read_config
from megaconv.families.parts.hf_config import load_config
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.families.parts.language_model import inner_config
from megaconv.families.parts.llama_vision import llama_inside
from megaconv.huggingface.canonical import whole_model
from megaconv.huggingface.weight_files import has_weights, read_directory
from megaconv.loader import Loader
from megaconv.mlx.names import INSIDE, SUPPORTED, mlx_rows
from megaconv.mlx.settings import dequantized, mlx_quantization
from megaconv.mlx.tensors import undone
from megaconv.model.fields import changed
from megaconv.model.ir import Header, OpenedSource, describe, main_dtype
from megaconv.model.naming import MLX
from megaconv.options import LoadOptions


def detect(path: Path) -> bool:
    """True if config.json has MLX's quantization, or if the first file of weights says that MLX wrote it."""
    if not (path / CONFIG_NAME).is_file() or not has_weights(path):
        return False
    files = [path / "model.safetensors", *path.glob("model-00001-of-*.safetensors")]
    first = next((file for file in files if file.is_file()), None)
    try:
        if mlx_quantization(load_config(path / CONFIG_NAME)) is not None:
            return True
        return first is not None and read_metadata(first).get("format") == "mlx"
    except CorruptCheckpoint:
        return False  # the loader `hf` says what is wrong


def open(path: Path, options: LoadOptions) -> OpenedSource:  # noqa: A001
    """Open a directory. Raises CheckpointError unless it is a complete model of a supported family."""
    directory = options.config or path
    raw = load_config(directory / CONFIG_NAME)
    if llama_inside(directory / CONFIG_NAME) is not None:
        raise UnsupportedInput(
            f"{path}: MLX's files of Llama 3.2 Vision are not read; convert the model's Hugging Face directory instead"
        )
    is_inside = inner_config(raw) is not None
    family, config = read_config(directory / CONFIG_NAME, text_only=is_inside)
    if options.true_vocab_size not in (None, config.vocab):
        raise UsageError(
            f"{path}: its vocabulary of {config.vocab} has no padding; --true-vocab-size is for Megatron checkpoints"
        )
    weights, stored = read_directory(path)
    where = str(weights)
    _require_supported(family, where)
    described = path if (path / CONFIG_NAME).is_file() else directory
    settings = mlx_quantization(load_config(described / CONFIG_NAME))
    found = dequantized(stored, settings, options.dtype, where)
    left_out: dict[str, int] = {}
    if is_inside:
        found, left_out = _language_model(found, where, text_only=options.text_only)
        is_tied = not any(name.startswith("lm_head.") for name in found)
        config = changed(config, {"tie_embeddings": is_tied})
    found = undone(found, family.name, where)
    rows = mlx_rows(family, found)
    config, tensors = whole_model(replace(family, rows=rows), config, MLX, found, where)
    manifest = describe(tensors)
    header = Header(
        replace(config, dtype=main_dtype(manifest)),
        manifest,
        files=find_sidecars(directory),
        source="mlx" if settings is None else f"mlx, {settings['bits']} bits",
        beside=left_out,
    )
    return OpenedSource(header, tensors)


def _require_supported(family: Family, where: str) -> None:
    if family.name not in SUPPORTED:
        raise UnsupportedInput(
            f"{where}: MLX's files of {family.name} are not read; docs/mlx.md lists the families that are. Convert the model's "
            "Hugging Face directory instead"
        )


def _language_model(
    found: Mapping[str, LazyTensor], where: str, *, text_only: bool
) -> tuple[dict[str, LazyTensor], dict[str, int]]:
    """(tensors by the names of the standalone language model, counts of the tensors left out).

    mlx-lm keeps the language model alone, and mlx-vlm the encoders too. Raises UsageError for encoders without text_only.
    """
    kept = {
        name.removeprefix(INSIDE): tensor
        for name, tensor in found.items()
        if name.startswith(INSIDE)
    }
    left_out = Counter(name.partition(".")[0] for name in found if not name.startswith(INSIDE))
    if left_out and not text_only:
        raise UsageError(
            f"{where}: holds a multimodal model ({', '.join(left_out)}); --text-only converts its language model"
        )
    return kept, dict(left_out)


LOADER = Loader(
    name="mlx",
    description="MLX (mlx-lm): config.json with *.safetensors, plain or quantized by MLX",
    detect=detect,
    open=open,
    reads_files=False,
    has_text_only=True,
)
