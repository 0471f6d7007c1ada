"""GGUF of the families whose numbers tests/gguf/test_gguf_llama_cpp.py has from llama.cpp: read again, and what is refused of them."""

import json
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
from tests.models import write_llama
from tests.runs import assert_refused, run

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
FACTORS = {"short_factor": [1.0, 1.25], "long_factor": [2.0, 3.5]}
"""Factors of heads of which 4 elements rotate."""
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "head_dim": 8}
GPT2 = {
    **dict.fromkeys(("hidden_size", "n_embd", "max_position_embeddings", "n_positions"), 8),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_hidden_layers", "n_layer"), 2),
}
GEMMA = {**HEADS, "query_pre_attn_scalar": 8, "sliding_window": 7}
CASES = [
    pytest.param("phi3", {**HEADS, "partial_rotary_factor": 0.5, "sliding_window": 7}, id="phi3"),
    pytest.param("gemma2", {**GEMMA, "num_hidden_layers": 3}, id="gemma2"),
    pytest.param("gemma2", {**GEMMA, "num_hidden_layers": 2, "attn_logit_softcapping": 20.0,
                            "layer_types": ["full_attention", "sliding_attention"]}, id="gemma2, windows elsewhere"),
    pytest.param("gemma3_text", {**GEMMA, "num_hidden_layers": 7, "rope_local_base_freq": 500.0}, id="gemma3"),
    pytest.param("gemma3_text", {**GEMMA, "num_hidden_layers": 2, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
                 id="gemma3, scaled"),
    pytest.param("olmo2", HEADS, id="olmo2"),
    pytest.param("qwen2_moe", {**HEADS, "decoder_sparse_step": 1, "mlp_only_layers": []}, id="qwen2_moe"),
]  # fmt: skip


def source_of(path: Path, family: str, keys: dict[str, Any]) -> Path:
    write_model(path, family, **{"max_position_embeddings": 64, **keys})
    return path


def refused(source: Path, tmp_path: Path, *words: str) -> None:
    place = ("--saver", "gguf", "--save-dir", tmp_path / "out", "--option", "tokenizer=none")
    assert_refused(run("convert", "--load-dir", source, *place), 2, *words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("family", "keys"), CASES)
def test_the_file_alone_gives_the_same_model_again(
    family: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    source = source_of(tmp_path / "hf", family, keys)
    written(source, tmp_path / "out", "tokenizer=none")
    expected = open_source(find_input(source))
    for options in (LoadOptions(), LoadOptions(config=source)):
        found = open_source(find_input(tmp_path / "out", options=options), options)
        others = {
            name for name, *_ in config_differences(found.header.config, expected.header.config)
        }
        # These tokens come from the tokenizer, which the output left out.
        assert others <= {"bos_token_id", "eos_token_id", "pad_token_id"}
        assert fingerprint_source(found, 1).weights == megaconv.fingerprint(source).weights


@pytest.mark.parametrize(
    "scaling",
    [YARN, {"rope_type": "linear", "factor": 2.5}],
    ids=lambda scaling: scaling["rope_type"],
)
def test_positions_that_metadata_scale_are_read_from_the_file_alone(
    scaling: dict[str, Any], tmp_path: Path
) -> None:
    source = write_llama(tmp_path / "hf", extra_config={"rope_scaling": scaling})
    values = written(source, tmp_path / "out", "tokenizer=none").values
    assert values["llama.rope.scaling.factor"] == scaling["factor"]
    found = open_source(find_input(tmp_path / "out"))
    assert found.header.config.positions.scaling == scaling


def test_longrope_is_two_tensors_and_a_factor(tmp_path: Path) -> None:
    """Said as the published models say it: transformers 4's keys, `su` in the first of them."""
    keys = {
        **HEADS,
        "partial_rotary_factor": 0.5,
        "original_max_position_embeddings": 16,
        "rope_scaling": {"type": "su", **FACTORS},
    }
    source = source_of(tmp_path / "hf", "phi3", keys)
    found = written(source, tmp_path / "out", "tokenizer=none", "gguf_type=bf16")
    for name, factors in (("long", FACTORS["long_factor"]), ("short", FACTORS["short_factor"])):
        sizes, kind, content = found.tensors[f"rope_factors_{name}.weight"]
        assert (sizes, kind) == ([2], 0)
        assert np.frombuffer(content, np.float32).tolist() == [
            np.float32(factor) for factor in factors
        ]
    assert found.values["phi3.rope.dimension_count"] == 4
    assert found.values["phi3.rope.scaling.original_context_length"] == 16
    # The square of the factor is 1 + log(64 / 16) / log(16) = 1.5.
    assert found.values["phi3.rope.scaling.attn_factor"] == pytest.approx(1.5**0.5)
    weights = load_file(source / "model.safetensors")
    for ours, theirs in (("attn_qkv", "self_attn.qkv_proj"), ("ffn_up", "mlp.gate_up_proj")):
        tensor = weights[f"model.layers.1.{theirs}.weight"]
        assert (
            found.tensors[f"blk.1.{ours}.weight"][2] == tensor.view(torch.uint8).numpy().tobytes()
        )
    assert_refused(run("fingerprint", tmp_path / "out"), 2, "scales positions", "give --config")
    back = run("convert", tmp_path / "out", tmp_path / "back", "--saver", "hf", "--config", source)
    assert back.status == 0, back.err
    assert megaconv.fingerprint(tmp_path / "back").weights == megaconv.fingerprint(source).weights


def test_longrope_is_written_as_transformers_reads_it_and_no_megatron_has_it(
    tmp_path: Path,
) -> None:
    keys = {
        **HEADS,
        "original_max_position_embeddings": 16,
        "partial_rotary_factor": 0.5,
        "rope_scaling": {"type": "longrope", **FACTORS},
    }
    source = source_of(tmp_path / "hf", "phi3", keys)
    megaconv.convert(source, tmp_path / "again", saver="hf")
    raw = json.loads((tmp_path / "again/config.json").read_text())
    assert (raw["rope_scaling"], raw["original_max_position_embeddings"]) == (
        {"type": "longrope", **FACTORS},
        16,
    )
    outcome = run("convert", source, tmp_path / "core", "--saver", "core")
    assert_refused(outcome, 2, "longrope", "no equivalent in Megatron core")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_notice_says_that_norms_of_float32_are_rounded(dtype: str, tmp_path: Path) -> None:
    source = source_of(tmp_path / "hf", "gemma2", {**GEMMA, "torch_dtype": dtype})
    held = load_file(source / "model.safetensors")
    cast = {name: tensor.to(getattr(torch, dtype)) for name, tensor in held.items()}
    save_file(cast, source / "model.safetensors", {"format": "pt"})
    place = ("--saver", "gguf", "--save-dir", tmp_path / "out", "--option", "tokenizer=none")
    outcome = run("convert", "--load-dir", source, *place)
    assert outcome.status == 0, outcome.err
    said = "norms are stored with 1 added, which rounds weights of float32"
    assert (said in outcome.out + outcome.err) == (dtype == "float32")


@pytest.mark.parametrize("found", [[1.0], [1.0, "x"], None], ids=str)
def test_longrope_without_a_factor_for_each_frequency_is_refused(
    found: Any, tmp_path: Path
) -> None:
    source = tmp_path / "hf"
    source.mkdir()
    scaling = {"type": "longrope", **FACTORS, "long_factor": found}
    keys = {
        **HEADS,
        "partial_rotary_factor": 0.5,
        "rope_scaling": scaling,
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
    }
    (source / "config.json").write_text(
        json.dumps({"num_hidden_layers": 1, "vocab_size": 8, "intermediate_size": 8, **keys})
    )
    (source / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    assert_refused(run("fingerprint", source), 3, "long_factor", "2 numbers")


@pytest.mark.parametrize(
    ("family", "keys", "words"),
    [
        ("gpt2", {**GPT2, "activation_function": "gelu"}, ("mlp.activation", "'gelu'", "gpt2")),
        ("qwen2", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                    "original_max_position_embeddings": 32}}, ("rope scaling 'llama3'", "linear, yarn")),
        ("llama", {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, ("rope scaling 'longrope'", "llama3, linear, yarn")),
        ("qwen3", {"rope_scaling": {**YARN, "beta_fast": 16.0}}, ("beta_fast 32",)),
        ("qwen3", {"rope_scaling": {**YARN, "attention_factor": 1.5}}, ("attention factor",)),
        ("qwen3", {"attention_bias": True}, ("attention.qkv_bias", "qwen3")),
        ("qwen3_moe", {"norm_topk_prob": False}, ("experts.renormalize",)),
        ("qwen2_moe", {"decoder_sparse_step": 2}, ("layers.mlp",)),
        ("mistral", {"sliding_window": 7}, ("layers.window", "7")),
        ("gemma", {"tie_word_embeddings": False}, ("tie_embeddings",)),
        ("gemma2", {**GEMMA, "query_pre_attn_scalar": 12}, ("attention.scale",)),
        ("gemma2", {**GEMMA, "num_hidden_layers": 46, "num_attention_heads": 2, "query_pre_attn_scalar": 8}, ("attention.scale",)),
        ("gemma2", {**GEMMA, "attn_logit_softcapping": None}, ("attention.score_cap", "50.0")),
        ("gemma2", {**GEMMA, "final_logit_softcapping": None}, ("head.logit_cap", "30.0")),
        ("olmo2", {"tie_word_embeddings": True}, ("tie_embeddings",)),
        ("phi3", {**HEADS, "head_dim": 16}, ("attention.head_dim",)),
        ("deepseek_v3", {"num_hidden_layers": 26, "q_lora_rank": 16}, ("26 layers", "q_lora_rank", "V2 Lite")),
    ],
)  # fmt: skip
def test_features_that_llama_cpp_computes_differently_are_refused_by_name(
    family: str, keys: dict[str, Any], words: tuple[str, ...], tmp_path: Path
) -> None:
    source = source_of(tmp_path / "hf", family, keys)
    refused(source, tmp_path, *words)


def test_a_notice_reports_that_llama_cpp_leaves_out_a_window(tmp_path: Path) -> None:
    source = source_of(tmp_path / "hf", "phi3", {**HEADS, "sliding_window": 7})
    outcome = run(
        "convert", source, tmp_path / "out", "--saver", "gguf", "--option", "tokenizer=none"
    )
    assert "leaves out Phi-3's window of 7 positions" in outcome.out + outcome.err
    assert Reader(tmp_path / "out/model.gguf").values["phi3.attention.sliding_window"] == 7


def test_heads_of_a_size_of_their_own_are_said_without_a_config_json_too(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "hf", head_dim=8)
    megaconv.convert(source, tmp_path / "core", saver="core", tp=2)
    values = written(tmp_path / "core", tmp_path / "out", "tokenizer=none").values
    assert values["llama.attention.key_length"] == values["llama.attention.value_length"] == 8


def test_a_file_without_tokens_says_how_many_rows_the_embedding_has(tmp_path: Path) -> None:
    """Without tokens in the file, llama.cpp needs this number."""
    source = source_of(tmp_path / "hf", "olmo2", HEADS)
    values = written(source, tmp_path / "out", "tokenizer=none").values
    assert (
        values["olmo2.vocab_size"] == json.loads((source / "config.json").read_text())["vocab_size"]
    )
