"""A retriever from text to answers: ICT on documents with words of a topic, then a search among all documents."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("faiss")
pytest.importorskip("regex")

ROOT = Path(__file__).parents[3]
TOPICS, DOCUMENTS, HELD_OUT = 200, 1000, 100
"""Five documents have the same topic. The last documents are in no training sample (`--split 90,10,0`)."""
COMMON_WORDS, TOPIC_WORDS = 40, 12
SENTENCES, LENGTH = 5, 8
TOKENIZER = ("--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", "vocab.txt")
MODEL = (
    "--model-type", "biencoder", "--biencoder-shared-query-context-model", "--biencoder-projection-dim", "32",
    "--num-layers", "1", "--hidden-size", "64", "--num-attention-heads", "4", "--ffn-hidden-size", "64",
    "--seq-length", "48", "--max-position-embeddings", "48", "--hidden-dropout", "0", "--attention-dropout", "0",
    "--micro-batch-size", "64", "--global-batch-size", "64",
)  # fmt: skip
CORPUS = (
    "--data-path", "corpus_text_sentence", "--titles-data-path", "corpus_title_sentence", *TOKENIZER,
)  # fmt: skip


def write_corpus(directory: Path) -> list[list[str]]:
    """Write corpus.jsonl and vocab.txt. Returns the sentences of each document."""
    drawn = random.Random(1)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words: list[str] = []
    while len(words) < COMMON_WORDS + TOPICS * TOPIC_WORDS:
        word = "".join(drawn.choices(letters, k=6))
        if word not in words:
            words.append(word)
    common, of_topics = words[:COMMON_WORDS], words[COMMON_WORDS:]
    documents, lines = [], []
    for number in range(DOCUMENTS):
        first = number % TOPICS * TOPIC_WORDS
        topic = of_topics[first : first + TOPIC_WORDS]
        sentences = [sentence(drawn, topic, common) for _ in range(SENTENCES)]
        documents.append(sentences)
        lines.append(json.dumps({"title": topic[0], "text": "\n".join(sentences)}))
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (directory / "vocab.txt").write_text("\n".join([*special, *words]))
    (directory / "corpus.jsonl").write_text("\n".join(lines))
    return documents


def sentence(drawn: random.Random, topic: list[str], common: list[str]) -> str:
    """Eight words, of which seven in ten are of the topic."""
    sources = [topic if drawn.random() < 0.7 else common for _ in range(LENGTH)]
    return " ".join(drawn.choice(source) for source in sources)


def lite(directory: Path, *words: object) -> None:
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [sys.executable, "-m", "megatron_lite", *map(str, words)],
        cwd=directory, env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def top5(directory: Path, load: str) -> float:
    """Return the share of held-out sentences whose own document is among the first five of all documents."""
    index, metrics = f"{load}-index", f"{load}.json"
    lite(directory, "embed", "--load", load, *CORPUS, "--seq-length", 48, "--output", index)
    words = ("--load", load, "--index", index, "--qa-data", "qa.jsonl", "--top-k", 5, *TOKENIZER)
    outputs = ("--output", f"{load}-hits.jsonl", "--metrics-file", metrics)
    lite(directory, "retrieve", *words, *outputs)
    return float(json.loads((directory / metrics).read_text())["top5_acc"])


@pytest.mark.slow
def test_three_hundred_steps_find_the_document_of_a_sentence(tmp_path: Path) -> None:
    documents = write_corpus(tmp_path)
    held_out = [sentences[2] for sentences in documents[-HELD_OUT:]]
    questions = [json.dumps({"question": each, "answers": [each]}) for each in held_out]
    (tmp_path / "qa.jsonl").write_text("\n".join(questions))
    keys = ("--json-keys", "text", "title", "--presplit-sentences")
    lite(
        tmp_path,
        "preprocess",
        "--input",
        "corpus.jsonl",
        *keys,
        *TOKENIZER,
        "--output-prefix",
        "corpus",
    )
    train = ("pretrain", *MODEL, *CORPUS, "--split", "90,10,0", "--fp32", "--eval-iters", 0)
    rates = ("--lr-decay-style", "linear", "--lr-warmup-iters", 20, "--lr", 1e-2)
    lite(tmp_path, *train, "--train-iters", 1, "--lr", 1e-9, "--save", "before")
    lite(tmp_path, *train, "--train-iters", 300, *rates, "--save", "after")
    assert top5(tmp_path, "before") < 0.1
    assert top5(tmp_path, "after") >= 0.9
