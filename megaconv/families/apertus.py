"""Apertus: Llama with norms on q and k, other names of norms, and MLPs without a gate whose activation (xIELU) is trained.

    hf    model.layers.{l}.{attention_layernorm, self_attn, feedforward_layernorm, mlp.{up_proj, act_fn, down_proj}}

Each layer stores four numbers of its activation. Megatron core has no such activation: these models are converted between
Hugging Face's files, and trained; core's names are those of the trainer's checkpoints. Source: ApertusConfig and
modeling_apertus.py of transformers 5.23, and XIELUActivation in its activations.py.
"""

from megaconv.families import Family
from megaconv.families.parts.decoder_keys import ATTENTION_BIASES, LLAMA_LIKE, decoder_keys
from megaconv.families.parts.decoder_rows import ATTENTION, EMBEDDING, HEAD, MLP, ROPE_FREQUENCIES
from megaconv.families.parts.keys import only_in_files
from megaconv.families.parts.rope import rope
from megaconv.families.parts.row_changes import in_core, with_modules, without_biases, without_gate
from megaconv.model.table import Row

_MODULES = {
    "input_layernorm": "attention_layernorm",
    "post_attention_layernorm": "feedforward_layernorm",
}
_ACT, _CORE = "model.layers.{l}.mlp.act_fn.", "decoder.layers.{l}.mlp.activation_func."
_ACTIVATION = (
    Row("layers.{l}.mlp.act.{alpha_p|alpha_n}", ("1", "1"),
        hf=_ACT + "{alpha_p|alpha_n}",
        core=_CORE + "{alpha_p|alpha_n}"),
    Row("layers.{l}.mlp.act.{beta|eps}", ("", ""),
        hf=_ACT + "{beta|eps}",
        core=_CORE + "{beta|eps}"),
)  # fmt: skip
BODY = with_modules((*ATTENTION, *without_biases(without_gate(MLP))), _MODULES)
ROWS = in_core((EMBEDDING, *BODY, *_ACTIVATION, *HEAD))

_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
_OF_PUBLISHED = {"mlp_bias": False, "post_norm": False, "qk_norm": True}
_KEYS = (
    *decoder_keys(
        positions=65536,
        ffn=14336,
        epsilon=1e-5,
        rotation=rope(1.2e7, _SCALING, stated_theta=1.2e7),
        tokens=(1, 2, 3),
    ),
    ATTENTION_BIASES,
    only_in_files(_OF_PUBLISHED),
)
_FIXED = {
    **LLAMA_LIKE,
    "attention.qk_norm": True,
    "mlp.activation": "xielu",
    "mlp.gated": False,
}

FAMILY = Family(
    name="apertus",
    architectures=("ApertusForCausalLM",),
    model_type="apertus",
    rows=ROWS,
    keys=_KEYS,
    fixed=_FIXED,
    only={"hidden_act": "xielu"},
    ignored=ROPE_FREQUENCIES,
    features=("qk_norm", "xielu"),
    recognized=None,
    proven="names",
)
