"""The adapter of a Megatron-Bridge run: a distributed checkpoint of nothing but the matrices that were trained.

    decoder.layers.self_attention.linear_qkv.adapter.linear_in.weight             [layers, rank, in]        LoRA: one A for q, k, v
    decoder.layers.self_attention.linear_qkv.adapter.linear_out.weight            [layers, out, rank]       rows as the weight has them
    decoder.layers.self_attention.linear_qkv.adapter.adapter_q.linear_in.weight                             CanonicalLoRA: one for each
    decoder.layers.mlp.linear_fc1.adapter.adapter_gate.linear_out.weight

run_config.yaml has its alpha (`peft: {_target_: megatron.bridge.peft.lora.LoRA, dim: 32, alpha: 32 ...}`). Source: lora.py,
canonical_lora.py, utils.py and adapter_wrapper.py in megatron/bridge/peft, checkpointing.py in megatron/bridge/training.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from formats.chunked import ChunkedTensor
from formats.errors import CorruptCheckpoint, UnsupportedInput
from formats.tensor import Box, LazyTensor
from formats.yaml_file import read_yaml
from megaconv.engine.adapters.translation import Pair, linear_weights, open_pairs, part_of
from megaconv.engine.sidecars import SIDECAR_DIRECTORY
from megaconv.errors import TensorMismatch, UsageError
from megaconv.families import read_config
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.megatron.distributed.keys import EXTRA_STATE, model_tensors, unstack
from megaconv.megatron.distributed.run_config import RUN_CONFIG
from megaconv.model.ir import OpenedSource
from megaconv.model.layout import divide
from megaconv.model.naming import CORE
from megaconv.model.natives import NativeTensor
from megaconv.model.regions import Region
from megaconv.options import LoadOptions

ADAPTER = ".adapter."
"""In the names of an adapter's tensors."""
LORA, CANONICAL = "megatron.bridge.peft.lora.LoRA", "megatron.bridge.peft.canonical_lora.CanonicalLoRA"
OPTION = "lora_alpha"
_MATRIX = re.compile(r"(.+)\.adapter\.(?:adapter_(\w+)\.)?linear_(in|out)\.weight")
_MOST_RANKS = 1 << 16


class Settings(NamedTuple):
    """What run_config.yaml says of an adapter."""

    alpha: float
    dropout: float
    tp: int
    """Of the run that saved it."""


def is_adapter(tensors: Mapping[str, ChunkedTensor]) -> bool:
    """Whether a distributed checkpoint holds an adapter alone, by its names."""
    names = list(model_tensors(tensors)[0])
    return bool(names) and all(ADAPTER in name for name in names)


def open_adapter_source(version: Path, tensors: Mapping[str, ChunkedTensor], options: LoadOptions) -> OpenedSource:
    """Raises CheckpointError for an adapter of another model, of a kind that isn't LoRA, or that lacks a matrix."""
    directory = options.config or version.parent / SIDECAR_DIRECTORY
    if not (directory / CONFIG_NAME).is_file():
        raise UsageError(
            f"{version}: is an adapter of Megatron-Bridge, which holds only what is added to a model; give --config with the "
            "Hugging Face directory of its base, and --saver peft",
            code="config-needed",
        )
    family, config = read_config(directory / CONFIG_NAME)
    settings = _settings(version, options)
    pairs = _pairs(version, tensors, linear_weights(family, config, CORE), settings)
    return open_pairs(
        family, config, pairs,
        base="", dropout=settings.dropout, source="core, torch_dist format of Megatron-Bridge, LoRA", where=str(version),
    )  # fmt: skip


def _settings(version: Path, options: LoadOptions) -> Settings:
    path = next((each for each in (version / RUN_CONFIG, version.parent / RUN_CONFIG) if each.is_file()), None)
    if path is None:
        if OPTION not in options.extra:
            raise UsageError(
                f"{version}: has no {RUN_CONFIG}, which says the alpha of its LoRA; give --option {OPTION}=NUMBER"
            )
        return Settings(_positive(options.extra[OPTION], f"--option {OPTION}"), 0.0, 0)
    settings = read_yaml(path)
    sections = settings if isinstance(settings, dict) else {}
    peft, model = sections.get("peft"), sections.get("model")
    if not isinstance(peft, dict):
        raise CorruptCheckpoint(f"{path}: has no `peft:` with the settings of its adapter")
    kind = str(peft.get("_target_", LORA))
    if kind not in (LORA, CANONICAL):
        raise UnsupportedInput(f"{path}: an adapter of {kind}; only LoRA and CanonicalLoRA are translated")
    dropout = peft.get("dropout", 0.0)
    tp = model.get("tensor_model_parallel_size", 1) if isinstance(model, dict) else 0
    if not isinstance(dropout, (int, float)) or type(tp) is not int or not 0 <= tp <= _MOST_RANKS:
        raise CorruptCheckpoint(f"{path}: dropout {dropout!r:.40} with tensor_model_parallel_size {tp!r:.40}")
    alpha = options.extra.get(OPTION, peft.get("alpha"))
    return Settings(_positive(alpha, f"{path}: peft: alpha"), float(dropout), tp)


def _positive(word: Any, what: str) -> float:
    try:
        number = float(word)
    except (TypeError, ValueError):
        number = 0.0
    if not 0 < number < 1 << 31:
        raise UsageError(f"{what} {word!r:.40}: expected a positive number")
    return number


def _pairs(
    version: Path, tensors: Mapping[str, ChunkedTensor], weights: Mapping[str, NativeTensor], settings: Settings
) -> Iterator[Pair]:
    matrices: dict[tuple[str, str], dict[str, LazyTensor]] = {}
    named = {name: tensor for name, tensor in model_tensors(tensors)[0].items() if EXTRA_STATE not in name}
    if any(".experts." in name for name in named):
        raise UnsupportedInput(
            f"{version}: has adapters of experts, whose tensors Megatron-Bridge has saved in several ways; they are not translated"
        )
    for name, tensor in unstack(named).items():
        found = _MATRIX.fullmatch(name)
        if found is None or f"{found[1]}.weight" not in weights:
            raise TensorMismatch(
                f"{version}: {name} is no adapter of a linear layer of the model", code="unknown-tensor"
            )
        matrices.setdefault((found[1], found[2] or ""), {})[found[3]] = tensor
    for (module, kind), held in matrices.items():
        name = f"{module}{ADAPTER}{f'adapter_{kind}' if kind else ''}".rstrip(".")
        if {"in", "out"} != held.keys():
            raise TensorMismatch(f"{version}: {name} has only one of its two matrices", code="missing-tensor")
        weight = weights[f"{module}.weight"]
        if kind:
            weight = canonical_part(weight, kind, settings.tp, f"{version}: {name}")
        yield Pair(weight, held["in"], held["out"], settings.alpha, name)


def canonical_part(weight: NativeTensor, kind: str, tp: int, where: str) -> NativeTensor:
    """The part of a fused weight that `adapter_<kind>` is for, with its rows as a run on tp ranks saves the adapter's B.

    Megatron-Bridge saves B of linear_fc1 as if it were [gate; up] on every rank, also where it is only one of them: the first half of
    each rank's rows comes before all second halves. tp 0: unknown, which is an error for these.
    """
    name = next((name for name in weight.parts if name.endswith(f".{kind}.weight")), None)
    if name is None or len(weight.parts) < 2:
        raise TensorMismatch(f"{where}: {weight.name} has no part of this name", code="unknown-tensor")
    part = part_of(weight, name)
    if kind not in ("gate", "up") or tp == 1:
        return part
    if tp == 0:
        raise UsageError(f"{where}: its rows lie by the tensor-parallel size of its run, which only {RUN_CONFIG} says")
    rows, ins = part.shape
    half = divide(rows, 2 * tp, "rows of an adapter of linear_fc1", "tensor parallel size (tp), in two halves")
    regions = tuple(
        Region(Box((2 * rank + second) * half, (2 * rank + second + 1) * half, 0, ins), (second * tp + rank) * half)
        for rank in range(tp)
        for second in (0, 1)
    )
    return part._replace(parts={name: regions})
