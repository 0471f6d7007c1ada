"""/v1/responses: items of an answer, its events, and conversations that go on from them, by the official client's own types."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.data.tokenizer import HuggingFaceTokenizer
from megatron_lite.inference.server.errors import Refused
from megatron_lite.inference.server.openai_responses.conversation import read_input
from tests.trainer.inference.forced import answered_at, byte_tokenizer
from tests.trainer.inference.serving import KEY, Serving
from tests.trainer.inference.written_calls import WRITERS

openai = pytest.importorskip("openai", reason="the client openai is not installed")
for package in ("transformers", "starlette", "uvicorn"):
    pytest.importorskip(package, reason=f"{package} is not installed")

SPECIAL = ["</s>", "<pad>", "[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"]
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% set marks = '[THINK] [TOOL_CALLS]' %}"
)
TOOLS = [{"type": "function", "name": name, "parameters": None} for name in ("weather", "time")]
CALLS = [("weather", {"city": "Köln"}), ("time", {"zone": "{"})]
THOUGHT = "[THINK]Hm, ö.[/THINK]"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("responses"), SPECIAL, TEMPLATE)


def answers(tokenizer: HuggingFaceTokenizer, text: str, **fields: Any) -> list[dict[str, Any]]:
    """The JSON objects of the answer of a model that says the text."""
    body = {"input": "Rain?", **fields}
    said = [text + "</s>"]
    return answered_at("/v1/responses", tokenizer, said, body, reasoning="auto")


def events(tokenizer: HuggingFaceTokenizer, text: str, **fields: Any) -> list[dict[str, Any]]:
    """The events of the same answer. Each is one of the client's types."""
    from openai.types.responses import ResponseStreamEvent
    from pydantic import TypeAdapter

    found = answers(tokenizer, text, stream=True, **fields)
    known: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    for event in found:
        known.validate_python(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def without_times(response: dict[str, Any]) -> dict[str, Any]:
    """A response without what differs between two requests: times, and ids."""
    text = json.dumps(response).replace(response["id"].removeprefix("resp_"), "")
    found: dict[str, Any] = json.loads(text) | {"created_at": 0, "completed_at": 0}
    found["output"] = [item | {"call_id": ""} for item in found["output"]]
    return found


def simple(items: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """(type, text or call) of each item."""
    found: list[tuple[str, Any]] = []
    for item in items:
        if item["type"] == "function_call":
            found.append((item["name"], json.loads(item["arguments"])))
        else:
            (content,) = item["content"]
            found.append((item["type"], content["text"]))
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Yes.", [("message", "Yes.")]),
        ("", [("message", "")]),
        (THOUGHT + "Yes.", [("reasoning", "Hm, ö."), ("message", "Yes.")]),
        (THOUGHT + WRITERS["mistral"](CALLS), [("reasoning", "Hm, ö."), *CALLS]),
        ("I look." + WRITERS["mistral"](CALLS), [("message", "I look."), *CALLS]),
    ],
)
def test_an_answer_and_its_stream_have_the_same_items(
    tokenizer: HuggingFaceTokenizer, text: str, expected: list[tuple[str, Any]]
) -> None:
    from openai.types.responses import Response

    (whole,) = answers(tokenizer, text, tools=TOOLS)
    Response.model_validate(whole)
    assert simple(whole["output"]) == expected
    assert whole["status"] == "completed"
    streamed = events(tokenizer, text, tools=TOOLS)
    assert [event["type"] for event in streamed[:2]] == ["response.created", "response.in_progress"]
    assert streamed[-1]["type"] == "response.completed"
    assert without_times(streamed[-1]["response"]) == without_times(whole)
    ended = [event["item"] for event in streamed if event["type"] == "response.output_item.done"]
    assert ended == streamed[-1]["response"]["output"]


def test_the_deltas_of_a_stream_add_up_to_its_items(tokenizer: HuggingFaceTokenizer) -> None:
    grown: dict[str, str] = {}
    streamed = events(tokenizer, THOUGHT + "Yes." + WRITERS["mistral"](CALLS), tools=TOOLS)
    for event in streamed:
        if event["type"].endswith(".delta"):
            grown[event["item_id"]] = grown.get(event["item_id"], "") + event["delta"]
    output = streamed[-1]["response"]["output"]
    assert list(grown) == [item["id"] for item in output]
    texts = [item.get("arguments") or item["content"][0]["text"] for item in output]
    assert list(grown.values()) == texts
    assert len([e for e in streamed if e["type"] == "response.output_text.delta"]) == 4


def test_the_limit_of_tokens_cuts_the_last_item(tokenizer: HuggingFaceTokenizer) -> None:
    for count, cut in ((3, "reasoning"), (12, "message")):
        (whole,) = answers(tokenizer, THOUGHT + "A long answer.", max_output_tokens=count)
        assert whole["status"] == "incomplete"
        assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
        last = whole["output"][-1]
        assert (last["type"], last["status"]) == (cut, "incomplete")
        assert whole["usage"]["output_tokens"] == count
        streamed = events(tokenizer, THOUGHT + "A long answer.", max_output_tokens=count)
        assert streamed[-1]["type"] == "response.incomplete"
        assert without_times(streamed[-1]["response"]) == without_times(whole)


def test_tokens_of_thinking_are_counted(tokenizer: HuggingFaceTokenizer) -> None:
    (whole,) = answers(tokenizer, THOUGHT + "Yes.")
    counted = whole["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert counted == len(tokenizer.tokenize(THOUGHT)) - 1  # the last mark comes with the answer


@pytest.mark.parametrize("text", [THOUGHT + "\n\nYes. ö", THOUGHT + "[", "Yes.", "\nYes."])
def test_log_probabilities_are_those_of_the_tokens_of_a_text(
    tokenizer: HuggingFaceTokenizer, text: str
) -> None:
    """Marks of thinking, and line breaks that are left out, have none."""
    asked = {"include": ["message.output_text.logprobs"]}
    (whole,) = answers(tokenizer, text, **asked)
    content = whole["output"][-1]["content"][0]
    likely = content["logprobs"]
    assert len(likely) == len(tokenizer.tokenize(content["text"]))
    assert likely[0]["token"] == content["text"][0]
    streamed = events(tokenizer, text, **asked)
    deltas = [event for event in streamed if event["type"] == "response.output_text.delta"]
    assert [each for event in deltas for each in event["logprobs"]] == likely


def test_the_items_of_an_answer_go_back_as_the_messages_of_a_chat(
    tokenizer: HuggingFaceTokenizer,
) -> None:
    (whole,) = answers(tokenizer, THOUGHT + "I look." + WRITERS["mistral"](CALLS), tools=TOOLS)
    calls = [item["call_id"] for item in whole["output"] if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": call, "output": "dry"} for call in calls]
    question = {"role": "user", "content": [{"type": "input_text", "text": "Rain?"}]}
    system, user, assistant, *tools = read_input(
        [{"role": "developer", "content": "Short."}, question, *whole["output"], *results],
        "Be kind.",
    )
    assert system == {"role": "system", "content": "Be kind.\n\nShort."}
    assert user == {"role": "user", "content": "Rain?"}
    assert (assistant["content"], assistant["reasoning_content"]) == ("I look.", "Hm, ö.")
    functions = [call["function"] for call in assistant["tool_calls"]]
    assert [(each["name"], json.loads(each["arguments"])) for each in functions] == CALLS
    assert [call["id"] for call in assistant["tool_calls"]] == calls
    expected = [{"role": "tool", "tool_call_id": call, "content": "dry"} for call in calls]
    assert tools == expected


def test_items_of_one_answer_become_one_message() -> None:
    def thinking(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}

    call = {"type": "function_call", "name": "weather", "arguments": "{}"}
    answer = [
        thinking("Hm."), {"role": "assistant", "content": "I look."}, thinking("More."), call | {"call_id": "1"},
        thinking("Again."), {"role": "assistant", "content": " Wait."}, call | {"call_id": "2"},
    ]  # fmt: skip
    results = [
        {"type": "function_call_output", "call_id": each, "output": "dry"} for each in ("1", "2")
    ]
    last = {"role": "assistant", "content": "It is dry."}
    question = {"role": "user", "content": "Rain?"}
    first, assistant, *tools, end, _ = read_input(
        [question, *answer, *results, last, question], None
    )
    assert (first, end) == (question, last)
    assert (assistant["content"], assistant["reasoning_content"]) == (
        "I look. Wait.",
        "Hm.More.Again.",
    )
    assert [each["id"] for each in assistant["tool_calls"]] == ["1", "2"]
    assert [each["tool_call_id"] for each in tools] == ["1", "2"]


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (None, "input should be a text, or a list of one item or more; it is missing"),
        ([], "input should be a text, or a list of one item or more; found []"),
        (["a"], "item 0 of input should be an object, found 'a'"),
        ([{"type": "item_reference", "id": "a"}], "item 0 of input has the type 'item_reference'"),
        ([{"role": "tool", "content": "a"}], "the role of item 0 of input should be one of user"),
        ([{"role": "user", "content": 3}], "the content of item 0 of input should be a text"),
        (
            [{"role": "user", "content": [{"type": "input_file", "file_id": "a"}]}],
            "the content of item 0 of input should have parts with a text, found 'input_file'",
        ),
        ([{"type": "function_call", "name": "a"}], "item 0 of input needs the text arguments"),
        ([{"type": "function_call_output", "output": "a"}], "item 0 of input needs the text call"),
    ],
)
def test_other_input_is_refused(items: Any, message: str) -> None:
    with pytest.raises(Refused) as refused:
        read_input(items, None)
    assert refused.value.message.startswith(message)
    assert refused.value.field == "input"


@pytest.fixture(scope="module")
def client(chat_server: Serving) -> Any:
    return openai.OpenAI(base_url=f"{chat_server.url}/v1", api_key=KEY, max_retries=0)


@pytest.mark.oracle
def test_the_official_client_gets_the_answer_of_a_chat(chat_server: Serving, client: Any) -> None:
    asked = {"temperature": 0, "model": "tiny"}
    messages = [{"role": "system", "content": "b"}, {"role": "user", "content": "hi"}]
    _, chat = chat_server.ask(
        "/v1/chat/completions", asked | {"messages": messages, "max_tokens": 6}
    )
    expected = chat["choices"][0]["message"]["content"]
    request = asked | {"instructions": "b", "input": "hi", "max_output_tokens": 6}
    answer = client.responses.create(**request)
    assert (answer.output_text, answer.instructions) == (expected, "b")
    assert answer.usage.input_tokens == chat["usage"]["prompt_tokens"]
    assert answer.usage.total_tokens == chat["usage"]["total_tokens"]
    *events, last = client.responses.create(**request, stream=True)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == last.response.output_text == expected


@pytest.mark.oracle
def test_log_probabilities_are_those_of_a_chat(chat_server: Serving, client: Any) -> None:
    messages = [{"role": "user", "content": "hi"}]
    asked = {"temperature": 0, "model": "tiny", "top_logprobs": 2}
    _, chat = chat_server.ask(
        "/v1/chat/completions", asked | {"messages": messages, "logprobs": True, "max_tokens": 4}
    )
    included = {"include": ["message.output_text.logprobs"], "max_output_tokens": 4}
    answer = client.responses.create(input="hi", **asked, **included)
    found = [each.to_dict() for each in answer.output[0].content[0].logprobs]
    expected = chat["choices"][0]["logprobs"]["content"]
    for token in expected:  # a part of a character has no bytes of its own
        for each in (token, *token["top_logprobs"]):
            each["bytes"] = each["bytes"] or []
    assert found == expected


@pytest.mark.oracle
def test_calls_and_forms_can_be_demanded(client: Any, chat_model: Path) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed (extra `serve`)")
    city: dict[str, Any] = {"type": "string", "enum": ["Bonn", "Rome"]}
    schema = {"type": "object", "properties": {"city": city}, "required": ["city"]}
    strict = {**schema, "additionalProperties": False}
    tool = {"type": "function", "name": "weather", "parameters": strict, "strict": True}
    chosen = [
        "required",
        {"type": "function", "name": "weather"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]},
    ]  # fmt: skip
    spaces = HuggingFaceTokenizer(str(chat_model)).tokenize(" \n")
    body = {"seed": 3, "logit_bias": {str(token): -100 for token in spaces}}
    asked: dict[str, Any] = {"model": "tiny", "input": "hi", "extra_body": body}
    for choice in chosen:
        answer = client.responses.create(**asked, tools=[tool], tool_choice=choice)
        (call,) = answer.output
        assert (call.type, call.name) == ("function_call", "weather")
        assert json.loads(call.arguments)["city"] in city["enum"]
    form = {"type": "json_schema", "name": "city", "schema": strict, "strict": True}
    answer = client.responses.create(**asked, text={"format": form})
    with client.responses.stream(**asked, text={"format": form}) as stream:
        assert stream.get_final_response().output_text == answer.output_text
    assert json.loads(answer.output_text)["city"] in city["enum"]
    assert answer.text.format.name == "city"


def nested(depth: int) -> dict[str, Any]:
    """Objects, each of which is a field of the next one."""
    found: dict[str, Any] = {}
    for _ in range(depth):
        found = {"a": found}
    return found


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "stores no responses"),
        ({"messages": []}, "messages", "unknown field 'messages'"),
        ({"n": 2}, "n", "unknown field 'n'"),
        ({"background": True}, "background", "background True is not supported"),
        ({"truncation": "auto"}, "truncation", "truncation 'auto' is not supported"),
        ({"tools": [{"type": "web_search"}]}, "tools", "tool 0 should have the type function"),
        ({"tools": {}}, "tools", "tools should be a list"),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice needs tools"),
        ({"text": {"format": {"type": "xml"}}}, "text", "response_format should be an object"),
        ({"text": {"verbosity": "low"}}, "verbosity", "verbosity 'low' is not supported"),
        ({"reasoning": {"effort": "low"}}, "reasoning", "chat template doesn't read"),
        ({"reasoning": {"mode": "pro"}}, "mode", "unknown field 'mode'"),
        ({"include": ["file_search_call.results"]}, "include", "include should be a list of"),
        ({"top_logprobs": 2}, "top_logprobs", "top_logprobs needs message.output_text.logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens", "should be a whole number from 1"),
        ({"stream_options": [3]}, "stream_options", "supports only include_obfuscation"),
        ({"stream_options": ""}, "stream_options", "supports only include_obfuscation"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "supports only include"),
        ({"instructions": 3}, "instructions", "instructions should be a text"),
        ({"tools": [{"type": "function", "name": "a", "parameters": {"b": float("nan")}}]}, "tools", "tools has NaN or an"),
        ({"text": {"format": {"type": "text", "a": [float("inf")]}}}, "text", "text has NaN or an"),
        ({"tools": [{"type": "function", "name": "a", "parameters": nested(300)}]}, "tools", "tools has more than 200 levels"),
        ({"input": "a" * 5000}, "input", "tokens"),
    ],
)  # fmt: skip
def test_bad_requests_are_refused_with_a_message(
    chat_server: Serving, fields: dict[str, Any], field: str, message: str
) -> None:
    status, found = chat_server.ask("/v1/responses", {"model": "tiny", "input": "hi"} | fields)
    assert status == 400
    assert message in found["error"]["message"]
    assert found["error"]["param"] == field


@pytest.mark.oracle
def test_fields_without_effect_are_accepted(chat_server: Serving) -> None:
    fields = {
        "metadata": {"a": "b"}, "store": True, "user": "me", "service_tier": "auto", "truncation": "disabled",
        "background": False, "reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"], "tools": [],
        "max_tool_calls": 3, "text": {"format": {"type": "text"}, "verbosity": "medium"}, "max_output_tokens": 2,
        "stream_options": None, "prompt_cache_key": "a", "previous_response_id": None, "parallel_tool_calls": True,
    }  # fmt: skip
    status, found = chat_server.ask("/v1/responses", {"model": "tiny", "input": "hi"} | fields)
    assert status == 200, found
    assert found["store"] is False
