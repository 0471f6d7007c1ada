"""Layers of a Mamba 2 or attention, each followed by an MLP: Bamba, Granite's hybrids, Falcon-H1.

    hf     model.layers.{l}.{input_layernorm, mamba, self_attn}, and the family's own names for the MLP
    core   decoder.layers.{l}.{mixer, self_attention, mlp}

A layer of Megatron core's hybrid stack is a mixer or an MLP. For layers of both, core's arguments have no words. Only the
trainer's own checkpoints have these names. Source: BambaConfig and BambaMixer of transformers 5.
"""

from dataclasses import replace
from typing import Any

from megaconv.errors import CorruptCheckpoint, NotExpressible
from megaconv.families.parts.decoder_rows import ATTENTION, HEAD
from megaconv.families.parts.keys import CONFIG_NAME, Fields, Keys, Raw, need_size, size
from megaconv.families.parts.mamba import TIME_STEP_LIMIT, mamba_rows
from megaconv.model.config import ModelConfig
from megaconv.model.table import Row

HF = "model.layers.{l}."


def rows_of(feature: str, rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """The rows, for layers with a feature alone."""
    return tuple(replace(row, when=f"{feature} {row.when or ''}".strip()) for row in rows)


MAMBA = mamba_rows(HF + "input_layernorm.", HF + "mamba.")
MIXERS = (*MAMBA, *rows_of("attention", ATTENTION))
"""The rows of the mixers, each with the norm before it."""


def ends(final_norm: str) -> tuple[Row, ...]:
    """The rows of the final norm and the head. final_norm: Hugging Face's name.

    Core's hybrid stack has its own name for the norm. A model without Mamba layers has the name of all other models.
    """
    norm, head = HEAD
    plain = norm.renamed(hf=final_norm)
    of_hybrids = plain.renamed(core="decoder.final_norm.weight")
    return (
        *rows_of("!hybrid_stack", (plain,)),
        *rows_of("hybrid_stack", (of_hybrids,)),
        head,
    )


def _read_width(raw: Raw) -> Fields:
    """The width of a Mamba head. Raises CorruptCheckpoint if the heads don't have the mixer's width together."""
    heads, width = need_size(raw, "mamba_n_heads", 128), inner_width(raw)
    stated = raw.get("mamba_d_head", "auto")
    head_dim = width // heads if stated in ("auto", None) else stated
    if type(head_dim) is not int or head_dim * heads != width:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {heads} heads of {head_dim!r} (mamba_n_heads, mamba_d_head) don't make up the width {width} of the mixer"
        )
    return {"mamba.heads": heads, "mamba.head_dim": head_dim}


def inner_width(raw: Raw) -> int:
    """The width of the mixer: mamba_d_ssm if the family has it, else mamba_expand x hidden_size."""
    if raw.get("mamba_d_ssm") is not None:
        return need_size(raw, "mamba_d_ssm")
    return need_size(raw, "mamba_expand", 2) * need_size(raw, "hidden_size")


def _write_width(config: ModelConfig) -> Raw:
    mamba = config.mamba
    if not mamba.heads:
        return {}
    expand, rest = divmod(mamba.heads * mamba.head_dim, config.hidden)
    if rest:
        raise NotExpressible(
            f"the model's mamba.heads x mamba.head_dim is {mamba.heads} x {mamba.head_dim}, which can't be represented as a multiple "
            f"(mamba_expand) of the hidden size {config.hidden}"
        )
    sizes = {"mamba_n_heads": mamba.heads, "mamba_d_head": mamba.head_dim}
    return {**sizes, "mamba_expand": expand}


WIDTH = Keys(("mamba_n_heads", "mamba_d_head", "mamba_expand"), _read_width, _write_width)
STATE = (
    size("mamba_n_groups", "mamba.groups", 1),
    size("mamba_d_state", "mamba.state", 256),
    TIME_STEP_LIMIT,
)
MAMBA_SIZES = (WIDTH, *STATE)
"""The sizes of Mamba 2, with transformers' own defaults."""
MAMBA_ONLY: dict[str, Any] = {
    "hidden_act": "silu",
    "mamba_d_conv": 4,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
"""The trainer's mixer has no other convolution, and no biases on projections."""
