"""Chats with a GPT-OSS: its answers as pieces of text, and its calls and JSON from a server."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.data.harmony import harmony_marks
from megatron_lite.data.tokenizer import HuggingFaceTokenizer
from megatron_lite.inference.sampling import Sampling
from megatron_lite.inference.server.answer_parts import AnswerParts, Kind
from megatron_lite.inference.server.openai_requests import Wanted
from megatron_lite.inference.server.pieces import Choice, Piece
from megatron_lite.inference.server.responses import Deadline
from megatron_lite.inference.server.streams import pieces
from megatron_lite.inference.server.tools import Tools
from tests.trainer.harmony_model import SPECIAL, TIME, WEATHER, save, tokenizer_of
from tests.trainer.inference.forced import ForcedWorker
from tests.trainer.inference.serving import ForkedServing

pytest.importorskip("transformers", reason="transformers is not installed")

PROMPT = "<|start|>user<|message|>Rain?<|end|><|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>No rain.<|return|>"
CALL = (
    '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "a"}<|call|>'
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    return tokenizer_of(tmp_path_factory.mktemp("harmony"))


def pieces_of(
    tokenizer: HuggingFaceTokenizer, *texts: str, tools: Tools | None = None, **fields: Any
) -> list[Piece]:
    marks = harmony_marks(tokenizer)
    assert marks is not None
    wanted = Wanted(
        (tuple(tokenizer.tokenize(PROMPT)),), 500, len(texts), Sampling(), (), None,
        echo=False, stream=True, usage=False, harmony=marks, tools=tools,
    )  # fmt: skip
    wanted = replace(wanted, **fields)
    worker: Any = ForcedWorker(tokenizer, texts)

    async def run() -> list[Piece]:
        found = pieces(worker, wanted, marks.stops, tokenizer.detokenize, Deadline(60))
        return [piece async for piece in found]

    return asyncio.run(run())


def answers(tokenizer: HuggingFaceTokenizer, *texts: str, **fields: Any) -> list[Choice]:
    choices = [Choice() for _ in texts]
    for piece in pieces_of(tokenizer, *texts, **fields):
        choices[piece.choice].add(piece)
    return choices


def called(choice: Choice) -> list[tuple[str, str]]:
    functions = [call["function"] for call in choice.calls]
    return [(each["name"], each["arguments"]) for each in functions]


def test_each_choice_has_its_own_text_thinking_and_calls(tokenizer: HuggingFaceTokenizer) -> None:
    first, second = answers(tokenizer, THOUGHT + FINAL, THOUGHT + CALL, tools=Tools((WEATHER,)))
    assert (first.text, first.reasoning, first.end) == ("No rain.", "Hm.", "stop")
    assert (second.text, second.reasoning, second.end) == ("", "Hm.", "tool_calls")
    assert called(second) == [("weather", '{"city": "a"}')]
    assert len(first.tokens) == len(tokenizer.tokenize(THOUGHT + FINAL)) - 1


def test_the_tokens_of_a_text_are_without_its_header(tokenizer: HuggingFaceTokenizer) -> None:
    answer = AnswerParts()
    for piece in pieces_of(tokenizer, THOUGHT + FINAL):
        list(answer.add(piece))
    thought, text = answer.parts
    assert (thought.kind, text.kind) == (Kind.THINKING, Kind.TEXT)
    assert [token for token, _ in text.tokens] == tokenizer.tokenize("No rain.")
    assert answer.thinking_count == len(tokenizer.tokenize("<|channel|>analysis<|message|>Hm."))


def test_a_request_without_tools_has_no_calls(tokenizer: HuggingFaceTokenizer) -> None:
    (found,) = answers(tokenizer, THOUGHT + CALL)
    assert (found.text, found.end, found.calls) == ("", "stop", ())


def test_several_calls_are_limited_as_the_request_says(tokenizer: HuggingFaceTokenizer) -> None:
    clock = "<|start|>assistant to=functions.time<|channel|>commentary json<|message|>{}<|call|>"
    text = CALL.replace("<|call|>", "<|end|>") + clock
    tools = Tools((WEATHER, TIME))
    (both,) = answers(tokenizer, text, tools=tools)
    assert [name for name, _ in called(both)] == ["weather", "time"]
    (one,) = answers(tokenizer, text, tools=replace(tools, single=True))
    assert [name for name, _ in called(one)] == ["weather"]


def test_a_cut_answer_says_so_at_every_length(tokenizer: HuggingFaceTokenizer) -> None:
    text = THOUGHT + CALL
    count = len(tokenizer.tokenize(text))
    for length in range(1, count):
        (found,) = answers(tokenizer, text, tools=Tools((WEATHER,)), max_tokens=length)
        assert (found.text, found.end, found.calls) == ("", "length", ())
        assert not any(mark in found.reasoning for mark in SPECIAL)


def test_a_stop_word_of_the_request_ends_the_text(tokenizer: HuggingFaceTokenizer) -> None:
    (found,) = answers(tokenizer, THOUGHT + FINAL, stop=(" rain", "Hm"))
    assert (found.text, found.reasoning, found.end) == ("No", "Hm.", "stop")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("starlette", reason="starlette is not installed (extra `serve`)")
    pytest.importorskip("llguidance", reason="llguidance is not installed (extra `serve`)")
    directory = tmp_path_factory.mktemp("gpt-oss")
    save(directory)
    return directory


def without_thinking(tokenizer: HuggingFaceTokenizer) -> dict[str, int]:
    """Biases with which the channel of an answer is not `analysis`, and texts are short."""
    return {str(tokenizer.tokenize(letter)[0]): -100 for letter in ("a", " ", "\n")}


@pytest.mark.oracle
def test_demanded_calls_and_json_are_messages_of_their_own(model: Path) -> None:
    tokenizer = HuggingFaceTokenizer(str(model))
    serving = ForkedServing(model, "--separate-reasoning")
    city: dict[str, Any] = {"type": "string", "enum": ["Bonn", "Rome"]}
    schema = {"type": "object", "properties": {"city": city}, "required": ["city"]}
    strict = {**schema, "additionalProperties": False}
    function = {"name": "weather", "description": "Get it.", "parameters": strict}
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Rain?"}],
        "reasoning_effort": "low",
        "max_tokens": 200,
        "temperature": 0,
        "logit_bias": without_thinking(tokenizer),
    }
    tools = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    _, said = serving.ask("/v1/chat/completions", body | tools)
    (choice,) = said["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert "reasoning_content" not in choice["message"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"])["city"] in city["enum"]
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": strict}}
    formed = body | {"response_format": form}
    _, said = serving.ask("/v1/chat/completions", formed)
    content = said["choices"][0]["message"]["content"]
    assert json.loads(content)["city"] in city["enum"]
    _, stream = serving.ask("/v1/chat/completions", formed | {"stream": True})
    lines = [line.removeprefix("data: ") for line in str(stream).splitlines() if "{" in line]
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
    assert "".join(delta.get("content") or "" for delta in deltas) == content
    assert serving.end() == (0, "")


@pytest.mark.oracle
def test_thinking_is_never_content(model: Path) -> None:
    """The template begins the thinking, and this model doesn't end it."""
    template = model / "chat_template.jinja"
    written = template.read_text()
    template.write_text(written + "{{ '<|channel|>analysis<|message|>' }}")
    try:
        plain, separate = ForkedServing(model), ForkedServing(model, "--separate-reasoning")
    finally:
        template.write_text(written)
    body = {"messages": [{"role": "user", "content": "Rain?"}], "temperature": 0, "max_tokens": 8}
    body["logit_bias"] = {str(number): -100 for number in range(len(SPECIAL))}
    _, said = plain.ask("/v1/chat/completions", body)
    assert said["choices"][0]["message"] == {"role": "assistant", "content": ""}
    _, said = separate.ask("/v1/chat/completions", body)
    message = said["choices"][0]["message"]
    assert message["content"] == ""
    assert message["reasoning_content"]
    assert [each.end() for each in (plain, separate)] == [(0, "")] * 2
