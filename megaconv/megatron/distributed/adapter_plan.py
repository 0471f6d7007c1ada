"""Plans an adapter as Megatron-Bridge saves it: `torch_dist` matrices, and run_config.yaml with alpha and modules.

adapter_source.py describes names and settings. The adapter is one that Bridge supports (adapter_fit.py): the same
modules in all layers, with one rank and one alpha. Each of its layers has an empty `_extra_state`, which Bridge asks
for.
"""

import re
from collections.abc import Iterator, Sequence

from formats import rank_files, torch_dist, torch_zip
from formats.distcp_files import DistcpFiles
from formats.output import FileLayout, PlainFile
from formats.tensor import Shape
from formats.yaml_file import yaml_bytes
from megaconv.adapters.translation import Module, adaptable_weights
from megaconv.engine.plan import OutputPlan, native_dtype
from megaconv.errors import UsageError
from megaconv.families import Family, family
from megaconv.megatron.distributed.adapter_fit import (
    EXPERT_RANKS,
    BridgeModule,
    bridge_modules,
    is_fused,
)
from megaconv.megatron.distributed.adapter_rows import rows_of_b, rows_of_lengths
from megaconv.megatron.distributed.adapter_settings import CANONICAL, DORA, LORA
from megaconv.megatron.distributed.bridge_files import CONTENT
from megaconv.megatron.distributed.chunks import PlannedChunk, chunks_of
from megaconv.megatron.distributed.keys import ADAPTER, EXTRA_STATE, stack, stacks_layers
from megaconv.megatron.distributed.plan import place
from megaconv.megatron.distributed.run_config import RUN_CONFIG
from megaconv.megatron.rank_files.iteration import at_iteration, directory_iteration
from megaconv.megatron.rank_files.plan import tracker_and_sidecars
from megaconv.model.adapter import AdapterInfo
from megaconv.model.config import ModelConfig
from megaconv.model.ir import Header
from megaconv.model.layout import Layout
from megaconv.model.naming import CORE
from megaconv.model.natives import NativeTensor
from megaconv.options import SaveOptions

_TARGETS = {
    "q": "linear_q",
    "k": "linear_k",
    "v": "linear_v",
    "gate": "linear_fc1_gate",
    "up": "linear_fc1_up",
}
"""Parts of fused weights -> CanonicalLoRA's names for them."""
_NUMBER = re.compile(r"\.\d+\.")


def plan_adapter(
    header: Header, info: AdapterInfo, options: SaveOptions, layout: Layout
) -> OutputPlan:
    """The plan of an adapter. Raises UsageError for another format, LayoutError."""
    if options.ckpt_format != "torch_dist":
        raise UsageError(
            f"--ckpt-format {options.ckpt_format}: Megatron-Bridge has adapters in torch_dist alone; give --ckpt-format torch_dist"
        )
    config, grouped = header.config, options.grouped_experts
    table = family(config.family)
    fused = is_fused(table, config, info)
    modules = bridge_modules(table, config, info, fused=fused, grouped=grouped)
    chunks, shapes, extras = _Keys(header, info, layout, grouped=grouped).of(modules)
    header = at_iteration(header, options, without_releases=True)
    iteration = directory_iteration(header.training)
    version = rank_files.iteration_directory(iteration)
    files = DistcpFiles(options.files or 1)
    stored = []
    for chunk in chunks:
        shape = shapes[chunk.key]
        file, record = files.add_chunk(chunk.key, shape, chunk.dtype, chunk.offset, chunk.shape)
        stored.append((chunk, f"{version}/{file}", record))
    for name in extras:
        files.add_object(name, [None])
    common = {
        "checkpoint_version": 3.0,
        "iteration": header.training.iteration,
        "content_metadata": CONTENT,
    }
    kind = LORA if fused else CANONICAL
    if info.is_dora:
        kind = DORA
    names = targets(modules, table, config, canonical=kind == CANONICAL, grouped=grouped)
    separate = grouped and config.experts.count > 0 and not info.experts_share
    settings = _run_config(layout, kind, info, names, grouped=grouped, separate=separate)
    written: dict[str, FileLayout] = dict(files.layouts(nested_keys=False)) | {
        torch_dist.COMMON_FILE: torch_zip.plan(common, "common"),
        torch_dist.FORMAT_FILE: PlainFile(torch_dist.format_json("torch_dist")),
        RUN_CONFIG: PlainFile(yaml_bytes(settings)),
    }
    placements, _ = place(iter(stored), header, options)
    layouts = {f"{version}/{name}": each for name, each in written.items()}
    return OutputPlan(layouts | tracker_and_sidecars(header, iteration), placements)


def _extra_state(key: str, place: Shape, grid: Shape) -> str:
    """MODULE._extra_state/shard_3_32: the name of the empty object of layer 3 of 32."""
    return f"{key.removesuffix('.weight')}{EXTRA_STATE}/shard_{'.'.join(map(str, place))}_{'.'.join(map(str, grid))}"


class _Keys:
    """The tensors and objects of a distributed checkpoint."""

    def __init__(self, header: Header, info: AdapterInfo, layout: Layout, *, grouped: bool) -> None:
        self._header, self._info, self._layout, self._grouped = header, info, layout, grouped
        self._stacked = stacks_layers(header.config)

    def of(
        self, modules: Sequence[BridgeModule]
    ) -> tuple[list[PlannedChunk], dict[str, Shape], list[str]]:
        """(chunks, shapes of whole tensors by key, names of empty objects)."""
        placed = [
            (*stack(native.name, layers=self._stacked), native)
            for module in modules
            for native in self._natives(module)
        ]
        last_place: dict[str, Shape] = {}
        for key, at, _ in placed:
            last_place[key] = tuple(map(max, zip(at, last_place.get(key, at), strict=True)))
        chunks = list[PlannedChunk]()
        shapes = dict[str, Shape]()
        extras = dict[str, None]()
        for key, at, native in placed:
            dtype = native_dtype(self._header, native)
            chunks += chunks_of(native, key, at, dtype, self._ranks(native))
            grid = tuple(last + 1 for last in last_place[key])
            shapes[key] = (*grid, *native.shape)
            if self._has_extra_state(key, native):
                # The objects of a grouped layer have no axis for its experts.
                axes = len(grid) - (self._grouped and native.of_experts)
                extras[_extra_state(key, at[:axes] or (0,), grid[:axes] or (1,))] = None
        return chunks, shapes, list(extras)

    def _has_extra_state(self, key: str, native: NativeTensor) -> bool:
        """True for a matrix of a linear layer. The adapters of each expert of a grouped layer are plain parameters."""
        of_group = self._grouped and native.of_experts
        return key.endswith(".weight") and (self._info.experts_share or not of_group)

    def _natives(self, module: BridgeModule) -> Iterator[NativeTensor]:
        """The module's native tensors, with the rows of B and of magnitudes as a run of this layout saves them."""
        ranks = self._ranks(module.weight)
        lows = {part: self._info.weights[part] for part in module.weight.parts}
        halved = bool(module.kind)
        rows = rows_of_b(module.weight, "", ranks, module.name, halved=halved)
        lengths = rows_of_lengths(module.weight, ranks, module.name)
        name = f"{module.name}{ADAPTER}{f'adapter_{module.kind}.' if module.kind else ''}"
        names = f"{name}linear_in.weight", f"{name}linear_out.weight", f"{name}weight_magnitude"
        yield from Module(rows, lows).natives(names, lengths)

    def _ranks(self, native: NativeTensor) -> int:
        """The number of ranks that share a tensor."""
        return EXPERT_RANKS if native.of_experts else self._layout.tp


def targets(
    modules: Sequence[BridgeModule],
    table: Family,
    config: ModelConfig,
    *,
    canonical: bool,
    grouped: bool,
) -> list[str]:
    """The names by which Bridge finds the modules: their last words, or patterns if the words also occur elsewhere.

    Linear layers of an MLP have the same names in dense layers, in experts and in shared experts.
    """
    natives = adaptable_weights(table, config, CORE)
    everywhere = {_place_of(name.removesuffix(".weight")) for name in natives}
    ours = {_place_of(module.name) for module in modules}
    found = set()
    for module in modules:
        word = module.name.rpartition(".")[2]
        place = _place_of(module.name)
        alone = all(other in ours for other in everywhere if other.rpartition(".")[2] == word)
        if grouped:
            place = place.replace(".local_experts.*.", ".")
        called = word if alone else f"*.{place}"
        words = [_TARGETS[module.kind]] if module.kind else [word]
        if canonical and not module.kind and word == "linear_fc1":
            # CanonicalLoRA has one A here, but knows the layer by the names of its parts alone.
            words = [_TARGETS["gate"], _TARGETS["up"]]
        found |= {called.removesuffix(word) + each for each in words}
    return sorted(found)


def _place_of(name: str) -> str:
    """A module's path in its layer, with `*` for an expert's number: `mlp.experts.local_experts.*.linear_fc1`."""
    return _NUMBER.sub(".*.", name.split(".", 3)[3])


def _run_config(
    layout: Layout,
    kind: str,
    info: AdapterInfo,
    names: Sequence[str],
    *,
    grouped: bool,
    separate: bool,
) -> dict[str, object]:
    """The settings that Bridge reads from a run that saved an adapter.

    separate: True if each expert of a grouped layer has its own adapter, which releases before 0.5 don't know.
    """
    of_experts = {"share_expert_adapters": False} if separate else {}
    low = next(iter(info.weights.values()))
    return {
        "model": {
            "tensor_model_parallel_size": layout.tp,
            "pipeline_model_parallel_size": layout.pp,
            "expert_tensor_parallel_size": EXPERT_RANKS,
            "moe_grouped_gemm": grouped,
        },
        "checkpoint": {"save_optim": False, "save_rng": False, "fully_parallel_save": False},
        "peft": {
            "_target_": kind,
            "target_modules": list(names),
            "dim": low.rank,
            "alpha": int(low.alpha) if low.alpha == int(low.alpha) else low.alpha,
            "dropout": info.dropout,
            **of_experts,
        },
    }
