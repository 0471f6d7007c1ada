"""The tensors and objects of a whole model under the keys of a distributed checkpoint.

Source: sharded_state_dict() of Megatron core's modules.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

from formats.tensor import Shape
from megaconv.engine.plan import native_dtype
from megaconv.errors import NotExpressible
from megaconv.families import family
from megaconv.megatron.distributed.chunks import PlannedChunk, chunks_of
from megaconv.megatron.distributed.keys import EXTRA_STATE, pieces, stack, stacks_layers
from megaconv.megatron.distributed.optimizer_plan import OptimizerForm
from megaconv.megatron.states.hybrid_form import hybrid_name
from megaconv.megatron.states.names import extra_states, is_of_linear_layer
from megaconv.megatron.states.whole_names import in_whole
from megaconv.model.beside import BESIDE
from megaconv.model.config import ModelConfig
from megaconv.model.ir import WEIGHT, Header
from megaconv.model.layout import Layout
from megaconv.model.naming import CORE, CORE_LOCAL, CORE_LOCAL_KEYS, Naming, with_rope_last
from megaconv.model.natives import NativeTensor, unsharded_tensors

_PROJECTORS_WITH_STATE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"gemma3": ("multi_modal_projector.mm_soft_embed_norm", "multi_modal_projector.proj")}
)
"""model_type -> modules with an extra state beside a copied encoder. Megatron-Bridge builds them of Megatron's layers."""


class PlacedTensor(NamedTuple):
    """A native tensor of a single rank, placed in a global tensor."""

    native: NativeTensor
    key: str
    """Key of the global tensor."""
    place: Shape
    """Position in the first axes of the global tensor."""
    dtype: str
    ranks: int
    """The number of ranks that the tensor is split for."""
    slot: str


class PlacedObject(NamedTuple):
    """An object that isn't a tensor, placed in a grid of objects with the same key."""

    key: str
    place: Shape
    grid: Shape
    """Size of the grid."""
    value: Any
    """None for an empty `_extra_state`."""


@dataclass(frozen=True)
class GlobalModel:
    """The tensors and objects of a whole model by their keys."""

    stacked: bool
    """True if layers are stacked, which they aren't if they differ."""
    tensors: list[PlacedTensor]
    shapes: Mapping[str, Shape]
    """Shapes of the global tensors, by key."""
    objects: list[PlacedObject]

    @classmethod
    def of(
        cls,
        header: Header,
        layout: Layout,
        vocab_rows: int,
        optimizer: OptimizerForm,
        *,
        local: bool,
        rope_last: bool,
        hybrid: bool,
    ) -> "GlobalModel":
        """The model in one piece. layout: the layout whose ranks the chunks are made for. vocab_rows: with padding.

        local: True for Megatron's own layers instead of Transformer Engine's. rope_last: True if indexers have their
        rotary elements last. hybrid: True for the form of a HybridModel.
        Raises NotExpressible if stacked layers would have different dtypes.
        """
        keys = _Keys.of(header.config, local=local, hybrid=hybrid)
        naming = with_rope_last(keys.naming) if rope_last else keys.naming
        natives = _written_tensors(header.config, naming, vocab_rows)
        if hybrid:
            natives = [native._replace(name=hybrid_name(native.name)) for native in natives]
        tensors = list(_placed_tensors(natives, keys, header, layout, optimizer))
        _require_one_dtype(tensors)
        return cls(
            stacked=keys.stacked,
            tensors=tensors,
            shapes=_global_shapes(tensors),
            objects=list(_extra_objects_of(natives, keys, header.config)),
        )

    def chunks(self) -> Iterator[PlannedChunk]:
        """The chunks of all tensors. Each call makes them anew, because a large model has hundreds of thousands."""
        for native, key, place, dtype, ranks, slot in self.tensors:
            yield from chunks_of(native, key, place, dtype, ranks, slot)


@dataclass(frozen=True)
class _Keys:
    """The way in which a model's tensors get their keys."""

    naming: Naming
    """The naming scheme of the tensors, before they get keys."""
    local: bool
    """True for Megatron's own layers instead of Transformer Engine's."""
    is_renamed: bool
    """True if local layers use Transformer Engine's names as keys."""
    stacked: bool
    """True if one key holds all layers."""
    has_scores: bool
    """True if the head gives scores. It then has no extra state."""
    is_multimodal: bool
    """True if the language model's keys have a prefix."""

    @classmethod
    def of(cls, config: ModelConfig, *, local: bool, hybrid: bool) -> "_Keys":
        # Latent attention and hybrids keep the names of their local layers.
        keeps_local_names = hybrid or bool(config.latent.kv_rank) or config.has("hybrid_stack")
        is_renamed = local and not keeps_local_names
        local_naming = CORE_LOCAL_KEYS if is_renamed else CORE_LOCAL
        return cls(
            naming=local_naming if local else CORE,
            local=local,
            is_renamed=is_renamed,
            stacked=stacks_layers(config) and not hybrid,
            has_scores=config.has("scores"),
            is_multimodal=config.whole is not None,
        )

    def key_and_place(self, name: str) -> tuple[str, Shape]:
        """(key, place in the key's first axes) of a tensor of the whole model."""
        inner_name = name.removeprefix(BESIDE)
        key, place = stack(inner_name, layers=self.stacked, local=self.is_renamed)
        is_language_model = inner_name == name
        return (self.in_language_model(key) if is_language_model else key), place

    def in_language_model(self, key: str) -> str:
        return in_whole(key) if self.is_multimodal else key


def _written_tensors(config: ModelConfig, naming: Naming, vocab_rows: int) -> list[NativeTensor]:
    """The tensors that a single rank would write: tensors outside the language model first."""
    rows = family(config.family).rows
    every = unsharded_tensors(rows, config, naming, vocab_rows=vocab_rows)
    written = [each for each in every if each.copy is None or each.copy.written]
    beside = [native for native in written if not _is_of_language_model(native)]
    return beside + [native for native in written if _is_of_language_model(native)]


def _is_of_language_model(native: NativeTensor) -> bool:
    return not native.name.startswith(BESIDE)


def _placed_tensors(
    natives: list[NativeTensor],
    keys: _Keys,
    header: Header,
    layout: Layout,
    optimizer: OptimizerForm,
) -> Iterator[PlacedTensor]:
    """The weights, each followed by its optimizer state."""
    # If a parameter has several names, Megatron's optimizer uses the last.
    last_names = {tuple(native.parts): native.name for native in natives if native.copy}
    split = (pieces(each) if _is_of_language_model(each) else (each,) for each in natives)
    for native in chain.from_iterable(split):
        key, place = keys.key_and_place(native.name)
        ranks = layout.etp if native.of_experts else layout.tp
        slots = [("", WEIGHT)]
        last_name = last_names.get(tuple(native.parts), native.name)
        if native.name == last_name:
            slots += optimizer.tensors(native)
        for prefix, slot in slots:
            dtype = native_dtype(header, native, slot)
            yield PlacedTensor(native, prefix + key, place, dtype, ranks, slot)


def _global_shapes(tensors: list[PlacedTensor]) -> dict[str, Shape]:
    """The shapes of global tensors, by key: the grid of places, then the shape of one native tensor."""
    grids: dict[str, Shape] = {}
    for tensor in tensors:
        grids[tensor.key] = _grown(grids.get(tensor.key), tensor.place)
    return {tensor.key: (*grids[tensor.key], *tensor.native.shape) for tensor in tensors}


def _grown(grid: Shape | None, place: Shape) -> Shape:
    """The smallest grid that holds another grid and this place."""
    if grid is None:
        grid = (0,) * len(place)
    return tuple(max(size, index + 1) for size, index in zip(grid, place, strict=True))


def _require_one_dtype(tensors: list[PlacedTensor]) -> None:
    dtypes: dict[str, str] = {}
    for tensor in tensors:
        if dtypes.setdefault(tensor.key, tensor.dtype) != tensor.dtype:
            raise NotExpressible(
                f"{tensor.key}: would stack layers of {dtypes[tensor.key]} and {tensor.dtype}; give --dtype to have them all the same"
            )


def _extra_objects_of(
    natives: list[NativeTensor], keys: _Keys, config: ModelConfig
) -> Iterator[PlacedObject]:
    """The extra states of the language model's modules, then of the encoders that Megatron builds."""
    inside = [native.name for native in natives if _is_of_language_model(native)]
    for found in _extra_objects(inside, keys):
        yield found._replace(key=keys.in_language_model(found.key))
    if config.whole is None:
        return
    beside = [native.name for native in natives if not _is_of_language_model(native)]
    built = [name.removeprefix(BESIDE) for name in beside if config.whole.builds(name)]
    yield from _extra_objects(built, keys)
    if not keys.local:
        modules = _PROJECTORS_WITH_STATE.get(str(config.whole.config.get("model_type")), ())
        yield from (PlacedObject(f"{module}{EXTRA_STATE}", (0,), (1,), None) for module in modules)


def extra_objects_of_norms(config: ModelConfig) -> list[PlacedObject]:
    """The extra states of norms that are modules of their own among Transformer Engine's layers."""
    keys = _Keys.of(config, local=False, hybrid=False)
    names = [native.name for native in _written_tensors(config, keys.naming, config.vocab)]
    return [found for found in _extra_objects(names, keys) if "norm._extra_state" in found.key]


def _extra_objects(names: list[str], keys: _Keys) -> Iterator[PlacedObject]:
    """The empty extra state of each module. names: tensors of the modules."""
    modules = _modules_with_state(names, local=keys.local, has_scores=keys.has_scores)
    placed = [stack(name, layers=keys.stacked) for name in modules]
    grids: dict[str, Shape] = {}
    for key, place in placed:
        grids[key] = _grown(grids.get(key), place)
    for key, place in placed:
        yield PlacedObject(key, place or (0,), grids[key] or (1,), None)


def _modules_with_state(names: list[str], *, local: bool, has_scores: bool) -> list[str]:
    """The names of extra states on a single rank."""
    # GPTModel leaves out the extra state of the head; MambaModel, BertModel and T5Model have it.
    with_head = any(name.startswith(("decoder.final_norm.", "lm_head.")) for name in names)

    def is_saved(name: str) -> bool:
        if is_of_linear_layer(name):
            return True
        return with_head if "output_layer" in name else not local

    every = extra_states(names, CORE_LOCAL if local else CORE, has_scores=has_scores)
    found = [name for name in every if is_saved(name)]
    if not local:
        norms = [name for name in names if name.endswith(_NORMS_WITH_STATE)]
        found += [name.removesuffix("weight") + "_extra_state" for name in norms]
    return found


_NORMS_WITH_STATE = (
    "q_layernorm.weight",
    "k_layernorm.weight",
    "kv_layernorm.weight",
    "indexer.k_norm.weight",
)
"""Endings of further tensors whose modules in Transformer Engine have an extra state."""
