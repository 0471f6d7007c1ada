"""Answers in harmony: as openai-harmony reads them, however malformed they are, and wherever they are cut."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_lite.data.finetuning.forms import Chat
from megatron_lite.data.harmony import Marks, begins_answer, harmony_marks
from megatron_lite.data.tokenizer import HuggingFaceTokenizer
from megatron_lite.inference.begun_answers import begun_answer, show
from megatron_lite.inference.chat_prompts import ChatPrompt
from megatron_lite.inference.gallery import TEXT_ALONE
from megatron_lite.inference.generating import answers
from megatron_lite.inference.harmony import HarmonyStream
from megatron_lite.inference.prompts import encode_chat
from megatron_lite.inference.questions import Question
from megatron_lite.inference.slots import Recomputed
from tests.trainer.harmony_model import SPECIAL, tokenizer_of
from tests.trainer.inference.conversations import save as save_chatml

ANSWERS = json.loads(
    (Path(__file__).parents[1] / "fixtures" / "harmony" / "answers.json").read_text()
)
PROMPT = "<|start|>user<|message|>hi<|end|><|start|>assistant"
ENDS = ("<|return|>", "<|call|>")
TOOLS = ("weather",)
Read = tuple[str, str, list[tuple[str, str]]]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    pytest.importorskip("transformers", reason="transformers is not installed")
    return tokenizer_of(tmp_path_factory.mktemp("harmony"))


def marks_of(tokenizer: HuggingFaceTokenizer) -> Marks:
    marks = harmony_marks(tokenizer)
    assert marks is not None
    return marks


def pieces(
    tokenizer: HuggingFaceTokenizer,
    text: str,
    stop: tuple[str, ...] = (),
    prompt: str = PROMPT,
    tools: tuple[str, ...] = TOOLS,
) -> tuple[list[tuple[str, str]], Read]:
    """The (text, thinking) of each token of an answer, and everything at its end."""
    complete = text.endswith(ENDS)
    ids = tokenizer.tokenize(text)[: -1 if complete else None]
    marks = marks_of(tokenizer)
    stream = HarmonyStream(marks, tokenizer.detokenize, tokenizer.tokenize(prompt), stop, tools)
    said = [stream.add(token) for token in ids]
    said.append(stream.finish(complete=complete))
    parts = [(each.text, each.thinking) for each in said]
    whole = ("".join(text for text, _ in parts), "".join(thought for _, thought in parts))
    return parts, (*whole, [(call.name, call.arguments) for call in stream.calls])


def read(tokenizer: HuggingFaceTokenizer, text: str, **options: str) -> Read:
    return pieces(tokenizer, text, **options)[1]  # type: ignore[arg-type]


def test_answers_have_the_messages_of_openai_harmony(tokenizer: HuggingFaceTokenizer) -> None:
    for text, messages in ANSWERS:
        said: list[str] = []
        thought: list[str] = []
        calls = []
        for number, (channel, recipient, content) in enumerate(messages):
            is_cut = number == len(messages) - 1 and not text.endswith(ENDS)
            if recipient == "functions.weather" and not is_cut:
                calls.append(("weather", content.strip() or "{}"))
            elif recipient is None and channel in (None, "final", "commentary"):
                said.append(content)
            else:
                thought.append(content)
        expected = ("\n\n".join(filter(None, said)), "\n\n".join(filter(None, thought)), calls)
        assert read(tokenizer, text) == expected, text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # A header without a message is no text, complete or cut off.
        ("<|channel|>final", ("", "", [])),
        ("<|channel|>fin", ("", "", [])),
        ("<|channel|>commentary to=functions.we", ("", "", [])),
        (" to=functions.weather", ("", "", [])),
        (" to", ("", "", [])),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assis", ("", "a", [])),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assistant", ("", "a", [])),
        ("<|channel|><|message|>a<|return|>", ("", "a", [])),
        # Marks at a wrong place.
        ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b<|return|>", ("b", "a", [])),
        ("<|channel|>analysis<|message|>a<|start|>assistant<|message|>b<|return|>", ("b", "a", [])),
        ("<|channel|>final<|message|>a<|message|>b<|constrain|>c<|return|>", ("abc", "", [])),
        ("<|end|><|end|><|start|><|start|>assistant<|channel|>final<|message|>a<|return|>", ("a", "", [])),
        ("<|channel|>analysis<|channel|>final<|message|>a<|return|>", ("a", "", [])),
        ("<|message|><|message|>a<|return|>", ("a", "", [])),
        # Without the format.
        ("Hello\n\nthere<|return|>", ("Hello\n\nthere", "", [])),
        ("Hello", ("Hello", "", [])),
        ("<|message|>Hello<|return|>", ("Hello", "", [])),
        ("<|return|>", ("", "", [])),
        ("", ("", "", [])),
        # Messages of other authors.
        ("<|channel|>final<|message|>a<|end|><|start|>user<|message|>b<|return|>", ("a", "b", [])),
        (
            "<|start|>functions.weather to=assistant<|channel|>commentary<|message|>b<|return|>",
            ("", "b", []),
        ),
        # Calls.
        ("<|channel|>commentary to=weather<|message|>{}<|call|>", ("", "", [("weather", "{}")])),
        ("<|channel|>commentary functions.weather<|message|> <|call|>", ("", "", [("weather", "{}")])),
        ("<|channel|>final to=functions.weather<|message|>{}<|call|>", ("", "", [("weather", "{}")])),
        ("<|channel|>commentary to=functions.weather<|message|>{a<|call|>", ("", "", [("weather", "{a")])),
        ("<|channel|>commentary to=functions.weather<|message|>{a", ("", "{a", [])),
        ("<|channel|>commentary to=functions.unknown<|message|>{}<|call|>", ("", "{}", [])),
        ("<|channel|>commentary to=all<|message|>I look.<|end|>", ("I look.", "", [])),
    ],
)  # fmt: skip
def test_malformed_answers_have_no_special_tokens_in_their_text(
    tokenizer: HuggingFaceTokenizer, text: str, expected: Read
) -> None:
    assert read(tokenizer, text) == expected


def test_text_comes_as_soon_as_it_is_final(tokenizer: HuggingFaceTokenizer) -> None:
    text = "<|channel|>analysis<|message|>é<|end|><|start|>assistant<|channel|>final<|message|>ab"
    parts, _ = pieces(tokenizer, text)
    assert [part for part in parts if part != ("", "")] == [("", "é"), ("a", ""), ("b", "")]


def test_a_stop_word_ends_the_text_but_not_the_thinking(tokenizer: HuggingFaceTokenizer) -> None:
    text = (
        "<|channel|>analysis<|message|>one STOP<|end|>"
        "<|start|>assistant<|channel|>final<|message|>two ST STOP three<|return|>"
    )
    parts, whole = pieces(tokenizer, text, ("STOP",))
    assert whole == ("two ST ", "one STOP", [])
    assert not any("STO" in said for said, _ in parts)
    assert read(tokenizer, "Hello STOP<|return|>", stop=("STOP",)) == ("Hello ", "", [])  # type: ignore[arg-type]


def test_a_prompt_may_begin_the_answers_header_or_its_text(tokenizer: HuggingFaceTokenizer) -> None:
    begun = f"{PROMPT}<|channel|>final<|message|>Sure"
    assert read(tokenizer, ", a<|return|>", prompt=begun) == (", a", "", [])
    begun = f"{PROMPT}<|channel|>analysis"
    assert read(tokenizer, "<|message|>a", prompt=begun) == ("", "a", [])


@pytest.mark.parametrize("seed", range(4))
def test_no_answer_breaks_the_reader_and_a_cut_only_shortens_it(
    tokenizer: HuggingFaceTokenizer, seed: int
) -> None:
    """50 cuts of random sequences of marks and texts. The text of a cut answer is a beginning of the whole text."""
    seeded = random.Random(seed)
    words = (
        *SPECIAL[3:],
        "assistant",
        "final",
        "analysis",
        "commentary",
        " to=functions.weather",
        "a",
        "é",
        "{}",
        " ",
    )
    text = "".join(seeded.choices(words, k=120))
    ids = tokenizer.tokenize(text)
    marks, prompt = marks_of(tokenizer), tokenizer.tokenize(PROMPT)
    stream = HarmonyStream(marks, tokenizer.detokenize, prompt, (), TOOLS)
    streamed = [""]
    for token in ids:
        streamed.append(streamed[-1] + stream.add(token).text)
    assert not any(word in streamed[-1] for word in SPECIAL)
    for cut in seeded.choices(range(len(ids)), k=50):
        short = HarmonyStream(marks, tokenizer.detokenize, prompt, (), TOOLS)
        said = "".join(short.add(token).text for token in ids[:cut])
        assert said == streamed[cut]
        rest = short.finish(complete=False).text
        assert not any(word in rest for word in SPECIAL)


def test_only_prompts_with_an_open_message_begin_an_answer(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    marks = marks_of(tokenizer)
    assert begins_answer(tokenizer.tokenize(PROMPT), marks)
    assert begins_answer(tokenizer.tokenize(f"{PROMPT}<|channel|>final<|message|>"), marks)
    assert not begins_answer(
        tokenizer.tokenize("<|start|>user<|message|>hi<|end|>assistant:"), marks
    )
    assert not begins_answer(tokenizer.tokenize("hi"), marks)
    save_chatml(tmp_path)
    assert harmony_marks(HuggingFaceTokenizer(str(tmp_path))) is None


def test_the_terminal_shows_the_text_in_a_paragraph_behind_the_thinking(
    tokenizer: HuggingFaceTokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    marks, prompt = marks_of(tokenizer), tuple(tokenizer.tokenize(PROMPT))
    opened: Any = SimpleNamespace(harmony=marks, tokenizer=tokenizer)
    answer = begun_answer(opened, (), prompt)
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    )
    thinks, kept = False, ""
    for token in tokenizer.tokenize(text):
        said = answer.add(token)
        thinks = show(said, thinks=thinks)
        kept += said.text
    show(answer.finish(complete=True), thinks=thinks)
    assert capsys.readouterr().out == "Hm.\n\nYes."
    assert kept == "Yes."
    plain = begun_answer(opened, (), tokenizer.tokenize("hi"))
    assert plain.add(tokenizer.tokenize("a")[0]).text == "a"


def writing(tokenizer: HuggingFaceTokenizer, text: str) -> Any:
    """A model that answers every chat with this text, opened by a command."""
    answer = tokenizer.tokenize(text)
    chat = Chat([{"role": "user", "content": "hi"}])
    begins = len(encode_chat(tokenizer, chat.messages))

    def logits(rows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        made = [torch.zeros(len(row), tokenizer.vocab_size) for row in rows]
        for row, scores in zip(rows, made, strict=True):
            scores[-1, answer[len(row) - begins]] = 1.0
        return made

    model = Recomputed(logits, 2, 4096)
    marks = marks_of(tokenizer)
    return SimpleNamespace(
        model=model, answering=model, tokenizer=tokenizer, harmony=marks, stop_ids=marks.stops, images=TEXT_ALONE,
        config=SimpleNamespace(vocab=tokenizer.vocab_size), asked=ChatPrompt(chat, "hi", None, Path("chats"), 1),
    )  # fmt: skip


FLAGS = {
    "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "seed": 0, "stop": [],
    "max_new_tokens": 100, "log_probs": None, "beams": None, "ignore_eos": False, "unconditional": False, "samples_per_prompt": None,
}  # fmt: skip
THOUGHT = "<|channel|>analysis<|message|>Hm. No.<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("flags", "text", "end"),
    [
        ({}, "No rain.", "stop"),
        ({"stop": [" rain"]}, "No", "stop"),
        ({"ignore_eos": True, "max_new_tokens": 50}, "No rain.", "length"),
    ],
)
def test_generate_answers_chats_with_the_text_alone(
    tokenizer: HuggingFaceTokenizer, flags: dict[str, Any], text: str, end: str
) -> None:
    """As `chat` and `serve` do. Stop words end the text, not the thinking."""
    written = f"{THOUGHT}<|channel|>final<|message|>No rain.<|return|>" + "<|return|>" * 20
    opened = writing(tokenizer, written)
    given: Any = SimpleNamespace(**{**FLAGS, **flags})
    (line,) = answers(opened, given, [Question(0, "hi", 0, opened.asked)])
    assert (line["text"], line["finish_reason"]) == (text, end)
    assert written.startswith(tokenizer.spelled(line["tokens"])[: len(THOUGHT)])


def test_beams_of_a_chat_have_the_text_alone(tokenizer: HuggingFaceTokenizer) -> None:
    opened = writing(tokenizer, f"{THOUGHT}<|channel|>final<|message|>No.<|return|>" + "." * 99)
    given: Any = SimpleNamespace(**FLAGS | {"beams": 2, "length_penalty": 1.0})
    (line,) = answers(opened, given, [Question(0, "hi", 0, opened.asked)])
    assert line["beams"][0]["text"] == "No."
