"""Maps a rank's matrix to modules of transformers: a fused qkv contains some rows of q_proj, k_proj and v_proj.

Each module has its own adapter, as in peft. So the trainer trains the same parameters as peft, and its files can be
loaded in any layout. The mapping follows from the family's table.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megaconv.errors import NotExpressible
from megaconv.families import family
from megaconv.model.config import ModelConfig
from megaconv.model.layout import Chunk, Layout
from megaconv.model.naming import HF_STACKED
from megaconv.model.natives import NativeTensor, Region, native_tensors
from megaconv.model.regions import PLAIN

_EXPERT = re.compile(r"\.experts\.(\d+)\.")


class Rows(NamedTuple):
    """Consecutive outputs of a module, and the rows of a rank's matrix that compute them."""

    local: Sequence[int]
    """A row of the rank's matrix for each output."""
    whole: int
    """The first output."""

    @property
    def size(self) -> int:
        return len(self.local)


@dataclass(frozen=True)
class Module:
    """A linear module of transformers, or one expert's part of a parameter that holds all experts."""

    path: str
    """Path in the whole model."""
    parameter: str | None
    """The parameter of the module at this path that has the adapter; None: its `weight`."""
    expert: int | None
    out: int
    width: int
    transposed: bool
    """True if transformers stores the weight as [in, out]."""

    @property
    def key(self) -> str:
        """The last word of the module's path or the parameter's name."""
        return self.parameter or self.path.rpartition(".")[2]

    @property
    def name(self) -> str:
        """The name for the tensors of the adapter; each expert has its own."""
        expert = "" if self.expert is None else f".{self.expert}"
        return f"{self.path}{expert}.{self.parameter}" if self.parameter else self.path


@dataclass(frozen=True)
class Share:
    """The part of a module that a rank's matrix contains."""

    module: Module
    rows: tuple[Rows, ...]
    columns: tuple[int, int]
    """The module's input columns: (first, last + 1)."""

    @property
    def out(self) -> int:
        return sum(run.size for run in self.rows)

    @property
    def width(self) -> int:
        return self.columns[1] - self.columns[0]


@dataclass(frozen=True)
class Whole:
    """The place of a canonical matrix in a module."""

    module: Module
    runs: tuple[tuple[int, int, int], ...]
    """(first row, last row + 1, the output of the module for the first row)."""


def modules_of(config: ModelConfig) -> Mapping[str, Whole]:
    """Return the module of each canonical matrix in the decoder's layers."""
    whole = Chunk(0, 0, 0, config.layer_count, is_first=True, is_last=True)
    found: dict[str, Whole] = {}
    for native in native_tensors(
        family(config.family).rows, config, HF_STACKED, Layout(), 0, whole, config.vocab
    ):
        if native.copy is None and len(native.shape) > 1:
            found |= {name: where for name, where in _wholes(native) if name.startswith("layers.")}
    return found


def _wholes(native: NativeTensor) -> Iterator[tuple[str, Whole]]:
    stacked = len(native.shape) == 3
    rows, columns = native.shape[-2:]
    if stacked and rows == 1:
        return  # a convolution [channels, 1, width] is no matrix
    path, _, last = native.name.rpartition(".")
    for name, regions in native.parts.items():
        if any(region.order != PLAIN and not region.transposed for region in regions):
            continue  # no trainable model has such a matrix
        transposed = regions[0].transposed
        out, width = (columns, rows) if transposed else (rows, columns)
        # A parameter [experts, rows, columns] counts as a matrix with experts · rows rows.
        expert = regions[0].row // rows if stacked else None
        module = Module(path, None if last == "weight" else last, expert, out, width, transposed)
        first = [region.col if transposed else region.row % rows for region in regions]
        runs = []
        for region, output in zip(regions, first, strict=True):
            runs.append((region.box.row0, region.box.row1, output))
        yield name, Whole(module, tuple(runs))


def shares_of(native: NativeTensor, modules: Mapping[str, Whole]) -> tuple[Share, ...]:
    """Return the parts of modules in a rank's matrix.

    Raises NotExpressible if its rows are not rows of transformers' modules.
    """
    if not native.parts.keys() <= modules.keys():
        raise NotExpressible(
            f"{native.name} can't have an adapter: transformers has no module with these weights"
        )
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
                    local = region.order.native_rows(region, range(first, last))
                    run = Rows(local, output + first - row0)
                    rows.setdefault(where.module.name, []).append(run)
            columns[where.module.name] = box.col0, box.col1
    return tuple(
        Share(module, tuple(sorted(rows[name], key=_first_row)), columns[name])
        for name, module in known.items()
    )


def of_all_experts(modules: Mapping[str, Whole]) -> frozenset[str]:
    """Return the names of modules that hold the matrices of all experts as one (DBRX). modules: modules_of the model."""
    experts: defaultdict[str, set[str]] = defaultdict(set)
    for canonical, where in modules.items():
        expert = _EXPERT.search(canonical)
        if expert is not None:
            experts[where.module.name].add(expert[1])
    return frozenset(name for name, numbers in experts.items() if len(numbers) > 1)


def require_own(shares: Iterable[Share], shared: Collection[str], *, trains: bool) -> None:
    """Raise NotExpressible if all experts of a layer would share an adapter. shared: of_all_experts of the model.

    Without training, each expert computes with a copy of the adapter, unless the matrix is a stack (Aria).
    """
    for share in shares:
        is_stack = share.module.expert is not None
        if share.module.name in shared and (trains or is_stack):
            raise NotExpressible(
                f"{share.module.name} can't have an adapter: transformers has one matrix for all experts of a layer, and each expert "
                "has an adapter of its own here; name other matrices (--lora-targets)"
            )


def refuse_dora(of_experts: Sequence[Module], others: Iterable[Module]) -> None:
    """Raise NotExpressible for DoRA of experts, if there are any. others: the other modules that would have DoRA."""
    if not of_experts:
        return
    possible = {module.key for module in others} - {module.key for module in of_experts}
    raise NotExpressible(
        f"{of_experts[0].name} belongs to experts, for which peft has no DoRA; with --lora-dora, name other matrices: "
        f"--lora-targets {' '.join(sorted(possible)) or 'o_proj'}"
    )


def _first_row(run: Rows) -> int:
    return run.local[0]


def _check(native: NativeTensor, region: Region) -> None:
    if region.transposed:
        raise NotExpressible(
            f"{native.name} can't have an adapter: its rows aren't those of a module of transformers"
        )
