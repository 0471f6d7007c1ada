"""The config.json of a model of which only the metadata of a GGUF file are known, for the architectures that are read.

    llama.embedding_length 4096         hidden_size
    llama.rope.freq_base 500000.0       rope_theta
    tensors: no output.weight           tie_word_embeddings

What a file leaves open isn't guessed: positions that are scaled by divisors need the model's own config.json. A mistral is a llama
there; whether a `deepseek2` is a V2 or a V3 is told by how its router weighs experts. gguf_metadata.py writes, and what it wrote is
read back by this: what llama.cpp's architecture has no key for has the one value here that it computes.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from formats.lazy_numpy import np
from megaconv.errors import UnsupportedInput, UsageError
from megaconv.families.parts.gguf_names import DIVISORS, SHARED_HEADS, full_every

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
_FURTHER: Mapping[str, Mapping[str, str]] = {
    "deepseek2": _LATENT,
    "qwen2moe": {
        "moe_intermediate_size": "expert_feed_forward_length",
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    },
    "qwen3moe": {"moe_intermediate_size": "expert_feed_forward_length"},
}
"""Of some architectures, beside _LLAMA_LIKE."""
_GATED = {1: ("DeepseekV2ForCausalLM", "deepseek_v2"), 2: ("DeepseekV3ForCausalLM", "deepseek_v3")}
"""expert_gating_func -> the model of which it is."""
_Said = Callable[[str], Any]
_Raw = dict[str, Any]

_CLASSES = {
    "llama": ("LlamaForCausalLM", "llama"), "mixtral": ("MixtralForCausalLM", "mixtral"), "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"), "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"), "gemma": ("GemmaForCausalLM", "gemma"),
    "qwen2moe": ("Qwen2MoeForCausalLM", "qwen2_moe"), "gpt2": ("GPT2LMHeadModel", "gpt2"), "deepseek2": _GATED[2],
    "phi3": ("Phi3ForCausalLM", "phi3"), "gemma2": ("Gemma2ForCausalLM", "gemma2"), "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "olmo2": ("Olmo2ForCausalLM", "olmo2"),
}  # fmt: skip
_TIED = {"gemma": True, "gemma2": True, "olmo2": False, "qwen2moe": False}
"""Whether the head is the embedding in architectures that have it one way alone."""
_TYPE, _FACTOR, _ORIGINAL = "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"


def shortest(value: float) -> float:
    """The shortest number that float32 keeps as this one: 1e-06, which float32 doesn't have."""
    return float(str(np.float32(value)))


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
        return shortest(value) if isinstance(value, float) else value

    names = _GPT2 if architecture == "gpt2" else {**_LLAMA_LIKE, **_FURTHER.get(architecture, {})}
    _require_told(architecture, said, names.values(), tensors, where)
    model, model_type = _CLASSES["mixtral" if architecture == "llama" and said("expert_count") else architecture]
    found = {key: said(name) for key, name in names.items()}
    found |= {"architectures": [model], "model_type": model_type, "vocab_size": vocab}
    found["tie_word_embeddings"] = _TIED.get(architecture, "output.weight" not in tensors)
    for key, name in (
        ("bos_token_id", "bos_token_id"),
        ("eos_token_id", "eos_token_id"),
        ("pad_token_id", "padding_token_id"),
    ):
        found[key] = keys.get(f"tokenizer.ggml.{name}")
    if architecture == "gpt2":
        return found | {"activation_function": "gelu_new"}
    found |= {"rope_theta": said("rope.freq_base") or 10000.0, "hidden_act": "silu", "rope_scaling": _scaling(said)}
    if architecture == "deepseek2":
        return found | _latent(said, where)
    shared = found["hidden_size"] // found["num_attention_heads"]
    found["head_dim"] = shared if architecture in SHARED_HEADS else said("attention.key_length") or shared
    if said("expert_count"):
        found |= _experts(said)
    own = _OWN.get(architecture)
    return found | (own(said, found, tensors) if own else {})


def _require_told(architecture: str, said: _Said, names: Collection[str], tensors: Collection[str], where: str) -> None:
    """Raises UsageError where the file doesn't say one of these, or scales positions in a way that it doesn't tell."""
    needed = [*names, *(["expert_gating_func"] if architecture == "deepseek2" else [])]
    kind = said(_TYPE) or ("linear" if said(_FACTOR) is not None else "none")
    told = {"none": (), "linear": (_FACTOR,), "yarn": (_FACTOR, _ORIGINAL)}.get(kind)
    if kind == "yarn" and architecture == "deepseek2":
        needed.append(_MSCALE)
    missing = [name for name in (*needed, *(told or ())) if said(name) is None]
    untold = told is None or any(name in tensors for name in DIVISORS) or said("rope.scaling.attn_factor") is not None
    if missing or untold:
        what = f"doesn't say {architecture}.{missing[0]}" if missing else "scales positions, and not by which numbers"
        raise UsageError(
            f"{where}: {what}; give --config with the Hugging Face directory of the model", code="config-needed"
        )


_MSCALE = "rope.scaling.yarn_log_multiplier"


def _scaling(said: _Said) -> _Raw | None:
    kind = said(_TYPE) or "linear"
    if said(_FACTOR) is None or kind == "none":
        return None
    found = {"rope_type": kind, "factor": said(_FACTOR)}
    if kind == "linear":
        return found
    found["original_max_position_embeddings"] = said(_ORIGINAL)
    if said(_MSCALE) is not None:
        found["mscale"] = found["mscale_all_dim"] = float(f"{10 * said(_MSCALE):.6g}")
    betas = {key: said(f"rope.scaling.yarn_{key}") for key in ("beta_fast", "beta_slow")}
    return found | {key: value for key, value in betas.items() if value is not None}


def _experts(said: _Said) -> _Raw:
    count = said("expert_count")
    return {"num_local_experts": count, "num_experts": count, "num_experts_per_tok": said("expert_used_count")}


def _latent(said: _Said, where: str) -> _Raw:
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
    return found


def _llama(said: _Said, found: _Raw, tensors: Collection[str]) -> _Raw:
    return {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_up.bias" in tensors}


def _qwen_moe(said: _Said, found: _Raw, tensors: Collection[str]) -> _Raw:
    """Qwen 3's weights of experts sum up to 1, Qwen 2's are what softmax gives."""
    sums_up = found["model_type"] == "qwen3_moe"
    return {"norm_topk_prob": sums_up, "decoder_sparse_step": 1, "mlp_only_layers": []}


def _phi3(said: _Said, found: _Raw, tensors: Collection[str]) -> _Raw:
    rotating = said("rope.dimension_count") or found["head_dim"]
    original = said(_ORIGINAL) or found["max_position_embeddings"]
    return {
        "partial_rotary_factor": rotating / found["head_dim"],
        "sliding_window": said("attention.sliding_window") or None,
        "original_max_position_embeddings": original,
    }


def _gemma(said: _Said, found: _Raw, tensors: Collection[str]) -> _Raw:
    return {"hidden_act": "gelu_pytorch_tanh"}


def _gemma2(said: _Said, found: _Raw, tensors: Collection[str]) -> _Raw:
    """The number of layers tells the largest models, whose scores are scaled by another number. All of Gemma 2 have caps."""
    is_27b = found["num_hidden_layers"] == {"gemma2": 46, "gemma3_text": 62}[found["model_type"]]
    scalar = found["hidden_size"] // found["num_attention_heads"] if is_27b else found["head_dim"]
    usual = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    caps = {key: said(key) or (value if found["model_type"] == "gemma2" else None) for key, value in usual.items()}
    own = {"query_pre_attn_scalar": scalar, "rope_local_base_freq": said("rope.freq_base_swa") or 10000.0}
    return {"hidden_activation": "gelu_pytorch_tanh", **caps, **own, **_windows(said, found)}


def _windows(said: _Said, found: _Raw) -> _Raw:
    """Layers with a window, of the pattern that llama.cpp takes where the file has none."""
    layers, window = found["num_hidden_layers"], said("attention.sliding_window")
    pattern = said("attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        every = pattern or full_every(found["model_type"])
        pattern = [bool((layer + 1) % every) for layer in range(layers)]
    kinds = ["sliding_attention" if window and windowed else "full_attention" for windowed in pattern]
    return {"sliding_window": window, "layer_types": kinds}


_OWN: Mapping[str, Callable[[_Said, _Raw, Collection[str]], _Raw]] = {
    "llama": _llama, "qwen2moe": _qwen_moe, "qwen3moe": _qwen_moe, "phi3": _phi3, "gemma": _gemma, "gemma2": _gemma2, "gemma3": _gemma2,
}  # fmt: skip
