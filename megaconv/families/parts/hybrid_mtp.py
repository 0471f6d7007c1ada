"""The MTP layer of hybrids whose layers are a mixer or an MLP each (Nemotron 3 Super and Ultra): attention, then experts.

    hf      mtp.layers.0.{enorm, hnorm, eh_proj, norm, mixer.q_proj ...}     mtp.layers.1.{norm, mixer.experts ..., final_layernorm}
    core    mtp.layers.0.{enorm, hnorm, eh_proj, final_layernorm}            mtp.layers.0.mtp_model_layer.layers.{0|1} ...

Both parts of such a layer (the pattern `*E`) are like those of the model. Hugging Face's files number the parts, Megatron's
files the whole layers. Megatron core has these layers from 0.17 on, and Hugging Face's class ignores them.

Source: nemotron_h_bridge.py of Megatron-Bridge; multi_token_prediction.py and hybrid_model.py of megatron-core 0.19.2.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

from megaconv.errors import NotExpressible
from megaconv.families.parts.keys import Fields, Keys, Raw
from megaconv.families.parts.mamba import layer_symbols
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.model.predicting import HYBRID_MTP
from megaconv.model.table import Copied, Row, Separate

_COUNT = "num_nextn_predict_layers"
_PATTERN, _WORDS = "mtp_hybrid_override_pattern", "mtp_layers_block_type"
_PARTS = {"attention": 0, "moe": 1}
"""Feature of a layer of the model -> number of the part of an MTP layer that is like it."""
_HF = "mtp.layers.{}."
_CORE = "mtp.layers.{l}."
_OF_LAYER = "decoder.layers.{l}."

_JOINT = (
    Row("mtp.{l}.{embed|hidden}_norm.weight", ("hidden", "hidden"), stage="mtp",
        hf="mtp.layers.0.{enorm|hnorm}.weight",
        core=_CORE + "{enorm|hnorm}.weight"),
    Row("mtp.{l}.join.weight", ("hidden 2*hidden",), tp=0, stage="mtp",
        hf="mtp.layers.0.eh_proj.weight",
        core=_CORE + "eh_proj.weight"),
)  # fmt: skip
_END = (
    Row("mtp.{l}.final_norm.weight", ("hidden",), stage="mtp",
        hf="mtp.layers.1.final_layernorm.weight",
        core=_CORE + "final_layernorm.weight"),
)  # fmt: skip
IN_CORE = Copied("mtp", {"core": ("embedding.word_embeddings.weight",)})
"""The copy of the embedding with Megatron's MTP layers."""


def hybrid_mtp_rows(rows: tuple[Row, ...], prefix: str) -> tuple[Row, ...]:
    """The rows of the MTP layer of a model with these rows. prefix: of a layer in Hugging Face's names."""
    inner = []
    for row in rows:
        features = (row.when or "").split()
        parts = [_PARTS[feature] for feature in features if feature in _PARTS]
        if row.stage == "layer" and parts:
            inner.append(_of_part(row, parts[0], prefix))
    return (*_JOINT, *inner, *_END)


def _of_part(row: Row, part: int, prefix: str) -> Row:
    """The row of a layer as that of a part of the MTP layer, which has this part whatever the last layer is."""
    # No program writes the experts of these layers in one tensor.
    kept = {key: spelled for key, spelled in row.names.items() if key != "hf_stacked"}
    names = {
        key: tuple(_moved(one, part, prefix) for one in spelled) for key, spelled in kept.items()
    }
    others = [feature for feature in (row.when or "").split() if feature not in _PARTS]
    canonical = row.canonical.replace("layers.{l}.", "mtp.{l}.", 1)
    return replace(
        row, canonical=canonical, stage="mtp", when=" ".join(others) or None, names=names
    )


def _moved(spelling: Separate, part: int, prefix: str) -> Separate:
    name = spelling.name.replace(prefix, _HF.format(part), 1)
    return replace(
        spelling, name=name.replace(_OF_LAYER, f"{_CORE}mtp_model_layer.layers.{part}.", 1)
    )


def _pattern(raw: Raw) -> str:
    """The symbols of the parts of an MTP layer. transformers takes the words unless these are its own default."""
    words = raw.get(_WORDS)
    symbols = HYBRID_MTP if words is None else layer_symbols(words)
    return str(raw.get(_PATTERN) or symbols) if symbols == HYBRID_MTP else symbols


def _refusal(raw: Raw, *, has_experts: bool) -> str:
    """The reason why the MTP layers of a config.json are left out; empty if they are converted."""
    count, pattern = raw.get(_COUNT) or 0, _pattern(raw)
    if type(count) is not int or count != 1:
        return f"{_COUNT} is {count!r:.20}; megaconv converts one layer"
    if pattern != HYBRID_MTP:
        return f"their pattern is {pattern!r:.40}; megaconv converts {HYBRID_MTP!r}"
    return "" if has_experts else "they have experts, and no other layer has any"


def hybrid_mtp_keys(symbols_of_layers: Keys) -> Keys:
    """The keys of MTP layers. symbols_of_layers: the keys of the model's own layers."""

    def read(raw: Raw) -> Fields:
        mlps = symbols_of_layers.read(raw)["layers.mlp"]
        has_experts = "experts" in ((mlps,) if isinstance(mlps, str) else mlps)
        return {"mtp_layers": int(not _refusal(raw, has_experts=has_experts))}

    def write(config: ModelConfig) -> Raw:
        if config.mtp_layers > 1:
            raise NotExpressible(
                f"the model's mtp_layers is {config.mtp_layers}; this architecture has one MTP layer, or none"
            )
        return {_COUNT: 1, _PATTERN: HYBRID_MTP} if config.mtp_layers else {}

    return Keys((_COUNT, _PATTERN, _WORDS), read, write)


def without_stored_mtp(config: ModelConfig, names: Collection[str]) -> ModelConfig:
    """The configuration without an MTP layer if Hugging Face's names have none, as in what transformers saves."""
    stored = any(name.startswith("mtp.") for name in names)
    return config if stored else changed(config, {"mtp_layers": 0})


def unconverted_mtp(config: ModelConfig) -> Mapping[str, str]:
    """The tensors of MTP layers of other kinds or numbers, for the `unused` of a family."""
    if config.mtp_layers:
        return {}
    reason = _refusal(config.hf or {}, has_experts=config.experts.count > 0)
    return {r"(model\.)?mtp\..*": f"layers for multi-token prediction ({reason})"}
