"""Retro and InstructRetro: a GPT, some of whose layers attend to the retrieved neighbors of each chunk of a text.

    layers 6, 9, 12 …                      (9, 12, … of more than 15 layers) have cross attention before the MLP
    decoder.layers.5.cross_attention.encoder   reads the neighbors; its first layer attends to the decoder's own chunk

The tensors outside cross attention are those of a GPT, under the same names. transformers has no class for this model.
Source: megatron/core/models/retro, core 0.15.3, which was the last release with it.
"""

from collections.abc import Iterator
from dataclasses import replace

from megaconv.families import Family
from megaconv.families.parts.decoder_rows import ATTENTION, EMBEDDING, HEAD, MLP
from megaconv.families.parts.row_changes import (
    in_core,
    with_optional_gate,
    with_optional_norm_biases,
)
from megaconv.model.table import Fused, Row, Separate

_HEADS = "heads*head_dim"
_LAYER = "decoder.layers.{l}."
_CROSS = "decoder.layers.{l}.cross_attention.attn."

_POSITIONS = Row(
    "positions.weight", ("max_positions hidden",), stage="first", when="learned",
    core="embedding.position_embeddings.weight",
)  # fmt: skip

_CROSS_ATTENTION = (
    Row("layers.{l}.cross_norm.weight", ("hidden",), when="retrieves",
        core=_LAYER + "pre_cross_attn_layernorm.weight"),
    Row("layers.{l}.cross.q.weight", (f"{_HEADS} hidden",), tp=0, when="retrieves",
        core=_CROSS + "linear_q.weight"),
    Row("layers.{l}.cross.q.bias", (_HEADS,), tp=0, when="retrieves qkv_bias",
        core=_CROSS + "linear_q.bias"),
    Row("layers.{l}.cross.{k|v}.weight", (f"{_HEADS} hidden",) * 2, tp=0, when="retrieves",
        core=Fused(_CROSS + "linear_kv.weight", groups="heads")),
    Row("layers.{l}.cross.{k|v}.bias", (_HEADS,) * 2, tp=0, when="retrieves qkv_bias",
        core=Fused(_CROSS + "linear_kv.bias", groups="heads")),
    Row("layers.{l}.cross.o.weight", (f"hidden {_HEADS}",), tp=1, when="retrieves",
        core=_CROSS + "linear_proj.weight"),
    Row("layers.{l}.cross.o.bias", ("hidden",), when="retrieves o_bias",
        core=_CROSS + "linear_proj.bias"),
)  # fmt: skip
"""Cross attention has as many key/value heads as heads, in every model."""


def _of_encoder(row: Row, first: int) -> Iterator[Row]:
    """The rows of the encoder's layers for a row of the decoder's. first: the layer that holds the encoder."""
    when = f"retrieval_from_{first + 1}"
    if row.canonical.startswith("layers.{l}.mlp_norm."):
        # The first layer normalizes behind a dictionary of its own, which TE doesn't fuse either.
        kind = row.canonical.rpartition(".")[2]
        own = {"core": (Separate(f"{_LAYER}pre_mlp_layernorm.norm.{kind}"),)}
        yield _moved(replace(row, names=own), first, f"{when} first_layer")
        yield _moved(row, first, f"{when} later_layer")
    elif row.when is not None and "retrieves" in row.when:
        yield _moved(row, first, f"{when} first_layer")
    else:
        yield _moved(row, first, when)


def _moved(row: Row, first: int, when: str) -> Row:
    """The row of the encoder with the condition `when` in place of the decoder's."""
    rest = [word for word in (row.when or "").split() if word != "retrieves"]
    prefix = f"decoder.layers.{first}.cross_attention.encoder.layers.{{l}}."
    names = {
        key: tuple(replace(one, name=one.name.replace(_LAYER, prefix)) for one in spelled)
        for key, spelled in row.names.items()
    }
    return replace(
        row,
        canonical=f"retriever.{row.canonical}",
        names=names,
        stage="retriever",
        when=" ".join((when, *rest)),
    )


def _in_core_alone(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    return tuple(row.without("hf") for row in in_core(rows))


_BEFORE_MLP = _in_core_alone(with_optional_norm_biases((*ATTENTION, *_CROSS_ATTENTION)))
_MLP = _in_core_alone(with_optional_gate(with_optional_norm_biases(MLP)))
_DECODER = (*_BEFORE_MLP, *_MLP)
_ENCODER = tuple(made for first in (5, 8) for row in _DECODER for made in _of_encoder(row, first))
_FINAL_NORM = with_optional_norm_biases((replace(HEAD[0], when="final_norm"),))

ROWS = (
    *_in_core_alone((EMBEDDING,)),
    _POSITIONS,
    *_BEFORE_MLP,
    *_ENCODER,
    *_MLP,
    *_in_core_alone((*_FINAL_NORM, HEAD[1])),
)

FAMILY = Family(
    name="retro",
    architectures=(),
    model_type="retro",
    rows=ROWS,
    keys=(),
    recognized="retrieval",
    no_class="transformers has no class for a Retro; --drop-retrieval converts the GPT inside it",
)
