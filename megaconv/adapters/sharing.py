"""Detects matrices of an adapter that a file repeats, but that Megatron-Bridge has once.

peft has an A for each of q, k and v, and both matrices for each expert. Bridge's LoRA has one A for a fused layer, and
one pair of matrices for a grouped layer of experts. Matrices with equal bits are treated as one tensor.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from formats.tensor import LazyTensor
from megaconv.adapters.derived import are_equal
from megaconv.adapters.translation import adaptable_weights, adapter_source
from megaconv.families import Family
from megaconv.model.adapter import LowRank, a_name, is_of_expert, of_any_expert
from megaconv.model.ir import Key, OpenedSource
from megaconv.model.naming import CORE


def with_shared(opened: OpenedSource, family: Family) -> OpenedSource:
    """The same adapter, with equal matrices as one tensor wherever Megatron fuses their weights."""
    info = opened.header.adapter
    assert info is not None
    modules = [
        tuple(native.parts)
        for native in adaptable_weights(family, opened.header.config, CORE).values()
    ]
    found = dict(opened.by_key)
    weights = dict(info.weights)
    for parts in modules:
        weights |= _one_a(parts, weights, found)
    weights |= _one_expert(modules, weights, found)
    return adapter_source(
        opened.header.config, replace(info, weights=weights), found, opened.header.source
    )


def _one_a(
    parts: Sequence[str], weights: Mapping[str, LowRank], found: dict[Key, LazyTensor]
) -> dict[str, LowRank]:
    """The adapters of a fused module's parts with one shared A; empty if the parts have different ones."""
    if len(parts) < 2 or any(name not in weights for name in parts):
        return {}
    lows = [weights[name] for name in parts]
    if len({(low.rank, low.alpha) for low in lows}) > 1:
        return {}
    sources = [found[Key(low.a)] for low in lows]
    if len({low.a for low in lows}) > 1 and not are_equal(sources):
        return {}
    shared = a_name(parts)
    found[Key(shared)] = sources[0]
    return {name: weights[name]._replace(a=shared) for name in parts}


def _one_expert(
    modules: Iterable[Sequence[str]], weights: Mapping[str, LowRank], found: dict[Key, LazyTensor]
) -> dict[str, LowRank]:
    """The adapters of all experts of a layer with one pair of matrices; empty if the experts' matrices differ."""
    alike: dict[tuple[str, ...], list[Sequence[str]]] = {}
    for parts in modules:
        if is_of_expert(parts[0]):
            alike.setdefault(tuple(map(of_any_expert, parts)), []).append(parts)
    changed: dict[str, LowRank] = {}
    for each_expert in alike.values():
        shared = [_one_of(names, weights, found) for names in zip(*each_expert, strict=True)]
        if all(shared):
            for one in shared:
                changed |= one
    return changed


def _one_of(
    names: Sequence[str], weights: Mapping[str, LowRank], found: dict[Key, LazyTensor]
) -> dict[str, LowRank]:
    lows = [weights[name] for name in names if name in weights]
    settings = {(low.rank, low.alpha, low.length) for low in lows}
    if len(lows) < len(names) or len(settings) > 1:
        return {}
    for matrices in ([low.a for low in lows], [low.b for low in lows]):
        if not are_equal(found[Key(name)] for name in matrices):
            return {}
    first = lows[0]
    shared = first._replace(
        a=of_any_expert(first.a),
        b=of_any_expert(first.b),
    )
    found[Key(shared.a)] = found[Key(first.a)]
    found[Key(shared.b)] = found[Key(first.b)]
    return dict.fromkeys(names, shared)
