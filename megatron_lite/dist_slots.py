"""Optimizer state of `torch_dist` checkpoints as canonical tensors: model-shaped, so it is assembled just like the weights.

optimizer.state.exp_avg.<key of the weight>
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from formats import torch_dist
from formats.tensor import LazyTensor
from megaconv.assembled import Placed, assemble
from megaconv.config import ModelConfig
from megaconv.dist_keys import unstack
from megaconv.dist_source import find_dist
from megaconv.families import family
from megaconv.ir import Key
from megaconv.layout import Layout
from megaconv.table import canonical_shapes, native_tensors

SPELLINGS = {
    "master": ("param", "fp32_param"), "exp_avg": ("exp_avg",), "exp_avg_sq": ("exp_avg_sq",), "momentum_buffer": ("momentum_buffer",),
}  # fmt: skip


def dist_slots(path: Path, config: ModelConfig, padded_vocab: int) -> dict[Key, LazyTensor]:
    """Empty where there are none, or not in the model's shape. Raises CheckpointError."""
    found = find_dist(path)
    if found is None or found[1] != "torch_dist":
        return {}
    tensors = torch_dist.open_directory(found[0]).tensors()
    slots: dict[Key, LazyTensor] = {}
    shapes = canonical_shapes(family(config.family).rows, config)
    for slot, words in SPELLINGS.items():
        prefixes = tuple(f"optimizer.state.{word}." for word in words)
        named = {
            name.removeprefix(prefix): t
            for name, t in tensors.items()
            for prefix in prefixes
            if name.startswith(prefix)
        }
        if named:
            placed = _place(dict(unstack(named)), config, padded_vocab, str(found[0]))
            slots |= {Key(key.name, slot): tensor for key, tensor in assemble(shapes, placed, strict=False).items()}
    return slots


def _place(tensors: Mapping[str, LazyTensor], config: ModelConfig, padded_vocab: int, where: str) -> Iterator[Placed]:
    layout = Layout(stage_layers=(config.layers,))
    (chunk,) = layout.chunks()
    for native in native_tensors(family(config.family).rows, config, "core", layout, 0, chunk, padded_vocab):
        if not native.tied_copy and native.name in tensors:
            yield Placed(native, tensors[native.name], where)
