"""How large the numbers may be by which a file describes a model, before anything of that size is counted out or made.

Each is far beyond every model and run that is known, and small enough that going through all of it takes no time. What a
file itself may have is in formats/ceilings.py.
"""

import re
from collections.abc import Mapping
from typing import Any

from megaconv.errors import CorruptCheckpoint

LAYERS = 2_000
"""The deepest models that are published whole have some 130; a thousand have been tried."""
EXPERTS = 65_536
"""Of one layer: published models have up to some 2,000 (a Switch Transformer)."""
ALL_EXPERTS = 100_000
"""Layers times experts: DeepSeek-V3 has 15,000, models of a trillion parameters have some 25,000."""
WIDTH = 1 << 24
"""Hidden sizes, widths of MLPs, heads and their elements: published models have up to some 60,000."""
VOCABULARY = 1 << 28
"""The largest vocabularies have a million tokens."""
POSITIONS = 1 << 40
"""Published models have up to ten million."""
RANKS = 65_536
"""Along one kind of parallelism: the largest runs have some ten thousand devices in all."""
ITERATION = 10**12
"""The longest runs have some ten million."""

_FIELDS = {
    "layers.count": LAYERS, "encoder.layers": LAYERS, "mtp_layers": LAYERS, "experts.count": EXPERTS,
    "hidden": WIDTH, "attention.heads": WIDTH, "attention.kv_heads": WIDTH, "attention.head_dim": WIDTH, "mlp.ffn": WIDTH,
    "experts.ffn": WIDTH, "experts.shared_ffn": WIDTH, "experts.latent": WIDTH,
    "latent.kv_rank": WIDTH, "latent.q_rank": WIDTH, "latent.rope_dim": WIDTH, "latent.v_dim": WIDTH,
    "linear.key_heads": WIDTH, "linear.value_heads": WIDTH, "linear.key_dim": WIDTH,
    "linear.value_dim": WIDTH, "linear.conv": WIDTH, "mamba.heads": WIDTH, "mamba.head_dim": WIDTH,
    "mamba.groups": WIDTH, "mamba.state": WIDTH, "token_types": WIDTH, "vocab": VOCABULARY, "max_positions": POSITIONS,
    "positions.buckets": WIDTH, "head.classes": WIDTH, "positions.max_distance": POSITIONS, "layers.window": POSITIONS,
}  # fmt: skip
"""By the dotted names of a configuration."""

_COUNTS = re.compile(r".*layer.*|first_k_dense_replace|decoder_sparse_step")
"""Keys by which config.json counts layers: num_hidden_layers, n_layer, max_window_layers."""


def require_possible(values: Mapping[str, Any]) -> None:
    """values: fields of a configuration by dotted name. Raises CorruptCheckpoint for one that no model has."""
    for name, ceiling in _FIELDS.items():
        value = values.get(name)
        if type(value) is int and value > ceiling:
            raise CorruptCheckpoint(f"the model's {name} should be at most {ceiling:,}, found {_short(value)}")
    layers, predicting, experts = (values.get(name) for name in ("layers.count", "mtp_layers", "experts.count"))
    layers = layers + predicting if type(layers) is int and type(predicting) is int else layers
    if type(layers) is int and type(experts) is int and layers * experts > ALL_EXPERTS:
        what = f"{layers:,} layers of {experts:,} experts"
        raise CorruptCheckpoint(f"the model can't have {what}; there may be {ALL_EXPERTS:,} in all")


def require_countable(config: Mapping[str, Any], where: str) -> None:
    """config: a config.json, before anything is made of it. Raises CorruptCheckpoint, naming where and the key, for more layers than
    any model has."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            require_countable(value, where)
        elif _COUNTS.fullmatch(key):
            number = len(value) if isinstance(value, list) else value
            if type(number) in (int, float) and not -LAYERS <= number <= LAYERS:
                raise CorruptCheckpoint(f"{where}: {key} should be at most {LAYERS:,}, found {_short(number)}")


def _short(number: float) -> str:
    return f"{number:,}" if abs(number) < 1 << 63 else "a number of more than 64 bits"
