"""Thinking apart from the answer: however the text is cut into pieces, and in answers of the server."""

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.inference.server.pieces import Choice, Piece
from megatron_lite.inference.server.reasoning import with_reasoning
from megatron_lite.inference.server.thinking_forms import thinking_forms_of
from megatron_lite.inference.server.tools import Tools, with_calls
from tests.trainer.inference.conversations import save
from tests.trainer.inference.serving import ForkedServing

THINK = thinking_forms_of("deepseek-r1", "")
WEATHER = {"type": "function", "function": {"name": "weather"}}


async def answers(texts: list[str], end: str = "stop") -> AsyncGenerator[Piece, None]:
    for number, text in enumerate(texts):
        yield Piece(0, text, end=end if number == len(texts) - 1 else None)


def separated(texts: list[str], *, begun: bool = False) -> tuple[str, str]:
    """(thinking, answer) of an answer that comes in these pieces."""
    choice = Choice()

    async def run() -> None:
        async for piece in with_reasoning(answers(texts), THINK, "hi<think>\n" if begun else "hi"):
            choice.add(piece)

    asyncio.run(run())
    assert choice.end == "stop"
    return choice.reasoning, choice.text


@pytest.mark.parametrize(
    ("text", "begun", "expected"),
    [
        ("<think>\nHm, 1 < 2.\n</think>\n\nYes.", False, ("Hm, 1 < 2.\n", "Yes.")),
        ("\n<think>a</think>b", False, ("a", "b")),
        ("Hm.\n</think>\n\nYes.", True, ("Hm.\n", "Yes.")),
        ("\n</think>\n\nYes.", True, ("", "Yes.")),
        (
            "Yes. <think> isn't a mark here</think>",
            False,
            ("", "Yes. <think> isn't a mark here</think>"),
        ),
        ("<thin ice", False, ("", "<thin ice")),
        ("  <th", False, ("", "  <th")),
        ("<think>cut off </thi", False, ("cut off </thi", "")),
        ("cut off", True, ("cut off", "")),
        ("<think>a</think>b<think>c</think>d", False, ("a", "b<think>c</think>d")),
        ("<think>a</</think>b\n", False, ("a</", "b\n")),
        ("", False, ("", "")),
        ("\n\nplain\n", False, ("", "\n\nplain\n")),
    ],
)
def test_thinking_is_apart_however_the_text_is_cut(
    text: str, begun: bool, expected: tuple[str, str]
) -> None:
    for width in range(1, len(text) + 2):
        texts = [text[at : at + width] for at in range(0, len(text), width)] or [""]
        assert separated(texts, begun=begun) == expected, texts


def test_text_that_begins_no_mark_is_not_held_back() -> None:
    async def run() -> list[tuple[str, str]]:
        pieces = with_reasoning(answers(["<think>a", " <b", "c</", "think>d", "<"]), THINK, "hi")
        return [(piece.reasoning, piece.text) async for piece in pieces]

    assert asyncio.run(run()) == [("a", ""), (" <b", ""), ("c", ""), ("", "d"), ("", "<")]


def test_calls_of_tools_are_found_behind_the_thinking() -> None:
    text = '<think>the tool?</think>\n<tool_call>{"name": "weather", "arguments": {}}</tool_call>'

    async def run() -> list[Piece]:
        pieces = with_reasoning(answers([text[:30], text[30:]]), THINK, "hi")
        return [piece async for piece in with_calls(pieces, Tools((WEATHER,)))]

    found = Choice()
    for piece in asyncio.run(run()):
        found.add(piece)
    assert (found.reasoning, found.text, found.end) == ("the tool?", "", "tool_calls")
    assert found.calls[0]["function"]["name"] == "weather"


@pytest.mark.oracle
def test_answers_and_streams_of_the_server_have_it(tmp_path: Path) -> None:
    """The template ends with the first mark, and this model never writes the second one."""
    pytest.importorskip("starlette", reason="starlette is not installed (extra `serve`)")
    save(tmp_path)
    template = tmp_path / "chat_template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}{{ '<think>\\n' }}")
    serving = ForkedServing(tmp_path, "--separate-reasoning")
    body: dict[str, Any] = {"temperature": 0, "max_tokens": 6}
    _, plain = serving.ask("/v1/completions", {"prompt": "hi<think>\n", **body})
    expected = plain["choices"][0]["text"].lstrip("\n")
    body |= {"messages": [{"role": "user", "content": "hi"}]}
    _, said = serving.ask("/v1/chat/completions", body)
    message = said["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "", "reasoning_content": expected}
    _, stream = serving.ask("/v1/chat/completions", {**body, "stream": True})
    lines = [line.removeprefix("data: ") for line in str(stream).splitlines() if "{" in line]
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == expected
    assert not any(delta.get("content") for delta in deltas)
    # A demanded form has no thinking.
    _, formed = serving.ask(
        "/v1/chat/completions",
        {**body, "max_tokens": 40, "response_format": {"type": "json_object"}},
    )
    assert "reasoning_content" not in formed["choices"][0]["message"]
    assert serving.end() == (0, "")
