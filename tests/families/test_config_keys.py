"""Every key that transformers' own configuration classes have is read, known with one value, or listed as harmless."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from megaconv.errors import CheckpointError, CorruptCheckpoint, NotExpressible, UnknownFamily
from megaconv.families import Family, families
from megaconv.families.parts.harmless_keys import HARMLESS
from megaconv.families.parts.keys import OFF
from megaconv.model.fields import fields_of
from tests.config_models import WITHOUT_CLASS, WITHOUT_CONFIG
from tests.families.test_same_function import BERT, T5, raw_config, raw_gpt2
from tests.strategies import OF_BART, OF_T5

FAMILIES = sorted(families().keys() - set(WITHOUT_CONFIG))
"""All families with a config.json."""
CLASSES = [
    (name, families()[name].model_type) for name in FAMILIES if name not in WITHOUT_CLASS
] + [("bert", "bert")]
SILENT = {
    # derived by the class from other keys, which are read
    ("deepseek_v2", "head_dim"), ("deepseek_v3", "head_dim"), ("deepseek_v2", "qk_head_dim"), ("deepseek_v3", "qk_head_dim"),
    ("deepseek_v2", "num_key_value_heads"), ("deepseek_v3", "num_key_value_heads"),
    ("glm4_moe_lite", "head_dim"), ("glm4_moe_lite", "qk_head_dim"), ("glm4_moe_lite", "num_key_value_heads"),
    *((name, key) for name in ("deepseek_v32", "glm_moe_dsa") for key in ("head_dim", "qk_head_dim", "num_key_value_heads")),
    *((name, key) for name in ("bailing_hybrid", "kimi_linear") for key in ("head_dim", "qk_head_dim", "num_key_value_heads")),
    *((name, key) for name in ("youtu", "minicpm3", "axk1", "mistral4") for key in ("head_dim", "qk_head_dim", "num_key_value_heads")),
    *(("axk2", key) for key in ("head_dim", "qk_head_dim", "num_key_value_heads")),
    ("mistral_large4_text", "head_dim"), ("mistral_large4_text", "qk_head_dim"),
    *(("sarvam_mla", key) for key in ("head_dim", "qk_head_dim", "num_key_value_heads", "q_head_dim")),
    # of experts, which the model doesn't have
    *(("doge", key) for key in ("num_experts", "num_experts_per_tok", "norm_topk_prob")),
    # not computed with by the class, or of layers for multi-token prediction, which are left out
    *(("inkling_text", key) for key in ("rms_norm_eps_moe_gate", "num_mtp_layers", "chain_hidden_post_norm", "mtp_hidden_states_first",
                                        "mtp_local_layer_ids")),
    # another key says it layer by layer
    ("inkling_text", "dense_mlp_idx"), ("inkling_text", "local_layer_ids"),
    ("zamba", "attn_layer_period"), ("zamba", "attn_layer_offset"),
    ("deepseek_v32", "first_k_dense_replace"), ("glm_moe_dsa", "first_k_dense_replace"),
    ("axk1", "first_k_dense_replace"), ("axk2", "first_k_dense_replace"), ("lfm2", "full_attn_idxs"),
    *(("mistral_large4_text", key) for key in ("first_k_dense_replace", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")),
    *((name, key) for name in ("hy_v4", "hy_v4_vl_text")
      for key in ("head_dim", "qk_head_dim", "num_key_value_heads", "num_nextn_predict_layers")),
    *(("glm5_next_text", key) for key in ("head_dim", "qk_head_dim", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")),
    ("bailing_hybrid", "layer_group_size"), ("bailing_hybrid", "first_k_dense_replace"), ("bailing_hybrid", "short_conv_kernel_size"),
    # layers for multi-token prediction, which are left out
    ("bailing_hybrid", "num_nextn_predict_layers"), ("deepseek_v4", "num_nextn_predict_layers"),
    # a width that mamba_d_ssm gives, and the place of a norm that this model lacks
    ("falcon_h1", "mamba_expand"), ("falcon_h1", "mamba_norm_before_gate"),
    # linear_attn_config says it
    *(("kimi_linear", f"linear_{size}") for size in ("head_dim", "num_heads", "conv_kernel_dim")),
    ("exaone_moe", "sliding_window_pattern"), ("exaone_moe", "first_k_dense_replace"),
    # without effect in the older architecture, which multi_query describes
    ("falcon", "num_kv_heads"),
    # written by the class, and computed anew from other keys when it reads a file
    ("gpt_bigcode", "num_key_value_heads"),
    # the class has these and doesn't read them
    ("biogpt", "layer_norm_eps"),
    # without effect without shared experts, or with a softmax
    ("cohere2_moe", "shared_expert_combination_strategy"), ("cohere2_moe", "norm_topk_prob"),
    # older forms of mlp_layer_types, which wins
    *(("ernie4_5_vl_moe_text", f"moe_layer_{word}") for word in ("start_index", "end_index", "interval")),
    # another form of mlp_layer_types, which wins
    ("minimax_m3_vl_text", "moe_layer_freq"), ("minimax_m3_vl_text", "sparse_attention_config"),
    # keys of layers for multi-token prediction, which are left out
    *(("step3p5", key) for key in ("num_nextn_predict_layers", "mtp_layer_types", "mtp_mlp_layer_types")),
    # older forms of rope_parameters and mlp_layer_types, which win
    *(("step3p5", key) for key in ("rope_theta", "rope_scaling", "partial_rotary_factors", "moe_layers_enum", "attention_other_setting")),
    # the same number as max_position_embeddings
    ("baichuan", "model_max_length"),
    # keys of generation alone
    ("gpt_neox", "is_decoder"), ("gpt_neox_japanese", "is_decoder"), ("xglm", "decoder_start_token_id"),
    *((name, "decoder_start_token_id") for name in ("t5", *OF_BART, *OF_T5)),
    # keys of rope scaling, which none of these models has
    *((name, "original_max_position_embeddings") for name in FAMILIES),
    # another name for num_experts, which wins where both are there
    ("qwen2_moe", "num_local_experts"), ("qwen3_moe", "num_local_experts"), ("flint", "num_local_experts"),
    ("qwen3_next", "num_local_experts"),
    # without groups, as topk_method greedy has none
    ("deepseek_v2", "n_group"), ("deepseek_v2", "topk_group"),
    # another name for sliding_window_pattern, which counts where there are no layer_types
    ("gemma3_text", "_sliding_window_pattern"),
    # older names of hybrid_override_pattern's and head_dim's, and layers for multi-token prediction, of which these values are left out
    ("nemotron_h", "layers_block_type"), ("nemotron_h", "attention_head_dim"), ("nemotron_h", "num_nextn_predict_layers"),
    ("nemotron_h", "mtp_layers_block_type"), ("nemotron_h", "mtp_hybrid_override_pattern"),
    *(("mellum", key) for key in ("num_nextn_predict_layers", "mtp_layer_types", "mtp_mlp_layer_types")),
    # beyond the tokens up to which the model is described
    ("qwen", "use_dynamic_ntk"), ("qwen", "use_logn_attn"),
    # the class and the dtype of the weights: other tests check them
    ("bert", "architectures"), ("bert", "model_type"),
}  # fmt: skip
"""(family, key) whose value changes nothing that is read, for the reason above."""


WITHOUT_COMMON_WINDOWS = (
    "roberta",
    *("nemotron_h", "inkling_text", "iquestcoder", "recurrent_gemma", "modernbert_decoder"),
    *OF_BART,
    *OF_T5,
)
"""Families that have no windows, or keys of their own for them."""


def complete(family: str) -> dict[str, Any]:
    """A config.json that says everything."""
    if family == "gpt2":
        return raw_gpt2(torch_dtype="bfloat16")
    if family in ("bert", "t5"):
        return {**(BERT if family == "bert" else T5)}
    windows: dict[str, Any] = {
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 2,
    }
    return raw_config(
        family,
        torch_dtype="bfloat16",
        **({} if family in WITHOUT_COMMON_WINDOWS else windows),
    )


def declared(table: Family) -> set[str]:
    keys = {key for words in table.keys for key in words.names}
    return keys | set(table.only) | set(OFF) | set(table.aliases)


@pytest.mark.oracle
@pytest.mark.parametrize(("family", "model_type"), CLASSES)
def test_every_key_of_transformers_class_is_declared(family: str, model_type: str) -> None:
    """A new release of transformers that has one more makes this fail: is it read, refused unless off, or harmless?"""
    mapping = pytest.importorskip("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    defaults, table = mapping[model_type]().to_dict(), families()[family]
    assert set(defaults) - declared(table) - HARMLESS == set()
    known = {**OFF, **table.only}
    assert {key: defaults[key] for key in known if key in defaults} == {
        key: known[key] for key in known if key in defaults
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_no_key_is_declared_twice_in_contradiction(family: str) -> None:
    table = families()[family]
    read = {key for words in table.keys for key in words.names}
    assert not read & set(table.only)
    assert not (read - {"architectures", "model_type", "torch_dtype", "dtype"}) & HARMLESS


@pytest.mark.parametrize("family", FAMILIES)
def test_a_key_that_is_known_with_one_value_is_refused_with_another(family: str) -> None:
    table, raw = families()[family], complete(family)
    for key, value in {**OFF, **table.only}.items():
        other = (
            not value
            if isinstance(value, bool)
            else value + 1
            if isinstance(value, float | int)
            else "another"
        )
        with pytest.raises(CheckpointError, match=key):
            table.read_hf({**raw, key: other})


def others(value: Any) -> list[Any]:
    if isinstance(value, bool) or value is None:
        return [True, False, 5, "linear", {"rope_type": "linear", "factor": 2.0}]
    if isinstance(value, int | float):
        return [2 * value + 2, value + 1, 1]
    return ["another", {"rope_type": "linear", "factor": 2.0}, ["another"], [0]]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_declared_key_changes_what_is_read_or_is_refused(family: str) -> None:
    table, raw = families()[family], complete(family)
    before = fields_of(table.read_hf(raw))
    unnoticed = set()
    for key in sorted({key for declared in table.keys for key in declared.names}):
        for other in others(raw.get(key)):
            try:
                if fields_of(table.read_hf({**raw, key: other})) != before:
                    break
            except (CheckpointError, TypeError, ValueError, AttributeError, KeyError):
                break
        else:
            unnoticed.add((family, key))
    assert unnoticed <= SILENT


# Further names of keys.

READ_UNDER_BOTH = {("qwen3_moe", "num_experts"), ("nemotron_h", "layer_types")}
"""(family, name): what the family's keys read themselves, since config.json files have it under either name."""
NO_KEYS = {("recurrent_gemma", "layer_types")}
"""(family, name) of attributes that follow from other keys: the class refuses a file that has them."""
READ_BY_THE_CLASS = {
    "lfm2": {"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"},
    "lfm2_moe": {"tie_embedding": "tie_word_embeddings"},
    "mistral_large4_text": {"num_experts": "n_routed_experts"},
    "nemotron_h": {
        "mamba_n_groups": "n_groups",
        "mamba_d_conv": "conv_kernel",
        "mamba_conv_bias": "use_conv_bias",
        "mamba_dt_min": "time_step_min",
        "mamba_dt_limit": "time_step_limit",
    },
}
"""Family -> further names that transformers' class reads itself, beside its attribute_map."""
PUBLISHED_KEYS = ("exaone", "sarvam_mla", "sarvam_moe")
"""Families that write the keys of published files. For them, the class's keys are the further names."""


def same_names(aliases: Mapping[str, str]) -> set[frozenset[str]]:
    """The sets of names of one key each."""
    return {
        frozenset({key, *(name for name, named in aliases.items() if named == key)})
        for key in aliases.values()
    }


@pytest.mark.oracle
@pytest.mark.parametrize(("family", "model_type"), CLASSES)
def test_every_further_name_that_transformers_reads_is_read_as_the_key(
    family: str, model_type: str
) -> None:
    """A new release of transformers that has one more makes this fail."""
    mapping = pytest.importorskip("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    theirs = {
        name: key
        for name, key in mapping[model_type].attribute_map.items()
        if (family, name) not in READ_UNDER_BOTH | NO_KEYS
    }
    ours = families()[family].aliases
    if family in PUBLISHED_KEYS:
        assert same_names(ours) == same_names(theirs)
    else:
        assert ours == theirs | READ_BY_THE_CLASS.get(family, {})


OPTIONAL_KEYS: dict[str, dict[str, Any]] = {
    "bamba": {"layers_block_type": ["mamba", "attention", "attention", "mamba"]},
    "falcon_h1": {"layers_block_type": ["hybrid"] * 4},
    "granite_moe_hybrid": {"layer_types": ["mamba", "attention", "mamba", "attention"]},
    "internlm3": {"attention_bias": False, "mlp_bias": False},
}
"""Keys with further names that a complete config.json need not have."""


def with_own_keys(family: str) -> tuple[dict[str, Any], dict[str, str]]:
    """(a complete config.json without further names, the further names of its keys)."""
    aliases = families()[family].aliases
    stated = complete(family) | OPTIONAL_KEYS.get(family, {})
    raw = {aliases.get(word, word): value for word, value in stated.items()}
    present = {name: key for name, key in aliases.items() if key in raw}
    assert present
    return raw, present


@pytest.mark.parametrize("family", [name for name in FAMILIES if families()[name].aliases])
def test_a_further_name_means_what_the_key_means(family: str) -> None:
    table = families()[family]
    raw, aliases = with_own_keys(family)
    before = table.read_hf(raw)
    for name, key in aliases.items():
        others = {word: value for word, value in raw.items() if word != key}
        assert fields_of(table.read_hf({**others, name: raw[key]})) == fields_of(before)
        assert fields_of(table.read_hf({**raw, name: raw[key]})) == fields_of(before)
        with pytest.raises(
            CorruptCheckpoint, match=rf"{key} is .* and {name} .*leave the wrong one out"
        ):
            table.read_hf({**raw, name: "another"})


@pytest.mark.parametrize("family", [name for name in FAMILIES if families()[name].aliases])
def test_a_further_name_of_an_unchanged_key_stays_as_it_is(family: str) -> None:
    table = families()[family]
    raw, aliases = with_own_keys(family)
    for name, key in aliases.items():
        both = {**raw, name: raw[key]}
        assert json.loads(table.config_json(table.read_hf(both))) == both


def test_a_further_name_does_not_bring_back_what_a_conversion_has_changed() -> None:
    """transformers lets it win over the key itself."""
    table, raw = families()["gpt2"], complete("gpt2")
    raw["max_position_embeddings"] = raw.pop("n_positions")
    longer = replace(table.read_hf(raw), max_positions=4096)
    assert table.read_hf(json.loads(table.config_json(longer))).max_positions == 4096
    assert "max_position_embeddings" not in json.loads(table.config_json(longer))


@pytest.mark.oracle
def test_transformers_reads_further_names_as_we_do() -> None:
    transformers = pytest.importorskip("transformers")
    raw = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "max_position_embeddings": 99,
        "vocab_size": 7,
    }
    theirs, ours = transformers.GPT2Config(**raw), families()["gpt2"].read_hf(raw)
    assert (ours.hidden, ours.attention.heads, ours.layer_count, ours.max_positions) == (
        64,
        4,
        3,
        99,
    )
    assert (theirs.n_embd, theirs.n_head, theirs.n_layer, theirs.n_positions) == (64, 4, 3, 99)


@pytest.mark.parametrize("name", ["ministral3", "mistral4"])
def test_a_factor_on_queries_without_rope_scaling_is_refused_by_name(name: str) -> None:
    plain = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1}
    raw = {**raw_config(name), "rope_scaling": plain}
    with pytest.raises(NotExpressible, match=r"llama_4_scaling_beta 0\.1 is not supported"):
        families()[name].read_hf(raw)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"head_dim": 4}, "head_dim is 4, but heads have 10"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, but 4 of 10"),
    ],
    ids=str,
)
def test_keys_of_mistral_4_that_follow_from_others_have_to_agree(
    keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(CorruptCheckpoint, match=message):
        families()["mistral4"].read_hf(raw_config("mistral4", **keys))


def test_a_kolibri_without_a_window_is_refused_by_name() -> None:
    with pytest.raises(UnknownFamily, match="sliding_window None is not supported"):
        families()["kolibri1"].read_hf(raw_config("kolibri1", sliding_window=None))


NEGATIVE: tuple[tuple[str, str, Any], ...] = (
    *((name, "sliding_window", -1) for name in ("mistral", "gemma2", "gpt_oss", "cohere2")),
    *((name, "first_k_dense_replace", -1) for name in ("deepseek_v3", "glm4_moe", "cohere2_moe")),
    *((name, "num_dense_layers", -2) for name in ("afmoe", "lfm2_moe")),
    *(("minimax_m3_vl_text", f"index_{name}", -4) for name in ("block_size", "topk_blocks", "local_blocks")),
    ("mistral4", "original_max_position_embeddings", -64),
    ("deepseek_v3", "n_shared_experts", -1),
    ("deepseek_v3", "q_lora_rank", -3),
    ("deepseek_v4", "compress_rope_theta", -5.0),
    ("gpt2", "n_inner", -8),
    ("gpt_neox", "rotary_pct", -0.5),
    ("glm4", "partial_rotary_factor", -0.5),
    ("muse_spark_text", "post_norm_eps", -1e-6),
    ("nemotron_h", "moe_latent_size", -12),
)  # fmt: skip


@pytest.mark.parametrize("value", ["false", "no", "", [], {}])
@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("llama", "tie_word_embeddings"), ("llama", "attention_bias"), ("qwen3_moe", "norm_topk_prob"),
        ("falcon", "parallel_attn"), ("xglm", "scale_embedding"), ("falcon_h1", "mamba_norm_before_gate"),
    ],
)  # fmt: skip
def test_a_text_is_neither_true_nor_false(family: str, key: str, value: Any) -> None:
    """Python takes "false" for true."""
    with pytest.raises(CorruptCheckpoint, match=f"{key} should be true or false, found"):
        families()[family].read_hf({**raw_config(family), key: value})


@pytest.mark.parametrize(("family", "key", "value"), NEGATIVE)
def test_a_negative_size_is_refused_by_its_key(family: str, key: str, value: float) -> None:
    words = rf"config\.json: {key}.* should be (0 or more|a positive number), found {value}"
    with pytest.raises(CorruptCheckpoint, match=words):
        families()[family].read_hf({**raw_config(family), key: value})


@pytest.mark.parametrize("name", FAMILIES)
def test_no_family_accepts_a_negative_number_for_a_size_of_its_config_json(name: str) -> None:
    raw = raw_config(name)
    read = {key for each in families()[name].keys for key in each.names}
    sizes = [key for key in raw if re.search("size|_dim$|^n_|^num_|_rank$|heads$|_layers$", key)]
    numbers = [key for key in sizes if key in read and type(raw[key]) is int]
    assert numbers
    for key in numbers:
        with pytest.raises(CheckpointError):
            families()[name].read_hf({**raw, key: -max(1, raw[key])})


@pytest.mark.parametrize("value", [-1e-6, -1.0])
@pytest.mark.parametrize("family", ["llama", "apertus", "falcon_mamba"])
def test_an_epsilon_with_which_no_norm_computes_is_refused(family: str, value: float) -> None:
    key = "layer_norm_epsilon" if family == "falcon_mamba" else "rms_norm_eps"
    with pytest.raises(CorruptCheckpoint, match=f"{key}.*0 or more"):
        families()[family].read_hf({**raw_config(family), key: value})


@pytest.mark.parametrize("value", [0, 0.0, -5000.0])
@pytest.mark.parametrize("family", ["llama", "apertus"])
def test_a_rotary_base_without_frequencies_is_refused(family: str, value: float) -> None:
    rope = {"rope_type": "default", "rope_theta": value}
    for keys in ({"rope_parameters": rope}, {"rope_theta": value}):
        raw = {**raw_config(family), **keys}
        if "rope_theta" in keys:
            raw.pop("rope_parameters", None)
        with pytest.raises(CorruptCheckpoint, match="rope_theta should be a positive number"):
            families()[family].read_hf(raw)


@pytest.mark.parametrize(
    "change",
    [
        {"factor": 0},
        {"factor": -8.0},
        {"factor": float("nan")},
        {"factor": float("inf")},
        {"low_freq_factor": -1.0},
        {"high_freq_factor": 0.0},
        {"original_max_position_embeddings": 0},
        {"low_freq_factor": 4.0},
        {"low_freq_factor": 4.0, "high_freq_factor": 1.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["llama", "apertus", "step3p5"])
def test_a_rope_scaling_without_finite_angles_is_refused(
    family: str, change: dict[str, float]
) -> None:
    scaling = {
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip

    def read(rope: dict[str, Any]) -> None:
        kinds = {"full_attention": rope, "sliding_attention": {"rope_theta": 1e4}}
        stated = kinds if family == "step3p5" else rope
        raw = {**raw_config(family), "rope_parameters": stated, "rope_scaling": None}
        families()[family].read_hf(raw)

    read(scaling)
    with pytest.raises(CorruptCheckpoint, match=next(iter(change))):
        read(scaling | change)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_rope_that_is_stretched_by_no_positive_factor_is_refused(family: str) -> None:
    for kind in ("linear", "yarn"):
        for factor in (0, 0.0, -2.0):
            rope = {"rope_type": kind, "rope_theta": 1e4, "factor": factor}
            raw = {**raw_config(family), "rope_parameters": rope, "rope_scaling": None}
            with pytest.raises(CorruptCheckpoint, match=r"factor.*should be a positive number"):
                families()[family].read_hf(raw)


@pytest.mark.parametrize("share", [1.5, float("nan")])
@pytest.mark.parametrize("family", ["phi3", "glm4", "stablelm", "minimax_m3_vl_text"])
def test_a_head_does_not_rotate_by_more_than_itself(family: str, share: float) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": share}
    with pytest.raises(CorruptCheckpoint, match=r"rotating share of a head should be 1 or less"):
        families()[family].read_hf(raw_config(family, rope_parameters=rope, rope_scaling=None))


def test_a_head_that_is_smaller_than_its_rotating_part_is_refused() -> None:
    """MiniMax M3 without rope_parameters, whose rotary_dim of 64 is larger than a head."""
    raw = {**raw_config("minimax_m3_vl_text", head_dim=16), "rotary_dim": 64}
    raw.pop("rope_parameters", None)
    with pytest.raises(CorruptCheckpoint, match=r"rotating share of a head should be 1 or less"):
        families()["minimax_m3_vl_text"].read_hf(raw)


_STEP_ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
}


@pytest.mark.parametrize("missing", sorted(_STEP_ROPES))
def test_no_rope_of_step_counts_if_that_of_a_kind_of_layers_is_missing(missing: str) -> None:
    """transformers builds all of them anew from rope_theta then."""
    raw = raw_config("step3p5")
    layers = raw["num_hidden_layers"]
    raw |= {
        "layer_types": ["full_attention", "sliding_attention"] * (layers // 2),
        "sliding_window": 8,
    }
    raw["rope_theta"] = 300.0
    for rest in ({}, {missing: None}):
        incomplete = {**_STEP_ROPES, **rest}
        if not rest:
            del incomplete[missing]
        positions = families()["step3p5"].read_hf(raw | {"rope_parameters": incomplete}).positions
        assert (positions.theta, positions.local_theta) == (300.0, 300.0)
        assert (positions.rotary_percent, positions.local_rotary_percent) == (1.0, None)


def test_a_scale_of_attention_that_is_no_number_of_step_is_refused() -> None:
    with pytest.raises(NotExpressible, match=r"query_pre_attn_scalar.*positive number"):
        families()["step3p5"].read_hf(raw_config("step3p5", query_pre_attn_scalar=-1))


@pytest.mark.parametrize("family", ["granite", "granite_moe_hybrid", "hyperclovax"])
@pytest.mark.parametrize(
    "key", ["embedding_multiplier", "residual_multiplier", "attention_multiplier"]
)
@pytest.mark.parametrize("value", [0.0, -0.1])
def test_a_factor_that_no_model_learns_with_is_refused(family: str, key: str, value: float) -> None:
    with pytest.raises(NotExpressible, match=f"{key}.*positive number"):
        families()[family].read_hf(raw_config(family, **{key: value}))


def test_phi_3_5_moe_with_another_scaling_than_longrope_is_refused() -> None:
    """Its class multiplies every scaling by longrope's factors for short and long texts."""
    rope = {
        "rope_type": "yarn",
        "factor": 4.0,
        "rope_theta": 1e4,
        "short_mscale": 1.2,
        "long_mscale": 1.3,
    }
    with pytest.raises(NotExpressible, match=r"'yarn' is not supported.*only 'longrope'"):
        families()["phimoe"].read_hf(raw_config("phimoe", rope_scaling=None, rope_parameters=rope))


@pytest.mark.parametrize(
    "family", ["gemma3_text", "mellum", "mimo_v2_flash", "cohere_compass_text"]
)
def test_yarn_of_one_kind_of_layers_begins_at_the_longest_text(family: str) -> None:
    """As in transformers: without an original length, max_position_embeddings is it."""
    raw = raw_config(family)
    whole = {"partial_rotary_factor": 1.0}
    ropes = {
        "full_attention": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6, **whole},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, **whole},
    }
    found = families()[family].read_hf({**raw, "rope_scaling": None, "rope_parameters": ropes})
    assert found.positions.scaling is not None
    assert (
        found.positions.scaling["original_max_position_embeddings"]
        == raw["max_position_embeddings"]
    )
