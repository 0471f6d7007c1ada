"""The mixers of a Megatron model's layers, and the sizes of mixers with a state, as its tensors show them."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from megaconv.megatron.arguments.size_tensors import SizeTensors
from megaconv.megatron.states.ranks import Weights
from megaconv.model.layout import Layout


def mixers_of(
    layers: Mapping[int, Weights], names: SizeTensors, *, hybrid: bool
) -> tuple[str, ...]:
    """The mixer of each layer.

    In a hybrid, a layer without attention is a lone MLP; other models have none.
    """

    def mixer(layer: Weights) -> str:
        if any(name.startswith(names.side_by_side) for name in layer):
            return "side_by_side"
        if names.linear + ".weight" in layer:
            return "linear"
        if names.kimi_delta + ".weight" in layer:
            return "kda"
        if any(name.startswith(names.mamba) for name in layer):
            return "mamba"
        if any(name.startswith(names.convolution) for name in layer):
            return "convolution"
        if any(name.startswith("self_attention.") for name in layer):
            return "attention"
        return "none" if hybrid else "attention"

    return tuple(mixer(layers[index]) for index in sorted(layers))


def attention_of(
    layers: Mapping[int, Weights], mixers: Sequence[str], names: SizeTensors
) -> Weights:
    """The tensors of the first layer with attention, as a layer with attention alone has them; empty if there is none."""
    for index, layer in layers.items():
        if mixers[index] in ("attention", "side_by_side"):
            return _alone(layer, names)
    return {}


def _alone(layer: Weights, names: SizeTensors) -> Weights:
    """The tensors of a layer, with the names that attention and Mamba 2 have in layers with one of them."""
    return {name.removeprefix(names.side_by_side): tensor for name, tensor in layer.items()}


def is_hybrid(
    layers: Mapping[int, Weights], last: Weights, args: Namespace, names: SizeTensors
) -> bool:
    """True for a model of Megatron core's hybrid stack: it has Mamba layers, that stack's own name for the final norm,
    or a pattern in its arguments."""
    if any(name.startswith(names.mamba) for layer in layers.values() for name in layer):
        return True
    if "decoder.final_norm.weight" in last:
        return True
    patterns = ("hybrid_override_pattern", "hybrid_layer_pattern")
    return any(getattr(args, name, None) for name in patterns)


def sizes_of_mixers(
    layers: Mapping[int, Weights], layout: Layout, names: SizeTensors
) -> dict[str, Any]:
    """The fields of mixers with a state that shapes show; empty for models without them."""
    alone = {index: _alone(layer, names) for index, layer in layers.items()}
    found = _find_mamba(alone, layout, names) | _find_convolution(layers, names)
    return found | _find_kimi_delta(layers, layout, names)


def _find_mamba(
    layers: Mapping[int, Weights], layout: Layout, names: SizeTensors
) -> dict[str, Any]:
    """The fields of Mamba layers that shapes show. Shapes don't show how many groups share the rows of B and C."""
    dt_bias, out = names.mamba + "dt_bias", names.mamba + "out_proj.weight"
    for layer in layers.values():
        if dt_bias in layer and out in layer:
            heads, width = layer[dt_bias].shape[0], layer[out].shape[-1]
            return {"mamba.heads": layout.tp * heads, "mamba.head_dim": width // max(1, heads)}
    return {}


def _find_convolution(layers: Mapping[int, Weights], names: SizeTensors) -> dict[str, Any]:
    """The width of short convolutions; empty for models without them."""
    weight = names.convolution + "conv1d.weight"
    for layer in layers.values():
        if weight in layer:
            return {"convolution.width": layer[weight].shape[-1]}
    return {}


def _find_kimi_delta(
    layers: Mapping[int, Weights], layout: Layout, names: SizeTensors
) -> dict[str, Any]:
    """The sizes of Kimi delta attention; empty for models without it."""
    for layer in layers.values():
        if names.kimi_delta + ".weight" in layer:
            heads, channels, width, conv = (
                layer[f"self_attention.{name}"].shape
                for name in ("A_log", "dt_bias", "out_norm.weight", "conv1d.weight")
            )
            sizes = {
                "key_dim": channels[0] // max(1, heads[0]),
                "value_dim": width[0],
                "conv": conv[-1],
            }
            of_model = dict.fromkeys(("key_heads", "value_heads"), layout.tp * heads[0])
            return {f"linear.{name}": size for name, size in (of_model | sizes).items()}
    return {}
