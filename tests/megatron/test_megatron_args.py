"""Megatron's arguments for any configuration, and back."""

from argparse import Namespace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaconv.engine.conversion import convert, fingerprint
from megaconv.errors import CheckpointError, CorruptCheckpoint, NotExpressible, UnknownFamily
from megaconv.families import families, family
from megaconv.families.parts.hf_config import load_config
from megaconv.megatron.arguments.latent import read_latent
from megaconv.megatron.arguments.null_tokenizer import size_for_all_releases
from megaconv.megatron.arguments.read import from_arguments, true_vocab
from megaconv.megatron.arguments.write import to_arguments
from megaconv.model.config import ModelConfig
from megaconv.model.described import value_of
from megaconv.model.fields import changed
from megaconv.model.layout import Layout, padded_vocab
from megaconv.model.training import TrainingState
from megaconv.options import ConvertOptions, SaveOptions
from tests.config_models import (
    LLAMA,
    LLAMA3,
    SCALINGS,
    YARN,
    Raw,
    configs,
    found_in_tensors,
    in_old_keys,
    raw_config,
    read,
)
from tests.models import write_llama


def arguments(config: ModelConfig, **more: Any) -> dict[str, Any]:
    options: dict[str, Any] = {
        "transformer_impl": "local",
        "vocab_divisor": 8,
        "padded_vocab": config.vocab,
    }
    options |= {"grouped_experts": False, **more}
    return to_arguments(
        config, Layout(stage_layers=(config.layer_count,)), TrainingState(), **options
    )


@given(configs())
@settings(max_examples=200, deadline=None)
def test_megatrons_arguments_lead_back_to_the_same_model(config: ModelConfig) -> None:
    told = families()[
        config.family
    ].recognized  # Phi-3's arguments are a Llama's or, with a window, a Mistral's
    family = None if told and config.has(told) else config.family
    assert (
        from_arguments(Namespace(**arguments(config)), found_in_tensors(config), family=family)
        == config
    )


@pytest.mark.parametrize(
    ("names", "epsilon"),
    [
        ({"norm_epsilon": 3e-6}, 3e-6),
        ({"layernorm_epsilon": 4e-6}, 4e-6),
        ({}, 1e-5),
        ({"norm_epsilon": None, "layernorm_epsilon": 2e-6}, 2e-6),
    ],
)
def test_the_norm_epsilon_is_read_in_every_spelling(
    names: dict[str, float | None], epsilon: float
) -> None:
    args = arguments(LLAMA)
    del args["norm_epsilon"], args["layernorm_epsilon"]
    assert (
        from_arguments(Namespace(**args, **names), found_in_tensors(LLAMA)).norm.epsilon == epsilon
    )


def test_the_norm_epsilon_is_written_in_every_spelling() -> None:
    written = arguments(LLAMA)
    assert written["norm_epsilon"] == written["layernorm_epsilon"] == 1e-5
    assert written["apply_layernorm_1p"] is written["layernorm_zero_centered_gamma"] is False


def test_one_query_group_without_grouped_attention_means_as_many_as_heads() -> None:
    config = changed(LLAMA, {"attention.kv_heads": 8})
    args = arguments(config)
    assert (args["group_query_attention"], args["num_query_groups"]) == (False, 1)
    assert from_arguments(Namespace(**args), found_in_tensors(config)).attention.kv_heads == 8


def test_one_query_group_with_grouped_attention_means_one() -> None:
    config = changed(LLAMA, {"attention.kv_heads": 1})
    args = arguments(config)
    assert (args["group_query_attention"], args["num_query_groups"]) == (True, 1)
    assert from_arguments(Namespace(**args), found_in_tensors(config)).attention.kv_heads == 1


def test_arguments_of_old_releases_have_fewer_names() -> None:
    config = changed(
        LLAMA, {"attention.kv_heads": 8, "attention.head_dim": 4, "norm.epsilon": 1e-5}
    )
    args = arguments(config)
    kept = (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "max_position_embeddings",
        "layernorm_epsilon",
        "position_embedding_type",
        "swiglu",
    )
    assert (
        from_arguments(Namespace(**{name: args[name] for name in kept}), found_in_tensors(config))
        == config
    )


def test_tensors_are_believed_where_arguments_say_something_else() -> None:
    args = arguments(LLAMA) | {
        "ffn_hidden_size": 1,
        "params_dtype": "float32",
        "untie_embeddings_and_output_weights": False,
        "num_layers": 9,
    }
    assert from_arguments(Namespace(**args), found_in_tensors(LLAMA)) == LLAMA


@pytest.mark.parametrize(
    ("other", "error", "message"),
    [
        (
            {"num_attention_heads": None},
            CorruptCheckpoint,
            "don't say num_attention_heads; give --config",
        ),
        ({"max_position_embeddings": None}, CorruptCheckpoint, "don't say max_position_embeddings"),
        ({"position_embedding_type": "alibi"}, UnknownFamily, "position_embedding_type is 'alibi'"),
        (
            {"position_embedding_type": "learned_absolute"},
            UnknownFamily,
            "the nearest is .*the model has no rope",
        ),
        ({"normalization": "other"}, UnknownFamily, "normalization is 'other'"),
        (
            {"use_rope_scaling": True, "rotary_seq_len_interpolation_factor": 4},
            UnknownFamily,
            "use_rope_scaling and rotary_seq_len_interpolation_factor 4: Megatron scales by both",
        ),
        ({"squared_relu": True}, UnknownFamily, "the model has no plain"),
        ({"softmax_type": "off-by-one"}, UnknownFamily, "softmax_type is 'off-by-one'"),
        ({"activation_func_clamp_value": 7.0}, UnknownFamily, "the model has clamped"),
        ({"glu_linear_offset": 1.0}, UnknownFamily, "the model has clamped"),
        ({"quick_geglu": True, "swiglu": False}, UnknownFamily, "the model has no silu"),
        (
            {"window_size": (7, 3)},
            UnknownFamily,
            r"window_size is \(7, 3\): right window 3; only 0",
        ),
        ({"window_size": (7, -1)}, UnknownFamily, "right window -1; only 0 is supported"),
        (
            {"position_embedding_type": "yarn"},
            CorruptCheckpoint,
            "don't say yarn_rotary_scaling_factor; give --config",
        ),
        ({"enable_gpt_oss": True}, CorruptCheckpoint, "don't say yarn_rotary_scaling_factor"),
    ],
)
def test_arguments_of_another_kind_of_model_are_refused(
    other: Raw, error: type[CheckpointError], message: str
) -> None:
    with pytest.raises(error, match=message):
        from_arguments(Namespace(**(arguments(LLAMA) | other)), found_in_tensors(LLAMA))


@pytest.mark.parametrize("name", ["layernorm_zero_centered_gamma", "apply_layernorm_1p"])
def test_norms_of_weight_plus_one_make_no_other_family_of_a_llama(name: str) -> None:
    args = Namespace(**(arguments(LLAMA) | {name: True}))
    config = from_arguments(args, found_in_tensors(LLAMA))
    assert (config.family, config.norm.zero_centered) == ("llama", True)


def test_neighbours_that_rotate_together_make_another_model_of_a_llama() -> None:
    config = from_arguments(
        Namespace(**(arguments(LLAMA) | {"rotary_interleaved": True})), found_in_tensors(LLAMA)
    )
    assert (config.family, config.positions.interleaved) == ("ernie4_5", True)


@pytest.mark.parametrize(
    ("freq", "rotates"),
    [
        (None, True),
        (0, True),
        (2, (True, False, True, False)),
        ([0, 0, 0, 1], (True, True, True, False)),
        ([0] * 4, True),
    ],
)
def test_layers_that_do_not_rotate_are_counted_as_megatron_counts_them(
    freq: object, rotates: object
) -> None:
    args = Namespace(**(arguments(LLAMA) | {"no_rope_freq": freq}))
    config = from_arguments(args, found_in_tensors(LLAMA))
    assert (value_of(config, "layers.rotates"), config.family) == (
        rotates,
        "llama" if rotates is True else "smollm3",
    )
    back = from_arguments(Namespace(**arguments(config)), found_in_tensors(config))
    assert back == config


@pytest.mark.parametrize(
    ("freq", "message"), [([0, 1], "about 2 layers, the model has 4"), ("4", "found '4'")]
)
def test_layers_that_do_not_rotate_have_to_be_layers_of_the_model(
    freq: object, message: str
) -> None:
    with pytest.raises(CorruptCheckpoint, match=message):
        from_arguments(
            Namespace(**(arguments(LLAMA) | {"no_rope_freq": freq})), found_in_tensors(LLAMA)
        )


@pytest.mark.parametrize(("per_token", "chosen"), [(4, 1), (6, 2), (2, 2)])
def test_groups_that_megatron_ranks_by_another_number_of_experts_are_refused(
    per_token: int, chosen: int
) -> None:
    """Megatron ranks a group by its moe_router_topk // moe_router_group_topk best experts, transformers by its best two."""
    config = read(raw_config("deepseek_v3"))
    other = {"moe_router_topk": per_token, "moe_router_group_topk": chosen}
    args = Namespace(**(arguments(config) | other))
    best = per_token // chosen
    with pytest.raises(
        UnknownFamily,
        match=rf"ranks a group by its best {best}, all supported model families by its best 2",
    ):
        from_arguments(args, found_in_tensors(config))
    alone = Namespace(**vars(args) | {"moe_router_num_groups": 1, "moe_router_group_topk": 1})
    assert from_arguments(alone, found_in_tensors(config)).experts.per_token == per_token


def test_an_approximate_gelu_without_biases_is_refused() -> None:
    """Megatron core fuses it with the bias, and asks for one."""
    config = changed(
        read(raw_config("starcoder2")),
        dict.fromkeys(("attention.qkv_bias", "attention.o_bias", "mlp.bias"), False),
    )
    with pytest.raises(NotExpressible, match="the approximate gelu in an MLP without biases"):
        arguments(config)


def test_yarn_of_neighbours_that_rotate_together_is_refused() -> None:
    """YarnRotaryEmbedding of core 0.16 knows halves alone."""
    config = changed(
        read(raw_config("ernie4_5")), {"positions.scaling": {"rope_type": "yarn", **YARN}}
    )
    with pytest.raises(
        NotExpressible, match="rotates neighbouring elements; Megatron core's rotates halves"
    ):
        arguments(config)


@pytest.mark.parametrize("family", ["glm", "smollm3"])
def test_rotations_that_legacy_models_do_not_know_are_refused_for_them(family: str) -> None:
    with pytest.raises(
        NotExpressible, match="Megatron's legacy models don't know: choose --saver core"
    ):
        arguments(read(raw_config(family)), legacy=True)


@pytest.mark.parametrize(
    ("family", "lacking", "message"),
    [
        ("gemma2", "attn_logit_softcapping", "attn_logit_softcapping; give --config"),
        ("gemma2", "final_logit_softcapping", "final_logit_softcapping; give --config"),
        ("gemma3_text", "rotary_base", "rotary_base as a pair; give --config"),
    ],
)
def test_fields_without_an_argument_of_megatron_are_never_guessed(
    family: str, lacking: str, message: str
) -> None:
    config = read(raw_config(family))
    args = arguments(config)
    del args[lacking]
    with pytest.raises(CorruptCheckpoint, match=message):
        from_arguments(Namespace(**args), found_in_tensors(config))


def test_a_base_of_rope_alone_is_not_that_of_both_kinds_of_layers() -> None:
    config = read(raw_config("gemma3_text"))
    with pytest.raises(CorruptCheckpoint, match="rotary_base as a pair"):
        from_arguments(
            Namespace(**arguments(config) | {"rotary_base": 1e6}), found_in_tensors(config)
        )


def test_the_scale_of_scores_is_read_as_core_and_as_megatron_bridges_gemma_2_say_it() -> None:
    config = read(
        raw_config(
            "gemma2",
            query_pre_attn_scalar=7,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
    )
    args = arguments(config)
    assert (args["softmax_scale"], args["query_pre_attn_scalar"]) == (7**-0.5, 7)
    del args["softmax_scale"]
    found = from_arguments(Namespace(**args), found_in_tensors(config))
    assert found.attention.scale == config.attention.scale


def test_a_llama_whose_scores_have_a_scale_of_their_own_is_none_that_hugging_face_knows() -> None:
    config = from_arguments(
        Namespace(**(arguments(LLAMA) | {"softmax_scale": 0.1})), found_in_tensors(LLAMA)
    )
    assert (config.family, config.attention.scale) == ("llama", 0.1)
    with pytest.raises(NotExpressible, match=r"attention\.scale is 0\.1"):
        family("llama").write_hf(config)


@pytest.mark.parametrize("factor", [0.0, -8.0, float("nan")])
def test_rope_that_is_stretched_by_no_positive_factor_is_refused(factor: float) -> None:
    args = arguments(LLAMA) | {"use_rope_scaling": True, "rope_scaling_factor": factor}
    with pytest.raises(CorruptCheckpoint, match="factor of the model's rope scaling should be"):
        from_arguments(Namespace(**args), found_in_tensors(LLAMA))


def test_a_scaling_that_is_left_out_is_not_read_as_another_one() -> None:
    config = read(raw_config("gemma3_text", rope_scaling={"rope_type": "dynamic", "factor": 4.0}))
    with pytest.raises(NotExpressible, match=r"rope scaling .*dynamic"):
        arguments(config)
    found = from_arguments(
        Namespace(**arguments(config, allow_lossy=True)), found_in_tensors(config)
    )
    assert found.positions.scaling is None


@pytest.mark.parametrize("value", ["0.1", True, -1.0])
def test_a_scale_that_is_no_positive_number_is_refused(value: object) -> None:
    with pytest.raises(CorruptCheckpoint, match="softmax_scale should be a positive number"):
        from_arguments(
            Namespace(**(arguments(LLAMA) | {"softmax_scale": value})), found_in_tensors(LLAMA)
        )


def test_heads_that_rotate_in_part_do_not_become_a_llama() -> None:
    config = from_arguments(
        Namespace(**(arguments(LLAMA) | {"rotary_percent": 0.5})), found_in_tensors(LLAMA)
    )
    assert config.positions.rotary_percent == 0.5
    with pytest.raises(
        NotExpressible,
        match=r"positions.rotary_percent is 0.5, which LlamaForCausalLM's config.json can't",
    ):
        family("llama").write_hf(config)


@pytest.mark.parametrize(
    ("args", "padded", "tp", "vocab"),
    [
        ({"vocab_size": 100, "make_vocab_size_divisible_by": 8}, 104, 1, 100),
        (
            {
                "vocab_size": 99,
                "make_vocab_size_divisible_by": 8,
                "tokenizer_type": "NullTokenizer",
            },
            104,
            1,
            100,
        ),
        (
            {
                "vocab_size": 100,
                "make_vocab_size_divisible_by": 8,
                "tokenizer_type": "NullTokenizer",
                "null_tokenizer_eod_id": None,
            },
            104,
            1,
            100,
        ),
        ({"vocab_size": 100}, 128, 1, 100),
        ({"vocab_size": 100, "make_vocab_size_divisible_by": 8}, 128, 4, 100),
        ({"vocab_size": 100, "make_vocab_size_divisible_by": 8}, 128, 1, None),
        ({"vocab_size": 105, "make_vocab_size_divisible_by": 8}, 104, 1, None),
        ({"vocab_size": None}, 104, 1, None),
        ({}, 104, 1, None),
    ],
)
def test_the_true_vocabulary_is_believed_only_if_padding_leads_to_the_rows_there_are(
    args: Raw, padded: int, tp: int, vocab: int | None
) -> None:
    assert true_vocab(Namespace(**args), padded, tp) == vocab


@given(vocab=st.integers(2, 5000), multiple=st.sampled_from([2, 8, 128, 512]))
def test_the_null_tokenizers_size_gives_the_same_rows_in_all_releases(
    vocab: int, multiple: int
) -> None:
    size = size_for_all_releases(vocab, multiple)
    up_to_core_17, later = padded_vocab(size + 1, multiple, 1), padded_vocab(size, multiple, 1)
    assert up_to_core_17 == later == padded_vocab(vocab, multiple, 1)


# Latent attention.


def latent(**changed: Any) -> dict[str, Any] | None:
    """The scaling of a DeepSeek's positions with these arguments; those given as ... are not there."""
    args = arguments(read(raw_config("deepseek_v3"))) | changed
    scaling = read_latent(
        Namespace(**{name: value for name, value in args.items() if value is not ...})
    )["positions.scaling"]
    return cast("dict[str, Any] | None", scaling)


def test_latent_attention_without_a_rope_type_has_yarn() -> None:
    """The parser's default is None since core 0.14, and MLATransformerConfig makes yarn of it."""
    found = latent(rope_type=None, rotary_scaling_factor=40.0)
    assert found is not None
    assert (found["rope_type"], found["factor"], found["original_max_position_embeddings"]) == (
        "yarn",
        40.0,
        4096,
    )
    assert latent(rope_type=None, rotary_scaling_factor=1.0) is None
    assert latent(rope_type="rope", rotary_scaling_factor=40.0) is None


def test_up_to_core_0_13_latent_attention_was_trained_at_its_largest_position() -> None:
    found = latent(
        rope_type=...,
        rotary_scaling_factor=40.0,
        max_position_embeddings=777,
        mscale=1.0,
        mscale_all_dim=1.0,
    )
    assert found is not None
    assert (
        found["original_max_position_embeddings"],
        found["mscale"],
        found["mscale_all_dim"],
    ) == (777, 1.0, 1.0)


@pytest.mark.parametrize(
    "changed",
    [
        {"rope_type": "rope", "mscale_all_dim": 1.0},
        {"rope_type": ..., "mscale": 0.707, "mscale_all_dim": 1.0},
    ],
    ids=["scores alone", "core 0.12"],
)
def test_attention_scores_that_are_scaled_otherwise_than_rotations_are_refused(
    changed: Raw,
) -> None:
    """A config.json has one mscale_all_dim for both."""
    with pytest.raises(UnknownFamily, match="attention scores are scaled by mscale"):
        latent(rotary_scaling_factor=40.0, **changed)


@pytest.mark.parametrize("mscales", [(0.707, 0.0), (0.0, 1.0), (0.0, 0.0)], ids=str)
def test_a_yarn_with_one_mscale_is_refused(mscales: tuple[float, float]) -> None:
    """Megatron scales rotations by the one that there is; every config.json that lacks one of them means 1 and none."""
    both = dict(zip(("mscale", "mscale_all_dim"), mscales, strict=True))
    with pytest.raises(
        UnknownFamily, match=f"has mscale {mscales[0]} and mscale_all_dim {mscales[1]}"
    ):
        latent(rope_type="yarn", rotary_scaling_factor=40.0, **both)
    assert latent(rope_type="yarn", rotary_scaling_factor=1.0, **both) is not None


# Refusals.


@pytest.mark.parametrize(
    ("scaling", "cause"),
    [
        (SCALINGS["dynamic"], r"\(dynamic\) has no equivalent in Megatron core"),
        (
            {"rope_type": "yarn", **YARN, "attention_factor": 1.5},
            r"\(yarn\) has attention_factor, which",
        ),
        (
            {"rope_type": "longrope"},
            r"\(longrope\) has no equivalent in Megatron core, which has linear, llama3 and yarn",
        ),
    ],
)
def test_rope_scaling_that_megatron_core_does_not_know_is_refused(scaling: Raw, cause: str) -> None:
    config = changed(LLAMA, {"positions.scaling": scaling})
    with pytest.raises(NotExpressible, match=f"rope scaling {cause}.*; --allow-lossy rope_scaling"):
        arguments(config)
    lossy = arguments(config, allow_lossy=True)
    assert (lossy["use_rope_scaling"], lossy["rotary_seq_len_interpolation_factor"]) == (
        False,
        None,
    )
    assert lossy["position_embedding_type"] == "rope"


@pytest.mark.parametrize(
    ("change", "cause"),
    [({"positions.rotary_percent": 0.5}, "scales 0.5 of a head"), ({}, "choose --saver core")],
)
def test_yarn_is_for_core_models_whose_whole_heads_rotate(change: Raw, cause: str) -> None:
    config = changed(LLAMA, {"positions.scaling": SCALINGS["yarn"], **change})
    with pytest.raises(NotExpressible, match=f"yarn.*{cause}"):
        arguments(config, legacy=not change)


@pytest.mark.parametrize(
    ("other", "cause"),
    [
        (
            {"low_freq_factor": 2.0},
            "low_freq_factor = 2.0; Megatron core's --use-rope-scaling has 1,",
        ),
        (
            {"high_freq_factor": 8.0},
            "high_freq_factor = 8.0; Megatron core's --use-rope-scaling has 4,",
        ),
        (
            {"original_max_position_embeddings": 4096},
            "original_max_position_embeddings = 4096; .* has 8192,",
        ),
        (
            {"low_freq_factor": 2.0, "original_max_position_embeddings": 4096},
            "low_freq_factor = 2.0 and original_max_position_embeddings = 4096; .* has 1 and 8192,",
        ),
    ],
)
def test_llama3_scaling_with_other_numbers_than_megatron_has_is_refused_with_both(
    other: Raw, cause: str
) -> None:
    with pytest.raises(
        NotExpressible,
        match=rf"rope scaling \(llama3\) has {cause} which no argument changes; --allow-lossy",
    ):
        arguments(changed(LLAMA, {"positions.scaling": {"rope_type": "llama3", **LLAMA3, **other}}))


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear"},
        {"rope_type": "llama3", "factor": 8.0},
        {"rope_type": "llama3", **LLAMA3, "factor": None},
    ],
)
def test_incomplete_rope_scaling_is_refused_and_no_crash(scaling: Raw) -> None:
    with pytest.raises(CheckpointError, match="rope"):
        arguments(read(in_old_keys(raw_config("llama"), 1e4, scaling)))


def test_scaling_that_was_left_out_is_there_again_after_the_way_back(tmp_path: Path) -> None:
    hf = write_llama(tmp_path / "hf", extra_config={"rope_scaling": SCALINGS["dynamic"]})
    with pytest.raises(NotExpressible, match="dynamic"):
        convert(hf, tmp_path / "core", "core", ConvertOptions())
    assert not (tmp_path / "core").exists()
    convert(
        hf,
        tmp_path / "core",
        "core",
        ConvertOptions(save=SaveOptions(allow_lossy=("rope_scaling",))),
    )
    convert(tmp_path / "core", tmp_path / "back", "hf", ConvertOptions())
    assert load_config(tmp_path / "back" / "config.json") == load_config(hf / "config.json")
    assert fingerprint(tmp_path / "back") == fingerprint(hf)


@pytest.mark.parametrize(
    "biases",
    [
        {"attention.qkv_bias": True, "attention.o_bias": True},
        {"mlp.bias": True},
        {"attention.o_bias": True, "mlp.bias": True},
        {"attention.qkv_bias": True, "mlp.bias": True},
    ],
)
def test_a_set_of_biases_that_megatron_core_does_not_know_is_refused(biases: Raw) -> None:
    with pytest.raises(
        NotExpressible, match="biases on all linear layers, on q, k and v only, or on none"
    ):
        arguments(changed(LLAMA, biases))


def test_attention_biases_without_mlp_biases_do_not_go_into_core(tmp_path: Path) -> None:
    hf = write_llama(tmp_path / "hf", extra_config={"attention_bias": True})
    with pytest.raises(NotExpressible, match="this model has another set"):
        convert(hf, tmp_path / "core", "core", ConvertOptions())


def test_a_sigmoid_router_that_leaves_its_weights_alone_is_not_written_for_megatron() -> None:
    with pytest.raises(NotExpressible, match="sigmoid router"):
        arguments(changed(read(raw_config("glm4_moe")), {"experts.renormalize": False}))
