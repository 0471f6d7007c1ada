"""The places of a model with parts that can be chosen: channels of hidden states and MLPs, and heads of mixers.

The heads of a mixer belong to groups of neighbours, which share keys and values (attention), B and C (Mamba), or queries and
keys (linear attention).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megaconv.model.config import ModelConfig
from megaconv.model.sizes import SIZES
from megaconv.options.kept_channels import HIDDEN

_MLP = re.compile(r"(?P<mlp>.+?\.mlp(?:\.experts\.\d+|\.shared)?)\.")
WIDTHS = {"ffn": "mlp.ffn", "moe_ffn": "experts.ffn", "shared_ffn": "experts.shared_ffn"}
"""The sizes of MLPs' channels -> the fields that hold them: of dense MLPs, routed experts, shared experts."""
ALTERNATING = "2*moe_ffn"
"""An axis of an expert whose rows are those of its two first matrices by turns."""
PARTS = {
    HIDDEN: "channels of the hidden states",
    "mlp.ffn": "channels of each MLP",
    "experts.ffn": "channels of each expert",
    "experts.shared_ffn": "channels of each shared expert",
    "attention.heads": "heads of each attention",
    "attention.kv_heads": "key/value heads of each attention",
    "mamba.heads": "heads of each Mamba",
    "mamba.groups": "groups of heads of each Mamba",
    "linear.value_heads": "value heads of each linear attention",
    "linear.key_heads": "key heads of each linear attention",
}
"""Fields -> what they count, for lines."""


@dataclass(frozen=True)
class HeadKind:
    """A kind of heads, by the sizes that count them in the shapes of tensors."""

    heads: str
    """The number of heads, such as `heads`."""
    groups: str
    """The number of their groups, such as `kv_heads`."""

    @property
    def field(self) -> str:
        """The field that holds the number of heads, such as `attention.heads`."""
        return SIZES[self.heads].field

    @property
    def group_field(self) -> str:
        """The field that holds the number of groups."""
        return SIZES[self.groups].field


_ATTENTION = HeadKind("heads", "kv_heads")
_MAMBA = HeadKind("mamba_heads", "mamba_groups")
_LINEAR = HeadKind("linear_value_heads", "linear_key_heads")
_MIXERS = {"attn": _ATTENTION, "mamba": _MAMBA, "linear": _LINEAR, "kda": _LINEAR}
"""The last words of mixers' canonical names -> their heads."""
_MIXER = re.compile(r"(?P<mixer>.+?\.(?P<kind>attn|mamba|linear|kda))\.")
HEADS = {kind.field: kind for kind in (_ATTENTION, _MAMBA, _LINEAR)}
"""Fields with numbers of heads -> the kind of the heads."""


def mixer_of(name: str) -> tuple[str, HeadKind] | None:
    """(the canonical name of a mixer such as `layers.3.attn`, the kind of its heads) of a tensor; None for other tensors."""
    match = _MIXER.match(name)
    return match and (match["mixer"], _MIXERS[match["kind"]])


def mlp_of(name: str) -> str | None:
    """The canonical name of the MLP that a tensor belongs to; None for other tensors."""
    match = _MLP.match(name)
    return match and match["mlp"]


def places_of(axes: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The places whose channels or heads can be chosen: `hidden`, and MLPs and mixers by their canonical names -> the field that
    holds their number.

    axes: of all tensors.
    """
    found = [place_of(name, axis) for name, of_tensor in axes.items() for axis in of_tensor]
    return {HIDDEN: HIDDEN} | dict(place for place in found if place is not None)


def place_of(name: str, axis: str) -> tuple[str, str] | None:
    """(the MLP or the mixer whose parts an axis of a tensor counts, the field that holds their number); None for other axes."""
    mlp, mixer = mlp_of(name), mixer_of(name)
    width = WIDTHS.get("moe_ffn" if axis == ALTERNATING else axis)
    if mlp and width:
        return mlp, width
    if mixer and mixer[1].heads in axis.split("*"):
        return mixer[0], mixer[1].field
    return None


def is_hidden(axis: str, config: ModelConfig) -> bool:
    """True for an axis of the channels of the hidden states."""
    return axis == HIDDEN or (axis == "expert_hidden" and not config.experts.latent)
