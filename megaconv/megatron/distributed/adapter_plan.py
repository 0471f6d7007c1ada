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
from megaconv.megatron.distributed.adapter_source import (
    ADAPTER,
    CANONICAL,
    DORA,
    LORA,
    rows_of_b,
    rows_of_lengths,
)
from megaconv.megatron.distributed.bridge_files import CONTENT
from megaconv.megatron.distributed.chunks import PlannedChunk, chunks_of
from megaconv.megatron.distributed.keys import EXTRA_STATE, stack, stacks_layers
from megaconv.megatron.distributed.plan import place
from megaconv.megatron.distributed.run_config import RUN_CONFIG
from megaconv.megatron.rank_files.iteration import at_iteration, directory_iteration
from megaconv.megatron.rank_files.plan import tracker_and_sidecars
from megaconv.model.adapter import AdapterInfo, LowRank, of_each_expert
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
    chunks, shapes, extras = _Keys(header, layout).of(modules)
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
    settings = _run_config(layout, kind, info, targets(modules, table, config), grouped=grouped)
    written: dict[str, FileLayout] = dict(files.layouts(nested_keys=False)) | {
        torch_dist.COMMON_FILE: torch_zip.plan(common, "common"),
        torch_dist.FORMAT_FILE: PlainFile(torch_dist.format_json("torch_dist")),
        RUN_CONFIG: PlainFile(yaml_bytes(settings)),
    }
    placements, _ = place(iter(stored), header, options)
    layouts = {f"{version}/{name}": each for name, each in written.items()}
    return OutputPlan(layouts | tracker_and_sidecars(header, iteration), placements)


def _extra_state(module: str, place: Shape, grid: Shape) -> str:
    """MODULE/_extra_state/shard_3_32: the name of the empty object of layer 3 of 32."""
    return f"{module}{EXTRA_STATE}/shard_{'.'.join(map(str, place))}_{'.'.join(map(str, grid))}"


class _Keys:
    """The tensors and objects of a distributed checkpoint."""

    def __init__(self, header: Header, layout: Layout) -> None:
        self._header, self._layout = header, layout
        self._stacked = stacks_layers(header.config)

    def of(
        self, modules: Sequence[BridgeModule]
    ) -> tuple[list[PlannedChunk], dict[str, Shape], list[str]]:
        """(chunks, shapes of whole tensors by key, names of empty objects)."""
        placed = [
            (*self._place(native.name), native)
            for module in modules
            for native in self._natives(module)
        ]
        last_place: dict[str, Shape] = {}
        for key, at, _ in placed:
            last_place[key] = tuple(map(max, zip(at, last_place.get(key, at), strict=True)))
        chunks = list[PlannedChunk]()
        shapes = dict[str, Shape]()
        extras = list[str]()
        for key, at, native in placed:
            dtype = native_dtype(self._header, native)
            chunks += chunks_of(native, key, at, dtype, self._ranks(native))
            grid = tuple(last + 1 for last in last_place[key])
            shapes[key] = (*grid, *native.shape)
            if key.endswith(".weight"):
                extras.append(_extra_state(key.removesuffix(".weight"), at or (0,), grid or (1,)))
        return chunks, shapes, extras

    def _place(self, name: str) -> tuple[str, Shape]:
        key, at = stack(name, layers=self._stacked)
        if ".local_experts." not in name:
            key = key.replace(".mlp.experts.", ".mlp.experts.experts.")
        return key, at

    def _natives(self, module: BridgeModule) -> Iterator[NativeTensor]:
        """The module's native tensors, with the rows of B and of magnitudes as a run of this layout saves them."""
        ranks = self._ranks(module.weight)
        lows = {part: self._low(part) for part in module.weight.parts}
        written = Module(rows_of_b(module.weight, "", ranks, module.name), lows)
        name = f"{module.name}{ADAPTER}{f'adapter_{module.kind}.' if module.kind else ''}"
        names = f"{name}linear_in.weight", f"{name}linear_out.weight", f"{name}weight_magnitude"
        yield from written.natives(names, rows_of_lengths(module.weight, ranks, module.name))

    def _ranks(self, native: NativeTensor) -> int:
        """The number of ranks that share a tensor."""
        return EXPERT_RANKS if native.of_experts else self._layout.tp

    def _low(self, part: str) -> LowRank:
        info = self._header.adapter
        assert info is not None
        return info.weights[next(of_each_expert(part, self._header.config.experts.count))]


def targets(modules: Sequence[BridgeModule], table: Family, config: ModelConfig) -> list[str]:
    """The names by which Bridge finds the modules: their last words, or patterns if the words also occur elsewhere.

    Linear layers of an MLP have the same names in dense layers, in experts and in shared experts.
    """
    natives = adaptable_weights(table, config, CORE)
    everywhere = {_place_of(name.removesuffix(".weight")) for name in natives}
    ours = {
        _place_of(module.name.replace(".mlp.experts.linear", ".mlp.experts.local_experts.0.linear"))
        for module in modules
    }
    found = set()
    for module in modules:
        word = module.name.rpartition(".")[2]
        place = _place_of(module.name)
        alone = all(other in ours for other in everywhere if other.rpartition(".")[2] == word)
        called = word if alone else f"*.{place}"
        found.add(called.removesuffix(word) + (_TARGETS[module.kind] if module.kind else word))
    return sorted(found)


def _place_of(name: str) -> str:
    """A module's path in its layer, with `*` for an expert's number: `mlp.experts.local_experts.*.linear_fc1`."""
    return _NUMBER.sub(".*.", name.split(".", 3)[3])


def _run_config(
    layout: Layout, kind: str, info: AdapterInfo, names: Sequence[str], *, grouped: bool
) -> dict[str, object]:
    """The settings that Bridge reads from a run that saved an adapter."""
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
        },
    }
