"""Runs of reward modeling: what they say, save and refuse; they go on to the same bits, and transformers gives the same scores."""

import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import megaconv
from megaconv.checkpoint import open_checkpoint
from megaconv.errors import NotExpressible
from megaconv.model.fields import changed
from megatron_lite.checkpoint.restore import open_weights
from megatron_lite.data.finetuning.examples import Examples
from megatron_lite.data.finetuning.pair_dataset import pair_dataset
from megatron_lite.data.finetuning.pieces import scored_pairs_for, without_end
from megatron_lite.data.finetuning.preview import preview
from megatron_lite.objectives.score_head import with_score_head
from megatron_lite.objectives.scored_pairs import ScoredPairs
from megatron_lite.settings.config import Settings
from tests.megatron_oracle import Megatron
from tests.trainer.loop.launches import DEEPSEEK, LLAMA, metrics, train
from tests.trainer.loop.test_manners import refused
from tests.trainer.loop.test_runs import kill_and_resume

PEFT = Path(__file__).parents[2] / "fixtures"
BASE = PEFT / "peft-llama-all-linear" / "base"
WORDS = (
    "finetune --finetune-data pairs.jsonl --reward-modeling --seq-length 16 --lr 1e-2 --lr-decay-style constant --log-interval 1 "
    "--global-batch-size 8 --metrics-file metrics.jsonl --distributed-timeout-minutes 1 --make-vocab-size-divisible-by 2 --fp32"
)
FIGURES = ("loss", "chosen_score", "rejected_score", "score_margin", "score_accuracy")
COUNT = 8
MARGINS = [0.0, 0.5, 1, 2.5, 0.25, -0.5, 3.0, 1.5]


def write_pairs(directory: Path, margins: Sequence[object] | None = None) -> None:
    directory.mkdir(exist_ok=True)
    records: list[dict[str, Any]] = [
        {"prompt": f"{n} 2", "chosen": f"3 {n} 4", "rejected": f"{n} 5"}
        for n in range(7, 7 + COUNT)
    ]
    for record, margin in zip(records, margins or (), strict=False):
        record["margin"] = margin
    (directory / "pairs.jsonl").write_text("\n".join(map(json.dumps, records)))


def figures(directory: Path) -> list[list[float]]:
    return [[line[name] for name in FIGURES] for line in metrics(directory) if "loss" in line]


def scores_of_transformers(model: Path, rows: list[list[int]]) -> list[float]:
    """The scores of one padded batch."""
    from transformers import AutoModelForSequenceClassification

    read = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32).eval()
    padding, longest = read.config.pad_token_id, max(map(len, rows))
    batch = [[*row, *[padding] * (longest - len(row))] for row in rows]
    visible = [[1] * len(row) + [0] * (longest - len(row)) for row in rows]
    with torch.no_grad():
        scores = read(torch.tensor(batch), attention_mask=torch.tensor(visible)).logits
    found: list[float] = scores.squeeze(1).tolist()
    return found


def merge_reward_model(run: Path, iteration: int, merged: Path) -> None:
    """Merge a run's adapter into BASE, as docs/reward-models.md says: the token of padding is that of the run."""
    adapter = run / f"iter_{iteration:07}"
    megaconv.convert(BASE, merged, saver="hf", adapters=[str(adapter)], dtype="float32")
    described = json.loads((merged / "config.json").read_text())
    described["pad_token_id"] = json.loads((run / "hf/config.json").read_text())["pad_token_id"]
    (merged / "config.json").write_text(json.dumps(described))


@pytest.mark.oracle
@pytest.mark.parametrize("ckpt_format", ["torch", "torch_dist"])
def test_megatron_core_loads_a_trained_reward_model_and_gives_its_scores(
    ckpt_format: str, megatron: Megatron, tmp_path: Path
) -> None:
    from transformers import AutoModelForSequenceClassification

    write_pairs(tmp_path)
    words = f"{WORDS} --load {BASE} --save ckpt --train-iters 2 --tensor-model-parallel-size 2"
    form = f"--ckpt-format {ckpt_format} --no-save-optim --transformer-impl local"
    train(tmp_path, 2, f"{words} {form}")
    megaconv.convert(tmp_path / "ckpt", tmp_path / "hf", saver="hf")
    model: Any = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "hf", dtype=torch.float32
    ).eval()
    tokens = torch.arange(2, 26).view(2, 12)
    with torch.no_grad():
        expected = model.score(model.base_model(input_ids=tokens).last_hidden_state)
    assert expected.std() > 0.1
    found = megatron.logits(tmp_path / "ckpt", tokens)
    assert (found - expected).abs().max().item() <= 1e-4


@pytest.mark.oracle
def test_a_run_goes_on_to_the_same_bits_and_transformers_gives_the_same_scores(
    tmp_path: Path,
) -> None:
    for name in ("whole", "same"):
        write_pairs(tmp_path / name)
    command = f"{WORDS} --load {BASE} --save ckpt --train-iters 4"
    log = train(tmp_path / "whole", 1, command).log(0)
    assert f"new: score.weight; left out of {BASE}: head.weight" in log
    lines = re.findall(
        r"^step +\d/4 .* loss (\S+) \| scores (\S+) chosen, (\S+) rejected, margin (\S+), accuracy (\S+)% \|",
        log,
        re.M,
    )
    assert len(lines) == 4
    assert float(lines[-1][0]) < 0.5 * float(lines[0][0])
    assert "perplexity" not in log

    train(tmp_path / "same", 1, f"{command} --exit-interval 2")
    again = train(tmp_path / "same", 1, f"{command} --resume").log(0)
    assert "continuing after step 2, 16 samples" in again
    assert "new:" not in again
    assert figures(tmp_path / "same") == figures(tmp_path / "whole")
    saved, model = tmp_path / "whole" / "ckpt", tmp_path / "model"
    assert megaconv.fingerprint(tmp_path / "same" / "ckpt") == megaconv.fingerprint(saved)

    megaconv.convert(saved, model, saver="hf")
    described = json.loads((model / "config.json").read_text())
    assert described["architectures"] == ["LlamaForSequenceClassification"]
    assert described["id2label"] == {"0": "LABEL_0"}
    # The next step begins from the model that transformers reads, at another layout.
    write_pairs(tmp_path / "next")
    layout = "--tp 2 --sequence-parallel"
    further = train(tmp_path / "next", 2, f"{WORDS} --load {model} --train-iters 1 {layout}").log(0)
    assert "new:" not in further
    chosen = [[n, 2, 3, n, 4] for n in range(7, 7 + COUNT)]
    rejected = [[n, 2, n, 5] for n in range(7, 7 + COUNT)]
    scores = np.array(scores_of_transformers(model, chosen + rejected)).reshape(2, COUNT)
    _, of_chosen, of_rejected, margin, accuracy = figures(tmp_path / "next")[0]
    assert (of_chosen, of_rejected) == pytest.approx(scores.mean(1).tolist(), rel=1e-5)
    assert margin == pytest.approx((scores[0] - scores[1]).mean(), rel=1e-5)
    assert accuracy == (scores[0] > scores[1]).mean()
    for_words = WORDS.replace("--reward-modeling", "--dpo")
    assert "model: the model has a head of scores, as reward models and critics have it" in refused(
        tmp_path / "next", f"{for_words} --load {model} --train-iters 1"
    )


@pytest.mark.oracle
def test_a_run_of_adapters_goes_on_to_the_same_bits_and_its_merged_model_gives_the_same_scores(
    tmp_path: Path,
) -> None:
    command = f"{WORDS} --load {BASE} --save ckpt --lora-rank 4 --train-iters 4"
    for name in ("whole", "same", "other"):
        write_pairs(tmp_path / name, MARGINS)
    log = train(tmp_path / "whole", 1, command).log(0)
    assert f"new: score.weight; left out of {BASE}: head.weight" in log
    assert "LoRA of rank 4, alpha 8 on all-linear, with the head of scores, fresh: 3,936 " in log
    assert "margins from -0.5 to 3, 1.031 in the mean" in log
    saved = tmp_path / "whole" / "ckpt" / "iter_0000004"
    described = json.loads((saved / "adapter_config.json").read_text())
    assert (described["task_type"], described["modules_to_save"]) == ("SEQ_CLS", ["score"])
    expected = load_file(saved / "adapter_model.safetensors")
    assert expected["base_model.model.score.weight"].shape == (1, 32)

    for name, size, layout in (("same", 1, ""), ("other", 4, "--tp 2 --pp 2 --sequence-parallel")):
        place = tmp_path / name
        train(place, 1, f"{command} --exit-interval 2")
        again = train(place, size, f"{command} --resume {layout}").log(0)
        assert "continuing after step 2, 16 samples" in again
        assert "new:" not in again
        assert "changed since the checkpoint" not in again
        found = load_file(place / "ckpt/iter_0000004/adapter_model.safetensors")
        for key, tensor in expected.items():
            is_equal = np.array_equal(found[key], tensor)
            assert is_equal if name == "same" else np.allclose(found[key], tensor, atol=1e-4), key

    merge_reward_model(tmp_path / "whole" / "ckpt", 4, tmp_path / "merged")
    # The next step begins from the merged model, and from the adapter on its base.
    rows = [[n, 2, 3, n, 4] for n in range(7, 7 + COUNT)]
    rows += [[n, 2, n, 5] for n in range(7, 7 + COUNT)]
    scores = np.array(scores_of_transformers(tmp_path / "merged", rows)).reshape(2, COUNT)
    for name, words in (
        ("merged", f"--load {tmp_path / 'merged'}"),
        ("adapter", f"--load {BASE} --lora-load {saved}"),
    ):
        write_pairs(tmp_path / f"next-{name}")
        further = train(tmp_path / f"next-{name}", 1, f"{WORDS} {words} --train-iters 1").log(0)
        assert "new:" not in further
        _, of_chosen, of_rejected, *_ = figures(tmp_path / f"next-{name}")[0]
        assert (of_chosen, of_rejected) == pytest.approx(scores.mean(1).tolist(), rel=1e-4)


def test_margins_change_the_loss_alone_and_pairs_without_one_have_0(tmp_path: Path) -> None:
    for name, margins in (("none", None), ("zero", [None, 0]), ("some", [1, None])):
        write_pairs(tmp_path / name, margins)
        train(tmp_path / name, 1, f"{WORDS} --load {BASE} --train-iters 1")
    (none,), (zero,), (some,) = (figures(tmp_path / name) for name in ("none", "zero", "some"))
    assert none == zero
    assert none[1:] == some[1:]
    assert some[0] > none[0]


def test_dpo_reports_margins_as_fields_that_are_not_read(tmp_path: Path) -> None:
    write_pairs(tmp_path, MARGINS)
    dpo = WORDS.replace("--reward-modeling", "--dpo")
    log = train(tmp_path, 1, f"{dpo} --load {BASE} --train-iters 1").log(0)
    assert 'fields that are not read: "margin"' in log


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bits_at_two_ranks(tmp_path: Path) -> None:
    layout = "--tp 2 --sequence-parallel --save-interval 1 --resume"
    command = f"{WORDS} --load {BASE} --save ckpt --train-iters 6 {layout}"
    for name in ("whole", "same"):
        write_pairs(tmp_path / name)
    train(tmp_path / "whole", 2, command)
    kill_and_resume(tmp_path / "same", 2, command, 1.5 + random.random() * 2)
    assert megaconv.fingerprint(tmp_path / "same" / "ckpt") == megaconv.fingerprint(
        tmp_path / "whole" / "ckpt"
    )


@pytest.mark.parametrize("ckpt_format", ["torch", "torch_dist"])
def test_a_bf16_run_with_a_distributed_optimizer_goes_on_to_the_same_bits(
    ckpt_format: str, tmp_path: Path
) -> None:
    """Two replicas share the optimizer, and the pipeline's last stage has the head."""
    layout = "--pp 2 --use-distributed-optimizer --save-interval 2"
    words = WORDS.replace("--fp32", f"--bf16 --ckpt-format {ckpt_format}")
    command = f"{words} --load {BASE} --save ckpt --train-iters 4 {layout}"
    for name in ("whole", "same"):
        write_pairs(tmp_path / name)
    train(tmp_path / "whole", 4, command)
    train(tmp_path / "same", 4, f"{command} --exit-interval 2")
    again = train(tmp_path / "same", 4, f"{command} --resume").log(0)
    assert "continuing after step 2, 16 samples" in again
    assert figures(tmp_path / "same") == figures(tmp_path / "whole")
    found, expected = (megaconv.fingerprint(tmp_path / name / "ckpt") for name in ("same", "whole"))
    assert expected.optimizer is not None
    assert found == expected


def test_the_new_head_has_the_standard_deviation_of_the_model_unless_a_flag_gives_one(
    tmp_path: Path,
) -> None:
    for name, flags, expected in (("own", "", 0.1), ("given", "--init-method-std 0.5", 0.5)):
        write_pairs(tmp_path / name)
        command = f"{WORDS} --load {BASE} --train-iters 1 --save ckpt {flags}"
        train(tmp_path / name, 1, command.replace("--lr 1e-2", "--lr 1e-12"))
        drawn = open_checkpoint(tmp_path / name / "ckpt").load("score.weight")
        assert drawn.shape == (1, 32)
        assert drawn.std().item() == pytest.approx(expected, rel=0.4)


@pytest.mark.parametrize(
    ("head", "words"),
    [
        ({"head.labels": 3}, "has 3 labels of a text; --reward-modeling trains a head without a bias"),
        ({"head.labels": 1, "head.labels_bias": True, "head.of_tokens": True}, "has 1 labels of each token and a bias"),
    ],
)  # fmt: skip
def test_heads_with_other_scores_are_refused(head: dict[str, Any], words: str) -> None:
    found = open_weights(str(BASE))
    header = replace(found.header, config=changed(found.config, head | {"tie_embeddings": False}))
    with pytest.raises(NotExpressible, match=words):
        with_score_head(replace(found, header=header), 0.02, 1, print)


def test_a_family_without_a_class_for_rewards_is_refused() -> None:
    found = open_weights(str(BASE))
    header = replace(found.header, config=replace(found.config, family="bitnet"))
    with pytest.raises(NotExpressible, match="no ForSequenceClassification with a head of scores"):
        with_score_head(replace(found, header=header), 0.02, 1, print)


@pytest.mark.parametrize(("pad", "expected"), [(5, 5), (None, 2)])
def test_the_token_of_padding_is_the_tokenizers_else_the_end_of_text(
    pad: int | None, expected: int
) -> None:
    tokenizer: Any = SimpleNamespace(pad=pad, eod=2)
    config = ScoredPairs().described(open_checkpoint(BASE).config, tokenizer)
    assert config.pad_token_id == expected


def test_padding_at_the_end_of_a_text_is_no_token_of_it() -> None:
    examples = Examples(
        np.array([1, 9, 2, 9, 9, 9, 3, 4, 9], np.int32),
        np.array([0, 0, 1, 1, 1, 0, 1, 1, 1], bool),
        np.array([0, 5, 8, 9]),
        np.zeros(3, bool),
    )
    found = without_end(examples, 9)
    assert found.tokens.tolist() == [1, 9, 2, 9, 3, 4]
    assert found.learned.tolist() == [False, False, True, False, True, True]
    assert found.bounds.tolist() == [0, 3, 6, 6]


def as_examples(*rows: list[int]) -> Examples:
    """Consecutive pairs of answers. No token is learned: scores don't need it."""
    bounds = np.concatenate(([0], np.cumsum([len(row) for row in rows])))
    tokens = np.array([token for row in rows for token in row], np.int32)
    return Examples(tokens, np.zeros(len(tokens), bool), bounds, np.zeros(len(rows), bool))


def test_a_truncated_answer_does_not_end_with_padding() -> None:
    """transformers takes the score of the last token that isn't padding."""
    pieces = scored_pairs_for(as_examples([1, 2, 9, 9, 3], [1, 4]), 4, padding=9)
    assert (pieces.starts.tolist(), pieces.ends.tolist()) == ([0, 5], [2, 7])
    assert (pieces.cut, pieces.dropped) == (1, 0)


def test_answers_of_one_token_have_scores_and_equal_ones_are_dropped() -> None:
    rows = [[1], [2], [1, 2], [1, 2], [1, 2, 3], [1, 2, 4], [], [1], [5], [5, 6]]
    pieces = scored_pairs_for(as_examples(*rows), 2, padding=9)
    assert len(pieces) == 2
    assert pieces.starts.tolist() == [0, 1, 13, 14]
    assert pieces.ends.tolist() == [1, 2, 14, 16]
    assert (pieces.cut, pieces.dropped) == (0, 3)
    samples = pair_dataset(pieces, np.arange(2), 2, None, seed=1)
    batches = [
        {name: torch.from_numpy(array[None]) for name, array in sample._asdict().items()}
        for sample in samples
    ]
    made = [ScoredPairs().microbatch(batch, Settings()) for batch in batches]
    assert sorted(each.tokens.tolist() for each in made) == [[[1, 0], [2, 0]], [[5, 0], [5, 6]]]


def test_a_preview_shows_answers_without_a_learned_token() -> None:
    pieces = scored_pairs_for(as_examples([5], [7, 6]), 2, padding=9)
    tokenizer: Any = SimpleNamespace(spelled=lambda tokens: " ".join(map(str, tokens)))
    assert list(preview(pair_dataset(pieces, np.arange(1), 2, None, seed=1)[0], tokenizer)) == [
        "the first pair: 0 of its tokens are compared",
        "  chosen",
        "    given   '5'",
        "  rejected",
        "    given   '7 6'",
    ]


def test_a_pair_that_differs_only_by_padding_is_dropped() -> None:
    examples = without_end(as_examples([1, 2, 9, 9], [1, 2, 9], [1, 9], [3, 9]), 9)
    pieces = scored_pairs_for(examples, 8, padding=9)
    assert (pieces.starts.tolist(), pieces.dropped) == ([4, 5], 1)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--reward-modeling", "--reward-modeling needs --load: a language model or a reward model"),
        ("--center-rewards-coefficient 0.1", "--center-rewards-coefficient requires --reward-modeling"),
        (f"--reward-modeling --load {BASE} --center-rewards-coefficient -1", "--center-rewards-coefficient -1 must be 0 or more"),
        (f"--reward-modeling --load {BASE} --dpo", "--reward-modeling and --dpo are two objectives"),
    ],
)  # fmt: skip
def test_flags_that_contradict_each_other_are_refused(
    flags: str, words: str, tmp_path: Path
) -> None:
    model = LLAMA.replace("--mock-data ", "")
    assert words in refused(
        tmp_path, f"pretrain {model} --finetune-data pairs.jsonl --train-iters 2 {flags}"
    )


def test_a_model_with_mtp_layers_becomes_a_reward_model_without_them(tmp_path: Path) -> None:
    write_pairs(tmp_path)
    model = f"{DEEPSEEK} --make-vocab-size-divisible-by 1"
    train(tmp_path, 1, f"pretrain {model} --train-iters 2 --save words")
    log = train(tmp_path, 1, f"{WORDS} --load words --save rm --train-iters 2").log(0)
    assert re.search(r"new: score\.weight; left out of words: .*mtp\.", log), log
    megaconv.convert(tmp_path / "rm", tmp_path / "hf", saver="hf")
    described = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert described["architectures"] == ["DeepseekV3ForSequenceClassification"]
    assert described["num_nextn_predict_layers"] == 0
    assert len(set(scores_of_transformers(tmp_path / "hf", [[7, 2, 3], [8, 2, 5, 6]]))) == 2
