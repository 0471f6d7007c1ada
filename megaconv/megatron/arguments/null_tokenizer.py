"""The vocabulary of Megatron's NullTokenizer, whose text is numbers. Two releases mean two things by `vocab_size`.

up to core 0.17      vocab_size tokens, and a token for the end of a document behind them
core 0.18 and later  vocab_size tokens in all; the end of a document is the last one, or null_tokenizer_eod_id
"""

from argparse import Namespace

NULL_TOKENIZER = "NullTokenizer"


def adds_a_token(args: Namespace) -> bool:
    """True if the tokenizer of a run with these arguments has one token more than `vocab_size`."""
    is_null = getattr(args, "tokenizer_type", None) == NULL_TOKENIZER
    return is_null and not hasattr(args, "null_tokenizer_eod_id")


def size_for_all_releases(vocab: int, multiple: int) -> int:
    """The `vocab_size` from which each release pads to the same number of rows as from `vocab` tokens.

    multiple: of which the number of rows is one. With the multiple 1, it is right up to core 0.17.
    """
    fills_rows = (vocab - 1) % multiple == 0
    return vocab if fills_rows and multiple > 1 else vocab - 1
