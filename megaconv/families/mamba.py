"""Pure Mamba 1, as state-spaces published it. Each layer is a mixer, without an MLP.

Megatron core has Mamba 2 only: these models are converted between Hugging Face's files. Source: MambaConfig and
modeling_mamba.py of transformers 5.23.
"""

from megaconv.families import Family
from megaconv.families.parts.decoder_keys import model_keys
from megaconv.families.parts.keys import Fields, Keys, Raw, flags, need_size, number, size
from megaconv.families.parts.mamba1 import mamba1_rows, time_step_rank
from megaconv.families.parts.pure_mamba import (
    MAX_POSITIONS,
    OLDER_EMBEDDING,
    unused_parts,
    with_ends,
)
from megaconv.families.parts.row_changes import hf_only
from megaconv.model.config import ModelConfig

ROWS = hf_only(with_ends(mamba1_rows("backbone.layers.{l}.norm.", "backbone.layers.{l}.mixer.")))

_HIDDEN, _WIDTH, _EXPAND, _RANK = "hidden_size", "intermediate_size", "expand", "time_step_rank"


def _read_widths(raw: Raw) -> Fields:
    """The widths of a mixer. transformers takes intermediate_size if it is there, whatever `expand` says."""
    hidden = need_size(raw, _HIDDEN, 768)
    width = need_size(raw, _WIDTH, need_size(raw, _EXPAND, 2) * hidden)
    return {
        "hidden": hidden,
        "mamba1.width": width,
        **time_step_rank(raw, _RANK, hidden),
        **unused_parts(hidden, 1, hidden),
    }


def _write_widths(config: ModelConfig) -> Raw:
    width = config.mamba1.width
    return {
        _HIDDEN: config.hidden,
        _WIDTH: width,
        _EXPAND: max(1, width // config.hidden),
        _RANK: config.mamba1.rank,
    }


_KEYS = (
    size("num_hidden_layers", "layers.count", 32),
    # `expand` and time_step_rank aren't named: in Mamba 2, they change nothing.
    Keys((_HIDDEN, _WIDTH), _read_widths, _write_widths),
    size("state_size", "mamba1.state", 16),
    size("conv_kernel", "mamba1.conv", 4),
    flags("use_bias", ("mamba1.bias",), default=False),
    flags("use_conv_bias", ("mamba1.conv_bias",), default=True),
    number("layer_norm_epsilon", "norm.epsilon", 1e-5),
    MAX_POSITIONS,
    *model_keys(tied=True, tokens=(0, 0, 0)),
)
_FIXED = {
    "layers.mixer": "mamba1",
    "layers.mlp": "none",
    "positions.kind": "none",
    "norm.kind": "RMSNorm",
}

FAMILY = Family(
    name="mamba",
    architectures=("MambaForCausalLM",),
    model_type="mamba",
    rows=ROWS,
    keys=_KEYS,
    fixed=_FIXED,
    only={"hidden_act": "silu"},
    older=OLDER_EMBEDDING,
    recognized=None,
    proven="names",
)
