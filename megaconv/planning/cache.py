"""The cache of a sequence in inference: the bytes that each layer keeps for the tokens to come.

    attention   k and v of each key/value head, for each token in reach; a rank has at least one head
    latent      the latent vector and the rotating part of the keys, for each token, on every tensor rank
    sparse      the same, and the indexer's key
    compressed  the key of each token in reach and of each entry, and the indexer's key of an entry, on every tensor rank
    linear      the last inputs of the convolution, and the state in float32
    kda, mamba  the same
    convolution the last inputs of the convolution
    side by side  that of attention and that of mamba

A layer that shares the keys and values of an earlier layer keeps nothing.

Inference engines such as vLLM, SGLang and TensorRT-LLM keep these. megatron-lite keeps all heads of latent attention,
and all tokens of layers with a window.
"""

from collections.abc import Callable

from megaconv.model.config import ModelConfig
from megaconv.model.subjects import LayerKind
from megaconv.planning.mixers import entries_of, in_layer, mixer_word

FLOAT32 = 4
MAMBA_CONVOLUTION = 4
"""Positions of Mamba 2's convolution."""


def reach(kind: LayerKind, tokens: int) -> int:
    """Return the number of cached tokens to which a token attends."""
    return min(tokens, kind.window or kind.chunk or tokens)


def cache_bytes(
    config: ModelConfig, kind: LayerKind, tokens: int, tp: int, cached: int, itemsize: int
) -> float:
    """Return the bytes that a rank keeps for one sequence in a layer.

    tokens: of the sequence. cached: bytes of an element of keys and values. itemsize: bytes of an activation.
    """
    word = mixer_word(config, kind)
    if word == "none" or kind.shares_kv:
        return 0.0
    if word == "compressed":
        return _of_compressed(config, kind, tokens) * cached
    found = 0.0
    if word in _STATES:
        channels, state = _STATES[word](config)
        found = (channels * itemsize + state * FLOAT32) / tp
        if word != "side_by_side":
            return found
        word = "attention"
    return found + _of_token(in_layer(config, kind), word, tp) * reach(kind, tokens) * cached


def _of_compressed(config: ModelConfig, kind: LayerKind, tokens: int) -> float:
    """Return the elements of keys, which are the values too. Tokens that make up the next entry are not counted."""
    head_dim = config.attention.head_dim
    of_indexer = config.compressed.index_dim if kind.entries == "selected" else 0
    entries = entries_of(config, kind, tokens) * (head_dim + of_indexer)
    return reach(kind, tokens) * head_dim + entries


def _of_token(config: ModelConfig, word: str, tp: int) -> float:
    """Return the elements that a rank keeps for a token."""
    attention, latent = config.attention, config.latent
    if word == "attention":
        width = attention.head_dim + attention.value_dim
        return max(1.0, attention.kv_heads / tp) * width
    found = latent.kv_rank + latent.rope_dim
    return found + (config.indexer.head_dim if word == "sparse" else 0)


def _of_delta_net(config: ModelConfig) -> tuple[float, float]:
    """Return the elements of the convolution's inputs, and of the state."""
    linear = config.linear
    keys, values = linear.key_heads * linear.key_dim, linear.value_heads * linear.value_dim
    return (2 * keys + values) * (linear.conv - 1), values * linear.key_dim


def _of_mamba(config: ModelConfig) -> tuple[float, float]:
    """Return the elements of the convolution's inputs, and of the state."""
    mamba = config.mamba
    inner = mamba.heads * mamba.head_dim
    channels = inner + 2 * mamba.groups * mamba.state
    return channels * (MAMBA_CONVOLUTION - 1), inner * mamba.state


def _of_convolution(config: ModelConfig) -> tuple[float, float]:
    """Return the elements of the convolution's inputs. There is no other state."""
    return config.hidden * (config.convolution.width - 1), 0


_STATES: dict[str, Callable[[ModelConfig], tuple[float, float]]] = {
    "linear": _of_delta_net,
    "kda": _of_delta_net,
    "mamba": _of_mamba,
    "convolution": _of_convolution,
    "side_by_side": _of_mamba,
}
"""Mixers whose cache does not grow with the sequence."""
