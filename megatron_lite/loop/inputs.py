"""From flags to tokenizer, datasets and the microbatches of each step."""

from dataclasses import replace
from pathlib import Path

from megaconv.errors import UsageError
from megaconv.model.config import ModelConfig
from megatron_lite.checkpoint.restore import Start
from megatron_lite.data.beside import tokenizer_beside
from megatron_lite.data.datasets import DataOptions, build_datasets
from megatron_lite.data.samples import Dataset
from megatron_lite.data.tokenizer import BERT_TYPES, Tokenizer, TokenizerOptions, build_tokenizer
from megatron_lite.loop.finetuning import Packed
from megatron_lite.loop.model_types import MODEL_TYPES, cache_path
from megatron_lite.settings.architecture import model_type
from megatron_lite.settings.config import Settings
from megatron_lite.settings.learning import Data
from megatron_lite.settings.sizes import Sizes


def make_tokenizer(settings: Settings, start: Start | None) -> Tokenizer:
    """As given; else the checkpoint's own, else numbers. Raises UsageError, CorruptCheckpoint."""
    data, size = settings.data, settings.model.vocab_size
    if data.tokenizer_type is None and data.tokenizer_model is None and data.vocab_file is None:
        beside = tokenizer_beside(start.files) if start is not None else None
        if beside is not None:
            return beside
        vocab = start.config.vocab if start is not None else size
        if vocab is None:
            raise UsageError(
                "--tokenizer-type and --tokenizer-model are missing (or --vocab-size, for data without a tokenizer)"
            )
        return build_tokenizer(TokenizerOptions("NullTokenizer", vocab_size=vocab - 1))
    kind = data.tokenizer_type or _kind(data)
    if kind == "NullTokenizer" and size is None and start is not None:
        size = start.config.vocab - 1
    vocabulary, merges = (Path(path) if path else None for path in (data.vocab_file, data.merge_file))
    options = TokenizerOptions(kind, data.tokenizer_model, vocabulary, merges, size)
    extra_ids = MODEL_TYPES[model_type(settings, start.config if start is not None else None)].extra_ids
    if extra_ids is None or kind not in BERT_TYPES:
        return build_tokenizer(options)
    extended = build_tokenizer(replace(options, extra_ids=extra_ids(settings)))
    # A model that others made has room for its own words alone, and BERT's samples have no use for what Megatron adds.
    fits = start is None or extra_ids(settings) or extended.vocab_size <= start.config.vocab
    return extended if fits else build_tokenizer(options)


def _kind(data: Data) -> str:
    """Of a tokenizer whose files are given, and nothing else."""
    if data.vocab_file:
        return "GPT2BPETokenizer" if data.merge_file else "BertWordPieceLowerCase"
    sentencepiece = str(data.tokenizer_model).endswith(".model") and Path(str(data.tokenizer_model)).is_file()
    return "Llama2Tokenizer" if sentencepiece else "HuggingFaceTokenizer"


def make_datasets(
    settings: Settings,
    config: ModelConfig,
    tokenizer: Tokenizer,
    sizes: Sizes,
    samples: list[int],
    packed: Packed | None,
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
        data_cache_path=cache_path(settings),
        reset_position_ids=data.reset_position_ids, reset_attention_mask=data.reset_attention_mask,
        eod_mask_loss=data.eod_mask_loss,
    )  # fmt: skip
    of_kind = MODEL_TYPES[model_type(settings, config)]
    if packed is None:
        sampling = of_kind.sampling and of_kind.sampling(settings, config, tokenizer, sizes.seq)
        found = build_datasets(options, tokenizer, samples, sampling)
    else:
        found = packed.datasets(settings, sizes, samples)
    if found[0] is None:
        raise UsageError(f"there is nothing to train on: the training split is empty; {of_kind.nothing_found}")
    return found
