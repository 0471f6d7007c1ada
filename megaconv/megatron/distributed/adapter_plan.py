"""Lays out an adapter as Megatron-Bridge saves one: `torch_dist` of its matrices, and run_config.yaml with its alpha and modules.

Names and settings: adapter_source.py. Bridge has one rank and one alpha for all modules, and the same modules in all layers.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from formats import rank_files, torch_dist, torch_zip
from formats.distcp_files import DistcpFiles
from formats.output import FileLayout, PlainFile
from formats.tensor import Shape
from formats.yaml_file import yaml_bytes
from megaconv.engine.adapters.translation import a_tensor, b_tensor, linear_weights, module_of
from megaconv.engine.plan import OutputPlan, native_dtype
from megaconv.errors import LayoutError, NotExpressible, UsageError
from megaconv.families import family
from megaconv.megatron.distributed.adapter_source import ADAPTER, CANONICAL, LORA, canonical_part
from megaconv.megatron.distributed.bridge_files import CONTENT
from megaconv.megatron.distributed.chunks import PlannedChunk, chunks_of
from megaconv.megatron.distributed.keys import stack, stacks_layers
from megaconv.megatron.distributed.plan import place
from megaconv.megatron.distributed.run_config import RUN_CONFIG
from megaconv.megatron.rank_files.plan import iteration_of, tracker_and_sidecars
from megaconv.model.adapter import AdapterInfo, LowRank
from megaconv.model.ir import Header
from megaconv.model.layout import Layout
from megaconv.model.naming import CORE
from megaconv.model.natives import NativeTensor
from megaconv.options import SaveOptions

_TARGETS = {"q": "linear_q", "k": "linear_k", "v": "linear_v", "gate": "linear_fc1_gate", "up": "linear_fc1_up"}
"""Parts of fused weights -> what CanonicalLoRA calls them."""


def plan_adapter(header: Header, info: AdapterInfo, options: SaveOptions, layout: Layout) -> OutputPlan:
    """Raises UsageError for another format, NotExpressible for an adapter that Bridge can't have, LayoutError."""
    if options.ckpt_format != "torch_dist":
        raise UsageError(
            f"--ckpt-format {options.ckpt_format}: Megatron-Bridge has adapters in torch_dist alone; give --ckpt-format torch_dist"
        )
    rank, alpha = _one_rank_and_alpha(info)
    if rank % layout.tp:
        raise LayoutError(
            f"rank = {rank} can't be divided over tp = {layout.tp}, as Megatron-Bridge does with every A; choose a tp that divides it",
            code="layout-indivisible",
        )
    weights = linear_weights(family(header.config.family), header.config, CORE)
    fused = _is_fused(weights, info)
    modules = list(_modules(weights, info, layout.tp, fused=fused))
    matrices = [
        matrix
        for name, weight, low in modules
        for matrix in (
            a_tensor(weight, f"{name}.linear_in.weight", low.a, rank),
            b_tensor(weight, f"{name}.linear_out.weight", rank),
        )
    ]
    chunks, shapes = _chunks(matrices, header, layout.tp)
    files, version = DistcpFiles(options.files or 1), rank_files.iteration_directory(iteration_of(header, options))
    stored = [
        (chunk, *files.add_chunk(chunk.key, shapes[chunk.key], chunk.dtype, chunk.offset, chunk.shape))
        for chunk in chunks
    ]
    common = {
        "checkpoint_version": 3.0,
        "iteration": header.training.iteration or 1,
        "content_metadata": CONTENT,
    }
    targets = sorted({_target(name) for name, _, _ in modules})
    written: dict[str, FileLayout] = dict(files.layouts(nested_keys=False)) | {
        torch_dist.COMMON_FILE: torch_zip.plan(common, "common"),
        torch_dist.FORMAT_FILE: PlainFile(torch_dist.format_json("torch_dist")),
        RUN_CONFIG: PlainFile(_run_config(layout, LORA if fused else CANONICAL, rank, alpha, info.dropout, targets)),
    }
    placements, _ = place(((chunk, f"{version}/{file}", record) for chunk, file, record in stored), header, options)
    layouts = {f"{version}/{name}": each for name, each in written.items()}
    return OutputPlan(layouts | tracker_and_sidecars(header, iteration_of(header, options)), placements)


def _one_rank_and_alpha(info: AdapterInfo) -> tuple[int, float]:
    kinds = Counter((low.rank, low.alpha) for low in info.weights.values())
    if len(kinds) > 1:
        first, second = list(kinds)[:2]
        raise NotExpressible(
            f"modules of rank {first[0]} with alpha {first[1]:g} and of rank {second[0]} with alpha {second[1]:g}: Megatron-Bridge has "
            "one of each for all; merge the adapter into its base (--adapter) instead"
        )
    return next(iter(kinds))


def _is_fused(weights: Mapping[str, NativeTensor], info: AdapterInfo) -> bool:
    """Whether every module that Megatron fuses has one A for all of its weights, which is Bridge's LoRA."""
    changed = [weight for weight in weights.values() if any(name in info.weights for name in weight.parts)]
    return all(
        len({info.weights[name].a for name in weight.parts if name in info.weights}) == 1
        and all(name in info.weights for name in weight.parts)
        for weight in changed
    )


def _modules(
    weights: Mapping[str, NativeTensor], info: AdapterInfo, tp: int, *, fused: bool
) -> Iterator[tuple[str, NativeTensor, LowRank]]:
    """(name of an adapter, the weight that it is for, its matrices)."""
    for native_name, weight in weights.items():
        name = f"{native_name.removesuffix('.weight')}{ADAPTER}".removesuffix(".")
        if fused or len(weight.parts) == 1:
            low = module_of(weight, info)
            if low is not None:
                yield name, weight, low
            continue
        for part in weight.parts:
            if part in info.weights:
                kind = part.split(".")[-2]
                yield f"{name}.adapter_{kind}", canonical_part(weight, kind, tp, native_name), info.weights[part]


def _chunks(matrices: Sequence[NativeTensor], header: Header, tp: int) -> tuple[list[PlannedChunk], dict[str, Shape]]:
    """(chunks, shapes of whole tensors by key). Raises NotExpressible where only some of the layers have a module's adapter."""
    stacked, chunks, shapes = stacks_layers(header.config), list[PlannedChunk](), dict[str, Shape]()
    layers: Counter[str] = Counter()
    for matrix in matrices:
        key, at = stack(matrix.name, layers=stacked)
        chunks += chunks_of(matrix, key, at, native_dtype(header, matrix), tp)
        shapes[key] = (*(header.config.layer_count for _ in at), *matrix.shape)
        layers[key] += 1
    for key, count in layers.items():
        if stacked and count != header.config.layer_count:
            raise NotExpressible(
                f"{key}: {count} of {header.config.layer_count} layers have this adapter; Megatron-Bridge saves all layers in one "
                "tensor. Merge the adapter into its base (--adapter) instead"
            )
    return chunks, shapes


def _target(name: str) -> str:
    """What Bridge's target_modules call the module of an adapter."""
    module, _, kind = name.rpartition(f"{ADAPTER}adapter_")
    return _TARGETS.get(kind, kind) if module else name.removesuffix(ADAPTER.rstrip(".")).rpartition(".")[2]


def _run_config(layout: Layout, kind: str, rank: int, alpha: float, dropout: float, targets: Sequence[str]) -> bytes:
    """What Bridge reads of a run that saved an adapter."""
    settings = {
        "model": {"tensor_model_parallel_size": layout.tp, "pipeline_model_parallel_size": layout.pp},
        "checkpoint": {"save_optim": False, "save_rng": False, "fully_parallel_save": False},
        "peft": {
            "_target_": kind,
            "target_modules": list(targets),
            "dim": rank,
            "alpha": int(alpha) if alpha == int(alpha) else alpha,
            "dropout": dropout,
        },
    }
    return yaml_bytes(settings)
