"""Gates of attention's output that are projections of their own: of each head, or of each element of a head.

    hf     model.layers.{l}.self_attn.g_proj, or another name
    core   decoder.layers.{l}.self_attention.linear_qkv: q of the heads of one key/value head, their gates, k and v

Megatron core has gates of each element alone. Core's names of the others are those of the trainer's checkpoints.
"""

from dataclasses import replace

from megaconv.model.table import Fused, Row

QKV = "layers.{l}.attn.{q|k|v}.weight"
_KINDS = {
    "head_gate": ("head_gate", "heads hidden"),
    "gate": ("output_gate", "heads*head_dim hidden"),
}
"""Canonical name of a gate -> (the feature of models that have it, its shape)."""


def with_gates(
    rows: tuple[Row, ...], module: str, *kinds: str, optional: bool = False
) -> tuple[Row, ...]:
    """The rows, with a gate beside q, k and v.

    module: Hugging Face's name of the gate. kinds: canonical names of the gates that the family's models may have, one
    each. optional: True if models may have none.
    """
    found: list[Row] = []
    for row in rows:
        if row.canonical != QKV:
            found.append(row)
            continue
        found += [_gated(row, module, kind) for kind in kinds]
        if optional:
            found.append(replace(row, when=f"!output_gate !head_gate {row.when or ''}".strip()))
    return tuple(found)


def _gated(row: Row, module: str, kind: str) -> Row:
    feature, shape = _KINDS[kind]
    q, k, v = row.shapes
    return Row(
        f"layers.{{l}}.attn.{{q|{kind}|k|v}}.weight", (q, shape, k, v), tp=0, when=f"{feature} {row.when or ''}".strip(),
        hf=f"model.layers.{{l}}.self_attn.{{q_proj|{module}|k_proj|v_proj}}.weight",
        core=Fused("decoder.layers.{l}.self_attention.linear_qkv.weight", groups="kv_heads"),
    )  # fmt: skip
