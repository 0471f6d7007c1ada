"""Names in Megatron core's state dictionaries that are no parameters, and the order in which its modules come."""

from collections.abc import Iterable

EXTRA_STATE = "._extra_state"
"""Transformer Engine's FP8 bookkeeping; every linear layer has an entry, empty without FP8."""

NOT_PARAMETERS = ("rotary_pos_emb.inv_freq",)

_MODULES = (
    "embedding.", ".input_layernorm", ".self_attention.core_attention", ".self_attention.linear_proj", ".self_attention.linear_qkv",
    ".self_attention.q_layernorm", ".self_attention.k_layernorm", ".pre_mlp_layernorm", ".mlp.linear_fc1", ".mlp.linear_fc2",
    "decoder.final_layernorm", "output_layer",
)  # fmt: skip
_MEMBERS = ("layer_norm_weight", "layer_norm_bias", "weight", "bias", "_extra_state")


def naming_of(names: Iterable[str]) -> str:
    """`core` for Transformer Engine's names, `core_local` for those of Megatron's own layers."""
    return "core" if any(name.endswith("linear_qkv.layer_norm_weight") for name in names) else "core_local"


def module_order(name: str) -> tuple[int, int, int]:
    """Sorts names as a model's own state_dict lists them; optimizer state is numbered by this order."""
    layer = int(name.split(".")[2]) if name.startswith("decoder.layers.") else -1
    module = next(index for index, word in enumerate(_MODULES) if word in name or name.startswith(word))
    if module >= _MODULES.index("decoder.final_layernorm"):
        layer = 1 << 30
    return layer, module, _MEMBERS.index(name.rsplit(".", 1)[1])


def extra_states(names: Iterable[str], *, has_head: bool) -> dict[str, bool]:
    """The `_extra_state` entries that a model with these parameters has: name -> whether it is an empty tensor (else None)."""
    names = list(names)
    engine = naming_of(names) == "core"
    modules = [name.rsplit(".", 1)[0] for name in names if ".linear_" in name and name.endswith(".weight")]
    if engine:
        modules += [
            module.replace("linear_proj", "core_attention") for module in modules if module.endswith("linear_proj")
        ]
        modules += [name.removesuffix(".weight") for name in names if name == "decoder.final_layernorm.weight"]
    found = {module + EXTRA_STATE: engine for module in modules}
    if has_head:
        found["output_layer" + EXTRA_STATE] = False
    return found
