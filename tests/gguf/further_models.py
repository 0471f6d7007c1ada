"""Small models of the families in megaconv/gguf/architectures.py."""

from collections.abc import Mapping

from tests.transformers_oracle import LAYERS, WINDOW, Variant, rope

_HALF = rope(5000.0, partial_rotary_factor=0.5)
_WHOLE = {"whole heads": rope(5000.0, partial_rotary_factor=1.0)}
_NEOX = {"hidden_act": "gelu_new", "num_key_value_heads": 8, "layer_norm_eps": 1e-3}
_STARCODER = {"norm_epsilon": 1e-3, "sliding_window": None}
_COMMAND = {"layer_norm_eps": 1e-3, "logit_scale": 0.3, "tie_word_embeddings": True}
FURTHER: Mapping[str, Variant] = {
    "starcoder2": Variant("starcoder2", {**_STARCODER, "tie_word_embeddings": False}, {"epsilon": {"norm_epsilon": 1e-1}}),
    "starcoder2, tied": Variant("starcoder2", {**_STARCODER, "tie_word_embeddings": True}),
    "stablelm": Variant("stablelm", {"layer_norm_eps": 1e-3, "use_qkv_bias": True, **_HALF}, _WHOLE),
    "nemotron": Variant("nemotron", {"norm_eps": 1e-3, **_HALF}, _WHOLE),
    "arcee": Variant("arcee", {}, {"rotary base": rope(100.0)}),
    "jais2": Variant("jais2", {"layer_norm_eps": 1e-3}, {"rotary base": rope(100.0)}),
    "ernie4_5": Variant("ernie4_5", {"tie_word_embeddings": True}, {"rotary base": rope(100.0)}),
    "seed_oss": Variant("seed_oss", {"head_dim": 12}, {"rotary base": rope(100.0)}),
    "phi": Variant("phi", {"num_key_value_heads": 8, "layer_norm_eps": 1e-3, **_HALF}, _WHOLE),
    "gpt_neox": Variant("gpt_neox", {**_NEOX, "use_parallel_residual": True, **_HALF},
                        {"one after the other": {"use_parallel_residual": False}}),
    "gpt_neox, one after the other": Variant(
        "gpt_neox", {**_NEOX, "use_parallel_residual": False, **_HALF}
    ),
    "bloom": Variant("bloom", {"layer_norm_epsilon": 1e-3, "n_layer": LAYERS, "n_head": 8}),
    "olmo": Variant("olmo", {"clip_qkv": 0.5}, {"no limit": {"clip_qkv": None}}),
    "olmo, no limit": Variant("olmo"),
    "cohere": Variant("cohere", {**_COMMAND}, {"logits": {"logit_scale": 1.0}}),
    "cohere2": Variant("cohere2", {**_COMMAND, "sliding_window": WINDOW, "head_dim": 8},
                       {"one less": {"sliding_window": WINDOW - 1}}),
    "granite": Variant(
        "granite",
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 2.5},
        {"scores": {"attention_multiplier": 0.3}, "residual": {"residual_multiplier": 1.0}},
    ),
    "granite, no factors": Variant("granite"),
}  # fmt: skip
"""Models of the architectures in megaconv/gguf/architectures.py."""
