"""Fits an adapter to the modules of Megatron-Bridge: differences between modules or layers are filled up with zeros.

Bridge has one rank and one alpha for all modules, and the same modules in all layers. A fused layer has one A (LoRA,
DoRA), or an adapter for each of its parts (CanonicalLoRA, which needs all of them: forward() and sharded_state_dict()
call all three). CanonicalLoRA too has one A for linear_fc1 of grouped experts. Rows of zeros after A and columns of
zeros in B add nothing, so that

    A = [A_q; A_k; A_v]        B = [B_q 0 0; 0 B_k 0; 0 0 B_v]        alpha / rank as before

is the same function with one A. Modules without an adapter get zeros and stay unchanged, also in training: no gradient
of either matrix passes through the zeros of the other.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from formats.tensor import LazyTensor
from megaconv.adapters.derived import Stack, Window
from megaconv.adapters.sharing import with_shared
from megaconv.adapters.translation import (
    adaptable_weights,
    adapter_source,
    part_of,
    require_all_written,
    sizes,
)
from megaconv.errors import NotExpressible, UsageError
from megaconv.families import Family, family
from megaconv.megatron.distributed.adapter_rows import is_fc1, require_plain_rows
from megaconv.megatron.distributed.bridge_files import ADAPTER_KIND, FUSED
from megaconv.megatron.distributed.keys import stack
from megaconv.model.adapter import (
    AdapterInfo,
    LowRank,
    a_name,
    b_name,
    is_of_expert,
    of_any_expert,
    of_each_expert,
)
from megaconv.model.config import ModelConfig
from megaconv.model.ir import Key, OpenedSource, Source
from megaconv.model.naming import CORE
from megaconv.model.natives import NativeTensor
from megaconv.model.table import canonical_shapes

EXPERT_RANKS = 1
"""Tensor-parallel ranks of experts with adapters.

With more, Bridge 0.3.1 neither saves nor loads them ("Duplicate ShardedObject keys"): ParallelLinearAdapter writes the
expert-parallel rank in place of the tensor-parallel rank.
"""
_CANONICAL = frozenset({("q", "k", "v"), ("gate", "up")})
"""The parts of fused weights for which CanonicalLoRA has adapters."""


class BridgeModule(NamedTuple):
    """A module of Bridge that has an adapter in this model."""

    name: str
    """The module's name on a rank."""
    weight: NativeTensor
    kind: str = ""
    """For CanonicalLoRA, the part of a fused weight that it adapts; empty for an adapter of the whole weight."""

    @property
    def key(self) -> str:
        """A key that is equal for the modules of all layers and experts."""
        return f"{stack(self.name, layers=True)[0]} {self.kind}"


def bridge_modules(
    table: Family, config: ModelConfig, info: AdapterInfo, *, fused: bool, grouped: bool
) -> list[BridgeModule]:
    """The modules with adapters. A module that any layer adapts is included for all layers."""
    found = list(_all_modules(table, config, info, fused=fused, grouped=grouped))
    changed = {
        module.key.partition(" ")[0]
        for module in found
        if module.weight.parts.keys() & info.weights.keys()
    }
    return [module for module in found if module.key.partition(" ")[0] in changed]


def _all_modules(
    table: Family, config: ModelConfig, info: AdapterInfo, *, fused: bool, grouped: bool
) -> Iterator[BridgeModule]:
    for native_name, native in adaptable_weights(table, config, CORE).items():
        name = native_name.removesuffix(".weight")
        of_group = grouped and is_of_expert(next(iter(native.parts)))
        if fused or of_group or len(native.parts) == 1:
            yield BridgeModule(name, native)
            continue
        for part in native.parts:
            yield BridgeModule(name, part_of(native, part), _word(part))


def _word(part: str) -> str:
    """The last word of a weight's name: `q` of layers.0.attn.q.weight."""
    return part.split(".")[-2]


def _are_shared(info: AdapterInfo, config: ModelConfig) -> bool:
    """True if all experts of a layer have the same adapter, in each layer."""
    names = {of_any_expert(name) for name in info.weights if is_of_expert(name)}
    return all(
        len({info.weights.get(each) for each in of_each_expert(name, config.experts.count)}) == 1
        for name in names
    )


def is_fused(table: Family, config: ModelConfig, info: AdapterInfo) -> bool:
    """True if every module that Megatron fuses has one A for all of its weights, as in Bridge's LoRA."""
    modules = [native.parts for native in _changed(table, config, info)]
    return all(
        len({info.weights[name].a if name in info.weights else "" for name in parts}) == 1
        for parts in modules
    )


def _is_canonical(table: Family, config: ModelConfig, info: AdapterInfo) -> bool:
    """True if Bridge's CanonicalLoRA has adapters of all these modules.

    It has none of a linear_fc1 without a gate, and none for an attention's gate or the parts of a linear attention.
    """
    for native in _changed(table, config, info):
        words = tuple(_word(part) for part in native.parts)
        fits = words in _CANONICAL if len(words) > 1 else not is_fc1(native)
        if not fits:
            return False
    return True


def _changed(table: Family, config: ModelConfig, info: AdapterInfo) -> list[NativeTensor]:
    """The weights that the adapter changes, whole or in part."""
    natives = adaptable_weights(table, config, CORE).values()
    return [native for native in natives if native.parts.keys() & info.weights.keys()]


def fitted(source: Source, *, tp: int, grouped: bool, kind: str | None) -> OpenedSource:
    """The same adapter, fitted to Bridge's modules.

    Raises NotExpressible for an adapter that Bridge can't have, UsageError.
    """
    header = source.header
    info, config, table = header.adapter, header.config, family(header.config.family)
    assert info is not None
    if kind not in (None, FUSED):
        raise UsageError(
            f"--option {ADAPTER_KIND}={kind}: is not known; choose {FUSED}, or leave it out for an adapter as it is"
        )
    if info.is_dora:
        require_dora_fits(table, config, info.weights, tp)
    for native in _changed(table, config, info):
        require_plain_rows(native, tp, native.name)
    fused = kind == FUSED or info.is_dora or is_fused(table, config, info)
    fused = fused or not _is_canonical(table, config, info)
    modules = bridge_modules(table, config, info, fused=fused, grouped=grouped)
    fitting = _Fitting(dict(source.tensors()), info, config)
    rank = fitting.rank(modules, tp)
    scale = _one_scale(info)
    for module in modules:
        fitting.fit(module, rank, scale * rank)
    require_all_written(info, fitting.weights, "Megatron has no modules of theirs")
    shared = grouped and _are_shared(info, config)
    fit = AdapterInfo(fitting.weights, info.base, info.dropout, experts_share=shared)
    # Matrices that became equal, such as those of zeros, are one tensor to readers of the output too.
    return with_shared(adapter_source(config, fit, fitting.made, header.source), table)


def _one_scale(info: AdapterInfo) -> float:
    scales = {low.alpha / low.rank: name for name, low in info.weights.items()}
    if len(scales) > 1:
        (first, one), (second, other) = list(scales.items())[:2]
        raise NotExpressible(
            f"alpha / rank is {first:g} of {one} and {second:g} of {other}: Megatron-Bridge has one for all modules; merge the adapter "
            "into its base (--adapter) instead"
        )
    return next(iter(scales))


@dataclass
class _Fitting:
    """The conversion of an adapter's tensors."""

    found: Mapping[Key, LazyTensor]
    info: AdapterInfo
    config: ModelConfig
    made: dict[Key, LazyTensor] = field(default_factory=dict)
    weights: dict[str, LowRank] = field(default_factory=dict)

    def rank(self, modules: Iterable[BridgeModule], tp: int) -> int:
        """The smallest rank that suits every module and that tensor-parallel ranks can divide."""
        needed = max(sum(low.rank for low in self._distinct(module.weight)) for module in modules)
        return -(-needed // tp) * tp

    def _distinct(self, weight: NativeTensor) -> list[LowRank]:
        """The adapters of a weight's parts, each A once."""
        lows = [self.info.weights.get(part) for part in weight.parts]
        return list({low.a: low for low in lows if low is not None}.values())

    def fit(self, module: BridgeModule, rank: int, alpha: float) -> None:
        """Add the module's tensors, and their relation to its weights."""
        distinct = self._distinct(module.weight)
        shared = a_name(tuple(module.weight.parts))
        _, ins = sizes(module.weight)
        self.made[Key(shared)] = self._a(distinct, (rank, ins))
        # The first row of each A in the stacked A; its B gets the same columns.
        firsts = dict[str, int]()
        row = 0
        for low in distinct:
            firsts[low.a] = row
            row += low.rank
        for part, regions in module.weight.parts.items():
            adapter = self.info.weights.get(part)
            b = b_name(part)
            rows = sum(region.box.rows for region in regions)
            self.made[Key(b)] = self._b(adapter, (rows, rank), firsts)
            length = adapter.length if adapter else ""
            if length:
                self.made[Key(length)] = self.found[Key(length)]
            self.weights[part] = LowRank(shared, b, rank, alpha, length)

    def _a(self, distinct: Sequence[LowRank], shape: tuple[int, int]) -> LazyTensor:
        """A: the parts' matrices, one below the other, in the order of the parts."""
        sources = tuple(self.found[Key(low.a)] for low in distinct)
        if len(sources) == 1 and tuple(sources[0].shape) == shape:
            return sources[0]
        return Stack(sources, shape[0]) if sources else Window(shape, self._dtype)

    def _b(
        self, low: LowRank | None, shape: tuple[int, int], firsts: Mapping[str, int]
    ) -> LazyTensor:
        """B: its values in the columns of its own A, zeros elsewhere."""
        if low is None:
            return Window(shape, self._dtype)
        source = self.found[Key(low.b)]
        return (
            source
            if tuple(source.shape) == shape
            else Window(shape, source.dtype, source, 0, firsts[low.a])
        )

    @property
    def _dtype(self) -> str:
        return next(iter(self.found.values())).dtype


def require_dora_fits(
    table: Family, config: ModelConfig, weights: Collection[str], tp: int
) -> None:
    """Raises NotExpressible for DoRA that Megatron-Bridge computes differently from peft, or not at all.

    Source: dora.py and dora_layers.py of Megatron-Bridge.
    """
    instead = "; merge the adapter into its base (--adapter) instead"
    if any(is_of_expert(name) for name in weights):
        raise NotExpressible(
            "DoRA of experts: Megatron-Bridge's DoRALinear gives tokens of an expert a further axis, and looks for a weight that grouped "
            f"layers don't have{instead}"
        )
    if any(name.endswith(".router.weight") for name in weights):
        raise NotExpressible(f"DoRA of a router: Megatron-Bridge has none{instead}")
    natives, shapes = adaptable_weights(table, config, CORE), canonical_shapes(table.rows, config)
    changed = {
        name: native for name, native in natives.items() if native.parts.keys() & set(weights)
    }
    for name, native in changed.items():
        if tp > 1 and native.tp == 1:
            raise NotExpressible(
                f"DoRA of {name} at tp = {tp}: Megatron-Bridge divides by the length that a row has on one rank, not by that of the whole "
                "row; choose --tp 1"
            )
        if name.endswith("linear_qkv.weight") and any(
            part.removesuffix("weight") + "bias" in shapes for part in native.parts
        ):
            raise NotExpressible(
                f"DoRA of {name}: Megatron-Bridge scales the layer's bias too, which adds to its output, and peft doesn't{instead}"
            )
    _require_whole(table, config, weights, changed)


def _require_whole(
    table: Family,
    config: ModelConfig,
    weights: Collection[str],
    changed: Mapping[str, NativeTensor],
) -> None:
    """Raises NotExpressible if a weight without an adapter would need magnitudes, which only its base could give."""
    keys = {stack(name, layers=True)[0] for name in changed}
    for name, native in adaptable_weights(table, config, CORE).items():
        lacking: Sequence[str] = [part for part in native.parts if part not in weights]
        if lacking and stack(name, layers=True)[0] in keys:
            raise NotExpressible(
                f"DoRA without an adapter of {lacking[0]}: Megatron-Bridge has magnitudes for all of {name} in every layer, and those "
                "of a weight without an adapter are only in its base; merge the adapter into its base (--adapter) instead"
            )
