"""MLX's output: the bytes that mlx-lm writes for the same model, and codes that come back.

tests/fixtures/mlx/families.json has a model of each family, and a digest of the weights that mlx-lm 0.32.2 made of it
(`mlx_oracle.py`).
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import megaconv
from megaconv import registry
from megaconv.engine.preparation import prepare
from megaconv.input import find_input
from megaconv.mlx.names import WRITTEN
from megaconv.mlx.tensors import is_shifted
from megaconv.options import ConvertOptions
from tests.conftest import FIXTURES
from tests.mlx_oracle import cases, digest, write_source
from tests.models import write_llama
from tests.runs import assert_refused, run

CASES = cases()


def write(name: str, tmp_path: Path) -> tuple[Path, bool]:
    """(a Hugging Face directory, True if the model is inside a multimodal one)."""
    config = CASES[name]["config"]
    return write_source(tmp_path / "source", config), "text_config" in config


def test_every_family_is_compared() -> None:
    assert set(WRITTEN) <= {name.partition(",")[0] for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_mlx_lm_and_come_back(name: str, tmp_path: Path) -> None:
    source, is_inside = write(name, tmp_path)
    made = megaconv.convert(source, tmp_path / "mlx", saver="mlx", text_only=is_inside, verify=True)
    assert digest(tmp_path / "mlx") == CASES[name]["digest"]
    back = megaconv.convert(tmp_path / "mlx", tmp_path / "hf", saver="hf")
    assert back.fingerprint == made.fingerprint
    if not is_shifted(made.header.config.family, "model.norm.weight"):
        assert made.fingerprint == megaconv.fingerprint(source, text_only=is_inside)


def test_norms_that_are_rounded_are_no_damage_of_a_source_with_a_record(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source", CASES["qwen3_next"]["config"])
    megaconv.convert(source, tmp_path / "hf", saver="hf")
    made = megaconv.convert(tmp_path / "hf", tmp_path / "mlx", saver="mlx")
    direct = megaconv.convert(source, tmp_path / "direct", saver="mlx")
    assert made.fingerprint == direct.fingerprint


@pytest.mark.parametrize("name", CASES)
def test_codes_come_back(name: str, tmp_path: Path) -> None:
    source, is_inside = write(name, tmp_path)
    options = {"bits": "4", "group_size": "32"}
    made = megaconv.convert(
        source, tmp_path / "mlx", saver="mlx", text_only=is_inside, verify=True, options=options
    )
    back = megaconv.convert(tmp_path / "mlx", tmp_path / "hf", saver="hf")
    assert back.fingerprint == made.fingerprint


FLOATS = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}


@pytest.mark.parametrize("mode", FLOATS)
@pytest.mark.parametrize("name", ["deepseek_v3", "llama", "qwen3_next"])
def test_floats_come_back(mode: str, name: str, tmp_path: Path) -> None:
    source, is_inside = write(name, tmp_path)
    made = megaconv.convert(
        source,
        tmp_path / "mlx",
        saver="mlx",
        text_only=is_inside,
        verify=True,
        options={"mode": mode},
    )
    config = json.loads((tmp_path / "mlx" / "config.json").read_text())
    bits, size = FLOATS[mode]
    assert config["quantization"] == {"group_size": size, "bits": bits, "mode": mode}
    back = megaconv.convert(tmp_path / "mlx", tmp_path / "hf", saver="hf")
    assert back.fingerprint == made.fingerprint


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_floats_are_read_as_bfloat16(dtype: str, llama: Path, tmp_path: Path) -> None:
    """Codes don't say which dtype the weight had."""
    options = {"mode": "mxfp8"}
    made = megaconv.convert(
        llama, tmp_path / "mlx", saver="mlx", dtype=dtype, options=options, verify=True
    )
    assert megaconv.fingerprint(tmp_path / "mlx") == made.fingerprint


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "model", hidden=64, ffn=128)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("size", [None, 32])
def test_config_json_describes_the_codes(
    bits: int, size: int | None, llama: Path, tmp_path: Path
) -> None:
    options = {"bits": str(bits)} | ({} if size is None else {"group_size": str(size)})
    megaconv.convert(llama, tmp_path / "mlx", saver="mlx", options=options, verify=True)
    config = json.loads((tmp_path / "mlx" / "config.json").read_text())
    expected = {"group_size": size or 64, "bits": bits, "mode": "affine"}
    assert config["quantization"] == config["quantization_config"] == expected
    with safe_open(tmp_path / "mlx" / "model.safetensors", "np") as file:
        names = set(file.keys())
        assert file.metadata()["format"] == "mlx"
    quantized = {name.removesuffix(".scales") for name in names if name.endswith(".scales")}
    assert {"model.embed_tokens", "lm_head", "model.layers.0.self_attn.q_proj"} <= quantized
    assert "model.norm" not in quantized


def test_a_width_that_is_no_multiple_of_the_group_stays_plain(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "model", hidden=64, ffn=56)
    megaconv.convert(source, tmp_path / "mlx", saver="mlx", options={"bits": "4"}, verify=True)
    with safe_open(tmp_path / "mlx" / "model.safetensors", "np") as file:
        names = set(file.keys())
    assert "model.layers.0.mlp.up_proj.scales" in names
    assert "model.layers.0.mlp.down_proj.scales" not in names


def test_shards_have_an_index(llama: Path, tmp_path: Path) -> None:
    whole = megaconv.convert(llama, tmp_path / "whole", saver="mlx", options={"bits": "4"})
    made = megaconv.convert(
        llama,
        tmp_path / "mlx",
        saver="mlx",
        options={"bits": "4"},
        max_shard_size=20_000,
        verify=True,
    )
    assert made.fingerprint == whole.fingerprint
    index = json.loads((tmp_path / "mlx" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert "model.layers.0.mlp.up_proj.biases" in index["weight_map"]


def test_one_of_several_processes_reports_no_rounding_error(llama: Path, tmp_path: Path) -> None:
    """It reads a part of the weights, and weights of which another one writes the codes."""
    options = ConvertOptions(extra={"bits": "4", "group_size": "32"})
    found = find_input(llama, None, options.load)
    saver = registry.saver("mlx")
    reports = [prepare(found, tmp_path / "out", saver, options, number)[1] for number in (1, 2)]
    assert [report.rounding is not None for report in reports] == [True, False]


def test_megatron_becomes_mlx(llama: Path, tmp_path: Path) -> None:
    megaconv.convert(llama, tmp_path / "core", saver="core", tp=2, pp=2)
    expected = megaconv.convert(llama, tmp_path / "a", saver="mlx", options={"bits": "6"})
    found = megaconv.convert(tmp_path / "core", tmp_path / "b", saver="mlx", options={"bits": "6"})
    assert found.fingerprint == expected.fingerprint
    assert digest(tmp_path / "a") == digest(tmp_path / "b")


def test_layers_for_predicting_further_tokens_are_left_out(tmp_path: Path) -> None:
    config = dict(CASES["deepseek_v3"]["config"])
    source = write_source(tmp_path / "source", config, mtp=1)
    done = run("convert", source, tmp_path / "mlx", "--saver", "mlx", "--verify")
    assert done.status == 0
    assert "1 MTP layer left out" in done.err
    assert digest(tmp_path / "mlx") == CASES["deepseek_v3"]["digest"]


@pytest.mark.parametrize("name", ["ministral3", "mistral4", "glm_moe_dsa"])
def test_the_rope_is_where_mlx_lm_looks_for_it(name: str, tmp_path: Path) -> None:
    config: dict[str, Any] = dict(CASES[name]["config"])
    source = write_source(tmp_path / "source", config)
    megaconv.convert(source, tmp_path / "core", saver="core", tp=1)
    megaconv.convert(tmp_path / "core", tmp_path / "mlx", saver="mlx")
    written = json.loads((tmp_path / "mlx" / "config.json").read_text())
    rope = config.get("rope_parameters") or {"rope_theta": config["rope_theta"]}
    assert rope.items() <= written["rope_parameters"].items()


@pytest.mark.parametrize("name", ["exaone4", "exaone_moe", "llama4", "mamba2", "minimax_m2"])
def test_keys_that_mlx_lm_requires_are_there_without_the_models_own_config(
    name: str, tmp_path: Path
) -> None:
    """A run of Megatron knows none of them."""
    keys = {
        "exaone4": ("sliding_window_pattern",),
        "exaone_moe": ("is_moe_layer",),
        "llama4": ("interleave_moe_layer_step",),
        "mamba2": ("intermediate_size", "time_step_limit", "time_step_rank"),
        "minimax_m2": ("shared_intermediate_size",),
    }[name]
    source, is_inside = write(name, tmp_path)
    core = tmp_path / "core"
    megaconv.convert(source, core, saver="core", dtype="fp32", text_only=is_inside)
    for file in core.rglob("*.json"):
        file.unlink()
    megaconv.convert(core, tmp_path / "mlx", saver="mlx")
    written = json.loads((tmp_path / "mlx" / "config.json").read_text())
    written = written.get("text_config", written)
    assert set(keys) <= written.keys()
    given = CASES[name]["config"]
    given = given.get("text_config", given)
    same = {"is_moe_layer", "interleave_moe_layer_step", "shared_intermediate_size"} & set(keys)
    assert {key: written[key] for key in same} == {key: given[key] for key in same}


def test_local_layers_of_exaone_4_are_letters(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    local = {"layer_types": kinds, "sliding_window": 7, "sliding_window_pattern": 3}
    source = write_source(tmp_path / "source", {**CASES["exaone4"]["config"], **local})
    megaconv.convert(source, tmp_path / "mlx", saver="mlx")
    written = json.loads((tmp_path / "mlx" / "config.json").read_text())
    assert written["sliding_window_pattern"] == "LLGL"


@pytest.mark.parametrize("name", ["qwen2", "mixtral", "phi3", "starcoder2", "lfm2", "internlm2"])
def test_heads_that_mlx_lm_has_no_key_for_are_refused(name: str, tmp_path: Path) -> None:
    config = {**CASES[name]["config"]}
    config["head_dim"] = 2 * config["hidden_size"] // config["num_attention_heads"]
    source = write_source(tmp_path / "source", config)
    refused = run("convert", source, tmp_path / "mlx", "--saver", "mlx")
    assert_refused(refused, 2, f"mlx-lm's class of {name} has no head_dim")


def test_experts_at_other_distances_than_mlx_lm_knows_are_refused(tmp_path: Path) -> None:
    config = json.loads(json.dumps(CASES["llama4"]["config"]))
    config["text_config"]["moe_layers"] = [1, 2]
    source = write_source(tmp_path / "source", config)
    refused = run("convert", source, tmp_path / "mlx", "--saver", "mlx", "--text-only")
    assert_refused(refused, 2, "layers 1, 2 have experts", "at equal distances")


def changed_config(name: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a case with other values. `...` removes a key."""
    given: dict[str, Any] = CASES[name]["config"]
    if "text_config" in given:
        return {**given, "text_config": _changed(given["text_config"], changes)}
    return _changed(given, changes)


def _changed(given: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in (given | changes).items() if value is not ...}


SLIDING = ["sliding_attention", "full_attention"] * 2
CHUNKS = ["chunked_attention"] * 3 + ["full_attention"]
LINEAR = ["linear_attention", "full_attention"] * 2
KEYS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("apertus", {"mlp_bias": ..., "post_norm": ..., "qk_norm": ...}, {"mlp_bias": False, "post_norm": False, "qk_norm": True}),
    ("cohere2", {"layer_types": SLIDING}, {"sliding_window_pattern": 2}),
    ("gemma3_text", {"layer_types": SLIDING}, {"sliding_window_pattern": 2}),
    ("granite_moe_hybrid", {"layer_types": LINEAR, "position_embedding_type": ...},
     {"layer_types": ["mamba", "attention"] * 2, "position_embedding_type": "nope"}),
    ("hunyuan_v1_dense", {"rope_scaling": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}},
     {"rope_scaling": {"rope_type": "dynamic", "alpha": 50.0, "type": "dynamic", "factor": 1.0}}),
    ("lfm2", {"block_dim": ..., "block_auto_adjust_ff_dim": True, "intermediate_size": 99, "block_multiple_of": 8},
     {"block_dim": 32, "block_ff_dim": 72, "intermediate_size": 72, "block_auto_adjust_ff_dim": False}),
    ("qwen3_5", {"layer_types": LINEAR, "full_attention_interval": ...}, {"full_attention_interval": 2}),
    ("qwen3_next", {"layer_types": LINEAR, "full_attention_interval": ...}, {"full_attention_interval": 2}),
    ("solar_open", {"first_k_dense_replace": ...}, {"first_k_dense_replace": 0}),
]  # fmt: skip
"""Family, a configuration as transformers 5 saves it, and the keys that mlx-lm needs."""


@pytest.mark.parametrize(("name", "given", "needed"), KEYS)
def test_a_configuration_of_transformers_gets_the_keys_of_mlx_lm(
    name: str, given: dict[str, Any], needed: dict[str, Any], tmp_path: Path
) -> None:
    config = changed_config(name, **given)
    source = write_source(tmp_path / "source", config)
    made = megaconv.convert(
        source, tmp_path / "mlx", saver="mlx", text_only="text_config" in config
    )
    written = json.loads((tmp_path / "mlx" / "config.json").read_text())
    assert needed.items() <= written.get("text_config", written).items()
    assert megaconv.fingerprint(tmp_path / "mlx") == made.fingerprint


BEYOND: list[tuple[str, dict[str, Any], str]] = [
    ("apertus", {"attention_bias": True}, "has no biases in attention"),
    ("deepseek_v2", {"rope_scaling": None}, "fails without rope_scaling"),
    ("falcon_mamba", {"layer_norm_epsilon": 1e-6}, "has no key for the epsilon"),
    ("gemma", {"tie_word_embeddings": False}, "always ties the head"),
    ("gemma2", {"attn_logit_softcapping": None}, "always limits scores and logits"),
    ("gemma3_text", {"layer_types": ["full_attention", *SLIDING[:3]]}, "layers 0, 2 have no window"),
    ("gemma3_text", {"layer_types": SLIDING[:1] * 4}, "no layer has no window"),
    ("glm", {"partial_rotary_factor": 0.5}, "rotates whole heads"),
    ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}, "has layers without experts"),
    ("glm_moe_dsa", {"indexer_types": ["full", "shared", "full", "full"]}, "has an indexer in every layer"),
    ("gpt_bigcode", {"multi_query": False, "num_key_value_heads": 8}, "expects one key/value head"),
    ("granite_moe_hybrid", {"mamba_n_groups": 2}, "normalizes all groups of a Mamba layer together"),
    ("laguna", {"gating": "per-element"}, "has one gate for each head"),
    ("llama4", {"no_rope_layers": [1, 1, 0, 1], "layer_types": [*CHUNKS[1:], CHUNKS[0]]}, "rotates all but every fourth layer"),
    ("phimoe", {"attention_bias": False}, "has biases in attention and in the head"),
    ("qwen2_moe", {"mlp_only_layers": [1]}, "has experts in all layers"),
    ("qwen3_next", {"layer_types": LINEAR[:1] * 4}, "no layer has attention"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "given", "said"), BEYOND)
def test_a_model_that_mlx_lm_computes_otherwise_is_refused(
    name: str, given: dict[str, Any], said: str, tmp_path: Path
) -> None:
    config = changed_config(name, **given)
    source = write_source(tmp_path / "source", config)
    text_only = ("--text-only",) if "text_config" in config else ()
    refused = run("convert", source, tmp_path / "mlx", "--saver", "mlx", *text_only)
    assert_refused(
        refused, 2, f"mlx-lm's class of {name}" if "no layer" not in said else name, said
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gemma2", "ignores the attention window of gemma2: from 8 tokens on"),
        ("jamba", "makes the weights of Jamba's chosen experts sum up to 1"),
    ],
)
def test_other_outputs_of_mlx_lm_are_noted(name: str, said: str, tmp_path: Path) -> None:
    source, _ = write(name, tmp_path)
    done = run("convert", source, tmp_path / "mlx", "--saver", "mlx")
    assert done.status == 0
    assert said in done.err
    silent = write_source(tmp_path / "llama", CASES["llama"]["config"])
    assert "mlx-lm" not in run("convert", silent, tmp_path / "other", "--saver", "mlx").err


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e4m3fn])
@pytest.mark.parametrize("options", [(), ("--option", "bits=4")])
def test_dtypes_that_mlx_does_not_compute_with_are_refused(
    dtype: torch.dtype, options: tuple[str, ...], llama: Path, tmp_path: Path
) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    path = llama / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {name: tensors[name].to(dtype)}, path)
    refused = run("convert", llama, tmp_path / "mlx", "--saver", "mlx", *options)
    word = str(dtype).removeprefix("torch.")
    assert_refused(refused, 2, f"layers.0.mlp.up.weight is {word}; mlx-lm computes with float16")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("bits=7",), "--option bits=7: is not supported; choose 2, 3, 4, 5, 6, 8"),
        (
            ("bits=4", "group_size=16"),
            "--option group_size=16: is not supported; choose 32, 64, 128",
        ),
        (("group_size=32",), "--option group_size: is for a quantized output"),
        (("mode=affine",), "--option mode: is for a quantized output; give --option bits=4 too"),
        (
            ("mode=mxfp6",),
            "--option mode=mxfp6: is not supported; choose affine, mxfp4, mxfp8, nvfp4",
        ),
        (("mode=mxfp4", "bits=8"), "--option bits=8: is not supported with mode=mxfp4; choose 4"),
        (
            ("mode=nvfp4", "group_size=32"),
            "--option group_size=32: is not supported with mode=nvfp4; choose 16",
        ),
    ],
)
def test_unknown_options_are_refused(
    options: tuple[str, ...], words: str, llama: Path, tmp_path: Path
) -> None:
    given = [word for option in options for word in ("--option", option)]
    assert_refused(run("convert", llama, tmp_path / "mlx", "--saver", "mlx", *given), 2, words)
    assert not (tmp_path / "mlx").exists()


def test_other_families_are_refused(tmp_path: Path) -> None:
    refused = run("convert", FIXTURES / "mlx" / "gpt_oss", tmp_path / "mlx", "--saver", "mlx")
    assert_refused(refused, 2, "use --saver hf --quantize mxfp4")
    llama = dict(CASES["llama"]["config"])
    arcee = {"architectures": ["ArceeForCausalLM"], "model_type": "arcee", "hidden_act": "relu2"}
    source = write_source(tmp_path / "model", llama | arcee)
    assert_refused(run("convert", source, tmp_path / "mlx", "--saver", "mlx"), 2, "docs/mlx.md")
