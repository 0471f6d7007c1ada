"""Which of transformers' modules a rank's matrix has a part of: a fused qkv of q_proj, k_proj and v_proj, of each some rows.

Each module has an adapter of its own, as peft has it, so that what is trained here is what peft trains, and what it saves
can be read back at any layout. All of it follows from the family's table.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megaconv.errors import NotExpressible
from megaconv.families import family
from megaconv.model.config import ModelConfig
from megaconv.model.layout import Chunk, Layout
from megaconv.model.naming import HF_STACKED
from megaconv.model.natives import NativeTensor, Region, native_tensors


class Rows(NamedTuple):
    """Of a rank's matrix, and where they are among the module's outputs."""

    local: int
    whole: int
    size: int


@dataclass(frozen=True)
class Module:
    """One of transformers' linear modules, or one expert's share of a parameter that holds all experts."""

    path: str
    """In the whole model."""
    parameter: str | None
    """Of the module at this path, where it isn't its `weight` that has the adapter."""
    expert: int | None
    out: int
    width: int
    transposed: bool
    """Whether transformers stores the weight as [in, out]."""

    @property
    def key(self) -> str:
        """Its last word."""
        return self.parameter or self.path.rpartition(".")[2]

    @property
    def name(self) -> str:
        """For the tensors of its adapter, each expert's by itself."""
        expert = "" if self.expert is None else f".{self.expert}"
        return f"{self.path}{expert}.{self.parameter}" if self.parameter else self.path


@dataclass(frozen=True)
class Share:
    """What a rank's matrix has of a module."""

    module: Module
    rows: tuple[Rows, ...]
    columns: tuple[int, int]
    """Of the module's inputs: first, and behind the last."""

    @property
    def out(self) -> int:
        return sum(run.size for run in self.rows)

    @property
    def width(self) -> int:
        return self.columns[1] - self.columns[0]


@dataclass(frozen=True)
class _Whole:
    """Where a canonical matrix lies in a module."""

    module: Module
    runs: tuple[tuple[int, int, int], ...]
    """(first row, the one behind the last, the module's output that the first one is)."""


def modules_of(config: ModelConfig) -> Mapping[str, _Whole]:
    """By the canonical matrices of the decoder's layers."""
    whole = Chunk(0, 0, 0, config.layer_count, is_first=True, is_last=True)
    found: dict[str, _Whole] = {}
    for native in native_tensors(family(config.family).rows, config, HF_STACKED, Layout(), 0, whole, config.vocab):
        if native.copy is None and len(native.shape) > 1:
            found |= {name: where for name, where in _wholes(native) if name.startswith("layers.")}
    return found


def _wholes(native: NativeTensor) -> Iterator[tuple[str, _Whole]]:
    stacked = len(native.shape) == 3
    rows, columns = native.shape[-2:]
    path, _, last = native.name.rpartition(".")
    for name, regions in native.parts.items():
        if any(region.pairs or region.halves or region.row_step > 1 or region.repeat > 1 for region in regions):
            continue  # no model that is trained has its matrices so
        transposed = regions[0].transposed
        out, width = (columns, rows) if transposed else (rows, columns)
        expert = regions[0].row // rows if stacked else None
        module = Module(path, None if last == "weight" else last, expert, out, width, transposed)
        first = [region.col if transposed else region.row % rows for region in regions]
        yield name, _Whole(module, tuple((r.box.row0, r.box.row1, at) for r, at in zip(regions, first, strict=True)))


def shares_of(native: NativeTensor, modules: Mapping[str, _Whole]) -> tuple[Share, ...]:
    """Of a rank's matrix. Raises NotExpressible for one whose rows aren't those of modules of transformers."""
    if not native.parts.keys() <= modules.keys():
        raise NotExpressible(f"{native.name} can't have an adapter: transformers has no module with these weights")
    rows: dict[str, list[Rows]] = {}
    columns: dict[str, tuple[int, int]] = {}
    known: dict[str, Module] = {}
    for name, regions in native.parts.items():
        where = modules[name]
        known[where.module.name] = where.module
        for region in regions:
            _check(native, region)
            box = region.box
            for row0, row1, output in where.runs:
                first, last = max(row0, box.row0), min(row1, box.row1)
                if first < last:
                    run = Rows(region.row + first - box.row0, output + first - row0, last - first)
                    rows.setdefault(where.module.name, []).append(run)
            columns[where.module.name] = box.col0, box.col1
    return tuple(Share(module, tuple(sorted(rows[name])), columns[name]) for name, module in known.items())


def _check(native: NativeTensor, region: Region) -> None:
    if region.transposed or region.pairs or region.halves or region.row_step > 1 or region.repeat > 1:
        raise NotExpressible(f"{native.name} can't have an adapter: its rows aren't those of a module of transformers")
