"""What a run can start from: checkpoints of NVIDIA's Megatron, of Hugging Face, and our own; and what it refuses."""

from pathlib import Path

import pytest

import megaconv
from tests.trainer.loop.launches import LLAMA, launch, train

FIXTURES = Path(__file__).parents[2] / "fixtures"
WORDS = "--mock-data --seq-length 16 --lr 1e-3 --log-interval 1 --eval-iters 0 --global-batch-size 4 --metrics-file metrics.jsonl"


@pytest.mark.parametrize(
    ("fixture", "size", "layout"),
    [
        ("core-te-llama-distopt-tp2dp2/checkpoint", 2, "--tensor-model-parallel-size 2 --use-distributed-optimizer"),
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
        tmp_path, 2, f"finetune --load ckpt {WORDS} --train-iters 1 --save tuned --pipeline-model-parallel-size 2"
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
