"""The layers of a hybrid from flags: a pattern with a symbol for each layer, or ratios from which one follows.

Source: mamba_hybrid_layer_allocation.py of megatron-core 0.16.1, and the arguments of Megatron-LM.
"""

from typing import Any

from megaconv.errors import UsageError
from megaconv.model.pattern import layer_fields
from megatron_lite.settings.layer_lists import read_list
from megatron_lite.settings.model import Model

_SPECS = ("mamba_stack_spec", "hybrid_stack_spec")
_OF_LAYOUT = {
    "|": "--pipeline-model-parallel-layout or --decoder-first-pipeline-num-layers for stages of different sizes",
    "/": "--load with a model that has layers for multi-token prediction",
}
"""A symbol that is no layer, in patterns of core 0.17 and later -> the flag to give instead."""


def hybrid_fields(model: Model) -> dict[str, Any]:
    """Return the fields of the layers, and of the mixers' sizes; empty for a model with attention alone."""
    pattern = _pattern(model)
    if pattern is not None:
        return layer_fields(pattern, "--hybrid-override-pattern") | _of_mamba(model, pattern)
    if model.experimental_attention_variant is not None:
        return {
            "layers.mixer": tuple(
                "linear" if linear else "attention" for linear in linear_layers(model)
            )
        }
    if model.attention_output_gate:
        raise UsageError(
            "--attention-output-gate is for attention between delta nets; give --experimental-attention-variant gated_delta_net too"
        )
    return {}


def is_mamba_hybrid(model: Model) -> bool:
    """Return whether the flags describe a hybrid with Mamba layers."""
    ratios = model.hybrid_attention_ratio, model.hybrid_mlp_ratio
    is_asked_for = model.hybrid_override_pattern or model.spec or model.is_hybrid_model
    return any(ratios) or bool(is_asked_for)


def _pattern(model: Model) -> str | None:
    """Return the pattern of a hybrid with Mamba layers; None for another model. Raises UsageError."""
    assert model.num_layers is not None
    if model.spec and model.spec[-1] not in _SPECS:
        raise UsageError(
            f"--spec {' '.join(model.spec)}: give megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec, or leave it out"
        )
    ratios = model.hybrid_attention_ratio, model.hybrid_mlp_ratio
    pattern = model.hybrid_override_pattern
    if not is_mamba_hybrid(model):
        return None
    if pattern is None:
        return allocated(model.num_layers, *ratios)
    for symbol, instead in _OF_LAYOUT.items():
        if symbol in pattern:
            raise UsageError(
                f"--hybrid-layer-pattern {pattern}: leave out the layers' `{symbol}`, and give {instead}"
            )
    if len(pattern) != model.num_layers:
        raise UsageError(
            f"--hybrid-override-pattern {pattern} has {len(pattern)} layers, --num-layers says {model.num_layers}"
        )
    expected = allocated(model.num_layers, *ratios)
    if any(ratios) and any(pattern.count(symbol) != expected.count(symbol) for symbol in "*-"):
        raise UsageError(
            f"--hybrid-override-pattern {pattern} has other numbers of layers than the ratios, which give {expected}; leave the ratios out"
        )
    return pattern


def allocated(layers: int, attention: float, mlp: float) -> str:
    """Return the pattern for shares of attention layers and of MLP layers, spread evenly among Mamba layers.

    Raises UsageError for shares that are more than all layers.
    """
    if min(attention, mlp) < 0 or attention + mlp > 1:
        raise UsageError(
            f"--hybrid-attention-ratio {attention:g} and --hybrid-mlp-ratio {mlp:g} should be 0 or more, and together at most 1"
        )
    attentions, mlps = round(layers * attention), round(layers * mlp)
    pattern = _spread("M" * layers, "*", attentions, sections=attentions + 1)
    return _spread(pattern, "-", mlps, sections=mlps)


def _spread(pattern: str, symbol: str, count: int, *, sections: int) -> str:
    """Replace `count` Mamba layers by the symbol. sections: of Mamba layers, each followed by the symbol if there is room."""
    if not count:
        return pattern
    length = (pattern.count("M") - count) / sections
    found, left = "", length
    for layer in pattern:
        if layer != "M":
            found += layer
        elif left < 0.5:
            found += symbol
            left += length
        else:
            found += layer
            left -= 1
    return found


def _of_mamba(model: Model, pattern: str) -> dict[str, Any]:
    """Return the fields of Mamba layers that no argument gives. Raises UsageError."""
    heads, width = model.mamba_num_heads, model.mamba_head_dim
    assert model.hidden_size is not None
    if heads is None:
        heads, rest = divmod(2 * model.hidden_size, width)
        if rest:
            raise UsageError(
                f"2 x --hidden-size {model.hidden_size} can't be divided by --mamba-head-dim {width}; give --mamba-num-heads"
            )
    if heads % model.mamba_num_groups:
        raise UsageError(
            f"{heads} Mamba heads can't be divided into --mamba-num-groups {model.mamba_num_groups}; give another number"
        )
    if "E" in pattern and not model.num_experts:
        raise UsageError(
            "--hybrid-override-pattern has layers with experts (E); give --num-experts"
        )
    return {"mamba.heads": heads, "mamba.head_dim": width}


def linear_layers(model: Model) -> list[bool]:
    """Return for each layer whether it has a delta net, from --linear-attention-freq. Raises UsageError."""
    text = (model.linear_attention_freq or "").replace(" ", "")
    layers = model.num_layers or 0
    if text.isdigit() and int(text):
        return [bool((layer + 1) % int(text)) for layer in range(layers)]
    found = read_list(text)
    if found is None or len(found) != layers:
        raise UsageError(
            f"--linear-attention-freq {text or 'is missing; it'} should be a number, or as many 0 and 1 as layers ({layers}): [1]*3+[0]*1"
        )
    return found
