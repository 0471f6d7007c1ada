"""`PUT /api` of Megatron's text generation server, with the rules of core 0.9. All of its fields are supported.

One difference: an impossible request is answered with status 400; Megatron uses status 200.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megaconv.errors import UsageError
from megatron_lite.inference.beams import LARGEST_LENGTH_PENALTY, Beam
from megatron_lite.inference.megatron import MegatronBeams, MegatronSettings, Words, generate
from megatron_lite.inference.opening import Opened
from megatron_lite.inference.prompts import tokens_of
from megatron_lite.inference.requests import Request
from megatron_lite.inference.server.errors import Refused
from megatron_lite.inference.server.fields import Fields
from megatron_lite.inference.slots import LanguageModel, require_known

MOST_PROMPTS = 128
RETIRED = {
    "max_len": "max_len is no longer used.  Replace with tokens_to_generate",
    "sentences": "sentences is no longer used.  Replace with prompts",
}  # fmt: skip

Answer = dict[str, Any]


@dataclass(frozen=True)
class Searched:
    """A beam search, for the running batch."""

    request: Request
    answer: Callable[[Sequence[Beam]], Answer]


def request(fields: Fields, opened: Opened) -> Searched | Callable[[LanguageModel], Answer]:
    """Return a beam search, or a function to call with the model, which may use all slots. Raises Refused."""
    for name, sentence in RETIRED.items():
        if name in fields:
            raise Refused(sentence, name)
    prompts = fields.any("prompts")
    if prompts is None:
        raise Refused("prompts argument required", "prompts")
    if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
        raise Refused("prompts is not a list of strings", "prompts")
    if not prompts:
        raise Refused("prompts is empty", "prompts")
    most = min(MOST_PROMPTS, opened.model.slots)
    if len(prompts) > most:
        raise Refused(f"Maximum number of prompts is {most}", "prompts")
    count = fields.integer("tokens_to_generate", 64, 0, opened.model.length)
    begin = (
        [opened.tokenizer.eod]
        if fields.boolean("add_BOS") and opened.tokenizer.eod is not None
        else []
    )
    rows = [[*begin, *_tokens(prompt, opened)] for prompt in prompts]
    longest = max(map(len, rows))
    if not all(rows):
        raise Refused("a prompt is empty; add_BOS gives it a token to begin with", "prompts")
    if longest + count > opened.model.length:
        raise Refused(
            f"Length of prompt + tokens_to_generate longer than allowed: {longest} + {count} > {opened.model.length}",
            "prompts",
        )
    fields.boolean("no_log")  # nothing is logged
    return (
        _beams(fields, opened, rows, count)
        if "beam_width" in fields
        else _sampled(fields, opened, rows, count)
    )


def _sampled(
    fields: Fields, opened: Opened, rows: list[list[int]], count: int
) -> Callable[[LanguageModel], Answer]:
    log_probs = fields.boolean("logprobs")
    if count == 0 and not log_probs:
        raise Refused("tokens_to_generate=0 implies logprobs should be True", "tokens_to_generate")
    top_k = fields.integer("top_k", 0, 0, min(1000, opened.config.vocab - 1))
    top_p = fields.number("top_p", 0.0, 0, 1)
    if top_k and top_p:
        raise Refused("cannot set both top-k and top-p samplings.", "top_p")
    decay, bound = fields.number("top_p_decay", 0.0, 0, 1), fields.number("top_p_bound", 0.0, 0, 1)
    if decay and not top_p:
        raise Refused("top_p_decay cannot be set without top_p", "top_p_decay")
    if bound and not 0 < bound <= top_p:
        raise Refused("top_p_bound must be greater than 0 and less than top_p", "top_p_bound")
    settings = MegatronSettings(
        count, top_k, top_p, decay, bound, fields.number("temperature", 1.0, 1e-6, 100), fields.boolean("stop_on_eol"),
        fields.boolean("stop_on_double_eol"), fields.boolean("prevent_newline_after_colon"),
        seed=fields.integer("random_seed", None, 0, 1 << 62),
    )  # fmt: skip
    fields.only({"stop_token": (), "length_penalty": ()})
    fields.finish()
    words = _words(opened, settings)

    def run(model: LanguageModel) -> Answer:
        found = generate(model, rows, settings, words)
        kept = [
            row[:length] for row, length in zip(found.tokens.tolist(), found.lengths, strict=True)
        ]
        values = None
        if log_probs:
            values = [
                row[: length - 1]
                for row, length in zip(found.log_probs.tolist(), found.lengths, strict=True)
            ]
        return _texts(opened, kept) | {"logprobs": values}

    return run


def _tokens(text: str, opened: Opened) -> list[int]:
    try:
        found = tokens_of(opened.tokenizer, text)
        require_known(found, opened.config.vocab)
    except UsageError as error:
        raise Refused(str(error), "prompts") from error
    return found


def _beams(fields: Fields, opened: Opened, rows: list[list[int]], count: int) -> Searched:
    most = len(opened.model.copied)
    width = fields.integer("beam_width", None, 1, most)
    if len(rows) > 1:
        raise Refused("When doing beam_search, batch size must be 1", "beam_width")
    if count == 0:
        raise Refused("beam search needs tokens_to_generate", "tokens_to_generate")
    stop = fields.integer("stop_token", 50256, 0, 1 << 31)
    penalty = fields.number("length_penalty", 1.0, -LARGEST_LENGTH_PENALTY, LARGEST_LENGTH_PENALTY)
    _without_beams(fields)
    (prompt,) = rows
    eod = opened.tokenizer.eod or 0
    rules = MegatronBeams(width, stop, penalty, eod)
    request = Request(tuple(prompt), count, beams=rules)

    def answer(found: Sequence[Beam]) -> Answer:
        texts = _texts(opened, [[*prompt, *beam.tokens] for beam in found])
        scores = [beam.score for beam in found]
        return texts | {"scores": scores}

    return Searched(request, answer)


def _without_beams(fields: Fields) -> None:
    """Refuse fields that Megatron reads but ignores in a beam search."""
    fields.only(
        dict.fromkeys(
            ("top_k", "top_p", "top_p_decay", "top_p_bound", "logprobs", "random_seed"), (0, False)
        )
    )
    fields.only({"temperature": (1,)})
    fields.only(
        dict.fromkeys(
            ("stop_on_eol", "stop_on_double_eol", "prevent_newline_after_colon"), (False,)
        )
    )
    fields.finish()


def _words(opened: Opened, settings: MegatronSettings) -> Words:
    if opened.tokenizer.eod is None:
        raise Refused("the tokenizer has no end of document")
    if not settings.prevent_newline_after_colon:
        return Words(opened.tokenizer.eod)
    colon, newline = _tokens(":", opened), _tokens("\n", opened)
    if len(newline) != 1 or len(colon) != 1:
        raise Refused(
            "this tokenizer has no single token for a colon or a newline",
            "prevent_newline_after_colon",
        )
    return Words(opened.tokenizer.eod, colon[0], newline[0])


def _texts(opened: Opened, rows: Sequence[Sequence[int]]) -> Answer:
    detokenize = opened.tokenizer.detokenize
    return {
        "text": [detokenize(row) for row in rows],
        "segments": [[detokenize([token]) for token in row] for row in rows],
    }
