"""Text with the marks of calls that a tokenizer has as special tokens, which text doesn't show otherwise."""

from collections.abc import Collection, Iterable, Sequence

from megatron_lite.data.tokenizer import HuggingFaceTokenizer, Tokenizer
from megatron_lite.inference.server.calls.form import CallForm
from megatron_lite.inference.text import Detokenize


def showing_marks(tokenizer: Tokenizer, forms: Iterable[CallForm]) -> Detokenize:
    """Return a function from tokens to text that shows the marks of these forms, and no other special token."""
    marks = {mark for form in forms for mark in form.all_marks}
    shown = _special_tokens(tokenizer, marks)
    if not shown:
        return tokenizer.detokenize

    def detokenize(ids: Sequence[int]) -> str:
        text, start = "", 0
        for place, token in enumerate(ids):
            if token in shown:
                text += tokenizer.detokenize(ids[start:place]) + shown[token]
                start = place + 1
        return text + tokenizer.detokenize(ids[start:])

    return detokenize


def _special_tokens(tokenizer: Tokenizer, marks: Collection[str]) -> dict[int, str]:
    """Return the special tokens that are marks, by id."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return {}
    return {
        number: token.content
        for number, token in tokenizer.inner.added_tokens_decoder.items()
        if token.special and token.content in marks
    }
