"""A run that is only described, and the contents of its pipeline stages."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from formats.tensor import ITEMSIZE
from megaconv.families import family
from megaconv.megatron.arguments.param_groups import is_expert
from megaconv.model.config import ModelConfig
from megaconv.model.layout import Chunk, padded_vocab
from megaconv.model.naming import CORE
from megaconv.model.natives import NativeTensor, RankTensors
from megaconv.model.table import encoder_layers, with_beside
from megatron_lite.models.mixers.table import stays_in_float32
from megatron_lite.parallel.parameter_kinds import Kind
from megatron_lite.parallel.parameters import ParameterInfo, is_partial, tied_along, trained_tensors
from megatron_lite.settings.options import ModelOptions, OptimizerOptions
from megatron_lite.settings.sizes import Sizes


class StackPart(NamedTuple):
    """Consecutive layers of one stack."""

    layers: range
    tokens: int
    """Tokens of a microbatch in these layers."""
    crosses: bool
    """True if each layer also attends to the encoder's output."""


BEFORE, BEHIND = -1, 1 << 30
"""Places before and after all layers, for sorting."""
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


@dataclass(frozen=True)
class Described:
    """A run as pretrain would set it up from the same flags and number of processes."""

    config: ModelConfig
    sizes: Sizes
    options: ModelOptions
    optimizer: OptimizerOptions

    @property
    def itemsize(self) -> int:
        """Bytes of an element of parameters and activations."""
        return ITEMSIZE[self.options.dtype]

    @property
    def world(self) -> int:
        return self.sizes.layout.tp * self.sizes.layout.pp * self.replicas

    @property
    def replicas(self) -> int:
        """Number of ranks that hold the same parameters, except those of experts."""
        return self.sizes.dp * self.sizes.cp

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on one context rank. T5: of the decoder."""
        length = self.sizes.decoder_seq or self.sizes.seq
        return length // self.sizes.cp * self.sizes.micro_batch

    @property
    def source_tokens(self) -> int:
        """Tokens of a microbatch that the encoder reads. 0 for a model with one stack."""
        return self.sizes.seq * self.sizes.micro_batch if self.sizes.decoder_seq else 0

    def stacks(self, chunk: Chunk) -> Iterator["StackPart"]:
        """Yield the parts of a chunk: layers of T5's encoder, then layers of the decoder or of the only stack."""
        of_encoder = encoder_layers(self.config, chunk)
        if of_encoder:
            yield StackPart(of_encoder, self.source_tokens, crosses=False)
        own = range(chunk.first_layer, chunk.first_layer + chunk.layers)
        if own:
            yield StackPart(own, self.tokens, crosses=self.config.encoder.layers > 0)

    @property
    def expert_dp(self) -> int:
        """Number of ranks that hold the same experts."""
        layout = self.sizes.layout
        return layout.tp * self.replicas // (layout.ep * layout.etp)

    @property
    def microbatches(self) -> int:
        """Microbatches of a step on one rank."""
        return self.sizes.batch.full // (self.sizes.micro_batch * self.sizes.dp)

    @property
    def sequence(self) -> bool:
        """True if activations between matrices are sharded (sequence parallelism)."""
        return self.options.sequence_parallel and self.sizes.layout.tp > 1

    @property
    def vocab_rows(self) -> int:
        """Rows of the whole vocabulary, padding included."""
        return padded_vocab(self.config.vocab, self.options.vocab_divisor, self.sizes.layout.tp)

    def chunks(self, pp_rank: int) -> list[Chunk]:
        """Return the virtual stages of a pipeline rank."""
        return [chunk for chunk in self.sizes.layout.chunks() if chunk.pp_rank == pp_rank]

    @cached_property
    def _tensors(self) -> RankTensors:
        rows = with_beside(family(self.config.family).rows, self.config)
        return RankTensors(rows, self.config, CORE, self.sizes.layout, self.vocab_rows)

    def parameters(self, index: int, chunk: Chunk) -> Sequence[ParameterInfo]:
        """Return the parameters of a chunk on the first tensor and expert ranks, in the order of a forward pass, unit by unit.

        Other ranks hold the same number of parameters.
        """
        natives = (native for native, *_ in trained_tensors(self._tensors.of(0, chunk)).values())
        return [
            self._info(index, native)
            for native in sorted(natives, key=lambda native: _place(native.name))
        ]

    def _info(self, index: int, native: NativeTensor) -> ParameterInfo:
        """Return the facts that modules declare, but from the family's table. The table also covers models without modules."""
        kind, layout = kind_of(native, self.config), self.sizes.layout
        return ParameterInfo(
            index,
            native,
            kind,
            partial=is_partial(kind, layout.tp, sequence=self.sequence),
            tied=tied_along(native, kind, self.config, layout),
            is_copy=native.copy is not None,
            in_float32=stays_in_float32(native.name),
        )


def kind_of(native: NativeTensor, config: ModelConfig) -> Kind:
    """Return the kind of a parameter, from its name and sharding."""
    if is_expert(native.name):
        return Kind.EXPERT
    if native.name.endswith("router.expert_bias"):
        return Kind.UNTRAINED
    if ".core_attention.indexer." in native.name:
        return Kind.CONSTANT
    if native.replicated:
        of_heads = config.attention.qk_norm and native.name.endswith(
            ("q_layernorm.weight", "k_layernorm.weight")
        )
        return Kind.OF_HEADS if of_heads else Kind.OF_TOKENS
    return Kind.VOCABULARY if native.name in VOCABULARY else Kind.SHARDED


def _place(name: str) -> int:
    """Return the sort key of a parameter in a forward pass: the number of its layer."""
    parts = name.split(".")
    if parts[1:2] == ["layers"]:
        return int(parts[2])
    return BEFORE if parts[0] == "embedding" else BEHIND
