"""Fields of requests that restrict the tokens of an answer: `response_format` and `logit_bias`."""

from collections.abc import Mapping, Sequence
from typing import Any

from megaconv.errors import UsageError
from megatron_lite.inference.grammar import ANY_OBJECT, Grammar, harmony_grammar, json_grammar
from megatron_lite.inference.opening import Opened
from megatron_lite.inference.server.errors import Refused

LARGEST_BIAS = 100
_LONGEST_TOKEN = 20
"""Most digits of a token's id. Python refuses to read some thousand digits."""


def read_logit_bias(value: Any, vocab: int) -> tuple[tuple[int, float], ...]:
    """Read an object of {token id as a text: number}. Raises Refused."""
    if value is None:
        return ()
    if isinstance(value, dict):
        pairs = value.items()
        if all(_is_token(token, vocab) and _is_bias(bias) for token, bias in pairs):
            return tuple((int(token), float(bias)) for token, bias in pairs)
    raise Refused(
        f"logit_bias should map token ids below {vocab} to numbers from -{LARGEST_BIAS} to {LARGEST_BIAS}, "
        f"found {value!r:.60}",
        "logit_bias",
    )


def _is_token(word: str, vocab: int) -> bool:
    is_short = word.isascii() and word.isdigit() and len(word) <= _LONGEST_TOKEN
    return is_short and str(int(word)) == word and int(word) < vocab


def _is_bias(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and -LARGEST_BIAS <= value <= LARGEST_BIAS


def read_response_format(value: Any, opened: Opened, *, harmony: bool) -> Grammar | None:
    """Read the form of the answer: text, any JSON object, or JSON of a schema.

    harmony: True for an answer in this format, whose last message has the form.
    """
    kind = value.get("type") if isinstance(value, dict) else value
    if kind in (None, "text"):
        return None
    if kind == "json_object":
        return _form(ANY_OBJECT, opened, harmony=harmony)
    described = value.get("json_schema") if kind == "json_schema" else None
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict):
        raise Refused(
            "response_format should be an object with the type text, json_object, or json_schema; "
            f"the last one has the schema in json_schema.schema; found {value!r:.80}",
            "response_format",
        )
    return _form(schema, opened, harmony=harmony)


def _form(schema: Mapping[str, Any], opened: Opened, *, harmony: bool) -> Grammar:
    if harmony:
        return harmony_form_of([('<|channel|> "final"', schema)], opened, "response_format")
    return form_of(schema, opened, "response_format")


def form_of(schema: Mapping[str, Any], opened: Opened, field: str) -> Grammar:
    """Return the grammar of a JSON schema. field: the request's field that has the schema. Raises Refused."""
    try:
        return json_grammar(schema, opened.tokenizer, opened.config.vocab, opened.stop_ids)
    except UsageError as error:
        raise Refused(str(error), field) from error


def harmony_form_of(
    answers: Sequence[tuple[str, Mapping[str, Any]]], opened: Opened, field: str
) -> Grammar:
    """Return the grammar of an answer in harmony. answers: see harmony_grammar. Raises Refused."""
    try:
        return harmony_grammar(answers, opened.tokenizer, opened.config.vocab, opened.stop_ids)
    except UsageError as error:
        raise Refused(str(error), field) from error
