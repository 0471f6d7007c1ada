"""Text with the marks of calls and of thinking that a tokenizer has as special tokens, which text doesn't show otherwise."""

from collections.abc import Iterable, Sequence

from megatron_lite.data.tokenizer import HuggingFaceTokenizer, Tokenizer
from megatron_lite.inference.text import Detokenize


def showing_marks(tokenizer: Tokenizer, marks: Iterable[str]) -> Detokenize:
    """Return a function from tokens to text that shows these marks, and no other special token."""
    shown = set(marks)
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return tokenizer.detokenize
    special = _special_tokens(tokenizer)
    hidden = {token for token, text in special.items() if text not in shown}
    if len(hidden) == len(special):
        return tokenizer.detokenize

    def detokenize(ids: Sequence[int]) -> str:
        # All at once: SentencePiece's tokenizers leave out the space before the first word that they are given.
        return tokenizer.spelled([token for token in ids if token not in hidden])

    return detokenize


def _special_tokens(tokenizer: HuggingFaceTokenizer) -> dict[int, str]:
    """Return the texts of the special tokens, by id."""
    return {
        number: token.content
        for number, token in tokenizer.inner.added_tokens_decoder.items()
        if token.special
    }
