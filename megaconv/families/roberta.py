"""RoBERTa, XLM-RoBERTa and CamemBERT: the original BERT with other names, without its second head.

    pad_token_id + 1            row of the first position in the table of positions
    lm_head.{dense, layer_norm} the transform before the head, always with an exact gelu
    roberta.pooler.dense        in files of published models; a masked language model doesn't compute with it

Megatron's BERT has two token types and a second head, or neither: these models are converted between Hugging Face's files.
The three classes compute the same. Source: RobertaConfig and modeling_roberta.py of transformers 5.24.
"""

from collections.abc import Collection
from dataclasses import replace

from megaconv.errors import CorruptCheckpoint
from megaconv.families import Family
from megaconv.families.bert import ACTIVATIONS, EMBEDDINGS, FINAL_NORM, HEADS, LAYERS, ONLY, POOLER
from megaconv.families.parts.decoder_keys import (
    ALL_BIASES,
    LEARNED_POSITIONS,
    model_keys,
    multi_head,
)
from megaconv.families.parts.key_changes import without_keys
from megaconv.families.parts.keys import (
    CONFIG_NAME,
    Fields,
    Keys,
    Raw,
    choice,
    need_size,
    number,
    size,
)
from megaconv.families.parts.row_changes import hf_only, with_modules
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.model.table import Copied, Row

_MODULES = {
    "bert.": "roberta.",
    "cls.predictions.transform.dense": "lm_head.dense",
    "cls.predictions.transform.LayerNorm": "lm_head.layer_norm",
    "cls.predictions.bias": "lm_head.bias",
}
_SECOND_NAMES = {
    "embed.weight": Copied("head", {"hf": ("lm_head.decoder.weight",)}),
    "head.bias": Copied("itself", {"hf": ("lm_head.decoder.bias",)}),
}


def _of_roberta(row: Row) -> Row:
    if row.canonical == "positions.weight":
        row = row.shaped("position_rows hidden")
    second = _SECOND_NAMES.get(row.canonical)
    return replace(row, copies=(second,) if second else ())


_TRANSFORM_AND_BIAS = tuple(row for row in HEADS if row.when == "transform")
_POOLER = tuple(replace(row, when="stored_pooler") for row in POOLER)
_OF_BERT = (*EMBEDDINGS, *LAYERS, *FINAL_NORM, *_TRANSFORM_AND_BIAS, *_POOLER)
_AFTER_SUMS = tuple(row for row in _OF_BERT if row.when != "pre_norm")
ROWS = hf_only(tuple(_of_roberta(row) for row in with_modules(_AFTER_SUMS, _MODULES)))

_PAD, _POSITIONS, _TIED = "pad_token_id", "max_position_embeddings", "tie_word_embeddings"


def _read_positions(raw: Raw) -> Fields:
    """The positions that tokens have. Rows of the table up to the padding token's number belong to none of them."""
    pad, rows = raw.get(_PAD, 1), need_size(raw, _POSITIONS, 512)
    if type(pad) is not int or not 0 <= pad < rows - 1:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {_PAD} should be a number from 0 to {rows - 2}, because positions begin after it; found {pad!r:.40}"
        )
    return {"positions.offset": pad + 1, "max_positions": rows - pad - 1}


def _write_positions(config: ModelConfig) -> Raw:
    return {_POSITIONS: config.positions.offset + config.max_positions}


_KEYS = (
    size("hidden_size", "hidden"),
    size("num_hidden_layers", "layers.count"),
    size("intermediate_size", "mlp.ffn"),
    Keys((_POSITIONS,), _read_positions, _write_positions),
    multi_head("num_attention_heads", "hidden_size"),
    number("layer_norm_eps", "norm.epsilon", 1e-12),
    choice("hidden_act", "mlp.activation", ACTIVATIONS, "gelu"),
    size("type_vocab_size", "token_types", 2),
    *model_keys(tied=True, tokens=(0, 2, 1)),
)
_FIXED = {
    **LEARNED_POSITIONS,
    **ALL_BIASES,
    "norm.place": "after_sum",
    "head.activation": "gelu",
    "tie_embeddings": True,
}


def with_stored_pooler(config: ModelConfig, names: Collection[str]) -> ModelConfig:
    """Set by the tensors whether the files hold a pooler."""
    return changed(config, {"head.pooler": "roberta.pooler.dense.weight" in names})


FAMILY = Family(
    name="roberta",
    architectures=("RobertaForMaskedLM", "XLMRobertaForMaskedLM", "CamembertForMaskedLM"),
    model_type="roberta",
    other_types=("xlm-roberta", "camembert"),
    rows=ROWS,
    keys=without_keys(_KEYS, _TIED),
    fixed=_FIXED,
    only={**ONLY, _TIED: True},
    ignored=(r"roberta\.embeddings\.position_ids",),
    prefix="roberta.",
    complete=with_stored_pooler,
    recognized=None,
    proven="names",
)
