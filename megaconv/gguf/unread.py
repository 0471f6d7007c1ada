"""Keys of a GGUF file's metadata that config.py doesn't read: those that change nothing, and those that are refused.

llama.cpp uses one architecture for several models: an OLMo 3 is an `olmo2` with a window, and an Arcee an `arcee` with or
without yarn. A key that isn't read may therefore be the difference between two models. Source: llama.cpp's converters.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from megaconv.errors import UsageError

_HARMLESS = frozenset((
    # Tensors show these: their shapes contain the sizes, and their presence the kind of layer.
    *("vocab_size", "attention.key_length", "attention.value_length", "expert_feed_forward_length", "expert_shared_count"),
    *("expert_shared_feed_forward_length", "use_parallel_residual"),
    # Only yarn needs it.
    "rope.scaling.original_context_length",
    # llama.cpp has them for people, for embeddings, or for one architecture that reads them.
    *("tensor_data_layout", "rope.scaling.finetuned", "pooling_type", "expert_weights_norm"),
))  # fmt: skip
_NEUTRAL: Mapping[str, Any] = {
    "rope.scaling.type": "none",
    "attention.causal": True,
    "expert_weights_scale": 1.0,
    "expert_group_count": 1,
    "expert_group_used_count": 1,
    "expert_gating_func": 1,
}
"""Key -> the value with which a model computes as without the key, besides 0."""
_ROTATING = "rope.dimension_count"


def require_read(
    architecture: str, keys: Mapping[str, Any], read: Collection[str], head_dim: int, where: str
) -> None:
    """Raise UsageError for a key that is not read and may change what the model computes.

    keys: the file's metadata. read: the keys that were read, without the architecture's prefix. head_dim: elements of a
    head, of which all rotate unless the architecture reads how many do.
    """
    for key, value in unread(architecture, keys, read, head_dim):
        raise UsageError(
            f"{where}: says {key} = {value!r:.60}, which is not read here and may change what the model computes; "
            "give --config with the Hugging Face directory of the model",
            code="config-needed",
        )


def unread(
    architecture: str, keys: Mapping[str, Any], read: Collection[str], head_dim: int
) -> Iterator[tuple[str, Any]]:
    """Yield the keys that are not read and may change what the model computes, with their values."""
    prefix = f"{architecture}."
    for key, value in keys.items():
        name = key.removeprefix(prefix)
        if name == key or name in read or name in _HARMLESS or _is_neutral(name, value, head_dim):
            continue
        yield key, value


def _is_neutral(name: str, value: Any, head_dim: int) -> bool:
    if name in _NEUTRAL:
        return bool(value == _NEUTRAL[name])
    if name == _ROTATING:
        return bool(value == head_dim)
    return not (any(value) if isinstance(value, list) else value)
