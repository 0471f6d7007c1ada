"""Converts requests of OpenAI's routes to requests for a running batch. Every field is supported or refused."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megaconv.errors import UsageError
from megatron_lite.data.harmony import Marks, begins_answer
from megatron_lite.inference.gallery import Picture
from megatron_lite.inference.grammar import Grammar
from megatron_lite.inference.image_tokens import without_images
from megatron_lite.inference.opening import Opened
from megatron_lite.inference.prompts import encode, encode_chat
from megatron_lite.inference.requests import Request, TooLong, check_prompt
from megatron_lite.inference.sampling import (
    LARGEST_REPETITION_PENALTY,
    LEAST_REPETITION_PENALTY,
    Sampling,
)
from megatron_lite.inference.server.answer_form import (
    form_of,
    harmony_form_of,
    read_logit_bias,
    read_response_format,
)
from megatron_lite.inference.server.errors import NoRoom, Refused, UnknownModel
from megatron_lite.inference.server.fields import Fields
from megatron_lite.inference.server.image_parts import with_pictures
from megatron_lite.inference.server.messages import read_messages
from megatron_lite.inference.server.template_variables import read_variables
from megatron_lite.inference.server.tools import Tools, read_tools
from megatron_lite.inference.slots import require_known
from megatron_lite.models.rng import mix

MOST_PROMPTS, MOST_CHOICES, MOST_STOPS, MOST_ALTERNATIVES = 128, 128, 16, 20
LARGEST_PENALTY = 2
_SMALLEST_TOP_P = 1e-9
"""It leaves only the likeliest token, as OpenAI's 0 does."""


@dataclass(frozen=True)
class Wanted:
    """A client's request."""

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    """0: generate nothing, only score the prompt."""
    choices: int
    """Number of choices for each prompt."""
    sampling: Sampling
    stop: tuple[str, ...]
    log_probs: int | None
    echo: bool
    stream: bool
    usage: bool
    """True if a stream ends with the numbers of tokens."""
    continues: bool = False
    """True if an answer continues the text of its prompt; False if it is a message of its own."""
    model: str = ""
    """The name that the answer states."""
    adapter: int | None = None
    """See slots.Feed."""
    grammar: Grammar | None = None
    """The form of the answers."""
    pictures: tuple[Picture, ...] = ()
    """The images of the prompts."""
    tools: Tools | None = None
    harmony: Marks | None = None
    """The special tokens of an answer in harmony, GPT-OSS' format; None for another answer."""
    varies: bool = False
    """True if the client gave no seed, so that equal prompts need not have equal answers."""

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of all prompts."""
        return sum(map(len, self.prompts))

    def requests(self, stop_ids: frozenset[int]) -> list[Request]:
        """Return the requests; choices of one prompt are adjacent, and each has a different seed.

        Without a seed of the client, each prompt has another seed too, because clients repeat a prompt to sample it.
        """
        found = []
        for number, prompt in enumerate(self.prompts):
            first = number * self.choices if self.varies else 0
            for choice in range(first, first + self.choices):
                request = Request(
                    prompt,
                    self.max_tokens,
                    self._seeded(choice),
                    stop_ids,
                    self.log_probs,
                    adapter=self.adapter,
                    grammar=self.grammar,
                    pictures=self.pictures,
                )
                found.append(request)
        return found

    def _seeded(self, choice: int) -> Sampling:
        if choice == 0:
            return self.sampling
        return replace(self.sampling, seed=mix(self.sampling.seed, choice))


def completion(fields: Fields, opened: Opened, name: str) -> Wanted:
    """Read a request of /v1/completions. Raises Refused."""
    prompts = _prompts(fields, opened)
    echo = fields.boolean("echo")
    choices = fields.integer("n", 1, 1, MOST_CHOICES)
    fields.only({"best_of": (choices,), "suffix": ("",)})
    max_tokens = fields.integer("max_tokens", 16, 0, opened.model.length)
    if max_tokens == 0 and not echo:
        raise Refused("max_tokens 0 requires echo", "max_tokens")
    wanted = _shared(
        fields,
        opened,
        name,
        prompts,
        max_tokens,
        choices,
        fields.integer("logprobs", None, 0, MOST_ALTERNATIVES),
    )
    return replace(wanted, echo=echo, continues=True)


def chat(fields: Fields, opened: Opened, name: str) -> Wanted:
    """Read a request of /v1/chat/completions. Raises Refused."""
    tools = read_tools(fields)
    offered = () if tools is None else tools.described
    messages, pictures = with_pictures(read_messages(fields.any("messages")), opened.images)
    variables = read_variables(fields, opened.tokenizer, offered)
    try:
        prompt = encode_chat(
            opened.tokenizer, messages, offered, variables=variables, pictures=pictures
        )
    except UsageError as error:
        raise Refused(str(error), "messages") from error
    fields.only({"modalities": (["text"],)})
    room = max(opened.model.length - len(prompt), 1)
    older = fields.integer("max_tokens", room, 1, opened.model.length)
    max_tokens = fields.integer("max_completion_tokens", older, 1, opened.model.length)
    choices = fields.integer("n", 1, 1, MOST_CHOICES)
    alternatives = fields.integer("top_logprobs", 0, 0, MOST_ALTERNATIVES)
    log_probs = alternatives if fields.boolean("logprobs") else None
    if alternatives and log_probs is None:
        raise Refused("top_logprobs needs logprobs", "top_logprobs")
    harmony = opened.harmony
    if harmony is not None and not begins_answer(prompt, harmony):
        harmony = None
    wanted = _shared(
        fields, opened, name, (prompt,), max_tokens, choices, log_probs, harmony, pictures, prompt_field="messages"
    )  # fmt: skip
    return wanted if tools is None else _with_tools(wanted, tools, opened)


def _with_tools(wanted: Wanted, tools: Tools, opened: Opened) -> Wanted:
    if not tools.forced:
        return replace(wanted, tools=tools)
    if wanted.grammar is not None:
        raise Refused("a tool_choice that demands a call excludes response_format", "tool_choice")
    if wanted.harmony is not None:
        form = harmony_form_of(tools.harmony_messages, opened, "tools")
        return replace(wanted, tools=tools, grammar=form)
    return replace(wanted, tools=tools, grammar=form_of(tools.schema, opened, "tools"))


def _shared(
    fields: Fields, opened: Opened, name: str, prompts: tuple[tuple[int, ...], ...], max_tokens: int, choices: int, log_probs: int | None,
    harmony: Marks | None = None, pictures: tuple[Picture, ...] = (), prompt_field: str = "prompt",
) -> Wanted:  # fmt: skip
    """prompt_field: the field that a refusal of the prompt names."""
    model, adapter = model_of(fields.any("model"), opened, name)
    grammar = read_response_format(
        fields.any("response_format"), opened, harmony=harmony is not None
    )
    seed = fields.integer("seed", None, -(1 << 63), (1 << 63) - 1)
    usual = opened.sampling
    sampling = Sampling(
        fields.number("temperature", usual.temperature, 0, 100), fields.integer("top_k", usual.top_k, 0, opened.config.vocab),
        max(fields.number("top_p", usual.top_p, 0, 1), _SMALLEST_TOP_P),
        fields.number("repetition_penalty", usual.repetition_penalty, LEAST_REPETITION_PENALTY, LARGEST_REPETITION_PENALTY),
        secrets.randbits(62) if seed is None else seed,
        fields.number("presence_penalty", 0.0, -LARGEST_PENALTY, LARGEST_PENALTY),
        fields.number("frequency_penalty", 0.0, -LARGEST_PENALTY, LARGEST_PENALTY),
        read_logit_bias(fields.any("logit_bias"), opened.config.vocab),
        fields.number("min_p", usual.min_p, 0, 1),
    )  # fmt: skip
    stop, stream = fields.words("stop", MOST_STOPS), fields.boolean("stream")
    usage = _stream_options(fields.any("stream_options"), stream=stream)
    fields.finish()
    for prompt in prompts:
        try:
            require_known(without_images(prompt) if pictures else prompt, opened.config.vocab)
        except UsageError as error:  # the tokenizer may have more tokens than the model
            raise Refused(str(error), prompt_field) from error
        try:
            check_prompt(prompt, max_tokens, opened.model.length)
        except TooLong as error:
            raise NoRoom(str(error), len(prompt), prompt_field) from error
        except UsageError as error:
            raise Refused(str(error), prompt_field) from error
    return Wanted(
        prompts,
        max_tokens,
        choices,
        sampling,
        stop,
        log_probs,
        echo=False,
        stream=stream,
        usage=usage,
        model=model,
        adapter=adapter,
        grammar=grammar,
        harmony=harmony,
        pictures=pictures,
        varies=seed is None,
    )


def model_of(asked: object, opened: Opened, name: str) -> tuple[str, int | None]:
    """Return (name of the model, number of its adapter). Without a name, it is the first adapter, or the model alone."""
    names = (name, *opened.adapters)
    if asked is None:
        return names[min(1, len(opened.adapters))], None
    if asked not in names:
        raise unknown_model(asked, names)
    return str(asked), names.index(str(asked))


def unknown_model(asked: object, names: Sequence[str]) -> UnknownModel:
    """Return the refusal of a request for another model than these."""
    known = ", ".join(map(repr, names))
    message = f"there is no model {asked!r:.100} here, but {known}"
    return UnknownModel(message, "model", "model_not_found")


def _stream_options(value: Any, *, stream: bool) -> bool:
    if value is None:
        return False
    if (
        not stream
        or not isinstance(value, dict)
        or set(value) - {"include_usage", "include_obfuscation"}
    ):
        raise Refused(
            "stream_options requires stream, and supports only include_usage", "stream_options"
        )
    return bool(value.get("include_usage"))


def _prompts(fields: Fields, opened: Opened) -> tuple[tuple[int, ...], ...]:
    """Return the prompts: from a text, texts, a row of token ids, or rows of token ids."""
    return tuple(_prompt(each, opened) for each in fields.texts("prompt", MOST_PROMPTS))


def _prompt(value: Any, opened: Opened) -> tuple[int, ...]:
    if isinstance(value, str):
        try:
            return encode(opened.tokenizer, value)
        except UsageError as error:
            raise Refused(str(error), "prompt") from error
    if isinstance(value, list) and all(
        type(token) is int and 0 <= token < opened.config.vocab for token in value
    ):
        return tuple(value)
    raise Refused(
        f"a prompt should be a text or token ids below {opened.config.vocab}, found {value!r:.60}",
        "prompt",
    )
