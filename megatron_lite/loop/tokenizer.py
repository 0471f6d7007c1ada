"""Builds the tokenizer from the flags or from the checkpoint."""

from dataclasses import replace
from pathlib import Path

from megaconv.errors import UsageError
from megatron_lite.checkpoint.restore import Start
from megatron_lite.data.beside import tokenizer_of
from megatron_lite.data.tokenizer import (
    BERT_TYPES,
    Tokenizer,
    TokenizerOptions,
    build_tokenizer,
    type_of_files,
)
from megatron_lite.settings.config import Settings


def make_tokenizer(settings: Settings, start: Start | None, extra_ids: int | None) -> Tokenizer:
    """Return the tokenizer of the flags, else that of the checkpoint, else token numbers.

    extra_ids: see Objective.extra_ids. Raises UsageError, CorruptCheckpoint.
    """
    data, size = settings.data, settings.model.vocab_size
    found = type_of_files(data.tokenizer_model, data.vocab_file, data.merge_file)
    kind = data.tokenizer_type or found
    if kind is None:
        beside = tokenizer_of(start.header) if start is not None else None
        if beside is not None:
            return beside
        vocab = start.config.vocab if start is not None else size
        if vocab is None:
            raise UsageError(
                "--tokenizer-type and --tokenizer-model are missing (or --vocab-size, for data without a tokenizer)"
            )
        return build_tokenizer(TokenizerOptions("NullTokenizer", vocab_size=vocab - 1))
    if kind == "NullTokenizer" and size is None and start is not None:
        size = start.config.vocab - 1
    vocabulary, merges = (
        Path(path) if path else None for path in (data.vocab_file, data.merge_file)
    )
    options = TokenizerOptions(kind, data.tokenizer_model, vocabulary, merges, size)
    if extra_ids is None or kind not in BERT_TYPES:
        return build_tokenizer(options)
    extended = build_tokenizer(replace(options, extra_ids=extra_ids))
    # A checkpoint from elsewhere has rows only for its own vocabulary, and BERT's samples don't use Megatron's extra tokens.
    fits = start is None or extra_ids or extended.vocab_size <= start.config.vocab
    return extended if fits else build_tokenizer(options)
