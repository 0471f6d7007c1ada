"""The command lines of Megatron-LM's README files run, from preprocessing to evaluation, on small models and texts.

A test replaces the sizes, the lengths of runs, and the flags that are refused. All other flags stay as they are.
"""

import json
import random
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import nltk
import pytest

from megatron_lite.data.preprocess import main as preprocess
from megatron_lite.processes import launch
from tests.conftest import FIXTURES
from tests.trainer.data.vocabularies import gpt2_files
from tests.trainer.inference.test_commands import run
from tests.trainer.loop.launches import MASKED, train
from tests.trainer.loop.made_up_tasks import WORDS, write_mnli, write_race

pytestmark = pytest.mark.slow

LINES = (FIXTURES / "megatron_command_lines.txt").read_text(encoding="utf-8").splitlines()[1:]
SMALL = {
    "--num-layers": "2", "--hidden-size": "32", "--num-attention-heads": "4", "--seq-length": "64",
    "--max-position-embeddings": "64", "--train-iters": "2", "--lr-decay-iters": "2", "--epochs": "1",
    "--save-interval": "2", "--eval-interval": "2", "--eval-iters": "1", "--log-interval": "1", "--workers": "2",
}  # fmt: skip
ON_A_CPU = {"--fp16": (), "--distributed-backend": ("--distributed-backend", "gloo")}
"""A flag that needs a GPU -> its words here."""


def words_of(start: str, changed: Mapping[str, Sequence[str]]) -> list[str]:
    """The words of the line that contains `start`, with small sizes. changed: a flag -> the words that replace it."""
    (line,) = [line for line in LINES if start in line]
    _, theirs = line.split("\t")
    found: list[str] = []
    skips = False
    for word in shlex.split(theirs)[1:]:
        if not word.startswith("--"):
            if not skips:
                found.append(word)
            continue
        replaced = {**ON_A_CPU, **changed}.get(word)
        skips = replaced is not None or word in SMALL
        if replaced is not None:
            found += replaced
        elif word in SMALL:
            found += [word, SMALL[word]]
        else:
            found.append(word)
    return found


@pytest.fixture(autouse=True)
def _failures_leave_the_tests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "leave", sys.exit)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the files that the lines name."""
    path = tmp_path_factory.mktemp("readme")
    drawn = random.Random(1)
    sentences = [" ".join(drawn.choices(WORDS, k=8)).capitalize() + "." for _ in range(400)]
    documents = [" ".join(sentences[first : first + 8]) for first in range(0, 400, 8)]
    rows = [json.dumps({"text": text, "title": text[:9]}) for text in documents]
    (path / "my-corpus.json").write_text("\n".join(rows) + "\n")
    (path / "bert-vocab.txt").write_text((MASKED / "vocab.txt").read_text())
    vocab, merges = gpt2_files(path / "gpt2")
    vocab.rename(path / "gpt2-vocab.json")
    merges.rename(path / "gpt2-merges.txt")
    (path / "wiki.test.tokens").write_text("\n".join(documents[:3]) + "\n")
    (path / "lambada.json").write_text(json.dumps({"text": "the fox and the dog"}) + "\n")
    (path / "long.json").write_text(json.dumps({"text": documents[0]}) + "\n")
    glue = path / "data/glue_data/MNLI"
    glue.mkdir(parents=True)
    for name, count in (("train", 16), ("dev_matched", 4), ("dev_mismatched", 4)):
        write_mnli(glue / f"{name}.tsv", count)
    for name, count in (("train/middle", 4), ("dev/middle", 2), ("dev/high", 2)):
        write_race(path / "data/RACE" / name, count)
    return path


@pytest.fixture
def sentences_by_nltk(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NLTK's data for English, with one abbreviation."""
    data = place / "nltk_data/tokenizers/punkt_tab/english"
    data.mkdir(parents=True, exist_ok=True)
    for name in ("collocations.tab", "sent_starters.txt", "ortho_context.tab"):
        (data / name).write_text("")
    (data / "abbrev_types.txt").write_text("7\n")
    monkeypatch.setattr(nltk.data, "path", [str(place / "nltk_data")])
    monkeypatch.setenv("NLTK_DATA", str(place / "nltk_data"))  # for processes of workers


def made_by_preprocess(
    place: Path, monkeypatch: pytest.MonkeyPatch, start: str, **files: str
) -> None:
    """Run a line of preprocess. files: flags that name files of another place."""
    monkeypatch.chdir(place)
    changed = {
        f"--{name.replace('_', '-')}": (f"--{name.replace('_', '-')}", value)
        for name, value in files.items()
    }
    words = words_of(start, changed)
    assert preprocess([*words, "--overwrite", "--workers", "1"]) == 0


@pytest.mark.usefixtures("sentences_by_nltk")
@pytest.mark.parametrize(
    ("start", "made"),
    [
        ("--output-prefix my-bert --vocab-file", "my-bert_text_sentence"),
        ("my-corpus.json --output-prefix my-gpt2 --vocab-file gpt2-vocab.json --tok", "my-gpt2_text_document"),
        ("--dataset-impl mmap", "my-gpt2_text_document"),
        ("--json-key text --output", "my-gpt2_text_document"),
    ],
)  # fmt: skip
def test_the_lines_of_preprocess_make_datasets(
    place: Path, monkeypatch: pytest.MonkeyPatch, start: str, made: str
) -> None:
    made_by_preprocess(place, monkeypatch, start)
    assert (place / f"{made}.idx").stat().st_size > 34
    assert (place / f"{made}.bin").stat().st_size > 100


@pytest.mark.usefixtures("sentences_by_nltk")
def test_a_corpus_of_blocks_and_titles_is_made(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_by_preprocess(
        place, monkeypatch, "--json-keys text title", input="my-corpus.json", vocab_file="bert-vocab.txt"
    )  # fmt: skip
    assert (place / "corpus_indexed_title_sentence.idx").is_file()


@pytest.mark.usefixtures("sentences_by_nltk")
def test_the_lines_of_bert_pretrain_and_finetune(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_by_preprocess(place, monkeypatch, "--output-prefix my-bert --vocab-file")
    words = words_of("pretrain_bert.py", {
        "--batch-size": ("--micro-batch-size", "4"),
        "--train-data": ("--data-path", "my-bert_text_sentence"),
        "--tokenizer-type": ("--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", "bert-vocab.txt"),
        **dict.fromkeys(("--tokenizer-model-type", "--max-preds-per-seq", "--presplit-sentences", "--fp32-embedding"), ()),
    })  # fmt: skip
    train(place, 1, f"pretrain --model-type bert {' '.join(words)}")
    assert (place / "checkpoints/bert_345m/latest_checkpointed_iteration.txt").read_text() == "2"
    for task in ("MNLI", "RACE"):
        words = words_of(f"--task {task}", {"--micro-batch-size": ("--micro-batch-size", "2")})
        running = train(place, 1, f"finetune {' '.join(words)}")
        assert " right" in running.log(0), task
        assert (place / f"checkpoints/bert_345m_{task.lower()}").is_dir()


@pytest.fixture
def trained_gpt(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint that pretrain_gpt2.py's line trains, in `place`, which is the working directory."""
    monkeypatch.chdir(place)
    if (place / "checkpoints/gpt2_345m").is_dir():
        return
    made_by_preprocess(place, monkeypatch, "--dataset-impl mmap")
    files = ("--vocab-file", "gpt2-vocab.json", "--merge-file", "gpt2-merges.txt")
    words = words_of("pretrain_gpt2.py", {
        "--batch-size": ("--micro-batch-size", "4"),
        "--train-data": ("--data-path", "my-gpt2_text_document"),
        "--tokenizer-type": ("--tokenizer-type", "GPT2BPETokenizer", *files),
    })  # fmt: skip
    train(place, 1, f"pretrain {' '.join(words)}")


@pytest.mark.usefixtures("trained_gpt")
def test_the_lines_of_gpt_pretrain_and_evaluate(capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    for task, measure in (("WIKITEXT103", "perplexity"), ("LAMBADA", "accuracy")):
        assert run("evaluate", *words_of(f"--task {task}", {}), "--dtype", "fp32") == 0
        assert measure in capsys.readouterr().out.lower(), task
    words = words_of("--task LAMBADA", {"--valid-data": ("--valid-data", "long.json")})
    assert run("evaluate", *words, "--dtype", "fp32") == 2
    assert "the model takes 64" in capsys.readouterr().err


@pytest.mark.usefixtures("trained_gpt")
def test_the_lines_of_2019_evaluate(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """run_gpt2_eval.py's lines run as they stand, on another checkpoint and with small sizes."""
    (place / "webtext.json").write_text((place / "my-corpus.json").read_text())
    model = {"--model-path": ("--model-path", "checkpoints/gpt2_345m")}
    modes = {
        "wiki.test.tokens --batch-size": "perplexity",
        "--cloze-eval": "accuracy",
        "--webtext-eval": "windows",
    }
    for start, measure in modes.items():
        capsys.readouterr()
        assert run("evaluate", *words_of(start, model), "--dtype", "fp32") == 0, start
        assert measure in capsys.readouterr().out
