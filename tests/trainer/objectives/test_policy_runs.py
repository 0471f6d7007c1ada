"""Runs on rewards: they learn, go on to the same bits, and equal one process at other layouts."""

import json
from pathlib import Path

import pytest

import megaconv
from tests.trainer.loop.launches import launch, train
from tests.trainer.loop.test_manners import metrics, refused

BASE = Path(__file__).parents[2] / "fixtures" / "peft-llama-all-linear" / "base"
WORDS = (
    f"finetune --load {BASE} --finetune-data prompts.jsonl --grpo --reward rewards.py:sevens --max-completion-length 8 --lr 1e-2 "
    "--lr-decay-style constant --log-interval 1 --global-batch-size 4 --eval-iters 0 --metrics-file metrics.jsonl "
    "--distributed-timeout-minutes 1 --make-vocab-size-divisible-by 2 --fp32 --save ckpt"
)
REWARDS = '''
def sevens(completions, id, **columns):
    """The share of a completion's tokens that are 7."""
    assert len(id) == len(completions)
    return [text.split().count("7") / max(len(text.split()), 1) for text in completions]


def wrong(completions, **columns):
    return []
'''


def write_task(directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "rewards.py").write_text(REWARDS)
    records = [{"prompt": f"{n} 2", "id": n} for n in range(7, 15)]
    (directory / "prompts.jsonl").write_text("\n".join(map(json.dumps, records)))


def figures(directory: Path) -> list[tuple[float, ...]]:
    names = ("loss", "reward", "kl", "completion_length", "grad_norm")
    return [tuple(line.get(name, 0.0) for name in names) for line in metrics(directory)]


def test_a_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    command = f"{WORDS} --num-generations 4 --num-iterations 2 --beta 0.1 --train-iters 2"
    for name in ("whole", "same"):
        write_task(tmp_path / name)
    log = train(tmp_path / "whole", 1, command).log(0)
    assert "8 prompts, 4 completions each of at most 8 tokens: 16 completions a step" in log
    assert "| groups without signal " in log
    train(tmp_path / "same", 1, f"{command} --exit-interval 1")
    train(tmp_path / "same", 1, f"{command} --resume")
    assert figures(tmp_path / "same") == figures(tmp_path / "whole")
    assert megaconv.fingerprint(tmp_path / "same" / "ckpt") == megaconv.fingerprint(
        tmp_path / "whole" / "ckpt"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "layout", "adapters"),
    [
        (2, "", ""),
        (2, "--data-parallel-sharding-strategy optim_grads_params", ""),
        (2, "--tp 2", ""),
        (2, "--pp 2", ""),
        (2, "--use-distributed-optimizer", "--lora-rank 4"),
        (2, "--tp 2", "--lora-rank 4"),
    ],
)
def test_a_run_at_a_layout_is_that_of_one_process(
    size: int, layout: str, adapters: str, tmp_path: Path
) -> None:
    command = (
        f"{WORDS} --num-generations 4 --num-iterations 2 --beta 0.1 --train-iters 3 {adapters}"
    )
    for name in ("alone", "several"):
        write_task(tmp_path / name)
    train(tmp_path / "alone", 1, command)
    train(tmp_path / "several", size, f"{command} {layout}")
    for one, other in zip(figures(tmp_path / "alone"), figures(tmp_path / "several"), strict=True):
        assert other == pytest.approx(one, rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_the_reward_rises_from_chance_to_nearly_one(tmp_path: Path) -> None:
    write_task(tmp_path)
    train(tmp_path, 1, f"{WORDS} --micro-batch-size 4 --train-iters 40")
    rewards = [line["reward"] for line in metrics(tmp_path)]
    assert rewards[0] < 0.05
    assert sum(rewards[-5:]) / 5 > 0.95


@pytest.mark.slow
def test_a_reward_that_returns_too_few_numbers_ends_the_run_with_one_line(tmp_path: Path) -> None:
    write_task(tmp_path)
    running = launch(tmp_path, 1, f"{WORDS.replace(':sevens', ':wrong')} --train-iters 1")
    assert running.wait() == [1]
    assert "--reward rewards.py:wrong: returned 0 rewards for 32 completions" in running.log(0)
    assert "Traceback" not in running.log(0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--beta 0.1", "--beta requires --grpo"),
        ("--grpo --finetune-data p.jsonl", "--grpo needs --reward FILE.py:FUNCTION"),
        ("--grpo --finetune-data p.jsonl --reward a.py:f --dpo", "--grpo and --dpo are two objectives"),
        ("--grpo --finetune-data p.jsonl --reward a.py:f --sequence-parallel --tp 2", "not with --sequence-parallel; leave it out"),
    ],
)  # fmt: skip
def test_flags_that_contradict_each_other_are_refused(
    flags: str, words: str, tmp_path: Path
) -> None:
    assert words in refused(tmp_path, f"finetune --load {BASE} --train-iters 1 {flags}")
