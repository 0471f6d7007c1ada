"""Runs of hybrids from Megatron's flags: saved, loaded by Megatron core, continued in the other format, generated from."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import megaconv
from megaconv.model.layout import Layout
from megaconv.model.pattern import pattern_of
from megatron_lite.checkpoint.weights import load_weights
from megatron_lite.engine import Engine
from megatron_lite.models.batch import Microbatch
from megatron_lite.parallel.grid import make_grid
from megatron_lite.settings.options import ModelOptions
from tests.megatron.test_optimizer import assert_one_step
from tests.megatron_oracle import Megatron
from tests.optimizer_oracle import step as go_on
from tests.trainer.loop.launches import LLAMA, train
from tests.trainer.loop.test_runs import losses_by_step

ROOT = Path(__file__).parents[3]
HYBRID = (
    LLAMA.replace(
        "--position-embedding-type rope --swiglu", "--position-embedding-type none --squared-relu"
    )
    + " --hybrid-override-pattern M*M- --mamba-head-dim 8 --mamba-num-groups 2 --mamba-state-dim 16"
)
DELTA_NETS = (
    f"{LLAMA} --experimental-attention-variant gated_delta_net --linear-attention-freq 4 --linear-num-key-heads 2 "
    "--linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 6 --attention-output-gate --qk-layernorm "
    "--apply-layernorm-1p --rotary-percent 0.5"
)
EXPERTS = (
    HYBRID.replace("M*M-", "M*ME")
    + " --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --sequence-parallel"
)
"""Experts without a shared one, and a router without a bias, which Nemotron-H's own models have."""
FURTHER = (
    f"{EXPERTS} --moe-latent-size 12 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-shared-expert-intermediate-size 24 --mtp-num-layers 1"
)
"""Like Nemotron 3 Super: experts in a latent width, and a layer that predicts further tokens."""
MODELS = {"hybrid": HYBRID, "hybrid, experts": EXPERTS, "delta nets": DELTA_NETS}
MAMBA = HYBRID.replace("--hybrid-override-pattern M*M-", "--is-hybrid-model")
RANK_FILES = "--train-iters 2 --lr-decay-iters 7 --save ckpt --tp 2 --pp 2 --ckpt-format torch --transformer-impl local"
COMMON = "--bf16 --lr-decay-iters 7 --save ckpt"
MAMBA_SCRIPT = (
    "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 1 --use-distributed-optimizer "
    "--overlap-param-gather --overlap-grad-reduce --untie-embeddings-and-output-weights --init-method-std 0.02 "
    "--position-embedding-type none --num-layers 12 --hidden-size 32 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --hybrid-attention-ratio 0.08 --hybrid-mlp-ratio 0.5 --seq-length 32 --max-position-embeddings 32 "
    "--train-samples 16 --lr-warmup-samples 2 --lr-decay-samples 14 --save ckpt --load ckpt --data-cache-path cache --split 99,1,0 "
    "--distributed-backend gloo --micro-batch-size 4 --global-batch-size 8 --lr 2.5e-4 --min-lr 2.5e-5 --lr-decay-style cosine "
    "--weight-decay 0.1 --clip-grad 1.0 --attention-dropout 0.0 --hidden-dropout 0.0 --disable-bias-linear --normalization RMSNorm "
    "--adam-beta1 0.9 --adam-beta2 0.95 --log-interval 1 --save-interval 2000 --eval-interval 2000 --eval-iters 1 --bf16 "
    "--use-mcore-models --spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec "
    "--no-create-attention-mask-in-dataloader --tensorboard-dir tensorboard "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 59 --mamba-head-dim 8 --mamba-state-dim 16 --metrics-file metrics.jsonl"
)
"""Megatron-LM's script for a Mamba of 800 million parameters, with small sizes."""


@pytest.mark.slow
@pytest.mark.oracle
@pytest.mark.parametrize("name", MODELS)
def test_megatron_core_loads_weights_and_optimizer_strictly(name: str, tmp_path: Path) -> None:
    """Saved at TP 2 as local layers; loaded in one process."""
    words = f"pretrain {MODELS[name]} {COMMON} --train-iters 3 --lr-warmup-iters 0 --tp 2 --transformer-impl local"
    train(tmp_path, 2, f"{words} --ckpt-format torch_dist")
    script = ["-m", "tests.trainer.loop.core_load", str(tmp_path / "ckpt" / "iter_0000003"), "1"]
    environment = os.environ | {
        "PYTHONWARNINGS": "ignore",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "RANK": "0",
    }
    done = subprocess.run(
        [sys.executable, *script, str(tmp_path / "meeting")], cwd=ROOT, env=environment, text=True, capture_output=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "tensors and their optimizer state" in done.stdout


@pytest.mark.parametrize(
    ("name", "impl"),
    [
        ("hybrid", "transformer_engine"),
        ("hybrid, experts", "transformer_engine"),
        ("delta nets", "transformer_engine"),
        pytest.param("hybrid", "local", marks=pytest.mark.slow),
        pytest.param("delta nets", "local", marks=pytest.mark.slow),
    ],
)
def test_a_stopped_run_goes_on_to_the_same_bits_and_both_formats_hold_the_same(
    name: str, impl: str, tmp_path: Path
) -> None:
    words = f"pretrain {MODELS[name]} {COMMON} --train-iters 3 --transformer-impl {impl}"
    train(tmp_path / "straight", 1, f"{words} --ckpt-format torch_dist")
    for more in ("--exit-interval 2", "--resume"):
        train(tmp_path / "stopped", 1, f"{words} --ckpt-format torch {more}")
    straight, stopped = (losses_by_step(tmp_path / each) for each in ("straight", "stopped"))
    assert straight[3] == stopped[3]
    prints = [megaconv.fingerprint(tmp_path / each / "ckpt") for each in ("straight", "stopped")]
    assert prints[0].weights == prints[1].weights


def test_a_hybrid_that_predicts_further_tokens_goes_on_and_is_converted(tmp_path: Path) -> None:
    words = f"pretrain {FURTHER} {COMMON} --train-iters 3"
    train(tmp_path / "straight", 1, f"{words} --ckpt-format torch_dist")
    for more in ("--exit-interval 2", "--resume"):
        train(tmp_path / "stopped", 1, f"{words} --ckpt-format torch {more}")
    straight, stopped = (tmp_path / each for each in ("straight", "stopped"))
    assert losses_by_step(straight)[3] == losses_by_step(stopped)[3]
    prints = [megaconv.fingerprint(each / "ckpt") for each in (straight, stopped)]
    assert prints[0].weights == prints[1].weights
    megaconv.convert(stopped / "ckpt", tmp_path / "hf", saver="hf")
    assert megaconv.fingerprint(tmp_path / "hf").weights == prints[0].weights
    found = megaconv.open(tmp_path / "hf").config
    assert (found.mtp_layers, found.experts.latent) == (1, 12)


@pytest.mark.slow
def test_megatrons_script_for_a_mamba_runs_with_small_sizes(tmp_path: Path) -> None:
    train(tmp_path, 4, f"pretrain {MAMBA_SCRIPT}")
    assert list(losses_by_step(tmp_path)) == [1, 2]
    config = megaconv.open(tmp_path / "ckpt").config
    assert pattern_of(config) == "M-M-M-*-M-M-"


@pytest.mark.slow
@pytest.mark.oracle
@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("hybrid", HYBRID),
        pytest.param("delta nets", DELTA_NETS, marks=pytest.mark.slow),
        pytest.param("mamba", MAMBA, marks=pytest.mark.slow),
    ],
)
def test_megatron_core_computes_and_goes_on_from_rank_files(
    name: str, model: str, tmp_path: Path
) -> None:
    """Saved at TP 2 and PP 2. Core loads weights strictly, gives our logits, and takes a step with its own optimizers."""
    train(tmp_path, 4, f"pretrain {model} {RANK_FILES}")
    saved = megaconv.open(tmp_path / "ckpt")
    layout = Layout(stage_layers=(saved.config.layer_count,))
    options = ModelOptions(dtype="float32", local_layers=True)
    engine = Engine(saved.config, make_grid(layout, 1, torch.device("cpu")), options, None)
    load_weights(engine, saved.tensors)
    tokens = torch.randint(0, 59, (2, 16), generator=torch.Generator().manual_seed(1))
    ours = engine.logits(Microbatch(tokens, tokens))
    assert ours is not None
    (tmp_path / "megatron").mkdir()
    with Megatron(tmp_path / "megatron") as megatron:
        found = megatron.logits(tmp_path / "ckpt", tokens)[..., :60]
    assert (found - ours[..., :60]).abs().max() < 1e-5
    go_on([(tmp_path / "ckpt", tmp_path / "next")], tmp_path)
    assert_one_step(saved, megaconv.open(tmp_path / "next"), name)
    megaconv.convert(tmp_path / "ckpt", tmp_path / "one", saver="core", tp=1, pp=1)
    one, two = (megaconv.fingerprint(tmp_path / each) for each in ("ckpt", "one"))
    assert (one.weights, one.optimizer) == (two.weights, two.optimizer)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [MAMBA, HYBRID, DELTA_NETS], ids=["mamba", "hybrid", "delta nets"]
)
def test_a_killed_run_goes_on_to_the_same_bits_at_two_ranks_and_two_stages(
    model: str, tmp_path: Path
) -> None:
    words = f"pretrain {model} --bf16 --lr-decay-iters 7 --save ckpt --save-interval 1 --tp 2 --pp 2 --ckpt-format torch"
    train(tmp_path / "straight", 4, f"{words} --train-iters 4")
    train(tmp_path / "killed", 4, f"{words} --train-iters 4 --exit-interval 2")
    train(tmp_path / "killed", 4, f"{words} --train-iters 4 --resume")
    straight, killed = (
        megaconv.fingerprint(tmp_path / name / "ckpt") for name in ("straight", "killed")
    )
    assert (straight.weights, straight.optimizer) == (killed.weights, killed.optimizer)
