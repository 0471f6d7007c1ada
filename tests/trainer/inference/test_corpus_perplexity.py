"""Every token of a corpus is predicted once, and the sums are those of whole documents."""

import json
import math
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from formats.errors import CorruptCheckpoint
from megaconv.errors import UsageError
from megatron_lite.cli import main
from megatron_lite.data.indexed_writer import IndexedWriter
from megatron_lite.data.recipes.documents import Reader
from megatron_lite.inference.commands.evaluate import parser
from megatron_lite.inference.evaluation.command import _check
from megatron_lite.inference.evaluation.corpus import Entry, entries_of, find_sources, perplexity
from megatron_lite.inference.evaluation.random_windows import random_windows, sampled_perplexity
from megatron_lite.inference.evaluation.windows import stream_windows
from megatron_lite.inference.evaluation.zeroshot import wikitext_windows
from megatron_lite.inference.slots import Recomputed
from megatron_lite.processes import launch
from tests.trainer.inference.conversations import save
from tests.trainer.inference.models import slots_of, tiny
from tests.trainer.loop.launches import train

TEXTS = ["Grüße aus Köln.", "one two  three\nfour", "", "x"]


class Bytes:
    """1 + each byte of UTF-8."""

    vocab_size = 257
    eod = 0
    pad = bos = None
    begin: list[int] = []  # noqa: RUF012

    def tokenize(self, text: str) -> list[int]:
        return [1 + byte for byte in text.encode()]

    def detokenize(self, ids: Sequence[int]) -> str:
        return bytes(number - 1 for number in ids).decode()

    def spelled(self, ids: Sequence[int]) -> str:
        return self.detokenize(ids)


def write(path: Path, texts: Sequence[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def measured(model: Any, words: list[str], length: int, **others: Any) -> dict[str, Any]:
    entries = entries_of(find_sources(words), Reader(), Bytes())
    return perplexity(model, Bytes(), entries, length, **others)


@pytest.mark.parametrize(("length", "stride"), [(4, 4), (4, 1), (7, 3), (100, 50), (1, 1)])
@pytest.mark.parametrize("count", [1, 2, 5, 8, 29, 30])
def test_windows_of_a_stream_are_those_of_the_whole_text(
    length: int, stride: int, count: int
) -> None:
    tokens = list(range(count))
    parts = [tokens[:3], [], tokens[3:4], tokens[4:]]
    expected = [window for window in wikitext_windows(tokens, length, stride) if window.counted > 0]
    assert list(stream_windows(parts, length, stride)) == expected


@pytest.mark.oracle
def test_sums_are_those_of_the_documents(tmp_path: Path) -> None:
    """One window holds the whole corpus, so that each token sees all tokens before it. Sizes are those of the
    texts."""
    model = slots_of(tiny(vocab_size=257))
    found = measured(model, [write(tmp_path / "corpus.jsonl", TEXTS)], 96)
    tokens = list(chain(*([*Bytes().tokenize(text), 0] for text in TEXTS)))
    (scored,) = model.score([tokens])
    total = -float(scored.log_probs.double().sum())
    size = sum(len(text.encode()) for text in TEXTS)
    predicted, words = len(tokens) - 1, 8
    counts = ("documents", "bytes", "words", "tokens", "predicted_tokens")
    assert [found[name] for name in counts] == [4, size, words, len(tokens), predicted]
    assert found["loss"] * predicted == pytest.approx(total, rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(total / predicted))
    assert found["bits_per_byte"] == pytest.approx(total / size / math.log(2))
    assert found["word_perplexity"] == pytest.approx(math.exp(total / words))
    assert found["tokens_per_word"] == pytest.approx(len(tokens) / words)


@pytest.mark.oracle
def test_an_indexed_corpus_gives_the_same_as_its_texts(tmp_path: Path) -> None:
    model = slots_of(tiny(vocab_size=257))
    texts = write(tmp_path / "corpus.jsonl", TEXTS)
    for name, end in (("with", [0]), ("without", [])):
        with IndexedWriter(str(tmp_path / name), np.dtype("<u2")) as writer:
            for text in TEXTS:
                tokens = [*Bytes().tokenize(text), *end]
                writer.add(tokens, [len(tokens)])
        assert measured(model, [str(tmp_path / name)], 9) == measured(model, [texts], 9)


def test_the_limit_ends_with_a_whole_document(tmp_path: Path) -> None:
    model = slots_of(tiny(vocab_size=257))
    all_texts = write(tmp_path / "corpus.jsonl", TEXTS)
    first = write(tmp_path / "first.jsonl", TEXTS[:2])
    limit = len(TEXTS[0].encode()) + 2
    assert measured(model, [all_texts], 9, limit=limit) == measured(model, [first], 9)


def test_random_windows_begin_in_documents_by_their_length() -> None:
    """The corpus has a short and a long document. A window that begins in the short one continues with further
    documents."""
    short, long = [1, 2, 0], [*range(100, 190), 0]
    tokens = np.array([*short, *long], np.int32)
    ends = np.array([3, 94])
    rows = [window.tokens for window in random_windows(tokens, ends, 4, 400)]
    assert {len(row) for row in rows} == {5}
    of_short = [row for row in rows if row[0] == 1]
    assert 3 <= len(of_short) <= 25  # 400 * 3 / 94 are expected
    assert all(row[:3] == (1, 2, 0) and row[3] in (1, 100) for row in of_short)
    starts = {row[0] for row in rows if row[0] >= 100}
    assert min(starts) < 105
    assert 180 < max(starts) <= 186
    assert rows[:7] == [window.tokens for window in random_windows(tokens, ends, 4, 7)]


@pytest.mark.oracle
def test_the_loss_of_random_windows_is_the_mean_of_their_tokens(tmp_path: Path) -> None:
    model = slots_of(tiny(vocab_size=257))
    path = write(tmp_path / "corpus.jsonl", TEXTS)
    entries = list(entries_of(find_sources([path]), Reader(), Bytes()))
    windows, length = 10, 6
    found = sampled_perplexity(model, entries, 0, length, windows)
    tokens = [token for entry in entries for token in (*entry.tokens, 0)]
    ends = np.cumsum([len(entry.tokens) + 1 for entry in entries])
    total = 0.0
    for window in random_windows(np.array(tokens, np.int32), ends, length, windows):
        (scored,) = model.score([window.tokens])
        total -= float(scored.log_probs.double().sum())
    predicted = windows * length
    assert found["loss"] == pytest.approx(total / predicted, rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(total / predicted))
    counts = ("windows", "predicted_tokens", "tokens")
    assert [found[name] for name in counts] == [windows, predicted, len(tokens)]


def test_a_perplexity_that_is_too_large_for_a_float_is_none() -> None:
    def logits(rows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        return [torch.eye(9)[8].mul(2000).repeat(len(row), 1) for row in rows]

    model = Recomputed(logits, 2, 64)
    found = sampled_perplexity(model, [Entry([1, 2, 3, 4], "a")], 0, length=3, count=2)
    assert (found["loss"], found["perplexity"]) == (2000, None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--task LAMBADA --valid-data x --webtext-eval", "needs --corpus"),
        ("--corpus x --webtext-eval --overlapping-eval 3", "excludes --overlapping-eval"),
        ("--corpus x --webtext-eval --eval-iters 0", "--eval-iters 0 must be 1 or more"),
    ],
)
def test_flags_that_random_windows_exclude_are_refused(
    words: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(f"evaluate --load x {words}".split())
    assert end.value.code == 2
    assert message in capfd.readouterr().err


def test_a_corpus_without_tokens_to_predict_is_refused(tmp_path: Path) -> None:
    model = slots_of(None)
    with pytest.raises(CorruptCheckpoint, match="no tokens to predict"):
        measured(model, [write(tmp_path / "corpus.jsonl", [""])], 9)
    with pytest.raises(UsageError, match="--overlapping-eval 10"):
        measured(model, [write(tmp_path / "corpus.jsonl", ["x"])], 9, stride=10)
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\n{"txt": 1}\n')
    with pytest.raises(CorruptCheckpoint, match=r"bad.jsonl:2.*'text'"):
        measured(model, [str(tmp_path / "bad.jsonl")], 9)


@pytest.mark.oracle
@pytest.mark.parametrize("measure", ["--corpus", "--task WIKITEXT103 --valid-data"])
@pytest.mark.parametrize(
    ("model_type", "length", "status", "message"),
    [
        ("gpt2", 97, 2, "error: --seq-length 97: the model has only 96 positions; take 96 or less"),
        ("gpt2", 96, 0, ""),
        ("llama", 97, 0, "warning: windows of 97 tokens exceed the model's 96 positions"),
        ("llama", 96, 0, ""),
        ("llama", 0, 2, "error: --seq-length 0 must be 1 or more"),
    ],
)
def test_windows_longer_than_the_model_are_refused_or_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    measure: str,
    model_type: str,
    length: int,
    status: int,
    message: str,
) -> None:
    """A table of positions ends. Rope goes on, with angles that no training has seen."""
    monkeypatch.setattr(launch, "leave", sys.exit)
    save(tmp_path / "model", model_type, max_position_embeddings=96)
    text = write(tmp_path / "wiki.jsonl", ["one two three " * 20])
    words = f"evaluate {tmp_path}/model {measure} {text} --seq-length {length}"
    with pytest.raises(SystemExit) as end:
        main(words.split())
    assert int(end.value.code or 0) == status
    said = [
        line for line in capfd.readouterr().err.splitlines() if line.startswith("megatron-lite")
    ]
    assert len(said) == bool(message)
    assert message in "".join(said)


@pytest.mark.slow
@pytest.mark.oracle
def test_two_data_parallel_ranks_measure_what_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test runs the command line. A corpus of one document has the sum that `score` gives for the document and
    its end."""
    monkeypatch.setattr(launch, "leave", sys.exit)
    save(tmp_path / "model")
    write(tmp_path / "corpus.jsonl", ["the only document of this corpus"])
    rows = [{"text": "the only document of this corpus<|end|>"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[0]))
    words = f"--corpus {tmp_path}/corpus.jsonl --seq-length 40 --load {tmp_path}/model"
    score = f"score --load {tmp_path}/model --input {tmp_path}/rows.jsonl --output {tmp_path}/s"
    for command in (f"evaluate {words} --output {tmp_path}/one.json", score):
        with pytest.raises(SystemExit) as end:
            main(command.split())
        assert not end.value.code
    one = json.loads((tmp_path / "one.json").read_text())["results"]["corpus"]
    scored = json.loads((tmp_path / "s").read_text())
    assert -one["loss"] * one["predicted_tokens"] == pytest.approx(scored["sum"], abs=1e-4)

    many = write(tmp_path / "corpus.jsonl", ["a b c d e f"] * 20)
    measure = f"evaluate --corpus {many} --seq-length 7 --load {tmp_path}/model --output"
    with pytest.raises(SystemExit):
        main([*measure.split(), f"{tmp_path}/one.json"])
    train(tmp_path / "run", 2, f"{measure} two.json")
    one = json.loads((tmp_path / "one.json").read_text())["results"]["corpus"]
    two = json.loads((tmp_path / "run" / "two.json").read_text())["results"]["corpus"]
    assert two == pytest.approx(one, rel=1e-6)


@pytest.mark.parametrize(
    ("words", "flag", "owner"),
    [
        ("--task WIKITEXT103 --valid-data x --limit-tokens 5", "--limit-tokens", "--corpus"),
        ("--task WIKITEXT103 --valid-data x --strict-lambada", "--strict-lambada", "--task LAMBADA"),
        ("--corpus x --valid-data x", "--valid-data", "--task"),
        ("--corpus x --limit 0", "--limit", "--lm-eval"),
        ("--corpus x --eval-iters 5", "--eval-iters", "--webtext-eval"),
        ("--corpus x --prompts x", "--prompts", "--toxicity"),
    ],
)  # fmt: skip
def test_flags_of_other_measurements_are_named(
    words: str, flag: str, owner: str, capfd: pytest.CaptureFixture[str]
) -> None:
    _check(parser().parse_args(["--load", "model", *words.split()]))
    said = f"without effect here: {flag}, which belongs to {owner}\n"
    assert capfd.readouterr().err == said
    _check(parser().parse_args(["--load", "model", "--corpus", "x", "--limit-tokens", "5"]))
    assert capfd.readouterr().err == ""
