"""What is to be known of each parameter beside its value: who else has it, whose share of its gradient this is."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from megaconv.families import family
from megaconv.model.config import ModelConfig
from megaconv.model.layout import Chunk
from megaconv.model.naming import CORE
from megaconv.model.natives import NativeTensor, native_tensors
from megatron_lite.parallel.grid import Grid


@dataclass(frozen=True)
class ParameterInfo:
    chunk: int
    """Its virtual stage on this rank."""
    native: NativeTensor
    """Its name, shape, and the rectangles of canonical tensors that it is made of."""
    replicated: bool
    """Every tensor rank has a copy."""
    partial: bool
    """The gradient of such a copy is only this rank's share: the sum over the tensor ranks is the whole."""
    tied: bool
    """An embedding of which the other end of the pipeline has a copy: its gradient is the sum of both."""
    is_copy: bool
    """The second one of those."""

    @property
    def name(self) -> str:
        return self.native.name

    @property
    def decays(self) -> bool:
        """Weight decay is for matrices, neither for norms nor for biases."""
        return len(self.native.shape) > 1


def parameter_infos(
    config: ModelConfig, grid: Grid, index: int, chunk: Chunk, vocab_rows: int, *, sequence: bool
) -> Iterator[ParameterInfo]:
    """All parameters of a chunk, in the order of the family's table.

    index: of the chunk on this rank. vocab_rows: of the whole vocabulary, padding included. sequence: with sequence parallelism.
    """
    natives = native_tensors(family(config.family).rows, config, CORE, grid.layout, grid.tp_rank, chunk, vocab_rows)
    for native in natives:
        if native.copy is not None and not native.copy.written:
            continue
        of_heads = native.name.endswith(("q_layernorm.weight", "k_layernorm.weight"))
        is_embedding = native.name == "embedding.word_embeddings.weight"
        yield ParameterInfo(
            index,
            native,
            replicated=native.replicated,
            partial=native.replicated and grid.layout.tp > 1 and (sequence or of_heads),
            tied=config.tie_embeddings and grid.layout.pp > 1 and (is_embedding or native.copy is not None),
            is_copy=native.copy is not None,
        )


def replace_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Put another one in the place of a parameter of this (dotted) name."""
    path, _, last = name.rpartition(".")
    module.get_submodule(path).register_parameter(last, parameter)
