"""Megatron core itself loads what the trainer saves, strictly, at other layouts; megaconv exports it to Hugging Face."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import megaconv
from formats import torch_zip
from megaconv.errors import CorruptCheckpoint, NotExpressible
from megaconv.model.layout import Layout
from megatron_lite.checkpoint.weights import load_weights
from megatron_lite.engine import Engine
from megatron_lite.models.batch import Microbatch
from megatron_lite.parallel.grid import make_grid
from megatron_lite.settings.options import ModelOptions
from tests.megatron_oracle import Megatron
from tests.trainer.loop.launches import BERT, LLAMA, LLAMA_3_SCRIPT, MIXTRAL, TIED, train

pytestmark = pytest.mark.oracle
ROOT = Path(__file__).parents[3]
TP2_PP2 = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
DP2 = "--use-distributed-optimizer --tensor-model-parallel-size 2"


@pytest.mark.parametrize(
    ("model", "words", "tp"),
    [(LLAMA, TP2_PP2, 1), (BERT, TP2_PP2, 1), pytest.param(TIED, DP2, 2, marks=pytest.mark.slow)],
    ids=["untied", "bert", "tied"],
)
def test_megatron_core_loads_weights_and_optimizer_strictly(
    model: str, words: str, tp: int, tmp_path: Path
) -> None:
    """Saved at TP2 PP2, or TP2 DP2 with a distributed optimizer; loaded at TP1 and TP2. Without a warm-up, while the rate falls."""
    words += " --lr-warmup-iters 0 --lr-decay-iters 7"
    command = f"pretrain {model} --train-iters 3 --save ckpt --bf16 --ckpt-format torch_dist --transformer-impl local"
    train(tmp_path, 4, f"{command} {words}")
    meeting = str(tmp_path / "meeting")
    script = [
        "-m",
        "tests.trainer.loop.core_load",
        str(tmp_path / "ckpt" / "iter_0000003"),
        str(tp),
        meeting,
    ]
    environment = os.environ | {
        "PYTHONWARNINGS": "ignore",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, *script], cwd=ROOT, env=environment | {"RANK": str(rank)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(tp)
    ]  # fmt: skip
    for rank in ranks:
        said, errors = rank.communicate(timeout=120)
        assert rank.returncode == 0, errors[-3000:]
        assert "tensors and their optimizer state" in said


@pytest.mark.slow
def test_settings_of_megatrons_llama_3_script_are_trained_and_loaded_by_core(
    tmp_path: Path,
) -> None:
    """LayerNorm that multiplies with its weight + 1, and a rate of embedding and head: losses are those that core computes."""
    import torch

    train(
        tmp_path,
        4,
        f"pretrain {LLAMA_3_SCRIPT} --save ckpt --transformer-impl local".replace(
            "--bf16 --grad-reduce-in-bf16", ""
        ),
    )
    common = torch_zip.read(tmp_path / "ckpt" / "iter_0000006" / "common.pt")
    groups = common["optimizer"]["optimizer"]["param_groups"]
    assert [(group["max_lr"], group["min_lr"], group["wd_mult"], group["default_config"]) for group in groups] == [
        (0.00015, 0.00001, 1.0, True), (5e-4, 4.5e-5, 1.0, False), (0.00015, 0.00001, 0.0, True),
    ]  # fmt: skip
    for tp in (1, 2):
        # The run's arguments have sequence parallelism. Core uses torch's LayerNorm here, which lacks it.
        megaconv.convert(
            tmp_path / "ckpt", tmp_path / f"tp{tp}", saver="core", tp=tp, transformer_impl="local"
        )
    checkpoint = megaconv.open(tmp_path / "tp1")
    engine = Engine(
        checkpoint.config,
        make_grid(Layout(stage_layers=(4,)), 1, torch.device("cpu")),
        ModelOptions(dtype="float32"),
        None,
    )
    load_weights(engine, checkpoint.tensors)
    tokens = torch.randint(0, 59, (2, 16), generator=torch.Generator().manual_seed(1))
    ours = engine.logits(Microbatch(tokens, tokens))
    assert ours is not None
    (tmp_path / "megatron").mkdir()
    with Megatron(tmp_path / "megatron") as megatron:
        for name in ("tp1", "tp2"):
            found = megatron.logits(tmp_path / name, tokens)[..., :60]
            assert (found - ours[..., :60]).abs().max().item() < 1e-5, name
    with pytest.raises(NotExpressible, match=r"norm\.zero_centered"):
        megaconv.convert(tmp_path / "ckpt", tmp_path / "hf", saver="hf")


@pytest.mark.slow
def test_megatron_core_and_transformers_compute_the_same_from_a_trained_checkpoint(
    tmp_path: Path,
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    words = f"--train-iters 2 --save ckpt --no-save-optim --transformer-impl local {TP2_PP2}"
    train(tmp_path, 4, f"pretrain {LLAMA} {words}")
    train(tmp_path, 4, f"pretrain {LLAMA} {words} --ckpt-format torch".replace("ckpt ", "ranks "))
    megaconv.convert(tmp_path / "ckpt", tmp_path / "hf", saver="hf")
    tokens = torch.randint(0, 60, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)(
            tokens
        ).logits
    (tmp_path / "megatron").mkdir()
    with Megatron(tmp_path / "megatron") as megatron:
        for name in ("ckpt", "ranks"):
            found = megatron.logits(tmp_path / name, tokens)[..., :60]
            assert (found - expected).abs().max().item() < 1e-4, name


@pytest.mark.slow
def test_megatron_core_computes_with_the_rank_files_of_a_mixture(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    words = "--pp 2 --ep 2 --ckpt-format torch --transformer-impl local"
    train(tmp_path, 4, f"pretrain {MIXTRAL} --train-iters 2 --save ckpt {words}")
    megaconv.convert(tmp_path / "ckpt", tmp_path / "hf", saver="hf")
    tokens = torch.randint(0, 60, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)(
            tokens
        ).logits
    (tmp_path / "megatron").mkdir()
    with Megatron(tmp_path / "megatron") as megatron:
        found = megatron.logits(tmp_path / "ckpt", tokens)[..., :60]
    assert (found - expected).abs().max().item() < 1e-4


def test_each_rank_file_says_the_rank_that_wrote_it(tmp_path: Path) -> None:
    train(
        tmp_path,
        4,
        f"pretrain {MIXTRAL} --train-iters 2 --save ckpt --pp 2 --ep 2 --ckpt-format torch",
    )
    version = tmp_path / "ckpt" / "iter_0000002"
    names = [
        f"mp_rank_00_{pp_rank:03d}_{ep_rank:03d}" for pp_rank in range(2) for ep_rank in range(2)
    ]
    assert [
        torch_zip.read(version / name / "model_optim_rng.pt")["args"].rank for name in names
    ] == [0, 1, 2, 3]
    (version / names[0]).rename(version / "aside")
    (version / names[1]).rename(version / names[0])
    (version / "aside").rename(version / names[1])
    with pytest.raises(CorruptCheckpoint, match="its args are of rank 1 of 4"):
        megaconv.open(tmp_path / "ckpt")


def test_the_optimizer_of_experts_is_listed_as_megatron_lists_it(tmp_path: Path) -> None:
    """Megatron's own files hold two optimizers: groups, settings, numbers of parameters, masters."""
    fixture = (
        ROOT / "tests" / "fixtures" / "core-te-mixtral-optim-ep2" / "checkpoint" / "iter_0000002"
    )
    train(
        tmp_path,
        2,
        f"pretrain {MIXTRAL} --train-iters 2 --save ckpt --ep 2 --bf16 --ckpt-format torch",
    )
    for rank in ("mp_rank_00_000", "mp_rank_00_001"):
        ours, theirs = (
            torch_zip.read(version / rank / "model_optim_rng.pt")["optimizer"]
            for version in (tmp_path / "ckpt" / "iter_0000002", fixture)
        )
        assert len(ours) == len(theirs) == 2
        for our, their in zip(ours, theirs, strict=True):
            assert our.keys() == their.keys()
            groups = [
                [set(group) for group in one["optimizer"]["param_groups"]] for one in (our, their)
            ]
            assert groups[0] == groups[1]
            kinds = [
                [
                    (group["is_expert_parallel"], group["wd_mult"])
                    for group in one["optimizer"]["param_groups"]
                ]
                for one in (our, their)
            ]
            assert kinds[0] == kinds[1]
            counts = [len(group["params"]) for group in our["optimizer"]["param_groups"]]
            assert [len(masters) for masters in our["fp32_from_fp16_params"]] == counts
            assert sorted(our["optimizer"]["state"]) == list(range(sum(counts)))
