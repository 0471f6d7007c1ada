"""The memory of an inference server's fullest rank, and the time of its tokens."""

from collections.abc import Hashable
from dataclasses import dataclass, fields

from megaconv.model.config import ModelConfig
from megaconv.model.layout import Chunk
from megaconv.planning.activations import layer_elements
from megaconv.planning.cache import cache_bytes
from megaconv.planning.layer_costs import LOGIT_BYTES, Machine
from megaconv.planning.layer_costs import message_seconds as prompt_message
from megaconv.planning.parameters import Parameters
from megaconv.planning.rank_memory import CONTEXT
from megaconv.planning.serving import PROMPT_AT_ONCE, Serving
from megaconv.planning.token_time import (
    TokenTime,
    head_time,
    layer_time,
    message_seconds,
    prompt_layer_seconds,
    together,
)


@dataclass(frozen=True, kw_only=True)
class ServingMemory:
    """Memory of a rank, in bytes."""

    weights: float
    cache: float
    activations: float
    """The bytes that a layer needs for the tokens of prompts that are computed at one time."""
    logits: float
    buffers: float
    """Memory of CUDA and NCCL."""

    @property
    def total(self) -> int:
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """Return the parts by name, in whole bytes."""
        return {part.name: int(getattr(self, part.name)) for part in fields(self)}


@dataclass(frozen=True)
class Served:
    """The estimate of one server."""

    serving: Serving
    memory: ServingMemory
    """Memory of the fullest rank."""
    time: TokenTime
    """The time of one token of each sequence."""
    first_token: float
    """Seconds of a prompt of `seq` tokens, if the server does nothing else."""
    parameters: int
    """Parameters of the fullest rank."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens that all replicas generate together."""
        return self.serving.batch * self.serving.dp / self.time.total


class Server:
    """Estimates servers of one model."""

    def __init__(self, config: ModelConfig, machine: Machine) -> None:
        self.config, self.machine = config, machine
        self._parameters: dict[Hashable, Parameters] = {}

    def estimate(self, serving: Serving) -> Served:
        """Return the estimate. Raises LayoutError if the model can't be sharded so."""
        chunks = list(serving.layout.chunks())
        sizes = [self._memory(serving, chunk) for chunk in chunks]
        memory = max(sizes, key=lambda parts: parts.total)
        fullest = chunks[sizes.index(memory)]
        return Served(
            serving,
            memory,
            self._token_time(serving),
            self._first_token(serving),
            self._of(serving).chunk(fullest).parameters,
        )

    def most_sequences(self, serving: Serving, memory: int) -> int:
        """Return the most sequences of a replica that fit; 0 if none fits. Raises LayoutError as `estimate` does."""
        found = []
        for chunk in serving.layout.chunks():
            parts = self._memory(serving, chunk)
            growing = (parts.cache + parts.logits) / serving.batch
            fixed = parts.total - parts.cache - parts.logits
            left = memory - fixed
            found.append(int(left // growing) if growing else 1 << 30)
        return max(0, min(found))

    def _of(self, serving: Serving) -> Parameters:
        """Return the parameters of ranks."""
        layout = serving.layout
        key = layout.tp, layout.ep, layout.etp
        if key not in self._parameters:
            self._parameters[key] = Parameters.of(self.config, *key, serving.vocab_divisor)
        return self._parameters[key]

    def _memory(self, serving: Serving, chunk: Chunk) -> ServingMemory:
        config, layout, run = self.config, serving.layout, serving.prompt
        kinds = config.layers[chunk.first_layer : chunk.first_layer + chunk.layers]
        whole = self._of(serving).chunk(chunk).parameters
        outside = self._of(serving).chunk(_ends_of(chunk)).parameters
        of_sequence = sum(
            cache_bytes(config, kind, serving.seq, layout.tp, serving.cached, serving.itemsize)
            for kind in kinds
        )
        widest = max((layer_elements(run, kind) for kind in kinds), default=0.0)
        columns = run.vocab_rows / layout.tp if chunk.is_last else 0.0
        return ServingMemory(
            weights=(whole - outside) * serving.weight + outside * serving.itemsize,
            cache=serving.batch * of_sequence,
            activations=widest * min(serving.seq, PROMPT_AT_ONCE) * serving.itemsize,
            logits=serving.batch * columns * LOGIT_BYTES,
            buffers=CONTEXT,
        )

    def _token_time(self, serving: Serving) -> TokenTime:
        """Return the time in which each sequence gets one token."""
        stages = [self._stage_time(serving, chunk) for chunk in serving.layout.chunks()]
        passes = min(serving.batch, serving.layout.pp)
        longest = max(stage.total for stage in stages)
        once = together(stages)
        # As many passes as there are sequences or stages follow each other through the longest stage.
        idle = max(0.0, passes * longest - once.total)
        return together((once, TokenTime(bubble=idle)))

    def pass_time(self, serving: Serving) -> TokenTime:
        """Return the time of one pass through all stages, in which `serving.passing` sequences get one token."""
        return together(self._stage_time(serving, chunk) for chunk in serving.layout.chunks())

    def _stage_time(self, serving: Serving, chunk: Chunk) -> TokenTime:
        parameters, config = self._of(serving), self.config
        times = {
            kind: layer_time(
                serving, kind, parameters.layer(config.layers.index(kind)), self.machine
            )
            for kind in set(config.layers)
        }
        last = chunk.first_layer + chunk.layers
        found = [times[kind] for kind in config.layers[chunk.first_layer : last]]
        if chunk.is_last:
            found.append(head_time(serving, self._head(serving), self.machine))
        if serving.layout.pp > 1:
            found.append(TokenTime(communication=message_seconds(serving, self.machine)))
        return together(found)

    def _head(self, serving: Serving) -> int:
        """Return the head's parameters on a rank, which are the embedding's if they are tied."""
        return serving.prompt.vocab_rows // serving.layout.tp * self.config.hidden

    def _first_token(self, serving: Serving) -> float:
        parameters, config = self._of(serving), self.config
        each = {
            kind: prompt_layer_seconds(
                serving, kind, parameters.layer(config.layers.index(kind)), self.machine
            )
            for kind in set(config.layers)
        }
        head = head_time(serving, self._head(serving), self.machine).total
        messages = (serving.layout.pp - 1) * prompt_message(serving.prompt, self.machine.gpu)
        return sum(each[kind] for kind in config.layers) + head + messages


def _ends_of(chunk: Chunk) -> Chunk:
    """Return the chunk without its layers."""
    return Chunk(0, 0, 0, 0, is_first=chunk.is_first, is_last=chunk.is_last)
