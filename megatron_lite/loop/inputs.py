"""From flags to tokenizer, datasets and the microbatches of each step."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from megaconv.errors import UsageError
from megatron_lite.checkpoint.restore import Start
from megatron_lite.data.batches import Batch
from megatron_lite.data.datasets import DataOptions, build_datasets
from megatron_lite.data.samples import Dataset
from megatron_lite.data.tokenizer import Tokenizer, TokenizerOptions, build_tokenizer
from megatron_lite.loop.finetuning import Packed
from megatron_lite.models.batch import Microbatch
from megatron_lite.settings.config import Settings
from megatron_lite.settings.sizes import Sizes


def make_tokenizer(settings: Settings, start: Start | None) -> Tokenizer:
    """As given; else the checkpoint's own, else numbers. Raises UsageError, CorruptCheckpoint."""
    data, size = settings.data, settings.model.vocab_size
    if data.tokenizer_type is None and data.tokenizer_model is None and data.vocab_file is None:
        beside = start.files.get("tokenizer.json") if start is not None else None
        if beside is not None:
            return build_tokenizer(TokenizerOptions("HuggingFaceTokenizer", str(beside.parent)))
        vocab = start.config.vocab if start is not None else size
        if vocab is None:
            raise UsageError(
                "--tokenizer-type and --tokenizer-model are missing (or --vocab-size, for data without a tokenizer)"
            )
        return build_tokenizer(TokenizerOptions("NullTokenizer", vocab_size=vocab - 1))
    of_vocabulary = "GPT2BPETokenizer" if data.merge_file else "BertWordPieceLowerCase"
    kind = data.tokenizer_type or (of_vocabulary if data.vocab_file else "HuggingFaceTokenizer")
    if kind == "NullTokenizer" and size is None and start is not None:
        size = start.config.vocab - 1
    vocabulary, merges = (Path(path) if path else None for path in (data.vocab_file, data.merge_file))
    return build_tokenizer(TokenizerOptions(kind, data.tokenizer_model, vocabulary, merges, size))


def make_datasets(
    settings: Settings, tokenizer: Tokenizer, sizes: Sizes, samples: list[int], packed: Packed | None
) -> list[Dataset | None]:
    """For training, evaluation, test. samples: how many of each will be drawn. packed: examples, if the run is on these.

    Raises UsageError, CorruptCheckpoint.
    """
    data = settings.data
    options = DataOptions(
        seq_length=sizes.seq, seed=settings.training.seed, data_path=data.data_path or (),
        finetune_data=data.finetune_data or (), split=data.split,
        train_data_path=data.train_data_path or (), valid_data_path=data.valid_data_path or (),
        test_data_path=data.test_data_path or (), mock_data=data.mock_data,
        data_cache_path=Path(data.data_cache_path) if data.data_cache_path else None,
        reset_position_ids=data.reset_position_ids, reset_attention_mask=data.reset_attention_mask,
        eod_mask_loss=data.eod_mask_loss,
    )  # fmt: skip
    found = build_datasets(options, tokenizer, samples) if packed is None else packed.datasets(settings, sizes, samples)
    if found[0] is None:
        raise UsageError("there is nothing to train on: the training split is empty; see --split")
    return found


@dataclass(frozen=True)
class Feeder:
    """Turns a rank's batch into microbatches on its device."""

    device: torch.device
    dp: int
    dp_rank: int
    reset_position_ids: bool
    reset_attention_mask: bool

    def microbatches(self, batch: Batch) -> list[Microbatch]:
        return list(self._microbatches(batch))

    def _microbatches(self, batch: Batch) -> Iterator[Microbatch]:
        masked = not bool(batch.loss_mask.all())
        documents = [_lengths(part) for part in batch.documents] if self.reset_attention_mask else None
        moved = batch.to(self.device)
        for number in range(len(batch.tokens)):
            yield Microbatch(
                moved.tokens[number], moved.labels[number],
                loss_mask=moved.loss_mask[number] if masked else None,
                positions=moved.position_ids[number] if self.reset_position_ids else None,
                documents=documents[number] if documents else None,
                index=number * self.dp + self.dp_rank,
            )  # fmt: skip


def _lengths(documents: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    """Of each sequence's documents, from the ordinals of its tokens' documents [batch, sequence]."""
    return tuple(tuple(torch.unique_consecutive(row, return_counts=True)[1].tolist()) for row in documents)
