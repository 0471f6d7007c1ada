"""Multi-token prediction (MTP): whole layers after the last, each of which predicts one token further ahead.

    hf      model.layers.61.{enorm, hnorm, eh_proj, input_layernorm, self_attn ..., shared_head.norm}    (after 61 layers)
    core    mtp.layers.0.{enorm, hnorm, eh_proj, transformer_layer..., final_layernorm}           (on the last stage)

Qwen3-Next and Qwen 3.5 have one MTP layer, with full attention, under its own names:

    hf      mtp.{pre_fc_norm_embedding, pre_fc_norm_hidden, fc, layers.0..., norm}

Rank files of later releases use mtp_model_layer instead of transformer_layer; distributed checkpoints keep the name.
MTP layers use the model's own embedding and head. Hugging Face's files hold copies of both with each MTP layer.
Megatron's files hold a copy of the embedding if the last stage isn't the first. Both join the halves of the embedding
and the hidden state in the same order.

Source: README_WEIGHTS.md of DeepSeek-V3; multi_token_prediction.py of megatron-core 0.16; mappings of Megatron-Bridge
for Qwen.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from megaconv.errors import NotExpressible
from megaconv.families.parts.keys import CONFIG_NAME, Fields, Keys, Raw
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.model.naming import HF
from megaconv.model.table import Copied, Row, Separate, Spelling

_HF = "model.layers.{l}."
_CORE = "mtp.layers.{l}."
_STACKED = "hf_mtp_stacked"

_JOINT = (
    Row("mtp.{l}.{embed|hidden}_norm.weight", ("hidden", "hidden"), stage="mtp",
        hf=_HF + "{enorm|hnorm}.weight",
        core=_CORE + "{enorm|hnorm}.weight"),
    Row("mtp.{l}.join.weight", ("hidden 2*hidden",), tp=0, stage="mtp",
        hf=_HF + "eh_proj.weight",
        core=_CORE + "eh_proj.weight"),
)  # fmt: skip
_END = (
    Row("mtp.{l}.final_norm.weight", ("hidden",), stage="mtp",
        hf=_HF + "shared_head.norm.weight",
        core=_CORE + "final_layernorm.weight"),
)  # fmt: skip
_COPIES = {
    "embed.weight": Copied(
        "mtp", {"hf": (_HF + "embed_tokens.weight",), "core": ("embedding.word_embeddings.weight",)}
    ),
    "head.weight": Copied("mtp", {"hf": (_HF + "shared_head.head.weight",)}),
}


def with_mtp(rows: tuple[Row, ...], *, hf_copies: bool = True) -> tuple[Row, ...]:
    """A table with the rows of MTP layers added. Each MTP layer is like the last ordinary layer. In Megatron, MTP
    layers come before the head.

    hf_copies: True if Hugging Face's files hold copies of embedding and head with each MTP layer.
    """
    copies = _COPIES
    if not hf_copies:
        in_core = {"core": _COPIES["embed.weight"].names["core"]}
        copies = {"embed.weight": Copied("mtp", in_core)}
    heads: list[Row] = []
    others: list[Row] = []
    for row in rows:
        if row.canonical in copies:
            copy = copies[row.canonical]
            row = replace(row, copies=(*row.copies, copy))
        is_head = row.canonical.startswith("head.")
        (heads if is_head else others).append(row)
    layer = (_as_mtp(row) for row in rows if row.stage == "layer")
    return (*others, *_JOINT, *layer, *_END, *heads)


@dataclass(frozen=True)
class OwnLayer:
    """One MTP layer with attention, under its own names in Hugging Face's files. All its other parts are like the
    last ordinary layer's."""

    layer: str
    """Prefix of the names of parts that every layer has."""
    names: Mapping[str, Spelling]
    """Canonical pattern -> name, for parts that only MTP layers have."""
    key: str
    """Key of config.json that counts MTP layers."""

    def rows(self, rows: tuple[Row, ...]) -> tuple[Row, ...]:
        """A table with the rows of this MTP layer added. In Megatron, it comes before the head."""
        of_any_layer = (row for row in rows if row.when is None or "linear" not in row.when)
        made = with_mtp(tuple(of_any_layer), hf_copies=False)
        predicting = [self._renamed(row) for row in made if row.stage == "mtp"]
        copied = {row.canonical: row for row in made if row.copies}
        heads = [row for row in rows if row.canonical.startswith("head.")]
        return (
            *(copied.get(row.canonical, row) for row in rows if row not in heads),
            *predicting,
            *heads,
        )

    def _renamed(self, row: Row) -> Row:
        # This layer has attention, whatever the last ordinary layer has.
        words = [word for word in (row.when or "").split() if word != "attention"]
        moved: Spelling = self._moved(row.spelling(HF))
        spelled = {"hf": self.names.get(row.canonical, moved)}
        if _STACKED in row.names:
            spelled[_STACKED] = self._moved(row.names[_STACKED])
        return replace(row, when=" ".join(words) or None).renamed(**spelled)

    def _moved(self, spellings: tuple[Separate, ...]) -> tuple[Separate, ...]:
        """The spellings with the prefix of this layer instead of an ordinary layer's."""
        return tuple(replace(one, name=one.name.replace(_HF, self.layer, 1)) for one in spellings)

    def complete(self, config: ModelConfig, names: Collection[str]) -> ModelConfig:
        """Set the number of MTP layers to 1 if Hugging Face's names contain one, whatever config.json says."""
        return changed(
            config, {"mtp_layers": int(any(name.startswith(self.layer) for name in names))}
        )

    @property
    def keys(self) -> Keys:
        return Keys((self.key,), self._read, lambda config: {self.key: config.mtp_layers})

    def _read(self, raw: Raw) -> Fields:
        value = raw.get(self.key) or 0
        if type(value) is not int or value not in (0, 1):
            raise NotExpressible(
                f"{CONFIG_NAME}: {self.key} is {value!r}; this architecture has one such layer, or none"
            )
        return {"mtp_layers": value}


OF_QWEN = OwnLayer(
    "mtp.layers.0.",
    {
        "mtp.{l}.{embed|hidden}_norm.weight": "mtp.pre_fc_norm_{embedding|hidden}.weight",
        "mtp.{l}.join.weight": "mtp.fc.weight",
        "mtp.{l}.final_norm.weight": "mtp.norm.weight",
    },
    "mtp_num_hidden_layers",
)
"""The MTP layer of Qwen3-Next and Qwen 3.5."""


MTP_LEFT_OUT = {r"(model\.)?mtp.*": "layers for multi-token prediction"}
"""MTP layers of architectures for which no source gives Megatron's names of these tensors."""


def mtp_apart(names: Collection[str]) -> Mapping[str, str]:
    """The tensors of layers for multi-token prediction under names that MTP_LEFT_OUT matches. Such a layer has a matrix
    `eh_proj`."""
    layers = tuple(name.partition("eh_proj")[0] for name in names if ".eh_proj." in name)
    return {name: f"mtp.{name}" for name in names if layers and name.startswith(layers)}


def layers_after_the_last(config: ModelConfig) -> Mapping[str, str]:
    """The tensors of layers after the last one, for the `unused` of a family. No published model has more than eight of them."""
    numbers = "|".join(str(config.layer_count + further) for further in range(8))
    return {rf"model\.layers\.(?:{numbers})\..*": "layers for multi-token prediction"}


def without_missing(config: ModelConfig, names: Collection[str]) -> ModelConfig:
    """Set the number of MTP layers to those in Hugging Face's names. transformers keeps the number in config.json, but
    doesn't save the layers."""
    first = f".layers.{config.layer_count}."
    most = len(names) + 1 if any(first in name for name in names) else 0
    return changed(config, {"mtp_layers": min(config.mtp_layers, most)})


def _as_mtp(row: Row) -> Row:
    names = {key: tuple(map(_with_mtp_name, spelled)) for key, spelled in row.names.items()}
    names.pop("hf_stacked", None)
    names.pop("hf_stacked_transposed", None)
    if "hf_stacked" in row.names:
        names[_STACKED] = row.names["hf_stacked"]
    canonical = row.canonical.replace("layers.{l}.", "mtp.{l}.", 1)
    return replace(row, canonical=canonical, stage="mtp", names=names)


def _with_mtp_name(spelling: Separate) -> Separate:
    """The spelling of a layer's tensor as that of an MTP layer's tensor. Only Megatron's names change."""
    name = spelling.name.replace("decoder.layers.{l}.", _CORE + "transformer_layer.", 1)
    return replace(spelling, name=name)
