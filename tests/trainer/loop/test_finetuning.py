"""A finetuning run from its flags to its checkpoint: what it chooses, says, counts and refuses; packed as if each example was alone."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import megaconv
from megatron_lite.data.batches import GlobalBatches
from megatron_lite.data.finetuning.dataset import FinetuneDataset
from megatron_lite.data.finetuning.examples import Examples
from megatron_lite.data.finetuning.pieces import pieces_for
from megatron_lite.objectives.feeder import Feeder
from megatron_lite.objectives.objective import Objective
from megatron_lite.settings.config import Settings
from megatron_lite.settings.learning import Data
from tests.trainer.data.chat_templates import MARKED, save_tokenizer
from tests.trainer.loop.launches import LLAMA, metrics, train
from tests.trainer.loop.test_manners import refused
from tests.trainer.parallel.small import MODELS, Case, make_engine

CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"{n}?"},
            {"role": "assistant", "content": "The fox " * n},
        ],
        "id": n,
    }
    for n in range(1, 7)
]


def test_a_run_on_chats_chooses_what_no_flag_says_and_tells_it(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "tokenizer", MARKED["chatml"])
    (tmp_path / "chats.json").write_text(json.dumps(CHATS))
    (tmp_path / "valid.jsonl").write_text("\n".join(map(json.dumps, CHATS[:3])))
    model = LLAMA.replace("--vocab-size 60 ", "").replace("--seq-length 16 ", "--seq-length 256 ")
    train(
        tmp_path,
        1,
        f"pretrain {model} --tokenizer-model tokenizer --train-iters 2 --bf16 --save base",
    )
    (tmp_path / "metrics.jsonl").unlink()
    command = (
        "finetune --load base --finetune-data chats.json --valid-finetune-data valid.jsonl --epochs 3 --show-sample --save tuned "
        "--metrics-file metrics.jsonl --distributed-timeout-minutes 1"
    )
    ran = train(tmp_path, 2, command)
    log = ran.log(0)
    for words in (
        "--bf16: the checkpoint's precision",
        "--lr 1e-05: ",
        "--log-interval 10: ",
        "--seq-length 64: the longest example has ",
        "samples for evaluation",
        'fields that are not read: "id"',
        "the first sample: ",
        "    learned 'The fox ",
    ):
        assert words in log, (words, log)
    (summary,) = re.findall(
        r"^6 examples, (\d+) tokens \((\d+) learned\), (\d+) samples of 64 tokens, (\S+) steps an epoch$",
        log,
        re.M,
    )
    assert int(summary[2]) / 2 == float(summary[3])
    (steps,) = re.findall(r"^3 epochs are (\d+) steps$", log, re.M)
    evaluations = [line["iteration"] for line in metrics(tmp_path) if "validation_loss" in line]
    assert evaluations[0] == -(-int(summary[2]) // 2)
    found = megaconv.inspect(tmp_path / "tuned").to_json()
    assert found["iteration"] == int(steps)
    assert (tmp_path / "tuned" / "hf" / "tokenizer.json").is_file()
    assert "nothing left" in train(tmp_path, 1, f"{command} --resume --micro-batch-size 2").log(0)


def test_finetuning_reports_truncated_and_dropped_examples(tmp_path: Path) -> None:
    records = [
        {"text": "1 2 3"},
        {"text": " ".join("1" * 30)},
        {"prompt": " ".join("1" * 30), "completion": "2"},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    command = f"pretrain {LLAMA} --finetune-data a.jsonl --tokenizer-type NullTokenizer --epochs 1".replace(
        "--mock-data ", ""
    )
    log = train(
        tmp_path,
        1,
        command.replace("--vocab-size 60", "--vocab-size 59").replace(
            "batch-size 4", "batch-size 1"
        ),
    ).log(0)
    assert "warning: 1 example is longer than --seq-length 16 and was cut" in log
    assert "warning: 1 example was dropped: nothing to learn is left of it" in log


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            "--epochs 2 --mock-data",
            "--epochs counts passes over --finetune-data or over one corpus",
        ),
        (
            "--epochs 2 --train-iters 2 --finetune-data a.jsonl",
            "give --train-iters, --train-samples or --epochs",
        ),
        ("--train-iters 2 --mock-data --show-sample", "--show-sample requires --finetune-data"),
        (
            "--finetune-data a.jsonl --valid-finetune-data a.jsonl --split 9,1 --epochs 1",
            "there is nothing to divide",
        ),
        ("--finetune-data a.jsonl --mock-data --epochs 1", "they exclude each other"),
        (
            "--finetune-data a.jsonl --epochs 1 --chat-template none",
            "--chat-template none: can't be read",
        ),
    ],
)
def test_flags_that_contradict_each_other_are_refused(
    flags: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "1 2 3"}\n')
    model = LLAMA.replace("--mock-data ", "").replace(
        "--vocab-size 60", "--tokenizer-type NullTokenizer --vocab-size 59"
    )
    assert words in refused(tmp_path, f"pretrain {model} {flags}")


@pytest.mark.parametrize("model", MODELS)
def test_packed_examples_have_the_losses_of_each_alone(model: str) -> None:
    """One row in a microbatch, or all of them."""
    random = np.random.default_rng(0)
    sizes = random.integers(3, 12, 12)
    bounds = np.concatenate(([0], np.cumsum(sizes)))
    tokens = random.integers(0, 61, bounds[-1]).astype(np.int32)
    learned = random.random(len(tokens)) < 0.7
    learned[bounds[1:] - 1] = True
    pieces = pieces_for(Examples(tokens, learned, bounds, np.zeros(12, bool)), 16)
    engine = make_engine(Case(model))
    feeder = Feeder(
        Objective().microbatch,
        Settings(data=Data(finetune_data=("a.jsonl",))),
        torch.device("cpu"),
        1,
        0,
    )

    def losses(members: list[int], rows: int = 1) -> tuple[dict[str, tuple[float, float]], int]:
        dataset = FinetuneDataset(pieces, np.array(members), 16, None, 0)
        batch = GlobalBatches(dataset, rows, 0, 1, 61).at(0, len(dataset) // rows * rows)
        return engine.evaluate(feeder.microbatches(batch)), len(dataset)

    alone = [losses([number])[0] for number in range(12)]
    for rows in (1, 5):
        packed, samples = losses(list(range(12)), rows)
        assert samples == 5
        assert packed.keys() == alone[0].keys()
        for name, (total, count) in packed.items():
            assert count == sum(each[name][1] for each in alone)
            assert total == pytest.approx(sum(each[name][0] for each in alone), rel=1e-6)
