"""Settings of a Megatron-Bridge provider or a NeMo 2 model as Megatron's arguments, so that the same lists check them.

    model:
      _target_: megatron.bridge.models.llama.llama_provider.Llama31ModelProvider
      activation_func: {_target_: torch.nn.functional.silu, _call_: false}
      num_query_groups: 8
      scale_factor: 32.0

A provider is a TransformerConfig of Megatron core with the arguments of GPTModel. Most of its fields have Megatron's
names. Newer configurations have the fields of TransformerConfig below `transformer:`. Fields with other names are
renamed here. Functions and specs, which Megatron-LM derives from flags, become those flags. A field without a flag
keeps its name, and is then refused. Source: gpt_provider.py, llama_provider.py, gemma_provider.py, gpt_builder.py and
yaml_utils.py of Megatron-Bridge, a run_config.yaml that it printed in October 2025; megatron/core/transformer/mlp.py.
"""

from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

from formats.wording import listing
from megaconv.errors import CorruptCheckpoint, UnknownFamily
from megaconv.megatron.arguments.provider_layers import (
    SPECS,
    require_described,
    target_of,
    window_fields,
)
from megaconv.megatron.arguments.rope import LLAMA3_SCALING

RENAMED = {
    "seq_length": "max_position_embeddings",
    "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
    "rope_scaling": "use_rope_scaling",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
}
"""A provider's field -> the equivalent argument of Megatron-LM."""
_LLAMA3 = {
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "old_context_len": "original_max_position_embeddings",
}
"""Fields of a provider beside scale_factor -> the keys in config.json."""
_OWN_MODULES = ("megatron.core.", "megatron.bridge.", "nemo.collections.llm.", "torch.")
"""Prefixes of the modules of Megatron, Bridge, NeMo and torch themselves."""
_TURNED = (
    "activation_func",
    "bias_activation_fusion",
    "interleaved_attn_pattern",
    "scale_factor",
    "share_embeddings_and_output_weights",
    *_LLAMA3,
)
"""Fields that are read here and become other arguments."""
_WITHOUT_EFFECT = (
    *(
        "_builder_",
        "_call_",
        "_target_",
        "bias_dropout_add_fusion",
        "data_step_fn",
        "extra_checkpoint_metadata",
        "forward_step_fn",
    ),
    *(
        "generation_config",
        "hf_model_id",
        "mamba_chunk_size",
        "mtp_enabled",
        "no_sync_func",
        "parallel_output",
        "restore_modelopt_state",
    ),
    *(
        "scatter_embedding_sequence_parallel",
        "should_pad_vocab",
        "use_transformer_engine_full_layer_spec",
    ),
)
"""Fields that only providers have and that don't change the model's computation."""

_DECIDING = (
    *(
        "num_attention_heads",
        "num_query_groups",
        "kv_channels",
        "normalization",
        "layernorm_epsilon",
    ),
    *("layernorm_zero_centered_gamma", "activation_func", "position_embedding_type", "seq_length"),
)
_DECIDING_ROPE = ("rotary_base", "rotary_percent", "rotary_interleaved")
_DECIDING_EXPERTS = (
    "moe_router_topk",
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_ffn_hidden_size",
)
"""Fields that no tensor shows, and that a provider class may have a default for.

Such a default isn't looked up.
"""


def provider_arguments(fields: Mapping[str, Any], where: str, *, complete: bool) -> Namespace:
    """A provider's fields as Megatron's arguments. Fields that are neither renamed nor read here stay unchanged.

    where: the file, for messages. complete: True if nothing else describes the model.
    Raises CorruptCheckpoint for settings without a decisive field, UnknownFamily for a scaling of positions that
    Megatron-LM has no argument for, and for layers that compute more than the fields say.
    """
    inner = fields.get("transformer")
    if isinstance(inner, dict):
        fields = {name: value for name, value in fields.items() if name != "transformer"} | inner
    if complete:
        require_described(fields, where)
        _require_deciding(fields, where)
    given = {
        name: value
        for name, value in {**fields, **window_fields(fields)}.items()
        if name not in (*_TURNED, *SPECS, *_WITHOUT_EFFECT)
    }
    for name, argument in RENAMED.items():
        if name in given:
            given[argument] = given.pop(name)
    if "num_attention_heads" in given:
        given["group_query_attention"] = given.get("num_query_groups") is not None
    if fields.get("share_embeddings_and_output_weights") is not None:
        given["untie_embeddings_and_output_weights"] = not fields[
            "share_embeddings_and_output_weights"
        ]
    given |= _activation(fields) | _llama3_scaling(fields, where)
    specs = [
        target for name in SPECS if (target := target_of(fields.get(name))) and not _is_own(target)
    ]
    args = Namespace()
    # Not as attributes: a field may have a name like __class__.
    vars(args).update(given | ({"spec": specs} if specs else {}))
    return args


def _require_deciding(fields: Mapping[str, Any], where: str) -> None:
    needed = _DECIDING + (
        _DECIDING_ROPE if fields.get("position_embedding_type") in ("rope", "yarn") else ()
    )
    needed += _DECIDING_EXPERTS if fields.get("num_moe_experts") else ()
    missing = [name for name in needed if name not in fields]
    if missing:
        raise CorruptCheckpoint(
            f"{where}: has no {listing(missing)}, whose default differs by class; "
            "pass --config with the Hugging Face directory of the model"
        )


def _is_own(target: str) -> bool:
    return target.startswith(_OWN_MODULES)


# Activations.


_ACTIVATION_FLAGS = ("swiglu", "quick_geglu", "squared_relu", "openai_gelu", "bias_gelu_fusion")


def _activation(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The activation as Megatron's flags. An activation without a flag stays as it is, so that it is refused."""
    if "activation_func" not in fields:
        return {}
    value = fields["activation_func"]
    kind = _kind_of(value)
    gated = bool(fields.get("gated_linear_unit"))
    fused = bool(fields.get("bias_activation_fusion"))
    off = dict.fromkeys(_ACTIVATION_FLAGS, False)
    if kind == "silu" and gated:
        return off | {"swiglu": True}
    if kind == "quick_gelu" and gated:
        return off | {"quick_geglu": True}
    if kind == "squared_relu":
        return off | {"squared_relu": True}
    if kind in ("gelu", "gelu_tanh"):
        # With a fused bias, core's gelu is the approximation.
        return off | {"bias_gelu_fusion": fused or kind == "gelu_tanh"}
    return off | {"activation_func": target_of(value) or repr(value)[:100]}


_KINDS = {
    "silu": "silu",
    "gelu": "gelu",
    "quick_gelu": "quick_gelu",
    "squared_relu": "squared_relu",
    "fast_gelu": "gelu_tanh",
    "openai_gelu": "gelu_tanh",
}
"""The last part of a function's name in torch, Megatron core and NeMo -> the activation."""


def _kind_of(value: Any) -> str | None:
    """The activation of a function; None for a function of another project, or with unknown arguments."""
    target = target_of(value)
    kind = _KINDS.get(target.rpartition(".")[2]) if _is_own(target) else None
    arguments = dict(_arguments(value))
    if kind == "gelu" and arguments == {"approximate": "tanh"}:
        return "gelu_tanh"
    return kind if not arguments else None


def _arguments(value: Any) -> Iterator[tuple[str, Any]]:
    """The arguments of a functools.partial."""
    for name, argument in value.items() if isinstance(value, dict) else ():
        if name not in ("_target_", "_call_", "_partial_") and not (
            name == "_args_" and not argument
        ):
            yield name, argument


# Positions.


def _llama3_scaling(fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The arguments of Llama 3's scaling. A provider of Llama 3.1 scales if it has a scale_factor.

    Megatron-LM has fixed values for the other numbers.
    """
    factor = fields.get("scale_factor")
    if factor is None:
        return {}
    for name, key in _LLAMA3.items():
        if name in fields and fields[name] != LLAMA3_SCALING[key]:
            raise UnknownFamily(
                f"{where}: {name} is {fields[name]!r:.40}; Megatron's rope scaling has {LLAMA3_SCALING[key]} alone"
            )
    return {"use_rope_scaling": True, "rope_scaling_factor": factor}
