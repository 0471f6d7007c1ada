"""Models that are converted and not trained: transformers computes the same logits from what we write.

The config.json that it reads is one that we write ourselves, from the description of the model alone.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from megaconv.errors import CheckpointError, NotExpressible
from megaconv.families import family, read_config
from megaconv.model.fields import fields_of
from megaconv.model.meaning import lost_fields
from tests.config_models import raw_config
from tests.savers.test_savers import write_model
from tests.transformers_oracle import CONVERTED, compute, create, family_of, load

SLOW = ("deepseek_v4, all settings",)
EACH = [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in CONVERTED]
REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("gemma4_text", {"use_bidirectional_attention": "all"}, "'all' is not supported"),
    ("gemma4_text", {"num_kv_shared_layers": 4}, "should be a number below 4, found 4"),
    ("gemma4_text", {"num_kv_shared_layers": 3}, "no earlier layer has a window"),
    ("gemma4_text", {"per_layer_config": {"0": {"hidden_size": 5}}}, "has hidden_size, which"),
    ("gemma4_text", {"use_double_wide_mlp": True}, "not supported with enable_moe_block"),
    ("gemma3n_text", {"altup_num_inputs": 2}, "altup_num_inputs 2 is not supported"),
    ("gemma3n_text", {"activation_sparsity_pattern": [0.5]}, "lists 1 layer, the model has 4"),
    ("deepseek_v4", {"compress_ratios": [0, 2, 4, 128]}, "compress_ratios has 2; this architecture supports 0, 4, 128"),
    ("deepseek_v4", {"compress_ratios": [0, 4]}, "compress_ratios lists 2 layers, the model has 4"),
    ("deepseek_v4", {"layer_types": ["full_attention"] * 4}, "layer_types has 'full_attention'"),
    ("deepseek_v4", {"mlp_layer_types": ["dense", "moe", "moe", "moe"]}, "mlp_layer_types has 'dense'"),
    ("deepseek_v4", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
    ("deepseek_v4", {"n_shared_experts": 2}, "n_shared_experts 2 is not supported"),
    ("deepseek_v4", {"o_groups": 3}, "can't have 8 heads in 3 groups of 6"),
    ("deepseek_v4", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope scaling 'linear' is not supported"),
    ("deepseek_v4", {"rope_parameters": {"main": {"rope_type": "yarn"}, "compress": {}}}, "rope_parameters scales main"),
    ("deepseek_v4", {"rope_parameters": {"main": {"partial_rotary_factor": 0.5}, "compress": {"partial_rotary_factor": 0.25}}},
     "two values of partial_rotary_factor, 0.5 and 0.25"),
    ("doge", {"is_moe": True}, "is_moe True is not supported"),
    ("doge", {"keep_window_size": 0}, "keep_window_size should be a positive number, found 0"),
    ("doge", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ("falcon_h1", {"projectors_bias": True}, "projectors_bias True is not supported"),
    ("falcon_h1", {"ssm_multipliers": [1.0]}, "should be 5 numbers"),
    ("laguna", {"num_attention_heads_per_layer": [8, 8, 8, 6]}, "has 6; expected a multiple of num_key_value_heads 4"),
    ("laguna", {"num_attention_heads_per_layer": [8]}, "lists 1 layer, the model has 4"),
    ("laguna", {"gating": "per-token"}, "gating 'per-token' is not supported"),
    ("laguna", {"moe_router_logit_softcapping": 30.0}, "moe_router_logit_softcapping 30.0 is not supported"),
    ("lfm3", {"conv_bias": True}, "conv_bias True is not supported"),
    ("lfm3", {"layer_types": ["conv", "chunked_attention"] * 2}, "layer_types has 'chunked_attention'"),
    ("lfm3", {"layer_types": ["conv"] * 3}, "layer_types lists 3 layers, the model has 4"),
    ("lfm3", {"rope_parameters": {"full_attention": {}}}, "should have full_attention and sliding_attention"),
    ("lfm3", {"rope_parameters": {"full_attention": {"rope_type": "yarn"}, "sliding_attention": {}}}, "rope of types 'yarn'"),
    ("lfm3", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling .* is not supported"),
    ("lfm3", {"sliding_window": None}, "sliding_window should be a positive number, found None"),
    ("mimo_v2_flash", {"num_attention_heads": 4}, "num_attention_heads 4 is not a multiple of 8"),
    ("mimo_v2_flash", {"hybrid_layer_pattern": [0, 1, 1, 1]}, r"hybrid_layer_pattern is \[0, 1, 1, 1\], but the keys"),
    ("mimo_v2_flash", {"layernorm_epsilon": 1e-2}, "layernorm_epsilon is 0.01, but the keys"),
    ("bailing_hybrid", {"q_lora_rank": 7}, "q_lora_rank 7 is not supported"),
    ("hy_v4", {"attention_bias": True}, "attention_bias True is not supported"),
    ("hy_v4", {"enable_ihc": False}, "enable_ihc False is not supported"),
    ("hy_v4", {"gating_type": "headwise"}, "gating_type 'headwise' is not supported"),
    ("hy_v4", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ("hy_v4", {"indexer_types": ["shared"] + ["full"] * 3}, "first layer can't share positions"),
    ("hy_v4", {"layer_types": ["full_attention"] * 4}, "layer_types has 'full_attention'"),
    ("hy_v4", {"q_lora_rank": None}, "the model's indexer can't have"),
    ("hy_v4", {"swiglu_limit": 0.0}, "swiglu_limit should be a positive number, found 0.0"),
    ("kimi_k3", {"activation_situ_beta": 0.0}, "activation_situ_beta should be a positive number"),
    ("kimi_k3", {"hidden_act": "silu"}, "hidden_act 'silu' is not supported"),
    ("kimi_k3", {"kv_lora_rank": None}, "kv_lora_rank should be a positive number"),
    ("kimi_k3", {"linear_attn_config": None}, "should have full_attn_layers and kda_layers, found nothing"),
    ("kimi_k3", {"mla_use_nope": False}, "mla_use_nope False is not supported"),
    ("kimi_k3", {"num_key_value_heads": 4}, "num_key_value_heads 4 is not supported"),
    ("kimi_k3", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers 1 is not supported"),
    ("kimi_k3", {"routed_expert_hidden_size": None}, "latent_moe_use_norm is not supported without routed_expert_hidden_size"),
    ("kimi_k3", {"tie_word_embeddings": True}, "tie_word_embeddings True is not supported"),
    ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope False is not supported"),
    ("kimi_linear", {"linear_attn_config": {"gate_lower_bound": -5.0}}, "gate_lower_bound -5.0"),
    (
        "kimi_linear",
        {"linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [4]}},
        "should list each of 4 layers once",
    ),
    ("qwen4_exp_text", {"ple_layer_ids": [2]}, "layer 2, which is no layer of linear_attention"),
    ("qwen4_exp_text", {"ple_layer_ids": [0]}, "ple_layer_ids should list layers from 1 to 4"),
    ("qwen4_exp_text", {"ple_embed_dim": 25}, "ple_embed_dim 25 can't be divided among 4 hashes"),
    ("qwen4_exp_text", {"eos_token_id": None}, "eos_token_id should be the token at which n-grams end"),
    ("qwen4_exp_text", {"heads_per_ngram": 10**9}, "can't be divided|can't have"),
    ("qwen4_exp_text", {"heads_per_ngram": 3000, "ple_embed_dim": 6000}, "can't have 6,000 hashes in 2 layers"),
    ("qwen4_exp_text", {"split_ngram_parts": 10**6}, "can't have tables of 1,000,000 parts"),
    ("qwen4_exp_text", {"ngram_vocab_size_base": 10**12}, "ngram_vocab_size_base should be at most"),
    ("qwen4_exp_text", {"indexer_n_heads": None}, "indexer_n_heads should be a positive number, found None"),
    ("qwen4_exp_text", {"indexer_kv_heads": 2}, "indexer_kv_heads 2 is not supported"),
    ("codegen", {"num_attention_heads": 2}, "n_head should be a multiple of 4"),
    ("qwen4_exp_text", {"indexer_budget": 5}, "indexer_compress_ratio 2 doesn't divide indexer_budget 5"),
    ("qwen4_exp_text", {"indexer_head_dim": 4}, "indexer_head_dim should be 6 or more"),
    ("qwen4_exp_text", {"output_gate_type": "relu"}, "output_gate_type 'relu' is not supported"),
    ("qwen4_exp_text", {"layer_types": ["sliding_attention"] * 4}, "layer_types has 'sliding_attention'"),
    ("qwen4_exp_text", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok 3 is not supported"),
    ("phimoe", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ("phimoe", {"router_jitter_noise": "none"}, "router_jitter_noise should be a number, found 'none'"),
    ("phimoe", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope scaling 'linear' is not supported"),
    ("phimoe", {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0] * 3}},
     "short_mscale should be a number, found None"),
    ("step3p5", {"attention_other_setting": {"head_dim": 7}}, "head_dim 7, which is not supported"),
    ("step3p5", {"rope_parameters": None, "rope_theta": [1.0, 2.0, 3.0, 2.0]}, "differ between layers of full_attention"),
    ("step3p5", {"num_sliding_attention_heads": 6}, "a layer has 6 heads .* expected a multiple of the 4 key/value heads"),
    ("step3p5", {"sliding_window": None}, "sliding_window should be a positive number"),
    ("minimax_m3_vl_text", {"swiglu_alpha": 2.0}, "swiglu_alpha 2.0 is not supported"),
    ("minimax_m3_vl_text", {"sparse_attention_config": {"sparse_init_block": 1}}, "sparse_init_block 1, only 0"),
    ("minimax_m3_vl_text", {"sparse_attention_config": {"sparse_disable_index_value": [0] * 4}}, "indexers with values"),
    ("molmo2_text", {"use_qk_norm": False}, "use_qk_norm False is not supported"),
    ("molmo2_text", {"tie_word_embeddings": True}, "tie_word_embeddings True is not supported"),
    ("molmo2_text", {"qk_norm_type": "gemma"}, "qk_norm_type 'gemma' is not supported"),
    ("molmo2_text", {"rope_scaling_layers": [4]}, "should list layers from 0 to 3"),
    ("molmo2_text", {"additional_vocab_size": -1}, "additional_vocab_size should be a number"),
    ("nemotron_nas", {"block_configs": None}, "block_configs should be a list"),
    (
        "nemotron_nas",
        {"block_configs": [{"attention": {"replace_with_linear": True}, "ffn": {"no_op": True}}] * 4},
        "attention.replace_with_linear True in layer 0, which is not supported",
    ),
    (
        "nemotron_nas",
        {"block_configs": [{"attention": {"no_op": True}, "ffn": {"moe": {"experts": 4}}}] * 4},
        r"ffn.moe .* in layer 0, which is not supported",
    ),
)  # fmt: skip
"""(family, keys of config.json, words of the message)."""


NO_NAMES = "has no names in Megatron's formats"
REFUSALS = {
    "molmo2_text, some layers scaled": "layers.scales_positions|norms on q and k",
    "glm_moe_dsa, shared indexers": "layers.shares_index|it has experts",
    "lfm3, tied": "biases on all linear layers|norms on q and k",
}
"""The reasons for which Megatron refuses models of families that it otherwise supports."""


@pytest.mark.parametrize(("name", "keys", "words"), REFUSED)
def test_features_that_converted_families_lack_are_refused_by_name(
    name: str, keys: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        family(name).read_hf(raw_config(name, **keys))


def test_keys_of_a_published_mimo_that_repeat_others_are_read() -> None:
    """Its sliding_window_size doesn't count the token itself."""
    repeated = {
        "hybrid_layer_pattern": [1, 0, 1, 0],
        "moe_layer_freq": [0, 1, 0, 1],
        "swa_num_key_value_heads": 8,
        "swa_v_head_dim": 5,
        "swa_rope_theta": 7000,
        "layernorm_epsilon": 1e-5,
        "partial_rotary_factor": 0.5,
        "sliding_window_size": 15,
        "routed_scaling_factor": None,
        "scoring_func": "sigmoid",
    }
    table, raw = family("mimo_v2_flash"), raw_config("mimo_v2_flash")
    assert not lost_fields(table.read_hf(raw), table.read_hf(raw | repeated))


@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text"])
def test_keys_and_values_that_nothing_computes_with_are_left_out_with_a_warning(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Published models hold them."""
    source = write_model(name, tmp_path / "hf")
    weights = load_file(source / "model.safetensors")
    unused = {
        "model.layers.3.self_attn.k_proj.weight": torch.ones(4, 4),
        "model.layers.3.self_attn.k_norm.weight": torch.ones(4),
    }
    save_file(weights | unused, source / "model.safetensors", metadata={"format": "pt"})
    megaconv.convert(source, tmp_path / "out", saver="hf", verify=True, workers=1)
    assert "keys and values of layers that share those of earlier layers" in caplog.text
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == weights.keys()


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("converted")
    for name, variant in CONVERTED.items():
        create(variant, root / name)
    return {name: root / name for name in CONVERTED}


def write_own_config(source: Path, output: Path, **settings: object) -> None:
    """Replace config.json by the one that its description alone gives."""
    path = output / "config.json"
    path.write_text(json.dumps(json.loads((source / "config.json").read_text()) | settings))
    found, config = read_config(path)
    path.write_bytes(found.config_json(replace(config, hf=None)))


@pytest.mark.oracle
@pytest.mark.parametrize("name", EACH)
def test_transformers_computes_the_same_logits_from_what_is_written(
    name: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    source, output = sources[name], tmp_path / "out"
    assert megaconv.convert(source, output, saver="hf", verify=True, workers=1).verified
    tokens = torch.randint(7, 100, (2, 24), generator=torch.Generator().manual_seed(3))
    expected = compute(load(source), tokens)
    assert torch.equal(compute(load(output), tokens), expected)
    write_own_config(source, output)
    assert torch.equal(compute(load(output), tokens), expected)
    for words, settings in CONVERTED[name].others.items():
        write_own_config(source, output, **settings)
        other = compute(load(output), tokens)
        assert not torch.equal(other, expected), words
        assert torch.equal(compute(load(source, **settings), tokens), other), words


@pytest.mark.oracle
@pytest.mark.parametrize("name", EACH)
def test_every_other_setting_is_another_model(name: str, sources: dict[str, Path]) -> None:
    raw = json.loads((sources[name] / "config.json").read_text())
    table = family(family_of(CONVERTED[name]))
    for words, settings in CONVERTED[name].others.items():
        assert lost_fields(table.read_hf(raw), table.read_hf(raw | settings)), words


@pytest.mark.oracle
@pytest.mark.parametrize("name", EACH)
def test_megatrons_formats_are_refused_at_once(
    name: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    for saver in ("core", "legacy"):
        with pytest.raises(NotExpressible, match=REFUSALS.get(name, NO_NAMES)):
            megaconv.convert(sources[name], tmp_path / "out", saver=saver)
    assert not list(tmp_path.iterdir())


# Step 3.7, whose language model transformers computes inside the whole model only.

STEP: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 88, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16,
    "vocab_size": 131, "max_position_embeddings": 96, "rms_norm_eps": 1e-3, "sliding_window": 7, "pad_token_id": 1,
    "layer_types": ["full_attention", "sliding_attention"] * 2, "num_sliding_attention_heads": 16,
    "mlp_layer_types": ["dense", "sparse", "sparse", "dense"], "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "share_expert_dim": 40, "moe_router_scaling_factor": 3.0, "swiglu_limits": [0.0, 0.2, 0.0, 0.0],
    "swiglu_limits_shared": [0.0, 0.3, 0.0, 0.4],
    "rope_parameters": {
        "full_attention": {"rope_type": "llama3", "rope_theta": 5000.0, "partial_rotary_factor": 0.5, "factor": 2.0, "low_freq_factor": 1.0,
                           "high_freq_factor": 32.0, "original_max_position_embeddings": 64},
        "sliding_attention": {"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 1.0},
    },
}  # fmt: skip
STEP_OTHERS: tuple[dict[str, Any], ...] = (
    {"sliding_window": 6},
    {"swiglu_limits": None},
    {"swiglu_limits_shared": [0.0, 0.3, 0.0, 0.3]},
    {"query_pre_attn_scalar": 4},
    {"moe_router_scaling_factor": 2.0},
)
OLDER_STEP: dict[str, Any] = {
    "layer_types": ["full_attention", "sliding_attention"] * 3,
    "attention_other_setting": {
        "num_attention_heads": 16,
        "num_attention_groups": 4,
        "head_dim": 16,
    },
    "moe_layers_enum": "1,2",
    "num_nextn_predict_layers": 2,
    "rope_theta": [5000.0, 700.0] * 3,
    "partial_rotary_factors": [0.5, 1.0] * 3,
    "rope_scaling": {
        name: value
        for name, value in STEP["rope_parameters"]["full_attention"].items()
        if name not in ("rope_theta", "partial_rotary_factor")
    },
    "swiglu_limits": [0.0, 0.2, 0.0, 0.0, 0.0, 0.0],
}
"""The same in the keys of published files."""


def step(**settings: Any) -> dict[str, Any]:
    """A config.json of a whole Step 3.7."""
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    text = {"model_type": "step3p5", **STEP, **settings}
    return {
        "model_type": "step3p7",
        "text_config": text,
        "vision_config": vision,
        "image_token_id": 130,
    }


def step_logits(source: Path, raw: dict[str, Any], tokens: torch.Tensor) -> torch.Tensor:
    """The logits of the whole model, with the weights of a directory and this configuration."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Step3p7Config(**raw)
    model = transformers.Step3p7ForConditionalGeneration.from_pretrained(
        source, config=config, dtype=torch.float32
    )
    return compute(model.eval(), tokens)


@pytest.mark.oracle
def test_transformers_computes_the_same_logits_from_a_step_3_7(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(20)
    raw, tokens = step(), torch.randint(7, 120, (2, 24))
    model = transformers.Step3p7ForConditionalGeneration(transformers.Step3p7Config(**raw))
    with torch.no_grad():
        for _, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_floating_point():
                tensor.normal_(0.0, 0.2)
    model.save_pretrained(tmp_path / "hf")
    expected = step_logits(tmp_path / "hf", step(), tokens)
    whole, text = tmp_path / "whole", tmp_path / "text"
    megaconv.convert(tmp_path / "hf", whole, saver="hf", verify=True, workers=1)
    megaconv.convert(
        tmp_path / "hf", text, saver="hf", workers=1, text_only=True, base=tmp_path / "hf"
    )
    assert torch.equal(step_logits(whole, step(), tokens), expected)
    assert torch.equal(step_logits(text, step(), tokens), expected)
    table = family("step3p5")
    for settings in ({}, *STEP_OTHERS):
        own = table.write_hf(table.read_hf(STEP | settings))
        found = step_logits(whole, step(**own), tokens)
        assert torch.equal(found, step_logits(whole, step(**settings), tokens)), settings
        assert torch.equal(found, expected) is not bool(settings), settings


def test_a_step_3_5_in_the_keys_of_published_files_is_the_same_model() -> None:
    older = {name: value for name, value in STEP.items() if name not in (
        "rope_parameters", "mlp_layer_types", "num_sliding_attention_heads")}  # fmt: skip
    table = family("step3p5")
    assert fields_of(table.read_hf(older | OLDER_STEP)) == fields_of(table.read_hf(STEP))


# MiniMax M3, whose published files name and hold tensors otherwise than transformers' class of the language model.


def test_a_minimax_m3_in_the_keys_of_published_files_is_the_same_model() -> None:
    table, raw = family("minimax_m3_vl_text"), raw_config("minimax_m3_vl_text", rope_theta=5e5)
    sparse = [0, 1, 0, 1]
    older = {
        "sparse_num_index_heads": 4, "sparse_index_dim": 6, "sparse_block_size": 8, "sparse_topk_blocks": 3, "sparse_local_block": 2,
        "sparse_attention_freq": sparse, "sparse_disable_index_value": sparse, "use_sparse_attention": True, "sparse_init_block": 0,
        "sparse_score_type": "max",
    }  # fmt: skip
    published = {name: value for name, value in raw.items() if not name.startswith("index_")}
    published = {
        **published,
        "layer_types": None,
        "mlp_layer_types": None,
        "moe_layer_freq": sparse,
    }
    found = table.read_hf(published | {"sparse_attention_config": older})
    assert fields_of(found) == fields_of(table.read_hf(raw))


@pytest.mark.oracle
def test_transformers_computes_the_same_logits_from_a_minimax_m3(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    whole, text = (
        transformers.MiniMaxM3SparseForConditionalGeneration,
        transformers.MiniMaxM3VLForCausalLM,
    )
    torch.manual_seed(20)
    language = {**CONVERTED["minimax_m3_vl_text"].settings, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8,
                "num_key_value_heads": 4, "vocab_size": 131, "max_position_embeddings": 96}  # fmt: skip
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
    }
    config = transformers.MiniMaxM3VLConfig(
        text_config=language, vision_config={**vision, "patch_size": 14}, projector_hidden_size=32,
        image_token_index=129, video_token_index=130,
    )  # fmt: skip
    model, tokens = whole(config), torch.randint(7, 120, (2, 24))
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "inv_freq" not in name:
                tensor.normal_(0.0, 0.2)
    model.save_pretrained(tmp_path / "hf")
    expected = compute(whole.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval(), tokens)
    for words, kind in (({}, whole), ({"text_only": True}, text)):
        output = tmp_path / kind.__name__
        megaconv.convert(tmp_path / "hf", output, saver="hf", verify=True, workers=1, **words)
        again = kind.from_pretrained(output, dtype=torch.float32).eval()
        assert torch.equal(compute(again, tokens), expected)
    before, after = (
        {name for name in load_file(path / "model.safetensors") if "language_model" in name}
        for path in (tmp_path / "hf", tmp_path / whole.__name__)
    )
    assert before == after
    assert any(".block_sparse_moe.experts.3.w1." in name for name in after)
