"""A described inference server: the model, its layout, and the sequences that it generates at a time."""

from dataclasses import dataclass
from functools import cached_property

from formats.tensor import ITEMSIZE
from megaconv.model.config import ModelConfig
from megaconv.model.layout import Layout
from megaconv.planning.run import Run

PROMPT_AT_ONCE = 8192
"""Tokens of prompts that an engine computes in one pass (vLLM's --max-num-batched-tokens)."""


@dataclass(frozen=True, kw_only=True)
class Serving:
    """The sizes of an inference server. A replica is a copy of the model on tp x pp GPUs."""

    config: ModelConfig
    layout: Layout
    """EP 1: tensor ranks shard each expert (ETP). EP = TP: they share the experts. Larger: replicas share them too."""
    dp: int
    """Replicas."""
    seq: int
    """Tokens of a sequence, prompt and answer."""
    batch: int = 1
    """Sequences that a replica generates at a time."""
    fp8: bool = False
    """True if the layers' weights are FP8."""
    cached: int = 2
    """Bytes of an element of cached keys and values."""
    vocab_divisor: int = 128

    @property
    def world(self) -> int:
        """GPUs."""
        return self.layout.tp * self.layout.pp * self.dp

    @property
    def itemsize(self) -> int:
        """Bytes of an activation, and of a weight outside the layers."""
        return ITEMSIZE[self.config.dtype]

    @property
    def weight(self) -> int:
        """Bytes of a layer's weight."""
        return 1 if self.fp8 else self.itemsize

    @property
    def sharing(self) -> int:
        """Replicas that share experts."""
        return max(1, self.layout.ep // self.layout.tp)

    @property
    def passing(self) -> int:
        """Sequences of one pass: the stages of a pipeline work on different ones."""
        return -(-self.batch // self.layout.pp)

    @cached_property
    def prompt(self) -> Run:
        """The pass of one prompt of `seq` tokens, as a microbatch."""
        return Run(
            config=self.config,
            layout=self.layout,
            dp=self.dp,
            seq=self.seq,
            global_batch=self.dp,
            dtype=self.config.dtype,
            sequence_parallel=self.layout.tp > 1,
            vocab_divisor=self.vocab_divisor,
        )
