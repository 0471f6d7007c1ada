"""Keys of Megatron's distributed checkpoints, and the names that the same tensors have on a single rank.

A key names a tensor of the whole model. Layers of one kind are stacked, and so are experts, the expert's axis second:

    decoder.layers.self_attention.linear_proj.weight           [layers, ...]
    decoder.layers.mlp.experts.experts.linear_fc1.weight       [layers, experts, ...]
    decoder.layers.3.mlp.linear_fc1.weight                     where layers differ
    decoder.layers.3.mlp.linear_fc1.weight_w, ..._v            gate and up separate (singleton_local_shards)
    decoder.layers.3.self_attention.in_proj.weight.query ...   what gated delta nets join is always separate
    decoder.layers.3.mixer.in_proj.weight.z ...                and what Mamba's mixers join

Local layers and Transformer Engine's give the same keys, those of the latter's names, but for the norm before experts.
Source: sharded_state_dict() in megatron/core/transformer, core 0.4 to 0.19.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from functools import reduce
from math import prod

from formats.chunked import ChunkedTensor, joined
from formats.errors import CorruptCheckpoint
from formats.tensor import Shape
from megaconv.megatron.states.whole_names import LANGUAGE_MODEL, apart
from megaconv.model.config import ModelConfig
from megaconv.model.natives import NativeTensor

EXTRA_STATE = "._extra_state"

_LAYERS = r"((?:decoder|encoder)\.layers\.|vision_model\.decoder\.(?:layers|deepstack_merger_list)\.)"
"""How names in a stack begin, of a language model or of a tower that Megatron has of its own layers (families/parts/towers.py)."""
_STACKED_LAYERS = re.compile(_LAYERS + r"(?!\d+\.)(.+)")
_STACKED_EXPERTS = re.compile(r"(.*\.experts\.)experts\.(?!\d+\.)(.+)")
_LAYER = re.compile(_LAYERS + r"(\d+)\.(.+)")
_EXPERT = re.compile(r"(.*\.experts\.)local_experts\.(\d+)\.(.+)")
_NOT_MODEL = re.compile(r"(chained_\d+\.)?optimizer\.|rng_state|rerun_state_machine_state")
_PREFIX = re.compile(r"((?:(?:module|model|language_model)\.)*)embedding\.word_embeddings\.weight")
_PIECES = {
    "self_attention.in_proj.weight": ("query", "key", "value", "z", "beta", "alpha"),
    "self_attention.conv1d.weight": ("query", "key", "value"),
    "mixer.in_proj.weight": ("z", "x", "B", "C", "dt"),
    "mixer.conv1d.weight": ("x", "B", "C"),
    "mixer.conv1d.bias": ("x", "B", "C"),
}
"""Ends of names of tensors with a key for each part -> how the keys end, in the order of the rows."""
_PIECE = re.compile(rf"(.*\.(?:{'|'.join(map(re.escape, _PIECES))}))\.\w+")
_MOST_STACKED = 1 << 16
"""Layers, or experts of a layer: more are no model but an attempt to fill the memory."""
_FC1_NORM, _MLP_NORM = "mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."


def model_tensors(tensors: Mapping[str, ChunkedTensor]) -> tuple[dict[str, ChunkedTensor], dict[str, ChunkedTensor]]:
    """(the weights alone, those beside the language model in a model that sees or hears), by the names that Megatron has.

    Frameworks around Megatron put a prefix (`module.`, `model.` ...) before them.
    """
    names = [name for name in tensors if not _NOT_MODEL.match(name)]
    prefix = next((found[1] for name in names if (found := _PREFIX.fullmatch(name))), "")
    outer = prefix.removesuffix(LANGUAGE_MODEL)
    return apart({name.removeprefix(outer): tensors[name] for name in names})


def has_optimizer(names: Collection[str]) -> bool:
    return any(re.match(r"(chained_\d+\.)?optimizer\.", name) for name in names)


def unstack(tensors: Mapping[str, ChunkedTensor]) -> dict[str, ChunkedTensor]:
    """What a single rank holds of model-shaped tensors (weights, or one kind of optimizer state), in Megatron's module names.

    Raises CorruptCheckpoint for halves of a tensor that don't fit each other.
    """
    single = dict(pair for name, tensor in tensors.items() for pair in _single(name, tensor))
    if any(_PIECE.fullmatch(name) for name in tensors):  # of few keys, rather than of all layers' names
        single = _joined(single)
    whole = {}
    for name, tensor in single.items():
        if name.endswith("_w") and f"{name[:-2]}_v" in single:
            whole[name[:-2]] = joined(tensor, single[f"{name[:-2]}_v"])
        elif not (name.endswith("_v") and f"{name[:-2]}_w" in single):
            whole[name] = tensor
    return {_norm_before_experts(name, whole): tensor for name, tensor in whole.items()}


def _joined(tensors: Mapping[str, ChunkedTensor]) -> dict[str, ChunkedTensor]:
    """With the tensors whole that have a key for each part; one of which a part is missing stays in parts."""
    whole: dict[str, ChunkedTensor] = {}
    for name, tensor in tensors.items():
        found = _PIECE.fullmatch(name)
        words = next((words for end, words in _PIECES.items() if found and found[1].endswith(end)), ())
        parts = [tensors.get(f"{found[1]}.{word}") for word in words] if found else []
        there = [part for part in parts if part is not None]
        if found and len(there) == len(words):
            whole[found[1]] = reduce(joined, there)
        else:
            whole[name] = tensor
    return whole


def pieces(native: NativeTensor) -> Iterator[NativeTensor]:
    """The tensors, each with a key of its own, that a native tensor is written as: mostly itself."""
    words = next((words for end, words in _PIECES.items() if native.name.endswith(end)), None)
    if words is None:
        yield native
        return
    for word, (part, (region,)) in zip(words, native.parts.items(), strict=True):
        shape = (region.box.rows // prod(native.shape[1:-1]), *native.shape[1:])
        yield native._replace(name=f"{native.name}.{word}", parts={part: (region._replace(row=0),)}, shape=shape)


def _single(name: str, tensor: ChunkedTensor) -> Iterator[tuple[str, ChunkedTensor]]:
    """Layers first, then experts."""
    if found := _STACKED_LAYERS.fullmatch(name):
        for layer, inner in enumerate(_unstack(name, tensor)):
            yield from _single(f"{found[1]}{layer}.{found[2]}", inner)
    elif found := _STACKED_EXPERTS.fullmatch(name):
        for expert, inner in enumerate(_unstack(name, tensor)):
            yield f"{found[1]}local_experts.{expert}.{found[2]}", inner
    else:
        yield re.sub(r"\.experts\.experts\.(?=\d)", ".experts.local_experts.", name), tensor


def _unstack(name: str, tensor: ChunkedTensor) -> list[ChunkedTensor]:
    if not tensor.shape or tensor.shape[0] > _MOST_STACKED:
        raise CorruptCheckpoint(f"{name} is {list(tensor.shape)}; its first axis should count layers, or experts")
    return tensor.unstack()


def _norm_before_experts(name: str, names: Collection[str]) -> str:
    """Local layers call it after a matrix that layers with experts don't have."""
    found = _LAYER.fullmatch(name) if _FC1_NORM in name else None
    if found and found[3].startswith(_FC1_NORM) and f"{found[1]}{found[2]}.mlp.router.weight" in names:
        return f"{found[1]}{found[2]}.{_MLP_NORM}{found[3].removeprefix(_FC1_NORM)}"
    return name


def stacks_layers(config: ModelConfig) -> bool:
    """Whether layers lie under one key: core gives each layer keys of its own where layers differ."""
    alike = not (config.experts.count and config.layers_with("dense"))
    return alike and not config.has("linear_layers") and not config.has("mamba_layers")


def stack(name: str, *, layers: bool, local: bool = False) -> tuple[str, Shape]:
    """(key, place in the key's first axes) of a tensor by its name on a single rank, Transformer Engine's.

    layers: whether layers are stacked. local: spell the norm before experts as local layers do.
    """
    place: Shape = ()
    if found := _LAYER.fullmatch(name):
        rest = found[3]
        if local and rest.startswith(_MLP_NORM):
            rest = _FC1_NORM + rest.removeprefix(_MLP_NORM)
        number = "" if layers else f"{found[2]}."
        name, place = f"{found[1]}{number}{rest}", (int(found[2]),) if layers else ()
    if found := _EXPERT.fullmatch(name):
        name, place = f"{found[1]}experts.{found[3]}", (*place, int(found[2]))
    return name, place
