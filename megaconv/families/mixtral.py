"""Mixtral: Mistral's attention, and experts in every layer."""

from megaconv.families import Family
from megaconv.families.llama import ATTENTION, EMBEDDING, HEAD, IGNORED
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, MIXTURE, SILU, decoder_keys, rope, window
from megaconv.families.parts.keys import Fields, Keys, Raw, need_size, size
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
    """Router and routed experts, given Hugging Face's names for them."""
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
    """The expert that every token passes."""
    return (
        Row("layers.{l}.mlp.shared.{gate|up}.weight", ("shared_ffn hidden", "shared_ffn hidden"), tp=0, when="moe shared_ffn",
            hf=_HF + fc1,
            core=Fused(_CORE + "shared_experts.linear_fc1.weight")),
        Row("layers.{l}.mlp.shared.down.weight", ("hidden shared_ffn",), tp=1, when="moe shared_ffn",
            hf=_HF + down,
            core=_CORE + "shared_experts.linear_fc2.weight"),
    )  # fmt: skip


_EXPERT = "block_sparse_moe.experts.{e}."
_EXPERTS = expert_rows("block_sparse_moe.gate.weight", _EXPERT + "{w1|w3}.weight", _EXPERT + "w2.weight")
_MISTRALS_OWN = {
    "layers.{l}.mlp_norm.weight": "layers.{l}.ffn_norm.weight",
    "layers.{l}.mlp.router.weight": "layers.{l}.feed_forward.gate.weight",
    "layers.{l}.mlp.experts.{e}.{gate|up}.weight": "layers.{l}.feed_forward.experts.{e}.{w1|w3}.weight",
    "layers.{l}.mlp.experts.{e}.down.weight": "layers.{l}.feed_forward.experts.{e}.w2.weight",
}
"""In consolidated.safetensors, as mistral-inference names its modules."""
_OWN = tuple(row.renamed(meta=_MISTRALS_OWN[row.canonical]) for row in (MOE_NORM, *_EXPERTS))
ROWS = (EMBEDDING, *ATTENTION, *_OWN, *HEAD)


def _read_width(raw: Raw) -> Fields:
    width = need_size(raw, "intermediate_size")
    return {"mlp.ffn": width, "experts.ffn": width}


EXPERTS_WIDTH = Keys(("intermediate_size",), _read_width, lambda config: {"intermediate_size": config.experts.ffn})
"""Of models that have experts in every layer, and one word for their width."""

_KEYS = (
    *decoder_keys(positions=131072, kv_heads=8, epsilon=1e-5, rotation=rope(1e6), tokens=(1, 2, None)),
    window(None),
    size("num_local_experts", "experts.count", 8),
    size("num_experts_per_tok", "experts.per_token", 2),
    EXPERTS_WIDTH,
)

FAMILY = Family(
    "mixtral", ("MixtralForCausalLM",), "mixtral", ROWS, keys=_KEYS, fixed=LLAMA_LIKE | {"layers.mlp": "experts"}, only=SILU,
    ignored=IGNORED, recognized=f"{MIXTURE} !sigmoid_router !shared_ffn !qk_norm",
)  # fmt: skip
