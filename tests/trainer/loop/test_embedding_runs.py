"""Runs of embedding models: what they say, save and refuse; they go on to the same bits, and transformers gives the same vectors."""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import megaconv
from megaconv.errors import UsageError
from megatron_lite.inference.text_vectors import open_loaded
from megatron_lite.retrieval.embedder import Embedder, Passage
from tests.trainer.loop.launches import metrics, train
from tests.trainer.loop.test_manners import refused
from tests.trainer.vectors import by_transformers, save, write_queries

pytestmark = pytest.mark.oracle
WORDS = (
    "finetune --embedding --finetune-data queries.jsonl --embedding-negatives 1 --lr 3e-3 --lr-decay-style constant --log-interval 1 "
    "--seq-length 16 --micro-batch-size 2 --global-batch-size 8 --metrics-file metrics.jsonl --distributed-timeout-minutes 1 --fp32 "
    "--make-vocab-size-divisible-by 2"
)
TEXTS = ("w1 w2 w3", "w7", "w20 w21 w22 w23 w24 w25", "w59 w58")
NOTHING = argparse.Namespace(
    training=None, tokenizer_type=None, tokenizer_model=None, vocab_file=None, merge_file=None, indexer_batch_size=4,
    seq_length=None,
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model"))


def prepared(place: Path) -> Path:
    """A directory with queries."""
    place.mkdir(exist_ok=True)
    write_queries(place / "queries.jsonl")
    return place


def figures(directory: Path) -> list[list[float]]:
    return [
        [line[name] for name in ("loss", "accuracy")]
        for line in metrics(directory)
        if "loss" in line
    ]


def embedder(directory: Path, length: int = 16) -> Embedder:
    return open_loaded(NOTHING, str(directory), "load:x", length, None)


def require_vectors(directory: Path, converted: Path, pooling: str, prompt: str) -> None:
    """Passages and questions have the vectors that transformers computes from the converted model."""
    opened = embedder(directory)
    passages = [Passage(number, text, "w9") for number, text in enumerate(TEXTS)]
    expected = by_transformers(converted, [f"w9 {text}" for text in TEXTS], pooling)
    assert np.allclose(opened.passages(passages), expected.numpy(), atol=1e-5)
    asked = by_transformers(converted, [prompt + text for text in TEXTS], pooling)
    assert np.allclose(opened.queries(TEXTS), asked.numpy(), atol=1e-5)


def test_a_run_goes_on_to_the_same_bits_and_transformers_gives_the_same_vectors(
    model: Path, tmp_path: Path
) -> None:
    whole, same, other = (prepared(tmp_path / name) for name in ("whole", "same", "other"))
    command = f"{WORDS} --load {model} --save ckpt --train-iters 12"
    log = train(whole, 1, command).log(0)
    assert "the head for words keeps its values, without gradients and optimizer state" in log
    assert (
        "24 queries, 48 documents that answer them, 24 hard negatives; a sample is 3 texts of up to 16 tokens; 3 steps an epoch"
        in log
    )
    assert "8 queries have fewer hard negatives than --embedding-negatives 1" in log
    lines = re.findall(r"^step +\d+/12 .* loss (\S+) \| accuracy (\S+)% \|", log, re.M)
    assert len(lines) == 12
    losses = [float(loss) for loss, _ in lines]
    assert sum(losses[-3:]) < 0.7 * sum(losses[:3])
    assert "perplexity" not in log

    for place, size, layout in ((same, 1, ""), (other, 4, "--tp 2 --pp 2 --sequence-parallel")):
        train(place, 1, f"{command} --exit-interval 2")
        again = train(place, size, f"{command} --resume {layout}").log(0)
        assert "continuing after step 2, 16 samples" in again
    assert figures(same) == figures(whole)
    assert np.allclose(figures(other), figures(whole), atol=1e-4)
    saved = whole / "ckpt"
    assert megaconv.fingerprint(same / "ckpt") == megaconv.fingerprint(saved)

    megaconv.convert(saved, tmp_path / "hf", saver="hf")
    assert head(tmp_path / "hf").equal(head(model))
    require_vectors(saved, tmp_path / "hf", "last", "")
    assert embedder(saved).fingerprint == embedder(tmp_path / "hf").fingerprint


def head(directory: Path) -> Tensor:
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")["lm_head.weight"]


def test_pooling_and_prompts_come_back_from_the_files_of_sentence_transformers(
    model: Path, tmp_path: Path
) -> None:
    flags = "--embedding-pooling mean --train-iters 2"
    prompt = "--embedding-query-prompt w5w6"
    command = f"{WORDS} --load {model} --save ckpt {flags} {prompt}"
    place = prepared(tmp_path / "first")
    train(place, 1, command)
    saved, converted = place / "ckpt", tmp_path / "hf"
    megaconv.convert(saved, converted, saver="hf")
    pooling = json.loads((converted / "1_Pooling" / "config.json").read_text())
    assert pooling == {
        "word_embedding_dimension": 32, "pooling_mode_lasttoken": False, "pooling_mode_mean_tokens": True, "include_prompt": True,
    }  # fmt: skip
    prompts = json.loads((converted / "config_sentence_transformers.json").read_text())
    assert prompts["prompts"] == {"query": "w5w6", "document": ""}
    length = json.loads((converted / "sentence_bert_config.json").read_text())
    assert length["max_seq_length"] == 64, "the model's positions"
    require_vectors(saved, converted, "mean", "w5w6")

    further = train(
        prepared(tmp_path / "next"), 1, f"{WORDS} --load {converted} --train-iters 1 --show-sample"
    ).log(0)
    assert "--embedding-query-prompt 'w5w6': that of the checkpoint" in further
    assert "--embedding-pooling mean: the tokens that make a text's vector" in further
    assert "  query: '<s> <unk> " in further
    # Other prompts and keys of the checkpoint stay.
    prompts["prompts"] |= {"sts": "compare: "}
    path = converted / "config_sentence_transformers.json"
    path.write_text(json.dumps(prompts | {"default_prompt_name": "sts", "truncate_dim": 8}))
    command = f"{WORDS} --load {converted} --save ckpt --train-iters 1 --embedding-query-prompt w8"
    train(prepared(tmp_path / "again"), 1, command)
    written = json.loads((tmp_path / "again" / "ckpt" / "hf" / path.name).read_text())
    assert written["prompts"] == {"query": "w8", "document": "", "sts": "compare: "}
    assert (written["default_prompt_name"], written["truncate_dim"]) == ("sts", 8)
    # Equal weights with another pooling give other vectors.
    fingerprint = embedder(converted).fingerprint
    pooling |= {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
    (converted / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    assert embedder(converted).fingerprint != fingerprint


def test_a_merged_adapter_has_the_files_of_its_run(model: Path, tmp_path: Path) -> None:
    place = prepared(tmp_path / "run")
    command = (
        f"{WORDS} --load {model} --save ckpt --train-iters 3 --lora-rank 4 --embedding-pooling mean"
    )
    log = train(place, 1, command).log(0)
    assert "LoRA of rank 4" in log
    megaconv.convert(model, tmp_path / "hf", saver="hf", adapters=[str(place / "ckpt")])
    assert head(tmp_path / "hf").equal(head(model))
    require_vectors(tmp_path / "hf", tmp_path / "hf", "mean", "")


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_step_has_the_loss_and_the_gradient_of_sentence_transformers(
    pooling: str, model: Path, tmp_path: Path
) -> None:
    """Its MultipleNegativesRankingLoss with the scale 1 / temperature. The learning rate leaves the weights as they are."""
    reason = "sentence-transformers is not installed (extra `retrieval`)"
    package: Any = pytest.importorskip("sentence_transformers", reason=reason)
    losses: Any = pytest.importorskip("sentence_transformers.sentence_transformer.losses", reason=reason)  # fmt: skip
    records = [
        {"anchor": f"w{n} w{n + 9}", "positive": f"w{n + 20} w{n + 1} w{n}", "negative": f"w{n + 40} w{n + 30}"}
        for n in range(8)
    ]  # fmt: skip
    (tmp_path / "queries.jsonl").write_text("\n".join(map(json.dumps, records)))
    words = WORDS.replace("--lr 3e-3", "--lr 1e-12")
    train(tmp_path, 1, f"{words} --load {model} --save ckpt --train-iters 1 --embedding-pooling {pooling}")  # fmt: skip
    (step,) = [line for line in metrics(tmp_path) if "loss" in line]
    megaconv.convert(tmp_path / "ckpt", tmp_path / "hf", saver="hf")
    theirs = package.SentenceTransformer(str(tmp_path / "hf"), device="cpu")
    texts = [[record[name] for record in records] for name in ("anchor", "positive", "negative")]
    loss = losses.MultipleNegativesRankingLoss(theirs, scale=20.0)(
        [theirs.preprocess(column) for column in texts], None
    )
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1e9)
    assert step["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert step["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


def test_an_evaluation_compares_the_queries_of_its_batches(model: Path, tmp_path: Path) -> None:
    place = prepared(tmp_path / "run")
    log = train(
        place,
        2,
        f"{WORDS} --load {model} --train-iters 2 --valid-finetune-data queries.jsonl --eval-interval 1",
    ).log(0)
    assert "--eval-iters 3: of 24 samples for evaluation" in log
    assert len(re.findall(r"validation .*loss \S+ \| accuracy \S+%", log)) == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--dpo", "--embedding and --dpo are two objectives; leave one of them out"),
        ("--context-parallel-size 2", "--embedding compares whole texts, which --context-parallel-size would"),
        ("--embedding-temperature 0", "--embedding-temperature 0 must be more than 0 and finite"),
        ("--embedding-negatives -1", "--embedding-negatives -1 must be 0 or more"),
        ("--finetune-loss dft", "--finetune-loss: --embedding has a loss of its own"),
        ("--teacher-load MODEL", "--embedding learns from queries, and --teacher-load from predictions"),
        ("--seq-length 1", "--seq-length 1 must be more than 1, the special tokens that end each text"),
        ("--embedding-negatives 0 --global-batch-size 1 --micro-batch-size 1", "--global-batch-size 1 has nothing to compare"),
    ],
)  # fmt: skip
def test_flags_that_contradict_the_objective_are_refused(
    flags: str, message: str, model: Path, tmp_path: Path
) -> None:
    words = flags.replace("MODEL", str(model))
    assert message in refused(
        prepared(tmp_path / "run"), f"{WORDS} --load {model} --train-iters 1 {words}"
    )


def test_what_misses_is_named(model: Path, tmp_path: Path) -> None:
    place = prepared(tmp_path / "run")
    words = f"{WORDS} --load {model} --train-iters 1"
    stated = words.replace("--embedding-negatives 1 ", "")
    assert "its queries have up to 2 hard negatives; say how many are used" in refused(
        place, stated
    )
    without = words.replace("--embedding ", "")
    assert "--embedding-negatives requires --embedding" in refused(place, without)
    alone = words.replace(f"--load {model} ", "")
    assert "--embedding needs --load: a language model or an embedding model" in refused(
        place, alone
    )


def test_a_model_of_other_modules_is_refused(model: Path, tmp_path: Path) -> None:
    copied = save(tmp_path / "model")
    modules: list[dict[str, Any]] = [
        {"type": "sentence_transformers.models.Dense", "path": "2_Dense"}
    ]
    (copied / "modules.json").write_text(json.dumps(modules))
    message = refused(prepared(tmp_path / "run"), f"{WORDS} --load {copied} --train-iters 1")
    assert "modules.json: the model has a module Dense, which isn't computed" in message


def test_texts_have_at_most_as_many_tokens_as_the_model_has_positions(model: Path) -> None:
    text = " ".join(["w1"] * 100)
    expected = by_transformers(model, [text], "last")
    assert np.allclose(embedder(model, length=256).queries([text]), expected.numpy(), atol=1e-5)
    asked = argparse.Namespace(**vars(NOTHING) | {"seq_length": 256})
    with pytest.raises(UsageError, match="has 64 positions; give at most these"):
        open_loaded(asked, str(model), "load:x", 256, None)


def test_vectors_have_length_1_and_long_texts_keep_their_end(model: Path) -> None:
    opened = embedder(model, length=5)
    found = torch.from_numpy(opened.queries(["w1 w2 w3 w4 w5 w6 w7", "w1 w2 w3"]))
    assert found.norm(dim=1).tolist() == pytest.approx([1.0, 1.0])
    assert torch.equal(found[0], found[1])
    assert torch.allclose(found, by_transformers(model, ["w1 w2 w3 w4 w5 w6 w7", "w1 w2 w3"], "last", length=5), atol=1e-5)  # fmt: skip
