"""The config.json of small models that generate no text."""

from typing import Any

_BERT: dict[str, Any] = {
    "model_type": "bert", "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 128, "max_position_embeddings": 64, "type_vocab_size": 2, "layer_norm_eps": 1e-12, "hidden_act": "gelu",
}  # fmt: skip
MASKED_BERT = _BERT | {"architectures": ["BertForMaskedLM"]}
CLASSIFYING_BERT = _BERT | {"architectures": ["BertForSequenceClassification"]}
T5: dict[str, Any] = {
    "architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "vocab_size": 128, "d_model": 64, "d_kv": 16, "d_ff": 128,
    "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "feed_forward_proj": "gated-gelu", "layer_norm_epsilon": 1e-6,
    "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "tie_word_embeddings": True,
}  # fmt: skip
SCORING_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForSequenceClassification"], "model_type": "llama", "num_labels": 1, "vocab_size": 128, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
}  # fmt: skip
