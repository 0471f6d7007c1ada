"""`data decontaminate` removes the texts of tasks as Megatron's filter_ngrams does, and accounts for every document."""

import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.data.recipes import ngrams
from megatron_lite.data.recipes.command import main
from megatron_lite.data.recipes.decontaminate import Cutting, pieces_of, tasks_of
from megatron_lite.data.recipes.ngrams import Finder, NgramSizes, ngrams_of

FIXTURE = Path(__file__).parents[2] / "fixtures" / "filter-ngrams"
"""A corpus, a task, and the corpus that the real script leaves with its defaults."""
TASK = "one two three four five six seven eight nine ten eleven twelve thirteen"


def decontaminate(corpus: Path, output: Path, *flags: str) -> int:
    task = f"lambada={FIXTURE / 'task.jsonl'}"
    words = ["decontaminate", "--input", str(corpus), "--output", str(output)]
    return main([*words, "--against", task, *flags])


def write_corpus(path: Path, *records: Any) -> Path:
    lines = [json.dumps(record) for record in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def finder_of(*texts: str) -> Finder:
    sizes = NgramSizes()
    return Finder(ngrams_of(texts, sizes), sizes.longest)


def sentences(count: int, seed: int = 0) -> str:
    """Text of sentences that no task has."""
    draw = random.Random(seed)
    return " ".join(f"Other words stand here {draw.randrange(10**6)}." for _ in range(count))


def test_the_output_equals_megatrons_byte_for_byte(tmp_path: Path) -> None:
    assert decontaminate(FIXTURE / "train.jsonl", tmp_path / "out") == 0
    expected = (FIXTURE / "expected.jsonl").read_bytes()
    assert (tmp_path / "out" / "train.jsonl").read_bytes() == expected


def test_every_removed_document_is_kept_with_its_reason_and_the_report_adds_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    assert decontaminate(FIXTURE / "train.jsonl", tmp_path / "out", "--report", str(file)) == 0
    removed = read_lines(tmp_path / "out-removed" / "train.jsonl")
    reasons = {record["id"]: record["removed_because"] for record in removed}
    assert reasons == {"7": "short-pieces", "8": "many-pieces"}
    report = json.loads(file.read_text())
    assert report["removed"] == {"short-pieces": 1, "many-pieces": 1}
    assert (report["documents"], report["kept"], report["split"], report["pieces"]) == (
        21,
        2,
        17,
        32,
    )
    sizes = report["bytes"]
    assert sizes["documents"] == sizes["kept"] + sizes["split"] + sum(sizes["removed"].values())
    assert "removed: many-pieces" in capsys.readouterr().out


def test_files_keep_their_order_names_and_compression(tmp_path: Path) -> None:
    lines = (FIXTURE / "train.jsonl").read_bytes().splitlines(keepends=True)
    corpus = tmp_path / "corpus"
    (corpus / "deep").mkdir(parents=True)
    (corpus / "a.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[:9])))
    (corpus / "deep" / "b.jsonl").write_bytes(b"".join(lines[9:]))
    assert decontaminate(corpus, tmp_path / "out") == 0
    first = gzip.decompress((tmp_path / "out" / "a.jsonl.gz").read_bytes())
    second = (tmp_path / "out" / "deep" / "b.jsonl").read_bytes()
    assert first + second == (FIXTURE / "expected.jsonl").read_bytes()


def test_the_name_of_a_task_is_given_or_that_of_its_file() -> None:
    file = str(FIXTURE / "task.jsonl")
    assert [task.name for task in tasks_of([f"lambada={file}"])] == ["lambada"]
    assert [task.name for task in tasks_of([file])] == ["task"]


def test_a_text_of_eight_to_twelve_words_is_one_ngram_and_a_shorter_one_is_none() -> None:
    sizes = NgramSizes()
    words = TASK.split()
    assert ngrams_of([" ".join(words[:7])], sizes) == set()
    assert ngrams_of([" ".join(words[:9])], sizes) == {" ".join(words[:9])}
    assert ngrams_of([TASK + " fourteen"], sizes) == {TASK, " ".join([*words[1:], "fourteen"])}


def test_a_text_without_ngrams_is_left_as_it_is() -> None:
    assert pieces_of(sentences(20), finder_of(TASK), Cutting()) is None


def test_both_sides_are_cut_back_to_the_end_of_a_sentence() -> None:
    left, right = sentences(20, seed=1), sentences(20, seed=2)
    pieces = pieces_of(f"{left} {TASK.upper()}. {right}", finder_of(TASK), Cutting())
    assert pieces is not None
    first, second = pieces
    assert left.startswith(first)
    last = len(first) - 1
    assert last <= len(left) + 1 - 200
    assert right.endswith(second)
    assert first[-1] == "."
    assert len(right) - len(second) >= 200


def test_a_text_whose_lower_case_is_longer_is_cut_at_its_own_positions() -> None:
    left = sentences(20).replace("Other", "İİİİ")
    plain = pieces_of(f"{sentences(20)} {TASK}", finder_of(TASK), Cutting())
    longer = pieces_of(f"{left} {TASK}", finder_of(TASK), Cutting())
    assert plain is not None
    assert longer is not None
    assert len(plain) == len(longer) == 1
    assert left.startswith(longer[0])
    assert longer[0].count(".") == plain[0].count(".")


def test_a_common_ngram_is_not_removed(tmp_path: Path) -> None:
    task = write_corpus(tmp_path / "task.jsonl", {"text": TASK})
    text = f"{sentences(20)} {TASK}. {sentences(20)}"
    corpus = write_corpus(tmp_path / "corpus.jsonl", *[{"text": text}] * 10)
    words = ["decontaminate", "--input", str(corpus), "--against", str(task)]
    assert main([*words, "--output", str(tmp_path / "common")]) == 0
    assert main([*words, "--output", str(tmp_path / "rare"), "--key-threshold", "11"]) == 0
    assert len(read_lines(tmp_path / "common" / "corpus.jsonl")) == 10
    assert len(read_lines(tmp_path / "rare" / "corpus.jsonl")) == 20


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "bad.jsonl:2: is not JSON"),
        ('{"body": "x"}', "bad.jsonl:2: has no text in 'text', only 'body'"),
        ('{"text": "\\ud800"}', "bad.jsonl:2: its 'text' has half a surrogate pair"),
    ],
)
def test_a_bad_line_ends_the_run_with_file_and_line_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    corpus = tmp_path / "bad.jsonl"
    corpus.write_text('{"text": "fine"}\n' + line + "\n", encoding="utf-8")
    assert decontaminate(corpus, tmp_path / "out") == 3
    assert message in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl"]
    assert decontaminate(corpus, tmp_path / "out", "--skip-bad-lines") == 0
    assert [record["text"] for record in read_lines(tmp_path / "out" / "bad.jsonl")] == ["fine"]


def test_an_existing_output_is_refused_and_replaced_with_overwrite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "old").write_text("old")
    assert decontaminate(FIXTURE / "train.jsonl", output) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert decontaminate(FIXTURE / "train.jsonl", output, "--overwrite") == 2
    assert "old: is no file that `data` writes" in capsys.readouterr().err
    (output / "old").rename(output / "old.jsonl.gz")
    assert decontaminate(FIXTURE / "train.jsonl", output, "--overwrite") == 0
    assert [path.name for path in output.iterdir()] == ["train.jsonl"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out-removed"]


def test_an_output_that_holds_the_input_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    file = write_corpus(corpus / "a.jsonl", {"text": "x"})
    assert decontaminate(file, corpus, "--overwrite") == 2
    assert "lies in the output" in capsys.readouterr().err
    assert file.exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--min-ngram-size", "14"], "--min-ngram-size 14: expected 1 to --max-ngram-size, 13"),
        (["--key-threshold", "-1"], "--key-threshold -1: expected 0 or more"),
        (["--against", "nowhere.jsonl"], "--against nowhere.jsonl: there is no such file"),
        (["--against-key", "question"], "has no text in 'question'"),
        (["--report", "nowhere/report.json"], "--report nowhere/report.json: its directory"),
    ],
)
def test_wrong_flags_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert decontaminate(FIXTURE / "train.jsonl", tmp_path / "out", *flags) in (2, 3)
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_task_without_long_texts_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = write_corpus(tmp_path / "task.jsonl", {"text": "too short"})
    corpus = FIXTURE / "train.jsonl"
    words = ["decontaminate", "--input", str(corpus), "--output", str(tmp_path / "out")]
    assert main([*words, "--against", str(task)]) == 2
    assert "no text has 8 words or more" in capsys.readouterr().err


@pytest.mark.parametrize("characters", [1, 2, 7, 40])
def test_a_text_that_is_read_in_pieces_has_the_same_first_ngram(
    characters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(characters)
    words = ["a", "b", "Σ", "İ", "x_1"]
    sizes = NgramSizes(2, 3)
    for _ in range(300):
        task, text = (
            "".join(draw.choice(words) + draw.choice((" ", ", ", "'")) for _ in range(count))
            for count in (draw.randrange(8), draw.randrange(30))
        )
        finder = Finder(ngrams_of([task], sizes), sizes.longest)
        with monkeypatch.context() as changes:
            changes.setattr(ngrams, "_PIECE_CHARACTERS", len(text))
            expected = finder.first(text)
            changes.setattr(ngrams, "_PIECE_CHARACTERS", characters)
            assert finder.first(text) == expected


def test_the_search_ends_at_the_first_ngram_of_a_long_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins again behind each hit. Otherwise a text with many of them would take hours."""
    task = "one two three four five six seven eight nine ten eleven twelve thirteen"
    finder = Finder(ngrams_of([task], NgramSizes()), 13)
    long_text = f"{task} " + "word " * 100_000
    pieces = ngrams._pieces
    read: list[int] = []

    def counted(text: str) -> Iterator[str]:
        for piece in pieces(text):
            read.append(len(piece))
            yield piece

    monkeypatch.setattr(ngrams, "_pieces", counted)
    assert finder.first(long_text) == (0, task)
    assert sum(read) < len(long_text) // 10
