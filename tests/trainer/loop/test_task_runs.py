"""A BERT finetuned on Megatron's tasks, from made-up files to transformers: at any layout, resumed to the same bits, converted."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megaconv
from megatron_lite.data.masked.vocabulary import vocabulary
from megatron_lite.data.tasks.examples import Task
from megatron_lite.data.tasks.glue import MNLI
from megatron_lite.data.tasks.race import RACE
from megatron_lite.data.tasks.samples import Sequences
from megatron_lite.data.tokenizer import TokenizerOptions, build_tokenizer
from tests.trainer.loop.launches import BERT, metrics, train
from tests.trainer.loop.made_up_tasks import LABELS, VOCABULARY, write_mnli, write_qqp, write_race
from tests.trainer.loop.test_manners import refused

DROPOUTS = "--hidden-dropout 0 --attention-dropout 0"
COMMON = (
    f"--model-type bert --pretrained-checkpoint bert --seq-length 40 --vocab-file {VOCABULARY} --lr 1e-3 --log-interval 1 "
    "--metrics-file metrics.jsonl --distributed-timeout-minutes 1"
)
ON_MNLI = f"finetune --task MNLI --train-data train.tsv --valid-data dev.tsv more.tsv {COMMON} --global-batch-size 4"
ON_RACE = f"finetune --task race --train-data RACE/train --valid-data RACE/dev {COMMON} --global-batch-size 2"

Pretrained = Callable[[Path, str], None]


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Pretrained:
    """pretrained(directory, dropouts) puts a `bert` there that has seen two batches."""
    made: dict[str, Path] = {}

    def give(directory: Path, dropouts: str = DROPOUTS) -> None:
        if dropouts not in made:
            made[dropouts] = tmp_path_factory.mktemp("pretrained")
            train(made[dropouts], 1, f"pretrain {BERT} {dropouts} --train-iters 2 --save bert")
        (directory / "bert").symlink_to(made[dropouts] / "bert")

    return give


def losses(directory: Path) -> list[float]:
    return [line["loss"] for line in metrics(directory) if "loss" in line]


def accuracies(log: str) -> list[tuple[int, str, int, int]]:
    """(epoch, file, right, all) as a run says them."""
    found = re.findall(r"\| epoch (\d+) \| (.*): ([\d,]+) of ([\d,]+) right", log)
    return [(int(epoch), path, int(right), int(count)) for epoch, path, right, count in found]


def answered(directory: Path, task: Task, path: Path, **names: Any) -> int:
    """The number of examples that transformers answers right, with a model that it opens by its config.json."""
    import transformers

    (kind,) = json.loads((directory / "config.json").read_text())["architectures"]
    model = getattr(transformers, kind).from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = build_tokenizer(TokenizerOptions("BertWordPieceLowerCase", vocab_file=VOCABULARY))
    words, right = vocabulary(tokenizer, ("cls", "sep", "pad")), 0
    made = Sequences(task, tokenizer.tokenize, words.cls, words.sep, words.pad, 40)
    for example in task.read(str(path)).examples:
        sample = made.sample(example)
        text, types, mask = (
            torch.from_numpy(each)[None]
            for each in (sample.text, sample.types, sample.padding_mask)
        )
        with torch.no_grad():
            logits = model(input_ids=text, token_type_ids=types, attention_mask=mask).logits
        right += int(logits.argmax()) == sample.label
    return right


def test_mnli_is_learned_measured_after_each_epoch_and_computed_alike_by_transformers(
    tmp_path: Path, pretrained: Pretrained
) -> None:
    pretrained(tmp_path, DROPOUTS)
    write_mnli(tmp_path / "train.tsv", 30)
    write_mnli(tmp_path / "dev.tsv", 11, seed=2, columns=16)
    write_mnli(tmp_path / "more.tsv", 7, seed=3)
    log = train(tmp_path, 1, f"{ON_MNLI} --epochs 5 --keep-last --save tuned").log(0)
    assert (
        "new for MNLI: classification_head.bias, classification_head.weight; left out of bert: binary_head, head, transform."
        in log
    )
    assert "MNLI: 30 examples, 8 steps an epoch, 18 examples to measure" in log
    found = accuracies(log)
    assert [(epoch, path, count) for epoch, path, _, count in found] == [
        (epoch, path, count) for epoch in range(1, 6) for path, count in (("dev.tsv", 11), ("more.tsv", 7), ("all of them", 18))
    ]  # fmt: skip
    # There are 18 answers, and a guess finds 6.
    assert 12 <= found[-1][2] == found[-2][2] + found[-3][2]

    megaconv.convert(tmp_path / "tuned", tmp_path / "hf", saver="hf")
    said = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert said["architectures"] == ["MegatronBertForSequenceClassification"]
    assert said["id2label"] == {str(number): name for number, name in enumerate(LABELS)}
    assert answered(tmp_path / "hf", MNLI, tmp_path / "dev.tsv") == found[-3][2]
    megaconv.convert(tmp_path / "tuned", tmp_path / "legacy", saver="legacy", tp=2)
    prints = [megaconv.fingerprint(tmp_path / name).weights for name in ("tuned", "hf", "legacy")]
    assert len(set(prints)) == 1
    again = train(
        tmp_path, 1, f"{ON_MNLI} --epochs 0".replace("checkpoint bert", "checkpoint legacy")
    ).log(0)
    assert accuracies(again) == [(0, *figures[1:]) for figures in found[-3:]]


@pytest.mark.slow
def test_race_is_learned_alike_at_two_layouts_and_computed_alike_by_transformers(
    tmp_path: Path, pretrained: Pretrained
) -> None:
    pretrained(tmp_path, DROPOUTS)
    write_race(tmp_path / "RACE" / "train", 7)
    write_race(tmp_path / "RACE" / "dev", 5, seed=2)
    log = train(tmp_path, 1, f"{ON_RACE} --epochs 2 --save one").log(0)
    alone = losses(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    again = train(
        tmp_path,
        2,
        f"{ON_RACE} --epochs 2 --save two --ckpt-format torch --tp 2 --sequence-parallel",
    ).log(0)
    assert len(alone) == 14
    assert np.array(losses(tmp_path)) == pytest.approx(np.array(alone), rel=1e-4)
    assert accuracies(again) == accuracies(log)
    assert "new for RACE: multichoice_head.bias, multichoice_head.weight" in log
    megaconv.convert(tmp_path / "two", tmp_path / "hf", saver="hf")
    assert answered(tmp_path / "hf", RACE, tmp_path / "RACE" / "dev") == accuracies(again)[-1][2]


@pytest.mark.slow
def test_a_run_on_a_task_goes_on_to_the_same_bits(tmp_path: Path, pretrained: Pretrained) -> None:
    """The run has dropout, resumes in the middle of an epoch, and has two pipeline stages with a sharded
    optimizer."""
    pretrained(tmp_path, "")
    write_qqp(tmp_path / "train.tsv", 13)
    write_qqp(tmp_path / "dev.tsv", 5, seed=2)
    command = f"finetune --task QQP --train-data train.tsv --valid-data dev.tsv {COMMON} --micro-batch-size 2 --dp-is-2 --epochs 2"
    command = command.replace(" --dp-is-2", " --use-distributed-optimizer --keep-last-batch")
    first = train(tmp_path, 2, f"{command} --save straight").log(0)
    assert (
        "warning: train.tsv: 1 line left out, as by Megatron: train.tsv:3: has 1 of 6 columns"
        in first
    )
    straight = losses(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    train(tmp_path, 2, f"{command} --save parted --exit-interval 3")
    second = train(tmp_path, 2, f"{command} --save parted --load parted").log(0)
    assert len(straight) == 8
    assert losses(tmp_path) == straight
    assert accuracies(second) == accuracies(first)
    assert megaconv.fingerprint(tmp_path / "parted") == megaconv.fingerprint(tmp_path / "straight")
    said = train(tmp_path, 2, f"{command} --save parted --resume").log(0)
    assert "nothing left: the run has made its 8 steps" in said
    assert accuracies(said) == accuracies(first)[-1:]
    other = refused(tmp_path, f"{command} --save parted --resume --global-batch-size 8")
    assert (
        "the continued run has batches of 4, of which the order of a task's examples follows"
        in other
    )


def test_another_tasks_head_is_left_out_by_name(tmp_path: Path, pretrained: Pretrained) -> None:
    pretrained(tmp_path, DROPOUTS)
    write_qqp(tmp_path / "train.tsv", 4)
    write_mnli(tmp_path / "mnli.tsv", 4)
    qqp = f"finetune --task QQP --train-data train.tsv {COMMON} --micro-batch-size 4 --epochs 1"
    train(tmp_path, 1, f"{qqp} --save qqp")
    mnli = qqp.replace("QQP", "MNLI").replace("train.tsv", "mnli.tsv")
    log = train(tmp_path, 1, mnli.replace("checkpoint bert", "checkpoint qqp")).log(0)
    assert (
        "new for MNLI: classification_head.bias, classification_head.weight; left out of qqp: classification_head"
        in log
    )
    assert "holds a run on something else than MNLI; --load it with another --save" in refused(
        tmp_path, f"{mnli} --save qqp --resume"
    )
    plain = "finetune --load qqp --data-path x --train-iters 1"
    assert "the checkpoint is a model for a task, without a head for words; give --task" in refused(
        tmp_path, plain
    )


REFUSED: Mapping[str, tuple[str, str]] = {
    "--epochs": ("--epochs 1", "--task MNLI needs --epochs: how often it goes through --train-data; 0 measures alone"),
    "files": ("--train-data train.tsv", "--task MNLI learns from --train-data, which is missing"),
    "other data": ("--epochs 1", "--task MNLI learns from --train-data; leave --data-path out"),
    "a batch": ("--global-batch-size 4", "--train-data has 3 examples, fewer than a batch of 8; --keep-last-batch makes one of them"),
    "evaluations": ("--model-type bert", "--eval-iters: evaluations are of --valid-data, which is missing; leave it out"),
    "the model": ("--model-type bert", "--model-type gpt contradicts the checkpoint, which is a bert"),
}  # fmt: skip
INSTEAD = {
    "other data": "--epochs 1 --data-path x",
    "a batch": "--global-batch-size 8",
    "evaluations": "--eval-iters 2",
    "the model": "--model-type gpt",
}


def test_options_that_a_task_does_not_support_are_refused(
    tmp_path: Path, pretrained: Pretrained
) -> None:
    pretrained(tmp_path, DROPOUTS)
    write_mnli(tmp_path / "train.tsv", 3)
    command = (
        f"finetune --task MNLI --train-data train.tsv {COMMON} --global-batch-size 4 --epochs 1"
    )
    for case, (words, message) in REFUSED.items():
        assert message in refused(tmp_path, command.replace(words, INSTEAD.get(case, ""))), case
    assert "--task MNLI starts from a trained BERT: it requires the command finetune" in refused(
        tmp_path,
        command.replace("finetune ", "pretrain --load bert ").replace(
            "--pretrained-checkpoint bert", ""
        ),
    )
