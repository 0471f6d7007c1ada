"""A pass of a network, step by step: the hidden states after the embedding and after each layer.

Each walk is a generator, so that two networks can be walked side by side and neither keeps the states of earlier layers.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from megatron_lite.models.bert import Bert
from megatron_lite.models.biencoder import Biencoder, Tower
from megatron_lite.models.chunk import ModelChunk, Stack
from megatron_lite.models.encoder_decoder import EncoderDecoder
from megatron_lite.models.network_interface import Network
from megatron_lite.models.passes import Pass

FINAL = "final norm"
"""Name of the state after the norm behind the last layer."""


class State(NamedTuple):
    """The result of one step."""

    name: str
    """Such as `embedding`, `layer 3`, `final norm`."""
    hidden: Tensor
    """[sequence, batch, hidden]."""


def walk(network: Network, run: Pass) -> Iterator[State]:
    """Yield the states in the order of their computation. The last one is the input of the logits."""
    if isinstance(network, ModelChunk):
        yield from _decoder(network, run)
    elif isinstance(network, Bert):
        yield from _bert(network, run)
    elif isinstance(network, EncoderDecoder):
        yield from _encoder_decoder(network, run)
    elif isinstance(network, Biencoder):
        yield from _biencoder(network, run)


def _decoder(network: ModelChunk, run: Pass) -> Iterator[State]:
    assert network.embedding is not None
    x = network.embedding(run)
    yield State("embedding", x)
    yield from _stack(network.decoder, "", x, run)


def _bert(network: Bert, run: Pass) -> Iterator[State]:
    assert network.embedding is not None
    state = State("embedding", network.embedding(run))
    yield state
    for state in _stack(network.encoder, "", state.hidden, run):
        if network.pooler is not None and state.name == FINAL:
            yield from _pooled(network, state.hidden)
        yield state


def _pooled(network: Bert, hidden: Tensor) -> Iterator[State]:
    """Yield the states of the heads that read the first token."""
    assert network.pooler is not None
    pooled = network.pooler(hidden)
    yield State("pooled text", pooled)
    for head in (network.binary_head, network.classification_head, network.multichoice_head):
        if head is not None:
            yield State("scores of texts", head(pooled))


def _stack(stack: Stack, of: str, x: Tensor, *beside: Tensor | Pass) -> Iterator[State]:
    """Yield the states of a stack. of: the stack's name with a space. beside: further arguments of each layer."""
    for number, layer in enumerate(stack.layers):
        x = layer(x, *beside)
        yield State(f"{of}layer {number}", x)
    if stack.last_norm is not None:
        yield State(of + FINAL, stack.last_norm(x))


def _encoder_decoder(network: EncoderDecoder, run: Pass) -> Iterator[State]:
    source, embedding = run.source, network.embedding
    assert source is not None
    assert embedding is not None
    assert network.encoder is not None
    assert network.decoder is not None
    state = State("encoder embedding", embedding(source))
    yield state
    for state in _stack(network.encoder, "encoder ", state.hidden, source):
        yield state
    x = embedding(run)
    yield State("embedding", x)
    yield from _stack(network.decoder, "", x, state.hidden, run)


def _biencoder(network: Biencoder, run: Pass) -> Iterator[State]:
    query, context = network.towers
    assert run.source is not None
    yield from _tower(query, "query ", run)
    if context is not query:
        yield from _tower(context, "context ", run.source)


def _tower(tower: Tower, of: str, run: Pass) -> Iterator[State]:
    assert tower.embedding is not None
    state = State(f"{of}embedding", tower.embedding(run))
    yield state
    for state in _stack(tower.encoder, of, state.hidden, run):
        yield state
    yield State(f"{of}embeddings of texts", tower.embeddings(state.hidden))
