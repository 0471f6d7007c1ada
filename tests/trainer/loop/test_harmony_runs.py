"""Runs that train a GPT-OSS whose experts are in MXFP4, on chats and on pairs of answers: transformers computes the same
losses and rewards from the weights that a run saves, at any layout."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import megaconv
from tests.trainer import harmony_model
from tests.trainer.loop.launches import metrics, train

pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.oracle

COMMAND = (
    "finetune --load model --seq-length 448 --lr 1e-2 --lr-decay-style constant --log-interval 1 --global-batch-size 4 --fp32 "
    "--metrics-file metrics.jsonl --distributed-timeout-minutes 1 --train-iters 3 --save-interval 2 --eval-iters 0 --save ckpt"
)
LAYOUTS = {
    "one process": (1, ""),
    "tp 2, ep 2": (2, "--tp 2 --ep 2 --etp 1 --sequence-parallel"),
    "pp 2": (2, "--pp 2"),
    "cp 2": (2, "--cp 2"),
    "ep 2, pp 2": (4, "--ep 2 --pp 2 --use-distributed-optimizer"),
}
QUESTIONS = [{"role": "user", "content": f"Add {number}."} for number in range(4)]
BETA = 0.1


def answer(text: str, thinking: str) -> dict[str, str]:
    return {"role": "assistant", "content": text, "thinking": thinking}


CHOSEN = [answer(f"{number}!" * (number + 1), "I add.") for number in range(4)]
REJECTED = [answer("No", "Hm" * number) for number in range(1, 5)]
CHATS = [
    {"messages": [question, chosen]} for question, chosen in zip(QUESTIONS, CHOSEN, strict=True)
]
PAIRS = [
    {"prompt": [question], "chosen": [chosen], "rejected": [rejected]}
    for question, chosen, rejected in zip(QUESTIONS, CHOSEN, REJECTED, strict=True)
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("harmony")
    harmony_model.save(place / "plain")
    megaconv.convert(place / "plain", place / "model", saver="hf", quantize="mxfp4")
    return place / "model"


def run(base: Path, directory: Path, records: list[Any], layout: str, flags: str) -> dict[str, Any]:
    """Train three steps on all records; return the metrics of the third one."""
    directory.mkdir()
    (directory / "model").symlink_to(base)
    (directory / "data.jsonl").write_text("\n".join(map(json.dumps, records)))
    size, words = LAYOUTS[layout]
    train(directory, size, f"{COMMAND} --finetune-data data.jsonl {words} {flags}")
    last: dict[str, Any] = metrics(directory)[2]
    return last


def after_two_steps(directory: Path, *, adapted: bool) -> Any:
    """transformers' model of the weights after two steps."""
    saved = directory / "ckpt" / "iter_0000002"
    adapters = [str(saved)] if adapted else []
    source = directory / "model" if adapted else saved
    config = str(directory / "model")
    return opened(source, directory / "tuned", adapters=adapters, config=config)


def opened(source: Path, target: Path, **options: Any) -> Any:
    from transformers import GptOssForCausalLM

    megaconv.convert(source, target, saver="hf", dtype="float32", **options)
    return GptOssForCausalLM.from_pretrained(target).eval()


def log_probabilities(
    model: Any, tokenizer: Any, question: dict[str, str], said: dict[str, str]
) -> torch.Tensor:
    """Those of each token that the assistant wrote."""
    prompt = tokenizer.apply_chat_template([question], add_generation_prompt=True)["input_ids"]
    whole = torch.tensor([tokenizer.apply_chat_template([question, said])["input_ids"]])
    assert whole[0, : len(prompt)].tolist() == prompt
    with torch.no_grad():
        logits = model(whole[:, :-1]).logits.float().log_softmax(-1)
    found: torch.Tensor = logits.gather(-1, whole[:, 1:, None])[0, len(prompt) - 1 :, 0]
    return found


REWARDS = """
def brief(completions, completion_ids, **columns):
    assert all(set(message) <= {"role", "content", "reasoning_content"} for message, in completions)
    return [-len(message["content"]) / len(ids) for (message,), ids in zip(completions, completion_ids)]
"""


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["", "--lora-rank 4"])
def test_rewards_of_completions_are_the_same_at_every_layout(
    flags: str, base: Path, tmp_path: Path
) -> None:
    """Tensor parallelism of a mixture of experts needs sequence parallelism, which --grpo doesn't have."""
    (tmp_path / "rewards.py").write_text(REWARDS)
    words = (
        f"--grpo --reward {tmp_path}/rewards.py:brief --max-completion-length 6 --num-generations 4 --beta 0.04 "
        f"--lr 1e-3 {flags}"
    )
    prompts = [{"prompt": [question]} for question in QUESTIONS]
    alone = run(base, tmp_path / "alone", prompts, "one process", words)
    for layout in ("pp 2", "ep 2, pp 2"):
        found = run(base, tmp_path / layout.replace(" ", ""), prompts, layout, words)
        for name in ("loss", "reward", "kl", "grad_norm"):
            assert found[name] == pytest.approx(alone[name], rel=1e-3, abs=1e-5)


CASES = [("one process", ""), ("tp 2, ep 2", "--lora-rank 4")]
FURTHER = [
    (layout, flags)
    for layout in LAYOUTS
    for flags in ("", "--lora-rank 4")
    if (layout, flags) not in CASES
]


@pytest.mark.parametrize(
    ("layout", "flags"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in FURTHER)],
)
def test_rewards_of_pairs_are_those_of_transformers(
    layout: str, flags: str, base: Path, tmp_path: Path
) -> None:
    found = run(base, tmp_path / "run", PAIRS, layout, f"--dpo --dpo-beta {BETA} {flags}")
    tuned = after_two_steps(tmp_path / "run", adapted=bool(flags))
    reference = opened(base, tmp_path / "reference")
    tokenizer = harmony_model.save_tokenizer(tmp_path / "tokenizer")
    for name, answers in (("chosen", CHOSEN), ("rejected", REJECTED)):
        rewards = [
            (
                log_probabilities(tuned, tokenizer, question, said).sum()
                - log_probabilities(reference, tokenizer, question, said).sum()
            )
            for question, said in zip(QUESTIONS, answers, strict=True)
        ]
        mean = BETA * float(torch.stack(rewards).mean())
        assert abs(mean) > 0.01
        assert found[f"{name}_reward"] == pytest.approx(mean, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(
    ("layout", "flags"),
    [CASES[1], *(pytest.param(*case, marks=pytest.mark.slow) for case in (CASES[0], *FURTHER))],
)
def test_losses_of_chats_are_those_of_transformers(
    layout: str, flags: str, base: Path, tmp_path: Path
) -> None:
    found = run(base, tmp_path / "run", CHATS, layout, flags)
    tuned = after_two_steps(tmp_path / "run", adapted=bool(flags))
    tokenizer = harmony_model.save_tokenizer(tmp_path / "tokenizer")
    each = [
        log_probabilities(tuned, tokenizer, question, said)
        for question, said in zip(QUESTIONS, CHOSEN, strict=True)
    ]
    assert found["loss"] == pytest.approx(-float(torch.cat(each).mean()), rel=1e-4)
