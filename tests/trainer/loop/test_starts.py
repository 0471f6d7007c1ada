"""The starts of a run: checkpoints of NVIDIA's Megatron, of Hugging Face and of our own; and the refused ones."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megaconv
from megatron_lite.loop import prepare
from megatron_lite.settings.arguments import parse
from tests.models import write_llama
from tests.trainer.loop.launches import LLAMA, launch, metrics, train

FIXTURES = Path(__file__).parents[2] / "fixtures"
WORDS = "--mock-data --seq-length 16 --lr 1e-3 --log-interval 1 --eval-iters 0 --global-batch-size 4 --metrics-file metrics.jsonl"


@pytest.mark.parametrize(
    ("fixture", "size", "layout"),
    [
        (
            "core-te-llama-distopt-tp2dp2/checkpoint",
            2,
            "--tensor-model-parallel-size 2 --use-distributed-optimizer",
        ),
        ("dist-v0.15-llama-optim-dp2-fully_sharded_model_space", 1, ""),
    ],
)
def test_a_run_of_nvidias_megatron_goes_on_with_its_optimizer(
    fixture: str, size: int, layout: str, tmp_path: Path
) -> None:
    checkpoint = FIXTURES / fixture
    iteration = megaconv.inspect(checkpoint).to_json()["iteration"]
    command = f"pretrain --load {checkpoint} {WORDS} --bf16 --save ckpt --train-iters {iteration + 2} {layout}"
    ran = train(tmp_path, size, command)
    assert "with optimizer state" in ran.log(0)
    assert f"continuing after step {iteration}, " in ran.log(0)
    found = megaconv.inspect(tmp_path / "ckpt").to_json()
    assert (found["iteration"], found["optimizer"]["step"]) == (iteration + 2, iteration + 2)


def test_finetuning_takes_weights_alone_and_a_contradiction_is_refused(tmp_path: Path) -> None:
    train(tmp_path, 1, f"pretrain {LLAMA} --train-iters 2 --save ckpt")
    ran = train(
        tmp_path,
        2,
        f"finetune --load ckpt {WORDS} --train-iters 1 --save tuned --pipeline-model-parallel-size 2",
    )
    assert "without optimizer state" in ran.log(0)
    assert "continuing" not in ran.log(0)
    assert (tmp_path / "tuned" / "latest_checkpointed_iteration.txt").read_text() == "1"
    for command, message in (
        (
            f"finetune --load ckpt {WORDS} --train-iters 1 --num-layers 5",
            "--num-layers 5 contradicts the checkpoint ckpt, which has 4",
        ),
        (f"finetune {WORDS} --train-iters 1", "finetune needs --load"),
        (
            f"pretrain --load ckpt {WORDS} --train-iters 3 --tokenizer-type NullTokenizer --vocab-size 60",
            "the tokenizer has 61 tokens, the model 60",
        ),
    ):
        running = launch(tmp_path, 1, command)
        assert running.wait() == [2]
        assert message in running.log(0)


@pytest.mark.parametrize("form", ["hugging face", "torch", "torch_dist"])
def test_a_model_that_no_run_has_trained_is_trained_for_all_steps(
    form: str, tmp_path: Path
) -> None:
    hf = write_llama(tmp_path / "hf", layers=2)
    if form != "hugging face":
        megaconv.convert(hf, tmp_path / "base", saver="core", ckpt_format=form)
    base = hf if form == "hugging face" else tmp_path / "base"
    ran = train(tmp_path, 1, f"pretrain --load {base} {WORDS} --save ckpt --train-iters 6")
    assert "continuing after step" not in ran.log(0)
    steps = [line["iteration"] for line in metrics(tmp_path)]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert megaconv.inspect(tmp_path / "ckpt").to_json()["consumed_train_samples"] == 24


def test_changes_of_a_continued_run_are_those_of_its_kind_of_model(tmp_path: Path) -> None:
    """Megatron's arguments hold T5's `vocab_extra_ids` and `decoder_seq_length` in a Llama too, with other defaults."""
    shutil.copytree(FIXTURES / "core-llama-optim-tp2pp2" / "checkpoint", tmp_path / "base")
    ran = train(tmp_path, 1, f"pretrain --load base {WORDS} --train-iters 3").log(0)
    changes = re.findall(r"changed since the checkpoint: (\w+)", ran)
    assert "mock_data" in changes
    assert not {"vocab_extra_ids", "decoder_seq_length"} & set(changes)


def test_a_release_of_megatron_begins_a_run_whatever_iteration_it_names(tmp_path: Path) -> None:
    """Megatron takes a release's weights, and no optimizer, scheduler or iteration."""
    shutil.copytree(FIXTURES / "core-llama-optim-tp2pp2" / "checkpoint", tmp_path / "base")
    (tmp_path / "base" / "iter_0000002").rename(tmp_path / "base" / "release")
    (tmp_path / "base" / "latest_checkpointed_iteration.txt").write_text("release")
    ran = train(tmp_path, 1, f"pretrain --load base {WORDS} --save ckpt --train-iters 2")
    assert "without optimizer state" in ran.log(0)
    assert "continuing after step" not in ran.log(0)
    found = megaconv.inspect(tmp_path / "ckpt").to_json()
    assert (found["iteration"], found["optimizer"]["step"]) == (2, 2)


def test_a_runs_own_release_begins_its_data_anew(tmp_path: Path) -> None:
    train(tmp_path, 1, f"pretrain {LLAMA} --train-iters 3 --save run")
    megaconv.convert(tmp_path / "run", tmp_path / "base", saver="core", release=True)
    train(tmp_path, 1, f"pretrain --load base {WORDS} --save ckpt --train-iters 2")
    found = megaconv.inspect(tmp_path / "ckpt").to_json()
    assert (found["iteration"], found["consumed_train_samples"]) == (2, 8)


def precision_of(log: str) -> str:
    """The precision in the log's second line: `llama, 4 layers of 32, bfloat16; ...`."""
    found = re.search(r"^llama, 4 layers of 32, (\w+);", log, re.MULTILINE)
    assert found is not None, log
    return found[1]


@pytest.mark.parametrize("form", ["torch_dist", "torch"])
def test_a_run_goes_on_in_its_precision_unless_a_flag_says_another(
    form: str, tmp_path: Path
) -> None:
    begins = f"pretrain {LLAMA} --ckpt-format {form} --train-iters"
    train(tmp_path, 1, f"{begins} 2 --bf16 --save ckpt")

    resumed = train(tmp_path, 1, f"{begins} 3 --save ckpt --resume").log(0)
    assert precision_of(resumed) == "bfloat16"
    assert "--bf16: the checkpoint's precision" in resumed
    assert "changed since the checkpoint" not in resumed

    loaded = train(tmp_path, 1, f"pretrain --load ckpt {WORDS} --train-iters 4").log(0)
    assert precision_of(loaded) == "bfloat16"

    changed = train(
        tmp_path, 1, f"pretrain --load ckpt {WORDS} --train-iters 4 --fp32 --save in-fp32"
    ).log(0)
    assert precision_of(changed) == "float32"
    assert "changed since the checkpoint: precision bf16 -> fp32" in changed

    back = train(tmp_path, 1, f"pretrain --load in-fp32 {WORDS} --train-iters 5 --bf16").log(0)
    assert "changed since the checkpoint: precision fp32 -> bf16" in back


def test_a_run_in_16_bits_goes_on_from_all_bits_of_fp32_weights(tmp_path: Path) -> None:
    """The weights of an fp32 checkpoint are its masters."""
    train(tmp_path, 1, f"pretrain {LLAMA} --train-iters 2 --bf16 --save run")
    megaconv.convert(tmp_path / "run", tmp_path / "in-fp32", saver="core", dtype="fp32")
    for start in ("run", "in-fp32"):
        goes_on = f"pretrain --load {start} {WORDS} --train-iters 3 --bf16 --save from-{start}"
        train(tmp_path, 1, goes_on)
    assert megaconv.fingerprint(tmp_path / "from-in-fp32") == megaconv.fingerprint(
        tmp_path / "from-run"
    )


def test_a_run_that_continues_without_fp8_says_so(tmp_path: Path) -> None:
    command = f"pretrain {LLAMA} --bf16 --save ckpt --resume --train-iters"
    train(tmp_path, 1, f"{command} 2 --fp8-format hybrid")
    assert "changed since the checkpoint: fp8_format hybrid -> None" in train(
        tmp_path, 1, f"{command} 3"
    ).log(0)


@pytest.mark.parametrize("slowly", [True, False])
def test_bf16_on_a_processor_without_it_is_pointed_out(
    monkeypatch: pytest.MonkeyPatch, slowly: bool
) -> None:
    monkeypatch.setattr(prepare, "lacks_bf16", lambda device: slowly)
    said: list[str] = []
    place: Any = SimpleNamespace(device=torch.device("cpu"), say=said.append)
    settings, _ = parse("finetune", ["--load", "base", "--finetune-data", "chats.json"])
    chosen = prepare._with_precision(settings, "bfloat16", place)
    assert chosen.precision.bf16
    assert ("no instructions for bf16" in said[0]) == slowly
