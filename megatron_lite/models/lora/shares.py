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
    first_output: int


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
    for name, regions in native.parts.items():
        region = regions[0]
        if len(regions) > 1 or region.pairs or region.halves or region.row_step > 1 or region.repeat > 1:
            continue  # no model that is trained has its matrices so
        rows, columns = native.shape[-2:]
        out, width = (columns, rows) if region.transposed else (rows, columns)
        expert = region.row // rows if stacked else None
        path, _, last = native.name.rpartition(".")
        module = Module(path, None if last == "weight" else last, expert, out, width, region.transposed)
        yield name, _Whole(module, region.col if region.transposed else region.row % rows)


def shares_of(native: NativeTensor, modules: Mapping[str, _Whole]) -> tuple[Share, ...]:
    """Of a rank's matrix, in the order of its rows; empty where it is made of something else."""
    if len(native.shape) != 2 or not native.parts.keys() <= modules.keys():
        return ()
    rows: dict[str, list[Rows]] = {}
    columns: dict[str, tuple[int, int]] = {}
    known: dict[str, Module] = {}
    for name, regions in native.parts.items():
        where = modules[name]
        known[where.module.name] = where.module
        for region in regions:
            _check(native, region)
            box = region.box
            run = Rows(region.row, where.first_output + box.row0, box.rows)
            rows.setdefault(where.module.name, []).append(run)
            columns[where.module.name] = box.col0, box.col1
    return tuple(Share(module, tuple(sorted(rows[name])), columns[name]) for name, module in known.items())


def _check(native: NativeTensor, region: Region) -> None:
    if region.transposed or region.pairs or region.halves or region.row_step > 1 or region.repeat > 1:
        raise NotExpressible(f"{native.name} can't have an adapter: its rows aren't those of a module of transformers")
