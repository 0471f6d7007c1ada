"""The tokens of a forward pass: built-in ones, or the windows of a text, and the rows that fit into memory together."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megaconv.errors import UsageError
from megaconv.model.config import ModelConfig
from megatron_lite.models.batch import Microbatch

BUILT_IN = 32
"""Number of built-in tokens, unless the caller asks for another."""
WINDOW = 512
"""Tokens of a window of a text, unless the caller asks for another number."""
_STEP = 2654435761
"""A prime near 2^32 / 1.618, whose multiples are spread evenly over any range."""


def built_in_tokens(vocab: int, count: int) -> tuple[int, ...]:
    """Return tokens that are spread over the vocabulary."""
    return tuple((number + 1) * _STEP % (1 << 32) * vocab >> 32 for number in range(count))


def windows(tokens: Sequence[int], length: int) -> list[tuple[int, ...]]:
    """Return the windows of a text one after the other. A last window of a single token predicts nothing and is left out."""
    found = [tuple(tokens[first : first + length]) for first in range(0, len(tokens), length)]
    return [window for window in found if len(window) > 1]


def row_bytes(config: ModelConfig, tokens: int, itemsize: int) -> int:
    """Return an upper estimate of the activations of a row in the layer that needs most memory, in bytes.

    itemsize: bytes of an element of the dtype to compute in.
    """
    attention, experts, hidden = config.attention, config.experts, config.hidden
    ffn = max(config.mlp.ffn, experts.shared_ffn) + experts.per_token * experts.ffn
    heads = 4 * (attention.heads + attention.kv_heads) * attention.head_dim
    linear, mamba = config.linear, config.mamba
    state = linear.value_heads * linear.value_dim + mamba.heads * (mamba.head_dim + mamba.state)
    elements = (6 + 2 * experts.per_token) * hidden + 3 * ffn + heads + 8 * state
    scores = 2 * attention.heads * tokens
    return tokens * (elements * itemsize + scores * 4)


def rows_together(
    config: ModelConfig, tokens: int, itemsize: int, max_memory: int, kept: int = 0
) -> int:
    """Return the number of rows that half of the memory holds. Raises UsageError if it holds none.

    kept: further hidden states of each token that are in memory.
    """
    each = row_bytes(config, tokens, itemsize) + kept * tokens * config.hidden * itemsize
    if each > max_memory // 2:
        raise UsageError(
            f"--max-memory {max_memory:,}: {tokens} tokens need about {2 * each:,} bytes; pass more, or fewer tokens"
        )
    return max_memory // 2 // each


def batches(
    config: ModelConfig, rows: Sequence[Sequence[int]], together: int
) -> Iterator[Microbatch]:
    """Yield the rows in passes of at most `together` rows. The next token is the label of each token but the last."""
    for first in range(0, len(rows), together):
        yield _batch(config, rows[first : first + together])


def _batch(config: ModelConfig, rows: Sequence[Sequence[int]]) -> Microbatch:
    longest = max(map(len, rows))
    # Padding repeats the last token. Causal attention doesn't reach it.
    padded = [[*row, *[row[-1]] * (longest - len(row))] for row in rows]
    tokens = torch.tensor(padded)
    counts = torch.tensor([[place < len(row) - 1 for place in range(longest)] for row in rows])
    both_ways = config.has("both_ways")
    return Microbatch(
        tokens,
        labels=tokens.roll(-1, 1),
        loss_mask=counts,
        source=tokens if config.encoder.layers or config.family == "biencoder" else None,
        types=torch.zeros_like(tokens) if config.token_types else None,
        visible=torch.ones_like(tokens, dtype=torch.bool) if both_ways else None,
    )


def counted_tokens(batch: Microbatch) -> Tensor:
    """Return bool [tokens, batch]: the tokens that are no padding, but for the last one of each row, which predicts nothing."""
    assert batch.loss_mask is not None
    return batch.loss_mask.bool().t()
