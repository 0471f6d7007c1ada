"""Megatron core in any format: rank directories (`torch`), `torch_dist`, `zarr`; any parallel layout."""

from pathlib import Path

from formats import rank_files
from megaconv.megatron.arguments.sizes import CORE_SIZE_TENSORS
from megaconv.megatron.distributed.source import find_dist, open_dist
from megaconv.megatron.rank_files.source import Spellings, open_model, open_ranks
from megaconv.megatron.states.names import describe_naming, naming_of
from megaconv.megatron.states.ranks import holds_legacy
from megaconv.model.ir import OpenedSource
from megaconv.options import LoadOptions

DESCRIPTION = "Megatron core: torch (mp_rank_*/model_optim_rng.pt), torch_dist (*.distcp), zarr"


def detect(path: Path) -> bool:
    version = rank_files.find_version(path)
    if version is not None and rank_files.is_rank_files(version):
        return not holds_legacy(version)
    return find_dist(path) is not None


def open(path: Path, options: LoadOptions) -> OpenedSource:  # noqa: A001
    """Raises CheckpointError for a checkpoint that is incomplete, contradicts itself, or is of no known family."""
    distributed = find_dist(path) is not None
    source, ckpt_format = (
        open_dist(path, options) if distributed else (open_ranks(path, options, legacy=False), "torch")
    )
    naming = naming_of([name for chunks in source.ranks.weights.values() for chunk in chunks for name in chunk])
    described = f"core, {ckpt_format} format" + ("" if distributed else f", {describe_naming(naming)}")
    return open_model(source, options, Spellings(CORE_SIZE_TENSORS, naming, described), by_args=distributed)
