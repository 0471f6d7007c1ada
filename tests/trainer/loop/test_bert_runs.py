"""A BERT from sentences to transformers: it trains at any layout, goes on to the same bits, is converted and taken up again."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import MegatronBertForPreTraining

import megaconv
from megaconv.model.layout import Layout
from megatron_lite.checkpoint.weights import load_weights
from megatron_lite.engine import Engine
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.bert import Bert
from megatron_lite.parallel.grid import make_grid
from megatron_lite.settings.options import ModelOptions
from tests.trainer.loop.launches import train
from tests.trainer.loop.test_manners import metrics, refused

MASKED = Path(__file__).parents[1] / "fixtures" / "masked"
WORDS = 129
"""Of its vocabulary that BERT's samples know."""
DATA = f"--data-path {MASKED}/corpus_text_sentence --vocab-file vocab.txt --split 80,15,5 --seq-length 64"
BERT = (
    f"--model-type bert --num-layers 2 --hidden-size 32 --num-attention-heads 4 --no-bias-gelu-fusion {DATA} "
    "--global-batch-size 4 --lr 1e-3 --log-interval 1 --eval-iters 0 --metrics-file metrics.jsonl --distributed-timeout-minutes 1"
)
PLAIN = "--hidden-dropout 0 --attention-dropout 0"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    words = (MASKED / "vocab.txt").read_text().splitlines()[:WORDS]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    return tmp_path


def losses(directory: Path) -> list[list[float]]:
    return [[line["loss"], line["sop_loss"]] for line in metrics(directory)]


def test_a_bert_goes_on_to_the_same_bits(place: Path) -> None:
    """With dropout, at tensor and sequence parallelism."""
    layout = "--tp 2 --sequence-parallel --use-distributed-optimizer"
    train(place, 2, f"pretrain {BERT} {layout} --train-iters 4 --save straight")
    straight = losses(place)
    (place / "metrics.jsonl").unlink()
    train(place, 2, f"pretrain {BERT} {layout} --train-iters 4 --save parted --exit-interval 2")
    ran = train(place, 2, f"pretrain {BERT} {layout} --train-iters 4 --save parted --resume")
    assert losses(place) == straight
    assert f"| loss {straight[-1][0]:.5f} | sop loss {straight[-1][1]:.5f} |" in ran.log(0)
    found, expected = (megaconv.fingerprint(place / name) for name in ("parted", "straight"))
    assert found == expected


def test_what_a_bert_saves_is_what_transformers_computes_and_trains_on(place: Path) -> None:
    train(place, 1, f"pretrain {BERT} {PLAIN} --train-iters 2 --save one --ckpt-format torch")
    alone = losses(place)
    (place / "metrics.jsonl").unlink()
    train(place, 2, f"pretrain {BERT} {PLAIN} --pp 2 --train-iters 2 --save two")
    assert np.array(losses(place)) == pytest.approx(np.array(alone), rel=1e-5)
    megaconv.convert(place / "two", place / "hf", saver="hf")
    theirs = MegatronBertForPreTraining.from_pretrained(place / "hf", dtype=torch.float32).eval()

    samples = np.load(MASKED / "expected.npz")
    text, types, mask = (
        torch.from_numpy(samples[f"bert/train/{name}"][:3].astype(np.int64))
        for name in ("text", "types", "padding_mask")
    )
    with torch.no_grad():
        expected = theirs(input_ids=text, token_type_ids=types, attention_mask=mask)
    source = megaconv.open(place / "hf")
    engine = Engine(
        source.config, make_grid(Layout(stage_layers=(2,)), 1, torch.device("cpu")), ModelOptions("float32"), None
    )
    load_weights(engine, source.tensors)
    batch = Microbatch(text, text, types=types, visible=mask.bool())
    logits, last = engine.logits(batch), engine.last_stage(batch)
    assert logits is not None
    assert last is not None
    shown = mask.bool()
    assert torch.allclose(logits[shown], expected.prediction_logits[shown], atol=1e-5)
    network, hidden = last
    assert isinstance(network, Bert)
    assert network.pooler is not None
    assert network.binary_head is not None
    order = network.binary_head(network.pooler(hidden))
    assert torch.allclose(order, expected.seq_relationship_logits, atol=1e-5)

    (place / "metrics.jsonl").unlink()
    go_on = f"{DATA} --global-batch-size 4 --train-iters 1 --metrics-file metrics.jsonl --log-interval 1 --eval-iters 0 --lr 1e-3"
    train(place, 1, f"finetune --load hf {go_on} {PLAIN}")
    train(place, 1, f"finetune --load one {go_on} {PLAIN}")
    first, second = losses(place)
    assert first == pytest.approx(second, rel=1e-5)


def test_sentences_are_asked_for_where_there_are_none(place: Path) -> None:
    command = f"pretrain {BERT} --train-iters 1"
    said = refused(place, command.replace("--vocab-file vocab.txt", "--tokenizer-type NullTokenizer --vocab-size 60"))
    assert "hidden words need a tokenizer with a mask: --tokenizer-type BertWordPieceLowerCase --vocab-file" in said
