"""Prompts of --grpo: texts and messages, their columns, and records that are no prompts."""

import json
from pathlib import Path
from typing import Any

import pytest

from formats.errors import CorruptCheckpoint
from megatron_lite.data.tokenizer import HuggingFaceTokenizer, NullTokenizer
from megatron_lite.objectives.prompts import Prompt, read_prompts
from tests.trainer.data.chat_templates import MARKED, save_tokenizer

ASKED = [{"role": "user", "content": "Say 4"}]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %} go{% endif %}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory, MARKED["chatml"])
    return HuggingFaceTokenizer(str(directory))


def read(directory: Path, record: dict[str, Any], *others: Any) -> Prompt:
    path = directory / "prompts.jsonl"
    path.write_text(json.dumps(record))
    (prompt,) = read_prompts([str(path)], *others, "--finetune-data")
    return prompt


def test_messages_are_prompts_by_a_template_up_to_the_answer(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    record = {"prompt": ASKED, "answer": "4", "completion": "no column"}
    own = read(tmp_path, record, tokenizer, None)
    assert tokenizer.spelled(own.ids) == tokenizer.inner.apply_chat_template(
        ASKED, tokenize=False, add_generation_prompt=True
    )
    assert own.content == ASKED
    assert own.columns == {"answer": "4"}
    assert tokenizer.spelled(read(tmp_path, record, tokenizer, TEMPLATE).ids) == "Say 4 go"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (ASKED, "has messages, and the tokenizer has no chat template; give --chat-template"),
        ([], 'its "prompt" should be a list of messages'),
        ("", 'has "prompt"; its "prompt" should be a text or messages'),
        (None, 'has no fields; its "prompt" should be a text or messages'),
    ],
)
def test_a_record_that_is_no_prompt_is_named_with_its_line(
    prompt: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(CorruptCheckpoint) as caught:
        read(tmp_path, {"prompt": prompt}, NullTokenizer(60), None)
    assert str(caught.value) == f"{tmp_path}/prompts.jsonl:1: {message}"


def test_a_prompt_without_tokens_is_refused(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    with pytest.raises(CorruptCheckpoint, match=r':1: has no tokens in its "prompt"'):
        read(tmp_path, {"prompt": ASKED}, tokenizer, "{{ '' }}")
