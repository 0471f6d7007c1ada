"""The configuration of a model: everything that any target format has to write, and what follows from it."""

from dataclasses import dataclass, field
from functools import cached_property

from megaconv.model.described import DescribedModel
from megaconv.model.features import OF_LAYER, OF_MODEL, parsed
from megaconv.model.predicting import kind_of_layer
from megaconv.model.sizes import SIZES
from megaconv.model.soundness import require_sound


@dataclass(frozen=True)
class ModelConfig(DescribedModel):
    """A described model whose values belong together."""

    _features: dict[int, frozenset[str]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )
    """The features of each layer that was asked about, with those of the model."""

    def __post_init__(self) -> None:
        """Raise CorruptCheckpoint for values that no model has."""
        require_sound(self)

    def layers_with(self, features: str) -> tuple[int, ...]:
        """Numbers of the layers that have all of these features."""
        return tuple(layer for layer in range(self.layer_count) if self.has(features, layer))

    def has(self, features: str, layer: int = 0) -> bool:
        """True if a layer has all of these features, such as `moe !shared_ffn`.

        features: names of OF_MODEL and OF_LAYER, separated by spaces. The prefix `!` means that the layer must not have the feature.
        layer: numbers after the last layer stand for the layers inside MTP layers. Raises KeyError for an unknown feature.
        """
        found = self._features.get(layer)
        if found is None:
            found = self._features[layer] = self._features_of_model | self._features_of(layer)
        wanted, unwanted = parsed(features)
        return wanted <= found and unwanted.isdisjoint(found)

    @cached_property
    def _features_of_model(self) -> frozenset[str]:
        return frozenset(name for name, holds in OF_MODEL.items() if holds(self))

    def _features_of(self, layer: int) -> frozenset[str]:
        kind = kind_of_layer(self, layer)
        return frozenset(name for name, holds in OF_LAYER.items() if holds(self, kind, layer))

    def sizes(self) -> dict[str, int]:
        """The sizes that shapes are written in, by name. Layers may have their own of some (own_sizes)."""
        rope_dim = self.latent.rope_dim
        derived = {
            "nope_dim": self.attention.head_dim - rope_dim,
            "kv_and_rope": self.latent.kv_rank + rope_dim,
            "rope_pairs": rope_dim // 2,
            "expert_hidden": self.experts.latent or self.hidden,
            "routes": self.experts.count
            + self.experts.zero
            + self.experts.optional
            + self.experts.scored_shared,
            "attn_v_dim": self.attention.value_dim,
            "position_rows": self.max_positions + self.positions.offset,
            "half_values": self.attention.kv_heads * self.attention.head_dim // 2,
            "qk_channels": (self.attention.heads + self.attention.kv_heads)
            * self.attention.head_dim,
            "encoder_ffn": self.encoder.ffn or self.mlp.ffn,
            "mamba1_head_dim": self.mamba1.width // (self.mamba1.heads or 1),
            "mamba1_inputs": self.mamba1.rank + 2 * self.mamba1.state,
            "conv_channels": self.hidden,
            "stored_decays": self.linear.stored_decays or self.linear.value_heads,
            "out_group_width": self.attention.heads
            * self.attention.head_dim
            // (self.compressed.out_groups or 1),
            "hyper_weights": (2 + self.hyper.mixes * self.hyper.streams) * self.hyper.streams,
            "predicted": self.predicted,
            **self._ngram_sizes(),
        }
        tower = {} if self.whole is None else self.whole.sizes
        return {name: size.of(self) for name, size in SIZES.items()} | derived | dict(tower)

    def _ngram_sizes(self) -> dict[str, int]:
        """The sizes of embeddings of n-grams. The rows of a table are those of its layer."""
        ngrams = self.ngrams
        hashes = max(0, ngrams.size - 1) * ngrams.heads
        stored = ngrams.stored_parts
        return {
            "ngram_rows": 0,
            "ngram_hashes": hashes,
            "ngram_row_width": ngrams.width // (hashes or 1),
            "ngram_parts": ngrams.parts if stored is None else stored,
        }
