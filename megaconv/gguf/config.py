"""Makes a config.json from the metadata of a GGUF file, for the architectures that megaconv reads.

    llama.embedding_length 4096         hidden_size
    llama.rope.freq_base 500000.0       rope_theta
    tensors: no output.weight           tie_word_embeddings

This module doesn't guess missing values: if positions are scaled by divisors that aren't those of a Llama 3.1, the
model's own config.json is required.
A mistral has the architecture `llama`. The router's function shows whether a `deepseek2` is a V2 or a V3.
metadata.py writes metadata, and this module reads them back. A field for which llama.cpp's architecture has no key
gets the only value that llama.cpp computes.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from formats.lazy_numpy import Floats, np
from megaconv.errors import UnsupportedInput, UsageError
from megaconv.gguf.architectures import BY_NAME, described, needed
from megaconv.gguf.llama3_scaling import published_scaling
from megaconv.gguf.names import DIVISORS, LLAMA3, SHARED_HEADS, full_every
from megaconv.gguf.unread import require_read

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
"""Key of config.json -> key of the file, without the architecture's prefix."""
_LATENT = {
    "qk_rope_head_dim": "rope.dimension_count",
    "kv_lora_rank": "attention.kv_lora_rank",
    "v_head_dim": "attention.value_length_mla",
    "qk_nope_head_dim": "attention.key_length_mla",  # minus the rotating elements
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
"""Further keys of some architectures, in addition to _LLAMA_LIKE."""
_GATED = {1: ("DeepseekV2ForCausalLM", "deepseek_v2"), 2: ("DeepseekV3ForCausalLM", "deepseek_v3")}
"""expert_gating_func -> (class, model_type)."""
_Get = Callable[[str], Any]
_Raw = dict[str, Any]

_CLASSES = {
    "llama": ("LlamaForCausalLM", "llama"), "mixtral": ("MixtralForCausalLM", "mixtral"), "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"), "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"), "gemma": ("GemmaForCausalLM", "gemma"),
    "qwen2moe": ("Qwen2MoeForCausalLM", "qwen2_moe"), "gpt2": ("GPT2LMHeadModel", "gpt2"), "deepseek2": _GATED[2],
    "phi3": ("Phi3ForCausalLM", "phi3"), "gemma2": ("Gemma2ForCausalLM", "gemma2"), "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "olmo2": ("Olmo2ForCausalLM", "olmo2"),
}  # fmt: skip
_TIED = {"gemma": True, "gemma2": True, "olmo2": False, "qwen2moe": False}
"""Architecture -> True if its head is always tied to the embedding, False if it never is."""
_TYPE = "rope.scaling.type"
_FACTOR = "rope.scaling.factor"
_ORIGINAL = "rope.scaling.original_context_length"
_NEEDED_TO_SCALE = {"none": (), "linear": (_FACTOR,), "yarn": (_FACTOR, _ORIGINAL)}
"""Kind of rope scaling -> the keys that describe it."""


def shortest(value: float) -> float:
    """The shortest number with the same float32 value. For example, float32 can't hold 1e-06 exactly."""
    return float(str(np.float32(value)))


_TOKEN_IDS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}
"""Key of config.json -> key of the metadata."""


def config_of(
    keys: Mapping[str, Any],
    tensors: Collection[str],
    vocab: int,
    where: str,
    divisors: Mapping[str, Floats] = {},
) -> dict[str, Any]:
    """The config.json of a model. keys: the file's metadata. tensors: names of its tensors. vocab: rows of the
    embedding. divisors: its tensors of divisors, by name.

    Raises UnsupportedInput for another architecture, and UsageError for a file that lacks a value.
    """
    architecture = str(keys.get("general.architecture"))
    if architecture not in _CLASSES and architecture not in BY_NAME:
        supported = ", ".join((*_CLASSES, *BY_NAME))
        raise UnsupportedInput(
            f"{where}: is of llama.cpp's architecture {architecture!r:.40}; supported are {supported}"
        )

    def value_of(name: str) -> Any:
        value = keys.get(f"{architecture}.{name}")
        return shortest(value) if isinstance(value, float) else value

    read = set[str]()

    def get(name: str) -> Any:
        read.add(name)
        return value_of(name)

    tokens = {key: keys.get(name) for key, name in _TOKEN_IDS.items()}
    if architecture in BY_NAME:
        missing = needed(get)
        if missing is not None:
            raise _config_needed(where, f"doesn't say {architecture}.{missing}")
        _require_keys(architecture, value_of, (), tensors, where)
        found = described(architecture, get, tensors, vocab, tokens)
        # Keys about rope scaling are not among those that were read, so a scaled model is refused.
        require_read(architecture, keys, read, _head_size(value_of), where)
        return found
    scaling = _scaling_by_divisors(architecture, get, divisors)
    if scaling is not None:
        tensors = [name for name in tensors if name != LLAMA3]
    names = _GPT2 if architecture == "gpt2" else {**_LLAMA_LIKE, **_FURTHER.get(architecture, {})}
    _require_keys(architecture, get, names.values(), tensors, where)
    is_mixtral = architecture == "llama" and get("expert_count")
    model, model_type = _CLASSES["mixtral" if is_mixtral else architecture]
    found = {
        **{key: get(name) for key, name in names.items()},
        "architectures": [model],
        "model_type": model_type,
        "vocab_size": vocab,
        "tie_word_embeddings": _TIED.get(architecture, "output.weight" not in tensors),
        **tokens,
    }
    if architecture == "gpt2":
        found |= {"activation_function": "gelu_new"}
    else:
        found = _llama_like(architecture, get, found, tensors, where)
    if scaling is not None:
        found["rope_scaling"] = scaling
    require_read(architecture, keys, read, found.get("head_dim", 0), where)
    return found


def _scaling_by_divisors(
    architecture: str, get: _Get, divisors: Mapping[str, Floats]
) -> _Raw | None:
    """The rope scaling of a Llama 3.1 by its divisors; None for any other file."""
    found, theta = divisors.get(LLAMA3), get("rope.freq_base")
    if architecture != "llama" or found is None or theta is None or get(_FACTOR) is not None:
        return None
    return published_scaling(found, theta)


def _head_size(get: _Get) -> int:
    """Elements of a head. get: gives values of a file that has the keys of `needed`."""
    return int(
        get("attention.key_length") or get("embedding_length") // get("attention.head_count")
    )


def _llama_like(
    architecture: str, get: _Get, found: _Raw, tensors: Collection[str], where: str
) -> _Raw:
    """The config.json of a model with RMSNorm and rotary positions. found: the keys of all architectures."""
    found |= {
        "rope_theta": get("rope.freq_base") or 10000.0,
        "hidden_act": "silu",
        "rope_scaling": _scaling(get),
    }
    if architecture == "deepseek2":
        return found | _latent(get, where)
    found["head_dim"] = found["hidden_size"] // found["num_attention_heads"]
    if architecture not in SHARED_HEADS and get("attention.key_length"):
        found["head_dim"] = get("attention.key_length")
    if get("expert_count"):
        found |= _experts(get)
    own = _OWN.get(architecture)
    return found | (own(get, found, tensors) if own else {})


def _require_keys(
    architecture: str, get: _Get, names: Collection[str], tensors: Collection[str], where: str
) -> None:
    """Raise UsageError if the file lacks one of these keys, or scales positions in a way that the metadata don't fully
    describe."""
    kind = get(_TYPE) or ("linear" if get(_FACTOR) is not None else "none")
    needed = list(names)
    if architecture == "deepseek2":
        needed.append("expert_gating_func")
    if architecture == "deepseek2" and kind == "yarn":
        needed.append(_MSCALE)
    needed += _NEEDED_TO_SCALE.get(kind, ())
    missing = [name for name in needed if get(name) is None]
    if missing:
        raise _config_needed(where, f"doesn't say {architecture}.{missing[0]}")
    has_divisors = any(name in tensors for name in DIVISORS)
    if kind not in _NEEDED_TO_SCALE or has_divisors or get("rope.scaling.attn_factor") is not None:
        raise _config_needed(where, "scales positions, and not by which numbers")


def _config_needed(where: str, what: str) -> UsageError:
    return UsageError(
        f"{where}: {what}; give --config with the Hugging Face directory of the model",
        code="config-needed",
    )


_MSCALE = "rope.scaling.yarn_log_multiplier"


def _scaling(get: _Get) -> _Raw | None:
    kind = get(_TYPE) or "linear"
    if get(_FACTOR) is None or kind == "none":
        return None
    found = {"rope_type": kind, "factor": get(_FACTOR)}
    if kind == "linear":
        return found
    found["original_max_position_embeddings"] = get(_ORIGINAL)
    if get(_MSCALE) is not None:
        mscale = float(f"{10 * get(_MSCALE):.6g}")
        found |= {"mscale": mscale, "mscale_all_dim": mscale}
    for key in ("beta_fast", "beta_slow"):
        beta = get(f"rope.scaling.yarn_{key}")
        if beta is not None:
            found[key] = beta
    return found


def _experts(get: _Get) -> _Raw:
    count = get("expert_count")
    return {
        "num_local_experts": count,
        "num_experts": count,
        "num_experts_per_tok": get("expert_used_count"),
    }


def _latent(get: _Get, where: str) -> _Raw:
    """The keys of deepseek2. Raises UnsupportedInput for a router that neither V2 nor V3 has."""
    gate = get("expert_gating_func")
    if gate not in _GATED:
        raise UnsupportedInput(
            f"{where}: says deepseek2.expert_gating_func = {gate!r:.40}; supported are 1 (V2) and 2 (V3)"
        )
    model, model_type = _GATED[gate]
    found = {key: get(name) for key, name in _LATENT.items()}
    found["qk_nope_head_dim"] -= found["qk_rope_head_dim"]
    found |= {
        "architectures": [model],
        "model_type": model_type,
        "num_key_value_heads": get("attention.head_count"),
    }
    found |= {
        "q_lora_rank": get("attention.q_lora_rank") or None,
        "attention_bias": False,
        "num_nextn_predict_layers": 0,
    }
    found["norm_topk_prob"] = bool(get("expert_weights_norm"))
    if model_type == "deepseek_v3":
        found |= {
            "n_group": get("expert_group_count") or 1,
            "topk_group": get("expert_group_used_count") or 1,
        }
    return found


def _llama(get: _Get, found: _Raw, tensors: Collection[str]) -> _Raw:
    return {
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }


def _qwen_moe(get: _Get, found: _Raw, tensors: Collection[str]) -> _Raw:
    """The keys of Qwen's experts. Qwen 3's expert weights sum up to 1; Qwen 2's are the output of softmax."""
    sums_up = found["model_type"] == "qwen3_moe"
    return {"norm_topk_prob": sums_up, "decoder_sparse_step": 1, "mlp_only_layers": []}


def _phi3(get: _Get, found: _Raw, tensors: Collection[str]) -> _Raw:
    rotating = get("rope.dimension_count") or found["head_dim"]
    original = get(_ORIGINAL) or found["max_position_embeddings"]
    return {
        "partial_rotary_factor": rotating / found["head_dim"],
        "sliding_window": get("attention.sliding_window") or None,
        "original_max_position_embeddings": original,
    }


def _gemma(get: _Get, found: _Raw, tensors: Collection[str]) -> _Raw:
    return {"hidden_act": "gelu_pytorch_tanh"}


def _gemma2(get: _Get, found: _Raw, tensors: Collection[str]) -> _Raw:
    """The keys of Gemma 2 and 3. All Gemma 2 models have caps.

    The number of layers identifies the largest models, whose scores are scaled by another number.
    """
    is_gemma2 = found["model_type"] == "gemma2"
    is_27b = found["num_hidden_layers"] == (46 if is_gemma2 else 62)
    hidden_per_head = found["hidden_size"] // found["num_attention_heads"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": get("attn_logit_softcapping") or (50.0 if is_gemma2 else None),
        "final_logit_softcapping": get("final_logit_softcapping") or (30.0 if is_gemma2 else None),
        "query_pre_attn_scalar": hidden_per_head if is_27b else found["head_dim"],
        "rope_local_base_freq": get("rope.freq_base_swa") or 10000.0,
        **_windows(get, found),
    }


def _windows(get: _Get, found: _Raw) -> _Raw:
    """The layers with a window. If the file has no pattern, they follow llama.cpp's default pattern."""
    layers, window = found["num_hidden_layers"], get("attention.sliding_window")
    pattern = get("attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        every = pattern or full_every(found["model_type"])
        pattern = [bool((layer + 1) % every) for layer in range(layers)]
    kinds = [
        "sliding_attention" if window and windowed else "full_attention" for windowed in pattern
    ]
    return {"sliding_window": window, "layer_types": kinds}


_OWN: Mapping[str, Callable[[_Get, _Raw, Collection[str]], _Raw]] = {
    "llama": _llama, "qwen2moe": _qwen_moe, "qwen3moe": _qwen_moe, "phi3": _phi3, "gemma": _gemma, "gemma2": _gemma2, "gemma3": _gemma2,
}  # fmt: skip
