"""MaxText's checkpoints of Llama, Mistral and Mixtral, as Orbax saves them.

    params.params.token_embedder.embedding                              [vocab, hidden]
    params.params.decoder.layers.self_attention.query.kernel            [hidden, layers, heads, head_dim]     scanned
    params.params.decoder.layers_3.self_attention.query.kernel          [hidden, heads, head_dim]             not scanned
    params.params.decoder.layers.self_attention.out.kernel              [heads, layers, head_dim, hidden]
    params.params.decoder.layers.mlp.wi_0.kernel                        [hidden, layers, ffn]: gate; wi_1: up
    params.params.decoder.layers.MoeBlock_0.wi_0                        [experts, layers, hidden, ffn]
    params.params.decoder.layers.pre_self_attention_layer_norm.scale    [hidden, layers]
    params.params.decoder.logits_dense.kernel                           [hidden, vocab]

Queries are stored divided by the square root of head_dim. The rotating elements of q and k are either pairs, as in
Meta's files, or halves, as in transformers; the arrays don't show which. With Llama 3.1's position scaling they are
pairs. For all other models, --option maxtext_rope says it. Source: MaxText, checkpoint_conversion, August 2026.
"""

import logging
import math
from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from formats.lazy_numpy import np
from formats.orbax_arrays import ArrayMatrix, OrbaxTree, find_tree, open_arrays, read_tree
from formats.tensor import Box, Bytes, ComputedTensor, LazyTensor, Shape
from formats.wording import listing
from megaconv.engine.sidecars import find_sidecars
from megaconv.errors import TensorMismatch, UnknownFormat, UsageError
from megaconv.extras import install
from megaconv.families import read_config
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.huggingface.canonical import whole_model
from megaconv.loader import Loader
from megaconv.model.config import ModelConfig
from megaconv.model.ir import Header, OpenedSource, describe, main_dtype
from megaconv.model.naming import HF
from megaconv.options import LoadOptions
from megaconv.values import rounding

_ROPE = "maxtext_rope"
FAMILIES = ("llama", "mistral", "mixtral")
_HEAD_AXES = 3
"""Axes of a matrix of attention in one layer: hidden size, heads, elements of a head."""

_log = logging.getLogger("megaconv")


class _Stored(NamedTuple):
    """The place of one of transformers' tensors in an array."""

    name: str
    """Name of the array. If layers aren't stacked, `{l}` stands for the layer."""
    order: tuple[int, ...]
    """Order of the axes of one layer (and one expert): the axes of the rows come first."""
    row_axes: int
    expert: bool = False
    rotates: bool = False


_ATTENTION, _MOE = "self_attention.", "MoeBlock_0."
_LAYER = {
    "input_layernorm": _Stored("pre_self_attention_layer_norm.scale", (0,), 1),
    "post_attention_layernorm": _Stored("post_self_attention_layer_norm.scale", (0,), 1),
    "self_attn.q_proj": _Stored(f"{_ATTENTION}query.kernel", (1, 2, 0), 2, rotates=True),
    "self_attn.k_proj": _Stored(f"{_ATTENTION}key.kernel", (1, 2, 0), 2, rotates=True),
    "self_attn.v_proj": _Stored(f"{_ATTENTION}value.kernel", (1, 2, 0), 2),
    "self_attn.o_proj": _Stored(f"{_ATTENTION}out.kernel", (2, 0, 1), 1),
}
_DENSE = {
    "mlp.gate_proj": _Stored("mlp.wi_0.kernel", (1, 0), 1),
    "mlp.up_proj": _Stored("mlp.wi_1.kernel", (1, 0), 1),
    "mlp.down_proj": _Stored("mlp.wo.kernel", (1, 0), 1),
}
_EXPERTS = {
    "block_sparse_moe.gate": _Stored(f"{_MOE}gate.kernel", (1, 0), 1),
    "block_sparse_moe.experts.{e}.w1": _Stored(f"{_MOE}wi_0", (1, 0), 1, expert=True),
    "block_sparse_moe.experts.{e}.w3": _Stored(f"{_MOE}wi_1", (1, 0), 1, expert=True),
    "block_sparse_moe.experts.{e}.w2": _Stored(f"{_MOE}wo", (1, 0), 1, expert=True),
}
_ENDS = {
    "model.embed_tokens.weight": _Stored("token_embedder.embedding", (0, 1), 1),
    "model.norm.weight": _Stored("decoder.decoder_norm.scale", (0,), 1),
    "lm_head.weight": _Stored("decoder.logits_dense.kernel", (1, 0), 1),
}


def detect(path: Path) -> bool:
    return find_tree(path) is not None


def open(path: Path, options: LoadOptions) -> OpenedSource:  # noqa: A001
    """Open a checkpoint. Raises CheckpointError if it is incomplete, or doesn't match the configuration."""
    place = find_tree(path)
    if place is None:
        raise UnknownFormat(f"{path}: holds no tree of arrays of Orbax's, with a _METADATA")
    if options.config is None:
        raise UsageError(
            f"{path}: a checkpoint of Orbax's doesn't describe its model; give --config with the model's Hugging Face directory",
            code="config-needed",
        )
    family, config = read_config(options.config / CONFIG_NAME)
    if family.name not in FAMILIES:
        raise UsageError(
            f"{options.config}: a {family.name}; of MaxText's models {', '.join(FAMILIES)} can be read"
        )
    pairs = _is_interleaved(config, options, path)
    found = _tensors(read_tree(place), config, pairs=pairs)
    config, tensors = whole_model(family, config, HF, found, str(place))
    manifest = describe(tensors)
    header = Header(
        replace(config, dtype=main_dtype(manifest)),
        manifest,
        files=find_sidecars(options.config),
        source=f"orbax, MaxText's names, rope {'interleaved' if pairs else 'split'}",
        has_optimizer=any(words[0] == "opt_state" for words in read_tree(place).arrays),
    )
    return OpenedSource(header, tensors)


def _is_interleaved(config: ModelConfig, options: LoadOptions, path: Path) -> bool:
    asked = options.extra.get(_ROPE)
    if asked not in (None, "interleaved", "split"):
        raise UsageError(f"--option {_ROPE}={asked}: is not known; choose interleaved or split")
    if asked is None and (config.positions.scaling or {}).get("rope_type") != "llama3":
        raise UsageError(
            f"{path}: MaxText's arrays don't show the order of rotary elements in q and k; give --option {_ROPE}=split (models that "
            f"MaxText's scripts converted from Llama 1, Llama 2, Mistral or Mixtral) or --option {_ROPE}=interleaved (Llama 3 and newer)",
            code="config-needed",
        )
    return asked != "split"


def _tensors(tree: OrbaxTree, config: ModelConfig, *, pairs: bool) -> dict[str, LazyTensor]:
    """Tensors by transformers' names. Raises TensorMismatch for arrays that are missing, unknown or misshapen."""
    names = {
        _below_params(words): name for words, name in tree.arrays.items() if words[0] == "params"
    }
    stacked = any(name.startswith("decoder.layers.") for name in names)
    is_tied = "decoder.logits_dense.kernel" not in names
    wanted = dict(_wanted(config, stacked=stacked, tied=is_tied))
    try:
        arrays = open_arrays(tree, {name: name for name in names.values()})
    except ImportError as error:
        raise UsageError(
            f"{tree.path}: is read by tensorstore ({error}); {install('orbax')}"
        ) from error
    _require_names(tree.path, names.keys(), {place.name for place in wanted.values()})
    found = {
        name: _matrix(name, place, arrays[names[place.name]], config, tree, pairs=pairs)
        for name, place in wanted.items()
    }
    of_vocabulary = [
        name for name in ("model.embed_tokens.weight", "lm_head.weight") if name in found
    ]
    rows = max(found[name].shape[0] for name in of_vocabulary)
    if rows > config.vocab:
        _log.warning(
            "%s: has %d rows for a vocabulary of %d; the rows of padding are left out",
            tree.path,
            rows,
            config.vocab,
        )
        for name in of_vocabulary:
            found[name] = _cut(found[name], config.vocab)
    return found


def _require_names(path: Path, found: Set[str], wanted: Set[str]) -> None:
    """Raise TensorMismatch unless the checkpoint has the arrays that the configuration asks for, and no others."""
    unknown, missing = sorted(found - wanted), sorted(wanted - found)
    if unknown:
        raise TensorMismatch(
            f"{path}: has {listing(unknown)}, which the configuration hasn't", code="unknown-tensor"
        )
    if missing:
        raise TensorMismatch(
            f"{path}: lacks {listing(missing)}, by the configuration", code="missing-tensor"
        )


def _below_params(words: tuple[str, ...]) -> str:
    while words[:1] == ("params",):
        words = words[1:]
    return ".".join(words)


class _Place(NamedTuple):
    """A tensor's array, by its name below `params`, with the layer and the expert if these are stacked in the array."""

    name: str
    stored: _Stored
    layer: int | None = None
    expert: int | None = None


def _wanted(config: ModelConfig, *, stacked: bool, tied: bool) -> Iterator[tuple[str, _Place]]:
    for name, stored in _ENDS.items():
        if name != "lm_head.weight" or not tied:
            yield name, _Place(stored.name, stored)
    kinds = _LAYER | (_EXPERTS if config.experts.count else _DENSE)
    for layer in range(config.layer_count):
        prefix = "decoder.layers." if stacked else f"decoder.layers_{layer}."
        index = layer if stacked else None
        for name, stored in kinds.items():
            experts = range(config.experts.count) if stored.expert else (None,)
            for expert in experts:
                in_layer = name.replace("{e}", str(expert))
                place = _Place(prefix + stored.name, stored, index, expert)
                yield f"model.layers.{layer}.{in_layer}.weight", place


class _Stack(NamedTuple):
    """An axis along which an array stacks layers or experts."""

    axis: int
    at: int
    """The layer's or the expert's number."""
    size: int
    """The number of layers or experts of the model."""
    unit: str


def _stacks(place: _Place, config: ModelConfig) -> list[_Stack]:
    """Experts are stacked along axis 0, layers along axis 1."""
    stacks = []
    if place.expert is not None:
        stacks.append(_Stack(0, place.expert, config.experts.count, "experts"))
    if place.layer is not None:
        stacks.append(_Stack(1, place.layer, config.layer_count, "layers"))
    return stacks


def _require_size(tree: OrbaxTree, place: _Place, found: int, size: int, unit: str) -> None:
    """Raise TensorMismatch unless an axis has this size. The size of the whole matrix doesn't show it."""
    if found != size:
        raise TensorMismatch(
            f"{tree.path}: {place.name} has {found} {unit}; the configuration has {size}. Give --config of the same model",
            code="misshapen-tensor",
        )


def _matrix(
    name: str, place: _Place, array: Any, config: ModelConfig, tree: OrbaxTree, *, pairs: bool
) -> LazyTensor:
    stored, axes = place.stored, len(place.stored.order)
    stacks = _stacks(place, config)
    expected = axes + len(stacks)
    if len(array.shape) != expected:
        raise TensorMismatch(
            f"{tree.path}: {place.name} is {list(array.shape)}, expected {expected} axes",
            code="misshapen-tensor",
        )
    index: list[Any] = [slice(None)] * expected
    for stack in stacks:
        index[stack.axis] = stack.at
        _require_size(tree, place, array.shape[stack.axis], stack.size, stack.unit)
    one = array[tuple(index)].transpose(stored.order)
    if axes == _HEAD_AXES:
        # Heads and their elements are both rows, or both columns.
        head_dim = one.shape[1] if stored.row_axes == 2 else one.shape[2]
        _require_size(tree, place, head_dim, config.attention.head_dim, "elements per head")
    rows, cols = math.prod(one.shape[: stored.row_axes]), math.prod(one.shape[stored.row_axes :])
    shape: Shape = (rows, cols) if axes > 1 else (rows,)
    matrix = ArrayMatrix(
        one,
        stored.row_axes,
        shape,
        array.dtype.name,
        f"{tree.path}: {place.name}",
        pairs=pairs and stored.rotates,
    )
    # MaxText stores queries divided by the square root of head_dim.
    return Scaled(matrix, math.sqrt(config.attention.head_dim)) if "q_proj" in name else matrix


def _cut(tensor: LazyTensor, rows: int) -> LazyTensor:
    return (
        replace(tensor, shape=(rows, *tensor.shape[1:]))
        if isinstance(tensor, ArrayMatrix)
        else tensor
    )


@dataclass(frozen=True)
class Scaled(ComputedTensor):
    """A matrix times a number, computed in float32 and rounded to its dtype."""

    factor: float

    def read_into(self, box: Box, out: Bytes) -> None:
        stored = np.empty(out.shape, np.uint8)
        self.source.read_into(box, stored)
        numbers = rounding.exact(stored.reshape(-1), self.dtype).astype(np.float32)
        scaled = numbers * np.float32(self.factor)
        np.copyto(out, rounding.rounded(scaled.reshape(box.rows, box.cols), self.dtype))


LOADER = Loader(
    name="orbax",
    description="MaxText (Orbax) of Llama, Mistral, Mixtral; needs --config and the extra orbax",
    detect=detect,
    open=open,
    options={
        _ROPE: "how MaxText's q and k have what rotates: `interleaved` (pairs, as Meta's files have it), "
        "or `split` (halves, as transformers)"
    },
    reads_files=False,
)
