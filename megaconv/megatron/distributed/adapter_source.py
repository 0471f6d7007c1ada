"""The adapter of a Megatron-Bridge run: a distributed checkpoint of only the trained matrices.

    decoder.layers.self_attention.linear_qkv.adapter.linear_in.weight             [layers, rank, in]        LoRA: one A for q, k, v
    decoder.layers.self_attention.linear_qkv.adapter.linear_out.weight            [layers, out, rank]       rows as the weight has them
    decoder.layers.self_attention.linear_qkv.adapter.weight_magnitude             [layers, out]             DoRA
    decoder.layers.self_attention.linear_qkv.adapter.adapter_q.linear_in.weight                             CanonicalLoRA: one for each
    decoder.layers.mlp.linear_fc1.adapter.adapter_gate.linear_out.weight
    decoder.layers.mlp.experts.experts.linear_fc2.adapter.linear_in.weight        [layers, rank, in]        grouped experts: one for all
    decoder.layers.mlp.experts.experts.linear_fc2.adapter.linear_in.weight        [layers, experts, rank, in]     sequential: one for each

run_config.yaml has its alpha (`peft: {_target_: megatron.bridge.peft.lora.LoRA, dim: 32, alpha: 32 ...}`). Source:
lora.py, dora.py, dora_layers.py, canonical_lora.py, utils.py and adapter_wrapper.py in megatron/bridge/peft,
checkpointing.py in megatron/bridge/training, 0.3.1; sharded_state_dict() of megatron/core/transformer/moe/experts.py.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from formats.chunked import ChunkedTensor
from formats.errors import CorruptCheckpoint, UnsupportedInput
from formats.tensor import Box, LazyTensor
from formats.yaml_file import read_yaml
from megaconv.adapters.translation import (
    Pair,
    adaptable_weights,
    of_all_experts,
    open_pairs,
    part_of,
)
from megaconv.engine.sidecars import SIDECAR_DIRECTORY
from megaconv.errors import TensorMismatch, UsageError
from megaconv.families import read_config
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.megatron.distributed.adapter_fit import require_dora_fits
from megaconv.megatron.distributed.keys import EXTRA_STATE, model_tensors, unstack
from megaconv.megatron.distributed.run_config import RUN_CONFIG
from megaconv.model.ir import OpenedSource
from megaconv.model.layout import divide
from megaconv.model.naming import CORE
from megaconv.model.natives import NativeTensor
from megaconv.model.regions import Region
from megaconv.options import LoadOptions

ADAPTER = ".adapter."
"""A part of the names of an adapter's tensors."""
LORA = "megatron.bridge.peft.lora.LoRA"
CANONICAL = "megatron.bridge.peft.canonical_lora.CanonicalLoRA"
OPTION = "lora_alpha"
DORA = "megatron.bridge.peft.dora.DoRA"
_TENSOR = re.compile(
    r"(.+)\.adapter\.(?:(?:adapter_(\w+)\.)?linear_(in|out)\.weight|weight_(magnitude))"
)
_EXPERTS = re.compile(r"(.*\.mlp\.experts\.)experts\.(?!\d)(.+)")
_LAYER = re.compile(r"decoder\.layers\.\d+\.")
_MOST_RANKS = 1 << 16
_GROUPED = "grouped."


class Settings(NamedTuple):
    """The settings of an adapter in run_config.yaml."""

    alpha: float
    dropout: float
    tp: int
    """Tensor-parallel size of the run that saved it; 0 if it isn't known."""
    etp: int
    dora: bool = False


def is_adapter(tensors: Mapping[str, ChunkedTensor]) -> bool:
    """True if a distributed checkpoint holds only an adapter, according to its names."""
    names = list(model_tensors(tensors)[0])
    return bool(names) and all(ADAPTER in name for name in names)


def open_adapter_source(
    version: Path, tensors: Mapping[str, ChunkedTensor], options: LoadOptions
) -> OpenedSource:
    """Open an adapter as a source.

    Raises CheckpointError for an adapter of another model, of another kind than LoRA, or without one of its matrices.
    """
    directory = options.config or version.parent / SIDECAR_DIRECTORY
    if not (directory / CONFIG_NAME).is_file():
        raise UsageError(
            f"{version}: is an adapter of Megatron-Bridge, which holds only what is added to a model; give --config with the "
            "Hugging Face directory of its base, and --saver peft",
            code="config-needed",
        )
    table, config = read_config(directory / CONFIG_NAME)
    settings = _settings(version, options)
    pairs = list(_pairs(version, tensors, adaptable_weights(table, config, CORE), settings))
    if settings.dora:
        require_dora_fits(
            table, config, {name for pair in pairs for name in pair.weight.parts}, settings.tp
        )
    kind = "DoRA" if settings.dora else "LoRA"
    return open_pairs(
        config, pairs,
        base="", dropout=settings.dropout, source=f"core, torch_dist format of Megatron-Bridge, {kind}", where=str(version),
    )  # fmt: skip


def _settings(version: Path, options: LoadOptions) -> Settings:
    path = next(
        (each for each in (version / RUN_CONFIG, version.parent / RUN_CONFIG) if each.is_file()),
        None,
    )
    if path is None:
        if OPTION not in options.extra:
            raise UsageError(
                f"{version}: has no {RUN_CONFIG}, which says the alpha of its LoRA; give --option {OPTION}=NUMBER"
            )
        return Settings(_positive(options.extra[OPTION], f"--option {OPTION}"), 0.0, 0, 0)
    settings = read_yaml(path)
    sections = settings if isinstance(settings, dict) else {}
    peft, model = sections.get("peft"), sections.get("model")
    if not isinstance(peft, dict):
        raise CorruptCheckpoint(f"{path}: has no `peft:` with the settings of its adapter")
    kind = str(peft.get("_target_", LORA))
    if kind not in (LORA, CANONICAL, DORA):
        raise UnsupportedInput(
            f"{path}: an adapter of {kind}; only LoRA, CanonicalLoRA and DoRA are translated"
        )
    dropout = peft.get("dropout", 0.0)
    if not isinstance(dropout, (int, float)) or not 0 <= dropout <= 1:
        raise CorruptCheckpoint(f"{path}: dropout {dropout!r:.40}: expected a number from 0 to 1")
    tp = _ranks(path, model, "tensor_model_parallel_size") or 1
    etp = _ranks(path, model, "expert_tensor_parallel_size") or tp
    alpha = options.extra.get(OPTION, peft.get("alpha"))
    return Settings(_positive(alpha, f"{path}: peft: alpha"), float(dropout), tp, etp, kind == DORA)


def _ranks(path: Path, model: Any, name: str) -> int:
    """A number of ranks in a configuration; 0 if it is missing."""
    found = model.get(name) if isinstance(model, dict) else None
    if found is not None and (type(found) is not int or not 1 <= found <= _MOST_RANKS):
        raise CorruptCheckpoint(f"{path}: {name} {found!r:.40}: expected a number of ranks")
    return found or 0


def _positive(word: Any, what: str) -> float:
    try:
        number = float(word)
    except (TypeError, ValueError):
        number = 0.0
    if not 0 < number < 1 << 31:
        raise UsageError(f"{what} {word!r:.40}: expected a positive number")
    return number


def _pairs(
    version: Path,
    tensors: Mapping[str, ChunkedTensor],
    weights: Mapping[str, NativeTensor],
    settings: Settings,
) -> Iterator[Pair]:
    held = _parts_by_module(version, tensors, weights)
    for (module, kind), parts in held.items():
        adapter = f"adapter_{kind}" if kind else ""
        name = f"{module}{ADAPTER}{adapter}".rstrip(".")
        if not {"in", "out"} <= parts.keys():
            raise TensorMismatch(
                f"{version}: {name} has only one of its two matrices", code="missing-tensor"
            )
        if settings.dora != ("magnitude" in parts):
            has = "no" if settings.dora else "a"
            raise TensorMismatch(
                f"{version}: {name} has {has} weight_magnitude, "
                "but its settings require the opposite"
            )
        native = f"{module}.weight"
        weight = weights[_first_of(native)]
        if _first_of(native) != native:
            weight = of_all_experts(weight)
        ranks = settings.etp if weight.of_experts else settings.tp
        where = f"{version}: {name}"
        rows = rows_of_b(weight, kind, ranks, where)
        lengths = rows_of_lengths(weight, ranks, where) if settings.dora else None
        yield Pair(
            rows, parts["in"], parts["out"], settings.alpha, name, parts.get("magnitude"), lengths
        )


def _parts_by_module(
    version: Path, tensors: Mapping[str, ChunkedTensor], weights: Mapping[str, NativeTensor]
) -> dict[tuple[str, str], dict[str, LazyTensor]]:
    """(module, kind of adapter) -> the adapter's tensors: `in`, `out` and `magnitude`.

    Raises TensorMismatch for a tensor of anything that is not a linear layer.
    """
    model, _ = model_tensors(tensors)
    stacked = {
        _grouped(name, tensor): tensor for name, tensor in model.items() if EXTRA_STATE not in name
    }
    held: dict[tuple[str, str], dict[str, LazyTensor]] = {}
    for name, tensor in unstack(stacked).items():
        found = _TENSOR.fullmatch(name)
        if found is None or _first_of(f"{found[1]}.weight") not in weights:
            raise TensorMismatch(
                f"{version}: {name} is no adapter of a linear layer of the model",
                code="unknown-tensor",
            )
        parts = held.setdefault((found[1], found[2] or ""), {})
        parts[found[3] or found[4]] = tensor
    return held


def _grouped(name: str, tensor: ChunkedTensor) -> str:
    """The name with another word for the second `experts` if the tensor has no axis for them."""
    found, stacked = _EXPERTS.fullmatch(name), _LAYER.match(name) is None
    if found is None or len(tensor.shape) != 2 + stacked:
        return name
    return f"{found[1]}{_GROUPED}{found[2]}"


def _first_of(native: str) -> str:
    """The name of the first expert's weight, for a tensor of all experts of a grouped layer."""
    return native.replace(f".experts.{_GROUPED}", ".experts.local_experts.0.")


def rows_of_b(weight: NativeTensor, kind: str, ranks: int, where: str) -> NativeTensor:
    """The weight with its rows in the order in which a run on `ranks` ranks saves B.

    kind: the part of a fused weight that `adapter_<kind>` adapts; empty for the whole weight.
    ranks: 0 if the number isn't known, which is an error for B of linear_fc1.

    Megatron-Bridge saves B of linear_fc1 as [gate; up] on every rank, even if it is only one of them, or if the layer
    has no gate. The first half of each rank's rows comes before all second halves.
    """
    part = weight
    if kind:
        name = next((name for name in weight.parts if name.endswith(f".{kind}.weight")), None)
        if name is None or len(weight.parts) < 2:
            raise TensorMismatch(
                f"{where}: {weight.name} has no part of this name", code="unknown-tensor"
            )
        part = part_of(weight, name)
    if not is_fc1(weight) or len(part.parts) > 1 or ranks == 1:
        return part
    _require_known(ranks, where)
    (name,), (rows, ins) = part.parts, part.shape
    half = divide(
        rows,
        2 * ranks,
        "rows of an adapter of linear_fc1",
        "tensor parallel size (tp), in two halves",
    )
    regions = []
    for rank in range(ranks):
        for second in (0, 1):
            row = (2 * rank + second) * half
            place = (second * ranks + rank) * half
            regions.append(Region(Box(row, row + half, 0, ins), place))
    return part._replace(parts={name: tuple(regions)})


def rows_of_lengths(weight: NativeTensor, ranks: int, where: str) -> NativeTensor:
    """The weight with its rows in the order in which a run saves DoRA's magnitudes.

    For linear_fc1 this is [gate; up] of each rank, one rank after the other.
    """
    if not is_fc1(weight) or len(weight.parts) == 1 or ranks == 1:
        return weight
    _require_known(ranks, where)
    rows, ins = weight.shape
    half = divide(
        rows, 2 * ranks, "magnitudes of linear_fc1", "tensor parallel size (tp), in two halves"
    )
    parts = {
        name: tuple(
            Region(Box(rank * half, (rank + 1) * half, 0, ins), (2 * rank + number) * half)
            for rank in range(ranks)
        )
        for number, name in enumerate(weight.parts)
    }
    return weight._replace(parts=parts)


def is_fc1(weight: NativeTensor) -> bool:
    return "linear_fc1" in weight.name


def _require_known(ranks: int, where: str) -> None:
    if ranks == 0:
        raise UsageError(
            f"{where}: its rows lie by the tensor-parallel size of its run, which only {RUN_CONFIG} says"
        )
