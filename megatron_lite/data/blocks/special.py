"""The special tokens of a retriever's texts."""

from megaconv.errors import UsageError
from megatron_lite.data.blocks.samples import Special
from megatron_lite.data.masked.vocabulary import vocabulary
from megatron_lite.data.tokenizer import Tokenizer


def special_tokens(tokenizer: Tokenizer) -> Special:
    """Return [CLS], [SEP] and [PAD]. Raises UsageError unless [PAD] is token 0, as masks of attention assume."""
    why = "texts of a retriever need the tokenizer of a BERT"
    words = vocabulary(tokenizer, ("cls", "sep", "pad"), why)
    if words.pad:
        raise UsageError(
            f"the tokenizer's [PAD] is token {words.pad}; a retriever's samples need it to be token 0, as in BERT's vocabularies"
        )
    return Special(words.cls, words.sep, words.pad)
