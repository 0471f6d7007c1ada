"""The naming schemes that the tensors of a Hugging Face directory may have."""

from collections.abc import Collection

from megaconv.model.naming import (
    HF,
    HF_FUSED,
    HF_FUSED_HALVED,
    HF_SEPARATE,
    HF_STACKED,
    HF_STACKED_TRANSPOSED,
    Naming,
    with_mtp_stacked,
)

_SEPARATE = (
    *(".block_sparse_moe.", ".mlp.gate.weight_1", ".attention.wkv_b."),
    "L_module.layers.0.self_attn.",
    ".attn.wq_du.",
)
"""Parts of names in files in which each expert has tensors of its own, under other names than in transformers' class:
names of Mixtral's, the second router of ERNIE 4.5 VL, and Mistral Large 4's latent attention. The next one is of
transformers' class of HRM-Text, whose published files have q, k, v and a gate in one tensor; the last is of Inkling's published
files."""
_FUSED = ".self_attn.att_proj."
"""Part of the names of files with q, k and v in one tensor, under other names than those of transformers' class."""
_STACKED = (".experts.gate_up_proj", ".experts.down_proj")
"""Suffixes of tensors with all experts of a layer.

transformers 5 has them; Qwen 3 VL on the Hub has each one transposed.
"""


def hf_namings(names: Collection[str]) -> tuple[Naming, ...]:
    """The naming schemes that the tensors of a Hugging Face directory may have."""
    stacked = [name for name in names if name.endswith(_STACKED)]
    if not stacked and any(part in name for name in names for part in _SEPARATE):
        return (HF, HF_SEPARATE)
    if any(_FUSED in name for name in names):
        return (HF, HF_FUSED, HF_FUSED_HALVED)
    if not stacked:
        # The classes of some families have other names for further tensors too. Without experts only those tell.
        return (HF,) if any(".experts." in name for name in names) else (HF, HF_STACKED)
    found = (HF, HF_STACKED, HF_STACKED_TRANSPOSED)
    if any(name.startswith("mtp.") for name in stacked):
        return tuple(map(with_mtp_stacked, found))
    return found
