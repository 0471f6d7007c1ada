"""Finds the tensors of a model that an adapter changes.

An adapter names modules as transformers does. So its addition to a module is a native tensor of the naming scheme `hf`,
and the family's table gives the rectangles of canonical tensors. Fused, transposed and stacked weights need no code
here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from formats.tensor import LazyTensor, Shape
from megaconv.adapters.file_paths import FilePaths
from megaconv.adapters.low_rank import Change, Delta, ScaledVector, Spread
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
from megaconv.huggingface.stored_names import prefix_of
from megaconv.model.assembled import Placed, assemble
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.model.naming import HF, HF_STACKED
from megaconv.model.natives import NativeTensor, unsharded_tensors
from megaconv.model.regions import Region
from megaconv.model.table import canonical_shapes

INSIDE = "model.language_model."
"""The beginning of names of a language model in transformers' class of a multimodal model. By itself, it begins with `model.`."""
INSIDE_BY_TYPE = {"idefics3": "model.text_model.", "smolvlm": "model.text_model."}
"""model_type of multimodal models whose names have another beginning there."""
_HEAD = "lm_head"
_HEADS = ("score.", "classifier.", "v_head.")
"""Names of the heads of other classes than those of language models."""


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
    names = _Names(family, config, str(adapter.weights))
    if config.tie_embeddings:
        adapter = without_repeats(adapter, names.parts, names.path)
        names = replace(names, config=_untied(adapter, names))
    found = Changes(names.config)
    found.replaced = _replaced(adapter, names)
    require_token_rows(adapter, tied=config.tie_embeddings)
    for name, tensor in adapter.tokens.items():
        canonical = names.matrix(name)
        found.tokens[canonical] = token_rows(adapter, name, tensor, names.shapes[canonical])
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


def _replaced(adapter: Adapter, names: "_Names") -> dict[str, LazyTensor]:
    found: dict[str, LazyTensor] = {}
    for name, tensor in adapter.replaced.items():
        native = names.native(name)
        require_rows_of_base(adapter, name, tensor, native.shape)
        found |= names.canonical(native, tensor)
    return found


def weights_of(
    adapter: Adapter, family: Family, config: ModelConfig
) -> Iterator[tuple[ModuleAdapter, NativeTensor]]:
    """Each module's adapter with its weight, which has transformers' name. Raises TensorMismatch, NotExpressible."""
    names = _Names(family, config, str(adapter.weights))
    for module in adapter.modules:
        yield module, names.target(module, adapter.config)


def replaced_tensors(
    adapter: Adapter, family: Family, config: ModelConfig
) -> dict[str, LazyTensor]:
    """The tensors by which an adapter replaces the model's, by canonical name. Raises TensorMismatch, NotExpressible."""
    names = _Names(family, config, str(adapter.weights))
    if config.tie_embeddings:
        adapter = without_repeats(adapter, names.parts, names.path)
    return _replaced(adapter, names)


def path_of(module: ModuleAdapter, native: NativeTensor, config: AdapterConfig) -> str:
    """The path that peft compares with the patterns of ranks and alphas.

    It is a module's path. For a parameter with its own adapter, the parameter's name follows.
    native: the weight that the adapter changes.
    """
    path = module_path(module.module)
    if not _is_of_parameter(native, config):
        return path
    parameter = native.name.rpartition(".")[2]
    return f"{path}.{parameter}"


def _is_of_parameter(native: NativeTensor, config: AdapterConfig) -> bool:
    """True if the adapter is one of a parameter: of all experts of a layer, or listed in `target_parameters`."""
    is_listed = any(f".{native.name}".endswith(f".{name}") for name in config.parameters)
    return len(native.shape) == 3 or is_listed


def _untied(adapter: Adapter, names: "_Names") -> ModelConfig:
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


@dataclass
class _Names:
    """The tensors of a model under transformers' names, including the stacked tensors of all experts of a layer."""

    family: Family
    config: ModelConfig
    where: str
    natives: Mapping[str, NativeTensor] = field(init=False)
    paths: FilePaths | None = field(init=False)
    """Set for a model that no family describes, whose files may name modules otherwise than its class."""
    shapes: Mapping[str, Shape] = field(init=False)
    prefix: str = field(init=False)
    """The beginning of names that the names of a bare model lack."""

    def __post_init__(self) -> None:
        rows = self.family.rows
        self.prefix = prefix_of(self.family)
        self.natives = {
            native.name: native
            for naming in (HF_STACKED, HF)
            for native in unsharded_tensors(rows, self.config, naming)
        }
        self.paths = None if self.config.own_names is None else FilePaths(self.natives)
        self.shapes = canonical_shapes(rows, self.config)

    def tensor(self, name: str) -> str:
        """The name in the model's files of a tensor with a name of transformers' class."""
        return self._renamed(name) if self.paths is None else self.paths.tensor(name)

    def _renamed(self, name: str) -> str:
        """The family's own name of a tensor or module."""
        for ours, theirs in self.family.renamed.items():
            if name.startswith(ours):
                return theirs + name.removeprefix(ours)
        for inside in (INSIDE, *INSIDE_BY_TYPE.values()):
            if name.startswith(inside):
                return f"model.{name.removeprefix(inside)}"
        return name

    def path(self, module: ModuleAdapter) -> str:
        """The path of a module in the model's files."""
        path = module_path(module.module)
        return self._renamed(path) if self.paths is None else self.paths.module(path)

    def native(self, name: str) -> NativeTensor:
        """The native tensor of a name.

        Raises TensorMismatch for a tensor that the model doesn't have, NotExpressible for a tied tensor's second name.
        """
        name = self.tensor(name)
        native = self.natives.get(name) or self.natives.get(self.prefix + name)
        if native is None:
            raise TensorMismatch(
                f"{self.where}: {name} is not in the model{self._reason(name)}",
                code="unknown-tensor",
            )
        if native.copy is not None:
            raise NotExpressible(
                f"{self.where}: has an adapter of {name}, which is tied to the embedding. megaconv merge BASE ADAPTER merges it into "
                "its base"
            )
        return native

    def matrix(self, name: str) -> str:
        """The canonical name of a matrix with a row for each token. Raises TensorMismatch for a tensor that is none."""
        canonical, *others = self.native(name).parts
        if others or len(self.shapes[canonical]) != 2:
            raise TensorMismatch(
                f"{self.where}: has rows of single tokens for {name}, which is neither an embedding nor a head"
            )
        return canonical

    def _reason(self, name: str) -> str:
        """Why files of a model without a family lack a module that its class has; empty for other models."""
        if name.startswith(_HEADS):
            return "; it belongs to a classifier or a reward model. Give the base with this head, or merge with peft"
        if self.paths is None:
            return ""
        if _HEAD in name.split(".") and not any(_HEAD in each.split(".") for each in self.natives):
            return (
                "; its head is tied to the embedding, and has no tensor of its own. Merge with peft"
            )
        return "; modules are found by the names in its files. If its class has other names, merge with peft"

    def parts(self, name: str) -> tuple[frozenset[str], bool]:
        """(canonical tensors, True for a duplicate tensor) of a tensor's name; none for an unknown name."""
        name = self.tensor(name)
        native = self.natives.get(name) or self.natives.get(self.prefix + name)
        return (
            (frozenset(), False)
            if native is None
            else (frozenset(native.parts), native.copy is not None)
        )

    def target(self, module: ModuleAdapter, config: AdapterConfig) -> NativeTensor:
        """The weight that a module's adapter changes."""
        path = self.path(module)
        if path + ".weight" in self.natives or self.prefix + path + ".weight" in self.natives:
            return self.native(path + ".weight")
        stacked = [self.natives[name] for name in self.natives if name.rpartition(".")[0] == path]
        fitting = [native for native in stacked if len(native.shape) == 3 and _fits(module, native)]
        if not stacked:
            raise TensorMismatch(
                f"{self.where}: {module.module}: the model has no such module{self._reason(path)}",
                code="unknown-tensor",
            )
        wrapped = _wrapped(module, stacked, config)
        if wrapped is not None:
            return wrapped
        if len(fitting) != 1:
            which = "none" if not fitting else " and ".join(native.name for native in fitting)
            raise TensorMismatch(
                f"{self.where}: {module.module} has matrices {list(module.a.shape)} and {list(module.b.shape)}, which are those "
                f"of {which}; expected those of one of {', '.join(native.name for native in stacked)}",
                code="misshapen-tensor",
            )
        return fitting[0]

    def is_flipped(self, native: NativeTensor, config: AdapterConfig) -> bool:
        """True if the adapter is one of a weight [in, out]. For peft, a parameter of two axes is always [out, in]."""
        if len(native.shape) == 2 and _is_of_parameter(native, config):
            return False
        return _flipped(native) if self.paths is None else config.flipped

    def canonical(self, native: NativeTensor, tensor: LazyTensor) -> dict[str, LazyTensor]:
        """The canonical tensors in a native tensor. Raises NotExpressible if it doesn't hold all of each."""
        shapes = {name: self.shapes[name] for name in native.parts}
        for name, regions in native.parts.items():
            held = sum(region.box.rows * region.box.cols for region in regions)
            if held < _elements(shapes[name]):
                raise NotExpressible(
                    f"{self.where}: {native.name} is only a part of {name}, "
                    "and can't be changed alone"
                )
        found = assemble(shapes, [Placed(native, tensor, self.where)], strict=True)
        return {key.name: lazy for key, lazy in found.items()}


def _elements(shape: Shape) -> int:
    """The number of elements of a tensor. Axes after the second one are not counted."""
    return prod(shape[:2])


def _flipped(native: NativeTensor) -> bool:
    """True if a family's table stores this weight as [in, out]."""
    regions: tuple[Region, ...] = next(iter(native.parts.values()))
    return regions[0].transposed


def _sizes(native: NativeTensor, *, flipped: bool) -> tuple[int, int, int]:
    """(number of experts, out, in) of a weight. flipped: True if it is stored as [in, out]."""
    experts = native.shape[0] if len(native.shape) == 3 else 1
    rows, cols = native.shape[-2:]
    return (experts, cols, rows) if flipped else (experts, rows, cols)


def _fits(module: ModuleAdapter, native: NativeTensor) -> bool:
    if not len(module.a.shape) == len(module.b.shape) == 2:
        return False
    experts, outs, ins = _sizes(native, flipped=_flipped(native))
    (a_rows, a_cols), (b_rows, b_cols) = module.a.shape, module.b.shape
    return (a_cols, b_rows) == (ins, outs) and a_rows == b_cols and a_rows % experts == 0


def _wrapped(
    module: ModuleAdapter, parameters: Sequence[NativeTensor], config: AdapterConfig
) -> NativeTensor | None:
    """The parameter of two axes that an adapter changes, among all parameters of a module in the order of the class.

    peft wraps a module once for each parameter with an adapter, the first parameter innermost. Returns None for other
    parameters.
    """
    changed = [each for each in parameters if _is_of_parameter(each, config)]
    depth = module.module.count(".base_layer")
    if depth >= len(changed) or any(len(each.shape) != 2 for each in changed):
        return None
    return changed[-1 - depth]


def _changes_of_module(
    module: ModuleAdapter, adapter: Adapter, weight: float, names: _Names
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
        experts, outs, ins = _sizes(native, flipped=flipped)
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
    is_added_rounded = module.embedding or _is_of_parameter(native, adapter.config)
    rounds_first = is_added_rounded or adapter.config.rounds_first
    for name, delta in deltas.items():
        yield name, Change(delta, rounds_first, magnitudes.get(name), _flipped(native))
    if module.bias is not None:
        bias = names.native(native.name.removesuffix("weight") + "bias")
        for name, delta in names.canonical(bias, ScaledVector(module.bias, scale)).items():
            yield name, Change(delta)


def _magnitudes(
    module: ModuleAdapter, adapter: Adapter, weight: float, names: _Names, native: NativeTensor
) -> dict[str, LazyTensor]:
    """DoRA's magnitudes by canonical name; empty without DoRA.

    Raises NotExpressible if peft has no DoRA of this kind.
    """
    if module.contradicts(adapter.config):
        has = "no" if module.magnitude is None else "a"
        raise TensorMismatch(
            f"{adapter.weights}: {module.module} has {has} magnitude, "
            "but its configuration requires the opposite"
        )
    if module.magnitude is None:
        return {}
    flipped = names.is_flipped(native, adapter.config)
    experts, outs, _ = _sizes(native, flipped=flipped)
    is_linear = experts <= 1 and not module.embedding and flipped == _flipped(native)
    fits = tuple(module.magnitude.shape) == (outs,)
    if weight != 1 or not is_linear or not fits:
        raise NotExpressible(
            f"{adapter.weights}: {module.module}: DoRA is merged into Linear alone, and into Conv1D of a known family, "
            f"with a magnitude [{outs}], and whole (no weight)"
        )
    return names.canonical(native, Spread(module.magnitude, native.shape, _flipped(native)))
