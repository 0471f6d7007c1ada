"""Megatron's models before core in `torch` format, of every release since 1.0.

Since checkpoint version 2, the rows of the fused q, k, v have the order of core, head by head. Before version 2, each
rank has the order:

    version 0 (not written in the file)    all of q, all of k, all of v
    version 1                              row by row: the first of q, of k, of v, the second of q ...

The same holds for the fused k, v of a T5's cross attention.
Source: fix_query_key_value_ordering in megatron/training/checkpointing.py of Megatron-LM.
"""

from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from formats import rank_files
from formats.errors import CorruptCheckpoint
from formats.tensor import Box, Bytes, LazyTensor
from megaconv.errors import UnknownFamily
from megaconv.loader import Loader
from megaconv.megatron.arguments.size_tensors import LEGACY_SIZE_TENSORS
from megaconv.megatron.rank_files.source import Spellings, open_model, open_ranks
from megaconv.megatron.states.ranks import Ranks, holds_legacy
from megaconv.model.ir import OpenedSource
from megaconv.model.naming import LEGACY
from megaconv.model.natives import NativeTensor, Region
from megaconv.model.regions import NativeOutput, Order
from megaconv.options import LoadOptions

_EXPERTS = (".mlp.router.", ".mlp.switch.", "experts.")
"""Parts of names that only models with a SwitchMLP have."""


@dataclass(frozen=True)
class EveryNthRow(Order):
    """A region's rows are at a distance in the native tensor."""

    step: int
    """The distance: 1 for rows without others between them."""

    def read(self, region: Region, wanted: Box, native: LazyTensor, out: Bytes) -> None:
        for index, row in enumerate(self._rows(region, wanted)):
            native.read_into(row, out[index : index + 1])

    def write(self, region: Region, wanted: Box, native: NativeOutput, rows: Bytes) -> None:
        for index, row in enumerate(self._rows(region, wanted)):
            native.write(row, rows[index : index + 1])

    def filled(self, region: Region) -> Iterator[Box]:
        yield from self._rows(region, region.box)

    def _rows(self, region: Region, wanted: Box) -> Iterator[Box]:
        box = region.in_native(wanted)
        for row in range(wanted.row0 - region.box.row0, wanted.row1 - region.box.row0):
            native_row = region.row + row * self.step
            yield box._replace(row0=native_row, row1=native_row + 1)


def detect(path: Path) -> bool:
    version = rank_files.find_version(path)
    return version is not None and rank_files.is_rank_files(version) and holds_legacy(version)


def open(path: Path, options: LoadOptions) -> OpenedSource:  # noqa: A001
    """Open a checkpoint. Raises CheckpointError if it is incomplete, contradicts itself, or belongs to no known family."""
    source = open_ranks(path, options, legacy=True)
    _require_known(source.ranks)
    version = _version(source.state, source.args, source.ranks.files[min(source.ranks.files)])
    described = f"legacy, torch format, checkpoint version {version}"
    spellings = Spellings(
        LEGACY_SIZE_TENSORS, LEGACY, described, lambda native: _arrange(native, version)
    )
    return open_model(source, options, spellings)


def _require_known(ranks: Ranks) -> None:
    names = [name for chunks in ranks.weights.values() for chunk in chunks for name in chunk]
    if any(part in name for part in _EXPERTS for name in names):
        raise UnknownFamily(
            f"{ranks.files[min(ranks.files)]}: is a legacy model with experts (SwitchMLP), which is not supported: its router has a bias "
            "and a sigmoid (in early releases a softmax), and no family of Megatron core or transformers computes such a router"
        )


def _version(state: Mapping[str, Any], args: Namespace, file: str) -> int:
    """The checkpoint version; 0 if the file doesn't say it. Releases that don't write it support neither pipelines nor
    bfloat16."""
    version = state.get("checkpoint_version", 0)
    if version not in (0, 1, 2, 3):
        raise CorruptCheckpoint(f"{file}: has checkpoint_version {version!r}; known: 0, 1, 2 and 3")
    if "checkpoint_version" not in state and (
        hasattr(args, "bf16") or hasattr(args, "pipeline_model_parallel_size")
    ):
        raise CorruptCheckpoint(
            f"{file}: has no checkpoint_version, but args of a release that writes one; so the order of its q, k, v is unknown. "
            "Set the key checkpoint_version (3.0 in every release since 2.0) in the file"
        )
    return int(version)


def _arrange(native: NativeTensor, version: int) -> NativeTensor:
    """The same pieces in the row order of a version before 2. The pieces have equal lengths."""
    is_fused = any(name in native.name for name in (".query_key_value.", ".key_value."))
    if version > 1 or not is_fused:
        return native
    boxes = {name: _bounds(regions) for name, regions in native.parts.items()}
    if len({box.rows for box in boxes.values()}) > 1:
        raise CorruptCheckpoint(
            f"{native.name}: checkpoint version {version} has no grouped queries, this model has"
        )
    parts = {
        name: (_region(box, place, len(boxes), version),)
        for place, (name, box) in enumerate(boxes.items())
    }
    return native._replace(parts=parts)


def _region(box: Box, place: int, pieces: int, version: int) -> Region:
    """One piece's region in version 0 (pieces behind each other) or 1 (the pieces' rows take turns)."""
    return (
        Region(box, place, order=EveryNthRow(pieces)) if version else Region(box, place * box.rows)
    )


def _bounds(regions: tuple[Region, ...]) -> Box:
    return regions[0].box._replace(row1=regions[-1].box.row1)


LOADER = Loader(
    name="legacy",
    description="Megatron before core, torch format, checkpoint versions 0 to 3",
    detect=detect,
    open=open,
    reads_files=False,
)
