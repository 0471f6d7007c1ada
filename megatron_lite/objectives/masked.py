"""Masked words, which a BERT or a T5 predicts from the words around them."""

from collections.abc import Sequence
from typing import ClassVar

from megaconv.errors import UsageError
from megatron_lite.data.batches import Batch
from megatron_lite.data.datasets import Sampling
from megatron_lite.data.masked.dataset import MaskedSampling
from megatron_lite.data.masked.masking import Masking
from megatron_lite.data.masked.samples import bert_sample, t5_sample
from megatron_lite.data.masked.vocabulary import vocabulary
from megatron_lite.data.samples import Arrays
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.bert import SWAPPED_PARTS
from megatron_lite.objectives.corpus import cache_path
from megatron_lite.objectives.objective import Objective
from megatron_lite.objectives.training_data import Setup
from megatron_lite.settings.config import Settings

T5_NGRAM = 10
"""Longest masked span in words, from Megatron's pretrain_t5."""

Sentences = Sequence[Sequence[int]]


class MaskedWords(Objective):
    """BERT: masked words, and whether the two parts of a sample are swapped."""

    tokens: ClassVar = ("text", "labels")
    nothing_found: ClassVar = (
        "documents of two sentences or more are needed, none of them longer than 512 tokens: "
        "preprocess --split-sentences"
    )

    @classmethod
    def of(cls, settings: Settings, model_type: str) -> "MaskedWords | None":
        return cls() if model_type == "bert" else None

    def extra_ids(self, settings: Settings) -> int | None:
        return 0

    def sampling(self, setup: Setup) -> Sampling | None:
        masked, seq_length = setup.settings.masked, setup.sizes.seq
        words = vocabulary(setup.tokenizer, ("cls", "sep", "mask", "pad"))
        masking, two_parts = Masking(masked.mask_prob), setup.config.head.binary

        def make(sentences: Sentences, longest: int, seed: int) -> Arrays:
            return bert_sample(
                sentences, longest, seq_length, seed, masking, words, two_parts=two_parts
            )

        return MaskedSampling(
            make,
            longest=seq_length - 3,
            least_sentences=2 if two_parts else 1,
            short_probability=masked.short_seq_prob,
            seed=setup.settings.training.seed,
            cache=cache_path(setup.settings),
        )

    def microbatch(self, batch: Batch, settings: Settings) -> Microbatch:
        return Microbatch(
            batch["text"],
            batch["labels"],
            batch["loss_mask"].float(),
            types=batch["types"],
            visible=batch["padding_mask"].bool(),
            extras={SWAPPED_PARTS: batch["is_random"]},
        )


class MaskedSpans(Objective):
    """T5: the decoder predicts the masked spans of the encoder's input."""

    tokens: ClassVar = ("text_enc", "text_dec", "labels")
    nothing_found: ClassVar = "documents of sentences are needed, none longer than 512 tokens: preprocess --split-sentences"

    @classmethod
    def of(cls, settings: Settings, model_type: str) -> "MaskedSpans | None":
        return cls() if model_type == "t5" else None

    def extra_ids(self, settings: Settings) -> int | None:
        return settings.masked.vocab_extra_ids

    def sampling(self, setup: Setup) -> Sampling | None:
        masked = setup.settings.masked
        training = setup.settings.training
        seq_length = setup.sizes.seq
        words = vocabulary(setup.tokenizer, ("cls", "sep", "mask", "pad", "bos", "eos"))
        if not words.sentinels:
            raise UsageError(
                "the tokenizer has no <extra_id_0>, which stands for a run of hidden words; take --tokenizer-type "
                "BertWordPieceLowerCase --vocab-file, to which --vocab-extra-ids adds them"
            )
        masking = Masking(masked.mask_prob, T5_NGRAM, use_geometric_distribution=True)

        def make(sentences: Sentences, longest: int, seed: int) -> Arrays:
            return t5_sample(
                sentences, longest, seq_length, training.decoder_seq_length, seed, masking, words
            )

        return MaskedSampling(
            make,
            longest=seq_length - 2,
            least_sentences=1,
            short_probability=masked.short_seq_prob,
            seed=training.seed,
            cache=cache_path(setup.settings),
        )

    def microbatch(self, batch: Batch, settings: Settings) -> Microbatch:
        return Microbatch(
            batch["text_dec"],
            batch["labels"],
            batch["loss_mask"].float(),
            source=batch["text_enc"],
            source_visible=batch["enc_mask"].bool(),
        )
