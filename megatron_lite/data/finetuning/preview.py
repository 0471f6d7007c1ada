"""`--show-sample`: a sample as text, with a mark on its learned parts."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from numpy.typing import NDArray

from megatron_lite.data.finetuning.image_dataset import ImageSample
from megatron_lite.data.finetuning.pair_dataset import PairSample
from megatron_lite.data.samples import Sample
from megatron_lite.data.tokenizer import Tokenizer

MANY = 12
"""The length of a repetition that is not spelled out."""


def preview(sample: Sample | ImageSample | PairSample, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield a line for each run of learned or unlearned tokens, example by example. Special tokens are spelled out."""
    learned = int(sample.loss_mask.sum())
    if isinstance(sample, PairSample):
        names = ("chosen", "rejected")
        title = f"the first pair: {learned:,} of its tokens are compared"
        if len(sample.good):
            names = ("good" if sample.good[0] else "bad", "with the answer to another question")
            title = "the first rated answer"
        yield title
        for row, name in enumerate(names):
            # Without the last label, which is no input. A single token has none.
            end = int(sample.lengths[row]) - 1
            yield f"  {name}"
            yield from _runs(
                sample.tokens[row, : max(end, 1)],
                sample.labels[row, :end],
                sample.loss_mask[row, :end],
                tokenizer,
            )
        return
    yield f"the first sample: {learned:,} of its {len(sample.tokens):,} tokens are learned"
    for ordinal in range(int(sample.documents.max()) + 1):
        inside = sample.documents == ordinal
        if sample.loss_mask[inside].any():
            yield f"  example {ordinal + 1}"
            yield from _runs(
                sample.tokens[inside], sample.labels[inside], sample.loss_mask[inside], tokenizer
            )


def _runs(
    tokens: NDArray[Any], labels: NDArray[Any], mask: NDArray[Any], tokenizer: Tokenizer
) -> Iterator[str]:
    # The first token is not a label; every other token is the label of the token before it.
    every, marks = [int(tokens[0]), *map(int, labels)], [False, *map(bool, mask)]
    for mark, run in groupby(zip(marks, every, strict=True), key=lambda pair: pair[0]):
        text = _spelled([token for _, token in run], tokenizer)
        yield f"    {'learned' if mark else 'given  '} {text!r}"


def _spelled(tokens: Sequence[int], tokenizer: Tokenizer) -> str:
    """Return the text of tokens. A token that is repeated many times, as those of images are, is spelled once."""
    text = ""
    waiting: list[int] = []
    for token, run in groupby(tokens):
        times = len(list(run))
        if times < MANY:
            waiting += [token] * times
            continue
        text += tokenizer.spelled([*waiting, token]) + f" x {times:,} "
        waiting = []
    return text + tokenizer.spelled(waiting)
