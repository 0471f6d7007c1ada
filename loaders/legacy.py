"""Megatron's models before core in `torch` format, of every release since 1.0.

Since checkpoint version 2 the rows of the fused q, k, v lie as in core, head by head; before it, on each rank,

    version 0 (not written down)    all of q, all of k, all of v
    version 1                       row by row: the first of q, of k, of v, the second of q ...

and so do the fused k, v of a T5's attention to its encoder.
Source: fix_query_key_value_ordering in megatron/training/checkpointing.py of Megatron-LM.
"""

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from formats import rank_files
from formats.errors import CorruptCheckpoint
from formats.tensor import Box
from megaconv.errors import UnknownFamily
from megaconv.megatron.arguments.sizes import LEGACY_SIZE_TENSORS
from megaconv.megatron.rank_files.source import Spellings, open_model, open_ranks
from megaconv.megatron.states.ranks import Ranks, holds_legacy
from megaconv.model.ir import OpenedSource
from megaconv.model.naming import LEGACY
from megaconv.model.natives import NativeTensor, Region
from megaconv.options import LoadOptions

DESCRIPTION = "Megatron before core, torch format, checkpoint versions 0 to 3"

_EXPERTS = (".mlp.router.", ".mlp.switch.", "experts.")
"""Parts of names that only models with a SwitchMLP have."""


def detect(path: Path) -> bool:
    version = rank_files.find_version(path)
    return version is not None and rank_files.is_rank_files(version) and holds_legacy(version)


def open(path: Path, options: LoadOptions) -> OpenedSource:  # noqa: A001
    """Raises CheckpointError for a checkpoint that is incomplete, contradicts itself, or is of no known family."""
    source = open_ranks(path, options, legacy=True)
    _require_known(source.ranks)
    version = _version(source.state, source.args, source.ranks.files[min(source.ranks.files)])
    described = f"legacy, torch format, checkpoint version {version}"
    spellings = Spellings(LEGACY_SIZE_TENSORS, LEGACY, described, lambda native: _arrange(native, version))
    return open_model(source, options, spellings)


def _require_known(ranks: Ranks) -> None:
    names = [name for chunks in ranks.weights.values() for chunk in chunks for name in chunk]
    if any(part in name for part in _EXPERTS for name in names):
        raise UnknownFamily(
            f"{ranks.files[min(ranks.files)]}: a legacy model with experts (SwitchMLP): each token goes to one of them, weighed by a "
            "sigmoid (in early releases a softmax) of a router that has a bias, which no supported family of Megatron core or transformers "
            "computes"
        )


def _version(state: Mapping[str, Any], args: Namespace, file: str) -> int:
    """0 where the file doesn't say; releases that say nothing know neither pipelines nor bfloat16."""
    version = state.get("checkpoint_version", 0)
    if version not in (0, 1, 2, 3):
        raise CorruptCheckpoint(f"{file}: has checkpoint_version {version!r}; known: 0, 1, 2 and 3")
    if "checkpoint_version" not in state and (hasattr(args, "bf16") or hasattr(args, "pipeline_model_parallel_size")):
        raise CorruptCheckpoint(
            f"{file}: has no checkpoint_version, but args of a release that writes one; so the order of its q, k, v is unknown. "
            "Set the key checkpoint_version (3.0 in every release since 2.0) in the file"
        )
    return int(version)


def _arrange(native: NativeTensor, version: int) -> NativeTensor:
    """The same pieces in the order of rows that a version before 2 has; they are as long as each other."""
    if version > 1 or not any(fused in native.name for fused in (".query_key_value.", ".key_value.")):
        return native
    boxes = {name: _bounds(regions) for name, regions in native.parts.items()}
    if len({box.rows for box in boxes.values()}) > 1:
        raise CorruptCheckpoint(f"{native.name}: checkpoint version {version} has no grouped queries, this model has")
    parts = {
        name: (Region(box, place, row_step=len(boxes)) if version else Region(box, place * box.rows),)
        for place, (name, box) in enumerate(boxes.items())
    }
    return native._replace(parts=parts)


def _bounds(regions: tuple[Region, ...]) -> Box:
    return regions[0].box._replace(row1=regions[-1].box.row1)
