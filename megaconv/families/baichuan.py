"""Baichuan 1 and 2: Llama with q, k and v in one tensor, and ALiBi in place of rope in models with 13 billion parameters.

In Baichuan 2, each row of the head is divided by its length when the model computes. The stored rows are not: weights are
converted as they are. Megatron core has no such head and no ALiBi, so that most of these models are converted between
Hugging Face's files only.

No release of transformers contains this architecture. Names and defaults come from the repositories
baichuan-inc/Baichuan2-7B-Base and Baichuan2-13B-Base (modeling_baichuan.py and configuration_baichuan.py). Their
config.json files don't say which class computes them. As in vLLM, the size of the vocabulary identifies Baichuan 2. A
model with ALiBi has no max_position_embeddings.
"""

from megaconv.errors import NotExpressible
from megaconv.families import Family
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, SILU, model_keys, multi_head
from megaconv.families.parts.decoder_rows import LLAMA_ROWS, ROPE_FREQUENCIES
from megaconv.families.parts.keys import Fields, Keys, Raw, follows, need_size, number, size
from megaconv.families.parts.row_changes import in_core, respelled, without_biases
from megaconv.model.config import ModelConfig
from megaconv.model.table import Fused, Spelling

VOCABULARY_OF_2 = 125696
"""Tokens of Baichuan 2. Baichuan 1 has 64,000."""
_QKV: dict[str, dict[str, Spelling]] = {
    "layers.{l}.attn.{q|k|v}.weight": {"hf": Fused("model.layers.{l}.self_attn.W_pack.weight")},
}
_ROTATING, _LONGEST = "max_position_embeddings", "model_max_length"


def _read_positions(raw: Raw) -> Fields:
    """Rope if the file has the key that only this class reads, else ALiBi."""
    if raw.get(_ROTATING) is not None:
        return {"positions.kind": "rope", "max_positions": need_size(raw, _ROTATING)}
    return {"positions.kind": "alibi", "max_positions": need_size(raw, _LONGEST, 4096)}


def _write_positions(config: ModelConfig) -> Raw:
    kind, longest = config.positions.kind, config.max_positions
    if kind == "alibi":
        return {_LONGEST: longest}
    if kind == "rope":
        return {_ROTATING: longest, _LONGEST: longest}
    raise NotExpressible(
        f"the model's positions.kind is {kind}, which this architecture can't represent: it has rope and alibi"
    )


_KEYS = (
    size("hidden_size", "hidden", 4096),
    size("num_hidden_layers", "layers.count", 32),
    size("intermediate_size", "mlp.ffn", 11008),
    multi_head("num_attention_heads", "hidden_size"),
    Keys((_ROTATING, _LONGEST), _read_positions, _write_positions),
    number("rms_norm_eps", "norm.epsilon", 1e-6),
    follows("head.normalized", lambda raw: raw.get("vocab_size") == VOCABULARY_OF_2),
    *model_keys(tied=False, tokens=(1, 2, 0)),
)
_FIXED = {name: value for name, value in LLAMA_LIKE.items() if name != "positions.kind"}

FAMILY = Family(
    name="baichuan",
    architectures=("BaichuanForCausalLM", "BaiChuanForCausalLM"),
    model_type="baichuan",
    rows=in_core(respelled(without_biases(LLAMA_ROWS), _QKV)),
    keys=_KEYS,
    fixed=_FIXED,
    only=SILU,
    ignored=ROPE_FREQUENCIES,
    recognized=None,
    proven="names",
)
"""`recognized` is None, since Megatron's arguments don't distinguish Baichuan 1 from Llama."""
