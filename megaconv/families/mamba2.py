"""Pure Mamba 2: Codestral Mamba and the models of state-spaces. Each layer is a mixer, without an MLP."""

from collections.abc import Mapping
from typing import Any

from megaconv.errors import NotExpressible
from megaconv.families import Family
from megaconv.families.parts.decoder_keys import model_keys
from megaconv.families.parts.keys import Fields, Keys, Raw, need_size, size
from megaconv.families.parts.mamba import MAMBA_ONLY, TIME_STEP_LIMIT, mamba_rows
from megaconv.families.parts.pure_mamba import (
    MAX_POSITIONS,
    OLDER_EMBEDDING,
    unused_parts,
    with_ends,
)
from megaconv.families.parts.row_changes import in_core
from megaconv.model.config import ModelConfig

ROWS = in_core(with_ends(mamba_rows("backbone.layers.{l}.norm.", "backbone.layers.{l}.mixer.")))

_FIXED = {
    "layers.mixer": "mamba",
    "layers.mlp": "none",
    "positions.kind": "none",
    "norm.kind": "RMSNorm",
    "norm.epsilon": 1e-5,
}


def _read_heads(raw: Raw) -> Fields:
    heads, head_dim = need_size(raw, "num_heads", 128), need_size(raw, "head_dim", 64)
    unused = unused_parts(need_size(raw, "hidden_size", 4096), heads, head_dim)
    return {**unused, "mamba.heads": heads, "mamba.head_dim": head_dim}


def _write_heads(config: ModelConfig) -> Raw:
    mamba = config.mamba
    expand, rest = divmod(mamba.heads * mamba.head_dim, config.hidden)
    if rest:
        raise NotExpressible(
            f"the model's mamba.heads x mamba.head_dim is {mamba.heads} x {mamba.head_dim}, and its class needs a multiple (expand) of "
            f"hidden, found {config.hidden}"
        )
    return {"num_heads": mamba.heads, "head_dim": mamba.head_dim, "expand": expand}


def _assumed(fields: Mapping[str, Any]) -> Fields:
    """The fields that Megatron's arguments may give otherwise, although they change nothing."""
    if "mamba.heads" not in fields:
        return {}  # none of the layers is Mamba 2
    unused = unused_parts(fields["hidden"], fields["mamba.heads"], fields["mamba.head_dim"])
    return {**unused, "mlp.activation": "silu", "mlp.gated": True, "positions.kind": "none"}


_KEYS = (
    size("hidden_size", "hidden", 4096),
    size("num_hidden_layers", "layers.count", 64),
    Keys(("num_heads", "head_dim"), _read_heads, _write_heads),
    size("n_groups", "mamba.groups", 8),
    size("state_size", "mamba.state", 128),
    TIME_STEP_LIMIT,
    MAX_POSITIONS,
    *model_keys(tied=False, tokens=(0, 2, 1)),
)
_OTHER_NAMES = ("mamba_hidden_act", "mamba_proj_bias", "time_step_min")
"""Keys of hybrids that a pure Mamba names otherwise, or uses only for initialization."""
_ONLY = {
    **{key: value for key, value in MAMBA_ONLY.items() if key not in _OTHER_NAMES},
    "hidden_act": "silu",
}

FAMILY = Family(
    name="mamba2",
    architectures=("Mamba2ForCausalLM",),
    model_type="mamba2",
    rows=ROWS,
    keys=_KEYS,
    fixed=_FIXED,
    only=_ONLY,
    older=OLDER_EMBEDDING,
    recognized="only_mamba !learned !norm_bias !zero_centered",
    assumed=_assumed,
    proven="custom module",
)
