"""Multi-token prediction: whole layers after the last, each of which predicts one token further ahead.

    hf      model.layers.61.{enorm, hnorm, eh_proj, input_layernorm, self_attn ..., shared_head.norm}    (after 61 layers)
    core    mtp.layers.0.{enorm, hnorm, eh_proj, transformer_layer..., final_layernorm}           (on the last stage)

Qwen3-Next and Qwen 3.5 have one, of full attention, under names of its own:

    hf      mtp.{pre_fc_norm_embedding, pre_fc_norm_hidden, fc, layers.0..., norm}

Rank files of later releases say mtp_model_layer for transformer_layer; distributed checkpoints keep the name.
Embedding and head are the model's own. Hugging Face's files hold both again with each such layer, Megatron's the embedding
again where the last stage isn't the first. Both join the embedding's half and the hidden state's in the same order.
Source: README_WEIGHTS.md of DeepSeek-V3; multi_token_prediction.py of megatron-core 0.16; mappings of Megatron-Bridge for Qwen.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from megaconv.errors import NotExpressible
from megaconv.families.parts.keys import CONFIG_NAME, Fields, Keys, Raw
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.model.naming import HF
from megaconv.model.table import Copied, Row, Spelling

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
    """A table, and what its models have of these layers: each is like the last ordinary one. In Megatron they come before the head.

    hf_copies: whether Hugging Face's files hold embedding and head again with each.
    """
    copies = _COPIES if hf_copies else {"embed.weight": Copied("mtp", {"core": _COPIES["embed.weight"].names["core"]})}
    copied = [
        replace(row, copies=(*row.copies, copies[row.canonical])) if row.canonical in copies else row for row in rows
    ]
    layer = (_as_mtp(row) for row in rows if row.stage == "layer")
    heads = [row for row in copied if row.canonical.startswith("head.")]
    return (*(row for row in copied if row not in heads), *_JOINT, *layer, *_END, *heads)


@dataclass(frozen=True)
class OwnLayer:
    """One such layer, of attention, under names of its own in Hugging Face's files. What it has else is as in the last ordinary one."""

    layer: str
    """In front of the names of what every layer has."""
    names: Mapping[str, Spelling]
    """Of what only these layers have, by canonical pattern."""
    key: str
    """In config.json: how many there are."""

    def rows(self, rows: tuple[Row, ...]) -> tuple[Row, ...]:
        """A table, and what its models have of this layer; in Megatron it comes before the head."""
        made = with_mtp(tuple(row for row in rows if row.when is None or "linear" not in row.when), hf_copies=False)
        predicting = [self._renamed(row) for row in made if row.stage == "mtp"]
        copied = {row.canonical: row for row in made if row.copies}
        heads = [row for row in rows if row.canonical.startswith("head.")]
        return (*(copied.get(row.canonical, row) for row in rows if row not in heads), *predicting, *heads)

    def _renamed(self, row: Row) -> Row:
        anywhere = " ".join(
            word for word in (row.when or "").split() if word != "attention"
        )  # whatever the last layer has
        spelled: Spelling = tuple(replace(one, name=one.name.replace(_HF, self.layer, 1)) for one in row.spelling(HF))
        stacked = {
            key: tuple(replace(one, name=one.name.replace(_HF, self.layer, 1)) for one in row.names[key])
            for key in (_STACKED,)
            if key in row.names
        }
        return replace(row, when=anywhere or None).renamed(hf=self.names.get(row.canonical, spelled), **stacked)

    def complete(self, config: ModelConfig, names: Collection[str]) -> ModelConfig:
        """There is one where Hugging Face's names have it, whatever config.json says."""
        return changed(config, {"mtp_layers": int(any(name.startswith(self.layer) for name in names))})

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
"""Qwen3-Next's and Qwen 3.5's."""


MTP_LEFT_OUT = {r"(model\.)?mtp.*": "layers for multi-token prediction"}
"""In files of architectures of which nobody has said what Megatron calls these layers' tensors."""


def without_missing(config: ModelConfig, names: Collection[str]) -> ModelConfig:
    """transformers keeps what config.json says of these layers, and doesn't save them: those that Hugging Face's names have."""
    first = f".layers.{config.layer_count}."
    most = len(names) + 1 if any(first in name for name in names) else 0
    return changed(config, {"mtp_layers": min(config.mtp_layers, most)})


def _as_mtp(row: Row) -> Row:
    names = {
        key: tuple(
            replace(one, name=one.name.replace("decoder.layers.{l}.", _CORE + "transformer_layer.", 1))
            for one in spelled
        )
        for key, spelled in row.names.items()
        if key not in ("hf_stacked", "hf_stacked_transposed")
    }
    if "hf_stacked" in row.names:
        names[_STACKED] = row.names["hf_stacked"]
    return replace(row, canonical=row.canonical.replace("layers.{l}.", "mtp.{l}.", 1), stage="mtp", names=names)
