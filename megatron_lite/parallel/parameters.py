"""Facts about each parameter: the ranks that share it, and the part of its gradient that this rank computes."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megaconv.families import family
from megaconv.model.config import ModelConfig
from megaconv.model.layout import Chunk, Layout
from megaconv.model.naming import CORE
from megaconv.model.natives import NativeTensor, native_tensors
from megatron_lite.parallel.parameter_kinds import Declaration, Kind

if TYPE_CHECKING:
    from torch import nn

    from megatron_lite.parallel.grid import Grid


ROWS = ".token_rows.rows"
"""End of the names of trained rows of an embedding or a head."""


_MTP = "mtp."
"""Prefix of the names of layers that predict further tokens."""


@dataclass(frozen=True)
class ParameterInfo:
    """The facts about one parameter of this rank."""

    chunk: int
    """The index of its virtual stage on this rank."""
    native: NativeTensor
    """Its name and shape, and the rectangles of canonical tensors that it consists of."""
    kind: Kind
    partial: bool
    """True if this rank computes only a share of the gradient. The sum over the tensor ranks is the whole gradient."""
    tied: str | None
    """The grid axis along which other stages hold a copy. The gradient is the sum over all copies."""
    is_copy: bool
    """True for every copy except the first."""
    second_names: tuple[str, ...] = ()
    """Other names of the parameter in checkpoints."""
    frozen: bool = False
    """True if the parameter keeps its loaded value: only adapters are trained, the gate of retrieval is 0, or it rests."""
    in_float32: bool = False
    """True if the parameter is float32, whatever the model's dtype."""
    rests: bool = False
    """True if the loss doesn't depend on the parameter, which keeps its value. Checkpoints have optimizer state of it all the
    same, which is zero."""

    @property
    def name(self) -> str:
        return self.native.name

    @property
    def replicated(self) -> bool:
        """True if every tensor rank has a copy."""
        return self.kind.copied

    @property
    def trained(self) -> bool:
        """True if the parameter has a gradient and optimizer state."""
        return self.kind is not Kind.UNTRAINED and not self.frozen

    @property
    def reduced_over(self) -> str:
        """The grid axis along which other ranks hold the same parameter, with gradients from other tokens."""
        return "edp" if self.kind is Kind.EXPERT else "replicas"

    @property
    def is_matrix(self) -> bool:
        """True for matrices and convolutions. Norms are none, though those of single heads have a row for each head."""
        return len(self.native.shape) > 1 and "norm" not in self.name

    @property
    def decays(self) -> bool:
        """True if weight decay applies: to matrices, but not to norms, to biases and to what keeps its value."""
        return self.is_matrix and self.kind is not Kind.CONSTANT and not self.rests

    @property
    def decoupled(self) -> bool:
        """True for the embedding, the head and trained rows of them, which may have a separate learning rate."""
        return (self.kind is Kind.VOCABULARY or self.name.endswith(ROWS)) and self.decays


def can_rest(name: str, kind: Kind) -> bool:
    """Return whether a parameter is trained by the losses of further tokens alone. name: ParameterInfo.name."""
    return name.startswith(_MTP) and kind is not Kind.UNTRAINED


def is_head(name: str) -> bool:
    """Return whether a parameter is of the head. name: ParameterInfo.name."""
    return name.startswith("output_layer.")


def parameter_infos(
    declared: Mapping[str, Declaration],
    config: ModelConfig,
    grid: "Grid",
    index: int,
    chunk: Chunk,
    vocab_rows: int,
    *,
    sequence: bool,
    frozen: Callable[[str], bool] = lambda name: False,
    local_layers: bool = False,
) -> Iterator[ParameterInfo]:
    """Yield all parameters of a chunk, in the order in which a forward pass uses them.

    declared: by the chunk's modules. index: of the chunk on this rank.
    vocab_rows: rows of the whole vocabulary, padding included.
    sequence: whether sequence parallelism is on. frozen: whether the parameter of a name keeps its value.
    local_layers: whether norms are stored as in Megatron's local layers, without a number added.
    """
    at = grid.experts_place() if config.experts.count else (0, 0)
    table = family(config.family).rows
    natives = native_tensors(table, config, CORE, grid.layout, grid.tp_rank, chunk, vocab_rows, *at)
    named = trained_tensors(natives)
    assert named.keys() == declared.keys(), (
        f"modules and table differ in {sorted(named.keys() ^ declared.keys())}"
    )
    for name, (kind, in_float32) in declared.items():
        native, *others = named[name]
        native = native._replace(shift=0) if local_layers else native
        # An expert's tensor belongs to one expert rank, even if the table shards no axis of it.
        assert kind is Kind.EXPERT or native.replicated == kind.copied, (
            f"{name} is declared as {kind}"
        )
        yield ParameterInfo(
            index,
            native,
            kind,
            partial=is_partial(kind, grid.layout.tp, sequence=sequence),
            tied=tied_along(native, kind, config, grid.layout),
            is_copy=native.copy is not None,
            second_names=tuple(other.name for other in others),
            frozen=frozen(name),
            in_float32=in_float32,
        )


def adapter_info(
    chunk: int,
    native: NativeTensor,
    declaration: Declaration,
    tp: int,
    *,
    sequence: bool,
    tied: str | None = None,
) -> ParameterInfo:
    """Return the facts about a parameter beside the model's own, which the model's table does not list."""
    return ParameterInfo(
        chunk,
        native,
        declaration.kind,
        partial=is_partial(declaration.kind, tp, sequence=sequence),
        tied=tied,
        is_copy=native.copy is not None,
        in_float32=declaration.in_float32,
    )


def rows_info(
    matrix: ParameterInfo, rows: NativeTensor, tp: int, *, sequence: bool
) -> ParameterInfo:
    """Return the facts about trained rows of an embedding or a head. matrix: the whole matrix."""
    declaration = Declaration(Kind.OF_HEADS)
    return adapter_info(matrix.chunk, rows, declaration, tp, sequence=sequence, tied=matrix.tied)


def is_partial(kind: Kind, tp: int, *, sequence: bool) -> bool:
    """Return whether a rank computes only a share of the gradient. sequence: whether sequence parallelism is on."""
    return tp > 1 and (kind is Kind.OF_HEADS or (kind is Kind.OF_TOKENS and sequence))


def trained_tensors(natives: Iterable[NativeTensor]) -> dict[str, list[NativeTensor]]:
    """Return the tensors of a chunk that are parameters by name, each followed by its second names."""
    found: dict[str, list[NativeTensor]] = {}
    for native in natives:
        same = None
        if native.copy is not None:
            if not (native.copy.written and native.copy.used):
                continue
            same = next((each for each in found.values() if each[0].parts == native.parts), None)
        if same is None:
            found[native.name] = [native]
        else:
            same.append(native)
    return found


def tied_along(native: NativeTensor, kind: Kind, config: ModelConfig, layout: Layout) -> str | None:
    """Return the grid axis along which other stages hold a trained copy of the parameter, or None."""
    if layout.pp == 1:
        return None
    if kind is Kind.VOCABULARY and at_both_ends(native, config):
        return "ends"
    return (
        "stacks"
        if layout.split_rank and native.parts.keys() & {"embed.weight", "positions.weight"}
        else None
    )


def at_both_ends(native: NativeTensor, config: ModelConfig) -> bool:
    """Return whether first and last stage both hold the table: tied weights, or the embedding that MTP layers use."""
    return config.tie_embeddings or (config.mtp_layers > 0 and "embed.weight" in native.parts)


def replace_parameter(module: "nn.Module", name: str, parameter: "nn.Parameter") -> None:
    """Replace the parameter of this dotted name."""
    path, _, last = name.rpartition(".")
    module.get_submodule(path).register_parameter(last, parameter)
