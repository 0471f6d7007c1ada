"""The dropouts of a model in training: the keys of config.json for them, and Megatron's two arguments.

    attention_dropout   of attention weights
    hidden_dropout      of each block's output before the residual sum, and of the embedding

A run of Megatron states them in its arguments. Any other model has those of its config.json, or the defaults of
transformers' class. A model without a config.json has none.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from megaconv.errors import CorruptCheckpoint
from megaconv.model.config import ModelConfig

ATTENTION, HIDDEN = "attention_dropout", "hidden_dropout"
"""The names of Megatron's arguments."""


class DropoutKeys(NamedTuple):
    """The keys that transformers' class reads; empty for a dropout that it doesn't have."""

    attention: str = "attention_dropout"
    hidden: str = ""
    embedding: str = ""
    """The key of the embedding's dropout, if it has one of its own."""
    usual_attention: float = 0.0
    """The class's value without the key."""
    usual_hidden: float = 0.0
    """The class's value without the key, for the blocks and for the embedding."""


_BERT = DropoutKeys("attention_probs_dropout_prob", "hidden_dropout_prob", "", 0.1, 0.1)
_GPT2 = DropoutKeys("attn_pdrop", "resid_pdrop", "embd_pdrop", 0.1, 0.1)
_GPTJ = DropoutKeys("attn_pdrop", "resid_pdrop", "embd_pdrop")
_PHI = DropoutKeys("attention_dropout", "resid_pdrop", "embd_pdrop")
_HIDDEN = DropoutKeys("attention_dropout", "hidden_dropout")

KEYS: Mapping[str, DropoutKeys] = {
    **dict.fromkeys(("bert", "biencoder", "biogpt", "roberta"), _BERT),
    **dict.fromkeys(("gpt2", "gpt_bigcode", "openai_gpt"), _GPT2),
    **dict.fromkeys(("codegen", "gptj"), _GPTJ),
    **dict.fromkeys(("phi", "phi3"), _PHI),
    **dict.fromkeys(("bloom", "doge", "falcon", "gpt_neox", "nemotron_h", "persimmon", "stablelm"), _HIDDEN),
    **dict.fromkeys(("ernie4_5", "ernie4_5_moe", "ernie4_5_vl_moe_text"), DropoutKeys("")),
    **dict.fromkeys(("falcon_mamba", "lfm2", "lfm2_moe", "mamba", "mamba2"), DropoutKeys("")),
    "ctrl": DropoutKeys("", "resid_pdrop", "embd_pdrop", usual_hidden=0.1),
    "dbrx": DropoutKeys("attn_pdrop", "resid_pdrop", "emb_pdrop"),
    "gpt_neo": DropoutKeys("attention_dropout", "resid_dropout", "embed_dropout"),
    "gpt_neox_japanese": DropoutKeys("attention_dropout", "hidden_dropout", usual_attention=0.1),
    "modernbert_decoder": DropoutKeys("attention_dropout", "", "embedding_dropout"),
    "mpt": DropoutKeys("attn_pdrop", "resid_pdrop", "emb_pdrop"),
    "opt": DropoutKeys("attention_dropout", "dropout", usual_hidden=0.1),
    "qwen": DropoutKeys("attn_dropout_prob", "", "emb_dropout_prob"),
    "seed_oss": DropoutKeys("attention_dropout", "residual_dropout", "", 0.1, 0.1),
    "starcoder2": DropoutKeys("attention_dropout", "residual_dropout", "embedding_dropout"),
    **dict.fromkeys(("mt5", "t5", "umt5"), DropoutKeys("dropout_rate", "dropout_rate", "", 0.1, 0.1)),
    **dict.fromkeys(("bart", "marian", "mbart", "pegasus"), DropoutKeys("attention_dropout", "dropout", "", 0.0, 0.1)),
    "m2m_100": DropoutKeys("attention_dropout", "dropout", "", 0.1, 0.1),
    "xglm": DropoutKeys("attention_dropout", "dropout", "", 0.1, 0.1),
}  # fmt: skip
"""Families -> their keys. All other families have attention_dropout alone, 0 without the key."""


def dropouts_of(config: ModelConfig) -> dict[str, float]:
    """attention_dropout and hidden_dropout of the model's config.json.

    Raises CorruptCheckpoint for a value that is no probability.
    """
    if config.hf is None:
        return {ATTENTION: 0.0, HIDDEN: 0.0}
    keys = _keys_of(config.family)
    return {
        ATTENTION: _stated(config.hf, keys.attention, keys.usual_attention),
        HIDDEN: _stated(config.hf, keys.hidden, keys.usual_hidden),
    }


def written_dropouts(family: str, arguments: Mapping[str, Any]) -> dict[str, float]:
    """The keys of a new config.json for a run's dropouts, if they aren't the class's usual ones.

    arguments: Megatron's arguments of the run, with or without its dropouts.
    """
    keys = _keys_of(family)
    attention = arguments.get(ATTENTION, keys.usual_attention)
    hidden = arguments.get(HIDDEN, keys.usual_hidden)
    written = {}
    if attention != keys.usual_attention:
        written[keys.attention] = attention
    if hidden != keys.usual_hidden:
        written[keys.embedding] = written[keys.hidden] = hidden
    return {key: value for key, value in written.items() if key}


def dropout_notices(config: ModelConfig) -> tuple[str, ...]:
    """The notice for a model whose embedding has another dropout than its blocks."""
    if config.hf is None:
        return ()
    keys = _keys_of(config.family)
    hidden = dropouts_of(config)[HIDDEN]
    embedding = _stated(config.hf, keys.embedding, hidden)
    if embedding == hidden:
        return ()
    return (
        f"{keys.embedding} is {embedding:g}: in training, Megatron drops the embedding as it drops the blocks' outputs, "
        f"with hidden_dropout {hidden:g}",
    )


def _keys_of(family: str) -> DropoutKeys:
    return KEYS.get(family, DropoutKeys())


def _stated(raw: Mapping[str, Any], key: str, usual: float) -> float:
    """The value of a key, of MPT's attn_config too. null means 0."""
    nested = raw.get("attn_config")
    keys = {**nested, **raw} if isinstance(nested, Mapping) else raw
    value = keys.get(key, usual) or 0.0
    if type(value) not in (int, float) or not 0 <= value <= 1:
        raise CorruptCheckpoint(f"config.json: {key} {value!r:.40}: expected a number from 0 to 1")
    return float(value)
