"""FlexOlmo: OLMo 2 with experts in every layer.

Megatron core has no norm after experts. The name of this norm in Megatron's checkpoints is the trainer's own.
"""

from dataclasses import replace

from megaconv.families.olmo2 import OLMO_2
from megaconv.families.olmoe import FAMILY as OLMOE
from megaconv.families.parts.decoder_keys import ATTENTION_BIASES, SILU, decoder_keys
from megaconv.families.parts.decoder_rows import ATTENTION, EMBEDDING, HEAD
from megaconv.families.parts.experts import EXPERTS_WIDTH, QWEN_EXPERTS
from megaconv.families.parts.keys import flags, size
from megaconv.families.parts.norm_places import (
    no_norm_after_experts,
    normed_over_all_heads,
    norms_at,
)
from megaconv.families.parts.rope import rope
from megaconv.families.parts.row_changes import in_core

_LAYER = norms_at(
    normed_over_all_heads(ATTENTION),
    QWEN_EXPERTS,
    before=None,
    after=("post_attention_layernorm", "post_feedforward_layernorm"),
    mlp_module="mlp",
)
_KEYS = (
    *decoder_keys(positions=4096, rotation=rope(500000.0), tokens=(None, 100257, 100277)),
    ATTENTION_BIASES,
    EXPERTS_WIDTH,
    size("num_experts", "experts.count", 7),
    size("num_experts_per_tok", "experts.per_token", 5),
    flags("norm_topk_prob", ("experts.renormalize",), default=False),
)


FAMILY = replace(
    OLMOE, name="flex_olmo", architectures=("FlexOlmoForCausalLM",), model_type="flex_olmo",
    rows=in_core((EMBEDDING, *_LAYER, *HEAD)), keys=_KEYS, fixed={**OLMO_2, "layers.mlp": "experts"}, only=SILU,
    recognized=None, proven="names", notices=no_norm_after_experts,
)  # fmt: skip
