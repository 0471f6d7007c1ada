"""Experts as Mixtral and Qwen have them: the rows of router, routed and shared experts, and the keys of config.json.

    hf     model.layers.{l}.mlp.{gate, experts.{e}, shared_expert, shared_expert_gate}
    core   decoder.layers.{l}.mlp.{router, experts, shared_experts}

transformers 5 writes each layer's experts as one stacked tensor (`hf+stacked`). Experts as DeepSeek has them are in
deepseek_experts.py. Their routed experts have Qwen's names.
"""

from megaconv.errors import CorruptCheckpoint
from megaconv.families.parts.keys import CONFIG_NAME, Fields, Keys, Raw, flags, need_size, size
from megaconv.model.config import ModelConfig
from megaconv.model.fields import per_layer
from megaconv.model.table import Fused, Row, Stacked, StackedTransposed

_HF = "model.layers.{l}."
_CORE = "decoder.layers.{l}.mlp."
_LOCAL_EXPERT = _CORE + "experts.local_experts.{e}."

MOE_NORM = Row(
    "layers.{l}.mlp_norm.weight", ("hidden",), when="moe",
    hf=_HF + "post_attention_layernorm.weight",
    core="decoder.layers.{l}.pre_mlp_layernorm.weight",
)  # fmt: skip


def expert_rows(router: str, gate_and_up: str, down: str) -> tuple[Row, ...]:
    """The rows of the router and the routed experts. The arguments are Hugging Face's names."""
    return (
        Row("layers.{l}.mlp.router.weight", ("experts hidden",), when="moe",
            hf=_HF + router,
            core=_CORE + "router.weight",
            hf_stacked=_HF + "mlp.gate.weight"),
        Row("layers.{l}.mlp.experts.{e}.{gate|up}.weight", ("moe_ffn hidden", "moe_ffn hidden"), tp=0, when="moe",
            hf=_HF + gate_and_up,
            hf_stacked=Stacked(_HF + "mlp.experts.gate_up_proj"),
            hf_stacked_transposed=StackedTransposed(_HF + "mlp.experts.gate_up_proj", "experts hidden 2*moe_ffn"),
            core=Fused(_LOCAL_EXPERT + "linear_fc1.weight"),
            core_grouped=Fused(_CORE + "experts.linear_fc1.weight{e}"),
            core_legacy_grouped=StackedTransposed(_CORE + "experts.weight1", "hidden local_experts*2*moe_ffn")),
        Row("layers.{l}.mlp.experts.{e}.down.weight", ("hidden moe_ffn",), tp=1, when="moe",
            hf=_HF + down,
            hf_stacked=Stacked(_HF + "mlp.experts.down_proj"),
            hf_stacked_transposed=StackedTransposed(_HF + "mlp.experts.down_proj", "experts moe_ffn hidden"),
            core=_LOCAL_EXPERT + "linear_fc2.weight",
            core_grouped=_CORE + "experts.linear_fc2.weight{e}",
            core_legacy_grouped=StackedTransposed(_CORE + "experts.weight2", "local_experts*moe_ffn hidden")),
    )  # fmt: skip


def shared_expert_rows(fc1: str, down: str) -> tuple[Row, ...]:
    """The rows of the shared expert, which every token passes."""
    return (
        Row("layers.{l}.mlp.shared.{gate|up}.weight", ("shared_ffn hidden", "shared_ffn hidden"), tp=0, when="moe shared_ffn",
            hf=_HF + fc1,
            core=Fused(_CORE + "shared_experts.linear_fc1.weight")),
        Row("layers.{l}.mlp.shared.down.weight", ("hidden shared_ffn",), tp=1, when="moe shared_ffn",
            hf=_HF + down,
            core=_CORE + "shared_experts.linear_fc2.weight"),
    )  # fmt: skip


QWEN_EXPERTS = expert_rows(
    "mlp.gate.weight",
    "mlp.experts.{e}.{gate_proj|up_proj}.weight",
    "mlp.experts.{e}.down_proj.weight",
)
_SHARED_GATE = Row(
    "layers.{l}.mlp.shared_gate.weight", ("1 hidden",), when="moe shared_gate",
    hf=_HF + "mlp.shared_expert_gate.weight",
    core=_CORE + "shared_experts.gate_weight",
)  # fmt: skip
QWEN_SHARED = (
    *shared_expert_rows(
        "mlp.shared_expert.{gate_proj|up_proj}.weight", "mlp.shared_expert.down_proj.weight"
    ),
    _SHARED_GATE,
)
"""A shared expert with a gate."""


def qwen_expert_keys(
    *, count: int, per_token: int, width: int, renormalize: bool = False
) -> tuple[Keys, ...]:
    """Routed experts in Qwen's keys. The numbers are the defaults for missing keys."""

    def read(raw: Raw) -> Fields:
        layers = need_size(raw, "num_hidden_layers")
        step = need_size(raw, "decoder_sparse_step", 1)
        dense = raw.get("mlp_only_layers")
        chosen = [
            layer
            for layer in range(layers)
            if layer not in (dense or ()) and (layer + 1) % step == 0
        ]
        found = _stated_count(raw, count)
        if not found:
            return {"experts.count": 0, "layers.mlp": "dense"}
        return {"experts.count": found, "layers.mlp": per_layer(chosen, layers, "experts", "dense")}

    def write(config: ModelConfig) -> Raw:
        dense = list(config.layers_with("dense"))
        return {
            "num_experts": config.experts.count,
            "decoder_sparse_step": 1,
            "mlp_only_layers": dense,
        }

    return (
        Keys(
            ("num_experts", "num_local_experts", "decoder_sparse_step", "mlp_only_layers"),
            read,
            write,
        ),
        size("num_experts_per_tok", "experts.per_token", per_token),
        size("moe_intermediate_size", "experts.ffn", width),
        flags("norm_topk_prob", ("experts.renormalize",), default=renormalize),
    )


def _stated_count(raw: Raw, default: int) -> int:
    """The number of experts under the first of its two names that has a value. 0 makes all layers dense."""
    for key in ("num_experts", "num_local_experts"):
        stated = raw.get(key)
        if stated is None:
            continue
        if type(stated) is not int or stated < 0:
            raise CorruptCheckpoint(
                f"{CONFIG_NAME}: {key} should be a number, found {stated!r:.60}"
            )
        return stated
    return default


def _read_width(raw: Raw) -> Fields:
    width = need_size(raw, "intermediate_size")
    return {"mlp.ffn": width, "experts.ffn": width}


EXPERTS_WIDTH = Keys(
    ("intermediate_size",), _read_width, lambda config: {"intermediate_size": config.experts.ffn}
)
"""Width of the experts, for models with experts in every layer and only one key for the width."""
