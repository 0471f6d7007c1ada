"""Variables of the chat template in chat requests: the template gets them; those that it doesn't read are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.data.tokenizer import HuggingFaceTokenizer
from megatron_lite.inference.prompts import encode_chat
from megatron_lite.inference.server.errors import Refused
from megatron_lite.inference.server.fields import Fields
from megatron_lite.inference.server.messages import read_messages
from megatron_lite.inference.server.template_variables import read_variables
from tests.trainer.data.chat_templates import save_tokenizer

pytest.importorskip("transformers", reason="transformers is not installed (extra `data`)")

TEMPLATE = (
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}{{ m.role + ': ' + m.content }}{% endif %}{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ ' quick' }}{% endif %}"
    "{% if reasoning_effort is defined %}{{ ' effort ' + reasoning_effort }}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    directory: Path = tmp_path_factory.mktemp("model")
    return HuggingFaceTokenizer(str(save_tokenizer(directory, TEMPLATE)))


def prompt(tokenizer: HuggingFaceTokenizer, **request: Any) -> str:
    fields = Fields.parse(json.dumps(request).encode())
    messages = read_messages(fields.any("messages"))
    variables = read_variables(fields, tokenizer, ())
    fields.finish()
    text: str = tokenizer.inner.decode(encode_chat(tokenizer, messages, variables=variables))
    return text


HI = [{"role": "user", "content": "hi"}]


def test_the_template_gets_the_variables_of_a_request(tokenizer: HuggingFaceTokenizer) -> None:
    assert prompt(tokenizer, messages=HI) == "user: hi"
    quick = prompt(tokenizer, messages=HI, chat_template_kwargs={"enable_thinking": False})
    assert quick == "user: hi quick"
    assert prompt(tokenizer, messages=HI, reasoning_effort="low") == "user: hi effort low"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"chat_template_kwargs": {"thinking": False}}, "doesn't read 'thinking'"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "can't set 'chat_template'"),
        ({"chat_template_kwargs": {"messages": []}}, "can't set 'messages'"),
        ({"chat_template_kwargs": "quick"}, "should be an object"),
    ],
)
def test_other_variables_are_refused(
    tokenizer: HuggingFaceTokenizer, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(Refused, match=message):
        prompt(tokenizer, messages=HI, **fields)


DEVELOPER = {"role": "developer", "content": "Be brief."}


def test_a_developer_speaks_as_the_system(tokenizer: HuggingFaceTokenizer) -> None:
    """Most templates leave out a message whose role they don't know."""
    assert prompt(tokenizer, messages=[DEVELOPER, *HI]) == "system: Be brief.user: hi"


def test_a_template_that_reads_the_role_gets_it(tokenizer: HuggingFaceTokenizer) -> None:
    template = "{% for m in messages %}{% if m.role == 'developer' %}{{ 'dev ' }}{% endif %}{{ m.content }}{% endfor %}"
    ids = encode_chat(tokenizer, [DEVELOPER, *HI], template=template)
    assert tokenizer.inner.decode(ids) == "dev Be brief.hi"
