"""Models of which some layers have experts and some a dense MLP, saved, continued at another layout, and exported."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import megaconv
from tests.trainer.loop.launches import DEEPSEEK, train
from tests.trainer.loop.test_runs import losses_by_step

pytestmark = pytest.mark.oracle
ROOT = Path(__file__).parents[3]
COMMAND = (
    "finetune --load hf --resume --save ckpt --mock-data --seq-length 16 --global-batch-size 4 --lr 1e-3 --lr-decay-iters 7 "
    "--train-iters 4 --log-interval 1 --eval-iters 0 --metrics-file metrics.jsonl --distributed-timeout-minutes 1 "
    "--make-vocab-size-divisible-by 4 --transformer-impl local"
)
LAYOUTS = [(2, "--ep 2 --use-distributed-optimizer --exit-interval 2"), (2, "--pp 2")]


SIZES: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 32, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "intermediate_size": 40,
    "norm_topk_prob": True, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": 4, "mlp_only_layers": [0, 2]},
    "Glm4Moe": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
    },
    "DeepseekV3": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 12,
        "kv_lora_rank": 10,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "head_dim": 4,
        "v_head_dim": 6,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
    },
    "GptOss": {"num_local_experts": 4, "sliding_window": 5},
}
"""Dense layers here and there, and a dense one first; the latter's routers have biases, which no gradient moves."""


@pytest.fixture(
    params=[
        pytest.param("Qwen3Moe", marks=pytest.mark.slow),
        "Glm4Moe",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("GptOss", "DeepseekV3")),
    ]
)
def mixed(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A directory with `hf` in it."""
    import transformers

    torch.manual_seed(5)
    config = getattr(transformers, f"{request.param}Config")(**{**SIZES, **MODELS[request.param]})
    getattr(transformers, f"{request.param}ForCausalLM")(config).save_pretrained(tmp_path / "hf")
    return tmp_path


@pytest.mark.slow
def test_a_run_with_dense_layers_and_experts_goes_on_at_another_layout_and_is_exported(
    mixed: Path,
) -> None:
    for name in ("one", "moved"):
        (mixed / name).mkdir()
        (mixed / name / "hf").symlink_to(mixed / "hf")
    train(mixed / "one", 1, COMMAND)
    for size, words in LAYOUTS:
        train(mixed / "moved", size, f"{COMMAND} {words}")
    one, moved = losses_by_step(mixed / "one"), losses_by_step(mixed / "moved")
    assert sorted(one) == sorted(moved) == [1, 2, 3, 4]
    assert [moved[step] for step in moved] == pytest.approx([one[step] for step in one], rel=1e-5)
    diff = megaconv.diff(mixed / "one" / "ckpt", mixed / "moved" / "ckpt")
    assert max((item.max_abs or 0.0) for item in diff.differences) < 1e-4
    megaconv.convert(mixed / "moved" / "ckpt", mixed / "back", saver="hf")
    prints = [megaconv.fingerprint(mixed / name) for name in ("back", "moved/ckpt")]
    assert prints[0].weights == prints[1].weights


@pytest.mark.slow
def test_a_model_from_flags_that_predicts_further_tokens_goes_on_in_both_formats(
    tmp_path: Path,
) -> None:
    words = f"pretrain {DEEPSEEK} --transformer-impl local --lr-decay-iters 7 --save ckpt --resume --train-iters 4"
    train(tmp_path / "one", 1, words)
    for size, layout in (
        (
            4,
            "--tp 2 --pp 2 --ep 2 --sequence-parallel --ckpt-format torch --exit-interval 2 --transformer-impl transformer_engine",
        ),
        (2, "--ep 2 --use-distributed-optimizer"),
    ):
        train(tmp_path / "moved", size, f"{words} {layout}")
    one, moved = losses_by_step(tmp_path / "one"), losses_by_step(tmp_path / "moved")
    assert [moved[step] for step in (1, 2, 3, 4)] == pytest.approx(
        [one[step] for step in (1, 2, 3, 4)], rel=1e-5
    )
    assert_core_loads(tmp_path / "moved")
    megaconv.convert(tmp_path / "moved" / "ckpt", tmp_path / "back", saver="hf")
    prints = [megaconv.fingerprint(tmp_path / name) for name in ("back", "moved/ckpt")]
    assert prints[0].weights == prints[1].weights


@pytest.mark.slow
def test_megatron_core_loads_dense_layers_and_experts_strictly(mixed: Path) -> None:
    train(mixed, 2, f"{COMMAND} --bf16 --ep 2 --use-distributed-optimizer")
    assert_core_loads(mixed)


def assert_core_loads(mixed: Path) -> None:
    script = [
        "-m",
        "tests.trainer.loop.core_load",
        str(mixed / "ckpt" / "iter_0000004"),
        "1",
        str(mixed / "meeting"),
    ]
    environment = os.environ | {
        "PYTHONWARNINGS": "ignore",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "RANK": "0",
    }
    done = subprocess.run(
        [sys.executable, *script],
        cwd=ROOT,
        env=environment,
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "tensors and their optimizer state" in done.stdout
