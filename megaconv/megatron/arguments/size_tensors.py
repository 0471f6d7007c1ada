"""The names of the tensors that show a Megatron model's sizes."""

from collections.abc import Collection
from dataclasses import dataclass, replace

from megaconv.megatron.states.ranks import Ranks


@dataclass(frozen=True)
class SizeTensors:
    """Names of the tensors whose shapes give the model's sizes."""

    embedding: str
    positions: str
    encoder: str
    decoder: str
    """The prefix of the decoder. `layers` and `final_norm` are the names in the last stack of the model."""
    layers: str
    """The prefix before a layer's number."""
    final_norm: str
    head: str
    tied_copy: str
    """The name of a tied head, if another stage holds the embedding."""
    # Names in a layer, without `.weight` and `.bias`:
    qkv: str
    o: str
    fc1: str
    fc2: str
    token_types: str
    head_bias: str
    """The bias of a T5's head."""
    linear: str = "self_attention.in_proj"
    """The input projection of a gated delta net."""
    kimi_delta: str = "self_attention.linear_qkvb"
    """The input projection of Kimi delta attention. Only the trainer writes it."""
    mamba: str = "mixer."
    """The prefix of a Mamba 2's tensors."""
    side_by_side: str = "side_by_side."
    """The prefix of attention and of Mamba 2 in a layer with both. Only the trainer writes them."""
    convolution: str = "short_conv."
    """The prefix of a short convolution's tensors. Only the trainer writes them."""
    transform: str = "lm_head.dense.weight"
    """The transform before BERT's head."""
    pooler: str = "pooler.dense.weight"
    tower: str = ""
    """The prefix of a biencoder's first tower, which all other names have too; empty for other models."""


CORE_SIZE_TENSORS = SizeTensors(
    "embedding.word_embeddings.weight",
    "embedding.position_embeddings.weight",
    "encoder.",
    "decoder.",
    "decoder.layers.",
    "decoder.final_layernorm",
    "output_layer.weight",
    "output_layer.weight",
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
    "embedding.tokentype_embeddings.weight",
    "lm_head.output_layer.bias",
)


LEGACY_SIZE_TENSORS = SizeTensors(
    "language_model.embedding.word_embeddings.weight",
    "language_model.embedding.position_embeddings.weight",
    "language_model.encoder.",
    "language_model.decoder.",
    "language_model.encoder.layers.",
    "language_model.encoder.final_norm",
    "language_model.output_layer.weight",
    "word_embeddings_for_head.weight",
    "self_attention.query_key_value",
    "self_attention.dense",
    "mlp.dense_h_to_4h",
    "mlp.dense_4h_to_h",
    "language_model.embedding.tokentype_embeddings.weight",
    "lm_head.bias",
    pooler="language_model.pooler.dense.weight",
)
_TOWERS = ("query_model.", "shared_model.")
"""The first tower of a biencoder. A second tower has the same sizes."""
_IN_TOWER = (
    "embedding", "positions", "encoder", "decoder", "layers", "final_norm", "token_types", "pooler",
)  # fmt: skip
"""The names that have a tower's prefix in a biencoder."""


def with_stacks(names: SizeTensors, ranks: Ranks) -> SizeTensors:
    """The names for the last stack of the model.

    This is the decoder, or the encoder if there is no decoder, as in legacy models.
    """
    found = [name for chunks in ranks.weights.values() for chunk in chunks for name in chunk]
    names = _in_tower(names, found)
    listed = names.decoder if names.layers.startswith(names.decoder) else names.encoder
    there = (
        stack
        for stack in (names.decoder, names.encoder)
        if any(name.startswith(stack) for name in found)
    )
    last = next(there, listed)
    return replace(
        names,
        layers=last + names.layers.removeprefix(listed),
        final_norm=last + names.final_norm.removeprefix(listed),
    )


def _in_tower(names: SizeTensors, found: Collection[str]) -> SizeTensors:
    """The names in a biencoder's first tower; unchanged for other models. found: all names of the checkpoint."""
    for tower in _TOWERS:
        if any(name.startswith(tower) for name in found):
            prefixed = {each: tower + getattr(names, each) for each in _IN_TOWER}
            return replace(names, tower=tower, **prefixed)
    return names
