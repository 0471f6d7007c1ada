"""Reads the facts that masking needs from a tokenizer: special tokens, and the pieces that continue a word."""

import numpy as np

from megaconv.errors import UsageError
from megatron_lite.data.masked.samples import Vocabulary
from megatron_lite.data.tokenizer import HuggingFaceTokenizer, RustTokenizer, Tokenizer

SENTINEL = "<extra_id_{}>"


def vocabulary(
    tokenizer: Tokenizer,
    needed: tuple[str, ...],
    why: str = "hidden words need a tokenizer with a mask",
) -> Vocabulary:
    """Return the vocabulary. needed: required special tokens, of `cls`, `sep`, `mask`, `pad`, `bos`, `eos`.

    why: the error message for a tokenizer without any of these.
    Raises UsageError for a tokenizer that lacks one.
    """
    if not isinstance(tokenizer, (RustTokenizer, HuggingFaceTokenizer)):
        raise UsageError(f"{why}: --tokenizer-type BertWordPieceLowerCase --vocab-file")
    special = {
        name: tokenizer.special(name) for name in ("cls", "sep", "mask", "pad", "bos", "eos")
    }
    missing = [name for name in needed if special[name] is None]
    if missing:
        raise UsageError(
            f"the tokenizer has no {' and no '.join(missing)} token, which the samples are made with; "
            "take --tokenizer-type BertWordPieceLowerCase --vocab-file"
        )
    pieces = tokenizer.pieces()
    numbers = {piece: number for number, piece in enumerate(pieces)}
    sentinels: list[int] = []
    while (piece := SENTINEL.format(len(sentinels))) in numbers:
        sentinels.append(numbers[piece])
    found = {name: -1 if number is None else number for name, number in special.items()}
    return Vocabulary(
        len(pieces),
        np.array([piece.startswith("##") for piece in pieces]),
        **found,
        sentinels=sentinels,
    )
