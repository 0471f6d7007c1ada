"""Finds the tensors of a model that an adapter changes.

An adapter names modules as transformers does. So its addition to a module is a native tensor of the naming scheme `hf`,
and the family's table gives the rectangles of canonical tensors. Fused, transposed and stacked weights need no code
here.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from formats.tensor import LazyTensor
from megaconv.adapters.derived import are_equal
from megaconv.adapters.low_rank import Change, Delta, ScaledVector, Spread
from megaconv.adapters.named_tensors import (
    HEAD,
    NamedTensors,
    is_of_parameter,
    is_transposed,
    matrix_sizes,
)
from megaconv.adapters.peft_files import Adapter, AdapterConfig, ModuleAdapter, module_path
from megaconv.adapters.scored_head import with_scored_head
from megaconv.adapters.tied_head import without_repeats
from megaconv.adapters.vocabulary import (
    TokenRows,
    require_rows_of_base,
    require_token_rows,
    resized,
    token_rows,
)
from megaconv.errors import NotExpressible, TensorMismatch
from megaconv.families import Family
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.model.natives import NativeTensor
from megaconv.model.table import canonical_shapes


@dataclass
class Changes:
    """The changes of a model by one adapter, by canonical name."""

    config: ModelConfig
    """The model's configuration. Its head is untied if the adapter changes only one of head and embedding."""
    deltas: dict[str, Change] = field(default_factory=dict)
    replaced: dict[str, LazyTensor] = field(default_factory=dict)
    """Whole replaced tensors, in the adapter's dtype."""
    tokens: dict[str, TokenRows] = field(default_factory=dict)
    """New rows of single tokens."""


def changes_of(adapter: Adapter, weight: float, family: Family, config: ModelConfig) -> Changes:
    """The changes of a model by an adapter. weight: the factor of the adapter's deltas.

    Raises TensorMismatch for an adapter of another model, NotExpressible for a change that can't be merged.
    """
    adapter, config = resized(adapter, family, with_scored_head(adapter, config))
    names = NamedTensors(family, config, str(adapter.weights))
    if config.tie_embeddings:
        adapter = without_repeats(adapter, names.parts, names.path)
        names = replace(names, config=_untied(adapter, names))
    found = Changes(names.config)
    found.replaced = _replaced(adapter, names)
    require_token_rows(adapter, tied=config.tie_embeddings)
    found.tokens = _rows(adapter, names)
    if weight != 1 and (found.replaced or found.tokens):
        first_names = ", ".join(sorted({*adapter.replaced, *adapter.tokens})[:3])
        raise NotExpressible(
            f"{adapter.weights}: holds whole tensors ({first_names}), which have no weight; "
            "give the adapter without one"
        )
    for module in adapter.modules:
        for name, change in _changes_of_module(module, adapter, weight, names):
            if name in found.deltas:
                raise TensorMismatch(
                    f"{adapter.weights}: {module.module} changes {name}, "
                    "which another module does too"
                )
            found.deltas[name] = change
    return found


def changed_rows(adapter: Adapter, family: Family, config: ModelConfig) -> dict[str, TokenRows]:
    """The new rows of single tokens by canonical name of the matrix. Raises TensorMismatch, NotExpressible."""
    names = NamedTensors(family, config, str(adapter.weights))
    require_token_rows(adapter, tied=config.tie_embeddings)
    return _rows(adapter, names)


def _rows(adapter: Adapter, names: NamedTensors) -> dict[str, TokenRows]:
    found = {}
    for name, tensor in adapter.tokens.items():
        canonical = names.matrix(name)
        found[canonical] = token_rows(adapter, name, tensor, names.shapes[canonical])
    return found


def _replaced(adapter: Adapter, names: NamedTensors) -> dict[str, LazyTensor]:
    found: dict[str, LazyTensor] = {}
    for name, tensor in adapter.replaced.items():
        if _repeats_embedding(name, adapter, names):
            continue
        native = names.native(name)
        require_rows_of_base(adapter, name, tensor, native.shape)
        found |= names.canonical(native, tensor)
    return found


def _repeats_embedding(name: str, adapter: Adapter, names: NamedTensors) -> bool:
    """True for the head of a tied multimodal model, whose files lack it, if it is the adapter's embedding once more."""
    is_tied_head = HEAD in name.split(".") and names.paths is not None and names.find(name) is None
    if not is_tied_head or not adapter.config.keeps_tie:
        return False
    head = adapter.replaced[name]
    others = (tensor for other, tensor in adapter.replaced.items() if other != name)
    return any(are_equal((head, other)) for other in others if other.shape == head.shape)


def weights_of(
    adapter: Adapter, family: Family, config: ModelConfig
) -> Iterator[tuple[ModuleAdapter, NativeTensor]]:
    """Each module's adapter with its weight, which has transformers' name. Raises TensorMismatch, NotExpressible."""
    names = NamedTensors(family, config, str(adapter.weights))
    for module in adapter.modules:
        yield module, names.target(module, adapter.config)


def replaced_tensors(
    adapter: Adapter, family: Family, config: ModelConfig
) -> dict[str, LazyTensor]:
    """The tensors by which an adapter replaces the model's, by canonical name. Raises TensorMismatch, NotExpressible."""
    names = NamedTensors(family, config, str(adapter.weights))
    if config.tie_embeddings:
        adapter = without_repeats(adapter, names.parts, names.path)
    return _replaced(adapter, names)


def path_of(module: ModuleAdapter, native: NativeTensor, config: AdapterConfig) -> str:
    """The path that peft compares with the patterns of ranks and alphas.

    It is a module's path. For a parameter with its own adapter, the parameter's name follows.
    native: the weight that the adapter changes.
    """
    path = module_path(module.module)
    if not is_of_parameter(native, config):
        return path
    parameter = native.name.rpartition(".")[2]
    return f"{path}.{parameter}"


def _untied(adapter: Adapter, names: NamedTensors) -> ModelConfig:
    """The configuration of a tied model; head and embedding are untied if the adapter changes only one of them.

    names: of the tied model. adapter: without changes of the head that repeat the embedding's.
    Raises NotExpressible for a family that has no separate head.
    """
    natives, keeps_tie = names.natives, adapter.config.keeps_tie
    heads = {name for name, native in natives.items() if native.copy is not None}
    shared = {part for name in heads for part in natives[name].parts}
    wholes = [*map(names.tensor, adapter.replaced)]
    wholes += [f"{names.path(module)}.weight" for module in adapter.modules]
    # peft puts new rows of the embedding into a tied head too.
    changes_head = not heads.isdisjoint([*wholes, *map(names.tensor, adapter.tokens)])
    changed_parts = {part for name in wholes if name in natives for part in natives[name].parts}
    changes_embedding = not shared.isdisjoint(changed_parts)
    if not changes_head and (keeps_tie or not changes_embedding):
        return names.config
    untied = changed(names.config, {"tie_embeddings": False})
    if not shared < set(canonical_shapes(names.family.rows, untied)):
        raise NotExpressible(
            f"{adapter.weights}: changes the embedding alone, which this family's models have as their head too"
        )
    return untied


def _changes_of_module(
    module: ModuleAdapter, adapter: Adapter, weight: float, names: NamedTensors
) -> Iterator[tuple[str, Change]]:
    if len(module.a.shape) != 2 or len(module.b.shape) != 2:
        raise TensorMismatch(
            f"{adapter.weights}: {module.module}: has tensors of shapes {list(module.a.shape)} and {list(module.b.shape)}, as for a "
            "convolution; only adapters with matrices, of two axes, are merged"
        )
    native = names.target(module, adapter.config)
    path = path_of(module, native, adapter.config)
    flipped = names.is_flipped(native, adapter.config) and not module.embedding
    experts, outs, ins = 1, native.shape[0], 1
    if len(native.shape) > 1:
        experts, outs, ins = matrix_sizes(native, flipped=flipped)
    if module.embedding:
        # In peft, the vocabulary is an embedding's input; in the model, it is the number of rows.
        outs, ins, flipped = ins, outs, True
    rank = module.a.shape[0] // experts
    if (
        tuple(module.a.shape) != (rank * experts, ins)
        or tuple(module.b.shape) != (outs, rank * experts)
        or not rank
    ):
        raise TensorMismatch(
            f"{adapter.weights}: {module.module} has matrices {list(module.a.shape)} and {list(module.b.shape)}; "
            f"{native.name} is {list(native.shape)}, so expected [r, {ins}] and [{outs}, r]",
            code="misshapen-tensor",
        )
    if rank != adapter.config.rank_of(path):
        raise TensorMismatch(
            f"{adapter.weights}: {module.module} has rank {rank}; its configuration says {adapter.config.rank_of(path)}",
            code="misshapen-tensor",
        )
    scale = adapter.config.scale_of(path, rank) * weight
    deltas = names.canonical(
        native, Delta(module.a, module.b, scale, native.shape, flipped, experts)
    )
    magnitudes = _magnitudes(module, adapter, weight, names, native)
    is_added_rounded = module.embedding or is_of_parameter(native, adapter.config)
    rounds_first = is_added_rounded or adapter.config.rounds_first
    for name, delta in deltas.items():
        yield name, Change(delta, rounds_first, magnitudes.get(name), is_transposed(native))
    if module.bias is not None:
        bias = names.native(native.name.removesuffix("weight") + "bias")
        for name, delta in names.canonical(bias, ScaledVector(module.bias, scale)).items():
            yield name, Change(delta)


def _magnitudes(
    module: ModuleAdapter,
    adapter: Adapter,
    weight: float,
    names: NamedTensors,
    native: NativeTensor,
) -> dict[str, LazyTensor]:
    """DoRA's magnitudes by canonical name; empty without DoRA.

    Raises NotExpressible if peft has no DoRA of this kind, TensorMismatch if tensors and configuration contradict each other.
    """
    module.refuse_contradiction(adapter.config, adapter.weights)
    if module.magnitude is None:
        return {}
    flipped = names.is_flipped(native, adapter.config)
    experts, outs, _ = matrix_sizes(native, flipped=flipped)
    is_linear = experts <= 1 and not module.embedding and flipped == is_transposed(native)
    fits = tuple(module.magnitude.shape) == (outs,)
    if weight != 1:
        raise NotExpressible(
            f"{adapter.weights}: {module.module}: DoRA is merged whole; give the adapter without the weight {weight:g}"
        )
    if not is_linear or not fits:
        raise NotExpressible(
            f"{adapter.weights}: {module.module}: DoRA is merged into Linear alone, and into Conv1D of a known family, "
            f"with a magnitude [{outs}]"
        )
    return names.canonical(native, Spread(module.magnitude, native.shape, is_transposed(native)))
