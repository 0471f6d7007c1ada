"""InstructRetro's prompts, and the metrics of its answers."""

import json
from pathlib import Path

import pytest

from formats.errors import CorruptCheckpoint
from megaconv.errors import UsageError
from megatron_lite.data.recipes import answers, questions
from megatron_lite.data.recipes.answers import exact_match, f1
from megatron_lite.data.recipes.command import make_parser
from megatron_lite.data.recipes.questions import QuestionForm, read_form, read_questions

ASKED = [
    {
        "question": "Who wrote it?", "answers": ["The Author", "Someone"],
        "ctxs": [{"title": "Book", "text": "The author wrote it."}, {"title": "Other", "text": "no"}],
    },
    {"question": "Which?", "answer": "(A) red", "qa_type": "multi_choice_qa", "choices": ["red", "blue"]},
]  # fmt: skip


def write(directory: Path, words: str) -> list[dict[str, object]]:
    file = directory / "asked.json"
    file.write_text(json.dumps(ASKED))
    given = make_parser().parse_args(
        f"questions --input {file} --output {directory / 'out.jsonl'} {words}".split()
    )
    questions.run(given)
    return [json.loads(line) for line in (directory / "out.jsonl").read_text().splitlines()]


def test_a_prompt_has_its_passages_before_the_question(tmp_path: Path) -> None:
    first, second = write(tmp_path, "")
    assert first["prompt"] == (
        f"{QuestionForm().system}\n\ntitle: Book, source: The author wrote it.\n\ntitle: Other, source: no\n\n"
        "User: Who wrote it?\n\nAssistant:"
    )
    assert first["completion"] == " The Author"
    assert first["answers"] == ["The Author", "Someone"]
    assert str(second["prompt"]).endswith(
        "User: Which? Choose one based on the following options: (A) red (B) blue\n\nAssistant:"
    )


def test_passages_are_cut_and_questions_are_not(tmp_path: Path) -> None:
    used = len(QuestionForm().system.split()) + len(["User:", "Who", "wrote", "it?", "Assistant:"])
    first, _ = write(tmp_path, f"--max-words {used + 4}")
    assert "title: Book, source: The\n\nUser: Who wrote it?" in str(first["prompt"])


def test_the_wording_is_data(tmp_path: Path) -> None:
    (tmp_path / "form.json").write_text(json.dumps({"system": "", "turn": "Q: {question} A:"}))
    first, _ = write(tmp_path, f"--neighbors 0 --form {tmp_path / 'form.json'}")
    assert first["prompt"] == "Q: Who wrote it? A:"


@pytest.mark.parametrize("turn", ["{foo}", "{question", "{}", "{question.x}"])
def test_a_form_with_wrong_braces_is_refused(turn: str, tmp_path: Path) -> None:
    (tmp_path / "form.json").write_text(json.dumps({"turn": turn}))
    with pytest.raises(UsageError, match=r"form.json: 'turn' may have \{question\}"):
        read_form(tmp_path / "form.json")


def test_half_a_surrogate_pair_in_a_question_stays(tmp_path: Path) -> None:
    (tmp_path / "asked.json").write_text('[{"question": "a \\ud800", "answer": "b"}]')
    words = f"questions --input {tmp_path / 'asked.json'} --output {tmp_path / 'out'}"
    questions.run(make_parser().parse_args(words.split()))
    assert "\ud800" in json.loads((tmp_path / "out").read_text())["prompt"]


def test_a_question_without_an_answer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(json.dumps([{"question": "Who?"}]))
    with pytest.raises(CorruptCheckpoint, match=r"bad.json, question 1: expected .answers."):
        list(read_questions(tmp_path / "bad.json"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ctxs": 5}, 'expected "ctxs" of objects'),
        ({"qa_type": "multi_choice_qa", "choices": "red"}, 'expected "choices" with a list'),
        ({"qa_type": "multi_choice_qa", "choices": ["red"] * 27}, "has 27 choices"),
    ],
)
def test_fields_of_a_question_that_are_no_lists_are_refused(
    fields: dict[str, object], message: str, tmp_path: Path
) -> None:
    asked = {"question": "Who?", "answer": "I", **fields}
    (tmp_path / "bad.json").write_text(json.dumps([asked]))
    with pytest.raises(CorruptCheckpoint, match=f"question 1: {message}"):
        list(read_questions(tmp_path / "bad.json"))


@pytest.mark.parametrize(
    ("text", "answer", "size", "expected"),
    [
        ("the red house", "A red house!", 1, 1.0), ("red", "red house", 1, 2 / 3), ("blue", "red", 1, 0.0),
        ("red house here", "red house there", 2, 0.5), ("well-known", "well known", 1, 1.0),
    ],
)  # fmt: skip
def test_f1_counts_common_tokens(text: str, answer: str, size: int, expected: float) -> None:
    assert f1(text, answer, size) == pytest.approx(expected)


def test_an_exact_match_is_of_any_answer() -> None:
    assert exact_match(" the Author. ", ["Someone", "author"])
    assert not exact_match("an author of it", ["Someone", "author"])


def test_references_that_are_no_texts_are_refused(tmp_path: Path) -> None:
    (tmp_path / "found").write_text('{"prompt": "a", "text": "3"}\n')
    (tmp_path / "wanted").write_text('{"prompt": "a", "answers": [3]}\n')
    words = f"answers --input {tmp_path / 'found'} --references {tmp_path / 'wanted'}"
    with pytest.raises(CorruptCheckpoint, match=r"found:1: expected .* a list of texts"):
        answers.run(make_parser().parse_args(words.split()))


def test_answers_that_are_not_utf_8_are_named(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_bytes(b'{"text": "\xe9"}\n')
    given = make_parser().parse_args(["answers", "--input", str(path), "--references", str(path)])
    with pytest.raises(UsageError, match=r"answers.jsonl: can't be read: 'utf-8'"):
        answers.run(given)
