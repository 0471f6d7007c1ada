"""Runs on rewards: they learn, go on to the same bits, and equal one process at other layouts."""

import json
from pathlib import Path
from statistics import mean

import pytest
import torch

import megaconv
from megatron_lite.settings.arguments import parse
from megatron_lite.settings.completion_flags import limits_without_effect
from tests.trainer.inference.conversations import save
from tests.trainer.loop.launches import launch, metrics, train
from tests.trainer.loop.test_manners import refused

BASE = Path(__file__).parents[2] / "fixtures" / "peft-llama-all-linear" / "base"
WORDS = (
    f"finetune --load {BASE} --finetune-data prompts.jsonl --grpo --reward rewards.py:sevens --max-completion-length 8 --lr 1e-2 "
    "--lr-decay-style constant --log-interval 1 --global-batch-size 4 --eval-iters 0 --metrics-file metrics.jsonl "
    "--distributed-timeout-minutes 1 --make-vocab-size-divisible-by 2 --fp32 --save ckpt"
)
GSPO = "--loss-type grpo --importance-sampling-level sequence --epsilon 1e-3"
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
    ("size", "layout", "further"),
    [
        (2, "", ""),
        (2, "--data-parallel-sharding-strategy optim_grads_params", ""),
        (2, "--tp 2", ""),
        (2, "--pp 2", ""),
        (2, "--use-distributed-optimizer", "--lora-rank 4"),
        (2, "--tp 2", "--lora-rank 4 --lora-modules-to-save embed_tokens lm_head"),
        (2, "--pp 2", "--lora-rank 4 --lora-trainable-token-indices 5-40"),
        (2, "--tp 2", "--lora-rank 4 --lora-dora"),
        (2, "--data-parallel-sharding-strategy optim_grads_params", "--lora-rank 4 --lora-dora"),
        (2, "", f"{GSPO} --mask-truncated-completions --micro-batch-size 2"),
        (2, "--pp 2", f"{GSPO} --mask-truncated-completions"),
        (2, "--tp 2", "--loss-type cispo"),
        (2, "--pp 2", "--loss-type sapo"),
    ],
)
def test_a_run_at_a_layout_is_that_of_one_process(
    size: int, layout: str, further: str, tmp_path: Path
) -> None:
    command = f"{WORDS} --num-generations 4 --num-iterations 2 --beta 0.1 --train-iters 3 {further}"
    for name in ("alone", "several"):
        write_task(tmp_path / name)
    train(tmp_path / "alone", 1, command)
    train(tmp_path / "several", size, f"{command} {layout}")
    for one, other in zip(figures(tmp_path / "alone"), figures(tmp_path / "several"), strict=True):
        assert other == pytest.approx(one, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("ratios", [GSPO, "--loss-type dapo --beta 0.1"])
def test_a_step_without_a_completion_that_ends_changes_nothing(ratios: str, tmp_path: Path) -> None:
    """Without a label that counts, tokens have no share of clipped ones and no divergence."""
    write_task(tmp_path)
    short = WORDS.replace("--max-completion-length 8", "--max-completion-length 1")
    masked = f"{ratios} --mask-truncated-completions --weight-decay 0"
    train(tmp_path, 1, f"{short} --num-generations 2 --train-iters 1 {masked}")
    (found,) = metrics(tmp_path)
    assert found["truncated"] == 1
    assert (
        found["loss"] == found["grad_norm"] == found.get("clip_ratio", 0) == found.get("kl", 0) == 0
    )
    trained, before = (megaconv.open(place) for place in (tmp_path / "ckpt", BASE))
    for name in before.tensors:
        assert torch.equal(trained.load(name), before.load(name).float()), name


def test_the_mean_reward_of_several_steps_counts_completions_that_are_masked(
    tmp_path: Path,
) -> None:
    """Some steps have a completion that ends, and others don't. The mean loss is over the former."""
    short = WORDS.replace("--global-batch-size 4", "--global-batch-size 1")
    command = f"{short} --num-generations 2 --train-iters 8 --mask-truncated-completions --lr 1e-9"
    for name, interval in (("each", 1), ("all", 8)):
        write_task(tmp_path / name)
        every = command.replace("--log-interval 1", f"--log-interval {interval}")
        log = train(tmp_path / name, 1, every).log(0)
    each, (together,) = metrics(tmp_path / "each"), metrics(tmp_path / "all")
    masked = [line for line in each if line["truncated"] == 1]
    assert 0 < len(masked) < len(each)
    assert f"| {len(masked)} without labels" in log
    for figure in ("reward", "completion_length", "truncated", "frac_reward_zero_std"):
        assert together[figure] == pytest.approx(mean(line[figure] for line in each)), figure
    learned = [line["loss"] for line in each if line["truncated"] < 1]
    assert together["loss"] == pytest.approx(mean(learned))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--epsilon 0.3", "--epsilon"),
        ("--delta 2 --epsilon 0.2", "--delta and --epsilon"),
        ("--epsilon 0.2 --epsilon-high 0.3", "--epsilon and --epsilon-high"),
        ("--loss-type cispo --epsilon-high 4", "--epsilon-high"),
        ("--loss-type cispo --epsilon-high 0.5", ""),
        ("--epsilon 0.3 --num-iterations 2", ""),
        ("", ""),
    ],
)  # fmt: skip
def test_limits_of_ratios_that_are_always_1_are_named(flags: str, named: str) -> None:
    words = f"--load {BASE} --finetune-data p.jsonl --grpo --reward r.py:f {flags}"
    settings, _ = parse("finetune", words.split())
    unused = limits_without_effect(settings)
    assert " and ".join(unused) == named


def test_a_run_names_a_limit_without_effect(tmp_path: Path) -> None:
    write_task(tmp_path)
    log = train(tmp_path, 1, f"{WORDS} --num-generations 2 --train-iters 1 --epsilon 0.3").log(0)
    assert "notice: --epsilon has no effect with --num-iterations 1: completions are learned" in log


def test_an_evaluation_without_a_completion_that_ends_has_rewards(tmp_path: Path) -> None:
    write_task(tmp_path)
    short = WORDS.replace("--max-completion-length 8", "--max-completion-length 1")
    valid = "--valid-finetune-data prompts.jsonl --eval-interval 1 --eval-iters 1"
    command = f"{short} --mask-truncated-completions --temperature 1e-3 --train-iters 1 {valid}"
    log = train(tmp_path, 1, command.replace("--eval-iters 0", "")).log(0)
    assert "validation: no label counts, so there is no loss | reward " in log
    found = metrics(tmp_path)[-1]
    assert found["validation_truncated"] == 1
    assert "validation_reward" in found
    assert "validation_loss" not in found


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
    running = launch(tmp_path, 2, f"{WORDS.replace(':sevens', ':wrong')} --train-iters 1")
    assert running.wait() == [1, 1]
    assert "--reward rewards.py:wrong: returned 0 rewards for 32 completions" in running.log(0)
    assert running.logs().count("error:") == 1
    assert "Traceback" not in running.logs()


CHATS = [
    {"prompt": "What is 3?", "answer": "3"},
    {"prompt": [{"role": "user", "content": "Say 4"}], "answer": "4"},
]
JUDGES = '''
def vowels(prompts, completions, answer):
    """Vowels of completions, which have the form of their prompts."""
    assert all(isinstance(p, str) == isinstance(c, str) for p, c in zip(prompts, completions))
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    assert not any("<|end|>" in text for text in texts)
    return [sum(letter in "aeiou" for letter in text) for text in texts]


def brief(completion_ids):
    return [-len(ids) / 10 for ids in completion_ids]
'''


@pytest.mark.slow
@pytest.mark.oracle
@pytest.mark.parametrize("layout", ["--ep 2", "--pp 2"])
def test_a_mixture_answers_chats_that_several_functions_judge(layout: str, tmp_path: Path) -> None:
    """The run has evaluations, and fewer prompts than a batch."""
    save(tmp_path / "mixture", "mixtral", num_local_experts=4, num_experts_per_tok=2)
    lines = "\n".join(map(json.dumps, CHATS))
    command = (
        "finetune --load ../mixture --finetune-data prompts.jsonl --valid-finetune-data prompts.jsonl --grpo --lr 1e-3 --fp32 "
        "--reward judges.py:vowels judges.py:brief --reward-weights 1 0.5 --num-generations 4 --max-completion-length 8 "
        "--beta 0.1 --temperature 0.9 --global-batch-size 4 --train-iters 2 --eval-interval 1 --log-interval 1 "
        "--metrics-file metrics.jsonl --distributed-timeout-minutes 1"
    )
    found = []
    for size, flags in ((1, ""), (2, layout)):
        directory = tmp_path / str(size)
        directory.mkdir()
        (directory / "judges.py").write_text(JUDGES)
        (directory / "prompts.jsonl").write_text(lines)
        train(directory, size, f"{command} {flags}")
        found.append(metrics(directory))
    names = {"loss", "reward", "reward_vowels", "reward_brief", "kl", "grad_norm"}
    names |= {"validation_loss", "validation_reward_vowels", "validation_kl"}
    seen: set[str] = set()
    for alone, several in zip(*found, strict=True):
        for name in names & alone.keys():
            assert several[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-5), name
        seen |= alone.keys()
        if "reward" in alone:
            weighted = alone["reward_vowels"] + 0.5 * alone["reward_brief"]
            assert alone["reward"] == pytest.approx(weighted)
    assert names <= seen


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--beta 0.1", "--beta requires --grpo"),
        ("--grpo --finetune-data p.jsonl", "--grpo needs --reward FILE.py:FUNCTION"),
        ("--grpo --finetune-data p.jsonl --reward a.py:f --delta 1.2", "--delta 1.2 must be more than 1.2"),
        ("--grpo --finetune-data p.jsonl --reward a.py:f --delta 3 --loss-type sapo", "leave it out with --loss-type sapo"),
        ("--grpo --finetune-data p.jsonl --reward a.py:f --epsilon 0.1 --loss-type cispo", "--epsilon limits ratios that are"),
        ("--grpo --finetune-data p.jsonl --reward a.py:f --epsilon-high 1 --loss-type sapo", "--epsilon-high limits ratios that are"),
        ("--grpo --finetune-data p.jsonl --reward a.py:f --sapo-temperature-neg 2", "is a number of --loss-type sapo"),
        (
            "--grpo --finetune-data p.jsonl --reward a.py:f --loss-type sapo --sapo-temperature-pos 0",
            "--sapo-temperature-pos 0 must be more than 0",
        ),
        (
            "--grpo --finetune-data p.jsonl --reward a.py:f --loss-type cispo --epsilon-high 0",
            "give more than 0, such as 5",
        ),
        ("--grpo --finetune-data p.jsonl --reward a.py:f --dpo", "--grpo and --dpo are two objectives"),
        ("--grpo --finetune-data p.jsonl --reward a.py:f --sequence-parallel --tp 2", "not with --sequence-parallel; leave it out"),
        (
            "--grpo --finetune-data p.jsonl --reward a.py:f --moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity",
            "not with --moe-pad-expert-input-to-capacity; leave it out",
        ),
        (
            "--grpo --finetune-data p.jsonl --reward a.py:f --ep 2 --moe-token-dispatcher-type allgather",
            "completions of --grpo differ in length; take alltoall",
        ),
    ],
)  # fmt: skip
def test_flags_that_contradict_each_other_are_refused(
    flags: str, words: str, tmp_path: Path
) -> None:
    assert words in refused(tmp_path, f"finetune --load {BASE} --train-iters 1 {flags}")
