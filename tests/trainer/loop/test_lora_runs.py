"""Runs that train adapters: what they save, how they go on, what they refuse."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from tests.trainer.loop.launches import metrics, train
from tests.trainer.loop.test_manners import refused

PEFT = Path(__file__).parents[2] / "fixtures"
BASE, ADAPTER = PEFT / "peft-llama-all-linear" / "base", PEFT / "peft-llama-all-linear" / "adapter"
WORDS = (
    f"finetune --load {BASE} --mock-data --seq-length 16 --lr 1e-2 --lr-decay-style constant --log-interval 1 --eval-iters 0 "
    "--global-batch-size 4 --metrics-file metrics.jsonl --distributed-timeout-minutes 1 --make-vocab-size-divisible-by 2 --fp32"
)
FRESH = f"{WORDS} --lora-rank 4 --lora-targets q_proj v_proj linear_fc2"


def losses(directory: Path) -> list[float]:
    return [line["loss"] for line in metrics(directory)]


def weights(directory: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(directory / "ckpt" / f"iter_{step:07}" / "adapter_model.safetensors")


def test_a_run_saves_what_peft_loads_and_goes_on_to_the_same_bits_and_at_another_layout(
    tmp_path: Path,
) -> None:
    whole = train(tmp_path / "whole", 1, f"{FRESH} --train-iters 4 --save ckpt --save-interval 2")
    assert "LoRA of rank 4, alpha 8 on q_proj v_proj linear_fc2, fresh: " in whole.log(0)
    assert " parameters on this rank, frozen" in whole.log(0)
    assert "saved to ckpt/iter_0000004 in " in whole.log(0)
    saved = tmp_path / "whole" / "ckpt" / "iter_0000004"
    assert {path.name for path in saved.iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors", "trainer_state.json",
    }  # fmt: skip
    assert {name.split(".")[-3] for name in weights(tmp_path / "whole", 4)} == {
        "q_proj",
        "v_proj",
        "down_proj",
    }
    megaconv.convert(BASE, tmp_path / "merged", saver="hf", adapters=[str(saved)])
    assert megaconv.fingerprint(tmp_path / "merged") != megaconv.fingerprint(BASE)

    for name, size, layout in (("same", 1, ""), ("other", 4, "--tp 2 --pp 2 --sequence-parallel")):
        place = tmp_path / name
        train(
            place, 1, f"{FRESH} --train-iters 4 --exit-interval 2 --save ckpt --resume --async-save"
        )
        again = train(place, size, f"{FRESH} --train-iters 4 --save ckpt --resume {layout}")
        assert "continuing after step 2, 8 samples" in again.log(0)
        assert losses(place) == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
        exact = name == "same"
        for key, tensor in weights(place, 4).items():
            expected = weights(tmp_path / "whole", 4)[key]
            assert (
                torch.equal(tensor, expected)
                if exact
                else torch.allclose(tensor, expected, atol=1e-4)
            ), key


@pytest.mark.parametrize(
    ("flags", "told", "name", "shape"),
    [
        (
            "--lora-dora",
            "DoRA of rank 4, alpha 8 on q_proj v_proj linear_fc2, fresh: ",
            "model.layers.0.mlp.down_proj.lora_magnitude_vector",
            (32,),
        ),
        (
            "--lora-modules-to-save embed_tokens lm_head",
            "on q_proj v_proj linear_fc2, with the embedding and the head whole, fresh: ",
            "lm_head.weight",
            (99, 32),
        ),
        (
            "--lora-trainable-token-indices 8 97-98",
            "on q_proj v_proj linear_fc2, with the rows of 3 tokens in the embedding and the head, fresh: ",
            "lm_head.token_adapter.trainable_tokens_delta",
            (3, 32),
        ),
    ],
)
def test_a_run_that_trains_more_than_pairs_goes_on_to_the_same_bits_and_at_another_layout(
    flags: str, told: str, name: str, shape: tuple[int, int], tmp_path: Path
) -> None:
    words = f"{FRESH} {flags} --train-iters 4 --save ckpt"
    log = train(tmp_path / "whole", 1, words).log(0)
    assert told in log
    assert ("trained rows: 8 '8', 97 '97', 98 '98'" in log) == ("indices" in flags)
    expected = weights(tmp_path / "whole", 4)
    assert expected[f"base_model.model.{name}"].shape == shape

    for name, size, layout in (
        ("same", 1, ""),
        ("other", 4, "--tp 2 --pp 2 --use-distributed-optimizer"),
    ):
        place = tmp_path / name
        train(place, 1, f"{words} --exit-interval 2")
        train(place, size, f"{words} --resume {layout}")
        assert losses(place) == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
        found = weights(place, 4)
        assert found.keys() == expected.keys()
        for key, tensor in found.items():
            is_same = torch.equal(tensor, expected[key])
            assert is_same or (name == "other" and torch.allclose(tensor, expected[key], atol=1e-4))


def test_an_adapter_of_another_base_is_pointed_out(tmp_path: Path) -> None:
    described = (ADAPTER / "adapter_config.json").read_text()
    adapter = tmp_path / "adapter"
    shutil.copytree(ADAPTER, adapter)
    name = json.loads(described)["base_model_name_or_path"]
    changed = described.replace(name, "another-base")
    (adapter / "adapter_config.json").write_text(changed)
    log = train(tmp_path / "run", 1, f"{WORDS} --lora-load {adapter} --train-iters 1").log(0)
    assert f"warning: the adapter was trained on another-base, but --load is {BASE}" in log


def test_an_adapter_of_peft_is_trained_on_with_a_shared_optimizer(tmp_path: Path) -> None:
    command = f"{WORDS.replace('--fp32', '--bf16')} --lora-load {ADAPTER} --train-iters 2 --save ckpt --use-distributed-optimizer"
    ran = train(tmp_path, 2, command)
    assert f"self_attn.q_proj self_attn.v_proj, from {ADAPTER}: " in ran.log(0)
    before, after = load_file(ADAPTER / "adapter_model.safetensors"), weights(tmp_path, 2)
    assert before.keys() == after.keys()
    assert all(not torch.equal(tensor, after[name]) for name, tensor in before.items())


@pytest.mark.slow
def test_a_stage_without_adapters_is_part_of_a_run(tmp_path: Path) -> None:
    command = f"{WORDS} --lora-rank 4 --lora-targets 1.self_attn.q_proj --save ckpt --resume"
    train(tmp_path / "one", 1, f"{command} --train-iters 4")
    two = train(tmp_path / "two", 2, f"{command} --train-iters 4 --exit-interval 2 --pp 2")
    assert "0 parameters on this rank, 0.00 bytes each" in two.log(0)
    train(tmp_path / "two", 2, f"{command} --train-iters 4 --pp 2")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    assert weights(tmp_path / "two", 4).keys() == weights(tmp_path / "one", 4).keys()


@pytest.mark.slow
def test_adapters_are_trained_on_in_the_precision_of_their_run(tmp_path: Path) -> None:
    """Their base may be in another."""
    command = f"{FRESH} --train-iters 4 --exit-interval 2 --save ckpt".replace("--fp32 ", "")
    began = train(tmp_path, 1, f"{command} --bf16").log(0)
    assert re.search(r"layers of \d+, bfloat16;", began)
    resumed = train(tmp_path, 1, f"{command} --resume").log(0)
    assert re.search(r"layers of \d+, bfloat16;", resumed)
    changed = train(tmp_path, 1, f"{command} --resume --train-iters 6 --fp32").log(0)
    assert "changed since the checkpoint: precision bf16 -> fp32" in changed
    half = train(tmp_path, 1, f"{command} --resume --train-iters 7 --fp16").log(0)
    assert "loss scale 4.29497e+09" in half


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            "--lora-rank 4 --lora-targets embed_tokens",
            "--lora-targets embed_tokens: is no matrix of this model",
        ),
        ("--lora-alpha 4", "--lora-alpha requires --lora-rank"),
        (f"--lora-load {ADAPTER} --lora-rank 3", "--lora-rank 3 contradicts the adapter"),
        (
            f"--lora-load {ADAPTER} --lora-dora",
            f"--lora-dora contradicts the adapter {ADAPTER}, which was trained without it; leave the flag out",
        ),
        ("--lora-dora", "--lora-dora requires --lora-rank"),
        ("--lora-rank 4 --lora-dropout 1", "--lora-dropout 1 has to lie between 0 and 1"),
        (f"--lora-load {BASE}", "has no adapter_config.json"),
        ("--lora-modules-to-save lm_head", "--lora-modules-to-save requires --lora-rank"),
        (
            "--lora-rank 4 --lora-modules-to-save norm",
            "--lora-modules-to-save norm: is no embedding and no head of this model; there are embed_tokens, lm_head",
        ),
        (
            "--lora-rank 4 --lora-modules-to-save embed_tokens,lm_head",
            "--lora-modules-to-save embed_tokens,lm_head: leave out the commas: embed_tokens lm_head",
        ),
        (
            f"--lora-load {ADAPTER} --lora-modules-to-save lm_head",
            "--lora-modules-to-save lm_head contradicts the adapter",
        ),
        (
            f"--lora-load {ADAPTER} --lora-trainable-token-indices 3",
            "--lora-trainable-token-indices 3 contradicts the adapter",
        ),
        (
            "--lora-rank 4 --lora-trainable-token-indices 97-99",
            "--lora-trainable-token-indices 97-99: the model has the tokens 0 to 98",
        ),
        (
            "--lora-rank 4 --lora-trainable-token-indices 5-3",
            "--lora-trainable-token-indices 5-3: the first token comes behind the last; write 3-5",
        ),
        (
            "--lora-rank 4 --lora-trainable-token-indices 3,4",
            "--lora-trainable-token-indices 3,4: leave out the commas: 3 4",
        ),
        (
            "--lora-rank 4 --lora-trainable-token-indices <|turn|>",
            "--lora-trainable-token-indices <|turn|>: is no number of a token; give numbers, as in",
        ),
        (
            "--lora-rank 4 --lora-trainable-token-indices 3 --lora-modules-to-save lm_head",
            "exclude each other: a whole module has the rows of all tokens",
        ),
    ],
)
def test_flags_that_contradict_each_other_are_refused(
    flags: str, words: str, tmp_path: Path
) -> None:
    assert words in refused(tmp_path, f"{WORDS} --train-iters 2 {flags}")


def test_a_run_of_adapters_is_not_continued_without_their_rank(tmp_path: Path) -> None:
    words = "--save ckpt: holds a run that trains adapters; pass --lora-rank 4 to continue it"
    train(tmp_path, 1, f"{FRESH} --train-iters 1 --save ckpt")
    command = f"{WORDS} --train-iters 2 --save ckpt --resume"
    assert words in refused(tmp_path, command)
    assert words in refused(tmp_path, f"{command} --lora-alpha 8")
    (tmp_path / "data.jsonl").write_text('{"text": "1 2 3"}\n' * 8)
    assert words in refused(tmp_path, f"finetune {BASE} data.jsonl --save ckpt")
    again = train(tmp_path, 1, f"{command} --lora-rank 4")
    assert "continuing after step 1, 4 samples" in again.log(0)


def test_a_run_of_adapters_is_not_continued_with_another_base(tmp_path: Path) -> None:
    """It went on with a warning, and its next checkpoint named the other base."""
    train(tmp_path, 1, f"{FRESH} --train-iters 1 --save ckpt")
    shutil.copytree(BASE, tmp_path / "other")
    resumed = f"{FRESH} --train-iters 2 --save ckpt --resume"
    words = f"--save ckpt: holds a run that started from {BASE}, not from other; choose another directory for --save"
    assert words in refused(tmp_path, resumed.replace(str(BASE), "other"))
    (tmp_path / "moved").mkdir()
    (tmp_path / "other").rename(tmp_path / "moved" / "base")
    log = train(tmp_path, 1, resumed.replace(str(BASE), "moved/base")).log(0)
    assert "continuing after step 1, 4 samples" in log
    assert "warning" not in log


def test_a_base_with_other_weights_under_its_path_is_noticed(tmp_path: Path) -> None:
    """Weights of another training. A copy in another dtype or format has the same weights."""
    shutil.copytree(BASE, tmp_path / "base")
    run_on_copy = FRESH.replace(str(BASE), "base")
    train(tmp_path, 1, f"{run_on_copy} --train-iters 1 --save ckpt")
    resumed = f"{run_on_copy} --train-iters 2 --save ckpt --resume"
    (file,) = (tmp_path / "base").glob("*.safetensors")
    changed = {
        name: tensor * (1 + 0.02 * torch.randn(tensor.shape))
        for name, tensor in load_file(file).items()
    }
    save_file(changed, file, metadata={"format": "pt"})
    said = refused(tmp_path, resumed)
    assert "--save ckpt: holds adapters of other weights than those of base now, such as" in said
    assert "--lora-load ckpt/iter_0000001 and another --save" in said
    advised = run_on_copy.replace("--lora-rank 4 --lora-targets q_proj v_proj linear_fc2", "")
    train(tmp_path, 1, f"{advised} --lora-load ckpt/iter_0000001 --train-iters 1 --save another")
    for name, options in (("hf", {"dtype": "bfloat16"}), ("core", {"tp": 2})):
        shutil.rmtree(tmp_path / "base")
        megaconv.convert(BASE, tmp_path / "base", saver=name, **options)
        shutil.copytree(tmp_path / "ckpt", tmp_path / f"to-{name}")
        log = train(tmp_path, 1, resumed.replace("ckpt", f"to-{name}")).log(0)
        assert "continuing after step 1, 4 samples" in log


def test_a_run_that_recorded_no_samples_of_its_base_goes_on(tmp_path: Path) -> None:
    train(tmp_path, 1, f"{FRESH} --train-iters 1 --save ckpt")
    state = tmp_path / "ckpt" / "iter_0000001" / "trainer_state.json"
    content = json.loads(state.read_text())
    assert 1 < len(content.pop("base_samples")) <= 16
    state.write_text(json.dumps(content))
    log = train(tmp_path, 1, f"{FRESH} --train-iters 2 --save ckpt --resume").log(0)
    assert "continuing after step 1, 4 samples" in log


def test_a_base_is_needed_and_another_runs_checkpoint_is_kept(tmp_path: Path) -> None:
    without = WORDS.replace(f"--load {BASE} ", "")
    assert "--lora-rank needs --load" in refused(
        tmp_path, f"{without} --lora-rank 4 --train-iters 1"
    )
    train(tmp_path, 1, f"{WORDS} --train-iters 1 --save ckpt")
    kept = refused(tmp_path, f"{FRESH} --train-iters 1 --save ckpt")
    assert "--save ckpt holds the checkpoint of another run" in kept
    assert "is not a checkpoint of adapters" in refused(
        tmp_path, f"{FRESH} --train-iters 1 --save ckpt --resume"
    )
