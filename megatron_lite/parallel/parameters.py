"""What is to be known of each parameter beside its value: who else has it, whose share of its gradient this is."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from megaconv.families import family
from megaconv.model.config import ModelConfig
from megaconv.model.layout import Chunk, Layout
from megaconv.model.naming import CORE
from megaconv.model.natives import NativeTensor, native_tensors
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.kinds import Kind


@dataclass(frozen=True)
class ParameterInfo:
    chunk: int
    """Its virtual stage on this rank."""
    native: NativeTensor
    """Its name, shape, and the rectangles of canonical tensors that it is made of."""
    kind: Kind
    partial: bool
    """The gradient of a copy is only this rank's share: the sum over the tensor ranks is the whole."""
    tied: str | None
    """The grid's axis along which other stages have a copy: its gradient is the sum of all."""
    is_copy: bool
    """One of those, but not the first."""
    second_names: tuple[str, ...] = ()
    """What checkpoints call it besides."""
    frozen: bool = False
    """It stays as it was loaded, beside adapters that are trained."""

    @property
    def name(self) -> str:
        return self.native.name

    @property
    def replicated(self) -> bool:
        """Every tensor rank has a copy."""
        return self.kind.copied

    @property
    def trained(self) -> bool:
        """Whether it has a gradient and an optimizer's state."""
        return self.kind is not Kind.UNTRAINED and not self.frozen

    @property
    def reduced_over(self) -> str:
        """The grid's axis along which other ranks have the same parameter, and gradients from other tokens."""
        return "edp" if self.kind is Kind.EXPERT else "replicas"

    @property
    def decays(self) -> bool:
        """Weight decay is for matrices, neither for norms nor for biases."""
        return len(self.native.shape) > 1

    @property
    def decoupled(self) -> bool:
        """Whether it is the embedding or the head, which may have a learning rate of their own."""
        return self.kind is Kind.VOCABULARY and self.decays


def parameter_infos(
    kinds: Mapping[str, Kind],
    config: ModelConfig,
    grid: Grid,
    index: int,
    chunk: Chunk,
    vocab_rows: int,
    *,
    sequence: bool,
    frozen: bool = False,
) -> Iterator[ParameterInfo]:
    """All parameters of a chunk, in the order in which a forward pass uses them.

    kinds: as the chunk's modules declare them. index: of the chunk on this rank. vocab_rows: of the whole vocabulary, padding
    included. sequence: with sequence parallelism. frozen: whether none of them is trained.
    """
    at = grid.experts_place() if config.experts.count else (0, 0)
    table = family(config.family).rows
    natives = native_tensors(table, config, CORE, grid.layout, grid.tp_rank, chunk, vocab_rows, *at)
    named = trained_tensors(natives)
    assert named.keys() == kinds.keys(), f"modules and table differ in {sorted(named.keys() ^ kinds.keys())}"
    for name, kind in kinds.items():
        native, *others = named[name]
        # A tensor of an expert is somebody's own, also where the table has nothing to shard of it.
        assert kind is Kind.EXPERT or native.replicated == kind.copied, f"{name} is declared as {kind}"
        yield ParameterInfo(
            index,
            native,
            kind,
            partial=is_partial(kind, grid.layout.tp, sequence=sequence),
            tied=tied_along(native, kind, config, grid.layout),
            is_copy=native.copy is not None,
            second_names=tuple(other.name for other in others),
            frozen=frozen,
        )


def adapter_info(chunk: int, native: NativeTensor, kind: Kind, tp: int, *, sequence: bool) -> ParameterInfo:
    """Of a matrix that is no part of the model's table, but is trained beside one that is."""
    return ParameterInfo(
        chunk, native, kind, partial=is_partial(kind, tp, sequence=sequence), tied=None, is_copy=False
    )  # fmt: skip


def is_partial(kind: Kind, tp: int, *, sequence: bool) -> bool:
    """Whether the gradient of a parameter of this kind is only its rank's share. sequence: with sequence parallelism."""
    return tp > 1 and (kind is Kind.OF_HEADS or (kind is Kind.OF_TOKENS and sequence))


def trained_tensors(natives: Iterable[NativeTensor]) -> dict[str, list[NativeTensor]]:
    """By name those of a chunk that are parameters, each with those that are second names for it."""
    found: dict[str, list[NativeTensor]] = {}
    for native in natives:
        if native.copy is not None and not (native.copy.written and native.copy.used):
            continue
        same = next((each for each in found.values() if native.copy and each[0].parts == native.parts), None)
        if same is None:
            found[native.name] = [native]
        else:
            same.append(native)
    return found


def tied_along(native: NativeTensor, kind: Kind, config: ModelConfig, layout: Layout) -> str | None:
    """The grid's axis along which other stages have a copy of a parameter that is trained."""
    if layout.pp == 1:
        return None
    if kind is Kind.VOCABULARY and at_both_ends(native, config):
        return "ends"
    return "stacks" if layout.split_rank and native.parts.keys() & {"embed.weight", "positions.weight"} else None


def at_both_ends(native: NativeTensor, config: ModelConfig) -> bool:
    """Whether first and last stage have a table of words: a tied one, or the embedding that predicts further tokens."""
    return config.tie_embeddings or (config.mtp_layers > 0 and "embed.weight" in native.parts)


def replace_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Put another one in the place of a parameter of this (dotted) name."""
    path, _, last = name.rpartition(".")
    module.get_submodule(path).register_parameter(last, parameter)
