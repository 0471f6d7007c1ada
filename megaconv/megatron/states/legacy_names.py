"""Names in Megatron's models from before core: nested dictionaries become dotted names, and old spellings new ones.

    {"language_model": {"embedding": {"word_embeddings": {"weight": ...}},
                        "encoder": {"layers.0.input_norm.weight": ..., "final_norm.weight": ...},
                        "decoder": {"layers.0.input_norm.weight": ...},                (T5)
                        "pooler": {"dense.weight": ...},                               (BERT)
                        "output_layer": {"weight": ..., "_extra_state": None}},        (untied models)
     "lm_head": {"bias": ..., "dense.weight": ...}, "binary_head": {"weight": ...},    (BERT; T5 has the bias alone)
     "word_embeddings_for_head": {"weight": ...}}                          (tied ones, on the last of several stages)
    {"query_model": {"language_model": ..., "projection_enc": {"weight": ...}}, "context_model": ...}    (biencoders)

Releases before 2.5 have `transformer` for `encoder` and `attention` for `self_attention`. Releases before core 0.4 have
`layernorm` for `norm`. The oldest have flat names where later ones nest. Layers of Transformer Engine have their own
names for the same rows. Source: megatron/legacy/model of Megatron-LM.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any

from megaconv.megatron.states.names import EXTRA_STATE
from megaconv.megatron.states.order import Exceptions, ModuleOrder
from megaconv.model.naming import LEGACY
from megaconv.model.table import Row

MODEL = "language_model"
_BLOCK = "encoder"
_DEEPEST = 5
"""The largest depth of nested dictionaries."""

_EXCEPTIONS = Exceptions(last={MODEL: ("output_layer",)})
"""A head is created after BERT's pooler."""
_FLAT = (_BLOCK, "decoder", "pooler", "lm_head")
"""Dictionaries without further dictionaries in them."""
_TOWERS = ("query_model", "context_model", "shared_model", "question_model")
_TOWER = r"(?:(?:query|context|shared)_model\.)?"
"""A regular expression: the prefix of a tower's names in a biencoder, or nothing."""
_LINEAR = (
    "query_key_value",
    "query",
    "key_value",
    "dense",
    "dense_h_to_4h",
    "dense_4h_to_h",
    "output_layer",
)


_TRANSFORMER_ENGINE = {
    r"\.self_attention\.layernorm_qkv\.layer_norm_(weight|bias)$": r".input_norm.\1",
    r"\.self_attention\.layernorm_qkv\.(weight|bias)$": r".self_attention.query_key_value.\1",
    r"\.self_attention\.proj\.(weight|bias)$": r".self_attention.dense.\1",
    r"\.layernorm_mlp\.layer_norm_(weight|bias)$": r".post_attention_norm.\1",
    r"\.layernorm_mlp\.fc1_(weight|bias)$": r".mlp.dense_h_to_4h.\1",
    r"\.layernorm_mlp\.fc2_(weight|bias)$": r".mlp.dense_4h_to_h.\1",
}
"""Names in Transformer Engine's legacy layers -> names in Megatron's own layers.

Such layers come from --transformer-impl transformer_engine.
"""


def flatten(model: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(present name, value) of everything in a nested model."""
    for path, value in _walk(model, 1):
        yield present(path), value


def _walk(level: Mapping[str, Any], depth: int) -> Iterator[tuple[str, Any]]:
    for key, value in level.items():
        if isinstance(value, dict) and depth < _DEEPEST:
            yield from ((f"{key}.{path}", inner) for path, inner in _walk(value, depth + 1))
        else:
            yield str(key), value


def present(name: str) -> str:
    """An old name in the spelling of the last releases; other names unchanged."""
    name = _of_biencoder(name)
    name = re.sub(
        rf"^({_TOWER}{MODEL})\.(word|position|tokentype)_embeddings\.",
        r"\1.embedding.\2_embeddings.",
        name,
    )
    name = re.sub(rf"^({_TOWER}{MODEL})\.transformer\.", rf"\1.{_BLOCK}.", name)
    name = name.replace(".attention.", ".self_attention.").replace(
        "lm_head.layernorm.", "lm_head.norm."
    )
    for pattern, words in _TRANSFORMER_ENGINE.items():
        name = re.sub(pattern, words, name)
    return re.sub(
        r"\b(input|post_attention|post_inter_attention|final)_layernorm\b", r"\1_norm", name
    )


def _of_biencoder(name: str) -> str:
    """A name of ICTBertModel (Megatron-LM 2.0) as BiEncoderModel spells it; other names unchanged."""
    name = re.sub(r"^question_model\.", "query_model.", name)
    return re.sub(rf"^({_TOWER})ict_head\.", r"\1projection_enc.", name)


def holds_model(model: Mapping[str, Any]) -> bool:
    """True if the nested dictionaries are those of a model from before core, or of a biencoder of such models."""
    towers = (model.get(tower) for tower in _TOWERS)
    return MODEL in model or any(isinstance(tower, dict) and MODEL in tower for tower in towers)


def nest_with_poolers(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The nested dictionaries of a biencoder with poolers, ICTBertModel, in its own names."""
    renamed = {}
    for name, value in flat.items():
        name = re.sub(r"^query_model\.", "question_model.", name)
        renamed[name.replace(".projection_enc.", ".ict_head.")] = value
    return nest(renamed)


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The nested dictionaries that Megatron writes.

    There is a level for each word, but none inside a block of layers or a head.
    """
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        words = name.split(".")
        depth = len(words) - 1
        for place, word in enumerate(words, 1):
            if word in _FLAT:
                depth = place
                break
        level = nested
        for word in words[:depth]:
            level = level.setdefault(word, {})
        level[".".join(words[depth:])] = value
    return nested


@cache
def legacy_order(rows: tuple[Row, ...]) -> ModuleOrder:
    """Sorts names in the order of a model's own state_dict."""
    return ModuleOrder(rows, LEGACY, _EXCEPTIONS)


def legacy_extra_states(names: Collection[str]) -> dict[str, bool]:
    """The `_extra_state` entries of a model with these parameters. None of them is a tensor."""
    modules = dict.fromkeys(
        name.rpartition(".")[0] for name in names if ".layers." in name or ".output_layer." in name
    )
    return {module + EXTRA_STATE: False for module in modules if module.endswith(_LINEAR)}
