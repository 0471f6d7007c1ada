"""`--guide`: answers before and after, the curve, the next commands, and the check of memory."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megaconv.errors import UsageError
from megaconv.model.fields import changed
from megatron_lite.data.tokenizer import NullTokenizer
from megatron_lite.loop import curve, memory_fit
from megatron_lite.loop.guide import next_commands
from megatron_lite.objectives.image_encoder import ImageEncoder
from megatron_lite.objectives.scored_model import scored
from megatron_lite.objectives.training_data import Setup
from megatron_lite.planning.memory import stage_memory
from megatron_lite.planning.stages import Described
from megatron_lite.planning.work import Work
from megatron_lite.settings.architecture import model_from_flags
from megatron_lite.settings.arguments import parse
from megatron_lite.settings.options import ModelOptions
from megatron_lite.settings.run_options import adapter_options, model_options, optimizer_options
from megatron_lite.settings.sizes import work_out
from tests.trainer import multimodal
from tests.trainer.data.chat_templates import MARKED, save_tokenizer
from tests.trainer.loop.launches import LLAMA, launch, train

LINES = [{"prompt": f"{n}?", "completion": "The fox jumps over the dog."} for n in range(8)]


def small_model(directory: Path) -> None:
    save_tokenizer(directory / "tokenizer", MARKED["chatml"])
    (directory / "lines.jsonl").write_text("\n".join(map(json.dumps, LINES)))
    model = LLAMA.replace("--vocab-size 60 ", "").replace("--seq-length 16 ", "--seq-length 64 ")
    train(directory, 1, f"pretrain {model} --tokenizer-model tokenizer --train-iters 2 --save base")


def test_the_short_form_trains_and_shows_what_comes_next(tmp_path: Path) -> None:
    small_model(tmp_path)
    command = "finetune base lines.jsonl --save tuned --epochs 30 --lr 3e-2 --pipeline-model-parallel-size 2"
    log = train(tmp_path, 2, command).log(0)
    assert "the first example:" in log
    answers = {}
    for line in log.splitlines():
        name, _, text = line.strip().partition(" ")
        if name in ("learned", "before", "after"):
            answers[name] = text.strip()
    assert answers["after"] == answers["learned"] != answers["before"]
    assert "loss of each step:" in log
    assert "megatron-lite chat --load tuned" in log
    assert "megaconv push tuned USER/NAME" in log


def test_the_short_form_continues_no_run_of_another_model_or_objective(tmp_path: Path) -> None:
    """It resumes without being asked to. It reported the other run's weights as its own, with exit status 0."""
    small_model(tmp_path)
    short = "--epochs 1 --lr 3e-2 --micro-batch-size 8"
    train(tmp_path, 1, f"finetune base lines.jsonl --save tuned {short}")
    (tmp_path / "base").rename(tmp_path / "other")
    other = launch(tmp_path, 1, f"finetune other lines.jsonl --save tuned {short}")
    assert other.wait() == [2], other.logs()
    assert "--save tuned: holds a run that started from base, not from other" in other.log(0)
    (tmp_path / "moved").mkdir()
    (tmp_path / "other").rename(tmp_path / "moved" / "base")
    pairs = launch(tmp_path, 1, f"finetune moved/base lines.jsonl --dpo --save tuned {short}")
    assert pairs.wait() == [2], pairs.logs()
    assert "--save tuned: holds a run without --dpo" in pairs.log(0)
    adapted = f"lines.jsonl --save adapted --lora-rank 2 {short}"
    train(tmp_path, 1, f"finetune moved/base {adapted}")
    shutil.copytree(tmp_path / "moved" / "base", tmp_path / "other")
    other = launch(tmp_path, 1, f"finetune other {adapted}")
    assert other.wait() == [2], other.logs()
    assert "--save adapted: holds a run that started from moved/base, not from other" in other.log(
        0
    )
    again = train(tmp_path, 1, f"finetune moved/base lines.jsonl --save tuned {short}")
    assert "nothing left: the run has made its" in again.log(0)


@pytest.mark.parametrize("lora", ["", "--lora-rank 4"])
def test_a_model_without_a_chat_template_is_not_sent_to_the_chat(lora: str) -> None:
    setup, _ = plain_setup(f"{LLAMA} {lora}")
    run: Any = setup
    talk = next(line for line in next_commands(run) if "--load" in line)
    loaded = "--load base --adapter tuned" if lora else "--load tuned"
    assert talk == f"  generate  megatron-lite generate {loaded} 'PROMPT'"
    template = replace(setup.settings.data, chat_template="template.jinja")
    run = replace(setup, settings=replace(setup.settings, data=template))
    assert f"  chat      megatron-lite chat {loaded}" in list(next_commands(run))


@pytest.mark.parametrize("lora", ["", "--lora-rank 4"])
def test_nobody_talks_to_a_reward_model(lora: str) -> None:
    setup, _ = plain_setup(f"{LLAMA} --finetune-data pairs.jsonl --reward-modeling {lora}")
    run: Any = replace(setup, config=scored(setup.config, "base"))
    names = [line.split()[0] for line in next_commands(run)]
    assert names == ["next:", "merge" if lora else "convert", "publish"]


@pytest.mark.parametrize("lora", ["", "--lora-rank 4"])
def test_an_embedding_model_embeds(lora: str) -> None:
    run: Any
    run, _ = plain_setup(f"{LLAMA} --finetune-data queries.jsonl --embedding {lora}")
    lines = list(next_commands(run))
    assert [line.split()[0] for line in lines] == [
        "next:", "merge" if lora else "convert", "embed", "publish",
    ]  # fmt: skip
    assert f"megatron-lite embed --load {'tuned-merged' if lora else 'tuned'} " in lines[2]


@pytest.mark.parametrize("lora", ["", "--lora-rank 4"])
def test_a_merged_model_needs_no_conversion(lora: str) -> None:
    """`megaconv merge` writes a Hugging Face directory."""
    run: Any
    run, _ = plain_setup(f"{LLAMA} {lora}")
    names = [line.split()[0] for line in next_commands(run)][2:]
    assert names == (["merge", "publish"] if lora else ["convert", "publish"])


def plain_setup(flags: str) -> tuple[Setup, ModelOptions]:
    """A run on one process."""
    words = f"{flags} --guide --load base --save tuned --train-iters 2 --no-check-for-nan-in-loss-and-grad"
    settings, _ = parse("finetune", words.split())
    config = model_from_flags(settings, 60)
    options = model_options(settings, {"hidden_dropout": 0.0, "attention_dropout": 0.0})
    place: Any = SimpleNamespace(world=1, device=torch.device("cpu"))
    setup = Setup(
        settings, config, NullTokenizer(59), work_out(settings, config, options, 1), place
    )
    return setup, options


def described(setup: Setup, options: ModelOptions) -> Described:
    return Described(setup.config, setup.sizes, options, optimizer_options(setup.settings))


def test_a_model_that_does_not_fit_is_refused_with_two_commands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setup, options = plain_setup(LLAMA)
    memory_fit.check_fits(setup, options, rows=1)
    monkeypatch.setattr(memory_fit, "free_bytes", lambda device: 550_000)
    with pytest.raises(UsageError) as refusal:
        memory_fit.check_fits(setup, options, rows=1)
    said = str(refusal.value)
    assert "`megatron-lite finetune base DATA --save tuned --lora-rank 16`" in said
    assert "or use 8 ranks with as much memory each: `torchrun --nproc-per-node 8 " in said
    assert "--data-parallel-sharding-strategy optim_grads_params`" in said
    monkeypatch.setattr(memory_fit, "free_bytes", lambda device: 1000)
    with pytest.raises(UsageError, match="take a smaller model, or devices with more memory"):
        memory_fit.check_fits(setup, options, rows=1)


def test_an_encoder_of_images_needs_memory_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    multimodal.create("qwen3_vl", tmp_path)
    setup, options = plain_setup(LLAMA)
    [texts] = stage_memory(described(setup, options))
    monkeypatch.setattr(memory_fit, "free_bytes", lambda device: texts.total)
    memory_fit.check_fits(setup, options, rows=1)
    with pytest.raises(UsageError, match="training all weights takes about"):
        memory_fit.check_fits(setup, options, rows=1, images=tmp_path)
    encoder = ImageEncoder(tmp_path, torch.device("cpu"), torch.float32)
    needed = texts.total + 4 * encoder.parameters
    monkeypatch.setattr(memory_fit, "free_bytes", lambda device: needed)
    memory_fit.check_fits(setup, options, rows=1, images=tmp_path)


def test_a_reward_model_needs_no_memory_for_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    setup, options = plain_setup(f"{LLAMA} --finetune-data pairs.jsonl --reward-modeling")
    setup = replace(setup, config=changed(setup.config, {"vocab": 20_000}))
    rewards = replace(setup, config=scored(setup.config, "base"))
    [needed] = stage_memory(replace(described(rewards, options), work=Work(rows=2)))
    monkeypatch.setattr(memory_fit, "free_bytes", lambda device: needed.total)
    memory_fit.check_fits(rewards, options, rows=2)
    with pytest.raises(UsageError, match=r"finetune base pairs.jsonl --reward-modeling --save"):
        memory_fit.check_fits(setup, options, rows=2)
    # The head for words: its weights with gradients and optimizer, the gradient of its matrix, and the normed states of
    # all tokens, of which a score needs one.
    [words] = stage_memory(replace(described(setup, options), work=Work(rows=2)))
    run = described(setup, options).run
    matrix = (run.vocab_rows - 1) * setup.config.hidden
    states = 2 * run.tokens * setup.config.hidden
    assert words.activations - needed.activations == (matrix + states) * 4
    assert words.kept - needed.kept == matrix * 16


def test_completions_and_the_reference_model_count_as_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setup, options = plain_setup(LLAMA)
    [alone] = stage_memory(described(setup, options))
    monkeypatch.setattr(memory_fit, "free_bytes", lambda device: alone.total)
    memory_fit.check_fits(setup, options, rows=1)
    with pytest.raises(UsageError):
        memory_fit.check_fits(setup, options, rows=8)
    diverging, _ = plain_setup(f"{LLAMA} --grpo --beta 0.1")
    with pytest.raises(UsageError):
        memory_fit.check_fits(diverging, options, rows=1)
    room = alone.kept + 8 * alone.activations + 4 * alone.parameters
    monkeypatch.setattr(memory_fit, "free_bytes", lambda device: room)
    memory_fit.check_fits(diverging, options, rows=8)


def test_adapters_that_do_not_fit_are_refused_with_a_command_for_more_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setup, options = plain_setup(f"{LLAMA} --lora-rank 4 --lora-dora")
    options = replace(options, lora=adapter_options(setup.settings))
    [needed] = stage_memory(described(setup, options))
    monkeypatch.setattr(memory_fit, "free_bytes", lambda device: needed.total)
    memory_fit.check_fits(setup, options, rows=1)
    monkeypatch.setattr(memory_fit, "free_bytes", lambda device: needed.total - 1)
    with pytest.raises(UsageError, match="training adapters takes about") as refusal:
        memory_fit.check_fits(setup, options, rows=1)
    said = str(refusal.value)
    assert "train adapters" not in said
    assert (
        "finetune base DATA --lora-dora --lora-rank 4 --save tuned --data-parallel-sharding-strategy"
        in said
    )


def test_the_curve_falls_from_left_to_right() -> None:
    lines = curve.draw([(step, 5.0 - step / 100) for step in range(1, 301)], width=30, height=6)
    plotted = [line.partition("│")[2] for line in lines[:6]]
    assert plotted[0].index("•") < plotted[-1].index("•")
    assert lines[0].startswith("   4.9")
    assert curve.draw([(1, 2.0)])[4].endswith("•")
