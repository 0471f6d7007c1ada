"""Answers of the commands: how they begin, their text, and their way onto the terminal."""

from collections.abc import Sequence

from megatron_lite.data.harmony import begins_answer
from megatron_lite.inference.answer import Answer, PlainAnswer, Said
from megatron_lite.inference.harmony import HarmonyStream
from megatron_lite.inference.opening import Opened
from megatron_lite.inference.text import TextStream, say


def begun_answer(
    opened: Opened, stop: Sequence[str], prompt: Sequence[int], *, continues: bool = False
) -> Answer:
    """Return the answer before its first token.

    stop: words that end it. continues: True if its text continues that of the prompt.
    """
    marks, detokenize = opened.harmony, opened.tokenizer.detokenize
    if continues:
        return PlainAnswer(TextStream(detokenize, stop, prompt))
    if marks is not None and begins_answer(prompt, marks):
        return HarmonyStream(marks, detokenize, prompt, stop)
    return PlainAnswer(TextStream(detokenize, stop))


def text_of(answer: Answer, tokens: Sequence[int]) -> str:
    """Return the text of a whole answer. answer: before its first token."""
    said = [answer.add(token) for token in tokens]
    return "".join(each.text for each in (*said, answer.finish(complete=True)))


def show(said: Said, *, thinks: bool) -> bool:
    """Print a part of an answer, the text in a paragraph behind the thinking. Returns whether it ends with thinking."""
    say(said.thinking)
    thinks = thinks or bool(said.thinking)
    if said.text:
        say("\n\n" + said.text if thinks else said.text)
        return False
    return thinks
