"""Gemma 1 (and CodeGemma): norms that multiply with their weight + 1, a scaled embedding, gated gelu, a tied head.

Megatron has words for the norms (layernorm_zero_centered_gamma: the stored values are the same), not for the scale of
the embedding: like Megatron-Bridge and NeMo we leave the weights as they are, and the model has to be built with it.
"""

from collections.abc import Mapping
from typing import Any

from megaconv.errors import NotExpressible, UnknownFamily
from megaconv.families import Family
from megaconv.families.llama import IGNORED
from megaconv.families.llama import ROWS as LLAMA_ROWS
from megaconv.families.parts.hf_config import read_decoder, refuse, write_decoder
from megaconv.model.config import ModelConfig

ROWS = tuple(row.without("legacy", "meta") for row in LLAMA_ROWS)

_DEFAULTS = {
    "num_key_value_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}
_GELU = ("gelu_pytorch_tanh", "gelu", "gelu_new", "gelu_fast")
"""The first releases say `gelu`, and mean its approximation, as transformers takes it."""


def read_hf(raw: Mapping[str, Any]) -> ModelConfig:
    if raw.get("hidden_activation") not in (None, *_GELU):
        raise UnknownFamily(
            f"config.json: hidden_activation {raw['hidden_activation']!r} is not known in this architecture"
        )
    if raw.get("use_bidirectional_attention"):
        raise NotExpressible(
            "config.json: use_bidirectional_attention makes an encoder of the model; only decoders are known"
        )
    bias = bool(raw.get("attention_bias"))
    own = {"activation": "gelu_tanh", "zero_centered_norm": True, "embedding_scale": raw["hidden_size"] ** 0.5}
    return read_decoder(raw, "gemma", _DEFAULTS | {"activations": _GELU}, qkv_bias=bias, o_bias=bias, **own)


def write_hf(config: ModelConfig) -> dict[str, Any]:
    refuse(
        config, "GemmaForCausalLM", mlp_bias="MLP biases", qk_norm="q and k norms", sliding_window="a sliding window"
    )
    if config.qkv_bias != config.o_bias:
        raise NotExpressible(
            "GemmaForCausalLM has biases on q, k, v and the output, or on none of them; this model has another set"
        )
    words = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
    return write_decoder(config, "GemmaForCausalLM", "gemma", attention_bias=config.qkv_bias, **words)


FAMILY = Family(
    "gemma", ("GemmaForCausalLM",), "gemma", ROWS, read_hf, write_hf, IGNORED, features=("zero_centered_norm",)
)
