"""Tokenizers of megatron-core: of 0.16, and of 0.19, which calls modules and arguments otherwise."""

from argparse import Namespace
from typing import Any

from megatron_lite.data.tokenizer import TokenizerOptions
from tests.megatron_oracle import installed_minor


def null_tokenizer(vocab: int) -> Any:
    """A tokenizer of numbers, whose end of document is `vocab`. Core counts that as a further token since 0.19."""
    from megatron.core.tokenizers import MegatronTokenizer

    if installed_minor() < 19:
        metadata, size = {"library": "null"}, vocab
    else:
        metadata, size = {"library": "null-text"}, vocab + 1
    return MegatronTokenizer.from_pretrained(metadata_path=metadata, vocab_size=size)


def build(options: TokenizerOptions) -> Any:
    """The tokenizer for the same flags."""
    if installed_minor() < 19:
        from megatron.core.tokenizers.text.utils.build_tokenizer import build_tokenizer
    else:
        from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    return build_tokenizer(_arguments(options))


def _arguments(options: TokenizerOptions) -> Namespace:
    given = {
        "tokenizer_type": options.type, "tokenizer_model": options.model, "vocab_size": options.vocab_size,
        "vocab_file": options.vocab_file and str(options.vocab_file), "merge_file": options.merge_file and str(options.merge_file),
        "trust_remote_code": False, "tokenizer_sentencepiece_legacy": False,
    }  # fmt: skip
    until_0_16 = {
        "tokenizer_special_tokens": None, "tokenizer_hf_use_fast": True,
        "tokenizer_hf_include_special_tokens": False, "tokenizer_metadata": None,
    }  # fmt: skip
    since_0_19 = {
        "special_tokens": None, "tokenizer_hf_no_use_fast": False, "tokenizer_hf_no_include_special_tokens": True, "metadata_path": None,
        "chat_template": None, "tokenizer_sentencepiece_ignore_extra_whitespaces": True, "pad_vocab_size": False,
    }  # fmt: skip
    return Namespace(**given, **until_0_16, **since_0_19)
