"""Flags that a --model-type does not support. They are refused by name, before any file is read."""

from collections.abc import Iterator, Mapping
from dataclasses import fields

from megaconv.errors import UsageError
from megatron_lite.settings.config import Settings, flags
from megatron_lite.settings.learning import Masked, Tasks
from megatron_lite.settings.retrieval import Retrieval

NO_WINDOWS = "its samples are sentences, not windows of tokens"
NO_LAYERS = "its layers have plain attention and a plain MLP"

OF_ENCODERS: Mapping[str, str] = {
    "mock_data": "there are no random sentences; give --data-path",
    "finetune_data": "examples are for models that predict the next token",
    "dpo": "it gives no answers that could be compared",
    "kto": "it gives no answers that could be compared",
    "reward_modeling": "it gives no answers that could be scored",
    "embedding": "vectors of texts are learned by decoders so far",
    "grpo": "it completes no prompts",
    "teacher_load": "teachers are for decoders so far",
    "reset_position_ids": NO_WINDOWS, "reset_attention_mask": NO_WINDOWS, "eod_mask_loss": NO_WINDOWS,
    "num_experts": NO_LAYERS, "multi_latent_attention": NO_LAYERS, "qk_layernorm": NO_LAYERS, "group_query_attention": NO_LAYERS,
    "mtp_num_layers": "it predicts no further tokens", "apply_layernorm_1p": "its norms multiply with their weight itself",
    "qk_clip": "scores are looked at in decoders alone", "log_max_attention_logit": "scores are looked at in decoders alone",
    "cpu_offloading_num_layers": "activations are offloaded in decoders alone",
    "lora_rank": "adapters are for decoders so far", "lora_load": "adapters are for decoders so far",
}  # fmt: skip
"""Flag -> the reason why such a model does not support it."""
_OF_BERT: Mapping[str, object] = {
    "position_embedding_type": "learned_absolute", "normalization": "LayerNorm", "swiglu": False, "disable_bias_linear": False,
    "context_parallel_size": 1,
}  # fmt: skip
_ALONE: Mapping[str, Mapping[str, object]] = {
    "bert": _OF_BERT,
    "biencoder": {**_OF_BERT, "bert_no_binary_head": False, "fp8_format": None},
    "t5": {"context_parallel_size": 1, "compile": False, "fp8_format": None},
}  # fmt: skip
"""By kind: flag -> the only supported value."""
_OF_TOWERS = (
    "biencoder_projection_dim",
    "ict_head_size",
    "biencoder_shared_query_context_model",
    *(item.name for item in fields(Retrieval)),
)
OF_MODEL: Mapping[str, tuple[str, ...]] = {
    "bert": ("bert_no_binary_head", *(item.name for item in fields(Tasks))),
    "biencoder": (*_OF_TOWERS, *(item.name for item in fields(Tasks))),
    "t5": ("encoder_num_layers", "decoder_num_layers", "encoder_seq_length", "decoder_seq_length"),
}
"""Flags that belong to one kind of model."""
MASKED: Mapping[str, tuple[str, ...]] = {
    "bert": ("mask_prob", "short_seq_prob"),
    "t5": ("mask_prob", "short_seq_prob", "vocab_extra_ids"),
}
"""The flags for masked samples that each kind supports."""


def check_kind(settings: Settings, kind: str) -> None:
    """Raise UsageError for the first flag that the kind of model does not support. kind: from model_type()."""
    for name, reason in _refused(settings, kind):
        raise UsageError(
            f"--{name.replace('_', '-')} has no part in a {kind}: {reason}; leave it out"
        )


def _refused(settings: Settings, kind: str) -> Iterator[tuple[str, str]]:
    if kind != "gpt":
        for name, reason in OF_ENCODERS.items():
            if _asked(settings, name):
                yield name, reason
        for name, value in _ALONE[kind].items():
            differs = _value(settings, name) != value
            if differs and _asked(settings, name):
                reason = f"there is code for {value} alone" if value else "there is no code for it"
                yield name, reason
    for name in sorted(of_other_kinds(kind)):
        if _asked(settings, name):
            yield name, "it is about another --model-type"


def of_other_kinds(kind: str) -> set[str]:
    """The flags that belong to other kinds of models only."""
    others = {item.name for item in fields(Masked)} - set(MASKED.get(kind, ()))
    for other, names in OF_MODEL.items():
        if other != kind:
            others |= set(names)
    return others - set(OF_MODEL.get(kind, ()))


def _value(settings: Settings, name: str) -> object:
    subject, _ = flags()[name]
    value: object = getattr(getattr(settings, subject), name)
    return value


def _asked(settings: Settings, name: str) -> bool:
    return name in settings.given and _value(settings, name) not in (None, False)
