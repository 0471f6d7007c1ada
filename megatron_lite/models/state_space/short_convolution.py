"""The short causal convolution before a state: each channel is a weighted sum of its last few tokens."""

import torch
from torch import Tensor


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    documents: Tensor | None = None,
    before: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (float32 [tokens, batch, channels], the last inputs [batch, channels, width - 1] in x's dtype).

    x [tokens, batch, channels]; weight [channels, 1, width], whose last column belongs to the token itself.
    documents: int [batch, tokens]. Tokens of earlier documents count as zeros.
    before: the inputs before the first token, of the form of the second result; None: zeros.
    float64 inputs give a float64 result.
    """
    tokens, width = len(x), weight.shape[-1]
    dtype = torch.promote_types(x.dtype, torch.float32)
    whole = _with_earlier(x, width, before)
    columns = weight.squeeze(1).to(dtype).unbind(-1)
    y = whole[width - 1 :] * columns[-1]
    for back in range(1, width):
        first = width - 1 - back
        part = whole[first : first + tokens] * columns[first]
        y = y + _masked(part, documents, back)
    if bias is not None:
        y = y + bias.to(dtype)
    return y, _last(whole, tokens)


def last_inputs(x: Tensor, width: int, before: Tensor | None) -> Tensor:
    """Return the last inputs of a convolution, the second result of short_convolution. x: of more than one token."""
    return _last(_with_earlier(x, width, before), len(x))


def _with_earlier(x: Tensor, width: int, before: Tensor | None) -> Tensor:
    """Return the inputs before the first token, then x: [width - 1 + tokens, batch, channels]."""
    if before is None:
        before = x.new_zeros(*x.shape[1:], width - 1)
    earlier = before.permute(2, 0, 1).to(x.dtype)
    return torch.cat((earlier, x))


def _last(whole: Tensor, tokens: int) -> Tensor:
    """Return the inputs after the first `tokens`, with channels before places."""
    return whole[tokens:].permute(1, 2, 0)


def _masked(part: Tensor, documents: Tensor | None, back: int) -> Tensor:
    """Set the part to zero at tokens whose input `back` places earlier is of another document."""
    return part if documents is None else part * _same(documents, back)


def _same(documents: Tensor, back: int) -> Tensor:
    """Return bool [tokens, batch, 1]: whether the token `back` places earlier belongs to the same document.

    Tokens before the row belong to its first document.
    """
    rows = documents.t()
    earlier = torch.cat((rows[:1].expand(back, -1), rows))[: len(rows)]
    return (rows == earlier).unsqueeze(-1)
