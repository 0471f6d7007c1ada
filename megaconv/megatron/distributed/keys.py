"""Keys of Megatron's distributed checkpoints, and the names of the same tensors on a single rank.

A key names a tensor of the whole model. Layers of one kind are stacked. So are experts, whose axis comes second:

    decoder.layers.self_attention.linear_proj.weight           [layers, ...]
    decoder.layers.mlp.experts.experts.linear_fc1.weight       [layers, experts, ...]
    decoder.layers.3.mlp.linear_fc1.weight                     where layers differ
    decoder.layers.3.mlp.linear_fc1.weight_w, ..._v            gate and up separate (singleton_local_shards)
    decoder.layers.3.self_attention.in_proj.weight.query ...   the fused parts of gated delta nets are always separate
    decoder.layers.3.mixer.in_proj.weight.z ...                and so are the fused parts of Mamba's mixers

Local layers and Transformer Engine's layers give the same keys: the names of the latter, except for the norm before
experts.
Source: sharded_state_dict() in megatron/core/transformer, core 0.4 to 0.19.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from functools import reduce
from math import prod

from formats.chunked import ChunkedTensor, joined
from formats.errors import CorruptCheckpoint
from formats.tensor import Shape
from megaconv.megatron.states.whole_names import LANGUAGE_MODEL, split_multimodal
from megaconv.model.config import ModelConfig
from megaconv.model.natives import NativeTensor

EXTRA_STATE = "._extra_state"
ADAPTER = ".adapter."
"""A part of the names of an adapter's tensors (adapter_source.py)."""

_LAYERS = r"((?:(?:query|context|shared)_model\.)?(?:decoder|encoder)\.layers\.|vision_model\.decoder\.(?:layers|deepstack_merger_list)\.)"
"""The prefix of names in a stack.

The stack is a language model's, a tower's of a biencoder, or an encoder's of Megatron's own layers (families/parts/towers.py).
"""
_STACKED_LAYERS = re.compile(_LAYERS + r"(?!\d+\.)(.+)")
_STACKED_EXPERTS = re.compile(r"(.*\.experts\.)experts\.(?!\d+\.)(.+)")
_LAYER = re.compile(_LAYERS + r"(\d+)\.(.+)")
_EXPERT = re.compile(r"(.*\.experts\.)local_experts\.(\d+)\.(.+)")
_NOT_MODEL = re.compile(r"(chained_\d+\.)?optimizer\.|rng_state|rerun_state_machine_state")
_PREFIX = re.compile(r"((?:(?:module|model|language_model)\.)*)embedding\.word_embeddings\.weight")
_PIECES = {
    "self_attention.in_proj.weight": ("query", "key", "value", "z", "beta", "alpha"),
    "self_attention.conv1d.weight": ("query", "key", "value"),
    "short_conv.in_proj.weight": ("B", "C", "x"),
    "mixer.in_proj.weight": ("z", "x", "B", "C", "dt"),
    "mixer.conv1d.weight": ("x", "B", "C"),
    "mixer.conv1d.bias": ("x", "B", "C"),
}
"""Suffixes of tensors with a separate key for each part -> the suffixes of these keys, in the order of the rows."""
_PIECE = re.compile(rf"(.*\.(?:{'|'.join(map(re.escape, _PIECES))}))\.\w+")
_MOST_STACKED = 1 << 16
"""The largest number of layers, or of experts in a layer. A larger number is an attempt to exhaust the memory."""
_FC1_NORM, _MLP_NORM = "mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."
_PREDICTING = r"mtp\.layers\.\d+\.(?:transformer_layer|mtp_model_layer)\."
_LOCAL_NORM = re.compile(
    rf"(?P<layer>{_LAYERS}\d+\.|{_PREDICTING}){re.escape(_FC1_NORM)}(?P<rest>.+)"
)
_NORM_BEFORE_MLP = re.compile(rf"({_PREDICTING}){re.escape(_MLP_NORM)}(.+)")


def model_tensors(
    tensors: Mapping[str, ChunkedTensor],
) -> tuple[dict[str, ChunkedTensor], dict[str, ChunkedTensor]]:
    """(the weights, a multimodal model's tensors outside its language model), under Megatron's names.

    Frameworks around Megatron add a prefix (`module.`, `model.` ...) to the names, which is removed.
    """
    names = [name for name in tensors if not _NOT_MODEL.match(name)]
    prefix = next((found[1] for name in names if (found := _PREFIX.fullmatch(name))), "")
    outer = prefix.removesuffix(LANGUAGE_MODEL)
    return split_multimodal({name.removeprefix(outer): tensors[name] for name in names})


def is_adapter(tensors: Mapping[str, ChunkedTensor]) -> bool:
    """True if a distributed checkpoint holds only an adapter, according to its names."""
    names = list(model_tensors(tensors)[0])
    return bool(names) and all(ADAPTER in name for name in names)


def has_optimizer(names: Collection[str]) -> bool:
    return any(re.match(r"(chained_\d+\.)?optimizer\.", name) for name in names)


def unstack(tensors: Mapping[str, ChunkedTensor]) -> dict[str, ChunkedTensor]:
    """The tensors of a single rank under Megatron's module names.

    tensors: model-shaped tensors (weights, or one optimizer slot).

    Raises CorruptCheckpoint for the two halves of a tensor that don't fit each other.
    """
    single = dict[str, ChunkedTensor]()
    for name, tensor in tensors.items():
        single.update(_single(name, tensor))
    if any(_PIECE.fullmatch(name) for name in tensors):  # test the few keys, not all layers' names
        single = _joined(single)
    whole = _halves_joined(single)
    return {_norm_before_experts(name, whole): tensor for name, tensor in whole.items()}


def _halves_joined(tensors: Mapping[str, ChunkedTensor]) -> dict[str, ChunkedTensor]:
    """The tensors, with NAME_w above NAME_v as NAME. Core saves the two halves of a gated MLP separately."""
    whole = {}
    for name, tensor in tensors.items():
        base, half = name[:-2], name[-2:]
        if half == "_w" and f"{base}_v" in tensors:
            whole[base] = joined(tensor, tensors[f"{base}_v"])
        elif half == "_v" and f"{base}_w" in tensors:
            continue  # its _w has joined it
        else:
            whole[name] = tensor
    return whole


def _joined(tensors: Mapping[str, ChunkedTensor]) -> dict[str, ChunkedTensor]:
    """The tensors with separate parts joined. If a part is missing, the other parts stay separate."""
    whole: dict[str, ChunkedTensor] = {}
    for name, tensor in tensors.items():
        found = _PIECE.fullmatch(name)
        words = next(
            (words for end, words in _PIECES.items() if found and found[1].endswith(end)), ()
        )
        parts = [tensors.get(f"{found[1]}.{word}") for word in words] if found else []
        there = [part for part in parts if part is not None]
        if found and len(there) == len(words):
            whole[found[1]] = reduce(joined, there)
        else:
            whole[name] = tensor
    return whole


def pieces(native: NativeTensor) -> Iterator[NativeTensor]:
    """The tensors with separate keys that a native tensor is written as; mostly the tensor itself."""
    words = next((words for end, words in _PIECES.items() if native.name.endswith(end)), None)
    if words is None:
        yield native
        return
    for word, (part, (region,)) in zip(words, native.parts.items(), strict=True):
        shape = (region.box.rows // prod(native.shape[1:-1]), *native.shape[1:])
        yield native._replace(
            name=f"{native.name}.{word}", parts={part: (region._replace(row=0),)}, shape=shape
        )


def _single(name: str, tensor: ChunkedTensor) -> Iterator[tuple[str, ChunkedTensor]]:
    """A single rank's tensors of one key: first the layers are unstacked, then the experts."""
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
        raise CorruptCheckpoint(
            f"{name} is {list(tensor.shape)}; its first axis should count layers, or experts"
        )
    return tensor.unstack()


def _norm_before_experts(name: str, names: Collection[str]) -> str:
    """The name of the norm before experts. Local layers name it after a matrix that layers with experts don't have."""
    found = _LOCAL_NORM.fullmatch(name) if _FC1_NORM in name else None
    if found and f"{found['layer']}mlp.router.weight" in names:
        return f"{found['layer']}{_MLP_NORM}{found['rest']}"
    return name


def stacks_layers(config: ModelConfig) -> bool:
    """True if one key holds all layers. Core gives each layer its own keys if the layers differ."""
    alike = not (config.experts.count and config.layers_with("dense"))
    alike = alike and not config.has("retrieval") and not config.attention.o_bias_last
    mixed = (
        *("linear_layers", "kda_layers", "convolution_layers", "side_by_side", "hybrid_stack"),
        *("layers_differ", "shared_kv", "keys_as_values", "skipped_norm"),
    )
    return alike and not any(config.has(feature) for feature in mixed)


def stack(name: str, *, layers: bool, local: bool = False) -> tuple[str, Shape]:
    """(key, place in the key's first axes) of a tensor by its name on a single rank with Transformer Engine's layers.

    layers: True if layers are stacked. local: spell the norm before experts as local layers do.
    """
    place: Shape = ()
    if found := _LAYER.fullmatch(name):
        rest = found[3]
        if local and rest.startswith(_MLP_NORM):
            rest = _FC1_NORM + rest.removeprefix(_MLP_NORM)
        if layers:
            name = f"{found[1]}{rest}"
            place = (int(found[2]),)
        else:
            name = f"{found[1]}{found[2]}.{rest}"
    elif local and (found := _NORM_BEFORE_MLP.fullmatch(name)):
        name = f"{found[1]}{_FC1_NORM}{found[2]}"
    if found := _EXPERT.fullmatch(name):
        name = f"{found[1]}experts.{found[3]}"
        place = (*place, int(found[2]))
    return name, place
