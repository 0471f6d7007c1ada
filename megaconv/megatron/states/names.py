"""Names in Megatron core's state dictionaries that are no parameters, and the order in which its modules come."""

from collections.abc import Collection, Sequence

EXTRA_STATE = "._extra_state"
"""Transformer Engine's FP8 bookkeeping; every linear layer has an entry, empty without FP8."""

NOT_PARAMETERS = ("rotary_pos_emb.inv_freq",)
BUFFERS = (*NOT_PARAMETERS, ".expert_bias", "tokens_per_expert")
"""How tensors of a model end that no optimizer trains."""

_ORDER = (
    "embedding", "word_embeddings", "position_embeddings", "tokentype_embeddings",
    "encoder_relative_pos_emb", "decoder_relative_pos_emb", "relative_attention_bias",
    "encoder", "decoder", "mtp", "lm_head", "output_layer", "binary_head", "pooler", "dense", "layer_norm", "layers",
    "enorm", "hnorm", "eh_proj", "transformer_layer", "final_layernorm",
    "input_layernorm", "self_attention", "pre_cross_attn_layernorm", "cross_attention", "pre_mlp_layernorm", "mlp",
    "core_attention", "softmax_offset",
    "linear_proj", "linear_q", "linear_kv", "linear_qkv", "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj",
    "linear_kv_down_proj", "linear_kv_up_proj", "q_layernorm", "k_layernorm", "kv_layernorm",
    "router", "gate_weight", "linear_fc1", "linear_fc2", "experts", "local_experts", "shared_experts",
    "layer_norm_weight", "layer_norm_bias", "weight", "bias", "expert_bias", "_extra_state",
)  # fmt: skip
"""Modules and their members as they come in a model's own state_dict; no two that meet are the wrong way round."""


def naming_of(names: Collection[str]) -> str:
    """`core` for Transformer Engine's names, `core_local` for those of Megatron's own layers; and how experts are stored."""
    fused = ("linear_qkv.layer_norm_weight", "linear_kv_up_proj.layer_norm_weight")
    base = "core" if any(name.endswith(fused) for name in names) else "core_local"
    if any(name.endswith(".experts.weight1") for name in names):
        return base + "+legacy_grouped"
    return base + ("+grouped" if any(name.endswith(".experts.linear_fc1.weight0") for name in names) else "")


def describe_naming(naming: str) -> str:
    """`Transformer Engine names, grouped experts`."""
    base, _, experts = naming.partition("+")
    engine = "Transformer Engine" if base == "core" else "local"
    return f"{engine} names" + (f", {experts.replace('_', ' ')} experts" if experts else "")


def module_order(name: str, words: Sequence[str] = _ORDER) -> tuple[tuple[int, int], ...]:
    """Sorts names as a model's own state_dict lists them; optimizer state is numbered by this order."""
    return tuple(_word_order(word, words) for word in name.split("."))


def _word_order(word: str, words: Sequence[str]) -> tuple[int, int]:
    if word.isdigit():
        return 0, int(word)
    if word in words:
        return words.index(word), 0
    bare = word.rstrip("0123456789")  # grouped experts: weight0, bias0, weight1, bias1 ...
    return words.index("weight"), 2 * int(word[len(bare) :]) + (bare == "bias")


_NORMS = tuple(
    f"{name}.weight"
    for name in (
        *("input_layernorm", "pre_cross_attn_layernorm", "pre_mlp_layernorm", "final_layernorm"),
        *("enorm", "hnorm"),
    )
)
"""Norms that are modules of their own among Transformer Engine's too."""


def extra_states(names: Collection[str]) -> dict[str, bool]:
    """The `_extra_state` entries that a model with these parameters has: name -> whether it is an empty tensor (else None)."""
    engine = naming_of(names).startswith("core+") or naming_of(names) == "core"
    modules = dict.fromkeys(name.rpartition(".")[0] for name in names if ".linear_" in name or ".eh_proj." in name)
    found = {module + EXTRA_STATE: engine for module in modules}
    if engine:
        attention = [module for module in modules if module.endswith("linear_proj")]
        found |= {module.replace("linear_proj", "core_attention") + EXTRA_STATE: True for module in attention}
        norms = [name for name in names if name.endswith(_NORMS)]
        found |= {name.removesuffix(".weight") + EXTRA_STATE: True for name in norms}
    heads = [name for name in ("lm_head.output_layer", "output_layer") if any(n.startswith(f"{name}.") for n in names)]
    if "decoder.final_layernorm.weight" in names and not heads:
        heads = ["output_layer"]  # a tied one, which has no parameters of its own
    return found | {head + EXTRA_STATE: False for head in heads}
