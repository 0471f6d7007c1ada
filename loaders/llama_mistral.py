"""Meta's and Mistral's original files. The loader's name is that of Megatron-LM's converter.

    params.json, consolidated.00.pth, consolidated.01.pth ...     Meta: one file per tensor-parallel rank
    params.json, consolidated.safetensors                         Mistral: whole, or in several files with an index

The files store each head's rows of q and k as rotary pairs. Llama 1 and 2 shard the embedding by columns, Llama 3 by
rows; the shapes show which. The shapes also show the width of Llama's MLP and its vocabulary, which params.json may
lack. A head is tied if it is missing, or if it equals the embedding bit by bit. megaconv/families/parts/meta_params.py
lists the assumptions for all other values. A Hugging Face directory (--config) replaces these assumptions.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from formats.errors import CorruptCheckpoint
from formats.tensor import LazyTensor
from formats.wording import counted
from megaconv import registry
from megaconv.engine.sidecars import find_sidecars
from megaconv.engine.tied_head import is_tied
from megaconv.errors import TensorMismatch, UsageError
from megaconv.families import family, fitting_config
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.families.parts.meta_params import (
    KINDS,
    PARAMS_NAME,
    kind_of,
    load_params,
    read_params,
    require_read,
)
from megaconv.huggingface.weight_files import read_file, read_sharded
from megaconv.loader import Loader
from megaconv.model.assembled import Placed, assemble
from megaconv.model.check import same_names
from megaconv.model.config import ModelConfig
from megaconv.model.ir import Header, Key, OpenedSource, Source, describe, main_dtype
from megaconv.model.layout import Chunk, Layout
from megaconv.model.naming import META, META_ROWS
from megaconv.model.natives import native_tensors
from megaconv.model.table import canonical_shapes
from megaconv.options import LoadOptions

_SHARD = re.compile(r"consolidated\.(\d+)\.pth")
_WHOLE = ("consolidated.safetensors", "consolidated.safetensors.index.json")

Shards = Mapping[str, Mapping[str, LazyTensor]]
"""File name -> its tensors, in the order of tensor-parallel ranks."""


def detect(path: Path) -> bool:
    return (path / PARAMS_NAME).is_file() and any(path.glob("consolidated*"))


def open(path: Path, options: LoadOptions) -> Source:  # noqa: A001
    """Open a directory. Raises CheckpointError if its files are incomplete, contradict each other, or hold no plain
    decoder.

    The `hf` loader opens a Hugging Face directory, whether --checkpoint-type asks for it or it is found here.
    """
    asked = options.checkpoint_type
    if asked == "hf" or (asked is None and not detect(path)):
        return registry.loader("hf").open(path, options)
    if not (path / PARAMS_NAME).is_file():
        owner = KINDS.get(asked or "", "all")
        raise UsageError(
            f"{path}: has no {PARAMS_NAME}, which {owner} files come with; "
            "--checkpoint-type hf is for Hugging Face directories"
        )
    params = load_params(path / PARAMS_NAME)
    kind = asked or kind_of(params)
    if options.config is None:
        require_read(params, kind, path / PARAMS_NAME)
    shards = _read_shards(path)
    config = _configure(path, params, kind, shards, options)
    if options.true_vocab_size not in (None, config.vocab):
        raise UsageError(
            f"{path}: its vocabulary of {config.vocab} has no padding; --true-vocab-size is for Megatron checkpoints"
        )
    tensors = _assemble(shards, config)
    may_be_tied = options.config is None and not config.tie_embeddings
    if may_be_tied and is_tied(tensors, sampled=options.metadata_only):
        # Meta's and Mistral's code has no tied head: the files of Llama 3.2 hold the embedding twice.
        config = _configure(path, params, kind, shards, options, tied=True)
        tensors = _assemble(shards, config)
    manifest = describe(tensors)
    count = f"{len(shards)} shards" if len(shards) > 1 else "one file"
    header = Header(
        replace(config, dtype=main_dtype(manifest)),
        manifest,
        files=_sidecars(path, options),
        source=f"llama_mistral, {KINDS[kind]} original files, {count}",
    )
    return OpenedSource(header, tensors)


def _sidecars(path: Path, options: LoadOptions) -> Mapping[str, Path]:
    """Small files of the model. Meta's downloads of Llama 1 have one tokenizer, in the parent directory of all sizes."""
    found = find_sidecars(options.config or path)
    beside = path.resolve().parent / "tokenizer.model"
    return found if found or not beside.is_file() else {beside.name: beside}


def _read_shards(path: Path) -> Shards:
    for name in _WHOLE:
        if (path / name).is_file():
            return {
                name: read_sharded(path / name)
                if name.endswith(".json")
                else read_file(path / name)
            }
    files: dict[int, Path] = {}
    for file in sorted(path.iterdir()):
        match = _SHARD.fullmatch(file.name)
        if match is None:
            continue
        other = files.setdefault(int(match[1]), file)
        if other is not file:
            raise CorruptCheckpoint(
                f"{path}: {other.name} and {file.name} are both shard {int(match[1])}; remove one of them"
            )
    if not files:
        raise CorruptCheckpoint(
            f"{path}: has a {PARAMS_NAME} but no weights; expected consolidated.00.pth, ... or {_WHOLE[0]}",
            code="missing-file",
        )
    _same_numbers(path, files, max(files) + 1)
    return {files[number].name: read_file(files[number]) for number in sorted(files)}


def _same_numbers(path: Path, files: Mapping[int, Path], expected: int) -> None:
    missing = (
        f"consolidated.{number:02d}.pth" for number in range(expected) if number not in files
    )
    if expected > len(files):
        raise CorruptCheckpoint(
            f"{path}: {expected - len(files)} of {counted(expected, 'shard')} missing: {', '.join(islice(missing, 8))}; "
            "a model needs all of them",
            code="missing-file",
        )


# Configuration.


def _configure(
    path: Path,
    params: Mapping[str, Any],
    kind: str,
    shards: Shards,
    options: LoadOptions,
    *,
    tied: bool = False,
) -> ModelConfig:
    """The configuration from params.json, or from --config. Raises TensorMismatch if --config describes another model."""
    first_name, first = next(iter(shards.items()))
    found = _found(f"{path / first_name}", first, len(shards), params)
    if tied:
        found = found | {"tie_embeddings": True}
    config = read_params(params, kind, found, path / PARAMS_NAME)
    _check_count(path, shards, config)
    if options.config is None:
        return config
    return fitting_config(options.config / CONFIG_NAME, config, str(path))


def _found(
    where: str, shard: Mapping[str, LazyTensor], count: int, params: Mapping[str, Any]
) -> dict[str, Any]:
    """The fields of the configuration that the tensors of a shard show."""

    def shape(name: str) -> Sequence[int]:
        if name not in shard or len(shard[name].shape) != 2:
            raise TensorMismatch(
                f"{where}: has no matrix {name}; these are not files of Meta's or Mistral's"
            )
        return shard[name].shape

    tied = "output.weight" not in shard
    rows, cols = shape("tok_embeddings.weight")
    # A shard with all columns (`dim`) of the embedding has a part of its rows.
    by_rows = rows * count if cols == params.get("dim") else rows
    vocab = by_rows if tied else shape("output.weight")[0] * count
    stated = params.get("vocab_size", -1)
    moe = params.get("moe")  # then params.json gives the width
    ffn = params.get("hidden_dim") if moe else shape("layers.0.feed_forward.w1.weight")[0] * count
    return {"vocab": stated if stated != -1 else vocab, "mlp.ffn": ffn, "tie_embeddings": tied}


def _check_count(path: Path, shards: Shards, config: ModelConfig) -> None:
    """Check the number of shards by the sizes of their tensors. Nothing else shows that the last shards are missing."""
    name = "layers.0.attention.wq.weight"
    query = next(iter(shards.values())).get(name)
    rows = config.attention.heads * config.attention.head_dim
    if query is None or not query.shape or not query.shape[0] or rows % query.shape[0]:
        return
    expected = rows // query.shape[0]
    if expected > len(shards):
        _same_numbers(path, dict.fromkeys(range(len(shards)), path), expected)


# Tensors.


def _assemble(shards: Shards, config: ModelConfig) -> dict[Key, LazyTensor]:
    rows = family(config.family).rows
    return assemble(canonical_shapes(rows, config), _place(shards, config), strict=True)


def _place(shards: Shards, config: ModelConfig) -> Iterator[Placed]:
    """Yield every tensor of every shard with its place. Raises TensorMismatch for missing and unknown tensors."""
    embedding = next(iter(shards.values()))["tok_embeddings.weight"]
    naming = META_ROWS if embedding.shape[-1] == config.hidden else META
    layout = Layout(tp=len(shards))
    whole = Chunk.of_whole_model(config.layer_count)
    table = family(config.family)
    for rank, (where, shard) in enumerate(shards.items()):
        found = {
            name: tensor
            for name, tensor in shard.items()
            if not any(re.fullmatch(pattern, name) for pattern in table.ignored)
        }
        expected = native_tensors(table.rows, config, naming, layout, rank, whole, config.vocab)
        natives = [native for native in expected if native.copy is None or native.name in found]
        same_names([native.name for native in natives], found, where)
        for native in natives:
            yield Placed(native, found[native.name], where)


LOADER = Loader(
    name="llama_mistral",
    description="Meta's originals: params.json with consolidated.*.pth; Mistral's: with consolidated.safetensors",
    detect=detect,
    open=open,
    reads_files=False,
)
