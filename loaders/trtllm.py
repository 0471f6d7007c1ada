"""TensorRT-LLM's own checkpoints of a Llama or a GPT-2: config.json with a file for each rank.

    config.json, rank0.safetensors, rank1.safetensors ...     rank = pipeline rank * tp + tensor-parallel rank

The files hold a tied head as well. Equal bits of head and embedding show that it is tied.
"""

import logging
from collections.abc import Iterator
from pathlib import Path

from formats.tensor import LazyTensor
from megaconv.engine.sidecars import find_sidecars
from megaconv.engine.tied_head import HEAD, is_tied
from megaconv.errors import LayoutError, UnsupportedInput, UsageError
from megaconv.families import fitting_config
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.loader import Loader
from megaconv.model.assembled import Placed, assemble
from megaconv.model.check import same_names
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.model.ir import Header, OpenedSource, describe, main_dtype
from megaconv.model.layout import padded_vocab
from megaconv.model.naming import TRTLLM
from megaconv.model.natives import NativeTensor, RankTensors
from megaconv.model.table import canonical_shapes
from megaconv.options import LoadOptions
from megaconv.trtllm.description import Description, read_description
from megaconv.trtllm.names import trtllm_rows, with_whole_embedding
from megaconv.trtllm.rank_files import rank_file, rank_numbers, read_rank, require_all
from megaconv.trtllm.stored_scales import dequantized, scales_of_activations
from megaconv.values.code_tensors import READ_AS

_log = logging.getLogger("megaconv")


def detect(path: Path) -> bool:
    return (path / CONFIG_NAME).is_file() and bool(rank_numbers(path))


def open(path: Path, options: LoadOptions) -> OpenedSource:  # noqa: A001
    """Open a directory.

    Raises CheckpointError if its files are incomplete, exchanged or damaged, or hold an unsupported model.
    """
    described = read_description(path / CONFIG_NAME)
    config = _configure(path, described.config, options)
    shapes = canonical_shapes(described.family.rows, described.config)
    placed = _place(path, described, options.dtype or READ_AS)
    tensors = assemble(shapes, placed, strict=True)
    tied = is_tied(tensors, sampled=options.metadata_only)
    if tied:
        del tensors[HEAD]
    manifest = describe(tensors)
    header = Header(
        changed(config, {"tie_embeddings": tied, "dtype": main_dtype(manifest)}),
        manifest,
        files=find_sidecars(options.config or path),
        source=f"trtllm, {described.layout}{', FP8' if described.is_fp8 else ''}",
    )
    return OpenedSource(header, tensors)


def _configure(path: Path, found: ModelConfig, options: LoadOptions) -> ModelConfig:
    """The model of the directory, or that of --config. Raises TensorMismatch if --config describes another model."""
    if options.true_vocab_size not in (None, found.vocab):
        raise UsageError(
            f"{path}: its {CONFIG_NAME} has a vocabulary of {found.vocab}; --true-vocab-size is for Megatron checkpoints"
        )
    if options.config is None:
        return found
    return fitting_config(options.config / CONFIG_NAME, found, str(path))


def _place(path: Path, described: Description, dtype: str) -> Iterator[Placed]:
    """Yield every tensor of every rank with its place. Raises TensorMismatch for missing and unknown tensors.

    dtype: the dtype that matrices in FP8 are read in.
    """
    ranks = described.ranks
    require_all(path, ranks)
    left_out = 0
    for rank, natives in enumerate(_expected(path, described)):
        where = str(path / rank_file(rank))
        stored = read_rank(path, rank, ranks)
        unused = scales_of_activations(stored)
        left_out += len(unused)
        tensors = {name: tensor for name, tensor in stored.items() if name not in unused}
        if described.is_fp8:
            tensors = dequantized(tensors, where, dtype)
        same_names([native.name for native in natives], tensors, where)
        for native in natives:
            tensor = tensors[native.name]
            yield Placed(_without_padding(native, tensor), tensor, where)
    if left_out:
        _log.warning(
            "%s: %d scales of activations are left out: the weights are plain ones", path, left_out
        )


def _without_padding(native: NativeTensor, tensor: LazyTensor) -> NativeTensor:
    """The native tensor as it is stored. A whole embedding has no padding in files of TensorRT-LLM's converters."""
    if not (native.replicated and native.padding_rows):
        return native
    rows, *others = native.shape
    unpadded = (rows - native.padding_rows, *others)
    return native._replace(shape=unpadded) if tuple(tensor.shape) == unpadded else native


def _expected(path: Path, described: Description) -> Iterator[list[NativeTensor]]:
    """Yield the tensors of each rank, stage by stage. Raises UnsupportedInput for ranks that share heads."""
    config, layout = described.config, described.layout
    rows = trtllm_rows(described.family)
    if not described.shards_embedding:
        rows = with_whole_embedding(rows)
    vocab = padded_vocab(config.vocab, 1, layout.tp)
    of_ranks = RankTensors(rows, config, TRTLLM, layout, vocab)
    try:
        for chunk in layout.chunks():
            for tp_rank in range(layout.tp):
                yield list(of_ranks.of(tp_rank, chunk))
    except LayoutError as error:
        raise UnsupportedInput(f"{path / CONFIG_NAME}: {error}") from error


LOADER = Loader(
    name="trtllm",
    description="TensorRT-LLM's own checkpoint of a Llama or GPT-2, plain or FP8: config.json with rank*.safetensors",
    detect=detect,
    open=open,
    reads_files=False,
)
