"""Command R: one LayerNorm without bias before attention and the MLP, which work in parallel; a factor on logits.

Rope rotates neighbours. Command R+ has norms of q and k, with weights of each head's own. Megatron core has no such layer:
these models are converted between Hugging Face's files, and trained.
"""

from typing import Any

from megaconv.families import Family
from megaconv.families.parts.decoder_keys import (
    ATTENTION_BIASES,
    LLAMA_LIKE,
    PARALLEL,
    SILU,
    body_keys,
    heads,
)
from megaconv.families.parts.decoder_rows import LLAMA_ROWS, ROPE_FREQUENCIES
from megaconv.families.parts.keys import Keys, flags, multiplier
from megaconv.families.parts.norm_places import with_own_norms
from megaconv.families.parts.rope import rope
from megaconv.families.parts.row_changes import in_core, with_shared_norm

ROWS = in_core(with_own_norms(with_shared_norm(LLAMA_ROWS)))
FIXED: dict[str, Any] = {
    **LLAMA_LIKE,
    **PARALLEL,
    "norm.kind": "LayerNorm",
    "norm.bias": False,
    "positions.interleaved": True,
    "attention.qk_norm_width": "own",
}


def command_keys(theta: float, *, own_size: bool = False) -> tuple[Keys, ...]:
    """The keys of all Command models. theta: the default of rope's base. own_size: as in `heads`."""
    body = body_keys(
        positions=8192, epsilon=1e-5, epsilon_key="layer_norm_eps", rotation=rope(theta), tied=True, tokens=(5, 255001, 0)
    )  # fmt: skip
    logits = multiplier("logit_scale", "head.divisor", 0.0625)
    return (*body, heads(None, own_size=own_size), ATTENTION_BIASES, logits)


FAMILY = Family(
    name="cohere",
    architectures=("CohereForCausalLM",),
    model_type="cohere",
    rows=ROWS,
    keys=(*command_keys(500000.0), flags("use_qk_norm", ("attention.qk_norm",), default=False)),
    fixed=FIXED,
    only=SILU,
    ignored=ROPE_FREQUENCIES,
    recognized=None,
    proven="names",
)
