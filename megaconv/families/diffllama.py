"""DiffLlama: Llama whose heads work in pairs. The second head's attention is subtracted from the first head's.

    model.layers.{l}.self_attn.lambda_{q1, k1, q2, k2}    [head_dim], which give the weight of the second head

Both heads of a pair read the values of both. The first halves of the heads are the first heads of all pairs. Megatron core
has no such attention: these models are converted between Hugging Face's files, and trained. Source: DiffLlamaConfig and
modeling_diffllama.py of transformers 5.24.
"""

from dataclasses import replace

from megaconv.errors import CorruptCheckpoint
from megaconv.families.llama import FAMILY as LLAMA
from megaconv.families.parts.decoder_keys import (
    ATTENTION_BIASES,
    GATED_SILU,
    LLAMA_LIKE,
    decoder_keys,
)
from megaconv.families.parts.keys import CONFIG_NAME, Fields, Keys, Raw, need_size
from megaconv.families.parts.row_changes import in_core, respelled
from megaconv.model.table import HeadPairs, Row

_ATTENTION = "model.layers.{l}.self_attn."
_LAMBDAS = Row(
    "layers.{l}.attn.lambda_{q1|k1|q2|k2}", ("head_dim",) * 4,
    hf=_ATTENTION + "lambda_{q1|k1|q2|k2}",
    core="decoder.layers.{l}.self_attention.lambda_{q1|k1|q2|k2}",
)  # fmt: skip
_IN_PAIRS = {
    f"layers.{{l}}.attn.{{q|k|v}}.{kind}": {"hf": HeadPairs(_ATTENTION + f"{{q|k|v}}_proj.{kind}")}
    for kind in ("weight", "bias")
}
ROWS = in_core((*respelled(LLAMA.rows, _IN_PAIRS), _LAMBDAS))


def _require_pairs(raw: Raw) -> Fields:
    """Return no fields. Raises CorruptCheckpoint for heads that make no pairs."""
    heads = need_size(raw, "num_attention_heads")
    kv_heads = need_size(raw, "num_key_value_heads", heads)
    if kv_heads % 2:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: num_key_value_heads should be even in this architecture, found {kv_heads}"
        )
    return {}


_KEYS = (
    *decoder_keys(positions=2048, epsilon=1e-5, tokens=(1, 2, None)),
    GATED_SILU,
    ATTENTION_BIASES,
    Keys((), _require_pairs, lambda config: {}),
)

FAMILY = replace(
    LLAMA, name="diffllama", architectures=("DiffLlamaForCausalLM",), model_type="diffllama", rows=ROWS, keys=_KEYS,
    fixed={**LLAMA_LIKE, "attention.differential": True},
    recognized=None, proven="names", numbered="the share of the second heads",
)  # fmt: skip
