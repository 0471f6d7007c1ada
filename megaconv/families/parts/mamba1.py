"""Mamba 1 mixers (arXiv 2312.00752), for all families that have them.

    layers.{l}.mamba1.{x|z}        projections of a token: x passes a convolution, z gates the output
    layers.{l}.mamba1.{dt|B|C}     projections of x: a narrow time step, and what is written to the state and read from it
    layers.{l}.mamba1.dt_up        the time step of each channel, from the narrow one

Megatron core has no such mixer. Source: MambaMixer, FalconMambaMixer and JambaMambaMixer of transformers 5.23.
"""

from math import ceil

from megaconv.families.parts.keys import Fields, Raw, need_size
from megaconv.model.table import Fused, Row


def mamba1_rows(norm: str, mixer: str) -> tuple[Row, ...]:
    """The rows of a mixer. norm, mixer: Hugging Face's prefixes for the norm before the mixer, and for the mixer's own
    tensors."""
    own = "layers.{l}.mamba1."
    return (
        Row("layers.{l}.input_norm.weight", ("hidden",), when="mamba1", hf=norm + "weight"),
        Row(own + "{x|z}.weight", ("mamba1_width hidden", "mamba1_width hidden"), tp=0, when="mamba1",
            hf=Fused(mixer + "in_proj.weight")),
        Row(own + "{x|z}.bias", ("mamba1_width", "mamba1_width"), tp=0, when="mamba1 mamba1_bias",
            hf=Fused(mixer + "in_proj.bias")),
        Row(own + "conv.weight", ("mamba1_width 1 mamba1_conv",), tp=0, when="mamba1",
            hf=mixer + "conv1d.weight"),
        Row(own + "conv.bias", ("mamba1_width",), tp=0, when="mamba1 mamba1_conv_bias",
            hf=mixer + "conv1d.bias"),
        Row(own + "{dt|B|C}.weight", ("mamba1_rank mamba1_width", *("mamba1_state mamba1_width",) * 2), tp=1, when="mamba1",
            hf=Fused(mixer + "x_proj.weight")),
        Row(own + "dt_up.weight", ("mamba1_width mamba1_rank",), tp=0, when="mamba1",
            hf=mixer + "dt_proj.weight"),
        Row(own + "dt_up.bias", ("mamba1_width",), tp=0, when="mamba1",
            hf=mixer + "dt_proj.bias"),
        Row(own + "A_log", ("mamba1_width mamba1_state",), tp=0, when="mamba1", hf=mixer + "A_log"),
        Row(own + "D", ("mamba1_width",), tp=0, when="mamba1", hf=mixer + "D"),
        Row(own + "out.weight", ("hidden mamba1_width",), tp=1, when="mamba1",
            hf=mixer + "out_proj.weight"),
        Row(own + "out.bias", ("hidden",), when="mamba1 mamba1_bias",
            hf=mixer + "out_proj.bias"),
    )  # fmt: skip


def inner_norms(mixer: str) -> Row:
    """The row of the norms of the narrow time step, of B and of C, if they have weights. mixer: as in mamba1_rows."""
    return Row(
        "layers.{l}.mamba1.{dt|B|C}_norm.weight", ("mamba1_rank", "mamba1_state", "mamba1_state"), when="mamba1",
        hf=mixer + "{dt|b|c}_layernorm.weight",
    )  # fmt: skip


def time_step_rank(raw: Raw, key: str, hidden: int) -> Fields:
    """The width of the narrow time step: a number, or a sixteenth of the hidden size."""
    stated = raw.get(key, "auto")
    rank = ceil(hidden / 16) if stated == "auto" else need_size(raw, key)
    return {"mamba1.rank": rank}
