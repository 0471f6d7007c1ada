"""Qwen 1.5 and 2 MoE: Qwen 2's attention, routed experts, and a gated shared expert."""

from megaconv.families import Family
from megaconv.families.llama import ATTENTION, EMBEDDING, HEAD, IGNORED, MLP
from megaconv.families.mixtral import MOE_NORM, expert_rows, shared_expert_rows
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, MIXTURE, SILU, decoder_keys
from megaconv.families.parts.keys import Fields, Keys, Raw, flags, need_size, size
from megaconv.families.qwen2 import qwen_windows
from megaconv.model.config import ModelConfig
from megaconv.model.fields import per_layer
from megaconv.model.table import Row

QWEN_EXPERTS = expert_rows(
    "mlp.gate.weight", "mlp.experts.{e}.{gate_proj|up_proj}.weight", "mlp.experts.{e}.down_proj.weight"
)
SHARED = shared_expert_rows("mlp.shared_expert.{gate_proj|up_proj}.weight", "mlp.shared_expert.down_proj.weight")
SHARED_GATE = Row(
    "layers.{l}.mlp.shared_gate.weight", ("1 hidden",), when="moe shared_gate",
    hf="model.layers.{l}.mlp.shared_expert_gate.weight",
    core="decoder.layers.{l}.mlp.shared_experts.gate_weight",
)  # fmt: skip
ROWS = (EMBEDDING, *ATTENTION, MOE_NORM, *MLP, *QWEN_EXPERTS, *SHARED, SHARED_GATE, *HEAD)


def qwen_experts(*, count: int, per_token: int, width: int, renormalize: bool = False) -> tuple[Keys, ...]:
    """Routed experts as Qwen describes them; the numbers count where keys are missing."""

    def read(raw: Raw) -> Fields:
        layers, step, dense = (
            need_size(raw, "num_hidden_layers"),
            need_size(raw, "decoder_sparse_step", 1),
            raw.get("mlp_only_layers"),
        )
        chosen = [layer for layer in range(layers) if layer not in (dense or ()) and (layer + 1) % step == 0]
        found = raw.get("num_experts") or raw.get("num_local_experts") or count
        return {"experts.count": found, "layers.mlp": per_layer(chosen, layers, "experts", "dense")}

    def write(config: ModelConfig) -> Raw:
        dense = list(config.layers_with("dense"))
        return {"num_experts": config.experts.count, "decoder_sparse_step": 1, "mlp_only_layers": dense}

    return (
        Keys(("num_experts", "num_local_experts", "decoder_sparse_step", "mlp_only_layers"), read, write),
        size("num_experts_per_tok", "experts.per_token", per_token),
        size("moe_intermediate_size", "experts.ffn", width),
        flags("norm_topk_prob", ("experts.renormalize",), default=renormalize),
    )


def _every_other_layer(raw: Raw) -> list[str]:
    """Unlike Qwen 2: every other layer, and only before max_window_layers."""
    layers, end = need_size(raw, "num_hidden_layers"), raw.get("max_window_layers", 28)
    return ["full_attention" if layer % 2 or layer >= end else "sliding_attention" for layer in range(layers)]


_KEYS = (
    *decoder_keys(positions=32768, kv_heads=16),
    *qwen_experts(count=60, per_token=4, width=1408),
    size("shared_expert_intermediate_size", "experts.shared_ffn", 5632),
    flags("qkv_bias", ("attention.qkv_bias",), default=True),
    qwen_windows(_every_other_layer),
)

FAMILY = Family(
    "qwen2_moe", ("Qwen2MoeForCausalLM",), "qwen2_moe", ROWS, keys=_KEYS, fixed=LLAMA_LIKE | {"experts.shared_gate": True},
    only=SILU, ignored=IGNORED, features=("qkv_bias",), recognized=f"{MIXTURE} !sigmoid_router shared_ffn",
)  # fmt: skip
