"""Special tokens of harmony, the format of GPT-OSS' conversations.

    <|start|>assistant<|channel|>analysis<|message|>I add.<|end|>
    <|start|>assistant<|channel|>final<|message|>4<|return|>

The format: github.com/openai/harmony, docs/format.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_lite.data.tokenizer import HuggingFaceTokenizer, Tokenizer


@dataclass(frozen=True)
class Marks:
    """The ids of the special tokens."""

    start: int
    """It begins a message. The header follows: role, recipient, channel, type of the content."""
    channel: int
    constrain: int
    message: int
    """It ends the header."""
    end: int
    """It ends a message. Further messages of the same answer may follow."""
    done: int
    """`<|return|>`: it ends an answer."""
    call: int
    """It ends a call of a tool, and with it the answer."""

    @property
    def all(self) -> frozenset[int]:
        return self.stops | {self.start, self.channel, self.constrain, self.message, self.end}

    @property
    def stops(self) -> frozenset[int]:
        """The tokens that end an answer."""
        return frozenset((self.done, self.call))


_WORDS = ("start", "channel", "constrain", "message", "end", "return", "call")
"""In the order of the fields of Marks."""


def harmony_marks(tokenizer: Tokenizer) -> Marks | None:
    """Return the ids of a tokenizer that has all special tokens of the format; None for another tokenizer."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return None
    ids = {str(token): number for number, token in tokenizer.inner.added_tokens_decoder.items()}
    found = [ids.get(f"<|{word}|>") for word in _WORDS]
    known = [number for number in found if number is not None]
    return Marks(*known) if len(known) == len(_WORDS) else None


def is_harmony_template(template: str) -> bool:
    """Return whether a chat template writes the format."""
    return "<|start|>assistant" in template and "<|channel|>final" in template


def begins_answer(prompt: Sequence[int], marks: Marks) -> bool:
    """Return whether a prompt ends within a message, so that the answer continues it."""
    ends = {marks.end, *marks.stops}
    open_message = False
    for token in prompt:
        open_message = token == marks.start or (open_message and token not in ends)
    return open_message
