"""Limits of the numbers that describe a model. Loaders check them before they count or allocate anything of that size.

Each limit is at least four times the value of every known model and run (tests/formats/test_ceilings.py). Each is also
small enough that a loop over all of it takes no time. The limits of a file itself are in formats/ceilings.py.
"""

import re
from collections.abc import Mapping
from typing import Any

from megaconv.errors import CorruptCheckpoint

LAYERS = 2_000
"""Layers of a model. The deepest published models have some 130 layers; researchers have tried a thousand."""
EXPERTS = 65_536
"""Experts of one layer. Published models have up to some 2,000 (a Switch Transformer)."""
ALL_EXPERTS = 250_000
"""Layers times experts. DeepSeek-V3 has 15,616, Qwen3.5-397B 30,720. A hybrid's layers without experts count as well:
up to 56,000."""
WIDTH = 1 << 24
"""Hidden sizes, widths of MLPs, and heads and their elements. Published models have up to some 60,000."""
VOCABULARY = 1 << 28
"""Tokens of a vocabulary. The largest vocabularies have a million tokens."""
POSITIONS = 1 << 40
"""Positions. Published models have up to ten million."""
COUNT = 10**9
"""GPUs, sequences and tokens of a planned run. A step has up to 10^5 sequences, a sequence up to 10^8 tokens."""
RANKS = 65_536
"""Ranks along one kind of parallelism. The largest runs have some ten thousand devices in all."""
ITERATION = 10**12
"""Iterations of a run. The longest runs have some ten million."""
OPERATIONS = 1e40
"""Floating-point operations of a whole run. The largest runs take some 10^26."""

_FIELDS = {
    "layers.count": LAYERS, "encoder.layers": LAYERS, "mtp_layers": LAYERS, "experts.count": EXPERTS,
    "retrieval.layers": LAYERS, "retrieval.chunk": POSITIONS, "retrieval.neighbors": WIDTH, "retrieval.chunks": WIDTH,
    "hidden": WIDTH, "attention.heads": WIDTH, "attention.kv_heads": WIDTH, "attention.head_dim": WIDTH, "mlp.ffn": WIDTH,
    "experts.ffn": WIDTH, "experts.vision_ffn": WIDTH, "experts.shared_ffn": WIDTH, "experts.latent": WIDTH,
    "latent.kv_rank": WIDTH, "latent.q_rank": WIDTH, "latent.rope_dim": WIDTH, "latent.v_dim": WIDTH,
    "linear.key_heads": WIDTH, "linear.value_heads": WIDTH, "linear.key_dim": WIDTH,
    "linear.value_dim": WIDTH, "linear.conv": WIDTH, "mamba.heads": WIDTH, "mamba.head_dim": WIDTH,
    "loops.runs": EXPERTS, "loops.before": LAYERS, "loops.after": LAYERS, "recurrence.high": EXPERTS, "recurrence.low": EXPERTS,
    "mamba1.width": WIDTH, "mamba1.state": WIDTH, "mamba1.conv": WIDTH, "mamba1.rank": WIDTH, "mamba1.heads": WIDTH,
    "attention.kept_keys": POSITIONS, "convolved.channels": WIDTH, "convolved.heads": WIDTH, "experts.router_width": WIDTH,
    "relative.width": WIDTH, "relative.extent": POSITIONS, "sublayer_conv": WIDTH, "experts.scored_shared": EXPERTS,
    "head.left_out": VOCABULARY, "encoder.ffn": WIDTH, "encoder.heads": WIDTH,
    "recurrent.head_dim": WIDTH, "recurrent.conv": WIDTH, "blocks.count": LAYERS, "blocks.adapter_rank": WIDTH,
    "mamba.groups": WIDTH, "mamba.state": WIDTH, "token_types": WIDTH, "vocab": VOCABULARY, "max_positions": POSITIONS,
    "positions.buckets": WIDTH, "head.classes": WIDTH, "positions.max_distance": POSITIONS, "layers.window": POSITIONS,
    "layer_inputs.width": WIDTH, "head.labels": WIDTH, "layer_inputs.vocab": VOCABULARY, "head.unpredicted": VOCABULARY,
    "block_indexer.heads": WIDTH, "block_indexer.head_dim": WIDTH, "block_indexer.topk": POSITIONS, "block_indexer.block": POSITIONS,
    "streams.count": WIDTH, "streams.laurel_rank": WIDTH, "hyper.streams": EXPERTS, "hyper.iterations": EXPERTS,
    "hyper.rank": WIDTH, "ngrams.size": EXPERTS, "ngrams.heads": EXPERTS, "ngrams.width": WIDTH, "ngrams.conv": WIDTH,
    "ngrams.vocab": VOCABULARY, "ngrams.multiple": VOCABULARY, "ngrams.parts": EXPERTS,
    "compressed.q_rank": WIDTH, "compressed.out_groups": WIDTH, "compressed.out_rank": WIDTH, "compressed.topk": POSITIONS,
    "compressed.short": POSITIONS, "compressed.long": POSITIONS, "compressed.index_heads": WIDTH, "compressed.index_dim": WIDTH,
}  # fmt: skip
"""Dotted name of a configuration's field -> its limit."""
SIZE_FIELDS = frozenset(_FIELDS)
"""The fields that are sizes or numbers of something."""

_COUNTS = re.compile(r"(?!.*(size|dim|theta)).*layer.*|first_k_dense_replace|decoder_sparse_step")
"""Keys by which config.json counts layers: num_hidden_layers, n_layer, max_window_layers. Other keys give a size that
each layer has, such as vocab_size_per_layer_input of Gemma 3n, which is 262,144."""


def require_possible(values: Mapping[str, Any]) -> None:
    """Raise CorruptCheckpoint for a field that is larger than in any model.

    values: fields of a configuration, by dotted name.
    """
    for name, ceiling in _FIELDS.items():
        value = values.get(name)
        if type(value) is int and value > ceiling:
            raise CorruptCheckpoint(
                f"the model's {name} should be at most {ceiling:,}, found {_short(value)}"
            )
    layers = values.get("layers.count")
    mtp_layers = values.get("mtp_layers")
    experts = values.get("experts.count")
    if type(layers) is int and type(mtp_layers) is int:
        layers += mtp_layers
    if type(layers) is int and type(experts) is int and layers * experts > ALL_EXPERTS:
        raise CorruptCheckpoint(
            f"the model can't have {layers:,} layers of {experts:,} experts; "
            f"there may be {ALL_EXPERTS:,} in all"
        )


def require_countable(config: Mapping[str, Any], where: str) -> None:
    """Raise CorruptCheckpoint if a config.json counts more layers than any model has.

    config: the content of a config.json, before anything is built from it. where: names the file in the message.
    """
    for key, value in config.items():
        if isinstance(value, Mapping):
            require_countable(value, where)
        elif _COUNTS.fullmatch(key):
            number = len(value) if isinstance(value, list) else value
            if type(number) in (int, float) and not -LAYERS <= number <= LAYERS:
                raise CorruptCheckpoint(
                    f"{where}: {key} should be at most {LAYERS:,}, found {_short(number)}"
                )


def _short(number: float) -> str:
    return f"{number:,}" if abs(number) < 1 << 63 else "a number of more than 64 bits"
