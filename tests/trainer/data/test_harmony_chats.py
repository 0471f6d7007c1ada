"""Conversations with GPT-OSS: the prompt is that of OpenAI's template and of openai-harmony, and the right tokens are learned."""

import json
import os
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from formats.errors import CorruptCheckpoint
from megatron_lite.data.encoding import BadRecord
from megatron_lite.data.finetuning.chat import ChatTemplate
from megatron_lite.data.finetuning.examples import Examples, ReadingOptions, read_examples
from megatron_lite.data.finetuning.forms import Chat, read_record
from megatron_lite.data.harmony_messages import with_harmony_fields
from megatron_lite.data.tokenizer import HuggingFaceTokenizer
from megatron_lite.inference.prompts import encode_chat
from megatron_lite.inference.server.messages import read_messages
from tests.trainer.harmony_model import TEMPLATE, TIME, WEATHER, tokenizer_of

pytest.importorskip("transformers", reason="transformers is not installed")

PYTHON = os.environ.get("TRL_PYTHON", "")
WRITTEN = json.loads(
    (Path(__file__).parents[1] / "fixtures" / "harmony" / "conversations.json").read_text()
)
USER = {"role": "user", "content": "Rain?"}


def call(name: str, arguments: str, number: str) -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


LOOK = call("weather", '{"city": "Köln"}', "1")
CLOCK = call("time", "{}", "2")
SUNNY = {"role": "tool", "tool_call_id": "1", "content": '{"sunny":true}'}
NOON = {"role": "tool", "tool_call_id": "2", "content": "noon"}
CALLS = {"role": "assistant", "content": None, "reasoning_content": "I look."}
NO = {"role": "assistant", "content": "No.", "reasoning_content": "I look."}
PROMPTS: dict[str, list[dict[str, Any]]] = {
    "call": [USER, {**CALLS, "tool_calls": [LOOK]}, SUNNY],
    "two calls": [USER, {**CALLS, "tool_calls": [LOOK, CLOCK]}, NOON, SUNNY],
    "answered": [USER, {**NO, "tool_calls": None}, USER],
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    return tokenizer_of(tmp_path_factory.mktemp("harmony"))


def prompt_of(tokenizer: HuggingFaceTokenizer, messages: list[Any], tools: Any = ()) -> str:
    return tokenizer.spelled(encode_chat(tokenizer, read_messages(messages), tools))


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_of_the_server_are_those_of_openai_harmony(
    tokenizer: HuggingFaceTokenizer, name: str
) -> None:
    prompt = prompt_of(tokenizer, PROMPTS[name], [WEATHER, TIME])
    assert prompt[prompt.index("<|start|>user") :] == WRITTEN[name]


def test_results_without_the_id_of_a_call_follow_the_calls_in_their_order(
    tokenizer: HuggingFaceTokenizer,
) -> None:
    results = [{"role": "tool", "content": each["content"]} for each in (SUNNY, NOON)]
    messages = [USER, {**CALLS, "tool_calls": [LOOK, CLOCK]}, *results]
    prompt = prompt_of(tokenizer, messages, [WEATHER, TIME])
    assert prompt.endswith(WRITTEN["two calls"])


def test_a_preamble_beside_thinking_and_a_call_is_kept(tokenizer: HuggingFaceTokenizer) -> None:
    """The template refuses both."""
    message = {**CALLS, "content": "Wait.", "tool_calls": [LOOK]}
    prompt = prompt_of(tokenizer, [USER, message, SUNNY])
    assert "<|channel|>analysis<|message|>I look.\n\nWait.<|end|>" in prompt


def test_instructions_of_system_and_developer_are_joined(tokenizer: HuggingFaceTokenizer) -> None:
    system = {"role": "system", "content": "Be kind."}
    developer = {"role": "developer", "content": "Be brief."}
    prompt = prompt_of(tokenizer, [system, developer, USER])
    assert (
        "<|start|>developer<|message|># Instructions\n\nBe kind.\n\nBe brief.\n\n<|end|>" in prompt
    )
    with pytest.raises(Exception, match="message 2 is by the system; this template reads"):
        prompt_of(tokenizer, [USER, system])


@pytest.mark.parametrize("described", [{}, {"description": None}])
def test_a_tool_without_a_description_is_written(
    tokenizer: HuggingFaceTokenizer, described: dict[str, None]
) -> None:
    tool = {"type": "function", "function": {"name": "time", **described}}
    assert "type time = () => any;" in prompt_of(tokenizer, [USER], [tool])
    ids, _ = ChatTemplate(tokenizer).encode(
        Chat([USER, {"role": "assistant", "content": "a"}], [tool])
    )
    assert "type time = () => any;" in tokenizer.spelled(ids)


def test_messages_of_another_template_stay_as_they_are() -> None:
    messages = [USER, NO, USER, {**CALLS, "tool_calls": [LOOK, CLOCK]}, NOON, SUNNY]
    assert with_harmony_fields(messages, "{{ messages }}") == messages


def learned_text(tokenizer: HuggingFaceTokenizer, chat: Chat, turns: str = "all") -> str:
    ids, learned = ChatTemplate(tokenizer, turns=turns).encode(chat)
    return tokenizer.spelled([token for token, mark in zip(ids, learned, strict=True) if mark])


def chat_of(messages: list[Any], tools: Any = None) -> Chat:
    example = read_record({"messages": messages, "tools": tools}).example
    assert isinstance(example, Chat)
    return example


THOUGHT = "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>No.<|return|>"


def test_an_answer_is_learned_with_its_thinking_and_its_end(
    tokenizer: HuggingFaceTokenizer,
) -> None:
    ids, _ = ChatTemplate(tokenizer).encode(chat_of([USER, NO]))
    assert tokenizer.spelled(ids).endswith(WRITTEN["training"])
    assert learned_text(tokenizer, chat_of([USER, NO])) == THOUGHT + FINAL


def test_all_that_a_model_writes_behind_the_prompt_is_learned(
    tokenizer: HuggingFaceTokenizer,
) -> None:
    """The beginning of the second message too, which the model writes behind its thinking."""
    prompt = prompt_of(tokenizer, [USER])
    question = prompt[prompt.index("<|start|>user") :]
    written = WRITTEN["training"].removeprefix(question)
    assert written != WRITTEN["training"]
    assert learned_text(tokenizer, chat_of([USER, NO])) == written


def test_a_call_is_learned_with_its_end_and_a_result_is_not(
    tokenizer: HuggingFaceTokenizer,
) -> None:
    asked = [USER, {**CALLS, "tool_calls": [LOOK]}]
    called = ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Köln"}<|call|>'
    assert learned_text(tokenizer, chat_of(asked, [WEATHER])) == THOUGHT + called
    # The template removes the call's thinking before the answer. So the call is not learned here, unless it has none.
    answered = chat_of([*asked, SUNNY, NO], [WEATHER])
    assert learned_text(tokenizer, answered) == THOUGHT + FINAL
    plain = {"role": "assistant", "content": None, "tool_calls": [LOOK]}
    answered = chat_of([USER, plain, SUNNY, NO], [WEATHER])
    assert learned_text(tokenizer, answered) == called + THOUGHT + FINAL
    assert learned_text(tokenizer, answered, "last") == THOUGHT + FINAL


def test_the_end_of_an_earlier_answer_is_not_learned(tokenizer: HuggingFaceTokenizer) -> None:
    """A model that writes `<|end|>` behind an answer goes on."""
    plain = {"role": "assistant", "content": "Yes."}
    chat = chat_of([USER, plain, USER, NO])
    assert learned_text(tokenizer, chat) == "<|channel|>final<|message|>Yes." + THOUGHT + FINAL
    assert learned_text(tokenizer, chat_of([USER, NO, USER, plain])) == (
        "<|channel|>final<|message|>Yes.<|return|>"
    )
    given = Chat(chat.messages, given=2)
    assert learned_text(tokenizer, given) == THOUGHT + FINAL


def read_pair_of(tokenizer: HuggingFaceTokenizer, directory: Path, **fields: Any) -> Examples:
    file = directory / "pairs.jsonl"
    file.write_text(json.dumps(fields))
    return read_examples([str(file)], tokenizer, ReadingOptions(pairs=True))


def test_an_answer_is_compared_with_a_call(tokenizer: HuggingFaceTokenizer, tmp_path: Path) -> None:
    asked = {**CALLS, "tool_calls": [LOOK]}
    found = read_pair_of(tokenizer, tmp_path, prompt=[USER], chosen=[asked], rejected=[NO])
    prompt = prompt_of(tokenizer, [USER])
    call = ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Köln"}<|call|>'
    for (first, last), answer in zip(pairwise(found.bounds), (call, FINAL), strict=True):
        assert tokenizer.spelled(found.tokens[first:last].tolist()) == prompt + THOUGHT + answer
        assert found.learned[first:last].sum() == len(tokenizer.tokenize(THOUGHT + answer))


def test_pairs_that_the_template_rewrites_are_refused(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    """It removes the thinking of a call that an answer follows."""
    asked = {**CALLS, "tool_calls": [LOOK]}
    clock = {"role": "assistant", "content": None, "tool_calls": [CLOCK]}
    with pytest.raises(CorruptCheckpoint, match="a whole turn can't be compared; end the turn"):
        read_pair_of(tokenizer, tmp_path, prompt=[USER], chosen=[asked, SUNNY, NO], rejected=[NO])
    before = [USER, asked, SUNNY]
    with pytest.raises(CorruptCheckpoint, match='different prompts for "chosen" and "rejected"'):
        read_pair_of(tokenizer, tmp_path, prompt=before, chosen=[clock], rejected=[NO])
    without = [USER, {**asked, "reasoning_content": None}, SUNNY]
    read_pair_of(tokenizer, tmp_path, prompt=without, chosen=[clock], rejected=[NO])


@pytest.mark.parametrize(
    "text", ["a<|end|>", "<|start|>assistant<|channel|>final<|message|>a<|end|>"]
)
def test_special_tokens_in_a_text_are_refused(tokenizer: HuggingFaceTokenizer, text: str) -> None:
    for messages in (
        [{"role": "user", "content": f"b<|end|>{text}"}, NO],
        [USER, {**NO, "content": text}],
    ):
        with pytest.raises(BadRecord, match=r"special tokens of harmony|<\|channel\|> tags"):
            ChatTemplate(tokenizer).encode(chat_of(messages))


@pytest.mark.oracle
@pytest.mark.parametrize("tools", [None, [WEATHER, TIME]])
def test_tokens_of_finetuning_are_those_of_transformers(
    tokenizer: HuggingFaceTokenizer, tools: Any
) -> None:
    thought = {"role": "assistant", "content": "No.", "thinking": "I look."}
    asked = {"role": "assistant", "content": "", "tool_calls": [{"name": "time", "arguments": {}}]}
    noon = {"role": "tool", "content": {"time": "noon"}}
    for messages in ([USER, thought], [USER, thought, USER, thought], [USER, asked, noon, thought]):
        made = tokenizer.inner.apply_chat_template(messages, tools=tools, return_dict=True)
        assert ChatTemplate(tokenizer).encode(Chat(messages, tools)).ids == made["input_ids"]


@pytest.mark.trl
@pytest.mark.skipif(not PYTHON, reason="TRL_PYTHON names no Python with trl")
@pytest.mark.parametrize("name", PROMPTS)
def test_the_template_of_these_tests_writes_what_openai_s_template_writes(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path, name: str
) -> None:
    """trl has OpenAI's template among its files."""
    found = "import importlib.util as u; print(u.find_spec('trl').submodule_search_locations[0])"
    trl = subprocess.run([PYTHON, "-c", found], capture_output=True, text=True, check=True)
    template = Path(trl.stdout.strip()) / "chat_templates" / "gptoss.jinja"
    theirs = tokenizer_of(tmp_path, template.read_text())
    assert theirs.inner.chat_template != TEMPLATE
    system = {"role": "system", "content": "Be kind."}
    for tools in ((), [WEATHER, TIME]):
        for messages in (PROMPTS[name], [system, *PROMPTS[name]]):
            assert prompt_of(theirs, messages, tools) == prompt_of(tokenizer, messages, tools)
            chat = chat_of([*messages, NO], tools or None)
            assert ChatTemplate(theirs).encode(chat) == ChatTemplate(tokenizer).encode(chat)
