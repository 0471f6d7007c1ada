"""The config.json of a model of which only the metadata of a GGUF file are known, for the architectures that are read.

    llama.embedding_length 4096         hidden_size
    llama.rope.freq_base 500000.0       rope_theta
    tensors: no output.weight           tie_word_embeddings

What a file leaves open isn't guessed: positions that are scaled need the model's own config.json, but for DeepSeek's, which are told
whole. A mistral is a llama there; whether a `deepseek2` is a V2 or a V3 is told by how its router weighs experts.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from megaconv.errors import UnsupportedInput, UsageError

_LLAMA_LIKE = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_GPT2 = {
    "n_embd": "embedding_length",
    "n_layer": "block_count",
    "n_inner": "feed_forward_length",
    "n_head": "attention.head_count",
    "n_positions": "context_length",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
}
"""Key of config.json -> of the file, behind the architecture's name."""
_LATENT = {
    "qk_rope_head_dim": "rope.dimension_count",
    "kv_lora_rank": "attention.kv_lora_rank",
    "v_head_dim": "attention.value_length_mla",
    "qk_nope_head_dim": "attention.key_length_mla",  # less what rotates
    "first_k_dense_replace": "leading_dense_block_count",
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "routed_scaling_factor": "expert_weights_scale",
}
"""Of deepseek2, beside _LLAMA_LIKE."""
_YARN = {
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "mscale": "rope.scaling.yarn_log_multiplier",
}
_GATED = {1: ("DeepseekV2ForCausalLM", "deepseek_v2"), 2: ("DeepseekV3ForCausalLM", "deepseek_v3")}
"""expert_gating_func -> the model of which it is."""
_Said = Callable[[str], Any]

_CLASSES = {
    "llama": ("LlamaForCausalLM", "llama"), "mixtral": ("MixtralForCausalLM", "mixtral"), "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"), "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"), "gemma": ("GemmaForCausalLM", "gemma"),
    "gpt2": ("GPT2LMHeadModel", "gpt2"), "deepseek2": _GATED[2],
}  # fmt: skip
_SCALED = ("rope.scaling.type", "rope.scaling.factor")


def config_of(keys: Mapping[str, Any], tensors: Collection[str], vocab: int, where: str) -> dict[str, Any]:
    """keys: the file's metadata. tensors: their names. vocab: rows of the embedding.

    Raises UnsupportedInput for another architecture, UsageError for a file that leaves something open.
    """
    architecture = str(keys.get("general.architecture"))
    if architecture not in _CLASSES:
        raise UnsupportedInput(
            f"{where}: is of llama.cpp's architecture {architecture!r:.40}; supported are {', '.join(_CLASSES)}"
        )

    def said(name: str) -> Any:
        value = keys.get(f"{architecture}.{name}")
        return float(str(np.float32(value))) if isinstance(value, float) else value  # 1e-06, which float32 doesn't have

    names, is_latent = _GPT2 if architecture == "gpt2" else _LLAMA_LIKE, architecture == "deepseek2"
    needed = [*names.values(), *([*_LATENT.values(), "expert_gating_func"] if is_latent else [])]
    scaled = [name for name in _SCALED if said(name) not in (None, "none")]
    if is_latent and scaled and said(_SCALED[0]) == "yarn":
        needed, scaled = [*needed, *_YARN.values()], []
    missing = [name for name in needed if said(name) is None]
    if missing or "rope_freqs.weight" in tensors or scaled:
        what = f"doesn't say {architecture}.{missing[0]}" if missing else "scales positions, and not by which numbers"
        raise UsageError(
            f"{where}: {what}; give --config with the Hugging Face directory of the model", code="config-needed"
        )
    experts = said("expert_count")
    model, model_type = _CLASSES["mixtral" if architecture == "llama" and experts else architecture]
    found = {key: said(name) for key, name in names.items()}
    found |= {"architectures": [model], "model_type": model_type, "vocab_size": vocab}
    found["tie_word_embeddings"] = "output.weight" not in tensors
    for key, name in (
        ("bos_token_id", "bos_token_id"),
        ("eos_token_id", "eos_token_id"),
        ("pad_token_id", "padding_token_id"),
    ):
        found[key] = keys.get(f"tokenizer.ggml.{name}")
    if architecture == "gpt2":
        return found | {"activation_function": "gelu_new"}
    found |= {"rope_theta": said("rope.freq_base") or 10000.0, "hidden_act": "silu"}
    if is_latent:
        return found | _latent(said, where)
    found["head_dim"] = said("attention.key_length") or found["hidden_size"] // found["num_attention_heads"]
    if architecture == "gemma":
        found["hidden_act"] = "gelu_pytorch_tanh"
    elif architecture != "qwen2":
        found["attention_bias"] = "blk.0.attn_q.bias" in tensors
    if experts:
        found |= {
            "num_local_experts": experts,
            "num_experts": experts,
            "num_experts_per_tok": said("expert_used_count"),
        }
    if architecture == "qwen3moe":
        found |= {"moe_intermediate_size": said("expert_feed_forward_length"), "norm_topk_prob": True}
        found |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    return found


def _latent(said: _Said, where: str) -> dict[str, Any]:
    """Of deepseek2. Raises UnsupportedInput for a router that neither V2 nor V3 has."""
    gate = said("expert_gating_func")
    if gate not in _GATED:
        raise UnsupportedInput(
            f"{where}: says deepseek2.expert_gating_func = {gate!r:.40}; supported are 1 (V2) and 2 (V3)"
        )
    model, model_type = _GATED[gate]
    found = {key: said(name) for key, name in _LATENT.items()}
    found["qk_nope_head_dim"] -= found["qk_rope_head_dim"]
    found |= {"architectures": [model], "model_type": model_type, "num_key_value_heads": said("attention.head_count")}
    found |= {
        "q_lora_rank": said("attention.q_lora_rank") or None,
        "attention_bias": False,
        "num_nextn_predict_layers": 0,
    }
    found["norm_topk_prob"] = bool(said("expert_weights_norm"))
    if model_type == "deepseek_v3":
        found |= {"n_group": said("expert_group_count") or 1, "topk_group": said("expert_group_used_count") or 1}
    if said(_SCALED[0]) == "yarn":
        scaling = {"rope_type": "yarn", **{key: said(name) for key, name in _YARN.items()}}
        scaling["mscale"] = scaling["mscale_all_dim"] = float(f"{10 * scaling['mscale']:.6g}")
        for key in ("beta_fast", "beta_slow"):
            if (value := said(f"rope.scaling.yarn_{key}")) is not None:
                scaling[key] = value
        found["rope_scaling"] = scaling
    return found
