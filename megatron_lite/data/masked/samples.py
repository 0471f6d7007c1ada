"""The inputs and labels of BERT and T5: the arrays of megatron-core's datasets, from the same draws."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megaconv.errors import UsageError
from megatron_lite.data.masked.masking import Masked, Masking, mask

Array = NDArray[np.int64]
MASK_EACH, RANDOM_EACH = 0.8, 0.5
"""BERT: the probability that a masked token becomes [MASK], and of the others that it becomes a random word."""


@dataclass(frozen=True)
class Vocabulary:
    """The facts about a tokenizer that masking needs."""

    words: int
    continues: NDArray[np.bool_]
    """True for each token that continues the word before it: it begins with ##."""
    cls: int
    sep: int
    mask: int
    pad: int
    bos: int = -1
    eos: int = -1
    sentinels: Sequence[int] = ()
    """T5's sentinels, in order."""

    @property
    def filler(self) -> int:
        """The padding while a sample is made: -1 if the padding token has another meaning too."""
        return -1 if self.pad in (self.cls, self.sep, self.mask, self.bos, self.eos) else self.pad


class BertSample(NamedTuple):
    """Arrays of shape [length]."""

    text: Array
    types: Array
    """0: [CLS], the first part and its [SEP]; 1: the second part and its [SEP]."""
    labels: Array
    """The masked tokens at their places; elsewhere -1, or 0 if -1 is the padding."""
    is_random: int
    """1 if the parts are swapped."""
    padding_mask: Array
    loss_mask: Array
    truncated: int


def bert_sample(
    sentences: Sequence[Sequence[int]],
    longest: int,
    length: int,
    seed: int,
    masking: Masking,
    words: Vocabulary,
    *,
    two_parts: bool,
) -> BertSample:
    """Return a sample. sentences, longest: from the mapping. two_parts: for a model with a binary head.

    seed: the dataset's seed plus the sample's number.
    """
    random = np.random.RandomState(seed % 2**32)
    pivot = len(sentences)
    swapped = False
    if two_parts:
        pivot = int(random.randint(1, len(sentences))) if len(sentences) >= 3 else 1
        swapped = bool(random.random_sample() < 0.5)
    first = list(chain.from_iterable(sentences[:pivot]))
    second = list(chain.from_iterable(sentences[pivot:]))
    if swapped:
        first, second = second, first
    truncated = len(first) + len(second) > longest
    _trim(first, second, longest, random)
    tokens = [words.cls, *first, words.sep]
    second_starts = len(tokens)
    if second:
        tokens += [*second, words.sep]
    types = np.zeros(length, np.int64)
    types[second_starts : len(tokens)] = 1
    types[len(tokens) :] = words.filler
    masked = mask(
        tokens,
        longest,
        masking,
        random,
        continues=words.continues,
        never=frozenset((words.cls, words.sep)),
        draw=partial(_drawn, words=words),
    )
    text = _padded(masked.tokens, length, words.filler)
    labels = np.full(length, -1, np.int64)
    loss_mask = np.zeros(length, np.int64)
    for span in masked.spans:
        labels[span.places] = span.tokens
        loss_mask[span.places] = 1
    padding_mask = np.where(text == words.filler, words.filler, 1)
    text[text == words.filler] = 0
    labels[labels == words.filler] = 0
    return BertSample(text, types, labels, int(swapped), padding_mask, loss_mask, int(truncated))


def _drawn(random: np.random.RandomState, words: Vocabulary) -> int | None:
    """Return the token that is shown in place of a masked token; None for the masked token itself."""
    if random.random_sample() < MASK_EACH:
        return words.mask
    if random.random_sample() < RANDOM_EACH:
        return None
    return int(random.randint(0, words.words))


def _trim(first: list[int], second: list[int], longest: int, random: np.random.RandomState) -> None:
    """Remove single tokens from either end of the longer part until both fit."""
    while len(first) + len(second) > longest:
        longer = first if len(first) > len(second) else second
        del longer[0 if random.random_sample() < 0.5 else -1]


class T5Sample(NamedTuple):
    """Arrays of shape [length] and [decoder length]."""

    text_enc: Array
    text_dec: Array
    labels: Array
    loss_mask: Array
    truncated: int
    enc_mask: Array
    dec_mask: Array


def t5_sample(
    sentences: Sequence[Sequence[int]],
    longest: int,
    length: int,
    decoder_length: int,
    seed: int,
    masking: Masking,
    words: Vocabulary,
) -> T5Sample:
    """Return a sample; arguments as in bert_sample.

    Raises UsageError for more spans than sentinels, or than the decoder has room for.
    """
    random = np.random.RandomState(seed % 2**32)
    tokens = [token for sentence in sentences for token in sentence]
    truncated = len(tokens) > longest
    masked = mask(
        tokens[:longest], longest, masking, random, continues=words.continues, never=frozenset((words.cls, words.sep)),
        draw=lambda _: words.mask,
    )  # fmt: skip
    shown, target = _around_sentinels(masked, words)
    if len(target) + 1 > decoder_length:
        raise UsageError(
            f"a sample hides {len(target)} tokens and sentinels, the decoder has room for {decoder_length - 1}; "
            "give a longer --decoder-seq-length, or hide less (--mask-prob)"
        )
    encoder = _padded(shown, length, words.filler)
    decoder = _padded([words.bos, *target], decoder_length, words.filler)
    labels = _padded([*target, words.eos], decoder_length, -1)
    loss_mask = (np.arange(decoder_length) <= len(target)).astype(np.int64)
    masks = [(text != words.filler).astype(np.int64) for text in (encoder, decoder)]
    for text in (encoder, decoder, labels):
        text[text == words.filler] = 0
    return T5Sample(encoder, decoder, labels, loss_mask, int(truncated), masks[0], masks[1])


def _around_sentinels(masked: Masked, words: Vocabulary) -> tuple[list[int], list[int]]:
    """Return (the text with a sentinel in place of each span, each sentinel followed by its span's tokens)."""
    if len(masked.spans) > len(words.sentinels):
        raise UsageError(
            f"a sample has {len(masked.spans)} runs of hidden words, the vocabulary {len(words.sentinels)} tokens that stand for one: "
            f"--vocab-extra-ids must be {len(masked.spans)} or more"
        )
    shown: list[int] = []
    target: list[int] = []
    done = 0
    for sentinel, span in zip(words.sentinels, masked.spans, strict=False):
        shown += [*masked.tokens[done : span.places[0]], sentinel]
        target += [sentinel, *span.tokens]
        done = span.places[-1] + 1
    return shown + masked.tokens[done:], target


def _padded(tokens: Sequence[int], length: int, filler: int) -> Array:
    """Pad the tokens to the length. Raises UsageError if there are more."""
    if len(tokens) > length:
        raise UsageError(
            f"a sample of {len(tokens)} tokens is longer than the sequence of {length}"
        )
    return np.array([*tokens, *[filler] * (length - len(tokens))], np.int64)
