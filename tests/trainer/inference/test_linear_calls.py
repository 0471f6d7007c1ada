"""The work of finding calls in a stream: characters that are looked at, counted wherever a text of any length is read."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from megatron_lite.inference.server.calls.end_search import EndSearch
from megatron_lite.inference.server.calls.form import CallForm
from megatron_lite.inference.server.calls.stream import CallStream
from megatron_lite.inference.server.calls.table import FORMS

SCHEMAS: dict[str, Any] = {"weather": {}}
LENGTHS = (4_000, 8_000, 16_000)
BEGUN = '<tool_call>{"name": "weather", "arguments": {"city": "'
TEXTS = {
    "an unfinished call": BEGUN + "a" * LENGTHS[-1],
    "end marks inside of a JSON string": BEGUN + "</tool_call>" * (LENGTHS[-1] // 12),
    "escaped quotes": BEGUN + '\\"\\\\' * (LENGTHS[-1] // 4),
    "calls of an unknown tool": '<tool_call>{"name": "b"}</tool_call>' * (LENGTHS[-1] // 30),
    "calls": '<tool_call>{"name": "weather"}</tool_call>' * (LENGTHS[-1] // 30),
    "begin marks": "<tool_call>" * (LENGTHS[-1] // 10),
    "white space": "\n" * LENGTHS[-1],
    "a list that may be a call": "[" * LENGTHS[-1],
    "another unfinished call": "[TOOL_CALLS]weather[ARGS]{" + "a" * LENGTHS[-1],
    "a text": "It rains. " * (LENGTHS[-1] // 10),
}


class Counter:
    looked_at = 0


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """Counts the characters of each search of an end, and of each read of the held text."""
    counter = Counter()
    search, take, shown = EndSearch.add, CallStream._take, CallStream._shown

    def counted_search(self: EndSearch, text: str, start: int = 0) -> None:
        counter.looked_at += len(self._rest) + len(text) - start
        search(self, text, start)

    def counted_take(self: CallStream, *, last: bool) -> Any:
        counter.looked_at += sum(map(len, self._held))
        return take(self, last=last)

    def counted_shown(self: CallStream, text: str) -> str:
        counter.looked_at += len(text) + len(self._space) * bool(text.strip())
        return shown(self, text)

    monkeypatch.setattr(EndSearch, "add", counted_search)
    monkeypatch.setattr(CallStream, "_take", counted_take)
    monkeypatch.setattr(CallStream, "_shown", counted_shown)
    return counter


@pytest.mark.parametrize("one_form", [True, False])
@pytest.mark.parametrize("kind", TEXTS)
def test_twice_the_answer_takes_twice_the_work(kind: str, one_form: bool, counter: Counter) -> None:
    def counting(form: CallForm) -> CallForm:
        def read(text: str, schemas: Any) -> Any:
            counter.looked_at += len(text)
            return form.read(text, schemas)

        return replace(form, read=read)

    chosen = [form for form in FORMS if form.name in ("hermes", "mistral") or not one_form]
    forms = tuple(map(counting, chosen))
    counts = []
    for length in LENGTHS:
        counter.looked_at = 0
        stream = CallStream(forms, SCHEMAS)
        for letter in TEXTS[kind][:length]:
            stream.add(letter)
        stream.finish()
        counts.append(counter.looked_at)
    assert counts[0] >= LENGTHS[0]
    for less, more in pairwise(counts):
        assert more < 2.1 * less, counts
    # A mark has up to 40 characters, and three forms begin with the same one.
    assert counts[-1] < 200 * LENGTHS[-1]
