"""Answers that begin many calls and end none are read in time that grows with their length."""

import time

import pytest

from megatron_lite.inference.server.calls.form import CallForm
from megatron_lite.inference.server.calls.stream import CallStream
from megatron_lite.inference.server.calls.table import FORMS
from tests.trainer.inference.test_call_forms import SCHEMAS, found, read

LENGTH = 200_000
SECONDS = 10
"""All answers of one form take less than a second. If the time grows with the square of the length, one takes minutes."""
HEADS = {
    "qwen3-coder": "<function=weather>",
    "minimax-m2": '<invoke name="weather">',
    "kimi-k2": "<|tool_call_begin|>",
    "glm-4.5": "weather",
    "hunyuan-3": "<tool_call>",
    "function-gemma": "call:weather{a:[",
}
"""The first text of a call, by form."""
BITS = {
    "qwen3-coder": ("<parameter=x>", "<parameter="),
    "minimax-m2": ('<parameter name="x">', "<parameter name=", "<invoke name="),
    "deepseek-v3.2": ('<｜DSML｜invoke name="x">', '<｜DSML｜parameter name="x" string="true">'),
    "function-gemma": ("<escape><escape>,",),
}
"""Texts that are repeated, by form, besides its marks."""


def _seconds(form: CallForm, text: str) -> float:
    started = time.monotonic()
    stream = CallStream((form,), SCHEMAS)
    stream.add(text)
    stream.finish()
    return time.monotonic() - started


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_long_answer_is_read_quickly(form: CallForm) -> None:
    ((begin, end), *_) = form.marks
    head = HEADS.get(form.name, "")
    taken = 0.0
    for bit in (*form.all_marks, *BITS.get(form.name, ()), " ", "{}"):
        taken += _seconds(form, begin + head + bit * (LENGTH // len(bit)) + "x" + end)
        assert taken < SECONDS, f"{bit!r}, repeated"


def test_marks_without_calls_are_text_and_after_many_of_them_everything_is() -> None:
    call = '<tool_call>{"name": "time"}</tool_call>'
    hermes = [form for form in FORMS if form.name == "hermes"]
    few, many = "<tool_call> " * 31, "<tool_call> " * 32
    said, calls = read(list(few + call), hermes)
    assert (said, found(calls)) == (few.rstrip(), [("time", {})])
    for pieces in ([many + call], list(many + call)):
        assert read(pieces, hermes) == (many + call, [])
