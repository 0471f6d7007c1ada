"""The tensors of a model, found by the names that an adapter uses: those of transformers' class."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from formats.tensor import LazyTensor, Shape
from megaconv.adapters.file_paths import FilePaths
from megaconv.adapters.peft_files import AdapterConfig, ModuleAdapter, module_path
from megaconv.errors import NotExpressible, TensorMismatch
from megaconv.families import Family
from megaconv.huggingface.stored_names import prefix_of
from megaconv.model.assembled import Placed, assemble
from megaconv.model.config import ModelConfig
from megaconv.model.naming import HF, HF_STACKED
from megaconv.model.natives import NativeTensor, unsharded_tensors
from megaconv.model.regions import Region
from megaconv.model.table import canonical_shapes

INSIDE = "model.language_model."
"""The beginning of names of a language model in transformers' class of a multimodal model. By itself, it begins with `model.`."""
INSIDE_BY_TYPE = {"idefics3": "model.text_model.", "smolvlm": "model.text_model."}
"""model_type of multimodal models whose names have another beginning there."""
HEAD = "lm_head"
_HEADS = ("score.", "classifier.", "v_head.")
"""Names of the heads of other classes than those of language models."""


@dataclass
class NamedTensors:
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

    def find(self, name: str) -> NativeTensor | None:
        """The native tensor of a name; None for a tensor that the model doesn't have."""
        name = self.tensor(name)
        return self.natives.get(name) or self.natives.get(self.prefix + name)

    def native(self, name: str) -> NativeTensor:
        """The native tensor of a name.

        Raises TensorMismatch for a tensor that the model doesn't have, NotExpressible for a tied tensor's second name.
        """
        native = self.find(name)
        if native is None:
            name = self.tensor(name)
            raise TensorMismatch(
                f"{self.where}: {name} is not in the model{self._reason(name)}",
                code="unknown-tensor",
            )
        if native.copy is not None:
            first = next(
                each.name
                for each in self.natives.values()
                if each.copy is None and each.parts.keys() == native.parts.keys()
            )
            raise NotExpressible(
                f"{self.where}: has an adapter of {name}, a copy of {first}. megaconv merge BASE ADAPTER takes adapters of tied heads, "
                "and of no other copy"
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
        if HEAD in name.split(".") and not any(HEAD in each.split(".") for each in self.natives):
            return (
                "; its head is tied to the embedding, and has no tensor of its own. Merge with peft"
            )
        return "; modules are found by the names in its files. If its class has other names, merge with peft"

    def parts(self, name: str) -> tuple[frozenset[str], bool]:
        """(canonical tensors, True for a duplicate tensor) of a tensor's name; none for an unknown name."""
        native = self.find(name)
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
        if len(native.shape) == 2 and is_of_parameter(native, config):
            return False
        return is_transposed(native) if self.paths is None else config.flipped

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


def is_transposed(native: NativeTensor) -> bool:
    """True if a family's table stores this weight as [in, out]."""
    regions: tuple[Region, ...] = next(iter(native.parts.values()))
    return regions[0].transposed


def matrix_sizes(native: NativeTensor, *, flipped: bool) -> tuple[int, int, int]:
    """(number of experts, out, in) of a weight. flipped: True if it is stored as [in, out]."""
    experts = native.shape[0] if len(native.shape) == 3 else 1
    rows, cols = native.shape[-2:]
    return (experts, cols, rows) if flipped else (experts, rows, cols)


def _fits(module: ModuleAdapter, native: NativeTensor) -> bool:
    if not len(module.a.shape) == len(module.b.shape) == 2:
        return False
    experts, outs, ins = matrix_sizes(native, flipped=is_transposed(native))
    (a_rows, a_cols), (b_rows, b_cols) = module.a.shape, module.b.shape
    return (a_cols, b_rows) == (ins, outs) and a_rows == b_cols and a_rows % experts == 0


def _wrapped(
    module: ModuleAdapter, parameters: Sequence[NativeTensor], config: AdapterConfig
) -> NativeTensor | None:
    """The parameter of two axes that an adapter changes, among all parameters of a module in the order of the class.

    peft wraps a module once for each parameter with an adapter, the first parameter innermost. Returns None for other
    parameters.
    """
    changed = [each for each in parameters if is_of_parameter(each, config)]
    depth = module.module.count(".base_layer")
    if depth >= len(changed) or any(len(each.shape) != 2 for each in changed):
        return None
    return changed[-1 - depth]


def is_of_parameter(native: NativeTensor, config: AdapterConfig) -> bool:
    """True if the adapter is one of a parameter: of all experts of a layer, or listed in `target_parameters`."""
    is_listed = any(f".{native.name}".endswith(f".{name}") for name in config.parameters)
    return len(native.shape) == 3 or is_listed
