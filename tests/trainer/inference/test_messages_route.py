"""/v1/messages: blocks of an answer, its events, and conversations that go on from them, by Anthropic's own client."""

import asyncio
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.data.tokenizer import HuggingFaceTokenizer
from megatron_lite.inference.server.anthropic_messages.answer import MessageForm
from megatron_lite.inference.server.anthropic_messages.conversation import read_conversation
from megatron_lite.inference.server.errors import Refused
from megatron_lite.inference.server.pieces import Piece, Pieces
from tests.trainer.inference.forced import answered_at, byte_tokenizer
from tests.trainer.inference.serving import KEY, Serving
from tests.trainer.inference.written_calls import WRITERS

anthropic = pytest.importorskip("anthropic", reason="the client anthropic is not installed")
for package in ("transformers", "starlette", "uvicorn"):
    pytest.importorskip(package, reason=f"{package} is not installed")

SPECIAL = ["</s>", "<pad>", "[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"]
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% set marks = '[THINK] [TOOL_CALLS]' %}"
    "{% if enable_thinking is defined %}{{ '+' if enable_thinking else '---' }}{% endif %}"
)
TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("weather", "time")]
CALLS = [("weather", {"city": "Köln"}), ("time", {"zone": "{"})]
THOUGHT = "[THINK]Hm, ö.[/THINK]"
QUESTION = [{"role": "user", "content": "Rain?"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("messages"), SPECIAL, TEMPLATE)


def answers(tokenizer: HuggingFaceTokenizer, text: str, **fields: Any) -> list[dict[str, Any]]:
    """The JSON objects of the answer of a model that says the text."""
    body = {"messages": QUESTION, "max_tokens": 500, **fields}
    said = [text + "</s>"]
    return answered_at("/v1/messages", tokenizer, said, body, reasoning="auto")


def events(tokenizer: HuggingFaceTokenizer, text: str, **fields: Any) -> list[dict[str, Any]]:
    """The events of the same answer. Each is one of the client's types."""
    from anthropic.types import RawMessageStreamEvent
    from pydantic import TypeAdapter

    found = answers(tokenizer, text, stream=True, **fields)
    known: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    for event in found:
        known.validate_python(event)
    return found


def simple(blocks: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """(type, text) of each block; of a call (name, arguments)."""
    found: list[tuple[str, Any]] = []
    for block in blocks:
        if block["type"] == "tool_use":
            found.append((block["name"], block["input"]))
        else:
            found.append((block["type"], block[block["type"]]))
    return found


def added_up(streamed: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """The same of the blocks that a stream's events make."""
    blocks: list[dict[str, Any]] = []
    for event in streamed:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            delta, block = dict(event["delta"]), blocks[event["index"]]
            kind = delta.pop("type")
            for key, value in delta.items():
                block[key] = block.get(key, "") + value
            assert kind in ("text_delta", "thinking_delta", "signature_delta", "input_json_delta")
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["partial_json"])
    return simple(blocks)


@pytest.mark.parametrize(
    ("text", "expected", "reason"),
    [
        ("Yes.", [("text", "Yes.")], "end_turn"),
        ("", [("text", "")], "end_turn"),
        (THOUGHT + "Yes.", [("thinking", "Hm, ö."), ("text", "Yes.")], "end_turn"),
        (THOUGHT + WRITERS["mistral"](CALLS), [("thinking", "Hm, ö."), *CALLS], "tool_use"),
        ("I look." + WRITERS["mistral"](CALLS), [("text", "I look."), *CALLS], "tool_use"),
    ],
)
def test_an_answer_and_its_stream_have_the_same_blocks(
    tokenizer: HuggingFaceTokenizer, text: str, expected: list[tuple[str, Any]], reason: str
) -> None:
    from anthropic.types import Message

    (whole,) = answers(tokenizer, text, tools=TOOLS)
    Message.model_validate(whole)
    assert simple(whole["content"]) == expected
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, None)
    streamed = events(tokenizer, text, tools=TOOLS)
    assert [streamed[0]["type"], streamed[-1]["type"]] == ["message_start", "message_stop"]
    assert streamed[0]["message"]["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert added_up(streamed) == expected
    assert streamed[-2]["usage"] == whole["usage"]
    assert streamed[-2]["delta"] == {"stop_reason": reason, "stop_sequence": None}


@pytest.mark.parametrize(
    "arguments", ["Bonn", '["Bonn"]', '{"city": NaN}', '{"city": "\\ud800"}', "[" * 9000]
)
def test_arguments_that_are_no_object_are_one_field_in_the_answer_and_its_stream(
    arguments: str,
) -> None:
    called = {"id": "a", "function": {"name": "weather", "arguments": arguments}}

    async def pieces() -> Pieces:
        yield Piece(0, "", end="tool_calls", calls=(called,))

    async def both() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        form = MessageForm("tiny", 3)
        return await form.whole(pieces()), [event async for event in form.events(pieces())]

    whole, streamed = asyncio.run(both())
    assert simple(whole["content"]) == [("weather", {"arguments": arguments})]
    assert added_up(streamed) == simple(whole["content"])


def test_an_answer_says_what_ended_it(tokenizer: HuggingFaceTokenizer) -> None:
    (cut,) = answers(tokenizer, "A long answer.", max_tokens=4)
    assert (cut["stop_reason"], cut["content"][0]["text"]) == ("max_tokens", "A lo")
    words = {"stop_sequences": ["answer", "long"]}
    (stopped,) = answers(tokenizer, "A long answer.", **words)
    assert stopped["content"][0]["text"] == "A "
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "long")
    delta = events(tokenizer, "A long answer.", **words)[-2]["delta"]
    assert delta == {"stop_reason": "stop_sequence", "stop_sequence": "long"}


def test_thinking_is_switched_by_the_variable_of_the_template(
    tokenizer: HuggingFaceTokenizer,
) -> None:
    def count(**fields: Any) -> int:
        (whole,) = answers(tokenizer, "Yes.", **fields)
        tokens: int = whole["usage"]["input_tokens"]
        return tokens

    plain = count()
    assert count(thinking={"type": "enabled", "budget_tokens": 2000}) == plain + 1
    assert count(thinking={"type": "adaptive"}) == plain + 1
    assert count(thinking={"type": "disabled"}) == plain + 3
    variables = {"chat_template_kwargs": {"enable_thinking": False}}
    assert count(thinking={"type": "adaptive"}, **variables) == plain + 3


def test_the_blocks_of_an_answer_go_back_as_the_messages_of_a_chat(
    tokenizer: HuggingFaceTokenizer,
) -> None:
    (whole,) = answers(tokenizer, THOUGHT + "I look." + WRITERS["mistral"](CALLS), tools=TOOLS)
    calls = [block["id"] for block in whole["content"] if block["type"] == "tool_use"]
    results: list[dict[str, Any]] = [
        {"type": "tool_result", "tool_use_id": calls[0], "content": "dry"},
        {"type": "tool_result", "tool_use_id": calls[1], "content": [{"type": "text", "text": "now"}]},
    ]  # fmt: skip
    more = {"type": "text", "text": "And?", "cache_control": {"type": "ephemeral"}}
    system, user, assistant, *rest = read_conversation(
        [*QUESTION, {"role": "assistant", "content": whole["content"]}, {"role": "user", "content": [*results, more]}],
        [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}],
    )  # fmt: skip
    assert system == {"role": "system", "content": "Be kind."}
    assert user == QUESTION[0]
    assert (assistant["content"], assistant["reasoning_content"]) == ("I look.", "Hm, ö.")
    functions = [call["function"] for call in assistant["tool_calls"]]
    assert [(each["name"], json.loads(each["arguments"])) for each in functions] == CALLS
    assert rest == [
        {"role": "tool", "tool_call_id": calls[0], "content": "dry"},
        {"role": "tool", "tool_call_id": calls[1], "content": "now"},
        {"role": "user", "content": "And?"},
    ]


@pytest.mark.parametrize(
    ("messages", "system", "message"),
    [
        (None, None, "messages should be a list of one message or more; it is missing"),
        (["a"], None, "message 0 should be an object with one of the roles user, assistant"),
        ([{"role": "tool", "content": "a"}], None, "message 0 should be an object with one of"),
        ([{"role": "user", "content": 3}], None, "the content of message 0 should be a text"),
        (
            [{"role": "user", "content": [{"type": "image"}]}],
            None,
            "the source of an image in message 0",
        ),
        ([{"role": "user", "content": [{"type": "video"}]}], None, "message 0 has a block of the"),
        ([{"role": "user", "content": [{"type": "text"}]}], None, "a text of message 0 needs the"),
        ([{"role": "assistant", "content": "a"}], None, "the last message is the assistant's"),
        (QUESTION, 3, "system should be a text or a list of blocks"),
        (QUESTION, [{"type": "image"}], "system has a block of the type 'image'"),
    ],
)
def test_other_messages_are_refused(messages: Any, system: Any, message: str) -> None:
    with pytest.raises(Refused) as refused:
        read_conversation(messages, system)
    assert refused.value.message.startswith(message)


@pytest.fixture(scope="module")
def client(chat_server: Serving) -> Any:
    return anthropic.Anthropic(base_url=chat_server.url, api_key=KEY, max_retries=0)


@pytest.mark.oracle
def test_anthropics_client_gets_the_answer_of_a_chat(chat_server: Serving, client: Any) -> None:
    asked = {"temperature": 0, "model": "tiny", "max_tokens": 6}
    messages = [{"role": "system", "content": "b"}, *QUESTION]
    _, chat = chat_server.ask("/v1/chat/completions", asked | {"messages": messages})
    expected = chat["choices"][0]["message"]["content"]
    request: dict[str, Any] = {
        "model": "tiny", "max_tokens": 6, "system": "b", "messages": QUESTION, "extra_body": {"temperature": 0},
    }  # fmt: skip
    answer = client.messages.create(**request)
    assert (answer.content[0].text, answer.stop_reason) == (expected, "max_tokens")
    assert answer.usage.input_tokens == chat["usage"]["prompt_tokens"]
    assert answer.usage.output_tokens == chat["usage"]["completion_tokens"]
    with client.messages.stream(**request) as stream:
        assert "".join(stream.text_stream) == expected
        assert stream.get_final_message().stop_reason == "max_tokens"
    counted = client.messages.count_tokens(model="tiny", system="b", messages=QUESTION)
    assert counted.input_tokens == answer.usage.input_tokens


@pytest.mark.oracle
def test_tokens_are_counted_where_the_prompt_has_no_room(client: Any) -> None:
    def asked(words: int) -> dict[str, Any]:
        return {"model": "tiny", "messages": [{"role": "user", "content": "a" * words}]}

    one, two = (client.messages.count_tokens(**asked(words)).input_tokens for words in (1, 2))
    assert client.messages.count_tokens(**asked(100_001)).input_tokens == one + 100_000 * (
        two - one
    )
    with pytest.raises(anthropic.BadRequestError, match="there is room for"):
        client.messages.create(**asked(100_001), max_tokens=6)


@pytest.mark.oracle
def test_calls_and_forms_can_be_demanded(client: Any, chat_model: Path) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed (extra `serve`)")
    city: dict[str, Any] = {"type": "string", "enum": ["Bonn", "Rome"]}
    schema = {"type": "object", "properties": {"city": city}, "required": ["city"]}
    strict = {**schema, "additionalProperties": False}
    tool = {"name": "weather", "description": "Get it.", "input_schema": strict}
    spaces = HuggingFaceTokenizer(str(chat_model)).tokenize(" \n")
    body = {"seed": 3, "logit_bias": {str(token): -100 for token in spaces}}
    asked: dict[str, Any] = {
        "model": "tiny", "messages": QUESTION, "max_tokens": 8000, "extra_body": body,
    }  # fmt: skip
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        answer = client.messages.create(**asked, tools=[tool], tool_choice=choice)
        (call,) = answer.content
        assert (call.type, call.name, answer.stop_reason) == ("tool_use", "weather", "tool_use")
        assert call.input["city"] in city["enum"]
    form = {"format": {"type": "json_schema", "schema": strict}}
    answer = client.messages.create(**asked, output_config=form)
    assert json.loads(answer.content[0].text)["city"] in city["enum"]


@pytest.mark.oracle
def test_errors_have_the_form_that_the_client_expects(chat_server: Serving, client: Any) -> None:
    asked = {"model": "tiny", "messages": QUESTION, "max_tokens": 6}
    other = anthropic.Anthropic(base_url=chat_server.url, api_key="wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError, match="the key is missing or wrong"):
        other.messages.create(**asked)
    with pytest.raises(anthropic.NotFoundError, match="there is no model 'big'") as refused:
        client.messages.create(**asked | {"model": "big"})
    assert refused.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="max_tokens should be a whole number"):
        client.messages.create(**asked | {"max_tokens": 0})
    bearer = anthropic.Anthropic(base_url=chat_server.url, auth_token=KEY, max_retries=0)
    assert bearer.messages.create(**asked).content


@pytest.mark.oracle
def test_refusals_before_the_route_have_the_same_form(chat_server: Serving) -> None:
    for route, method, expected in (
        ("/v1/messages", "GET", 405),
        ("/v1/messages/count_tokens", "PUT", 405),
        ("/v1/messages/batches", "POST", 404),
    ):
        status, found = chat_server.ask(route, {}, method=method)
        kind = "not_found_error" if expected == 404 else "invalid_request_error"
        assert (status, found["type"], found["error"]["type"]) == (expected, "error", kind)
    other = urllib.request.Request(f"{chat_server.url}/v1/messages", headers={"Host": "a.example"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(other)
    assert json.loads(refused.value.read())["error"]["type"] == "permission_error"
    assert "param" in chat_server.ask("/v1/messagesx", {})[1]["error"]


@pytest.mark.oracle
def test_no_depth_of_a_body_is_an_internal_error(chat_server: Serving) -> None:
    """Python reads a few levels more than it writes."""
    for depth in range(930, 1001):
        deep = '{"a": ' * depth + "1" + "}" * depth
        call = f'{{"type": "tool_use", "id": "a", "name": "b", "input": {deep}}}'
        said = f'{{"role": "assistant", "content": [{call}]}}, {{"role": "user", "content": "c"}}'
        status, _ = chat_server.ask(
            "/v1/messages", f'{{"max_tokens": 2, "messages": [{said}]}}'.encode()
        )
        assert status in (200, 400), depth


@pytest.mark.oracle
def test_the_tool_runner_sends_the_whole_conversation(client: Any) -> None:
    """It first asks the server to store the conversation."""

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Get the weather.

        Args:
            city: the city
        """
        return f"rain in {city}"

    greedy = {"temperature": 0}
    runner = client.beta.messages.tool_runner(
        model="tiny", max_tokens=6, tools=[weather], messages=QUESTION, extra_body=greedy
    )
    assert runner.until_done().stop_reason == "max_tokens"


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"n": 2}, "unknown field 'n'"),
        ({"thread": {"type": "create"}}, "this server stores no conversations: leave out thread"),
        ({"input": "a"}, "unknown field 'input'"),
        ({"tools": [{"type": "web_search_20250305", "name": "a"}]}, "no type of the API's own"),
        ({"tools": {}}, "tools should be a list"),
        ({"tool_choice": "any"}, "tool_choice should be an object with the type auto, any"),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"tool_choice": {"type": {}}}, "tool_choice should be an object with the type auto, any"),
        ({"thinking": {"type": []}}, "thinking should be an object with the type enabled"),
        ({"thinking": True}, "thinking should be an object with the type enabled"),
        ({"output_config": {"effort": "low"}}, "chat template doesn't read 'reasoning_effort'"),
        ({"output_config": {"format": {"type": "xml"}}}, "should have the type json_schema"),
        ({"output_config": 3}, "output_config should be an object"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs should be an object"),
        ({"stop_sequences": 3}, "should be a text or up to 16"),
        ({"messages": [{"role": "user", "content": "a" * 5000}]}, "tokens"),
    ],
)
def test_bad_requests_are_refused_with_a_message(
    chat_server: Serving, fields: dict[str, Any], message: str
) -> None:
    body = {"model": "tiny", "messages": QUESTION, "max_tokens": 6} | fields
    status, found = chat_server.ask("/v1/messages", body)
    assert status == 400
    assert (found["type"], found["error"]["type"]) == ("error", "invalid_request_error")
    assert message in found["error"]["message"]


@pytest.mark.oracle
def test_fields_without_effect_are_accepted(chat_server: Serving) -> None:
    fields = {
        "metadata": {"user_id": "a"}, "service_tier": "auto", "cache_control": {"type": "ephemeral"}, "tools": [],
        "thinking": {"type": "enabled", "budget_tokens": 1024}, "tool_choice": {"type": "auto"}, "output_config": {},
    }  # fmt: skip
    body = {"model": "tiny", "messages": QUESTION, "max_tokens": 6} | fields
    status, found = chat_server.ask("/v1/messages?beta=true", body)
    assert status == 200, found
