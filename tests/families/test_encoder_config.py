"""The configurations of BERT and T5: config.json and Megatron's arguments lead back to the same model."""

import json
from argparse import Namespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaconv.errors import NotExpressible, UnknownFamily
from megaconv.families import family, family_of_hf
from megaconv.megatron.arguments.read import from_arguments
from megaconv.megatron.arguments.write import to_arguments
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed, fields_of
from megaconv.model.ir import TrainingState
from megaconv.model.layout import Layout
from tests.config_models import LLAMA as DECODER
from tests.config_models import found_in_tensors

Draw = st.DrawFn

BERT: dict[str, Any] = {
    "architectures": ["MegatronBertForPreTraining"], "model_type": "megatron-bert", "hidden_size": 12, "num_hidden_layers": 2,
    "num_attention_heads": 3, "intermediate_size": 20, "vocab_size": 31, "torch_dtype": "bfloat16",
}  # fmt: skip
T5: dict[str, Any] = {
    "architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "d_model": 12, "num_layers": 2, "num_heads": 3,
    "d_kv": 5, "d_ff": 20, "vocab_size": 31, "torch_dtype": "bfloat16",
}  # fmt: skip


MODELS = ("ForPreTraining", "ForSequenceClassification", "ForMultipleChoice")


def read(raw: dict[str, Any]) -> ModelConfig:
    return family_of_hf(raw, "config.json").read_hf(raw)


@st.composite
def berts(draw: Draw) -> ModelConfig:
    """A BERT that both transformers and Megatron's legacy models can have."""
    place, model = draw(st.sampled_from(("MegatronBert", "Bert"))), draw(st.sampled_from(MODELS))
    kind = place + model
    words: dict[str, Any] = {
        "architectures": [kind],
        "hidden_act": draw(st.sampled_from(("gelu", "gelu_new"))),
        "layer_norm_eps": draw(st.sampled_from((1e-12, 1e-5))),
        "max_position_embeddings": draw(st.integers(1, 99)),
        "torch_dtype": draw(st.sampled_from(("bfloat16", "float32"))),
        "pad_token_id": None,
    }
    classes = draw(st.integers(1, 5)) if model == "ForSequenceClassification" else 0
    if classes:
        words["id2label"] = {str(number): f"class {number}" for number in range(classes)}
    config = read(BERT | words)
    assert (config.head.classes, config.head.choices) == (classes, model == "ForMultipleChoice")
    return config


@st.composite
def t5s(draw: Draw) -> ModelConfig:
    """A T5 that Megatron core can have."""
    bias, tied, layers = draw(st.booleans()), draw(st.booleans()), draw(st.integers(1, 4))
    positions = draw(st.sampled_from(("learned", "relative", "rope")))
    found = {
        "positions.buckets": draw(st.integers(1, 40)),
        "positions.max_distance": draw(st.integers(1, 200)),
    }
    gated = draw(st.booleans())
    return changed(
        read(T5),
        {
            "layers.count": layers,
            "encoder.layers": layers,
            "positions.kind": positions,
            "norm.kind": draw(st.sampled_from(("LayerNorm", "RMSNorm"))),
            "mlp.activation": "silu" if gated else draw(st.sampled_from(("gelu", "gelu_tanh"))),
            "mlp.gated": gated,
            "attention.scale": None,
            "norm.final": draw(st.booleans()),
            "attention.qkv_bias": bias,
            "attention.o_bias": bias,
            "mlp.bias": bias,
            "tie_embeddings": tied,
            "head.bias": tied,
            "head.divisor": None,
            "pad_token_id": None,
            "eos_token_id": None,
            **(found if positions == "relative" else dict.fromkeys(found, 0)),
        },
    )


FOUND = (
    "encoder.layers",
    "norm.final",
    "head.bias",
    "positions.buckets",
    "token_types",
    "head.binary",
    "head.classes",
    "head.choices",
)
"""The fields of an encoder, in addition to those of all models."""


def back(config: ModelConfig, *, legacy: bool) -> ModelConfig:
    """The configuration, read back from Megatron's arguments and from fields that a loader reads from the tensors."""
    found = found_in_tensors(config, *FOUND) | (
        {"head.activation": "gelu"} if config.head.activation else {}
    )
    return from_arguments(Namespace(**arguments(config, legacy=legacy)), found, legacy=legacy)


def arguments(config: ModelConfig, **more: Any) -> dict[str, Any]:
    options: dict[str, Any] = {
        "transformer_impl": "local",
        "grouped_experts": False,
        "vocab_divisor": 8,
        "padded_vocab": 32,
    }
    return to_arguments(
        config, Layout(stage_layers=(config.layer_count,)), TrainingState(), **options | more
    )


@given(berts())
@settings(max_examples=40, deadline=None)
def test_a_bert_comes_back_from_config_json_and_from_legacy_arguments(config: ModelConfig) -> None:
    assert read(json.loads(json.dumps(family("bert").write_hf(config)))) == config
    assert back(config, legacy=True) == config


@given(t5s())
@settings(max_examples=60, deadline=None)
def test_a_t5_comes_back_from_cores_arguments(config: ModelConfig) -> None:
    assert back(config, legacy=False) == config


@pytest.mark.parametrize(
    "words",
    [
        {},
        {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        {"num_decoder_layers": 5},
    ],
)
def test_a_t5_of_transformers_comes_back_from_its_config_json(words: dict[str, Any]) -> None:
    config = read(T5 | words)
    assert read(json.loads(json.dumps(family("t5").write_hf(config)))) == config


def test_a_decoder_has_nothing_of_an_encoder() -> None:
    found = fields_of(DECODER)
    assert not any(
        found[name]
        for name in ("encoder.layers", "token_types", "positions.buckets", "positions.max_distance")
    )
    assert not any(
        found[name] for name in ("head.activation", "head.binary", "head.bias", "attention.scale")
    )
    assert (found["norm.final"], found["norm.place"]) == (True, "before")


OF_TASK = read(BERT | {"architectures": ["MegatronBertForSequenceClassification"]})
REFUSED = (
    read(BERT | {"hidden_act": "gelu"}),
    changed(
        read(T5),
        {
            "attention.scale": None,
            "head.bias": True,
            "head.divisor": None,
            "mlp.activation": "gelu",
        },
    ),
)


@pytest.mark.parametrize(
    ("config", "change", "legacy", "reason"),
    [
        (REFUSED[0], {"norm.place": "after_sum"}, False, "choose --saver legacy"),
        (REFUSED[0], {"token_types": 0}, False, "0 token types and a binary head"),
        (REFUSED[0], {"token_types": 3}, True, "3 token types"),
        (
            REFUSED[0],
            {"head.activation": "gelu_tanh"},
            True,
            "approximate gelu before its head only",
        ),
        (REFUSED[0], {"tie_embeddings": False}, True, "choose --saver core"),
        (OF_TASK, {"token_types": 0}, False, "0 token types and a classification head"),
        (REFUSED[1], {"attention.scale": 1.0}, False, "square root of the head size"),
        (REFUSED[1], {"head.bias": False}, False, "if the head is its embedding, and only then"),
        (
            REFUSED[1],
            {"positions.kind": "learned", "head.bias": False},
            True,
            "has a bias on its head, this model has none",
        ),
        (REFUSED[1], {}, True, "relative positions"),
        (REFUSED[1], {"mlp.activation": "relu"}, False, "relu"),
        (REFUSED[1], {"encoder.layers": 7}, False, "2 in its decoder and 7 in its encoder"),
    ],
)
def test_encoders_that_megatron_does_not_support_are_refused(
    config: ModelConfig, change: dict[str, Any], legacy: bool, reason: str
) -> None:
    arguments(REFUSED[1], legacy=False)
    with pytest.raises(NotExpressible, match=reason):
        arguments(changed(config, change), legacy=legacy)


@pytest.mark.parametrize(
    "words",
    [{"hidden_act": "relu"}, {"position_embedding_type": "relative_key"}, {"is_decoder": True}],
    ids=str,
)
def test_a_bert_that_computes_something_else_is_refused(words: dict[str, Any]) -> None:
    with pytest.raises(UnknownFamily, match=next(iter(words))):
        read(BERT | words)


def test_bert_in_cores_files_does_not_norm_afterwards() -> None:
    """Core takes the argument and ignores it, so that nobody can tell what was meant."""
    config = read(BERT)
    args = Namespace(**arguments(config) | {"apply_residual_connection_post_layernorm": True})
    found = found_in_tensors(config, *FOUND) | {"head.activation": "gelu"}
    with pytest.raises(UnknownFamily, match="apply_residual_connection_post_layernorm"):
        from_arguments(args, found)
