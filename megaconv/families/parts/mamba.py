"""Mamba 2 mixers, of whichever families have them.

    layers.{l}.mamba.{z|x|B|C|dt}   projections of a token: x, B and C pass a convolution, z gates the output, dt is the time step
    layers.{l}.mamba.{A_log|D}      how fast each head forgets, and how much of x goes by the state

Each of the five is sharded for itself, by its heads or its groups of heads, and so are the three of the convolution. Source:
modeling_nemotron_h.py of transformers 5; mamba_mixer.py of megatron-core 0.16.1, whose convolution is over 4 positions.
"""

from megaconv.families.parts.keys import Keys, size
from megaconv.model.table import Fused, Row

_CORE = "decoder.layers.{l}.mixer."
_INNER, _STATE = "mamba_heads*mamba_head_dim", "mamba_groups*mamba_state"


def mamba_rows(norm: str, mixer: str) -> tuple[Row, ...]:
    """norm, mixer: what Hugging Face's names of the norm before it and of the mixer's own tensors begin with."""
    return (
        Row("layers.{l}.mamba.{dt_bias|A_log|D}", ("mamba_heads",) * 3, tp=0, when="mamba",
            hf=mixer + "{dt_bias|A_log|D}",
            core=_CORE + "{dt_bias|A_log|D}"),
        Row("layers.{l}.mamba.{z|x|B|C|dt}.weight",
            (f"{_INNER} hidden", f"{_INNER} hidden", f"{_STATE} hidden", f"{_STATE} hidden", "mamba_heads hidden"), tp=0, when="mamba",
            hf=Fused(mixer + "in_proj.weight"),
            core=Fused(_CORE + "in_proj.weight")),
        Row("layers.{l}.mamba.conv.{x|B|C}.weight", (f"{_INNER} 1 4", f"{_STATE} 1 4", f"{_STATE} 1 4"), tp=0, when="mamba",
            hf=Fused(mixer + "conv1d.weight"),
            core=Fused(_CORE + "conv1d.weight")),
        Row("layers.{l}.mamba.conv.{x|B|C}.bias", (_INNER, _STATE, _STATE), tp=0, when="mamba",
            hf=Fused(mixer + "conv1d.bias"),
            core=Fused(_CORE + "conv1d.bias")),
        Row("layers.{l}.mamba.out_norm.weight", (_INNER,), tp=0, when="mamba",
            hf=mixer + "norm.weight",
            core=_CORE + "norm.weight"),
        Row("layers.{l}.mamba.out.weight", (f"hidden {_INNER}",), tp=1, when="mamba",
            hf=mixer + "out_proj.weight",
            core=_CORE + "out_proj.weight"),
        # Last, since Megatron core makes the norm of such a layer, of its local ones, after the mixer.
        Row("layers.{l}.input_norm.weight", ("hidden",), when="mamba",
            hf=norm + "weight",
            core=_CORE + "in_proj.layer_norm_weight",
            core_local="decoder.layers.{l}.norm.weight"),
    )  # fmt: skip


MAMBA_SIZES: tuple[Keys, ...] = (
    size("mamba_num_heads", "mamba.heads", 128),
    size("mamba_head_dim", "mamba.head_dim", 64),
    size("n_groups", "mamba.groups", 8),
    size("ssm_state_size", "mamba.state", 128),
)
"""With transformers' own defaults."""
