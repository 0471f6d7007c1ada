"""A run that is only described, and what its pipeline stages would hold."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from megaconv.families import family
from megaconv.megatron.arguments.param_groups import is_expert
from megaconv.model.config import ModelConfig
from megaconv.model.layout import Chunk, padded_vocab
from megaconv.model.naming import CORE
from megaconv.model.natives import NativeTensor, RankTensors
from megaconv.model.table import with_beside
from megatron_lite.parallel.kinds import Kind
from megatron_lite.parallel.parameters import ParameterInfo, is_partial, tied_along, trained_tensors
from megatron_lite.settings.options import ModelOptions, OptimizerOptions
from megatron_lite.settings.sizes import Sizes

BEFORE, BEHIND = -1, 1 << 30
"""Of the layers."""
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


@dataclass(frozen=True)
class Described:
    """A run: what pretrain would make of the same flags in so many processes."""

    config: ModelConfig
    sizes: Sizes
    options: ModelOptions
    optimizer: OptimizerOptions

    @property
    def itemsize(self) -> int:
        """Bytes of an element of parameters and activations."""
        dtype: torch.dtype = getattr(torch, self.options.dtype)
        return dtype.itemsize

    @property
    def world(self) -> int:
        return self.sizes.layout.tp * self.sizes.layout.pp * self.replicas

    @property
    def replicas(self) -> int:
        """Ranks that hold the same parameters, those of experts apart."""
        return self.sizes.dp * self.sizes.cp

    @property
    def tokens(self) -> int:
        """Of a microbatch that a context rank has."""
        return self.sizes.seq // self.sizes.cp * self.sizes.micro_batch

    @property
    def expert_dp(self) -> int:
        """Ranks that hold the same experts."""
        layout = self.sizes.layout
        return layout.tp * self.replicas // (layout.ep * layout.etp)

    @property
    def microbatches(self) -> int:
        """Of a step and rank."""
        return self.sizes.batch.full // (self.sizes.micro_batch * self.sizes.dp)

    @property
    def sequence(self) -> bool:
        """Whether activations between matrices are sharded."""
        return self.options.sequence_parallel and self.sizes.layout.tp > 1

    @property
    def vocab_rows(self) -> int:
        """Of the whole vocabulary, padding included."""
        return padded_vocab(self.config.vocab, self.options.vocab_divisor, self.sizes.layout.tp)

    def chunks(self, pp_rank: int) -> list[Chunk]:
        """Virtual stages of a pipeline rank."""
        return [chunk for chunk in self.sizes.layout.chunks() if chunk.pp_rank == pp_rank]

    @cached_property
    def _tensors(self) -> RankTensors:
        rows = with_beside(family(self.config.family).rows, self.config)
        return RankTensors(rows, self.config, CORE, self.sizes.layout, self.vocab_rows)

    def parameters(self, index: int, chunk: Chunk) -> Sequence[ParameterInfo]:
        """Of the first tensor and expert ranks of a chunk; others hold as much. In the order of a forward pass, unit by unit."""
        natives = (native for native, *_ in trained_tensors(self._tensors.of(0, chunk)).values())
        return [self._info(index, native) for native in sorted(natives, key=lambda native: _place(native.name))]

    def _info(self, index: int, native: NativeTensor) -> ParameterInfo:
        """What modules declare, read off the table, which also has models that there are no modules for."""
        kind, layout = kind_of(native, self.config), self.sizes.layout
        return ParameterInfo(
            index,
            native,
            kind,
            partial=is_partial(kind, layout.tp, sequence=self.sequence),
            tied=tied_along(native, kind, self.config, layout),
            is_copy=native.copy is not None,
        )


def kind_of(native: NativeTensor, config: ModelConfig) -> Kind:
    if is_expert(native.name):
        return Kind.EXPERT
    if native.name.endswith("router.expert_bias"):
        return Kind.UNTRAINED
    if native.replicated:
        of_heads = config.attention.qk_norm and native.name.endswith(("q_layernorm.weight", "k_layernorm.weight"))
        return Kind.OF_HEADS if of_heads else Kind.OF_TOKENS
    return Kind.VOCABULARY if native.name in VOCABULARY else Kind.SHARDED


def _place(name: str) -> int:
    """Where a forward pass needs it: the number of its layer."""
    parts = name.split(".")
    if parts[1:2] == ["layers"]:
        return int(parts[2])
    return BEFORE if parts[0] == "embedding" else BEHIND
