"""The reactions of a run to files that it finds, and its messages about them."""

import json
import re
from pathlib import Path

import pytest

import megaconv
from megatron_lite.data import preprocess
from tests.trainer.data.vocabularies import gpt2_files
from tests.trainer.loop.launches import LLAMA, launch, metrics, train

SAVED = f"pretrain {LLAMA} --save ckpt"


def refused(directory: Path, command: str) -> str:
    running = launch(directory, 1, command)
    assert running.wait() == [2], running.logs()
    (error,) = re.findall(r"^megatron-lite: error: (.*)$", running.log(0), re.MULTILINE)
    return str(error)


def test_iterations_are_iterations_also_after_the_batch_has_changed(tmp_path: Path) -> None:
    train(tmp_path, 1, f"{SAVED} --train-iters 2")
    command = f"{SAVED} --train-iters 4 --resume".replace(
        "--global-batch-size 4", "--global-batch-size 8"
    )
    ran = train(tmp_path, 1, command)
    assert "changed since the checkpoint: global_batch_size 4 -> 8" in ran.log(0)
    assert [(line["iteration"], line["consumed_samples"]) for line in metrics(tmp_path)] == [
        (1, 4),
        (2, 8),
        (3, 16),
        (4, 24),
    ]
    assert "step      4/4" in ran.log(0)
    # One warm-up step of four, then linear: as if all four had had this batch.
    assert [line["learning_rate"] for line in metrics(tmp_path)[2:]] == pytest.approx(
        [1e-3 * 2 / 3, 1e-3 / 3]
    )
    again = train(tmp_path, 1, command)
    assert "nothing left: the run has made its 4 steps, 24 samples" in again.log(0)


@pytest.mark.parametrize("kind", ["examples", "corpus"])
def test_other_data_under_the_same_name_are_pointed_out(kind: str, tmp_path: Path) -> None:
    flag = {"examples": "--finetune-data data.jsonl", "corpus": "--data-path data_text_document"}
    command = f"{SAVED} --resume --train-iters".replace("--mock-data", flag[kind])
    logs = []
    for steps, words in ((2, "1 2 3 4 5 6 7 8 9"), (3, "1 2 3 4 5 6 7 8 9"), (4, "1 2 3 4 9 8 7")):
        (tmp_path / "data.jsonl").write_text(f'{{"text": "{words}"}}\n' * 16)
        if kind == "corpus":
            preprocess.main(
                ["--input", str(tmp_path / "data.jsonl"), "--output-prefix", str(tmp_path / "data"),
                 "--tokenizer-type", "NullTokenizer", "--vocab-size", "59", "--overwrite"]
            )  # fmt: skip
        logs.append(train(tmp_path, 1, f"{command} {steps}").log(0))
    has_line = ["changed since the checkpoint: the training data" in log for log in logs]
    assert has_line == [False, False, True]


def test_a_run_of_samples_says_when_none_are_left(tmp_path: Path) -> None:
    command = f"{SAVED} --train-samples 8 --resume".replace("--lr-warmup-iters 1", "")
    for said in (False, True):
        assert ("nothing left" in train(tmp_path, 1, command).log(0)) == said


def test_a_batch_without_labels_is_skipped_and_counted(tmp_path: Path) -> None:
    """The first four examples are prompts whose completion has no tokens."""
    lines = [{"text": "1 2 3 4 5 6 7 8 9 10 11 12"}] * 8
    (tmp_path / "examples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = f"pretrain {LLAMA} --train-iters 3".replace(
        "--mock-data", "--finetune-data examples.jsonl"
    )
    running = launch(
        tmp_path,
        2,
        command.replace("--vocab-size 60", "--tokenizer-type NullTokenizer --vocab-size 59"),
        no_labels,
    )
    assert running.wait() == [0, 0], running.logs()
    assert "| 1 without labels" in running.log(0).splitlines()[-1]
    assert [line["grad_norm"] > 0 for line in metrics(tmp_path)] == [True, False, True]


def no_labels(rank: int) -> None:
    """Remove all labels of the second step, on every rank."""
    from dataclasses import replace
    from typing import Any

    import torch

    from megatron_lite.engine import Engine

    whole = Engine.train_step

    def train_step(self: Engine, microbatches: Any, *arguments: Any) -> Any:
        if self.step == 1:
            microbatches = [
                replace(batch, loss_mask=torch.zeros(batch.labels.shape)) for batch in microbatches
            ]
        return whole(self, microbatches, *arguments)

    Engine.train_step = train_step  # type: ignore[method-assign]


def test_a_checkpoint_is_not_clobbered_by_another_run(tmp_path: Path) -> None:
    train(tmp_path, 1, f"{SAVED} --train-iters 2")
    assert "--save ckpt holds the checkpoint of another run: --resume continues it" in refused(
        tmp_path, f"{SAVED} --train-iters 2"
    )


def test_one_directory_for_load_and_save_starts_a_run_and_continues_it(tmp_path: Path) -> None:
    """Megatron-LM's scripts expect this of the jobs of one run."""
    command = f"{SAVED} --load ckpt --train-iters 2 --exit-interval 1"
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "notes.txt").write_text("of the first job")
    error = refused(tmp_path, f"{command} --exit-on-missing-checkpoint")
    assert "--load ckpt: holds no checkpoint" in error
    assert "no checkpoint in ckpt yet: starting from random weights" in train(
        tmp_path, 1, command
    ).log(0)
    again = train(tmp_path, 1, f"{command} --exit-on-missing-checkpoint")
    assert "continuing after step 1" in again.log(0)
    error = refused(tmp_path, f"{command} --finetune")
    assert (
        "--load and --save are both ckpt, which holds a checkpoint: --resume continues that run"
        in error
    )
    assert "nothing left" in train(tmp_path, 1, f"{command} --finetune --resume").log(0)


def test_a_log_line_has_the_mean_of_its_interval(tmp_path: Path) -> None:
    command = f"pretrain {LLAMA} --train-iters 4"
    train(tmp_path / "each", 1, command)
    train(tmp_path / "pairs", 1, command.replace("--log-interval 1", "--log-interval 2"))
    each = [line["loss"] for line in metrics(tmp_path / "each")]
    pairs = [line["loss"] for line in metrics(tmp_path / "pairs")]
    assert pairs == pytest.approx([(each[0] + each[1]) / 2, (each[2] + each[3]) / 2], rel=1e-12)


def test_a_tokenizer_stays_with_the_checkpoint_however_it_was_given(tmp_path: Path) -> None:
    vocabulary, merges = gpt2_files(tmp_path / "words")
    (tmp_path / "words" / "LICENSE").write_text("of somebody else")
    (tmp_path / "examples.jsonl").write_text(
        '{"text": "a text of some words and some more words"}\n' * 8
    )
    command = f"{SAVED} --train-iters 2 --finetune-data examples.jsonl --vocab-file {vocabulary} --merge-file {merges}"
    ran = train(tmp_path, 1, command.replace("--mock-data ", "").replace("--vocab-size 60 ", ""))
    assert "without a tokenizer" not in ran.log(0)
    beside = {path.name for path in (tmp_path / "ckpt" / "hf").iterdir()}
    assert beside == {"config.json", "vocab.json", "merges.txt"}
    config = json.loads((tmp_path / "ckpt" / "hf" / "config.json").read_text())
    assert config["eos_token_id"] == json.loads(vocabulary.read_text())["<|endoftext|>"]
    assert megaconv.inspect(tmp_path / "ckpt").to_json()["iteration"] == 2
