"""A pass of a network, step by step: the hidden states after the embedding and after each layer.

Each walk is a generator, so that two networks can be walked side by side and neither keeps the states of earlier layers.
"""

from collections.abc import Generator, Iterator
from typing import NamedTuple

from torch import Tensor

from megatron_lite.models.bert import Bert
from megatron_lite.models.biencoder import Biencoder, Tower
from megatron_lite.models.carrying import CarryingChunk, run_layer
from megatron_lite.models.chunk import ModelChunk, Stack
from megatron_lite.models.encoder_decoder import EncoderDecoder
from megatron_lite.models.ends import Embedding
from megatron_lite.models.network_interface import Network
from megatron_lite.models.passes import Pass


class State(NamedTuple):
    """The result of one step."""

    name: str
    """Such as `embedding`, `layer 3`, `final norm`."""
    hidden: Tensor
    """[sequence, batch, hidden], or [texts, width] of heads that read one token of a text."""


def walk(network: Network, run: Pass) -> Iterator[State]:
    """Yield the states in the order of their computation. The last one is the input of the logits."""
    if isinstance(network, CarryingChunk):
        yield from _carrying(network, run)
    elif isinstance(network, ModelChunk):
        yield from _decoder(network, run)
    elif isinstance(network, Bert):
        yield from _bert(network, run)
    elif isinstance(network, EncoderDecoder):
        yield from _encoder_decoder(network, run)
    elif isinstance(network, Biencoder):
        yield from _biencoder(network, run)


Steps = Generator[State, None, Tensor]
"""States, and at the end the last hidden states."""


def _embedded(embedding: Embedding | None, of: str, run: Pass) -> Steps:
    """Embed the tokens. of: the name of a tower or an encoder with a space."""
    assert embedding is not None
    x: Tensor = embedding(run)
    yield State(f"{of}embedding", x)
    return x


def _stack(stack: Stack | None, of: str, x: Tensor, *beside: Tensor | Pass) -> Steps:
    """Run the layers of a stack, without its last norm. beside: further arguments of each layer."""
    assert stack is not None
    for number, layer in enumerate(stack.layers):
        x = layer(x, *beside)
        yield State(f"{of}layer {number}", x)
    return x


def _normed(stack: Stack | None, of: str, x: Tensor) -> Steps:
    """Apply the last norm of a stack, if it has one."""
    assert stack is not None
    if stack.last_norm is not None:
        x = stack.last_norm(x)
        yield State(f"{of}final norm", x)
    return x


def _carrying(network: CarryingChunk, run: Pass) -> Iterator[State]:
    state = network.begin(run)
    yield State("embedding", state.hidden)
    for number, layer in enumerate(network.decoder.layers):
        state = run_layer(layer, state, run, {})
        yield State(f"layer {number}", state.hidden)
    yield from _normed(network.decoder, "", state.hidden)


def _decoder(network: ModelChunk, run: Pass) -> Iterator[State]:
    x = yield from _embedded(network.embedding, "", run)
    x = yield from _stack(network.decoder, "", x, run)
    yield from _normed(network.decoder, "", x)


def _bert(network: Bert, run: Pass) -> Iterator[State]:
    x = yield from _embedded(network.embedding, "", run)
    x = yield from _stack(network.encoder, "", x, run)
    if network.pooler is not None:
        normed = x if network.encoder.last_norm is None else network.encoder.last_norm(x)
        yield from _pooled(network, network.pooler(normed))
    yield from _normed(network.encoder, "", x)


def _pooled(network: Bert, pooled: Tensor) -> Iterator[State]:
    """Yield the states of the heads that read the first token. pooled: [texts, hidden]."""
    yield State("pooled text", pooled)
    for head in (network.binary_head, network.classification_head, network.multichoice_head):
        if head is not None:
            yield State("scores of texts", head(pooled))


def _encoder_decoder(network: EncoderDecoder, run: Pass) -> Iterator[State]:
    source = run.source
    assert source is not None
    memory = yield from _embedded(network.embedding, "encoder ", source)
    memory = yield from _stack(network.encoder, "encoder ", memory, source)
    memory = yield from _normed(network.encoder, "encoder ", memory)
    x = yield from _embedded(network.embedding, "", run)
    x = yield from _stack(network.decoder, "", x, memory, run)
    yield from _normed(network.decoder, "", x)


def _biencoder(network: Biencoder, run: Pass) -> Iterator[State]:
    query, context = network.towers
    assert run.source is not None
    yield from _tower(query, "query ", run)
    if context is not query:
        yield from _tower(context, "context ", run.source)


def _tower(tower: Tower, of: str, run: Pass) -> Iterator[State]:
    x = yield from _embedded(tower.embedding, of, run)
    x = yield from _stack(tower.encoder, of, x, run)
    x = yield from _normed(tower.encoder, of, x)
    yield State(f"{of}embeddings of texts", tower.embeddings(x))
