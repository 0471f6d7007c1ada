"""Nemotron-H, Nemotron Nano 2, Nemotron 3 Nano, Super and Ultra. Each layer is one of Mamba 2, attention, an MLP, or experts."""

from dataclasses import replace

from megaconv.families import Family
from megaconv.families.parts.decoder_keys import SQUARED_RELU, model_keys
from megaconv.families.parts.decoder_rows import EMBEDDING, HEAD
from megaconv.families.parts.deepseek_experts import SIGMOID_ROUTER, routed_experts, sigmoid_routing
from megaconv.families.parts.hybrid_mtp import (
    IN_CORE,
    hybrid_mtp_keys,
    hybrid_mtp_rows,
    unconverted_mtp,
    without_stored_mtp,
)
from megaconv.families.parts.keys import Keys, size
from megaconv.families.parts.mamba import (
    HEADS,
    LIMITED_TIME_STEPS,
    MAMBA_ONLY,
    MAMBA_SIZES,
    PATTERN,
    TIME_STEP_LIMIT,
    limited_time_steps,
    mamba_rows,
    of_experts,
)
from megaconv.families.parts.row_changes import in_core
from megaconv.model.table import Copied, Fused, Row, Stacked

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
    Row("layers.{l}.mlp.router.bias", ("experts",), when="moe router_bias",
        hf=_HF + "gate.e_score_correction_bias",
        core=_CORE + "mlp.router.expert_bias"),
    # Every rank holds both whole: they are Transformer Engine's linear layers, and core has no others here.
    Row("layers.{l}.mlp.latent.down.weight", ("expert_latent hidden",), when="moe expert_latent",
        hf=_HF + "fc1_latent_proj.weight",
        core=_CORE + "mlp.fc1_latent_proj.weight"),
    Row("layers.{l}.mlp.latent.up.weight", ("hidden expert_latent",), when="moe expert_latent",
        hf=_HF + "fc2_latent_proj.weight",
        core=_CORE + "mlp.fc2_latent_proj.weight"),
    Row("layers.{l}.mlp.experts.{e}.up.weight", ("moe_ffn expert_hidden",), tp=0, when="moe",
        hf=_HF + "experts.{e}.up_proj.weight",
        hf_stacked=Stacked(_HF + "experts.up_proj"),
        core=_EXPERT + "linear_fc1.weight",
        core_grouped=_CORE + "mlp.experts.linear_fc1.weight{e}"),
    Row("layers.{l}.mlp.experts.{e}.down.weight", ("expert_hidden moe_ffn",), tp=1, when="moe",
        hf=_HF + "experts.{e}.down_proj.weight",
        hf_stacked=Stacked(_HF + "experts.down_proj"),
        core=_EXPERT + "linear_fc2.weight",
        core_grouped=_CORE + "mlp.experts.linear_fc2.weight{e}"),
    Row("layers.{l}.mlp.shared.up.weight", ("shared_ffn hidden",), tp=0, when="moe shared_ffn",
        hf=_HF + "shared_experts.up_proj.weight",
        core=_CORE + "mlp.shared_experts.linear_fc1.weight"),
    Row("layers.{l}.mlp.shared.down.weight", ("hidden shared_ffn",), tp=1, when="moe shared_ffn",
        hf=_HF + "shared_experts.down_proj.weight",
        core=_CORE + "mlp.shared_experts.linear_fc2.weight"),
)  # fmt: skip
_TIED_HEAD = Copied(
    "head", {"hf": ("lm_head.weight",), "core": ("output_layer.weight",)}, untied=("hf",)
)
"""transformers' NemotronHForCausalLM reads the head from the file although tie_word_embeddings is true. Without the
tensor, it starts with a random head."""
_EMBEDDING = replace(
    EMBEDDING.renamed(hf="backbone.embeddings.weight"), copies=(_TIED_HEAD, IN_CORE)
)
_LAYERS = (*mamba_rows(_NORM, _HF), *_ATTENTION, *_MLP, *_EXPERTS)
ROWS = in_core((
    _EMBEDDING, *_LAYERS, *hybrid_mtp_rows(_LAYERS, "backbone.layers.{l}."),
    HEAD[0].renamed(hf="backbone.norm_f.weight", core="decoder.final_norm.weight"), HEAD[1],
))  # fmt: skip

_LATENT = Keys(
    ("moe_latent_size",),
    lambda raw: {"experts.latent": raw.get("moe_latent_size") or 0},
    lambda config: {"moe_latent_size": config.experts.latent or None},
)
_KEYS = (
    PATTERN,
    size("hidden_size", "hidden"),
    size("intermediate_size", "mlp.ffn", 21504),
    size("max_position_embeddings", "max_positions", 4096),
    HEADS,
    *MAMBA_SIZES,
    *map(
        of_experts,
        (
            *routed_experts(count=8, per_token=2, width=7688),
            size("moe_shared_expert_intermediate_size", "experts.shared_ffn", 7688),
            *sigmoid_routing(scale=1.0, groups=1, group_topk=1),
            _LATENT,
            Keys((), lambda raw: SIGMOID_ROUTER, lambda config: {}),
        ),
    ),
    TIME_STEP_LIMIT,
    hybrid_mtp_keys(PATTERN),
    *model_keys(tied=False, tokens=(1, 2, 0)),
)
_FIXED = {
    **SQUARED_RELU,
    **LIMITED_TIME_STEPS,
    "positions.kind": "none",
    "norm.kind": "RMSNorm",
    "norm.epsilon": 1e-5,
}
_ONLY = {
    **MAMBA_ONLY,
    **{
        "mlp_hidden_act": "relu2",
        "sliding_window": None,
        "mlp_bias": False,
        "attention_bias": False,
    },
    "n_shared_experts": 1,
}
_NAMES_OF_BAMBA = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_min": "time_step_min",
    "mamba_dt_limit": "time_step_limit",
}
"""Further names that transformers' class reads itself."""

FAMILY = Family(
    name="nemotron_h",
    architectures=("NemotronHForCausalLM",),
    model_type="nemotron_h",
    rows=ROWS,
    keys=_KEYS,
    fixed=_FIXED,
    only=_ONLY,
    unused=unconverted_mtp,
    complete=without_stored_mtp,
    renamed={"model.": "backbone."},
    recognized="hybrid_stack !only_mamba !rope !learned !norm_bias !zero_centered plain",
    proven="custom module",
    notices=limited_time_steps,
    aliases={"num_local_experts": "n_routed_experts", **_NAMES_OF_BAMBA},
)
