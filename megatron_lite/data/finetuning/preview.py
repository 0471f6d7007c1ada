"""`--show-sample`: a sample as text, and which of it is learned."""

from collections.abc import Iterator
from itertools import groupby

from megatron_lite.data.samples import Sample
from megatron_lite.data.tokenizer import Tokenizer


def preview(sample: Sample, tokenizer: Tokenizer) -> Iterator[str]:
    """A line for each run of tokens that are learned or not, example by example; special tokens as they are spelled."""
    learned = int(sample.loss_mask.sum())
    yield f"the first sample: {learned:,} of its {len(sample.tokens):,} tokens are learned"
    for ordinal in range(int(sample.documents.max()) + 1):
        inside = sample.documents == ordinal
        mask = sample.loss_mask[inside] > 0
        if not mask.any():
            continue
        yield f"  example {ordinal + 1}"
        # The first token is nobody's label, every other one is the label of the one before it.
        tokens = [int(sample.tokens[inside][0]), *map(int, sample.labels[inside])]
        marks = [False, *map(bool, mask)]
        for mark, run in groupby(zip(marks, tokens, strict=True), key=lambda pair: pair[0]):
            text = tokenizer.spelled([token for _, token in run])
            yield f"    {'learned' if mark else 'given  '} {text!r}"
