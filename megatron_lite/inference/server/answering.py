"""Turns a request for an answer to its pieces: text, thinking and calls of tools, each apart from the others."""

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import cached_property

from megatron_lite.inference.image_tokens import without_images
from megatron_lite.inference.opening import Opened
from megatron_lite.inference.prompts import template_for_tools
from megatron_lite.inference.sampling import Likelihood
from megatron_lite.inference.server.calls.form import CallForm
from megatron_lite.inference.server.calls.table import BY_TEMPLATE, forms_of
from megatron_lite.inference.server.openai_requests import Wanted
from megatron_lite.inference.server.pieces import Piece, Pieces, Token, Tokens
from megatron_lite.inference.server.reasoning import with_reasoning, without_reasoning
from megatron_lite.inference.server.responses import Deadline
from megatron_lite.inference.server.shown_marks import showing_marks
from megatron_lite.inference.server.streams import pieces
from megatron_lite.inference.server.thinking_forms import ThinkingForm, thinking_forms_of
from megatron_lite.inference.server.tools import with_calls
from megatron_lite.inference.server.worker import Worker
from megatron_lite.inference.slots import LanguageModel, Scored, require_finite
from megatron_lite.inference.text import Detokenize

_OF_MARK = 16
"""Number of tokens at a prompt's end that may have the mark of thinking."""


@dataclass
class Answering:
    """Answers of one model."""

    opened: Opened
    worker: Worker
    reasoning: str | None
    """The name of the form of thinking (thinking_forms.py), which chats have apart from the answer; None: they don't."""
    tool_calls: str
    """The name of the form of calls of tools (calls/table.py)."""
    _detokenizers: dict[tuple[bool, bool], Detokenize] = field(default_factory=dict)
    """By (shows the marks of calls, shows those of thinking)."""

    async def pieces(self, wanted: Wanted, deadline: Deadline) -> Pieces:
        """Yield the pieces of all choices, with echo first those of the prompts.

        Raises Overloaded at the start, TimedOut and NoAnswer later.
        """
        if wanted.echo:
            async for piece in self._echoed(wanted, deadline):
                yield piece
        if not wanted.max_tokens:
            return
        async with aclosing(self._generated(wanted, deadline)) as generated:
            async for piece in generated:
                yield piece

    async def _echoed(self, wanted: Wanted, deadline: Deadline) -> Pieces:
        """Yield each prompt once for each of its choices, with log-probabilities if they were asked for."""
        end = None if wanted.max_tokens else "length"
        for number, prompt in enumerate(wanted.prompts):
            scored = None
            if wanted.log_probs is not None:
                scoring = self.worker.between(_score(prompt, wanted.log_probs, wanted.adapter))
                (scored,) = await deadline.of(scoring)
            text = self.opened.tokenizer.detokenize(prompt)
            tokens = _tokens_of(prompt, scored, wanted.log_probs or 0)
            first = number * wanted.choices
            for choice in range(first, first + wanted.choices):
                yield Piece(choice, text, tokens, end, echoed=True)

    def _generated(self, wanted: Wanted, deadline: Deadline) -> Pieces:
        stops = self.opened.stop_ids
        found = pieces(self.worker, wanted, stops, self._detokenize(wanted), deadline)
        if wanted.harmony is not None:
            return found if self.reasoning else without_reasoning(found)
        if self._separates(wanted):
            end = without_images(wanted.prompts[0][-_OF_MARK:])
            prompt = self.opened.tokenizer.spelled(end)
            found = with_reasoning(found, self._thinking_forms, prompt)
        if wanted.tools is None:
            return found
        return with_calls(found, replace(wanted.tools, forms=self._call_forms))

    def _separates(self, wanted: Wanted) -> bool:
        """Return whether thinking is apart from the answer. An answer of a demanded form has none."""
        return self.reasoning is not None and not wanted.continues and wanted.grammar is None

    def _detokenize(self, wanted: Wanted) -> Detokenize:
        may_call = wanted.tools is not None and not wanted.tools.forced
        if wanted.harmony is not None:
            return self.opened.tokenizer.detokenize
        return self._shown(calls=may_call, thinking=self._separates(wanted))

    def _shown(self, *, calls: bool, thinking: bool) -> Detokenize:
        """Return the function from tokens to text with the marks that are read in it."""
        if (calls, thinking) not in self._detokenizers:
            forms = [*self._call_forms] * calls + [*self._thinking_forms] * thinking
            marks = {mark for form in forms for mark in form.all_marks}
            made = showing_marks(self.opened.tokenizer, marks)
            self._detokenizers[calls, thinking] = made
        return self._detokenizers[calls, thinking]

    @cached_property
    def _template(self) -> str:
        return template_for_tools(self.opened.tokenizer)

    @cached_property
    def _call_forms(self) -> tuple[CallForm, ...]:
        """The forms in which the model may write calls."""
        return forms_of(self.tool_calls, self._template)

    @cached_property
    def _thinking_forms(self) -> tuple[ThinkingForm, ...]:
        """The forms in which the model may mark its thinking."""
        return thinking_forms_of(self.reasoning or BY_TEMPLATE, self._template)


def _tokens_of(prompt: tuple[int, ...], scored: Scored | None, top: int) -> Tokens:
    """Return a prompt's tokens with their log-probabilities; the first token has none."""
    if scored is None:
        return tuple((token, None) for token in prompt)
    found: list[Token] = [(prompt[0], None)]
    for place, token in enumerate(prompt[1:]):
        log_prob = float(scored.log_probs[place])
        top_ids = scored.top_ids[place, :top].tolist()
        top_log_probs = scored.top_log_probs[place, :top].tolist()
        likeliest = tuple(zip(top_ids, top_log_probs, strict=True))
        found.append((token, Likelihood(log_prob, likeliest)))
    return tuple(found)


def _score(
    prompt: tuple[int, ...], top: int, adapter: int | None
) -> Callable[[LanguageModel], list[Scored]]:
    return lambda model: [require_finite(found) for found in model.score([prompt], top, adapter)]
