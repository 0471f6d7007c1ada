"""Kinds of models that learn from different samples: the one place where each names what it does with data.

What each computes, megatron_lite.models.networks says.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from megaconv.errors import UsageError
from megaconv.model.config import ModelConfig
from megatron_lite.data.batches import Batch
from megatron_lite.data.datasets import Sampling
from megatron_lite.data.masked.dataset import MaskedSampling
from megatron_lite.data.masked.masking import Masking
from megatron_lite.data.masked.samples import bert_sample, t5_sample
from megatron_lite.data.masked.vocabulary import vocabulary
from megatron_lite.data.tokenizer import Tokenizer
from megatron_lite.models.batch import Microbatch
from megatron_lite.settings.architecture import model_type
from megatron_lite.settings.config import Settings


@dataclass(frozen=True)
class ModelType:
    tokens: tuple[str, ...]
    """What of a sample is tokens of the vocabulary."""
    microbatch: Callable[[Batch, Settings], Microbatch]
    """Of samples' arrays [micro_batch_size, ...]."""
    sampling: Callable[[Settings, ModelConfig, Tokenizer, int], Sampling] | None = None
    """(settings, model, tokenizer, tokens of a sequence) -> how samples are made; None: windows of tokens. Raises UsageError."""
    extra_ids: Callable[[Settings], int] | None = None
    """How many sentinels Megatron adds to BERT's vocabulary, beside [BOS] and [EOS]; None: nothing is added."""
    nothing_found: str = "see --split"
    """What to do where there is no sample."""


def _of_pairs(batch: Batch) -> Microbatch:
    """Rows of pairs one behind another; what fills them up stands behind all that counts, where a decoder doesn't see it."""
    length, reference = batch["tokens"].shape[-1], batch["reference"]
    tokens, labels, counting = (batch[name].view(-1, length) for name in ("tokens", "labels", "loss_mask"))
    return Microbatch(tokens, labels, counting, reference=reference.flatten() if reference.numel() else None)


def _of_decoder(batch: Batch, settings: Settings) -> Microbatch:
    if settings.dpo.dpo:
        return _of_pairs(batch)
    data, mask = settings.data, batch["loss_mask"]
    packed = data.finetune_data is not None  # examples don't see each other
    return Microbatch(
        batch["tokens"], batch["labels"],
        loss_mask=None if bool(mask.all()) else mask,
        positions=batch["position_ids"] if data.reset_position_ids or packed else None,
        documents=_lengths(batch["documents"]) if data.reset_attention_mask or packed else None,
    )  # fmt: skip


def _lengths(documents: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    """Of each sequence's documents, from the ordinals of its tokens' documents [batch, sequence]."""
    return tuple(tuple(torch.unique_consecutive(row, return_counts=True)[1].tolist()) for row in documents)


def _of_bert(batch: Batch, settings: Settings) -> Microbatch:
    return Microbatch(
        batch["text"], batch["labels"], batch["loss_mask"].float(), types=batch["types"],
        visible=batch["padding_mask"].bool(), swapped=batch["is_random"],
    )  # fmt: skip


def _bert_sampling(settings: Settings, config: ModelConfig, tokenizer: Tokenizer, seq_length: int) -> Sampling:
    masked, words = settings.masked, vocabulary(tokenizer, ("cls", "sep", "mask", "pad"))
    masking, two_parts = Masking(masked.mask_prob), config.head.binary

    return MaskedSampling(
        lambda sentences, longest, seed: bert_sample(
            sentences, longest, seq_length, seed, masking, words, two_parts=two_parts
        ),
        seq_length - 3, 2 if two_parts else 1, masked.short_seq_prob, settings.training.seed, cache_path(settings),
    )  # fmt: skip


def _of_t5(batch: Batch, settings: Settings) -> Microbatch:
    return Microbatch(
        batch["text_dec"], batch["labels"], batch["loss_mask"].float(), source=batch["text_enc"],
        source_visible=batch["enc_mask"].bool(),
    )  # fmt: skip


def _t5_sampling(settings: Settings, _: ModelConfig, tokenizer: Tokenizer, seq_length: int) -> Sampling:
    masked, words = settings.masked, vocabulary(tokenizer, ("cls", "sep", "mask", "pad", "bos", "eos"))
    if not words.sentinels:
        raise UsageError(
            "the tokenizer has no <extra_id_0>, which stands for a run of hidden words; take --tokenizer-type "
            "BertWordPieceLowerCase --vocab-file, to which --vocab-extra-ids adds them"
        )
    masking = Masking(masked.mask_prob, T5_NGRAM, use_geometric_distribution=True)
    decoder_seq = settings.training.decoder_seq_length

    return MaskedSampling(
        lambda sentences, longest, seed: t5_sample(sentences, longest, seq_length, decoder_seq, seed, masking, words),
        seq_length - 2, 1, masked.short_seq_prob, settings.training.seed, cache_path(settings),
    )  # fmt: skip


def _of_task(batch: Batch, settings: Settings) -> Microbatch:
    """Choices of an example are rows one behind another. Padding has the padding's token for a type, which may be no type."""
    length = batch["text"].shape[-1]
    text, types, mask = (batch[name].reshape(-1, length) for name in ("text", "types", "padding_mask"))
    return Microbatch(
        text, text, types=types * mask, visible=mask.bool(), answers=batch["label"], counting=batch["counts"].float()
    )


OF_TASK = ModelType(("text",), _of_task)
"""A BERT that learns a --task."""


T5_NGRAM = 10
"""Words of a run at most: Megatron's pretrain_t5."""


def cache_path(settings: Settings) -> Path | None:
    return Path(settings.data.data_cache_path) if settings.data.data_cache_path else None


SENTENCES = (
    "documents of two sentences or more are needed, none of them longer than 512 tokens: preprocess --split-sentences"
)

MODEL_TYPES: Mapping[str, ModelType] = {
    "gpt": ModelType(("tokens", "labels"), _of_decoder),
    "bert": ModelType(("text", "labels"), _of_bert, _bert_sampling, lambda _: 0, SENTENCES),
    "t5": ModelType(
        ("text_enc", "text_dec", "labels"),
        _of_t5,
        _t5_sampling,
        lambda settings: settings.masked.vocab_extra_ids,
        "documents of sentences are needed, none longer than 512 tokens: preprocess --split-sentences",
    ),
}
"""By --model-type."""


def type_of(settings: Settings, config: ModelConfig) -> ModelType:
    return MODEL_TYPES[model_type(settings, config)] if settings.tasks.task is None else OF_TASK


@dataclass(frozen=True)
class Feeder:
    """Turns a rank's batch into microbatches on its device."""

    kind: ModelType
    settings: Settings
    device: torch.device
    dp: int
    dp_rank: int

    def microbatches(self, batch: Batch) -> list[Microbatch]:
        return list(self._microbatches(batch))

    def _microbatches(self, batch: Batch) -> Iterator[Microbatch]:
        count = len(next(iter(batch.values())))
        for number in range(count):
            one = {name: rows[number] for name, rows in batch.items()}
            index = number * self.dp + self.dp_rank
            yield self.kind.microbatch(one, self.settings).numbered(index).to(self.device)
