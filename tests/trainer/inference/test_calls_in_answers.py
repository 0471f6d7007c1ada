"""Calls of tools in the server's answers and streams, for a tokenizer that has their marks as special tokens."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.data.tokenizer import HuggingFaceTokenizer
from megatron_lite.inference.server.calls.table import FORMS
from megatron_lite.inference.server.shown_marks import showing_marks
from megatron_lite.inference.text import continuation
from tests.trainer.inference.forced import answered, byte_tokenizer
from tests.trainer.inference.written_calls import WRITERS

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("starlette", reason="starlette is not installed (extra `serve`)")

SPECIAL = ["</s>", "<pad>", "[TOOL_CALLS]", "[ARGS]", "<|tool_call>", "<tool_call|>", '<|"|>']
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% set begin = '[TOOL_CALLS]' %}"
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("weather", "time")]
CALLS = [("weather", {"city": "Köln"}), ("time", {"zone": "{"})]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("calls"), SPECIAL, TEMPLATE)


def asked(
    tokenizer: HuggingFaceTokenizer, text: str, form: str = "auto", **fields: Any
) -> list[dict[str, Any]]:
    """The JSON objects of the answer to a chat whose model says the text."""
    return answered(tokenizer, [text + "</s>"], {"tools": TOOLS, **fields}, tool_calls=form)


def called(calls: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    return [(each["function"]["name"], json.loads(each["function"]["arguments"])) for each in calls]


def test_an_answer_has_the_calls_of_the_form_that_the_template_writes(
    tokenizer: HuggingFaceTokenizer,
) -> None:
    (answer,) = asked(tokenizer, "I look.\n" + WRITERS["mistral"](CALLS))
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == "I look."
    assert called(choice["message"]["tool_calls"]) == CALLS
    assert choice["finish_reason"] == "tool_calls"
    assert [len(call["id"]) for call in choice["message"]["tool_calls"]] == [9, 9]


def test_a_stream_has_text_as_it_comes_and_numbered_calls(tokenizer: HuggingFaceTokenizer) -> None:
    parts = asked(tokenizer, "I look." + WRITERS["mistral"](CALLS), stream=True)
    deltas = [part["choices"][0]["delta"] for part in parts]
    # White space waits for the text behind it, because it is left out before a call.
    assert [delta.get("content") for delta in deltas[:7]] == ["I", None, " l", *"ook."]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call.pop("index") for call in calls] == [0, 1]
    assert called(calls) == CALLS
    assert parts[-1]["choices"][0]["finish_reason"] == "tool_calls"
    # The first call is sent as soon as the second one begins.
    assert len([delta for delta in deltas if "tool_calls" in delta]) == 2


def test_an_option_names_another_form(tokenizer: HuggingFaceTokenizer) -> None:
    text = WRITERS["gemma-4"](CALLS)
    (answer,) = asked(tokenizer, text, "gemma-4")
    assert called(answer["choices"][0]["message"]["tool_calls"]) == CALLS
    (answer,) = asked(tokenizer, text)  # the template says that it is another model's
    assert "tool_calls" not in answer["choices"][0]["message"]


def test_only_one_call_is_sent_if_the_request_says_so(tokenizer: HuggingFaceTokenizer) -> None:
    for fields in ({}, {"stream": True}):
        parts = asked(tokenizer, WRITERS["mistral"](CALLS), parallel_tool_calls=False, **fields)
        choices = [part["choices"][0] for part in parts]
        found = [choice.get("message", choice.get("delta")) for choice in choices]
        calls = [call for each in found for call in each.get("tool_calls", ())]
        assert called(calls) == CALLS[:1]


def test_text_without_tools_shows_no_special_token(tokenizer: HuggingFaceTokenizer) -> None:
    (answer,) = asked(tokenizer, "a[TOOL_CALLS]b", tools=[])
    assert answer["choices"][0]["message"]["content"] == "ab"


def test_only_the_marks_of_calls_are_shown(tokenizer: HuggingFaceTokenizer) -> None:
    ids = tokenizer.tokenize('<pad>a[TOOL_CALLS]ö[ARGS]<|"|></s>')
    marks = {form.name: form.all_marks for form in FORMS}
    assert showing_marks(tokenizer, marks["mistral"])(ids) == "a[TOOL_CALLS]ö[ARGS]"
    assert showing_marks(tokenizer, sum(marks.values(), ()))(ids) == 'a[TOOL_CALLS]ö[ARGS]<|"|>'
    assert showing_marks(tokenizer, marks["hermes"])(ids) == "aö"


def test_words_behind_a_mark_keep_the_space_of_sentencepiece(tmp_path: Path) -> None:
    """A Llama 2's decoder leaves out the first word's space."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "</s>", "▁Hello", "▁world"]
    inner = Tokenizer(models.Unigram([(word, -1.0) for word in words], unk_id=0))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="</s>", additional_special_tokens=["[TOOL_CALLS]"]
    )
    made.save_pretrained(tmp_path)
    detokenize = showing_marks(HuggingFaceTokenizer(str(tmp_path)), ["[TOOL_CALLS]"])
    hello, world, end = 2, 3, 1
    mark = made.convert_tokens_to_ids("[TOOL_CALLS]")
    answer = [hello, mark, world, end, mark, end, world]
    assert detokenize(answer) == "Hello[TOOL_CALLS] world[TOOL_CALLS] world"
    assert continuation(detokenize, [hello], answer) == " " + detokenize(answer)
