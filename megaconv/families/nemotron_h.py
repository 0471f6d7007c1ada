"""Nemotron-H, Nemotron Nano 2 and Nemotron 3 Nano: layers of Mamba 2, attention, MLPs and experts, each of which is one alone."""

from math import inf

from megaconv.errors import CorruptCheckpoint, NotExpressible
from megaconv.families import Family
from megaconv.families.glm4_moe import SIGMOID
from megaconv.families.llama import EMBEDDING, HEAD
from megaconv.families.parts.decoder_keys import SQUARED_RELU, heads, model_keys
from megaconv.families.parts.decoder_rows import in_core
from megaconv.families.parts.expert_keys import routed_experts, sigmoid_routing
from megaconv.families.parts.keys import CONFIG_NAME, Fields, Keys, Raw, size
from megaconv.families.parts.mamba import MAMBA_SIZES, mamba_rows
from megaconv.families.parts.mtp import MTP_LEFT_OUT
from megaconv.model.config import ModelConfig
from megaconv.model.pattern import layer_fields, pattern_of
from megaconv.model.table import Fused, Row, Stacked

_NORM = "backbone.layers.{l}.norm."
_HF = "backbone.layers.{l}.mixer."
_CORE = "decoder.layers.{l}."
_EXPERT = _CORE + "mlp.experts.local_experts.{e}."

_ATTENTION = (
    Row("layers.{l}.input_norm.weight", ("hidden",), when="attention",
        hf=_NORM + "weight",
        core=_CORE + "self_attention.linear_qkv.layer_norm_weight",
        core_local=_CORE + "input_layernorm.weight"),
    Row("layers.{l}.attn.{q|k|v}.weight", ("heads*head_dim hidden", "kv_heads*head_dim hidden", "kv_heads*head_dim hidden"), tp=0,
        when="attention",
        hf=_HF + "{q|k|v}_proj.weight",
        core=Fused(_CORE + "self_attention.linear_qkv.weight", groups="kv_heads")),
    Row("layers.{l}.attn.o.weight", ("hidden heads*head_dim",), tp=1, when="attention",
        hf=_HF + "o_proj.weight",
        core=_CORE + "self_attention.linear_proj.weight"),
)  # fmt: skip
_MLP = (
    Row("layers.{l}.mlp_norm.weight", ("hidden",), when="dense",
        hf=_NORM + "weight",
        core=_CORE + "mlp.linear_fc1.layer_norm_weight",
        core_local=_CORE + "pre_mlp_layernorm.weight"),
    Row("layers.{l}.mlp.up.weight", ("ffn hidden",), tp=0, when="dense",
        hf=_HF + "up_proj.weight",
        core=_CORE + "mlp.linear_fc1.weight"),
    Row("layers.{l}.mlp.down.weight", ("hidden ffn",), tp=1, when="dense",
        hf=_HF + "down_proj.weight",
        core=_CORE + "mlp.linear_fc2.weight"),
)  # fmt: skip
_EXPERTS = (
    Row("layers.{l}.mlp_norm.weight", ("hidden",), when="moe",
        hf=_NORM + "weight",
        core=_CORE + "pre_mlp_layernorm.weight"),
    Row("layers.{l}.mlp.router.weight", ("experts hidden",), when="moe",
        hf=_HF + "gate.weight",
        core=_CORE + "mlp.router.weight"),
    Row("layers.{l}.mlp.router.bias", ("experts",), when="moe",
        hf=_HF + "gate.e_score_correction_bias",
        core=_CORE + "mlp.router.expert_bias"),
    Row("layers.{l}.mlp.experts.{e}.up.weight", ("moe_ffn hidden",), tp=0, when="moe",
        hf=_HF + "experts.{e}.up_proj.weight",
        hf_stacked=Stacked(_HF + "experts.up_proj"),
        core=_EXPERT + "linear_fc1.weight",
        core_grouped=_CORE + "mlp.experts.linear_fc1.weight{e}"),
    Row("layers.{l}.mlp.experts.{e}.down.weight", ("hidden moe_ffn",), tp=1, when="moe",
        hf=_HF + "experts.{e}.down_proj.weight",
        hf_stacked=Stacked(_HF + "experts.down_proj"),
        core=_EXPERT + "linear_fc2.weight",
        core_grouped=_CORE + "mlp.experts.linear_fc2.weight{e}"),
    Row("layers.{l}.mlp.shared.up.weight", ("shared_ffn hidden",), tp=0, when="moe",
        hf=_HF + "shared_experts.up_proj.weight",
        core=_CORE + "mlp.shared_experts.linear_fc1.weight"),
    Row("layers.{l}.mlp.shared.down.weight", ("hidden shared_ffn",), tp=1, when="moe",
        hf=_HF + "shared_experts.down_proj.weight",
        core=_CORE + "mlp.shared_experts.linear_fc2.weight"),
)  # fmt: skip
ROWS = in_core((
    EMBEDDING.renamed(hf="backbone.embeddings.weight"), *mamba_rows(_NORM, _HF), *_ATTENTION, *_MLP, *_EXPERTS,
    HEAD[0].renamed(hf="backbone.norm_f.weight", core="decoder.final_norm.weight"), HEAD[1],
))  # fmt: skip

_WORDS = {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-", "moe": "E"}
"""For a layer, before transformers 5.2x and since; files on the Hub have symbols."""


def _pattern(raw: Raw) -> str:
    kinds = raw.get("layers_block_type")
    if kinds is None:
        return str(raw.get("hybrid_override_pattern") or "ME*-")
    others = [kind for kind in kinds if kind not in _WORDS]
    if others:
        raise NotExpressible(f"{CONFIG_NAME}: layers_block_type has {others[0]!r}; supported: {', '.join(_WORDS)}")
    return "".join(_WORDS[kind] for kind in kinds)


def _read_layers(raw: Raw) -> Fields:
    pattern, layers = _pattern(raw), raw.get("num_hidden_layers")
    if layers is not None and layers != len(pattern):
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: num_hidden_layers is {layers!r}, its pattern has {len(pattern)} layers"
        )
    return layer_fields(pattern, f"{CONFIG_NAME}: hybrid_override_pattern")


def _write_layers(config: ModelConfig) -> Raw:
    return {"hybrid_override_pattern": pattern_of(config), "num_hidden_layers": config.layer_count}


def _of_experts(declared: Keys) -> Keys:
    """What a model without experts may say nonetheless, and doesn't mean."""
    return Keys(
        declared.names,
        lambda raw: declared.read(raw) if "E" in _pattern(raw) else {},
        lambda config: declared.write(config) if config.experts.count else {},
    )


def _read_heads(raw: Raw) -> Fields:
    older = {"head_dim": raw["attention_head_dim"]} if "attention_head_dim" in raw else {}
    return _HEADS.read({**older, **raw})


_HEADS = heads(8, 128)
_NO_LIMIT = ([0.0, inf], [0.0, {"__float__": "Infinity"}])
"""As Python's JSON has infinity, and as transformers 5 has it."""


def _time_step_limit(raw: Raw) -> Fields:
    if list(raw.get("time_step_limit") or _NO_LIMIT[0]) not in _NO_LIMIT:
        raise NotExpressible(
            f"{CONFIG_NAME}: time_step_limit {raw['time_step_limit']!r} is not supported, since Megatron core has no limit on time steps"
        )
    return {}


_KEYS = (
    Keys(("layers_block_type", "hybrid_override_pattern", "num_hidden_layers"), _read_layers, _write_layers),
    size("hidden_size", "hidden"),
    size("intermediate_size", "mlp.ffn", 21504),
    size("max_position_embeddings", "max_positions", 4096),
    Keys((*_HEADS.names, "attention_head_dim"), _read_heads, _HEADS.write),
    *MAMBA_SIZES,
    *map(
        _of_experts,
        (
            *routed_experts(count=8, per_token=2, width=7688),
            size("moe_shared_expert_intermediate_size", "experts.shared_ffn", 7688),
            *sigmoid_routing(scale=1.0, groups=1, group_topk=1),
            Keys((), lambda raw: SIGMOID, lambda config: {}),
        ),
    ),
    Keys(("time_step_limit",), _time_step_limit, lambda config: {}),
    Keys(("num_nextn_predict_layers", "mtp_layers_block_type"), lambda raw: {}, lambda config: {}),
    *model_keys(tied=False, tokens=(1, 2, 0)),
)
_FIXED = {**SQUARED_RELU, "positions.kind": "none", "norm.kind": "RMSNorm", "norm.epsilon": 1e-5}
_ONLY = {
    **{
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "conv_kernel": 4,
        "use_conv_bias": True,
        "sliding_window": None,
    },
    **dict.fromkeys(("use_bias", "mamba_proj_bias", "mlp_bias", "attention_bias"), False),
    **{"layer_norm_epsilon": 1e-5, "time_step_min": 0.001, "n_shared_experts": 1, "moe_latent_size": None},
}
"""Of the convolution and of the gated norm's epsilon, Megatron core's mixer has no other."""


def _time_steps(config: ModelConfig) -> tuple[str, ...]:
    return (
        "transformers makes time steps of Mamba layers at least 0.001 (time_step_min), Megatron core has no such limit: the weights "
        "are the same, and so are logits but where time steps are smaller",
    )


FAMILY = Family(
    "nemotron_h", ("NemotronHForCausalLM",), "nemotron_h", ROWS, keys=_KEYS, fixed=_FIXED, only=_ONLY, left_out=MTP_LEFT_OUT,
    recognized="mamba_layers !rope !learned !norm_bias !zero_centered relu2 plain", proven="custom module", notices=_time_steps,
)  # fmt: skip
