"""Norms in other places than before each sublayer and over each head, for all families that have them.

    hf      the family's own names: `post_attention_layernorm` is the norm after attention in one family,
            and the norm before the MLP in another
    core    self_attention.linear_proj.post_layernorm, mlp.linear_fc2.post_layernorm      (after a sublayer)
            self_attention.{q_layernorm, k_layernorm} as wide as all heads, sharded like these heads

Megatron core has no modules for these norms. The names are those of Megatron-Bridge. It puts a norm after a sublayer
into the sublayer's last linear layer (TERowParallelLinearLayerNorm). It also computes the sum of squares of all heads
over tensor-parallel ranks (FullDimQNorm).
"""

from dataclasses import replace

from megaconv.model.config import ModelConfig
from megaconv.model.table import Row

_HF = "model.layers.{l}."
_CORE = "decoder.layers.{l}."
_BEFORE = ("layers.{l}.input_norm.weight", "layers.{l}.mlp_norm.weight")

Places = tuple[str, str]
"""Hugging Face's names for the norms of attention and of the MLP."""


def norms_at(
    attention: tuple[Row, ...],
    mlp: tuple[Row, ...],
    *,
    before: Places | None,
    after: Places,
    mlp_module: str = "mlp.linear_fc2",
) -> tuple[Row, ...]:
    """The rows of attention and the MLP with norms after them. before: the names of the norms before them; None if
    there are none. mlp_module: the module in Megatron core that holds the norm after the MLP."""
    names = dict(zip(_BEFORE, before or (), strict=False))
    found: list[Row] = []
    for row in (
        *attention,
        _after("attn_output_norm", after[0], "self_attention.linear_proj"),
        *mlp,
        _after("mlp_output_norm", after[1], mlp_module),
    ):
        if row.canonical in names:
            found.append(row.renamed(hf=f"{_HF}{names[row.canonical]}.weight"))
        elif row.canonical not in _BEFORE:
            found.append(row)
    return tuple(found)


def _after(name: str, word: str, module: str) -> Row:
    return Row(
        f"layers.{{l}}.{name}.weight", ("hidden",),
        hf=f"{_HF}{word}.weight",
        core=f"{_CORE}{module}.post_layernorm.weight",
    )  # fmt: skip


def output_norms_by_mlp(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """The rows, for models with dense layers and layers with experts: the norm after experts has a name of its own in
    Megatron core's scheme."""
    found: list[Row] = []
    for row in rows:
        if row.canonical != "layers.{l}.mlp_output_norm.weight":
            found.append(row)
            continue
        of_experts = row.renamed(core=f"{_CORE}mlp.post_layernorm.weight")
        found += [replace(row, when="dense"), replace(of_experts, when="moe")]
    return tuple(found)


def no_norm_after_experts(config: ModelConfig) -> tuple[str, ...]:
    """The notice for a model with norms after its experts."""
    return (
        "Megatron core has no norm after experts; only megatron_lite reads it (mlp.post_layernorm)",
    )


QK_NORM_BIASES = Row(
    "layers.{l}.attn.{q|k}_norm.bias", ("head_dim", "head_dim"), when="qk_norm_bias",
    hf=f"{_HF}self_attn.{{q|k}}_norm.bias",
    core=f"{_CORE}self_attention.{{q|k}}_layernorm.bias",
)  # fmt: skip
"""The biases of the norms of q and k."""


def with_own_norms(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """The same rows, with weights of each head's own in the norms of q and k."""
    own = ("heads head_dim", "kv_heads head_dim")
    return tuple(
        replace(row, shapes=own, tp=0)
        if row.canonical == "layers.{l}.attn.{q|k}_norm.weight"
        else row
        for row in rows
    )


def normed_over_all_heads(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """The same rows, with norms of q and k that are as wide as all heads of a rank."""
    wide = ("heads*head_dim", "kv_heads*head_dim")
    return tuple(
        replace(row, shapes=wide, tp=0)
        if row.canonical == "layers.{l}.attn.{q|k}_norm.weight"
        else row
        for row in rows
    )


def qk_norms_of_either_width(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """The same rows, for models with norms of q and k over each head or over all heads."""
    found: list[Row] = []
    for row in rows:
        if row.canonical != "layers.{l}.attn.{q|k}_norm.weight":
            found.append(row)
            continue
        (wide,) = normed_over_all_heads((row,))
        found += [
            replace(row, when="qk_norm !wide_qk_norm"),
            replace(wide, when="wide_qk_norm"),
        ]
    return tuple(found)


def norms_where_they_are(rows: tuple[Row, ...], names: Places) -> tuple[Row, ...]:
    """The rows of attention and the MLP, for models with norms before or after them (norm.place).

    names: Hugging Face's names of the norms, which are the same in both places.
    """
    modules = ("self_attention.linear_proj", "mlp.linear_fc2")
    after = ("attn_output_norm", "mlp_output_norm")
    found: list[Row] = []
    for row in rows:
        if row.canonical not in _BEFORE:
            found.append(row)
            continue
        which = _BEFORE.index(row.canonical)
        when = " ".join(filter(None, (row.when, "pre_norm")))
        before = row.renamed(hf=f"{_HF}{names[which]}.weight")
        found.append(replace(before, when=when))
        output = _after(after[which], names[which], modules[which])
        found.append(replace(output, when="output_norm"))
    return tuple(found)
