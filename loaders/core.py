"""Megatron core in `torch` format: rank directories, any tensor, pipeline and virtual-pipeline parallel layout."""

from pathlib import Path

from formats import rank_files
from megaconv.ir import OpenedSource
from megaconv.megatron_names import describe_naming, naming_of
from megaconv.megatron_ranks import holds_legacy
from megaconv.megatron_sizes import CORE
from megaconv.megatron_source import Dialect, open_model, open_ranks
from megaconv.options import LoadOptions

DESCRIPTION = "Megatron core, torch format: iter_*/mp_rank_*/model_optim_rng.pt"


def detect(path: Path) -> bool:
    version = rank_files.find_version(path)
    return version is not None and rank_files.is_rank_files(version) and not holds_legacy(version)


def open(path: Path, options: LoadOptions) -> OpenedSource:  # noqa: A001
    """Raises CheckpointError for a checkpoint that is incomplete, contradicts itself, or is of no known family."""
    source = open_ranks(path, options, legacy=False)
    naming = naming_of([name for chunks in source.ranks.weights.values() for chunk in chunks for name in chunk])
    return open_model(source, options, Dialect(CORE, naming, f"core, torch format, {describe_naming(naming)}"))
