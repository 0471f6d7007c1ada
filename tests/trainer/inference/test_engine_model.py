"""A model at any layout generates what transformers does: with its cache, in a running batch, by beams."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megaconv.checkpoint import open_checkpoint
from megaconv.errors import LayoutError
from megaconv.model.fields import changed
from megaconv.model.layout import LayerSplit, Layout, split_layers
from megatron_lite.checkpoint.weights import load_weights
from megatron_lite.engine import Engine
from megatron_lite.inference.batching import generate
from megatron_lite.inference.beams import Beam, BeamSettings
from megatron_lite.inference.model import EngineModel
from megatron_lite.inference.requests import Request
from megatron_lite.inference.sampling import Sampling
from megatron_lite.inference.slots import Scored
from megatron_lite.models.masks import window_mask
from megatron_lite.parallel.grid import make_grid
from megatron_lite.settings.options import ModelOptions
from tests.trainer.inference.models import EOS, LENGTH, slots_of, tiny
from tests.trainer.parallel.small import MODELS as SMALL_MODELS
from tests.trainer.parallel.small import Case, batches, make_engine
from tests.trainer.parallel.worlds import World
from tests.transformers_oracle import BLOCKS

pytestmark = pytest.mark.oracle

DELTA_NETS: dict[str, Any] = {
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}
GRANITE: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}
GRANITE_HYBRID: dict[str, Any] = {
    **GRANITE,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 4,
    "mamba_d_state": 16,
    "shared_intermediate_size": 40,
    "layer_types": ["mamba", "attention", "mamba", "mamba"],
}
GEMMA_4: dict[str, Any] = {
    "head_dim": 12,
    "global_head_dim": 16,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "final_logit_softcapping": 3.0,
}
KEYS_AS_VALUES: dict[str, Any] = {"attention_k_eq_v": True, "num_global_key_value_heads": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "mistral, a window": ("mistral", {"sliding_window": 7}),
    "mixtral": (
        "mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "gpt2": ("gpt2", {}),
    "diffllama": ("diffllama", {"head_dim": 12, "num_key_value_heads": 4}),
    "openai_gpt": (
        "openai-gpt",
        {
            "n_embd": 64,
            "n_layer": 4,
            "n_head": 8,
            "n_positions": LENGTH,
            "tie_word_embeddings": True,
        },
    ),
    "modernbert_decoder": (
        "modernbert-decoder",
        {
            "local_attention": 12,
            "pad_token_id": 0,
            "sliding_window": 6,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "tie_word_embeddings": True,
        },
    ),
    "beam": (
        "beam",
        {
            "head_dim": 12,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "n_group": 2,
            "topk_group": 1,
            "mlp_layer_types": ["dense", "sparse"] * 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 6,
        },
    ),
    "dbrx": (
        "dbrx",
        {
            "d_model": 64,
            "attn_config": {"clip_qkv": 2.0, "kv_n_heads": 4, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    "gemma3_text": (
        "gemma3_text",
        {
            "head_dim": 16,
            "sliding_window": 7,
            "layer_types": [
                "sliding_attention",
                "full_attention",
                "sliding_attention",
                "sliding_attention",
            ],
            "query_pre_attn_scalar": 24,
        },
    ),
    "gemma4_unified_text": ("gemma4_unified_text", {**GEMMA_4, **KEYS_AS_VALUES}),
    "gemma4_text, layer inputs": (
        "gemma4_text",
        {
            **GEMMA_4,
            "hidden_size_per_layer_input": 6,
            "vocab_size_per_layer_input": 132,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
        },
    ),
    "gemma4_text, experts": (
        "gemma4_text",
        {
            **GEMMA_4,
            **KEYS_AS_VALUES,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "lfm3": (
        "lfm3",
        {
            "head_dim": 16,
            "sliding_window": 7,
            "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
            "conv_L_cache": 4,
        },
    ),
    "step3p5": (
        "step3p5",
        {
            "pad_token_id": 0,
            "head_dim": 16,
            "sliding_window": 7,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "num_sliding_attention_heads": 16,
            "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "share_expert_dim": 40,
            "swiglu_limits": [0.0, 0.2, 0.0, 0.0],
            "swiglu_limits_shared": [0.0, 0.3, 0.0, 0.4],
        },
    ),
    "laguna": (
        "laguna",
        {
            "head_dim": 12,
            "sliding_window": 7,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "num_attention_heads_per_layer": [8, 4, 12, 4],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "nemotron_nas": (
        "nemotron-nas",
        {
            "intermediate_size": None,
            "num_key_value_heads": None,
            "block_configs": BLOCKS,
            "use_cache": False,
        },
    ),
    "mimo_v2_flash": (
        "mimo_v2_flash",
        {
            "num_key_value_heads": 2,
            "head_dim": 12,
            "v_head_dim": 10,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 24,
        },
    ),
    "apertus": ("apertus", {}),
    "falcon_h1": (
        "falcon_h1",
        {
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_ssm": 128,
            "mamba_n_groups": 4,
            "mamba_d_state": 16,
            "key_multiplier": 0.5,
            "ssm_multipliers": [0.5, 0.25, 2.0, 3.0, 0.75],
            "mlp_multipliers": [0.5, 2.0],
        },
    ),
    "kimi_linear": (
        "kimi_linear",
        {
            "num_key_value_heads": 8,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "num_experts": 4,
            "num_experts_per_token": 2,
            "moe_intermediate_size": 24,
            "num_shared_experts": 1,
            "num_expert_group": 2,
            "topk_group": 1,
            "linear_head_dim": 12,
            "linear_num_heads": 4,
            "linear_conv_kernel_dim": 3,
            "layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention"],
            "model_max_length": 96,
        },
    ),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 16,
            "sliding_window": 7,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "llama4": (
        "llama4_text",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "intermediate_size": 24,
            "intermediate_size_mlp": 64,
            "moe_layers": [1, 3],
            "no_rope_layers": [1, 0, 1, 1],
            "attention_chunk_size": 7,
            "floor_scale": 4,
            "attn_scale": 0.3,
        },
    ),
    "deepseek_v32": (
        "deepseek_v32",
        {
            "num_key_value_heads": 8,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "index_n_heads": 3,
            "index_head_dim": 16,
            "index_topk": 6,
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "num_key_value_heads": 8,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "num_hidden_layers": 4,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 7,
            "intermediate_size": 24,
        },
    ),
    "exaone4": ("exaone4", {"sliding_window": 7}),
    "minimax_m2": (
        "minimax_m2",
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24},
    ),
    "bamba": (
        "bamba",
        {
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_n_groups": 4,
            "mamba_d_state": 16,
        },
    ),
    "granite": ("granite", GRANITE),
    "granite hybrid": (
        "granitemoehybrid",
        {**GRANITE_HYBRID, "num_local_experts": 0, "position_embedding_type": "rope"},
    ),
    "granite hybrid, experts": (
        "granitemoehybrid",
        {
            **GRANITE_HYBRID,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 24,
        },
    ),
    "lfm2": (
        "lfm2",
        {
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "conv_L_cache": 4,
            "block_multiple_of": 8,
        },
    ),
    "mamba2": (
        "mamba2",
        {
            "num_heads": 8,
            "head_dim": 16,
            "n_groups": 4,
            "state_size": 16,
            "time_step_limit": (0.0, float("inf")),
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            "hybrid_override_pattern": "M*-E",
            "head_dim": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 12,
            "n_groups": 4,
            "ssm_state_size": 16,
            "n_routed_experts": 4,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 24,
            "use_cache": False,  # with a cache, transformers doesn't limit the time steps of new tokens
        },
    ),
    "lara_mini": (
        "lara_mini",
        {
            **DELTA_NETS,
            "layer_types": [
                "linear_attention",
                "sliding_attention",
                "full_attention",
                "linear_attention",
            ],
            "sliding_window": 5,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
        },
    ),
    "qwen3_5": ("qwen3_5_text", DELTA_NETS),
    "qwen3_next": (
        "qwen3_next",
        {
            **DELTA_NETS,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
        },
    ),
}
PROMPTS = [(3, 17, 90, 6, 22), (3, 60), (3, *range(40, 60)), (8, 9, 8)]
BEAMS = Request(PROMPTS[0], 7, stop_ids=frozenset([EOS, 20]), beams=BeamSettings(3, 0.8))
WANTED = [
    Request(prompt, 6 + 3 * number, Sampling(0), frozenset([EOS]))
    for number, prompt in enumerate(PROMPTS)
]


def run(rank: int, directory: Path, tp: int, pp: int, dp: int, ep: int, vpp: int) -> Any:
    """(tokens of all requests in a running batch, of each alone, beams, scores, one beside another in padding) on rank 0."""
    checkpoint = open_checkpoint(directory)
    config = checkpoint.config
    layers = split_layers(config.layer_count, pp, vpp, LayerSplit())
    grid = make_grid(
        Layout(tp, pp, vpp, ep, stage_layers=layers),
        dp,
        torch.device("cpu"),
        experts=config.experts.count > 0,
    )
    engine = Engine(config, grid, ModelOptions(dtype="float32", trains=False), None)
    load_weights(engine, checkpoint.tensors)
    model = EngineModel(engine, 3, LENGTH)
    if rank:
        model.follow()
        grid.close()
        return None
    together = generate(model, [*WANTED[:2], BEAMS, *WANTED[2:]])
    answers = [answer.tokens for answer in together if not answer.beams]
    alone = [generate(model, [wanted])[0].tokens for wanted in WANTED]
    beams = list(generate(model, [BEAMS])[0].beams)
    assert [beam.tokens for beam in together[2].beams] == [beam.tokens for beam in beams]
    scores = model.score(PROMPTS, 2)
    model.close()
    grid.close()
    return answers, alone, beams, scores


@pytest.fixture(scope="module", params=MODELS)
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, Any]:
    kind, settings = MODELS[request.param]
    model, directory = tiny(kind, **settings), tmp_path_factory.mktemp("model")
    model.save_pretrained(directory)
    return request.param, directory, expected(model)


Expected = tuple[list[list[int]], list[Beam], list[Scored]]


def expected(model: Any) -> Expected:
    """The answers of transformers: greedy ones, those of beams, and log-probabilities of rows."""
    greedy = [
        continued(model, wanted.prompt, max_new_tokens=wanted.max_tokens)[0][0] for wanted in WANTED
    ]
    rows, scores = continued(
        model, PROMPTS[0], max_new_tokens=BEAMS.max_tokens, num_beams=3, num_return_sequences=3,
        length_penalty=0.8, eos_token_id=list(BEAMS.stop_ids),
    )  # fmt: skip
    beams = [Beam(tuple(row), score) for row, score in zip(rows, scores, strict=True)]
    return greedy, beams, slots_of(model).score(PROMPTS, 2)


def continued(
    model: Any, prompt: tuple[int, ...], **settings: Any
) -> tuple[list[list[int]], list[float]]:
    found = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False, pad_token_id=0,
        output_scores=True, return_dict_in_generate=True, **settings,
    )  # fmt: skip
    scores = found.sequences_scores.tolist() if "sequences_scores" in found else []
    return found.sequences[:, len(prompt) :].tolist(), scores


def compare(found: Any, wanted: Expected) -> None:
    answers, alone, beams, scores = found
    assert answers == alone == wanted[0]
    for beam, theirs in zip(beams, wanted[1], strict=True):
        assert beam.tokens == theirs.tokens[: len(beam.tokens)]
        assert set(theirs.tokens[len(beam.tokens) :]) <= {0, EOS}  # padding
    assert [beam.score for beam in beams] == pytest.approx(
        [beam.score for beam in wanted[1]], abs=1e-4
    )
    for mine, theirs in zip(scores, wanted[2], strict=True):
        torch.testing.assert_close(mine.log_probs, theirs.log_probs, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(mine.top_log_probs, theirs.top_log_probs, atol=1e-4, rtol=1e-4)
        assert torch.equal(mine.greedy, theirs.greedy)
        assert torch.equal(mine.top_ids, theirs.top_ids)


def test_one_process_generates_what_transformers_does(saved: tuple[str, Path, Any]) -> None:
    _, directory, wanted = saved
    compare(run(0, directory, 1, 1, 1, 1, 1), wanted)


LAYOUTS = {
    "tp2": (2, 1, 1, 1, 1), "pp2": (1, 2, 1, 1, 1), "tp2 pp2": (2, 2, 1, 1, 1), "pp2 vpp2": (1, 2, 1, 1, 2),
    "dp2": (1, 1, 2, 1, 1), "ep2": (1, 1, 2, 2, 1), "tp2 ep2": (2, 1, 1, 2, 1),
}  # fmt: skip
WITH_EXPERTS = (
    *("mixtral", "deepseek_v3", "deepseek_v32", "llama4", "gpt_oss", "minimax_m2"),
    *("lara_mini", "nemotron_h", "qwen3_next", "granite hybrid, experts", "gemma4_text, experts"),
    *("beam", "dbrx", "mimo_v2_flash", "laguna", "step3p5", "kimi_linear"),
)
FITTING = [
    (name, layout)
    for name in MODELS
    for layout, sizes in LAYOUTS.items()
    if sizes[3] == 1 or name in WITH_EXPERTS
]
"""Experts are shared out where there are any."""
QUICK = {
    ("qwen3", "tp2 pp2"),
    ("mixtral", "tp2 ep2"),
    ("mixtral", "ep2"),
    ("nemotron_h", "tp2 ep2"),
    ("qwen3_5", "tp2 pp2"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "layout"), FITTING, indirect=["saved"])
def test_every_layout_generates_what_transformers_does(
    layout: str, saved: tuple[str, Path, Any], world: World
) -> None:
    _, directory, wanted = saved
    sizes = LAYOUTS[layout]
    compare(world.run(sizes[0] * sizes[1] * sizes[2], run, directory, *sizes)[0], wanted)


@pytest.mark.parametrize(("name", "layout"), sorted(QUICK))
def test_sharded_models_generate_what_transformers_does(
    name: str, layout: str, tmp_path: Path, world: World
) -> None:
    kind, settings = MODELS[name]
    model = tiny(kind, **settings)
    model.save_pretrained(tmp_path)
    sizes = LAYOUTS[layout]
    compare(world.run(sizes[0] * sizes[1] * sizes[2], run, tmp_path, *sizes)[0], expected(model))


def passes(rank: int, directory: Path, ep: int) -> list[int]:
    """Rows that this rank computed of five that are scored and of four that are generated, in the order of its passes."""
    checkpoint = open_checkpoint(directory)
    layout = Layout(
        1, 1, 1, ep, stage_layers=split_layers(checkpoint.config.layer_count, 1, 1, LayerSplit())
    )
    grid = make_grid(layout, 2, torch.device("cpu"), experts=checkpoint.config.experts.count > 0)
    engine = Engine(checkpoint.config, grid, ModelOptions(dtype="float32", trains=False), None)
    load_weights(engine, checkpoint.tensors)
    model, found, last_stage = EngineModel(engine, 3, LENGTH), [], engine.last_stage

    def counted(batch: Any, cache: Any = None) -> Any:
        found.append(len(batch.tokens))
        return last_stage(batch, cache)

    engine.last_stage = counted  # type: ignore[method-assign]
    if rank:
        model.follow()
    else:
        model.score([*PROMPTS, PROMPTS[0]])
        generate(model, [Request((3, 9, number), 2, Sampling(0)) for number in range(4)])
        model.close()
    grid.close()
    return found


def test_data_parallel_ranks_share_rows(tmp_path: Path, world: World) -> None:
    tiny("llama").save_pretrained(tmp_path)
    assert world.run(2, passes, tmp_path, 1) == [[3, 2, 2], [2, 2, 2]]


@pytest.mark.parametrize("window", [None, 5])
def test_a_model_that_was_scored_with_can_be_trained(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors that inference keeps for passes of the same length are useless to autograd, and must not be reused."""
    monkeypatch.setitem(
        SMALL_MODELS, "a window", changed(SMALL_MODELS["qwen3"], {"layers.window": window})
    )
    case = Case("a window")
    window_mask.cache_clear()
    engine, untouched, step = make_engine(case), make_engine(case), list(batches(case, 0))
    length = step[0].tokens.shape[1]
    EngineModel(engine, 1, length).score([range(length + 1)])
    assert engine.train_step(step, 1e-3).loss == untouched.train_step(step, 1e-3).loss


def test_context_parallelism_is_refused(tmp_path: Path, world: World) -> None:
    tiny("llama").save_pretrained(tmp_path)
    assert all(
        "context parallelism" in said for said in world.run(2, at_context_parallelism, tmp_path)
    )


def at_context_parallelism(rank: int, directory: Path) -> str:
    checkpoint = open_checkpoint(directory)
    layers = split_layers(checkpoint.config.layer_count, 1, 1, LayerSplit())
    grid = make_grid(Layout(1, 1, 1, 1, stage_layers=layers), 1, torch.device("cpu"), cp=2)
    engine = Engine(checkpoint.config, grid, ModelOptions(dtype="float32", trains=False), None)
    with pytest.raises(LayoutError) as refused:
        EngineModel(engine, 1, LENGTH)
    grid.close()
    return str(refused.value)
