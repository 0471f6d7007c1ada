"""A training run that is only described: the model, the layout and the sizes that decide its cost."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from formats.tensor import ITEMSIZE
from megaconv.model.config import ModelConfig
from megaconv.model.layout import Chunk, Layout, padded_vocab
from megaconv.model.subjects import LayerKind
from megaconv.model.table import encoder_layers
from megaconv.planning.adapters import NO_ADAPTERS, LayerAdapters
from megaconv.planning.capacity import capacity_of
from megaconv.planning.recomputation import KEEP_ALL, Recompute


class StackPart(NamedTuple):
    """Consecutive layers of one stack."""

    layers: range
    tokens: int
    """Tokens of a microbatch in these layers."""
    crosses: bool
    """True if each layer also attends to the encoder's output."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The sizes of a run. Names and values of the words are Megatron's."""

    config: ModelConfig
    layout: Layout
    dp: int
    """Data-parallel ranks, without context-parallel ranks."""
    cp: int = 1
    seq: int
    """Tokens of a sequence. T5: of the encoder's sequence."""
    decoder_seq: int = 0
    """T5: tokens of the decoder's sequence. 0 for a model with one stack."""
    micro_batch: int = 1
    """Sequences of a microbatch."""
    global_batch: int
    """Sequences of a step."""
    dtype: str = "bfloat16"
    """Dtype of parameters and activations."""
    sequence_parallel: bool = False
    recompute: Recompute = KEEP_ALL
    offloaded: int = 0
    """First layers whose activations are in main memory (--cpu-offloading-num-layers). Only at PP 1."""
    context: str = "p2p"
    """`p2p`, `all_gather`, `a2a` or `a2a+p2p`: how context-parallel ranks exchange keys and values."""
    near: int = 1
    """For a2a+p2p: number of neighbouring context ranks that exchange heads for tokens."""
    dispatcher: str = "alltoall"
    """`alltoall`, `allgather`, or `flex` (Megatron-LM with DeepEP): how ranks exchange the tokens of experts."""
    overlaps_experts: bool = False
    """True if the exchange of experts' tokens runs behind another microbatch's passes, as only Megatron-LM has it."""
    padded_to: float | None = None
    """The capacity factor that experts are padded to; None: no padding."""
    balance: tuple[str, ...] = ()
    """Kinds of the balancing losses of experts, such as `seq_aux_loss`."""
    moves_bias: bool = False
    """True if each step moves the biases of routers that have them."""
    sharding: str = "no_shard"
    """One of SHARDING (megaconv/model/memory.py): the state that data-parallel ranks share."""
    overlaps_reduce: bool = True
    """True if gradients are reduced during the backward pass (--overlap-grad-reduce)."""
    overlaps_gather: bool = True
    """True if parameters are gathered during the passes (--overlap-param-gather)."""
    vocab_divisor: int = 128
    trains: bool = True
    """False for a model that is computed without gradients, such as a teacher."""
    frozen: bool = False
    """True if the model's weights have no gradients, because only adapters are trained."""
    trains_embedding: bool = False
    trains_head: bool = False
    """True if the module is trained whole beside adapters."""
    trains_rows: bool = False
    """True if rows of the embedding are trained beside adapters."""
    adapters: tuple[tuple[LayerKind, LayerAdapters], ...] = ()
    """The adapters of a layer of each kind; kinds without adapters may be missing."""

    rests_mtp: bool = False
    """True if MTP layers are not computed, because the loss is that of the next token alone."""

    rests_head: bool = False
    """True if the head is not computed, because the loss is that of the hidden states before it."""

    head_again: bool = False
    """True if each pass computes the head once more before, without gradients, as losses of pairs do."""

    losses: int = 0
    """Losses and figures whose sums ranks exchange in a step; 0: those of the model's own head."""

    def adapters_of(self, kind: LayerKind) -> LayerAdapters:
        """Return the adapters of a layer of this kind."""
        return dict(self.adapters).get(kind, NO_ADAPTERS)

    @property
    def backward(self) -> int:
        """Backward passes of a microbatch: 1, or 0 for a model that isn't trained."""
        return int(self.trains)

    @property
    def mtp_layers(self) -> int:
        """The number of MTP layers that a pass computes."""
        return 0 if self.rests_mtp else self.config.mtp_layers

    @property
    def head_is_frozen(self) -> bool:
        """True if the head has no gradient. A head of scores is trained whole beside adapters, as by peft."""
        if self.rests_head:
            return True
        return self.frozen and not self.trains_head and not self.config.has("scores")

    @property
    def embedding_is_frozen(self) -> bool:
        """True if the embedding has no gradient."""
        return self.frozen and not self.trains_embedding

    @property
    def input_is_frozen(self) -> bool:
        """True if the first layer's input has no gradient."""
        return self.embedding_is_frozen and not self.trains_rows

    @property
    def itemsize(self) -> int:
        """Bytes of an element of parameters and activations."""
        return ITEMSIZE[self.dtype]

    @property
    def world(self) -> int:
        """Ranks of the run."""
        return self.layout.tp * self.layout.pp * self.replicas

    @property
    def replicas(self) -> int:
        """Number of ranks that hold the same parameters, except those of experts."""
        return self.dp * self.cp

    @property
    def expert_dp(self) -> int:
        """Number of ranks that hold the same experts."""
        return self.layout.tp * self.replicas // (self.layout.ep * self.layout.etp)

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on one context rank. T5: of the decoder."""
        length = self.decoder_seq or self.seq
        return length // self.cp * self.micro_batch

    @property
    def routed_tokens(self) -> int:
        """Tokens that one rank's routers choose experts for."""
        return self.tokens // (self.layout.tp if self.sequence else 1)

    @property
    def routed_rows(self) -> int:
        """Rows of experts that come from one rank's tokens, padding included."""
        experts, tokens = self.config.experts, self.routed_tokens
        if self.padded_to is None:
            return tokens * experts.per_token
        capacity = capacity_of(tokens, experts.per_token, experts.count, self.padded_to)
        return experts.count * capacity

    @property
    def source_tokens(self) -> int:
        """Tokens of a microbatch that the encoder reads. 0 for a model with one stack."""
        return self.seq * self.micro_batch if self.decoder_seq else 0

    @property
    def microbatches(self) -> int:
        """Microbatches of a step on one rank."""
        return self.global_batch // (self.micro_batch * self.dp)

    @property
    def sequence(self) -> bool:
        """True if activations between matrices are sharded (sequence parallelism)."""
        return self.sequence_parallel and self.layout.tp > 1

    @cached_property
    def vocab_rows(self) -> int:
        """Rows of the whole vocabulary, padding included."""
        return padded_vocab(self.config.vocab, self.vocab_divisor, self.layout.tp)

    @property
    def logit_columns(self) -> float:
        """Outputs of the head for a token on one rank: its part of the vocabulary, or all scores, which each rank computes."""
        return self.config.head.labels or self.vocab_rows / self.layout.tp

    @property
    def computed_columns(self) -> float:
        """logit_columns as far as a pass computes them."""
        return 0.0 if self.rests_head else self.logit_columns

    def chunks(self, pp_rank: int) -> list[Chunk]:
        """Return the virtual stages of a pipeline rank."""
        return [chunk for chunk in self.layout.chunks() if chunk.pp_rank == pp_rank]

    def stacks(self, chunk: Chunk) -> Iterator[StackPart]:
        """Yield the parts of a chunk: layers of T5's encoder, then layers of the decoder or of the only stack."""
        of_encoder = encoder_layers(self.config, chunk)
        if of_encoder:
            yield StackPart(of_encoder, self.source_tokens, crosses=False)
        own = range(chunk.first_layer, chunk.first_layer + chunk.layers)
        if own:
            yield StackPart(own, self.tokens, crosses=self.config.encoder.layers > 0)

    @property
    def width(self) -> float:
        """Elements of a token between layers on one rank."""
        return self.config.hidden / (self.layout.tp if self.sequence else 1)
