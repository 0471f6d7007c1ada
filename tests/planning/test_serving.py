"""Inference: caches are those of published models and of the trainer, times those of published rates."""

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

from benchmarks.published_runs import DEEPSEEK_V3, LLAMA2_7B, LLAMA3_8B, LLAMA3_405B
from benchmarks.published_serving import GPT_FAST, ROWS, Generated
from benchmarks.serving import first_tokens, rate_of, table
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed, from_fields
from megaconv.model.layout import Layout
from megaconv.planning.cache import cache_bytes
from megaconv.planning.gpus import GIB, GPUS
from megaconv.planning.layer_costs import Machine
from megaconv.planning.served import Served, Server
from megaconv.planning.serving import Serving
from megaconv.planning.serving_flags import megatron_lite_flags, megatron_lm_flags, vllm_flags
from megaconv.planning.serving_search import WantedServer, search_servers
from megatron_lite.models.mixers.declaration import PerRow, PerToken
from megatron_lite.models.mixers.table import mixer_of
from tests.planning.models import DEEPSEEK, LLAMA

H100 = Machine(GPUS["h100"])
HYBRID = from_fields(
    "qwen3_next",
    {
        "layers.count": 4, "layers.mixer": ("linear",) * 3 + ("attention",), "hidden": 64, "attention.heads": 4,
        "attention.kv_heads": 2, "attention.head_dim": 16, "mlp.ffn": 96, "vocab": 128, "max_positions": 256,
        "tie_embeddings": False, "linear.key_heads": 2, "linear.value_heads": 4, "linear.key_dim": 8, "linear.value_dim": 12,
        "linear.conv": 4,
    },
)  # fmt: skip


def whole_cache(config: ModelConfig, tokens: int, tp: int = 1) -> float:
    return sum(cache_bytes(config, kind, tokens, tp, 2, 2) for kind in config.layers)


@pytest.mark.parametrize(
    ("config", "published"),
    [(DEEPSEEK_V3, 70_272), (LLAMA3_405B, 516_096)],
    ids=["deepseek-v3", "llama-3.1-405b"],
)
def test_bytes_of_a_cached_token_are_the_published_ones(
    config: ModelConfig, published: int
) -> None:
    """arXiv:2505.09343, table 1."""
    assert whole_cache(config, 1) == published
    assert whole_cache(config, 1000) == 1000 * published


@pytest.mark.parametrize("config", [LLAMA, HYBRID], ids=["attention", "delta net"])
def test_a_cache_is_that_of_the_trainers_mixers(config: ModelConfig) -> None:
    tokens, found = 32, 0
    for kind in config.layers:
        mixer = mixer_of(config, kind)
        assert mixer is not None
        for part in mixer.cache(config, config.sizes()):
            if isinstance(part, PerToken):
                found += part.heads * part.width * tokens * 2
            else:
                assert isinstance(part, PerRow)
                found += prod(part.shape) * (4 if part.in_float32 else 2)
    assert whole_cache(config, tokens) == found


def test_tensor_ranks_share_heads_but_not_latent_vectors() -> None:
    assert whole_cache(LLAMA, 100, tp=2) == whole_cache(LLAMA, 100) / 2
    assert whole_cache(LLAMA, 100, tp=8) == whole_cache(LLAMA, 100, tp=4), "one head is the least"
    assert whole_cache(DEEPSEEK, 100, tp=8) == whole_cache(DEEPSEEK, 100)


def test_layers_with_a_window_keep_its_tokens_alone() -> None:
    config = changed(LLAMA, {"layers.window": (128,) * 8})
    assert whole_cache(config, 4096) == whole_cache(LLAMA, 128)


@pytest.mark.parametrize("row", [row for row in ROWS if row.source == GPT_FAST])
def test_rates_of_one_sequence_are_close_to_published_ones(row: Generated) -> None:
    assert rate_of(row) == pytest.approx(row.rate, rel=0.1)


def test_printed_errors_are_those_of_the_documentation() -> None:
    written = (
        (Path(__file__).parents[2] / "docs" / "planning.md")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    assert [line for line in (*table(), *first_tokens()) if line not in written] == []


def server(config: ModelConfig, tp: int = 1, batch: int = 1, **sizes: int | bool) -> Served:
    layout = Layout(tp, stage_layers=(config.layer_count,))
    serving = Serving(config=config, layout=layout, dp=1, seq=4096, batch=batch)
    return Server(config, H100).estimate(replace(serving, **sizes))


def test_more_sequences_give_more_tokens_but_each_one_later() -> None:
    few, many = server(LLAMA3_8B, batch=4), server(LLAMA3_8B, batch=64)
    assert few.time.total < many.time.total < 16 * few.time.total
    assert few.tokens_per_second < many.tokens_per_second


def test_fp8_halves_the_weights_of_layers_and_of_caches() -> None:
    plain, small = server(LLAMA3_8B, batch=8), server(LLAMA3_8B, batch=8, fp8=True, cached=1)
    assert small.memory.cache == plain.memory.cache / 2
    outside = 2 * 2 * 128256 * 4096
    assert plain.memory.weights - outside == pytest.approx(
        2 * (small.memory.weights - outside), rel=1e-3
    )
    assert small.time.memory < plain.time.memory


def test_as_many_sequences_as_fit_are_the_most_that_fit() -> None:
    memory = 40 * GIB
    found = search_servers(
        LLAMA2_7B, WantedServer(gpus=2, seq=2048, sequences=None, memory=memory), H100
    )
    assert found.fitting
    estimator = Server(LLAMA2_7B, H100)
    for one in found.fitting:
        more = replace(one.serving, batch=one.serving.batch + 1)
        assert one.memory.total <= memory < estimator.estimate(more).memory.total
        assert one.serving.world == 2
    rates = [one.tokens_per_second for one in found.fitting]
    assert rates == sorted(rates, reverse=True)


def test_without_a_number_of_gpus_the_fewest_are_taken() -> None:
    """A model of 405B in bf16 takes 756 GiB: 16 GPUs of 80 GiB, and 8 of 141 GB."""
    for gpu, count in (("h100", 16), ("h200", 8)):
        machine = Machine(GPUS[gpu])
        wanted = WantedServer(gpus=None, seq=4096, sequences=1, memory=machine.gpu.memory)
        assert search_servers(LLAMA3_405B, wanted, machine).gpus == count


def test_experts_are_sharded_or_shared_by_ranks_and_by_replicas() -> None:
    wanted = WantedServer(gpus=4, seq=1024, sequences=8, memory=80 * GIB)
    found = search_servers(DEEPSEEK, wanted, H100).fitting
    layouts = [(one.serving.layout, one.serving.dp) for one in found]
    ways = {(layout.tp, layout.ep, layout.etp, dp) for layout, dp in layouts if layout.pp == 1}
    assert {(2, 1, 2, 2), (2, 2, 1, 2), (2, 4, 1, 2), (1, 4, 1, 4)} <= ways


def test_each_replica_starts_with_the_flags_of_its_engine() -> None:
    layout = Layout(2, stage_layers=(LLAMA.layer_count,))
    dense = Serving(config=LLAMA, layout=layout, dp=2, seq=512, batch=3)
    assert megatron_lite_flags(dense) == ["--tp", "2", "--slots", "3", "--max-length", "512"]
    assert megatron_lm_flags(dense)[:2] == ["--tensor-model-parallel-size", "2"]
    assert vllm_flags(dense)[:4] == ["--tensor-parallel-size", "2", "--data-parallel-size", "2"]
    shared = Layout(2, ep=4, stage_layers=(DEEPSEEK.layer_count,))
    experts = replace(dense, config=DEEPSEEK, layout=shared, fp8=True)
    assert megatron_lite_flags(experts) == []
    assert {"--enable-expert-parallel", "--data-parallel-size", "fp8"} <= set(vllm_flags(experts))
    # Two tensor ranks would share each of four key/value heads.
    assert megatron_lite_flags(replace(dense, layout=replace(layout, tp=8))) == []
    apart = replace(experts, layout=replace(shared, ep=1, etp=2))
    assert "--data-parallel-size" not in vllm_flags(apart)
