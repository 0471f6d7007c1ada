"""The server from outside: the official client, plain requests, many at a time, and its end."""

import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lite.inference.commands import serve
from tests.trainer.inference.conversations import decoded, save
from tests.trainer.inference.models import slots_of
from tests.trainer.inference.serving import KEY, ForkedServing, Serving, opened, parsed, ranks
from tests.trainer.inference.storms import judge, mixed, storm

for package in ("starlette", "uvicorn"):
    pytest.importorskip(package, reason=f"{package} is not installed (extra `serve`)")

pytestmark = pytest.mark.oracle


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("chat")
    return directory, save(directory)


@pytest.fixture(scope="module")
def serving(model: tuple[Path, Any]) -> Iterator[Serving]:
    running = Serving(
        model[0], "--slots", "3", "--max-waiting", "60", "--served-model-name", "tiny"
    )
    yield running
    status, errors = running.end()
    assert (status, errors) == (0, "")


def expected(model: tuple[Path, Any], text: str, count: int) -> str:
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(model[0])(text, return_tensors="pt").input_ids
    found = model[1].generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
    )
    return decoded(model[0], found[0, ids.shape[1] :])


def test_the_official_client_gets_its_answers(serving: Serving, model: tuple[Path, Any]) -> None:
    openai = pytest.importorskip("openai", reason="the client openai is not installed")
    client = openai.OpenAI(base_url=f"{serving.url}/v1", api_key=KEY, max_retries=0)
    assert [each.id for each in client.models.list()] == ["tiny"]
    whole = client.completions.create(
        model="tiny", prompt=["Hello", "one"], max_tokens=8, temperature=0, logprobs=2
    )
    assert [choice.text for choice in whole.choices] == [
        expected(model, "Hello", 8),
        expected(model, "one", 8),
    ]
    assert len(whole.choices[0].logprobs.token_logprobs) == 8
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (8, 16)
    messages = [{"role": "user", "content": "hi"}]
    said = expected(model, "<|user|>hi<|end|><|assistant|>", 6)
    answer = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=6, temperature=0, logprobs=True, top_logprobs=2
    )
    assert answer.choices[0].message.content == said
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
    parts = list(
        client.chat.completions.create(
            model="tiny",
            messages=messages,
            max_tokens=6,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == said
    assert parts[-1].usage.completion_tokens == 6
    with pytest.raises(openai.BadRequestError, match="room for 96"):
        client.completions.create(model="tiny", prompt="x" * 90, max_tokens=20)
    with pytest.raises(openai.NotFoundError, match="other"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{serving.url}/v1", api_key="wrong", max_retries=0).models.list()


def test_a_prompt_is_judged_without_generating(serving: Serving, model: tuple[Path, Any]) -> None:
    """local-completions of lm-eval sends such requests."""
    row = [7, 9, 30, 31]
    status, found = serving.ask(
        "/v1/completions", {"prompt": row, "max_tokens": 0, "echo": True, "logprobs": 1}
    )
    assert status == 200
    values = found["choices"][0]["logprobs"]["token_logprobs"]
    assert values[0] is None
    assert values[1:] == pytest.approx(
        slots_of(model[1]).score([row])[0].log_probs.tolist(), abs=1e-4
    )
    status, found = serving.ask(
        "/v1/completions", {"prompt": [7] * 97, "max_tokens": 0, "echo": True}
    )
    assert status == 400
    assert "97 tokens and 0 to generate make 97; there is room for 96" in found["error"]["message"]
    full = {"prompt": [7] * 96, "max_tokens": 0, "echo": True}
    assert serving.ask("/v1/completions", full)[0] == 200


def test_an_answer_has_the_requested_number_of_likeliest_tokens(serving: Serving) -> None:
    """Half of this tokenizer's tokens are parts of characters, which have no text of their own."""
    body = {"prompt": "Hello", "max_tokens": 8, "temperature": 1.0, "seed": 1, "logprobs": 5}
    logprobs = serving.ask("/v1/completions", body)[1]["choices"][0]["logprobs"]
    for word, value, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert len(top) == (5 if value >= sorted(top.values())[-5] else 6)
        assert top[word] == value


def test_a_client_finds_a_model_by_its_name(serving: Serving) -> None:
    openai = pytest.importorskip("openai", reason="the client openai is not installed")
    client = openai.OpenAI(base_url=f"{serving.url}/v1", api_key=KEY, max_retries=0)
    (listed,) = client.models.list().data
    assert client.models.retrieve(listed.id) == listed
    for name in ("another", "a/b"):
        with pytest.raises(openai.NotFoundError, match="there is no model"):
            client.models.retrieve(name)
    lines = serving.ask("/metrics")[1].splitlines()
    assert not [line for line in lines if "another" in line or "a/b" in line]


def test_fields_without_effect_and_fields_that_are_null_are_accepted(serving: Serving) -> None:
    """Many clients send each of their fields. A top_p of 0 leaves the likeliest token."""
    body = {"prompt": "Hello", "max_tokens": 6}
    _, greedy = serving.ask("/v1/completions", {**body, "temperature": 0})
    fields = {"prompt_cache_key": "a", "audio": None, "temperature": None, "top_p": 0}
    status, found = serving.ask("/v1/completions", body | fields)
    assert status == 200, found
    assert found["choices"][0]["text"] == greedy["choices"][0]["text"]


def letters_of_whitespace(model: tuple[Path, Any]) -> dict[str, float]:
    """A bias against the tokens of spaces and line ends."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model[0])
    return {str(token): -100 for token in tokenizer(" \n").input_ids}


def test_an_answer_has_the_form_that_was_asked_for(
    serving: Serving, model: tuple[Path, Any]
) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed (extra `serve`)")
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["a"],
        "additionalProperties": False,
    }
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
        "logit_bias": letters_of_whitespace(model),
        "seed": 3,
    }
    status, found = serving.ask("/v1/chat/completions", body)
    assert status == 200, found
    (choice,) = found["choices"]
    assert re.fullmatch(r'{"a":\d{1,2}}', choice["message"]["content"])
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("streamed", [False, True])
def test_a_call_of_a_tool_can_be_demanded(
    serving: Serving, model: tuple[Path, Any], streamed: bool
) -> None:
    openai = pytest.importorskip("openai", reason="the client openai is not installed")
    pytest.importorskip("llguidance", reason="llguidance is not installed (extra `serve`)")
    client = openai.OpenAI(base_url=f"{serving.url}/v1", api_key=KEY, max_retries=0)
    parameters = {"type": "object", "properties": {"city": {"enum": ["a", "b"]}}}
    parameters |= {"required": ["city"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        tools=[tool],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        logit_bias=letters_of_whitespace(model),
        stream=streamed,
    )
    (choice,) = list(answer)[-1].choices if streamed else answer.choices
    (call,) = (choice.delta if streamed else choice.message).tool_calls
    assert choice.finish_reason == "tool_calls"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("a", "b")


def test_a_tiny_temperature_chooses_the_likeliest_tokens(serving: Serving) -> None:
    asked = {"prompt": "Hello", "max_tokens": 4}
    greedy, tiny = (
        serving.ask("/v1/completions", asked | {"temperature": number}) for number in (0, 1e-40)
    )
    assert tiny[0] == 200
    assert tiny[1]["choices"] == greedy[1]["choices"]


def test_choices_differ_and_a_seed_repeats_them(serving: Serving) -> None:
    body = {"prompt": "Hello", "max_tokens": 6, "n": 4, "seed": 5, "temperature": 1.5}
    first, again = (serving.ask("/v1/completions", body)[1] for _ in range(2))
    texts = [choice["text"] for choice in first["choices"]]
    assert texts == [choice["text"] for choice in again["choices"]]
    assert len(set(texts)) > 1


def test_a_prompt_that_is_repeated_without_a_seed_has_several_answers(serving: Serving) -> None:
    body = {"prompt": ["Hello"] * 4, "max_tokens": 6, "temperature": 1.5}
    for seed, distinct in ((None, 4), (5, 1)):
        found = serving.ask("/v1/completions", body | ({} if seed is None else {"seed": seed}))[1]
        assert len({choice["text"] for choice in found["choices"]}) == distinct


def test_megatrons_route_answers_as_megatron_does(
    serving: Serving, model: tuple[Path, Any]
) -> None:
    body = {"prompts": ["Hello", "one two"], "tokens_to_generate": 5, "top_k": 1, "logprobs": True}
    status, found = serving.ask("/api", body, method="PUT")
    assert status == 200
    assert found["text"][1] == "one two" + expected(model, "one two", 5)
    assert ["".join(words) for words in found["segments"]] == found["text"]
    assert len(found["logprobs"][1]) == 7 + 5 - 1
    beams = serving.ask(
        "/api",
        {"prompts": ["Hello"], "tokens_to_generate": 4, "beam_width": 2, "stop_token": 0},
        method="PUT",
    )
    assert len(beams[1]["text"]) == len(beams[1]["scores"]) == 2
    assert serving.ask("/api", {"prompts": ["a"], "top_k": 2, "top_p": 0.5}, method="PUT") == (
        400,
        "cannot set both top-k and top-p samplings.",
    )
    assert serving.ask("/api", {"sentences": ["a"]}, method="PUT")[0] == 400


BAD: list[tuple[str, Any, int]] = [
    ("/v1/completions", b"{", 400),
    ("/v1/completions", [], 400),
    ("/v1/completions", {"prompt": "x", "nonsense": 1}, 400),
    ("/v1/completions", {"prompt": "x", "best_of": 3}, 400),
    ("/v1/completions", {"prompt": "x", "temperature": -1}, 400),
    ("/v1/completions", {"prompt": "x", "max_tokens": True}, 400),
    ("/v1/completions", {"prompt": [999]}, 400),
    ("/v1/completions", {"prompt": ""}, 400),
    ("/v1/completions", {}, 400),
    ("/v1/completions", b" " * (5 << 20), 413),
    ("/v1/chat/completions", {"messages": [{"role": "user"}]}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, 400),
    ("/v1/completions", {"prompt": "x", "presence_penalty": 3}, 400),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"999": 1}}, 400),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"0" * 20 + "999": 1}}, 400),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"1": 1, "01": 1}}, 400),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"1": 101}}, 400),
    ("/v1/completions", {"prompt": "x", "response_format": "json"}, 400),
    ("/v1/completions", {"prompt": "x", "response_format": {"type": "json_schema"}}, 400),
]


@pytest.mark.parametrize(("route", "body", "status"), BAD)
def test_bad_requests_are_refused_with_a_message(
    serving: Serving, route: str, body: Any, status: int
) -> None:
    found, said = serving.ask(route, body)
    assert found == status
    assert said["error"]["message"]


def test_an_empty_prompt_is_no_prompt_that_is_too_long(serving: Serving) -> None:
    """Clients shorten a prompt that is too long, and ask again."""
    codes = {"": None, "x" * 2000: "context_length_exceeded"}
    for prompt, code in codes.items():
        status, said = serving.ask("/v1/completions", {"prompt": prompt})
        assert (status, said["error"]["code"]) == (400, code)
        assert said["error"]["param"] == "prompt"


def test_a_chat_that_is_too_long_is_refused_by_the_name_of_its_field(serving: Serving) -> None:
    chat = {"messages": [{"role": "user", "content": "x" * 2000}]}
    status, said = serving.ask("/v1/chat/completions", chat)
    assert (status, said["error"]["code"]) == (400, "context_length_exceeded")
    assert said["error"]["param"] == "messages"


def head(
    serving: Serving, lines: list[str], route: str = "/v1/completions", method: str = "POST"
) -> socket.socket:
    """A connection that has sent these headers, and no body."""
    host, port = serving.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=30)
    start = f"{method} {route} HTTP/1.1\r\nAuthorization: Bearer {KEY}\r\n"
    connection.sendall((start + "".join(f"{line}\r\n" for line in lines) + "\r\n").encode())
    return connection


def received(connection: socket.socket) -> tuple[int, Any]:
    """The answer up to its announced end."""
    file = connection.makefile("rb")
    status, length = int(file.readline().split()[1]), 0
    while (line := file.readline().strip().lower()) != b"":
        if line.startswith(b"content-length:"):
            length = int(line.split()[1])
    return status, parsed(file.read(length))


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/api"])
def test_a_body_that_is_announced_too_large_is_refused_before_it_comes(
    serving: Serving, route: str
) -> None:
    host = serving.url.removeprefix("http://")
    for announced in (
        "Content-Length: 4194305",
        "Content-Length: 99999999999999999",
        "Content-Length: 5000000\r\nExpect: 100-continue",
    ):
        begun = time.monotonic()
        with head(serving, [f"Host: {host}", announced], route) as connection:
            status, said = received(connection)
            assert (status, time.monotonic() - begun < 3) == (413, True)
            assert "larger than 4,194,304 bytes" in (
                said if isinstance(said, str) else said["error"]["message"]
            )


def test_a_body_in_chunks_is_refused_where_it_becomes_too_large(serving: Serving) -> None:
    host = serving.url.removeprefix("http://")
    with head(serving, [f"Host: {host}", "Transfer-Encoding: chunked"]) as connection:
        for _ in range(5):
            connection.sendall(b"100000\r\n" + b" " * (1 << 20) + b"\r\n")
        assert received(connection)[0] == 413


OWN = "127.0.0.1:{port}"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (["Host: " + OWN], 200),
        (["Host: localhost:{port}"], 200),
        (["Host: LOCALHOST"], 200),
        (["Host: [::1]:9000"], 200),
        (["Host: " + OWN, "Origin: http://" + OWN], 200),
        (["Host: evil.example:{port}"], 403),
        (["Host: 127.0.0.1.evil.example"], 403),
        (["Host: localhost.evil.example"], 403),
        (["Host: 192.168.1.5:{port}"], 403),
        (["Host: ["], 403),
        (["Host: " + OWN, "Origin: http://evil.example"], 403),
        (["Host: " + OWN, "Origin: http://127.0.0.1:3000"], 403),
        (["Host: " + OWN, "Origin: null"], 403),
        (["Host: " + OWN, "Origin: http://" + OWN, "Origin: http://evil.example"], 403),
    ],
)
@pytest.mark.parametrize("route", ["/", "/health", "/metrics", "/v1/models", "/nowhere"])
def test_pages_of_other_sites_and_names_that_are_not_this_machine_are_refused(
    serving: Serving, headers: list[str], status: int, route: str
) -> None:
    port = serving.url.rpartition(":")[2]
    with head(serving, [line.format(port=port) for line in headers], route, "GET") as connection:
        found, said = received(connection)
    assert found == (404 if status == 200 and route == "/nowhere" else status)
    if status == 403:
        assert said["error"]["type"] == "permission_error"


def test_another_method_is_refused_with_the_one_to_send(serving: Serving) -> None:
    status, said = serving.ask("/v1/completions")
    assert status == 405
    assert "GET /v1/completions: Method Not Allowed; send POST" in said["error"]["message"]


def test_a_token_of_the_tokenizer_that_the_model_lacks_is_refused(
    model: tuple[Path, Any], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    larger = AutoTokenizer.from_pretrained(model[0])
    larger.add_tokens(["<image>"])
    larger.save_pretrained(tmp_path)
    running = ForkedServing(model[0], "--tokenizer-model", str(tmp_path), "--access-log")
    messages = [{"role": "user", "content": "<image>"}]
    for route, body in (
        ("/v1/completions", {"prompt": "<image>"}),
        ("/v1/chat/completions", {"messages": messages}),
        ("/api", {"prompts": ["<image>"], "tokens_to_generate": 2, "top_k": 1}),
    ):
        status, said = running.ask(route, body)
        assert (status, "is outside the model's vocabulary" in str(said)) == (400, True)
    assert running.ask("/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200
    assert running.ask("/a%0Ab")[0] == 404
    status, logged = running.end()
    assert status == 0
    requests = [line.split()[2:5] for line in logged.splitlines()]
    assert requests[0] == ["POST", "/v1/completions", "400"]
    assert requests[-2:] == [["POST", "/v1/completions", "200"], ["GET", "/a\\nb", "404"]]
    assert len(requests) == 5


def test_good_requests_among_bad_ones_and_clients_that_leave_are_all_answered(
    serving: Serving, model: tuple[Path, Any]
) -> None:
    shots = mixed(opened(model[0]), 30)
    judge(shots, storm(serving, shots))
    serving.settle()


def test_requests_beyond_the_queue_are_asked_to_retry(serving: Serving) -> None:
    status, said = serving.ask("/v1/completions", {"prompt": "x", "n": 64, "max_tokens": 2})
    assert status == 429
    assert "room for 63" in said["error"]["message"]


def test_an_address_in_use_is_reported_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert serve.main(["--load", "nowhere", "--port", port]) == 2
    assert capsys.readouterr().err.endswith(
        f"--port {port} can't be opened: Address already in use\n"
    )


@pytest.mark.slow
def test_ranks_serve_together_and_end_together(model: tuple[Path, Any]) -> None:
    body = {"prompt": "Hello", "max_tokens": 8, "temperature": 0}
    running = Serving(model[0], "--tp", "2", world=2)
    assert running.ask("/v1/completions", body)[1]["choices"][0]["text"] == expected(
        model, "Hello", 8
    )
    os.kill(ranks(running.process.pid)[0], signal.SIGTERM)
    running.process.communicate(timeout=120)
    assert running.process.returncode == 0


@pytest.mark.slow
def test_a_killed_rank_ends_the_server(model: tuple[Path, Any]) -> None:
    running = Serving(model[0], "--tp", "2", world=2)
    os.kill(ranks(running.process.pid)[1], signal.SIGKILL)
    _, errors = running.process.communicate(timeout=120)
    assert running.process.returncode != 0
    assert "Signal 9" in errors or "lost the connection" in errors
