"""An adapter as the modules of Megatron-Bridge have it: what differs by module or layer there is filled up with zeros.

Bridge has one rank and one alpha for all modules, and the same modules in all layers; a fused layer has one A (LoRA, DoRA), or an
adapter for each of its parts (CanonicalLoRA, which can't do without any: forward() and sharded_state_dict() of 0.3.1 call all three).
Rows of zeros after A and columns of zeros in B add nothing, so that

    A = [A_q; A_k; A_v]        B = [B_q 0 0; 0 B_k 0; 0 0 B_v]        alpha / rank as before

is the same function with one A, and with zeros in their place modules without an adapter stay as they are, also in training: no
gradient of either matrix gets through the other's zeros.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from formats.tensor import LazyTensor
from megaconv.engine.adapters.derived import Stack, Window
from megaconv.engine.adapters.translation import (
    adaptable_weights,
    adapter_source,
    of_all_experts,
    part_of,
    require_all_written,
    sizes,
)
from megaconv.errors import NotExpressible, UsageError
from megaconv.families import Family, family
from megaconv.megatron.distributed.bridge_files import ADAPTER_KIND, FUSED
from megaconv.megatron.distributed.keys import stack
from megaconv.model.adapter import AdapterInfo, LowRank, a_name, b_name, is_of_expert, of_each_expert
from megaconv.model.config import ModelConfig
from megaconv.model.ir import Key, OpenedSource, Source
from megaconv.model.naming import CORE
from megaconv.model.natives import NativeTensor
from megaconv.model.table import canonical_shapes

EXPERT_RANKS = 1
"""Tensor-parallel ranks of experts with adapters: with more, Bridge 0.3.1 neither saves nor loads them ("Duplicate ShardedObject keys",
since ParallelLinearAdapter writes the expert-parallel rank into the place of the tensor-parallel one)."""


class BridgeModule(NamedTuple):
    """A module of Bridge's that has an adapter in this model."""

    name: str
    """Its name on a rank."""
    weight: NativeTensor
    kind: str = ""
    """Of CanonicalLoRA: which part of a fused weight it is for; empty for an adapter of all of it."""

    @property
    def key(self) -> str:
        """The same for all layers' and experts'."""
        return f"{stack(self.name, layers=True)[0]} {self.kind}"


def bridge_modules(
    table: Family, config: ModelConfig, info: AdapterInfo, *, fused: bool, grouped: bool
) -> list[BridgeModule]:
    """In all layers, wherever any layer has them."""
    found = list(_all_modules(table, config, info, fused=fused, grouped=grouped))
    changed = {
        module.key.partition(" ")[0] for module in found if _weights(module.weight, config) & info.weights.keys()
    }
    return [module for module in found if module.key.partition(" ")[0] in changed]


def _all_modules(
    table: Family, config: ModelConfig, info: AdapterInfo, *, fused: bool, grouped: bool
) -> Iterator[BridgeModule]:
    for native_name, native in adaptable_weights(table, config, CORE).items():
        name, weight = native_name.removesuffix(".weight"), native
        if grouped and is_of_expert(next(iter(native.parts))):
            if ".local_experts.0." not in name:
                continue
            name, weight = name.replace(".local_experts.0.", "."), of_all_experts(native)
        if fused or len(weight.parts) == 1:
            yield BridgeModule(name, weight)
        else:
            yield from (BridgeModule(name, part_of(weight, part), part.split(".")[-2]) for part in weight.parts)


def _weights(weight: NativeTensor, config: ModelConfig) -> set[str]:
    return {name for part in weight.parts for name in of_each_expert(part, config.experts.count)}


def is_fused(table: Family, config: ModelConfig, info: AdapterInfo) -> bool:
    """Whether every module that Megatron fuses has one A for all of its weights, which is Bridge's LoRA."""
    modules = [native.parts for native in adaptable_weights(table, config, CORE).values()]
    changed = [parts for parts in modules if any(name in info.weights for name in parts)]
    return all(len({info.weights[name].a if name in info.weights else "" for name in parts}) == 1 for parts in changed)


def fitted(source: Source, *, tp: int, grouped: bool, kind: str | None) -> OpenedSource:
    """The same adapter in the modules that Bridge has. Raises NotExpressible for what it can't have, UsageError."""
    header = source.header
    info, config, table = header.adapter, header.config, family(header.config.family)
    assert info is not None
    if kind not in (None, FUSED):
        raise UsageError(
            f"--option {ADAPTER_KIND}={kind}: is not known; choose {FUSED}, or leave it out for an adapter as it is"
        )
    if info.is_dora:
        require_dora_fits(table, config, info.weights, tp)
    fused = kind == FUSED or info.is_dora or is_fused(table, config, info)
    modules = bridge_modules(table, config, info, fused=fused, grouped=grouped)
    fitting = _Fitting(dict(source.tensors()), info, config)
    rank = fitting.rank(modules, tp)
    scale = _one_scale(info)
    for module in modules:
        fitting.fit(module, rank, scale * rank)
    require_all_written(info, fitting.weights, "Megatron has no modules of theirs")
    return adapter_source(config, AdapterInfo(fitting.weights, info.base, info.dropout), fitting.made, header.source)


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
    """What becomes of an adapter's tensors."""

    found: Mapping[Key, LazyTensor]
    info: AdapterInfo
    config: ModelConfig
    made: dict[Key, LazyTensor] = field(default_factory=dict)
    weights: dict[str, LowRank] = field(default_factory=dict)

    def rank(self, modules: Iterable[BridgeModule], tp: int) -> int:
        """The least that every module can have, and that ranks can share."""
        needed = max(sum(low.rank for low in self._distinct(module.weight)) for module in modules)
        return -(-needed // tp) * tp

    def _distinct(self, weight: NativeTensor) -> list[LowRank]:
        """Of the parts that have an adapter, each A once."""
        lows = [self._low(part) for part in weight.parts]
        return list({low.a: low for low in lows if low is not None}.values())

    def _low(self, part: str) -> LowRank | None:
        """Raises NotExpressible where it stands for all experts' and theirs differ."""
        lows = {self.info.weights.get(name) for name in of_each_expert(part, self.config.experts.count)}
        if len(lows) > 1:
            raise NotExpressible(
                f"{part}: experts have adapters of their own, and a grouped layer of Megatron-Bridge has one pair of matrices for all of a "
                "rank's experts (LoRALinear around TEGroupedLinear); leave --moe-grouped-gemm out, which gives adapters for a run "
                "with moe_grouped_gemm=False, or merge the adapter into its base (--adapter)"
            )
        return lows.pop()

    def fit(self, module: BridgeModule, rank: int, alpha: float) -> None:
        """Adds the module's tensors, and what they are to its weights."""
        distinct, shared = self._distinct(module.weight), a_name(tuple(module.weight.parts))
        _, ins = sizes(module.weight)
        self.made[Key(shared)] = self._a(distinct, (rank, ins))
        firsts = {low.a: sum(each.rank for each in distinct[:number]) for number, low in enumerate(distinct)}
        for part, regions in module.weight.parts.items():
            low, b = self._low(part), b_name(part)
            self.made[Key(b)] = self._b(low, (sum(region.box.rows for region in regions), rank), firsts)
            if low and low.length:
                self.made[Key(low.length)] = self.found[Key(low.length)]
            for name in of_each_expert(part, self.config.experts.count):
                self.weights[name] = LowRank(shared, b, rank, alpha, low.length if low else "")

    def _a(self, distinct: Sequence[LowRank], shape: tuple[int, int]) -> LazyTensor:
        """One below the other, in the order of the parts."""
        sources = tuple(self.found[Key(low.a)] for low in distinct)
        if len(sources) == 1 and tuple(sources[0].shape) == shape:
            return sources[0]
        return Stack(sources, shape[0]) if sources else Window(shape, self._dtype)

    def _b(self, low: LowRank | None, shape: tuple[int, int], firsts: Mapping[str, int]) -> LazyTensor:
        """In the columns of its own A."""
        if low is None:
            return Window(shape, self._dtype)
        source = self.found[Key(low.b)]
        return source if tuple(source.shape) == shape else Window(shape, source.dtype, source, 0, firsts[low.a])

    @property
    def _dtype(self) -> str:
        return next(iter(self.found.values())).dtype


def require_dora_fits(table: Family, config: ModelConfig, weights: Collection[str], tp: int) -> None:
    """Raises NotExpressible for DoRA that Megatron-Bridge computes otherwise than peft, or not at all (dora.py, dora_layers.py)."""
    instead = "; merge the adapter into its base (--adapter) instead"
    if any(is_of_expert(name) for name in weights):
        raise NotExpressible(
            "DoRA of experts: Megatron-Bridge's DoRALinear gives tokens of an expert a further axis, and looks for a weight that grouped "
            f"layers don't have{instead}"
        )
    if any(name.endswith(".router.weight") for name in weights):
        raise NotExpressible(f"DoRA of a router: Megatron-Bridge has none{instead}")
    natives, shapes = adaptable_weights(table, config, CORE), canonical_shapes(table.rows, config)
    changed = {name: native for name, native in natives.items() if native.parts.keys() & set(weights)}
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
    table: Family, config: ModelConfig, weights: Collection[str], changed: Mapping[str, NativeTensor]
) -> None:
    """Raises NotExpressible where lengths would be needed of weights that have no adapter: those of the base's rows."""
    keys = {stack(name, layers=True)[0] for name in changed}
    for name, native in adaptable_weights(table, config, CORE).items():
        lacking: Sequence[str] = [part for part in native.parts if part not in weights]
        if lacking and stack(name, layers=True)[0] in keys:
            raise NotExpressible(
                f"DoRA without an adapter of {lacking[0]}: Megatron-Bridge has magnitudes for all of {name} in every layer, and those "
                "of a weight without an adapter are only in its base; merge the adapter into its base (--adapter) instead"
            )
