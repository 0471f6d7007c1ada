"""The adapters of a run that is only described, from the family's table. They are those that `models/lora/attached.py` adds."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from megaconv.planning.adapters import LayerAdapters
from megatron_lite.models.lora.parameters import Sharding, adapter_parameters
from megatron_lite.models.lora.shares import (
    Module,
    Share,
    Whole,
    of_all_experts,
    refuse_dora,
    require_own,
    shares_of,
)
from megatron_lite.models.lora.targets import is_target
from megatron_lite.parallel.parameter_kinds import Kind
from megatron_lite.parallel.parameters import ParameterInfo, adapter_info
from megatron_lite.settings.options import LoRA

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_NEVER = (".router.weight", ".conv1d.weight")
"""Matrices of layers whose modules take no adapter."""
_PLACES = {
    "fc1": ("mlp.linear_fc1", "shared_experts.linear_fc1", "local_experts.linear_fc1"),
    "fc2": ("mlp.linear_fc2", "shared_experts.linear_fc2", "local_experts.linear_fc2"),
}
_OUTPUTS = (".linear_proj", ".out_proj")
"""Ends of the names of mixers' last matrices."""
_FIELDS = {Sharding.COLUMNS: "columns", Sharding.ROWS: "rows", Sharding.NOT_AT_ALL: "whole"}
"""Sharding -> the field of LayerAdapters for the numbers between A and B."""
_SCALED = {
    Sharding.COLUMNS: "scaled", Sharding.ROWS: "scaled_sums", Sharding.NOT_AT_ALL: "scaled_sums",
}  # fmt: skip
"""Sharding -> the field of LayerAdapters for outputs with DoRA."""


@dataclass(frozen=True)
class PlannedAdapter:
    """The adapter of one matrix."""

    layer: int
    """Number of its layer in the chunk."""
    path: str
    """The path of the matrix in the chunk."""
    shares: tuple[Share, ...]
    sharding: Sharding
    infos: tuple[ParameterInfo, ...]
    """A and B of each share, and with DoRA its magnitude."""


def planned_adapters(
    infos: Iterable[ParameterInfo],
    modules: Mapping[str, Whole],
    lora: LoRA,
    tp: int,
    *,
    sequence: bool,
) -> Iterator[PlannedAdapter]:
    """Yield the adapters of a chunk. infos: the chunk's own parameters. modules: modules_of the model."""
    shared = of_all_experts(modules)
    of_experts, others = list[Module](), list[Module]()
    for own in infos:
        path, _, last = own.name.rpartition(".")
        layer = _LAYER.match(own.name)
        if last != "weight" or layer is None or not _takes_adapter(own):
            continue
        possible = shares_of(own.native, modules)
        shares = tuple(share for share in possible if is_target(share.module, path, lora.targets))
        if not shares:
            continue
        require_own(shares, shared, trains=True)
        sharding = _sharding(own, shares)
        adapted = of_experts if sharding is Sharding.EXPERTS else others
        adapted += [share.module for share in shares]
        made = adapter_parameters(path, shares, sharding, lora)
        found = [
            adapter_info(own.chunk, native, declaration, tp, sequence=sequence)
            for native, declaration in made
        ]
        yield PlannedAdapter(int(layer[1]), path, shares, sharding, tuple(found))
    if lora.dora:
        refuse_dora(of_experts, others)


def _takes_adapter(own: ParameterInfo) -> bool:
    return (
        own.is_matrix
        and len(own.native.shape) == 2
        and own.kind not in (Kind.UNTRAINED, Kind.CONSTANT)
        and not own.name.endswith(_NEVER)
    )


def _sharding(own: ParameterInfo, shares: Iterable[Share]) -> Sharding:
    """Return the sharding of a matrix. One that a single tensor rank holds counts as sharded by columns."""
    if own.kind is Kind.EXPERT:
        return Sharding.EXPERTS
    if own.replicated:
        return Sharding.NOT_AT_ALL
    is_part = any(share.width < share.module.width for share in shares)
    return Sharding.ROWS if is_part else Sharding.COLUMNS


def layer_adapters(adapters: Iterable[PlannedAdapter], lora: LoRA) -> LayerAdapters:
    """Return the sizes of one layer's adapters on a rank."""
    sizes = Counter[str]()
    places = set[str]()
    experts = dict[str, int]()
    widths = dict[str, int]()
    dropped = 0
    for adapter in adapters:
        places.add(_place(adapter.path))
        count = sum(prod(info.native.shape) for info in adapter.infos)
        numbers = lora.rank * len(adapter.shares)
        width = adapter.shares[0].width
        if adapter.sharding is Sharding.EXPERTS:
            sizes["experts"] += count
            # Each row passes one of the experts.
            experts[_place(adapter.path)] = numbers
            widths[_place(adapter.path)] = width
        else:
            sizes["dense"] += count
            sizes[_FIELDS[adapter.sharding]] += numbers
            dropped += width
            rows = sum(share.out for share in adapter.shares) if lora.dora else 0
            sizes[_SCALED[adapter.sharding]] += rows
            if adapter.sharding is Sharding.ROWS:
                sizes["lengths"] += rows
        sizes["copied"] += numbers * width
    return LayerAdapters(
        **sizes,
        of_expert=sum(experts.values()),
        dropped=dropped if lora.dropout else 0,
        dropped_of_expert=sum(widths.values()) if lora.dropout else 0,
        inputs=frozenset(places),
    )


def _place(path: str) -> str:
    """Return the place of a matrix in its layer: one of INPUTS, or `output` for a mixer's last matrix."""
    if path.endswith(_OUTPUTS):
        return "output"
    found = (place for place, ends in _PLACES.items() if path.endswith(ends))
    return next(found, "mixer")
