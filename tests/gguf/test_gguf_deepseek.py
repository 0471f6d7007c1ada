"""DeepSeek V2 and V3 as GGUF: tensors against a restatement of llama.cpp's rules in numpy, names against those that it lists."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from megaconv.engine.fingerprints import fingerprint_source
from megaconv.engine.opening import open_source
from megaconv.input import find_input
from megaconv.model.meaning import config_differences
from megaconv.options import LoadOptions
from tests.families.test_families import write_model
from tests.gguf.test_gguf import Reader, written
from tests.runs import assert_refused, run

YARN = {
    "type": "yarn", "factor": 40, "original_max_position_embeddings": 8, "mscale": 0.707, "mscale_all_dim": 0.707,
    "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
SHAPES = {
    "hidden_size": 64, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 32, "v_head_dim": 16,
    "intermediate_size": 96, "moe_intermediate_size": 32,
}  # fmt: skip
DIRECT = {"q_lora_rank": None}
CASES = [
    pytest.param("deepseek_v3", {"n_group": 1, "topk_group": 1, "norm_topk_prob": True}, id="v3"),
    pytest.param(
        "deepseek_v3",
        {**DIRECT, "norm_topk_prob": True, "num_nextn_predict_layers": 0},
        id="moonlight",
    ),
    pytest.param("deepseek_v2", {**DIRECT, "routed_scaling_factor": 1.0}, id="v2-lite"),
    pytest.param(
        "deepseek_v2", {"routed_scaling_factor": 16.0, "tie_word_embeddings": True}, id="v2"
    ),
]
LISTED = {
    "token_embd", "output_norm", "output", "attn_norm", "attn_q", "attn_q_a", "attn_q_b", "attn_kv_a_mqa", "attn_k_b",
    "attn_v_b", "attn_q_a_norm", "attn_kv_a_norm", "attn_output", "ffn_gate_inp", "ffn_norm", "ffn_gate", "ffn_down", "ffn_up",
    "ffn_gate_exps", "ffn_down_exps", "ffn_up_exps", "ffn_gate_shexp", "ffn_down_shexp", "ffn_up_shexp", "exp_probs_b",
}  # fmt: skip
"""The tensors of these models that gguf 0.19 lists (gguf.MODEL_TENSORS[MODEL_ARCH.DEEPSEEK2])."""


def model(path: Path, family: str, keys: dict[str, Any]) -> Path:
    """Write a model in bfloat16. The biases that choose experts are float32, as DeepSeek publishes them."""
    write_model(path, family, **{**SHAPES, "rope_scaling": YARN, **keys})
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("e_score_correction_bias"):
            tensors[name] = tensor.float() + 2**-20
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def expected_tensors(source: Path) -> dict[str, torch.Tensor]:
    """GGUF's names -> what llama.cpp's converter makes of the model's tensors, in their dtype."""
    config, weights = (
        json.loads((source / "config.json").read_text()),
        load_file(source / "model.safetensors"),
    )
    heads, nope, v = (
        config[key] for key in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim")
    )
    found = {
        "token_embd": weights["model.embed_tokens.weight"],
        "output_norm": weights["model.norm.weight"],
    }
    if not config.get("tie_word_embeddings"):
        found["output"] = weights["lm_head.weight"]
    plain = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
        "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
        "self_attn.o_proj": "attn_output", "mlp.gate": "ffn_gate_inp", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "mlp.shared_experts.gate_proj": "ffn_gate_shexp", "mlp.shared_experts.up_proj": "ffn_up_shexp",
        "mlp.shared_experts.down_proj": "ffn_down_shexp",
    }  # fmt: skip
    for layer in range(config["num_hidden_layers"]):
        theirs, ours = f"model.layers.{layer}.", f"blk.{layer}."
        found |= {
            ours + new: weights[f"{theirs}{old}.weight"]
            for old, new in plain.items()
            if f"{theirs}{old}.weight" in weights
        }
        both = weights[theirs + "self_attn.kv_b_proj.weight"].reshape(heads, nope + v, -1)
        found[ours + "attn_k_b"], found[ours + "attn_v_b"] = (
            both[:, :nope].transpose(1, 2),
            both[:, nope:],
        )
        if theirs + "mlp.experts.0.up_proj.weight" in weights:
            for kind in ("gate", "up", "down"):
                each = [
                    weights[f"{theirs}mlp.experts.{expert}.{kind}_proj.weight"]
                    for expert in range(config["n_routed_experts"])
                ]
                found[f"{ours}ffn_{kind}_exps"] = torch.stack(each)
        if (bias := theirs + "mlp.gate.e_score_correction_bias") in weights:
            found[ours + "exp_probs_b"] = weights[bias]
    return {
        f"{name}.{'bias' if name.endswith('exp_probs_b') else 'weight'}": tensor
        for name, tensor in found.items()
    }


@pytest.mark.parametrize(("family", "keys"), CASES)
def test_tensors_are_the_models_under_the_names_that_llama_cpp_lists(
    family: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    source = model(tmp_path / "hf", family, keys)
    found, expected = written(source, tmp_path / "out", "tokenizer=none"), expected_tensors(source)
    assert found.tensors.keys() == expected.keys()
    assert {re.sub(r"^blk\.\d+\.", "", name).rpartition(".")[0] for name in found.tensors} <= LISTED
    for name, tensor in expected.items():
        is_float32 = tensor.dim() == 1 or "ffn_gate_inp" in name
        sizes, kind, content = found.tensors[name]
        assert (sizes, kind) == (list(reversed(tensor.shape)), 0 if is_float32 else 30), name
        stored = tensor.float() if is_float32 else tensor
        assert content == stored.contiguous().view(torch.uint8).numpy().tobytes(), name


@pytest.mark.parametrize(("family", "keys"), CASES)
def test_the_file_alone_gives_the_same_model_again(
    family: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    source = model(tmp_path / "hf", family, {**keys, "num_nextn_predict_layers": 0})
    written(source, tmp_path / "out", "tokenizer=none")
    expected = open_source(find_input(source))
    for options in (LoadOptions(), LoadOptions(config=source)):
        found = open_source(find_input(tmp_path / "out", options=options), options)
        # Which tokens begin and end a text is the tokenizer's to say; it was left out.
        others = {
            name for name, *_ in config_differences(found.header.config, expected.header.config)
        }
        assert others <= {"bos_token_id", "eos_token_id"}
        assert found.header.manifest == expected.header.manifest
        assert fingerprint_source(found, 1).weights == megaconv.fingerprint(source).weights


def test_metadata_say_what_the_family_means_whatever_config_json_leaves_out(tmp_path: Path) -> None:
    source = model(
        tmp_path / "hf",
        "deepseek_v3",
        {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5},
    )
    assert "scoring_func" not in json.loads((source / "config.json").read_text())
    values = written(source, tmp_path / "out", "tokenizer=none").values
    expected = {
        "attention.head_count": 4, "attention.head_count_kv": 1, "attention.kv_lora_rank": 32, "attention.q_lora_rank": 32,
        "attention.key_length": 40, "attention.value_length": 32, "attention.key_length_mla": 40,
        "attention.value_length_mla": 16, "rope.dimension_count": 8, "block_count": 3, "leading_dense_block_count": 1,
        "expert_count": 4, "expert_used_count": 2, "expert_shared_count": 2, "expert_feed_forward_length": 32,
        "feed_forward_length": 96, "expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 2.5,
        "expert_group_count": 2, "expert_group_used_count": 1, "vocab_size": 19, "embedding_length": 64, "context_length": 32,
        "rope.freq_base": 10000.0, "rope.scaling.type": "yarn", "rope.scaling.factor": 40.0,
        "rope.scaling.original_context_length": 8, "rope.scaling.yarn_log_multiplier": float(np.float32(0.0707)),
        "attention.layer_norm_rms_epsilon": float(np.float32(1e-6)),
    }  # fmt: skip
    assert {
        name.removeprefix("deepseek2."): value
        for name, value in values.items()
        if "deepseek2." in name
    } == expected
    lite = model(tmp_path / "lite", "deepseek_v2", DIRECT)
    values = written(lite, tmp_path / "lite-out", "tokenizer=none").values
    assert (values["deepseek2.expert_gating_func"], values["deepseek2.expert_weights_norm"]) == (
        1,
        False,
    )
    assert "deepseek2.expert_group_count" not in values
    # llama.cpp needs this key, except in models of 26 or 27 layers.
    assert values["deepseek2.attention.q_lora_rank"] == 0


def test_layers_that_predict_further_tokens_are_left_out_with_a_notice(tmp_path: Path) -> None:
    source = model(tmp_path / "hf", "deepseek_v3", {"num_nextn_predict_layers": 1})
    place = ("--saver", "gguf", "--save-dir", tmp_path / "out", "--option", "tokenizer=none")
    outcome = run("convert", "--load-dir", source, *place)
    assert outcome.status == 0, outcome.err
    assert "1 MTP layer left out" in outcome.out + outcome.err
    found = Reader(tmp_path / "out/model.gguf")
    assert not [name for name in found.tensors if name.startswith("blk.3.")]
    megaconv.convert(source, tmp_path / "core", saver="core", pp=3)
    assert written(tmp_path / "core", tmp_path / "again", "tokenizer=none").tensors == found.tensors


def test_a_sharded_deepseek_gives_the_same_gguf_and_can_be_sharded_again(tmp_path: Path) -> None:
    source = model(tmp_path / "hf", "deepseek_v3", {"num_nextn_predict_layers": 0})
    megaconv.convert(source, tmp_path / "core", saver="core", tp=2, pp=3, ep=2)
    found, expected = (
        written(path, tmp_path / f"{path.name}-gguf", "tokenizer=none")
        for path in (tmp_path / "core", source)
    )
    assert (found.tensors, found.values) == (expected.tensors, expected.values)
    megaconv.convert(tmp_path / "hf-gguf", tmp_path / "again", saver="core", tp=4, ep=4)
    assert megaconv.fingerprint(tmp_path / "again").weights == megaconv.fingerprint(source).weights


def test_in_q8_0_what_is_stored_transposed_has_16_bits(tmp_path: Path) -> None:
    source = model(tmp_path / "hf", "deepseek_v3", {})
    found = written(source, tmp_path / "out", "tokenizer=none", "gguf_type=q8_0")
    kinds = {name: kind for name, (_, kind, _) in found.tensors.items()}
    names = ("attn_k_b", "attn_v_b", "attn_q_b", "ffn_up_exps", "ffn_gate_inp")
    assert [kinds[f"blk.1.{name}.weight"] for name in names] == [1, 8, 8, 8, 0]
    expected = expected_tensors(source)["blk.1.attn_k_b.weight"].half()
    assert (
        found.tensors["blk.1.attn_k_b.weight"][2]
        == expected.contiguous().view(torch.uint8).numpy().tobytes()
    )


@pytest.mark.parametrize(
    "changes",
    [{"mscale": 1.0}, {"mscale": None, "mscale_all_dim": None}, {"type": "linear"}],
    ids=str,
)
def test_positions_that_llama_cpp_would_scale_otherwise_are_refused(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    scaling = {key: value for key, value in {**YARN, **changes}.items() if value is not None}
    source = model(tmp_path / "hf", "deepseek_v3", {"rope_scaling": scaling})
    outcome = run(
        "convert", "--load-dir", source, "--saver", "gguf", "--save-dir", tmp_path / "out"
    )
    assert_refused(outcome, 2, "rope scaling", "yarn")
    assert not (tmp_path / "out").exists()


def test_keys_and_values_that_arent_split_are_refused_by_name(tmp_path: Path) -> None:
    source = model(tmp_path / "hf", "deepseek_v2", DIRECT)
    written(source, tmp_path / "out", "tokenizer=none")
    file = tmp_path / "out/model.gguf"
    file.write_bytes(
        file.read_bytes().replace(b"blk.0.attn_norm.weight", b"blk.0.attn_kv_b.weight")
    )
    assert_refused(run("fingerprint", file), 3, "attn_kv_b", "convert the model again")
