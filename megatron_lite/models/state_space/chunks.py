"""Chunks of a sequence, and the places in them where documents of packed rows begin and end."""

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def in_chunks(x: Tensor, chunk: int) -> Tensor:
    """[batch, tokens, ...] -> [batch, chunks, chunk, ...]. The last chunk is padded with zeros."""
    padding = -x.shape[1] % chunk
    if padding:
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, padding))
    return x.reshape(x.shape[0], -1, chunk, *x.shape[2:])


class Boundaries(NamedTuple):
    """The documents of each chunk. States pass from chunk to chunk, but never from document to document."""

    same: Tensor
    """Bool [batch, chunks, chunk, chunk]: whether two tokens belong to one document."""
    continues: Tensor
    """Bool [batch, chunks, chunk]: tokens of the document in which the previous chunk ended."""
    ends: Tensor
    """Bool [batch, chunks, chunk]: tokens of the document in which the chunk ends."""
    whole: Tensor
    """Bool [batch, chunks]: chunks that lie in one document, which also contains the previous chunk's last token."""


def boundaries(documents: Tensor, chunk: int) -> Boundaries:
    """Return the documents of each chunk. documents: int [batch, tokens], the number of each token's document.

    The numbers of a row never decrease. An initial state belongs to the row's first document. Padding belongs to the
    last document, so that the last state stays the state after the last token.
    """
    padding = documents[:, -1:].expand(-1, -documents.shape[1] % chunk)
    padded = torch.cat((documents, padding), 1)
    # [batch, chunks, chunk]
    numbers = padded.view(len(padded), -1, chunk)
    # [batch, chunks]: the documents of the last token of each chunk, and of the last token before it
    last = numbers[:, :, -1]
    first_of_row = numbers[:, :1, 0]
    before = torch.cat((first_of_row, last[:, :-1]), 1)
    return Boundaries(
        same=numbers.unsqueeze(-1) == numbers.unsqueeze(-2),
        continues=numbers == before.unsqueeze(-1),
        ends=numbers == last.unsqueeze(-1),
        whole=before == last,
    )


def decay_between(decay: Tensor, bounds: Boundaries | None) -> Tensor:
    """Return exp(decay[t] - decay[s]) [batch, chunks, heads, t, s] for tokens s up to t of one document, else 0.

    decay: [batch, chunks, chunk, heads], summed over the chunk's tokens up to each token.
    The mask is added to the exponent. A product with a mask after exp would give inf * 0 = NaN in the backward pass.
    """
    chunk = decay.shape[2]
    # [t, s], with documents [batch, chunks, 1, t, s]: later tokens, and tokens of other documents
    hidden = torch.ones(chunk, chunk, dtype=torch.bool, device=decay.device).triu(1)
    if bounds is not None:
        hidden = (hidden | ~bounds.same).unsqueeze(2)
    mask = torch.zeros(hidden.shape, dtype=decay.dtype, device=decay.device)
    mask = mask.masked_fill_(hidden, -torch.inf)
    # Contiguous, because the heads would otherwise be the innermost axis of all larger tensors.
    by_head = decay.transpose(2, 3).contiguous()
    exponent = by_head.unsqueeze(-1) - by_head.unsqueeze(-2)
    return exponent.add_(mask).exp_()


class Passed(NamedTuple):
    """The factors by which states pass through chunks."""

    into: Tensor
    """[batch, chunks, chunk, heads]: of the state before the chunk, at each token."""
    out: Tensor
    """[batch, chunks, chunk, heads]: of what a token adds to the state after the chunk."""
    through: Tensor
    """[batch, chunks, heads]: of the state before the chunk, in the state after it."""


def passed(decay: Tensor, bounds: Boundaries | None) -> Passed:
    """Return the factors of all chunks. decay: as in decay_between."""
    at_end = decay[:, :, -1:]
    found = Passed(
        into=decay.exp(),
        out=(at_end - decay).exp(),
        through=at_end[:, :, 0].exp(),
    )
    if bounds is None:
        return found
    return Passed(
        into=found.into * bounds.continues.unsqueeze(-1),
        out=found.out * bounds.ends.unsqueeze(-1),
        through=found.through * bounds.whole.unsqueeze(-1),
    )
