"""The config.json of a model of which only the metadata of a GGUF file are known, for the architectures that are read.

    llama.embedding_length 4096         hidden_size
    llama.rope.freq_base 500000.0       rope_theta
    tensors: no output.weight           tie_word_embeddings

What a file leaves open isn't guessed: positions that are scaled need the model's own config.json. A mistral is a llama there.
"""

from collections.abc import Collection, Mapping
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
_CLASSES = {
    "llama": ("LlamaForCausalLM", "llama"), "mixtral": ("MixtralForCausalLM", "mixtral"), "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"), "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"), "gemma": ("GemmaForCausalLM", "gemma"),
    "gpt2": ("GPT2LMHeadModel", "gpt2"),
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

    names = _GPT2 if architecture == "gpt2" else _LLAMA_LIKE
    missing = [name for name in names.values() if said(name) is None]
    if missing or "rope_freqs.weight" in tensors or any(said(name) not in (None, "none") for name in _SCALED):
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
