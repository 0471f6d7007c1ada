"""Thinking in earlier answers: it comes back in the prompt, in the field that each family's template reads."""

from pathlib import Path
from typing import Any

import pytest

from megatron_lite.data.template_messages import as_template_expects
from megatron_lite.data.tokenizer import HuggingFaceTokenizer
from megatron_lite.inference.prompts import encode_chat
from megatron_lite.inference.server.messages import read_messages
from tests.trainer.data.chat_templates import save_tokenizer

pytest.importorskip("transformers", reason="transformers is not installed (extra `data`)")

QWEN = (
    "{% for m in messages %}{% if m.reasoning_content is string %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% endfor %}"
)
GEMMA = (
    "{% for m in messages %}{% set thought = m.get('reasoning') %}{% if thought %}<|channel>thought\n{{ thought }}<channel|>"
    "{% endif %}{{ m['content'] }}{% endfor %}"
)
MAGISTRAL = (
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for block in m['content'] %}"
    "{% if block['type'] == 'text' %}{{ block['text'] }}{% elif block['type'] == 'thinking' %}"
    "{{ '[THINK]' + block['thinking'] + '[/THINK]' }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
COMMAND_A = (
    "{% for m in messages %}{% if m.tool_calls %}<|START_THINKING|>{{ m.tool_plan }}<|END_THINKING|>"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
CALL = {"type": "function", "function": {"name": "weather", "arguments": "{}"}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    directory: Path = tmp_path_factory.mktemp("model")
    return HuggingFaceTokenizer(str(save_tokenizer(directory, PLAIN)))


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (QWEN, "hi<think>Hm.</think>Yes."),
        (GEMMA, "hi<|channel>thought\nHm.<channel|>Yes."),
        (MAGISTRAL, "hi[THINK]Hm.[/THINK]Yes."),
        (PLAIN, "hiYes."),
        (COMMAND_A, "hiYes."),
    ],
)
def test_a_template_gets_earlier_thinking_in_its_own_field(
    tokenizer: HuggingFaceTokenizer, template: str, expected: str, field: str
) -> None:
    answer = {"role": "assistant", "content": "Yes.", field: "Hm."}
    messages = read_messages([{"role": "user", "content": "hi"}, answer])
    ids = encode_chat(tokenizer, messages, template=template)
    assert tokenizer.inner.decode(ids) == expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (QWEN, "hi<think>Hm.</think>"),
        (MAGISTRAL, "hi[THINK]Hm.[/THINK]"),
        (COMMAND_A, "hi<|START_THINKING|>Hm.<|END_THINKING|>"),
    ],
)
def test_thinking_before_a_call_comes_back(
    tokenizer: HuggingFaceTokenizer, template: str, expected: str
) -> None:
    answer = {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Hm.",
        "tool_calls": [CALL],
    }
    messages = read_messages([{"role": "user", "content": "hi"}, answer])
    ids = encode_chat(tokenizer, messages, template=template)
    assert tokenizer.inner.decode(ids) == expected


PLANNED = {"role": "assistant", "content": "a", "tool_calls": [CALL], "tool_plan": "c"}


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (MAGISTRAL, {"role": "user", "content": "a", "reasoning_content": "b"}),
        (MAGISTRAL, {"role": "assistant", "content": "a"}),
        (MAGISTRAL, {"role": "assistant", "content": "a", "reasoning_content": ""}),
        (MAGISTRAL, {"role": "assistant", "content": "a", "reasoning_content": 3}),
        (QWEN, {"role": "assistant", "content": "a", "reasoning_content": "b", "reasoning": "c"}),
        (COMMAND_A, {**PLANNED, "reasoning": "b"}),
    ],
)
def test_other_messages_stay_as_they_are(template: str, message: dict[str, Any]) -> None:
    assert as_template_expects([message], template) == [message]
