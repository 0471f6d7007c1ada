"""All values of a model, grouped by subject. `config.py` adds what follows from them.

Every value has a dotted name (`attention.heads`, `layers.window`). Loaders collect the values that they find under
these names, and families list the names that their config.json can represent. Error messages name the fields that a
target can't represent. `fields.py` translates between dotted names and objects.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from megaconv.model.beside import Whole
from megaconv.model.mixers import (
    BlockIndexer,
    CompressedAttention,
    ConvolvedAttention,
    Indexer,
    LatentAttention,
    LinearAttention,
    Mamba,
    Mamba1,
    Recurrent,
    RelativeAttention,
    SharedBlocks,
    ShortConvolution,
)
from megaconv.model.own_names import OwnNames
from megaconv.model.retrieving import Retrieval, Retriever, retrieving_layers
from megaconv.model.streams import (
    HyperConnections,
    LayerInputs,
    Loops,
    NGrams,
    Recurrence,
    Streams,
    UnitStates,
)
from megaconv.model.subjects import (
    MLP,
    Attention,
    Encoder,
    Experts,
    Factors,
    Head,
    LayerKind,
    Norm,
    Positions,
    Temperature,
)

OF_ONE_LAYER = ("heads", "kv_heads", "head_dim", "ffn")
"""The sizes that a layer may have of its own."""


@dataclass(frozen=True)
class DescribedModel:
    """One model. Its sizes are those of the whole model, before sharding and padding."""

    family: str
    layers: tuple[LayerKind, ...]
    """Layers of the decoder, or of the only stack, in order."""
    hidden: int
    vocab: int
    max_positions: int
    attention: Attention
    mlp: MLP
    norm: Norm = field(default_factory=Norm)
    positions: Positions = field(default_factory=Positions)
    temperature: Temperature = field(default_factory=Temperature)
    latent: LatentAttention = field(default_factory=LatentAttention)
    indexer: Indexer = field(default_factory=Indexer)
    block_indexer: BlockIndexer = field(default_factory=BlockIndexer)
    compressed: CompressedAttention = field(default_factory=CompressedAttention)
    convolved: ConvolvedAttention = field(default_factory=ConvolvedAttention)
    relative: RelativeAttention = field(default_factory=RelativeAttention)
    linear: LinearAttention = field(default_factory=LinearAttention)
    mamba: Mamba = field(default_factory=Mamba)
    mamba1: Mamba1 = field(default_factory=Mamba1)
    recurrent: Recurrent = field(default_factory=Recurrent)
    blocks: SharedBlocks = field(default_factory=SharedBlocks)
    convolution: ShortConvolution = field(default_factory=ShortConvolution)
    factors: Factors = field(default_factory=Factors)
    experts: Experts = field(default_factory=Experts)
    layer_inputs: LayerInputs = field(default_factory=LayerInputs)
    streams: Streams = field(default_factory=Streams)
    hyper: HyperConnections = field(default_factory=HyperConnections)
    ngrams: NGrams = field(default_factory=NGrams)
    loops: Loops = field(default_factory=Loops)
    unit_states: UnitStates = field(default_factory=UnitStates)
    recurrence: Recurrence = field(default_factory=Recurrence)
    encoder: Encoder = field(default_factory=Encoder)
    retrieval: Retrieval = field(default_factory=Retrieval)
    head: Head = field(default_factory=Head)
    tie_embeddings: bool = False
    embedding_scale: float | None = None
    """A factor on the embedding's output."""
    residual_scale: float | None = None
    """A factor on the output of each attention and each MLP, before it is added; None for 1."""
    weighted_residuals: bool = False
    """True if the values that a sublayer's output is added to have a stored factor for each element (Doge)."""
    sublayer_conv: int = 0
    """Width in positions, including the token's own, of convolutions over single channels of keys, of values, and of the
    outputs of attention and of MLPs or experts (Inkling). Each is added to its input. 0: there are none."""
    stored_scales: bool = False
    """True if a stored number scales the output of each dense MLP, and another one the weights of experts (Inkling)."""
    affine_residuals: bool = False
    """True if both sides of each residual sum, and the embedding, have a stored number for each element that is added to
    them, and then one that scales them (Zaya)."""
    residual_by_depth: bool = False
    """True if the n-th sum of the model, counted from 2, has weights by its number (Beam): the root of 1 / n for the
    sublayer's output, and the root of (n - 1) / n for the values that it is added to."""
    residual_temperature: float | None = None
    """Temperature of the gates of residuals (Muse Spark): the sigmoid of a stored number, divided by it, gives the weights
    of each element of a sublayer's input and output in their sum. None: both are added as they are."""
    residual_block: int = 0
    """Layers of a block of attention residuals (Kimi K3, arXiv 2607.24653): the input of each sublayer is a weighted sum
    of the outputs of all earlier blocks and of the own block's sum so far. 0: the plain sum of all earlier outputs."""
    layer_scale: bool = False
    """True if each layer has a stored number that scales its output."""
    parallel_residual: bool = False
    """True if attention and the MLP of a layer work on the same input, each after its own norm or both after one
    (norm.shared), and both are added to it."""
    retriever: Retriever = field(default_factory=Retriever)
    token_types: int = 0
    """Number of segment types that have an embedding."""
    mtp_layers: int = 0
    """Number of multi-token prediction (MTP) layers, which follow the last layer."""
    dtype: str = "bfloat16"
    """Dtype of most of the weights, read from the tensors."""
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    hf: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    """The model's own config.json, unchanged; None if it is not known."""
    whole: Whole | None = field(default=None, compare=False, repr=False)
    """The multimodal model that contains this model and is converted with it; None for a plain language model."""
    own_names: OwnNames | None = field(default=None, compare=False, repr=False)
    """The tensors of a model that no family describes. All sizes above then have no meaning."""

    @property
    def layer_count(self) -> int:
        return len(self.layers)

    @property
    def retrieving(self) -> range:
        """Numbers of the layers that attend to retrieved text; empty in models without retrieval."""
        return retrieving_layers(self.layer_count) if self.retrieval.layers else range(0)

    @property
    def predicted(self) -> int:
        """Tokens that the head has rows for."""
        return self.vocab - self.head.unpredicted

    def tokens_of(self, canonical: str) -> int:
        """Rows of a canonical tensor that has one for each token, such as the embedding."""
        return self.predicted if canonical.startswith("head.") else self.vocab

    @property
    def window(self) -> int | None:
        """Attention window of the layers that have one; None if no layer has one."""
        return next((kind.window for kind in self.layers if kind.window is not None), None)

    def own_sizes(self, layer: int) -> dict[str, int]:
        """The sizes that one layer has instead of the model's; empty in most models."""
        kind = self.layers[layer]
        own = {name: getattr(kind, name) for name in OF_ONE_LAYER}
        return {name: size for name, size in own.items() if size is not None}

    def layer_sizes(self, layer: int) -> dict[str, int]:
        """The sizes of one layer that differ from the model's in the shapes of its tensors."""
        rows = self.layers[layer].ngram_rows
        tables = {"ngram_rows": rows} if rows else {}
        window = self.layers[layer].window
        profiles = {"relative_extent": window} if self.relative.width and window else {}
        return {**self.own_sizes(layer), **tables, **profiles, **self.block_places.get(layer, {})}

    @cached_property
    def block_places(self) -> Mapping[int, Mapping[str, int]]:
        """Layer with a shared block -> the first layer that has this block, and the number of the use among all uses."""
        uses = [layer for layer, kind in enumerate(self.layers) if kind.block]
        return {
            layer: {"block_holder": uses[use % self.blocks.count], "block_use": use}
            for use, layer in enumerate(uses)
        }

    def holds_block(self, layer: int) -> bool:
        """True if a layer is the first that has its shared block."""
        return self.block_places.get(layer, {}).get("block_holder") == layer


def value_of(config: DescribedModel, name: str) -> Any:
    """The value of a dotted field. A field such as `layers.window` is one value if all layers agree, else a tuple with
    one for each."""
    subject, inner = _split(name)
    if subject == "layers":
        if inner == "count":
            return config.layer_count
        values = tuple(getattr(kind, inner) for kind in config.layers)
        return values[0] if len(set(values)) == 1 else values
    return getattr(getattr(config, subject), inner) if subject else getattr(config, inner)


@cache
def _split(name: str) -> tuple[str, str]:
    """(subject, field) of a dotted field. The subject is empty for a field of the model itself."""
    subject, _, inner = name.rpartition(".")
    return subject, inner
